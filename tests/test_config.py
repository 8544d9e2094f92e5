"""config.json to ModelConfig: the facts of each family against Transformers' own classes, and all ways to be bad."""

import json
import os
import subprocess
import sys
from copy import deepcopy
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tp_residual.errors import ConfigError
from tp_residual.model.config import ModelConfig
from tp_residual.model.families import FAMILIES
from tp_residual.model.fields import REFUSED

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 101,
}

# The config.json of SmolLM2-135M-Instruct as published: several fields that are unknown elsewhere and mean nothing.
SMOLLM2 = json.loads(
    """
    {"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 1,
     "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
     "intermediate_size": 1536, "is_llama_config": true, "max_position_embeddings": 8192, "mlp_bias": false,
     "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
     "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": false, "rope_scaling": null,
     "rope_theta": 100000, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.42.3",
     "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}, "use_cache": true,
     "vocab_size": 49152}
    """
)


def small(model_type: str = "llama", **changes: Any) -> dict[str, Any]:
    return {"model_type": model_type, **SIZES, **changes}


def read(values: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_dict(values, "config.json")


def refusal(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        read(values)
    message = str(caught.value)
    assert message.startswith("config.json: ") and "\n" not in message
    return message


# --- against Transformers

WINDOWED = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
VARIANTS = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "tie_word_embeddings": True}),
    ("llama", {"num_key_value_heads": None, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    ("llama", {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.5}, "torch_dtype": "float16"}),
    ("mistral", {}),
    ("mistral", {"sliding_window": None, "head_dim": 12, "rope_theta": 1e6}),
    ("mistral", {"sliding_window": 7, "dtype": "bfloat16"}),
    ("qwen2", {}),
    ("qwen2", {"sliding_window": 9}),
    ("qwen2", WINDOWED | {"eos_token_id": [5, 3, 5]}),
    ("qwen2", WINDOWED | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 5}),
    ("qwen3", {}),
    ("qwen3", WINDOWED | {"attention_bias": True, "head_dim": 10, "max_window_layers": 0}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}),
]


def expected(config: Any) -> dict[str, Any]:
    """What Transformers makes of a config: sizes from its config object, the rest from the modules it builds."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = set(model.state_dict())
    layers = model.model.layers
    window = config.sliding_window if config.model_type == "mistral" else None
    eos = config.eos_token_id
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "head_dim": layers[0].self_attn.head_dim,
        "num_key_value_heads": layers[0].self_attn.k_proj.out_features // layers[0].self_attn.head_dim,
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_type": model.model.rotary_emb.rope_type,
        "rope_factor": config.rope_parameters.get("factor", 1.0),
        "tie_word_embeddings": config.tie_word_embeddings,
        "qkv_bias": "model.layers.0.self_attn.q_proj.bias" in names,
        "o_bias": "model.layers.0.self_attn.o_proj.bias" in names,
        "mlp_bias": "model.layers.0.mlp.down_proj.bias" in names,
        "qk_norm": "model.layers.0.self_attn.q_norm.weight" in names,
        "sliding_window": tuple(getattr(layer.self_attn, "sliding_window", window) for layer in layers),
        "dtype": None if config.dtype is None else str(config.dtype).removeprefix("torch."),
        "bos_token_id": config.bos_token_id,
        "eos_token_ids": tuple(dict.fromkeys(eos)) if isinstance(eos, list) else () if eos is None else (eos,),
        "pad_token_id": config.pad_token_id,
    }


@pytest.mark.parametrize(("model_type", "changes"), VARIANTS)
def test_facts_equal_transformers(tmp_path: Path, model_type: str, changes: dict[str, Any]) -> None:
    values = small(model_type, **changes)
    theirs = AutoConfig.for_model(**deepcopy(values))  # it writes into nested dicts
    theirs.save_pretrained(tmp_path)
    wanted = expected(theirs)
    for ours in (read(values), ModelConfig.from_dir(tmp_path)):  # as written, and as they save it
        assert ours.warnings == ()
        assert {name: getattr(ours, name) for name in wanted} == wanted
        assert (ours.model_type, ours.hidden_act, ours.weight_after_cast) == (model_type, "silu", True)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_equal_transformers(model_type: str) -> None:
    # Only what must be given; 64 heads, because an absent num_key_value_heads means 32 in some families.
    values = small(model_type, num_attention_heads=64, hidden_size=128)
    del values["num_key_value_heads"]
    wanted = expected(AutoConfig.for_model(**values))
    ours = read(values)
    assert {name: getattr(ours, name) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({}, {}),
        ({"rope_theta": 500000}, {"rope_parameters": {"rope_theta": 5e5}}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}},
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}},
        ),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 4}},
            {"rope_theta": 1e4, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
        ),
    ],
)
def test_both_rope_spellings_agree(old: dict[str, Any], new: dict[str, Any]) -> None:
    ours, theirs = read(small(**old)), AutoConfig.for_model(**small(**deepcopy(new))).rope_parameters
    assert ours == read(small(**new)) and ours.warnings == ()
    assert (ours.rope_theta, ours.rope_type) == (theirs["rope_theta"], theirs["rope_type"])
    assert ours.rope_factor == theirs.get("factor", 1.0)
    assert isinstance(ours.rope_theta, float) and isinstance(ours.rope_factor, float)


def test_published_smollm2_config_loads_without_warnings() -> None:
    config = read(SMOLLM2)
    assert config.warnings == ()
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.rope_theta, config.dtype, config.eos_token_ids) == (100000.0, "bfloat16", (2,))
    assert config.tie_word_embeddings and config.sliding_window == (None,) * 30


# --- known, harmless, refused, unknown

# A value that asks for something that is not built, and one that does not ask for it.
ASKS: dict[str, tuple[Any, Any]] = {
    "quantization_config": ({"quant_method": "gptq", "bits": 4}, None),
    "compression_config": ({"format": "int-quantized"}, None),
    "text_config": ({"hidden_size": 64}, None),
    "vision_config": ({"depth": 2}, None),
    "audio_config": ({}, None),
    "llm_config": ({"hidden_size": 64}, None),
    "language_config": ({"hidden_size": 64}, None),
    "thinker_config": ({"hidden_size": 64}, None),
    "talker_config": ({"hidden_size": 64}, None),
    "is_encoder_decoder": (True, False),
    "add_cross_attention": (True, False),
    "tie_encoder_decoder": (True, False),
    "num_experts": (8, 0),
    "num_local_experts": (8, None),
    "n_routed_experts": (64, 0),
    "n_shared_experts": (1, 0),
    "mlp_only_layers": ([0], []),
    "num_experts_per_tok": (2, 0),
    "moe_intermediate_size": (32, 0),
    "per_layer_config": ({"0": {"head_dim": 4}}, {}),
    "block_configs": ([{}], None),
    "pruned_heads": ({"0": [1]}, {}),
    "num_nextn_predict_layers": (1, 0),
    "q_lora_rank": (16, None),
    "kv_lora_rank": (16, None),
    "partial_rotary_factor": (0.5, 1.0),
    "rotary_pct": (0.25, 1),
    "no_rope_layers": ([1, 0, 1], []),
    "no_rope_layer_interval": (4, 0),
    "rope_local_base_freq": (10000.0, None),
    "local_rope_theta": (10000.0, None),
    "rope_interleaved": (True, False),
    "use_mrope": (True, False),
    "mrope_section": ([2, 1, 1], None),
    "mrope_interleaved": (True, False),
    "attention_factor": (1.1, 1.0),
    "mscale": (0.7, 1.0),
    "mscale_all_dim": (0.7, 1),
    "alibi": (True, False),
    "use_alibi": (True, False),
    "position_embedding_type": ("alibi", "rope"),
    "attn_logit_softcapping": (50.0, None),
    "final_logit_softcapping": (30.0, None),
    "attn_logit_softcap": (50.0, None),
    "logit_softcap": (30.0, None),
    "residual_multiplier": (0.22, 1.0),
    "embedding_multiplier": (12.0, 1.0),
    "lm_head_multiplier": (0.5, 1),
    "scale_emb": (12, 1),
    "logits_scaling": (8.0, 1.0),
    "logit_scale": (0.0625, 1),
    "attention_multiplier": (0.0156, None),
    "query_pre_attn_scalar": (256, None),
    "scale_depth": (1.4, None),
    "clip_qkv": (8.0, None),
    "attention_chunk_size": (8192, None),
    "attn_output_gate": (True, False),
    "gated_attention": (True, False),
    "use_gated_attention": (True, False),
    "use_attention_gate": (True, False),
    "headwise_attn_output_gate": (True, False),
    "elementwise_attn_output_gate": (True, False),
    "parallel_attn": (True, False),
    "use_parallel_residual": (True, False),
    "pretraining_tp": (2, 1),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_unless_neutral(name: str) -> None:
    asking, neutral = ASKS[name]
    message = refusal(small("qwen3", **{name: asking}))
    assert f"{name}=" in message and "refused" in message and "use a model that has null" in message
    assert read(small("qwen3", **{name: neutral})).warnings == ()
    assert read(small("qwen3", **{name: None})).warnings == ()


@pytest.mark.parametrize(
    "name", sorted(REFUSED.keys() & {"partial_rotary_factor", "mrope_section", "attention_factor"})
)
def test_refused_inside_rope_parameters(name: str) -> None:
    asking, neutral = ASKS[name]
    rope = {"rope_type": "default", "rope_theta": 1e4}
    assert f"rope_parameters.{name}=" in refusal(small(rope_parameters=rope | {name: asking}))
    assert read(small(rope_parameters=rope | {name: neutral})).warnings == ()


def test_nested_config_is_named_before_its_model_type() -> None:
    assert "text_config=" in refusal({"model_type": "llava", "text_config": small()})


def test_an_unknown_field_gives_one_warning() -> None:
    config = read(small(flux_capacitor=1.21, rope_parameters={"rope_type": "linear", "factor": 2, "wobble": 1}))
    assert len(config.warnings) == 2
    assert "flux_capacitor" in config.warnings[0] and "rope_parameters.wobble" in config.warnings[1]
    quiet = read(small(rope_parameters={"rope_type": "linear", "factor": 2}))
    assert config == quiet and hash(config) == hash(quiet)


@pytest.mark.parametrize(
    "name", ["architectures", "transformers_version", "use_cache", "initializer_range", "attention_dropout", "top_p"]
)
def test_harmless_fields_change_nothing(name: str) -> None:
    values: dict[str, Any] = {name: 0.5}
    config = read(small(**values))
    assert config == read(small()) and config.warnings == ()


# --- values that cannot be right. What must be in the message: the field, its value, and what would be legal.

BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"model_type": "gpt2"}, ['model_type="gpt2"', "llama, mistral, qwen2, qwen3"]),
    ({"model_type": None}, ["model_type=null", "string"]),
    ({"hidden_size": 0}, ["hidden_size=0", "at least 1"]),
    ({"hidden_size": "48"}, ['hidden_size="48"', "an integer"]),
    ({"hidden_size": True}, ["hidden_size=true", "an integer"]),
    ({"hidden_size": 48.0}, ["hidden_size=48.0", "an integer"]),
    ({"hidden_size": 50}, ["hidden_size=50", "num_attention_heads=6", "head_dim"]),
    ({"intermediate_size": -1}, ["intermediate_size=-1", "at least 1"]),
    ({"num_hidden_layers": 0}, ["num_hidden_layers=0", "at least 1"]),
    ({"num_attention_heads": 0}, ["num_attention_heads=0"]),
    ({"num_attention_heads": 0, "head_dim": 8}, ["num_attention_heads=0", "at least 1"]),
    ({"num_key_value_heads": 4}, ["num_attention_heads=6", "num_key_value_heads=4"]),
    ({"num_key_value_heads": 0}, ["num_key_value_heads=0", "at least 1"]),
    ({"head_dim": 7}, ["head_dim=7", "even"]),
    ({"vocab_size": None}, ["vocab_size=null", "an integer"]),
    ({"max_position_embeddings": 0}, ["max_position_embeddings=0", "at least 1"]),
    ({"rms_norm_eps": 0}, ["rms_norm_eps=0.0", "above 0"]),
    ({"rms_norm_eps": float("nan")}, ["rms_norm_eps=NaN", "finite"]),
    ({"rms_norm_eps": 10**400}, ["rms_norm_eps=1000", "finite"]),
    ({"rms_norm_eps": True}, ["rms_norm_eps=true", "finite number"]),
    ({"hidden_act": "gelu"}, ['hidden_act="gelu"', "silu"]),
    ({"rope_theta": -1.0}, ["rope_theta=-1.0", "above 0"]),
    ({"rope_theta": None}, ["rope_theta=null", "number"]),
    ({"rope_scaling": [1]}, ["rope_scaling=[1]", "object"]),
    (
        {"rope_scaling": {"type": "longrope", "factor": 2}},
        ['rope_scaling.rope_type="longrope"', "default or linear or dynamic"],
    ),
    ({"num_key_value_head": 1}, ["num_key_value_head is not a field, and num_key_value_heads is"]),
    ({"rms_norm_epss": 1e-3}, ["rms_norm_epss is not a field, and rms_norm_eps is"]),
    (
        {"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_thetas": 5}},
        ["rope_parameters.rope_thetas is not a field"],
    ),
    ({"rope_scaling": {"type": "dynamic"}}, ["rope_scaling.factor is missing"]),
    ({"rope_scaling": {"type": "dynamic", "factor": 0.5}}, ["factor=0.5", "at least 1"]),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, ["low_freq_factor is missing"]),
    (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8,
                "low_freq_factor": 4,
                "high_freq_factor": 1,
                "original_max_position_embeddings": 8,
            }
        },
        ["low_freq_factor=4.0", "below high_freq_factor=1.0"],
    ),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 8, "beta_fast": 1, "beta_slow": 2}},
        ["beta_slow=2.0", "below beta_fast=1.0"],
    ),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 8, "original_max_position_embeddings": 0}},
        ["original_max_position_embeddings=0"],
    ),
    ({"rope_scaling": {"rope_type": "linear"}}, ["rope_scaling.factor is missing"]),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, ["rope_factor=0.0", "above 0"]),
    ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, ['rope_scaling.factor="2"', "number"]),
    ({"rope_scaling": {"rope_type": "default", "factor": 2}}, ["factor=2.0", "default"]),
    ({"rope_scaling": {"rope_type": "default", "type": "mrope"}}, ["rope_scaling=", "two types"]),
    ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"type": "default"}}, ["differ", "keep one"]),
    ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, ["10000.0", "1000000.0", "differ"]),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, ["rope_parameters=", "between layers"]),
    ({"tie_word_embeddings": 1}, ["tie_word_embeddings=1", "true or false"]),
    ({"attention_bias": "yes"}, ['attention_bias="yes"', "true or false"]),
    ({"dtype": "int8"}, ['dtype="int8"', "bfloat16"]),
    ({"torch_dtype": 16}, ["torch_dtype=16", "string"]),
    ({"dtype": "float16", "torch_dtype": "bfloat16"}, ["dtype=float16", "torch_dtype=bfloat16", "keep one"]),
    ({"bos_token_id": 101}, ["bos_token_id=101", "0 to 100"]),
    ({"eos_token_id": [2, 400]}, ["eos_token_id=400", "0 to 100"]),
    ({"eos_token_id": ["2"]}, ['eos_token_id=["2"]', "token id"]),
    ({"eos_token_id": True}, ["eos_token_id=true", "token id"]),
    ({"pad_token_id": -2}, ["pad_token_id=-2", "0 to 100"]),
    ({"sliding_window": 8}, ["sliding_window=8", "model_type=llama", "null"]),
    ({"model_type": "mistral", "sliding_window": 0}, ["sliding_window=0", "at least 1"]),
    ({"model_type": "mistral", "use_sliding_window": False}, ["sliding_window=4096", "use_sliding_window=false"]),
    ({"model_type": "mistral", "layer_types": ["full_attention"] * 3}, ["layer_types=", "model_type=mistral"]),
    ({"layer_types": "full_attention"}, ['layer_types="full_attention"', "list"]),
    ({"layer_types": ["full_attention"]}, ["layer_types has 1", "num_hidden_layers=3"]),
    ({"layer_types": ["full_attention", "linear_attention", {}]}, ['"linear_attention"', "full_attention"]),
    ({"layer_types": ["full_attention", "full_attention", {}]}, ["layer_types has {}"]),
    ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 3}, ["sliding_attention", "no sliding_window"]),
    ({"model_type": "qwen2", "attention_bias": False}, ["attention_bias=false", "model_type=qwen2", "always true"]),
    ({"model_type": "mistral", "mlp_bias": True}, ["mlp_bias=true", "model_type=mistral", "always false"]),
    ({"qk_norm": True}, ["qk_norm=true", "model_type=llama", "always false"]),
]


@pytest.mark.parametrize(("changes", "parts"), BAD, ids=[json.dumps(changes)[:60] for changes, _ in BAD])
def test_bad_values_are_named(changes: dict[str, Any], parts: list[str]) -> None:
    message = refusal(small(**changes))
    assert all(part in message for part in parts), message
    assert len(message) < 400


@pytest.mark.parametrize("kind", ["longrope", "proportional", "su", "mrope"])
def test_other_rope_types_are_refused_by_name(kind: str) -> None:
    assert f'"{kind}"' in refusal(small(rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 8.0}))


@pytest.mark.parametrize("name", ["model_type", *(set(SIZES) - {"num_key_value_heads"})])
def test_a_missing_size_is_not_guessed(name: str) -> None:
    values = small()
    del values[name]
    assert f"{name} is missing" in refusal(values)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "qwen2", "attention_bias": True},
        {"model_type": "qwen3", "use_qk_norm": True},
        {"model_type": "mistral", "use_sliding_window": True, "layer_types": ["sliding_attention"] * 3},
        {"sliding_window": None, "use_sliding_window": False, "layer_types": ["full_attention"] * 3},
        {"hidden_act": "swish", "pad_token_id": -1, "dtype": "torch.float32", "torch_dtype": "float32"},
    ],
)
def test_a_field_that_repeats_the_fact_is_accepted(changes: dict[str, Any]) -> None:
    config = read(small(**changes))
    assert config.warnings == () and config.hidden_act == "silu" and config.pad_token_id is None


def test_frozen_and_checked_whoever_makes_it() -> None:
    config = read(small())
    with pytest.raises(FrozenInstanceError):
        config.hidden_size = 1  # type: ignore[misc]
    for changes in ({"sliding_window": ()}, {"num_key_value_heads": 5}, {"rope_type": "yarn"}, {"head_dim": True}):
        with pytest.raises(ConfigError):
            replace(config, **changes)


# --- files

BROKEN = [
    (b'{"model_type": "llama",\n "hidden_size": }', ["line 2, column 17"]),
    (b"", ["line 1, column 1"]),
    (b'{"hidden_size": 1', ["line 1, column"]),
    (b'{"hidden_size": 1, "hidden_size": 2}', ["hidden_size is given twice"]),
    (b"[1, 2]", ["[1, 2], not a JSON object"]),
    (b'{"a": "\xff"}', ["not valid JSON", "utf-8"]),
    (b"[" * 100_000, ["not valid JSON"]),
    (b'{"hidden_size": ' + b"9" * 5000 + b"}", ["not valid JSON", "digits"]),
]


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(("content", "parts"), BROKEN)
def test_broken_files_are_one_clear_message(tmp_path: Path, content: bytes, parts: list[str], file: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small()))
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dir(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / file} ") and "\n" not in message
    assert all(part in message for part in parts), message
    error = caught.value
    assert error.__cause__ is None and (error.__suppress_context__ or not error.__context__)  # nothing from inside json


def test_directories_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    empty = tmp_path / "empty"
    empty.mkdir()
    nested = tmp_path / "nested"
    (nested / "config.json").mkdir(parents=True)
    for path, part in (
        (tmp_path / "absent", "absent does not exist"),
        (file, "file is not a directory"),
        (file / "below", "below does not exist"),
        (loop, "loop"),
        (Path("a\0b"), "cannot be read|does not exist"),
        (empty, "empty has no config.json"),
        (nested, "config.json cannot be read: Is a directory"),
    ):
        with pytest.raises(ConfigError, match=part):
            ModelConfig.from_dir(path)


def test_unreadable_files_and_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root reads everything, so the refusal is the operating system's, put in by hand.
    def refuse(self: Path, *args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(self))

    (tmp_path / "config.json").write_text(json.dumps(small()))
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: Permission denied"):
        ModelConfig.from_dir(tmp_path)
    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: Permission denied"):
        ModelConfig.from_dir(tmp_path)
    monkeypatch.setattr(Path, "is_dir", refuse)
    with pytest.raises(ConfigError, match=r"cannot be read .*Permission denied"):
        ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize(
    ("generation", "stops"),
    [
        (None, (7,)),
        ({}, (7,)),
        ({"eos_token_id": None}, (7,)),
        ({"eos_token_id": 9, "temperature": 0.6}, (9,)),
        ({"eos_token_id": [9, 8, 9]}, (9, 8)),
    ],
)
def test_stop_tokens_of_generation_config_come_first(
    tmp_path: Path, generation: dict[str, Any] | None, stops: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small(eos_token_id=7, odd=1)))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    config = ModelConfig.from_dir(str(tmp_path))
    assert config.eos_token_ids == stops and len(config.warnings) == 1


@pytest.mark.parametrize(("eos", "part"), [(101, "0 to 100"), ("2", "token id"), ([None], "token id")])
def test_bad_stop_tokens_name_their_file(tmp_path: Path, eos: Any, part: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small()))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ConfigError, match=rf"generation_config\.json: eos_token_id=.*{part}"):
        ModelConfig.from_dir(tmp_path)


def test_errors_name_the_config_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small(hidden_act="relu")))
    with pytest.raises(ConfigError, match=r"^/.*/config\.json: hidden_act="):
        ModelConfig.from_dir(tmp_path)


def test_imports_no_torch() -> None:
    code = "import sys; import tp_residual.cli.generate; print('torch' in sys.modules)"
    root = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, env=environment)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr
