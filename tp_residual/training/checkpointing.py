"""Less memory for the backward pass: whole layers computed again from the residual, or only what layers read of it.

`checkpoint_layers` keeps the residual between layers and nothing else. A layer hands on a stream that owes an update, and the summand of
that is as large as the whole residual on every rank: kept, it would double what is held, and under sequence parallelism undo it. So the
sum is completed at the layer's border (the same collective, earlier), and what lies between layers is the residual, under sequence
parallelism this rank's tokens of it. The backward pass repeats a layer's norms, gathers and the one sum inside it; the sum at the border
is outside and is not repeated.

`RebuiltReads` keeps everything but the normed values: no matrix product is repeated, only norms and, under sequence parallelism, gathers.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tp_residual.errors import UserError
from tp_residual.kernels.contract import norm
from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.collectives import gathered
from tp_residual.parallel.partial import Partial
from tp_residual.residual.boundary import Boundary, Site
from tp_residual.residual.norms import RMSNorm
from tp_residual.residual.stream import Stream


class CheckpointedLayers:
    """The layers that are checkpointed now."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers = layers

    def remove(self) -> None:
        """They are plain again."""
        for layer in self.layers:
            delattr(layer, "forward")
        self.layers = []


def checkpoint_layers(layers: nn.ModuleList, *, every: int = 1) -> CheckpointedLayers:
    """Checkpoint the first and then each `every`-th of a decoder's layers (`model.model.layers`), which map a Stream and more to a Stream.

    Values and gradients keep their bits, except where residual and update have different 16-bit dtypes (one more rounding). Names of
    modules and parameters stay. What a layer does must follow from its arguments, as a DropoutStream's masks do. Taps see a layer's
    reads, not the sum completed at its border. What a ladder's layer is owed is kept as it is. Raises UserError for layers that are
    checkpointed already.
    """
    if not isinstance(every, int) or every < 1:
        raise UserError(f"every={every} must be an integer of at least 1")
    chosen = list(layers)[::every]
    if any("forward" in vars(layer) for layer in chosen):
        raise UserError("these layers are checkpointed already; remove() first")
    for layer in chosen:
        # a ladder's layer may not see the newest update yet, whoever wrote it
        lags = any(sublayer.lag for sublayer in getattr(layer, "sublayers", ()))
        setattr(layer, "forward", _checkpointed(layer.forward, completes=not lags))  # noqa: B010 - on the instance, over its class's
    return CheckpointedLayers(chosen)


def _checkpointed(forward: Callable[..., Stream], *, completes: bool) -> Callable[..., Stream]:
    """completes: what the stream owes is completed first, without its taps."""

    def checkpointed(stream: Stream, *arguments: Any) -> Stream:
        given = replace(replace(stream, taps=()).complete(), taps=stream.taps) if completes and stream.owed else stream

        def again() -> Stream:
            return forward(replace(given, _used=[]), *arguments)

        return checkpoint(again, use_reentrant=False, preserve_rng_state=False)

    return checkpointed


@dataclass(frozen=True, eq=False)
class _Read:
    """How to make a read value again: the normed residual, gathered if the stream is token-sharded."""

    value: weakref.ref[Tensor]
    residual: Tensor
    norm: RMSNorm | None
    boundary: Boundary
    tokens: int
    dtype: torch.dtype
    tag: str

    @torch.no_grad()
    def again(self) -> Tensor:
        x = self.residual.to(self.dtype)
        if self.norm is not None:
            x = norm(self.residual, self.norm.weight, self.norm.bias, self.norm.spec, self.dtype)
        group = self.boundary.group
        if self.boundary.sequence_parallel and group.size > 1:
            x = gathered(group, x, f"{self.tag}.again", 0, self.boundary.token_split(self.tokens))
        return x


class RebuiltReads:
    """A context for the forward pass, and its tap: what layers read of the stream is not kept for the backward pass but made again.

        with RebuiltReads(model) as reads:
            out = model(batch, backend, taps=(reads,))

    Saves one `[tokens, hidden]` a boundary on every rank, at the cost of its norm, and of one all-gather under sequence parallelism. The
    residual, which the boundary keeps anyway, is what it is made from; to the same bits, so gradients keep theirs. The backward pass may
    run after the context has ended.
    """

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.norms = {module.name: module for module in model.modules() if isinstance(module, RMSNorm)}
        self._latest: _Read | None = None

    def __enter__(self) -> "RebuiltReads":
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        self._latest = None

    def __call__(self, site: Site, _partial: Partial | None, residual: Tensor, normed: Tensor | None) -> None:
        if normed is None:
            return
        tokens = normed.shape[0]
        self._latest = _Read(
            weakref.ref(normed),
            residual.detach(),
            self.norms[site.norm] if site.norm else None,
            self.model.boundary_for(tokens),
            tokens,
            normed.dtype,
            site.norm or "read",
        )

    def _pack(self, tensor: Tensor) -> Tensor | _Read:
        read = self._latest
        if read is None or (value := read.value()) is None:  # dead, and its memory may be another's
            return tensor
        same = tensor.data_ptr() == value.data_ptr() and tensor.shape == value.shape
        return read if same and tensor.stride() == value.stride() and tensor.dtype == value.dtype else tensor

    @staticmethod
    def _unpack(kept: Tensor | _Read) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept.again()
