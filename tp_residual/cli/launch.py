"""Ranks: whether this process is one, how to become several, and what each sets up. Imports torch only inside a rank."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from tp_residual.errors import CollectiveError, RequestError

if TYPE_CHECKING:
    from tp_residual.parallel.group import TensorParallelGroup


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
            f"--tp {requested} differs from the launcher's world size {world_size}; start {requested} processes or leave --tp out"
        )
    return world_size


def relaunch(argv: list[str], tp_size: int) -> NoReturn:
    """Become torchrun with `tp_size` ranks of the same command on this machine."""
    os.environ.setdefault(
        "OMP_NUM_THREADS", "1"
    )  # each rank sets its own number; unset, torchrun prints a warning about it
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
    if requested is not None:
        if requested < 1:
            raise RequestError(f"--threads {requested} must be at least 1")
        return requested
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def open_group(device: str, timeout_s: float, *, checked: bool = False) -> TensorParallelGroup:
    """This rank's group over all ranks of the launcher, or a group of one. Refuses more local ranks than GPUs before NCCL starts."""
    import torch
    import torch.distributed as dist

    from tp_residual.parallel.group import TensorParallelGroup

    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count()
    if device == "cuda" and gpus < local_ranks:
        raise RequestError(
            f"--device cuda: {local_ranks} ranks on this machine need as many GPUs, and {gpus} are visible; "
            f"use --tp {max(gpus, 1)} or --device cpu"
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


def leave(code: int) -> NoReturn:
    """End a rank at once: after a failure, the interpreter's own exit can wait for a collective that never returns."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _report_on_sigterm(group: TensorParallelGroup) -> None:
    """The launcher ends ranks with SIGTERM when one has failed; each then says where it was.

    A thread does it, woken by a socket: the main thread may be blocked inside a collective and would never run a Python handler.
    """
    readable, writable = socket.socketpair()
    writable.setblocking(False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(writable.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        while received := readable.recv(1):
            if received[0] == signal.SIGTERM:
                os.write(
                    2, f"tp_residual: rank {group.rank} of {group.size} ended by SIGTERM: {group.record}\n".encode()
                )
                os._exit(128 + signal.SIGTERM)

    group_sockets.extend((readable, writable))
    threading.Thread(target=watch, name="tp_residual-sigterm", daemon=True).start()


group_sockets: list[
    socket.socket
] = []  # kept open for the life of the process: a closed wake-up socket would lose the signal
