"""The arithmetic that every boundary kernel must reproduce bit for bit, in plain torch. Usable without a group.

Everything is computed in fp32 (fp64 stays fp64) and each result is rounded once. The order of each sum is fixed, and no step is left
to a library's choice of fused multiply-add or approximate square root, so that Triton and C++ can be compared with `torch.equal`.
"""

from ctypes import c_float
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Literal, get_args

import torch
from torch import Tensor

from tp_residual.errors import UserError

WIDE = (torch.float32, torch.float64)
Kind = Literal["rms", "layer"]


@dataclass(frozen=True)
class NormSpec:
    """What a norm computes, without its parameters.

    weight_offset: 1.0 for models that store `w - 1`. weight_after_cast: round the normalised value to the output dtype first and
    multiply then (the Llama order, two roundings), instead of one rounding at the end. Raises UserError for anything that is no norm;
    whether eps can be used is asked where it is used (`usable_eps`).
    """

    eps: float
    kind: Kind = "rms"
    weight_offset: float = 0.0
    weight_after_cast: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise UserError(f"kind={self.kind!r} is not a norm that is known; use 'rms' or 'layer'")
        for name, value in (("eps", self.eps), ("weight_offset", self.weight_offset)):
            require_number(name, value)
        if not isfinite(c_float(self.weight_offset).value):
            raise UserError(
                f"weight_offset={self.weight_offset} is not finite in float32; use 0.0, or 1.0 for models that store w - 1"
            )


@dataclass(frozen=True)
class AddNormSpec:
    """What happens to a completed sum, without its operands: `round(skip_scale * residual + update_scale * update)`, then a norm.

    norm: reads the new residual as rounded. update_norm: applied to the update first (sandwich). round_update: round the sum, and the
    update norm's result, to this dtype before the add, as separate operations in that dtype do.
    """

    stream_dtype: torch.dtype
    output_dtype: torch.dtype
    norm: NormSpec | None = None
    update_norm: NormSpec | None = None
    update_scale: float = 1.0
    skip_scale: float = 1.0
    round_update: torch.dtype | None = None


def require_number(name: str, value: object) -> None:
    """Raises UserError for text, None, a tensor."""
    if not isinstance(value, float) and not isinstance(value, Real):
        raise UserError(f"{name}={value!r} is a {type(value).__name__}, not a number; pass a Python float")


def usable_eps(eps: float) -> bool:
    """Above 0 and finite in fp32, in which it is added: else a row of zeros is divided by zero, or every row by infinity."""
    return 0.0 < c_float(eps).value < float("inf")


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


def column_sum(x: Tensor) -> Tensor:
    """Sum of rows `[tokens, D]` by the same tree: torch's own order depends on the number of threads where D is 1."""
    return tree_sum(x.t()).squeeze(1)


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
    d_weight = column_sum(grad * normalised).to(weight.dtype)
    return d_x * r, d_weight, None if bias is None else column_sum(grad).to(bias.dtype)


def add_norm(
    spec: AddNormSpec,
    residual: Tensor | None,
    update: Tensor | None,
    *,
    update_bias: Tensor | None = None,
    update_weight: Tensor | None = None,
    update_norm_bias: Tensor | None = None,
    weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`(new residual, normed value or None)` of rows `[tokens, D]`; at least one of residual and update is given.

    update_bias is added once to the completed sum, before any rounding of it. A scale of 1 is not multiplied.
    """
    if update is not None:
        update = widen(update)
        if update_bias is not None:
            update = update + widen(update_bias)
        update = _rounded(update, spec.round_update)
        if spec.update_norm is not None:
            assert update_weight is not None
            update = norm(update, update_weight, update_norm_bias, spec.update_norm, update.dtype)
            update = _rounded(update, spec.round_update)
        if spec.update_scale != 1.0:
            update = update * spec.update_scale
    if residual is None:
        assert update is not None
        new_residual = update.to(spec.stream_dtype)
    else:
        kept = residual if update is None and spec.skip_scale == 1.0 else widen(residual)
        if spec.skip_scale != 1.0:
            kept = kept * spec.skip_scale
        if update is not None:
            wide = torch.promote_types(kept.dtype, update.dtype)
            kept = kept.to(wide) + update.to(wide)
        new_residual = kept.to(spec.stream_dtype)
    if spec.norm is None:
        return new_residual, None
    assert weight is not None
    return new_residual, norm(new_residual, weight, norm_bias, spec.norm, spec.output_dtype)


def add(
    residual: Tensor | None, update: Tensor | None, dtype: torch.dtype, *, round_update: torch.dtype | None = None
) -> Tensor:
    """The stream after an update, without scales or norms."""
    return add_norm(AddNormSpec(dtype, dtype, round_update=round_update), residual, update)[0]


def _rounded(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None else widen(x.to(dtype))
