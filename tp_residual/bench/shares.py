"""Where a step's time goes, from the product's own counters: compiled kernels by what they do, boundaries, the sampler, the rest."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from tp_residual.kernels.native_time import Work, native_seconds
from tp_residual.parallel.group import TensorParallelGroup

_NATIVE: dict[str, Work] = {"gemm": "linear", "attention": "attention", "elementwise": "elementwise"}
SHARES = (*_NATIVE, "boundary", "sampler", "python")


class Meter:
    """The product's counters as seconds by part of a step, each moment counted once.

    Kernels that run inside a boundary are the boundary's: how much of a kernel's time that is, is learned from one batch under `watching`,
    since telling it costs two readings a boundary, which the batches that are timed do not pay.
    """

    def __init__(self, group: TensorParallelGroup) -> None:
        self._group = group
        self._inside = dict.fromkeys(_NATIVE, 0.0)

    def __call__(self) -> dict[str, float]:
        counters = self._group.counters
        seconds = _kernels() | {"boundary": counters.boundary_s, "sampler": counters.sampler_s}
        return seconds | {f"{name} inside": spent for name, spent in self._inside.items()}

    @contextmanager
    def watching(self) -> Iterator[None]:
        ranges, self._group.ranges = self._group.ranges, self._range
        try:
            yield
        finally:
            self._group.ranges = ranges

    def _range(self, name: str) -> Any:
        return self._boundary() if name.startswith("boundary ") else nullcontext()

    @contextmanager
    def _boundary(self) -> Iterator[None]:
        before = _kernels()
        yield
        for name, seconds in difference(_kernels(), before).items():
            self._inside[name] += seconds


def _kernels() -> dict[str, float]:
    native = native_seconds()
    return {name: 0.0 if native is None else native[work] for name, work in _NATIVE.items()}


def difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in after}


def shares(spent: Iterable[Mapping[str, float]], watched: Mapping[str, float]) -> dict[str, float | None]:
    """Of one rank's phases, each part's share of their seconds; None where a part is not counted, which `watched`, a phase under
    `Meter.watching`, shows by a counter that stood still. python: what is left.
    """
    phases = list(spent)
    whole = sum(phase["seconds"] for phase in phases)
    found: dict[str, float | None] = {}
    for name in _NATIVE:
        outside = watched[name] - watched[f"{name} inside"]
        total = sum(phase[name] for phase in phases)
        found[name] = total * outside / watched[name] / whole if outside > 0 else None
    for name in ("boundary", "sampler"):
        found[name] = sum(phase[name] for phase in phases) / whole
    counted = [share for share in found.values() if share is not None]
    found["python"] = 1.0 - sum(counted) if len(counted) == len(found) else None
    return found


def why_missing(name: str, device: torch.device) -> str:
    """Of a share that is None."""
    if device.type == "cuda":
        return "the host's clock sees launches there, not what runs; generate --profile shows it"
    if name == "python":
        return "it is what the others leave, and one of them is not counted"
    return f"no compiled kernel does {_NATIVE[name]} here, and only those are counted"
