"""One rank of `run_ranks`, from inside: set up, call, send back, and answer the caller meanwhile."""

import contextlib
import faulthandler
import os
import pickle
import shutil
import sys
import threading
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from tp_residual.parallel.group import TensorParallelGroup, TransportChoice, _groups
from tp_residual.testing.runner import STACK_SIGNAL

# They describe the launch that the caller is part of, not this one.
_LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")

_START_S = 30.0  # a short limit is for what is tested, not for ranks that start on a busy machine


def main(
    number: int,
    world_size: int,
    pipe: Connection,
    payload: bytes,
    folder: str,
    stack_path: str,
    environment: dict[str, str],
    collective_timeout_s: float,
    checked: bool,
    transport: TransportChoice,
    warning_filter: Any,
) -> None:
    """Run the payload. Returns, so that the process exits with 0, when the caller has heard of every rank's success."""
    stack_file = open(stack_path, "w")  # faulthandler writes to it until the process is gone
    faulthandler.register(STACK_SIGNAL, stack_file, all_threads=True)
    faulthandler.enable(stack_file)
    os.environ.clear()
    os.environ.update({name: value for name, value in environment.items() if name not in _LAUNCH})
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # all ranks are here, whatever this host's name resolves to
    caller = _Caller(pipe, folder)
    torch.set_num_threads(1)
    try:
        store = FileStore(os.path.join(folder, "store"), world_size)  # a file per call: no port to collide on
        limit = timedelta(seconds=max(collective_timeout_s, _START_S))  # above the group's own, which each wait brings
        dist.init_process_group("gloo", store=store, rank=number, world_size=world_size, timeout=limit)
        group = TensorParallelGroup.from_world(
            timeout_s=collective_timeout_s,
            limits={"start": max(collective_timeout_s, _START_S)},
            checked=checked,
            transport=transport,
        )
        function, args, kwargs = pickle.loads(payload)
        with warnings.catch_warnings():
            warnings.simplefilter(warning_filter)
            result = function(group, *args, **kwargs)
        caller.send("result", _dumps_result(result, number))
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        summary = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
        caller.send("error", summary, text, _dumps_exception(error), records())
        caller.leave(1)  # at once: peers that wait for this rank notice its closed sockets
    caller.released.wait()
    group.close()
    dist.destroy_process_group()


class _Caller:
    """The process that called `run_ranks`. A thread hears it even while the rank is blocked in a collective."""

    def __init__(self, pipe: Connection, folder: str) -> None:
        self.folder = folder
        self.pipe, self.lock, self.released = pipe, threading.Lock(), threading.Event()
        threading.Thread(target=self.answer_caller, daemon=True).start()

    def send(self, *message: Any) -> None:
        with self.lock:
            self.pipe.send_bytes(pickle.dumps(message))

    def leave(self, code: int) -> NoReturn:
        """Exit without teardown, which may wait for peers."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)

    def answer_caller(self) -> None:
        while True:
            try:
                request = self.pipe.recv_bytes()
            except (EOFError, OSError):
                shutil.rmtree(self.folder, ignore_errors=True)
                self.leave(1)  # the caller is gone: killed, perhaps, and will not clean up
            if request == b"report":
                self.send("record", records())
            else:
                self.released.set()


def records() -> str:
    """The last collective of each group of this rank that has made one."""
    groups = sorted(_groups.values(), key=lambda group: group.handle)
    texts = {
        f"{group.record}{'' if dist_wide(group) else f' (group of ranks {list(group.ranks)})'}": None
        for group in groups
        if group.record.last
    }
    return "; ".join(texts) or "no collective yet"


def dist_wide(group: TensorParallelGroup) -> bool:
    return not dist.is_initialized() or group.size == dist.get_world_size()


def _dumps_result(result: Any, number: int) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise TypeError(
            f"rank {number} returned a {type(result).__name__} that cannot be sent back ({error}); return plain data"
        ) from error


def _dumps_exception(error: BaseException) -> bytes:
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        return pickle.dumps(None)
    return pickled
