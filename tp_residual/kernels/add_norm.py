"""Residual add and norm as one operation. Usable without a group and without the rest of the package.

The meaning is `contract.add_norm`, bit for bit on every device. Which code runs is decided in `implementation` alone: Triton on
CUDA, compiled C++ on CPU, plain torch for whatever these do not cover. Everything is an opaque torch.library operator, so that a
compiler neither changes bits nor recompiles; nothing waits for the device, so that CUDA graphs capture it.
"""

from collections.abc import Iterable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from tp_residual.errors import UserError
from tp_residual.kernels import contract, cpu
from tp_residual.kernels.add_norm_operands import Operands, check_operands, check_outputs, require_tensors
from tp_residual.kernels.contract import AddNormSpec, NormSpec, column_sum, norm_backward, require_number, widen

Order = Literal["contract", "fast"]

LIBRARY = torch.library.Library("tp_residual", "FRAGMENT")

MAX_TRITON_HIDDEN = 16384  # a longer row does not fit a program's registers
_HAS_TRITON = find_spec("triton") is not None  # Linux only


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
    order: Order = "contract",
    residual_out: Tensor | None = None,
    normed_out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`new = skip_scale * residual + update_scale * update_norm(update + update_bias)`; returns `(new, norm(new) or None)`.

    residual, update: rows `[tokens, hidden]`, strided or not, at least one of them, fp32, bf16, fp16 or fp64 in any mixture; weights
    and biases `[hidden]`. Computed in fp32 (fp64 for fp64) and rounded once to the spec's dtypes, see `AddNormSpec`. order: `contract`
    gives the same bits on every device, `fast` lets a GPU add up a row in its own order. A residual that nothing changes is returned as
    it is, not copied.

    residual_out, normed_out: write there instead of allocating; each may be exactly `residual` or `update`. Not differentiable then;
    else any number of times, and a parameter's gradient is summed in an order that depends on the shape alone.
    Raises UserError for operands that do not fit each other, before anything is written.
    """
    if order not in ("contract", "fast"):
        raise UserError(f"order={order!r} is not known; use 'contract' or 'fast'")
    operands = Operands(residual, update, update_bias, update_weight, update_norm_bias, weight, norm_bias)
    require_tensors(Operands._fields, operands)
    fast, compiling = order == "fast", torch.compiler.is_compiling()
    if residual_out is None and normed_out is None:
        # torch.func can batch an operator that returns, and none that writes
        if compiling or _differentiates(operands) or torch._C._functorch.maybe_current_level() is not None:
            new_residual, normed = torch.ops.tp_residual.add_norm(*operands, *_scalars(spec), fast)
            return operands.rows if operands.leaves_residual(
                spec
            ) else new_residual, None if spec.norm is None else normed
    else:
        require_tensors(("residual_out", "normed_out"), (residual_out, normed_out))
        _refuse_gradients("add_norm into given outputs", operands)
    residual_out, normed_out = _outputs(spec, operands, residual_out, normed_out)
    if compiling:
        torch.ops.tp_residual.add_norm_out(*operands, *_scalars(spec), fast, residual_out, normed_out)
    else:
        _CALL_OPERATOR(*operands, _number(spec), fast, residual_out, normed_out)
    return operands.rows if residual_out is None else residual_out, normed_out


def fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, *, weight_offset: float = 0.0
) -> None:
    """In place on both: `residual += input`, then `input = rmsnorm(residual) * (weight + weight_offset)`.

    Name, arguments and effect are those that users of SGLang and FlashInfer know; weight_offset=1.0 is the Gemma form. input, residual:
    rows `[tokens, hidden]`, strided or not, which may differ in dtype (an fp32 residual under 16-bit input); weight: `[hidden]`. The sum
    is made in fp32 and rounded once to the residual; the norm reads the residual *as rounded*, like every later reader, and is rounded
    once to the input.
    Raises UserError for operands that do not fit each other, overlap, or require a gradient.
    """
    require_tensors(("input", "residual", "weight"), (input, residual, weight))
    require_number("eps", eps)
    require_number("weight_offset", weight_offset)
    _refuse_gradients("fused_add_rmsnorm, which works in place,", (input, residual, weight))
    _FUSED_OPERATOR(input, residual, weight, eps, weight_offset)


def compute(
    spec: AddNormSpec,
    operands: Operands,
    *,
    fast: bool = False,
    residual_out: Tensor | None = None,
    normed_out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`add_norm` without checks, gradients and an operator around it: for callers that are inside an operator themselves."""
    operands = Operands(*map(_readable, operands))
    how = implementation(spec, operands.rows, operands)
    if how == "plain":
        return _plain(spec, operands, residual_out, normed_out)
    residual_out, normed_out = outputs = _outputs(spec, operands, residual_out, normed_out)
    if operands.rows.shape[0] > 0 and (residual_out is not None or normed_out is not None):
        if how == "triton":
            from tp_residual.kernels.add_norm_triton import add_norm_launch  # an optional import: Triton is for Linux

            add_norm_launch(spec, operands, residual_out, normed_out, fast=fast).run()
        else:
            cpu.run_checked(spec, operands, outputs, fast=fast)
    return operands.rows if residual_out is None else residual_out, normed_out


def compute_gradients(
    spec: AddNormSpec,
    d_new_residual: Tensor | None,
    d_normed: Tensor | None,
    saved: Operands,
    dtypes: tuple[torch.dtype, torch.dtype],
    wanted: list[bool],
) -> list[Tensor]:
    """Gradients of the wanted operands, in their order. Roundings count as identities.

    saved: the operands, with what the norm read in the place of the residual. dtypes: of the gradients of residual and update.
    """
    d_new_residual, d_normed = _readable(d_new_residual), _readable(d_normed)
    saved = Operands(*map(_readable, saved))
    given = d_new_residual if d_new_residual is not None else d_normed
    assert given is not None
    if given.shape[0] == 0 or implementation(spec, given, (d_new_residual, d_normed, *saved)) != "triton":
        gradients = _plain_gradients(spec, d_new_residual, d_normed, saved, dtypes)
        return [gradient for gradient, want in zip(gradients, wanted, strict=True) if want and gradient is not None]
    from tp_residual.kernels.triton_add_norm_backward import add_norm_backward_launches

    out = Operands(*_gradient_buffers(given, saved, dtypes, wanted))
    for launch in add_norm_backward_launches(spec, d_new_residual, d_normed, saved, out):
        launch.run()
    return [t for t in out if t is not None]


def implementation(
    spec: AddNormSpec, rows: Tensor, tensors: Iterable[Tensor | None]
) -> Literal["triton", "cpu", "plain"]:
    """The one place that decides which code runs. rows: of the operands `tensors`."""
    dtypes = {spec.stream_dtype, spec.output_dtype, spec.round_update, *(t.dtype for t in tensors if t is not None)}
    if torch.float64 in dtypes:
        return "plain"
    if rows.is_cuda and _HAS_TRITON and rows.shape[1] <= MAX_TRITON_HIDDEN:
        return "triton"
    if rows.device.type == "cpu" and cpu.unavailable() is None:
        return "cpu"
    return "plain"


def _plain(
    spec: AddNormSpec, operands: Operands, residual_out: Tensor | None, normed_out: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    new_residual, normed = contract.add_norm(spec, operands.residual, operands.update, **operands.parameters())
    if residual_out is not None:
        new_residual = residual_out.copy_(new_residual)
    if normed_out is not None:
        assert normed is not None
        normed = normed_out.copy_(normed)
    return new_residual, normed


def _plain_gradients(
    spec: AddNormSpec,
    d_new_residual: Tensor | None,
    d_normed: Tensor | None,
    saved: Operands,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> list[Tensor | None]:
    """Gradients of all operands, None where there is none, from differentiable operations only."""
    stream, update, update_bias, update_weight, update_norm_bias, weight, norm_bias = saved
    gradient = None if d_new_residual is None else widen(d_new_residual)
    d_weight = d_norm_bias = d_update_weight = d_update_norm_bias = d_update_bias = None
    if d_normed is not None:
        assert spec.norm is not None and stream is not None and weight is not None
        d_stream, d_weight, d_norm_bias = norm_backward(d_normed, stream, weight, norm_bias, spec.norm)
        gradient = d_stream if gradient is None else gradient + d_stream
    assert gradient is not None
    d_residual = (gradient * spec.skip_scale).to(dtypes[0])
    d_update = gradient * spec.update_scale
    if spec.update_norm is not None:
        assert update is not None and update_weight is not None
        update = widen(update)
        if update_bias is not None:
            update = update + widen(update_bias)
        if spec.round_update is not None:
            update = update.to(spec.round_update)
        d_update, d_update_weight, d_update_norm_bias = norm_backward(
            d_update, update, update_weight, update_norm_bias, spec.update_norm
        )
    if update_bias is not None:
        d_update_bias = column_sum(d_update).to(update_bias.dtype)
    return [
        d_residual,
        d_update.to(dtypes[1]),
        d_update_bias,
        d_update_weight,
        d_update_norm_bias,
        d_weight,
        d_norm_bias,
    ]


def _outputs(
    spec: AddNormSpec, operands: Operands, residual_out: Tensor | None, normed_out: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The given outputs, and new ones for results that have none."""
    rows = operands.rows
    if residual_out is None and not operands.leaves_residual(spec):
        residual_out = _new_rows(rows, spec.stream_dtype)
    if normed_out is None and spec.norm is not None:
        normed_out = _new_rows(rows, spec.output_dtype)
    return residual_out, normed_out


def _new_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    if rows.dtype is dtype and rows.is_contiguous():
        return torch.empty_like(rows)  # in half the time
    return torch.empty_like(rows, dtype=dtype, memory_format=torch.contiguous_format)


def _gradient_buffers(
    rows: Tensor, saved: Operands, dtypes: tuple[torch.dtype, torch.dtype], wanted: list[bool]
) -> list[Tensor | None]:
    shapes = [(rows.shape, dtype) for dtype in dtypes]
    shapes += [(rows.shape[1:], rows.dtype if t is None else t.dtype) for t in saved[2:]]
    return [
        torch.empty(shape, dtype=dtype, device=rows.device) if want else None
        for (shape, dtype), want in zip(shapes, wanted, strict=True)
    ]


def _readable(t: Tensor | None) -> Tensor | None:
    """With unit stride in the last dimension, as kernels read it."""
    return t if t is None or t.shape[-1] == 1 or t.stride(-1) == 1 else t.contiguous()


def _differentiates(operands: Iterable[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)


def _refuse_gradients(what: str, operands: Iterable[Tensor | None]) -> None:
    if _differentiates(operands):
        raise UserError(
            f"{what} has no gradient, and an operand has requires_grad=True; use add_norm without outputs, or torch.no_grad()"
        )


# -- operators: they take no objects, so that a spec travels as its scalars, which a compiler can keep; or, where none is at work, as its
# number in this process: 12 arguments less are half of what a call costs on the host

_OPERANDS = "Tensor? residual, Tensor? update, " + ", ".join(f"Tensor? {name}" for name in Operands._fields[2:])
_SCALARS = (
    "ScalarType stream_dtype, ScalarType output_dtype, str? kind, float eps, float weight_offset, bool weight_after_cast, "
    "str? update_kind, float update_eps, float update_weight_offset, float update_scale, float skip_scale, ScalarType? round_update"
)
_SCALAR_COUNT = _SCALARS.count(",") + 1
_NO_NORM = (None, 0.0, 0.0)
OUTPUTS = ("residual_out", "normed_out")
_FUSED_NAMES = ("residual", "input", *Operands._fields[2:])


def _scalars(spec: AddNormSpec) -> tuple[Any, ...]:
    norm, update_norm = spec.norm, spec.update_norm
    return (
        spec.stream_dtype,
        spec.output_dtype,
        *(_NO_NORM if norm is None else (norm.kind, norm.eps, norm.weight_offset)),
        norm is not None and norm.weight_after_cast,
        *(_NO_NORM if update_norm is None else (update_norm.kind, update_norm.eps, update_norm.weight_offset)),
        spec.update_scale,
        spec.skip_scale,
        spec.round_update,
    )


@lru_cache(maxsize=1024)  # a model has a handful, and making one costs as much as all other host work of a call
def _spec(
    stream_dtype: torch.dtype,
    output_dtype: torch.dtype,
    kind: Any,
    eps: float,
    weight_offset: float,
    weight_after_cast: bool,
    update_kind: Any,
    update_eps: float,
    update_weight_offset: float,
    update_scale: float,
    skip_scale: float,
    round_update: torch.dtype | None,
) -> AddNormSpec:
    norm = None if kind is None else NormSpec(eps, kind, weight_offset, weight_after_cast)
    update_norm = None if update_kind is None else NormSpec(update_eps, update_kind, update_weight_offset)
    return AddNormSpec(stream_dtype, output_dtype, norm, update_norm, update_scale, skip_scale, round_update)


_specs: list[AddNormSpec] = []
_numbers: dict[AddNormSpec, int] = {}


def _number(spec: AddNormSpec) -> int:
    number = _numbers.get(spec)
    if number is None:
        _specs.append(spec)
        number = _numbers[spec] = len(_specs) - 1
    return number


def _taken_apart(arguments: tuple[Any, ...]) -> tuple[AddNormSpec, Operands, tuple[Any, ...]]:
    """Spec, operands and what follows them in an operator's arguments."""
    count = len(Operands._fields)
    scalars = arguments[count : count + _SCALAR_COUNT]
    return _spec(*scalars), Operands(*arguments[:count]), arguments[count + _SCALAR_COUNT :]


def _add_norm(*arguments: Any) -> tuple[Tensor, Tensor]:
    spec, operands, (fast,) = _taken_apart(arguments)
    check_operands(spec, operands)
    new_residual, normed = compute(spec, operands, fast=fast)
    if operands.leaves_residual(spec):
        new_residual = new_residual.new_empty(0)  # an operator may not return its input
    return new_residual, new_residual.new_empty(0, dtype=spec.output_dtype) if normed is None else normed


def _add_norm_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    spec, operands, _ = _taken_apart(arguments)
    check_operands(spec, operands)
    rows = operands.rows
    return (
        rows.new_empty(0 if operands.leaves_residual(spec) else rows.shape, dtype=spec.stream_dtype),
        rows.new_empty(0 if spec.norm is None else rows.shape, dtype=spec.output_dtype),
    )


def _add_norm_out(*arguments: Any) -> None:
    spec, operands, (fast, *outputs) = _taken_apart(arguments)
    _run("add_norm operator", spec, operands, tuple(outputs), Operands._fields, OUTPUTS, fast)


def _add_norm_out_fake(*arguments: Any) -> None:
    spec, operands, _ = _taken_apart(arguments)
    check_operands(spec, operands)


def _add_norm_call(*arguments: Any) -> None:
    *tensors, number, fast, residual_out, normed_out = arguments
    outputs = residual_out, normed_out
    _run("add_norm operator", _specs[number], Operands(*tensors), outputs, Operands._fields, OUTPUTS, fast)


def _add_norm_call_fake(*arguments: Any) -> None:
    *tensors, number, _, _, _ = arguments
    check_operands(_specs[number], Operands(*tensors))


@lru_cache(maxsize=1024)
def _fused_spec(stream_dtype: torch.dtype, output_dtype: torch.dtype, eps: float, weight_offset: float) -> AddNormSpec:
    return AddNormSpec(stream_dtype, output_dtype, NormSpec(eps, "rms", weight_offset))


def _fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float) -> None:
    spec = _fused_spec(residual.dtype, input.dtype, eps, weight_offset)
    operands = Operands(residual, input, weight=weight)
    _run("fused operator", spec, operands, (residual, input), _FUSED_NAMES, _FUSED_NAMES[:2], False)


def _fused_add_rmsnorm_fake(input: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float) -> None:
    spec = _fused_spec(residual.dtype, input.dtype, eps, weight_offset)
    check_operands(spec, Operands(residual, input, weight=weight), _FUSED_NAMES)


def _run(
    checker: str,
    spec: AddNormSpec,
    operands: Operands,
    outputs: tuple[Tensor | None, ...],
    names: tuple[str, ...],
    output_names: tuple[str, ...],
    fast: bool,
) -> None:
    """Into outputs, with checks: the short ones, if these operands are like others that passed the long ones."""
    residual_out, normed_out = outputs
    if cpu.run_known(checker, spec, operands, (residual_out, normed_out), fast=fast):
        return
    check_operands(spec, operands, names)
    check_outputs(spec, operands, (residual_out, normed_out), names, output_names)
    compute(spec, operands, fast=fast, residual_out=residual_out, normed_out=normed_out)
    if implementation(spec, operands.rows, operands) == "cpu":
        cpu.remember(checker, spec, operands, (residual_out, normed_out))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    spec, operands, _ = _taken_apart(inputs)
    ctx.set_materialize_grads(False)  # an output that nobody used costs nothing
    stream = None
    if spec.norm is not None:
        stream = operands.residual if operands.leaves_residual(spec) else output[0]
    update = None if spec.update_norm is None else operands.update
    ctx.save_for_backward(*operands._replace(residual=stream, update=update))
    ctx.dtypes = [torch.float32 if t is None else t.dtype for t in operands[:2]]
    ctx.given = [t is not None for t in operands]
    ctx.scalars = _scalars(spec)


def _backward(ctx: Any, d_new_residual: Tensor | None, d_normed: Tensor | None) -> tuple[Tensor | None, ...]:
    saved, none = Operands(*ctx.saved_tensors), (None,) * (_SCALAR_COUNT + 1)
    if d_new_residual is None and d_normed is None:
        return (*(None,) * len(saved), *none)
    spec, dtypes = _spec(*ctx.scalars), tuple(ctx.dtypes)
    if torch.is_grad_enabled():  # a gradient of this gradient is wanted
        gradients = _plain_gradients(spec, d_new_residual, d_normed, saved, dtypes)
        return (*(g if given else None for g, given in zip(gradients, ctx.given, strict=True)), *none)
    wanted = [given and needed for given, needed in zip(ctx.given, ctx.needs_input_grad, strict=False)]
    if d_normed is None:
        wanted[-2:] = False, False
    same = wanted[0] and wanted[1] and dtypes[0] == dtypes[1] and spec.update_norm is None
    same = same and spec.skip_scale == spec.update_scale
    computed = iter(
        torch.ops.tp_residual.add_norm_backward(
            *saved,
            *ctx.scalars,
            d_new_residual,
            d_normed,
            *dtypes,
            [want and not (same and i == 1) for i, want in enumerate(wanted)],
        )
    )
    gradients = [next(computed) if want and not (same and i == 1) else None for i, want in enumerate(wanted)]
    if same:
        gradients[1] = gradients[0]
    return (*gradients, *none)


def _add_norm_backward(*arguments: Any) -> list[Tensor]:
    spec, saved, (d_new_residual, d_normed, residual_dtype, update_dtype, wanted) = _taken_apart(arguments)
    return compute_gradients(spec, d_new_residual, d_normed, saved, (residual_dtype, update_dtype), wanted)


def _add_norm_backward_fake(*arguments: Any) -> list[Tensor]:
    _, saved, (d_new_residual, d_normed, residual_dtype, update_dtype, wanted) = _taken_apart(arguments)
    given = d_new_residual if d_new_residual is not None else d_normed
    return [t for t in _gradient_buffers(given, saved, (residual_dtype, update_dtype), wanted) if t is not None]


for _name, _schema, _function, _fake in (
    ("add_norm", f"({_OPERANDS}, {_SCALARS}, bool fast) -> (Tensor, Tensor)", _add_norm, _add_norm_fake),
    (
        "add_norm_out",
        f"({_OPERANDS}, {_SCALARS}, bool fast, Tensor(a!)? residual_out, Tensor(b!)? normed_out) -> ()",
        _add_norm_out,
        _add_norm_out_fake,
    ),
    (
        "add_norm_call",
        f"({_OPERANDS}, int spec, bool fast, Tensor(a!)? residual_out, Tensor(b!)? normed_out) -> ()",
        _add_norm_call,
        _add_norm_call_fake,
    ),
    (
        "add_norm_backward",
        f"({_OPERANDS}, {_SCALARS}, Tensor? d_new_residual, Tensor? d_normed, ScalarType residual_dtype, ScalarType update_dtype, "
        "bool[] wanted) -> Tensor[]",
        _add_norm_backward,
        _add_norm_backward_fake,
    ),
    (
        "fused_add_rmsnorm",
        "(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float eps, float weight_offset) -> ()",
        _fused_add_rmsnorm,
        _fused_add_rmsnorm_fake,
    ),
):
    LIBRARY.define(f"{_name}{_schema}")
    LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tp_residual::{_name}", _fake, lib=LIBRARY)
torch.library.register_autograd("tp_residual::add_norm", _backward, setup_context=_setup_context, lib=LIBRARY)
# found once: each look-up of an operator's overload is a microsecond
_FUSED_OPERATOR = torch.ops.tp_residual.fused_add_rmsnorm.default
_CALL_OPERATOR = torch.ops.tp_residual.add_norm_call.default
