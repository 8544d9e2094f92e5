"""The boundary from the group's collectives and one add+norm: `reference` and `library`."""

from torch import Tensor

from tp_residual.kernels.add_norm import compute
from tp_residual.kernels.add_norm_operands import Operands
from tp_residual.kernels.contract import add_norm
from tp_residual.parallel.collectives import gathered, summed, summed_shard
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.splits import Split
from tp_residual.residual.request import BoundaryRequest


class PlainExecutor:
    """The group's collectives, then the add and the norm.

    `reference` sums in rank order and stays with plain torch: the meaning of the boundary, bit for bit. `library` leaves the order to the
    library's own all-reduce or reduce-scatter (a second numeric class, outside the bitwise claims), and adds and normalises in one fused
    pass. `local` is that pass for a group of one.
    """

    def __init__(self, name: str, *, ordered: bool, fused: bool = False, alone: bool = False) -> None:
        self.name, self.ordered, self.fused, self.alone = name, ordered, fused, alone

    def supports(self, request: BoundaryRequest, group: TensorParallelGroup) -> str | None:
        return f"the group has {group.size} ranks" if self.alone and group.size > 1 else None

    def run(
        self,
        request: BoundaryRequest,
        group: TensorParallelGroup,
        tag: str,
        tokens: Split,
        residual: Tensor | None,
        partial: Tensor | None,
        bias: Tensor | None,
        weight: Tensor | None,
        norm_bias: Tensor | None,
        update_weight: Tensor | None = None,
        update_norm_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        update = partial
        if partial is not None and group.size > 1:
            if request.sequence_parallel:
                update = summed_shard(group, partial, tag, 0, tokens, self.ordered)
            else:
                update = summed(group, partial, tag, self.ordered)
        spec = request.add_norm_spec()
        operands = Operands(residual, update, bias, update_weight, update_norm_bias, weight, norm_bias)
        if self.fused:
            new_residual, normed = compute(spec, operands)
        else:
            new_residual, normed = add_norm(spec, residual, update, **operands.parameters())
        if normed is None:
            return new_residual, new_residual.new_empty(0, dtype=request.output_dtype)
        if request.sequence_parallel and request.result == "gathered" and group.size > 1:
            normed = gathered(group, normed, tag, 0, tokens)
        return new_residual, normed
