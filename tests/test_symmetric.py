"""Boundaries over symmetric memory: sizes, refusals, the kernels in the interpreter, what they compile to, and real peers."""

import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from compile_triton import Compiled

from tp_residual.kernels import symmetric_geometry, symmetric_triton
from tp_residual.kernels.contract import AddNormSpec, NormSpec
from tp_residual.kernels.symmetric_geometry import (
    MAX_BLOCKS,
    MAX_WORLD,
    Workspace,
    crossover_bytes,
    flat_geometry,
    row_geometry,
)
from tp_residual.kernels.symmetric_triton import REPORT_WORDS, STATE_WORDS, Peers
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.residual.request import BoundaryRequest
from tp_residual.residual.symmetric import SymmetricExecutor
from tp_residual.testing import run_ranks

HERE = Path(__file__).parent
SPEC = NormSpec(1e-5)


# -- sizes


@pytest.mark.parametrize("world", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("two_shot", [False, True])
def test_launches_take_each_row_once_and_stay_in_the_workspace(world: int, two_shot: bool) -> None:
    space = Workspace(world, 1 << 20)
    for tokens in (0, 1, world, 1000, 4099):
        for hidden, itemsize in ((1, 4), (100, 2), (4096, 2), (16384, 4)):
            geometry = row_geometry(tokens, hidden, itemsize, space, two_shot=two_shot)
            rows = -(-tokens // world) if two_shot else tokens
            taken = [row for piece in geometry.pieces for row in range(piece.first, piece.first + piece.count)]
            assert taken == list(range(rows))
            assert geometry.block >= hidden > geometry.block // 2
            for piece in geometry.pieces:
                assert 1 <= piece.blocks <= min(piece.count, MAX_BLOCKS)
                nbytes = piece.count * hidden * itemsize
                assert nbytes * (world if two_shot else 1) <= space.piece_bytes
                assert nbytes <= space.result_bytes or not two_shot


def test_the_parts_of_a_workspace_do_not_overlap() -> None:
    for world in range(1, MAX_WORLD + 1):
        space = Workspace(world, 1024)
        parts = [(0, 2 * 1024), (space.results, 2 * space.result_bytes), (space.flags, 2 * MAX_BLOCKS * world * 8)]
        ends = [start + nbytes for start, nbytes in parts]
        assert [start for start, _ in parts[1:]] == ends[:2] and space.nbytes >= ends[2]
        assert space.result_bytes * world >= space.piece_bytes
        assert all(n % 16 == 0 for n in (space.results, space.result_bytes, space.flags, space.nbytes))


def test_a_gather_takes_each_element_once() -> None:
    space = Workspace(2, 1024)
    for length in (0, 1, 256, 257, 5000):
        pieces = flat_geometry(length, 64, 4, space)
        assert [e for p in pieces for e in range(p.first, p.first + p.count)] == list(range(length))
        assert all(p.count * 4 <= 1024 and (p.blocks - 1) * 64 < p.count for p in pieces)


def test_two_shot_begins_where_its_second_meeting_is_paid_back() -> None:
    assert crossover_bytes(2) == math.inf
    assert crossover_bytes(4) == pytest.approx(1e6) and crossover_bytes(8) == pytest.approx(285_714, abs=1)
    for world in range(3, 17):  # both sides of the formula's own equation
        size = crossover_bytes(world, 3e-6, 1e11)
        assert (world - 1) * size / 1e11 == pytest.approx(3e-6 + 2 * (world - 1) / world * size / 1e11)


def test_sizes_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="world=17 is not between 1 and 16"):
        Workspace(17)
    with pytest.raises(ValueError, match="piece_bytes=100 is not a positive multiple of 128"):
        Workspace(2, 100)
    with pytest.raises(ValueError, match="piece_bytes=128 cannot hold a row of 64 x 2 bytes for 2 ranks"):
        row_geometry(2, 64, 2, Workspace(2, 128), two_shot=True)


# -- refusals


def request(dtype: torch.dtype = torch.float32) -> BoundaryRequest:
    return BoundaryRequest(True, 1, SPEC, "gathered", False, dtype, torch.float32)


def refusal_body(group: TensorParallelGroup) -> tuple[str | None, str | None]:
    executor = SymmetricExecutor()
    return executor.supports(request(), group), executor.supports(request(torch.float64), group)


def test_the_executor_says_why_it_cannot_run() -> None:
    for device, dtype in run_ranks(2, refusal_body):
        assert device == "the ranks' device is cpu, not CUDA"
        assert dtype == "float64 is not one of float32, bfloat16, float16"
    assert SymmetricExecutor().supports(request(), TensorParallelGroup.single()) == "a group of one has no peers"


def open_body(group: TensorParallelGroup) -> object:
    from tp_residual.parallel.symmetric import open_symmetric

    if group.rank == 1:
        group.device = torch.device("cuda", 0)  # only this rank could, so all must hear that rank 0 cannot
        group.processes = (group.processes[0], replace(group.processes[1], host="elsewhere"))
    return open_symmetric(group)


def test_all_ranks_hear_the_same_refusal() -> None:
    assert run_ranks(2, open_body) == ["rank 0: its device is cpu, not a CUDA device"] * 2


# -- the kernels, in the interpreter


def interpreted(*arguments: str) -> None:
    """In a process of its own: Triton reads the variable when a kernel is decorated."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "symmetric_interpreted.py", *arguments],
        cwd=HERE,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_interpreted_kernels() -> None:
    interpreted()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_interpreted_kernels_thoroughly() -> None:
    interpreted("-m", "slow")


# -- what they compile to

FORMS = {
    "one-shot": dict(two_shot=False, sharded=False, gather=True),
    "two-shot": dict(two_shot=True, sharded=False, gather=True),
    "gathered": dict(two_shot=True, sharded=True, gather=True),
    "shard": dict(two_shot=True, sharded=True, gather=False),
}


def peers_of(world: int) -> Peers:
    words = [torch.zeros(n, dtype=torch.int64) for n in (world, STATE_WORDS, REPORT_WORDS)]
    return Peers(Workspace(world), 0, *words, limit_ns=60 * 10**9)


@cache
def compiled(
    form: str, arch: int, hidden: int, world: int, dtype: torch.dtype, norm: NormSpec | None = SPEC
) -> Compiled:
    peers, x = peers_of(world), torch.zeros(1, hidden, dtype=dtype)
    options = FORMS[form]
    geometry = row_geometry(256, hidden, dtype.itemsize, peers.space, two_shot=options["two_shot"])
    calls: list[tuple[Any, dict[str, Any]]] = []
    recorder = replace(peers)
    object.__setattr__(recorder, "run", lambda kernel, piece, warps, arguments: calls.append((kernel, arguments)))
    symmetric_triton.reduce_add_norm(
        recorder, geometry, AddNormSpec(dtype, dtype, norm), x, x, None if norm is None else x,
        sharded=options["sharded"], gather=options["gather"], residual=x, weight=None if norm is None else x[0],
    )  # fmt: skip
    kernel, arguments = calls[0]
    return Compiled(kernel, peers.arguments(geometry.pieces[0]) | arguments, arch, **peers.options(geometry.warps))


def check_flags(kernel: Compiled, meetings: int) -> None:
    """Every access to a flag is of system scope: a release of the epoch, and acquires when it is first read and in each turn."""
    assert (
        kernel.count_ptx(r"atom\.global\.sys\.release\.exch\.b64|atom\.global\.release\.sys\.exch\.b64") == meetings * 2
    )
    assert kernel.count_ptx(r"atom\.global\.(sys\.acquire|acquire\.sys)\.add\.u64") == meetings * 2
    narrow = [line for line in re.findall(r"\b(?:atom|red)\.global[\w.]+", kernel.ptx) if ".sys" not in line]
    assert all("cas" in line for line in narrow), narrow  # this rank's own note that it has failed
    assert kernel.count_ptx(r"ld\.global\.nc") == 0  # peers write what the non-coherent cache would keep


def check_accesses(kernel: Compiled, stack: int = 0) -> None:
    assert kernel.stack <= stack, "spills"
    assert stack or kernel.count_sass(r"\b(LDL|STL)\b") == 0
    assert kernel.count_sass(r"\bLDG?\.E\.[\w.]*128") and kernel.count_sass(r"\bSTG?\.E\.[\w.]*128")
    assert kernel.count_sass(r"\b(LD|ST)G?\.E\.[\w.]*(U16|S16|U8)") == 0, "accesses one element wide"
    assert kernel.count_ptx(r"\bfma\.") == 0


@pytest.mark.parametrize(("form", "arch"), [*((form, 90) for form in FORMS), ("one-shot", 80), ("gathered", 80)])
def test_compiled(form: str, arch: int) -> None:
    kernel = compiled(form, arch, 4096, 8, torch.bfloat16)
    check_flags(kernel, 2 if FORMS[form]["gather"] and FORMS[form]["two_shot"] else 1)
    check_accesses(kernel)


def test_only_division_and_root_use_fused_multiply_add() -> None:
    """Their correctly rounded forms are made of it. Without a norm there is none; with one, no more for a longer row."""
    assert compiled("one-shot", 90, 4096, 8, torch.bfloat16, None).count_sass("FFMA") == 0
    short, long = (compiled("one-shot", 90, hidden, 8, torch.bfloat16) for hidden in (4096, 8192))
    assert 0 < long.count_sass("FFMA") <= short.count_sass("FFMA")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hidden", [576, 2880, 8192, 16384])
def test_compiled_everywhere(arch: int, dtype: torch.dtype, hidden: int) -> None:
    for form in FORMS:
        for world in (2, 8, 16):
            # some of those with the most registers keep up to four numbers, of the whole program and not of a row, in memory
            check_accesses(compiled(form, arch, hidden, world, dtype), stack=16)


def test_compiled_gather() -> None:
    peers, x = peers_of(8), torch.zeros(4096, dtype=torch.int32)
    calls: list[tuple[Any, Any, int, dict[str, Any]]] = []
    object.__setattr__(peers, "run", lambda *call: calls.append(call))
    symmetric_triton.all_gather(peers, x, x)
    kernel, piece, warps, arguments = calls[0]
    gather = Compiled(kernel, peers.arguments(piece) | arguments, 90, **peers.options(warps))
    check_flags(gather, 1)
    check_accesses(gather)


# -- real peers


@pytest.mark.multi_gpu
@pytest.mark.timeout(600)
def test_real_peers() -> None:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"{count} CUDA devices; needs 2")
    size = min(count, 8, symmetric_geometry.MAX_WORLD)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={size}",
            str(HERE / "multi_gpu_symmetric.py"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
