"""Seconds that this process has spent inside compiled kernels, by what they do: what is left of a step is Python and the rest of torch.

Counted by the kernels themselves, always: two readings of a clock a call. `exchange` holds the waits for other ranks; `boundary_s` of a
group's counters holds those, too, and what Python does around them.
"""

import ctypes
import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from tp_residual.kernels import build

Work = Literal["linear", "attention", "elementwise", "exchange"]

WORKS: tuple[Work, ...] = ("linear", "attention", "elementwise", "exchange")


def native_seconds() -> dict[Work, float] | None:
    """Since the process began; None where there are no compiled kernels."""
    library = _library()
    return None if library is None else {work: library.tpr_native_ns(at) / 1e9 for at, work in enumerate(WORKS)}


@contextmanager
def counted(work: Work) -> Iterator[None]:
    """For work that another library does in the kernels' place."""
    library, began = _library(), time.perf_counter_ns()
    try:
        yield
    finally:
        if library is not None:
            library.tpr_add_native_ns(WORKS.index(work), time.perf_counter_ns() - began)


@functools.cache
def _library() -> ctypes.CDLL | None:
    if build.unavailable() is not None:
        return None
    library = build.library()
    library.tpr_native_works.restype = ctypes.c_int32
    assert library.tpr_native_works() == len(WORKS)
    library.tpr_native_ns.argtypes, library.tpr_native_ns.restype = (ctypes.c_int32,), ctypes.c_uint64
    library.tpr_add_native_ns.argtypes, library.tpr_add_native_ns.restype = (ctypes.c_int32, ctypes.c_uint64), None
    return library
