"""Several replicas of a model work through one list: who takes which part, and one place where the answers arrive.

Work is taken, not dealt out: a replica whose engine has room takes a little more from a counter in the side channel of all ranks.
Answers go the same way to rank 0, which alone writes them: one process owns the output, and no other machine needs the file.
"""

import json
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch.distributed as dist

from tp_residual.errors import CollectiveError
from tp_residual.parallel.group import TensorParallelGroup

_POLL_S = 0.02  # how late rank 0 may notice an answer
_BEAT_S = 1.0  # between two signs of life
_SILENCE_S = 10.0  # without one, a rank is given up: a machine that is cut off says nothing
_END = ""  # a replica's last message; no JSON value is empty
_WRITER = "rank 0, which writes the answers,"


class SharedWork:
    """A context that every rank of `world` opens; `group` is this rank's replica, one of equally many consecutive ranks each.

    write: called on rank 0 of the world, one answer at a time, with whatever any replica's rank 0 delivered (a JSON value).
    A rank that is gone, or silent for 10 s, is a CollectiveError on every rank, and an error of `write` is raised on rank 0: by `check`,
    or when more is taken.
    """

    def __init__(self, world: TensorParallelGroup, group: TensorParallelGroup, write: Callable[[Any], None]) -> None:
        self.world, self.group = world, group
        self.replicas, self.replica = world.size // group.size, world.rank // group.size
        self._write, self._writing = write, threading.Lock()
        self._failure: Exception | None = None
        self._heard = math.inf  # when rank 0 last answered another rank
        self._closed, self._all_written = threading.Event(), threading.Event()
        self._sent = self._taken = self._turn = 0

    def __enter__(self) -> "SharedWork":
        if self.replicas > 1:
            # connections of the threads' own: one that is cut off blocks its connection, and must not block this rank
            try:
                self._store: dist.Store = self.world.store.clone()  # type: ignore[attr-defined]
                self._watched: dist.Store = self.world.store.clone()  # type: ignore[attr-defined]
            except RuntimeError:
                raise self._lost(f"{_WRITER} is gone") from None
            self._post = ThreadPoolExecutor(1, "tp_residual-answers")
            if self.world.rank != 0:
                self._heard = time.monotonic()
            watch = self._receive if self.world.rank == 0 else self._beat
            threading.Thread(target=watch, name="tp_residual-replicas", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        if self.replicas > 1:
            self._post.shutdown(wait=error is None)

    def take(self, total: int, most: int) -> range:
        """This replica's next places in a list of `total`, at most `most`: the same on each of its ranks. Empty when all are taken.

        Several replicas take at most half of an equal share of what is left, so that they end together.
        """
        if self.replicas == 1:
            start, self._taken = self._taken, min(total, self._taken + most)
            return range(start, self._taken)
        most = max(1, min(most, -(-(total - self._taken) // (2 * self.replicas))))
        ours = str(self._ask(self._store.add, "work/taken", most)) if self.group.rank == 0 else ""
        self._turn += 1
        end = int(self.group.share(f"take {self._turn}", ours)[0])
        self._taken = min(total, end)
        return range(min(total, end - most), self._taken)

    def finish(self) -> None:
        """Once, when this replica's last answer is delivered: returns when every replica's answers are written."""
        if self.replicas > 1:
            self._wait_for_the_others()

    def deliver(self, answer: Any) -> None:
        """Called by rank 0 of a replica; `write` is called with it within some 20 ms, on rank 0 of the world before this returns."""
        if self.world.rank == 0:
            with self._writing:
                self._write(answer)
        else:
            self._send(json.dumps(answer, ensure_ascii=False))

    def check(self) -> None:
        """Raises what went wrong elsewhere; called between steps."""
        if self._failure is None and time.monotonic() - self._heard > _SILENCE_S:
            self._failure = self._lost(f"{_WRITER} could not be reached for {_SILENCE_S:g} s")
        if self._failure is not None:
            raise self._failure

    def _wait_for_the_others(self) -> None:
        if self.group.rank == 0 and self.world.rank != 0:
            self._send(_END)
        if self.world.rank == 0:
            while not self._all_written.wait(_POLL_S):
                self.check()
            self._store.set("work/finished", "")
        else:
            while not self._ask(self._store.check, ["work/finished"]):
                self.check()
                time.sleep(_POLL_S)

    # -- a rank other than 0: everything goes through one thread, so that a dead connection blocks that

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self._post.submit(call, *arguments).result(_SILENCE_S)
        except (RuntimeError, TimeoutError):
            self.check()
            raise self._lost(f"{_WRITER} is gone or cannot be reached") from None

    def _send(self, text: str) -> None:
        key = f"work/answer/{self.replica}/{self._sent}"
        self._sent += 1
        self._post.submit(self._store.set, key, text).add_done_callback(self._note)

    def _note(self, sent: "Future[None]") -> None:
        if sent.exception() is not None:
            self._failure = self._failure or self._lost(f"{_WRITER} is gone")

    def _beat(self) -> None:
        try:
            while not self._closed.is_set():
                self._watched.add(f"work/alive/{self.world.rank}", 1)
                self._heard = time.monotonic()
                self._look_for_the_dead()
                self._closed.wait(_BEAT_S)
        except CollectiveError as error:
            self._failure = self._failure or error
        except RuntimeError:
            self._failure = self._failure or self._lost(f"{_WRITER} is gone")

    # -- rank 0

    def _receive(self) -> None:
        """Write what the others deliver, and notice who no longer lives."""
        try:
            following = dict.fromkeys(range(1, self.replicas), 0)
            looked = time.monotonic()
            beats = {rank: (0, time.monotonic()) for rank in range(self.group.size, self.world.size)}
            while not self._closed.is_set():
                for replica in list(following):
                    while replica in following and (text := self._take(replica, following[replica])) is not None:
                        following[replica] += 1
                        if text == _END:
                            del following[replica]
                        else:
                            with self._writing:
                                self._write(json.loads(text))
                if not following:
                    self._all_written.set()
                if time.monotonic() - looked > _BEAT_S:
                    looked = time.monotonic()
                    self._look_for_the_silent(beats)
                    self._look_for_the_dead()
                self._closed.wait(_POLL_S)
        except Exception as error:  # the main thread raises it
            self._failure = self._failure or error

    def _take(self, replica: int, number: int) -> str | None:
        key = f"work/answer/{replica}/{number}"
        if not self._watched.check([key]):
            return None
        text = self._watched.get(key).decode()
        self._watched.delete_key(key)
        return text

    def _look_for_the_silent(self, beats: dict[int, tuple[int, float]]) -> None:
        now = time.monotonic()
        for rank, (seen, when) in beats.items():
            beat = self._watched.add(f"work/alive/{rank}", 0)
            if beat != seen:
                beats[rank] = beat, now
            elif now - when > _SILENCE_S:
                raise self._lost(
                    f"rank {rank} (replica {rank // self.group.size}) has been silent for {_SILENCE_S:g} s"
                )

    def _look_for_the_dead(self) -> None:
        if self.world.dead_peers():
            raise self._lost("a rank of this machine has ended")

    def _lost(self, what: str) -> CollectiveError:
        dead = ", ".join(f"the process of rank {rank} has ended" for rank in self.world.dead_peers())
        return CollectiveError(
            f"rank {self.world.rank} of {self.world.size} (replica {self.replica}): {dead or what}; delivered answers are kept"
        )
