"""What one step of the stream should make of what was there before it: the residual config's equations, in fp64, in one process.

Shares no arithmetic with connections, boundaries and kernels. Weights are whole tensors by checkpoint name.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tp_residual.model.config import ModelConfig
from tp_residual.residual.config import SublayerPlan

Weights = Callable[[str], Tensor]


@dataclass(frozen=True)
class Join:
    """The parts of one new residual before any norm of it: what the skip and the update come to."""

    skip: Tensor
    update: Tensor

    @property
    def total(self) -> Tensor:
        return self.skip + self.update


class Expected:
    """By a model's config; weights(name) is the whole parameter."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config, self.residual, self.weights = config, config.residual, weights

    def norm(self, x: Tensor, name: str, *, weight: Tensor | None = None) -> Tensor:
        """weight: instead of the parameter's."""
        if self.residual.norm == "layer":
            x = x - x.mean(-1, keepdim=True)
        y = x / (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt()
        y = y * (self.weights(f"{name}.weight") if weight is None else weight)
        return y + self.weights(f"{name}.bias") if self.residual.norm == "layer" else y

    def embedding(self, update: Tensor) -> Tensor:
        return update * self.residual.embed_scale

    def join(self, plan: SublayerPlan, x: Tensor, update: Tensor) -> Join:
        """x: the residual that the update is added to. update: the completed sum, with its bias."""
        residual, connection = self.residual, plan.connection
        layer, own = f"model.layers.{plan.layer}", f"model.layers.{plan.layer}.{connection.name}"
        if connection.update_norm is not None:
            update = self.norm(update, f"{layer}.{connection.update_norm}")
        update = update * connection.update_scale * plan.keep
        if residual.learned_update != "none":
            update = update * self.weights(f"{own}.update_scale")
        skip = x
        path = "model.residual_shortcut" if residual.shortcut_shared else f"{own}.shortcut"
        if residual.shortcut == "projection":
            skip = x @ self.weights(f"{path}.weight").T
        elif residual.shortcut == "lowrank":
            skip = x + x @ self.weights(f"{path}.down").T @ self.weights(f"{path}.up").T
        skip = skip * connection.skip_scale
        if residual.learned_skip != "none":
            skip = skip * self.weights(f"{own}.skip_scale")
        if residual.skip_channels is not None:
            skip = torch.where(torch.arange(skip.shape[-1], device=skip.device) < residual.skip_channels, skip, 0.0)
        if residual.gate != "none":
            carry, transform = self.gate(x, f"{own}.gate")
            skip, update = carry * skip, transform * update
        return Join(skip, update)

    def gate(self, x: Tensor, path: str) -> tuple[Tensor, Tensor]:
        z = self.weights(f"{path}.bias")
        if self.residual.gate == "lowrank":
            z = z + x @ self.weights(f"{path}.down").T @ self.weights(f"{path}.up").T
        elif self.residual.gate != "static":
            z = z + x @ self.weights(f"{path}.weight").T
        g = 1 / (1 + torch.exp(-z / self.residual.gate_temperature))
        return ((1 - g * g).sqrt() if self.residual.gate_coupling == "variance" else 1 - g), g

    def after(self, plan: SublayerPlan, total: Tensor) -> Tensor:
        """The stream value that a sum of skip and update becomes: itself, or its post-norm."""
        post = plan.connection.post_norm
        return total if post is None else self.norm(total, f"model.layers.{plan.layer}.{post}")

    def mixture(self, layer: int, history: list[Tensor]) -> Tensor:
        weights = self.weights(f"model.depth_mix.{layer}")
        return sum((w * state for w, state in zip(weights, history, strict=True)), torch.zeros_like(history[0]))

    def inputs(self, plan: SublayerPlan, read: Tensor) -> dict[str, Tensor]:
        """What each module of a sublayer is given, of what was read."""
        if len(plan.read_norms) == 1:
            return dict.fromkeys(plan.modules, read * plan.input_scale)
        layer = f"model.layers.{plan.layer}"
        return {
            module: self.norm(read, f"{layer}.{name}") * plan.input_scale
            for module, name in zip(plan.modules, plan.read_norms, strict=True)
        }
