"""Moves between layouts: each against its written adjoint, compositions under gradcheck, sums bit for bit, misuse by
name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tp_residual.errors import LayoutError
from tp_residual.parallel.collectives import (
    invariant_to_column_input,
    invariant_to_last_dim_shard,
    invariant_to_token_shard,
    last_dim_shard_to_column_input,
    last_dim_shard_to_invariant,
    partial_to_invariant,
    partial_to_last_dim_shard,
    partial_to_token_shard,
    summed,
    summed_shard,
    token_shard_to_column_input,
    token_shard_to_invariant,
)
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.partial import Partial
from tp_residual.parallel.splits import Split
from tp_residual.testing import expect_collectives, hostile_layouts, hostile_values, relative_error


@dataclass(frozen=True)
class Move:
    """A move and its meaning: what all ranks put in and what each gets out, forward and backward.

    Values by rank; `cut(x, rank)` is the rank's slice. kinds: the collective of forward and of backward, if any.
    """

    run: Callable[..., Tensor]
    dim: int
    takes: str  # "whole" (the same everywhere), "partial", "shard"
    forward: Callable[..., Tensor]
    backward: Callable[..., Tensor]
    kinds: tuple[str | None, str | None]
    ordered: bool = True  # whether it sums in one direction, so that it takes `ordered`


def own(values, rank, cut):
    return values[rank]


def own_slice(values, rank, cut):
    return cut(values[rank], rank)


def total(values, rank, cut):
    return in_rank_order(values)


def slice_of_total(values, rank, cut):
    return cut(in_rank_order(values), rank)


def in_rank_order(values):
    out = values[0].clone()
    for value in values[1:]:
        out = out + value
    return out


def joined(dim):
    return lambda values, rank, cut: torch.cat(values, dim)


def rows(run, *rest, **options):
    return Move(run, 0, *rest, **options)


def columns(run, *rest, **options):
    return Move(run, 1, *rest, **options)


def summing(move):
    return lambda x, split, group, ordered: move(Partial(x, group, "test"), split, tag="move", ordered=ordered)


def plain(move):
    return lambda x, split, group, ordered: move(x, split, group, tag="move")


def gathering(move):
    return lambda x, split, group, ordered: move(x, split, group, tag="move", ordered=ordered)


AR, RS, AG = "all_reduce", "reduce_scatter", "all_gather"
MOVES = {
    "invariant_to_column_input": rows(
        lambda x, split, group, ordered: invariant_to_column_input(x, group, tag="move", ordered=ordered),
        "whole", own, total, (None, AR),
    ),
    "partial_to_invariant": rows(
        lambda x, split, group, ordered: partial_to_invariant(Partial(x, group, "test"), tag="move", ordered=ordered),
        "partial", total, own, (AR, None),
    ),
    "token_shard_to_column_input": rows(
        gathering(token_shard_to_column_input), "shard", joined(0), slice_of_total, (AG, RS)
    ),
    "token_shard_to_invariant": rows(plain(token_shard_to_invariant), "shard", joined(0), own_slice, (AG, None)),
    "partial_to_token_shard": rows(summing(partial_to_token_shard), "partial", slice_of_total, joined(0), (RS, AG)),
    "invariant_to_token_shard": rows(plain(invariant_to_token_shard), "whole", own_slice, joined(0), (None, AG)),
    "last_dim_shard_to_column_input": columns(
        gathering(last_dim_shard_to_column_input), "shard", joined(1), slice_of_total, (AG, RS)
    ),
    "last_dim_shard_to_invariant": columns(
        plain(last_dim_shard_to_invariant), "shard", joined(1), own_slice, (AG, None)
    ),
    "partial_to_last_dim_shard": columns(
        summing(partial_to_last_dim_shard), "partial", slice_of_total, joined(1), (RS, AG)
    ),
    "invariant_to_last_dim_shard": columns(
        plain(invariant_to_last_dim_shard), "whole", own_slice, joined(1), (None, AG)
    ),
}  # fmt: skip


def splits_of(size):
    """Uneven, with empty shards at the tail and in the middle, even, and nothing at all."""
    hole = Split(4, ((0, 4),) if size == 1 else ((0, 2), *((2, 2),) * (size - 2), (2, 4)))
    return [Split.ceil_chunks(5, size), Split.even(7, size), Split.even(2, size), hole, Split.ceil_chunks(0, size)]


def check_moves(group):
    """Every move x split x order x memory layout of the input and of the incoming gradient."""
    for name, move in MOVES.items():
        for number, split in enumerate(splits_of(group.size)):
            for ordered in (False, True):
                check_move(group, name, move, split, seed=number, ordered=ordered)


def check_move(group, name, move, split, seed, ordered):
    def cut(x, rank):
        start, stop = split.ranges[rank]
        return x.narrow(move.dim, start, stop - start)

    ranks = range(group.size)
    shape = (split.total, 3) if move.dim == 0 else (3, split.total)
    inputs = [hostile_values(*shape, seed=seed, rank=0 if move.takes == "whole" else rank) for rank in ranks]
    if move.takes == "shard":
        inputs = [cut(x, rank).contiguous() for rank, x in enumerate(inputs)]
    expected = move.forward(inputs, group.rank, cut)
    out_shapes = [move.forward(inputs, rank, cut).shape for rank in ranks]
    gradients = [hostile_layouts(hostile_values(*out_shapes[rank], seed=seed + 100, rank=rank)) for rank in ranks]
    layouts = hostile_layouts(inputs[group.rank])
    exact = ordered or group.size == 2  # two summands have one order
    for layout in ("strided",) if ordered else gradients[0]:
        where = f"{name} {split.sizes} ordered={ordered} {layout}"
        x = layouts[layout if layout in ("transposed", "sliced", "strided") else "sliced"].requires_grad_()
        before = x.detach().clone()
        kinds = [{} if kind is None or group.size == 1 else {kind: 1} for kind in move.kinds]
        with expect_collectives(group, **kinds[0]):
            y = move.run(x, split, group, ordered)
        assert_same(y.detach(), expected, exact, f"{where}: forward")
        incoming = gradients[group.rank][layout]
        kept = incoming.clone()
        with expect_collectives(group, **kinds[1]):
            (d_x,) = torch.autograd.grad(y, x, incoming)
        wanted = move.backward([gradients[rank][layout].contiguous() for rank in ranks], group.rank, cut)
        assert_same(d_x, wanted, exact, f"{where}: backward")
        assert torch.equal(x.detach(), before), f"{where}: the input was written to"
        assert torch.equal(incoming, kept), f"{where}: the incoming gradient was written to"
        x.grad = None
    x = inputs[group.rank].clone().requires_grad_()
    move.run(x, split, group, ordered).sum().backward()  # an expanded gradient, straight from torch
    ones = [torch.ones(out_shapes[rank], dtype=torch.float64) for rank in ranks]
    assert_same(x.grad, move.backward(ones, group.rank, cut), True, f"{name} {split.sizes}: sum().backward()")


def assert_same(value, reference, exact, where):
    assert value.shape == reference.shape, f"{where}: {list(value.shape)} instead of {list(reference.shape)}"
    error = relative_error(value.reshape(1, -1), reference.reshape(1, -1))
    assert error <= (0 if exact else 1e-14), f"{where}: relative error {error:.1e}"


@pytest.mark.parametrize("tp_size", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_every_move_and_its_written_adjoint(ranks, tp_size):
    ranks(tp_size, check_moves)


# -- derivatives: invariant in, invariant out, so that every rank may check in lock-step


def through_all_ranks(group, x):
    """invariant -> column input -> partial -> invariant."""
    weight = hostile_values(x.shape[1], 4, seed=1, rank=group.rank)
    h = torch.tanh(invariant_to_column_input(x, group, tag="in") @ weight)
    return partial_to_invariant(Partial(h @ weight.T, group, "test"), tag="out", ordered=True)


def through_token_shards(group, x):
    """invariant -> token shard -> column input -> partial -> token shard -> invariant."""
    split = Split.ceil_chunks(x.shape[0], group.size)
    weight = hostile_values(x.shape[1], 4, seed=2, rank=group.rank)
    shard = torch.tanh(invariant_to_token_shard(x, split, group, tag="slice"))
    h = torch.tanh(token_shard_to_column_input(shard, split, group, tag="in") @ weight)
    shard = partial_to_token_shard(Partial(h @ weight.T, group, "test"), split, tag="out")
    return token_shard_to_invariant(shard * shard, split, group, tag="gather")


def through_column_shards(group, x):
    """invariant -> last-dim shard -> column input -> partial -> last-dim shard -> invariant."""
    split = Split.even(x.shape[1], group.size)
    weight = hostile_values(x.shape[1], 4, seed=3, rank=group.rank)
    shard = torch.tanh(invariant_to_last_dim_shard(x, split, group, tag="slice"))
    h = torch.tanh(last_dim_shard_to_column_input(shard, split, group, tag="in", ordered=True) @ weight)
    shard = partial_to_last_dim_shard(Partial(h @ weight.T, group, "test"), split, tag="out")
    return last_dim_shard_to_invariant(shard * shard, split, group, tag="gather")


def check_derivatives(group):
    for function in (through_all_ranks, through_token_shards, through_column_shards):
        torch.manual_seed(0)  # gradcheck draws its directions from it: the same on all ranks
        x = hostile_values(4, 3, seed=4).requires_grad_()
        name = function.__name__
        run = partial(function, group)
        assert torch.autograd.gradcheck(run, (x,), nondet_tol=0.0), name
        assert torch.autograd.gradgradcheck(run, (x,), nondet_tol=0.0, gen_non_contig_grad_outputs=True), name


def test_first_and_second_derivatives(ranks):
    ranks(3, check_derivatives)  # four tokens: 2, 2 and none


def check_saved_values(group):
    """exp saves its output: a sum in place would double its gradient without an error."""
    x = hostile_values(4, 3, seed=1, rank=group.rank).requires_grad_()
    y = x.exp()
    kept = y.detach().clone()
    gradient = hostile_values(4, 3, seed=2)
    for ordered in (False, True):
        (d_x,) = torch.autograd.grad(
            partial_to_invariant(Partial(y, group, "exp"), tag="sum", ordered=ordered), x, gradient, retain_graph=True
        )
        assert torch.equal(d_x, gradient * x.exp()) and torch.equal(y, kept)


def test_what_autograd_saved_is_not_written_to(ranks):
    ranks(2, check_saved_values)


# -- sums


def check_ordered_sums(group):
    """Bitwise the rank-order sum, whole and scattered, on either side of the size from which a gather is replaced."""
    reversed_differs = False
    for tokens in (*range(10), 33):
        for hidden in (7, 1024) if tokens == 33 else (7,):
            for dtype in (torch.float32, torch.bfloat16):
                values = [
                    hostile_values(tokens, hidden, seed=tokens, rank=rank, dtype=dtype) for rank in range(group.size)
                ]
                reference = in_rank_order([value.float() for value in values])
                reversed_differs |= not torch.equal(in_rank_order([value.float() for value in values[::-1]]), reference)
                where = f"{tokens} tokens x {hidden} {dtype}"
                x = values[group.rank]
                with expect_collectives(group, all_reduce=1):
                    assert torch.equal(summed(group, x, "sum", ordered=True), reference), where
                for dim, total in ((0, tokens), (1, hidden)):
                    for split in (Split.ceil_chunks(total, group.size), Split.even(total, group.size)):
                        start, stop = split.ranges[group.rank]
                        with expect_collectives(group, reduce_scatter=1):
                            shard = summed_shard(group, x, "sum", dim, split, ordered=True)
                        assert torch.equal(shard, reference.narrow(dim, start, stop - start)), f"{where} {split.sizes}"
                rounded = partial_to_invariant(Partial(x, group, "test"), tag="sum", ordered=True)
                assert rounded.dtype == dtype and torch.equal(rounded, reference.to(dtype)), where
    assert reversed_differs or group.size == 2  # else these data could not show a wrong order


@pytest.mark.parametrize("tp_size", [2, 3, 4, 8])
def test_ordered_sums_are_bitwise_the_rank_order_sum(ranks, tp_size):
    ranks(tp_size, check_ordered_sums)


def check_16_bit(group):
    """(256, 1, 1, 1) is 260 when summed in fp32; 256 when every step is rounded to bf16."""
    for big in range(group.size):
        x = torch.full((33, 9), 256.0 if group.rank == big else 1.0, dtype=torch.bfloat16)
        split, columns = Split.ceil_chunks(33, group.size), Split.even(9, group.size)
        for ordered in (False, True):
            for y in (
                partial_to_invariant(Partial(x, group, "test"), tag="sum", ordered=ordered),
                partial_to_token_shard(Partial(x, group, "test"), split, tag="sum", ordered=ordered),
                partial_to_last_dim_shard(Partial(x, group, "test"), columns, tag="sum", ordered=ordered),
            ):
                assert y.dtype == torch.bfloat16 and (y == 260).all(), (big, ordered, y.unique())
        both = Partial(x, group, "first") + Partial(x, group, "second")
        assert both.value.dtype == torch.float32 and (partial_to_invariant(both, tag="sum") == 518).all()


def test_16_bit_summands_are_summed_in_fp32(ranks):
    ranks(4, check_16_bit)


def check_non_finite(group):
    x = hostile_values(5, 4, seed=0, rank=group.rank, dtype=torch.float32)
    if group.rank == 1:
        x[1, 2] = float("nan")
    x[3, 3] = float("inf") if group.rank == 0 else float("-inf")
    x[4, 0] = float("inf") if group.rank == 2 else x[4, 0]
    for ordered in (False, True):
        y = partial_to_invariant(Partial(x, group, "test"), tag="sum", ordered=ordered)
        assert y[1, 2].isnan() and y[3, 3].isnan() and y[4, 0] == float("inf"), y
        assert y.isfinite().sum() == 5 * 4 - 3
        whole = last_dim_shard_to_invariant(x, Split.even(4 * group.size, group.size), group, tag="gather")
        assert whole[1].isnan().nonzero().flatten().tolist() == [6]


def test_non_finite_values_stay_where_they_are(ranks):
    ranks(3, check_non_finite)


def check_bias(group):
    """Added once, after the sum; in a column-scattered result, this rank's columns of it."""
    values = [hostile_values(5, 7, seed=1, rank=rank) for rank in range(group.size)]
    bias = 100 * hostile_values(7, seed=2)
    split, columns = Split.ceil_chunks(5, group.size), Split.even(7, group.size)
    partial = Partial(values[group.rank], group, "test", bias)
    whole = in_rank_order(values) + bias
    assert_same(partial_to_invariant(partial, tag="sum"), whole, False, "invariant")
    assert_same(
        partial_to_token_shard(partial, split, tag="sum"), whole[slice(*split.ranges[group.rank])], False, "tokens"
    )
    assert_same(
        partial_to_last_dim_shard(partial, columns, tag="sum"),
        whole[:, slice(*columns.ranges[group.rank])],
        False,
        "columns",
    )
    assert_same(partial_to_invariant(partial + partial, tag="sum"), 2 * whole, False, "two updates")


@pytest.mark.parametrize("tp_size", [1, 3])
def test_the_bias_joins_once(ranks, tp_size):
    ranks(tp_size, check_bias)


# -- operators and misuse


def check_operators(group):
    """Schema and fake of each operator: a compiler must see the shapes that are true, empty shards included."""
    for split in splits_of(group.size)[2:]:
        full = hostile_values(split.total, 3, seed=0, rank=group.rank, dtype=torch.float32)
        shard = full[slice(*split.ranges[group.rank])].clone()
        arguments = (group.handle, group.rank, "op", 0, list(split.sizes), True)
        for name, x in {
            "invariant_to_column_input": full,
            "partial_to_invariant": full,
            "partial_to_shard": full,
            "invariant_to_shard": full,
            "shard_to_column_input": shard,
            "shard_to_invariant": shard,
        }.items():
            operator = getattr(torch.ops.tp_residual, name).default
            for value in (x, hostile_layouts(x)["transposed"]):
                torch.library.opcheck(operator, (value, *arguments), test_utils=("test_schema", "test_faketensor"))


def test_operators_tell_the_compiler_the_truth(ranks):
    ranks(2, check_operators, warning_filter="default")  # opcheck's own imports warn


def refused(words, function, *args, **kwargs):
    with pytest.raises(LayoutError) as error:
        function(*args, **kwargs)
    for word in words:
        assert word in str(error.value), (word, str(error.value))


def check_misuse(group):
    x = hostile_values(5, 4, seed=0)
    split = Split.ceil_chunks(5, group.size)
    owed = Partial(x, group, "layers.3.mlp.down_proj")
    named = ["layers.3.mlp.down_proj", "partial sum"]
    with expect_collectives(group):  # every refusal comes before the collective
        for move in (partial_to_token_shard, partial_to_last_dim_shard):
            refused(["takes the Partial", "[5, 4]"], move, x, split, tag="t")
        refused(["partial_to_invariant", "must not be summed again"], partial_to_invariant, x, tag="t")
        for use in (
            lambda: owed + x,
            lambda: x + owed,
            lambda: owed - x,
            lambda: x - owed,
            lambda: owed * 2,
            lambda: 2 * owed,
            lambda: x * owed,
            lambda: owed / 2,
            lambda: -owed,
            lambda: owed @ x.T,
            lambda: x.T @ owed,
            lambda: F.silu(owed),
            lambda: F.linear(owed, x),
            lambda: F.rms_norm(owed, (4,)),
            lambda: torch.cat([owed, owed]),
            lambda: owed[0],
        ):
            refused(named, use)
        with pytest.raises(AttributeError, match=r"layers\.3\.mlp\.down_proj is a partial sum"):
            owed.sum()
        shard = x[slice(*split.ranges[group.rank])]
        for move in (token_shard_to_column_input, token_shard_to_invariant):
            refused(["should hold", "of the 5 elements"], move, x, split, group, tag="t")
            refused(["takes a tensor and got Partial"], move, owed, split, group, tag="t")
        refused(["of the 5 elements"], invariant_to_token_shard, shard, split, group, tag="t")
        refused(["of the 9 elements"], invariant_to_last_dim_shard, x, Split.even(9, group.size), group, tag="t")
        refused(["of the 9 elements"], partial_to_token_shard, owed, Split.even(9, group.size), tag="t")
        wrong = Split.even(5, group.size + 1)
        refused(
            [f"over {group.size + 1} ranks, the group has {group.size}"],
            invariant_to_token_shard,
            x,
            wrong,
            group,
            tag="t",
        )
        other = Partial(x[:3], group, "layers.3.self_attn.o_proj")
        refused(["down_proj", "o_proj", "same shape"], lambda: owed + other)
        refused(["same group"], lambda: owed + Partial(x, TensorParallelGroup.single(), "elsewhere"))


def test_misuse_is_refused_by_name(ranks):
    ranks(2, check_misuse)
