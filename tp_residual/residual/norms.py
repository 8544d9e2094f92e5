"""Norm modules: parameters and their blocks. The arithmetic is the contract's, inside a boundary or alone."""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tp_residual.kernels.contract import NormSpec, norm
from tp_residual.parallel.blocks import ParameterBlock, replicated_block
from tp_residual.parallel.group import TensorParallelGroup


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension; passed to `Stream.read`, or called on a tensor (per-head q/k norm).

    partial_gradient: each rank sees only its tokens (a token-sharded stream) or its heads, so the weight's gradient must be summed.
    """

    def __init__(
        self,
        size: int,
        spec: NormSpec,
        group: TensorParallelGroup,
        *,
        partial_gradient: bool,
        name: str = "norm",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.spec, self.group, self.partial_gradient, self.name = spec, group, partial_gradient, name
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=group.device))
        self.bias = nn.Parameter(torch.zeros(size, dtype=dtype, device=group.device)) if spec.kind == "layer" else None

    def forward(self, x: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch size"]:
        return norm(x, self.weight, self.bias, self.spec, x.dtype)

    def declare_blocks(self, prefix: str) -> Iterable[ParameterBlock]:
        yield replicated_block(f"{prefix}weight", self.weight, self.group.size, partial_gradient=self.partial_gradient)
        if self.bias is not None:
            yield replicated_block(f"{prefix}bias", self.bias, self.group.size, partial_gradient=self.partial_gradient)
