# mypy: disable-error-code="no-untyped-def"
"""The forward add+norm as one Triton kernel: each value is read once and written once."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_residual.kernels.add_norm_operands import Operands
from tp_residual.kernels.contract import AddNormSpec
from tp_residual.kernels.triton_rows import (
    DTYPES,
    Geometry,
    load_parameter,
    load_rows,
    normalize,
    round_to,
    row_stride,
    store_rows,
    stride_unit,
)


@dataclass(frozen=True)
class Launch:
    """A kernel with everything it is launched with."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]
    device: torch.device

    def run(self) -> None:
        if self.device.type == "cuda" and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):  # Triton launches on the current device
                self.kernel[self.grid](**self.arguments, **self.options)
        else:
            self.kernel[self.grid](**self.arguments, **self.options)


@triton.jit(
    do_not_specialize=["stride_residual", "stride_update", "stride_residual_out", "stride_normed_out", "tokens"]
)
def add_norm_kernel(
    residual_ptr,
    update_ptr,
    update_bias_ptr,
    update_weight_ptr,
    update_norm_bias_ptr,
    weight_ptr,
    norm_bias_ptr,
    residual_out_ptr,
    normed_out_ptr,
    stride_residual,
    stride_update,
    stride_residual_out,
    stride_normed_out,
    tokens,
    skip_scale,
    update_scale,
    eps,
    weight_offset,
    update_eps,
    update_weight_offset,
    STREAM_DTYPE: tl.constexpr,
    ROUND_UPDATE: tl.constexpr,
    LAYER: tl.constexpr,
    UPDATE_LAYER: tl.constexpr,
    WEIGHT_AFTER_CAST: tl.constexpr,
    CONTRACT: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """new = (skip_scale * residual + update_scale * norm(update + bias)).to(STREAM_DTYPE); normed = norm(new) * weight + norm_bias

    Rows `[tokens, HIDDEN]`, strides in STRIDE_UNIT elements; ROWS rows a program. An absent operand, output, scale or offset is None.
    fp32 throughout. A row is read whole before any of it is written, so that outputs may be the inputs.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if update_ptr is not None:
        new = load_rows(update_ptr, stride_update * STRIDE_UNIT, rows, tokens, HIDDEN, ROWS, BLOCK)
        if update_bias_ptr is not None:
            new += load_parameter(update_bias_ptr, HIDDEN, BLOCK)
        new = round_to(new, ROUND_UPDATE).to(tl.float32)
        if update_weight_ptr is not None:
            centred, r = normalize(new, update_eps, UPDATE_LAYER, CONTRACT, HIDDEN, ROWS, BLOCK, LEVELS)
            scale = load_parameter(update_weight_ptr, HIDDEN, BLOCK)
            if update_weight_offset is not None:
                scale += update_weight_offset
            new = centred * r * scale
            if update_norm_bias_ptr is not None:
                new += load_parameter(update_norm_bias_ptr, HIDDEN, BLOCK)
            new = round_to(new, ROUND_UPDATE).to(tl.float32)
        if update_scale is not None:
            new *= update_scale
    if residual_ptr is not None:
        kept = load_rows(residual_ptr, stride_residual * STRIDE_UNIT, rows, tokens, HIDDEN, ROWS, BLOCK)
        if skip_scale is not None:
            kept *= skip_scale
        if update_ptr is not None:
            new = kept + new
        else:
            new = kept
    rounded = round_to(new, STREAM_DTYPE)
    if residual_out_ptr is not None:
        store_rows(residual_out_ptr, stride_residual_out * STRIDE_UNIT, rounded, rows, tokens, HIDDEN, ROWS, BLOCK)
    if normed_out_ptr is not None:
        centred, r = normalize(rounded.to(tl.float32), eps, LAYER, CONTRACT, HIDDEN, ROWS, BLOCK, LEVELS)
        normed = centred * r
        scale = load_parameter(weight_ptr, HIDDEN, BLOCK)
        if weight_offset is not None:
            scale += weight_offset
        OUTPUT_DTYPE: tl.constexpr = normed_out_ptr.dtype.element_ty
        if WEIGHT_AFTER_CAST:
            normed = round_to(normed, OUTPUT_DTYPE).to(tl.float32) * scale
            normed = round_to(normed, OUTPUT_DTYPE).to(tl.float32)
        else:
            normed *= scale
        if norm_bias_ptr is not None:
            normed += load_parameter(norm_bias_ptr, HIDDEN, BLOCK)
        normed = round_to(normed, OUTPUT_DTYPE)
        store_rows(normed_out_ptr, stride_normed_out * STRIDE_UNIT, normed, rows, tokens, HIDDEN, ROWS, BLOCK)


def add_norm_launch(
    spec: AddNormSpec, operands: Operands, residual_out: Tensor | None, normed_out: Tensor | None, *, fast: bool
) -> Launch:
    """The launch that writes into `residual_out` and `normed_out`, either of which may be absent.

    Rows `[tokens, hidden]`, tokens >= 1, hidden 1 to 16384, unit stride in the last dimension; no fp64.
    """
    residual, update = operands.residual, operands.update
    tokens, hidden = operands.rows.shape
    geometry = Geometry.of(hidden)
    unit = stride_unit(residual, update, residual_out, normed_out)
    arguments = dict(
        **{f"{name}_ptr": t for name, t in operands._asdict().items()},
        residual_out_ptr=residual_out,
        normed_out_ptr=normed_out,
        stride_residual=row_stride(residual, unit),
        stride_update=row_stride(update, unit),
        stride_residual_out=row_stride(residual_out, unit),
        stride_normed_out=row_stride(normed_out, unit),
        tokens=tokens,
        skip_scale=None if spec.skip_scale == 1.0 else spec.skip_scale,
        update_scale=None if spec.update_scale == 1.0 else spec.update_scale,
        **norm_arguments(spec),
        STREAM_DTYPE=DTYPES[spec.stream_dtype],
        ROUND_UPDATE=DTYPES[spec.round_update or torch.float32],
        WEIGHT_AFTER_CAST=spec.norm is not None and spec.norm.weight_after_cast and spec.output_dtype != torch.float32,
        CONTRACT=not fast,
        STRIDE_UNIT=unit,
        **geometry.constants(hidden),
    )
    options = {"num_warps": geometry.warps, "enable_fp_fusion": fast}
    return Launch(add_norm_kernel, (triton.cdiv(tokens, geometry.rows),), arguments, options, operands.rows.device)


def norm_arguments(spec: AddNormSpec) -> dict[str, Any]:
    """What both kernels are told about the two norms."""
    norm, update_norm = spec.norm, spec.update_norm
    return dict(
        eps=None if norm is None else norm.eps,
        weight_offset=None if norm is None or norm.weight_offset == 0.0 else norm.weight_offset,
        update_eps=None if update_norm is None else update_norm.eps,
        update_weight_offset=None
        if update_norm is None or update_norm.weight_offset == 0.0
        else update_norm.weight_offset,
        LAYER=norm is not None and norm.kind == "layer",
        UPDATE_LAYER=update_norm is not None and update_norm.kind == "layer",
    )
