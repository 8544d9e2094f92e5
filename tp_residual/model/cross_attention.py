"""Attention of a decoder to an encoder's output, sharded by heads: the third residual of an encoder-decoder layer."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from tp_residual.errors import LayoutError
from tp_residual.model.attention_backend import HeadGroups, TokenBatch
from tp_residual.model.layout import ModelLayout
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.linear import ColumnParallelLinear, RowParallelLinear
from tp_residual.parallel.partial import Partial


@dataclass(frozen=True, eq=False)
class Memory:
    """An encoder's output: column input `[source tokens, hidden]`, and where the sequence of each batch row lies in it.

    Every decoder layer reads the same tensor, so its gradient, a partial sum on each rank, is added up over the layers and completed
    once. kept: keys and values by layer, when they are kept for many steps (`keep`): they do not grow while the decoder does.
    """

    states: Float[Tensor, "source hidden"]
    rows: dict[int, tuple[int, int]]
    keeps: bool = False
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def keep(self) -> "Memory":
        """The same for decoding: each layer's keys and values are computed at its first use only. Not for training."""
        return Memory(self.states, self.rows, True)

    @property
    def nbytes(self) -> int:
        """Of the kept keys and values."""
        return sum(x.numel() * x.element_size() for pair in self.kept.values() for x in pair)


class CrossAttention(nn.Module):
    """In: the normed stream as column input. Out: a Partial. Queries carry no position: which source token is near is for the encoder."""

    def __init__(
        self,
        layout: ModelLayout,
        layer: int,
        group: TensorParallelGroup,
        *,
        sequence_parallel: bool,
        dtype: torch.dtype,
        path: str,
    ) -> None:
        super().__init__()
        config, rows, kv_rows = layout.config, layout.query_rows, layout.key_value_rows
        self.layer, self.head_dim, self.path = layer, config.head_dim, path
        self.groups = HeadGroups(layout.heads, group.rank, group.device)
        self.q_proj = ColumnParallelLinear(config.hidden_size, {"": rows}, group, bias=config.qkv_bias, dtype=dtype)
        self.kv_proj = ColumnParallelLinear(
            config.hidden_size, {"k_proj": kv_rows, "v_proj": kv_rows}, group, bias=config.qkv_bias, dtype=dtype
        )
        self.o_proj = RowParallelLinear(
            rows,
            config.hidden_size,
            group,
            bias=config.o_bias,
            sequence_parallel=sequence_parallel,
            name=f"{path}.o_proj",
            dtype=dtype,
        )

    def forward(self, x: Float[Tensor, "tokens hidden"], batch: TokenBatch, memory: Memory | None) -> Partial:
        if memory is None:
            raise LayoutError(f"{self.path} needs the encoder's output; pass memory=model.encode(source)")
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k, v = self._keys_and_values(memory)
        parts = []
        for start, stop, row, _ in batch.spans:
            if row not in memory.rows:
                raise LayoutError(
                    f"{self.path}: batch row {row} has no source; the encoder saw rows {sorted(memory.rows)}"
                )
            source = slice(*memory.rows[row])
            parts.append(attend_all(q[start:stop], k[source], v[source], self.groups))
        return self.o_proj(torch.cat(parts).flatten(1))

    def _keys_and_values(self, memory: Memory) -> tuple[Tensor, Tensor]:
        if self.layer in memory.kept:
            return memory.kept[self.layer]
        both = self.kv_proj.split(self.kv_proj(memory.states))
        k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in both)
        if memory.keeps:
            memory.kept[self.layer] = k, v
        return k, v


def attend_all(
    q: Float[Tensor, "tokens local_heads head_dim"],
    k: Float[Tensor, "source local_kv_heads head_dim"],
    v: Float[Tensor, "source local_kv_heads head_dim"],
    groups: HeadGroups,
) -> Float[Tensor, "tokens local_heads head_dim"]:
    """Attention to every key, scaled by 1/sqrt(head_dim)."""
    if q.shape[1] != groups.kv_heads:
        k, v = k.index_select(1, groups.kv_of_query), v.index_select(1, groups.kv_of_query)
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None])
    return out[0].transpose(0, 1)


class Bidirectional:
    """An attention backend in which every token of a sequence sees all of it: an encoder's. Keeps nothing between passes."""

    def __init__(self) -> None:
        self._current: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, layer: int, k: Tensor, v: Tensor, batch: TokenBatch) -> None:
        assert all(span.context == 0 for span in batch.spans), "an encoder sees whole sequences"
        self._current[layer] = k, v

    def attend(self, layer: int, q: Tensor, batch: TokenBatch, groups: HeadGroups, window: int | None) -> Tensor:
        if window is not None:
            raise LayoutError(f"sliding_window={window} of layer {layer} means nothing in an encoder; use null")
        k, v = self._current.pop(layer)
        return torch.cat([attend_all(q[a:b], k[a:b], v[a:b], groups) for a, b, _, _ in batch.spans])
