"""The arithmetic that every boundary kernel must reproduce bit for bit, in plain torch. Usable without a group.

Everything is computed in fp32 (fp64 stays fp64) and each result is rounded once. The order of each sum is fixed, and no step is left
to a library's choice of fused multiply-add or approximate square root, so that Triton and C++ can be compared with `torch.equal`.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True)
class NormSpec:
    """What a norm computes, without its parameters.

    weight_offset: 1.0 for models that store `w - 1`. weight_after_cast: round the normalised value to the output dtype first and
    multiply then (the Llama order, two roundings), instead of one rounding at the end.
    """

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    weight_offset: float = 0.0
    weight_after_cast: bool = False


def widen(x: Tensor) -> Tensor:
    """fp32 for the 16-bit types, fp32 and fp64 as they are."""
    return x if x.dtype in WIDE else x.float()


def tree_sum(x: Tensor) -> Tensor:
    """Sum of the last dimension, kept: zero-pad to a power of two, then halve by `v[i] + v[i + h]` until one is left."""
    size = x.shape[-1]
    width = 1 << (size - 1).bit_length()
    if width != size:
        x = torch.nn.functional.pad(x, (0, width - size))
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x


def _over(x: Tensor, divisor: int) -> Tensor:
    # by a tensor: for a Python scalar, CUDA multiplies by a rounded reciprocal instead of dividing
    return torch.div(x, torch.full((1,), float(divisor), dtype=x.dtype, device=x.device))


def _inverse_root(mean_square: Tensor, eps: float) -> Tensor:
    # not rsqrt, which is approximate and differs in 14 % of inputs
    # through fp64, which rounds to the nearest fp32: for many rows torch's fp32 sqrt on CPU is a library's, off in 0.3 % of inputs
    value = mean_square + eps
    root = torch.sqrt(value.double()).to(value.dtype)
    return torch.div(torch.ones_like(root), root)


def normalize(x: Tensor, spec: NormSpec) -> tuple[Tensor, Tensor]:
    """`(centred x, 1 / root)`, wide: their product is the normalised value before the weight. x: `[..., D]`, wide."""
    size = x.shape[-1]
    if spec.kind == "layer":
        x = x - _over(tree_sum(x), size)
    return x, _inverse_root(_over(tree_sum(x * x), size), spec.eps)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, spec: NormSpec, dtype: torch.dtype) -> Tensor:
    """`(x * r) * w (+ b)` of the last dimension, r = 1 / sqrt(mean(x^2) + eps); rounded once to `dtype`.

    x: any float dtype, read as it is (a boundary passes the rounded stream). LayerNorm centres x by its mean first.
    """
    centred, r = normalize(widen(x), spec)
    y = centred * r
    scale = widen(weight).to(y.dtype)
    if spec.weight_offset:
        scale = scale + spec.weight_offset
    if spec.weight_after_cast and dtype not in WIDE:
        y = (y.to(dtype).float() * scale).to(
            dtype
        )  # one multiplication in fp32 rounded to 16 bits is the 16-bit multiplication
        return y if bias is None else (y.float() + bias.float()).to(dtype)
    y = y * scale
    if bias is not None:
        y = y + widen(bias).to(y.dtype)
    return y.to(dtype)


def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, spec: NormSpec
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients `(d_x wide, d_weight, d_bias)` of `norm`, from differentiable operations only, so that it can be differentiated again.

    grad, x: `[tokens, D]`. Statistics are recomputed from x. Accumulated in fp32 (fp64 for fp64), rounded once to each parameter's dtype.
    """
    wide = torch.promote_types(widen(grad).dtype, widen(x).dtype)
    grad, x = grad.to(wide), x.to(wide)
    if spec.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    r = (x.square().mean(-1, keepdim=True) + spec.eps).rsqrt()
    normalised = x * r
    scaled = grad * (weight.to(wide) + spec.weight_offset)
    d_x = scaled - normalised * (scaled * normalised).mean(-1, keepdim=True)
    if spec.kind == "layer":
        d_x = d_x - scaled.mean(-1, keepdim=True)
    d_weight = (grad * normalised).sum(0).to(weight.dtype)
    return d_x * r, d_weight, None if bias is None else grad.sum(0).to(bias.dtype)


def add(
    residual: Tensor | None, update: Tensor | None, dtype: torch.dtype, *, round_update: torch.dtype | None = None
) -> Tensor:
    """The stream after an update: `round(residual + update)`, added wide, rounded once to `dtype`.

    round_update: round the completed sum to this dtype before the add, as a plain all-reduce in that dtype does.
    """
    if update is None:
        assert residual is not None
        return residual.to(dtype)
    if round_update is not None:
        update = widen(update.to(round_update))
    if residual is None:
        return update.to(dtype)
    residual, update = widen(residual), widen(update)
    wide = torch.promote_types(residual.dtype, update.dtype)
    return (residual.to(wide) + update.to(wide)).to(dtype)
