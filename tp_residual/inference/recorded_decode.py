"""Decode steps of few sequences on a CPU, recorded once for each number of them and then run without Python between the kernels.

Embedding, rotary tables and sampling stay outside: they run as always, into and out of fixed memory.
"""

import logging
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tp_residual.inference.compiled_cache import CompiledKVCache, Places
from tp_residual.inference.scheduler import Scheduled, only_decodes
from tp_residual.kernels.recording import Program, recording
from tp_residual.model.attention_backend import Span, TokenBatch
from tp_residual.model.decoder import CausalLM
from tp_residual.model.rope import RopeTables, rope_tables
from tp_residual.parallel.partial import Partial
from tp_residual.parallel.shared import SharedTransport

logger = logging.getLogger("tp_residual")

# Of more, the kernels take so long that Python is some percent; each recording keeps the memory of a whole pass.
MOST_SEQUENCES = 8


class RecordedDecode:
    """For a model whose weights are packed, on `cache`. All ranks of its group run the same steps.

    refused: why no step of this model can be recorded, once that is known; "" otherwise.
    """

    def __init__(self, model: CausalLM, cache: CompiledKVCache) -> None:
        self._model, self._cache = model, cache
        self._steps: dict[int, _Step] = {}
        self.refused = ""
        if model.group.checked:
            self.refused = "collectives are compared one by one"

    def serves(self, parts: Sequence[Scheduled]) -> bool:
        """Whether a step is one token of each of a few sequences, and each gets another. Rope type "dynamic" turns by lengths."""
        if self.refused or len(parts) > MOST_SEQUENCES or self._model.config.rope_type == "dynamic":
            return False
        transport = self._model.group.transport
        if isinstance(transport, SharedTransport) and not transport.is_usable:
            return False  # a step that runs as always says why
        return only_decodes(parts)

    def run(self, parts: Sequence[Scheduled], tables: Sequence[list[int]]) -> Float[Tensor, "rows local_vocab"]:
        """The logits of each part's token. Valid until the next step."""
        model, group = self._model, self._model.group
        step = self._steps.get(len(parts))
        if step is None:
            step = self._steps[len(parts)] = _Step(model, len(parts))
        batch = step.fill(self._cache, parts, tables)
        embedded = model.model.embed_tokens(batch.token_ids)
        step.embedded.copy_(embedded.value)
        rope = rope_tables(model.config, batch.positions, model.dtype)
        for kept, now in zip(step.rope, rope, strict=True):
            kept.copy_(now)
        if step.program is None:
            return self._record(step, batch)
        before, program = group.record.number, step.program
        waited = program.boundary_s

        def wait(number: int, exchange_at: int, status: int) -> None:
            transport = group.transport
            assert isinstance(transport, SharedTransport), "only its exchanges are recorded"
            group.wait_for_recorded(
                program.collectives[number], before + number + 1, lambda: transport.go_on(exchange_at, status)
            )

        program.run(wait)
        group.counters.boundary_s += program.boundary_s - waited
        group.count_recorded(program.collectives, before)
        return step.logits

    def _record(self, step: "_Step", batch: TokenBatch) -> Tensor:
        """The first step of a size runs as always, since some things are made on first use; the second is recorded."""
        embedded = Partial(step.embedded, self._model.group, self._model.model.embed_tokens.name)
        if not step.warm:
            step.warm = True
            return self._model.forward_embedded(embedded, step.rope, batch, self._cache).local_logits
        with recording() as current:
            step.logits = self._model.forward_embedded(embedded, step.rope, batch, self._cache).local_logits
        if current.foreign:
            self.refused = current.foreign
            self._steps.clear()
            if self._model.group.rank == 0:
                logger.info("decode steps are not recorded: %s is no kernel that can be", current.foreign)
        else:
            step.program = current.program(step)
        return step.logits


class _Step:
    """`rows` sequences of one token each: the memory that a recorded pass reads and writes."""

    def __init__(self, model: CausalLM, rows: int) -> None:
        config = model.config
        wide = torch.float64 if model.dtype == torch.float64 else torch.float32
        self.embedded = torch.empty(rows, config.hidden_size, dtype=model.dtype)
        self.rope = RopeTables(*torch.empty(2, rows, config.head_dim, dtype=wide).unbind())
        self.places = Places(torch.empty(rows, dtype=torch.long), torch.empty(rows, 4, dtype=torch.long))
        self.logits = torch.empty(0)
        self.warm = False
        self.program: Program | None = None

    def fill(self, cache: CompiledKVCache, parts: Sequence[Scheduled], tables: Sequence[list[int]]) -> TokenBatch:
        both = torch.tensor([[part.ids[0] for part in parts], [part.context for part in parts]])
        spans = tuple(Span(at, at + 1, part.sequence.row, part.context) for at, part in enumerate(parts))
        batch = TokenBatch(both[0], both[1], spans)
        cache.begin(tables, batch, self.places)
        return batch
