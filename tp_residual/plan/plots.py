"""A picture of a plan: prefill by tokens and decode by tp size, with where a pass's time goes."""

from io import BytesIO
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tp_residual.bench.results import replace_file
from tp_residual.plan.estimate import Plan, PlanRow
from tp_residual.plan.hardware import Hardware

_DPI = 110
_PARTS = ("gemm_us", "attention_us", "elementwise_us", "launch_us", "boundary_us")


def write_plot(plan: Plan, hardware: Hardware, path: str) -> None:
    """As `path` ends: .png, .pdf or .svg."""
    figure = Figure(figsize=(12.8, 5.2), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    prefill, decode = figure.subplots(1, 2)
    _prefill(prefill, [row for row in plan.rows if row.step == "prefill" and row.cost is not None])
    least = min(plan.request.batch)
    _decode(
        decode, [row for row in plan.rows if row.step == "decode" and row.cost is not None and row.sequences == least]
    )
    figure.suptitle(f"predicted, {plan.request.dtype}, {hardware.name}: {hardware.origin()}", fontsize=9, wrap=True)
    for axis in (prefill, decode):
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
    picture = BytesIO()
    figure.savefig(picture, format=Path(path).suffix[1:].lower())
    replace_file(path, picture.getvalue())


def _name(row: PlanRow) -> str:
    return f"tp {row.tp} {row.mode.upper()}" + (f", {row.nodes} nodes" if row.nodes > 1 else "")


def _prefill(axis: Axes, rows: list[PlanRow]) -> None:
    lines: dict[str, list[PlanRow]] = {}
    for row in rows:
        lines.setdefault(_name(row), []).append(row)
    for name, each in lines.items():
        points = sorted((row.tokens, row.tokens_per_s) for row in each)
        axis.plot(
            *zip(*points, strict=True), marker="o", markersize=4, linestyle="--" if " SP" in name else "-", label=name
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set(xlabel="tokens of the prompt", ylabel="tokens/s", title="prefill")
    axis.grid(True, which="major", alpha=0.3)


def _decode(axis: Axes, rows: list[PlanRow]) -> None:
    bottom = [0.0] * len(rows)
    places = list(range(len(rows)))
    for part in _PARTS:
        heights = [getattr(row.cost, part) / 1e3 for row in rows]
        axis.bar(places, heights, 0.7, bottom=bottom, label=part.removesuffix("_us"))
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axis.set_xticks(
        places, [_name(row) + ("" if row.fits else "\n(does not fit)") for row in rows], rotation=30, fontsize=7
    )
    sequences = rows[0].sequences if rows else 0
    axis.set(ylabel="ms a pass", title=f"decode, batch {sequences}")
