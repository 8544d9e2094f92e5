"""The boundary: complete what is owed, add it to the residual, normalise. One operation at one place, many executors.

`BoundaryRequest` says all that a boundary may be asked. A `Boundary` decides once, from values all ranks share, which executor
answers, says so, and is carried by the stream: producer and consumer never decide separately. The whole step is one opaque
torch.library operator, so a compiler changes none of its bits.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from tp_residual.errors import UserError
from tp_residual.kernels.contract import NormSpec, column_sum, norm_backward, widen
from tp_residual.kernels.recording import active
from tp_residual.parallel.collectives import (
    LIBRARY,
    invariant_to_column_input,
    move,
    start_summed,
    start_summed_shard,
    starts_early,
)
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.partial import Partial
from tp_residual.parallel.splits import Split
from tp_residual.residual.dispatch import BySize, symmetric_limit_bytes
from tp_residual.residual.plain import PlainExecutor
from tp_residual.residual.request import PLAIN, BoundaryRequest, Executor, Join, Result
from tp_residual.residual.shared import SharedExecutor
from tp_residual.residual.symmetric import SymmetricExecutor
from tp_residual.residual.table import EXECUTOR_NAMES, BoundaryTable

logger = logging.getLogger("tp_residual")

_REFERENCE = PlainExecutor("reference", ordered=True)
EXECUTORS: dict[str, Executor] = {
    "reference": _REFERENCE,
    "library": PlainExecutor("library", ordered=False, fused=True),
    "shared": SharedExecutor(_REFERENCE),
    "symmetric": SymmetricExecutor(),
    "local": PlainExecutor("local", ordered=True, fused=True, alone=True),
}
BOUNDARY_CHOICES = ("auto", *EXECUTOR_NAMES)


@dataclass(frozen=True)
class Site:
    """Where a boundary is: the module whose sum it completes and the norm that reads it (empty when there is none)."""

    update: str
    norm: str

    def __str__(self) -> str:
        return f"{self.update or 'nothing owed'} -> {self.norm or 'raw'}"


# (site, the owed partial or None, the new residual in its layout, what was read of it or None); observers only
Tap = Callable[[Site, Partial | None, Tensor, Tensor | None], None]

_boundaries: WeakValueDictionary[int, "Boundary"] = WeakValueDictionary()
_handles = count()


_KEPT_SPLITS = 1024  # by token count: decoding asks for the same one at every boundary


class Boundary:
    """Who completes the sums of one stream, decided once.

    choice: an executor's name, or `auto`: on CPU `shared` where the group has a segment, else `reference`, where the rank-order sum costs
    what gloo's all-reduce costs and is reproducible; on CUDA `symmetric` up to the size where `library` overtakes it; `table` overrides
    both. A forced choice that cannot answer one of `norms`, or one of `joins`, is a UserError, an automatic one falls back with one log
    line. overlap: sums are best started early, so that on CUDA `library` comes first.
    stream_dtype: of the residual; output_dtype: of the normed values (the weights' dtype).
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
        joins: Sequence[Join] = (),
        overlap: bool = False,
        table: BoundaryTable | None = None,
    ) -> None:
        self.group, self.sequence_parallel = group, sequence_parallel
        self.stream_dtype, self.output_dtype = stream_dtype, output_dtype
        self.round_reduced, self.gradients, self.overlap = round_reduced, gradients, overlap
        self.handle = next(_handles)
        self._splits: dict[int, Split] = {}
        self._requests: dict[tuple[bool, int, NormSpec | None, Result, Join], BoundaryRequest] = {}
        self.executor = self._choose(choice, norms, joins, table)
        _boundaries[self.handle] = self

    def request(
        self, has_residual: bool, updates: int, norm_spec: NormSpec | None, result: Result, join: Join = PLAIN
    ) -> BoundaryRequest:
        """The same object for the same question: executors keep what they have prepared for it."""
        key = has_residual, updates, norm_spec, result, join
        if key not in self._requests:
            self._requests[key] = BoundaryRequest(
                has_residual,
                updates,
                norm_spec,
                result,
                self.sequence_parallel,
                self.stream_dtype,
                self.output_dtype,
                self.round_reduced,
                self.gradients,
                *join,
            )
        return self._requests[key]

    def token_split(self, tokens: int) -> Split:
        """Which tokens of the residual each rank holds between boundaries."""
        make = Split.ceil_chunks if self.sequence_parallel else Split.replicated
        if torch.compiler.is_compiling():  # a traced dictionary is a guard: each new count would recompile
            return make(tokens, self.group.size)
        split = self._splits.get(tokens)
        if split is None:
            if len(self._splits) >= _KEPT_SPLITS:
                self._splits.clear()
            split = self._splits[tokens] = make(tokens, self.group.size)
        return split

    def _choose(
        self, choice: str, norms: Sequence[NormSpec], joins: Sequence[Join], table: BoundaryTable | None
    ) -> Executor:
        if choice not in BOUNDARY_CHOICES:
            raise UserError(f"boundary={choice!r} is not one of {', '.join(BOUNDARY_CHOICES)}")
        requests = [self.request(True, 0, None, "raw")]
        requests += [self.request(first, 1, spec, "gathered") for spec in norms for first in (False, True)]
        requests += [self.request(True, 1, spec, "gathered", join) for spec in norms for join in joins]
        for executor, why in [(EXECUTORS[choice], "forced")] if choice != "auto" else self._automatic(table):
            reasons = [reason for request in requests if (reason := executor.supports(request, self.group))]
            if not reasons:
                self._log("%s (%s, stream %s; %s)", executor.name, self.mode, _short(self.stream_dtype), why)
                return executor
            if choice != "auto":
                raise UserError(f"boundary={choice!r} cannot run here: {reasons[0]}; use --boundary auto")
            self._log("%s cannot run here: %s", executor.name, reasons[0])
        raise AssertionError("reference supports every request")

    def _automatic(self, table: BoundaryTable | None) -> Iterator[tuple[Executor, str]]:
        """Candidates, best first, and what speaks for each. From values that all ranks share."""
        group, cuda = self.group, self.group.device.type == "cuda"
        if group.size == 1:
            yield EXECUTORS["local"], "alone"
        if table is not None:
            ranges = table.ranges(
                device=group.device.type,
                transport=group.transport_name,
                world=group.size,
                dtype=_short(self.stream_dtype),
                mode="sp" if self.sequence_parallel else "tp",
                order="any" if cuda else "contract",
            )
            if ranges is not None:
                yield BySize([(limit, EXECUTORS[name]) for limit, name in ranges]), f"measured: {table}"
        if cuda and not self.overlap:
            limit = symmetric_limit_bytes()
            yield BySize([(limit, EXECUTORS["symmetric"]), (math.inf, EXECUTORS["library"])]), "by size"
        if cuda:
            yield EXECUTORS["library"], "default"
        elif group.transport_name == "shared":
            yield EXECUTORS["shared"], "ranks of one host"
        yield EXECUTORS["reference"], "default"

    def start_sum(self, tokens: int, partial: Tensor, tag: str) -> Callable[[], Tensor] | None:
        """Begin to complete a sum: what waits for it and returns it wide, in the stream's layout, without the partial's bias. None where
        the executor does not let it be taken apart, or its transport only waits.
        """
        if not isinstance(self.executor, PlainExecutor) or not starts_early(self.group):
            return None
        if self.sequence_parallel:
            return start_summed_shard(self.group, partial, tag, self.token_split(tokens), self.executor.ordered)
        return start_summed(self.group, partial, tag, self.executor.ordered)

    @property
    def mode(self) -> str:
        return "sequence parallel" if self.sequence_parallel else "tensor parallel"

    def _log(self, message: str, *values: object) -> None:
        if self.group.rank == 0 and self.group.size > 1:
            logger.info("boundary: " + message, *values)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
    new_residual, normed = _execute(owner, residual, partial, bias, weight, norm_bias, tokens, spec, result, tag)
    # an operator may not return its input
    return (new_residual.clone() if new_residual is residual else new_residual), normed


def _execute(
    owner: Boundary,
    residual: Tensor | None,
    partial: Tensor | None,
    bias: Tensor | None,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    tokens: int,
    spec: NormSpec | None,
    result: Result,
    tag: str,
    join: Join = PLAIN,
    update_norm: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    request = owner.request(residual is not None, int(partial is not None), spec, result, join)
    split = owner.token_split(tokens)
    began = time.perf_counter()
    recording = active()
    if recording is not None:
        recording.in_boundary = True
    with owner.group.range(f"boundary {tag}"):
        answer = owner.executor.run(
            request, owner.group, tag, split, residual, partial, bias, weight, norm_bias, *update_norm
        )
    if recording is not None:
        recording.in_boundary = False
    owner.group.counters.boundary_s += time.perf_counter() - began
    return answer


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
        d_bias = None if bias is None else column_sum(gradient).to(bias.dtype)
    d_old_residual = None if ctx.residual_dtype is None else gradient.to(ctx.residual_dtype)
    return (d_old_residual, d_partial, d_bias, d_weight, d_norm_bias, *(None,) * 9)


LIBRARY.define(
    "boundary(Tensor? residual, Tensor? partial, Tensor? bias, Tensor? weight, Tensor? norm_bias, SymInt tokens, SymInt local_tokens, "
    "int boundary, str result, str kind, float eps, float weight_offset, bool weight_after_cast, str tag) -> (Tensor, Tensor)"
)
LIBRARY.impl("boundary", _boundary, "CompositeExplicitAutograd")
torch.library.register_fake("tp_residual::boundary", _boundary_fake, lib=LIBRARY)
torch.library.register_autograd("tp_residual::boundary", _backward, setup_context=_setup_context, lib=LIBRARY)


def is_observed(*tensors: Tensor | None) -> bool:
    """Whether something traces or differentiates what is done with these operands, so that it must be made of operators."""
    given = next(tensor for tensor in tensors if tensor is not None)
    return type(given) is not Tensor or torch.is_grad_enabled() or torch.compiler.is_compiling()


def run_joined(
    boundary: Boundary,
    tokens: int,
    residual: Tensor | None,
    partial: Partial,
    norm: tuple[Tensor | None, Tensor | None, NormSpec | None],
    result: Result,
    tag: str,
    join: Join,
    update_norm: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor]:
    """`run_boundary` of a sum that is scaled or normalised first, in the executor's one pass; not where `is_observed`.

    norm, update_norm: weight and bias, and the norm's spec.
    """
    weight, norm_bias, spec = norm
    return _execute(
        boundary, residual, partial.value, partial.bias, weight, norm_bias, tokens, spec, result, tag, join, update_norm
    )


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
    """`(new residual, normed)`; normed is empty for a raw result. The operator, where something traces or differentiates.

    Otherwise its body: taking the objects apart for the dispatcher costs several times what a boundary of one token does.
    """
    value, bias = (None, None) if partial is None else (partial.value, partial.bias)
    if not is_observed(value, residual):
        return _execute(boundary, residual, value, bias, weight, norm_bias, tokens, spec, result, tag)
    given = spec or NormSpec(0.0)
    local_tokens = boundary.token_split(tokens).size(boundary.group.rank)
    new_residual, normed = torch.ops.tp_residual.boundary(
        residual, value, bias, weight, norm_bias, tokens, local_tokens, boundary.handle, result,
        given.kind, given.eps, given.weight_offset, given.weight_after_cast, tag,
    )  # fmt: skip
    return new_residual, normed
