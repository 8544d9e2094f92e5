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
    shapes = {(row["hidden"], row["dtype"]) for row in result.rows if "hidden" in row}
    panels = {"boundary": len(shapes), "memory": 1}.get(result.what, 2)
    figure = Figure(figsize=(6.4 * min(panels, 2), 4.6 * -(-panels // 2) + 0.6), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(-(-panels // 2), min(panels, 2), squeeze=False).flat)
    {
        "collectives": _collectives,
        "bandwidth": _bandwidth,
        "boundary": _boundary,
        "add-norm": _add_norm,
        "generate": _generate,
        "memory": _memory,
        "gemm": _gemm,
        "scaling": _scaling,
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


def _beside_limits(axis: Axes, rows: Iterable[Row], name: Callable[[Row], str], x: str, y: str, limit: str) -> None:
    """A line of each name, and its own limit dashed in the same colour."""
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(name(row), []).append(row)
    for number, (label, chosen) in enumerate(lines.items()):
        chosen.sort(key=lambda row: row[x])
        at, marker = [row[x] for row in chosen], _MARKERS[number % len(_MARKERS)]
        (drawn,) = axis.plot(at, [row[y] for row in chosen], marker=marker, markersize=4, linewidth=1.2, label=label)
        axis.plot(at, [row[limit] for row in chosen], linestyle="--", linewidth=1, color=drawn.get_color())
    axis.plot([], [], linestyle="--", color="grey", label="limit")


def _generate(axes: Sequence[Axes], rows: Sequence[Row], _: Row) -> None:
    prefill = [row | {"tokens": row["batch"] * row["prompt_tokens"]} for row in rows if row["step"] == "prefill"]
    decode = [row for row in rows if row["step"] == "decode"]
    _log(axes[0], "tokens of a batch's prompts", "us until its last first token, p50", "prefill")
    _beside_limits(axes[0], prefill, lambda row: f"batch {row['batch']}", "tokens", "p50_us", "limit_us")
    _log(axes[1], "sequences", "us a step, p50", "decode")
    _beside_limits(axes[1], decode, lambda row: f"prompt {row['prompt_tokens']}", "batch", "p50_us", "limit_us")


def _scaling(axes: Sequence[Axes], rows: Sequence[Row], _: Row) -> None:
    for axis, step in zip(axes, ("prefill", "decode"), strict=True):
        chosen = [
            row | {"limit_per_s": row["tokens_per_s"] * 100 / row["percent_of_limit"]}
            for row in rows
            if row["step"] == step
        ]
        _log(axis, "ranks", "tokens/s", step)
        _beside_limits(
            axis,
            chosen,
            lambda row: f"batch {row['batch']}, prompt {row['prompt_tokens']}",
            "ranks",
            "tokens_per_s",
            "limit_per_s",
        )


def _gemm(axes: Sequence[Axes], rows: Sequence[Row], _: Row) -> None:
    def name(row: Row) -> str:
        return f"{row['linear']}, {row['out_features']} x {row['in_features']}"

    _log(axes[0], "tokens", "us, p50", "time")
    _beside_limits(axes[0], rows, name, "tokens", "p50_us", "limit_us")
    _log(axes[1], "tokens", "% of the limit", "against the slower of read and product")
    _lines(axes[1], _grouped(rows, name, "tokens", "percent_of_limit"))
    axes[1].axhline(100, color="black", linestyle="--", linewidth=1)


def _memory(axes: Sequence[Axes], rows: Sequence[Row], _: Row) -> None:
    """What is known of a rank, stacked, beside the most that it took; the bound over both."""
    parts = {
        "weights_bytes": "weights",
        "packed_bytes": "packed copies",
        "cache_bytes": "KV cache",
        "stream_bytes": "stream",
    }
    axis, known = axes[0], [0.0] * len(rows)
    places = list(range(len(rows)))
    for name, label in parts.items():
        heights = [row[name] / 1e6 for row in rows]
        axis.bar([at - 0.2 for at in places], heights, 0.38, bottom=known, label=label)
        known = [low + height for low, height in zip(known, heights, strict=True)]
    peaks = [row["peak_anonymous_bytes"] / 1e6 for row in rows]
    axis.bar([at + 0.2 for at in places], peaks, 0.38, color="lightgrey", label="anonymous, most")
    bounds = [row["bound_bytes"] / 1e6 for row in rows]
    axis.hlines(bounds, [at - 0.4 for at in places], [at + 0.4 for at in places], "black", "dashed", label="bound")
    axis.set_xticks(places, [row["mode"].upper() for row in rows])
    axis.set(ylabel="MB of the fullest rank", title="memory")
