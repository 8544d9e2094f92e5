"""Rotary position embedding, in the half-rotated form of the Llama checkpoints.

Angles depend on the position alone: the same token gives the same bits in prefill, in decode and in any batch.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tp_residual.model.config import ModelConfig


class RopeTables(NamedTuple):
    """Cosine and sine `[tokens, head_dim]` of one forward pass; fp32, or fp64 for an fp64 model."""

    cos: Float[Tensor, "tokens head_dim"]
    sin: Float[Tensor, "tokens head_dim"]


def rope_tables(config: ModelConfig, positions: Int[Tensor, " tokens"], dtype: torch.dtype) -> RopeTables:
    """position / factor * theta^(-2i / head_dim); factor is 1 but for rope type "linear" (position interpolation, arXiv 2306.15595)."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    exponent = torch.arange(0, config.head_dim, 2, device=positions.device).to(wide) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponent) / config.rope_factor
    angles = positions.to(wide)[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return RopeTables(angles.cos(), angles.sin())


def apply_rope(x: Float[Tensor, "tokens heads head_dim"], tables: RopeTables) -> Float[Tensor, "tokens heads head_dim"]:
    """`x * cos + rotate_half(x) * sin`, computed in the tables' precision and rounded once to x's dtype."""
    low, high = x.chunk(2, dim=-1)
    rotated = torch.cat([-high, low], dim=-1)
    return (x * tables.cos[:, None] + rotated * tables.sin[:, None]).to(x.dtype)
