"""What each rank says about its collectives: the last one it entered, and how many of each it made.

Every wait that expires, every dead peer and every SIGTERM is reported from this record, because a hang without rank, number, tag and
shape is the failure people cannot diagnose.
"""

import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")

# Frames of these modules are how a collective is made, not who asked for it.
_MACHINERY = (
    "torch",
    "jaxtyping",
    "tp_residual.parallel",
    "tp_residual.residual.boundary",
    "tp_residual.residual.stream",
)


@dataclass(frozen=True)
class CollectiveCall:
    """One collective as every rank must see it: equal on all ranks, or the ranks have parted ways.

    site: `module:line` of the caller, in checked mode; a module and not a file, since hosts keep their files in different places.
    """

    number: int
    kind: str
    tag: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    site: str = ""

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        where = f" from {self.site}" if self.site else ""
        return f"#{self.number} {self.kind} tag={self.tag!r} shape={list(self.shape)} dtype={dtype}{where}"


def call_site() -> str:
    """`module:line` of the code that asked for the present collective: the first frame that is not machinery."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        # what a compiler generated has no module, and other lines on each rank
        if module and not any(module == name or module.startswith(f"{name}.") for name in _MACHINERY):
            return f"{module}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class CollectiveRecord:
    """The last call of this rank, whether it has returned, and what else this rank waits for.

    since: time.monotonic() when the present wait began. waits_for: something awaited through the side channel, or "".
    """

    def __init__(self) -> None:
        self.in_flight = False
        self.number = 0
        self.since = 0.0
        self.waits_for = ""
        self._call: tuple[str, str, torch.Size, torch.dtype, str] | None = None

    def enter(self, kind: str, tag: str, tensor: torch.Tensor, site: str = "") -> None:
        self.number += 1
        self._call = kind, tag, tensor.shape, tensor.dtype, site
        self.since = time.monotonic()
        self.in_flight = True

    @property
    def last(self) -> CollectiveCall | None:
        if self._call is None:
            return None
        kind, tag, shape, dtype, site = self._call
        return CollectiveCall(self.number, kind, tag, tuple(shape), dtype, site)

    @property
    def waiting(self) -> bool:
        return self.in_flight or bool(self.waits_for)

    def __str__(self) -> str:
        last = self.last
        if self.waits_for:
            return f"waiting for {self.waits_for}, after {last or 'no collective yet'}"
        if last is None:
            return "no collective yet"
        return f"{'waiting in' if self.in_flight else 'last completed'} {last}"


class Limits:
    """How long a wait may last, by phase. `phase` is the one that this rank is in; a phase without a limit of its own has the default."""

    def __init__(self, default_s: float, by_phase: Mapping[str, float] | None = None) -> None:
        self._default_s, self._by_phase = default_s, dict(by_phase or {})
        self.phase = ""

    @property
    def seconds(self) -> float:
        return self._by_phase.get(self.phase, self._default_s)

    @property
    def longest(self) -> float:
        return max(self._default_s, *self._by_phase.values()) if self._by_phase else self._default_s

    def __str__(self) -> str:
        return f"limit {self.seconds:g} s" + (f" of {self.phase}" if self.phase else "")


class Counters:
    """Calls and payload bytes (this rank's input) by (tag, kind).

    boundary_s: host seconds inside boundaries, waits for slower peers included; on CUDA that is launching, not running.
    sampler_s: the same of choosing the next tokens.
    """

    def __init__(self) -> None:
        self._totals: dict[tuple[str, str], list[int]] = {}  # [calls, bytes]: one look-up a collective
        self.boundary_s = self.sampler_s = 0.0

    def add(self, tag: str, kind: str, nbytes: int) -> None:
        total = self._totals.get((tag, kind))
        if total is None:
            total = self._totals[tag, kind] = [0, 0]
        total[0] += 1
        total[1] += nbytes

    @property
    def calls(self) -> Counter[tuple[str, str]]:
        return Counter({key: total[0] for key, total in self._totals.items()})

    @property
    def bytes(self) -> Counter[tuple[str, str]]:
        return Counter({key: total[1] for key, total in self._totals.items()})

    def by_kind(self) -> dict[str, int]:
        totals: Counter[str] = Counter()
        for (_, kind), (calls, _) in self._totals.items():
            totals[kind] += calls
        return dict(totals)

    def reset(self) -> None:
        self._totals.clear()
        self.boundary_s = self.sampler_s = 0.0
