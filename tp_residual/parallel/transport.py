"""The wire: five collectives over contiguous tensors, each returning a new tensor. Only this file calls torch.distributed's collectives
(and `bench/collectives.py`, which times their in-place forms).

Autograd, counters and the record live above (`group.py`, `collectives.py`), so another wire is another small class.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from tp_residual.errors import LayoutError
from tp_residual.parallel.record import Limits

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


def require_chunks(kind: str, x: Tensor, size: int) -> None:
    """Raises LayoutError unless dimension 0 can be scattered: a wire trusts it, and would write beyond its buffers."""
    if x.dim() == 0 or x.shape[0] % size:
        raise LayoutError(
            f"{kind} of shape {list(x.shape)} over {size} ranks: dimension 0 is scattered in equal chunks; pad it to a multiple of {size}"
        )


@runtime_checkable
class SumsInRankOrder(Protocol):
    """A transport that can add in rank order itself: summands widened to fp32 at least, and so is the sum it returns."""

    def ordered_all_reduce(self, x: Tensor) -> Tensor: ...
    def ordered_reduce_scatter(self, x: Tensor) -> Tensor: ...


@runtime_checkable
class StartsEarly(Protocol):
    """A transport whose collectives run while their ranks compute. Each returns at once a function that waits for the result; it is called
    once, in the order in which the collectives were started.
    """

    def start_all_reduce(self, x: Tensor) -> Callable[[], Tensor]: ...
    def start_reduce_scatter(self, x: Tensor) -> Callable[[], Tensor]: ...
    def start_all_gather(self, x: Tensor) -> Callable[[], Tensor]: ...
    def start_all_to_all(self, x: Tensor) -> Callable[[], Tensor]: ...


class TorchTransport:
    """A torch process group. Under gloo, every wait ends after the limit of the present phase with a RuntimeError.

    Under NCCL it orders the streams and returns: a limit would make the host wait for the device at each call. There, the group's
    CudaWatchdog keeps the time.
    """

    def __init__(self, process_group: dist.ProcessGroup, limits: Limits, *, device: torch.device) -> None:
        self.process_group = process_group
        self.size = process_group.size()
        self.limits = None if device.type == "cuda" else limits

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.start_all_reduce(x)()

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self.start_reduce_scatter(x)()

    def all_gather(self, x: Tensor) -> Tensor:
        return self.start_all_gather(x)()

    def all_to_all(self, x: Tensor) -> Tensor:
        return self.start_all_to_all(x)()

    def start_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        out = x.clone()
        return self._end(dist.all_reduce(out, group=self.process_group, async_op=True), x, out)

    def start_reduce_scatter(self, x: Tensor) -> Callable[[], Tensor]:
        require_chunks("reduce_scatter", x, self.size)
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        return self._end(_reduce_scatter(out, x, group=self.process_group, async_op=True), x, out)

    def start_all_gather(self, x: Tensor) -> Callable[[], Tensor]:
        out = x.new_empty((x.shape[0] * self.size, *x.shape[1:]))
        return self._end(_all_gather(out, x, group=self.process_group, async_op=True), x, out)

    def start_all_to_all(self, x: Tensor) -> Callable[[], Tensor]:
        require_chunks("all_to_all", x, self.size)
        out = torch.empty_like(x)
        return self._end(dist.all_to_all_single(out, x, group=self.process_group, async_op=True), x, out)

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        out = x.clone()
        self.wait(dist.broadcast(out, group_src=root, group=self.process_group, async_op=True))
        return out

    def _end(self, work: dist.Work, x: Tensor, out: Tensor) -> Callable[[], Tensor]:
        def wait(_keep: Tensor = x) -> Tensor:
            self.wait(work)
            return out

        return wait

    def wait(self, work: dist.Work) -> None:
        if self.limits is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=self.limits.seconds))


class PeerTransport:
    """Some ranks of a process group, by direct exchange within it; sums are in member order.

    No process group of their own: torch names one made without WORLD after the number of groups that a rank has made, so chained
    sets (ranks 1 and 2, ranks 2 and 3) wait for each other until they expire, and each would cost another NCCL communicator.
    """

    def __init__(self, whole: TorchTransport, members: Sequence[int]) -> None:
        self.whole, self.members = whole, tuple(members)
        self.size, self.rank = len(self.members), self.members.index(whole.process_group.rank())

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._sum(self._exchange([x] * self.size))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        require_chunks("reduce_scatter", x, self.size)
        return self._sum(self._exchange(x.chunk(self.size)))

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._exchange([x] * self.size))

    def all_to_all(self, x: Tensor) -> Tensor:
        require_chunks("all_to_all", x, self.size)
        return torch.cat(self._exchange(x.chunk(self.size)))

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        return self._exchange([x] * self.size)[root].clone()

    def _exchange(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Send piece i to member i; what the members sent here, in order."""
        received = [piece if i == self.rank else torch.empty_like(piece) for i, piece in enumerate(pieces)]
        operations = []
        for i, member in enumerate(self.members):
            if i != self.rank:
                operations.append(dist.P2POp(dist.isend, pieces[i], group=self.whole.process_group, group_peer=member))
                operations.append(
                    dist.P2POp(dist.irecv, received[i], group=self.whole.process_group, group_peer=member)
                )
        for work in dist.batch_isend_irecv(operations):
            self.whole.wait(work)
        return received

    @staticmethod
    def _sum(summands: list[Tensor]) -> Tensor:
        total = summands[0].clone()
        for summand in summands[1:]:
            total += summand
        return total


class CudaWatchdog:
    """Notices a collective that never completes on the device, where waiting does not block the host.

    One daemon thread polls the event recorded behind each call, in order; the first that is still pending at its limit is handed to
    `on_expiry`, with the description of its call, once.
    """

    def __init__(self, limits: Limits, on_expiry: Callable[[str], None], poll_s: float = 0.2) -> None:
        self._calls: queue.SimpleQueue[tuple[float, str, torch.cuda.Event] | None] = queue.SimpleQueue()
        self._limits, self._on_expiry, self._poll_s = limits, on_expiry, poll_s
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
                if time.monotonic() - issued > self._limits.seconds:
                    self._on_expiry(description)
                    return
                time.sleep(self._poll_s)
