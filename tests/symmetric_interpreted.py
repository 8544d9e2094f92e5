"""The symmetric-memory kernels in Triton's interpreter, one process a rank: run by test_symmetric.py with TRITON_INTERPRET=1.

Ranks share a mapped file where GPUs would map each other's memory. Processes and not threads, since the interpreter keeps the program's
number in a global; addresses and never tensor arguments, since it copies the storage of each argument onto itself after a launch.
"""

import importlib.util
import itertools
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

from tp_residual.errors import CollectiveError, UserError
from tp_residual.kernels import symmetric_triton
from tp_residual.kernels.contract import AddNormSpec, NormSpec, add_norm
from tp_residual.kernels.symmetric_geometry import Workspace, row_geometry
from tp_residual.kernels.symmetric_triton import REPORT_WORDS, STATE_WORDS, Peers
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.partial import Partial
from tp_residual.parallel.splits import Split
from tp_residual.parallel.symmetric import SymmetricTransport
from tp_residual.residual import boundary as boundary_module
from tp_residual.residual.boundary import Boundary
from tp_residual.residual.norms import RMSNorm
from tp_residual.residual.stream import Stream
from tp_residual.residual.symmetric import SymmetricExecutor
from tp_residual.testing import expect_collectives, run_ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PIECE_BYTES = 2048  # so that a few rows already take several launches
NEVER_S = 60.0  # of the interpreter's time, in which a poll counts as a millisecond


def yield_while_polling() -> None:
    """Let a rank that polls give way to those it waits for: there are more ranks than cores."""
    operate = interpreter_builder.create_atomic_rmw

    def operate_and_yield(*arguments: object) -> object:
        result = operate(*arguments)
        os.sched_yield()
        return result

    interpreter_builder.create_atomic_rmw = operate_and_yield


yield_while_polling()


def file_for(folder: Path, world: int, piece_bytes: int = PIECE_BYTES) -> str:
    """A zeroed file with a workspace for each rank."""
    path = folder / f"memory-{world}-{piece_bytes}"
    with open(path, "wb") as file:
        file.truncate(Workspace(world, piece_bytes).nbytes * world)
    return str(path)


def map_peers(path: str, rank: int, world: int, *, limit_s: float = NEVER_S, piece_bytes: int = PIECE_BYTES) -> Peers:
    space = Workspace(world, piece_bytes)
    memory = torch.from_file(path, shared=True, size=space.nbytes * world, dtype=torch.uint8)
    table = memory.data_ptr() + torch.arange(world) * space.nbytes
    state, report = torch.zeros(STATE_WORDS, dtype=torch.int64), torch.zeros(REPORT_WORDS, dtype=torch.int64)
    return Peers(space, rank, table, state, report, int(limit_s * 1e9), memory)


def values(shape: Sequence[int], dtype: torch.dtype, *seed: object) -> Tensor:
    """Magnitudes spread so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(random.Random(repr(seed)).getrandbits(40))
    powers = torch.randint(-3, 3, tuple(shape), generator=generator)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * 10.0**powers).to(dtype)


def rank_order_sum(summands: Sequence[Tensor]) -> Tensor:
    total = summands[0].float()
    for summand in summands[1:]:
        total = total + summand.float()
    return total


def same_bits(x: Tensor, y: Tensor) -> bool:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.dtype == y.dtype and torch.equal(x.view(integer), y.view(integer))


def check_call(
    peers: Peers,
    tokens: int,
    hidden: int,
    spec: AddNormSpec,
    dtype: torch.dtype,
    form: str,
    seed: object,
    *,
    with_residual: bool = True,
    with_bias: bool = False,
    module: ModuleType = symmetric_triton,
    max_blocks: int = 64,
) -> bool:
    """Whether one call gives the contract's bits. form: one of FORMS. Outputs start as NaN, so that a row left out shows."""
    world, rank = peers.space.world, peers.rank
    xs = [values((tokens, hidden), dtype, seed, "x", peer) for peer in range(world)]
    residual = values((tokens, hidden), spec.stream_dtype, seed, "residual") if with_residual else None
    bias = values((hidden,), dtype, seed, "bias") if with_bias else None
    norm = spec.norm
    weight = None if norm is None else values((hidden,), spec.output_dtype, seed, "weight")
    norm_bias = values((hidden,), spec.output_dtype, seed, "norm bias") if norm and norm.kind == "layer" else None
    expected, expected_y = add_norm(
        spec, residual, rank_order_sum(xs), update_bias=bias, weight=weight, norm_bias=norm_bias
    )
    sharded, gather = form in ("gathered", "shard"), form == "gathered"
    itemsize = max(dtype.itemsize, spec.stream_dtype.itemsize, spec.output_dtype.itemsize)
    geometry = row_geometry(tokens, hidden, itemsize, peers.space, two_shot=form != "one-shot", max_blocks=max_blocks)
    if sharded:
        own = slice(*Split.ceil_chunks(tokens, world).ranges[rank])
        residual = None if residual is None else residual[own].contiguous()
        expected = expected[own]
        if not gather and expected_y is not None:
            expected_y = expected_y[own]
    stream = torch.full_like(expected, float("nan"))
    normed = None if expected_y is None else torch.full_like(expected_y, float("nan"))
    module.reduce_add_norm(
        peers, geometry, spec, xs[rank], stream, normed, sharded=sharded, gather=gather and norm is not None,
        residual=residual, bias=bias, weight=weight, norm_bias=norm_bias,
    )  # fmt: skip
    assert peers.expired() is None, peers.expired()
    return same_bits(stream, expected) and (expected_y is None or same_bits(normed, expected_y))


FORMS = ("one-shot", "two-shot", "gathered", "shard")
RMS, LAYER = NormSpec(1e-5), NormSpec(1e-6, "layer")


def requests() -> Iterator[tuple[AddNormSpec, torch.dtype, bool, bool]]:
    """(spec, dtype of the partial sums, with a residual, with a bias)"""
    yield AddNormSpec(BF16, BF16, RMS), BF16, True, False
    yield AddNormSpec(FP32, BF16, RMS), BF16, True, True
    yield AddNormSpec(FP32, FP32, LAYER), FP32, True, False
    yield AddNormSpec(FP16, FP16, NormSpec(1e-5, weight_offset=1.0)), FP16, True, False
    yield AddNormSpec(BF16, BF16, NormSpec(1e-5, weight_after_cast=True), round_update=BF16), BF16, True, True
    yield AddNormSpec(BF16, BF16, LAYER), BF16, False, False
    yield AddNormSpec(BF16, BF16), BF16, True, False
    yield AddNormSpec(FP32, FP32), FP32, False, False


def contract_body(group: TensorParallelGroup, path: str, thorough: bool) -> list[object]:
    """Every kind of request, ragged sizes, several launches, calls of different shapes in a row, late ranks: what went wrong."""
    peers, wrong = map_peers(path, group.rank, group.size), []
    late = random.Random(group.rank)
    sizes = ((1, 24), (3, 100), (2, 64), (5, 33), (2, 1), (3, 128))
    calls = [
        (form, request, sizes[(i + j) % len(sizes)])
        for i, form in enumerate(FORMS)
        for j, request in enumerate(requests())
        if thorough or i == j % len(FORMS)
    ]
    # several launches each
    calls += [(form, (AddNormSpec(FP32, FP32, RMS), FP32, True, False), (5, 128)) for form in FORMS]
    if thorough:
        calls += [(form, next(requests()), size) for form in FORMS for size in ((13, 64), (9, 100))]
    for number, (form, (spec, dtype, with_residual, with_bias), (tokens, hidden)) in enumerate(calls):
        if late.random() < 0.3:
            time.sleep(0.02)
        if not check_call(
            peers, tokens, hidden, spec, dtype, form, number, with_residual=with_residual, with_bias=with_bias
        ):
            wrong.append((form, tokens, hidden, spec, dtype))
    return wrong


@pytest.mark.parametrize(
    ("world", "thorough"),
    [
        (2, False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((4, False), (2, True), (3, True), (4, True))),
    ],
)
def test_every_form_is_the_contract_bit_for_bit(tmp_path: Path, world: int, thorough: bool) -> None:
    assert run_ranks(world, contract_body, file_for(tmp_path, world), thorough, timeout_s=100) == [[]] * world


def test_rounding_comes_after_the_sum_and_the_residual(tmp_path: Path) -> None:
    run_ranks(2, one_rounding_body, file_for(tmp_path, 2))


def one_rounding_body(group: TensorParallelGroup, path: str) -> None:
    """256 + 0.75 + 0.5 is 257.25, which bf16 rounds to 258; with the sum rounded before the residual joins it would be 256."""
    peers = map_peers(path, group.rank, 2)
    x = torch.full((1, 8), 256.0 if group.rank == 0 else 0.75).bfloat16()
    residual = torch.full((1, 8), 0.5).bfloat16()
    stream = torch.full_like(x, float("nan"))
    geometry = row_geometry(1, 8, 2, peers.space, two_shot=False)
    symmetric_triton.reduce_add_norm(
        peers, geometry, AddNormSpec(BF16, BF16), x, stream, None, sharded=False, gather=True, residual=residual
    )
    assert stream.tolist() == [[258.0] * 8]


# -- the protocol, and that these tests would notice if it were another


def mutated(folder: str, name: str, *edits: tuple[str, str]) -> ModuleType:
    """The kernels with `edits` in their text, and with rank 0 held up for STALL_S after each first meeting."""
    text = Path(symmetric_triton.__file__).read_text()
    stall = "    if PHASE == 0 and rank == 0:\n        time.sleep(STALL_S)\n    return late > 0\n"
    for old, new in (*edits, ("import torch\n", "import time\nimport torch\n"), ("    return late > 0\n", stall)):
        assert old in text, f"{old!r} is not in the kernels any more"
        text = text.replace(old, new)
    path = Path(folder, f"mutant_{name}.py")
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


_MEET = "_meet(table_ptr, state_ptr, report_ptr, rank, epoch, limit, 0, FLAGS, WORLD, PEERS)"
_BEGIN = "_begin(state_ptr, limit_ns)\n"
_SUM = "for peer in tl.static_range(1, WORLD):\n        total += tl.load(_at(table_ptr, "
_MUTANTS: dict[str, tuple[tuple[str, str], ...]] = {
    "unchanged": (),
    "no_first_wait": (("    while (late > 0) & (waited", "    late = late * PHASE\n    while (late > 0) & (waited"),),
    "no_second_wait": (
        ("    while (late > 0) & (waited", "    late = late * (1 - PHASE)\n    while (late > 0) & (waited"),
    ),
    "epoch_reused": (("    tl.store(state_ptr + blocks, epoch,", "    tl.store(state_ptr + blocks, epoch * 0,"),),
    "one_slot": (("(epoch % 2)", "(epoch * 0)"),),
    "programs_count_alone": (
        ("mask=blocks % tl.num_programs(0) == tl.program_id(0)", "mask=blocks == tl.program_id(0)"),
    ),
    "signal_before_data": ((_BEGIN, f"{_BEGIN}    late = {_MEET}\n"),),
    "rank_order_reversed": ((f"{_SUM}peer,", f"{_SUM}WORLD - peer,"),),
}


_QUICK_MUTANTS = ("unchanged", "signal_before_data")


def protocol_body(group: TensorParallelGroup, path: str, folder: str, name: str) -> list[int]:
    """Which of a fixed sequence of calls went wrong on this rank. Rank 1 is late to some, rank 0 is held up within others."""
    rank, world = group.rank, group.size
    peers, wrong = map_peers(path, rank, world), []
    module = mutated(folder, f"{name}_{rank}", *_MUTANTS[name])
    # (form, tokens, programs at most, rank 1 is late, rank 0 is held up): few rows, so that nothing but the protocol keeps ranks together
    calls = [
        ("one-shot", 1, 64, False, False),
        ("one-shot", 2, 64, True, True),
        ("one-shot", 2, 1, False, False),
        ("one-shot", 1, 64, False, True),
        ("one-shot", 1, 64, True, False),
        ("two-shot", world, 64, False, True),
        ("gathered", world, 64, False, False),
    ]
    for number, (form, tokens, max_blocks, late, held_up) in enumerate(calls):
        module.STALL_S = 0.5 * held_up
        if rank == 1:
            time.sleep(0.3 * late)
        if not check_call(
            peers, tokens, 16, AddNormSpec(FP32, FP32, RMS), FP32, form, number, module=module, max_blocks=max_blocks
        ):
            wrong.append(number)
    return wrong


@pytest.mark.parametrize(
    "name",
    [*_QUICK_MUTANTS, *(pytest.param(name, marks=pytest.mark.slow) for name in _MUTANTS if name not in _QUICK_MUTANTS)],
)
def test_the_protocol_is_needed(tmp_path: Path, name: str) -> None:
    world = 3 if name == "rank_order_reversed" else 2
    wrong = run_ranks(world, protocol_body, file_for(tmp_path, world), str(tmp_path), name)
    assert any(wrong) == (name != "unchanged"), wrong


def absent_body(group: TensorParallelGroup, path: str) -> str:
    """Rank 1 makes one call and then no more: what the others are told."""
    peers = map_peers(path, group.rank, group.size, limit_s=0.1)
    spec = AddNormSpec(BF16, BF16, RMS)
    assert check_call(replace(peers, limit_ns=int(60e9)), 2, 16, spec, BF16, "two-shot", 0)
    if group.rank == 1:
        return ""
    x, weight = values((2, 16), BF16, group.rank), values((16,), BF16, "weight")
    wire = SymmetricTransport(peers, group.transport, crossover_bytes=1e9)
    stream, normed = wire.reduce_add_norm(spec, x, weight=weight)
    assert stream.isnan().all() and normed is not None and normed.isnan().all()
    with pytest.raises(CollectiveError) as caught:
        wire.all_reduce(x)
    # no wait once one has expired: this limit would outlast the test
    peers, geometry = replace(peers, limit_ns=int(1e15)), row_geometry(2, 16, 2, peers.space, two_shot=True)
    for sharded in (False, True):
        stream, normed = torch.zeros(1 + (not sharded), 16).bfloat16(), torch.zeros(2, 16).bfloat16()
        symmetric_triton.reduce_add_norm(
            peers, geometry, spec, x, stream, normed, sharded=sharded, gather=True, weight=weight
        )
        assert normed.isnan().all()
    words, out = torch.zeros(4, dtype=torch.int32), torch.zeros(group.size, 4, dtype=torch.int32)
    symmetric_triton.all_gather(peers, words, out)
    assert out.view(FP32).isnan().all() and out.view(BF16).isnan().all()
    return str(caught.value)


def test_a_peer_that_never_comes_is_named_and_its_sums_are_nan(tmp_path: Path) -> None:
    said = run_ranks(3, absent_body, file_for(tmp_path, 3))
    for rank in (0, 2):
        assert f"rank {rank} of 3 waited 0.1 s for rank 1 to bring its summands of call 2" in said[rank]
        assert "the last that rank 1 brought were of call 1 " in said[rank]


# -- the wire and the boundary on top of it


WIRE_BYTES = 1 << 16


def wire_body(group: TensorParallelGroup, path: str) -> None:
    rank, world = group.rank, group.size
    peers = map_peers(path, rank, world, piece_bytes=WIRE_BYTES)
    for crossover in (0.0, 1e9):
        wire = SymmetricTransport(peers, group.transport, crossover_bytes=crossover)
        for dtype, shape in itertools.product((BF16, FP32), ((3, 24), (0, 24), (5,), (2, 3, 4), (5000,))):
            xs = [values(shape, dtype, "reduce", peer) for peer in range(world)]
            assert same_bits(wire.all_reduce(xs[rank]), rank_order_sum(xs).to(dtype)), (dtype, shape)
    for shape in ((4, 24), (0, 24), (2,), (3, 5), (1, 2, 3)):
        xs = [values((shape[0] * world, *shape[1:]), BF16, "scatter", peer) for peer in range(world)]
        expected = rank_order_sum(xs).to(BF16)[rank * shape[0] : (rank + 1) * shape[0]]
        assert same_bits(wire.reduce_scatter(xs[rank]), expected), shape
    for dtype, shape in itertools.product((BF16, FP32, torch.int64, torch.uint8), ((3, 5), (1,), (0, 4), (2, 9000))):
        xs = [(100 * values(shape, torch.float64, "gather", peer)).long().to(dtype) for peer in range(world)]
        assert same_bits(wire.all_gather(xs[rank]), torch.cat(xs)), (dtype, shape)
    for dtype in (torch.float64, torch.int64):  # left to the library
        xs = [torch.arange(2 * world).to(dtype) + peer for peer in range(world)]
        assert torch.equal(wire.all_reduce(xs[rank]), sum(xs))
        assert torch.equal(wire.reduce_scatter(xs[rank]), sum(xs)[2 * rank : 2 * rank + 2])
    assert torch.equal(wire.broadcast(torch.tensor([rank]), 1), torch.tensor([1]))
    assert wire.all_to_all(torch.arange(world) + 10 * rank).tolist() == [10 * peer + rank for peer in range(world)]
    with pytest.raises(UserError, match="hidden=16385 is above the 16384"):
        wire.reduce_add_norm(AddNormSpec(BF16, BF16), torch.zeros(1, 16385, dtype=BF16))


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_wire(tmp_path: Path, world: int) -> None:
    run_ranks(world, wire_body, file_for(tmp_path, world, WIRE_BYTES))


def boundary_body(group: TensorParallelGroup, path: str) -> None:
    """Two writes to a stream and their gradients, through this executor and through `reference`, in both layouts."""
    peers = map_peers(path, group.rank, group.size)
    executor = SymmetricExecutor(lambda group: SymmetricTransport(peers, group.transport, crossover_bytes=200))
    boundary_module.EXECUTORS["symmetric"] = executor
    for dtype, stream_dtype, sequence_parallel, tokens in (
        (FP32, FP32, False, 3),
        (FP32, FP32, True, 3),
        (BF16, FP32, False, 1),
        (BF16, BF16, True, 1),
        (BF16, BF16, False, 0),
        (BF16, BF16, True, 0),
    ):
        found = []
        for choice in ("reference", "symmetric"):
            module = RMSNorm(24, RMS, group, partial_gradient=sequence_parallel, dtype=dtype)
            with torch.no_grad():
                module.weight.copy_(values((24,), FP32, "weight"))
            boundary = Boundary(
                group,
                choice,
                sequence_parallel=sequence_parallel,
                stream_dtype=stream_dtype,
                output_dtype=dtype,
                norms=[RMS],
            )
            assert boundary.executor.name == choice
            x, bias = values((tokens, 24), dtype, group.rank).requires_grad_(), values((24,), dtype, "bias")
            sums = {"reduce_scatter": 2, "all_gather": 3} if sequence_parallel else {"all_reduce": 2}
            with expect_collectives(group, **sums):
                _, stream = Stream.start(Partial(x, group, "embed"), boundary).read(module)
                y, stream = stream.write(Partial(x * 3, group, "mlp", bias)).read(module)
                again, stream = stream.read(module)
            (y.float().sin().sum() + again.float().square().sum()).backward()
            found.append((stream.residual.detach(), y.detach(), again.detach(), x.grad, module.weight.grad))
        for reference, symmetric in zip(*found, strict=True):
            assert same_bits(reference, symmetric), (dtype, stream_dtype, sequence_parallel, tokens)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_boundary_is_reference_bit_for_bit(tmp_path: Path, world: int) -> None:
    run_ranks(world, boundary_body, file_for(tmp_path, world))


# -- several ranks in one launch


def simulated_body(group: TensorParallelGroup, path: str) -> None:
    """This process runs only its own part of a launch that holds all ranks: the interpreter would run the others one after another."""
    rank, world = group.rank, group.size
    set_index, set_dimensions = interpreter_builder.set_grid_idx, interpreter_builder.set_grid_dim
    interpreter_builder.set_grid_idx = lambda x, y, z: set_index(x, rank, z)
    interpreter_builder.set_grid_dim = lambda x, y, z: set_dimensions(x, world, z)
    peers = map_peers(path, 0, world)
    peers = replace(peers, state=peers.state.repeat(world, 1), report=peers.report.repeat(world, 1))
    spec = AddNormSpec(BF16, BF16, RMS)
    for tokens, form in itertools.product((1, 5), FORMS):
        sharded, gather = form in ("gathered", "shard"), form != "shard"
        xs = values((world, tokens, 24), BF16, form, tokens)
        residual, weight = values((tokens, 24), BF16, form, "residual"), values((24,), BF16, "weight")
        expected, expected_y = add_norm(spec, residual, rank_order_sum(list(xs)), weight=weight)
        chunk = -(-tokens // world)
        if sharded:
            padded = torch.nn.functional.pad(residual, (0, 0, 0, chunk * world - tokens), value=float("nan"))
            stacked, own = padded.view(world, chunk, 24), slice(*Split.ceil_chunks(tokens, world).ranges[rank])
        else:
            stacked, own = residual.repeat(world, 1, 1), slice(0, tokens)
        stream, normed = symmetric_triton.simulate(
            peers,
            spec,
            xs,
            two_shot=form != "one-shot",
            sharded=sharded,
            gather=gather,
            residual=stacked,
            weight=weight,
            max_blocks=2,
        )
        assert normed is not None and expected_y is not None
        mine, rest = stream[rank][: own.stop - own.start], torch.cat([stream[:rank], stream[rank + 1 :]])
        assert same_bits(mine, expected[own]) and rest.isnan().all(), form
        assert (peers.state != 0).any(1).tolist() == [peer == rank for peer in range(world)]
        y = expected_y if gather else expected_y[own]
        assert same_bits(normed[rank][: y.shape[0]], y), form


@pytest.mark.slow
def test_ranks_simulated_in_one_launch(tmp_path: Path) -> None:
    run_ranks(3, simulated_body, file_for(tmp_path, 3))
