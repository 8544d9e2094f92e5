"""One picture of a diagnosis: each step's error under its limit, the gradients of both paths, and what a bf16 stream would lose."""

from io import BytesIO
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tp_residual.doctor.report import Diagnosis, Finding

_COLORS = {
    "joins": "#2f6db3",
    "reads": "#3a9a5b",
    "updates": "#e0762f",
    "skip gradient": "#2f6db3",
    "branch gradient": "#e0762f",
}
_LEAST = 1e-17  # an exact step is not drawn


def picture(diagnosis: Diagnosis, model: str) -> bytes:
    """A PNG."""
    by_probe = {finding.probe: finding for finding in diagnosis.findings}
    figure = Figure(figsize=(9, 8.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(3, 1)
    mode = "token-sharded" if diagnosis.sequence_parallel else "replicated"
    verdict = (
        "healthy" if diagnosis.healthy else "; ".join(f"{fault.probe}: {fault.what}" for fault in diagnosis.faults)
    )
    figure.suptitle(
        f"{Path(model).name or model}: residual {diagnosis.residual}, tp={diagnosis.tp_size}, stream {mode}, {diagnosis.dtype}\n"
        f"{verdict[:110]}",
        fontsize=10,
    )
    errors = axes[0]
    for name in ("updates", "joins", "reads"):
        finding = by_probe.get(name)
        if finding is not None and finding.series:
            errors.semilogy(
                [max(v, _LEAST) for v in finding.series], ".-", color=_COLORS[name], label=name, linewidth=1
            )
    limit = next((f.bound for f in diagnosis.findings if f.probe == "joins"), None)
    if limit is not None:
        errors.axhline(limit, color="#b03030", linestyle="--", linewidth=1, label="limit")
    errors.set_title("Each step against fp64 from the same inputs", fontsize=10)
    errors.set_ylabel("relative error")
    errors.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    gradients = axes[1]
    for name, style in (("branch gradient", ".-"), ("skip gradient", "--")):  # for Pre-Norm the two are the same number
        finding = by_probe.get(name)
        if finding is not None and any(finding.series):
            gradients.semilogy(finding.series, style, color=_COLORS[name], label=name, linewidth=1.2)
    gradients.set_title("Gradient that comes by each path", fontsize=10)
    gradients.set_ylabel("norm")
    if gradients.lines:
        gradients.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    else:
        gradients.text(
            0.5, 0.5, "not differentiated: 16-bit weights", ha="center", transform=gradients.transAxes, fontsize=9
        )
    lost = axes[2]
    shares = _series(by_probe.get("swallow rate"))
    lost.bar(range(len(shares)), [100 * share for share in shares], color="#7a5ba8")
    lost.set_title("Elements of each update that a bfloat16 stream would lose", fontsize=10)
    lost.set_ylabel("%")
    lost.set_xlabel("sublayer")
    for each in axes:
        each.grid(axis="y", alpha=0.3)
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _series(finding: Finding | None) -> tuple[float, ...]:
    return () if finding is None else finding.series
