"""The boundary: complete what is owed, add it to the residual, normalise. One operation at one place, many executors.

`BoundaryRequest` says all that a boundary may be asked. A `Boundary` decides once, from values all ranks share, which executor
answers, says so, and is carried by the stream: producer and consumer never decide separately. The whole step is one opaque
torch.library operator, so a compiler changes none of its bits.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from tp_residual.errors import LayoutError, UserError
from tp_residual.kernels.contract import AddNormSpec, NormSpec, add_norm, norm_backward, widen
from tp_residual.parallel.collectives import LIBRARY, gathered, invariant_to_column_input, move, summed, summed_shard
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.partial import Partial
from tp_residual.parallel.splits import Split

logger = logging.getLogger("tp_residual")

BOUNDARY_CHOICES = ("auto", "reference", "library")
Result = Literal["gathered", "shard", "raw"]


@dataclass(frozen=True)
class BoundaryRequest:
    """One boundary, described by values every rank shares.

    has_residual: false for the first one, which only completes the embedding. updates: how many partial sums are owed, 0 or 1.
    norm: applied to the new residual, or None. result: the normed value gathered (the layout of a column-parallel input), as this
    rank's token shard, or raw (no normed value). round_reduced: round the sum to the output dtype before the add, as a plain
    all-reduce does. gradients: backward and double backward are needed.
    """

    has_residual: bool
    updates: int
    norm: NormSpec | None
    result: Result
    sequence_parallel: bool
    stream_dtype: torch.dtype
    output_dtype: torch.dtype
    round_reduced: bool = False
    gradients: bool = True

    def __post_init__(self) -> None:
        if self.updates not in (0, 1) or not (self.has_residual or self.updates):
            raise LayoutError(
                f"a boundary needs a residual or an owed sum: has_residual={self.has_residual}, updates={self.updates}"
            )
        if (self.norm is None) != (self.result == "raw"):
            raise LayoutError(f"result={self.result!r} with norm={self.norm}: raw means no norm, the others need one")
        if self.result == "shard" and not self.sequence_parallel:
            raise LayoutError(
                "result='shard' needs a token-sharded stream (sequence_parallel=True); this one is replicated"
            )


class Executor(Protocol):
    """One way to run every request it supports. ordered: its sums are in rank order, so it is bitwise the contract."""

    name: str
    ordered: bool

    def supports(self, request: BoundaryRequest, group: TensorParallelGroup) -> str | None:
        """None, or the reason why not. Asked when the model is built, never on the way."""
        ...

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
    ) -> tuple[Tensor, Tensor]:
        """`(new residual in its layout, normed value in the result's layout)`; the second is empty for a raw result."""
        ...


class PlainExecutor:
    """The group's collectives and the contract in plain torch.

    `reference` sums in rank order: the meaning of the boundary, bit for bit. `library` leaves the order to the library's own
    all-reduce or reduce-scatter: a second numeric class, outside the bitwise claims.
    """

    def __init__(self, name: str, *, ordered: bool) -> None:
        self.name, self.ordered = name, ordered

    def supports(self, request: BoundaryRequest, group: TensorParallelGroup) -> str | None:
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
    ) -> tuple[Tensor, Tensor]:
        update = None
        if partial is not None:
            if group.size == 1:
                update = widen(partial)
            elif request.sequence_parallel:
                update = summed_shard(group, partial, tag, 0, tokens, self.ordered)
            else:
                update = summed(group, partial, tag, self.ordered)
        round_update = request.output_dtype if request.round_reduced else None
        spec = AddNormSpec(request.stream_dtype, request.output_dtype, request.norm, round_update=round_update)
        new_residual, normed = add_norm(spec, residual, update, update_bias=bias, weight=weight, norm_bias=norm_bias)
        if normed is None:
            return new_residual, new_residual.new_empty(0, dtype=request.output_dtype)
        if request.sequence_parallel and request.result == "gathered" and group.size > 1:
            normed = gathered(group, normed, tag, 0, tokens)
        return new_residual, normed


EXECUTORS: dict[str, Executor] = {
    "reference": PlainExecutor("reference", ordered=True),
    "library": PlainExecutor("library", ordered=False),
}


@dataclass(frozen=True)
class Site:
    """Where a boundary is: the module whose sum it completes and the norm that reads it (empty when there is none)."""

    update: str
    norm: str

    def __str__(self) -> str:
        return f"{self.update or 'nothing owed'} -> {self.norm or 'raw'}"


# (site, the owed partial or None, the new residual in its layout, the normed value or None); observers only
Tap = Callable[[Site, Partial | None, Tensor, Tensor | None], None]

_boundaries: WeakValueDictionary[int, "Boundary"] = WeakValueDictionary()
_handles = count()


class Boundary:
    """Who completes the sums of one stream, decided once.

    choice: `reference`, `library`, or `auto`: reference on CPU, where the rank-order sum costs what gloo's all-reduce costs and is
    reproducible; library on CUDA. A forced choice that cannot answer one of `norms` is a UserError, an automatic one falls back with
    one log line. stream_dtype: of the residual; output_dtype: of the normed values (the weights' dtype).
    """

    def __init__(
        self,
        group: TensorParallelGroup,
        choice: str = "auto",
        *,
        sequence_parallel: bool = False,
        stream_dtype: torch.dtype = torch.float32,
        output_dtype: torch.dtype = torch.float32,
        round_reduced: bool = False,
        gradients: bool = True,
        norms: Sequence[NormSpec] = (),
    ) -> None:
        self.group, self.sequence_parallel = group, sequence_parallel
        self.stream_dtype, self.output_dtype = stream_dtype, output_dtype
        self.round_reduced, self.gradients = round_reduced, gradients
        self.handle = next(_handles)
        self.executor = self._choose(choice, norms)
        _boundaries[self.handle] = self

    def request(self, has_residual: bool, updates: int, norm_spec: NormSpec | None, result: Result) -> BoundaryRequest:
        return BoundaryRequest(
            has_residual,
            updates,
            norm_spec,
            result,
            self.sequence_parallel,
            self.stream_dtype,
            self.output_dtype,
            self.round_reduced,
            self.gradients,
        )

    def token_split(self, tokens: int) -> Split:
        """Which tokens of the residual each rank holds between boundaries."""
        if self.sequence_parallel:
            return Split.ceil_chunks(tokens, self.group.size)
        return Split.replicated(tokens, self.group.size)

    def _choose(self, choice: str, norms: Sequence[NormSpec]) -> Executor:
        if choice not in BOUNDARY_CHOICES:
            raise UserError(f"boundary={choice!r} is not one of {', '.join(BOUNDARY_CHOICES)}")
        wanted = ("library" if self.group.device.type == "cuda" else "reference") if choice == "auto" else choice
        requests = [self.request(True, 0, None, "raw")]
        requests += [self.request(first, 1, spec, "gathered") for spec in norms for first in (False, True)]
        for name in dict.fromkeys((wanted, "reference")):
            executor = EXECUTORS[name]
            reasons = [reason for request in requests if (reason := executor.supports(request, self.group))]
            if not reasons:
                mode = "sequence parallel" if self.sequence_parallel else "tensor parallel"
                if self.group.rank == 0 and self.group.size > 1:
                    logger.info(
                        "boundary: %s (%s, stream %s)", name, mode, str(self.stream_dtype).removeprefix("torch.")
                    )
                return executor
            if choice != "auto":
                raise UserError(f"boundary={choice!r} cannot run here: {reasons[0]}; use --boundary auto")
            logger.info("boundary: %s cannot run here: %s", name, reasons[0])
        raise AssertionError("reference supports every request")


# -- the operator


def _boundary(
    residual: Tensor | None,
    partial: Tensor | None,
    bias: Tensor | None,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    tokens: int,
    local_tokens: int,
    boundary: int,
    result: Result,
    kind: Literal["rms", "layer"],
    eps: float,
    weight_offset: float,
    weight_after_cast: bool,
    tag: str,
) -> tuple[Tensor, Tensor]:
    owner = _boundaries[boundary]
    spec = None if weight is None else NormSpec(eps, kind, weight_offset, weight_after_cast)
    request = owner.request(residual is not None, int(partial is not None), spec, result)
    new_residual, normed = owner.executor.run(
        request, owner.group, tag, owner.token_split(tokens), residual, partial, bias, weight, norm_bias
    )
    return (new_residual.clone() if new_residual is residual else new_residual), normed


def _boundary_fake(
    residual: Tensor | None,
    partial: Tensor | None,
    bias: Tensor | None,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    tokens: int,
    local_tokens: int,
    boundary: int,
    result: Result,
    *_: object,
) -> tuple[Tensor, Tensor]:
    owner = _boundaries[boundary]
    given = residual if residual is not None else partial
    assert given is not None
    # shapes from arguments alone: ranks share a compiler's cache on disk, and hold different numbers of tokens
    rows = {"raw": 0, "shard": local_tokens, "gathered": tokens}[result]
    shape = (0,) if result == "raw" else (rows, given.shape[-1])
    return given.new_empty((local_tokens, given.shape[-1]), dtype=owner.stream_dtype), given.new_empty(
        shape, dtype=owner.output_dtype
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    residual, partial, bias, weight, norm_bias, tokens, _, boundary, result, *spec, tag = inputs
    ctx.save_for_backward(output[0], weight, norm_bias, bias)
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.partial_dtype = None if partial is None else partial.dtype
    ctx.call = tokens, boundary, result, spec, tag


def _backward(ctx: Any, d_residual: Tensor, d_normed: Tensor) -> tuple[Tensor | None, ...]:
    """Composed of moves and differentiable arithmetic, so that it can be differentiated again.

    The normed value is a column input: its incoming gradient is a partial sum, completed first (all-reduce, or reduce-scatter to the
    token shard). What then reaches the residual also is the gradient of the owed sum, in the layout of each rank's summand.
    """
    new_residual, weight, norm_bias, bias = ctx.saved_tensors
    tokens, boundary, result, (kind, eps, weight_offset, weight_after_cast), tag = ctx.call
    owner = _boundaries[boundary]
    group, split, ordered = owner.group, owner.token_split(tokens), owner.executor.ordered
    tag, sizes = f"{tag}.backward", split.sizes
    gradient = widen(d_residual)
    d_weight = d_norm_bias = None
    if weight is not None:
        if group.size > 1 and result == "gathered":
            if owner.sequence_parallel:
                d_normed = move("partial_to_shard", d_normed, group, tag, 0, sizes, ordered)
            else:
                d_normed = move("partial_to_invariant", d_normed, group, tag, 0, [], ordered)
        spec = NormSpec(eps, kind, weight_offset, weight_after_cast)
        d_through_norm, d_weight, d_norm_bias = norm_backward(d_normed, new_residual, weight, norm_bias, spec)
        gradient = gradient + d_through_norm
    d_partial = d_bias = None
    if ctx.partial_dtype is not None:
        d_partial = gradient.to(ctx.partial_dtype)
        if owner.sequence_parallel and group.size > 1:
            d_partial = move("shard_to_column_input", d_partial, group, tag, 0, sizes, ordered)
        else:
            d_partial = invariant_to_column_input(d_partial, group, tag=tag, ordered=ordered)
        d_bias = None if bias is None else gradient.sum(0).to(bias.dtype)
    d_old_residual = None if ctx.residual_dtype is None else gradient.to(ctx.residual_dtype)
    return (d_old_residual, d_partial, d_bias, d_weight, d_norm_bias, *(None,) * 9)


LIBRARY.define(
    "boundary(Tensor? residual, Tensor? partial, Tensor? bias, Tensor? weight, Tensor? norm_bias, SymInt tokens, SymInt local_tokens, "
    "int boundary, str result, str kind, float eps, float weight_offset, bool weight_after_cast, str tag) -> (Tensor, Tensor)"
)
LIBRARY.impl("boundary", _boundary, "CompositeExplicitAutograd")
torch.library.register_fake("tp_residual::boundary", _boundary_fake, lib=LIBRARY)
torch.library.register_autograd("tp_residual::boundary", _backward, setup_context=_setup_context, lib=LIBRARY)


def run_boundary(
    boundary: Boundary,
    tokens: int,
    residual: Tensor | None,
    partial: Partial | None,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    spec: NormSpec | None,
    result: Result,
    tag: str,
) -> tuple[Tensor, Tensor]:
    """The operator with its objects taken apart. `(new residual, normed)`; normed is empty for a raw result."""
    given = spec or NormSpec(0.0)
    local_tokens = boundary.token_split(tokens).size(boundary.group.rank)
    value, bias = (None, None) if partial is None else (partial.value, partial.bias)
    new_residual, normed = torch.ops.tp_residual.boundary(
        residual, value, bias, weight, norm_bias, tokens, local_tokens, boundary.handle, result,
        given.kind, given.eps, given.weight_offset, given.weight_after_cast, tag,
    )  # fmt: skip
    return new_residual, normed
