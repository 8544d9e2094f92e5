"""What do more ranks buy on one machine? `bench generate` at each tp size in turn, in processes of its own, round after round.

A speedup is the median over rounds of pairs: the machine's own speed changes for longer than a round of one size takes, and sizes that take
turns see the same of it. Imports no torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

import numpy as np

from tp_residual.bench.results import Result, Row
from tp_residual.errors import RequestError

FEWEST_ROUNDS = 3
_SAMPLES = ("samples_us", "limit_samples_us")
# what a row says once, however often it was measured: the median over rounds
_MEDIANS = (
    *("tokens_per_s", "TFLOP_s", "weight_GB_s", "percent_of_limit"),
    *(f"{wait}_p{q}_us" for wait in ("ttft", "itl") for q in (50, 95, 99)),
)

Key = tuple[str, int, int]


@dataclass
class Sizes:
    """What has been measured, by tp size; and why another has not."""

    results: dict[int, list[Result]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def measure_sizes(
    sizes: Sequence[int],
    rounds: int,
    run: Callable[[int], Result],
    refused: type[Exception],
    say: Callable[[str], None],
) -> Sizes:
    """`run(tp)` of each size in turn, forwards and backwards; a size that it refuses is a note, and asked no more.

    Raises RequestError when every size is refused.
    """
    found, left = Sizes(), list(sizes)
    for number in range(rounds):
        for size in left[:] if number % 2 == 0 else left[::-1]:
            say(f"tp={size}, round {number + 1} of {rounds}")
            try:
                result = run(size)
            except refused as error:
                found.notes.append(f"tp={size}: {error}")
                found.results.pop(size, None)
                left.remove(size)
            else:
                found.results.setdefault(size, []).append(result)
    if not left:
        raise RequestError(f"no tp size of {', '.join(map(str, sizes))} runs here: {'; '.join(found.notes)}")
    found.notes += dict.fromkeys(
        f"tp={size}: {note}" for size, results in found.results.items() for result in results for note in result.notes
    )
    return found


def merge(found: Sizes) -> list[Row]:
    """A row for each step, batch, prompt and size, with its speedup and efficiency against the smallest size that ran."""
    by_size = {size: [_by_key(result) for result in results] for size, results in sorted(found.results.items())}
    base_size = min(by_size)
    on_gpus = found.results[base_size][0].settings["device"] == "cuda"
    rows: list[Row] = []
    for key in by_size[base_size][0]:
        base = [rows_of[key] for rows_of in by_size[base_size]]
        for rounds in by_size.values():
            rows.append(_merged([rows_of[key] for rows_of in rounds], base, on_gpus=on_gpus))
    return rows


def _by_key(result: Result) -> dict[Key, Row]:
    return {(row["step"], row["batch"], row["prompt_tokens"]): row for row in result.rows}


def _merged(rounds: Sequence[Row], base: Sequence[Row], *, on_gpus: bool) -> Row:
    """base: the same of the smallest size, whose rounds lie beside these."""
    row = dict(rounds[0])
    for name in _SAMPLES:
        row[name] = [us for each in rounds for us in each[name]]
    for name in _MEDIANS:
        if name in row:
            row[name] = median(each[name] for each in rounds)
    for name in row:
        if name.endswith("_share"):
            known = [each[name] for each in rounds if each[name] is not None]
            row[name] = fmean(known) if len(known) == len(rounds) else None
    kept = [us for us in row["samples_us"] if us is not None]
    row |= {f"p{q}_us": float(np.percentile(np.asarray(kept), q)) for q in (50, 95, 99)}
    row["limit_us"] = float(np.median([us for us in row["limit_samples_us"] if us is not None]))
    row["rank_p50_us"] = [median(each) for each in zip(*(each["rank_p50_us"] for each in rounds), strict=True)]
    row["samples"], row["late_samples"] = len(kept), sum(each["late_samples"] for each in rounds)
    pairs = [theirs["p50_us"] / ours["p50_us"] for theirs, ours in zip(base, rounds, strict=True)]
    speedup = median(pairs)
    return row | {
        "rounds": len(rounds),
        "speedup": speedup,
        "speedup_min": min(pairs),
        "speedup_max": max(pairs),
        "efficiency": speedup * _places(base[0], on_gpus) / _places(row, on_gpus),
        "against_ranks": base[0]["ranks"],
        "round_p50_us": [each["p50_us"] for each in rounds],
    }


def _places(row: Mapping[str, int], on_gpus: bool) -> int:
    """What it computes on: a GPU a rank, or so many cores, of which more ranks of fewer threads take no more."""
    return row["ranks"] * (1 if on_gpus else row["threads"])
