"""How an update joins the stream: scales, gates, shortcuts, masks and the norms around the add, composed of one config.

A connection without parameters of its own is a description that a boundary's executor carries out in one pass. Everything else is
`combine`: plain differentiable arithmetic on completed values in the stream's layout, so local under sequence parallelism as well.
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tp_residual.kernels.contract import norm, widen
from tp_residual.parallel.blocks import ParameterBlock, replicated_block, split_blocks
from tp_residual.parallel.collectives import invariant_to_last_dim_shard
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.partial import Partial
from tp_residual.parallel.splits import Split
from tp_residual.residual.config import (
    ConnectionPlan,
    ParameterPlan,
    ResidualConfig,
    connection_parameters,
    shortcut_parameters,
)
from tp_residual.residual.norms import RMSNorm
from tp_residual.residual.request import Join


class Replicated(nn.Module):
    """Parameters that every rank holds whole, by name, at their starting values; `normal` ones are small and random.

    sequence_parallel: each rank applies them to its own tokens, so that their gradients are partial.
    """

    def __init__(
        self, plans: Iterable[ParameterPlan], group: TensorParallelGroup, *, sequence_parallel: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        for plan in plans:
            self.register_parameter(plan.name, nn.Parameter(starting_value(plan, group.device, dtype)))

    def declare_blocks(self, prefix: str) -> Iterable[ParameterBlock]:
        for name, parameter in self.named_parameters(recurse=False):
            yield replicated_block(
                f"{prefix}{name}", parameter, self.group.size, partial_gradient=self.sequence_parallel
            )


def starting_value(plan: ParameterPlan, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The whole parameter before training. A loader or an init rule overwrites it."""
    if plan.init == "identity":
        return torch.eye(plan.shape[0], plan.shape[1], device=device, dtype=dtype)
    if plan.init == "normal":
        # the same on every rank, whatever the global generator has drawn there
        generator = torch.Generator().manual_seed(sum(map(ord, plan.name)))
        return (torch.randn(plan.shape, generator=generator) * 0.02).to(device, dtype)
    return torch.full(plan.shape, float(plan.init), device=device, dtype=dtype)


class Gate(Replicated):
    """`(carry, transform)` of a residual `[tokens, hidden]`, each `[tokens or 1, hidden or 1]`: what x and u are multiplied by."""

    weight: Tensor
    down: Tensor
    up: Tensor
    bias: Tensor

    def __init__(
        self,
        config: ResidualConfig,
        hidden: int,
        group: TensorParallelGroup,
        *,
        sequence_parallel: bool,
        dtype: torch.dtype,
    ) -> None:
        plans = [
            ParameterPlan(plan.name.removeprefix("gate."), plan.shape, plan.init)
            for plan in connection_parameters(config, hidden)
            if plan.name.startswith("gate.")
        ]
        super().__init__(plans, group, sequence_parallel=sequence_parallel, dtype=dtype)
        self.kind, self.coupling, self.temperature = config.gate, config.gate_coupling, config.gate_temperature

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        wide = x.dtype
        z = self.bias.to(wide)
        if self.kind in ("scalar", "vector"):
            z = F.linear(x, self.weight.to(wide)) + z
        elif self.kind == "lowrank":
            z = F.linear(F.linear(x, self.down.to(wide)), self.up.to(wide)) + z
        z = z / self.temperature
        transform = torch.sigmoid(z)
        if self.coupling == "variance":
            # 1 - g^2 as (1 - g)(1 + g), and 1 - g as sigmoid(-z): no cancellation where g is near 1
            return torch.sqrt(torch.sigmoid(-z) * (1 + transform)), transform
        return torch.sigmoid(-z), transform


class Shortcut(nn.Module):
    """What stands for x in `x + u`. `projection`: its part of the sum goes into the sublayer's own collective where the stream is
    replicated (`summand`), each rank with a range of input channels; a token-sharded stream is projected where it lies. `lowrank`: local.
    """

    weight: Tensor
    down: Tensor
    up: Tensor

    def __init__(
        self,
        config: ResidualConfig,
        hidden: int,
        group: TensorParallelGroup,
        *,
        sequence_parallel: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.kind, self.group, self.sequence_parallel = config.shortcut, group, sequence_parallel
        self.columns = Split.even(hidden, group.size)
        self.is_sharded = config.shortcut_within_sum and not sequence_parallel
        for plan in shortcut_parameters(config, hidden):
            value = starting_value(plan, group.device, dtype)
            if self.is_sharded:
                value = value[:, slice(*self.columns.ranges[group.rank])].contiguous()
            self.register_parameter(plan.name, nn.Parameter(value))

    def summand(self, residual: Tensor) -> Partial:
        """This rank's summand of the projected, replicated residual."""
        part = invariant_to_last_dim_shard(residual, self.columns, self.group, tag="shortcut")
        return Partial(F.linear(widen(part), widen(self.weight)), self.group, "shortcut")

    def forward(self, x: Tensor) -> Tensor:
        """Of a wide residual in the stream's layout."""
        if self.kind == "projection":
            return F.linear(x, self.weight.to(x.dtype))
        return x + F.linear(F.linear(x, self.down.to(x.dtype)), self.up.to(x.dtype))

    def declare_blocks(self, prefix: str) -> Iterable[ParameterBlock]:
        for name, parameter in self.named_parameters(recurse=False):
            if self.is_sharded:
                full = (self.columns.total, self.columns.total)
                yield from split_blocks(f"{prefix}{name}", parameter, 1, self.columns, full, self.group.rank)
            else:
                yield replicated_block(
                    f"{prefix}{name}", parameter, self.group.size, partial_gradient=self.sequence_parallel
                )


class Connection(Replicated):
    """One sublayer's way back into the stream. Norms belong to the layer, whose checkpoint names them; they are only used here.

    shortcut: a shared one, held by the model. keep: the probability with which training runs the sublayer, which scales its updates at
    inference. Without parameters of its own it is `static`: constants and norms.
    """

    skip_scale: Tensor
    update_scale: Tensor

    def __init__(
        self,
        config: ResidualConfig,
        plan: ConnectionPlan,
        hidden: int,
        group: TensorParallelGroup,
        *,
        sequence_parallel: bool,
        dtype: torch.dtype,
        update_norm: RMSNorm | None = None,
        post_norm: RMSNorm | None = None,
        shortcut: Shortcut | None = None,
        keep: float = 1.0,
    ) -> None:
        own = [each for each in connection_parameters(config, hidden) if "." not in each.name]
        super().__init__(own, group, sequence_parallel=sequence_parallel, dtype=dtype)
        self.plan = plan
        self._norms = update_norm, post_norm  # in a tuple: not children
        options: Any = {"sequence_parallel": sequence_parallel, "dtype": dtype}
        self.gate = Gate(config, hidden, group, **options) if config.gate != "none" else None
        self.shortcut = None
        if config.shortcut != "identity" and shortcut is None:
            self.shortcut = Shortcut(config, hidden, group, **options)
        self._in_use = (shortcut or self.shortcut,)
        self.channels = config.skip_channels
        self.keep = keep

    @property
    def update_norm(self) -> RMSNorm | None:
        return self._norms[0]

    @property
    def post_norm(self) -> RMSNorm | None:
        return self._norms[1]

    @property
    def shortcut_in_use(self) -> Shortcut | None:
        """Its own, or the model's."""
        return self._in_use[0]

    @property
    def update_scale_now(self) -> float:
        return self.plan.update_scale if self.training else self.plan.update_scale * self.keep

    @functools.cached_property
    def is_static(self) -> bool:
        """Whether an executor can carry it out: nothing but constants and norms."""
        return not any(True for _ in self.parameters()) and self.shortcut_in_use is None and self.channels is None

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether it is `x + u`, always."""
        return self.is_static and self.plan.is_plain and self.keep == 1.0

    @property
    def join(self) -> Join:
        """What an executor is asked now, for a static connection."""
        return self._join(self.update_scale_now)

    @property
    def joins(self) -> tuple[Join, Join]:
        """In training and at inference."""
        return self._join(self.plan.update_scale), self._join(self.plan.update_scale * self.keep)

    def _join(self, update_scale: float) -> Join:
        return Join(None if self.update_norm is None else self.update_norm.spec, update_scale, self.plan.skip_scale)

    @property
    def carries_skip(self) -> bool:
        """Whether the skip is a part of the sum, so that `write` needs the residual."""
        shortcut = self.shortcut_in_use
        return shortcut is not None and shortcut.is_sharded

    def write(self, residual: Tensor, update: Partial) -> Partial:
        """What is owed once this update is written: with the projected skip in it, where that is part of the sum."""
        assert self.shortcut_in_use is not None
        skip = _scaled(self.shortcut_in_use.summand(residual), self.plan.skip_scale)
        return _scaled(update, self.update_scale_now) + skip

    def combine(
        self, residual: Tensor | None, update: Tensor, stream_dtype: torch.dtype, round_update: torch.dtype | None
    ) -> Tensor:
        """The new stream value, before a post-norm. residual: in the stream's layout and dtype, None where the stream starts. update:
        complete, wide, same layout. round_update: as in AddNormSpec.
        """
        wide = update.dtype if residual is None else torch.promote_types(widen(residual).dtype, update.dtype)
        u = update if round_update is None else widen(update.to(round_update))
        u = u.to(wide)
        if self.update_norm is not None:
            u = norm(u, self.update_norm.weight, self.update_norm.bias, self.update_norm.spec, wide)
            u = u if round_update is None else widen(u.to(round_update)).to(wide)
        if self.carries_skip:
            return u.to(stream_dtype)  # scaled and with the skip in it, by `write`
        if self.update_scale_now != 1.0:
            u = u * self.update_scale_now
        parameters = self._parameters
        if "update_scale" in parameters:
            u = u * self.update_scale.to(wide)
        if residual is None:
            return u.to(stream_dtype)
        x = residual.to(wide)
        skip = x if self.shortcut_in_use is None else self.shortcut_in_use(x)
        if self.plan.skip_scale != 1.0:
            skip = skip * self.plan.skip_scale
        if "skip_scale" in parameters:
            skip = skip * self.skip_scale.to(wide)
        if self.channels is not None:
            skip = skip * (torch.arange(skip.shape[-1], device=skip.device) < self.channels)
        if self.gate is not None:
            carry, transform = self.gate(x)
            skip, u = skip * carry, u * transform
        return (skip + u).to(stream_dtype)


def _scaled(partial: Partial, scale: float) -> Partial:
    """The partial sum of the scaled value: a constant may be applied to each summand."""
    if scale == 1.0:
        return partial
    bias = None if partial.bias is None else widen(partial.bias) * scale
    return Partial(widen(partial.value) * scale, partial.group, partial.source, bias)


def joins_of(connections: Iterable[Connection]) -> list[Join]:
    """What an executor may be asked for the updates of these, each once."""
    return list(dict.fromkeys(join for each in connections if each.is_static for join in each.joins))
