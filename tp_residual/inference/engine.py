"""The engine: any number of requests, of any settings, through one model at once. Every rank runs the same one in lockstep.

Ranks are given the same requests in the same order, and decide the same from values all of them have; a step is one forward pass over
the tokens that the scheduler chose, pieces of prompts and decode steps together. What a request generates depends on nothing else that
runs: not on who shares its passes, nor on how its prompt was cut.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias

import torch
from torch import Tensor

from tp_residual.errors import RequestError
from tp_residual.inference.compiled_cache import CompiledKVCache
from tp_residual.inference.decode_graphs import DecodeGraphs
from tp_residual.inference.finite import FiniteCheck
from tp_residual.inference.logprobs import FinalStates, TokenLogProb, token_log_probs
from tp_residual.inference.paged_cache import CacheCapacity, PagedKVCache, agree_on_capacity, kv_block_bytes, make_cache
from tp_residual.inference.profile import StepProfiler
from tp_residual.inference.recorded_decode import RecordedDecode
from tp_residual.inference.request import (
    EngineLimits,
    GenerationSettings,
    Request,
    ScoreRequest,
    check_pairs,
    check_prompts,
)
from tp_residual.inference.results import Generation, GenerationTimings, TokenEvent
from tp_residual.inference.sampling import Draw, Sampler
from tp_residual.inference.scheduler import BlockPool, Scheduled, Scheduler
from tp_residual.inference.scheduler import Sequence as ScheduledSequence
from tp_residual.inference.stop_strings import StoppableText
from tp_residual.inference.tokenizer import Tokenizer
from tp_residual.model.attention_backend import TokenBatch
from tp_residual.model.decoder import CausalLM
from tp_residual.model.fields import is_integer
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.vocabulary import request_checksum, require_same_request
from tp_residual.residual.boundary import Tap

logger = logging.getLogger("tp_residual")

_CHECKSUM_MODULUS = (1 << 53) - 111  # fp64, in which checksums travel, holds every integer below 2**53


@dataclass
class _Continuation:
    """What is known of a sequence beside its tokens. scored_from: the first of `whole` whose log-probability is wanted; None: of none."""

    settings: GenerationSettings
    result: Generation
    text: StoppableText | None
    whole: list[int]
    scored_from: int | None


_Work: TypeAlias = dict[ScheduledSequence, _Continuation]


class Engine:
    """All ranks of `group` make it, and call `add`, `step` and `drop`, alike. `cancel` is the exception: one rank suffices.

    tokenizer: for text; stop strings need it. check_finite: name the layer and rank where NaN or infinity first appears.
    memory_sharers: see `agree_on_capacity`. capacity: what was decided elsewhere, instead of `limits`' max_model_len and kv_memory.
    Raises RequestError on every rank when the limits leave no room for one request.
    """

    def __init__(
        self,
        model: CausalLM,
        group: TensorParallelGroup,
        limits: EngineLimits | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        check_finite: bool = False,
        memory_sharers: int | None = None,
        capacity: CacheCapacity | None = None,
        timings: GenerationTimings | None = None,
    ) -> None:
        if model.group is not group:
            raise RequestError(
                "the model was built on another group than the one given to the engine; pass model.group"
            )
        self.limits = limits or EngineLimits()
        self.model, self.group, self.tokenizer = model, group, tokenizer
        self.capacity = capacity or agree_on_capacity(
            model.layout, group, self.limits, model.dtype, memory_sharers=memory_sharers
        )
        self.cache = make_cache(model.layout, group, self.capacity.num_blocks, self.capacity.block_size, model.dtype)
        # what computes decode steps of one shape again and again; None: each as any other
        self.replay: DecodeGraphs | RecordedDecode | None = None
        if group.device.type == "cuda" and isinstance(self.cache, PagedKVCache):
            self.replay = DecodeGraphs(model, self.cache, self.limits.max_num_seqs)
        elif isinstance(self.cache, CompiledKVCache) and model.lm_head.packed is not None:
            self.replay = RecordedDecode(model, self.cache)
        self.profiler: StepProfiler | None = None
        self.timings = timings if timings is not None else GenerationTimings()
        self.timings.kv_cache_bytes = max(self.timings.kv_cache_bytes, self.cache.nbytes)
        self.pool = BlockPool(self.capacity.num_blocks, self.capacity.block_size)
        self.scheduler = Scheduler(
            self.pool,
            self.limits.max_num_seqs,
            self.limits.max_batched_tokens,
            self.capacity.max_model_len,
            # the rotation of "dynamic" follows from the length a sequence has when its key is computed
            whole_prompts=model.config.rope_type == "dynamic",
        )
        self._sampler = Sampler(model.lm_head.split, group, self.limits.max_num_seqs)
        self._finite = FiniteCheck(group) if check_finite else None
        self._work: _Work = {}
        self._numbers = count()
        self._checksum, self._must_agree = 1, False
        self._cancels: deque[int] = deque()

    # -- requests

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def room(self) -> int:
        """Sequences that could run beside those there are; 0 while any waits."""
        return self.scheduler.room

    def describe(self) -> str:
        """What the limits came to: for a person, at the start."""
        capacity = self.capacity
        blocks = (
            kv_block_bytes(self.model.layout, rank, capacity.block_size, self.model.dtype)
            for rank in range(self.group.size)
        )
        sizes = sorted({f"{capacity.num_blocks * block / 1e6:.1f}" for block in blocks}, key=float)
        size = sizes[0] if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        return (
            f"KV cache: {capacity.tokens} tokens in {capacity.num_blocks} blocks of {capacity.block_size}, "
            f"{size} MB a rank; {capacity.full_length_requests} requests of max_model_len={capacity.max_model_len} fit; "
            f"max_num_seqs={self.limits.max_num_seqs} "
            f"max_batched_tokens={self.limits.max_batched_tokens}"
        )

    def add(self, request: Request | ScoreRequest) -> int:
        """Queue it; the number by which events and `cancel` know it. It waits for as long as what it needs is taken.

        Raises RequestError, on every rank and leaving everything else as it was, for what can never be served.
        """
        if isinstance(request, ScoreRequest):
            whole = [*request.context_ids, *request.completion_ids]
            check_pairs(
                [(request.context_ids, request.completion_ids)],
                self.model.config,
                request.count,
                first_index=request.index,
                lengths=False,
            )
            settings = GenerationSettings(prompt_logprobs=request.count)
            # the last token is only predicted
            sequences = self._queue(f"sequence {request.index}", whole[:-1], 0, 1)
            scored_from: int | None = len(request.context_ids)
        else:
            whole, settings = list(request.prompt_ids), request.settings
            check_prompts([whole], self.model.config, settings, lengths=False, first_index=request.index)
            if settings.stop and self.tokenizer is None:
                raise RequestError(
                    f"stop strings {list(settings.stop)} are text, and no tokenizer was given; pass tokenizer"
                )
            sequences = self._queue(f"prompt {request.index}", whole, settings.max_new_tokens, settings.sampling.n)
            scored_from = None if settings.prompt_logprobs is None else 1
        for sequence in sequences:
            result = Generation(request.index, scored_from or 0, sequence.sample)
            if isinstance(request, Request):
                result.prompt_tokens = len(whole)
                result.logprobs = None if settings.logprobs is None else []
            if scored_from is not None:
                result.prompt_logprobs = []
            text = None
            if self.tokenizer is not None and isinstance(request, Request):
                text = StoppableText(self.tokenizer.stream(), settings.stop)
            self._work[sequence] = _Continuation(settings, result, text, whole, scored_from)
        if self.group.size > 1:
            # a rank that was given something else is noticed with the next token, or before anything whose shape a setting decides
            self._tell(request_checksum(whole, settings, request.index, scored_from))
            self._must_agree |= not settings.sampling.greedy or settings.logprobs is not None or scored_from is not None
        return sequences[0].request

    def cancel(self, request: int) -> None:
        """End it, on every rank, with the step in which all hear of it: the next one, or for several requests one step each.

        Any rank may call it, alone. Its continuations end with finish_reason "cancelled"; nothing happens when it has ended already.
        Raises RequestError for what is no request's number.
        """
        if not is_integer(request) or request < 0:
            raise RequestError(f"request={request!r} is not the number of a request; events have it as `request`")
        self._cancels.append(request)

    def drop(self, requests: Sequence[int]) -> None:
        """Forget them at once and without an event. All ranks alike."""
        for request in requests:
            self._tell(request)
            for sequence in self.scheduler.cancel(request):
                del self._work[sequence]

    def _queue(self, name: str, prompt_ids: list[int], max_new_tokens: int, samples: int) -> list[ScheduledSequence]:
        try:
            return self.scheduler.add(next(self._numbers), prompt_ids, max_new_tokens, samples)
        except RequestError as error:
            raise RequestError(f"{name}: {error}") from None

    # -- a step

    def step(self) -> list[TokenEvent]:
        """One forward pass. Its events come in the order of the sequences' admission, those of cancelled requests last.

        Raises GenerationError on every rank when ranks disagree in requests or tokens, and for logits that are NaN.
        """
        with self.profiler.step() if self.profiler is not None else nullcontext():
            return self._step()

    @torch.inference_mode()
    def _step(self) -> list[TokenEvent]:
        parts = self.scheduler.schedule()
        if not parts:
            self._cancels.clear()  # nothing is left that could be cancelled
            return []
        began, boundary_s = time.perf_counter(), self.group.counters.boundary_s
        used = (self.pool.num_blocks - self.pool.free_blocks) * self.cache.nbytes // self.pool.num_blocks
        self.timings.kv_used_bytes = max(self.timings.kv_used_bytes, used)
        if self._must_agree:
            require_same_request(self.group, self._checksum)
            self._must_agree = False
        decoding = sum(bool(part.sequence.generated_ids) for part in parts)
        tokens = sum(len(part.ids) for part in parts)
        logits = self._forward(parts)
        live = self._live(parts)
        chosen, scored, cancelled = self._choose(logits, live)
        boundary_s = self.group.counters.boundary_s - boundary_s
        self.timings.add_pass(tokens - decoding, decoding, time.perf_counter() - began, boundary_s)
        events = self._scored(parts)
        for at, (sequence, _) in enumerate(live):
            events.append(self._account(sequence, chosen[at], scored.get(at)))
        for request in cancelled:
            events += self._cancel(request)
        return events

    def _forward(self, parts: list[Scheduled]) -> Tensor:
        """The logits of the last token of each part that needs one; what is scored on the way is noted."""
        model, device = self.model, self.group.device
        scored = any(map(self._wants_scores, parts))
        watched = self._finite is not None or self.profiler is not None or self.group.ranges is not None or scored
        if self.replay is not None and not watched and self.replay.serves(parts):
            return self.replay.run(parts, self.scheduler.tables)
        batch = TokenBatch.of([(part.sequence.row, part.context, part.ids) for part in parts], device)
        self.cache.begin(self.scheduler.tables, batch)
        last = [span.stop - 1 for span, part in zip(batch.spans, parts, strict=True) if part.sequence.needs_token]
        states = FinalStates(model) if scored else None
        taps: tuple[Tap, ...] = tuple(tap for tap in (self._finite, states) if tap is not None)
        logit_rows = torch.tensor(last, dtype=torch.long, device=device)
        logits = model(batch, self.cache, logit_rows=logit_rows, taps=taps).local_logits
        if self._finite is not None:
            self._finite.require(logits)
        if states is not None:
            self._score(states, batch, parts)
        return logits

    def _live(self, parts: list[Scheduled]) -> list[tuple[ScheduledSequence, int]]:
        """The sequences that get a token now, each with its row of logits: a prompt's samples all have its last one."""
        live, copies, row = [], [], 0
        for sequence, _, _ in parts:
            if not sequence.needs_token:
                continue
            begins = not sequence.generated_ids
            followers, copied = self.scheduler.fork(sequence) if begins else ([], [])
            copies += copied
            for each in (sequence, *followers):
                if begins:
                    self._sampler.begin(each.row, self._work[each].settings.sampling, each.prompt_ids)
                if each is not sequence:
                    self._work[each].result.prompt_logprobs = self._work[sequence].result.prompt_logprobs
                live.append((each, row))
            row += 1
        self.cache.copy_blocks(copies)
        return live

    def _choose(
        self, logits: Tensor, live: list[tuple[ScheduledSequence, int]]
    ) -> tuple[list[int], dict[int, TokenLogProb], list[int]]:
        """(tokens, log-probabilities by place where asked for, requests that some rank wants cancelled)."""
        rows = [row for _, row in live]
        if len(rows) > logits.shape[0]:
            logits = logits.index_select(0, torch.tensor(rows, device=logits.device))
        states = [self._work[sequence] for sequence, _ in live]
        told = [at for at, state in enumerate(states) if state.settings.logprobs is not None]
        raw = logits.clone() if told else logits
        self._forbid_early_stops(logits, states)
        draws = [
            Draw(state.settings.sampling, sequence.row, state.result.index, sequence.sample, sequence.computed)
            for (sequence, _), state in zip(live, states, strict=True)
        ]
        note = self._cancels[0] + 1 if self._cancels else 0
        chosen, notes = self._sampler.choose(logits, draws, self._checksum, note)
        if note:
            self._cancels.popleft()
        scored = {}
        if told:
            most = max(state.settings.logprobs or 0 for state in states)
            split = self.model.lm_head.split
            found = token_log_probs(raw[told], [chosen[at] for at in told], most, split, self.group)
            scored = {at: each.cut(states[at].settings.logprobs or 0) for at, each in zip(told, found, strict=True)}
        return chosen, scored, list(dict.fromkeys(note - 1 for note in notes if note))

    def _account(self, sequence: ScheduledSequence, token_id: int, log_prob: TokenLogProb | None) -> TokenEvent:
        state = self._work[sequence]
        settings, result, text = state.settings, state.result, state.text
        self._tell(token_id)
        sequence.generated_ids.append(token_id)
        result.token_ids.append(token_id)
        if log_prob is not None:
            assert result.logprobs is not None
            result.logprobs.append(log_prob)
        new = text.step(token_id) if text is not None else ""
        if (not settings.ignore_eos and token_id in settings.stop_token_ids) or (text is not None and text.stopped):
            result.finish_reason = "stop"
        elif len(result.token_ids) == settings.max_new_tokens:
            result.finish_reason = "length"
        else:
            return TokenEvent(sequence.request, result.index, result.sample, token_id, new)
        self.scheduler.finish(sequence)
        return self._end(sequence, token_id, new)

    def _cancel(self, request: int) -> list[TokenEvent]:
        self._tell(request)
        events = []
        for sequence in self.scheduler.cancel(request):
            self._work[sequence].result.finish_reason = "cancelled"
            events.append(self._end(sequence, None, ""))
        return events

    def _end(self, sequence: ScheduledSequence, token_id: int | None, new: str) -> TokenEvent:
        state = self._work.pop(sequence)
        result, text = state.result, state.text
        if text is not None:
            new += text.finish()
            result.text = text.text
            if text.stopped and result.finish_reason == "length":
                result.finish_reason = "stop"  # by characters that only the end made certain
        return TokenEvent(sequence.request, result.index, result.sample, token_id, new, result)

    def _forbid_early_stops(self, logits: Tensor, states: list[_Continuation]) -> None:
        """Before min_new_tokens, stop tokens get -inf on the rank that holds them."""
        start, stop = self.model.lm_head.split.ranges[self.group.rank]
        for row, state in enumerate(states):
            settings = state.settings
            if settings.ignore_eos or len(state.result.token_ids) >= settings.min_new_tokens:
                continue
            mine = [token_id - start for token_id in settings.stop_token_ids if start <= token_id < stop]
            logits[row, mine] = -torch.inf

    # -- log-probabilities of tokens that were given

    def _wants_scores(self, part: Scheduled) -> bool:
        state = self._work[part.sequence]
        if state.scored_from is None:
            return False
        return state.scored_from <= part.context + len(part.ids) and part.context + 1 < len(state.whole)

    def _score(self, states: FinalStates, batch: TokenBatch, parts: list[Scheduled]) -> None:
        """Of all the tokens that this pass predicts and that are known and asked about, at once."""
        rows, targets, owners = list[int](), list[int](), list[_Continuation]()
        for span, part in zip(batch.spans, parts, strict=True):
            if self._wants_scores(part):
                state = self._work[part.sequence]
                assert state.scored_from is not None
                first = max(state.scored_from, part.context + 1)
                last = min(len(state.whole), part.context + len(part.ids) + 1)
                rows += range(span.start + first - 1 - part.context, span.start + last - 1 - part.context)
                targets += state.whole[first:last]
                owners += [state] * (last - first)
        most = max(state.settings.prompt_logprobs or 0 for state in owners)
        for state, found in zip(owners, states.log_probs(rows, targets, most), strict=True):
            assert state.result.prompt_logprobs is not None
            state.result.prompt_logprobs.append(found.cut(state.settings.prompt_logprobs or 0))

    def _scored(self, parts: list[Scheduled]) -> list[TokenEvent]:
        """Those that were only to be scored, and now are."""
        events = []
        for sequence, _, _ in parts:
            if not sequence.max_new_tokens and not sequence.prefilling:
                self._work[sequence].result.finish_reason = "scored"
                self.scheduler.finish(sequence)
                events.append(self._end(sequence, None, ""))
        return events

    def _tell(self, number: int) -> None:
        """Into the checksum that every step compares."""
        self._checksum = (self._checksum * 1_000_003 + number + 1) % _CHECKSUM_MODULUS
