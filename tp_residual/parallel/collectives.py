"""Moves between layouts, each with its own name and its conjugate as backward.

A value on the tensor-parallel axis is *invariant* (replicated, gradient complete), *column input* (replicated, gradient a partial
sum), a *shard* (a slice along one dimension), or *partial* (a summand). The two replicated kinds look the same in the forward pass
and differ by a factor in the gradient, so no move has a default here.

Each move is one opaque torch.library operator with a fake and an autograd formula. The record and the counters are written inside it:
a compiler neither changes its bits nor recompiles because of them. A backward calls the conjugate *move*, so second derivatives are
right. Inputs are made contiguous first (gloo corrupts memory otherwise) and never written to (autograd may have saved them).
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tp_residual.errors import LayoutError
from tp_residual.kernels.contract import widen
from tp_residual.parallel.group import TensorParallelGroup, group_of
from tp_residual.parallel.partial import Partial
from tp_residual.parallel.splits import Split
from tp_residual.parallel.transport import StartsEarly, SumsInRankOrder, Transport

LIBRARY = torch.library.Library("tp_residual", "DEF")

# Per rank; a gather of everything is one wake-up of the peers instead of two, and moves no more than this.
_GATHER_BELOW_BYTES = 64 * 1024


# -- the wire level: plain tensors, no autograd


def summed(group: TensorParallelGroup, x: Tensor, tag: str, ordered: bool) -> Tensor:
    """The sum over the group of `x` in fp32 at least, on every rank. ordered: summands are added in rank order, 0 first."""
    wide = widen(x)
    if not ordered:
        return group.run("all_reduce", tag, wide, lambda transport, t: transport.all_reduce(t))
    return group.run("all_reduce", tag, x, _ordered_all_reduce)


def summed_shard(group: TensorParallelGroup, x: Tensor, tag: str, dim: int, split: Split, ordered: bool) -> Tensor:
    """This rank's slice along `dim` of the sum over the group, in fp32 at least."""
    chunks = _padded_chunks(x if ordered else widen(x), dim, split)
    if ordered:
        own = group.run("reduce_scatter", tag, chunks, _ordered_reduce_scatter)
    else:
        own = group.run("reduce_scatter", tag, chunks, lambda transport, t: transport.reduce_scatter(t))
    shape = list(x.shape)
    shape[dim] = max(split.sizes)
    return own.view(shape).narrow(dim, 0, split.size(group.rank))


def starts_early(group: TensorParallelGroup) -> bool:
    """Whether the group's collectives can be started ahead of their results."""
    return group.size > 1 and isinstance(group.transport, StartsEarly)


def start_summed(group: TensorParallelGroup, x: Tensor, tag: str, ordered: bool) -> Callable[[], Tensor]:
    """`summed`, started; the group's transport must be one that `StartsEarly`."""
    if not ordered:
        return group.start("all_reduce", tag, widen(x), lambda transport, t: _early(transport).start_all_reduce(t))
    return group.start("all_reduce", tag, x, _start_ordered_all_reduce)


def start_summed_shard(
    group: TensorParallelGroup, x: Tensor, tag: str, split: Split, ordered: bool
) -> Callable[[], Tensor]:
    """`summed_shard` of rows, started."""
    chunks, own = _padded_chunks(x if ordered else widen(x), 0, split), split.size(group.rank)
    if not ordered:
        wait = group.start(
            "reduce_scatter", tag, chunks, lambda transport, t: _early(transport).start_reduce_scatter(t)
        )
        return lambda: wait()[:own]
    wait = group.start("reduce_scatter", tag, chunks, lambda transport, t: _early(transport).start_all_to_all(t))
    return lambda: _rank_order_sum(wait(), group.size)[:own]


def _early(transport: Transport) -> StartsEarly:
    assert isinstance(transport, StartsEarly), "the caller has asked"
    return transport


def _start_ordered_all_reduce(transport: Transport, x: Tensor) -> Callable[[], Tensor]:
    """As `_ordered_all_reduce`, the same bits. What is large is gathered at the end, when its sums are known."""
    size, flat = transport.size, x.reshape(-1)
    if flat.numel() * flat.element_size() <= _GATHER_BELOW_BYTES:
        wait = _early(transport).start_all_gather(flat)
        return lambda: _rank_order_sum(wait(), size).view(x.shape)
    piece = -(-flat.numel() // size)
    wait = _early(transport).start_all_to_all(_pad(flat, 0, piece * size))
    return lambda: transport.all_gather(_rank_order_sum(wait(), size))[: flat.numel()].view(x.shape)


def gathered(group: TensorParallelGroup, x_shard: Tensor, tag: str, dim: int, split: Split) -> Tensor:
    """The slices of all ranks along `dim`, in order. For chunks padded only at the tail and dim 0, a view of what arrived."""
    chunk = max(split.sizes)
    padded = _pad(x_shard, dim, chunk)
    everything = group.run(
        "all_gather", tag, padded.reshape(1, *padded.shape), lambda transport, t: transport.all_gather(t)
    )
    if dim == 0 and _tail_padded(split):
        return everything.reshape(group.size * chunk, *x_shard.shape[1:])[: split.total]
    return torch.cat([everything[rank].narrow(dim, 0, size) for rank, size in enumerate(split.sizes)], dim)


def _rank_order_sum(summands: Tensor, size: int) -> Tensor:
    """Rows `[size * n, ...]`, one block a rank, to `[n, ...]`: widened and added 0, 1, 2, ... in that order."""
    blocks = summands.chunk(size)
    total = widen(blocks[0]).clone()
    for block in blocks[1:]:
        total += block  # widens the 16-bit types exactly
    return total


def _ordered_all_reduce(transport: Transport, x: Tensor) -> Tensor:
    """all_to_all of equal pieces, rank-order sum, gather; or, when small, a gather of everything and the same sum: the same bits."""
    if isinstance(transport, SumsInRankOrder):
        return transport.ordered_all_reduce(x)
    size = transport.size
    flat = x.reshape(-1)
    if flat.numel() * flat.element_size() <= _GATHER_BELOW_BYTES:
        return _rank_order_sum(transport.all_gather(flat), size).view(x.shape)
    piece = -(-flat.numel() // size)
    own = _rank_order_sum(transport.all_to_all(_pad(flat, 0, piece * size)), size)
    return transport.all_gather(own)[: flat.numel()].view(x.shape)


def _ordered_reduce_scatter(transport: Transport, chunks: Tensor) -> Tensor:
    if isinstance(transport, SumsInRankOrder):
        return transport.ordered_reduce_scatter(chunks)
    return _rank_order_sum(transport.all_to_all(chunks), transport.size)


def _padded_chunks(x: Tensor, dim: int, split: Split) -> Tensor:
    """`x` cut by `split` along `dim` and stacked along dimension 0, each piece zero-padded to the longest."""
    chunk = max(split.sizes)
    if dim == 0 and _tail_padded(split):
        return _pad(x, 0, chunk * len(split.ranges))
    pieces = [_pad(x.narrow(dim, start, stop - start), dim, chunk) for start, stop in split.ranges]
    return torch.cat([piece.reshape(1, *piece.shape) for piece in pieces])


def _tail_padded(split: Split) -> bool:
    chunk = max(split.sizes)
    return split == Split.ceil_chunks(split.total, len(split.ranges)) or all(size == chunk for size in split.sizes)


def _pad(x: Tensor, dim: int, size: int) -> Tensor:
    missing = size - x.shape[dim]
    if missing == 0:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)


# -- operators: (x, group handle, rank, tag, dim, sizes of the split, ordered) -> tensor
#
# rank is the group's own: the fake kernels must know shapes from arguments alone, since ranks share a compiler's cache on disk.


def _split(sizes: list[int]) -> Split:
    edges = [0]
    for size in sizes:
        edges.append(edges[-1] + size)
    return Split(edges[-1], tuple(itertools.pairwise(edges)))


def _sum_to_all(x: Tensor, group: int, rank: int, tag: str, dim: int, sizes: list[int], ordered: bool) -> Tensor:
    return summed(group_of(group), x, tag, ordered).to(x.dtype)


def _sum_to_shard(x: Tensor, group: int, rank: int, tag: str, dim: int, sizes: list[int], ordered: bool) -> Tensor:
    # clone: an operator may not return a view of a buffer of another size
    return (
        summed_shard(group_of(group), x, tag, dim, _split(sizes), ordered)
        .to(x.dtype)
        .clone(memory_format=torch.contiguous_format)
    )


def _gather(x: Tensor, group: int, rank: int, tag: str, dim: int, sizes: list[int], ordered: bool) -> Tensor:
    return gathered(group_of(group), x, tag, dim, _split(sizes))


def _slice(x: Tensor, group: int, rank: int, tag: str, dim: int, sizes: list[int], ordered: bool) -> Tensor:
    start, stop = _split(sizes).ranges[rank]
    return x.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)


def _identity(x: Tensor, group: int, rank: int, tag: str, dim: int, sizes: list[int], ordered: bool) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)  # as its fake says


def _same_shape(x: Tensor, group: int, rank: int, tag: str, dim: int, sizes: list[int], ordered: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _shard_shape(x: Tensor, group: int, rank: int, tag: str, dim: int, sizes: list[int], ordered: bool) -> Tensor:
    shape = list(x.shape)
    shape[dim] = sizes[rank]
    return x.new_empty(shape)


def _full_shape(x: Tensor, group: int, rank: int, tag: str, dim: int, sizes: list[int], ordered: bool) -> Tensor:
    shape = list(x.shape)
    shape[dim] = sum(sizes)
    return x.new_empty(shape)


# name -> (forward, fake, name of the conjugate move, which is its backward)
_MOVES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], str]] = {
    "invariant_to_column_input": (_identity, _same_shape, "partial_to_invariant"),
    "partial_to_invariant": (_sum_to_all, _same_shape, "invariant_to_column_input"),
    "shard_to_column_input": (_gather, _full_shape, "partial_to_shard"),
    "partial_to_shard": (_sum_to_shard, _shard_shape, "shard_to_column_input"),
    "shard_to_invariant": (_gather, _full_shape, "invariant_to_shard"),
    "invariant_to_shard": (_slice, _shard_shape, "shard_to_invariant"),
}


def _conjugate_backward(conjugate: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.arguments = inputs[1:]

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (getattr(torch.ops.tp_residual, conjugate)(grad, *ctx.arguments), *(None,) * len(ctx.arguments))

    return setup, backward


for _name, (_forward, _fake, _conjugate) in _MOVES.items():
    LIBRARY.define(f"{_name}(Tensor x, int group, int rank, str tag, int dim, int[] sizes, bool ordered) -> Tensor")
    LIBRARY.impl(_name, _forward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tp_residual::{_name}", _fake, lib=LIBRARY)
    _setup, _backward = _conjugate_backward(_conjugate)
    torch.library.register_autograd(f"tp_residual::{_name}", _backward, setup_context=_setup, lib=LIBRARY)


def move(
    name: str, x: Tensor, group: TensorParallelGroup, tag: str, dim: int, sizes: Sequence[int], ordered: bool
) -> Tensor:
    """The operator `name`; for backward formulas. People call the named functions below."""
    return getattr(torch.ops.tp_residual, name)(x, group.handle, group.rank, tag, dim, list(sizes), ordered)


# -- the moves


def invariant_to_column_input(x: Tensor, group: TensorParallelGroup, *, tag: str, ordered: bool = False) -> Tensor:
    """Identity; backward: all-reduce. Enters a column-parallel linear from a replicated stream."""
    if group.size == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return move("invariant_to_column_input", x, group, tag, 0, [], ordered)


def partial_to_invariant(partial: Partial, *, tag: str, ordered: bool = False) -> Tensor:
    """All-reduce, then the bias once; backward: identity. Sums in fp32 at least, one rounding to the partial's dtype.

    Raises LayoutError for anything that is not a Partial: a sum that is complete must not be summed again.
    """
    value, group = _owed(partial, "partial_to_invariant"), partial.group
    if group.size > 1:
        value = move("partial_to_invariant", value, group, tag, 0, [], ordered)
    return value if partial.bias is None else value + partial.bias


def partial_to_token_shard(partial: Partial, split: Split, *, tag: str, ordered: bool = False) -> Tensor:
    """Reduce-scatter of rows, then the bias once; backward: all-gather. `[tokens, hidden]` to `[local tokens, hidden]`."""
    value, group = _owed(partial, "partial_to_token_shard"), partial.group
    _check_axis(value, 0, split.total, group, split, "partial_to_token_shard")
    if group.size > 1:
        value = move("partial_to_shard", value, group, tag, 0, split.sizes, ordered)
    return value if partial.bias is None else value + partial.bias


def partial_to_last_dim_shard(partial: Partial, split: Split, *, tag: str, ordered: bool = False) -> Tensor:
    """Reduce-scatter of columns; backward: gather."""
    value, group = _owed(partial, "partial_to_last_dim_shard"), partial.group
    _check_axis(value, -1, split.total, group, split, "partial_to_last_dim_shard")
    bias = partial.bias
    if group.size > 1:
        value = move("partial_to_shard", value, group, tag, value.dim() - 1, split.sizes, ordered)
        bias = None if bias is None else bias[slice(*split.ranges[group.rank])]
    return value if bias is None else value + bias


def token_shard_to_column_input(
    x_shard: Tensor, split: Split, group: TensorParallelGroup, *, tag: str, ordered: bool = False
) -> Tensor:
    """All-gather of rows; backward: reduce-scatter. Enters a column-parallel linear from a token-sharded stream."""
    return _gather_move("shard_to_column_input", x_shard, 0, split, group, tag, ordered)


def token_shard_to_invariant(x_shard: Tensor, split: Split, group: TensorParallelGroup, *, tag: str) -> Tensor:
    """All-gather of rows; backward: slice. For replicated consumers, whose gradient is complete."""
    return _gather_move("shard_to_invariant", x_shard, 0, split, group, tag, False)


def last_dim_shard_to_column_input(
    x_shard: Tensor, split: Split, group: TensorParallelGroup, *, tag: str, ordered: bool = False
) -> Tensor:
    """All-gather of columns; backward: reduce-scatter."""
    return _gather_move("shard_to_column_input", x_shard, x_shard.dim() - 1, split, group, tag, ordered)


def last_dim_shard_to_invariant(x_shard: Tensor, split: Split, group: TensorParallelGroup, *, tag: str) -> Tensor:
    """All-gather of columns; backward: slice."""
    return _gather_move("shard_to_invariant", x_shard, x_shard.dim() - 1, split, group, tag, False)


def invariant_to_token_shard(x: Tensor, split: Split, group: TensorParallelGroup, *, tag: str) -> Tensor:
    """Slice of rows; backward: all-gather."""
    return _slice_move(x, 0, split, group, tag)


def invariant_to_last_dim_shard(x: Tensor, split: Split, group: TensorParallelGroup, *, tag: str) -> Tensor:
    """Slice of columns; backward: all-gather."""
    return _slice_move(x, x.dim() - 1, split, group, tag)


def _gather_move(
    name: str, x_shard: Tensor, dim: int, split: Split, group: TensorParallelGroup, tag: str, ordered: bool
) -> Tensor:
    _check_axis(x_shard, dim, split.size(group.rank), group, split, name)
    if group.size == 1:
        return x_shard
    return move(name, x_shard, group, tag, dim, split.sizes, ordered)


def _slice_move(x: Tensor, dim: int, split: Split, group: TensorParallelGroup, tag: str) -> Tensor:
    _check_axis(x, dim, split.total, group, split, "invariant_to_shard")
    if group.size == 1:
        return x
    return move("invariant_to_shard", x, group, tag, dim, split.sizes, False)


def _owed(partial: object, name: str) -> Tensor:
    if not isinstance(partial, Partial):
        kind = f"a tensor of shape {list(partial.shape)}" if isinstance(partial, Tensor) else type(partial).__name__
        raise LayoutError(
            f"{name}() takes the Partial that a row-parallel layer returned and got {kind}; a completed sum must not be summed again"
        )
    return partial.value


def _check_axis(x: object, dim: int, expected: int, group: TensorParallelGroup, split: Split, name: str) -> None:
    if not isinstance(x, Tensor):
        raise LayoutError(
            f"{name}() takes a tensor and got {type(x).__name__}; complete a Partial with a partial_to_* move"
        )
    if len(split.ranges) != group.size:
        raise LayoutError(f"{name}(): the split is over {len(split.ranges)} ranks, the group has {group.size}")
    if x.shape[dim] != expected:
        raise LayoutError(
            f"{name}(): dimension {dim} of {list(x.shape)} is {x.shape[dim]}, but rank {group.rank} of {group.size} should hold {expected} "
            f"of the {split.total} elements; the value has another layout than its caller thinks"
        )
