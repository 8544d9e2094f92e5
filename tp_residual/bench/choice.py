"""What the boundary's rows say about choices: where SP overtakes TP, and which executor to take for how many bytes. Needs no torch."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from tp_residual.bench.results import Result, Row, replace_file

Line: TypeAlias = tuple[str, str, str, int, str]

# a later executor of the table must be faster than the one before it by this much: two that are alike do not take turns
_WORTH_A_SWITCH = 0.95


def crossovers(rows: Sequence[Row]) -> dict[Line, int | None]:
    """By line (executor, transport, call, hidden, dtype): from how many tokens on SP is faster at every size measured, or None."""
    found: dict[Line, int | None] = {}
    times = {(*line(row), row["mode"], row["tokens"]): row["p50_us"] for row in rows}
    for each in dict.fromkeys(line(row) for row in rows if row["mode"] == "sp"):
        found[each] = None
        for tokens in sorted({row["tokens"] for row in rows if line(row) == each}, reverse=True):
            if times[(*each, "sp", tokens)] >= times.get((*each, "tp", tokens), float("inf")):
                break
            found[each] = tokens
    return found


def line(row: Mapping[str, Any]) -> Line:
    return row["executor"], row["transport"], row["call"], row["hidden"], row["dtype"]


def executor(row: Mapping[str, Any]) -> str:
    """A row's name for people: with the wire where it is not the executor's own, and `op` where the operator was called."""
    wire = "" if row["transport"] in (row["executor"], "none") else f"/{row['transport']}"
    call = "op" if row["call"] == "operator" else ""
    return " ".join(filter(None, (row["executor"] + wire, row["mode"].upper(), call)))


def dispatch_table(rows: Sequence[Row], device: str) -> list[dict[str, Any]]:
    """The fastest executor by byte range, for each transport, world size, dtype, mode and order: docs/benchmarks.md has the format.

    order: `contract` chooses among executors that are bitwise the contract, `any` among all.
    """
    situations: dict[tuple[str, int, str, str, str], list[Row]] = {}
    for row in rows:
        if row["call"] == "executor":
            for order in ("contract", "any") if row["order"] == "contract" else ("any",):
                key = row["transport"], row["ranks"], row["dtype"], row["mode"], order
                situations.setdefault(key, []).append(row)
    names = ("transport", "world", "dtype", "mode", "order")
    return [
        {"device": device, **dict(zip(names, key, strict=True)), "ranges": _ranges(chosen)}
        for key, chosen in situations.items()
    ]


def _ranges(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Edges lie at the geometric mean of the two sizes between which the choice changes; the last range has no end."""
    ranges: list[dict[str, Any]] = []
    last, choice = 0, ""
    for nbytes in sorted({row["bytes"] for row in rows}):
        times: dict[str, list[float]] = {}
        for row in rows:
            if row["bytes"] == nbytes:
                times.setdefault(row["executor"], []).append(row["p50_us"])
        us = {name: sum(each) / len(each) for name, each in times.items()}
        best = min(us, key=us.__getitem__)
        if not choice:
            choice = best
        elif best != choice and us[best] < _WORTH_A_SWITCH * us.get(choice, float("inf")):
            ranges.append({"up_to_bytes": round((last * nbytes) ** 0.5), "executor": choice})
            choice = best
        last = nbytes
    return [*ranges, {"up_to_bytes": None, "executor": choice}]


def write_dispatch_table(path: str, result: Result) -> None:
    """What the dispatcher reads as its override; docs/benchmarks.md has the format."""
    content = {
        "format": "tp_residual boundary table 1",
        "hardware": result.hardware,
        "versions": result.versions,
        "commit": result.commit,
        "command": result.command,
        "table": dispatch_table(result.rows, result.settings["device"]),
    }
    replace_file(path, json.dumps(content, indent=1) + "\n")
