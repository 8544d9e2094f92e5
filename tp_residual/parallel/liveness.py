"""Who is alive, and whom this rank waits for: processes of this host, and a thread that speaks while a wait lasts."""

import json
import logging
import os
import socket
import threading
import time
from dataclasses import dataclass

import torch.distributed as dist

from tp_residual.parallel.record import CollectiveRecord, Limits

logger = logging.getLogger("tp_residual")

_WAKE_S = 1.0
FIRST_NOTICE_S = 5.0  # then after twice as long each time


@dataclass(frozen=True)
class Process:
    """Where a rank runs. host: equal only where process ids mean the same."""

    host: str
    pid: int

    @classmethod
    def own(cls) -> "Process":
        return cls(host_identity(), os.getpid())

    def to_json(self) -> str:
        return json.dumps([self.host, self.pid])

    @classmethod
    def from_json(cls, text: str) -> "Process":
        return cls(*json.loads(text))

    def is_gone(self) -> bool:
        """Whether it is known to be dead; never true for a process of another host. A zombie is dead."""
        if self.host != host_identity():
            return False
        try:
            with open(f"/proc/{self.pid}/stat") as stat:
                return stat.read().rpartition(")")[2].split()[0] in "ZX"
        except FileNotFoundError:
            return os.path.isdir("/proc/self")
        except OSError:
            return False


def host_identity() -> str:
    """The running kernel and its process-id namespace: containers of one machine may share a host name and not their ids."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


class WaitReporter:
    """A thread that publishes this rank's record once a second, and logs a line while a wait lasts: for how long, in what, for whom.

    The lowest waiting rank speaks. store: a connection of the thread's own, since a blocked wait holds its connection.
    """

    def __init__(self, rank: int, size: int, record: CollectiveRecord, limits: Limits, store: dist.Store) -> None:
        self._rank, self._size, self._record, self._limits, self._store = rank, size, record, limits, store
        self._closed = threading.Event()
        self._published = ""
        self._announced: tuple[float, float] = (
            0.0,
            FIRST_NOTICE_S,
        )  # (start of the wait, seconds at which to speak next)
        self._thread = threading.Thread(target=self._run, name="tp_residual-waits", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(_WAKE_S)

    def _run(self) -> None:
        while not self._closed.wait(_WAKE_S):
            try:
                self._publish()
                self._speak()
            except RuntimeError:  # the side channel is gone, and whoever is blocked will hear of it
                return

    def _publish(self) -> None:
        state = str(self._record)
        if state != self._published:
            self._store.set(f"state/{self._rank}", state)
            self._published = state

    def _speak(self) -> None:
        since, due_s = self._announced
        if not self._record.waiting:
            return
        if since != self._record.since:
            since, due_s = self._record.since, FIRST_NOTICE_S
        waited_s = time.monotonic() - since
        if waited_s < due_s:
            self._announced = since, due_s
            return
        self._announced = since, 2 * due_s
        states = {peer: said(self._store, peer) for peer in range(self._size) if peer != self._rank}
        here = f"#{self._record.number} "  # a peer may have waited elsewhere when it last spoke
        slow = {peer: state for peer, state in states.items() if not (state.startswith("waiting") and here in state)}
        if any(peer < self._rank and peer not in slow for peer in states):
            return
        whom = "; ".join(f"rank {peer}: {state}" for peer, state in slow.items()) or "every rank is waiting"
        logger.warning(
            "rank %d of %d has been %s for %.0f s (%s); %s",
            self._rank,
            self._size,
            self._record,
            waited_s,
            self._limits,
            whom,
        )


def said(store: dist.Store, rank: int) -> str:
    """What that rank last published of itself."""
    key = f"state/{rank}"
    return store.get(key).decode() if store.check([key]) else "no word yet"
