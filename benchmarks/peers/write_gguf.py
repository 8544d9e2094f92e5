"""A bf16 (or fp32) GGUF file with the weights of a Hugging Face directory, for llama.cpp: no tokenizer, nothing quantised.

    python write_gguf.py MODEL_DIR OUT.gguf [bfloat16|float32]

Needs `gguf` and numpy only. Matrices keep their values: bf16 may become fp32, and not the other way round. Norm weights and biases are
written in fp32, the only type that llama.cpp adds and multiplies them in. Llama and Mistral rotate neighbouring elements in llama.cpp and
halves in the checkpoint, so the rows of their q and k are reordered; Qwen rotates halves in both.
"""

import json
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_STORED = {"BF16": np.uint16, "F32": np.float32}
_DTYPES = {"bfloat16": GGMLQuantizationType.BF16, "float32": GGMLQuantizationType.F32}
_OUTSIDE = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
_INSIDE = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class CannotWrite(ValueError):
    """A model that this file has no way to say to llama.cpp."""


def write_gguf(model_dir: str | Path, target: str | Path, dtype: str = "bfloat16") -> int:
    """dtype: of the matrices. Returns how many tensors were written. Raises CannotWrite by name, before the file is begun."""
    config = json.loads((Path(model_dir) / "config.json").read_text())
    kind = config.get("model_type")
    if kind not in _ARCHITECTURES:
        raise CannotWrite(f"model_type={kind!r} is not one of {', '.join(_ARCHITECTURES)}")
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or (rope if rope.get("rope_type", "default") != "default" else None)
    if scaling is not None:
        raise CannotWrite(f"rope scaling {scaling} is not written; use a model without")
    if config.get("use_sliding_window") or (kind == "mistral" and config.get("sliding_window")):
        raise CannotWrite("a sliding window is not written; use a model without")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    if dtype not in _DTYPES:
        raise CannotWrite(f"dtype {dtype} is not one of {', '.join(_DTYPES)}")
    names = {}
    for name, stored, _ in _tensors(Path(model_dir)):
        names[name] = _gguf_name(name)
        if stored == "F32" and dtype == "bfloat16":
            raise CannotWrite(f"tensor {name!r} is fp32, and in bf16 it would have other values; use float32")
    writer = GGUFWriter(str(target), _ARCHITECTURES[kind])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    tied = config.get("tie_word_embeddings", False)
    written = 0
    for name, stored, array in _tensors(Path(model_dir)):
        if tied and name == "lm_head.weight":
            continue
        if _ARCHITECTURES[kind] == "llama" and ("q_proj" in name or "k_proj" in name):
            array = interleaved(array, heads if "q_proj" in name else kv_heads)
        raw = GGMLQuantizationType.F32 if array.ndim == 1 else _DTYPES[dtype]
        array = as_float32(array, stored) if raw is GGMLQuantizationType.F32 else np.ascontiguousarray(array)
        # as bytes: numpy has no bfloat16
        writer.add_tensor(names[name], array.view(np.uint8), raw_dtype=raw)
        written += 1
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """`[heads * head_dim, ...]` whose head rows are two halves, as pairs: row j of the first half, then row j of the second."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def as_float32(array: np.ndarray, stored: str) -> np.ndarray:
    """Exactly: a bfloat16 is the upper half of a float."""
    if stored == "F32":
        return np.ascontiguousarray(array)
    return (array.astype(np.uint32) << 16).view(np.float32)


def _gguf_name(name: str) -> str:
    if name in _OUTSIDE:
        return f"{_OUTSIDE[name]}.weight"
    inside = name.removeprefix("model.layers.")
    layer, _, rest = inside.partition(".")
    module, _, kind = rest.rpartition(".")
    if inside == name or module not in _INSIDE:
        raise CannotWrite(f"tensor {name!r} has no name in llama.cpp")
    return f"blk.{layer}.{_INSIDE[module]}.{kind}"


def _tensors(model_dir: Path) -> Iterator[tuple[str, str, np.ndarray]]:
    """(name, dtype, values; bfloat16 as uint16) of every tensor, in the order of the files; mapped, not read."""
    for file in sorted(model_dir.glob("*.safetensors")):
        with file.open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        length = int.from_bytes(mapped[:8], "little")
        header: dict[str, Any] = json.loads(mapped[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, info in header.items():
            if info["dtype"] not in _STORED:
                raise CannotWrite(f"tensor {name!r} is {info['dtype']}; use bfloat16 or float32 weights")
            start, stop = info["data_offsets"]
            kind = _STORED[info["dtype"]]
            flat = np.frombuffer(mapped, kind, (stop - start) // np.dtype(kind).itemsize, 8 + length + start)
            yield name, info["dtype"], flat.reshape(info["shape"])


if __name__ == "__main__":
    try:
        write_gguf(*sys.argv[1:])
    except (CannotWrite, OSError) as error:
        sys.exit(f"write_gguf: {error}")
