"""Decode steps of fixed shapes, captured once as CUDA graphs and replayed: at few sequences, launching kernels takes longer than they run.

A step of any number of sequences runs in the next larger captured size (1, 2, 4, 8, ...), with block tables cut at the next power of two.
Rows that only fill up compute on a block of their own: they write nowhere else, nobody reads them, and their logits are cut off.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tp_residual.inference.paged_cache import PagedKVCache
from tp_residual.inference.scheduler import Scheduled, only_decodes
from tp_residual.model.attention_backend import HeadGroups, Span, TokenBatch
from tp_residual.model.decoder import CausalLM


class DecodeGraphs:
    """For a model on one device, whose cache is `cache`. All ranks of its group run the same steps, and so capture the same graphs.

    captures: whether steps are captured; on the CPU they are computed each time, with the same shapes and values.
    """

    def __init__(self, model: CausalLM, cache: PagedKVCache, max_num_seqs: int) -> None:
        self._model, self._cache = model, cache
        self.captures = model.group.device.type == "cuda"
        self._most = max_num_seqs
        self._steps: dict[tuple[int, int], _Step] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.captures else None

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(sequences, blocks a table) of what was prepared so far."""
        return list(self._steps)

    def serves(self, parts: Sequence[Scheduled]) -> bool:
        """Whether a step is one token of each sequence, and each gets another. Rope type "dynamic" needs lengths, which are no tensor."""
        return self._model.config.rope_type != "dynamic" and only_decodes(parts)

    def run(self, parts: Sequence[Scheduled], tables: Sequence[list[int]]) -> Float[Tensor, "rows local_vocab"]:
        """The logits of each part's token. Valid until the next step."""
        blocks = max(part.context // self._cache.block_size + 1 for part in parts)
        size = min(_next_power_of_two(len(parts)), max(self._most, len(parts))), _next_power_of_two(blocks)
        step = self._steps.get(size)
        if step is None:
            step = self._steps[size] = _Step(self._cache, *size)
        step.fill(parts, tables)
        if step.replay is None:
            step.replay = self._prepare(step)
        return step.replay()[: len(parts)]

    def _prepare(self, step: "_Step") -> Callable[[], Tensor]:
        def compute() -> Tensor:
            return self._model(step.batch, step).local_logits

        if not self.captures:
            return compute
        # what is made on first use (libraries' handles, a boundary's buffers) must not be made while capturing
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                compute()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # thread-local: a watchdog's thread asks for the state of events, which global capture takes for an error
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = compute()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay


class _Step:
    """The attention backend of `rows` sequences of one token each, with tables of `width` blocks: buffers that a graph reads in place."""

    def __init__(self, cache: PagedKVCache, rows: int, width: int) -> None:
        device = cache.kv.device
        self._cache, self._rows = cache, rows
        ids, positions, self._blocks, self._offsets = torch.zeros(4, rows, dtype=torch.long, device=device).unbind()
        self._tables = torch.full((rows, width), cache.scratch_block, dtype=torch.long, device=device)
        self._places = torch.arange(width * cache.block_size, device=device)
        spans = tuple(Span(row, row + 1, row, 0) for row in range(rows))
        self.batch = TokenBatch(ids, positions, spans)
        self.replay: Callable[[], Tensor] | None = None

    def fill(self, parts: Sequence[Scheduled], tables: Sequence[list[int]]) -> None:
        """This step's tokens; the rows that are left write to the scratch block and read it alone."""
        size, width, scratch = self._cache.block_size, self._tables.shape[1], self._cache.scratch_block
        idle = self._rows - len(parts)
        contexts = [part.context for part in parts]
        used = [tables[part.sequence.row][: context // size + 1] for part, context in zip(parts, contexts, strict=True)]
        columns = (
            [part.ids[0] for part in parts] + [0] * idle,
            contexts + [0] * idle,
            [blocks[-1] for blocks in used] + [scratch] * idle,
            [context % size for context in contexts] + [0] * idle,
        )
        targets = self.batch.token_ids, self.batch.positions, self._blocks, self._offsets
        for target, values in zip(targets, columns, strict=True):
            target.copy_(torch.tensor(values))
        self._tables.copy_(
            torch.tensor([blocks + [scratch] * (width - len(blocks)) for blocks in used] + [[scratch] * width] * idle)
        )

    def append(
        self,
        layer: int,
        k: Float[Tensor, "tokens local_kv_heads head_dim"],
        v: Float[Tensor, "tokens local_kv_heads head_dim"],
        batch: TokenBatch,
    ) -> None:
        self._cache.write(layer, k, v, self._blocks, self._offsets)

    def attend(
        self,
        layer: int,
        q: Float[Tensor, "tokens local_heads head_dim"],
        batch: TokenBatch,
        groups: HeadGroups,
        window: int | None,
    ) -> Float[Tensor, "tokens local_heads head_dim"]:
        behind = batch.positions[:, None] - self._places
        seen = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
        k, v = (self._gather(kept, seen) for kept in self._cache.kv[layer])
        slots = q if groups.even else q.index_select(1, groups.query_of_slot)
        folded = slots.unflatten(1, (groups.kv_heads, groups.slots))
        out = torch.nn.functional.scaled_dot_product_attention(folded, k, v, attn_mask=seen[:, None, None])
        out = out.flatten(1, 2)
        return out if groups.even else out.index_select(1, groups.slot_of_query)

    def _gather(self, kept: Tensor, seen: Tensor) -> Tensor:
        """`[rows, local_kv_heads, places, head_dim]`; zero where nothing is seen, since a mask would let NaN through."""
        found = kept[self._tables].transpose(1, 2).flatten(2, 3)
        return found.masked_fill(~seen[:, None, :, None], 0)


def _next_power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
