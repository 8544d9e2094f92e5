"""Recorded passes: the calls of compiled kernels that one pass made, to be made again on the same memory without Python in between.

At one token a decoder layer is ten calls of some microseconds each, and the Python around them takes longer than they do. What a CUDA
graph is on a GPU, a recording is here: a pass runs once as always, while each kernel notes its call; `Program.run` makes the same calls
from one C loop. What is not a noted call (an operator of torch that computes, a collective over another wire) would be missing from it: so
whatever else happens is seen, and the recording is refused with a reason.
"""

import ctypes
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tp_residual.kernels import build

Kind = Literal["linear", "rope", "silu", "append", "attend", "add_norm", "exchange"]

KINDS: tuple[Kind, ...] = ("linear", "rope", "silu", "append", "attend", "add_norm", "exchange")

_ALLOCATES = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty")


class _Op(ctypes.Structure):
    """csrc/program.cpp's Op."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("in_boundary", ctypes.c_int32),
        ("call", ctypes.c_void_p),
        ("channel", ctypes.c_void_p),
    )


class _Progress(ctypes.Structure):
    _fields_ = (("next", ctypes.c_int64), ("status", ctypes.c_int32), ("boundary_ns", ctypes.c_uint64))


@dataclass(frozen=True)
class Collective:
    """What an exchange is called in the group's record. shape: a tensor on `meta`. A scatter and a gather share one exchange."""

    kind: str
    tag: str
    shape: Tensor


class Recording:
    """What a pass does, as it does it. in_boundary: set by who completes a sum, around what belongs to it."""

    def __init__(self) -> None:
        self.foreign = ""  # the first thing that was no noted call
        self.in_boundary = False
        self.noted_exchanges: set[int] = set()
        self._ops: list[tuple[int, bool, int, int | None]] = []
        self._collectives: dict[int, tuple[Collective, ...]] = {}
        self._kept: list[object] = []

    def add(self, kind: Kind, call: ctypes.Structure, *kept: object, channel: int | None = None) -> None:
        """kept: what must live as long as the call's addresses are used."""
        self._ops.append((KINDS.index(kind), self.in_boundary, ctypes.addressof(call), channel))
        self._kept.append((call, kept))

    def add_exchange(
        self, call: ctypes.Structure, channel: int, collectives: tuple[Collective, ...], *kept: object
    ) -> None:
        self._collectives[len(self._ops)] = collectives
        self.add("exchange", call, *kept, channel=channel)

    def refuse(self, what: str) -> None:
        self.foreign = self.foreign or what

    def program(self, *kept: object) -> "Program":
        """kept: inputs and outputs of the pass, whose memory the program reads and writes."""
        assert not self.foreign, self.foreign
        return Program(self._ops, self._collectives, (self._kept, kept))


class Program:
    """A recorded pass. collectives: all of them, in order. boundary_s: seconds inside boundaries so far."""

    def __init__(
        self, ops: list[tuple[int, bool, int, int | None]], collectives: dict[int, tuple[Collective, ...]], kept: object
    ) -> None:
        self.collectives = tuple(each for exchange in _in_order(collectives) for each in exchange)
        self.boundary_s = 0.0
        self._first = dict(
            zip(sorted(collectives), accumulate(map(len, _in_order(collectives)), initial=0), strict=False)
        )
        self._ops = (_Op * len(ops))(*(_Op(*op) for op in ops))
        self._count, self._kept = len(ops), kept
        self._progress = _Progress()
        self._function = _function()

    def run(self, wait: Callable[[int, int, int], None]) -> None:
        """Make the calls. wait(number of a collective, address of its exchange, status): for one that did not end at once."""
        progress = self._progress
        progress.next, progress.boundary_ns = 0, 0
        while True:
            self._function(ctypes.addressof(self._ops), self._count, ctypes.addressof(progress))
            if progress.next >= self._count:
                break
            at, began = progress.next, time.perf_counter()
            wait(self._first[at], self._ops[at].call, progress.status)
            self.boundary_s += time.perf_counter() - began
            progress.next = at + 1
        self.boundary_s += progress.boundary_ns / 1e9


def _in_order(collectives: dict[int, tuple[Collective, ...]]) -> list[tuple[Collective, ...]]:
    return [collectives[at] for at in sorted(collectives)]


_ACTIVE: ContextVar[Recording | None] = ContextVar("tp_residual_recording", default=None)


def active() -> Recording | None:
    """The recording that the running code is part of, as torch has its grad mode."""
    return _ACTIVE.get()


@contextmanager
def recording() -> Iterator[Recording]:
    """Within it, kernels note their calls, and operators of torch that compute are held against the recording."""
    current = Recording()
    token = _ACTIVE.set(current)
    try:
        with _Watch(current):
            yield current
    finally:
        _ACTIVE.reset(token)


class _Watch(TorchDispatchMode):
    def __init__(self, current: Recording) -> None:
        super().__init__()
        self._recording = current

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's own hook: else the first operator imports torch._dynamo, three seconds in the middle of a step."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name not in _ALLOCATES and (func._schema.is_mutable or not _only_views(out, args)):
            self._recording.refuse(f"the operator {func}")
        return out


def _only_views(out: Any, args: Any) -> bool:
    """Whether what came out is the first argument's memory, and so nothing was computed."""
    if not args or not isinstance(args[0], Tensor):
        return False
    memory = args[0].untyped_storage().data_ptr()
    results = out if isinstance(out, list | tuple) else [out]
    return all(isinstance(each, Tensor) and each.untyped_storage().data_ptr() == memory for each in results)


@functools.cache
def _function() -> Callable[[int, int, int], None]:
    function = build.library().tpr_run_program
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p), None
    run: Callable[[int, int, int], None] = function
    return run
