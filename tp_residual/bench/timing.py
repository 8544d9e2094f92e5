"""How every benchmark here takes time.

- Everything that is compared is timed in the same rounds, one sample of each in turn, forwards and backwards: a machine whose speed
  changes for seconds at a time changes it for all of them. Ratios are medians over rounds.
- Ranks are released together before each sample. On the CPUs of one host they agree on a moment of the shared clock and spin until it
  comes; a sample that a rank began late is dropped. Elsewhere a collective stands right before the sample.
- A sample is the maximum over ranks. It is one call, or as many as last 50 us, since reading the clock costs 0.1 us.
- On CPU the host's clock is read; on CUDA events are, with the queue filled behind a sleeping device so that no launch is timed.
"""

import gc
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import numpy as np
import torch

from tp_residual.bench.machine import flush_bytes
from tp_residual.bench.request import Rules
from tp_residual.bench.results import Row
from tp_residual.errors import CollectiveError, VerificationFailed
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.transport import TorchTransport

Progress = Callable[[int, int, str], None]  # (done, total, what comes now)

_SAMPLE_US = 50.0
_MOST_CALLS = 100
_FEWEST_ROUNDS = 5
_PROBES = 3
_LATE_NS = 1_000
# the moment of release lies this far ahead: a gloo all-gather, which carries it, takes up to 2 ms
_AHEAD_NS, _FURTHEST_AHEAD_NS = 2_000_000, 20_000_000
_SLEEP_CYCLES = 1_000_000  # about half a millisecond of a GPU's clock: the time in which a sample's launches are queued


@dataclass(frozen=True)
class Candidate:
    """One thing to time: `run` is one call; `before` is called ahead of each sample and not timed. host: by the host's clock, the device
    waited for, also on CUDA.
    """

    run: Callable[[], object]
    before: Callable[[], object] | None = None
    host: bool = False


@dataclass(frozen=True)
class Samples:
    """us: microseconds a call by round, the maximum over ranks; None where a rank was released late and the sample is dropped."""

    us: tuple[float | None, ...]
    rank_p50_us: tuple[float, ...]
    calls: int
    late: int

    @classmethod
    def of(cls, by_rank: Sequence[Sequence[float]], late_ns: Sequence[Sequence[int]], calls: int) -> "Samples":
        """by_rank, late_ns: `[ranks][rounds]`.

        Late samples are dropped while they are fewer than half, so that any two candidates share a round.
        """
        slowest = [max(times) for times in zip(*by_rank, strict=True)]
        late = [max(each) > _LATE_NS for each in zip(*late_ns, strict=True)]
        dropping = 2 * sum(late) < len(late)
        kept = tuple(None if dropping and was_late else us for us, was_late in zip(slowest, late, strict=True))
        return cls(kept, tuple(percentile(times, 50) for times in by_rank), calls, sum(late))

    def scaled(self, factor: float) -> "Samples":
        """As if each call had done `factor` times the work at the same speed."""
        return Samples(
            tuple(None if us is None else us * factor for us in self.us),
            tuple(us * factor for us in self.rank_p50_us),
            self.calls,
            self.late,
        )

    def percentile(self, q: float) -> float:
        return percentile([us for us in self.us if us is not None], q)


def percentile(values: Sequence[float], q: float) -> float:
    """Linear between the two nearest samples."""
    return float(np.percentile(np.asarray(values), q))


def ratio(limit: Samples, samples: Samples) -> float:
    """Median over rounds of limit / samples: what part of the limit's speed was reached."""
    pairs = zip(limit.us, samples.us, strict=True)
    return percentile([a / b for a, b in pairs if a is not None and b is not None], 50)


class Clock:
    """Times candidates by `rules` on every rank of `group`; each rank calls the same methods in the same order."""

    def __init__(self, group: TensorParallelGroup, rules: Rules) -> None:
        self.group, self.rules, self.device = group, rules, group.device
        self.timing: Literal["host", "event"] = "event" if self.device.type == "cuda" else "host"
        self.released: Literal["alone", "spin", "collective"] = "alone"
        self._exchanges = count()
        self._ahead_ns, self._late_ns = _AHEAD_NS, 0
        self._wire: TorchTransport | None = None
        if group.size > 1:
            assert group.process_group is not None, "a subgroup is not timed"
            # of its own, so that what releases the ranks is never what is measured
            self._wire = TorchTransport(group.process_group, group.limits, device=self.device)
            one_clock = self.timing == "host" and len({process.host for process in group.processes}) == 1
            self.released = "spin" if one_clock else "collective"
        self._flush = None
        if rules.cache == "cold":
            self._flush = torch.zeros(flush_bytes(self.device), dtype=torch.uint8, device=self.device)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, through the side channel."""
        return [json.loads(text) for text in self.group.share(f"bench/{next(self._exchanges)}", json.dumps(value))]

    def require_correct(self, what: str, wrong: int) -> None:
        """Before anything is timed: raises VerificationFailed on every rank when one of them has a wrong element."""
        by_rank = self.gather(wrong)
        if any(by_rank):
            counts = ", ".join(f"{bad} on rank {rank}" for rank, bad in enumerate(by_rank) if bad)
            raise VerificationFailed(f"wrong result, nothing was timed: {what}: wrong elements: {counts}")

    def interleaved(self, candidates: Mapping[str, Candidate]) -> dict[str, Samples]:
        """One sample of each candidate a round. Raises CollectiveError when one of them fails."""
        names = list(candidates)
        try:
            calls, rounds = self._plan(candidates)
            us: dict[str, list[float]] = {name: [] for name in names}
            late: dict[str, list[int]] = {name: [] for name in names}
            gc.collect()
            gc.disable()
            try:
                for number in range(rounds):
                    for name in names if number % 2 == 0 else reversed(names):
                        late_ns, taken = self.sample(candidates[name], calls[name])
                        us[name].append(taken)
                        late[name].append(late_ns)
            finally:
                gc.enable()
        except RuntimeError as error:
            if isinstance(error, VerificationFailed | CollectiveError):
                raise
            raise CollectiveError(f"rank {self.group.rank} of {self.group.size}: {error}") from error
        everybody = self.gather([us, late])
        return {
            name: Samples.of([rank[0][name] for rank in everybody], [rank[1][name] for rank in everybody], calls[name])
            for name in names
        }

    def fields(self, samples: Samples, limit: str, limits: Samples) -> Row:
        """What every row says of its samples, and of the limit that was measured in the same rounds."""
        return {
            "timing": self.timing,
            "cache": self.rules.cache,
            "released": self.released,
            "samples": sum(us is not None for us in samples.us),
            "late_samples": samples.late,
            "calls_per_sample": samples.calls,
            **{f"p{q}_us": _short(samples.percentile(q)) for q in (50, 95, 99)},
            "limit": limit,
            "limit_us": _short(limits.percentile(50)),
            "percent_of_limit": _short(100 * ratio(limits, samples)),
            "rank_p50_us": [_short(us) for us in samples.rank_p50_us],
            "samples_us": [None if us is None else _short(us) for us in samples.us],
            "limit_samples_us": [None if us is None else _short(us) for us in limits.us],
        }

    def _plan(self, candidates: Mapping[str, Candidate]) -> tuple[dict[str, int], int]:
        """Calls a sample and the number of rounds, the same on every rank, from a few untimed calls of each."""
        probes: list[list[float]] = []
        for candidate in candidates.values():
            for _ in range(self.rules.warmup):
                if candidate.before is not None:
                    candidate.before()
                candidate.run()
            probes.append([self.sample(candidate, 1)[1] for _ in range(_PROBES)])
        slowest = [max(min(times) for times in each) for each in zip(*self.gather(probes), strict=True)]
        cold = self._flush is not None
        calls = {
            name: 1 if cold else min(_MOST_CALLS, max(1, round(_SAMPLE_US / max(us, 0.01))))
            for name, us in zip(candidates, slowest, strict=True)
        }
        seconds = sum(us * n for us, n in zip(slowest, calls.values(), strict=True)) / 1e6
        return calls, min(self.rules.iters, max(_FEWEST_ROUNDS, int(self.rules.seconds / seconds)))

    def sample(self, candidate: Candidate, calls: int = 1) -> tuple[int, float]:
        """One sample, which all ranks take together: `(ns by which this rank began late, us a call)`."""
        if candidate.before is not None:
            candidate.before()
        if self._flush is not None:
            self._flush.add_(1)
        if self.timing == "event" and not candidate.host:
            return 0, self._event_sample(candidate, calls)
        self._synchronize()
        late_ns = self._release()
        self._synchronize()
        began = time.perf_counter_ns()
        for _ in range(calls):
            candidate.run()
        self._synchronize()
        return late_ns, (time.perf_counter_ns() - began) / calls / 1e3

    def _event_sample(self, candidate: Candidate, calls: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_SLEEP_CYCLES)
        self._release()
        begin.record()
        for _ in range(calls):
            candidate.run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / calls

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _release(self) -> int:
        """Returns on all ranks together; the nanoseconds by which this one is late.

        A late rank says so in the next release, whose moment then lies further ahead on all of them.
        """
        if self._wire is None:
            return 0
        if self.released == "collective":
            self._wire.all_reduce(torch.zeros(1, device=self.device))
            return 0
        stamps = self._wire.all_gather(torch.tensor([[time.monotonic_ns(), self._late_ns]]))
        latest, lateness = (int(value) for value in stamps.max(0).values)
        self._ahead_ns = min(max(_AHEAD_NS, 2 * lateness), _FURTHEST_AHEAD_NS)
        moment = latest + self._ahead_ns
        while (now := time.monotonic_ns()) < moment:
            pass
        self._late_ns = now - moment
        return self._late_ns


def _short(value: float) -> float:
    """Five significant digits: files stay readable, and no clock is better than that."""
    return float(f"{value:.5g}")
