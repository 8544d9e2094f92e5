"""Which executor completes a boundary fastest, and from how many tokens on does a token-sharded stream pay?

One boundary: the sum of the ranks' partials, the residual add, the norm, and the normed value in full on every rank. TP keeps the whole
residual on each rank, SP a token shard.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tp_residual.bench.bandwidth import copy_of
from tp_residual.bench.collectives import runnable
from tp_residual.bench.request import ShapesRequest
from tp_residual.bench.results import Row
from tp_residual.bench.shapes import NORM, operand, wrong_elements
from tp_residual.bench.timing import Candidate, Clock, Progress
from tp_residual.errors import UserError
from tp_residual.kernels.contract import AddNormSpec, add_norm, widen
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.partial import Partial
from tp_residual.parallel.transport import Transport
from tp_residual.residual.boundary import EXECUTORS, Boundary, BoundaryRequest, run_boundary

LIMIT = "one copy that moves the counted bytes, on every rank at once"
MODES = ("tp", "sp")


def passes(mode: str, ranks: int) -> float:
    """The least traffic of one rank's memory, in passes over `[tokens, hidden]`: what an executor must read and write at any rate.

    Each partial is read and published; the peers' are read, whole (one shot) or a rank's rows of them whose sums are published again
    (two shots), whichever is less; then residual in and out and the normed value out.
    """
    if ranks == 1:
        return 4.0
    others = (ranks - 1) / ranks
    if mode == "sp":  # residual in and out and normed out for its own rows; the peers' normed rows in, all of them out
        return 2 + others + 3 / ranks + others + 1
    return 2 + min(ranks - 1, 2 * others + 1 / ranks) + 3


def link_passes(ranks: int) -> float:
    """The least that crosses between ranks, each way and rank: a reduce-scatter and an all-gather, fused or not."""
    return 2 * (ranks - 1) / ranks


@dataclass(frozen=True)
class _Shape:
    """Operands of one shape on this rank, and the contract's answer."""

    residual: Tensor
    partial: Tensor
    weight: Tensor
    new_residual: Tensor
    normed: Tensor

    @classmethod
    def make(cls, clock: Clock, tokens: int, hidden: int, dtype: torch.dtype) -> "_Shape":
        sizes = tokens, hidden, dtype, clock.device
        partials = [operand("partial", *sizes, rank=rank) for rank in range(clock.group.size)]
        residual, weight = operand("residual", *sizes), operand("weight", 1, hidden, dtype, clock.device)
        total = widen(partials[0]).clone()
        for each in partials[1:]:
            total += each
        new_residual, normed = add_norm(AddNormSpec(dtype, dtype, NORM), residual, total, weight=weight)
        assert normed is not None
        return cls(residual, partials[clock.group.rank], weight, new_residual, normed)


@dataclass(frozen=True)
class _Way:
    """One executor over one wire in one mode, called as the product does: directly, or through the operator."""

    boundary: Boundary
    transport: str
    wire: Transport | None
    mode: str
    call: str

    def __str__(self) -> str:
        return f"{self.boundary.executor.name} over {self.transport}, {self.mode}, by the {self.call}"

    def activate(self) -> None:
        """Executors that name no wire of their own take the group's."""
        self.boundary.group.transport = self.wire

    def candidate(self, shape: _Shape) -> Candidate:
        boundary, group, tokens = self.boundary, self.boundary.group, shape.partial.shape[0]
        split = boundary.token_split(tokens)
        residual = shape.residual[slice(*split.ranges[group.rank])].contiguous()
        run: Any
        if self.call == "operator":
            owed = Partial(shape.partial, group, "bench")
            run = partial(run_boundary, boundary, tokens, residual, owed, shape.weight, None, NORM, "gathered", "bench")
        else:
            request = boundary.request(True, 1, NORM, "gathered")
            run = partial(
                boundary.executor.run,
                request, group, "bench", split, residual, shape.partial, None, shape.weight, None,
            )  # fmt: skip
        return Candidate(run, before=self.activate)

    def wrong(self, shape: _Shape, run: Callable[[], Any]) -> int:
        self.activate()
        new_residual, normed = run()
        own = slice(*self.boundary.token_split(shape.partial.shape[0]).ranges[self.boundary.group.rank])
        bitwise = self.boundary.executor.ordered
        residual_wrong = wrong_elements(new_residual, shape.new_residual[own], bitwise=bitwise)
        return residual_wrong + wrong_elements(normed, shape.normed, bitwise=bitwise)


def measure_boundary(
    clock: Clock, request: ShapesRequest, available: Mapping[str, Transport | str], progress: Progress
) -> tuple[list[Row], list[str]]:
    """`(rows, notes)`: a row for each dtype, hidden size, tokens, executor, wire and mode. All of one shape are timed in the same rounds.

    Raises UserError for an executor that was asked for and cannot run, VerificationFailed for a wrong result.
    """
    rows: list[Row] = []
    wires, reasons = runnable(clock, available)
    notes = [f"{name}: {reason}" for name, reason in reasons.items()]
    total = len(request.dtypes) * len(request.hidden) * len(request.tokens)
    done, own_wire = 0, clock.group.transport
    try:
        for name in request.dtypes:
            ways, missing = _ways(clock, request, wires or {"none": None}, getattr(torch, name))
            notes += [note for note in missing if note not in notes]
            for hidden in request.hidden:
                for tokens in request.tokens:
                    progress(done, total, f"{tokens} x {hidden} {name}")
                    rows += _one_shape(clock, ways, tokens, hidden, name)
                    done += 1
    finally:
        clock.group.transport = own_wire
    return rows, notes


def _ways(
    clock: Clock, request: ShapesRequest, wires: Mapping[str, Transport | None], dtype: torch.dtype
) -> tuple[list[_Way], list[str]]:
    """The same on every rank: what one rank cannot run is nobody's. Also why an executor runs over no wire."""
    for name in request.executors:
        if name not in EXECUTORS:
            raise UserError(f"--boundary {name!r} is not one of {', '.join(EXECUTORS)}")
    calls = ("executor", "operator") if request.operator else ("executor",)
    ways: list[_Way] = []
    notes = []
    for name, mode in product(request.executors or EXECUTORS, MODES if clock.group.size > 1 else MODES[:1]):
        refused = {}
        for transport, wire in wires.items():
            clock.group.transport = wire
            made = _boundary(clock.group, name, mode, dtype)
            reason = next((each for each in clock.gather(made if isinstance(made, str) else None) if each), None)
            if reason is None:
                assert isinstance(made, Boundary)
                ways += [_Way(made, transport, wire, mode, call) for call in calls]
            else:
                refused[transport] = reason
        if len(refused) == len(wires):
            notes.append(f"{name} {mode.upper()}: {next(reversed(refused.values()))}")
            if request.executors:
                raise UserError(f"--boundary {notes[-1]}; leave it out to measure those that can run here")
    return ways, notes


def _boundary(group: TensorParallelGroup, name: str, mode: str, dtype: torch.dtype) -> Boundary | str:
    """As a model would have it, or the reason why not."""
    request = BoundaryRequest(True, 1, NORM, "gathered", mode == "sp", dtype, dtype, gradients=False)
    if reason := EXECUTORS[name].supports(request, group):
        return reason
    boundary = Boundary(
        group,
        "reference",
        sequence_parallel=mode == "sp",
        stream_dtype=dtype,
        output_dtype=dtype,
        gradients=False,
        norms=[NORM],
    )
    boundary.executor = EXECUTORS[name]  # some are no choice of --boundary, only `auto` takes them
    return boundary


def _one_shape(clock: Clock, ways: Sequence[_Way], tokens: int, hidden: int, dtype: str) -> list[Row]:
    group, shape = clock.group, _Shape.make(clock, tokens, hidden, getattr(torch, dtype))
    payload = shape.partial.numel() * shape.partial.element_size()
    modes = dict.fromkeys(way.mode for way in ways)
    candidates = {f"copy {mode}": copy_of(passes(mode, group.size) * payload, clock.device) for mode in modes}
    named = {str(way): way for way in ways}
    for name, way in named.items():
        candidates[name] = way.candidate(shape)
        clock.require_correct(f"{name}, {tokens} x {hidden} {dtype}", way.wrong(shape, candidates[name].run))
    samples = clock.interleaved(candidates)
    rows = []
    for name, way in named.items():
        counted = passes(way.mode, group.size)
        memory = round(counted * payload)
        rows.append(
            {
                "executor": way.boundary.executor.name,
                "transport": way.transport,
                "call": way.call,
                "mode": way.mode,
                "tokens": tokens,
                "hidden": hidden,
                "dtype": dtype,
                "order": "contract" if way.boundary.executor.ordered else "fast",
                "ranks": group.size,
                "bytes": payload,
                "passes": counted,
                "memory_bytes": memory,
                "link_bytes": round(link_passes(group.size) * payload),
                "memory_GB_s": memory / samples[name].percentile(50) / 1e3,
                **clock.fields(samples[name], LIMIT, samples[f"copy {way.mode}"]),
            }
        )
    return rows
