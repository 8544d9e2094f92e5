"""Column- and row-parallel linears for any tp size.

Weights keep the checkpoint's orientation, `[out_features, in_features]`. A parameter's storage is exactly this rank's share.
"""

from collections.abc import Iterable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tp_residual.errors import LayoutError
from tp_residual.kernels.linear import PackedWeight, linear
from tp_residual.parallel.blocks import ParameterBlock, replicated_block, split_blocks
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.partial import Partial
from tp_residual.parallel.splits import Split


class ColumnParallelLinear(nn.Module):
    """`x @ weight.T + bias` with the output features split; several projections of one input may be fused.

    projections: checkpoint name of each projection (`q_proj`) to the split of its output features, fused in this order. A name is
    relative to the module that holds this one; a single projection whose name is "" is this module itself.
    In: column input `[tokens, in_features]`, replicated. Out: `[tokens, local_out_features]`, sharded. No collective; its input's
    gradient is a partial sum, which the move into it (or the stream's boundary) completes.
    """

    def __init__(
        self,
        in_features: int,
        projections: Mapping[str, Split],
        group: TensorParallelGroup,
        *,
        bias: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.in_features, self.group = in_features, group
        self.projections = dict(projections)
        self.local_sizes = [split.size(group.rank) for split in self.projections.values()]
        self.weight = uninitialized(sum(self.local_sizes), in_features, dtype=dtype, group=group)
        self.bias = uninitialized(sum(self.local_sizes), dtype=dtype, group=group) if bias else None
        self.packed: PackedWeight | None = None  # see parallel/packing.py

    def forward(self, x: Float[Tensor, "tokens in_features"]) -> Float[Tensor, "tokens local_out_features"]:
        check_input(x, self.in_features, "ColumnParallelLinear", self.projections)
        return linear(x, self.weight, self.packed, self.bias)

    def split(self, y: Float[Tensor, "tokens local_out_features"]) -> tuple[Tensor, ...]:
        """The fused output as views, one a projection."""
        return y.split(self.local_sizes, dim=-1)

    def declare_blocks(self, prefix: str) -> Iterable[ParameterBlock]:
        parent = prefix.rstrip(".").rpartition(".")[0]
        offset = 0
        for name, split in self.projections.items():
            path = f"{parent}.{name}." if parent and name else f"{name}." if name else prefix
            rank = self.group.rank
            yield from split_blocks(
                f"{path}weight", self.weight, 0, split, (split.total, self.in_features), rank, offset
            )
            if self.bias is not None:
                yield from split_blocks(f"{path}bias", self.bias, 0, split, (split.total,), rank, offset)
            offset += split.size(rank)


class RowParallelLinear(nn.Module):
    """`x @ weight.T` with the input features split: a summand on each rank.

    In: `[tokens, local_in_features]`, sharded. Out: `Partial` of `[tokens, out_features]` in the GEMM's dtype. No collective. The bias,
    whole on every rank, travels with the Partial and is added once, after the sum: summed first, it would count tp times; inside rank
    0's GEMM, it would be rounded with that summand.
    """

    def __init__(
        self,
        split: Split,
        out_features: int,
        group: TensorParallelGroup,
        *,
        bias: bool = False,
        sequence_parallel: bool = False,
        name: str = "row_parallel",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """sequence_parallel: the sum is completed into token shards: the bias sees this rank's tokens only, its gradient is partial."""
        super().__init__()
        self.in_split, self.out_features, self.group = split, out_features, group
        self.sequence_parallel, self.name = sequence_parallel, name
        self.weight = uninitialized(out_features, split.size(group.rank), dtype=dtype, group=group)
        self.bias = uninitialized(out_features, dtype=dtype, group=group) if bias else None
        self.packed: PackedWeight | None = None

    def forward(self, x: Float[Tensor, "tokens local_in_features"]) -> Partial:
        check_input(x, self.in_split.size(self.group.rank), "RowParallelLinear", (self.name,))
        return Partial(linear(x, self.weight, self.packed), self.group, self.name, self.bias)

    def declare_blocks(self, prefix: str) -> Iterable[ParameterBlock]:
        full_shape = (self.out_features, self.in_split.total)
        yield from split_blocks(f"{prefix}weight", self.weight, 1, self.in_split, full_shape, self.group.rank)
        if self.bias is not None:
            yield replicated_block(f"{prefix}bias", self.bias, self.group.size, partial_gradient=self.sequence_parallel)


def uninitialized(*shape: int, dtype: torch.dtype, group: TensorParallelGroup) -> nn.Parameter:
    """Uninitialised: a checkpoint, a twin or an init rule fills it, and each of those proves that it filled everything."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=group.device))


def check_input(x: Tensor | Partial, features: int, kind: str, names: Iterable[str]) -> None:
    """Raises LayoutError for a Partial, and for another number of features than this rank's."""
    if isinstance(x, Partial):
        x.refuse(f"{kind}({', '.join(names)})")
    if x.shape[-1] != features:
        raise LayoutError(
            f"{kind}({', '.join(names)}) takes {features} features on this rank and got {x.shape[-1]} (input {list(x.shape)})"
        )
