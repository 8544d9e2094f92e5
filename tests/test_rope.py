"""Rope types against Transformers' own tables, below and beyond the length of pretraining, and each sequence by its own length."""

import math
from functools import cache
from typing import Any

import pytest
import torch

from tp_residual.errors import RequestError
from tp_residual.inference.request import GenerationSettings, check_prompts
from tp_residual.model.attention_backend import TokenBatch
from tp_residual.model.config import ModelConfig
from tp_residual.model.rope import rope_tables

BASE = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
ROPES: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn_scaled": YARN | {"attention_factor": 1.25, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn_mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}


@cache
def config(name: str) -> ModelConfig:
    return ModelConfig.from_dict(BASE | {"rope_scaling": ROPES[name]}, name)


def transformers_tables(name: str, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one sequence of `length` tokens, by a module that has seen nothing before."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = LlamaConfig(**{key: value for key, value in BASE.items() if key != "model_type"}, rope_scaling=ROPES[name])
    cos, sin = LlamaRotaryEmbedding(theirs)(torch.zeros(1, 1, 1), torch.arange(length)[None])
    return cos[0], sin[0]


@pytest.mark.parametrize("length", [5, 64, 65, 120])
@pytest.mark.parametrize("name", ROPES)
def test_tables_are_transformers(name: str, length: int) -> None:
    batch = TokenBatch.prefill([[0] * length])
    ours = rope_tables(config(name), batch.positions, torch.float32, batch.sequence_lengths)
    for got, expected in zip(ours, transformers_tables(name, length), strict=True):
        # fp32 angles of up to 120 radians: half an ulp is 4e-6, and powers in another order cost a few
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)


def test_the_types_are_not_the_same_thing() -> None:
    positions = torch.arange(120)
    tables = {name: rope_tables(config(name), positions, torch.float32, torch.full((120,), 120)).cos for name in ROPES}
    for first in ROPES:
        for second in ROPES:
            assert (first == second) == bool((tables[first] - tables[second]).abs().max() < 1e-3)


def test_dynamic_goes_by_each_sequences_own_length() -> None:
    lengths = [5, 120, 64, 90]
    batch = TokenBatch.prefill([[0] * length for length in lengths])
    together = rope_tables(config("dynamic"), batch.positions, torch.float64, batch.sequence_lengths).sin
    for span, length in zip(batch.spans, lengths, strict=True):
        alone = TokenBatch.prefill([[0] * length])
        expected = rope_tables(config("dynamic"), alone.positions, torch.float64, alone.sequence_lengths).sin
        assert torch.equal(together[span.start : span.stop], expected)
    # a decode step counts what its own row holds already
    step = TokenBatch.of([(0, 4, [1]), (1, 99, [1])])
    assert step.sequence_lengths.tolist() == [5, 100]


def test_legal_lengths() -> None:
    assert {name: config(name).max_sequence_length for name in ROPES} == {
        "default": 64, "linear": 256, "llama3": 64, "yarn": 64, "yarn_scaled": 64, "yarn_mscale": 64, "dynamic": 128,
    }  # fmt: skip
    longer = ModelConfig.from_dict(BASE | {"rope_scaling": YARN | {"factor": 10.0}}, "longer")
    assert longer.max_sequence_length == 160
    no_factor = ModelConfig.from_dict(BASE | {"rope_scaling": YARN | {"factor": None}}, "no factor")
    assert no_factor.rope_factor == 4.0 and math.isclose(no_factor.rope_scaling.attention_factor, 0.1 * math.log(4) + 1)


def test_requests_are_held_to_the_legal_length() -> None:
    settings = GenerationSettings(max_new_tokens=28)
    check_prompts([[1] * 100], config("dynamic"), settings)
    limit = "129 exceeds max_position_embeddings=64 stretched to 128 by rope_type=dynamic"
    with pytest.raises(RequestError, match=limit):
        check_prompts([[1] * 101], config("dynamic"), settings)
    with pytest.raises(RequestError, match=r"92 exceeds max_position_embeddings=64; shorten"):
        check_prompts([[1] * 64], config("llama3"), settings)
