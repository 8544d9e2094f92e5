# mypy: disable-error-code="no-untyped-def"
"""The backward of add+norm as one Triton kernel over rows, and one more for the sum of each parameter's gradient over the rows.

No atomics: each program adds its rows in order, then the programs' sums are added in order. Both orders are functions of the shape.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_residual.kernels.add_norm_operands import Operands
from tp_residual.kernels.add_norm_triton import Launch, norm_arguments
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

# enough programs for the largest devices, few enough that their sums are small beside the rows
MAX_PROGRAMS = 256


@triton.jit
def norm_gradient(d_y, x, weight, r, LAYER: tl.constexpr, HIDDEN: tl.constexpr):
    """`(d_x, normalised x)` of `y = x * r * weight` for a centred x with zeros beyond HIDDEN."""
    normalised = x * r
    scaled = d_y * weight
    d_x = scaled - normalised * (tl.sum(scaled * normalised, axis=1, keep_dims=True) / HIDDEN)
    if LAYER:
        d_x -= tl.sum(scaled, axis=1, keep_dims=True) / HIDDEN
    return d_x * r, normalised


@triton.jit
def store_partial(ptr, x, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    tl.store(ptr + tl.program_id(0) * HIDDEN + columns, tl.sum(x, axis=0), mask=columns < HIDDEN)


@triton.jit(
    do_not_specialize=[
        "stride_d_new_residual",
        "stride_d_normed",
        "stride_stream",
        "stride_update",
        "stride_d_residual",
        "stride_d_update",
        "tokens",
        "tiles_a_program",
    ]
)
def add_norm_backward_kernel(
    d_new_residual_ptr,
    d_normed_ptr,
    stream_ptr,
    update_ptr,
    update_bias_ptr,
    update_weight_ptr,
    weight_ptr,
    d_residual_ptr,
    d_update_ptr,
    d_weight_ptr,
    d_norm_bias_ptr,
    d_update_weight_ptr,
    d_update_norm_bias_ptr,
    d_update_bias_ptr,
    stride_d_new_residual,
    stride_d_normed,
    stride_stream,
    stride_update,
    stride_d_residual,
    stride_d_update,
    tokens,
    tiles_a_program,
    skip_scale,
    update_scale,
    eps,
    weight_offset,
    update_eps,
    update_weight_offset,
    ROUND_UPDATE: tl.constexpr,
    LAYER: tl.constexpr,
    UPDATE_LAYER: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """d_new = d_new_residual + norm_backward(d_normed)
    d_residual = d_new * skip_scale
    d_update = update_norm_backward(d_new * update_scale)

    stream: what the norm read, `[tokens, HIDDEN]`. Roundings count as identities. Each program takes a run of tiles and writes its sum
    of each parameter's gradient as one fp32 row `[HIDDEN]`. Gradients that nobody wants are None.
    """
    sum_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    sum_norm_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    sum_update_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    sum_update_norm_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    sum_update_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    tile = tl.program_id(0).to(tl.int64) * tiles_a_program
    end = tl.minimum(tile + tiles_a_program, tl.cdiv(tokens, ROWS))
    while tile < end:  # not range: Triton 3.6's interpreter takes no run-time bounds
        rows = tile * ROWS + tl.arange(0, ROWS)
        d_new = tl.zeros((ROWS, BLOCK), tl.float32)
        if d_normed_ptr is not None:
            d_normed = load_rows(d_normed_ptr, stride_d_normed * STRIDE_UNIT, rows, tokens, HIDDEN, ROWS, BLOCK)
            stream = load_rows(stream_ptr, stride_stream * STRIDE_UNIT, rows, tokens, HIDDEN, ROWS, BLOCK)
            centred, r = normalize(stream, eps, LAYER, False, HIDDEN, ROWS, BLOCK, LEVELS)
            scale = load_parameter(weight_ptr, HIDDEN, BLOCK)
            if weight_offset is not None:
                scale += weight_offset
            d_new, normalised = norm_gradient(d_normed, centred, scale, r, LAYER, HIDDEN)
            if d_weight_ptr is not None:
                sum_weight += d_normed * normalised
            if d_norm_bias_ptr is not None:
                sum_norm_bias += d_normed
        if d_new_residual_ptr is not None:
            d_new += load_rows(
                d_new_residual_ptr, stride_d_new_residual * STRIDE_UNIT, rows, tokens, HIDDEN, ROWS, BLOCK
            )
        if d_residual_ptr is not None:
            d_residual = d_new
            if skip_scale is not None:
                d_residual *= skip_scale
            d_residual = round_to(d_residual, d_residual_ptr.dtype.element_ty)
            store_rows(d_residual_ptr, stride_d_residual * STRIDE_UNIT, d_residual, rows, tokens, HIDDEN, ROWS, BLOCK)
        d_update = d_new
        if update_scale is not None:
            d_update *= update_scale
        if update_weight_ptr is not None:
            update = load_rows(update_ptr, stride_update * STRIDE_UNIT, rows, tokens, HIDDEN, ROWS, BLOCK)
            if update_bias_ptr is not None:
                update += load_parameter(update_bias_ptr, HIDDEN, BLOCK)
            update = round_to(update, ROUND_UPDATE).to(tl.float32)
            if ROWS > 1 or HIDDEN != BLOCK:  # the bias has also reached the padding's rows
                update = tl.where((rows < tokens)[:, None] & (tl.arange(0, BLOCK)[None, :] < HIDDEN), update, 0.0)
            centred, r = normalize(update, update_eps, UPDATE_LAYER, False, HIDDEN, ROWS, BLOCK, LEVELS)
            scale = load_parameter(update_weight_ptr, HIDDEN, BLOCK)
            if update_weight_offset is not None:
                scale += update_weight_offset
            if d_update_norm_bias_ptr is not None:
                sum_update_norm_bias += d_update
            d_scaled = d_update
            d_update, normalised = norm_gradient(d_scaled, centred, scale, r, UPDATE_LAYER, HIDDEN)
            if d_update_weight_ptr is not None:
                sum_update_weight += d_scaled * normalised
        if d_update_bias_ptr is not None:
            sum_update_bias += d_update
        if d_update_ptr is not None:
            d_update = round_to(d_update, d_update_ptr.dtype.element_ty)
            store_rows(d_update_ptr, stride_d_update * STRIDE_UNIT, d_update, rows, tokens, HIDDEN, ROWS, BLOCK)
        tile += 1
    if d_weight_ptr is not None:
        store_partial(d_weight_ptr, sum_weight, HIDDEN, BLOCK)
    if d_norm_bias_ptr is not None:
        store_partial(d_norm_bias_ptr, sum_norm_bias, HIDDEN, BLOCK)
    if d_update_weight_ptr is not None:
        store_partial(d_update_weight_ptr, sum_update_weight, HIDDEN, BLOCK)
    if d_update_norm_bias_ptr is not None:
        store_partial(d_update_norm_bias_ptr, sum_update_norm_bias, HIDDEN, BLOCK)
    if d_update_bias_ptr is not None:
        store_partial(d_update_bias_ptr, sum_update_bias, HIDDEN, BLOCK)


@triton.jit(do_not_specialize=["rows"])
def column_sum_kernel(x_ptr, out_ptr, rows, HIDDEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out = x.sum(0) of a contiguous fp32 `[rows, HIDDEN]`; COLUMNS columns a program, rows in order, ROWS at a time."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    row = 0
    while row < rows:
        at = row + tl.arange(0, ROWS)
        mask = (at < rows)[:, None] & (columns < HIDDEN)[None, :]
        total += tl.load(x_ptr + at[:, None] * HIDDEN + columns[None, :], mask=mask, other=0.0)
        row += ROWS
    tl.store(out_ptr + columns, round_to(tl.sum(total, axis=0), out_ptr.dtype.element_ty), mask=columns < HIDDEN)


def add_norm_backward_launches(
    spec: AddNormSpec, d_new_residual: Tensor | None, d_normed: Tensor | None, saved: Operands, out: Operands
) -> list[Launch]:
    """The launches that write the gradients in `out`, in this order; None where none is wanted.

    saved: the operands, with what the norm read in the place of the residual. Rows `[tokens, hidden]`, tokens >= 1, unit stride in the
    last dimension; no fp64.
    """
    given = d_new_residual if d_new_residual is not None else d_normed
    assert given is not None
    tokens, hidden = given.shape
    geometry = Geometry.of(hidden)
    unit = stride_unit(d_new_residual, d_normed, saved.residual, saved.update, out.residual, out.update)
    tiles = triton.cdiv(tokens, geometry.rows)
    tiles_a_program = triton.cdiv(tiles, MAX_PROGRAMS)
    programs = triton.cdiv(tiles, tiles_a_program)
    sums = {f"d_{name}_ptr": t for name, t in zip(out._fields[2:], out[2:], strict=True)}
    partials: dict[str, Any] = {
        name: None if t is None else torch.empty(programs, hidden, dtype=torch.float32, device=given.device)
        for name, t in sums.items()
    }
    arguments = dict(
        d_new_residual_ptr=d_new_residual,
        d_normed_ptr=d_normed,
        stream_ptr=saved.residual,
        update_ptr=saved.update,
        update_bias_ptr=saved.update_bias,
        update_weight_ptr=saved.update_weight,
        weight_ptr=saved.weight,
        d_residual_ptr=out.residual,
        d_update_ptr=out.update,
        **partials,
        stride_d_new_residual=row_stride(d_new_residual, unit),
        stride_d_normed=row_stride(d_normed, unit),
        stride_stream=row_stride(saved.residual, unit),
        stride_update=row_stride(saved.update, unit),
        stride_d_residual=row_stride(out.residual, unit),
        stride_d_update=row_stride(out.update, unit),
        tokens=tokens,
        tiles_a_program=tiles_a_program,
        skip_scale=None if spec.skip_scale == 1.0 else spec.skip_scale,
        update_scale=None if spec.update_scale == 1.0 else spec.update_scale,
        **norm_arguments(spec),
        ROUND_UPDATE=DTYPES[spec.round_update or torch.float32],
        STRIDE_UNIT=unit,
        **geometry.constants(hidden),
    )
    options = {"num_warps": geometry.warps, "enable_fp_fusion": True}
    launches = [Launch(add_norm_backward_kernel, (programs,), arguments, options, given.device)]
    for name, t in sums.items():
        if t is not None:
            arguments = dict(x_ptr=partials[name], out_ptr=t, rows=programs, HIDDEN=hidden, ROWS=16, COLUMNS=64)
            options = {"num_warps": 4, "enable_fp_fusion": True}
            launches.append(Launch(column_sum_kernel, (triton.cdiv(hidden, 64),), arguments, options, given.device))
    return launches
