"""The residual stream: an immutable value with two verbs.

    x, stream = stream.read(norm)        complete what is owed, add it, normalise: the input of a column-parallel linear
    stream    = stream.write(update)     record the update, a partial sum; nothing is communicated yet

A layer maps stream to stream and says nothing about collectives. Checkpointing, pipeline cuts and compilers see only this value.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import torch
from jaxtyping import Float
from torch import Tensor

from tp_residual.errors import LayoutError
from tp_residual.parallel.collectives import token_shard_to_invariant
from tp_residual.parallel.partial import Partial
from tp_residual.residual.boundary import Boundary, Result, Site, Tap, run_boundary
from tp_residual.residual.norms import RMSNorm


class Layout(StrEnum):
    """How the residual lies on the ranks between boundaries."""

    REPLICATED = "replicated"
    TOKEN_SHARDED = "token_sharded"


@dataclass(frozen=True, eq=False)
class Stream:
    """The residual `[tokens, hidden]` (this rank's tokens, when token-sharded) and the update still owed to it.

    tokens: of the whole stream. Each value is used once, by `read`, `write` or `complete`; a second use raises, since it would add
    the next update to a stale residual. Recomputation in a backward pass uses it again, legally.
    """

    boundary: Boundary
    tokens: int
    residual: Tensor | None
    owed: Partial | None
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
    def start(cls, embedded: Partial, boundary: Boundary, taps: tuple[Tap, ...] = ()) -> "Stream":
        """A stream that owes the embedding: the first read completes it, so embedding, add and norm are one boundary as well."""
        _check_partial(embedded, boundary, "Stream.start")
        return cls(boundary, embedded.shape[0], None, embedded, taps)

    @classmethod
    def resume(
        cls, residual: Tensor, tokens: int, layout: Layout, boundary: Boundary, taps: tuple[Tap, ...] = ()
    ) -> "Stream":
        """A stream received at a pipeline cut. layout: as the sender had it; it is never deduced from the shape."""
        stream = cls(boundary, tokens, residual, None, taps)
        if layout is not stream.layout:
            raise LayoutError(f"the received residual is {layout}, this boundary keeps its stream {stream.layout}")
        return stream

    @property
    def layout(self) -> Layout:
        return Layout.TOKEN_SHARDED if self.boundary.sequence_parallel else Layout.REPLICATED

    def write(self, update: Partial) -> "Stream":
        """Owe `update`. Two writes without a read between them are one sum: one collective."""
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
        return self._with(self.residual, update if self.owed is None else self.owed + update)

    def read(self, norm: RMSNorm, result: Result = "gathered") -> tuple[Float[Tensor, "tokens hidden"], "Stream"]:
        """`(norm(residual + owed), the stream that owes nothing)`.

        The normed value is a column input (gathered), in the boundary's output dtype; with result="shard" it stays this rank's tokens.
        """
        self._use(f"read({norm.name})")
        site = Site("" if self.owed is None else self.owed.source, norm.name)
        residual, normed = run_boundary(
            self.boundary, self.tokens, self.residual, self.owed, norm.weight, norm.bias, norm.spec, result, norm.name
        )
        for tap in self.taps:
            tap(site, self.owed, residual, normed)
        return normed, self._with(residual, None)

    def complete(self) -> "Stream":
        """The stream that owes nothing, without a norm: for pipeline cuts and for looking at the residual."""
        self._use("complete()")
        if self.owed is None:
            return self._with(self.residual, None)
        residual, _ = run_boundary(
            self.boundary, self.tokens, self.residual, self.owed, None, None, None, "raw", "complete"
        )
        for tap in self.taps:
            tap(Site(self.owed.source, ""), self.owed, residual, None)
        return self._with(residual, None)

    def replicated(self) -> Float[Tensor, "tokens hidden"]:
        """The residual of all tokens, in token order, on every rank (one all-gather when token-sharded). Nothing may be owed."""
        if self.owed is not None or self.residual is None:
            raise LayoutError(
                f"the stream still owes the update of {self.owed.source if self.owed else 'nothing'}; call complete() first"
            )
        if not self.boundary.sequence_parallel:
            return self.residual
        split = self.boundary.token_split(self.tokens)
        return token_shard_to_invariant(self.residual, split, self.boundary.group, tag="stream.replicated")

    def _with(self, residual: Tensor | None, owed: Partial | None) -> "Stream":
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
