"""`contract.add_norm` in compiled C++ on the CPU: the same bits in one pass over memory, without allocating.

    new_residual = round(skip_scale * residual + update_scale * (update + update_bias))
    normed = norm(new_residual)

Operands are fp32, bf16 or fp16 in any mixture; fp64 stays with plain torch. Autograd does not see what is written here.
"""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from tp_residual.errors import UserError
from tp_residual.kernels import build
from tp_residual.kernels.contract import AddNormSpec, NormSpec

Order = Literal["contract", "fast"]

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
NO_DTYPE = -1
KINDS = {"rms": 0, "layer": 1}
HOLD_LOCK_BELOW = 1 << 15  # elements: up to some 20 us, which is less than another thread may keep a released lock


class _NormSpec(ctypes.Structure):
    _fields_ = (
        ("eps", ctypes.c_float),
        ("weight_offset", ctypes.c_float),
        ("kind", ctypes.c_int32),
        ("weight_after_cast", ctypes.c_int32),
    )


class RowSpec(ctypes.Structure):
    """csrc/contract.h's RowSpec: an AddNormSpec with its parameters' addresses. Made by `row_spec`."""

    _fields_ = (
        ("D", ctypes.c_int64),
        ("stream", ctypes.c_int32),
        ("output", ctypes.c_int32),
        ("round_update", ctypes.c_int32),
        ("update_scale", ctypes.c_float),
        ("skip_scale", ctypes.c_float),
        ("norm", _NormSpec),
        ("update_norm", _NormSpec),
        ("has_norm", ctypes.c_int32),
        ("has_update_norm", ctypes.c_int32),
        ("weight_dtype", ctypes.c_int32),
        ("norm_bias_dtype", ctypes.c_int32),
        ("update_bias_dtype", ctypes.c_int32),
        ("update_weight_dtype", ctypes.c_int32),
        ("update_norm_bias_dtype", ctypes.c_int32),
        ("weight", ctypes.c_void_p),
        ("norm_bias", ctypes.c_void_p),
        ("update_bias", ctypes.c_void_p),
        ("update_weight", ctypes.c_void_p),
        ("update_norm_bias", ctypes.c_void_p),
    )


class _Call(ctypes.Structure):
    """csrc/add_norm.cpp's AddNormCall."""

    _fields_ = (
        ("row", ctypes.POINTER(RowSpec)),
        ("tokens", ctypes.c_int64),
        ("residual", ctypes.c_void_p),
        ("update", ctypes.c_void_p),
        ("residual_out", ctypes.c_void_p),
        ("normed_out", ctypes.c_void_p),
        ("residual_stride", ctypes.c_int64),
        ("update_stride", ctypes.c_int64),
        ("residual_out_stride", ctypes.c_int64),
        ("normed_out_stride", ctypes.c_int64),
        ("residual_dtype", ctypes.c_int32),
        ("update_dtype", ctypes.c_int32),
        ("fast", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


def unavailable() -> str | None:
    """Why there are no compiled kernels here, or None. Builds them if nobody has."""
    return build.unavailable()


def covers(*dtypes: torch.dtype) -> bool:
    """Whether operands of these dtypes can be served."""
    return all(dtype in DTYPES for dtype in dtypes)


def add_norm(
    spec: AddNormSpec,
    residual: Tensor | None,
    update: Tensor | None,
    *,
    residual_out: Tensor,
    normed_out: Tensor | None,
    update_bias: Tensor | None = None,
    update_weight: Tensor | None = None,
    update_norm_bias: Tensor | None = None,
    weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    order: Order = "contract",
    threads: int | None = None,
) -> None:
    """`contract.add_norm` into `residual_out` (stream dtype) and `normed_out` (output dtype; None exactly if there is no norm).

    Rows `[tokens, D]` with any stride between rows, parameters `[D]`; zero tokens do nothing. An output may be an input itself (in place),
    but not overlap one otherwise, nor the other output. order: `contract` gives `contract.add_norm`'s bits (a NaN stays a NaN, its sign and
    payload are open), `fast` sums each row in a free order. threads: at most this many (default: torch's number), fewer when
    there is little to do, and the same bits with any number. Raises `UserError` for operands that do not fit, `BuildError` without kernels.
    """
    prepare(
        spec,
        residual,
        update,
        residual_out=residual_out,
        normed_out=normed_out,
        update_bias=update_bias,
        update_weight=update_weight,
        update_norm_bias=update_norm_bias,
        weight=weight,
        norm_bias=norm_bias,
        order=order,
        threads=threads,
    )()


def prepare(
    spec: AddNormSpec,
    residual: Tensor | None,
    update: Tensor | None,
    *,
    residual_out: Tensor,
    normed_out: Tensor | None,
    update_bias: Tensor | None = None,
    update_weight: Tensor | None = None,
    update_norm_bias: Tensor | None = None,
    weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    order: Order = "contract",
    threads: int | None = None,
) -> Callable[[], None]:
    """`add_norm` on these tensors as a function to be called many times: it checks nothing, and costs the work and about 1 us.

    It reads and writes the memory that the tensors had when it was made, and keeps that alive.
    """
    rows = {"residual": residual, "update": update, "residual_out": residual_out, "normed_out": normed_out}
    given = {name: tensor for name, tensor in rows.items() if tensor is not None}
    _check_rows(spec, given)
    if order not in ("contract", "fast"):
        raise UserError(f"order={order!r} is not a summation order; use 'contract' or 'fast'")
    if threads is not None and threads < 1:
        raise UserError(f"threads={threads} must be at least 1; leave it out for torch's number")
    tokens, size = residual_out.shape
    if update is None:  # as in the contract, what would be done to it is not asked for
        spec = replace(spec, update_norm=None)
        update_bias = update_weight = update_norm_bias = None
    row = row_spec(
        spec,
        size,
        update_bias=update_bias,
        update_weight=update_weight,
        update_norm_bias=update_norm_bias,
        weight=weight,
        norm_bias=norm_bias,
    )
    call = _Call(
        row=ctypes.pointer(row),
        tokens=tokens,
        fast=order == "fast",
        threads=threads or torch.get_num_threads(),
        residual_dtype=NO_DTYPE if residual is None else DTYPES[residual.dtype],
        update_dtype=NO_DTYPE if update is None else DTYPES[update.dtype],
    )
    for name, tensor in given.items():
        setattr(call, name, tensor.data_ptr())
        setattr(call, f"{name}_stride", tensor.stride(0))
    function, address = _functions()[tokens * size < HOLD_LOCK_BELOW], ctypes.addressof(call)
    memory = (call, *given.values(), update_bias, update_weight, update_norm_bias, weight, norm_bias)

    def run(_keep: object = memory) -> None:
        function(address)

    return run if tokens else lambda: None


def row_spec(
    spec: AddNormSpec,
    size: int,
    *,
    update_bias: Tensor | None = None,
    update_weight: Tensor | None = None,
    update_norm_bias: Tensor | None = None,
    weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
) -> RowSpec:
    """The C++ side's form of `spec` and its parameters `[size]`. It holds addresses: keep the parameters alive while it is in use.

    The same object for the same spec and addresses, so that a call with a layer's weights looks it up. Raises `UserError` for
    parameters that do not fit.
    """
    parameters = (weight, norm_bias, update_bias, update_weight, update_norm_bias)
    names = ("weight", "norm_bias", "update_bias", "update_weight", "update_norm_bias")
    for name, tensor in zip(names, parameters, strict=True):
        if tensor is not None:
            if tensor.shape != (size,) or not tensor.is_contiguous() or tensor.device.type != "cpu":
                raise UserError(
                    f"{name} has shape {list(tensor.shape)}, stride {list(tensor.stride())} on {tensor.device}; "
                    f"rows of {size} elements need a contiguous [{size}] on the CPU"
                )
            _check_dtype(name, tensor.dtype)
    where = tuple((NO_DTYPE, 0) if t is None else (DTYPES[t.dtype], t.data_ptr()) for t in parameters)
    return _row_spec(spec, size, where)


@functools.lru_cache(maxsize=4096)
def _row_spec(spec: AddNormSpec, size: int, where: tuple[tuple[int, int], ...]) -> RowSpec:
    for name, dtype in (("stream_dtype", spec.stream_dtype), ("output_dtype", spec.output_dtype)):
        _check_dtype(name, dtype)
    if spec.round_update is not None:
        _check_dtype("round_update", spec.round_update)
    (weight_dtype, weight), (norm_bias_dtype, norm_bias), (update_bias_dtype, update_bias), *rest = where
    (update_weight_dtype, update_weight), (update_norm_bias_dtype, update_norm_bias) = rest
    for name, norm, address in (("weight", spec.norm, weight), ("update_weight", spec.update_norm, update_weight)):
        if norm is not None and not address:
            raise UserError(f"{name} is missing, and the spec has a norm that needs it; pass a [{size}] tensor")
    return RowSpec(
        D=size,
        stream=DTYPES[spec.stream_dtype],
        output=DTYPES[spec.output_dtype],
        round_update=NO_DTYPE if spec.round_update is None else DTYPES[spec.round_update],
        update_scale=spec.update_scale,
        skip_scale=spec.skip_scale,
        norm=_norm_spec(spec.norm),
        update_norm=_norm_spec(spec.update_norm),
        has_norm=spec.norm is not None,
        has_update_norm=spec.update_norm is not None,
        weight_dtype=weight_dtype,
        norm_bias_dtype=norm_bias_dtype,
        update_bias_dtype=update_bias_dtype,
        update_weight_dtype=update_weight_dtype,
        update_norm_bias_dtype=update_norm_bias_dtype,
        weight=weight or None,
        norm_bias=norm_bias or None,
        update_bias=update_bias or None,
        update_weight=update_weight or None,
        update_norm_bias=update_norm_bias or None,
    )


def _norm_spec(norm: NormSpec | None) -> _NormSpec:
    if norm is None:
        return _NormSpec()
    if not norm.eps > 0:
        raise UserError(
            f"eps={norm.eps} must be above 0: a row of zeros would be divided by zero; use the config's value"
        )
    return _NormSpec(norm.eps, norm.weight_offset, KINDS[norm.kind], norm.weight_after_cast)


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        known = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise UserError(
            f"{name} is {dtype}, which is none of {known}; use kernels.contract, which takes every float dtype"
        )


def _check_rows(spec: AddNormSpec, rows: dict[str, Tensor]) -> None:
    """Raises `UserError` unless the rows are laid out as `add_norm` says."""
    if "residual" not in rows and "update" not in rows:
        raise UserError("residual and update are both None; give at least one")
    if (spec.norm is not None) != ("normed_out" in rows):
        has = "a norm and no" if spec.norm is not None else "no norm and a"
        raise UserError(f"there is {has} normed_out; pass it exactly if the spec has a norm")
    shape = rows["residual_out"].shape
    if len(shape) != 2 or shape[1] == 0:
        raise UserError(f"residual_out has shape {list(shape)}, not [tokens, D] with D at least 1")
    outputs = [(name, rows[name]) for name in ("residual_out", "normed_out") if name in rows]
    for name, tensor in rows.items():
        _check_dtype(name, tensor.dtype)
        if tensor.device.type != "cpu":
            raise UserError(f"{name} is on {tensor.device}; this kernel is for the CPU")
        if tensor.shape != shape:
            raise UserError(f"{name} has shape {list(tensor.shape)}, residual_out {list(shape)}; make them equal")
        if shape[1] > 1 and tensor.stride(1) != 1:
            raise UserError(f"{name} has strides {list(tensor.stride())}; its last dimension must be contiguous")
    for (name, tensor), dtype in zip(outputs, (spec.stream_dtype, spec.output_dtype), strict=False):
        if tensor.dtype != dtype:
            raise UserError(f"{name} is {tensor.dtype}, and the spec says {dtype}; make them equal")
        if shape[0] > 1 and tensor.stride(0) < shape[1]:
            raise UserError(
                f"{name}'s rows overlap: stride {tensor.stride(0)} for {shape[1]} elements; pass a contiguous output"
            )
    places = {name: _Place.of(tensor) for name, tensor in rows.items()}
    for name, _ in outputs:
        for other in rows:
            in_place = other in ("residual", "update") and places[name] == places[other]
            if other != name and not in_place and places[name].meets(places[other]):
                raise UserError(f"{name} overlaps {other} without being the same memory; pass another output")


class _Place(NamedTuple):
    """Where rows lie, in bytes."""

    start: int
    end: int
    stride: int
    row: int

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        tokens, size = tensor.shape
        element, start = tensor.element_size(), tensor.data_ptr()
        stride, row = tensor.stride(0) * element, size * element
        return cls(start, start + (tokens - 1) * stride + row if tokens else start, stride, row)

    def meets(self, other: "_Place") -> bool:
        """Whether they overlap: row by row at equal strides (two halves of one buffer do not), else the ranges from first to last byte."""
        if self.start >= other.end or other.start >= self.end:
            return False
        if self.stride != other.stride or self.stride < max(self.row, other.row):
            return True
        offset = (other.start - self.start) % self.stride
        return offset < self.row or offset + other.row > self.stride


@functools.cache
def _functions() -> tuple[Callable[[int], None], Callable[[int], None]]:
    """tpr_add_norm of a call's address: without and with Python's global lock kept."""
    library = build.library()
    functions = []
    for handle in (library, build.holding_lock(library)):
        function = handle.tpr_add_norm
        function.argtypes, function.restype = (ctypes.c_void_p,), None
        functions.append(function)
    return functions[0], functions[1]
