"""What a decoder layer does between its linears, in compiled C++ on the CPU (csrc/decoder.cpp): rotary positions, silu(gate) * up, and keys
and values in a paged cache with attention over it.

For inference: nothing here has a gradient. Each function has a plain-torch meaning elsewhere: `model/rope.py`, `model/mlp.py` and
`model/attention_backend.py`. Operands are fp32, bf16 or fp16, all of one dtype.
"""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tp_residual.kernels import build
from tp_residual.kernels.recording import active

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MOST_HEAD_DIM, HEAD_DIM_UNIT = 256, 16


class _Rope(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("y_stride", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
    )


class _Silu(ctypes.Structure):
    _fields_ = (
        ("gate", ctypes.c_void_p),
        ("up", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("features", ctypes.c_int64),
        ("in_stride", ctypes.c_int64),
        ("y_stride", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


class _Append(ctypes.Structure):
    _fields_ = (
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("k_stride", ctypes.c_int64),
        ("v_stride", ctypes.c_int64),
        ("block_stride", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
    )


class _Attend(ctypes.Structure):
    _fields_ = (
        ("q", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("spans", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("heads", ctypes.c_void_p),
        ("span_count", ctypes.c_int64),
        ("table_width", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("query_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("q_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("block_stride", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


@dataclass(frozen=True)
class _Functions:
    """Each takes a call's address. What takes microseconds keeps Python's global lock; attention, which may take long, does not."""

    rope: Callable[[int], None]
    silu: Callable[[int], None]
    append: Callable[[int], None]
    attend: Callable[[int], None]
    block: int


def serves(*operands: Tensor) -> bool:
    """Whether the elementwise functions here may be used for such operands: on the CPU, of a known dtype, nothing to differentiate."""
    first = operands[0]
    return (
        first.device.type == "cpu"
        and first.dtype in DTYPES
        and not torch.compiler.is_compiling()
        and not (torch.is_grad_enabled() and any(operand.requires_grad for operand in operands))
        and _functions() is not None
    )


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x * cos + rotate_half(x) * sin` of `[tokens, heads, head_dim]` with fp32 tables `[tokens, head_dim]`.

    The operations and roundings of plain torch, so its bits.
    """
    tokens, heads, head_dim = x.shape
    assert cos.dtype is torch.float32 and cos.shape == sin.shape == (tokens, head_dim)
    if x.stride(2) != 1 or x.stride(1) != head_dim:  # a fused projection's part is as it should be
        x = x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    y = torch.empty((tokens, heads, head_dim), dtype=x.dtype)
    call = _Rope(
        x.data_ptr(),
        y.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        tokens,
        heads,
        head_dim,
        x.stride(0),
        heads * head_dim,
        DTYPES[x.dtype],
    )
    functions = _functions()
    assert functions is not None
    functions.rope(ctypes.addressof(call))
    if (recording := active()) is not None:
        recording.add("rope", call, x, y, cos, sin)
    return y


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up` of `[tokens, features]` halves of one tensor, rounded after silu and after the product, as plain torch does.

    exp is a polynomial, good to about a unit in the last place of fp32.
    """
    tokens, features = gate.shape
    assert (gate.shape == up.shape and gate.stride(0) == up.stride(0)) or tokens <= 1
    y = torch.empty((tokens, features), dtype=gate.dtype)
    call = _Silu(
        gate.data_ptr(),
        up.data_ptr(),
        y.data_ptr(),
        tokens,
        features,
        gate.stride(0),
        features,
        DTYPES[gate.dtype],
        torch.get_num_threads(),
    )
    functions = _functions()
    assert functions is not None
    functions.silu(ctypes.addressof(call))
    if (recording := active()) is not None:
        recording.add("silu", call, gate, up, y)
    return y


def attention_block(head_dim: int, dtype: torch.dtype) -> int:
    """Tokens of a cache block of the compiled attention, or 0 where there is none for such heads."""
    functions = _functions()
    fits = head_dim % HEAD_DIM_UNIT == 0 and head_dim <= MOST_HEAD_DIM and dtype in DTYPES
    return functions.block if functions is not None and fits else 0


def append(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Keys and values `[tokens, kv_heads, head_dim]` into the blocks of one layer.

    keys `[blocks, kv_heads, head_dim, block]`, values `[blocks, kv_heads, block, head_dim]`, each block contiguous
    and equally far from the next in both. slots: int64 `[tokens]`, block * block size +
    place.
    """
    tokens, kv_heads, head_dim = k.shape
    if k.stride(1) != head_dim or k.stride(2) != 1:
        k = k.contiguous()
    if v.stride(1) != head_dim or v.stride(2) != 1:
        v = v.contiguous()
    call = _Append(
        k.data_ptr(),
        v.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        slots.data_ptr(),
        tokens,
        kv_heads,
        head_dim,
        k.stride(0),
        v.stride(0),
        keys.stride(0),
        DTYPES[k.dtype],
    )
    functions = _functions()
    assert functions is not None
    functions.append(ctypes.addressof(call))
    if (recording := active()) is not None:
        recording.add("append", call, k, v, keys, values, slots)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, spans: Tensor, tables: Tensor, heads: Tensor, window: int | None
) -> Tensor:
    """Causal attention of `[tokens, query_heads, head_dim]` over the cache, scaled by 1/sqrt(head_dim), in the same shape.

    spans: int64 `[sequences, 4]`: first token, one past the last, row of the table, tokens before. tables: int32 `[rows, width]`, blocks
    in order. heads: int64 `[kv_heads, 2]`: the first query head of each KV head, and how many. fp32 inside, one rounding. The
    bits of a query depend on its own sequence alone.
    """
    tokens, query_heads, head_dim = q.shape
    if q.stride(1) != head_dim or q.stride(2) != 1:
        q = q.contiguous()
    out = torch.empty((tokens, query_heads, head_dim), dtype=q.dtype)
    call = _Attend(
        q.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        out.data_ptr(),
        spans.data_ptr(),
        tables.data_ptr(),
        heads.data_ptr(),
        spans.shape[0],
        tables.shape[1],
        keys.shape[1],
        query_heads,
        head_dim,
        q.stride(0),
        query_heads * head_dim,
        window or 0,
        keys.stride(0),
        head_dim**-0.5,
        DTYPES[q.dtype],
        torch.get_num_threads(),
    )
    functions = _functions()
    assert functions is not None
    functions.attend(ctypes.addressof(call))
    if (recording := active()) is not None:
        recording.add("attend", call, q, keys, values, out, spans, tables, heads)
    return out


@functools.cache
def _functions() -> _Functions | None:
    """None where nothing could be compiled."""
    if build.unavailable() is not None:
        return None
    library = build.library()
    holding = build.holding_lock(library)
    library.tpr_attention_block.restype = ctypes.c_int64
    found = holding.tpr_rope, holding.tpr_silu, holding.tpr_append, library.tpr_attend
    for function in found:
        function.argtypes, function.restype = (ctypes.c_void_p,), None
    return _Functions(*found, int(library.tpr_attention_block()))
