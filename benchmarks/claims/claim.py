"""A claim: a statement, where it is from, the interval that its figures must lie in, and a broken twin whose figures must not.

The intervals stand in the code, next to the statement; nothing derives them from a measurement. A claim that its broken twin
fulfils as well shows nothing, so the twin is judged with the same intervals.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

SOURCES = {
    "S0": "“Residual”, an article on the residual stream of decoder-only language models",
    "S3": "“Transformer残差连接原理与工程实践详解”, an article on residual connections in Transformers",
}

# what the figures say of the source; ambiguous: it can be read in ways that are not all true
Judgement = Literal["right", "in part", "ambiguous", "wrong"]
Verdict = Literal["holds", "FAILS", "TWIN HOLDS", "not run"]


class NotRun(Exception):
    """Something that the claim needs is not here; the message says what, and how to give it."""


@dataclass(frozen=True)
class Bound:
    """The closed interval from low to high."""

    low: float = -math.inf
    high: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        if self.low == self.high:
            return f"= {short(self.low)}"
        if self.low == -math.inf or (self.low == 0 and self.high < 1):  # of a magnitude: a share, an error
            return f"<= {short(self.high)}"
        if self.high == math.inf:
            return f">= {short(self.low)}"
        return f"{short(self.low)} .. {short(self.high)}"


@dataclass(frozen=True)
class Found:
    """values: by figure. reported: figures without a bound, in words. series: lines for the plot, by name, as (x, y) points."""

    values: Mapping[str, float]
    reported: Mapping[str, str] = field(default_factory=dict)
    series: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """source: where it is said. judgement, note: what the figures say of it. bounds: by figure. twin: what is broken in it.

    measure(broken): the figures, of the twin if broken. quick: done in a few seconds. has_curves: the plot has a panel of it.
    """

    id: str
    statement: str
    source: str
    judgement: Judgement
    note: str
    bounds: Mapping[str, Bound]
    twin: str
    measure: Callable[[bool], Found]
    quick: bool = True
    has_curves: bool = False


@dataclass(frozen=True)
class Row:
    claim: Claim
    figure: str
    bound: Bound
    measured: float
    twin: float
    verdict: Verdict


@dataclass(frozen=True)
class Outcome:
    """One claim, measured. reason: why it was not run."""

    claim: Claim
    rows: Sequence[Row]
    reported: Mapping[str, str]
    series: Mapping[str, Sequence[tuple[float, float]]]
    seconds: float
    reason: str = ""

    @property
    def good(self) -> bool:
        return all(row.verdict in ("holds", "not run") for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        claim = self.claim
        return {
            "id": claim.id,
            "statement": claim.statement,
            "source": claim.source,
            "judgement": claim.judgement,
            "note": claim.note,
            "broken_twin": claim.twin,
            "seconds": round(self.seconds, 2),
            "figures": [
                {
                    "figure": row.figure,
                    "low": _finite(row.bound.low),
                    "high": _finite(row.bound.high),
                    "measured": _finite(row.measured),
                    "twin": _finite(row.twin),
                    "verdict": row.verdict,
                }
                for row in self.rows
            ],
            "reported": dict(self.reported),
            "series": {name: [list(point) for point in points] for name, points in self.series.items()},
            **({"reason": self.reason} if self.reason else {}),
        }


def run(claim: Claim) -> Outcome:
    """Measure a claim and its broken twin."""
    began = time.perf_counter()
    try:
        found, broken = claim.measure(False), claim.measure(True)
    except NotRun as reason:
        rows = [Row(claim, figure, bound, math.nan, math.nan, "not run") for figure, bound in claim.bounds.items()]
        return Outcome(claim, rows, {}, {}, time.perf_counter() - began, str(reason))
    assert set(claim.bounds) == set(found.values) <= set(broken.values), f"{claim.id}: its figures are not its bounds'"
    rows = []
    for figure, bound in claim.bounds.items():
        measured, twin = float(found.values[figure]), float(broken.values[figure])
        verdict: Verdict = "FAILS" if measured not in bound else "TWIN HOLDS" if twin in bound else "holds"
        rows.append(Row(claim, figure, bound, measured, twin, verdict))
    return Outcome(claim, rows, found.reported, found.series, time.perf_counter() - began)


def short(value: float) -> str:
    """Three digits."""
    if math.isnan(value):
        return "-"
    if value == round(value) and abs(value) < 1e5:
        return f"{value:.0f}"
    return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e+")


def slope(points: Mapping[int, float]) -> float:
    """Of the line through log y against log x, by least squares."""
    x = [math.log(key) for key in points]
    y = [math.log(value) for value in points.values()]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


def _finite(value: float) -> float | None:
    """JSON has no infinities."""
    return value if math.isfinite(value) else None
