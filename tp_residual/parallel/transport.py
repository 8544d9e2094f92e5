"""The wire: five collectives over contiguous tensors, each returning a new tensor. Only this file calls torch.distributed's collectives.

Autograd, counters and the record live above (`group.py`, `collectives.py`), so another wire is another small class.
"""

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed these two; the older names warn there and are all that earlier releases have.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Transport(Protocol):
    """Inputs are contiguous and never written to; dimension 0 is the one that is scattered or gathered, in equal chunks."""

    size: int

    def all_reduce(self, x: Tensor) -> Tensor: ...
    def reduce_scatter(self, x: Tensor) -> Tensor: ...
    def all_gather(self, x: Tensor) -> Tensor: ...
    def all_to_all(self, x: Tensor) -> Tensor: ...
    def broadcast(self, x: Tensor, root: int) -> Tensor: ...


class TorchTransport:
    """A torch process group (gloo or NCCL). Every wait ends after `timeout_s` seconds with a RuntimeError."""

    def __init__(self, process_group: dist.ProcessGroup, timeout_s: float) -> None:
        self.process_group = process_group
        self.size = process_group.size()
        self.timeout = timedelta(seconds=timeout_s)

    def all_reduce(self, x: Tensor) -> Tensor:
        out = x.clone()
        self._wait(dist.all_reduce(out, group=self.process_group, async_op=True))
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        self._wait(_reduce_scatter(out, x, group=self.process_group, async_op=True))
        return out

    def all_gather(self, x: Tensor) -> Tensor:
        out = x.new_empty((x.shape[0] * self.size, *x.shape[1:]))
        self._wait(_all_gather(out, x, group=self.process_group, async_op=True))
        return out

    def all_to_all(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self._wait(dist.all_to_all_single(out, x, group=self.process_group, async_op=True))
        return out

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        out = x.clone()
        self._wait(dist.broadcast(out, group_src=root, group=self.process_group, async_op=True))
        return out

    def _wait(self, work: dist.Work) -> None:
        work.wait(self.timeout)


class CudaWatchdog:
    """Notices a collective that never completes on the device, where waiting does not block the host.

    One daemon thread polls the event recorded behind each call, in order; the first that is still pending `timeout_s` after it was
    issued is handed to `on_expiry`, with the description of its call, once.
    """

    def __init__(self, timeout_s: float, on_expiry: Callable[[str], None], poll_s: float = 0.2) -> None:
        self._calls: queue.SimpleQueue[tuple[float, str, torch.cuda.Event] | None] = queue.SimpleQueue()
        self._timeout_s, self._on_expiry, self._poll_s = timeout_s, on_expiry, poll_s
        self._thread = threading.Thread(target=self._watch, name="tp_residual-cuda-watchdog", daemon=True)
        self._thread.start()

    def watch(self, description: str, event: torch.cuda.Event) -> None:
        self._calls.put((time.monotonic(), description, event))

    def close(self) -> None:
        self._calls.put(None)

    def _watch(self) -> None:
        while (call := self._calls.get()) is not None:
            issued, description, event = call
            while not event.query():
                if time.monotonic() - issued > self._timeout_s:
                    self._on_expiry(description)
                    return
                time.sleep(self._poll_s)
