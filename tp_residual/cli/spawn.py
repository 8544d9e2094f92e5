"""A launcher for the ranks of one machine: starts them, passes signals on, and leaves none behind. Imports no torch.

Not torchrun, which costs an import of torch before any rank starts, and answers Ctrl-C with a traceback of its own. A rank cannot tell
the difference: the variables are the same, but for a listening socket that rank 0 inherits, so that no other process can take the port.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

STORE_FD = "TP_RESIDUAL_STORE_FD"  # rank 0's inherited listening socket, at MASTER_PORT
LAUNCHER_PID = "TP_RESIDUAL_LAUNCHER_PID"

_GRACE_S = 2.0  # ranks that lost a peer name it themselves, unless they compute
_END_S = 4.0  # between SIGTERM and SIGKILL
_INTERRUPT_S = 2.5  # between Ctrl-C and SIGKILL


def run_ranks_here(argv: Sequence[str], ranks: int) -> int:
    """The command in `ranks` processes of this machine. 0, or the exit code of the first that failed (128 + n for signal n)."""
    return _Ranks(argv, ranks).wait()


class _Ranks:
    def __init__(self, argv: Sequence[str], count: int) -> None:
        self._signals: list[int] = []
        self._wake, write = socket.socketpair()
        write.setblocking(False)
        self._wake_write = write
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda number, _: self._signals.append(number))
        signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        sys.stdout.flush()
        sys.stderr.flush()
        # a rank inherits the mask and lifts it once it can answer: an interpreter that is interrupted while it starts shows a traceback
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        with socket.create_server(("127.0.0.1", 0), backlog=count) as listener:
            common = os.environ | {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(listener.getsockname()[1]),
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
                LAUNCHER_PID: str(os.getpid()),
            }
            # each rank sets its own number of threads later; libraries that start theirs on import must not take all cores each
            common.setdefault("OMP_NUM_THREADS", "1")
            self._children = [
                subprocess.Popen(
                    [sys.executable, "-m", "tp_residual", *argv],
                    env=common
                    | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                    | ({STORE_FD: str(listener.fileno())} if rank == 0 else {}),
                    pass_fds=(listener.fileno(),) if rank == 0 else (),
                    stdin=None if rank == 0 else subprocess.DEVNULL,
                )
                for rank in range(count)
            ]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def wait(self) -> int:
        told = 0  # the signal that ends the launcher itself
        failed: tuple[int, int] | None = None  # (rank, exit code) of the first failure
        harder: list[tuple[float, int]] = []  # (when, signal) still to be sent to whoever runs
        while True:
            for number in self._take_signals():
                if number == signal.SIGCHLD:
                    continue
                wait_s = 0.0 if told else _INTERRUPT_S if number == signal.SIGINT else _END_S
                told = told or number
                self._send(number)
                harder = [(time.monotonic() + wait_s, signal.SIGKILL)]
            codes = [child.poll() for child in self._children]
            if failed is None and any(codes):
                failed = next((rank, code) for rank, code in enumerate(codes) if code)
                now = time.monotonic()
                harder = harder or [(now + _GRACE_S, signal.SIGTERM), (now + _GRACE_S + _END_S, signal.SIGKILL)]
            if None not in codes:
                return self._exit_code(told, failed)
            while harder and time.monotonic() >= harder[0][0]:
                self._send(harder.pop(0)[1])
            self._sleep(max(0.0, harder[0][0] - time.monotonic()) if harder else None)

    def _exit_code(self, told: int, failed: tuple[int, int] | None) -> int:
        if told:
            return 128 + told
        if failed is None:
            return 0
        rank, code = failed
        if code > 0:
            return code
        name = signal.Signals(-code).name
        print(
            f"tp_residual: error: rank {rank} of {len(self._children)} was ended by {name}", file=sys.stderr, flush=True
        )
        return 128 - code

    def _take_signals(self) -> list[int]:
        taken, self._signals = self._signals, []
        return taken

    def _sleep(self, seconds: float | None) -> None:
        """Until a signal comes, or for so long."""
        if self._signals:
            return
        self._wake.settimeout(seconds)
        try:
            self._wake.recv(64)
        except TimeoutError:
            pass

    def _send(self, number: int) -> None:
        for child in self._children:
            child.send_signal(number)  # does nothing to one that has been waited for
