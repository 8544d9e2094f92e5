"""Pictures of one prompt's lens: the stream by layer, who wrote the logit, its heads, and the logit lens.

Token texts are strangers' and are drawn as they are: never as mathematics, and by id where the font has no such letter.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from io import BytesIO
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, FigureBase
from matplotlib.font_manager import findfont, get_font
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tp_residual.lens.request import visible
from tp_residual.lens.result import Kind, PromptLens

_DPI = 110
_COLORS: dict[Kind, str] = {"embedding": "#6b6b6b", "attention": "#2f6db3", "mlp": "#e0762f"}
_STATES = 48  # rows of the heat map at most: more are too low for their text
_LETTERS = 9  # of a token in a cell
_MARKED_HEADS = 6
_CELL_WIDTH = 0.82  # inches
_LEAST = 1e-12  # probabilities below are drawn there

TokenText = Callable[[int], str]


def pictures(lens: PromptLens, text: TokenText, title: str) -> dict[str, bytes]:
    """PNGs by name. text: of a token id. title: the model and how it ran."""
    drawn = {}
    for name, (draw, size) in _kinds(lens).items():
        figure = _figure(*size)
        draw(figure, lens, text)
        _head(figure, lens, text, title, size[0])
        drawn[name] = _png(figure)
    return drawn


def one_picture(lens: PromptLens, text: TokenText, title: str) -> bytes:
    """All of them on one sheet: the logit lens on the right, the others under each other on the left."""
    kinds = _kinds(lens)
    draw_lens, (lens_width, lens_height) = kinds.pop("logit_lens")
    left = max(width for _, (width, _) in kinds.values())
    heights = [height for _, (_, height) in kinds.values()]
    figure = _figure(left + lens_width, max(sum(heights), lens_height) + 0.4)
    columns: Any = figure.subfigures(1, 2, width_ratios=[left, lens_width])
    for part, (draw, _) in zip(
        columns[0].subfigures(len(kinds), 1, height_ratios=heights), kinds.values(), strict=True
    ):
        draw(part, lens, text)
    draw_lens(columns[1], lens, text)
    _head(figure, lens, text, title, left + lens_width)
    return _png(figure)


def _kinds(
    lens: PromptLens,
) -> dict[str, tuple[Callable[[FigureBase, PromptLens, TokenText], None], tuple[float, float]]]:
    """Name to (what draws it, inches)."""
    layers, heads = len(lens.attentions), len(lens.attentions[0].logits)
    width = min(max(8.0, 2.0 + 0.25 * layers), 20.0)
    states = len(_shown(list(range(len(lens.states)))))
    return {
        "stream": (_stream, (width, 8.0)),
        "components": (_components, (width, 6.6)),
        "heads": (_heads, (width, min(max(2.6, 1.6 + 0.22 * heads), 12.0))),
        "logit_lens": (_logit_lens, (4.4 + _CELL_WIDTH * len(lens.window), 2.4 + 0.25 * states)),
    }


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _png(figure: Figure) -> bytes:
    picture = BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def _head(figure: Figure, lens: PromptLens, text: TokenText, title: str, width: float) -> None:
    """The model, and as much of the prompt's end as there is room for."""
    room, shown = int(width * 11.5), list[str]()
    for token in reversed(lens.token_ids[: lens.position + 1]):
        shown.insert(0, _drawable(text(token), token).replace("\u2423", " "))
        if sum(map(len, shown)) > room:
            shown[0] = "…"
            break
    figure.suptitle(
        f"{title}\n{''.join(shown).strip()} ▸ {_token(lens.final_ids[-1], text)}", fontsize=10, parse_math=False
    )


# ---- texts


@cache
def _letters() -> frozenset[int]:
    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())


def _drawable(text: str, token_id: int) -> str:
    shown = visible(text)
    return shown if all(ord(letter) in _letters() for letter in shown) else f"#{token_id}"


def _token(token_id: int, text: TokenText, letters: int = 20) -> str:
    shown = _drawable(text(token_id), token_id)
    return shown if len(shown) <= letters else f"{shown[: letters - 1]}…"


def _subject(lens: PromptLens, text: TokenText) -> str:
    name = f"logit of {_token(lens.target, text)}"
    return name if lens.versus is None else f"{name} minus {_token(lens.versus, text)}"


# ---- the stream


def _stream(figure: FigureBase, lens: PromptLens, text: TokenText) -> None:
    norms, writes, cosines = figure.subplots(3, 1, sharex=True, height_ratios=[1.25, 1, 1])
    borders = [write for write in lens.writes if write.site.kind != "attention"]
    at = [write.site.layer for write in borders]
    by_token = np.array([[lens.rms(value) for value in write.norm] for write in borders])
    others = by_token[:, lens.measured]
    several = len(lens.token_ids) > 2
    if several:
        low, high = np.percentile(others, [10, 90], axis=1)
        norms.fill_between(at, low, high, color="#4c4c4c", alpha=0.15, linewidth=0, label="10 to 90 % of tokens")
    if len(lens.token_ids) > 1:
        norms.plot(
            at,
            by_token[:, 0],
            "--",
            color="#a03a6f",
            linewidth=1.2,
            label=f"first token, {_token(lens.token_ids[0], text)}",
        )
    norms.plot(
        at,
        others.mean(axis=1),
        color="#2b2b2b",
        linewidth=1.8,
        label="mean" + (" without the first" if several else ""),
    )
    if several and lens.position:
        label = f"position {lens.position}, {_token(lens.token_ids[lens.position], text)}"
        norms.plot(at, by_token[:, lens.position], color="#1b9e77", linewidth=1.2, label=label)
    norms.set(yscale="log", ylabel="rms of x", title="The stream after each layer")
    sublayers: tuple[tuple[Kind, int], ...] = (("attention", 1), ("mlp", 2))
    for kind, offset in sublayers:
        indices = [2 * layer + offset for layer in range(len(lens.attentions))]
        look: dict[str, Any] = {"color": _COLORS[kind], "marker": "o", "markersize": 3, "linewidth": 1.3}
        relative = [lens.mean(lens.relative_writes(index)) for index in indices]
        writes.plot(range(len(indices)), relative, label=_NAMES[kind], **look)
        cosines.plot(
            range(len(indices)),
            [lens.mean(lens.writes[index].cosine) for index in indices],
            label=f"u of {_NAMES[kind]}, x before it",
            **look,
        )
    writes.axhline(1, color="#999999", linewidth=0.7, linestyle=":")
    writes.set(
        yscale="log", ylabel="|u| / |x|", title="What each sublayer writes, relative to the stream it reads (mean)"
    )
    in_out = [lens.mean(values) for values in lens.layer_cosine]
    cosines.plot(range(len(in_out)), in_out, color="#2b2b2b", linewidth=1.3, label="x before and after the layer")
    cosines.axhline(0, color="#999999", linewidth=0.7)
    cosines.set(ylabel="cosine", xlabel="layer", ylim=(-1.05, 1.05), title="Where it points (mean)")
    for axis in (norms, writes, cosines):
        axis.grid(True, which="major", alpha=0.25)
        _legend(axis)
    _layer_axis(cosines, len(lens.attentions))


_NAMES: dict[Kind, str] = {"embedding": "embedding", "attention": "attention", "mlp": "MLP"}


def _legend(axis: Axes, columns: int = 1) -> None:
    """Beside the panel, where it covers no line."""
    legend = axis.legend(fontsize=8, frameon=False, ncols=columns, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    for entry in legend.get_texts():
        entry.set_parse_math(False)


def _layer_axis(axis: Axes, layers: int) -> None:
    step = max(1, -(-layers // 32))
    axis.set_xticks([-1, *range(0, layers, step)], ["emb", *map(str, range(0, layers, step))], fontsize=8)
    axis.set_xlim(-1.7, layers - 0.3)


# ---- who wrote it


def _components(figure: FigureBase, lens: PromptLens, text: TokenText) -> None:
    logits, shares = figure.subplots(2, 1, sharex=True)
    places: tuple[tuple[Kind, float], ...] = (("embedding", 0.0), ("attention", -0.2), ("mlp", 0.2))
    for axis, values, whole in (
        (logits, [c.logit for c in lens.components], lens.logit),
        (shares, [c.share for c in lens.components], 1.0),
    ):
        for kind, offset in places:
            chosen = [
                (c.site.layer + offset, v) for c, v in zip(lens.components, values, strict=True) if c.site.kind == kind
            ]
            at, heights = zip(*chosen, strict=True)
            axis.bar(at, heights, 0.4, color=_COLORS[kind], label=_NAMES[kind], zorder=3)
        total = np.cumsum(values)
        borders = [index for index, c in enumerate(lens.components) if c.site.kind != "attention"]
        layers = [lens.components[index].site.layer for index in borders]
        axis.plot(layers, total[borders], color="#2b2b2b", linewidth=1.2, label="sum so far", zorder=4)
        axis.axhline(whole, color="#2b2b2b", linewidth=0.8, linestyle=":", zorder=2)
        axis.axhline(0, color="#777777", linewidth=0.8, zorder=2)
        axis.grid(True, axis="y", alpha=0.25)
        axis.margins(y=0.12)
    name = _subject(lens, text)
    logits.set_title(
        f"What each component adds to the {name} = {lens.logit:.2f}, at position {lens.position}", parse_math=False
    )
    logits.set_ylabel("logit")
    shares.set(ylabel="share", xlabel="layer", title="Share of each component in the final stream (they sum to 1)")
    _legend(logits)
    _layer_axis(shares, len(lens.attentions))


def _heads(figure: FigureBase, lens: PromptLens, text: TokenText) -> None:
    axis = figure.subplots()
    values = np.array([attention.logits for attention in lens.attentions]).T
    limit = float(np.abs(values).max()) or 1.0
    image = axis.imshow(values, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
    bar = figure.colorbar(image, ax=axis, pad=0.01)
    bar.set_label("logit", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    axis.set_title(f"What each attention head adds to the {_subject(lens, text)}", parse_math=False)
    axis.set(xlabel="layer", ylabel="head")
    layers = values.shape[1]
    step = max(1, -(-layers // 32))
    axis.set_xticks(range(0, layers, step), [str(layer) for layer in range(0, layers, step)], fontsize=8)
    axis.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    axis.tick_params(axis="y", labelsize=8)
    owners = lens.head_owners
    for head in range(1, len(owners)):
        if owners[head] != owners[head - 1]:
            axis.axhline(head - 0.5, color="#555555", linewidth=0.9, linestyle=(0, (4, 3)))
    if owners[-1]:
        axis.set_ylabel("head (dashed: between ranks)", fontsize=9)
    if layers <= 48:  # the cells are wide enough for a number
        for place in np.argsort(-np.abs(values), axis=None)[:_MARKED_HEADS]:
            head, layer = np.unravel_index(place, values.shape)
            value = float(values[head, layer])
            color = "white" if abs(value) > 0.6 * limit else "black"
            axis.text(float(layer), float(head), f"{value:+.1f}", ha="center", va="center", fontsize=6.5, color=color)


# ---- the logit lens


def _shown(states: Sequence[Any]) -> list[Any]:
    """Evenly chosen, the last one always among them."""
    step = -(-len(states) // _STATES)
    return list(states[::-1][::step][::-1])


def _logit_lens(figure: FigureBase, lens: PromptLens, text: TokenText) -> None:
    cells, answer = figure.subplots(1, 2, sharey=True, width_ratios=[_CELL_WIDTH * len(lens.window) + 0.4, 1.5])
    states = _shown(lens.states)
    ranks = np.array([[likely.final_rank for likely in state.window] for state in states])
    scale, colors = LogNorm(1, max(10, ranks.max())), colormaps["YlGnBu_r"]
    look: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "origin": "lower"}
    image = cells.imshow(ranks, cmap=colors, norm=scale, **look)
    for row, state in enumerate(states):
        for column, likely in enumerate(state.window):
            red, green, blue, _ = colors(scale(ranks[row, column]))
            dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
            token = likely.top[0][0]
            cells.text(
                column, row, _token(token, text, _LETTERS), ha="center", va="center", fontsize=7.5,
                color="white" if dark else "#1a1a1a", parse_math=False, in_layout=False,
                weight="bold" if token == lens.final_ids[column] else "normal",
            )  # fmt: skip
    for edge in range(1, len(lens.window)):
        cells.axvline(edge - 0.5, color="white", linewidth=1.2)
    read = [_token(lens.token_ids[position], text, _LETTERS) for position in lens.window]
    cells.set_xticks(range(len(read)), read, fontsize=8, parse_math=False)
    cells.set_yticks(range(len(states)), [state.label for state in states], fontsize=8)
    cells.set(xlabel="token that is read", ylabel="stream after layer")
    cells.set_title("Logit lens: the likeliest next token (bold: the final answer)", fontsize=10)
    bar = figure.colorbar(image, ax=cells, location="bottom", shrink=0.6, pad=0.02, aspect=40)
    bar.set_label("rank of the final answer at this layer (1: it is the likeliest)", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    bar.ax.xaxis.set_major_formatter(FuncFormatter(lambda rank, _: f"{rank:,.0f}"))
    bar.ax.invert_xaxis()
    probabilities = [max(math.exp(state.window[-1].final_log_prob), _LEAST) for state in states]
    answer.plot(probabilities, range(len(states)), "o-", color=_COLORS["mlp"], markersize=3.5, linewidth=1.2)
    answer.set(xscale="log", xlim=(max(_LEAST, 0.3 * min(probabilities)), 2))
    answer.set_xlabel("probability", fontsize=9)
    answer.set_title(f"p({_token(lens.final_ids[-1], text, 14)})", fontsize=10, parse_math=False)
    answer.grid(True, axis="x", alpha=0.25)
    answer.tick_params(labelsize=8)
