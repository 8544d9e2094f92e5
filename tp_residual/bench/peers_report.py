"""What `bench peers` prints, and its picture."""

import sys
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tp_residual.bench.results import Result, Row, replace_file

_WIDTH = 100
_SAYS = {"decode_tok_s": "decode tok/s", "prefill_tok_s": "prefill tok/s", "start_s": "first token, s"}


def print_peers(result: Result) -> None:
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("", "batch", "prompt", "peer", "ours", "theirs", "ratio", "min", "max", "GB/s", "limit"):
        table.add_column(name, justify="left" if name in ("", "peer") else "right", no_wrap=True)
    rows = [row for row in result.rows if "reason" not in row]
    for row in rows:
        percent = row.get("percent_of_read_limit")
        table.add_row(
            _SAYS[row["metric"]],
            f"{row['batch']}",
            f"{row['prompt']}",
            f"{row['peer']} tp={row['peer_tp']}",
            _figure(row["ours"]),
            _figure(row["peer_value"]),
            *(f"{row[f'ratio_{which}']:.2f}" for which in ("median", "min", "max")),
            _figure(row["read_limit_gb_s"]) if "read_limit_gb_s" in row else "",
            "" if percent is None else f"{percent:.0f} %",
        )
    if rows:
        console.print(table)
    settings = result.settings
    say = [
        f"ours: tp={settings['ranks']}, {settings['threads']} threads a rank; every side on the same {settings['cores']} cores, "
        f"{settings['dtype']}",
        f"ratio: median of pairs taken in turn, above 1 where we are faster ({settings['rounds']} rounds of slices of at most "
        f"{settings['slice_s']:g} s or one step; a start is cold, {settings['starts']} times)",
        "GB/s: read by as many processes as ranks, in the same rounds; limit: our part of it, of the weights that a step must read",
        *(f"not here: {note}" for note in result.notes),
    ]
    for line in say:
        console.print(escape(line), highlight=False)


def notes_of(rows: Sequence[Row]) -> list[str]:
    """A line for each row that has a reason instead of a figure."""
    missing = [row for row in rows if "reason" in row]
    return [f"{row['peer']}{'' if row['metric'] is None else ' ' + row['metric']}: {row['reason']}" for row in missing]


def write_peers_plot(result: Result, path: str) -> None:
    """Ratios with their range, a panel a metric: a line at 1 is where both are as fast. As `path` ends: .png, .pdf or .svg."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in result.rows if "reason" not in row]
    metrics = [metric for metric in _SAYS if any(row["metric"] == metric for row in rows)]
    figure = Figure(figsize=(5.2 * max(1, len(metrics)), 4.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, metric in zip(figure.subplots(1, max(1, len(metrics)), squeeze=False).flat, metrics, strict=False):
        chosen = [row for row in rows if row["metric"] == metric]
        names = [f"{row['peer']} tp={row['peer_tp']}\nbatch {row['batch']}, prompt {row['prompt']}" for row in chosen]
        middle = [row["ratio_median"] for row in chosen]
        below = [row["ratio_median"] - row["ratio_min"] for row in chosen]
        above = [row["ratio_max"] - row["ratio_median"] for row in chosen]
        bars = axes.bar(range(len(chosen)), middle, 0.6, yerr=(below, above), capsize=3, color="#4c78a8")
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
        axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
        axes.set_xticks(range(len(chosen)), names, rotation=30, ha="right", fontsize=7)
        axes.set_title(_SAYS[metric])
        axes.set_ylabel("times as fast as the peer (median, range of pairs)")
    settings, versions = result.settings, result.versions
    figure.suptitle(
        f"bench peers: tp={settings['ranks']}, {settings['dtype']}, {settings['cores']} cores, {result.hardware['cpu']}, "
        f"torch {versions['torch']}, {result.commit[:10]}",
        fontsize=9,
    )
    picture = BytesIO()
    figure.savefig(picture, format=Path(path).suffix[1:].lower())
    replace_file(path, picture.getvalue())


def _figure(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"
