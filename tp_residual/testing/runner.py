"""Run a function on N ranks and know why when it does not end.

Ranks are forked from a server that has torch loaded already: 0.2 s for four of them instead of a second each. Forking
the caller itself would be as quick and hangs in torch once the caller has used two OpenMP threads. Nothing here imports
torch: only ranks need it.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

STACK_SIGNAL = signal.SIGQUIT  # makes a rank write its Python stack, even while it is blocked in C

_GRACE_S = 5.0  # after the first failure: peers notice in well under a second, then look for reports for two seconds
_REPORT_S = 1.0
_EXIT_S = 10.0
_PRELOAD = (
    "tp_residual.testing.rank",
    "tp_residual.testing.twin",
    "tp_residual.residual.stream",
    "torch.fx.experimental.symbolic_shapes",  # the first backward() imports it, and sympy: a second in each rank
)

_context = multiprocessing.get_context("forkserver")
_extra_preload: tuple[str, ...] = ()
_server_started = False


class RanksFailed(RuntimeError):
    """Some ranks raised, died or did not end in time.

    By rank: exceptions (None where it cannot be pickled) and tracebacks of those that raised, exit_codes of those that
    died (negative: the signal), stacks of those that were still running and of those that crashed, records of the last
    collective.
    """

    def __init__(self, message: str, ranks: Sequence["_Rank"]) -> None:
        super().__init__(message)
        self.exceptions = {rank.number: rank.exception for rank in ranks if rank.traceback is not None}
        self.tracebacks = {rank.number: rank.traceback for rank in ranks if rank.traceback is not None}
        self.exit_codes = {rank.number: rank.exit_code for rank in ranks if rank.exit_code}
        self.stacks = {rank.number: rank.stack for rank in ranks if rank.stack}
        self.records = {rank.number: rank.record for rank in ranks if rank.record}


def set_preload(modules: Sequence[str]) -> None:
    """Modules, by name, that the server imports before it forks ranks: a project's test helpers and its slow imports.

    They are imported before tp_residual itself, so one of them may install an import hook. Call it before the first
    `run_ranks`.
    """
    global _extra_preload
    if _server_started and tuple(modules) != _extra_preload:
        raise RuntimeError(
            "set_preload() after ranks were started has no effect; call it earlier, in conftest.py for instance"
        )
    _extra_preload = tuple(modules)


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    collective_timeout_s: float | None = None,
    checked: bool = True,
    transport: str = "torch",
    warning_filter: str = "error",
    **kwargs: Any,
) -> list[Any]:
    """What `function(group, *args, **kwargs)` returned on each of `world_size` CPU ranks, by rank.

    group is the TensorParallelGroup of all ranks (gloo), made with `checked`, `transport` and a limit of collective_timeout_s
    (half of timeout_s unless given). Ranks import the function by its name, so it must be at module level; arguments and
    results travel by pickle. Each rank has one torch thread, the caller's environment, and turns warnings into errors
    (see warnings.simplefilter).

    Raises RanksFailed naming every rank that raised, died or still ran after timeout_s, with traceback, exit code or
    stack, and its last collective. Once a rank has failed the others get a few seconds and are killed. No rank outlives
    this call.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size} is not positive")
    payload = _dumps(function, args, kwargs)
    limit = collective_timeout_s if collective_timeout_s is not None else timeout_s / 2
    environment = dict(os.environ)
    _start_server()
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="tp_residual-ranks-") as folder:
        try:
            for number in range(world_size):
                ours, theirs = _context.Pipe()
                stack_file = Path(folder, f"stack-{number}")
                process = _context.Process(
                    target=_enter,
                    args=(
                        number,
                        world_size,
                        theirs,
                        payload,
                        folder,
                        str(stack_file),
                        environment,
                        limit,
                        checked,
                        transport,
                        warning_filter,
                    ),
                    name=f"rank {number}",
                )
                process.start()
                theirs.close()  # so that the end of the rank is the end of the pipe
                ranks.append(_Rank(number, process, ours, stack_file))
            return _collect(ranks, timeout_s)
        finally:
            for rank in ranks:
                rank.process.kill()
            for rank in ranks:
                rank.process.join()
                rank.process.close()
                rank.pipe.close()


@dataclass
class _Rank:
    """The caller's view of one rank."""

    number: int
    process: Any  # multiprocessing.context.ForkServerProcess
    pipe: connection.Connection
    stack_file: Path
    running: bool = True
    result: bytes = b""
    record: str = ""
    summary: str = ""
    traceback: str | None = None
    exception: BaseException | None = None
    exit_code: int | None = None
    stack: str = ""

    def receive(self) -> None:
        """Take one message, or the end of the pipe, which is the end of the rank."""
        try:
            kind, *content = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.wait(_REPORT_S)
            self.running = False
            return
        self.running = False
        if kind == "result":
            self.result = content[0]
        else:
            self.summary, self.traceback, pickled, self.record = content
            with contextlib.suppress(Exception):  # an exception class that only the rank could import
                self.exception = pickle.loads(pickled)

    def wait(self, seconds: float) -> bool:
        """Whether it has exited; its exit code and, if it crashed, its stack are then known."""
        self.process.join(max(seconds, 0))
        self.exit_code = self.process.exitcode
        if self.exit_code:
            self.stack = self.read_stack()
        return self.exit_code is not None

    def report(self) -> None:
        """Ask a rank that does not end what it is doing."""
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(b"report")
            if self.pipe.poll(_REPORT_S) and (message := pickle.loads(self.pipe.recv_bytes()))[0] == "record":
                self.record = message[1]
        self.record = self.record or "does not answer (blocked in native code?)"
        with contextlib.suppress(OSError):
            os.kill(
                self.process.pid, STACK_SIGNAL
            )  # after the answer: walking the frames of a thread that runs can crash
        size, end = -1, time.monotonic() + _REPORT_S
        while size != (size := len(self.read_stack())) or (not size and time.monotonic() < end):
            time.sleep(0.05)  # the file grows while the signal is handled
        self.stack = self.read_stack()

    def read_stack(self) -> str:
        """The threads' Python stacks, innermost frame first, without our own frames and the thread that answers us."""
        text = self.stack_file.read_text() if self.stack_file.exists() else ""
        threads = [thread.splitlines() for thread in text.split("\n\n") if "in answer_caller" not in thread]
        return "\n".join(
            line for lines in threads for line in takewhile(lambda line: "/testing/rank.py" not in line, lines)
        ).strip()

    @property
    def failed(self) -> bool:
        return self.running or not self.result or bool(self.exit_code)


def _collect(ranks: list[_Rank], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    failed: list[_Rank] = []  # in the order in which it became known: the cause before its consequences
    expired = False
    while running := [rank for rank in ranks if rank.running]:
        ready = connection.wait([rank.pipe for rank in running], max(0.0, deadline - time.monotonic()))
        if not ready:
            expired = not failed
            break
        for rank in running:
            if rank.pipe in ready:
                rank.receive()
                if not rank.running and rank.failed:
                    failed.append(rank)
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
    for rank in running:
        rank.report()
    if not failed and not running:  # everybody is back; only now may rank 0 take the side channel down with it
        for rank in ranks:
            with contextlib.suppress(OSError):
                rank.pipe.send_bytes(b"exit")
        end = time.monotonic() + _EXIT_S
        for rank in ranks:
            if not rank.wait(end - time.monotonic()):
                rank.running = True
                rank.report()
        failed = [rank for rank in ranks if rank.failed]
        if not failed:
            return [pickle.loads(rank.result) for rank in ranks]
    failed += [rank for rank in ranks if rank.running and rank not in failed]
    raise RanksFailed(_describe(ranks, failed, timeout_s, expired), ranks)


def _describe(ranks: Sequence[_Rank], failed: Sequence[_Rank], timeout_s: float, expired: bool) -> str:
    lines = []
    details: dict[str, list[int]] = {}  # equal ones are shown once
    for rank in failed:
        text = ""
        if rank.traceback is not None:
            lines.append(f"rank {rank.number} raised {rank.summary}")
            text = rank.traceback
        elif rank.running and rank.result:
            lines.append(f"rank {rank.number} returned but did not exit in {_EXIT_S:g} s")
            text = rank.stack
        elif rank.running:
            when = (
                f"still running after {timeout_s:g} s"
                if expired
                else "killed, still running seconds after the first failure"
            )
            lines.append(f"rank {rank.number} {when}; {rank.record}")
            text = rank.stack
        else:
            when = "after it had returned" if rank.result else "before it returned"
            lines.append(f"rank {rank.number} died {when}: {_exit_reason(rank.exit_code)}")
            text = rank.stack
        if text:
            details.setdefault(text, []).append(rank.number)
    first = f"{len(failed)} of {len(ranks)} ranks failed"
    blocks = [f"---- rank {', '.join(map(str, numbers))} ----\n{text.rstrip()}" for text, numbers in details.items()]
    return "\n".join([first, *(f"  {line}" for line in lines), *blocks])


def _exit_reason(code: int | None) -> str:
    if code is None:
        return "its pipe closed, but the process has not ended"
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _dumps(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """pickle by itself, not multiprocessing's pickler: under that, torch sends tensors as shared-memory handles."""
    named = {"function": function, **{f"argument {i}": arg for i, arg in enumerate(args)}, **kwargs}
    for name, value in named.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            way_out = (
                "use a function at module level, which ranks can import by its name"
                if name == "function"
                else "pass plain data"
            )
            raise TypeError(f"{name} {value!r} cannot be sent to the ranks ({error}); {way_out}") from error
    return pickle.dumps((function, args, kwargs))


def _start_server() -> None:
    """Start the server that forks ranks, once a process.

    It gets this process's import path, which the standard library does not give it before Python 3.14, and one OpenMP
    thread, so that no preloaded module can start a pool that a fork would leave without its threads.
    """
    global _server_started
    _server_started = True
    _context.set_forkserver_preload(["__main__", *_extra_preload, *_PRELOAD])
    with _environment(PYTHONPATH=os.pathsep.join(sys.path), OMP_NUM_THREADS="1"):
        forkserver.ensure_running()


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _enter(*args: Any) -> None:
    from tp_residual.testing.rank import main  # here, and not above: it loads torch

    main(*args)
