"""Greedy generation for a batch of prompts of any lengths, on every rank alike."""

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tp_residual.errors import RequestError
from tp_residual.inference.kv_cache import KVCache
from tp_residual.inference.request import GenerationSettings, check_prompts
from tp_residual.model.attention_backend import TokenBatch
from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.vocabulary import vocab_parallel_argmax

_CHECKSUM_MODULUS = (1 << 53) - 111  # fp64, in which checksums travel, holds every integer below 2**53


@dataclass
class Generation:
    """One prompt's continuation. token_ids: the new ones, the stop token included. finish_reason: "stop" or "length"."""

    index: int
    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""


@dataclass
class GenerationTimings:
    """Wall-clock seconds and token counts of the two steps, on this rank."""

    prefill_s: float = 0.0
    prefill_tokens: int = 0
    decode_s: float = 0.0
    decode_tokens: int = 0
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
    on_token: Callable[[int, int], None] | None = None,
    timings: GenerationTimings | None = None,
) -> list[Generation]:
    """Continue each prompt (token ids) greedily; all ranks of `group` call it with the same arguments and get the same result.

    on_token(index, token_id): called for each new token as it is chosen. timings: filled in, when given.
    Raises RequestError, before any collective, for what `check_prompts` refuses; GenerationError on every rank when ranks
    disagree in prompts, settings or tokens.
    """
    if model.group is not group:
        raise RequestError("the model was built on another group than the one given to generate(); pass model.group")
    check_prompts(prompts, model.config, settings)
    timings = timings if timings is not None else GenerationTimings()
    results = [Generation(index, len(prompt)) for index, prompt in enumerate(prompts)]
    longest = max(len(prompt) for prompt in prompts) + settings.max_new_tokens
    cache = KVCache(model.layout, group, rows=len(prompts), max_tokens=longest, dtype=model.dtype)
    timings.kv_cache_bytes = cache.nbytes
    parts = [(row, 0, list(prompt)) for row, prompt in enumerate(prompts)]
    checksum = zlib.crc32(
        repr((parts, settings)).encode()
    )  # ranks given other prompts or settings are noticed with the first token
    with torch.inference_mode():
        while parts:
            began = time.perf_counter()
            batch = TokenBatch.of(parts, group.device)
            last_rows = torch.tensor([span.stop - 1 for span in batch.spans], device=group.device)
            logits = model(batch, cache, logit_rows=last_rows).local_logits
            _forbid_early_stops(logits, [results[row] for row, _, _ in parts], settings, model)
            chosen = vocab_parallel_argmax(logits, model.lm_head.split, group, checksum).tolist()
            _count(timings, parts, len(chosen), time.perf_counter() - began)
            following = []
            for (row, context, ids), token_id in zip(parts, chosen, strict=True):
                checksum = (checksum * 1_000_003 + token_id + 1) % _CHECKSUM_MODULUS
                result = results[row]
                result.token_ids.append(token_id)
                if on_token is not None:
                    on_token(row, token_id)
                if not settings.ignore_eos and token_id in settings.stop_token_ids:
                    result.finish_reason = "stop"
                elif len(result.token_ids) == settings.max_new_tokens:
                    result.finish_reason = "length"
                else:
                    following.append((row, context + len(ids), [token_id]))
            parts = following
    return results


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


def _count(timings: GenerationTimings, parts: list[tuple[int, int, list[int]]], rows: int, seconds: float) -> None:
    if parts[0][1] == 0:
        timings.prefill_s += seconds
        timings.prefill_tokens += sum(len(ids) for _, _, ids in parts)
    else:
        timings.decode_s += seconds
        timings.decode_tokens += rows
