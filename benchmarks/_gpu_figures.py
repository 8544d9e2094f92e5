"""What add+norm's rows say: against a copy, against each peer, and as a table. Imports no torch, so that a report is always written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from _gpu_record import columns

OURS, OURS_IN_PLACE = "fused", "fused in place"
LARGE_BYTES = 128 * 10**6  # of one operand
TARGET_PERCENT = 95.0


@dataclass(frozen=True)
class Figure:
    met: bool
    text: str


def figures(rows: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Against a copy at LARGE_BYTES and above, and against each peer at each shape: in place against in place, else out of place."""
    found = []
    for row in rows:
        if row["form"] in (OURS, OURS_IN_PLACE) and row["order"] == "contract" and row["bytes"] >= LARGE_BYTES:
            percent = row["percent_of_limit"]
            text = f"{row['form']}: {percent:.1f} % of a same-run copy at {_shape(row)}, target {TARGET_PERCENT:.0f} %"
            found.append(Figure(percent >= TARGET_PERCENT, text))
    ours = {(_shape(row), row["form"]): row["p50_us"] for row in rows if row["order"] == "contract"}
    for row in rows:
        if not row["peer"]:
            continue
        name = OURS_IN_PLACE if row["in_place"] else OURS
        if (mine := ours.get((_shape(row), name))) is not None:
            text = f"{name} {mine:.2f} us, {row['form']} {row['p50_us']:.2f} us: {row['p50_us'] / mine:.2f} times as fast at {_shape(row)}"
            found.append(Figure(mine <= row["p50_us"], text))
    return found


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    heading = ["tokens", "hidden", "cache", "launch", "form", "order", "p50 us", "p95 us", "GB/s", "% of copy"]
    rows = sorted(rows, key=lambda row: (row["hidden"], row["tokens"], row["cache"] != "warm"))
    lines = [
        [str(row["tokens"]), str(row["hidden"]), row["cache"], row["launch"], row["form"], row["order"]]
        + [f"{row[key]:.2f}" for key in ("p50_us", "p95_us")]
        + [f"{row['useful_GB_s']:.1f}", f"{row['percent_of_limit']:.1f}"]
        for row in rows
    ]
    return columns([heading, *lines])


def _shape(row: Mapping[str, Any]) -> str:
    return f"{row['tokens']} x {row['hidden']}, {row['cache']} cache"
