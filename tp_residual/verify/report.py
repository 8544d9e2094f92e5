"""What `verify` found: one comparison a state, a verdict, and the first culprit. The same object on every rank; JSON both ways."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Verdict = Literal["pass", "rounding", "fault"]


@dataclass(frozen=True)
class Comparison:
    """One value against the oracle's.

    quantity: stream, update, logits; or gradient. limit: of max_error, or of median_error where `judged` says so. local_error: the
    largest error of a token of what this module computed, given our own input to it, beyond the rounding of known steps; local_limit:
    what rounding can explain of that.
    """

    module: str
    quantity: str
    max_error: float
    median_error: float
    max_ulp: float
    worst_token: int
    worst_dimension: int
    judged: Literal["max", "median", "none"]
    limit: float
    local_error: float
    local_limit: float

    @property
    def within_limit(self) -> bool:
        value = {"max": self.max_error, "median": self.median_error, "none": 0.0}[self.judged]
        return value <= self.limit

    @property
    def explained(self) -> bool:
        """Rounding explains what this module added."""
        return self.local_error <= self.local_limit


@dataclass(frozen=True)
class Culprit:
    """The first module that computed something else than the unsharded model does from the same input.

    kind: one of `tp_residual.verify.diagnose.KINDS`. evidence: what was measured. ranks: where, or empty for all of them.
    """

    module: str
    kind: str
    evidence: str
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        where = f" on rank {', '.join(map(str, self.ranks))}" if self.ranks else ""
        return f"{self.module}: {self.kind}{where} ({self.evidence})"


@dataclass(frozen=True)
class VerifyReport:
    """passed: every value within its limit and every module explained by rounding.

    verdict: `rounding` when limits are exceeded though each module by itself computes the right thing: the errors only grew.
    """

    verdict: Verdict
    summary: str
    comparisons: tuple[Comparison, ...]
    culprit: Culprit | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return self.verdict == "pass"

    def worst(self, quantity: str) -> Comparison | None:
        """The comparison of that quantity with the largest error."""
        return max((c for c in self.comparisons if c.quantity == quantity), key=lambda c: c.max_error, default=None)

    def as_json(self) -> dict[str, Any]:
        return {"passed": self.passed} | asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "VerifyReport":
        culprit = values["culprit"]
        return cls(
            values["verdict"],
            values["summary"],
            tuple(Comparison(**each) for each in values["comparisons"]),
            None if culprit is None else Culprit(**culprit | {"ranks": tuple(culprit["ranks"])}),
            values["settings"],
            values["figures"],
        )
