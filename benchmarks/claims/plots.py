"""One picture of the claims that have curves: gradients and variance against depth, losses, a ladder's speed-up."""

from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from tp_residual.bench.results import replace_file

Points = Sequence[tuple[float, float]]
Series = Mapping[str, Mapping[str, Points]]  # claim -> line -> points

_GREY = "0.45"
_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, _BROWN = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#7B5EA7", "#8C6D46"


def write_plot(content: Mapping[str, Any], path: str) -> None:
    """content: what the JSON file holds. Panels without curves in it are left out; raises ValueError where none is left."""
    series: Series = {claim["id"]: claim["series"] for claim in content["claims"] if claim["series"]}
    panels = [draw for needed, draw in _PANELS if needed in series]
    if not panels:
        raise ValueError(f"none of these claims has a curve; --plot is for {', '.join(name for name, _ in _PANELS)}")
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.6 * columns, 4.1 * rows + 0.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis, draw in zip(axes, panels, strict=False):
        draw(axis, series)
        axis.grid(True, which="major", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    for unused in axes[len(panels) :]:
        unused.remove()
    versions = content["versions"]
    figure.suptitle(
        f"python -m benchmarks.claims, torch {versions['torch']}, {content['commit'][:10]}", fontsize=8, color=_GREY
    )
    picture = BytesIO()
    figure.savefig(picture, format="png")
    replace_file(path, picture.getvalue())


def _depths(axis: Axes, ticks: Sequence[float], y: str, title: str) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(ticks)
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set(xlabel="layers L", ylabel=y)
    axis.set_title(title, fontsize=10, loc="left")


def _line(axis: Axes, points: Points, label: str, color: str, **style: Any) -> None:
    x, y = zip(*points, strict=True)
    axis.plot(x, y, label=label, color=color, **{"linewidth": 1.6, **style})


def _power(axis: Axes, points: Points, exponent: float) -> None:
    """A dashed line with that slope through the first point."""
    (x0, y0), *_ = points
    ends = [(x0, y0), (points[-1][0], y0 * (points[-1][0] / x0) ** exponent)]
    _line(axis, ends, "", _GREY, linestyle="--", linewidth=1.0, zorder=1)


def _gradients(axis: Axes, series: Series) -> None:
    lines = series["gradient-depth"]
    for name, color, exponent in (("post-norm", _RED, 0.0), ("pre-norm", _BLUE, -0.5)):
        _power(axis, lines[name], exponent)
        _line(axis, lines[name], name, color, marker="o", markersize=5)
    _depths(
        axis,
        [x for x, _ in lines["pre-norm"]],
        "gradient norm, last MLP's second matrix",
        "At initialisation: last layer's gradient",
    )
    axis.set_ylim(0.05, 2)
    axis.text(
        0.03, 0.05, "dashed: slopes 0 and -1/2, arXiv 2002.04745", transform=axis.transAxes, fontsize=8, color=_GREY
    )
    axis.legend(fontsize=8, frameon=False, loc="center right", bbox_to_anchor=(1.0, 0.72))


def _variance(axis: Axes, series: Series) -> None:
    lines = series["init-rules"]
    look = {
        "plain": (_RED, 1.0, "writers not scaled"),
        "variance / sqrt(N)": (_ORANGE, 0.5, "variance / sqrt(N), as S3 says"),
        "std / sqrt(2L)": (_BLUE, 0.0, "std / sqrt(2L), GPT-2"),
    }
    for name, (color, exponent, label) in look.items():
        _power(axis, lines[name], exponent)
        _line(axis, lines[name], label, color, marker="o", markersize=5)
    _depths(
        axis, [x for x, _ in lines["plain"]], "mean square added to the stream", "Variance growth of a pre-norm decoder"
    )
    axis.set_ylim(0.4, 80)
    axis.text(0.03, 0.77, "dashed: slopes 1, 1/2 and 0", transform=axis.transAxes, fontsize=8, color=_GREY)
    axis.legend(fontsize=8, frameon=False, loc="upper left")


def _losses(axis: Axes, series: Series) -> None:
    look: dict[str, tuple[str, str, dict[str, Any]]] = {
        "learns/pre": ("pre-norm", _BLUE, {}),
        "learns/deepnorm": ("DeepNorm", _GREEN, {}),
        "shallow/post, L=6, lr 1e-3": ("post-norm, L=6, lr 1e-3", _PURPLE, {"linewidth": 1.2}),
        "learns/post": ("post-norm", _RED, {}),
        "clipping/post, clipped at 1": (
            "post-norm, clipped at 1",
            "black",
            {"linestyle": (0, (1, 2)), "linewidth": 1.8},
        ),
        "no-skip/masked": ("pre-norm without its skips", _BROWN, {"linestyle": "--", "linewidth": 1.2}),
    }
    for key, (label, color, style) in look.items():
        claim, _, name = key.partition("/")
        if claim in series:
            _line(axis, _smooth(series[claim][name]), label, color, **style)
    axis.set_title("150 steps without warm-up, L = 12, lr 3e-3", fontsize=10, loc="left")
    axis.set(xlabel="step", ylabel="loss, nats (mean of five)", ylim=(1.0, 4.6))
    for height, text in ((3.27, "entropy of single symbols"), (1.21, "entropy of the chain")):
        axis.axhline(height, color=_GREY, linewidth=0.8, linestyle=":", zorder=1)
        axis.annotate(
            text, (150, height), xytext=(0, -10), textcoords="offset points", ha="right", fontsize=8, color=_GREY
        )
    axis.legend(fontsize=8, frameon=False, ncols=2, loc="upper right")


def _smooth(points: Points, width: int = 5) -> Points:
    values = [y for _, y in points]
    means = [sum(values[max(0, at - width + 1) : at + 1]) / min(at + 1, width) for at in range(len(values))]
    return [(x, mean) for (x, _), mean in zip(points, means, strict=True)]


def _ladder(axis: Axes, series: Series) -> None:
    lines = series["ladder-overlap"]
    highest = max(x for x, _ in lines["measured"])
    ratios = [highest * step / 200 for step in range(201)]
    _line(
        axis,
        [(c, (1 + c) / max(1.0, c)) for c in ratios],
        "(t + c) / max(t, c), one sum at a time",
        _GREY,
        linestyle="--",
    )
    axis.fill_between(
        ratios,
        [0.85 * (1 + c) / max(1.0, c) for c in ratios],
        [1.15 * (1 + c) / max(1.0, c) for c in ratios],
        color=_GREY,
        alpha=0.12,
        linewidth=0,
        label="the bound, 15 %",
    )
    _line(axis, lines["measured"], "measured at tp=2", _BLUE, marker="o", markersize=6, linestyle="")
    axis.axhline(1.0, color=_GREY, linewidth=0.8)
    axis.set_title("Ladder against sequential, communication emulated", fontsize=10, loc="left")
    axis.set(
        xlabel="communication / computation of a sublayer, c / t", ylabel="speed-up", ylim=(0.8, 2.4), xlim=(0, None)
    )
    axis.legend(fontsize=8, frameon=False, loc="upper left")


_PANELS: tuple[tuple[str, Callable[[Axes, Series], None]], ...] = (
    ("gradient-depth", _gradients),
    ("init-rules", _variance),
    ("learns", _losses),
    ("ladder-overlap", _ladder),
)
