"""The tensors that add+norm reads, and what callers can get wrong about them. All of it is read on the host: no synchronisation."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tp_residual.errors import UserError
from tp_residual.kernels.contract import AddNormSpec, NormSpec, usable_eps

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_STRIDED = torch.strided


class Operands(NamedTuple):
    """Rows `[tokens, hidden]`, at least one of them, and parameters `[hidden]`, as `contract.add_norm` names them."""

    residual: Tensor | None
    update: Tensor | None
    update_bias: Tensor | None = None
    update_weight: Tensor | None = None
    update_norm_bias: Tensor | None = None
    weight: Tensor | None = None
    norm_bias: Tensor | None = None

    @property
    def rows(self) -> Tensor:
        """The first operand that is given; it has the shape of the results."""
        given = self.residual if self.residual is not None else self.update
        if given is None:
            raise UserError("residual=None and update=None leave nothing to compute; give at least one of them")
        return given

    def parameters(self) -> dict[str, Tensor | None]:
        """By name, all but residual and update."""
        return dict(zip(self._fields[2:], self[2:], strict=True))

    def leaves_residual(self, spec: AddNormSpec) -> bool:
        """Whether the new residual is the residual itself: then it is neither written nor copied."""
        residual = self.residual
        return (
            residual is not None
            and self.update is None
            and spec.skip_scale == 1.0
            and residual.dtype == spec.stream_dtype
        )


def require_tensors(names: Sequence[str], values: Sequence[object]) -> None:
    """Raises UserError for what is not a dense tensor. None passes: whether an operand may be missing is the spec's matter."""
    for name, value in zip(names, values, strict=True):
        if value is None or (isinstance(value, Tensor) and value.layout is _STRIDED):
            continue
        if not isinstance(value, Tensor):
            kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
            raise UserError(f"{name} is a {kind}, not a torch.Tensor; convert it with torch.as_tensor")
        raise UserError(f"{name} has layout {_name(value.layout)}, and rows are read in place; pass {name}.to_dense()")


def check_operands(spec: AddNormSpec, operands: Operands, names: Sequence[str] = Operands._fields) -> None:
    """Raises UserError unless shapes, dtypes, devices and the presence of each operand fit the spec and each other.

    names: what the caller calls the operands.
    """
    first, first_name = operands.rows, names[operands.residual is None]
    for name, t in zip(names[:2], operands[:2], strict=True):
        if t is None:
            continue
        if t.dim() != 2:
            raise UserError(
                f"{name} has shape {list(t.shape)}, not [tokens, hidden]; fold other dimensions with .flatten(0, -2)"
            )
        _check_like(name, t, first_name, first)
        if t.shape != first.shape:
            raise UserError(
                f"{name} has shape {list(t.shape)}, {first_name} has {list(first.shape)}; they must be equal"
            )
    hidden = first.shape[1]
    if hidden == 0:
        raise UserError(f"{first_name} has hidden size 0; a row needs at least one value")
    for field in ("stream_dtype", "output_dtype", "round_update"):
        dtype = getattr(spec, field)
        if dtype not in FLOATS and not (field == "round_update" and dtype is None):
            raise UserError(f"{field}={_name(dtype)} is not a floating type; use one of {_names()}")
    _check_norm(
        "update_norm",
        spec.update_norm,
        update_weight=operands.update_weight,
        update_norm_bias=operands.update_norm_bias,
    )
    _check_norm("norm", spec.norm, weight=operands.weight, norm_bias=operands.norm_bias)
    for name, t in zip(names[2:], operands[2:], strict=True):
        if t is not None:
            _check_like(name, t, first_name, first)
            if t.shape != (hidden,):
                raise UserError(
                    f"{name} has shape {list(t.shape)}, {first_name} has hidden size {hidden}; {name} must be [{hidden}]"
                )
    if operands.update is None and (spec.update_norm is not None or operands.update_bias is not None):
        raise UserError(
            "update=None leaves nothing for update_norm and update_bias to apply to; give an update, or neither of them"
        )


def check_outputs(
    spec: AddNormSpec,
    operands: Operands,
    outputs: tuple[Tensor | None, Tensor | None],
    names: Sequence[str] = Operands._fields,
    output_names: Sequence[str] = ("residual_out", "normed_out"),
) -> None:
    """Raises UserError unless the outputs have the results' shape and dtypes, and can be written row by row.

    outputs: for the new residual and the normed value. Each may be exactly `residual` or `update` (in place); any other overlap is
    refused. Call after `check_operands`.
    """
    if outputs[1] is not None and spec.norm is None:
        raise UserError(
            "normed_out is given and spec.norm=None makes no normed value; leave normed_out out or give the norm"
        )
    for name, out, dtype in zip(output_names, outputs, (spec.stream_dtype, spec.output_dtype), strict=True):
        if out is None:
            continue
        _check_like(name, out, "operands", operands.rows)
        if out.shape != operands.rows.shape:
            raise UserError(
                f"{name} has shape {list(out.shape)}, the operands have {list(operands.rows.shape)}; they must be equal"
            )
        if out.dtype != dtype:
            raise UserError(
                f"{name} has dtype {_name(out.dtype)}, the result has {_name(dtype)}; change the tensor or the spec"
            )
        tokens, hidden = out.shape
        if (hidden > 1 and out.stride(1) != 1) or (tokens > 1 and out.stride(0) < hidden):
            raise UserError(
                f"{name} has strides {list(out.stride())} for shape {list(out.shape)}; what is written needs unit stride in the last "
                "dimension and rows that do not overlap: pass a contiguous tensor"
            )
        for position, (other_name, other) in enumerate(
            zip((*names, *output_names), (*operands, *outputs), strict=True)
        ):
            if other is None or other_name == name or not overlap(out, other):
                continue
            if position > 1 or not same_memory(out, other):
                raise UserError(f"{name} overlaps {other_name} in memory; give each its own (.clone())")


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether one may be written in the place of the other: the same elements of the same type."""
    return (a.data_ptr(), a.dtype, a.stride()) == (b.data_ptr(), b.dtype, b.stride())


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share a byte. Exact for rows with one stride (column slices of one buffer), else by their extents."""
    (a_start, a_end), (b_start, b_end) = _extent(a), _extent(b)
    if a_start >= b_end or b_start >= a_end:
        return False
    if a.dim() == b.dim() == 2:
        stride = a.stride(0) * a.element_size()
        a_row, b_row = a.shape[1] * a.element_size(), b.shape[1] * b.element_size()
        if stride == b.stride(0) * b.element_size() and stride >= max(a_row, b_row) and a.stride(1) == b.stride(1) == 1:
            shift = (b_start - a_start) % stride
            return shift < a_row or stride - shift < b_row
    return True


def _extent(t: Tensor) -> tuple[int, int]:
    """First byte and one past the last."""
    if t.numel() == 0:
        return t.data_ptr(), t.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def _check_norm(field: str, spec: NormSpec | None, **parameters: Tensor | None) -> None:
    weight_name, weight = next(iter(parameters.items()))
    if spec is None:
        for name, t in parameters.items():
            if t is not None:
                raise UserError(f"{name} is given and spec.{field}=None does not use it; leave it out or give the norm")
        return
    if weight is None:
        raise UserError(f"{weight_name}=None with spec.{field}={spec}; give the weight or leave the norm out")
    if not usable_eps(spec.eps):
        raise UserError(
            f"spec.{field} has eps={spec.eps}, which is not above 0 and finite in float32, and a row of zeros would be divided by zero; "
            "use 1e-6"
        )


def _check_like(name: str, t: Tensor, first_name: str, first: Tensor) -> None:
    if t.dtype not in FLOATS:
        raise UserError(
            f"{name} has dtype {_name(t.dtype)}; add+norm computes in floating point, convert it to one of {_names()}"
        )
    if t.device != first.device:
        raise UserError(f"{name} is on {t.device}, {first_name} on {first.device}; move them to one device")


def _name(dtype: torch.dtype | torch.layout | None) -> str:
    return str(dtype).removeprefix("torch.")


def _names() -> str:
    return ", ".join(map(_name, FLOATS))
