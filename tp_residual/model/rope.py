"""Rotary position embedding, in the half-rotated form of the Llama checkpoints.

Angles depend on a token's position and, for rope type "dynamic", on the length of its own sequence: never on the batch.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tp_residual.kernels.decoder import rope, serves
from tp_residual.model.config import ModelConfig


class RopeTables(NamedTuple):
    """Cosine and sine `[tokens, head_dim]` of one forward pass; fp32, or fp64 for an fp64 model."""

    cos: Float[Tensor, "tokens head_dim"]
    sin: Float[Tensor, "tokens head_dim"]


def rope_tables(
    config: ModelConfig,
    positions: Int[Tensor, " tokens"],
    dtype: torch.dtype,
    sequence_lengths: Int[Tensor, " tokens"] | None = None,
) -> RopeTables:
    """Cosine and sine of position x frequency. sequence_lengths: of each token's sequence so far, needed by "dynamic" alone."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    frequencies = _frequencies(config, positions.device, wide)
    if config.rope_type == "dynamic":
        assert sequence_lengths is not None
        frequencies = _dynamic(config, frequencies, sequence_lengths)
    angles = positions.to(wide)[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    scale = 1.0 if config.rope_scaling is None else config.rope_scaling.attention_factor
    return RopeTables(angles.cos() * scale, angles.sin() * scale)


def _frequencies(config: ModelConfig, device: torch.device, wide: torch.dtype) -> Tensor:
    """`theta^(-2i / head_dim)`, `[head_dim / 2]`, changed as the rope type says.

    linear divides by the factor (arXiv 2306.15595). llama3 divides the low frequencies, keeps the high ones and blends between, by
    wavelengths in the length of pretraining (Llama 3.1). yarn does so by the number of rotations over that length (arXiv 2309.00071).
    """
    exponent = torch.arange(0, config.head_dim, 2, device=device).to(wide) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponent)
    factor, scaling = config.rope_factor, config.rope_scaling
    if config.rope_type == "linear":
        return frequencies / factor
    if config.rope_type == "llama3":
        assert scaling is not None
        rotations = scaling.original_max_position_embeddings / (2 * math.pi / frequencies)
        kept = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept = kept.clamp(0, 1)
        return (1 - kept) * frequencies / factor + kept * frequencies
    if config.rope_type == "yarn":
        assert scaling is not None
        low, high = (_yarn_dimension(config, rotations) for rotations in (scaling.beta_fast, scaling.beta_slow))
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, config.head_dim - 1)
        ramp = (torch.arange(config.head_dim // 2, device=device).to(wide) - low) / (high - low or 0.001)
        divided = ramp.clamp(0, 1)
        return frequencies / factor * divided + frequencies * (1 - divided)
    return frequencies


def _yarn_dimension(config: ModelConfig, rotations: float) -> float:
    """The (real-valued) frequency index that turns `rotations` times over the length of pretraining."""
    assert config.rope_scaling is not None
    length = config.rope_scaling.original_max_position_embeddings
    return config.head_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))


def _dynamic(config: ModelConfig, frequencies: Tensor, sequence_lengths: Tensor) -> Tensor:
    """`[tokens, head_dim / 2]`: beyond max_position_embeddings, theta grows with the length of the token's own sequence (NTK-aware)."""
    wide, length = frequencies.dtype, config.max_position_embeddings
    stretch = config.rope_factor * sequence_lengths.to(wide) / length - (config.rope_factor - 1)
    theta = config.rope_theta * stretch.clamp(min=1.0) ** (config.head_dim / (config.head_dim - 2))
    exponent = torch.arange(0, config.head_dim, 2, device=frequencies.device).to(wide) / config.head_dim
    return torch.where((sequence_lengths > length)[:, None], 1.0 / theta[:, None] ** exponent, frequencies)


def apply_rope(x: Float[Tensor, "tokens heads head_dim"], tables: RopeTables) -> Float[Tensor, "tokens heads head_dim"]:
    """`x * cos + rotate_half(x) * sin`, computed in the tables' precision and rounded once to x's dtype."""
    if tables.cos.dtype == torch.float32 and serves(x):
        return rope(x, tables.cos, tables.sin)
    low, high = x.chunk(2, dim=-1)
    rotated = torch.cat([-high, low], dim=-1)
    return (x * tables.cos[:, None] + rotated * tables.sin[:, None]).to(x.dtype)
