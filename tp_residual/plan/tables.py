"""What `plan` prints: tables of at most 100 columns, what follows from them, and where every number comes from."""

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tp_residual.plan.estimate import Plan, PlanRow, Step
from tp_residual.plan.hardware import Hardware
from tp_residual.plan.result import CheckedPass

WIDTH = 100


def print_plan(plan: Plan, hardware: Hardware) -> None:
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(_memory(plan))
    for step in ("prefill", "decode"):
        console.print(_times(plan, step))
    for line in (*verdicts(plan), *(f"note: {note}" for note in plan.notes)):
        _say(console, line)
    _say(console, f"hardware {hardware.name}: {hardware.origin()}")


def _memory(plan: Plan) -> Table:
    request = plan.request
    table = _table(
        "tp", "nodes", "weights", "KV a token", "KV cache", "stream TP", "stream SP", "needed", "of", "fits", "most context",
        "SP from",
        title=f"memory of the fullest rank, {request.dtype}: {max(request.batch)} sequences of {request.context} tokens, passes of up to "
        f"{max(*request.tokens, *request.batch)}",
    )  # fmt: skip
    for (tp_size, nodes), rows in groupby(plan.rows, key=lambda row: (row.tp, row.nodes)):
        by_mode = {row.mode: row.memory for row in rows}
        memory = by_mode["tp"]
        crossing = plan.crossovers.get((tp_size, nodes))
        table.add_row(
            str(tp_size), str(nodes), _bytes(memory.weight_bytes), _bytes(memory.kv_bytes_per_token),
            _bytes(memory.kv_cache_bytes), _bytes(memory.stream_bytes),
            _bytes(by_mode["sp"].stream_bytes) if "sp" in by_mode else "-", _bytes(memory.needed_bytes),
            _bytes(memory.device_bytes), "yes" if memory.fits else "NO", _count(memory.max_context_tokens),
            "-" if crossing is None else "never" if crossing.tokens is None else f"{crossing.tokens} tok",
            style=None if memory.fits else "red",
        )  # fmt: skip
    return table


def _times(plan: Plan, step: Step) -> Table:
    size = "tokens" if step == "prefill" else "seqs"
    about = "one prompt a pass" if step == "prefill" else f"one token a sequence, {plan.request.context} in the cache"
    table = _table(
        size, "tp", "nodes", "mode", "time ms", "tokens/s", "a rank", "gemm", "attn", "elem", "launch", "boundary", "fits",
        title=f"{step}, predicted: {about}",
    )  # fmt: skip

    def of(row: PlanRow) -> int:
        return row.tokens if step == "prefill" else row.sequences

    chosen = sorted((row for row in plan.rows if row.step == step), key=lambda row: (of(row), row.tp, row.nodes))
    for _, rows in groupby(chosen, key=of):
        for row in rows:
            table.add_row(str(of(row)), str(row.tp), str(row.nodes), row.mode.upper(), *_predicted(row))
        table.add_section()
    return table


def _predicted(row: PlanRow) -> list[str]:
    if row.cost is None:
        return ["-"] * 8 + ["NO"]
    cost, total = row.cost, row.cost.total_us
    parts = cost.gemm_us, cost.attention_us, cost.elementwise_us, cost.launch_us, cost.boundary_us
    rates = _digits(row.tokens_per_s), _digits(row.tokens_per_s / row.tp)
    fits = "yes" if row.fits else "NO"
    return [_digits(total / 1e3), *rates, *(f"{100 * part / total:.0f}%" for part in parts), fits]


def verdicts(plan: Plan) -> Iterator[str]:
    """Best sizes, one node or several, why SP never pays where it does not, and what could not be predicted."""
    request = plan.request
    questions: list[tuple[Step, int, str]] = [
        *(("decode", size, f"decode of {size} sequence{'s' * (size > 1)}") for size in request.batch),
        *(("prefill", size, f"prefill of {size} tokens") for size in request.tokens),
    ]
    for step, size, name in questions:
        best = plan.fastest(step, size)
        if best is None:
            yield f"{name}: no layout fits"
            continue
        yield f"{name}: fastest with {_layout(best)}, {_rate(best)}; most a rank with {_most_a_rank(plan, step, size)}"
        one = plan.fastest(step, size, nodes=1)
        if request.nodes > 1:
            yield f"{name}: {_one_or_several(plan, step, size, best, one)}"
    for (tp_size, nodes), crossing in plan.crossovers.items():
        if tp_size > 1 and crossing.tokens is None:
            yield f"tp={tp_size} on {_nodes(nodes)}: SP is never faster: {crossing.reason}"
    for why in dict.fromkeys(f"tp={row.tp}: {row.why}" for row in plan.rows if row.why):
        yield f"not predicted: {why}"
    for row in {(row.tp, row.nodes): row for row in plan.rows if not row.memory.fits}.values():
        over = row.memory.needed_bytes - row.memory.device_bytes
        yield f"tp={row.tp} on {_nodes(row.nodes)} does not fit: {_bytes(over)} too much on the fullest rank"


def _most_a_rank(plan: Plan, step: Step, size: int) -> str:
    best = plan.fastest(step, size, per_rank=True)
    assert best is not None
    return f"{_layout(best)}, {_digits(best.tokens_per_s / best.tp)} tokens/s each"


def _one_or_several(plan: Plan, step: Step, size: int, best: PlanRow, one: PlanRow | None) -> str:
    if best.nodes == 1:
        several = [plan.fastest(step, size, nodes=count) for count in range(2, plan.request.nodes + 1)]
        others = [row for row in several if row is not None]
        if not others:
            return "one node; nothing on several was predicted"
        other = max(others, key=lambda row: row.tokens_per_s)
        return f"one node; the best on several, {_layout(other)}, has {_rate(other)}"
    if one is None:
        return f"{best.nodes} nodes: nothing fits on one"
    return f"{best.nodes} nodes, {best.tokens_per_s / one.tokens_per_s:.2f} times one node's best, {_layout(one)}"


def _layout(row: PlanRow) -> str:
    mode = f" {row.mode.upper()}" if row.tp > 1 else ""
    return f"tp={row.tp}{mode}" + (f" on {_nodes(row.nodes)}" if row.nodes > 1 else "")


def _nodes(count: int) -> str:
    return "one node" if count == 1 else f"{count} nodes"


def _rate(row: PlanRow) -> str:
    assert row.cost is not None
    return f"{_digits(row.cost.total_us / 1e3)} ms, {_digits(row.tokens_per_s)} tokens/s"


def print_check(rows: Sequence[CheckedPass], hardware: Hardware) -> None:
    """Every point, whatever its error."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    table = _table(
        "step", "tokens", "seqs", "context", "tp", "mode", "predicted ms", "measured ms", "p5 - p95", "samples", "error",
        title="predicted against measured",
    )  # fmt: skip
    for row in rows:
        spread = f"{_digits(row.p5_us / 1e3)} - {_digits(row.p95_us / 1e3)}"
        table.add_row(
            row.step, str(row.tokens), str(row.sequences), str(row.context), str(row.tp), row.mode.upper(),
            _digits(row.predicted_us / 1e3), _digits(row.measured_us / 1e3), spread, str(row.samples), f"{100 * row.error:+.0f}%",
        )  # fmt: skip
    console.print(table)
    errors = sorted((abs(row.error) for row in rows), reverse=True)
    _say(
        console,
        f"error = predicted / measured - 1 of {len(errors)} points: largest {100 * errors[0]:.0f} %, "
        f"median {100 * errors[len(errors) // 2]:.0f} %",
    )
    _say(console, f"hardware {hardware.name}: {hardware.origin()}")


def _table(*columns: str, title: str) -> Table:
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _say(console: Console, text: str) -> None:
    console.print(escape(text), highlight=False)


def _digits(value: float) -> str:
    """Three digits, or all before the point."""
    return (
        f"{value:.0f}"
        if value >= 100
        else f"{value:.1f}"
        if value >= 10
        else f"{value:.2f}"
        if value >= 0.1
        else f"{value:.2g}"
    )


def _count(number: int) -> str:
    return f"{_digits(number / 1e6)} M" if number >= 10**6 else str(number)


def _bytes(nbytes: int) -> str:
    unit = next((unit for unit in (10**9, 10**6, 10**3) if nbytes >= unit), 1)
    return f"{_digits(nbytes / unit)} " + {1: "B", 10**3: "kB", 10**6: "MB", 10**9: "GB"}[unit]
