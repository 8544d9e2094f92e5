"""A benchmark that starts others: each in processes of its own, one after the other, none left behind. Imports no torch."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tp_residual.bench.results import Result, load
from tp_residual.errors import GenerationError, UserError

_USER_ERROR = 2  # what the command line answers a request with that it refuses
_END_S = 10.0


class ChildRefused(UserError):
    """What the child said of a request that it does not serve."""


def run_bench(arguments: Sequence[str], what: str) -> Result:
    """`bench ARGUMENTS` and the result that it writes; its table is dropped, and its messages go to this process's stderr when it fails.

    Raises ChildRefused for what it refuses, GenerationError when it fails. A signal ends it, too, before this process.
    """
    with tempfile.TemporaryDirectory(prefix="tp_residual-bench-") as folder:
        output, log = Path(folder, "result.json"), Path(folder, "stderr")
        command = [sys.executable, "-m", "tp_residual", "bench", *arguments, "--output", str(output)]
        with log.open("wb") as stderr:
            # a group of its own: Ctrl-C comes to this process alone, which ends the child in order
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, process_group=0
            )
            before = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
            try:
                code = child.wait()
            except BaseException:
                _end(child)
                raise
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)
        said = log.read_text(errors="replace").strip()
        if code == _USER_ERROR:
            raise ChildRefused(_message(said))
        if code:
            print(said, file=sys.stderr, flush=True)
            raise GenerationError(f"{what} ended with exit code {code}: {_message(said)}")
        return load(str(output))


def _message(said: str) -> str:
    """The last thing that was called an error, without who said it."""
    errors = [line for line in said.splitlines() if line.startswith("tp_residual: error")]
    text = (errors or said.splitlines() or ["it said nothing"])[-1]
    return text.partition(": ")[2].partition(": ")[2] if errors else text


def _end(child: subprocess.Popen[bytes]) -> None:
    """It ends its ranks itself when it is asked to; whatever does not is killed with its group."""
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(_END_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
