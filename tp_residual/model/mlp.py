"""The gated MLP, sharded by intermediate features: fused gate/up column-parallel, down_proj row-parallel."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from tp_residual.kernels.decoder import serves, silu_mul
from tp_residual.model.layout import ModelLayout
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.linear import ColumnParallelLinear, RowParallelLinear
from tp_residual.parallel.partial import Partial


class MLP(nn.Module):
    """`down_proj(silu(gate_proj(x)) * up_proj(x))` (SwiGLU, arXiv 2002.05202): column input in, Partial out."""

    def __init__(
        self,
        layout: ModelLayout,
        layer: int,
        group: TensorParallelGroup,
        *,
        sequence_parallel: bool,
        dtype: torch.dtype,
        path: str | None = None,
    ) -> None:
        """path: what messages and counters call it; `model.layers.N.mlp` unless given."""
        super().__init__()
        config, features = layout.config, layout.intermediate
        self.gate_up_proj = ColumnParallelLinear(
            config.hidden_size, {"gate_proj": features, "up_proj": features}, group, bias=config.mlp_bias, dtype=dtype
        )
        self.down_proj = RowParallelLinear(
            features,
            config.hidden_size,
            group,
            bias=config.mlp_bias,
            sequence_parallel=sequence_parallel,
            name=f"{path or f'model.layers.{layer}.mlp'}.down_proj",
            dtype=dtype,
        )

    def forward(self, x: Float[Tensor, "tokens hidden"]) -> Partial:
        gate, up = self.gate_up_proj.split(self.gate_up_proj(x))
        return self.down_proj(silu_mul(gate, up) if serves(gate, up) else F.silu(gate) * up)
