"""The paged KV cache: blocks of a few tokens that any sequence may hold, found through its block table; and how many there are.

The number of blocks is agreed by all ranks, since each holds its own heads of the same tokens: it is what the poorest has room for.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tp_residual.errors import RequestError
from tp_residual.inference.block_tables import BlockTables
from tp_residual.inference.compiled_cache import CompiledKVCache
from tp_residual.inference.paged_attention import PagedAttention, PagedPass, SdpaAttention, choose_attention
from tp_residual.inference.request import EngineLimits, check_limits
from tp_residual.inference.scheduler import BLOCK_SIZE, BlockCopy, blocks_for
from tp_residual.kernels.decoder import attention_block
from tp_residual.machine import available_memory
from tp_residual.model.attention_backend import AttentionBackend, HeadGroups, TokenBatch
from tp_residual.model.layout import ModelLayout
from tp_residual.parallel.group import TensorParallelGroup

logger = logging.getLogger("tp_residual")

# Of the memory that is free once the weights are there. The rest is for activations and, on a CPU, for everybody else: its pages are
# taken only when tokens are written to them.
CPU_SHARE, CUDA_SHARE = 0.5, 0.8


class BlockCache(AttentionBackend, Protocol):
    """What an engine needs of a cache, whoever computes it. Spans' rows are places in `tables`."""

    num_blocks: int

    @property
    def nbytes(self) -> int: ...

    def begin(self, tables: Sequence[list[int]], batch: TokenBatch) -> None:
        """Once before each forward pass. A table is a list that is replaced when it changes, never altered."""
        ...

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Keys and values of whole blocks, in all layers; between passes."""
        ...


class PagedKVCache:
    """`[layers, 2, blocks, local_kv_heads, block_size, head_dim]`, this rank's KV heads.

    attention: who computes it (None: SDPA). Behind the blocks that sequences hold lies one for rows that only fill up a captured step
    (see `decode_graphs`).
    """

    def __init__(
        self,
        layout: ModelLayout,
        group: TensorParallelGroup,
        num_blocks: int,
        block_size: int = BLOCK_SIZE,
        dtype: torch.dtype = torch.float32,
        attention: PagedAttention | None = None,
    ) -> None:
        config = layout.config
        self.num_blocks, self.block_size, self.scratch_block = num_blocks, block_size, num_blocks
        heads = layout.heads.key_value.size(group.rank)
        shape = (config.num_hidden_layers, 2, num_blocks + 1, heads, block_size, config.head_dim)
        self.kv = torch.empty(shape, dtype=dtype, device=group.device)
        self.attention = attention or SdpaAttention()
        self._tables = BlockTables(num_blocks, group.device)
        self._blocks = self._offsets = torch.zeros(0, dtype=torch.int32, device=group.device)

    @property
    def nbytes(self) -> int:
        return self.kv[:, :, : self.num_blocks].numel() * self.kv.element_size()

    def begin(self, tables: Sequence[list[int]], batch: TokenBatch) -> None:
        self._tables.update(tables, batch)
        device = self.kv.device
        rows = torch.tensor([span.row for span in batch.spans], device=device)
        counts = torch.tensor([span.stop - span.start for span in batch.spans], device=device)
        positions = batch.positions
        at = torch.div(positions, self.block_size, rounding_mode="floor")
        self._blocks = self._tables.tensor[rows.repeat_interleave(counts), at].long()
        self._offsets = positions - at * self.block_size
        self.attention.begin(PagedPass(self._tables.tensor, batch, self.block_size))

    def append(
        self,
        layer: int,
        k: Float[Tensor, "tokens local_kv_heads head_dim"],
        v: Float[Tensor, "tokens local_kv_heads head_dim"],
        batch: TokenBatch,
    ) -> None:
        self.write(layer, k, v, self._blocks, self._offsets)

    def write(
        self,
        layer: int,
        k: Float[Tensor, "tokens local_kv_heads head_dim"],
        v: Float[Tensor, "tokens local_kv_heads head_dim"],
        blocks: Int[Tensor, " tokens"],
        offsets: Int[Tensor, " tokens"],
    ) -> None:
        """Each token to its place in its block, whoever says which these are."""
        keys, values = self.kv[layer]
        keys[blocks, :, offsets] = k
        values[blocks, :, offsets] = v

    def attend(
        self,
        layer: int,
        q: Float[Tensor, "tokens local_heads head_dim"],
        batch: TokenBatch,
        groups: HeadGroups,
        window: int | None,
    ) -> Float[Tensor, "tokens local_heads head_dim"]:
        keys, values = self.kv[layer]
        return self.attention.attend(keys, values, q, groups, window)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        if copies:
            source, target = torch.tensor(copies, device=self.kv.device).unbind(1)
            self.kv[:, :, target] = self.kv[:, :, source]


def make_cache(
    layout: ModelLayout, group: TensorParallelGroup, num_blocks: int, block_size: int, dtype: torch.dtype
) -> BlockCache:
    """The one place that chooses who keeps the cache, and who attends: compiled on the CPU where it takes such heads in such blocks."""
    try:
        if group.device.type == "cpu" and attention_block(layout.config.head_dim, dtype) == block_size:
            return CompiledKVCache(layout, group, num_blocks, dtype)
        groups = HeadGroups(layout.heads, group.rank, group.device)
        attention = choose_attention(groups, layout.config.head_dim, dtype)
        return PagedKVCache(layout, group, num_blocks, block_size, dtype, attention)
    except (RuntimeError, OSError) as error:  # torch's allocators raise nothing narrower
        nbytes = num_blocks * kv_block_bytes(layout, group.rank, block_size, dtype)
        raise RequestError(
            f"kv_memory={nbytes} bytes could not be allocated on rank {group.rank} ({error}); use less"
        ) from None


def kv_block_bytes(layout: ModelLayout, rank: int, block_size: int, dtype: torch.dtype) -> int:
    """What a block takes of a rank's memory: keys and values of its KV heads in all layers."""
    config = layout.config
    heads = layout.heads.key_value.size(rank)
    return 2 * config.num_hidden_layers * heads * block_size * config.head_dim * dtype.itemsize


@dataclass(frozen=True)
class CacheCapacity:
    """The same on all ranks. max_model_len: what a sequence may have at most; at least one of that length fits."""

    num_blocks: int
    block_size: int
    max_model_len: int

    @property
    def tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def full_length_requests(self) -> int:
        return self.num_blocks // blocks_for(self.max_model_len, self.block_size)


def agree_on_capacity(
    layout: ModelLayout,
    group: TensorParallelGroup,
    limits: EngineLimits,
    dtype: torch.dtype,
    *,
    memory_sharers: int | None = None,
    block_size: int = BLOCK_SIZE,
) -> CacheCapacity:
    """As many blocks as the poorest rank has memory for, and not more than max_num_seqs sequences of max_model_len tokens fill.

    One all-gather. memory_sharers: ranks that divide this machine's memory; those of the group that run here unless given.
    Raises RequestError on every rank when one sequence of a given max_model_len does not fit, or not even one block.
    """
    config = layout.config
    check_limits(limits, config)
    wanted = limits.max_model_len or config.max_sequence_length
    ours = limits.kv_memory if limits.kv_memory is not None else free_memory(group, memory_sharers)
    ours = min(ours, 1 << 60)  # travels as 64 bits, and is more than there is
    block_bytes = [kv_block_bytes(layout, rank, block_size, dtype) for rank in range(group.size)]
    available = [ours]
    if group.size > 1:
        told = torch.tensor([ours], dtype=torch.long, device=group.device)
        available = group.run("all_gather", "kv_cache", told, lambda transport, t: transport.all_gather(t)).tolist()
    room = [memory // block for memory, block in zip(available, block_bytes, strict=True)]
    poorest = room.index(min(room))
    fitting = min(room) * block_size
    if fitting < (wanted if limits.max_model_len is not None else 1):
        needed = blocks_for(wanted if limits.max_model_len is not None else 1, block_size) * max(block_bytes)
        held = f"kv_memory={available[poorest]} bytes on rank {poorest} hold {fitting} tokens of the KV cache"
        if limits.max_model_len is None:
            whole = blocks_for(wanted, block_size) * max(block_bytes)
            raise RequestError(
                f"{held}, and it comes in blocks of {block_size}; give kv_memory of at least {needed}, or {whole} for sequences of all "
                f"{wanted} positions"
            )
        shorter = f"use max_model_len of at most {fitting}, or " if fitting else ""
        raise RequestError(
            f"{held}, and one sequence of max_model_len={wanted} needs more; {shorter}give kv_memory of at least {needed}"
        )
    max_model_len = min(wanted, fitting)
    if max_model_len < wanted and group.rank == 0:
        logger.info(
            "max_model_len: %d instead of %d, since the KV cache of rank %d holds no more (kv_memory=%d bytes)",
            max_model_len, wanted, poorest, available[poorest],
        )  # fmt: skip
    useful = limits.max_num_seqs * blocks_for(max_model_len, block_size)
    return CacheCapacity(min(min(room), useful), block_size, max_model_len)


def free_memory(group: TensorParallelGroup, memory_sharers: int | None = None) -> int:
    """Bytes that this rank's cache may take when nobody said how many: a share of what is free, divided by the ranks that divide it."""
    if group.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(group.device)
        return int(CUDA_SHARE * free)
    if memory_sharers is None:
        here = group.processes[group.rank].host if group.processes else ""
        memory_sharers = max(1, sum(process.host == here for process in group.processes))
    return int(CPU_SHARE * available_memory() / memory_sharers)
