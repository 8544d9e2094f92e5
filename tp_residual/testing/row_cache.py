"""The simplest cache there is, to step a model token by token in a test, and to compare other caches with."""

import torch
from jaxtyping import Float
from torch import Tensor

from tp_residual.model.attention_backend import HeadGroups, TokenBatch, attend_sequence
from tp_residual.model.layout import ModelLayout
from tp_residual.parallel.group import TensorParallelGroup


class RowCache:
    """Attention backend over `[rows, local_kv_heads, max_tokens, head_dim]` a layer, this rank's KV heads; a span's row is its place."""

    def __init__(
        self, layout: ModelLayout, group: TensorParallelGroup, *, rows: int, max_tokens: int, dtype: torch.dtype
    ) -> None:
        shape = (
            layout.config.num_hidden_layers,
            2,
            rows,
            layout.heads.key_value.size(group.rank),
            max_tokens,
            layout.config.head_dim,
        )
        self._kv = torch.empty(shape, dtype=dtype, device=group.device)

    @property
    def nbytes(self) -> int:
        return self._kv.numel() * self._kv.element_size()

    def append(
        self,
        layer: int,
        k: Float[Tensor, "tokens local_kv_heads head_dim"],
        v: Float[Tensor, "tokens local_kv_heads head_dim"],
        batch: TokenBatch,
    ) -> None:
        keys, values = self._kv[layer]
        for start, stop, row, context in batch.spans:
            end = context + stop - start
            keys[row, :, context:end] = k[start:stop].transpose(0, 1)
            values[row, :, context:end] = v[start:stop].transpose(0, 1)

    def attend(
        self,
        layer: int,
        q: Float[Tensor, "tokens local_heads head_dim"],
        batch: TokenBatch,
        groups: HeadGroups,
        window: int | None,
    ) -> Float[Tensor, "tokens local_heads head_dim"]:
        keys, values = self._kv[layer]
        parts = []
        for start, stop, row, context in batch.spans:
            end = context + stop - start
            parts.append(attend_sequence(q[start:stop], keys[row, :, :end], values[row, :, :end], groups, window))
        return torch.cat(parts) if len(parts) > 1 else parts[0]
