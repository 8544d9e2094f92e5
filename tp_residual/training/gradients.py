"""Between the last backward pass and the optimizer's step: sums that may not be forgotten, one norm, one clipping factor, NaN by name.

sync_gradients(blocks, group)                      the partial gradients become whole
norm = clip_grad_norm(blocks, group, 1.0)          one factor for all ranks
require_finite(norm, blocks, group, step=step)     or TrainingError, on every rank
optimizer.step()                                   any torch optimizer that treats parameters element by element
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tp_residual.errors import LayoutError, TrainingError, UserError
from tp_residual.parallel.blocks import (
    ParameterBlock,
    clear_mark,
    grad_norm,
    is_mixed,
    is_summed,
    mark_mixed,
    parameter_blocks,
    raise_together,
)
from tp_residual.parallel.group import TensorParallelGroup


class _Removable(Protocol):
    def remove(self) -> None: ...


class GradientGuard:
    """Raises LayoutError at an optimizer's step while one of its partial gradients has not been summed; made by `attach`."""

    def __init__(
        self, blocks: list[ParameterBlock], optimizer: torch.optim.Optimizer, group: TensorParallelGroup
    ) -> None:
        self.blocks, self.group = blocks, group
        self._onto_sum: dict[nn.Parameter, bool] = {}
        self._hooks: list[_Removable] = [optimizer.register_step_pre_hook(self._before_step)]
        if group.checked:
            for parameter in dict.fromkeys(block.parameter for block in blocks if block.partial_gradient):
                if parameter.requires_grad:
                    self._hooks.append(parameter.register_hook(self._look_at(parameter)))
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(self._accumulated))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _look_at(self, parameter: nn.Parameter) -> Callable[[Tensor], None]:
        def before_accumulation(_: Tensor) -> None:
            grad = parameter.grad
            # a sum that was zeroed in place is a fresh start
            self._onto_sum[parameter] = grad is not None and (is_summed(grad) or is_mixed(grad)) and bool(grad.any())

        return before_accumulation

    def _accumulated(self, parameter: Tensor) -> None:
        grad = parameter.grad
        assert grad is not None
        if self._onto_sum.pop(parameter, False):  # type: ignore[call-overload]
            mark_mixed(grad)
        else:
            clear_mark(grad)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        stepped = {id(parameter) for options in optimizer.param_groups for parameter in options["params"]}
        problem = ""
        for block in self.blocks:
            grad = block.parameter.grad
            if not block.partial_gradient or id(block.parameter) not in stepped or grad is None or is_summed(grad):
                continue
            how = "has had more accumulated onto its sum" if is_mixed(grad) else "is still this rank's summand"
            problem = (
                f"optimizer.step(): the gradient of {block.name}, which ranks {', '.join(map(str, block.holders))} hold together, {how}; "
                "call sync_gradients(blocks, group) once, after the last backward pass of the step"
            )
            break
        raise_together(problem, self.group)


def attach(
    model: nn.Module | Iterable[ParameterBlock], optimizer: torch.optim.Optimizer, group: TensorParallelGroup
) -> GradientGuard:
    """From now on `optimizer.step()` raises LayoutError while a partial gradient of its parameters has not been through `sync_gradients`.

    Always seen, at no cost: a gradient that was never summed since it came into being. In checked mode (`group.checked`) also seen, by
    hooks on the parameters: further accumulation after the sum, also into gradients that are zeroed in place; and all ranks raise
    when one does. A closure handed to `step` runs after the check. Raises LayoutError for a parameter of the optimizer without block.
    """
    blocks = parameter_blocks(model) if isinstance(model, nn.Module) else list(model)
    declared = {id(block.parameter) for block in blocks}
    for number, options in enumerate(optimizer.param_groups):
        for parameter in options["params"]:
            if id(parameter) not in declared:
                raise LayoutError(
                    f"a parameter of shape {list(parameter.shape)} in the optimizer's group {number} belongs to no block of the model; "
                    "build the optimizer from the parameters of the model that is attached"
                )
    return GradientGuard(blocks, optimizer, group)


@torch.no_grad()
def clip_grad_norm(
    blocks: Iterable[ParameterBlock], group: TensorParallelGroup, max_norm: float, p: float = 2.0
) -> Tensor:
    """Scale all gradients by `min(1, max_norm / (norm + 1e-6))`, torch's rule, with the norm of `grad_norm`, which is returned.

    All ranks get the same norm, so the same factor. A norm that is not finite scales nothing: see `require_finite`. Call it after
    `sync_gradients`. Raises UserError for a max_norm that is not positive.
    """
    if not max_norm > 0:
        raise UserError(f"max_norm={max_norm} must be positive; without clipping, call grad_norm()")
    blocks = list(blocks)
    norm = grad_norm(blocks, group, p)
    if math.isfinite(float(norm)):
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter in dict.fromkeys(block.parameter for block in blocks):
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.device))
    return norm


def require_finite(norm: Tensor, blocks: Iterable[ParameterBlock], group: TensorParallelGroup, *, step: int) -> None:
    """Raises TrainingError on every rank, with one text, when `norm` (of `grad_norm` or `clip_grad_norm`) is not finite.

    It names the step, the first tensor in the model's order with a NaN or an infinity, the lowest rank that has one there, and the last
    tensor: the backward pass reached that one first. A summed gradient has them on all its holders. Costs nothing when all is well.
    """
    if math.isfinite(float(norm)):
        return
    blocks = list(blocks)
    names = list(dict.fromkeys(block.name for block in blocks))  # the same on all ranks
    bad = torch.zeros(1, len(names), dtype=torch.uint8, device=group.device)  # 1: infinite, 2: NaN
    position = {name: index for index, name in enumerate(names)}
    for block in blocks:
        if block.parameter.grad is not None:
            grad = block.of(block.parameter.grad)
            kind = 2 * grad.isnan().any() + grad.isinf().any()
            bad[0, position[block.name]] |= kind.to(torch.uint8)
    if group.size > 1:
        bad = group.run("all_gather", "require_finite", bad, lambda transport, t: transport.all_gather(t))
    found = bad.any(dim=0).nonzero()[:, 0].tolist()
    if not found:
        raise TrainingError(f"step {step}: the gradient norm is {float(norm)}, though every gradient is finite")

    def tell(index: int) -> str:
        rank = int(bad[:, index].nonzero()[0, 0])
        kind = "NaN" if int(bad[rank, index]) & 2 else "infinite"
        return f"{names[index]} is {kind} on rank {rank} of {group.size}"

    more = f"; the last of {len(found)} such tensors: {tell(found[-1])}" if len(found) > 1 else ""
    raise TrainingError(f"step {step}: the gradient of {tell(found[0])}{more}")
