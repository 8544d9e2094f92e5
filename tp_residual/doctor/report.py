"""What a diagnosis says. Imports no torch."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Status = Literal["ok", "fault", "note", "skipped"]


@dataclass(frozen=True)
class Finding:
    """One probe's verdict. where: the module or boundary, of the first fault. value, bound: the worst value seen and what it must not
    exceed (None where the verdict is no number). what: in a sentence; of a fault, its name first, then the numbers. series: the values
    behind it in the order of the pass, for pictures.
    """

    probe: str
    status: Status
    what: str
    where: str = ""
    value: float | None = None
    bound: float | None = None
    series: tuple[float, ...] = ()


@dataclass(frozen=True)
class Diagnosis:
    """findings: one a probe, the same on every rank."""

    residual: str
    tp_size: int
    sequence_parallel: bool
    dtype: str
    tokens: int
    findings: tuple[Finding, ...]

    @property
    def faults(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.status == "fault"]

    @property
    def healthy(self) -> bool:
        return not self.faults

    def with_finding(self, finding: Finding) -> "Diagnosis":
        return replace(self, findings=(*self.findings, finding))

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"healthy": self.healthy}
