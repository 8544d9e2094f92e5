"""`contract.add_norm` in compiled C++ on the CPU: the same bits in one pass over memory, without allocating.

    new_residual = round(skip_scale * residual + update_scale * (update + update_bias))
    normed = norm(new_residual)

Operands are fp32, bf16 or fp16 in any mixture; fp64 stays with plain torch. Autograd does not see what is written here.
"""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tp_residual.errors import UserError
from tp_residual.kernels import build
from tp_residual.kernels.add_norm_operands import Operands, overlap, require_tensors, same_memory
from tp_residual.kernels.contract import AddNormSpec, NormSpec, usable_eps
from tp_residual.kernels.recording import active

Order = Literal["contract", "fast"]
Outputs = tuple[Tensor | None, Tensor | None]  # the new residual, if it is wanted, and the normed value

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
        ("row", ctypes.c_void_p),
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
        ("wary", ctypes.c_int32),
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
    residual_out: Tensor | None,
    normed_out: Tensor | None,
    update_bias: Tensor | None = None,
    update_weight: Tensor | None = None,
    update_norm_bias: Tensor | None = None,
    weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    order: Order = "contract",
    threads: int | None = None,
) -> None:
    """`contract.add_norm` into `residual_out` (stream dtype; None: only its norm is wanted) and `normed_out` (output dtype; None exactly if
    there is no norm).

    Rows `[tokens, D]` with any stride between rows, parameters `[D]`; zero tokens do nothing. An output may be an input itself (in place),
    but not overlap one otherwise, nor the other output. order: `contract` gives `contract.add_norm`'s bits (a NaN stays a NaN, its sign and
    payload are open), `fast` sums each row in a free order. threads: at most this many (default: torch's number), fewer when
    there is little to do, and the same bits with any number. Raises `UserError` for operands that do not fit, `BuildError` without kernels.
    """
    operands = Operands(residual, update, update_bias, update_weight, update_norm_bias, weight, norm_bias)
    outputs = residual_out, normed_out
    _require_tensors(operands, outputs)
    known = order in ("contract", "fast") and (threads is None or threads > 0)
    if known and run_known("cpu", spec, operands, outputs, fast=order == "fast", threads=threads):
        return
    prepare(
        spec,
        residual,
        update,
        residual_out=residual_out,
        normed_out=normed_out,
        **operands.parameters(),
        order=order,
        threads=threads,
    )()
    remember("cpu", spec, operands, outputs)


class _Known(NamedTuple):
    """What calls of one kind have in common: the row spec, its address, and the codes of the operands' dtypes."""

    row: RowSpec
    row_at: int
    residual_dtype: int
    update_dtype: int


# Calls whose presence of operands and dtypes were found right: of one checker, since another refuses other things.
_known: dict[tuple[object, ...], _Known] = {}
_MAX_KNOWN = 4096  # a model has some hundred
_ROWS_AND_PARAMETERS = (*Operands._fields, "residual_out", "normed_out")


def run_known(
    checker: str,
    spec: AddNormSpec,
    operands: Operands,
    outputs: Outputs,
    *,
    fast: bool,
    threads: int | None = None,
) -> bool:
    """Compute it if `checker` has passed such a call before, and these tensors are contiguous, of the same sizes and apart in memory.

    False: nothing was written, and the thorough checks have to say whether it is wrong or only unusual. Written out for the sake of its
    few microseconds, and the memory is compared in the C++ function.
    """
    found = _key(checker, spec, operands, outputs)
    if found is None:
        return False
    key, pointers, (tokens, size) = found
    known = _known.get(key)
    if known is None:
        return False
    _refuse_recording()
    call = _Call(
        known.row_at,
        tokens,
        *pointers,
        size,
        size,
        size,
        size,
        known.residual_dtype,
        known.update_dtype,
        fast,
        threads or torch.get_num_threads(),
        True,
    )
    return not _functions()[tokens * size < HOLD_LOCK_BELOW](ctypes.addressof(call))


def _key(
    checker: str, spec: AddNormSpec, operands: Operands, outputs: Outputs
) -> tuple[tuple[object, ...], list[int | None], torch.Size] | None:
    """What a call is known by, its rows' addresses and their shape; None unless all is contiguous, on the CPU, and of its kind's size."""
    residual, update, *parameters = operands
    first = residual if residual is not None else update
    if first is None:
        return None
    shape = first.shape
    if len(shape) != 2 or not first.numel():
        return None
    key: list[object] = [checker, spec, shape[1]]
    pointers: list[int | None] = []
    for t in (residual, update):
        if t is None:
            key.append(None)
            pointers.append(None)
        elif t.is_contiguous() and t.is_cpu and (t is first or t.shape == shape):
            key.append(t.dtype)
            pointers.append(t.data_ptr())
        else:
            return None
    for t in outputs:
        if t is None:
            key.append(None)
            pointers.append(None)
        elif t is residual or t is update:  # in place
            at = t is not residual
            key.append(key[3 + at])
            pointers.append(pointers[at])
        elif t.is_contiguous() and t.is_cpu and t.shape == shape:
            key.append(t.dtype)
            pointers.append(t.data_ptr())
        else:
            return None
    row_shape = shape[1:]
    for t in parameters:
        if t is None:
            key.append(None)
        elif t.is_cpu and t.is_contiguous() and t.shape == row_shape:
            key.append(t.dtype)
            key.append(t.data_ptr())
        else:
            return None
    return tuple(key), pointers, shape


def remember(checker: str, spec: AddNormSpec, operands: Operands, outputs: Outputs) -> None:
    """After `checker` has passed such a call and it has run here: the next one need not be checked for presence and dtypes."""
    found = _key(checker, spec, operands, outputs)
    if found is not None:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        row = _row_for(spec, operands)
        _known[found[0]] = _Known(row, ctypes.addressof(row), *map(_code, operands[:2]))


def run_checked(spec: AddNormSpec, operands: Operands, outputs: Outputs, *, fast: bool) -> None:
    """`add_norm` of operands that fit each other and the spec, with unit stride in the last dimension."""
    row = _row_for(spec, operands)
    call = _call(row, operands, outputs, fast, None)
    _functions()[operands.rows.numel() < HOLD_LOCK_BELOW](ctypes.addressof(call))
    if (recording := active()) is not None:
        recording.add("add_norm", call, row, operands, outputs)


def _refuse_recording() -> None:
    """The public forms note no call: a model goes through `run_checked`."""
    if (recording := active()) is not None:
        recording.refuse("the public add+norm")


def _row_for(spec: AddNormSpec, operands: Operands) -> RowSpec:
    parameters = operands.parameters()
    if operands.update is None:  # as in the contract, what would be done to it is not asked for
        spec = spec if spec.update_norm is None else replace(spec, update_norm=None)
        parameters |= dict.fromkeys(("update_bias", "update_weight", "update_norm_bias"))
    return row_spec(spec, operands.rows.shape[1], **parameters)


def _call(row: RowSpec, operands: Operands, outputs: Outputs, fast: bool, threads: int | None) -> _Call:
    rows = (*operands[:2], *outputs)
    return _Call(
        ctypes.addressof(row),
        operands.rows.shape[0],
        *(None if t is None else t.data_ptr() for t in rows),
        *(0 if t is None else t.stride(0) for t in rows),
        *map(_code, operands[:2]),
        fast,
        threads or torch.get_num_threads(),
        False,
    )


def _code(t: Tensor | None) -> int:
    return NO_DTYPE if t is None else DTYPES[t.dtype]


def prepare(
    spec: AddNormSpec,
    residual: Tensor | None,
    update: Tensor | None,
    *,
    residual_out: Tensor | None,
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
    operands = Operands(residual, update, update_bias, update_weight, update_norm_bias, weight, norm_bias)
    outputs = residual_out, normed_out
    _require_tensors(operands, outputs)
    rows = {"residual": residual, "update": update, "residual_out": residual_out, "normed_out": normed_out}
    _check_rows(spec, {name: tensor for name, tensor in rows.items() if tensor is not None})
    if order not in ("contract", "fast"):
        raise UserError(f"order={order!r} is not a summation order; use 'contract' or 'fast'")
    if threads is not None and threads < 1:
        raise UserError(f"threads={threads} must be at least 1; leave it out for torch's number")
    row = _row_for(spec, operands)
    call = _call(row, operands, outputs, order == "fast", threads)
    tokens, size = operands.rows.shape
    _refuse_recording()
    function, address = _functions()[tokens * size < HOLD_LOCK_BELOW], ctypes.addressof(call)
    memory = (call, row, operands, outputs)

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
    if not usable_eps(norm.eps):
        raise UserError(
            f"eps={norm.eps} must be above 0 and finite in float32: a row of zeros would be divided by zero; use the config's value"
        )
    return _NormSpec(norm.eps, norm.weight_offset, KINDS[norm.kind], norm.weight_after_cast)


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        known = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise UserError(
            f"{name} is {dtype}, which is none of {known}; use kernels.contract, which takes every float dtype"
        )


def _require_tensors(operands: Operands, outputs: Outputs) -> None:
    require_tensors(_ROWS_AND_PARAMETERS, operands + outputs)


def _check_rows(spec: AddNormSpec, rows: dict[str, Tensor]) -> None:
    """Raises `UserError` unless the rows are laid out as `add_norm` says."""
    if "residual" not in rows and "update" not in rows:
        raise UserError("residual and update are both None; give at least one")
    if (spec.norm is not None) != ("normed_out" in rows):
        has = "a norm and no" if spec.norm is not None else "no norm and a"
        raise UserError(f"there is {has} normed_out; pass it exactly if the spec has a norm")
    dtypes = {"residual_out": spec.stream_dtype, "normed_out": spec.output_dtype}
    outputs = [(name, rows[name], dtype) for name, dtype in dtypes.items() if name in rows]
    if not outputs:
        raise UserError("residual_out and normed_out are both None, which leaves nothing to write; give at least one")
    first, shape = outputs[0][0], outputs[0][1].shape
    if len(shape) != 2 or shape[1] == 0:
        raise UserError(f"{first} has shape {list(shape)}, not [tokens, D] with D at least 1")
    for name, tensor in rows.items():
        _check_dtype(name, tensor.dtype)
        if tensor.device.type != "cpu":
            raise UserError(f"{name} is on {tensor.device}; this kernel is for the CPU")
        if tensor.shape != shape:
            raise UserError(f"{name} has shape {list(tensor.shape)}, {first} {list(shape)}; make them equal")
        if shape[1] > 1 and tensor.stride(1) != 1:
            raise UserError(f"{name} has strides {list(tensor.stride())}; its last dimension must be contiguous")
    for name, tensor, dtype in outputs:
        if tensor.dtype != dtype:
            raise UserError(f"{name} is {tensor.dtype}, and the spec says {dtype}; make them equal")
        if shape[0] > 1 and tensor.stride(0) < shape[1]:
            raise UserError(
                f"{name}'s rows overlap: stride {tensor.stride(0)} for {shape[1]} elements; pass a contiguous output"
            )
    for name, tensor, _ in outputs:
        for other, there in rows.items():
            in_place = other in ("residual", "update") and same_memory(tensor, there)
            if other != name and not in_place and overlap(tensor, there):
                raise UserError(f"{name} overlaps {other} without being the same memory; pass another output")


@functools.cache
def _functions() -> tuple[Callable[[int], int], Callable[[int], int]]:
    """tpr_add_norm of a call's address: without and with Python's global lock kept. Not 0 where it was wary and wrote nothing."""
    library = build.library()
    functions = []
    for handle in (library, build.holding_lock(library)):
        function = handle.tpr_add_norm
        function.argtypes, function.restype = (ctypes.c_void_p,), ctypes.c_int32
        functions.append(function)
    return functions[0], functions[1]
