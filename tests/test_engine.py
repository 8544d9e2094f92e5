"""The engine: what a request generates depends on nothing else that runs; blocks come back; ranks cancel, refuse and disagree together.

Functions named check_* run on every rank.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import config, prompts, random_weights, sharded

from tp_residual.errors import GenerationError, RequestError
from tp_residual.inference import engine as engine_module
from tp_residual.inference.engine import Engine
from tp_residual.inference.generate import generate, score
from tp_residual.inference.paged_cache import CacheCapacity
from tp_residual.inference.request import EngineLimits, GenerationSettings, Request, SamplingSettings, ScoreRequest
from tp_residual.inference.results import Generation, TokenEvent
from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.testing import RanksFailed, run_ranks

NEW = 6
CROWD = [prompt[: 1 + length] for prompt, length in zip(prompts(12, longest=20), range(30, 18, -1), strict=True)]
GREEDY = GenerationSettings(max_new_tokens=NEW)


def tiny(group: TensorParallelGroup, name: str = "llama", **options: Any) -> CausalLM:
    return sharded(config(name), group, random_weights(config(name), dtype=torch.float32), **options)


def small_engine(
    model: CausalLM, seqs: int = 32, tokens: int = 1024, blocks: int = 100, block_size: int = 4, **options: Any
) -> Engine:
    limits = EngineLimits(max_num_seqs=seqs, max_batched_tokens=tokens)
    return Engine(model, model.group, limits, capacity=CacheCapacity(blocks, block_size, 64), **options)


def drain(engine: Engine) -> dict[tuple[int, int], Generation]:
    """Everything that is asked for, by (request, sample)."""
    results = {}
    while engine.has_work:
        for event in engine.step():
            if event.generation is not None:
                assert (event.request, event.sample) not in results
                results[event.request, event.sample] = event.generation
    assert engine.pool.free_blocks == engine.pool.num_blocks, "blocks are lost"
    return results


# ---- alone and in a crowd ----


def check_crowd(group: TensorParallelGroup, name: str, sequence_parallel: str) -> list[list[int]]:
    model = tiny(group, name, sequence_parallel=sequence_parallel)
    alone = [generate(model, [prompt], group, GREEDY)[0].token_ids for prompt in CROWD]
    together = [result.token_ids for result in generate(model, CROWD, group, GREEDY)]
    assert together == alone
    for seqs, tokens, blocks in ((3, 5, 40), (12, 12, 20)) if group.size > 1 else ((32, 1024, 100), (1, 1, 12)):
        engine = small_engine(model, seqs, tokens, blocks)
        numbers = [engine.add(Request(prompt, GREEDY, index)) for index, prompt in enumerate(CROWD)]
        results = drain(engine)
        assert [results[number, 0].token_ids for number in numbers] == alone, (seqs, tokens, blocks)
        timings = engine.timings
        assert timings.prefill_tokens == sum(map(len, CROWD)) and timings.decode_tokens == len(CROWD) * (NEW - 1)
        assert timings.largest_prefill <= tokens and timings.kv_used_bytes <= timings.kv_cache_bytes
    return alone


def check_late(group: TensorParallelGroup) -> None:
    """Arriving one by one, while others run."""
    model = tiny(group)
    expected = [result.token_ids for result in generate(model, CROWD, group, GREEDY)]
    engine = small_engine(model, 4, 9)
    late: list[TokenEvent] = []
    for index, prompt in enumerate(CROWD):
        engine.add(Request(prompt, GREEDY, index))
        late += engine.step()
    while engine.has_work:
        late += engine.step()
    assert {e.index: e.generation.token_ids for e in late if e.generation} == dict(enumerate(expected))


def test_requests_may_come_while_others_run() -> None:
    run_ranks(2, check_late)


def test_a_prompt_is_not_cut_where_its_rotation_follows_from_its_length() -> None:
    check_dynamic_rope(TensorParallelGroup.single())


@pytest.mark.parametrize(
    ("tp_size", "name", "sequence_parallel"),
    [
        pytest.param(1, "qwen2", "off", marks=pytest.mark.slow),
        (2, "llama", "on"),
        pytest.param(2, "mistral", "off", marks=pytest.mark.slow),
        pytest.param(3, "llama", "off", marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens_are_the_same_alone_in_a_crowd_and_in_pieces(
    tp_size: int, name: str, sequence_parallel: str
) -> None:
    shares = run_ranks(tp_size, check_crowd, name, sequence_parallel)
    assert all(share == shares[0] for share in shares)
    if name == "llama":
        assert shares[0] == check_crowd(TensorParallelGroup.single(), name, "off")
    assert len({tuple(tokens) for tokens in shares[0]}) > 8, "texts that are alike prove little"


def check_dynamic_rope(group: TensorParallelGroup) -> None:
    """Its rotation follows from the length at the time: a prompt that is cut would be another prompt."""
    values = {
        "rope_parameters": {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 500.0},
        "max_position_embeddings": 8,
    }
    model = sharded(config("llama", **values), group, random_weights(config("llama"), dtype=torch.float32))
    assert model.config.rope_type == "dynamic" and model.config.max_sequence_length == 64
    mine = [prompt[:20] for prompt in CROWD[::4]]
    alone = [generate(model, [prompt], group, GenerationSettings(max_new_tokens=4))[0].token_ids for prompt in mine]
    engine = small_engine(model, 3, 5)
    numbers = [engine.add(Request(prompt, GenerationSettings(max_new_tokens=4))) for prompt in mine]
    results = drain(engine)
    assert [results[number, 0].token_ids for number in numbers] == alone


# ---- settings that differ ----

MIXED = [
    GREEDY,
    GenerationSettings(max_new_tokens=6, sampling=SamplingSettings(temperature=1.3, top_k=40, seed=3)),
    GenerationSettings(max_new_tokens=9, sampling=SamplingSettings(temperature=0.9, top_p=0.9, seed=4, n=3)),
    GenerationSettings(max_new_tokens=5, logprobs=2, sampling=SamplingSettings(repetition_penalty=1.7)),
    GenerationSettings(max_new_tokens=7, stop_token_ids=tuple(range(0, 101, 3)), min_new_tokens=3, prompt_logprobs=1),
    GenerationSettings(
        max_new_tokens=4, prompt_logprobs=0, logprobs=0,
        sampling=SamplingSettings(temperature=2.0, repetition_penalty=1.2, min_p=0.01, n=2, seed=9),
    ),
    GenerationSettings(max_new_tokens=6, sampling=SamplingSettings(temperature=1.3, top_k=40, seed=5)),
]  # fmt: skip


def same(ours: Generation, theirs: Generation) -> None:
    """Tokens alike; log-probabilities to rounding, since a GEMM of another height may sum in another order."""
    assert (ours.index, ours.sample, ours.token_ids, ours.finish_reason) == (
        theirs.index, theirs.sample, theirs.token_ids, theirs.finish_reason,
    )  # fmt: skip
    for name in ("logprobs", "prompt_logprobs"):
        one, other = getattr(ours, name), getattr(theirs, name)
        assert (one is None) == (other is None)
        for a, b in zip(one or [], other or [], strict=True):
            assert a.token_id == b.token_id and [i for i, _ in a.top] == [i for i, _ in b.top]
            assert a.log_prob == pytest.approx(b.log_prob, abs=2e-5)


def check_mixed(group: TensorParallelGroup, seqs: int, tokens: int) -> list[list[int]]:
    model = tiny(group)
    engine = small_engine(model, seqs, tokens)
    numbers = [engine.add(Request(CROWD[index], settings, index)) for index, settings in enumerate(MIXED)]
    pair = CROWD[0][:7], CROWD[0][7:]
    scoring = engine.add(ScoreRequest(*pair, count=2, index=7))
    results = drain(engine)
    tokens_of = []
    for index, (number, settings) in enumerate(zip(numbers, MIXED, strict=True)):
        alone = generate(model, [CROWD[index]], group, settings, indices=[index])
        for result in alone:
            same(results[number, result.sample], result)
            tokens_of.append(result.token_ids)
    scored = results[scoring, 0]
    expected = score(model, [pair], group, count=2)[0]
    assert scored.finish_reason == "scored" and scored.prompt_logprobs is not None
    assert [t.token_id for t in scored.prompt_logprobs] == pair[1]
    for ours, theirs in zip(scored.prompt_logprobs, expected, strict=True):
        assert ours.log_prob == pytest.approx(theirs.log_prob, abs=2e-5) and len(ours.top) == len(theirs.top) == 2
    return tokens_of


@pytest.mark.parametrize(
    ("tp_size", "seqs", "tokens"), [(1, 20, 200), (2, 4, 6), pytest.param(3, 20, 20, marks=pytest.mark.slow)]
)
def test_settings_may_differ_in_one_pass(tp_size: int, seqs: int, tokens: int) -> None:
    shares = run_ranks(tp_size, check_mixed, seqs, tokens)
    assert all(share == shares[0] for share in shares)
    assert shares[0] == check_mixed(TensorParallelGroup.single(), 20, 200), "on any ranks and however prompts are cut"


def check_samples(group: TensorParallelGroup) -> None:
    model = tiny(group)
    sampling = SamplingSettings(temperature=1.5, seed=7, n=5)
    settings = GenerationSettings(max_new_tokens=6, sampling=sampling, prompt_logprobs=0)
    engine = small_engine(model)
    number = engine.add(Request(CROWD[0], settings, 3))
    results = drain(engine)
    assert engine.timings.prefill_tokens == len(CROWD[0]) and engine.timings.decode_tokens == 5 * 5
    assert len({tuple(results[number, sample].token_ids) for sample in range(5)}) == 5
    assert all(results[number, s].prompt_logprobs == results[number, 0].prompt_logprobs for s in range(5))
    few = small_engine(model, seqs=2, tokens=7)
    again = few.add(Request(CROWD[0], settings, 3))
    in_turn = drain(few)
    for sample in range(5):
        same(in_turn[again, sample], results[number, sample])
    assert few.timings.prefill_tokens == 3 * len(CROWD[0]), "2, 2 and 1 at a time"


def test_samples_share_the_prompt_and_not_their_text() -> None:
    run_ranks(2, check_samples)


# ---- more than fits ----


def check_queue(group: TensorParallelGroup) -> None:
    """Forty requests, a cache for two: all are answered, in the order in which they came, and those that never fit disturb nobody."""
    model = tiny(group)
    engine = small_engine(model, seqs=8, tokens=30, blocks=14)
    order, refused, texts = [], [], {}
    settings = GenerationSettings(max_new_tokens=5)
    for index in range(40):
        prompt = [(7 * index + i) % 101 for i in range(1 + index % 20)]
        if index % 10 == 9:
            with pytest.raises(RequestError, match=f"prompt {index}: .* exceeds max_model_len=64") as failure:
                engine.add(Request([*prompt, *[1] * 50], settings, index))
            refused.append(str(failure.value))
        texts[index] = prompt
        order.append(engine.add(Request(prompt, settings, index)))
    with pytest.raises(RequestError, match=r"prompt 40: .* need 15 blocks of 4 tokens, and the KV cache has 14"):
        engine.add(Request([1] * 56, settings, 40))
    results = drain(engine)
    assert len(results) == 40 and len(refused) == 4
    assert max(engine.timings.kv_used_bytes, 1) <= engine.cache.nbytes
    for index in (0, 9, 19, 33):
        alone = generate(model, [texts[index]], group, settings)[0].token_ids
        assert results[order[index], 0].token_ids == alone


def test_more_requests_than_cache_are_queued_and_none_is_lost() -> None:
    run_ranks(2, check_queue)


# ---- cancelling ----


def check_cancel(group: TensorParallelGroup, by: int) -> list[Any]:
    """Rank `by` alone cancels three requests: one that runs, one of two samples in the middle of its prompt, one that waits."""
    model = tiny(group)
    engine = small_engine(model, seqs=4, tokens=6)
    two = replace(GREEDY, sampling=SamplingSettings(temperature=1.0, n=2))
    numbers = [
        engine.add(Request(CROWD[11], replace(GREEDY, max_new_tokens=30), 0)),
        engine.add(Request(CROWD[0], two, 1)),
        engine.add(Request(CROWD[2], GREEDY, 2)),
        engine.add(Request(CROWD[3], GREEDY, 3)),
    ]
    story: list[Any] = []
    for step in range(200):
        if step == 2 and group.rank == by:
            for number in (numbers[0], numbers[1], numbers[3], 999):
                engine.cancel(number)
        if not engine.has_work:
            break
        for event in engine.step():
            if event.generation is not None:
                story.append((step, event.index, event.sample, event.generation.finish_reason, event.token_id))
        story.append((step, engine.pool.free_blocks, len(engine.scheduler.running)))
    assert engine.pool.free_blocks == engine.pool.num_blocks
    ended = {entry[1:4]: entry[0] for entry in story if len(entry) == 5}
    assert ended.pop((2, 0, "length")) > 5
    assert ended == {(0, 0, "cancelled"): 2, (1, 0, "cancelled"): 3, (1, 1, "cancelled"): 3, (3, 0, "cancelled"): 4}
    fresh = small_engine(model)
    fresh.cancel(0)  # nothing runs: nothing is ended later
    assert fresh.step() == []
    number = fresh.add(Request(CROWD[2], GREEDY, 2))
    assert drain(fresh)[number, 0].finish_reason == "length"
    return story


@pytest.mark.parametrize(("tp_size", "by"), [(1, 0), (2, 1), (3, 2)])
def test_one_rank_cancels_and_all_free_the_blocks_in_the_same_step(tp_size: int, by: int) -> None:
    shares = run_ranks(tp_size, check_cancel, by)
    assert all(share == shares[0] for share in shares)


def check_exchanges(group: TensorParallelGroup) -> None:
    """A step's one all-gather carries tokens, checksum and cancellation; pieces of prompts have it as well."""
    model = tiny(group)
    engine = small_engine(model, tokens=32)
    for index, prompt in enumerate(CROWD):
        engine.add(Request(prompt, GREEDY, index))
    steps = 0
    while engine.has_work:
        if group.rank == 1 and steps == 1:
            engine.cancel(0)
        engine.step()
        steps += 1
    assert group.counters.by_kind()["all_gather"] == steps
    assert group.counters.calls["argmax", "all_gather"] == steps


def test_cancelling_takes_no_exchange_of_its_own() -> None:
    run_ranks(2, check_exchanges)


def check_drop(group: TensorParallelGroup) -> None:
    model = tiny(group)
    engine = small_engine(model, seqs=2, tokens=5)
    numbers = [engine.add(Request(prompt, GREEDY, index)) for index, prompt in enumerate(CROWD[:5])]
    engine.step()
    engine.drop([numbers[0], numbers[4]])
    results = drain(engine)
    assert sorted(number for number, _ in results) == numbers[1:4]


def test_dropped_requests_leave_nothing() -> None:
    run_ranks(2, check_drop)


# ---- ranks that differ ----


def check_other_requests(group: TensorParallelGroup, what: str) -> None:
    engine = small_engine(tiny(group))
    settings = replace(GREEDY, sampling=SamplingSettings(temperature=1.0)) if what == "seed" else GREEDY
    if group.rank == 1:
        settings = {
            "seed": replace(settings, sampling=SamplingSettings(temperature=1.0, seed=1)),
            "index": settings,
            "logprobs": replace(settings, logprobs=0),
        }[what]
    if what == "logprobs" and group.rank == 0:
        settings = replace(settings, logprobs=2)
    engine.add(Request(CROWD[0], settings, group.rank if what == "index" else 0))
    engine.step()


@pytest.mark.parametrize("what", ["seed", "index", "logprobs"])
def test_ranks_with_other_requests_fail_together_in_the_first_step(what: str) -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(2, check_other_requests, what)
    assert sorted(failure.value.exceptions) == [0, 1]
    for error in failure.value.exceptions.values():
        # what decides no shape is compared with the first token, the rest before anything else is exchanged
        said = "prompts, settings or the tokens so far" if what == "index" else "prompts or settings"
        assert isinstance(error, GenerationError) and f"ranks disagree about {said} (" in str(error)


def test_wrong_requests_are_refused_and_leave_the_engine_as_it_was() -> None:
    model = tiny(TensorParallelGroup.single())
    engine = small_engine(model)
    cases: list[tuple[Any, str]] = [
        (Request([], GREEDY, 4), "prompt 4 is empty"),
        (Request([101], GREEDY, 2), "prompt 2 has token id 101, outside"),
        (Request([1], replace(GREEDY, stop=("x",))), "are text, and no tokenizer was given"),
        (Request([1], replace(GREEDY, logprobs=102)), "logprobs=102 exceeds the vocabulary"),
        (ScoreRequest([1], [], index=3), "sequence 3 has a completion of 0 tokens"),
        (ScoreRequest([1] * 60, [1] * 7, index=3), "sequence 3: 66 tokens of prompt and max_new_tokens=0"),
    ]
    for request, message in cases:
        with pytest.raises(RequestError, match=message):
            engine.add(request)
    assert not engine.has_work and engine.step() == []
    with pytest.raises(RequestError, match="on another group"):
        Engine(model, TensorParallelGroup.single())


def test_a_mixed_pass_is_divided_by_its_tokens() -> None:
    timings = engine_module.GenerationTimings()
    timings.add_pass(12, 4, 2.0, 0.5)
    assert (timings.prefill_s, timings.decode_s, timings.decode_boundary_s) == (1.5, 0.5, 0.125)
    timings.add_pass(0, 4, 1.0, 0.25)
    assert (timings.decode_s, timings.decode_tokens, timings.decode_passes) == (1.5, 8, 1.25)
    assert timings.prefill_tokens == 12 and timings.largest_prefill == 16
