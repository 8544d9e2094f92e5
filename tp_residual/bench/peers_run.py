"""All of `bench peers`: each peer in turn is started beside us, found to be the same model, and measured in pairs."""

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tp_residual.bench.peers_request import MOST_STEPS, PeersRequest
from tp_residual.bench.peers_rounds import Prober, run_rounds, short, start_row, throughput_row, times_of
from tp_residual.bench.peers_side import Side, SideFailed, SideSpec, WrongCount
from tp_residual.bench.peers_specs import START_PROMPT_TOKENS, PeerMissing
from tp_residual.bench.results import Row

CHECK_PROMPTS = 8
_WARM_STEPS = (2, 4)
_MOST_PREFILLS = 16


@dataclass
class Findings:
    """sides: by name, how each was configured, its versions, what it took of the cores while it was to idle. failures: of the run."""

    rows: list[Row] = field(default_factory=list)
    sides: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def measured(self) -> bool:
        return any("reason" not in row for row in self.rows)


def measure_peers(
    request: PeersRequest,
    ours: SideSpec,
    peers: Mapping[str, Callable[[], SideSpec]],
    prober: Prober,
    weight_bytes: int,
    scratch: Path,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> Findings:
    """peers: by name, what makes its spec, or raises PeerMissing. weight_bytes: that one decode step has to read.

    A peer that cannot be run is a row with a `reason`; the others go on. Wrong counts are a failure of the run, which goes on as well.
    Raises SideFailed when it is our own side that fails.
    """
    found = Findings()
    for name, make_spec in peers.items():
        at: Row = {"metric": None, "batch": None, "prompt": None}
        try:
            _measure_peer(request, ours, make_spec(), prober, weight_bytes, scratch, found, at, say)
        except (PeerMissing, SideFailed, WrongCount) as error:
            if isinstance(error, SideFailed) and error.name == ours.name:
                raise
            reason = error.reason if isinstance(error, SideFailed) else str(error)
            if isinstance(error, WrongCount):
                found.failures.append(reason)
            say(f"{name} is not measured{_where(at)}: {reason}")
            found.rows.append({**at, "peer": name, "reason": reason})
    return found


def _measure_peer(
    request: PeersRequest,
    ours: SideSpec,
    peer: SideSpec,
    prober: Prober,
    weight_bytes: int,
    scratch: Path,
    found: Findings,
    at: Row,
    say: Callable[[str], None],
) -> None:
    """at: kept at what is being measured, for whoever reports a failure."""
    common = {"peer": peer.name, "peer_tp": peer.tp, "peer_threads": peer.threads, "dtype": request.dtype}
    starts = request.starts if "start" in request.metrics else 1
    if "start" in request.metrics:
        at |= {"metric": "start_s", "batch": 1, "prompt": START_PROMPT_TOKENS}
    say(f"{peer.name}: starting both sides" + (f", {starts} times" if starts > 1 else ""))
    with _started(request, ours, peer, starts, scratch) as (sides, start_s):
        us, them = sides
        for side in sides:
            found.sides[side.spec.name] = {
                "tp": side.spec.tp, "threads": side.spec.threads,
                "how": side.loaded.get("how", ""), "versions": side.loaded.get("versions", {}),
            }  # fmt: skip
        if "start" in request.metrics:
            found.rows.append({**at, **common, **start_row(*start_s)})
            say(_summary(found.rows[-1]))
        at |= {"metric": None, "batch": None, "prompt": None}
        _require_same_model(request, us, them)
        for prompt in request.prompts:
            for batch in request.batches:
                prompts = prompts_of(request, batch, prompt)
                for metric in ("prefill", "decode"):
                    if metric not in request.metrics or (metric == "prefill" and batch != min(request.batches)):
                        continue
                    at |= {"metric": f"{metric}_tok_s", "batch": batch, "prompt": prompt}
                    measure = _prefill if metric == "prefill" else _decode
                    row = measure(request, us, them, prober, prompts, weight_bytes)
                    found.rows.append({**at, **common, **row})
                    say(_summary(found.rows[-1]))
        for side in sides:
            found.sides[side.spec.name] |= {
                "stopped_while_idle": side.spins,
                "idle_cpu_percent": short(100 * side.idle_cpu_s / side.idle_s) if side.idle_s else None,
            }


@contextmanager
def _started(
    request: PeersRequest, ours: SideSpec, peer: SideSpec, starts: int, scratch: Path
) -> Iterator[tuple[tuple[Side, Side], tuple[list[float], list[float]]]]:
    """Cold processes each time, in turn, alone; those of the last time stay."""
    seconds: dict[str, list[float]] = {ours.name: [], peer.name: []}
    for number in range(starts):
        with ExitStack() as stack:
            sides: dict[str, Side] = {}
            for spec in (ours, peer) if number % 2 == 0 else (peer, ours):
                with ExitStack() as others:
                    for other in sides.values():
                        others.enter_context(other.idle())
                    log = scratch / f"{spec.name}.log"
                    side = Side(spec, log, load_limit_s=request.load_limit_s, limit_s=request.limit_s)
                    if number < starts - 1:
                        with side:
                            side.load()
                    else:
                        sides[spec.name] = stack.enter_context(side)
                        side.load()
                        side.watch_idle()
                seconds[spec.name].append(side.start_s)
            if sides:
                yield (sides[ours.name], sides[peer.name]), (seconds[ours.name], seconds[peer.name])


def _require_same_model(request: PeersRequest, us: Side, them: Side) -> None:
    """The first tokens of some prompts, each alone. In 16 bits the two largest logits may change places, so half of them must be equal."""
    firsts = []
    prompts = prompts_of(request, CHECK_PROMPTS, START_PROMPT_TOKENS)
    for side, other in ((us, them), (them, us)):
        with other.idle():
            firsts.append([side.prefill([prompt]).ids[0][0] for prompt in prompts])
            side.watch_idle()
    same = sum(a == b for a, b in zip(*firsts, strict=True))
    if 2 * same < CHECK_PROMPTS:
        raise SideFailed(
            them.spec.name,
            f"only {same} of {CHECK_PROMPTS} first tokens are {us.spec.name}'s; the two do not run the same model",
        )


def _decode(
    request: PeersRequest, us: Side, them: Side, prober: Prober, prompts: list[list[int]], weight_bytes: int
) -> Row:
    batch = len(prompts)
    each, first = [], []
    for side, other in ((us, them), (them, us)):
        with other.idle():
            first.append(side.prefill(prompts).ids)
            warm = [side.decode(batch, steps) for steps in _WARM_STEPS][-1]
            side.watch_idle()
        each.append(warm.seconds / _WARM_STEPS[-1])
    steps = times_of(request.slice_s, each, MOST_STEPS)
    rounds = run_rounds(us, them, prober, request.rounds, lambda side: side.decode(batch, steps))
    return throughput_row(rounds, weight_bytes, steps) | {"same_first_tokens": _same(*first)}


def _prefill(request: PeersRequest, us: Side, them: Side, prober: Prober, prompts: list[list[int]], _: int) -> Row:
    each, first = [], []
    for side, other in ((us, them), (them, us)):
        with other.idle():
            side.prefill(prompts)
            warm = side.prefill(prompts)
            side.watch_idle()
        each.append(warm.seconds)
        first.append(warm.ids)
    times = times_of(request.slice_s, each, _MOST_PREFILLS)
    rounds = run_rounds(us, them, prober, request.rounds, lambda side: side.prefill(prompts, times))
    return throughput_row(rounds, None, times) | {"same_first_tokens": _same(*first)}


def prompts_of(request: PeersRequest, batch: int, tokens: int) -> list[list[int]]:
    """Ids of no meaning, no two prompts alike: a prefix that two had in common could be computed once."""
    source = random.Random(f"{batch} prompts of {tokens} tokens")
    return [[source.randrange(request.vocab_size) for _ in range(tokens)] for _ in range(batch)]


def _same(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    return short(sum(a[0] == b[0] for a, b in zip(ours, theirs, strict=True)) / len(ours))


def _where(at: Row) -> str:
    if at["metric"] is None:
        return ""
    return f" at {at['metric']}, batch {at['batch']}, prompt {at['prompt']}"


def _summary(row: Row) -> str:
    return (
        f"{row['peer']} tp={row['peer_tp']}, {row['metric']}, batch {row['batch']}, prompt {row['prompt']}: {row['ours']:.4g} here, "
        f"{row['peer_value']:.4g} there, ratio {row['ratio_median']:.3f} ({row['ratio_min']:.3f}-{row['ratio_max']:.3f}) "
        f"in {row['rounds']} pairs"
    )
