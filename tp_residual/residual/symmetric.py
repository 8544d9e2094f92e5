"""The boundary as one kernel over peers' memory, for CUDA ranks with access to each other."""

from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tp_residual.kernels.contract import add_norm
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.splits import Split
from tp_residual.parallel.transport import Transport
from tp_residual.residual.request import BoundaryRequest

if TYPE_CHECKING:
    from tp_residual.parallel.symmetric import SymmetricTransport

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class SymmetricExecutor:
    """Collective, residual add and norm in one launch, bitwise `reference`. A gradient is made of the group's own moves, as for all.

    Counted as one all-reduce, or as one reduce-scatter and, if the result is gathered, one all-gather. The first question about a group
    maps its peers' memory, so all ranks ask together. open_transport: how; a transport or the reason why there is none, alike on all
    ranks.
    """

    name = "symmetric"
    ordered = True

    def __init__(
        self, open_transport: "Callable[[TensorParallelGroup], SymmetricTransport | str] | None" = None
    ) -> None:
        self._open = open_transport or _open
        self._transports: WeakKeyDictionary[TensorParallelGroup, SymmetricTransport | str] = WeakKeyDictionary()

    def supports(self, request: BoundaryRequest, group: TensorParallelGroup) -> str | None:
        if group.size == 1:
            return "a group of one has no peers"
        for dtype in (request.stream_dtype, request.output_dtype):
            if dtype not in _DTYPES:
                return f"{str(dtype).removeprefix('torch.')} is not one of float32, bfloat16, float16"
        if request.update_norm is not None or request.update_scale != 1.0 or request.skip_scale != 1.0:
            return "its kernel adds the sum as it is, and this residual connection scales or normalises it first"
        if group not in self._transports:
            self._transports[group] = self._open(group)
        transport = self._transports[group]
        return transport if isinstance(transport, str) else None

    def transport(self, group: TensorParallelGroup) -> "SymmetricTransport":
        """The wire below, of a group that is supported: for collectives alone, and `check()` after replays of a CUDA graph."""
        transport = self._transports[group]
        assert not isinstance(transport, str), transport
        return transport

    def run(
        self,
        request: BoundaryRequest,
        group: TensorParallelGroup,
        tag: str,
        tokens: Split,
        residual: Tensor | None,
        partial: Tensor | None,
        bias: Tensor | None,
        weight: Tensor | None,
        norm_bias: Tensor | None,
        update_weight: Tensor | None = None,
        update_norm_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        wire = self.transport(group)
        sharded, gather = request.sequence_parallel, request.result == "gathered"
        spec = request.add_norm_spec()
        normed: Tensor | None = None
        if partial is None:
            new_residual, normed = add_norm(spec, residual, None, weight=weight, norm_bias=norm_bias)
            if normed is not None and sharded and gather:
                normed = _gathered(group, wire, tag, normed, tokens)
        else:

            def fused(_: Transport, x: Tensor) -> Tensor:
                nonlocal normed
                stream, normed = wire.reduce_add_norm(
                    spec,
                    x,
                    local_tokens=tokens.size(group.rank) if sharded else None,
                    gather=gather,
                    residual=None if residual is None else residual.contiguous(),
                    bias=bias,
                    weight=weight,
                    norm_bias=norm_bias,
                )
                return stream

            new_residual = group.run("reduce_scatter" if sharded else "all_reduce", tag, partial, fused)
            if normed is not None and sharded and gather:
                chunk = max(tokens.sizes) * normed.shape[-1] * normed.element_size()
                group.counters.add(tag, "all_gather", chunk)
        if normed is None:
            normed = new_residual.new_empty(0, dtype=request.output_dtype)
        return new_residual, normed


def _gathered(group: TensorParallelGroup, wire: Transport, tag: str, shard: Tensor, tokens: Split) -> Tensor:
    padded = torch.nn.functional.pad(shard, (0, 0, 0, max(tokens.sizes) - shard.shape[0]))
    return group.run("all_gather", tag, padded, lambda _, x: wire.all_gather(x))[: tokens.total]


def _open(group: TensorParallelGroup) -> "SymmetricTransport | str":
    if group.device.type != "cuda":
        return f"the ranks' device is {group.device.type}, not CUDA"
    # not above: Triton takes half a second to import, and CPU ranks never need it
    from tp_residual.parallel.symmetric import open_symmetric

    return open_symmetric(group)
