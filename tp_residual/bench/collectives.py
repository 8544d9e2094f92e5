"""How fast are the wires? Every collective of every transport that runs here, as users of nccl-tests know the figures.

algbw = S / t and busbw = algbw x the factor of the collective, in GB/s of 1e9 bytes; S is the full buffer: for all-gather and
reduce-scatter that of all ranks together. In place: the result lands in the input's memory, where the wire can do that.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tp_residual.bench.bandwidth import copy_of
from tp_residual.bench.request import CollectivesRequest
from tp_residual.bench.results import Row
from tp_residual.bench.timing import Candidate, Clock, Progress
from tp_residual.errors import UserError
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.shared import SharedTransport
from tp_residual.parallel.transport import PeerTransport, TorchTransport, Transport

LIMIT = "copy of as many bytes on every rank at once"

_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@contextmanager
def transports(group: TensorParallelGroup) -> Iterator[dict[str, Transport | str]]:
    """Every wire by name: one that runs, or the reason why it does not; none in a group of one.

    All ranks call it, once in a group's life. What is opened here is closed here; the group's own transport is left alone.
    """
    found: dict[str, Transport | str] = {}
    opened: list[SharedTransport] = []
    if group.process_group is not None:
        library, other = ("nccl", "gloo") if group.device.type == "cuda" else ("gloo", "nccl")
        found[library] = TorchTransport(group.process_group, group.limits, device=group.device)
        found |= dict.fromkeys((other, "shared", "symmetric"), f"the ranks are on {group.device.type}")
        if isinstance(group.transport, SharedTransport):
            found["shared"] = group.transport
        elif group.device.type == "cpu":
            found["shared"] = shared = SharedTransport.open(group)
            if not isinstance(shared, str):
                opened.append(shared)
        else:
            from tp_residual.parallel.symmetric import open_symmetric  # it needs Triton, which not every platform has

            found["symmetric"] = open_symmetric(group)
    try:
        yield found
    finally:
        for each in opened:
            each.close()


class InPlace:
    """A process group's collectives with the result in the input's memory; all-to-all has none. Inputs are overwritten."""

    def __init__(self, whole: TorchTransport) -> None:
        self._whole, self._group = whole, whole.process_group
        self.size, self._rank = whole.size, whole.process_group.rank()

    def all_reduce(self, x: Tensor) -> Tensor:
        self._whole.wait(dist.all_reduce(x, group=self._group, async_op=True))
        return x

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        self._whole.wait(dist.broadcast(x, group_src=root, group=self._group, async_op=True))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """x: the whole buffer, this rank's part filled in."""
        self._whole.wait(_gather_into(x, x.chunk(self.size)[self._rank], group=self._group, async_op=True))
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        own = x.chunk(self.size)[self._rank]
        self._whole.wait(_scatter_into(own, x, group=self._group, async_op=True))
        return own


def bus_factor(collective: str, ranks: int) -> float:
    """busbw / algbw: what each rank's link carries for each byte of the buffer."""
    others = (ranks - 1) / ranks
    return {"all_reduce": 2 * others, "broadcast": 1.0, "p2p": 1.0}.get(collective, others)


def algorithm_bandwidth(nbytes: int, us: float) -> float:
    """GB/s of 1e9 bytes."""
    return nbytes / us / 1e3


def pattern(start: int, elements: int, rank: int, seed: int, like: Tensor) -> Tensor:
    """Elements `start` and following of rank's data: whole numbers from -4 to 4, scattered, so that any sum of up to 64 ranks is exact."""
    index = torch.arange(start, start + elements, dtype=torch.int64, device=like.device)
    mixed = (index + 1) * 2654435761 + (rank * 7919 + seed * 104729 + 1) * 40503 * (index % 1009 + 1)
    return ((mixed >> 11) % 9 - 4).to(like.dtype)


@dataclass(frozen=True)
class _Call:
    """One collective of one transport at one size on this rank. full: the buffer's elements."""

    collective: str
    wire: Any
    place: str
    full: int
    root: int
    rank: int
    ranks: int

    @property
    def chunk(self) -> int:
        return self.full // self.ranks

    def input(self, seed: int, like: Tensor) -> Tensor:
        if self.collective != "all_gather":
            return pattern(0, self.full, self.rank, seed, like)
        own = pattern(0, self.chunk, self.rank, seed, like)
        if self.place == "out":
            return own
        whole = like.new_zeros(self.full)
        whole.chunk(self.ranks)[self.rank].copy_(own)
        return whole

    def expected(self, seed: int, like: Tensor) -> Tensor:
        everybody = range(self.ranks)
        if self.collective == "broadcast":
            return pattern(0, self.full, self.root, seed, like)
        if self.collective == "all_gather":
            return torch.cat([pattern(0, self.chunk, rank, seed, like) for rank in everybody])
        own = self.chunk * self.rank
        if self.collective == "all_to_all":
            return torch.cat([pattern(own, self.chunk, rank, seed, like) for rank in everybody])
        start, elements = (own, self.chunk) if self.collective == "reduce_scatter" else (0, self.full)
        total = torch.zeros(elements, device=like.device)
        for rank in everybody:
            total += pattern(start, elements, rank, seed, like)
        return total.to(like.dtype)

    def run(self, x: Tensor) -> Tensor:
        call = getattr(self.wire, self.collective)
        return call(x, self.root) if self.collective == "broadcast" else call(x)

    def wrong(self, seed: int, like: Tensor) -> int:
        """Elements that are not what they must be; all of them when the shape is another."""
        out, expected = self.run(self.input(seed, like)), self.expected(seed, like)
        if out.shape != expected.shape or out.dtype != expected.dtype:
            return max(1, expected.numel())
        return int((out != expected).sum())


def measure_collectives(
    clock: Clock, request: CollectivesRequest, available: Mapping[str, Transport | str], progress: Progress
) -> tuple[list[Row], list[str]]:
    """`(rows, notes)`: a row for each transport, collective, size and place. Transports of one size are timed in the same rounds.

    Raises UserError for a transport that was asked for and cannot run, VerificationFailed for a wrong result, before its size is timed.
    """
    wires, notes = _choose(clock, request, available)
    like = torch.empty(0, dtype=getattr(torch, request.dtype), device=clock.device)
    sizes = request.elements(clock.group.size)
    total, done, rows = len(sizes) * len(request.collectives), 0, []
    for collective in request.collectives:
        for full in sizes:
            progress(done, total, f"{collective} {full * like.element_size()} B")
            if collective == "p2p":
                rows += _pairs(clock, request, wires, full, like)
            else:
                rows += _one_size(clock, request, wires, collective, full, like)
            done += 1
    if "p2p" in request.collectives:
        notes += [f"p2p over {name}: it has no exchange of two ranks alone" for name in wires if name not in _LIBRARY]
    return rows, notes


_LIBRARY = ("gloo", "nccl")


def _choose(
    clock: Clock, request: CollectivesRequest, available: Mapping[str, Transport | str]
) -> tuple[dict[str, Transport], list[str]]:
    """The same on every rank: a wire that one rank cannot open is nobody's."""
    wires, reasons = runnable(clock, available)
    for name in request.transports:
        if name in reasons or name not in available:
            raise UserError(
                f"--transport {name} cannot run here: {reasons.get(name, 'unknown')}; leave it out to measure those that can"
            )
    chosen = {name: wire for name, wire in wires.items() if not request.transports or name in request.transports}
    return chosen, [f"{name}: {reason}" for name, reason in reasons.items()]


def runnable(clock: Clock, available: Mapping[str, Transport | str]) -> tuple[dict[str, Transport], dict[str, str]]:
    """`(wires, reasons)`, the same names on every rank: a wire that one rank cannot open is nobody's."""
    reasons: dict[str, str] = {}
    for rank in reversed(clock.gather({name: wire for name, wire in available.items() if isinstance(wire, str)})):
        reasons |= rank
    wires = {name: wire for name, wire in available.items() if name not in reasons and not isinstance(wire, str)}
    return wires, reasons


def _one_size(
    clock: Clock, request: CollectivesRequest, wires: Mapping[str, Transport], collective: str, full: int, like: Tensor
) -> list[Row]:
    group, nbytes = clock.group, full * like.element_size()
    calls = {}
    for name, wire in wires.items():
        calls[name, "out"] = _Call(collective, wire, "out", full, request.root, group.rank, group.size)
        if isinstance(wire, TorchTransport) and hasattr(InPlace, collective):
            calls[name, "in"] = _Call(collective, InPlace(wire), "in", full, request.root, group.rank, group.size)
    candidates = {"limit": copy_of(2 * nbytes, clock.device)}
    for (name, place), call in calls.items():
        wrong = sum(call.wrong(seed, like) for seed in range(request.check))
        clock.require_correct(f"{collective} over {name}, {nbytes} B, {place} of place", wrong)
        candidates[f"{name} {place}"] = Candidate(partial(call.run, call.input(0, like)))
    samples = clock.interleaved(candidates)
    factor, rows = bus_factor(collective, group.size), []
    for name, place in calls:
        measured = samples[f"{name} {place}"]
        algbw = algorithm_bandwidth(nbytes, measured.percentile(50))
        rows.append(
            {
                "transport": name,
                "collective": collective,
                "place": place,
                "redop": "sum" if "reduce" in collective else "none",
                "root": request.root if collective == "broadcast" else -1,
                "dtype": request.dtype,
                "ranks": group.size,
                "bytes": nbytes,
                "count": full if collective in ("all_reduce", "broadcast") else full // group.size,
                "wrong": 0,
                "algbw_GB_s": algbw,
                "busbw_GB_s": algbw * factor,
                **clock.fields(measured, LIMIT, samples["limit"]),
            }
        )
    return rows


def _pairs(
    clock: Clock, request: CollectivesRequest, wires: Mapping[str, Transport], full: int, like: Tensor
) -> list[Row]:
    """Each pair of ranks sends `full` elements both ways at once while the others wait: bytes of one direction over the time."""
    group, nbytes, rows = clock.group, full * like.element_size(), []
    for name, wire in wires.items():
        if not isinstance(wire, TorchTransport):
            continue
        for pair in combinations(range(group.size), 2):
            run: Callable[[], object] = _nothing
            wrong = 0
            if group.rank in pair:
                peers = PeerTransport(wire, pair)
                x = pattern(0, 2 * full, group.rank, 0, like)
                expected = [pattern(full * pair.index(group.rank), full, rank, 0, like) for rank in pair]
                wrong = int((peers.all_to_all(x) != torch.cat(expected)).sum())
                run = partial(peers.all_to_all, x)
            label = f"{pair[0]}-{pair[1]}"
            clock.require_correct(f"exchange of ranks {label} over {name}, {nbytes} B", wrong)
            samples = clock.interleaved({"limit": copy_of(2 * nbytes, clock.device), label: Candidate(run)})
            algbw = algorithm_bandwidth(nbytes, samples[label].percentile(50))
            rows.append(
                {
                    "transport": name,
                    "collective": "p2p",
                    "place": "out",
                    "pair": label,
                    "redop": "none",
                    "root": -1,
                    "dtype": request.dtype,
                    "ranks": group.size,
                    "bytes": nbytes,
                    "count": full,
                    "wrong": 0,
                    "algbw_GB_s": algbw,
                    "busbw_GB_s": algbw,
                    **clock.fields(samples[label], LIMIT, samples["limit"]),
                }
            )
    return rows


def _nothing() -> None:
    """What a rank outside the pair does in its sample."""
