"""The paged KV cache whose attention is compiled (`kernels/decoder.py`): on the CPU, one call a layer for all sequences of a pass.

It pays: torch's attention needs each sequence's blocks gathered and a call of its own, and in bf16, on a CPU without bf16 instructions, it
multiplies at an eighth of the fp32 rate. A query's result depends on its own sequence alone, to the bit: not on who shares the pass, nor on
how its prompt was cut.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tp_residual.inference.block_tables import BlockTables
from tp_residual.inference.scheduler import BlockCopy
from tp_residual.kernels.decoder import append, attend, attention_block
from tp_residual.kernels.linear import empty_on_huge_pages
from tp_residual.model.attention_backend import HeadGroups, TokenBatch
from tp_residual.model.layout import ModelLayout
from tp_residual.parallel.group import TensorParallelGroup


class Places(NamedTuple):
    """Of one pass: `block * block_size + place` of each token, and (first token, one past the last, row, context) of each sequence."""

    slots: Int[Tensor, " tokens"]
    spans: Int[Tensor, "sequences 4"]


class CompiledKVCache:
    """`[blocks, layers, 2, local_kv_heads, ...]`: keys end in `[head_dim, block_size]`, values in `[block_size, head_dim]`.

    A block's layers lie together, so that the memory which a few sequences touch is in one place and not in a huge page of each layer. The
    block size is the kernel's.
    """

    def __init__(self, layout: ModelLayout, group: TensorParallelGroup, num_blocks: int, dtype: torch.dtype) -> None:
        config = layout.config
        self.num_blocks, self.block_size = num_blocks, attention_block(config.head_dim, dtype)
        heads, layers = layout.heads.key_value.size(group.rank), config.num_hidden_layers
        shape = (num_blocks, layers, 2, heads, config.head_dim * self.block_size)
        self._kv = empty_on_huge_pages(math.prod(shape), dtype).view(shape)
        keys, values = self._kv.unbind(2)
        self._layers = [
            (
                keys[:, layer].unflatten(-1, (config.head_dim, self.block_size)),
                values[:, layer].unflatten(-1, (self.block_size, config.head_dim)),
            )
            for layer in range(layers)
        ]
        self._tables = BlockTables(num_blocks, group.device)
        self._slots = self._spans = torch.zeros(0, dtype=torch.int64)

    @property
    def nbytes(self) -> int:
        return self._kv.numel() * self._kv.element_size()

    def begin(self, tables: Sequence[list[int]], batch: TokenBatch, places: "Places | None" = None) -> None:
        """places: where to put what `append` and `attend` read, for a pass that is recorded on fixed memory."""
        self._tables.update(tables, batch)
        size, slots = self.block_size, list[int]()
        for start, stop, row, context in batch.spans:
            table = tables[row]
            slots += [table[at // size] * size + at % size for at in range(context, context + stop - start)]
        found = Places(torch.tensor(slots), torch.tensor(batch.spans))
        if places is None:
            places = found
        else:
            places.slots.copy_(found.slots)
            places.spans.copy_(found.spans)
        self._slots, self._spans = places

    def append(
        self,
        layer: int,
        k: Float[Tensor, "tokens local_kv_heads head_dim"],
        v: Float[Tensor, "tokens local_kv_heads head_dim"],
        batch: TokenBatch,
    ) -> None:
        append(k, v, *self._layers[layer], self._slots)

    def attend(
        self,
        layer: int,
        q: Float[Tensor, "tokens local_heads head_dim"],
        batch: TokenBatch,
        groups: HeadGroups,
        window: int | None,
    ) -> Float[Tensor, "tokens local_heads head_dim"]:
        return attend(q, *self._layers[layer], self._spans, self._tables.tensor, groups.ranges, window)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        if copies:
            source, target = torch.tensor(copies).unbind(1)
            self._kv[target] = self._kv[source]
