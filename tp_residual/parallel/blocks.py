"""Row blocks: what each rank's parameters hold of the checkpoint's tensors, and how their gradients become whole.

A parameter declares blocks, not one role. At 9 query and 3 KV heads over two ranks both hold KV head 1: only that block of k_proj
needs a gradient sum, between its two holders. Loading, gradient sync, gradient norm, saving and resharding all iterate blocks.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tp_residual.errors import LayoutError
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.splits import Split

# Of a gradient sum: large enough to hide a collective's fixed cost, small enough to bound its copies.
BUCKET_BYTES = 25 << 20

_MIXED = -1  # in place of the version of a gradient that was summed

_asked: WeakKeyDictionary[TensorParallelGroup, int] = WeakKeyDictionary()  # a name is shared once in a group's life


@dataclass(frozen=True, eq=False)
class ParameterBlock:
    """One contiguous run along `dim` of one parameter of this rank.

    name: the checkpoint tensor it comes from. local / globe: its `[start, stop)` along `dim` in the parameter and in that tensor.
    holders: the group ranks that hold it. partial_gradient: each holder's gradient is a summand, not the whole.
    """

    name: str
    parameter: nn.Parameter
    dim: int
    local: tuple[int, int]
    globe: tuple[int, int]
    global_shape: tuple[int, ...]
    holders: tuple[int, ...]
    partial_gradient: bool

    @property
    def owner(self) -> int:
        """The one rank that counts and saves it."""
        return min(self.holders)

    def of(self, tensor: Tensor) -> Tensor:
        """The block's view of a tensor shaped like the parameter (the parameter itself, its gradient)."""
        return tensor.narrow(self.dim, self.local[0], self.local[1] - self.local[0])

    def of_full(self, tensor: Tensor) -> Tensor:
        """The block's view of a tensor shaped like the checkpoint's."""
        return tensor.narrow(self.dim, self.globe[0], self.globe[1] - self.globe[0])


@runtime_checkable
class DeclaresBlocks(Protocol):
    """A module whose own parameters (not its children's) declare their blocks."""

    def declare_blocks(self, prefix: str) -> Iterable[ParameterBlock]:
        """prefix: the module's path with a trailing dot, or nothing."""
        ...


def parameter_blocks(module: nn.Module) -> list[ParameterBlock]:
    """Every block of this rank, in module order. Raises LayoutError for a parameter that no module declares."""
    blocks: list[ParameterBlock] = []
    for path, child in module.named_modules():
        if isinstance(child, DeclaresBlocks):
            blocks.extend(child.declare_blocks(f"{path}." if path else ""))
    declared = {id(block.parameter) for block in blocks}
    missing = [name for name, parameter in module.named_parameters() if id(parameter) not in declared]
    if missing:
        raise LayoutError(
            f"no parameter block for {', '.join(missing)}: give its module declare_blocks(), or its gradient would stay unsummed"
        )
    return blocks


def split_blocks(
    name: str, parameter: nn.Parameter, dim: int, split: Split, full_shape: tuple[int, ...], rank: int, offset: int = 0
) -> list[ParameterBlock]:
    """The blocks of a parameter whose rows (or columns) from `offset` on are this rank's range of `split`.

    Where several ranks hold a run, each computes with it from its own inputs: the gradient is partial there.
    """
    first, end = split.ranges[rank]
    if first == end:  # an empty share still names its tensor, so that all ranks name the same ones
        return [ParameterBlock(name, parameter, dim, (offset, offset), (first, first), full_shape, (rank,), False)]
    return [
        ParameterBlock(
            name,
            parameter,
            dim,
            (start - first + offset, stop - first + offset),
            (start, stop),
            full_shape,
            holders,
            len(holders) > 1,
        )
        for start, stop, holders in split.segments()
        if rank in holders
    ]


def replicated_block(name: str, parameter: nn.Parameter, size: int, *, partial_gradient: bool) -> ParameterBlock:
    """A parameter that all `size` ranks hold whole."""
    whole = (0, parameter.shape[0])
    return ParameterBlock(
        name, parameter, 0, whole, whole, tuple(parameter.shape), tuple(range(size)), partial_gradient and size > 1
    )


def sync_gradients(
    blocks: Iterable[ParameterBlock], group: TensorParallelGroup, *, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Sum the partial gradients over their holders. Call it once, after the last backward pass of a step and before clipping.

    Each set of holders sums flat buckets of at most `bucket_bytes`, in fp32 (fp64 gradients in fp64), whatever the blocks' number and
    sizes. A parameter without a gradient counts as zero, so that all holders take part whatever their inputs reached. Raises LayoutError
    for a gradient that has been summed before: again, it would count once a holder. In checked mode all ranks raise when one does.
    """
    shared = [block for block in blocks if block.partial_gradient and block.parameter.requires_grad]
    _refuse_summed(shared, group)
    by_holders: dict[tuple[tuple[int, ...], bool], list[Tensor]] = defaultdict(list)
    for block in shared:
        if block.parameter.grad is None:
            block.parameter.grad = torch.zeros_like(block.parameter)
        by_holders[block.holders, block.parameter.dtype == torch.float64].append(block.of(block.parameter.grad))
    # the same order everywhere, so that overlapping sets cannot wait for each other
    for holders, wide in sorted(by_holders):
        members, dtype = group.subgroup(holders), torch.float64 if wide else torch.float32
        with torch.no_grad():
            for bucket in _buckets(by_holders[holders, wide], max(1, bucket_bytes // dtype.itemsize)):
                flat = torch.cat([piece.to(dtype) for piece in bucket])
                total = members.run("all_reduce", "sync_gradients", flat, lambda transport, t: transport.all_reduce(t))
                for piece, summed in zip(bucket, total.split([piece.numel() for piece in bucket]), strict=True):
                    piece.copy_(summed)
    for block in shared:
        if block.parameter.grad is not None:
            mark_summed(block.parameter.grad)


def _buckets(grads: Iterable[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """One-dimensional pieces of the gradients in order, together at most `limit` elements; a large gradient is cut.

    Sums are written to the pieces; they have reached every gradient once the iterator is at its end.
    """
    bucket: list[Tensor] = []
    free = limit
    copies: list[tuple[Tensor, Tensor]] = []
    for grad in grads:
        flat = grad.reshape(-1)
        if not grad.is_contiguous():
            copies.append((grad, flat))
        while flat.numel():
            piece, flat = flat[:free], flat[free:]
            bucket.append(piece)
            free -= piece.numel()
            if free == 0:
                yield bucket
                bucket, free = [], limit
    if bucket:
        yield bucket
    for grad, flat in copies:
        grad.copy_(flat.view(grad.shape))


# -- what has been summed
#
# The mark lies on the gradient tensor itself: a new gradient has none, so "not summed" is what is believed without proof.


def mark_summed(grad: Tensor) -> None:
    """This gradient, as it is now, is the sum over its holders."""
    grad.tp_residual_summed = grad._version  # type: ignore[attr-defined]


def mark_mixed(grad: Tensor) -> None:
    """A summand was accumulated onto a sum: the whole can no longer be had from it."""
    grad.tp_residual_summed = _MIXED  # type: ignore[attr-defined]


def clear_mark(grad: Tensor) -> None:
    """It is a summand again."""
    if hasattr(grad, "tp_residual_summed"):
        del grad.tp_residual_summed


def is_summed(grad: Tensor) -> bool:
    """It has been summed, and nobody has seen anything accumulate since (seen: by the hooks of `training.attach` in checked mode)."""
    return getattr(grad, "tp_residual_summed", _MIXED) != _MIXED


def is_mixed(grad: Tensor) -> bool:
    return getattr(grad, "tp_residual_summed", None) == _MIXED


def _refuse_summed(shared: list[ParameterBlock], group: TensorParallelGroup) -> None:
    problem = ""
    for block in shared:
        grad = block.parameter.grad
        if grad is not None and is_mixed(grad):
            problem = f"the gradient of {block.name} was summed, and then more was accumulated onto it; accumulate first, sum once"
        elif grad is not None and getattr(grad, "tp_residual_summed", None) == grad._version:
            problem = f"the gradient of {block.name} has been summed already, and would count once more for each of its holders"
        if problem:
            break
    raise_together(problem and f"sync_gradients(): {problem}; zero_grad() between steps", group)


def raise_together(problem: str, group: TensorParallelGroup) -> None:
    """Raises LayoutError(problem) unless it is empty; in checked mode on every rank when any rank has one, by the side channel."""
    if group.checked and group.size > 1:
        number = _asked[group] = _asked.get(group, 0) + 1
        for rank, theirs in enumerate(group.share(f"problem {number}", problem)):
            if theirs:
                raise LayoutError(f"rank {rank} of {group.size}: {theirs}")
    elif problem:
        raise LayoutError(problem)


def grad_norm(blocks: Iterable[ParameterBlock], group: TensorParallelGroup, p: float = 2.0) -> Tensor:
    """The p-norm (1, 2, inf) of the whole model's gradient, a 0-dim fp32 tensor (fp64 for fp64 gradients), the same on every rank.

    Call it after `sync_gradients`. Each block counts once, at its owner. A NaN on one rank reaches all: the per-rank values are
    gathered and combined here, since gloo's MAX drops a NaN depending on its rank.
    """
    if p not in (1.0, 2.0, float("inf")):
        raise ValueError(f"p={p} is not one of 1, 2, inf")
    blocks = list(blocks)
    # fp64 inside: torch's fp32 vector_norm is off by 6e-4 at 14 million elements on CPU
    parts = [
        torch.linalg.vector_norm(block.of(block.parameter.grad).reshape(-1), p, dtype=torch.float64)
        for block in blocks
        if block.owner == group.rank and block.parameter.grad is not None and block.of(block.parameter.grad).numel()
    ]
    own = torch.stack(parts) if parts else torch.zeros(1, dtype=torch.float64, device=group.device)
    own = torch.linalg.vector_norm(own, p).view(1)
    if group.size > 1:
        own = group.run("all_gather", "grad_norm", own, lambda transport, t: transport.all_gather(t))
    norm = torch.linalg.vector_norm(own, p)
    wide = any(block.parameter.dtype == torch.float64 for block in blocks)  # not of `parts`: a rank may own nothing
    return norm if wide else norm.float()
