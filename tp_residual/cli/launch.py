"""Ranks: whether this process is one, how to become several, and what each sets up. Imports torch only inside a rank."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from tp_residual.errors import CollectiveError, RequestError

if TYPE_CHECKING:
    from tp_residual.parallel.group import TensorParallelGroup


SHORTEST_TIMEOUT_S, LONGEST_TIMEOUT_S = 0.1, 1e6
# How long a rank whose error all ranks share lets the others say it, too, before the launcher ends them.
_AGREEMENT_S = 1.5


def under_launcher() -> bool:
    """torchrun, or anything else that gives each process its RANK and WORLD_SIZE."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def resolve_tp(requested: int | None) -> int:
    """The tensor-parallel size; RequestError when --tp and the launcher's world size differ."""
    if requested is not None and requested < 1:
        raise RequestError(f"--tp {requested} must be at least 1")
    if not under_launcher():
        return requested or 1
    world_size = int(os.environ["WORLD_SIZE"])
    if requested not in (None, world_size):
        raise RequestError(
            f"--tp {requested} differs from the launcher's world size {world_size}; use --tp {world_size} or leave it out"
        )
    return world_size


def relaunch(argv: list[str], tp_size: int) -> NoReturn:
    """Become torchrun with `tp_size` ranks of the same command on this machine."""
    # each rank sets its own number; unset, torchrun prints a warning about it
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(tp_size),
        "-m",
        "tp_residual",
        *argv,
    ]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *command])


def threads_per_rank(requested: int | None) -> int:
    """--threads, or the usable cores divided by the ranks on this machine; at least one."""
    usable = len(os.sched_getaffinity(0))
    if requested is not None:
        if not 1 <= requested <= usable:
            raise RequestError(
                f"--threads {requested} is not between 1 and the {usable} usable cores; use 1 to {usable}"
            )
        return requested
    return max(1, usable // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def check_timeout(seconds: float) -> None:
    """Raises RequestError for a limit that torch cannot keep, or that nothing could meet."""
    if not SHORTEST_TIMEOUT_S <= seconds <= LONGEST_TIMEOUT_S:
        raise RequestError(
            f"--timeout {seconds:g} is not between {SHORTEST_TIMEOUT_S:g} and {LONGEST_TIMEOUT_S:g} seconds; the default is 300"
        )


def open_group(device: str, timeout_s: float, *, checked: bool = False) -> TensorParallelGroup:
    """This rank's group over all ranks of the launcher, or a group of one. Refuses more local ranks than GPUs before NCCL starts."""
    if under_launcher():
        _end_with_launcher()
    # a dead peer makes torch's store warn with a C++ stack, beside our message
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch
    import torch.distributed as dist

    from tp_residual.parallel.group import TensorParallelGroup

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
    if not under_launcher():
        return TensorParallelGroup.single(place)
    limit = timedelta(seconds=timeout_s)
    try:
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=limit)
    except RuntimeError as error:
        raise CollectiveError(
            f"rank {os.environ['RANK']} could not reach its peers within {timeout_s:g} s: {error}"
        ) from error
    group = TensorParallelGroup.from_world(device=place, timeout_s=timeout_s, checked=checked)
    _report_on_sigterm(group)
    return group


def leave(code: int, *, shared_error: bool = False) -> NoReturn:
    """End a rank at once: after a failure, the interpreter's own exit can wait for a collective that never returns.

    shared_error: every rank has found the same; give each the time to say so.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if shared_error and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        time.sleep(_AGREEMENT_S)
    os._exit(code)


def _end_with_launcher() -> None:
    """Ask the kernel for a SIGTERM when the launcher dies: killed, it could not end its ranks, and they would compute on."""
    PR_SET_PDEATHSIG = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _report_on_sigterm(group: TensorParallelGroup) -> None:
    """The launcher ends ranks with SIGTERM when one has failed; each then says where it was, and which rank is gone.

    A thread does it, woken by a socket: the main thread may be blocked inside a collective and would never run a Python handler.
    """
    here = socket.gethostname()
    ranks = [json.loads(text) for text in group.share("process", json.dumps([here, os.getpid()]))]
    readable, writable = socket.socketpair()
    writable.setblocking(False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(writable.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        while received := readable.recv(1):
            if received[0] == signal.SIGTERM:
                gone = [str(rank) for rank, (host, pid) in enumerate(ranks) if host == here and not _alive(pid)]
                after = f" (rank {', '.join(gone)} is gone)" if gone else ""
                os.write(
                    2,
                    f"tp_residual: rank {group.rank} of {group.size} ended by SIGTERM{after}: {group.record}\n".encode(),
                )
                os._exit(128 + signal.SIGTERM)

    _wakeup_sockets.extend((readable, writable))
    threading.Thread(target=watch, name="tp_residual-sigterm", daemon=True).start()


def _alive(pid: int) -> bool:
    """Whether a process of this machine still runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# Open for the life of the process: a closed wake-up socket would lose the signal.
_wakeup_sockets: list[socket.socket] = []
