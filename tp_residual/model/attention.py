"""Grouped-query attention, sharded by heads: fused qkv column-parallel, o_proj row-parallel."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tp_residual.kernels.contract import NormSpec
from tp_residual.model.attention_backend import AttentionBackend, HeadGroups, TokenBatch
from tp_residual.model.layout import ModelLayout
from tp_residual.model.rope import RopeTables, apply_rope
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.linear import ColumnParallelLinear, RowParallelLinear
from tp_residual.parallel.partial import Partial
from tp_residual.residual.norms import RMSNorm


class Attention(nn.Module):
    """In: the normed stream as column input `[tokens, hidden]`. Out: this rank's heads' share of the update, a Partial."""

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
        """path: what messages and counters call it; `model.layers.N.self_attn` unless given."""
        super().__init__()
        config, rows, kv_rows = layout.config, layout.query_rows, layout.key_value_rows
        self.layer, self.head_dim, self.window = layer, config.head_dim, config.sliding_window[layer]
        self.groups = HeadGroups(layout.heads, group.rank, group.device)
        self.qkv_proj = ColumnParallelLinear(
            config.hidden_size,
            {"q_proj": rows, "k_proj": kv_rows, "v_proj": kv_rows},
            group,
            bias=config.qkv_bias,
            dtype=dtype,
        )
        self.local_heads = [
            size // config.head_dim for size in self.qkv_proj.local_sizes
        ]  # of queries, keys and values
        self.o_proj = RowParallelLinear(
            rows,
            config.hidden_size,
            group,
            bias=config.o_bias,
            sequence_parallel=sequence_parallel,
            name=f"{path or f'model.layers.{layer}.self_attn'}.o_proj",
            dtype=dtype,
        )
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            # replicated weights on sharded heads: the gradient is partial whatever the stream's layout
            spec = NormSpec(config.rms_norm_eps, weight_after_cast=config.weight_after_cast)
            self.q_norm = RMSNorm(config.head_dim, spec, group, partial_gradient=True, name="q_norm", dtype=dtype)
            self.k_norm = RMSNorm(config.head_dim, spec, group, partial_gradient=True, name="k_norm", dtype=dtype)

    def forward(
        self, x: Float[Tensor, "tokens hidden"], rope: RopeTables, batch: TokenBatch, backend: AttentionBackend
    ) -> Partial:
        qkv = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = qkv.split(self.local_heads, dim=1)
            q, k = apply_rope(self.q_norm(q), rope), apply_rope(self.k_norm(k), rope)
        elif torch.is_grad_enabled():
            # apart: what backward keeps of the queries would hold the keys' memory, too
            q, k, v = qkv.split(self.local_heads, dim=1)
            q, k = apply_rope(q, rope), apply_rope(k, rope)
        else:
            queries, keys, values = self.local_heads
            both, v = qkv.split((queries + keys, values), dim=1)
            q, k = apply_rope(both, rope).split((queries, keys), dim=1)
        backend.append(self.layer, k, v, batch)
        out = backend.attend(self.layer, q, batch, self.groups, self.window)
        return self.o_proj(out.flatten(1))
