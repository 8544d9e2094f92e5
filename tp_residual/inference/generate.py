"""Generation for a batch of prompts of any lengths, on every rank alike: greedy, or drawn as `sampling` says."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tp_residual.errors import RequestError
from tp_residual.inference.finite import FiniteCheck
from tp_residual.inference.kv_cache import KVCache
from tp_residual.inference.logprobs import FinalStates, TokenLogProb, token_log_probs
from tp_residual.inference.request import GenerationSettings, check_prompts
from tp_residual.inference.sampling import Sampler
from tp_residual.inference.stop_strings import StoppableText
from tp_residual.inference.tokenizer import Tokenizer
from tp_residual.model.attention_backend import TokenBatch
from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.vocabulary import request_checksum, require_same_request
from tp_residual.residual.boundary import Tap

_CHECKSUM_MODULUS = (1 << 53) - 111  # fp64, in which checksums travel, holds every integer below 2**53


@dataclass
class Generation:
    """One continuation. token_ids: the new ones, those of the stop included. finish_reason: "stop" or "length".

    text: without special tokens, ending before a stop string; None without a tokenizer. logprobs, prompt_logprobs: as asked for;
    the prompt's first token, which nothing predicts, has none.
    """

    index: int
    prompt_tokens: int
    sample: int = 0
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    text: str | None = None
    logprobs: list[TokenLogProb] | None = None
    prompt_logprobs: list[TokenLogProb] | None = None


@dataclass
class GenerationTimings:
    """Wall-clock seconds and token counts of the two steps, on this rank; of decode also what boundaries took (see `Counters`)."""

    prefill_s: float = 0.0
    prefill_tokens: int = 0
    decode_s: float = 0.0
    decode_tokens: int = 0
    decode_passes: int = 0
    decode_boundary_s: float = 0.0
    kv_cache_bytes: int = 0

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.prefill_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0


def generate(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    group: TensorParallelGroup,
    settings: GenerationSettings,
    *,
    tokenizer: Tokenizer | None = None,
    indices: Sequence[int] | None = None,
    on_token: Callable[[int, int], None] | None = None,
    on_finish: Callable[[Generation], None] | None = None,
    check_finite: bool = False,
    timings: GenerationTimings | None = None,
) -> list[Generation]:
    """Continue each prompt (token ids); all ranks of `group` call it with the same arguments and get the same result.

    The result has settings.sampling.n continuations a prompt, in order. tokenizer: for their text; stop strings need it. indices: the
    prompts' places in the list they come from, which key their noise (0, 1, ... unless given). on_token(row, token_id): called for each
    new token as it is chosen, row counting continuations. on_finish(continuation): as soon as one has ended. check_finite: name
    the layer and rank where NaN or infinity first appears. timings: added to, when given.
    Raises RequestError, before any collective, for what `check_prompts` refuses; GenerationError on every rank when ranks
    disagree in prompts, settings or tokens.
    """
    if model.group is not group:
        raise RequestError("the model was built on another group than the one given to generate(); pass model.group")
    check_prompts(prompts, model.config, settings)
    if settings.stop and tokenizer is None:
        raise RequestError(f"stop strings {list(settings.stop)} are text, and no tokenizer was given; pass tokenizer")
    timings = timings if timings is not None else GenerationTimings()
    indices = range(len(prompts)) if indices is None else indices
    samples = settings.sampling.n
    results = [
        Generation(index, len(prompt), sample)
        for index, prompt in zip(indices, prompts, strict=True)
        for sample in range(samples)
    ]
    kept_logprobs = [list[TokenLogProb]() for _ in results]
    if settings.logprobs is not None:
        for result, kept in zip(results, kept_logprobs, strict=True):
            result.logprobs = kept
    longest = max(len(prompt) for prompt in prompts) + settings.max_new_tokens
    cache = KVCache(model.layout, group, rows=len(results), max_tokens=longest, dtype=model.dtype)
    timings.kv_cache_bytes = max(timings.kv_cache_bytes, cache.nbytes)
    parts = [(row, 0, list(prompts[row // samples])) for row in range(len(results))]
    checksum = request_checksum(
        parts, settings, list(indices)
    )  # a rank that was given other ones is noticed with the first token
    if not settings.sampling.greedy:
        require_same_request(group, checksum)  # settings decide the shapes of what is exchanged
    draws = [(result.index, result.sample) for result in results]
    sampler = Sampler(settings.sampling, model.lm_head.split, group, [ids for _, _, ids in parts], draws)
    texts = [StoppableText(tokenizer.stream(), settings.stop) for _ in results] if tokenizer is not None else None
    finite = FiniteCheck(group) if check_finite else None
    with torch.inference_mode():
        while parts:
            began, boundary_s = time.perf_counter(), group.counters.boundary_s
            batch = TokenBatch.of(parts, group.device)
            last_rows = torch.tensor([span.stop - 1 for span in batch.spans], device=group.device)
            taps: tuple[Tap, ...] = (finite,) if finite is not None else ()
            states = FinalStates(model) if settings.prompt_logprobs is not None and parts[0][1] == 0 else None
            logits = model(
                batch, cache, logit_rows=last_rows, taps=taps if states is None else (*taps, states)
            ).local_logits
            if finite is not None:
                finite.require(logits)
            if states is not None:
                _add_prompt_logprobs(states, batch, parts, results, settings)
            active = [row for row, _, _ in parts]
            raw = logits.clone() if settings.logprobs is not None else logits
            _forbid_early_stops(logits, [results[row] for row in active], settings, model)
            chosen = sampler.choose(logits, active, [context + len(ids) for _, context, ids in parts], checksum)
            if settings.logprobs is not None:
                scored = token_log_probs(raw, chosen, settings.logprobs, model.lm_head.split, group)
                for row, each in zip(active, scored, strict=True):
                    kept_logprobs[row].append(each)
            boundary_s = group.counters.boundary_s - boundary_s
            _count(timings, parts, len(chosen), time.perf_counter() - began, boundary_s)
            following = []
            for (row, context, ids), token_id in zip(parts, chosen, strict=True):
                checksum = (checksum * 1_000_003 + token_id + 1) % _CHECKSUM_MODULUS
                result, text = results[row], texts[row] if texts is not None else None
                result.token_ids.append(token_id)
                if on_token is not None:
                    on_token(row, token_id)
                if text is not None:
                    text.step(token_id)
                if (not settings.ignore_eos and token_id in settings.stop_token_ids) or (
                    text is not None and text.stopped
                ):
                    result.finish_reason = "stop"
                elif len(result.token_ids) == settings.max_new_tokens:
                    result.finish_reason = "length"
                else:
                    following.append((row, context + len(ids), [token_id]))
                    continue
                if text is not None:
                    text.finish()
                    result.text = text.text
                    if text.stopped:
                        result.finish_reason = "stop"
                if on_finish is not None:
                    on_finish(result)
            parts = following
    return results


def _add_prompt_logprobs(
    states: FinalStates,
    batch: TokenBatch,
    parts: list[tuple[int, int, list[int]]],
    results: list[Generation],
    settings: GenerationSettings,
) -> None:
    """Of each prompt once, shared by its samples."""
    assert settings.prompt_logprobs is not None
    for span, (row, _, ids) in zip(batch.spans, parts, strict=True):
        if results[row].sample == 0:
            scored = states.log_probs(range(span.start, span.stop - 1), ids[1:], settings.prompt_logprobs)
        results[row].prompt_logprobs = scored


def _forbid_early_stops(
    logits: Tensor, results: list[Generation], settings: GenerationSettings, model: CausalLM
) -> None:
    """Before min_new_tokens, stop tokens get -inf on the rank that holds them."""
    if settings.ignore_eos:
        return
    start, stop = model.lm_head.split.ranges[model.group.rank]
    mine = [token_id - start for token_id in settings.stop_token_ids if start <= token_id < stop]
    for row, result in enumerate(results):
        if mine and len(result.token_ids) < settings.min_new_tokens:
            logits[row, mine] = -torch.inf


def _count(
    timings: GenerationTimings, parts: list[tuple[int, int, list[int]]], rows: int, seconds: float, boundary_s: float
) -> None:
    if parts[0][1] == 0:
        timings.prefill_s += seconds
        timings.prefill_tokens += sum(len(ids) for _, _, ids in parts)
    else:
        timings.decode_s += seconds
        timings.decode_tokens += rows
        timings.decode_passes += 1
        timings.decode_boundary_s += boundary_s
