"""What a model did at every boundary and in every sublayer, made whole on every rank in fp64. The run is not changed by being watched."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tp_residual.kernels.contract import widen
from tp_residual.model.attention_backend import NoCache, TokenBatch
from tp_residual.model.decoder import CausalLM, DecoderLayer
from tp_residual.parallel.blocks import ParameterBlock, parameter_blocks
from tp_residual.parallel.collectives import gathered, summed
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.partial import Partial
from tp_residual.residual.boundary import Boundary, Site


@dataclass
class Seen:
    """One boundary on this rank, as its tap saw it. residual and read keep their gradients when there is a backward pass."""

    site: Site
    partial: Tensor | None
    bias: Tensor | None
    residual: Tensor
    read: Tensor | None

    @property
    def one_operator(self) -> bool:
        """Whether residual and read are results of one operator, so that the residual's own gradient lacks what came through the read."""
        made = self.residual.grad_fn
        return (
            self.read is not None and self.read is not self.residual and made is not None and made is self.read.grad_fn
        )


@dataclass
class Observed:
    """boundaries in order; inputs and outputs of sublayer modules by (layer, module), the logits. All of this rank."""

    model: CausalLM
    boundary: Boundary
    tokens: int
    boundaries: list[Seen] = field(default_factory=list)
    inputs: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    outputs: dict[tuple[int, str], Partial] = field(default_factory=dict)
    local_logits: Tensor | None = None
    cotangent: Tensor | None = None  # of all logits, whole, fp64; None without a backward pass

    # -- making it whole

    def stream(self, x: Tensor) -> Tensor:
        """A value in the stream's layout, all tokens, fp64."""
        group = self.model.group
        if self.boundary.sequence_parallel and group.size > 1:
            x = gathered(group, x.detach().contiguous(), "doctor.stream", 0, self.boundary.token_split(self.tokens))
        return x.detach().double()

    def sum(self, value: Tensor) -> Tensor:
        """Of all ranks' summands."""
        group = self.model.group
        wide = value.detach().double()
        return wide if group.size == 1 else summed(group, wide, "doctor.sum", True)

    def written(self, layer: int, modules: Sequence[str]) -> tuple[Tensor, Tensor, Tensor | None]:
        """What a sublayer's modules wrote: (the completed update with its biases, this rank's summand without, the biases)."""
        outputs = [self.outputs[layer, name] for name in modules if (layer, name) in self.outputs]
        if not outputs:
            config, device = self.model.config, self.model.group.device
            nothing = torch.zeros(self.tokens, config.hidden_size, dtype=torch.float64, device=device)
            return nothing, nothing, None
        own = torch.stack([output.value.detach().double() for output in outputs]).sum(0)
        biases = [widen(output.bias.detach()).double() for output in outputs if output.bias is not None]
        bias = sum(biases[1:], biases[0]) if biases else None
        total = self.sum(own)
        return (total if bias is None else total + bias), own, bias

    def update(self, partial: Tensor, bias: Tensor | None) -> Tensor:
        """The completed update, its bias added once."""
        total = self.sum(partial)
        return total if bias is None else total + widen(bias.detach()).double()


def observe(model: CausalLM, sequences: Sequence[Sequence[int]], *, gradients: bool, seed: int = 0) -> Observed:
    """One forward pass; with gradients, also the backward of a fixed random cotangent of the logits. The model is left in eval mode."""
    model.eval()
    batch = TokenBatch.prefill([list(ids) for ids in sequences], model.group.device)
    tokens = batch.token_ids.shape[0]
    seen = Observed(model, model.boundary_for(tokens), tokens)

    def tap(site: Site, partial: Partial | None, residual: Tensor, read: Tensor | None) -> None:
        value = None if partial is None else partial.value
        if gradients:
            for tensor in (value, residual, read):
                if tensor is not None and tensor.requires_grad and not tensor.is_leaf:
                    tensor.retain_grad()
        seen.boundaries.append(Seen(site, value, None if partial is None else partial.bias, residual, read))

    hooks = []
    for number, layer in enumerate(model.model.layers):
        assert isinstance(layer, DecoderLayer)
        for sublayer in layer.sublayers:
            for name in sublayer.modules:

                def hook(
                    _: nn.Module, arguments: tuple[Any, ...], output: Partial, key: tuple[int, str] = (number, name)
                ) -> None:
                    seen.inputs[key], seen.outputs[key] = arguments[0], output
                    if output.value.requires_grad:
                        output.value.retain_grad()

                hooks.append(layer.get_submodule(name).register_forward_hook(hook))
    try:
        with torch.set_grad_enabled(gradients):
            local = model(batch, NoCache(), taps=(tap,)).local_logits
            seen.local_logits = local
            if gradients:
                generator = torch.Generator().manual_seed(seed)
                cotangent = torch.randn(tokens, model.config.vocab_size, generator=generator, dtype=torch.float64)
                seen.cotangent = cotangent.to(local.device)
                start, stop = model.lm_head.split.ranges[model.group.rank]
                local.backward(cotangent[:, start:stop].to(local))
    finally:
        for handle in hooks:
            handle.remove()
    return seen


class WholeWeights:
    """Whole parameters by checkpoint name, fp64, each gathered once from the blocks of all ranks. Every rank asks for the same ones."""

    def __init__(self, model: nn.Module, group: TensorParallelGroup) -> None:
        self.group = group
        self.blocks: dict[str, list[ParameterBlock]] = {}
        for block in parameter_blocks(model):
            self.blocks.setdefault(block.name, []).append(block)
        self._kept: dict[str, Tensor] = {}

    def __call__(self, name: str) -> Tensor:
        if name not in self._kept:
            self._kept[name] = self.gather(name)
        return self._kept[name]

    def forget(self) -> None:
        self._kept.clear()

    def gather(self, name: str, *, gradient: bool = False) -> Tensor:
        """The parameter, or its gradient, from each block's owner."""
        blocks = self.blocks[name]
        whole = torch.zeros(blocks[0].global_shape, dtype=torch.float64, device=self.group.device)
        for block in blocks:
            if block.owner == self.group.rank:
                tensor = block.parameter.grad if gradient else block.parameter
                if tensor is not None:
                    block.of_full(whole).copy_(block.of(tensor.detach()))
        return whole if self.group.size == 1 else summed(self.group, whole, "doctor.weights", True)


def differing_ranks(group: TensorParallelGroup, tensors: Sequence[Tensor]) -> list[list[int]]:
    """For each tensor that all ranks should hold alike: the ranks whose bits are not rank 0's."""
    if group.size == 1:
        return [[] for _ in tensors]
    sums = [zlib.crc32(t.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()) for t in tensors]
    own = torch.tensor(sums, dtype=torch.float64, device=group.device)[None]
    everybody = group.run("all_gather", "doctor.replicas", own, lambda transport, t: transport.all_gather(t)).cpu()
    return [(everybody[:, i] != everybody[0, i]).nonzero()[:, 0].tolist() for i in range(len(tensors))]
