"""`bench`: its figures are what they are called, a wrong result is never a figure, and two files are compared against their spread.

Nothing here judges a speed. Functions named check_* run on every rank.
"""

import csv
import json
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tp_residual.bench import boundary as boundary_benchmark
from tp_residual.bench import collectives as collectives_benchmark
from tp_residual.bench.add_norm import measure_add_norm
from tp_residual.bench.boundary import link_passes, measure_boundary, passes
from tp_residual.bench.choice import crossovers, dispatch_table
from tp_residual.bench.collectives import bus_factor, measure_collectives, transports
from tp_residual.bench.compare import Comparison
from tp_residual.bench.machine import last_level_cache_bytes
from tp_residual.bench.request import COLLECTIVES, EXECUTORS, CollectivesRequest, Rules, ShapesRequest, parse_size
from tp_residual.bench.results import IDENTITY, Result
from tp_residual.bench.shapes import wrong_elements
from tp_residual.bench.timing import Candidate, Clock, Samples, percentile, ratio
from tp_residual.cli import main
from tp_residual.errors import VerificationFailed
from tp_residual.kernels import build, contract
from tp_residual.kernels.add_norm import add_norm
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.transport import TorchTransport, Transport
from tp_residual.residual import boundary as boundaries
from tp_residual.testing import run_ranks

QUICK = Rules(iters=4, warmup=1, seconds=1.0)
COMMON = ("--iters", "3", "--warmup", "1", "--max-seconds", "1")


def silent(*_: object) -> None: ...


# ---- bad input: a name, exit code 2, and no torch


BAD = {
    "collectives": "needs at least 2 ranks; add --tp 2",
    "collectives --tp 2 --min-bytes -4": "--min-bytes -4 must be at least 1",
    "collectives --tp 2 --min-bytes 2K --max-bytes 1K": "--max-bytes 1024 is less than --min-bytes 2048",
    "collectives --tp 2 --max-bytes 1X": "--max-bytes '1X' is not a size; write it as 4096, 64K, 64KB or 64KiB",
    "collectives --tp 2 --factor 1": "--factor 1 must be above 1",
    "collectives --tp 2 --factor nan": "--factor nan must be above 1",
    "collectives --tp 2 --check 0": "--check 0 must be at least 1",
    "collectives --tp 2 --root 2": "--root 2 is not one of the 2 ranks; use 0 to 1",
    "collectives --tp 2 --root -1": "--root -1 must be at least 0",
    "collectives --tp 2 --collective all": "--collective 'all' is not one of all_reduce",
    "collectives --tp 2 --transport mpi": "--transport 'mpi' is not one of gloo",
    "collectives --tp 2 --dtype int8": "argument --dtype: invalid choice: 'int8'",
    "collectives --tp 0": "--tp 0 must be at least 1",
    "bandwidth --bytes 3": "--bytes 3 must be at least 64",
    "bandwidth --gemm-size 0": "--gemm-size 0 must be at least 16",
    "bandwidth --iters 0": "--iters 0 must be at least 1",
    "bandwidth --warmup -1": "--warmup -1 must be at least 0",
    "bandwidth --max-seconds 0": "--max-seconds 0 is not between 0 and 1e6",
    "bandwidth --threads 4096": "--threads 4096 is not between 1 and",
    "bandwidth --tp 4096 --pin": "--pin: local ranks=4096 is more than",
    "boundary --tokens 1,x": "--tokens '1,x' is not a list of whole numbers",
    "boundary --tokens 0": "--tokens 0 must be at least 1",
    "boundary --hidden -8": "--hidden -8 must be at least 1",
    "boundary --boundary librery": "--boundary 'librery' is not one of reference, library, shared, symmetric, local",
    "boundary --tp 2 --tokens 3,99999999 --hidden 8,4096": "--tokens 99999999 --hidden 4096 on each of 2 ranks needs at least",
    "add-norm --tokens 99999999 --hidden 4096": " bytes and this machine has ",
    "bandwidth --gemm-size 999999": "--gemm-size 999999 needs at least 17999964000018 bytes and this machine has ",
    "bandwidth --bytes 999999G": "--bytes 1073740750258176 needs at least",
    "collectives --tp 2 --max-bytes 999999G": "--max-bytes 1073740750258176 on each of 2 ranks needs at least",
    "bandwidth --plot x.jpg": "--plot x.jpg does not end in one of .png, .pdf, .svg",
    "bandwidth --plot x": "--plot x does not end in one of .png, .pdf, .svg",
    "boundary --output /nowhere/x": "--output /nowhere/x cannot be written: No such file or directory (/nowhere)",
    "boundary --output /dev/null": "--output /dev/null is not a regular file; name one",
    "boundary --tune /": "--tune / is a folder; name a file in it",
    "boundary --output same --csv ./same": "two of --output, --csv, --plot and --tune name the same file",
    "add-norm --csv /proc/x": "--csv /proc/x cannot be written",
    "compare nothing.json nothing.json": "nothing.json cannot be read: No such file or directory",
    "compare empty.json empty.json --fail-over -1": "--fail-over -1 must be 0 or more percent",
    "compare empty.json empty.json": "empty.json is not JSON",
    "compare other.json other.json": "other.json has no what, hardware",
    "": "the following arguments are required: QUESTION",
}


def test_bad_input_is_named_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "other.json").write_text("[1]")
    script = """
import contextlib, io, json, sys
from tp_residual.cli import main
said = {}
for line in json.loads(sys.argv[1]):
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        try:
            code = main(["bench", *line.split()])
        except SystemExit as end:
            code = end.code
    said[line] = code, stderr.getvalue()
assert "torch" not in sys.modules
print(json.dumps(said))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(list(BAD))], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    for line, (code, stderr) in json.loads(done.stdout).items():
        assert code == 2 and BAD[line] in stderr and stderr.count("\n") == 1, (line, code, stderr)


def test_a_picture_without_matplotlib_is_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("tp_residual.bench.results.find_spec", lambda name: None)
    assert main(["bench", "bandwidth", "--plot", str(tmp_path / "x.png")]) == 2
    assert "--plot needs matplotlib, which is not installed; install tp_residual with its extra `plot`" in (
        capsys.readouterr().err
    )


def test_sizes_are_read_as_nccl_tests_reads_them() -> None:
    sizes = {"8": 8, "64K": 65536, "1M": 2**20, "2G": 2**31, "64KB": 64000, "1.5KiB": 1536, " 4 kb ": 4000}
    assert {text: parse_size("--bytes", text) for text in sizes} == sizes


def test_buffers_are_whole_chunks_for_every_rank() -> None:
    request = CollectivesRequest(min_bytes=1, max_bytes=100, factor=10, dtype="bfloat16")
    assert request.elements(3) == [3, 48]  # 1 and 10 B hold not even one element a rank of 3 more; 100 B hold 50
    assert CollectivesRequest(min_bytes=8, max_bytes=9, factor=1.01).elements(2) == [2]


# ---- arithmetic


def test_bandwidth_factors_of_nccl_tests_by_hand() -> None:
    by_hand = {
        "all_reduce": {2: 1.0, 4: 1.5, 8: 1.75},
        "all_gather": {2: 0.5, 4: 0.75, 8: 0.875},
        "reduce_scatter": {2: 0.5, 4: 0.75, 8: 0.875},
        "all_to_all": {2: 0.5, 4: 0.75, 8: 0.875},
        "broadcast": {2: 1.0, 4: 1.0, 8: 1.0},
        "p2p": {2: 1.0, 4: 1.0, 8: 1.0},
    }
    assert {name: {n: bus_factor(name, n) for n in (2, 4, 8)} for name in COLLECTIVES} == by_hand


def test_passes_of_a_boundary_by_hand() -> None:
    """Two ranks, TP: own partial in and out, the peer's in, residual in and out, normed out. SP: half of what is not the partial."""
    assert [passes("tp", n) for n in (1, 2, 4)] == [4, 6, 2 + 2 * 3 / 4 + 1 / 4 + 3]
    assert [passes("sp", n) for n in (2, 4)] == [2 + 1 / 2 + 3 / 2 + 1 / 2 + 1, 2 + 3 / 4 + 3 / 4 + 3 / 4 + 1]
    assert [link_passes(n) for n in (1, 2, 4)] == [0, 1, 1.5]


def test_percentiles_ratios_and_the_maximum_over_ranks() -> None:
    assert [percentile([4, 1, 3, 2], q) for q in (0, 50, 100)] == [1, 2.5, 4]
    assert percentile(range(101), 95) == 95 and percentile(range(101), 99) == 99
    on_time = [[0, 900, 5, 0], [10, 20, 30, 40]]
    samples = Samples.of([[1, 9, 3, 4], [5, 2, 8, 4]], on_time, calls=7)
    assert samples.us == (5, 9, 8, 4) and samples.late == 0 and samples.calls == 7
    assert samples.rank_p50_us == (3.5, 4.5) and samples.percentile(50) == 6.5
    late = Samples.of([[1, 9, 3, 4], [5, 2, 8, 4]], [[0, 0, 0, 0], [0, 5000, 0, 0]], calls=1)
    assert late.us == (5, None, 8, 4) and late.late == 1 and late.percentile(100) == 8
    crowded = Samples.of([[1, 9, 3, 4], [5, 2, 8, 4]], [[0, 0, 2000, 0], [0, 5000, 0, 0]], calls=1)
    assert crowded.us == (5, 9, 8, 4) and crowded.late == 2  # half: kept, and said
    # by round, not of the medians: 6 / 5, nothing, 4 / 8, 4 / 4
    limit = replace(late, us=(6, 1, 4, 4))
    assert ratio(limit, late) == 1.0


def test_a_result_is_right_in_every_bit_or_within_rounding() -> None:
    right = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    off = right.clone()
    off[1, 5] *= 1 + 2**-7  # the next bfloat16 at most
    wrong = right.clone()
    wrong[1] *= 1.05
    nan = right.clone()
    nan[2, 0] = float("nan")
    assert [wrong_elements(each, right, bitwise=True) > 0 for each in (right, off, wrong, nan)] == [
        False,
        True,
        True,
        True,
    ]
    assert [wrong_elements(each, right, bitwise=False) for each in (right, off, wrong, nan)] == [0, 0, 64, 64]
    assert wrong_elements(right[:2], right, bitwise=False) and wrong_elements(right.float(), right, bitwise=True)


# ---- the clock


def check_clock(group: TensorParallelGroup) -> tuple[str, Samples, list[int], list[int]]:
    clock = Clock(group, Rules(iters=9, warmup=0))
    started: list[int] = []

    def slow_on_rank_1() -> None:
        started.append(time.monotonic_ns())
        time.sleep(0.004 * group.rank)

    # a rank that comes 20 ms later to the sample must not begin it 20 ms later
    candidate = Candidate(slow_on_rank_1, before=lambda: time.sleep(0.02 * group.rank))
    samples = clock.interleaved({"one": candidate, "two": Candidate(silent)})
    everybody = clock.gather(started)
    return clock.released, samples["one"], *everybody


def test_ranks_begin_together_and_the_slowest_counts() -> None:
    for released, samples, first, second in run_ranks(2, check_clock):
        assert released == "spin"
        assert all(us is None or us >= 4000 for us in samples.us) and len(samples.us) == 9
        assert samples.rank_p50_us[0] < 4000 <= samples.rank_p50_us[1]
        apart = [abs(a - b) for a, b in zip(first, second, strict=True)]
        assert percentile(apart, 50) < 10e6, apart


def test_short_calls_are_taken_together_and_a_cold_cache_is_one_call() -> None:
    group = TensorParallelGroup.single()
    calls = []
    warm = Clock(group, Rules(iters=5, warmup=2))
    samples = warm.interleaved(
        {"short": Candidate(lambda: calls.append(0)), "long": Candidate(lambda: time.sleep(0.001))}
    )
    assert samples["short"].calls > 1 == samples["long"].calls
    assert len(calls) == 2 + 3 + 5 * samples["short"].calls
    cold = Clock(group, Rules(iters=5, warmup=2, cache="cold"))
    assert cold.interleaved({"short": Candidate(silent)})["short"].calls == 1
    assert cold._flush is not None  # and is written before each of 3 probes and 5 samples
    assert cold._flush.min() == cold._flush.max() == 3 + 5 and cold._flush.numel() >= 2 * last_level_cache_bytes()


# ---- collectives


def check_collectives(group: TensorParallelGroup, request: CollectivesRequest) -> tuple[list[Any], list[str]]:
    with transports(group) as available:
        return measure_collectives(Clock(group, QUICK), request, available, silent)


def test_every_collective_is_checked_timed_and_counted() -> None:
    request = CollectivesRequest(
        min_bytes=1000, max_bytes=1000, dtype="bfloat16", transports=("gloo",), root=1, check=2
    )
    (rows, notes), *others = run_ranks(3, check_collectives, request)
    assert all(other == (rows, notes) for other in others)  # every rank has the same samples
    assert any(note.startswith("nccl: the ranks are on cpu") for note in notes)
    found = {(row["collective"], row.get("pair"), row["place"], row["bytes"]): row for row in rows}
    kinds = {(collective, None, "out") for collective in COLLECTIVES if collective != "p2p"}
    kinds |= {(collective, None, "in") for collective in ("all_reduce", "broadcast", "all_gather", "reduce_scatter")}
    kinds |= {("p2p", pair, "out") for pair in ("0-1", "0-2", "1-2")}
    assert set(found) == {(*kind, 996) for kind in kinds}
    factors = {"all_reduce": 4 / 3, "broadcast": 1.0, "p2p": 1.0}
    for (collective, _, _, nbytes), row in found.items():
        assert row["algbw_GB_s"] == pytest.approx(nbytes / (row["p50_us"] * 1e-6) / 1e9, rel=1e-4)
        assert row["busbw_GB_s"] == pytest.approx(row["algbw_GB_s"] * factors.get(collective, 2 / 3))
        whole = collective in ("all_reduce", "broadcast", "p2p")
        assert row["count"] == nbytes // 2 // (1 if whole else 3)
        assert row["redop"] == ("sum" if collective in ("all_reduce", "reduce_scatter") else "none")
        assert row["root"] == (1 if collective == "broadcast" else -1)
        assert (row["wrong"], row["timing"], row["cache"], row["released"]) == (0, "host", "warm", "spin")
        kept = [us for us in row["samples_us"] if us is not None]
        assert len(row["samples_us"]) == 4 and row["samples"] == len(kept) and len(row["rank_p50_us"]) == 3
        assert row["p50_us"] == pytest.approx(percentile(kept, 50), rel=1e-4)
        assert row["p95_us"] == pytest.approx(percentile(kept, 95), rel=1e-4)
        assert row["p99_us"] == pytest.approx(percentile(kept, 99), rel=1e-4)
        assert row["limit_us"] > 0 and len(row["limit_samples_us"]) == 4


class Opened:
    """A wire that counts how often it was closed; for three ranks there is none."""

    closed = 0

    @classmethod
    def open(cls, group: TensorParallelGroup) -> "Opened | str":
        return cls() if group.size == 2 else "made for two"

    def close(self) -> None:
        self.closed += 1


def check_opened(group: TensorParallelGroup) -> tuple[object, bool, int]:
    collectives_benchmark.SharedTransport = Opened  # type: ignore[misc, assignment]
    with transports(group) as available:
        wire = available["shared"]
        assert available["symmetric"] == available["nccl"] == "the ranks are on cpu"
    active: Any = Opened()
    group.transport, ours = active, group.transport
    with transports(group) as available:
        kept = available["shared"] is active
    group.transport = ours
    return wire if isinstance(wire, str) else wire.closed, kept, active.closed  # type: ignore[attr-defined]


def test_wires_are_opened_and_closed_except_the_groups_own() -> None:
    assert run_ranks(2, check_opened) == [(1, True, 0)] * 2
    assert run_ranks(3, check_opened) == [("made for two", True, 0)] * 3


class WrongWire(TorchTransport):
    """Each collective with a fault of its kind, on rank 1 only or where no rank alone sees it."""

    @property
    def rank(self) -> int:
        return self.process_group.rank()

    def all_reduce(self, x: Tensor) -> Tensor:
        out = super().all_reduce(x)
        out[-1] += self.rank
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return super().reduce_scatter(x.flip(0))

    def all_gather(self, x: Tensor) -> Tensor:
        return super().all_gather(x).roll(x.shape[0])

    def all_to_all(self, x: Tensor) -> Tensor:
        return x.clone()

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        return super().broadcast(x, 0)


def check_wrong_wire(group: TensorParallelGroup) -> dict[str, str]:
    assert group.process_group is not None
    wire = WrongWire(group.process_group, group.limits, device=group.device)
    said = {}
    for collective in COLLECTIVES[:-1]:
        request = CollectivesRequest(min_bytes=64, max_bytes=64, collectives=(collective,), root=1)
        clock = Clock(group, QUICK)
        clock.gather = _numbered(clock, collective)  # type: ignore[method-assign]
        clock.interleaved = _never_timed  # type: ignore[method-assign]
        with pytest.raises(VerificationFailed) as error:
            measure_collectives(clock, request, {"wrong": wire}, silent)
        said[collective] = str(error.value)
    return said


def _numbered(clock: Clock, name: str) -> Callable[[Any], list[Any]]:
    """Keys of the side channel are used once: a clock of its own for each collective needs its own."""
    number = iter(range(100))

    def gather(value: Any) -> list[Any]:
        return [json.loads(text) for text in clock.group.share(f"{name} {next(number)}", json.dumps(value))]

    return gather


def _never_timed(*_: object) -> dict[str, Samples]:
    raise AssertionError("a wrong result was timed")


def test_a_wrong_transport_is_caught_on_every_rank_before_it_is_timed() -> None:
    first, second = run_ranks(2, check_wrong_wire)
    assert first == second and set(first) == set(COLLECTIVES[:-1])
    assert first["all_reduce"] == (
        "wrong result, nothing was timed: all_reduce over wrong, 64 B, out of place: wrong elements: 1 on rank 1"
    )


# ---- boundary


class Stranger(boundaries.PlainExecutor):
    """An executor that this benchmark has never heard of; it runs TP only, and is wrong by the last element where told to."""

    def __init__(self, *, wrong: bool) -> None:
        super().__init__("stranger", ordered=True)
        self.wrong = wrong

    def supports(self, request: boundaries.BoundaryRequest, group: TensorParallelGroup) -> str | None:
        return "it knows no shards" if request.sequence_parallel else None

    def run(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        new_residual, normed = super().run(*arguments)
        if self.wrong and arguments[1].rank == 1:
            normed[-1, -1] *= 1 + 2**-7
        return new_residual, normed


def check_boundary(group: TensorParallelGroup, wrong: bool) -> tuple[list[Any], list[str]]:
    boundaries.EXECUTORS["stranger"] = Stranger(wrong=wrong)
    only = ("stranger",) if wrong else ()
    request = ShapesRequest((1, 5), (24,), ("bfloat16",), only, operator=True)
    assert group.process_group is not None
    gloo = TorchTransport(group.process_group, group.limits, device=group.device)
    wires: dict[str, Transport | str] = {"gloo": gloo, "carrier pigeon": "none has come back"}
    if wrong:  # asked for by name, its missing mode is an error: measure the one it has
        boundary_benchmark.MODES = ("tp",)
    before = group.transport
    try:
        return measure_boundary(Clock(group, QUICK), request, wires, silent)
    finally:
        assert group.transport is before


def test_every_registered_executor_is_measured_where_it_runs() -> None:
    (rows, notes), other = run_ranks(2, check_boundary, False)
    assert (rows, notes) == other
    assert "carrier pigeon: none has come back" in notes and "stranger SP: it knows no shards" in notes
    found = {(row["executor"], row["mode"], row["call"], row["tokens"]) for row in rows}
    assert {("stranger", "tp", call, tokens) for call in ("executor", "operator") for tokens in (1, 5)} <= found
    both = {(name, mode, "executor", 5) for name in ("reference", "library") for mode in ("tp", "sp")}
    assert both <= found and not any(name == "stranger" and mode == "sp" for name, mode, *_ in found)
    for row in rows:
        assert row["order"] == ("fast" if row["executor"] == "library" else "contract") and row["transport"] == "gloo"
        payload = row["tokens"] * 24 * 2
        assert row["bytes"] == payload == row["link_bytes"]
        assert row["memory_bytes"] == payload * {"tp": 6, "sp": 5.5}[row["mode"]]
        assert row["memory_GB_s"] == pytest.approx(row["memory_bytes"] / row["p50_us"] / 1e3, rel=1e-4)


def test_a_group_of_one_has_boundaries_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    shapes = ("--tokens", "3", "--hidden", "8", "--threads", "1", "--dtype", "float32")
    assert main(["bench", "boundary", *shapes, *COMMON, "--output", str(path)]) == 0
    assert "local TP" in capsys.readouterr().out
    rows = {row["executor"]: row for row in json.loads(path.read_text())["rows"]}
    assert {"local", "reference", "library"} <= set(rows)
    for row in rows.values():
        assert (row["mode"], row["transport"], row["passes"], row["link_bytes"]) == ("tp", "none", 4, 0)
        assert row["memory_bytes"] == 4 * 3 * 8 * 4 and row["released"] == "alone"


def check_wrong_boundary(group: TensorParallelGroup) -> str:
    with pytest.raises(VerificationFailed) as error:
        check_boundary(group, True)
    return str(error.value)


def test_a_wrong_executor_is_caught_on_every_rank() -> None:
    said = run_ranks(2, check_wrong_boundary)
    assert said == ["wrong result, nothing was timed: stranger over gloo, tp, by the executor, 1 x 24 bfloat16: "
                    "wrong elements: 1 on rank 1"] * 2  # fmt: skip


def timed(executor: str, mode: str, tokens: int, us: float, **changed: Any) -> dict[str, Any]:
    row = {
        "executor": executor, "transport": "gloo", "call": "executor", "mode": mode, "tokens": tokens, "hidden": 8, "ranks": 2,
        "dtype": "float32", "order": "fast" if executor == "library" else "contract", "bytes": 32 * tokens, "p50_us": us,
    }  # fmt: skip
    return row | changed


def test_sp_crosses_over_where_it_stays_faster() -> None:
    rows = [timed("a", "tp", tokens, us) for tokens, us in ((1, 10), (2, 20), (4, 40), (8, 80))]
    rows += [timed("a", "sp", tokens, us) for tokens, us in ((1, 5), (2, 21), (4, 39), (8, 79))]
    rows += [timed("b", "tp", 1, 10), timed("b", "sp", 1, 10)]
    assert crossovers(rows) == {
        ("a", "gloo", "executor", 8, "float32"): 4,
        ("b", "gloo", "executor", 8, "float32"): None,
    }


def test_the_dispatch_table_takes_the_fastest_of_each_order() -> None:
    rows = [timed("reference", "tp", tokens, us) for tokens, us in ((1, 10), (4, 20), (16, 90), (64, 400))]
    rows += [timed("shared", "tp", tokens, us) for tokens, us in ((1, 11), (4, 19.5), (16, 60), (64, 300))]
    rows += [timed("library", "tp", tokens, us) for tokens, us in ((1, 1), (4, 30), (16, 100), (64, 500))]
    rows += [timed("library", "tp", 64, 0.1, call="operator"), timed("shared", "sp", 1, 3)]
    about = {"device": "cpu", "transport": "gloo", "world": 2, "dtype": "float32"}
    # 19.5 us against 20 at 4 tokens is no reason to change; 16 tokens are 512 B: sqrt(128 * 512) = 256, sqrt(32 * 128) = 64
    ordered = [{"up_to_bytes": 256, "executor": "reference"}, {"up_to_bytes": None, "executor": "shared"}]
    free = [{"up_to_bytes": 64, "executor": "library"}, {"up_to_bytes": None, "executor": "shared"}]
    assert dispatch_table(rows, "cpu") == [
        about | {"mode": "tp", "order": "contract", "ranges": ordered},
        about | {"mode": "tp", "order": "any", "ranges": free},
        about | {"mode": "sp", "order": "contract", "ranges": [{"up_to_bytes": None, "executor": "shared"}]},
        about | {"mode": "sp", "order": "any", "ranges": [{"up_to_bytes": None, "executor": "shared"}]},
    ]


# ---- add-norm, bandwidth, files and the command line


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n" and len(content) > 5000
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def check_files(folder: Path, what: str) -> list[dict[str, Any]]:
    """The rows of result.json, after a look at all that the command wrote there."""
    result = json.loads((folder / "result.json").read_text())
    assert result["what"] == what and set(result) == {
        "what", "hardware", "versions", "commit", "command", "settings", "notes", "rows"
    }  # fmt: skip
    assert result["command"].startswith(f"python -m tp_residual bench {what} ") and result["versions"]["torch"]
    assert result["hardware"]["cpu"] and result["hardware"]["usable_cores"] >= 1 and result["settings"]["warmup"] == 1
    rows = result["rows"]
    with (folder / "rows.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(rows)
    for line, row in zip(lines, rows, strict=True):
        flat = {key: str(value) for key, value in row.items() if not isinstance(value, list)}
        assert {key: value for key, value in line.items() if value} == flat
    identities = [tuple(row.get(key) for key in IDENTITY[what]) for row in rows]
    assert len(set(identities)) == len(rows)
    width, height = png_size(folder / "picture.png")
    assert 600 <= width <= 2000 and 400 <= height <= 2000
    return rows


def files(folder: Path) -> tuple[str, ...]:
    return (
        "--output", str(folder / "result.json"), "--csv", str(folder / "rows.csv"), "--plot", str(folder / "picture.png")
    )  # fmt: skip


def run_bench(*options: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tp_residual", "bench", *options], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100
    return done.stdout


def test_add_norm_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = ("--tokens", "3,40", "--hidden", "100", "--dtype", "float32", "--dtype", "bfloat16")
    assert main(["bench", "add-norm", *shapes, "--threads", "1", *COMMON, *files(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "add and norm, hidden 100, bfloat16" in out and max(map(len, out.splitlines())) <= 100
    rows = check_files(tmp_path, "add-norm")
    assert {(row["tokens"], row["dtype"]) for row in rows} == {(t, d) for t in (3, 40) for d in ("float32", "bfloat16")}
    for row in rows:
        size = {"float32": 4, "bfloat16": 2}[row["dtype"]]
        assert row["bytes"] == row["tokens"] * 100 * size and row["least_bytes"] == 4 * row["bytes"]
        # separate operations in fp32: add 3, square 2, mean 1, times the root 2, times the weight 2, widen and narrow 4
        by_hand = {"fused": 4, "fused, into": 4, "add, rms_norm": 5, "separate": 14 if size == 4 else 23}
        assert row["passes"] == by_hand[row["form"]] and row["form_bytes"] == row["passes"] * row["bytes"]
        assert row["useful_GB_s"] == pytest.approx(row["least_bytes"] / row["p50_us"] / 1e3, rel=1e-4)
        assert row["released"] == "alone" and row["ranks"] == 1


@pytest.mark.slow
def test_a_picture_is_what_its_name_says(tmp_path: Path) -> None:
    for name, begins in (("x.svg", b"<?xml"), ("x.PDF", b"%PDF")):
        shape = ("--tokens", "3", "--hidden", "8", "--threads", "1")
        assert main(["bench", "add-norm", *shape, *COMMON, "--plot", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(begins)


@pytest.mark.slow
def test_torch_compile_is_one_of_the_forms() -> None:
    out = run_bench("add-norm", "--tokens", "3", "--hidden", "8", "--threads", "1", "--compile", *COMMON)
    assert any(line.split()[:2] == ["torch.compile", "fast"] for line in out.splitlines())


def test_a_wrong_kernel_prints_no_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def off_by_a_bit(*operands: Any) -> tuple[Tensor, Tensor]:
        new, normed = contract.add(operands[0], operands[1], operands[0].dtype), operands[0].clone()
        return new, normed

    monkeypatch.setattr("tp_residual.bench.add_norm._add_then_norm", off_by_a_bit)
    path = tmp_path / "result.json"
    assert (
        main(["bench", "add-norm", "--tokens", "3", "--hidden", "8", "--threads", "1", *COMMON, "--output", str(path)])
        == 1
    )
    captured = capsys.readouterr()
    assert captured.out == "" and not path.exists()
    assert "wrong result, nothing was timed: add, rms_norm (fast), 3 x 8 bfloat16" in captured.err


def test_contract_order_must_agree_in_every_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_bit(*operands: Any, **options: Any) -> tuple[Tensor, Tensor]:
        new, normed = add_norm(*operands, **options)
        normed = normed.clone()
        normed[0, 0] *= 1 + 2**-7
        return new, normed

    monkeypatch.setattr("tp_residual.bench.add_norm.add_norm", one_bit)
    clock = Clock(TensorParallelGroup.single(), QUICK)
    with pytest.raises(VerificationFailed, match=r"fused \(contract\), 3 x 8 bfloat16: wrong elements: 1 on rank 0"):
        measure_add_norm(clock, ShapesRequest((3,), (8,)), silent)


def test_bandwidth_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--bytes", "64K", "--gemm-size", "32", "--threads", "1")
    assert main(["bench", "bandwidth", *sizes, *COMMON, *files(tmp_path)]) == 0
    assert "TFLOP/s" in capsys.readouterr().out
    rows = {(row["kernel"], row["dtype"]): row for row in check_files(tmp_path, "bandwidth")}
    moved = {"read": 1, "copy": 2, "add": 3, "triad": 3}
    assert set(rows) == {(kernel, "float32") for kernel in (*moved, "gemm", "launch")} | {("gemm", "bfloat16")}
    for kernel, times in moved.items():
        row = rows[kernel, "float32"]
        assert row["moved_bytes"] == times * 65536 and row["threads"] == 1
        assert row["GB_s"] == pytest.approx(row["moved_bytes"] / row["p50_us"] / 1e3, rel=1e-4)
        assert row["limit_us"] == pytest.approx(rows["copy", "float32"]["p50_us"] * times / 2, rel=1e-3)
    gemm = rows["gemm", "bfloat16"]
    assert gemm["flops"] == 2 * 32**3 and gemm["TFLOP_s"] == pytest.approx(
        gemm["flops"] / gemm["p50_us"] / 1e6, rel=1e-4
    )


@pytest.mark.slow
def test_collectives_from_the_command_line(tmp_path: Path) -> None:
    sizes = ("--tp", "2", "--min-bytes", "1K", "--max-bytes", "4K", "--transport", "gloo")
    which = ("--collective", "all_reduce", "--collective", "p2p")
    out = run_bench("collectives", *sizes, *which, *COMMON, *files(tmp_path))
    for text in (
        "all_reduce over gloo",
        "algbw",
        "busbw",
        "#wrong",
        "average busbw",
        "p2p over gloo",
        "released together by a spin",
    ):
        assert text in out
    rows = check_files(tmp_path, "collectives")
    assert {(row["collective"], row["place"], row["bytes"]) for row in rows} == {
        (*kind, size) for kind in (("all_reduce", "out"), ("all_reduce", "in"), ("p2p", "out")) for size in (1024, 4096)
    }


def test_boundary_from_the_command_line_writes_a_dispatch_table(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    shapes = ("--tp", "2", "--tokens", "1,6", "--hidden", "48", "--boundary", "reference", "--tune", str(table))
    out = run_bench("boundary", *shapes, *COMMON, *files(tmp_path))
    assert "boundary, hidden 48, bfloat16" in out and ": SP is " in out and "best" in out
    rows = check_files(tmp_path, "boundary")
    gloo = {(row["mode"], row["tokens"]) for row in rows if row["transport"] == "gloo"}
    assert gloo == {(mode, tokens) for mode in ("tp", "sp") for tokens in (1, 6)}
    written = json.loads(table.read_text())
    assert written["format"] == "tp_residual boundary table 1" and written["commit"] and written["hardware"]["cpu"]
    assert {"device": "cpu", "transport": "gloo", "world": 2, "dtype": "bfloat16", "mode": "tp", "order": "any",
            "ranges": [{"up_to_bytes": None, "executor": "reference"}]} in written["table"]  # fmt: skip


@pytest.mark.slow
def test_one_that_cannot_run_is_refused_with_its_reason_by_every_rank() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tp_residual", "bench", "collectives", "--tp", "2", "--transport", "nccl"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    assert done.stderr.count("cannot run here: the ranks are on cpu") == 2


def test_the_names_of_executors_are_those_that_are_registered() -> None:
    assert EXECUTORS == tuple(boundaries.EXECUTORS)


def test_without_compiled_kernels_the_fused_form_says_what_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    command = ["bench", "add-norm", "--tokens", "3", "--hidden", "8", "--threads", "1", *COMMON, "--output", str(path)]
    monkeypatch.setattr(build, "_result", lambda: build.BuildError("CXX=nonsense names no program"))
    assert main(command) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "not here: the compiled kernels, so that `fused` is plain torch: CXX=nonsense names no program" in out
    assert "fused (plain) contract" in out
    ran = {row["form"]: row["implementation"] for row in json.loads(path.read_text())["rows"]}
    assert ran == {"fused": "plain", "fused, into": "plain", "add, rms_norm": "torch", "separate": "torch"}
    monkeypatch.undo()
    if build.unavailable() is None:
        assert main(command) == 0
        assert "(plain)" not in capsys.readouterr().out
        assert json.loads(path.read_text())["rows"][0]["implementation"] == "cpu"


# ---- compare


def comparison(
    percent: float, spread: float, limit_percent: float = 0.0, limit_spread: float = 1.0
) -> tuple[str, float]:
    each = Comparison("x", 100.0, 100.0 + percent, percent, spread, limit_percent, limit_spread)
    return each.verdict, round(each.regression_percent, 1)


def test_verdicts() -> None:
    assert comparison(4, spread=5) == ("same", 0)
    assert comparison(20, spread=5) == ("slower", 20)
    assert comparison(-20, spread=5) == ("faster", 0)
    assert comparison(30, spread=5, limit_percent=28) == ("machine", 0)  # 1.6 % is left
    assert comparison(30, spread=5, limit_percent=60) == ("machine", 0)  # the other way: the limit lost more
    assert comparison(30, spread=5, limit_percent=10) == ("slower", 18.2)  # 1.3 / 1.1
    assert comparison(30, spread=5, limit_percent=28, limit_spread=40) == ("slower", 30)  # the limit did not move
    assert comparison(-30, spread=5, limit_percent=-28) == ("machine", 0)
    assert comparison(30, spread=5, limit_percent=-10) == ("slower", 30)  # of the two measures, the milder


def result(path: Path, times: dict[str, list[float | None]], limit: float = 10.0, **changed: Any) -> str:
    """An add-norm result with one row for each form, of which the samples are given."""
    rows = [
        {
            "form": form, "order": "fast", "tokens": 1, "hidden": 8, "dtype": "float32", "ranks": 1, "limit": "copy",
            "samples_us": samples, "limit_samples_us": [limit, limit * 1.01, limit * 0.99, limit][: len(samples)],
        }
        for form, samples in times.items()
    ]  # fmt: skip
    settings = {"ranks": 1, "threads": 1, "device": "cpu", "pin": False, "cache": "warm", "iters": len(rows)}
    made = Result("add-norm", {"cpu": "one", "gpus": []}, {"torch": "2"}, "abc", "bench", settings, rows)
    replace(made, **changed).write_json(str(path))
    return str(path)


def test_two_files_are_compared_against_their_spread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steady, wide = [100.0, 101.0, 99.0, 100.0], [60.0, 90.0, 110.0, None]
    old = result(tmp_path / "old.json", {"kept": steady, "noisy": wide, "worse": steady, "better": steady})
    # 90 -> 110 us is +22 %, and the quartiles of the noisy row are 25 us apart
    new = result(
        tmp_path / "new.json",
        {"kept": [101.0, 100.0, 99.0, 100.0], "noisy": [110.0, 80.0, 120.0, None], "worse": [131.0, 130.0, 129.0, 130.0],
         "better": [70.0, 71.0, 69.0, 70.0]},
    )  # fmt: skip
    assert main(["bench", "compare", old, new]) == 0
    out = capsys.readouterr().out
    verdicts = {line.split()[0]: (line.split()[3], line.split()[-1]) for line in out.splitlines() if "%" in line}
    assert verdicts == {"kept": ("+0.0", "same"), "noisy": ("+22.2", "same"), "worse": ("+30.0", "slower"),
                        "better": ("-30.0", "faster")}  # fmt: skip
    assert main(["bench", "compare", old, new, "--fail-over", "31"]) == 0
    capsys.readouterr()
    assert main(["bench", "compare", old, new, "--fail-over", "29"]) == 1
    captured = capsys.readouterr()
    assert (
        "1 of 4 rows are slower by more than 29 %; most of all worse: 30.0 %" in captured.err
        and "slower" in captured.out
    )
    slow_machine = result(
        tmp_path / "slow.json",
        {form: [130.0, 131.0, 129.0, 130.0] for form in ("kept", "noisy", "worse", "better")},
        13.0,
    )
    assert main(["bench", "compare", old, slow_machine, "--fail-over", "0"]) == 0
    assert capsys.readouterr().out.count("machine") == 4 + 1  # rows, and the line below the table


def test_damaged_files_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = result(tmp_path / "old.json", {"a": [1.0, 2.0, 3.0, 2.0]})
    fields = json.loads(Path(old).read_text())
    row = fields["rows"][0]
    damages: dict[str, dict[str, Any]] = {
        "row 0 has samples_us=None, not a list with times": {
            "rows": [{k: v for k, v in row.items() if k != "samples_us"}]
        },
        "row 0 has samples_us=[], not a list": {"rows": [row | {"samples_us": []}]},
        "row 0 has samples_us=[None], not a list": {"rows": [row | {"samples_us": [None]}]},
        "row 0 has '1' among its samples_us": {"rows": [row | {"samples_us": [1.0, "1"]}]},
        "row 0 has 0.0 among its limit_samples_us": {"rows": [row | {"limit_samples_us": [1.0, 0.0]}]},
        "row 0 has p50_us='fast', which is no time": {"rows": [row | {"p50_us": "fast"}]},
        "row 0 has tokens=[1], which is no name": {"rows": [row | {"tokens": [1]}]},
        "row 0 has limit=None": {"rows": [row | {"limit": None}]},
        "row 1 is 3, not an object": {"rows": [row, 3]},
        "rows is no list of measurements": {"rows": []},
        "settings is None, not an object": {"settings": None},
        "hardware is [], not an object": {"hardware": []},
    }
    for message, damage in damages.items():
        (tmp_path / "new.json").write_text(json.dumps(fields | damage))
        for files in ((old, str(tmp_path / "new.json")), (str(tmp_path / "new.json"), old)):
            assert main(["bench", "compare", *files]) == 2
            stderr = capsys.readouterr().err
            assert message in stderr and "measure again" in stderr and stderr.count("\n") == 1, (message, stderr)


def test_unlike_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times: dict[str, list[float | None]] = {"a": [1.0, 2.0, 3.0, 2.0]}
    old = result(tmp_path / "old.json", times)
    settings = {"ranks": 1, "threads": 1, "device": "cpu", "pin": False, "cache": "warm", "iters": 7}
    refused = {
        "hardware differ: cpu is one in the old file and two in the new one": {"hardware": {"cpu": "two", "gpus": []}},
        "settings differ: threads is 1 in the old file and 2 in the new one": {"settings": settings | {"threads": 2}},
        "the old file is a result of add-norm, the new one of bandwidth": {"what": "bandwidth"},
    }
    for message, changed in refused.items():
        assert main(["bench", "compare", old, result(tmp_path / "new.json", times, **changed)]) == 2
        assert message in capsys.readouterr().err
    assert main(["bench", "compare", old, result(tmp_path / "new.json", times, settings=settings)]) == 0  # more samples
    more = result(tmp_path / "new.json", times | {"b": [1.0, 1.0, 1.0, 1.0]})
    capsys.readouterr()
    assert main(["bench", "compare", old, more]) == 2
    assert "b, fast, tokens 1, hidden 8, float32, ranks 1 is in the new file only" in capsys.readouterr().err
    assert main(["bench", "compare", more, old]) == 2
    assert "is in the old file only; the new one has other shapes" in capsys.readouterr().err
