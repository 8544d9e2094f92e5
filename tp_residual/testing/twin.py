"""Sharded equals unsharded: the check that a layout is right, in the forward and in the backward pass.

A factor of tp, a missing sum, an averaged gradient or a bias counted twice all are plain differences here. Nothing of
the sharded module is trusted: its twin is an ordinary module that knows of no ranks.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tp_residual.checkpoint.load import load_state_dict_blocks
from tp_residual.parallel.blocks import grad_norm, parameter_blocks, sync_gradients
from tp_residual.parallel.collectives import partial_to_invariant
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.partial import Partial
from tp_residual.testing.hostile import hostile_layouts, hostile_values

FP64_RTOL = 1e-10  # rounding is 1e-16 an operation; the smallest fault this is for is 1/tp

# A gradient that is zero but for rounding (a bias before a norm) has no relative error of its own: below this share of
# the whole model's gradient, errors are relative to that share.
_FLOOR = 1e-6


def relative_error(value: Tensor, reference: Tensor, *, floor: float = 0.0) -> float:
    """Norm of the difference over norm of the reference, per token (all but the last dimension), maximum over tokens.

    floor: a reference norm below it counts as it. NaN anywhere gives infinity; zero for zero gives zero.
    """
    if value.shape != reference.shape:
        raise ValueError(f"shape {list(value.shape)} instead of {list(reference.shape)}")
    if value.numel() == 0:
        return 0.0
    value, reference = value.detach(), reference.detach().double()
    difference = torch.linalg.vector_norm(torch.atleast_1d(value.double() - reference), dim=-1)
    scale = torch.linalg.vector_norm(torch.atleast_1d(reference), dim=-1).clamp(min=floor)
    error = torch.where(difference == 0, 0.0, difference / scale)
    return float(torch.where(error.isnan(), torch.inf, error).max())


def assert_equals_twin(
    group: TensorParallelGroup,
    sharded: nn.Module,
    twin: nn.Module,
    inputs: Sequence[Any],
    *,
    run: Callable[..., Any] | None = None,
    run_twin: Callable[..., Any] | None = None,
    grad_outputs: Sequence[Tensor] | None = None,
    seed: int = 0,
    rtol: float | None = None,
) -> dict[str, float]:
    """Give `sharded` the weights of `twin`, run both forward and backward, and compare everything. Every rank calls it
    alike.

    inputs: the whole, equal on all ranks (invariant). run(sharded, *inputs) and run_twin(twin, *inputs) default to a
    plain call; what they return, a tensor or a tuple of them, must be invariant as well (a Partial is completed here),
    so `run` holds the moves into and out of a layer that is used alone. Parameters of the twin have the names of the
    sharded module's blocks. grad_outputs: one for each floating output; random by `seed` unless given, and of awkward
    memory layout for `sharded`.

    Compared, by relative error against rtol (1e-10 for fp64 weights; others must say what they expect): each output per
    token; the gradient of each floating input; after sync_gradients, each block of each parameter's gradient; grad_norm
    for p = 1, 2, inf. Inputs and incoming gradients must be left as they were. Returns the errors by name, or raises
    AssertionError naming rank, what differs and by what factor. All ranks finish their collectives before any raises.
    """
    parameters = dict(twin.named_parameters())
    blocks = parameter_blocks(sharded)
    dtypes = {parameter.dtype for parameter in (*parameters.values(), *(block.parameter for block in blocks))}
    if rtol is None:
        if dtypes - {torch.float64}:
            raise ValueError(
                f"parameters of {', '.join(sorted(map(str, dtypes)))} have no default tolerance; "
                "build in fp64 or give rtol"
            )
        rtol = FP64_RTOL
    load_state_dict_blocks(blocks, {name: parameter.detach() for name, parameter in parameters.items()})
    check = _Check(group, rtol)

    outputs, own_inputs = _call(run or _plain, sharded, inputs)
    references, twin_inputs = _call(run_twin or _plain, twin, inputs)
    if len(outputs) != len(references):
        raise AssertionError(f"the sharded module returned {len(outputs)} values, its twin {len(references)}")
    for index, (output, reference) in enumerate(zip(outputs, references, strict=True)):
        check.same(f"output {index}", output.detach(), reference.detach())

    if torch.is_grad_enabled() and any(reference.requires_grad for reference in references):
        gradients = _cotangents(references, grad_outputs, seed)
        incoming = [
            hostile_layouts(gradient)["strided"] if gradient.dim() else gradient.clone() for gradient in gradients
        ]
        kept = [gradient.clone() for gradient in incoming]
        wanted = [index for index, reference in enumerate(references) if reference.requires_grad]
        _backward(sharded, [outputs[index] for index in wanted], incoming)
        _backward(twin, [references[index] for index in wanted], gradients)
        for index, (now, before) in enumerate(zip(incoming, kept, strict=True)):
            check.unchanged(f"incoming gradient {index}", now, before)
        for index, (own, other) in enumerate(zip(own_inputs, twin_inputs, strict=True)):
            if isinstance(own, Tensor) and own.requires_grad:
                check.same(f"gradient of input {index}", _gradient(own), _gradient(other))
        sync_gradients(blocks, group)
        total = (
            float(torch.stack([torch.linalg.vector_norm(_gradient(p).double()) for p in parameters.values()]).norm())
            if parameters
            else 0.0
        )
        for block in blocks:
            start, stop = block.globe
            name = f"gradient of {block.name}[{start}:{stop}] along dim {block.dim}"
            reference = block.of_full(_gradient(parameters[block.name]))
            check.same(
                name, block.of(_gradient(block.parameter)).reshape(-1), reference.reshape(-1), floor=_FLOOR * total
            )
        for p in (1.0, 2.0, float("inf")):
            norms = [torch.linalg.vector_norm(_gradient(parameter).double(), p) for parameter in parameters.values()]
            reference = (
                torch.linalg.vector_norm(torch.stack(norms), p) if norms else torch.zeros((), dtype=torch.float64)
            )
            check.same(f"grad_norm p={p:g}", grad_norm(blocks, group, p), reference)

    for index, (own, given) in enumerate(zip(own_inputs, inputs, strict=True)):
        if isinstance(given, Tensor):
            check.unchanged(f"input {index}", own.detach(), given)
    check.finish()
    return check.errors


class _Check:
    """Collects instead of raising: a rank that raised early would leave the others waiting in their next collective."""

    def __init__(self, group: TensorParallelGroup, rtol: float) -> None:
        self.group, self.rtol = group, rtol
        self.errors: dict[str, float] = {}
        self.problems: list[str] = []

    def same(self, name: str, value: Tensor, reference: Tensor, *, floor: float = 0.0) -> None:
        if value.shape != reference.shape:
            self.problems.append(f"{name} has shape {list(value.shape)}, the twin's {list(reference.shape)}")
            return
        error = relative_error(value, reference, floor=floor)
        self.errors[name] = error
        if not error <= self.rtol:
            self.problems.append(
                f"{name} differs from the twin's: relative error {error:.2e} > {self.rtol:.0e}"
                f"{_factor(value, reference)}"
            )

    def unchanged(self, name: str, now: Tensor, before: Tensor) -> None:
        if not torch.equal(now, before):
            self.problems.append(f"{name} was written to")

    def finish(self) -> None:
        if self.problems:
            raise AssertionError(f"rank {self.group.rank} of {self.group.size}: " + "\n  ".join(self.problems))


def _factor(value: Tensor, reference: Tensor) -> str:
    """Most faults of this kind are a factor: tp, 1 / tp, or nothing at all."""
    value, reference = value.double().reshape(-1), reference.double().reshape(-1)
    scale = float(value @ reference / (reference @ reference))
    rest = float(torch.linalg.vector_norm(value - scale * reference))
    return (
        f" (it is {scale:.6g} times the twin's)"
        if rest <= 1e-6 * float(torch.linalg.vector_norm(value)) or not value.any()
        else ""
    )


def _plain(module: nn.Module, *inputs: Any) -> Any:
    return module(*inputs)


def _call(run: Callable[..., Any], module: nn.Module, inputs: Iterable[Any]) -> tuple[list[Tensor], list[Any]]:
    """The outputs, and the module's own copies of the inputs, which collect gradients."""
    own = [
        value.detach().clone().requires_grad_(value.is_floating_point()) if isinstance(value, Tensor) else value
        for value in inputs
    ]
    result = run(module, *own)
    results = result if isinstance(result, tuple | list) else (result,)
    return [partial_to_invariant(y, tag="twin.output") if isinstance(y, Partial) else y for y in results], own


def _cotangents(references: Sequence[Tensor], given: Sequence[Tensor] | None, seed: int) -> list[Tensor]:
    differentiable = [reference for reference in references if reference.requires_grad]
    if given is not None:
        if [g.shape for g in given] != [r.shape for r in differentiable]:
            raise ValueError(
                f"grad_outputs has shapes {[list(g.shape) for g in given]}, "
                f"the outputs {[list(r.shape) for r in differentiable]}"
            )
        return list(given)
    return [hostile_values(*r.shape, seed=seed, rank=1000 + i, dtype=r.dtype) for i, r in enumerate(differentiable)]


def _backward(module: nn.Module, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    module.zero_grad(set_to_none=True)
    pairs = [
        (output, gradient) for output, gradient in zip(outputs, gradients, strict=True) if output.requires_grad
    ]  # an empty share has none
    torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
