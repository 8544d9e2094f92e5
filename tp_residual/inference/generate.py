"""Generation and scoring as functions: a list in, a list out, on every rank alike, through an engine made for that list.

Everything runs at once, in one pass where that is possible, and the cache is exactly as large as the list needs.
"""

from collections.abc import Callable, Sequence

from tp_residual.errors import RequestError
from tp_residual.inference.engine import Engine
from tp_residual.inference.logprobs import TokenLogProb
from tp_residual.inference.paged_cache import CacheCapacity
from tp_residual.inference.request import (
    EngineLimits,
    GenerationSettings,
    Request,
    ScoreRequest,
    check_pairs,
    check_prompts,
)
from tp_residual.inference.results import Generation, GenerationTimings
from tp_residual.inference.scheduler import BLOCK_SIZE, blocks_of_samples
from tp_residual.inference.tokenizer import Tokenizer
from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.vocabulary import request_checksum, require_same_request

__all__ = ["Generation", "GenerationTimings", "generate", "score"]


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

    The result has settings.sampling.n continuations a prompt, in order; they share the computation of the prompt. tokenizer: for their
    text; stop strings need it. indices: the prompts' places in the list they come from, which key their noise (0, 1, ... unless given).
    on_token(row, token_id): called for each new token as it is chosen, row counting continuations. on_finish(continuation): as soon as
    one has ended. check_finite: name the layer and rank where NaN or infinity first appears. timings: added to, when given.
    Raises RequestError, before any collective, for what `check_prompts` refuses; GenerationError on every rank when ranks
    disagree in prompts, settings or tokens.
    """
    if model.group is not group:
        raise RequestError("the model was built on another group than the one given to generate(); pass model.group")
    check_prompts(prompts, model.config, settings)
    samples, new = settings.sampling.n, settings.max_new_tokens
    engine = _engine_for(
        model,
        [(len(prompt), new, samples) for prompt in prompts],
        tokenizer=tokenizer,
        check_finite=check_finite,
        timings=timings,
    )
    places = range(len(prompts)) if indices is None else indices
    rows = {
        engine.add(Request(prompt, settings, place)): number * samples
        for number, (prompt, place) in enumerate(zip(prompts, places, strict=True))
    }
    results: dict[int, Generation] = {}
    while engine.has_work:
        for event in engine.step():
            row = rows[event.request] + event.sample
            if on_token is not None and event.token_id is not None:
                on_token(row, event.token_id)
            if event.generation is not None:
                results[row] = event.generation
                if on_finish is not None:
                    on_finish(event.generation)
    return [results[row] for row in range(len(results))]


def score(
    model: CausalLM, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], group: TensorParallelGroup, *, count: int = 0
) -> list[list[TokenLogProb]]:
    """For each (context, completion), the log-probability of every token of the completion; one pass over all of them.

    All ranks call it with the same arguments and get the same numbers. count: as many of the likeliest tokens beside each. Raises
    RequestError, before any collective, for an empty context or completion, more tokens than positions, and ids outside the vocabulary.
    """
    if model.group is not group:
        raise RequestError("the model was built on another group than the one given to score(); pass model.group")
    check_pairs(pairs, model.config, count)
    require_same_request(group, request_checksum(pairs, count))
    engine = _engine_for(model, [(len(context) + len(completion) - 1, 0, 1) for context, completion in pairs])
    numbers = [
        engine.add(ScoreRequest(context, completion, count, index)) for index, (context, completion) in enumerate(pairs)
    ]
    scored: dict[int, list[TokenLogProb]] = {}
    while engine.has_work:
        for event in engine.step():
            if event.generation is not None:
                scored[event.request] = event.generation.prompt_logprobs or []
    return [scored[number] for number in numbers]


def _engine_for(
    model: CausalLM,
    needs: list[tuple[int, int, int]],
    *,
    tokenizer: Tokenizer | None = None,
    check_finite: bool = False,
    timings: GenerationTimings | None = None,
) -> Engine:
    """With room for all of `needs` at once: (prompt tokens, new tokens, samples) of each."""
    sequences = sum(samples for _, _, samples in needs)
    tokens = sum(prompt for prompt, _, _ in needs)
    blocks = sum(blocks_of_samples(*each, BLOCK_SIZE) for each in needs)
    return Engine(
        model,
        model.group,
        EngineLimits(max_num_seqs=sequences, max_batched_tokens=max(sequences, tokens)),
        tokenizer=tokenizer,
        check_finite=check_finite,
        capacity=CacheCapacity(blocks, BLOCK_SIZE, max(prompt + new for prompt, new, _ in needs)),
        timings=timings,
    )
