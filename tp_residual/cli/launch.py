"""Ranks: whether this process is one, how to become several, and what each sets up. Imports torch only inside a rank."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from tp_residual.cli.spawn import LAUNCHER_PID, STORE_FD
from tp_residual.errors import CollectiveError, RequestError

if TYPE_CHECKING:
    from tp_residual.parallel.group import TensorParallelGroup, TransportChoice


logger = logging.getLogger("tp_residual")

SHORTEST_TIMEOUT_S, LONGEST_TIMEOUT_S = 0.1, 1e6
# start: until all ranks have met. load: a rank may read its weights for long before its first word. step: a prefill's computation.
_PHASE_LIMITS_S = {"start": 300.0, "load": 1800.0, "step": 300.0}
_DEFAULTS = (
    "defaults: " + ", ".join(f"{phase}={seconds:g}" for phase, seconds in _PHASE_LIMITS_S.items()) + ", else 120"
)
_FIRST_NOTICE_S = 10.0
_INTERRUPT_S = 2.0  # what the main thread has, after Ctrl-C, to write what is finished
# How long a rank whose error all ranks share lets the others say it, too, before the launcher ends them.
_AGREEMENT_S = 1.5


def under_launcher() -> bool:
    """torchrun, or anything else that gives each process its RANK and WORLD_SIZE."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def resolve_tp(requested: int | None, replicas: int | None = None) -> tuple[int, int]:
    """(tensor-parallel size, replicas): their product is the launcher's world size, or how many ranks are to be started.

    What is not given: one replica outside a launcher; under it, as many as its world size has room for, or one of all ranks.
    Raises RequestError for sizes that do not fit.
    """
    for option, value in (("--tp", requested), ("--replicas", replicas)):
        if value is not None and value < 1:
            raise RequestError(f"{option} {value} must be at least 1")
    if not under_launcher():
        return requested or 1, replicas or 1
    world_size = int(os.environ["WORLD_SIZE"])
    for option, value in (("--tp", requested), ("--replicas", replicas)):
        if value is not None and world_size % value:
            legal = ", ".join(str(size) for size in range(1, world_size + 1) if world_size % size == 0)
            raise RequestError(
                f"the launcher's world size {world_size} is no multiple of {option} {value}; use {legal}"
            )
    tp_size = requested or world_size // (replicas or 1)
    if replicas not in (None, world_size // tp_size):
        raise RequestError(
            f"--tp {tp_size} and --replicas {replicas} are {tp_size * replicas} ranks, and the launcher's world size is {world_size}; "
            f"use --replicas {world_size // tp_size} or leave it out"
        )
    return tp_size, world_size // tp_size


@dataclass(frozen=True)
class TimeLimits:
    """The limit of every wait in seconds, and those of the phases that have one of their own."""

    default_s: float = 120.0
    by_phase: Mapping[str, float] = field(default_factory=lambda: dict(_PHASE_LIMITS_S))

    @property
    def longest_s(self) -> float:
        return max(self.default_s, *self.by_phase.values())


def parse_timeouts(texts: Sequence[str]) -> TimeLimits:
    """From `S` (every phase) and `PHASE=S`, the last word for each.

    Raises RequestError for limits that torch cannot keep, or that nothing could meet.
    """
    limits = TimeLimits()
    by_phase = dict(limits.by_phase)
    default_s = limits.default_s
    for text in texts:
        phase, equals, number = text.rpartition("=")
        try:
            seconds = float(number)
        except ValueError:
            raise RequestError(f"--timeout {text!r} is not S or PHASE=S with a number of seconds") from None
        if not SHORTEST_TIMEOUT_S <= seconds <= LONGEST_TIMEOUT_S:
            raise RequestError(
                f"--timeout {text} is not between {SHORTEST_TIMEOUT_S:g} and {LONGEST_TIMEOUT_S:g} seconds; {_DEFAULTS}"
            )
        if not equals:
            default_s, by_phase = seconds, dict.fromkeys(by_phase, seconds)
        elif phase in by_phase:
            by_phase[phase] = seconds
        else:
            raise RequestError(f"--timeout {text!r}: phase {phase!r} is not one of {', '.join(by_phase)}")
    return TimeLimits(default_s, by_phase)


def open_group(
    device: str, limits: TimeLimits, *, checked: bool = False, transport: TransportChoice = "auto"
) -> TensorParallelGroup:
    """This rank's group over all ranks of the launcher, or a group of one. Refuses more local ranks than GPUs before NCCL starts."""
    import torch
    import torch.distributed as dist

    from tp_residual.kernels.build import unavailable
    from tp_residual.parallel.group import TensorParallelGroup, first_line

    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count()
    if device == "cuda" and gpus < local_ranks:
        fewer = f"--tp {gpus} or " if gpus else ""
        raise RequestError(
            f"--device cuda: local ranks={local_ranks} is more than visible GPUs={gpus}; use {fewer}--device cpu"
        )
    on_gpu = device != "cpu" and gpus >= local_ranks
    place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(place)
    if not on_gpu:
        unavailable()  # compiles what is missing now, and not in the middle of what is timed
    if not under_launcher():
        return TensorParallelGroup.single(place)
    start_s = limits.by_phase["start"]
    waiting = threading.Timer(_FIRST_NOTICE_S, _say_waiting_for_peers, [start_s])
    waiting.daemon = True
    waiting.start()
    try:
        # the process group's limit stands above those of the phases, which each wait brings itself
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", timeout=timedelta(seconds=limits.longest_s), **_rendezvous(start_s)
        )
    except (RuntimeError, ValueError) as error:
        raise CollectiveError(
            f"rank {os.environ['RANK']} could not reach its peers within {start_s:g} s: {first_line(error)}"
        ) from error
    finally:
        waiting.cancel()
    group = TensorParallelGroup.from_world(
        device=place, timeout_s=limits.default_s, limits=limits.by_phase, checked=checked, transport=transport
    )
    group.enter_phase("start")
    watch_group(group)
    return group


def watch_group(group: TensorParallelGroup) -> None:
    """When this rank is ended, it says where it was in `group`, too."""
    _endings.groups.append(group)


def _rendezvous(start_s: float) -> dict[str, Any]:
    """Arguments of init_process_group: nothing under torchrun, our launcher's inherited socket otherwise."""
    if LAUNCHER_PID not in os.environ:
        return {}
    from torch.distributed import TCPStore

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        size,
        rank == 0,
        timedelta(seconds=start_s),
        wait_for_workers=False,
        master_listen_fd=int(os.environ[STORE_FD]) if rank == 0 else None,
    )
    return {"store": store, "rank": rank, "world_size": size}


def _say_waiting_for_peers(start_s: float) -> None:
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    logger.warning("rank %s of %s waits for the others to start (limit %g s of start)", rank, size, start_s)


def leave(code: int, *, shared_error: bool = False) -> NoReturn:
    """End a rank at once: after a failure, the interpreter's own exit can wait for a collective that never returns.

    shared_error: every rank has found the same; give each the time to say so.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if shared_error and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        time.sleep(_AGREEMENT_S)
    os._exit(code)


class _Endings:
    """How a rank ends when it is told to: with one line that says where it was, at once, whatever the main thread is blocked in.

    A thread hears the signals, woken by a socket: blocked inside a collective, the main thread would never run a Python handler. SIGTERM
    (a launcher's, when a peer has failed) ends the rank; SIGINT lets the main thread finish what it writes, for a moment.
    """

    def __init__(self) -> None:
        self.groups: list[TensorParallelGroup] = []

    def watch(self) -> None:
        self._readable, writable = socket.socketpair()
        writable.setblocking(False)
        self._writable = writable  # closed, it would lose the signal
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(signal.SIGINT, self._interrupt)
        signal.set_wakeup_fd(writable.fileno(), warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # our launcher starts ranks with it blocked
        threading.Thread(target=self._listen, name="tp_residual-signals", daemon=True).start()

    def _interrupt(self, *_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal and the launcher may both send it
        raise KeyboardInterrupt

    def _listen(self) -> None:
        while received := self._readable.recv(1):
            if received[0] == signal.SIGTERM:
                # in a thread of its own: whoever read stderr may be gone, or no longer read
                speaker = threading.Thread(target=self._say_where, args=["ended by SIGTERM"], daemon=True)
                speaker.start()
                speaker.join(1.0)
                os._exit(128 + signal.SIGTERM)
            if received[0] == signal.SIGINT:
                time.sleep(_INTERRUPT_S)
                os._exit(128 + signal.SIGINT)

    def _say_where(self, how: str) -> None:
        if not self.groups:
            where = f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} {how}: starting, no collective yet"
        else:
            world, *replica = self.groups
            dead = ", ".join(map(str, world.dead_peers()))
            gone = f" (rank {dead} is gone)" if dead else ""
            where = f"rank {world.rank} of {world.size} {how}{gone}: " + "; in its replica ".join(
                str(group.record) for group in (world, *replica)
            )
        os.write(2, f"tp_residual: {where}\n".encode())


_endings = _Endings()


def prepare_rank() -> None:
    """First thing in a rank, before anything slow: end when told to, and with the launcher.

    Killed, a launcher cannot end its ranks, and they would compute on: the kernel is asked for a SIGTERM when it dies.
    """
    # read when torch is imported: a dead peer makes its store warn with a C++ stack, beside our message
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its profiler announces each start and stop
    _endings.watch()
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.environ.get(LAUNCHER_PID, str(os.getppid())) != str(os.getppid()):
            os._exit(128 + signal.SIGTERM)  # it died before the call above
