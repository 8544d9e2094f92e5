"""Two sides in turn, and what the pairs say. Nothing here knows a peer by name.

A round is one slice of each side, the other standing by, and between them a probe of the memory. Who is first changes with every
round. Both do the same work in a round, so that contexts are as long and counts can be compared; a ratio is of one pair, and its median of
all.
"""

import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tp_residual.bench import peers_prober
from tp_residual.bench.peers_side import Side, Work
from tp_residual.bench.results import Row
from tp_residual.errors import GenerationError

_PROBE_S = 0.15


class Prober:
    """As many processes as ranks, each with an array of its own, all reading at once when asked."""

    def __init__(self, processes: int, threads: int, nbytes: int) -> None:
        self._probers = [
            subprocess.Popen(
                [sys.executable, str(Path(peers_prober.__file__)), str(nbytes), str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
                process_group=0,
            )
            for _ in range(processes)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for prober in self._probers:
            prober.kill()
            prober.communicate()

    def read_gb_s(self) -> float:
        """GB/s of 1e9 bytes of all of them together."""
        for prober in self._probers:
            assert prober.stdin is not None
            prober.stdin.write(f"{_PROBE_S}\n")
        total = 0.0
        for prober in self._probers:
            assert prober.stdout is not None
            words = prober.stdout.readline().split()
            if len(words) != 2:
                raise GenerationError(
                    "a process that probes the memory has ended; nothing can be said of the read limit"
                )
            total += int(words[0]) / float(words[1]) / 1e9
        return total


@dataclass(frozen=True)
class Round:
    ours: Work
    peer: Work
    read_gb_s: float


def run_rounds(ours: Side, peer: Side, prober: Prober, rounds: int, work: Callable[[Side], Work]) -> list[Round]:
    """`rounds` pairs of work(ours) and work(peer)."""
    found = []
    for number in range(rounds):
        order = (ours, peer) if number % 2 == 0 else (peer, ours)
        done: dict[str, Work] = {}
        for side, other in (order, order[::-1]):
            if done:
                for each in order:
                    each.stop_if_spinning()
                read_gb_s = prober.read_gb_s()
            with other.idle():
                done[side.spec.name] = work(side)
        found.append(Round(done[ours.spec.name], done[peer.spec.name], read_gb_s))
    return found


def times_of(slice_s: float, each: Sequence[float], most: int) -> int:
    """How often something that takes `each` seconds on the sides fits a slice of the slower one; at least once."""
    return max(1, min(most, int(slice_s / max(each))))


def ratio_fields(ratios: Sequence[float]) -> Row:
    """ratios: one a pair, above 1 where we are faster."""
    return {
        "ratio_median": short(statistics.median(ratios)),
        "ratio_min": short(min(ratios)),
        "ratio_max": short(max(ratios)),
        "rounds": len(ratios),
    }


def throughput_row(rounds: Sequence[Round], weight_bytes: int | None, steps: int) -> Row:
    """Tokens a second of both sides, and the read limit of the same rounds.

    weight_bytes: that a step must read, at least; None where a step is not bound by them (prefill), and no percentage is given. Those of
    keys and values are not counted.
    """
    ours, theirs = [each.ours.rate for each in rounds], [each.peer.rate for each in rounds]
    limits = [each.read_gb_s for each in rounds]

    def percent(seconds: Callable[[Round], float]) -> float | None:
        if weight_bytes is None:
            return None
        return short(
            statistics.median(100 * weight_bytes * steps / seconds(each) / 1e9 / each.read_gb_s for each in rounds)
        )

    return {
        "ours": short(statistics.median(ours)),
        "peer_value": short(statistics.median(theirs)),
        **ratio_fields([mine / other for mine, other in zip(ours, theirs, strict=True)]),
        "steps": steps,
        "read_limit_gb_s": short(statistics.median(limits)),
        "percent_of_read_limit": percent(lambda each: each.ours.seconds),
        "peer_percent_of_read_limit": percent(lambda each: each.peer.seconds),
        "ours_samples": [short(rate) for rate in ours],
        "peer_samples": [short(rate) for rate in theirs],
        "read_limit_samples": [short(limit) for limit in limits],
    }


def start_row(ours: Sequence[float], theirs: Sequence[float]) -> Row:
    """Seconds to the first token, by pair; a ratio above 1 says that we were there first."""
    return {
        "ours": short(statistics.median(ours)),
        "peer_value": short(statistics.median(theirs)),
        **ratio_fields([other / mine for mine, other in zip(ours, theirs, strict=True)]),
        "ours_samples": [short(seconds) for seconds in ours],
        "peer_samples": [short(seconds) for seconds in theirs],
    }


def short(value: float) -> float:
    """Five significant digits, as in the other results."""
    return float(f"{value:.5g}")
