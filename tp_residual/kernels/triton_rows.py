# mypy: disable-error-code="no-untyped-def"
"""What Triton kernels over rows share: launch geometry, rounding, row sums and normalisation, as in `contract.py`.

A tile is `[ROWS, BLOCK]`: whole rows, zero-padded to a power of two, in registers. Geometry is a function of the row's length alone, so
that a row's bits do not depend on who else is in the batch.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# read by Triton when a kernel is decorated, so it cannot change afterwards
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@dataclass(frozen=True)
class Geometry:
    """One program's tile: rows, padded row length, warps."""

    rows: int
    block: int
    warps: int

    @staticmethod
    def of(hidden: int) -> "Geometry":
        # at least 512 elements a warp, two 128-bit accesses of 16-bit values a thread: with fewer, some threads would hold copies of
        # others' elements, and in place they could read what those have already written
        block = 1 << (hidden - 1).bit_length()
        rows = max(1, 1024 // block)
        return Geometry(rows, block, min(32, rows * block // 512))

    def constants(self, hidden: int) -> dict[str, int]:
        return {"HIDDEN": hidden, "ROWS": self.rows, "BLOCK": self.block, "LEVELS": self.block.bit_length() - 1}


def stride_unit(*tensors: Tensor | None) -> int:
    """The largest of 8, 4, 2, 1 that divides every row stride. Kernels take strides in this unit, and so know how rows are aligned."""
    return math.gcd(8, *(t.stride(0) for t in tensors if t is not None))


def row_stride(t: Tensor | None, unit: int) -> int | None:
    return None if t is None else t.stride(0) // unit


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """fp32 to DTYPE, to nearest even. Triton's interpreter truncates to bfloat16, so there the bits are rounded by hand."""
    if _INTERPRETED and DTYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        nearest = tl.where(x != x, 0x7FC0, nearest)
        return nearest.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def load_rows(ptr, stride, rows, tokens, HIDDEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The tile of `[tokens, HIDDEN]` at `rows`, widened to fp32; zeros outside."""
    columns = tl.arange(0, BLOCK)[None, :]
    ptrs = ptr + rows[:, None] * stride + columns
    if ROWS > 1:
        return tl.load(ptrs, mask=(rows < tokens)[:, None] & (columns < HIDDEN), other=0.0).to(tl.float32)
    elif HIDDEN != BLOCK:
        return tl.load(ptrs, mask=columns < HIDDEN, other=0.0).to(tl.float32)
    else:
        return tl.load(ptrs).to(tl.float32)


@triton.jit
def store_rows(ptr, stride, x, rows, tokens, HIDDEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)[None, :]
    ptrs = ptr + rows[:, None] * stride + columns
    if ROWS > 1:
        tl.store(ptrs, x, mask=(rows < tokens)[:, None] & (columns < HIDDEN))
    elif HIDDEN != BLOCK:
        tl.store(ptrs, x, mask=columns < HIDDEN)
    else:
        tl.store(ptrs, x)


@triton.jit
def load_parameter(ptr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """`[1, BLOCK]` of a weight or bias `[HIDDEN]`, widened to fp32."""
    columns = tl.arange(0, BLOCK)[None, :]
    if HIDDEN != BLOCK:
        return tl.load(ptr + columns, mask=columns < HIDDEN, other=0.0).to(tl.float32)
    else:
        return tl.load(ptr + columns).to(tl.float32)


@triton.jit
def row_sum(x, ROWS: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr, CONTRACT: tl.constexpr):
    """`[ROWS, 1]` of a zero-padded `[ROWS, BLOCK]`. CONTRACT: by halves, `v[i] + v[i + h]`; a sum of two has only one order."""
    if CONTRACT:
        for level in tl.static_range(LEVELS):
            halves = tl.reshape(x, (ROWS, 2, BLOCK >> (level + 1)))
            if ROWS == 1 and level > 0 and (BLOCK >> (level + 1)) >= 32:
                # a split brings the halves into one thread: one or two exchanges between warps for all levels together, where a
                # reduction costs two barriers a level (31 instead of 3 at 8192 values); the first halves are in one thread anyway
                low, high = tl.split(tl.permute(halves, (0, 2, 1)))
                x = low + high
            else:
                x = tl.sum(halves, axis=1)
        return x
    else:
        return tl.sum(x, axis=1, keep_dims=True)


@triton.jit
def normalize(
    x,
    eps,
    LAYER: tl.constexpr,
    CONTRACT: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """`(centred x, 1 / root)`: `[ROWS, BLOCK]`, zero beyond HIDDEN, and `[ROWS, 1]`."""
    size = tl.full((ROWS, 1), HIDDEN, tl.float32)
    if LAYER:
        x = x - tl.div_rn(row_sum(x, ROWS, BLOCK, LEVELS, CONTRACT), size)
        if HIDDEN != BLOCK:
            x = tl.where(tl.arange(0, BLOCK)[None, :] < HIDDEN, x, 0.0)
    value = tl.div_rn(row_sum(x * x, ROWS, BLOCK, LEVELS, CONTRACT), size) + eps
    if CONTRACT:
        return x, tl.div_rn(tl.full((ROWS, 1), 1.0, tl.float32), tl.sqrt_rn(value))
    else:
        return x, tl.rsqrt(value)
