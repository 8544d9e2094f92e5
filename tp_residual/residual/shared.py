"""The boundary over a shared memory segment: reduce, add and norm in one C call (`kernels/csrc/shared.cpp`), bitwise the contract."""

from ctypes import addressof

import torch
from torch import Tensor

from tp_residual.errors import CollectiveError, LayoutError
from tp_residual.kernels.cpu import RowSpec, row_spec
from tp_residual.kernels.recording import Collective, Recording, active
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.shared import DTYPES, ONE_SHOT, SCATTER, SCATTER_GATHER, TWO_SHOT, Exchange, SharedTransport
from tp_residual.parallel.splits import Split
from tp_residual.parallel.transport import Transport
from tp_residual.residual.request import BoundaryRequest, Executor

Dtypes = tuple[
    torch.dtype | None, ...
]  # of residual, partial, bias, weight, norm bias, and of the update norm's weight and bias

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class SharedExecutor:
    """For groups whose transport is a SharedTransport, in fp32 arithmetic.

    Tensor parallel: for few bytes each rank adds all summands and finishes every row itself; for many it does so for its share of each
    piece, and the others copy its rows. Sequence parallel: each rank adds and finishes its tokens, and the normed rows are gathered.
    Summands are always added in rank order, so all of this gives the same bits.

    otherwise: who answers what needs no exchange (nothing owed), and rows that do not fit into a slot of the segment.
    """

    name = "shared"
    ordered = True

    def __init__(self, otherwise: Executor) -> None:
        self.otherwise = otherwise

    def supports(self, request: BoundaryRequest, group: TensorParallelGroup) -> str | None:
        if not isinstance(group.transport, SharedTransport):
            return "its ranks share no memory segment"
        for what, dtype in (("stream", request.stream_dtype), ("output", request.output_dtype)):
            if dtype not in FLOATS:
                return f"it computes in float32, and the {what} is {str(dtype).removeprefix('torch.')}"
        return None

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
        transport = group.transport
        assert isinstance(transport, SharedTransport), "supports() has been asked"
        update_norm = update_weight, update_norm_bias
        if partial is None:
            return self.otherwise.run(request, group, tag, tokens, residual, partial, bias, weight, norm_bias)
        try:
            turn = transport.turn.pop()
        except IndexError:
            raise CollectiveError(
                f"rank {group.rank} of {group.size} entered the boundary tag={tag!r} while another thread is {group.record}; "
                "two threads would interleave differently on each rank: give each its own group"
            ) from None
        try:
            plan = transport.plans.get(id(request))
            if plan is None or not plan.is_for(
                request, tokens, residual, partial, bias, weight, norm_bias, update_norm
            ):
                plan = _plan(transport, request, tokens, residual, partial, bias, weight, norm_bias, update_norm)
            if plan is None:
                operands = residual, partial, bias, weight, norm_bias, *update_norm
                return self.otherwise.run(request, group, tag, tokens, *operands)
            return plan.run(group, tag, residual, partial, bias, weight, norm_bias, update_norm)
        finally:
            transport.turn.append(turn)


def _plan(
    transport: SharedTransport,
    request: BoundaryRequest,
    tokens: Split,
    residual: Tensor | None,
    partial: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    update_norm: tuple[Tensor | None, Tensor | None],
) -> "_Plan | None":
    """The plan for such operands, found again by the request itself at the next call; None where the segment cannot serve them.

    Raises LayoutError for shapes that do not belong together: the C call trusts them.
    """
    hidden, local_tokens = partial.shape[-1], tokens.size(transport.rank)
    for name, operand, shape in (
        ("partial", partial, (tokens.total, hidden)),
        ("residual", residual, (local_tokens, hidden)),
        ("bias", bias, (hidden,)),
        ("weight", weight, (hidden,)),
        ("norm bias", norm_bias, (hidden,)),
        ("update norm weight", update_norm[0], (hidden,)),
        ("update norm bias", update_norm[1], (hidden,)),
    ):
        if operand is not None and operand.shape != shape:
            raise LayoutError(
                f"a boundary of {tokens.total} tokens, {local_tokens} of them on rank {transport.rank}, and hidden size {hidden} takes a "
                f"{name} of shape {list(shape)}, and got {list(operand.shape)}"
            )
    dtypes = tuple(
        None if operand is None else operand.dtype
        for operand in (residual, partial, bias, weight, norm_bias, *update_norm)
    )
    key = request, hidden, dtypes
    plan = transport.plans.get(key)
    if plan is None:
        if not _is_served(transport, request, hidden, dtypes):
            return None
        plan = transport.plans[key] = _Plan(transport, request, hidden, dtypes, (bias, weight, norm_bias, *update_norm))
    plan.prepare(tokens)
    if plan.request is request:
        transport.plans[id(request)] = plan
    return plan


def _is_served(transport: SharedTransport, request: BoundaryRequest, hidden: int, dtypes: Dtypes) -> bool:
    known = all(dtype is None or dtype in FLOATS for dtype in dtypes)
    return known and _slot_row(transport, request, hidden, dtypes[1]) <= transport.slot_bytes


def _slot_row(transport: SharedTransport, request: BoundaryRequest, hidden: int, partial: torch.dtype | None) -> int:
    """Bytes of a slot that hold a row for each rank and the results of one: the most that any form needs at least."""
    assert partial is not None
    return hidden * (transport.size * partial.itemsize + request.stream_dtype.itemsize + request.output_dtype.itemsize)


class _Plan:
    """One request for operands of given dtypes and hidden size: everything that a call need not work out again."""

    def __init__(
        self,
        transport: SharedTransport,
        request: BoundaryRequest,
        hidden: int,
        dtypes: Dtypes,
        parameters: tuple[Tensor | None, ...],
    ) -> None:
        self.transport, self.request, self.hidden, self.dtypes = transport, request, hidden, dtypes
        residual, partial = dtypes[:2]
        assert partial is not None
        self.sequence_parallel = request.sequence_parallel
        self.gathers = request.sequence_parallel and request.result == "gathered"
        spec = request.add_norm_spec()
        names = "update_bias", "weight", "norm_bias", "update_weight", "update_norm_bias"
        given = {n: None if x is None else x.contiguous() for n, x in zip(names, parameters, strict=True)}
        # a copy of its own, into which each call writes its parameters' addresses
        self.spec = RowSpec.from_buffer_copy(row_spec(spec, hidden, **given))
        self.has_update_norm = request.update_norm is not None
        self.update, self.scratch = torch.empty(hidden), torch.empty(transport.scratch_floats(hidden))
        self.exchange = Exchange(
            spec=addressof(self.spec),
            update=self.update.data_ptr(),
            scratch=self.scratch.data_ptr(),
            width=hidden,
            piece_bytes=max(transport.piece_bytes, _slot_row(transport, request, hidden, partial)),
            dtype=DTYPES[partial],
            residual_dtype=DTYPES[residual or request.stream_dtype],
        )
        self.at = addressof(self.exchange)
        # views of the parts, since each look-up of one makes an object
        self.input, self.residual = self.exchange.input, self.exchange.residual
        self.new_residual, self.normed = self.exchange.out[0], self.exchange.out[1]
        self.input.row, self.residual.row = (
            hidden * partial.itemsize,
            hidden * (residual or request.stream_dtype).itemsize,
        )
        self.new_residual.row, self.normed.row = (
            hidden * request.stream_dtype.itemsize,
            hidden * request.output_dtype.itemsize,
        )
        self.status = 0

    def prepare(self, tokens: Split) -> None:
        """What depends on the number of tokens."""
        request, transport, exchange = self.request, self.transport, self.exchange
        total, first, local = tokens.total, tokens.ranges[transport.rank][0], tokens.size(transport.rank)
        if request.sequence_parallel:
            form = SCATTER_GATHER if self.gathers else SCATTER
            chunk = max(tokens.sizes)
            # the record and the counters see the shapes that cross: padded to equal chunks
            self.scattered = torch.empty((chunk * transport.size, self.hidden), dtype=self.dtypes[1], device="meta")
            self.gathered = torch.empty((1, chunk, self.hidden), dtype=request.output_dtype, device="meta")
        else:
            small = total * self.input.row * (transport.size - 1) <= transport.one_shot_bytes
            form = ONE_SHOT if small else TWO_SHOT
        self.residual.first = self.new_residual.first = first
        self.normed.first = 0 if self.gathers else first
        exchange.form, exchange.rows = form, total
        exchange.signature = transport.signature(form, True, exchange.dtype, self.input.row, total)
        self.tokens, self.partial_size, self.residual_size = total, total * self.hidden, local * self.hidden
        # one element each, expanded: empty_like() of them is the quickest way to a new tensor
        self.new_residual_like = torch.empty(1, dtype=request.stream_dtype).expand(local, self.hidden)
        rows = {"raw": 0, "shard": local, "gathered": total}[request.result]
        normed_shape = (0,) if request.result == "raw" else (rows, self.hidden)
        self.normed_like = torch.empty(1, dtype=request.output_dtype).expand(normed_shape)

    def is_for(
        self,
        request: BoundaryRequest,
        tokens: Split,
        residual: Tensor | None,
        partial: Tensor,
        bias: Tensor | None,
        weight: Tensor | None,
        norm_bias: Tensor | None,
        update_norm: tuple[Tensor | None, Tensor | None],
    ) -> bool:
        """Whether the C call may trust this plan: sizes and dtypes. Written out, since it is part of every call's microseconds."""
        hidden, dtypes = self.hidden, self.dtypes
        return (
            self.request is request
            and self.tokens == tokens.total
            and partial.numel() == self.partial_size
            and partial.dtype is dtypes[1]
            and (
                dtypes[0] is None
                if residual is None
                else residual.dtype is dtypes[0] and residual.numel() == self.residual_size
            )
            and (dtypes[3] is None if weight is None else weight.dtype is dtypes[3] and weight.numel() == hidden)
            and (dtypes[2] is None if bias is None else bias.dtype is dtypes[2] and bias.numel() == hidden)
            and (
                dtypes[4] is None if norm_bias is None else norm_bias.dtype is dtypes[4] and norm_bias.numel() == hidden
            )
            and (not self.has_update_norm or self._has_these(update_norm))
        )

    def _has_these(self, update_norm: tuple[Tensor | None, Tensor | None]) -> bool:
        return all(
            dtype is None if x is None else x.dtype is dtype and x.numel() == self.hidden
            for x, dtype in zip(update_norm, self.dtypes[5:], strict=True)
        )

    def run(
        self,
        group: TensorParallelGroup,
        tag: str,
        residual: Tensor | None,
        partial: Tensor,
        bias: Tensor | None,
        weight: Tensor | None,
        norm_bias: Tensor | None,
        update_norm: tuple[Tensor | None, Tensor | None],
    ) -> tuple[Tensor, Tensor]:
        spec = self.spec
        new_residual, normed = torch.empty_like(self.new_residual_like), torch.empty_like(self.normed_like)
        self.new_residual.data = new_residual.data_ptr()
        if residual is not None:
            residual = residual.contiguous()
            self.residual.data = residual.data_ptr()
        if weight is not None:
            weight = weight.contiguous()
            spec.weight, self.normed.data = weight.data_ptr(), normed.data_ptr()
            if norm_bias is not None:
                norm_bias = norm_bias.contiguous()
                spec.norm_bias = norm_bias.data_ptr()
        if bias is not None:
            bias = bias.contiguous()
            spec.update_bias = bias.data_ptr()
        if self.has_update_norm:
            update_norm = tuple(None if x is None else x.contiguous() for x in update_norm)  # type: ignore[assignment] # still two
            spec.update_weight, spec.update_norm_bias = (None if x is None else x.data_ptr() for x in update_norm)
        partial = partial.contiguous()
        self.input.data = partial.data_ptr()
        if (recording := active()) is not None:
            operands = residual, partial, bias, weight, norm_bias, *update_norm, new_residual, normed
            self._note(recording, tag, partial, operands)
        if not self.sequence_parallel:
            group.run("all_reduce", tag, partial, self._reduce)
            return new_residual, normed
        group.run("reduce_scatter", tag, self.scattered, self._scatter)
        if self.gathers:
            group.run("all_gather", tag, self.gathered, self._gather)
        return new_residual, normed

    def _note(self, recording: Recording, tag: str, partial: Tensor, operands: tuple[Tensor | None, ...]) -> None:
        """The exchange that is about to be made, with addresses of its own: this plan's next call writes others into its structures."""
        spec = RowSpec.from_buffer_copy(self.spec)
        exchange = Exchange.from_buffer_copy(self.exchange)
        exchange.spec = addressof(spec)
        if self.sequence_parallel:
            collectives = [Collective("reduce_scatter", tag, self.scattered)]
            if self.gathers:
                collectives.append(Collective("all_gather", tag, self.gathered))
        else:
            collectives = [
                Collective("all_reduce", tag, torch.empty(partial.shape, dtype=partial.dtype, device="meta"))
            ]
        recording.noted_exchanges.add(self.at)
        recording.add_exchange(exchange, self.transport.channel_at, tuple(collectives), spec, self, operands)

    def _reduce(self, _: Transport, x: Tensor) -> Tensor:
        self.transport.run(self.at)
        return x

    def _scatter(self, _: Transport, shape: Tensor) -> Tensor:
        """All of it; or, when a peer is late, up to the wait for its normed rows, which is the gather's."""
        self.status = self.transport.run(self.at, stop_before_gather=True)
        return shape

    def _gather(self, _: Transport, shape: Tensor) -> Tensor:
        if self.status:
            self.status = self.transport.run(self.at)
        return shape
