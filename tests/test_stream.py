"""The stream as a value: what may be done with it, what raises by name, and that watching or recomputing changes nothing."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tp_residual.errors import LayoutError
from tp_residual.kernels.contract import NormSpec
from tp_residual.parallel.blocks import parameter_blocks, sync_gradients
from tp_residual.parallel.collectives import partial_to_invariant, partial_to_token_shard
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.linear import ColumnParallelLinear, RowParallelLinear
from tp_residual.parallel.partial import Partial
from tp_residual.parallel.splits import Split
from tp_residual.residual.boundary import Boundary, Site
from tp_residual.residual.norms import RMSNorm
from tp_residual.residual.stream import Layout, Stream
from tp_residual.testing import expect_collectives, hostile_values, hostile_weights_, relative_error, run_ranks

HIDDEN, INNER, TOKENS = 12, 20, 5


class Block(nn.Module):
    """One Pre-Norm sublayer: norm, column, silu, row with bias."""

    def __init__(self, group: TensorParallelGroup, name: str, *, sequence_parallel: bool) -> None:
        super().__init__()
        features = Split.even(INNER, group.size)
        double = torch.float64
        self.norm = RMSNorm(
            HIDDEN, NormSpec(1e-5), group, partial_gradient=sequence_parallel, name=f"{name}.norm", dtype=double
        )
        self.up = ColumnParallelLinear(HIDDEN, {"up": features}, group, bias=True, dtype=double)
        self.down = RowParallelLinear(
            features, HIDDEN, group, bias=True, sequence_parallel=sequence_parallel, name=f"{name}.down", dtype=double
        )

    def forward(self, stream: Stream) -> Stream:
        x, stream = stream.read(self.norm)
        return stream.write(self.down(F.silu(self.up(x))))


def blocks_of(group: TensorParallelGroup, *, sequence_parallel: bool) -> nn.ModuleList:
    """Three blocks whose sharded weights are slices of the same whole."""
    modules = nn.ModuleList(Block(group, f"block{i}", sequence_parallel=sequence_parallel) for i in range(3))
    whole = nn.ModuleList(Block(TensorParallelGroup.single(), f"block{i}", sequence_parallel=False) for i in range(3))
    hostile_weights_(whole, seed=4)
    full = {block.name: block.parameter for block in parameter_blocks(whole)}
    with torch.no_grad():
        for block in parameter_blocks(modules):
            block.of(block.parameter).copy_(block.of_full(full[block.name]))
    return modules


def start(
    group: TensorParallelGroup, *, sequence_parallel: bool = False, tokens: int = TOKENS, requires_grad: bool = False
) -> Stream:
    boundary = Boundary(
        group, "reference", sequence_parallel=sequence_parallel, stream_dtype=torch.float64, output_dtype=torch.float64
    )
    value = hostile_values(tokens, HIDDEN, seed=1, rank=group.rank).requires_grad_(requires_grad)
    return Stream.start(Partial(value, group, "embed"), boundary)


# -- checkpointing


def checkpoint_body(group: TensorParallelGroup, sequence_parallel: bool) -> None:
    gradients = []
    for recompute in (False, True):
        modules = blocks_of(group, sequence_parallel=sequence_parallel)
        stream = start(group, sequence_parallel=sequence_parallel, requires_grad=True)
        assert stream.owed
        leaf = stream.owed[0].partial.value
        for block in modules:
            stream = checkpoint(block, stream, use_reentrant=False) if recompute else block(stream)
        y, _ = stream.read(modules[0].norm)
        y.backward(hostile_values(*y.shape, seed=9, rank=group.rank))
        sync_gradients(parameter_blocks(modules), group)
        gradients.append([leaf.grad, *(parameter.grad for parameter in modules.parameters())])
    for plain, recomputed in zip(*gradients, strict=True):
        assert plain is not None and recomputed is not None and plain.abs().max() > 0
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(sequence_parallel: bool) -> None:
    run_ranks(3, checkpoint_body, sequence_parallel)


# -- the value


@torch.no_grad()
def verbs_body(group: TensorParallelGroup) -> None:
    modules = blocks_of(group, sequence_parallel=True)
    for sequence_parallel in (False, True):
        # writing communicates nothing; two writes are one sum
        stream = start(group, sequence_parallel=sequence_parallel)
        x, stream = stream.read(modules[0].norm)
        with expect_collectives(group):
            first, second = modules[0].down(F.silu(modules[0].up(x))), modules[1].down(F.silu(modules[1].up(x)))
            both = stream.write(first).write(second)
        with expect_collectives(group, **({"reduce_scatter": 1} if sequence_parallel else {"all_reduce": 1})):
            both = both.complete()
        added = partial_to_invariant(first, tag="t") + partial_to_invariant(second, tag="t")
        before = Stream(stream.boundary, TOKENS, stream.residual).replicated()
        # 1e-14: the same sums in another order, fp64
        assert relative_error(both.replicated(), before + added) < 1e-14
        # a shard result stays this rank's tokens and gathers nothing
        if sequence_parallel:
            with expect_collectives(group):
                shard, _ = both.read(modules[0].norm, result="shard")
            whole, _ = Stream(both.boundary, TOKENS, both.residual).read(modules[0].norm)
            own = both.boundary.token_split(TOKENS).ranges[group.rank]
            assert torch.equal(shard, whole[slice(*own)])


def test_writes_are_local_and_pending_writes_are_one_collective() -> None:
    run_ranks(2, verbs_body)


@torch.no_grad()
def taps_body(group: TensorParallelGroup) -> None:
    for sequence_parallel in (False, True):
        modules = blocks_of(group, sequence_parallel=sequence_parallel)
        seen: list[tuple[Site, Partial | None, torch.Tensor, torch.Tensor | None]] = []
        watched, plain = (
            start(group, sequence_parallel=sequence_parallel),
            start(group, sequence_parallel=sequence_parallel),
        )
        watched = Stream(
            watched.boundary, watched.tokens, None, watched.owed, (lambda *call, seen=seen: seen.append(call),)
        )
        for block in modules:
            watched, plain = block(watched), block(plain)
        watched, plain = watched.complete(), plain.complete()
        assert watched.residual is not None and plain.residual is not None
        assert torch.equal(watched.residual, plain.residual)
        assert [str(site) for site, *_ in seen] == [
            "embed -> block0.norm", "block0.down -> block1.norm", "block1.down -> block2.norm", "block2.down -> raw",
        ]  # fmt: skip
        # what a tap sees is enough to check the boundary: residual after = residual before + completed update
        for (_, _, before, _), (_, partial, after, _) in itertools.pairwise(seen):
            assert partial is not None
            split = watched.boundary.token_split(TOKENS)
            update = (
                partial_to_token_shard(partial, split, tag="tap")
                if sequence_parallel
                else partial_to_invariant(partial, tag="tap")
            )
            assert relative_error(after, before + update) < 1e-14


def test_taps_see_every_boundary_and_change_none() -> None:
    run_ranks(2, taps_body)


def cut_body(group: TensorParallelGroup) -> None:
    """A pipeline stage sends (residual, tokens, layout); 6 tokens on two ranks are 3 rows each."""
    modules = blocks_of(group, sequence_parallel=True)
    sent = modules[0](start(group, sequence_parallel=True, tokens=6)).complete()
    assert sent.layout is Layout.TOKEN_SHARDED and sent.residual is not None and sent.residual.shape == (3, HIDDEN)
    received = Stream.resume(sent.residual, 6, sent.layout, sent.boundary)
    assert torch.equal(modules[1](received).complete().replicated(), modules[1](sent).complete().replicated())
    replicated = start(group).boundary
    with pytest.raises(
        LayoutError, match="the received residual is token_sharded, this boundary keeps its stream replicated"
    ):
        Stream.resume(sent.residual, 3, Layout.TOKEN_SHARDED, replicated)
    with pytest.raises(
        LayoutError, match=r"a replicated stream of 6 tokens holds 6 of them on rank . of 2, and this residual has 3"
    ):
        Stream.resume(sent.residual, 6, Layout.REPLICATED, replicated)


def test_layout_travels_with_the_stream() -> None:
    run_ranks(2, cut_body)


# -- misuse, by name


def misuse_body(group: TensorParallelGroup) -> None:
    modules = blocks_of(group, sequence_parallel=False)
    block = modules[0]
    stream = start(group)
    x, after = stream.read(block.norm)
    update = block.down(F.silu(block.up(x)))
    tensor = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)

    def refused(message: str, call) -> None:  # type: ignore[no-untyped-def]
        with expect_collectives(group), pytest.raises((LayoutError, AttributeError), match=message):
            call()

    refused(
        r"read\(block0.norm\) on a stream that read\(block0.norm\) has used already", lambda: stream.read(block.norm)
    )
    refused(r"write\(block0.down\) on a stream that read\(block0.norm\) has used already", lambda: stream.write(update))
    refused(r"Stream.write\(\) takes the Partial .* got a tensor of shape \[5, 12\]", lambda: after.write(tensor))
    refused(r"Stream.start\(\) takes the Partial", lambda: Stream.start(tensor, after.boundary))
    refused(
        r"partial_to_invariant\(\) takes the Partial .* must not be summed again",
        lambda: partial_to_invariant(tensor, tag="t"),
    )
    refused(r"\+ on the output of block0.down", lambda: update + tensor)
    refused(r"add on the output of block0.down", lambda: tensor + update)
    refused(r"\+ on the output of block0.down", lambda: update + 1)
    refused(r"rms_norm on the output of block0.down", lambda: F.rms_norm(update, (HIDDEN,)))
    refused(
        r"linear on the output of block0.down|ColumnParallelLinear\(up\) on the output of block0.down",
        lambda: block.up(update),
    )
    refused(r"\* on the output of block0.down", lambda: update * 2)
    refused(r"'float': the output of block0.down is a partial sum", lambda: update.float())
    refused(
        r"block0.down wrote 3 tokens to a stream of 5",
        lambda: after.write(Partial(update.value[:3], group, "block0.down")),
    )
    refused(
        r"block0.down wrote \[5, 7\] on cpu to a residual of \[5, 12\]",
        lambda: after.write(Partial(update.value[:, :7], group, "block0.down")),
    )
    other = TensorParallelGroup.single()
    refused("block0.down belongs to another group", lambda: after.write(Partial(update.value, other, "block0.down")))
    refused("they need the same shape and the same group", lambda: update + Partial(update.value[:3], group, "x"))
    written = after.write(update)
    refused("still owes the update of block0.down", written.replicated)
    refused(
        "residual dtype torch.float32 is not the stream's torch.float64",
        lambda: Stream(after.boundary, TOKENS, tensor.float()),
    )
    refused("takes 12 features on this rank and got 7", lambda: block.up(tensor[:, :7]))


def test_every_misuse_raises_by_name_before_any_collective() -> None:
    run_ranks(2, misuse_body)
