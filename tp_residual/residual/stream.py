"""The residual stream: an immutable value with two verbs.

    x, stream = stream.read(norm)        complete what is owed, add it, normalise: the input of a column-parallel linear
    stream    = stream.write(update)     record the update, a partial sum; nothing is communicated yet

A layer maps stream to stream and says nothing about collectives. Checkpointing, pipeline cuts and compilers see only this value.
How an update joins the residual is its `Connection`, given to `write`; the read that completes the update carries it out.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from jaxtyping import Float
from torch import Tensor

from tp_residual.errors import LayoutError
from tp_residual.kernels.add_norm import add_norm, compute
from tp_residual.kernels.add_norm_operands import Operands
from tp_residual.kernels.contract import AddNormSpec, widen
from tp_residual.parallel.collectives import (
    invariant_to_column_input,
    partial_to_invariant,
    partial_to_token_shard,
    token_shard_to_column_input,
    token_shard_to_invariant,
)
from tp_residual.parallel.partial import Partial
from tp_residual.residual.boundary import (
    Boundary,
    Result,
    Site,
    Tap,
    is_observed,
    run_boundary,
    run_joined,
)
from tp_residual.residual.connection import Connection
from tp_residual.residual.norms import RMSNorm
from tp_residual.residual.request import PLAIN


class Layout(StrEnum):
    """How the residual lies on the ranks between boundaries."""

    REPLICATED = "replicated"
    TOKEN_SHARDED = "token_sharded"


@dataclass(frozen=True, eq=False)
class Owed:
    """One update that is written and not yet completed. connection: how it joins the residual; None: it is added.

    apart: a later write does not join its sum, since a read in between may leave it out. arriving: waits for its sum, if it was started.
    """

    partial: Partial
    connection: Connection | None = None
    apart: bool = False
    arriving: Callable[[], Tensor] | None = None

    @property
    def is_plain(self) -> bool:
        return self.connection is None or self.connection.is_plain


@dataclass(frozen=True, eq=False)
class Stream:
    """The residual `[tokens, hidden]` (this rank's tokens, when token-sharded) and the updates still owed to it, oldest first.

    tokens: of the whole stream. Each value is used once, by `read`, `write` or `complete`; a second use raises, since it would add
    the next update to a stale residual. Recomputation in a backward pass uses it again, legally.
    """

    boundary: Boundary
    tokens: int
    residual: Tensor | None
    owed: tuple[Owed, ...] = ()
    taps: tuple[Tap, ...] = ()
    _used: list[str] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        local = self.boundary.token_split(self.tokens).size(self.boundary.group.rank)
        if self.residual is not None and self.residual.shape[0] != local:
            raise LayoutError(
                f"a {self.layout} stream of {self.tokens} tokens holds {local} of them on rank {self.boundary.group.rank} of "
                f"{self.boundary.group.size}, and this residual has {self.residual.shape[0]}: it has another layout"
            )
        if self.residual is not None and self.residual.dtype != self.boundary.stream_dtype:
            raise LayoutError(f"residual dtype {self.residual.dtype} is not the stream's {self.boundary.stream_dtype}")

    @classmethod
    def start(
        cls, embedded: Partial, boundary: Boundary, taps: tuple[Tap, ...] = (), connection: Connection | None = None
    ) -> "Stream":
        """A stream that owes the embedding: the first read completes it, so embedding, add and norm are one boundary as well."""
        _check_partial(embedded, boundary, "Stream.start")
        return cls(boundary, embedded.shape[0], None, (Owed(embedded, connection),), taps)

    @classmethod
    def resume(
        cls, residual: Tensor, tokens: int, layout: Layout, boundary: Boundary, taps: tuple[Tap, ...] = ()
    ) -> "Stream":
        """A stream received at a pipeline cut. layout: as the sender had it; it is never deduced from the shape."""
        stream = cls(boundary, tokens, residual, (), taps)
        if layout is not stream.layout:
            raise LayoutError(f"the received residual is {layout}, this boundary keeps its stream {stream.layout}")
        return stream

    @property
    def layout(self) -> Layout:
        return Layout.TOKEN_SHARDED if self.boundary.sequence_parallel else Layout.REPLICATED

    def write(self, update: Partial, connection: Connection | None = None, *, apart: bool = False) -> "Stream":
        """Owe `update`, which is to join the residual by `connection`. Two plain writes without a read between them are one sum, so one
        collective, unless they are kept `apart`: then the sum is started now, where that is possible and nothing is differentiated.
        """
        _check_partial(update, self.boundary, "Stream.write")
        if update.shape[0] != self.tokens:
            raise LayoutError(f"{update.source} wrote {update.shape[0]} tokens to a stream of {self.tokens}")
        if self.residual is not None and (
            update.shape[-1] != self.residual.shape[-1] or update.value.device != self.residual.device
        ):
            raise LayoutError(
                f"{update.source} wrote {list(update.shape)} on {update.value.device} to a residual of {list(self.residual.shape)} on "
                f"{self.residual.device}; an update has the stream's hidden size and device"
            )
        self._use(f"write({update.source})")
        if connection is not None and connection.carries_skip:
            update = connection.write(self._complete_residual(update.source), update)
        arriving = None
        if apart and not is_observed(update.value):
            arriving = self.boundary.start_sum(self.tokens, update.value, update.source)
        new = Owed(update, connection, apart, arriving)
        if self.owed and self.owed[-1].is_plain and new.is_plain and not (self.owed[-1].apart or apart):
            return self._with(self.residual, (*self.owed[:-1], Owed(self.owed[-1].partial + update)))
        return self._with(self.residual, (*self.owed, new))

    def read(
        self, norm: RMSNorm | None, result: Result = "gathered", *, lag: int = 0
    ) -> tuple[Float[Tensor, "tokens hidden"], "Stream"]:
        """`(norm(residual + owed), the stream that owes nothing)`.

        The normed value is a column input (gathered), in the boundary's output dtype; with result="shard" it stays this rank's tokens.
        norm: None reads the new residual itself. lag: the newest so many updates are left out of what is read, and stay owed.
        """
        self._use("read()" if norm is None else f"read({norm.name})")
        # what the stream starts with is no update: nothing is read without it
        due = max(len(self.owed) - lag, int(self.residual is None))
        residual = self.residual
        for owed in self.owed[: due - 1] if due else ():
            residual, _ = self._join(residual, owed, None, "raw")
        last = self.owed[due - 1] if due else None
        residual, normed = self._join(residual, last, norm, result)
        return normed, self._with(residual, self.owed[due:])

    def complete(self) -> "Stream":
        """The stream that owes nothing, without a norm: for pipeline cuts and for looking at the residual."""
        self._use("complete()")
        residual = self.residual
        for owed in self.owed:
            residual, _ = self._join(residual, owed, None, "raw")
        return self._with(residual, ())

    def replaced(self, residual: Tensor) -> "Stream":
        """The stream with another residual, in its layout. Nothing may be owed: the update would be added to what it was not made for."""
        self._complete_residual("replaced()")
        self._use("replaced()")
        return self._with(residual, ())

    def replicated(self) -> Float[Tensor, "tokens hidden"]:
        """The residual of all tokens, in token order, on every rank (one all-gather when token-sharded). Nothing may be owed."""
        residual = self._complete_residual("replicated()")
        if not self.boundary.sequence_parallel:
            return residual
        split = self.boundary.token_split(self.tokens)
        return token_shard_to_invariant(residual, split, self.boundary.group, tag="stream.replicated")

    # -- inside

    def _join(
        self, residual: Tensor | None, owed: Owed | None, norm: RMSNorm | None, result: Result
    ) -> tuple[Tensor, Tensor]:
        """`(new residual, what is read of it)`: one boundary. Without a norm the residual itself is read, unless the result is raw."""
        connection = None if owed is None else owed.connection
        post = None if connection is None else connection.post_norm
        partial = None if owed is None else owed.partial
        if owed is not None and owed.arriving is not None:
            new, read = self._arrived(residual, owed, owed.arriving, norm, result)
        elif connection is None or connection.is_plain:
            new, read = self._plain(residual, partial, norm, result)
        elif (
            connection.is_static
            and not is_observed(residual, owed.partial.value if owed else None)
            and (post is None or self.boundary.stream_dtype == self.boundary.output_dtype)
        ):
            new, read = self._in_one_pass(residual, owed.partial, connection, norm, result)  # type: ignore[union-attr] # it has a connection
        else:
            new, read = self._composed(residual, owed.partial, connection, norm, result)  # type: ignore[union-attr]
        site = Site("" if partial is None else partial.source, "" if norm is None else norm.name)
        for tap in self.taps:
            tap(site, partial, new, None if result == "raw" else read)
        return new, read

    def _plain(
        self, residual: Tensor | None, partial: Partial | None, norm: RMSNorm | None, result: Result
    ) -> tuple[Tensor, Tensor]:
        if norm is not None:
            return run_boundary(
                self.boundary, self.tokens, residual, partial, norm.weight, norm.bias, norm.spec, result, norm.name
            )
        if partial is not None:
            residual, _ = run_boundary(
                self.boundary, self.tokens, residual, partial, None, None, None, "raw", "complete"
            )
        assert residual is not None, "a stream starts with an owed embedding"
        return residual, residual if result == "raw" else self._as_read(residual, result, "read")

    def _in_one_pass(
        self, residual: Tensor | None, partial: Partial, connection: Connection, norm: RMSNorm | None, result: Result
    ) -> tuple[Tensor, Tensor]:
        """By the executor: constants and norms, nothing to be differentiated."""
        update_norm, post = connection.update_norm, connection.post_norm
        parameters = (None, None) if update_norm is None else (update_norm.weight, update_norm.bias)
        first = norm if post is None else post
        of_first = (None, None, None) if first is None else (first.weight, first.bias, first.spec)
        asked: Result = "raw" if first is None else result
        if post is not None and (
            norm is not None or result != "gathered"
        ):  # then only the new residual is wanted of it
            asked = "shard" if self.boundary.sequence_parallel else "gathered"
        tag = "complete" if first is None else first.name
        new, read = run_joined(
            self.boundary, self.tokens, residual, partial, of_first, asked, tag, connection.join, parameters
        )
        if post is None:
            if norm is None and result != "raw":
                read = self._as_read(new, result, "read")
            return new, read
        new = read
        if self.boundary.sequence_parallel and asked == "gathered":
            new = read[slice(*self.boundary.token_split(self.tokens).ranges[self.boundary.group.rank])]
        return self._plain(new, None, norm, result) if norm is not None else (new, read)

    def _arrived(
        self,
        residual: Tensor | None,
        owed: Owed,
        arriving: Callable[[], Tensor],
        norm: RMSNorm | None,
        result: Result,
    ) -> tuple[Tensor, Tensor]:
        """A sum that was started: wait for it, then what is left is local."""
        boundary, connection, began = self.boundary, owed.connection, time.perf_counter()
        update = arriving()
        boundary.group.counters.boundary_s += time.perf_counter() - began
        if connection is not None and (not connection.is_static or connection.post_norm is not None):
            return self._composed(residual, owed.partial, connection, norm, result, update)
        join = PLAIN if connection is None else connection.join
        request = boundary.request(residual is not None, 1, None, "raw", join)
        update_norm = None if connection is None else connection.update_norm
        parameters = (None, None) if update_norm is None else (update_norm.weight, update_norm.bias)
        new, _ = compute(request.add_norm_spec(), Operands(residual, update, owed.partial.bias, *parameters))
        return self._plain(new, None, norm, result)

    def _composed(
        self,
        residual: Tensor | None,
        partial: Partial,
        connection: Connection,
        norm: RMSNorm | None,
        result: Result,
        update: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """By moves and differentiable arithmetic: whatever a connection may be, with gradients. update: the sum, if it is complete."""
        boundary, ordered = self.boundary, self.boundary.executor.ordered
        wide = Partial(widen(partial.value), partial.group, partial.source)
        tag = norm.name if norm is not None else "complete"
        if update is None and boundary.sequence_parallel:
            split = boundary.token_split(self.tokens)
            update = partial_to_token_shard(wide, split, tag=tag, ordered=ordered)
        elif update is None:
            update = partial_to_invariant(wide, tag=tag, ordered=ordered)
        if partial.bias is not None:
            update = update + widen(partial.bias)
        round_update = boundary.output_dtype if boundary.round_reduced else None
        new = connection.combine(residual, update, boundary.stream_dtype, round_update)
        if connection.post_norm is not None:
            new = self._normed(new, connection.post_norm, boundary.stream_dtype)
        if result == "raw":
            return new, new
        return new, self._as_read(new if norm is None else self._normed(new, norm, boundary.output_dtype), result, tag)

    def _normed(self, x: Tensor, norm: RMSNorm, dtype: torch.dtype) -> Tensor:
        _, normed = add_norm(AddNormSpec(x.dtype, dtype, norm.spec), x, None, weight=norm.weight, norm_bias=norm.bias)
        assert normed is not None
        return normed

    def _as_read(self, x: Tensor, result: Result, tag: str) -> Tensor:
        """A value in the stream's layout as the result's, in the output dtype."""
        boundary = self.boundary
        x = x.to(boundary.output_dtype)
        if result == "shard":
            return x
        if boundary.sequence_parallel:
            split = boundary.token_split(self.tokens)
            return token_shard_to_column_input(x, split, boundary.group, tag=tag, ordered=boundary.executor.ordered)
        return invariant_to_column_input(x, boundary.group, tag=tag, ordered=boundary.executor.ordered)

    def _complete_residual(self, what: str) -> Tensor:
        if self.owed or self.residual is None:
            sources = " and ".join(owed.partial.source for owed in self.owed) or "nothing"
            raise LayoutError(f"{what}: the stream still owes the update of {sources}; call complete() first")
        return self.residual

    def _with(self, residual: Tensor | None, owed: tuple[Owed, ...]) -> "Stream":
        return Stream(self.boundary, self.tokens, residual, owed, self.taps)

    def _use(self, how: str) -> None:
        if torch.compiler.is_compiling():
            return
        if (
            self._used and torch._C._current_graph_task_id() == -1
        ):  # not inside a backward pass, where checkpointing recomputes
            raise LayoutError(
                f"{how} on a stream that {self._used[0]} has used already; go on with the stream that call returned"
            )
        self._used.append(how)


def _check_partial(update: object, boundary: Boundary, verb: str) -> None:
    if not isinstance(update, Partial):
        kind = f"a tensor of shape {list(update.shape)}" if isinstance(update, Tensor) else type(update).__name__
        raise LayoutError(
            f"{verb}() takes the Partial of a row-parallel layer and got {kind}; if that layer has completed its own sum, the boundary "
            "would sum it again"
        )
    if update.group is not boundary.group:
        raise LayoutError(f"{verb}(): {update.source} belongs to another group than this stream's boundary")
