"""Is the new result slower than the old one, or does it only look so? Two files of `bench ... --output`, row by row.

A difference counts when it is larger than the spread of the samples, the distance between their quartiles in the wider of the two
files, and stays so when the limit's own movement is taken out: each run measured its limit in the same rounds, and a machine that was
slower as a whole was slower there, too. A limit has moved when its change is larger than its spread.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tp_residual.bench.results import AMOUNTS, IDENTITY, Result, Row
from tp_residual.errors import RequestError

_SETTINGS = ("ranks", "threads", "device", "pin", "cache")  # those that change what is measured, not how often

Verdict = Literal["same", "faster", "slower", "machine"]


@dataclass(frozen=True)
class Comparison:
    """percent: of the median time, new against old; limit_percent: of the limit's. The spread of each beside it.

    verdict: same (within the spread), machine (the limit moved along), faster or slower (beyond both).
    """

    name: str
    old_us: float
    new_us: float
    percent: float
    spread_percent: float
    limit_percent: float
    limit_spread_percent: float

    @property
    def own_percent(self) -> float:
        """What is left of the change when the limit's is taken out."""
        moved = self.limit_percent if abs(self.limit_percent) > self.limit_spread_percent else 0.0
        return 100 * ((100 + self.percent) / (100 + moved) - 1)

    @property
    def verdict(self) -> Verdict:
        if abs(self.percent) <= self.spread_percent:
            return "same"
        if abs(self.own_percent) <= self.spread_percent or self.percent * self.own_percent < 0:
            return "machine"
        return "slower" if self.percent > 0 else "faster"

    @property
    def regression_percent(self) -> float:
        """By how much it is slower, with or without the limit's change, whichever is less; 0 unless the verdict is slower."""
        return min(self.percent, self.own_percent) if self.verdict == "slower" else 0.0


def compare(old: Result, new: Result) -> list[Comparison]:
    """Raises RequestError when the two did not measure the same things on the same hardware with the same settings."""
    if old.what != new.what:
        raise RequestError(
            f"the old file is a result of {old.what}, the new one of {new.what}; compare two of one kind"
        )
    if old.what in AMOUNTS:
        raise RequestError(
            f"results of {old.what} are amounts and have no samples whose spread a difference could be held against; compare "
            f"{', '.join(AMOUNTS[old.what])} of the rows themselves"
        )
    for kind, theirs, ours in (("hardware", old.hardware, new.hardware), ("settings", old.settings, new.settings)):
        for key in _SETTINGS if kind == "settings" else dict.fromkeys([*theirs, *ours]):
            if theirs.get(key) != ours.get(key):
                raise RequestError(
                    f"{kind} differ: {key} is {theirs.get(key)} in the old file and {ours.get(key)} in the new one; "
                    "measure both on one machine with one command"
                )
    olds, news = _by_identity(old), _by_identity(new)
    for where, others, name in (("old", news, "new"), ("new", olds, "old")):
        for identity in olds if where == "old" else news:
            if identity not in others:
                raise RequestError(
                    f"{_name(old.what, identity)} is in the {where} file only; the {name} one has other shapes or executors: "
                    "measure both with one command"
                )
    varying = [
        position for position in range(len(IDENTITY[old.what])) if len({identity[position] for identity in olds}) > 1
    ]
    return [_compare(_name(old.what, identity, varying), olds[identity], news[identity]) for identity in olds]


def _compare(name: str, old: Row, new: Row) -> Comparison:
    times, limits = (
        [[us for us in row[samples] if us is not None] for row in (old, new)]
        for samples in ("samples_us", "limit_samples_us")
    )
    # a row that is its own limit cannot be excused by it
    limit = (0.0, 0.0) if old["limit"] == "itself" else (_change(*limits), max(map(_spread, limits)))
    old_us, new_us = (float(np.median(each)) for each in times)
    return Comparison(name, old_us, new_us, _change(*times), max(map(_spread, times)), *limit)


def _change(old: Sequence[float], new: Sequence[float]) -> float:
    return 100 * (float(np.median(new)) / float(np.median(old)) - 1)


def _spread(values: Sequence[float]) -> float:
    low, middle, high = np.percentile(np.asarray(values), (25, 50, 75))
    return 100 * float(high - low) / float(middle)


def _by_identity(result: Result) -> dict[tuple[Any, ...], Row]:
    return {tuple(row.get(key) for key in IDENTITY[result.what]): row for row in result.rows}


def _name(what: str, identity: tuple[Any, ...], positions: Sequence[int] = ()) -> str:
    """Those of its values at `positions` (none: all); text alone, numbers with their key."""
    chosen = [(IDENTITY[what][at], identity[at]) for at in positions or range(len(identity))]
    return ", ".join(
        value if isinstance(value, str) else f"{key} {value}" for key, value in chosen if value not in (None, -1)
    )
