"""What `bench` prints: tables of at most 100 columns, each followed by how its figures were taken."""

import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tp_residual.bench.choice import crossovers, executor, line
from tp_residual.bench.compare import Comparison
from tp_residual.bench.results import AMOUNTS, Result, Row

WIDTH = 100
_RELEASED = {
    "alone": "one rank",
    "spin": "ranks released together by a spin on one clock",
    "collective": "ranks released together by a collective",
}


def print_result(result: Result) -> None:
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    printers: dict[str, Callable[[Console, Sequence[Row]], None]] = {
        "collectives": _collectives,
        "bandwidth": _bandwidth,
        "boundary": _boundary,
        "add-norm": _add_norm,
        "generate": _generate,
        "memory": _memory,
        "gemm": _gemm,
        "scaling": _scaling,
    }
    printers[result.what](console, result.rows)
    if result.what in AMOUNTS:
        _notes(console, result)
    else:
        _footer(console, result)


def print_comparisons(comparisons: Sequence[Comparison]) -> None:
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    table = _table("", "old us", "new us", "time", "spread", "limit", "spread", "verdict")
    for each in comparisons:
        table.add_row(
            escape(each.name),
            _us(each.old_us),
            _us(each.new_us),
            f"{each.percent:+.1f} %",
            f"{each.spread_percent:.1f} %",
            f"{each.limit_percent:+.1f} %",
            f"{each.limit_spread_percent:.1f} %",
            each.verdict,
            style={"slower": "bold red", "faster": "green"}.get(each.verdict),
        )
    console.print(table)
    _say(console, "same: within the spread of the samples. machine: the limit measured beside it moved along.")


def _table(*columns: str, title: str = "") -> Table:
    """The first column is text, to the left, unless its name begins with `<`; it wraps where it has no name."""
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0), title=title or None, title_justify="left")
    for number, name in enumerate(columns):
        text = number == 0 and not name.startswith("<")
        table.add_column(name.lstrip("<"), justify="left" if text else "right", no_wrap=bool(name))
    return table


def _collectives(console: Console, rows: Sequence[Row]) -> None:
    def where(row: Row) -> tuple[str, str]:
        return row["transport"], row["collective"]

    for (transport, collective), chosen in groupby(sorted(rows, key=where), key=where):
        if collective == "p2p":
            _pairs(console, transport, list(chosen))
        else:
            _collective(console, transport, collective, list(chosen))


def _collective(console: Console, transport: str, collective: str, rows: Sequence[Row]) -> None:
    title = f"{collective} over {transport}: out of place, then in place"
    half = ("time us", "algbw", "busbw", "#wrong")
    table = _table("<size", "count", "type", "redop", "root", *half, *half, title=title)
    places = {(row["bytes"], row["place"]): row for row in rows}
    for nbytes in sorted({row["bytes"] for row in rows}):
        row = places[nbytes, "out"]
        cells = [str(nbytes), str(row["count"]), row["dtype"], row["redop"], str(row["root"])]
        for place in ("out", "in"):
            timed = places.get((nbytes, place))
            if timed is None:
                cells += ["-"] * 4
            else:
                bandwidths = (f"{timed[name]:.3f}" for name in ("algbw_GB_s", "busbw_GB_s"))
                cells += [_us(timed["p50_us"]), *bandwidths, str(timed["wrong"])]
        table.add_row(*cells)
    console.print(table)
    average = sum(row["busbw_GB_s"] for row in rows) / len(rows)
    last = places[max(row["bytes"] for row in rows), "out"]
    _say(
        console,
        f"average busbw {average:.3f} GB/s; a copy of {last['bytes']} B takes {_us(last['limit_us'])} us, {_percent(last)} of the time",
    )


def _pairs(console: Console, transport: str, rows: Sequence[Row]) -> None:
    """A matrix of the largest size; the file has the others."""
    nbytes = max(row["bytes"] for row in rows)
    found = {row["pair"]: row["algbw_GB_s"] for row in rows if row["bytes"] == nbytes}
    ranks = range(rows[0]["ranks"])
    table = _table("<rank", *map(str, ranks), title=f"p2p over {transport}")
    for a in ranks:
        cells = (found.get(f"{min(a, b)}-{max(a, b)}") for b in ranks)
        table.add_row(str(a), *("-" if cell is None else f"{cell:.3f}" for cell in cells))
    console.print(table)
    _say(console, f"GB/s each way, {nbytes} B both ways at once, one pair at a time")


def _bandwidth(console: Console, rows: Sequence[Row]) -> None:
    table = _table(
        "kernel", "type", "threads", "bytes", "p50 us", "p95", "p99", "each rank", "all ranks", "", "of copy", title="limits"
    )  # fmt: skip
    for row in rows:
        unit = next((name for name in ("GB_s", "TFLOP_s") if name in row), None)
        rates = (
            ["", "", ""] if unit is None else [_rate(row[unit]), _rate(row[f"total_{unit}"]), unit.replace("_", "/")]
        )
        share = _percent(row) if row["limit"] != "itself" else ""
        table.add_row(
            f"{row['kernel']} {row.get('size', '')}".strip(),
            row["dtype"],
            str(row["threads"]),
            _bytes(row["bytes"]),
            *_times(row),
            *rates,
            share,
        )
    console.print(table)


def _boundary(console: Console, rows: Sequence[Row]) -> None:
    marks = crossovers(rows)
    for (hidden, dtype), chosen in groupby(rows, key=lambda row: (row["hidden"], row["dtype"])):
        table = _table(
            "executor", "tokens", "p50 us", "p95", "p99", "passes", "memory", "link", "GB/s", "limit", "mark",
            title=f"boundary, hidden {hidden}, {dtype}",
        )  # fmt: skip
        for tokens, shape in groupby(chosen, key=lambda row: row["tokens"]):
            same = list(shape)
            best = min(same, key=lambda row: row["p50_us"])
            for row in same:
                overtakes = row["mode"] == "sp" and marks[line(row)] == tokens
                mark = " ".join(["best"] * (row is best) + ["SP"] * overtakes)
                table.add_row(
                    executor(row), str(tokens), *_times(row), f"{row['passes']:.3g}",
                    _bytes(row["memory_bytes"]), _bytes(row["link_bytes"]), f"{row['memory_GB_s']:.2f}", _percent(row), mark,
                )  # fmt: skip
            table.add_section()
        console.print(table)
        for row in {line(row): row for row in rows if (row["hidden"], row["dtype"]) == (hidden, dtype)}.values():
            if line(row) in marks:
                tokens = marks[line(row)]
                says = (
                    f"faster from {tokens} tokens on (mark SP)" if tokens else "not faster at the most tokens measured"
                )
                _say(console, f"{executor(row | {'mode': ''})}: SP is {says}")


def _add_norm(console: Console, rows: Sequence[Row]) -> None:
    for (hidden, dtype), chosen in groupby(rows, key=lambda row: (row["hidden"], row["dtype"])):
        table = _table(
            "form", "order", "tokens", "p50 us", "p95", "p99", "passes", "4 passes", "GB/s", "limit",
            title=f"add and norm, hidden {hidden}, {dtype}",
        )  # fmt: skip
        for tokens, shape in groupby(chosen, key=lambda row: row["tokens"]):
            for row in shape:
                table.add_row(
                    row["form"] + " (plain)" * (row.get("implementation") == "plain"), row["order"], str(tokens),
                    *_times(row), f"{row['passes']:.3g}", _bytes(row["least_bytes"]),
                    f"{row['useful_GB_s']:.2f}", _percent(row),
                )  # fmt: skip
            table.add_section()
        console.print(table)


def _generate(console: Console, rows: Sequence[Row]) -> None:
    first = rows[0]
    table = _table(
        "step", "batch", "prompt", "tokens/s", "p50 ms", "p95", "p99", "wait p50", "p95", "p99", "GB/s", "limit",
        title=f"{first['model']}, {first['dtype']} ({first['form']}), boundary {first['boundary']}, "
        f"sequence parallel {first['sequence_parallel']}",
    )  # fmt: skip
    for row in rows:
        waits = "ttft" if row["step"] == "prefill" else "itl"
        table.add_row(
            *_cell(row), _rate(row["tokens_per_s"]), *(_ms(row[f"p{q}_us"]) for q in (50, 95, 99)),
            *(_ms(row[f"{waits}_p{q}_us"]) for q in (50, 95, 99)),
            f"{row['weight_GB_s']:.1f}" if "weight_GB_s" in row else "", _percent(row),
        )  # fmt: skip
    console.print(table)
    _say(
        console,
        "wait: for the first token (prefill), from one token to the next (decode), of each request; GB/s of weights",
    )
    parts = ("gemm", "attention", "boundary", "elementwise", "sampler", "python")
    table = _table("step", "batch", "prompt", *parts, title="shares of a step's time")
    for row in rows:
        shares = (row[f"{part}_share"] for part in parts)
        table.add_row(*_cell(row), *("-" if share is None else f"{100 * share:.1f} %" for share in shares))
    console.print(table)
    _say(console, "python: what is left when compiled kernels, boundaries and the sampler are taken out")


def _scaling(console: Console, rows: Sequence[Row]) -> None:
    first = rows[0]
    table = _table(
        "step", "batch", "prompt", "ranks", "threads", "tokens/s", "p50 ms", "limit", "speedup", "least", "most", "efficiency",
        title=f"{first['model']}, {first['dtype']}; against {first['against_ranks']} ranks, {first['rounds']} rounds in turn",
    )  # fmt: skip
    for cell, same in groupby(rows, key=_cell):
        for row in same:
            speedups = (f"{row[name]:.2f}" for name in ("speedup", "speedup_min", "speedup_max"))
            table.add_row(
                *cell, str(row["ranks"]), str(row["threads"]), _rate(row["tokens_per_s"]), _ms(row["p50_us"]), _percent(row),
                *speedups, f"{100 * row['efficiency']:.0f} %",
            )  # fmt: skip
        table.add_section()
    console.print(table)
    _say(console, "efficiency: the speedup, divided by how many times the cores (ranks x threads; GPUs) it takes")


def _gemm(console: Console, rows: Sequence[Row]) -> None:
    for shape, same in groupby(rows, key=lambda row: (row["linear"], row["out_features"], row["in_features"])):
        chosen = list(same)
        table = _table(
            "<tokens", "p50 us", "p95", "p99", "GB/s", "TFLOP/s", "limit us", "limit",
            title=f"{shape[0]}, {shape[1]} x {shape[2]} on the fullest rank, {chosen[0]['dtype']} ({chosen[0]['form']})",
        )  # fmt: skip
        for row in chosen:
            table.add_row(
                str(row["tokens"]), *_times(row), f"{row['weight_GB_s']:.1f}", f"{row['TFLOP_s']:.3g}",
                _us(row["limit_us"]), _percent(row),
            )  # fmt: skip
        console.print(table)


_MEMORY = {
    "weights_bytes": "weights as torch holds them",
    "packed_bytes": "packed copies of linears",
    "extra_bytes": "  of a tied head, whose weight stays",
    "cache_bytes": "KV cache reserved",
    "cache_used_bytes": "  used at most",
    "stream_bytes": "residual stream of the largest pass",
    "load_peak_anonymous_bytes": "anonymous, most while loading",
    "loaded_anonymous_bytes": "anonymous, loaded",
    "run_peak_anonymous_bytes": "anonymous, most while generating",
    "peak_anonymous_bytes": "anonymous, most of all",
    "bound_bytes": "weights + packed + cache + 300 MB",
    "over_bytes": "beyond that (negative: within)",
}


def _memory(console: Console, rows: Sequence[Row]) -> None:
    first = rows[0]
    table = _table(
        "MB of a rank, the most of any", *(row["mode"] for row in rows),
        title=f"{first['model']}, {first['dtype']} ({first['form']}), {first['ranks']} ranks, batch {first['batch']}, "
        f"prompt {first['prompt_tokens']} + {first['new_tokens']} tokens",
    )  # fmt: skip
    for name, text in _MEMORY.items():
        table.add_row(text, *(f"{row[name] / 1e6:.2f}" for row in rows))
    console.print(table)
    _say(console, "anonymous: RssAnon of the process, looked at every 2 ms and at the end of each phase")


def _cell(row: Row) -> tuple[str, str, str]:
    return row["step"], str(row["batch"]), str(row["prompt_tokens"])


def _ms(us: float) -> str:
    ms = us / 1e3
    return f"{ms:.3f}" if ms < 10 else f"{ms:.2f}" if ms < 1000 else f"{ms:.0f}"


def _footer(console: Console, result: Result) -> None:
    """How every figure above was taken; rows that differ in it are in the file."""
    rows, settings = result.rows, result.settings
    released = " and ".join(dict.fromkeys(_RELEASED[row["released"]] for row in rows))
    kept = [row["samples"] for row in rows]
    samples = f"{min(kept)}" if min(kept) == max(kept) else f"{min(kept)} to {max(kept)}"
    late = sum(row["late_samples"] for row in rows)
    _say(
        console,
        f"{_all(rows, 'timing')} timing, {_all(rows, 'cache')} cache, {released}; {samples} samples a row, each the maximum over ranks "
        f"({settings['ranks']}; threads of each: {settings['threads']}{', pinned' if settings['pin'] else ''})"
        + (f"; {late} were released late, and dropped where they are fewer than half" if late else ""),
    )
    limits = dict.fromkeys(row["limit"] for row in rows if row["limit"] != "itself")
    _say(console, f"limit: {'; '.join(limits)}, in the same rounds")
    _notes(console, result)


def _notes(console: Console, result: Result) -> None:
    for note in result.notes:
        _say(console, f"not here: {note}")


def _all(rows: Iterable[Row], key: str) -> str:
    return " and ".join(dict.fromkeys(row[key] for row in rows))


def _say(console: Console, text: str) -> None:
    console.print(escape(text), highlight=False)


def _times(row: Row) -> list[str]:
    return [_us(row[f"p{q}_us"]) for q in (50, 95, 99)]


def _us(us: float) -> str:
    return f"{us:.2f}" if us < 100 else f"{us:.1f}" if us < 10_000 else f"{us:.0f}"


def _bytes(nbytes: int) -> str:
    """Three or four digits of B, kB, MB or GB: decimal, as GB/s is."""
    unit = next((unit for unit in (10**9, 10**6, 10**3) if nbytes >= 10 * unit), 1)
    return f"{nbytes / unit:.0f} " + {1: "B", 10**3: "kB", 10**6: "MB", 10**9: "GB"}[unit]


def _rate(value: float) -> str:
    return f"{value:.3g}" if value < 10 else f"{value:.1f}"


def _percent(row: Row) -> str:
    return f"{row['percent_of_limit']:.0f} %" if row["percent_of_limit"] >= 10 else f"{row['percent_of_limit']:.1f} %"
