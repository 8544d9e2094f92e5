"""Tiny random models of every family, as the directories Transformers saves, chosen so that no part of a model goes unseen.

Head counts split unevenly (9/3, 14/2, 8/1), the vocabulary (101) and the intermediate sizes are prime, windows are shorter than the
prompts. Weights are wide and no two alike, biases and norm weights included: greedy text then wanders, and gaps between logits stay
far above rounding. Ranks import this file, so Transformers, which takes seconds, is imported by what the parent alone calls.
"""

import atexit
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tp_residual.checkpoint.load import load_state_dict_blocks
from tp_residual.model.config import ModelConfig
from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.blocks import parameter_blocks
from tp_residual.parallel.group import TensorParallelGroup

_COMMON = {
    "vocab_size": 101,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MODELS: dict[str, dict[str, Any]] = {
    "llama": _COMMON
    | {
        "model_type": "llama",
        "hidden_size": 45,
        "intermediate_size": 59,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "tie_word_embeddings": False,
    },
    "llama_biased": _COMMON
    | {
        "model_type": "llama",
        "hidden_size": 48,
        "intermediate_size": 71,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 6,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
    },
    "qwen2": _COMMON
    | {
        "model_type": "qwen2",
        "hidden_size": 56,
        "intermediate_size": 37,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 3,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": _COMMON
    | {
        "model_type": "qwen3",
        "hidden_size": 36,
        "intermediate_size": 47,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 10,
        "tie_word_embeddings": False,
    },
    "mistral": _COMMON
    | {
        "model_type": "mistral",
        "hidden_size": 40,
        "intermediate_size": 53,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "sliding_window": 4,
        "tie_word_embeddings": False,
    },
}

# For the command line: the same with room for a byte-level vocabulary. Not in MODELS, which tests go through.
TEXT_MODELS = {"llama_text": MODELS["llama"] | {"vocab_size": 320}}


def config(name: str, **changes: Any) -> ModelConfig:
    return ModelConfig.from_dict((MODELS | TEXT_MODELS)[name] | changes, name)


def random_weights(config: ModelConfig, seed: int = 4, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """A full state dict under the checkpoint's names: matrices and biases of standard deviation 0.2, norm weights from 0.5 to 1.5."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    linears = {
        "self_attn.q_proj": (q, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q, config.o_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    for layer in (f"model.layers.{number}" for number in range(config.num_hidden_layers)):
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{layer}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{layer}.{name}.bias"] = (rows,)
        shapes |= {f"{layer}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        if config.qk_norm:
            shapes |= {f"{layer}.self_attn.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (
            0.5 + torch.rand(shape, generator=generator, dtype=torch.float64)
            if "norm" in name
            else 0.2 * torch.randn(shape, generator=generator, dtype=torch.float64)
        ).to(dtype)
        for name, shape in shapes.items()
    }


def prompts(count: int, seed: int = 0, longest: int = 13) -> list[list[int]]:
    """Ragged: lengths from 1 up, the longest first; any id of the vocabulary, its last one among them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [longest, 1, *(2 + i * 3 % longest for i in range(count))][:count]
    batch = [torch.randint(0, 101, (length,), generator=generator).tolist() for length in lengths]
    batch[0][-2] = 100
    return batch


def sharded(config: ModelConfig, group: TensorParallelGroup, weights: dict[str, Tensor], **options: Any) -> CausalLM:
    """This rank's share of the model; loading proves that every element of every parameter is written once."""
    model = CausalLM(config, group, **options)
    load_state_dict_blocks(parameter_blocks(model), weights)
    return model


# -- for the parent only: Transformers


@cache
def scratch_dir() -> Path:
    """A folder for this run of the tests."""
    folder = tempfile.TemporaryDirectory(prefix="tp_residual-tiny-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


@cache
def reference(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Transformers' own model, in fp32, with `random_weights`. Refuses a state dict whose names or shapes differ from its own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict((MODELS | TEXT_MODELS)[name])
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(values.pop("model_type"), **values), attn_implementation="eager"
    )
    weights = random_weights(config(name), dtype=dtype)
    if config(name).tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True)
    model.to(dtype)
    return model.eval()


@cache
def saved(name: str, dtype: torch.dtype = torch.float32, max_shard_size: str = "50GB") -> Path:
    """Its directory: config.json, generation_config.json and the weights, as Transformers writes them."""
    folder = scratch_dir() / f"{name}-{str(dtype).removeprefix('torch.')}-{max_shard_size}"
    reference(name, dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder
