"""What a boundary may be asked, and who may answer."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from tp_residual.errors import LayoutError
from tp_residual.kernels.contract import AddNormSpec, NormSpec
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.splits import Split

Result = Literal["gathered", "shard", "raw"]


class Join(NamedTuple):
    """How a completed sum joins the residual, as far as an executor can do it: the last fields of a BoundaryRequest."""

    update_norm: NormSpec | None = None
    update_scale: float = 1.0
    skip_scale: float = 1.0


PLAIN = Join()


@dataclass(frozen=True)
class BoundaryRequest:
    """One boundary, described by values every rank shares.

    has_residual: false for the first one, which only completes the embedding. updates: how many partial sums are owed, 0 or 1.
    norm: applied to the new residual, or None. update_norm, update_scale, skip_scale: how the sum joins the residual, as in AddNormSpec.
    result: the normed value gathered (the layout of a column-parallel input), as this
    rank's token shard, or raw (no normed value). round_reduced: round the sum to the output dtype before the add, as a plain
    all-reduce does. gradients: backward and double backward are needed.
    """

    has_residual: bool
    updates: int
    norm: NormSpec | None
    result: Result
    sequence_parallel: bool
    stream_dtype: torch.dtype
    output_dtype: torch.dtype
    round_reduced: bool = False
    gradients: bool = True
    update_norm: NormSpec | None = None
    update_scale: float = 1.0
    skip_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.updates not in (0, 1) or not (self.has_residual or self.updates):
            raise LayoutError(
                f"a boundary needs a residual or an owed sum: has_residual={self.has_residual}, updates={self.updates}"
            )
        if (self.norm is None) != (self.result == "raw"):
            raise LayoutError(f"result={self.result!r} with norm={self.norm}: raw means no norm, the others need one")
        if self.result == "shard" and not self.sequence_parallel:
            raise LayoutError(
                "result='shard' needs a token-sharded stream (sequence_parallel=True); this one is replicated"
            )

    def add_norm_spec(self) -> AddNormSpec:
        """What happens to the completed sum."""
        round_update = self.output_dtype if self.round_reduced else None
        return AddNormSpec(
            self.stream_dtype,
            self.output_dtype,
            self.norm,
            self.update_norm,
            self.update_scale,
            self.skip_scale,
            round_update,
        )


class Executor(Protocol):
    """One way to run every request it supports. ordered: its sums are in rank order, so it is bitwise the contract."""

    name: str
    ordered: bool

    def supports(self, request: BoundaryRequest, group: TensorParallelGroup) -> str | None:
        """None, or the reason why not. Asked when the model is built, never on the way."""
        ...

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
        """`(new residual in its layout, normed value in the result's layout)`; the second is empty for a raw result."""
        ...
