"""How far two values are apart, by token, and how far rounding alone can take them.

An error is relative and per token: norm of the difference over norm of the reference. Absolute errors say nothing here: the norm of one
token's stream can be a thousand times another's.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

# fp32 against the fp64 oracle. Correct code on the demo model: 1e-5 for streams and updates, 1.6e-5 for logits on text. Random ids are
# nothing that a model was trained on: attention spreads, activations grow where text keeps them small, and the same rounding is amplified
# to 4e-5; hence four times the room.
_FP32 = {"stream": 2e-5, "update": 5e-5, "logits": 5e-5}
_RANDOM_IDS = 4.0

# 16 bits: a state's median over the tokens against that of the same model in the same dtype at tp=1, in the same command. Correct code
# stays below 1.15 (updates 1.53). Maxima reach 3.9 times in correct code, so they are shown and not judged.
MEDIAN_RATIOS = {"stream": 1.5, "update": 2.0, "logits": 1.5}
MEDIAN_TOKENS = 256

# One sublayer on our own input, by token. fp32: at most 3.3e-6 in correct code on the demo model, text and random ids alike (nothing is
# inherited), against 1e-3 and more for any fault. 16 bits: 8 times the largest at tp=1; what differs is the order of sums.
_LOCAL_FP32 = 5e-5
LOCAL_RATIO = 8.0
# fp32 roundings of one sum, add or norm whose order is free, in units of eps: tens, whatever the sizes.
FEW_ROUNDINGS = 64.0


@dataclass(frozen=True)
class Difference:
    """max_ulp: the largest elementwise distance in units in the last place of `dtype` at the reference's element."""

    max_error: float
    median_error: float
    max_ulp: float
    worst_token: int
    worst_dimension: int


def token_errors(value: Float[Tensor, "tokens width"], reference: Float[Tensor, "tokens width"]) -> Tensor:
    """`|value - reference| / |reference|` by token `[tokens]`, fp64. NaN counts as infinite; 0 of 0 as none."""
    value, reference = value.double(), reference.double()
    distance = torch.linalg.vector_norm(value - reference, dim=-1)
    error = distance / torch.linalg.vector_norm(reference, dim=-1)
    return error.where(distance != 0, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)


def difference(
    value: Float[Tensor, "tokens width"], reference: Float[Tensor, "tokens width"], dtype: torch.dtype
) -> Difference:
    """dtype: that of `value`, in whose last place the reference is measured."""
    errors = token_errors(value, reference)
    worst = int(errors.argmax())
    apart = (value.double() - reference.double()).abs().nan_to_num(nan=torch.inf)
    unit = torch.finfo(dtype).eps * torch.exp2(
        reference.double().abs().clamp_min(torch.finfo(dtype).tiny).log2().floor()
    )
    return Difference(
        float(errors.max()), float(errors.median()), float((apart / unit).max()), worst, int(apart[worst].argmax())
    )


def limits(dtype: torch.dtype, *, text: bool) -> dict[str, float]:
    """By quantity, for a 32- or 64-bit model: the largest relative error of a token. text: of a language, not random ids.

    "local": of what one module makes of our own input to it.
    """
    scale = torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
    if dtype == torch.float64:
        scale *= 8  # the oracle rounds as coarsely itself
    drift = scale if text else scale * _RANDOM_IDS
    return {name: limit * drift for name, limit in _FP32.items()} | {"local": _LOCAL_FP32 * scale}


def beyond_rounding(
    value: Float[Tensor, "tokens width"],
    reference: Float[Tensor, "tokens width"],
    allowed: Float[Tensor, "tokens width"],
    scale: Float[Tensor, " tokens"],
) -> Tensor:
    """By token: the norm of what exceeds `allowed` elementwise, over `scale`. 0 where rounding to a known dtype explains everything."""
    excess = ((value.double() - reference.double()).abs() - allowed).clamp_min(0).nan_to_num(nan=torch.inf)
    norm = torch.linalg.vector_norm(excess, dim=-1)
    return (norm / scale).where(norm != 0, 0.0).nan_to_num(nan=torch.inf)


def fitted_factor(value: Tensor, reference: Tensor) -> tuple[float, float]:
    """The least-squares factor c of `value = c * reference`, and the norm of what it leaves."""
    value, reference = value.double().reshape(-1), reference.double().reshape(-1)
    square = float(reference @ reference)
    factor = float(value @ reference) / square if square else 0.0
    return factor, float(torch.linalg.vector_norm(value - factor * reference))
