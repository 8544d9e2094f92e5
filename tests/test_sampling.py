"""Sampling: the tokens Transformers' filters keep, noise that depends on nothing but its key, frequencies, the same text on any ranks.

Functions named check_* run on every rank.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from tiny_models import config, prompts, random_weights, sharded
from torch import Tensor

from tp_residual.errors import ConfigError, GenerationError, RequestError
from tp_residual.inference import sampling
from tp_residual.inference.generate import generate
from tp_residual.inference.request import GenerationSettings, SamplingSettings, check_prompts
from tp_residual.inference.sampling import (
    Draw,
    Sampler,
    add_noise,
    filter_logits,
    gumbel_noise,
    noise_key,
    penalize_repetition,
)
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.splits import Split
from tp_residual.parallel.vocabulary import summarize_rows
from tp_residual.testing import RanksFailed, run_ranks

VOCABULARY = 101
PROMPTS = prompts(3)


def rows_of_logits(vocabulary: int) -> Tensor:
    """Ordinary, flat, peaked, all negative, with many ties, all equal, with -inf, and from bf16."""
    generator = torch.Generator().manual_seed(11)
    x = 3 * torch.randn(8, vocabulary, generator=generator)
    x[1] *= 0.05
    x[2] *= 6
    x[3] -= 40
    x[4] = x[4].round()
    x[5] = -5
    x[6, ::2] = -torch.inf
    x[7] = x[7].bfloat16().float()
    return x


FILTERS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 40},
    {"top_p": 0.05},
    {"top_p": 0.4},
    {"top_p": 0.95},
    {"top_p": 0.999},
    {"min_p": 0.08},
    {"min_p": 1.0},
    {"top_k": 23, "top_p": 0.7},
    {"top_k": 30, "top_p": 0.8, "min_p": 0.03, "temperature": 1.7},
    {"top_p": 0.9, "temperature": 0.3},
    {"top_k": 5, "repetition_penalty": 1.8},
    {"top_p": 0.6, "repetition_penalty": 0.7, "temperature": 2.5},
]


def transformers_filters(x: Tensor, history: list[list[int]], values: dict[str, Any]) -> Tensor:
    from transformers.generation import logits_process as theirs

    ids = torch.tensor(history)
    steps = [
        ("repetition_penalty", theirs.RepetitionPenaltyLogitsProcessor),
        ("temperature", theirs.TemperatureLogitsWarper),
        ("top_k", theirs.TopKLogitsWarper),
        ("top_p", theirs.TopPLogitsWarper),
        ("min_p", theirs.MinPLogitsWarper),
    ]
    for name, step in steps:
        if name in values:
            x = step(values[name])(ids, x)
    return x


Case = tuple[Tensor, list[list[int]], dict[str, Any]]


def check_filters(group: TensorParallelGroup, cases: list[Case], first_candidates: int) -> tuple[list[Tensor], int]:
    """This rank's slices after the filters, and how often top-p exchanged candidates."""
    sampling.TOP_P_CANDIDATES = first_candidates
    results = []
    for x, history, values in cases:
        settings = SamplingSettings(**{"temperature": 1.0} | values)
        split = Split.even(x.shape[1], group.size)
        start, stop = split.ranges[group.rank]
        local, seen = x[:, start:stop].clone(), torch.zeros(x.shape[0], stop - start, dtype=torch.bool)
        for row, ids in enumerate(history):
            seen[row, [i - start for i in ids if start <= i < stop]] = True
        local = penalize_repetition(local, seen, settings.repetition_penalty) / settings.temperature
        ours = filter_logits(local, settings, split, group)
        assert bool(((ours == local) | (ours == -torch.inf)).all())
        results.append(ours)
    return results, group.counters.calls["top_p", "all_gather"]


def assert_filters_agree(tp_size: int, cases: list[Case], first_candidates: int = 256) -> list[int]:
    """The same values kept in each row. Which of equal ones at the edge of a nucleus, an unstable sort decides in Transformers: here
    the lowest ids. Long rows in fp64 there, too: their fp32 running sum is off by a token at the edge of a flat nucleus."""
    shares = run_ranks(tp_size, check_filters, cases, first_candidates)
    for number, (x, history, values) in enumerate(cases):
        ours = torch.cat([share[0][number] for share in shares], dim=-1)
        theirs = transformers_filters(x.double() if x.shape[1] > 1000 else x.clone(), history, values).float()
        assert torch.equal(ours.sort(-1).values, theirs.sort(-1).values), values
        if "top_p" not in values:
            assert torch.equal(ours, theirs), values
        else:
            unfiltered = {
                name: value for name, value in values.items() if name in ("repetition_penalty", "temperature")
            }
            scores = transformers_filters(x.clone(), history, unfiltered)
            order = scores.sort(dim=-1, descending=True, stable=True).indices
            assert bool((ours.gather(1, order) > -torch.inf).int().diff(dim=-1).le(0).all()), "a prefix of that order"
    return [calls for _, calls in shares]


@pytest.mark.parametrize(("tp_size", "first_candidates"), [(1, 256), (2, 3), (3, 256), (3, 3)])
def test_filters_keep_what_transformers_keeps(tp_size: int, first_candidates: int) -> None:
    x = rows_of_logits(VOCABULARY)
    history = [[(7 * row + 3 * i) % VOCABULARY for i in range(6)] + [VOCABULARY - 1] for row in range(8)]
    cases = [(x, history, values) for values in FILTERS]
    kept = (transformers_filters(x.clone(), history, {"top_k": 7}) > -torch.inf).sum(-1)
    assert kept.max() > 7, "some row has ties at the seventh"
    calls = assert_filters_agree(tp_size, cases, first_candidates)
    nuclei = sum("top_p" in values for values in FILTERS)
    if tp_size > 1:
        assert calls[0] == nuclei if first_candidates == 256 else calls[0] > 2 * nuclei, calls


def test_more_ranks_than_tokens_and_a_large_vocabulary() -> None:
    """Empty ranks; and flat rows of 5000, whose nuclei take every doubling from 256."""
    small, large = rows_of_logits(3), rows_of_logits(5000)
    filters: list[tuple[Tensor, dict[str, Any]]] = [
        (small, {"top_k": 2}), (small, {"top_p": 0.5}), (small, {"min_p": 0.3}), (large, {"top_p": 0.9}),
    ]  # fmt: skip
    cases = [(x, [[0]] * len(x), values) for x, values in filters]
    assert assert_filters_agree(4, cases) == [1 + 4] * 4, (
        "256, 512, 1024, then all 1250 of each rank; once for 3 tokens"
    )


# ---- the summary of a row ----


def check_summary(group: TensorParallelGroup) -> None:
    x = rows_of_logits(VOCABULARY)
    x[5] = -torch.inf
    split = Split.even(VOCABULARY, group.size)
    start, stop = split.ranges[group.rank]
    targets = torch.tensor([0, 100, 50, 33, 34, 1, 67, 66])
    summary = summarize_rows(x[:, start:stop], 9, split, group, tag="test", targets=targets)
    wide = x.double()
    # fp64 throughout: only the order of the sum differs
    torch.testing.assert_close(summary.log_normalizer, wide.logsumexp(-1), rtol=1e-14, atol=1e-13)
    assert summary.target_logits.tolist() == wide.gather(1, targets[:, None])[:, 0].tolist()
    order = wide.sort(dim=-1, descending=True, stable=True)
    for row in (0, 1, 2, 3, 4, 6, 7):
        assert summary.values[row, :9].tolist() == order.values[row, :9].tolist()
        assert summary.ids[row, :9].tolist() == order.indices[row, :9].tolist(), "equal values: the lowest ids"
    assert summary.log_normalizer[5] == -torch.inf


@pytest.mark.parametrize("tp_size", (1, 3))
def test_a_summary_is_that_of_the_whole_row(tp_size: int) -> None:
    run_ranks(tp_size, check_summary)


# ---- noise ----


def python_gumbel(key: int, token_id: int) -> float:
    """The same in Python's integers: splitmix64 from `key`."""
    mask = (1 << 64) - 1
    z = (key + (token_id + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return -math.log(-math.log((2 * (z >> 12) + 1) / 2**53))


def test_noise_is_a_function_of_its_key() -> None:
    keys = [noise_key(*parts) for parts in ((0, 0, 0, 0), (5, 1, 2, 3), (2**64 - 1, 10**7, 9, 131071))]
    signed = torch.tensor([key - (1 << 64) if key >> 63 else key for key in keys])
    ids = torch.tensor([0, 1, 49151, 151_935])
    ours = gumbel_noise(signed[:, None].expand(-1, 4), ids.expand(3, -1))
    expected = torch.tensor([[python_gumbel(key, i) for i in ids.tolist()] for key in keys], dtype=torch.float64)
    torch.testing.assert_close(ours, expected, rtol=1e-14, atol=1e-15)
    parts = [(s, p, n, t) for s in range(3) for p in range(5) for n in range(5) for t in range(40)]
    assert len({noise_key(*each) for each in parts}) == len(parts)


def test_no_noise_is_infinite() -> None:
    """The largest and the smallest uniform: of bits that are all ones and all zero."""
    ends = sampling.uniform(torch.tensor([0, -1, 2**63 - 1, -(2**63)]))
    assert ends.tolist() == [2.0**-53, 1 - 2.0**-53, 0.5 - 2.0**-53, 0.5 + 2.0**-53]
    assert bool((-(-ends.log()).log()).isfinite().all())
    ids = torch.arange(200_000)
    noise = gumbel_noise(torch.full_like(ids, -(2**62)), ids)
    assert bool(noise.isfinite().all())
    # mean and variance of the standard Gumbel; five standard errors of 200000 draws
    assert abs(float(noise.mean()) - 0.5772156649) < 5 * math.sqrt(math.pi**2 / 6 / 200_000)
    assert abs(float(noise.var()) - math.pi**2 / 6) < 5 * math.sqrt(4.4 * (math.pi**2 / 6) ** 2 / 200_000)


DRAWS = 10_000


def check_frequencies(group: TensorParallelGroup, values: dict[str, Any]) -> list[int]:
    x = rows_of_logits(VOCABULARY)[0] / 2
    split = Split.even(VOCABULARY, group.size)
    start, stop = split.ranges[group.rank]
    settings = SamplingSettings(temperature=1.0, seed=3, **values)
    sampler = Sampler(split, group, rows=1)
    local = x[start:stop].expand(DRAWS, -1)
    return sampler.choose(local, [Draw(settings, 0, 0, 0, position) for position in range(DRAWS)], 0)[0]


@pytest.mark.parametrize(
    "values",
    (
        {},
        pytest.param({"top_k": 12}, marks=pytest.mark.slow),
        {"top_p": 0.8},
        pytest.param({"min_p": 0.1}, marks=pytest.mark.slow),
    ),
)
def test_frequencies_are_those_of_the_distribution(values: dict[str, Any]) -> None:
    x = transformers_filters((rows_of_logits(VOCABULARY)[:1] / 2).clone(), [[1]], values)
    expected = DRAWS * x[0].double().softmax(-1)
    shares = run_ranks(3, check_frequencies, values)
    assert shares[0] == shares[1] == shares[2]
    assert shares[0] == check_frequencies(TensorParallelGroup.single(), values)
    observed = torch.tensor(shares[0]).bincount(minlength=VOCABULARY).double()
    assert not observed[expected == 0].any()
    common, rare = expected >= 5, (expected < 5) & (expected > 0)
    cells = [(observed[common], expected[common])]
    if rare.any():
        cells.append((observed[rare].sum()[None], expected[rare].sum()[None]))
    chi_square = sum(float(((o - e) ** 2 / e).sum()) for o, e in cells)
    freedom = sum(len(o) for o, _ in cells) - 1
    # Wilson-Hilferty: the 1 - 1e-6 quantile of chi-square (4.75 standard deviations); the draws are fixed, so it cannot flake
    limit = freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square < limit, (chi_square, limit)


# ---- in generation ----

SAMPLED = GenerationSettings(
    max_new_tokens=8, sampling=SamplingSettings(temperature=1.4, top_p=0.97, repetition_penalty=1.2, seed=7, n=2)
)


def check_sampled(group: TensorParallelGroup, sequence_parallel: str) -> list[list[int]]:
    """Each continuation also alone, in another batch and order; different torch seeds change nothing."""
    torch.manual_seed(group.rank)
    weights = random_weights(config("llama"), dtype=torch.float32)
    model = sharded(config("llama"), group, weights, sequence_parallel=sequence_parallel)
    together = generate(model, PROMPTS, group, SAMPLED)
    assert [(result.index, result.sample) for result in together] == [(i, s) for i in range(3) for s in range(2)]
    backwards = generate(model, PROMPTS[::-1], group, SAMPLED, indices=[2, 1, 0])
    alone = [result for i in range(3) for result in generate(model, [PROMPTS[i]], group, SAMPLED, indices=[i])]
    key = {(result.index, result.sample): result.token_ids for result in together}
    for result in (*backwards, *alone):
        assert key[result.index, result.sample] == result.token_ids
    other = generate(model, PROMPTS, group, replace(SAMPLED, sampling=replace(SAMPLED.sampling, seed=8)))
    assert [result.token_ids for result in other] != [result.token_ids for result in together]
    first = replace(SAMPLED, sampling=replace(SAMPLED.sampling, n=1))
    assert [r.token_ids for r in generate(model, PROMPTS, group, first)] == [r.token_ids for r in together[::2]]
    return [result.token_ids for result in together]


@pytest.mark.parametrize(
    ("tp_size", "sequence_parallel"),
    [
        (1, "off"),
        (2, "on"),
        pytest.param(3, "off", marks=pytest.mark.slow),
        pytest.param(4, "off", marks=pytest.mark.slow),
    ],
)
def test_sampled_text_is_the_same_on_any_ranks_and_in_any_batch(tp_size: int, sequence_parallel: str) -> None:
    shares = run_ranks(tp_size, check_sampled, sequence_parallel)
    assert all(share == shares[0] for share in shares)
    assert shares[0] == _expected_samples()
    assert len({tuple(tokens) for tokens in shares[0]}) == 6, "prompts and samples differ"


_samples: list[list[list[int]]] = []


def _expected_samples() -> list[list[int]]:
    """By another road: Transformers' logits and filters, Python's noise."""
    if not _samples:
        model, texts, values = tiny_models.reference("llama"), [], SAMPLED.sampling
        chosen = {
            "repetition_penalty": values.repetition_penalty,
            "temperature": values.temperature,
            "top_p": values.top_p,
        }
        for index, prompt in enumerate(PROMPTS):
            for sample in range(2):
                ids = list(prompt)
                for _ in range(SAMPLED.max_new_tokens):
                    with torch.no_grad():
                        logits = model(torch.tensor([ids])).logits[:, -1]
                    scores = transformers_filters(logits, [ids], chosen)[0].tolist()
                    key = noise_key(values.seed, index, sample, len(ids))
                    ids.append(max(range(VOCABULARY), key=lambda i: scores[i] + python_gumbel(key, i)))
                texts.append(ids[len(prompt) :])
        _samples.append(texts)
    return _samples[0]


def check_greedy_with_penalty(group: TensorParallelGroup) -> list[list[int]]:
    model = sharded(config("llama"), group, random_weights(config("llama"), dtype=torch.float32))
    settings = GenerationSettings(max_new_tokens=10, sampling=SamplingSettings(repetition_penalty=1.5))
    return [result.token_ids for result in generate(model, PROMPTS, group, settings)]


def test_greedy_decoding_with_a_penalty_equals_transformers() -> None:
    expected = []
    for prompt in PROMPTS:
        with torch.no_grad():
            out = tiny_models.reference("llama").generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=10, repetition_penalty=1.5,
                pad_token_id=0, eos_token_id=[10**6],
            )  # fmt: skip
        expected.append(out[0, len(prompt) :].tolist())
    assert run_ranks(2, check_greedy_with_penalty) == [expected, expected]


def check_ranks_that_disagree(group: TensorParallelGroup) -> None:
    model = sharded(config("llama"), group, random_weights(config("llama"), dtype=torch.float32))
    settings = GenerationSettings(max_new_tokens=4, sampling=SamplingSettings(temperature=1.0, top_k=5 + group.rank))
    generate(model, PROMPTS, group, settings)


def test_settings_that_differ_between_ranks_are_noticed_before_the_first_exchange() -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(2, check_ranks_that_disagree)
    assert sorted(failure.value.exceptions) == [0, 1]
    for error in failure.value.exceptions.values():
        assert isinstance(error, GenerationError) and "disagree about prompts or settings" in str(error)


def check_nan(group: TensorParallelGroup, values: dict[str, Any], row: list[float]) -> None:
    split = Split.even(6, group.size)
    start, stop = split.ranges[group.rank]
    draw = Draw(SamplingSettings(temperature=1.0, **values), 0, 0, 0, 1)
    Sampler(split, group, rows=1).choose(torch.tensor([row])[:, start:stop], [draw], 0)


@pytest.mark.parametrize("values", ({}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}))
def test_nan_is_an_error_on_every_rank_whatever_the_filter(values: dict[str, Any]) -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(2, check_nan, values, [1.0, 2.0, 3.0, 0.5, math.nan, 9.0])
    assert sorted(failure.value.exceptions) == [0, 1]
    for error in failure.value.exceptions.values():
        assert isinstance(error, GenerationError) and "logits are NaN on rank [1]" in str(error)


def test_a_token_of_minus_infinity_is_never_drawn() -> None:
    scores = torch.full((50, 9), -torch.inf)
    scores[:, 4] = -1e30
    assert add_noise(scores, list(range(50)), 0).argmax(-1).tolist() == [4] * 50


# ---- settings ----

REFUSED = [
    ({"temperature": -0.5}, "temperature=-0.5 must be at least 1e-06, or 0"),
    ({"temperature": 1e-9}, "temperature=1e-09 must be at least"),
    ({"temperature": math.nan}, "temperature=nan must be a finite number"),
    ({"top_k": -1}, "top_k=-1 must be at least 1, or 0"),
    ({"top_p": 0.0}, "top_p=0 must be above 0 and at most 1"),
    ({"top_p": 1.5}, "top_p=1.5 must be above 0 and at most 1"),
    ({"min_p": -0.1}, "min_p=-0.1 must be between 0 and 1"),
    ({"min_p": 1.1}, "min_p=1.1 must be between 0 and 1"),
    ({"repetition_penalty": 0.0}, "repetition_penalty=0 must be above 0"),
    ({"seed": -1}, "seed=-1 must be between 0 and"),
    ({"n": 0}, "n=0 must be at least 1"),
    ({"temperature": 0.0, "n": 2}, "n=2 greedy samples would be the same"),
    ({"temperature": 0.0, "top_p": 0.5}, "temperature=0 is greedy, where .* mean nothing"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_settings_that_cannot_be_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingSettings(**{"temperature": 1.0} | values)


def test_counts_beyond_the_vocabulary_are_refused() -> None:
    wrong: list[dict[str, Any]] = [
        {"sampling": SamplingSettings(temperature=1.0, top_k=102)},
        {"logprobs": 102},
        {"prompt_logprobs": 102},
    ]
    for values in wrong:
        with pytest.raises(RequestError, match="=102 exceeds the vocabulary of 101 tokens"):
            check_prompts([[1]], config("llama"), GenerationSettings(max_new_tokens=4, **values))


RESOLVED: list[tuple[dict[str, Any] | None, dict[str, Any], SamplingSettings]] = [
    (None, {}, SamplingSettings()),
    ({"temperature": 0.6, "top_p": 0.9}, {}, SamplingSettings()),
    ({"do_sample": False, "temperature": 0.6, "top_k": 5}, {}, SamplingSettings()),
    ({"do_sample": False, "top_k": 5}, {"temperature": 0.9}, SamplingSettings(temperature=0.9, top_k=5)),
    ({"do_sample": True}, {}, SamplingSettings(temperature=1.0)),
    ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None}, {"top_p": 0.5, "seed": 4},
     SamplingSettings(temperature=0.6, top_k=20, top_p=0.5, seed=4)),
    ({"do_sample": True, "temperature": 0.6, "top_k": 20}, {"temperature": 0.0}, SamplingSettings()),
    ({"do_sample": True, "top_k": 20, "repetition_penalty": 1.1}, {"top_k": 0},
     SamplingSettings(temperature=1.0, repetition_penalty=1.1)),
    ({"repetition_penalty": 1.1}, {}, SamplingSettings(repetition_penalty=1.1)),
    (None, {"min_p": 0.1, "n": 3}, SamplingSettings(temperature=1.0, min_p=0.1, n=3)),
]  # fmt: skip


@pytest.mark.parametrize(("file", "flags", "expected"), RESOLVED)
def test_flags_over_generation_config_over_greedy(
    file: dict[str, Any] | None, flags: dict[str, Any], expected: SamplingSettings, tmp_path: Path
) -> None:
    if file is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(file))
    assert SamplingSettings.resolve(tmp_path, **flags) == expected


def test_a_broken_generation_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "temperature": "hot"}')
    with pytest.raises(ConfigError, match=r'generation_config.json: temperature="hot" must be a finite number'):
        SamplingSettings.resolve(tmp_path)
