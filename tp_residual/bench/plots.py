"""Pictures of result files: one figure a question, on log axes, with the limit that was measured beside the figures."""

from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tp_residual.bench.choice import crossovers, executor, line
from tp_residual.bench.results import Result, Row, replace_file

_DPI = 110
_MARKERS = "osD^vP*X"


def write_plot(result: Result, path: str, extra: Row | None = None) -> None:
    """As `path` ends: .png, .pdf or .svg. extra: what `measure_add_norm` found beside its rows."""
    panels = {"boundary": len({(row["hidden"], row["dtype"]) for row in result.rows if "mode" in row})}.get(
        result.what, 2
    )
    figure = Figure(figsize=(6.4 * min(panels, 2), 4.6 * -(-panels // 2) + 0.6), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(-(-panels // 2), min(panels, 2), squeeze=False).flat)
    {
        "collectives": _collectives,
        "bandwidth": _bandwidth,
        "boundary": _boundary,
        "add-norm": _add_norm,
    }[result.what](axes, result.rows, extra or {})
    for unused in axes[panels:]:
        unused.remove()
    figure.suptitle(_title(result), fontsize=9)
    _legend(figure, axes[:panels])
    picture = BytesIO()
    figure.savefig(picture, format=Path(path).suffix[1:].lower())
    replace_file(path, picture.getvalue())


def _title(result: Result) -> str:
    where = ", ".join(result.hardware["gpus"]) if result.settings["device"] == "cuda" else result.hardware["cpu"]
    return (
        f"bench {result.what}: {result.settings['ranks']} ranks, {result.settings['threads']} threads each, "
        f"{result.settings['cache']} cache, {where}, torch {result.versions['torch']}, {result.commit[:10]}"
    )


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    for each in axes:
        if each.get_legend_handles_labels()[0]:
            each.legend(fontsize=7)


def _log(axis: Axes, x: str, y: str, title: str) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set(xlabel=x, ylabel=y, title=title)
    axis.grid(True, which="major", alpha=0.3)


def _lines(axis: Axes, lines: dict[str, list[tuple[float, float]]], **style: Any) -> None:
    for number, (name, points) in enumerate(lines.items()):
        x, y = zip(*sorted(points), strict=True)
        marker = _MARKERS[number % len(_MARKERS)]
        look: dict[str, Any] = {"marker": marker, "markersize": 4, "linewidth": 1.2, "label": name} | style
        axis.plot(x, y, **look)


def _grouped(rows: Iterable[Row], name: Callable[[Row], str], x: str, y: str) -> dict[str, list[tuple[float, float]]]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        lines.setdefault(name(row), []).append((row[x], row[y]))
    return lines


def _limit(axis: Axes, rows: Iterable[Row], x: str, y: str, name: str) -> None:
    points = {(row[x], row[y]) for row in rows}
    by_x = {at: sorted(value for where, value in points if where == at) for at in {where for where, _ in points}}
    middle = [(at, values[len(values) // 2]) for at, values in by_x.items()]
    _lines(axis, {name: middle}, color="black", linestyle="--", marker="")


def _collectives(axes: Sequence[Axes], rows: Sequence[Row], _: Row) -> None:
    def name(row: Row) -> str:
        return f"{row.get('pair', row['collective'])}, {row['transport']}" + (
            " in place" if row["place"] == "in" else ""
        )

    _log(axes[0], "bytes", "us, p50", "time")
    _lines(axes[0], _grouped(rows, name, "bytes", "p50_us"))
    _limit(axes[0], rows, "bytes", "limit_us", "copy")
    _log(axes[1], "bytes", "GB/s", "bus bandwidth")
    _lines(axes[1], _grouped(rows, name, "bytes", "busbw_GB_s"))


def _bandwidth(axes: Sequence[Axes], rows: Sequence[Row], _: Row) -> None:
    memory = [row for row in rows if "GB_s" in row]
    kernels = list(dict.fromkeys(row["kernel"] for row in memory))
    threads = sorted({row["threads"] for row in memory})
    width = 0.8 / len(threads)
    for number, count in enumerate(threads):
        chosen = [row for row in memory if row["threads"] == count]
        places = [kernels.index(row["kernel"]) + (number - (len(threads) - 1) / 2) * width for row in chosen]
        bars = axes[0].bar(places, [row["total_GB_s"] for row in chosen], width * 0.95, label=f"{count} threads")
        axes[0].bar_label(bars, fmt="%.1f", fontsize=7)
    axes[0].set_xticks(range(len(kernels)), kernels)
    axes[0].set(ylabel="GB/s, all ranks", title="memory")
    gemms = [row for row in rows if "TFLOP_s" in row]
    bars = axes[1].bar(
        [f"{row['kernel']} {row['size']}\n{row['dtype']}" for row in gemms],
        [row["total_TFLOP_s"] for row in gemms],
        0.5,
    )
    axes[1].bar_label(bars, fmt="%.3g", fontsize=7)
    axes[1].set(ylabel="TFLOP/s, all ranks", title="matrix product")


def _boundary(axes: Sequence[Axes], rows: Sequence[Row], _: Row) -> None:
    marks = crossovers(rows)
    for axis, (hidden, dtype) in zip(axes, dict.fromkeys((row["hidden"], row["dtype"]) for row in rows), strict=False):
        chosen = [row for row in rows if (row["hidden"], row["dtype"]) == (hidden, dtype)]
        _log(axis, "tokens", "us, p50", f"hidden {hidden}, {dtype}")
        lines = _grouped(chosen, executor, "tokens", "p50_us")
        _lines(axis, lines)
        _limit(axis, chosen, "tokens", "limit_us", "copy of the counted bytes")
        crossing = {line(row): row for row in chosen if marks.get(line(row)) is not None}
        for number, (key, row) in enumerate(crossing.items()):
            tokens, height = marks[key] or 0, 0.02 + number / (len(crossing) + 1)
            axis.axvline(tokens, color="grey", linewidth=0.8, linestyle=":")
            place: dict[str, Any] = {
                "xycoords": ("data", "axes fraction"),
                "rotation": 90,
                "fontsize": 7,
                "ha": "right",
            }
            axis.annotate(f"SP: {executor(row | {'mode': ''})}", (tokens, height), **place)


def _add_norm(axes: Sequence[Axes], rows: Sequence[Row], roof: Row) -> None:
    def name(row: Row) -> str:
        return row["form"] + (f" ({row['order']})" if row["form"] == "fused" else "") + f", {row['dtype']}"

    _log(axes[0], "bytes of four passes", "GB/s of four passes", "add and norm")
    _lines(axes[0], _grouped(rows, name, "least_bytes", "useful_GB_s"))
    speeds = [row | {"limit_GB_s": row["least_bytes"] / row["limit_us"] / 1e3} for row in rows]
    _limit(axes[0], speeds, "least_bytes", "limit_GB_s", "copy")
    largest = max(row["bytes"] for row in rows)
    copy = max(row["limit_GB_s"] for row in speeds if row["bytes"] == largest)
    _log(axes[1], "flops a byte, as each form is written", "GFLOP/s", f"roofline at {largest / 1e6:g} MB an operand")
    peak = 1e3 * roof["TFLOP_s"]
    ends = (0.02, peak / copy, 8 * peak / copy)
    axes[1].plot(
        ends, [min(copy * x, peak) for x in ends], "k--", label=f"copy {copy:.1f} GB/s, fp32 GEMM {peak:.0f} GFLOP/s"
    )
    chosen = [row for row in rows if row["bytes"] == largest]
    at = [
        row | {"intensity": row["GFLOP_s"] / row["useful_GB_s"] * row["least_bytes"] / row["form_bytes"]}
        for row in chosen
    ]
    _lines(axes[1], _grouped(at, name, "intensity", "GFLOP_s"), linestyle="", markersize=7)
