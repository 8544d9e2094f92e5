"""What a family is, said once: the facts that config.json leaves to the model's code.

Which projections have a bias, whether heads are normalised, which layers look through a window, and what an absent
field means. A new family is one more entry here: `config.py` reads the entries, and the decoder is built from the
resulting `ModelConfig` alone. The facts and the defaults are those of Transformers 5.24. This file imports no torch.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type`.

    A bias is True, False, or the name of the config field that decides it (absent there means False).
    `windows` says which layers slide: "none"; "all" by `sliding_window` (null: none); or "upper", which is none unless
    `use_sliding_window`, and then the layers from `max_window_layers` on, or those that `layer_types` names.
    The remaining fields are what an absent field of config.json means.
    """

    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    weight_after_cast: bool = True  # y = weight * normalised.to(dtype), the Llama order
    windows: Literal["none", "all", "upper"] = "none"
    sliding_window: int | None = None
    max_window_layers: int = 0
    head_dim: int | None = None  # None: hidden_size // num_attention_heads
    num_key_value_heads: int | None = None  # None: as many as query heads
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    bos_token_id: int | None = None
    eos_token_id: int | None = None


FAMILIES: dict[str, Family] = {
    "llama": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "mistral": Family(
        windows="all",
        sliding_window=4096,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "qwen2": Family(
        qkv_bias=True,
        windows="upper",
        sliding_window=4096,
        max_window_layers=28,
        num_key_value_heads=32,
        max_position_embeddings=32768,
    ),
    "qwen3": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        windows="upper",
        sliding_window=4096,
        max_window_layers=28,
        head_dim=128,
        num_key_value_heads=32,
        max_position_embeddings=32768,
    ),
}
