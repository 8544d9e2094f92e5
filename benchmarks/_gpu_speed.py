"""How fast is add+norm on this device? Beside a copy of the same run, eager operations, torch.compile and whatever else is installed.

Warm: calls follow one another in a CUDA graph, so that no launch from Python is timed and what fits stays in the L2 cache. Cold: one call
by itself after twice the L2 cache was overwritten.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from _gpu_figures import OURS, OURS_IN_PLACE
from _gpu_graphs import captured
from _gpu_operands import Setting
from _gpu_peers import PEERS, Form, attempt, discover
from _gpu_record import Recorder
from torch import Tensor

from tp_residual.bench.add_norm import FEWEST_PASSES, LIMIT, forms
from tp_residual.bench.bandwidth import copy_of
from tp_residual.bench.request import Rules
from tp_residual.bench.results import Row
from tp_residual.bench.shapes import NORM, operand, wrong_elements
from tp_residual.bench.timing import Candidate, Clock, Samples
from tp_residual.kernels import contract
from tp_residual.kernels.add_norm import fused_add_rmsnorm
from tp_residual.parallel.group import TensorParallelGroup

# large ones first, in case that time runs out
SHAPES = tuple((tokens, hidden) for tokens in (16384, 1, 16, 256, 4096) for hidden in (4096, 8192))
ATTEMPT_S = 60.0  # FlashInfer compiles its kernels for half a minute, where nvcc is there
KEPT = "usable.json"
_REPEATED_BYTES = 64 << 20  # of calls in one graph, at most _MOST_REPEATS of them
_MOST_REPEATS = 20

Cache = Literal["warm", "cold"]


@dataclass(frozen=True)
class Contender:
    """passes: over `[tokens, hidden]`. bitwise: held to the contract's bits. Results of in_place ones lie in their operands."""

    name: str
    order: str
    run: Form
    passes: float
    in_place: bool = False
    bitwise: bool = False
    peer: bool = False

    @property
    def ours(self) -> bool:
        return self.name in (OURS, OURS_IN_PLACE)


def find_peers(record: Recorder, setting: Setting) -> list[str]:
    """Names of the peers that can be timed; of all of them, a note says which version, or why not. Kept for `usable_peers`."""
    usable, missing = discover(PEERS, lambda name: attempt(name, setting.device, min(ATTEMPT_S, record.remaining_s)))
    for name, version in usable.items():
        record.note(f"{name}: {version}")
    for name, why in missing.items():
        record.note(f"{name}: {why}")
    (setting.scratch / KEPT).write_text(json.dumps(list(usable)))
    return list(usable)


def usable_peers(record: Recorder, setting: Setting) -> list[str]:
    kept = setting.scratch.parent / "peers" / KEPT
    return json.loads(kept.read_text()) if kept.exists() else find_peers(record, setting)


def measure_speed(record: Recorder, setting: Setting) -> None:
    usable = usable_peers(record, setting)
    shapes = ((1, 64), (16, 128)) if setting.small else SHAPES
    rules = Rules(iters=5 if setting.small else 100, warmup=2, seconds=1.0)
    caches: tuple[Cache, ...] = ("warm", "cold")
    clocks = {cache: Clock(TensorParallelGroup.single(setting.device), replace(rules, cache=cache)) for cache in caches}
    with torch.no_grad():
        for tokens, hidden in shapes:
            if record.remaining_s < 0:
                record.note(f"{tokens} x {hidden}: not measured, the section's time was over")
                continue
            measure = partial(_one_shape, record, setting, clocks, usable, tokens, hidden)
            record.measure(f"add+norm of {tokens} x {hidden}", measure)


def contenders(dtype: torch.dtype, peers: Sequence[str], *, compiled: bool) -> list[Contender]:
    found = [
        Contender(form.name, form.order, form.run, form.passes(dtype.itemsize), bitwise=form.order == "contract")
        for form in forms(dtype, compiled=compiled)[0]
    ]
    found.append(Contender(OURS_IN_PLACE, "contract", _fused_in_place, FEWEST_PASSES, in_place=True, bitwise=True))
    for name in peers:
        found.append(
            Contender(name, "fast", PEERS[name].open(), FEWEST_PASSES, in_place=PEERS[name].in_place, peer=True)
        )
    return found


def _fused_in_place(residual: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    fused_add_rmsnorm(update, residual, weight, NORM.eps)
    return residual, update


def _one_shape(
    record: Recorder,
    setting: Setting,
    clocks: Mapping[Cache, Clock],
    peers: Sequence[str],
    tokens: int,
    hidden: int,
) -> None:
    dtype, device = torch.bfloat16, setting.device
    torch._dynamo.reset()  # torch.compile gives up after eight shapes of one function
    residual, update = (operand(kind, tokens, hidden, dtype, device) for kind in ("residual", "partial"))
    weight = operand("weight", 1, hidden, dtype, device)
    expected = contract.add_norm(contract.AddNormSpec(dtype, dtype, NORM), residual, update, weight=weight)
    right: list[Contender] = []
    for contender in contenders(dtype, peers, compiled=not setting.small):
        what = f"{contender.name} ({contender.order}) of {tokens} x {hidden}"
        try:
            found = contender.run(residual.clone(), update.clone(), weight)
            wrong = _wrong(found, expected, contender.bitwise)
        except Exception as error:
            if contender.ours:
                raise
            record.note(f"{what}: not timed, {type(error).__name__}: {error}")
            continue
        if contender.ours:
            record.check(f"{what}, before it is timed", [f"{wrong} wrong elements" if wrong else None])
        elif wrong:
            record.note(f"{what}: not timed, {wrong} elements are beyond rounding")
        if not wrong:
            right.append(contender)
    payload = residual.numel() * residual.element_size()
    copy = copy_of(FEWEST_PASSES * payload, device)
    for cache, clock in clocks.items():
        repeats = max(1, min(_MOST_REPEATS, _REPEATED_BYTES // payload)) if cache == "warm" else 1
        candidates, timed = {"limit": _repeated(copy, repeats, device)}, dict[str, Contender]()
        for number, contender in enumerate(right):
            operands = (residual.clone(), update.clone()) if contender.in_place else (residual, update)
            run = Candidate(partial(contender.run, *operands, weight))
            try:
                candidates[str(number)] = _repeated(run, repeats, device)
            except RuntimeError as error:
                if contender.ours:
                    raise
                record.note(f"{contender.name} of {tokens} x {hidden}: not in a CUDA graph: {error}")
            else:
                timed[str(number)] = contender
        samples = {name: _per_call(each, repeats) for name, each in clock.interleaved(candidates).items()}
        for name, contender in timed.items():
            record.row(
                add_norm_row(contender, tokens, hidden, payload, repeats)
                | clock.fields(samples[name], LIMIT, samples["limit"])
                | {"useful_GB_s": _rate(FEWEST_PASSES * payload, samples[name])}
            )
    record.say(f"{tokens} x {hidden}: {len(right)} forms timed")


def _wrong(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor | None], bitwise: bool) -> int:
    wrong = 0
    for ours, right in zip(found, expected, strict=True):
        assert right is not None
        wrong += wrong_elements(ours, right, bitwise=bitwise)
    return wrong


def _repeated(candidate: Candidate, repeats: int, device: torch.device) -> Candidate:
    if repeats == 1:
        return candidate

    def run() -> None:
        for _ in range(repeats):
            candidate.run()

    return Candidate(captured(run, device))


def _per_call(samples: Samples, repeats: int) -> Samples:
    return Samples(
        tuple(None if us is None else us / repeats for us in samples.us),
        tuple(us / repeats for us in samples.rank_p50_us),
        samples.calls * repeats,
        samples.late,
    )


def _rate(nbytes: int, samples: Samples) -> float:
    return round(nbytes / samples.percentile(50) / 1e3, 2)


def add_norm_row(contender: Contender, tokens: int, hidden: int, payload: int, repeats: int) -> Row:
    """What is measured, as `bench add-norm` names it."""
    return {
        "what": "add-norm",
        "form": contender.name,
        "order": contender.order,
        "in_place": contender.in_place,
        "peer": contender.peer,
        "tokens": tokens,
        "hidden": hidden,
        "dtype": "bfloat16",
        "ranks": 1,
        "bytes": payload,
        "passes": contender.passes,
        "least_bytes": FEWEST_PASSES * payload,
        "form_bytes": round(contender.passes * payload),
        "launch": "graph" if repeats > 1 else "eager",
    }
