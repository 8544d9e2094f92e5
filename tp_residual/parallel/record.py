"""What each rank says about its collectives: the last one it entered, and how many of each it made.

Every wait that expires, every dead peer and every SIGTERM is reported from this record, because a hang without rank, number, tag and
shape is the failure people cannot diagnose.
"""

from collections import Counter
from dataclasses import dataclass

import torch

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")


@dataclass(frozen=True)
class CollectiveCall:
    """One collective as every rank must see it: equal on all ranks, or the ranks have parted ways."""

    number: int
    kind: str
    tag: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"#{self.number} {self.kind} tag={self.tag!r} shape={list(self.shape)} dtype={dtype}"


class CollectiveRecord:
    """The last call of this rank and whether it has returned."""

    def __init__(self) -> None:
        self.last: CollectiveCall | None = None
        self.in_flight = False
        self.number = 0

    def enter(self, kind: str, tag: str, tensor: torch.Tensor) -> CollectiveCall:
        self.number += 1
        self.last = CollectiveCall(self.number, kind, tag, tuple(tensor.shape), tensor.dtype)
        self.in_flight = True
        return self.last

    def leave(self) -> None:
        self.in_flight = False

    def __str__(self) -> str:
        if self.last is None:
            return "no collective yet"
        return f"{'waiting in' if self.in_flight else 'last completed'} {self.last}"


class Counters:
    """Calls and payload bytes (this rank's input) by (tag, kind)."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()

    def add(self, tag: str, kind: str, nbytes: int) -> None:
        self.calls[tag, kind] += 1
        self.bytes[tag, kind] += nbytes

    def by_kind(self) -> dict[str, int]:
        totals: Counter[str] = Counter()
        for (_, kind), calls in self.calls.items():
            totals[kind] += calls
        return dict(totals)

    def reset(self) -> None:
        self.calls.clear()
        self.bytes.clear()
