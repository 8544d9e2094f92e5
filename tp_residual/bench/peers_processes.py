"""A program and everything that it started: seen, stopped, continued and ended as one. Linux, through /proc.

A peer's ranks may have process groups and names of their own, and outlive whoever started them; so members are found by parent and by
group, and remembered.
"""

import os
import signal
import subprocess
import time
from dataclasses import dataclass

from tp_residual.errors import GenerationError

_TICKS = os.sysconf("SC_CLK_TCK")
_SETTLE_S = 5.0  # in which every member must have stopped, or gone
_SHARED_MEMORY = "/dev/shm/"


@dataclass(frozen=True)
class _Process:
    pid: int
    state: str
    parent: int
    group: int
    cpu_s: float
    started: int  # in ticks since boot: tells a process from a later one of the same number


class ProcessTree:
    """root must lead a process group of its own."""

    def __init__(self, root: subprocess.Popen[bytes]) -> None:
        self._root = root
        self._known: dict[int, int] = {}
        self._segments: set[str] = set()
        self._older_segments = _all_segments()

    def members(self) -> list[_Process]:
        """Those that live, zombies left out."""
        processes = {process.pid: process for process in _all_processes()}
        found = {pid for pid, started in self._known.items() if pid in processes and processes[pid].started == started}
        found |= {pid for pid, process in processes.items() if self._root.pid in (pid, process.group)}
        children: dict[int, list[int]] = {}
        for process in processes.values():
            children.setdefault(process.parent, []).append(process.pid)
        waiting = list(found)
        while waiting:
            for pid in children.get(waiting.pop(), ()):
                if pid not in found:
                    found.add(pid)
                    waiting.append(pid)
        self._known = {pid: processes[pid].started for pid in found}
        return [processes[pid] for pid in sorted(found) if processes[pid].state not in "ZX"]

    def cpu_seconds(self) -> float:
        """User and system time of all that live, in steps of 10 ms."""
        return sum(process.cpu_s for process in self.members())

    def stop(self) -> None:
        """Returns when none of them runs; what one starts meanwhile is stopped, too. Raises GenerationError when one does not stop."""
        ends = time.monotonic() + _SETTLE_S
        while running := [process for process in self.members() if process.state not in "Tt"]:
            if time.monotonic() > ends:
                raise GenerationError(f"processes {[each.pid for each in running]} do not stop on SIGSTOP")
            for process in running:
                _send(process.pid, signal.SIGSTOP)
            time.sleep(0.001)

    def resume(self) -> None:
        for process in self.members():
            _send(process.pid, signal.SIGCONT)

    def note_segments(self) -> None:
        """Remembers which files of shared memory they use now. Those that were there before this tree are somebody else's."""
        for process in self.members():
            self._segments |= _segments(process.pid) - self._older_segments

    def end(self) -> None:
        """SIGKILL to all of them, until none is left; then removes the segments of shared memory that they made and nobody else uses."""
        ends = time.monotonic() + _SETTLE_S
        self.note_segments()
        while (left := self.members()) and time.monotonic() < ends:
            for process in left:
                _send(process.pid, signal.SIGKILL)
            time.sleep(0.005)
        self._root.wait()
        if self._segments:
            used = {path for process in _all_processes() for path in _segments(process.pid)}
            for path in self._segments - used:
                try:
                    os.unlink(path)
                except OSError:  # gone already, or another user's
                    pass
        self._segments = set()


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _all_processes() -> list[_Process]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat") as file:
                    text = file.read()
            except OSError:
                continue
            # the name, in brackets, may hold anything
            fields = text.rpartition(")")[2].split()
            cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS
            found.append(_Process(int(name), fields[0], int(fields[1]), int(fields[2]), cpu_s, int(fields[19])))
    return found


def _all_segments() -> set[str]:
    try:
        return {_SHARED_MEMORY + name for name in os.listdir(_SHARED_MEMORY)}
    except OSError:
        return set()


def _segments(pid: int) -> set[str]:
    """Files of shared memory that a process has mapped or open, those without a name left out."""
    found = set()
    try:
        with open(f"/proc/{pid}/maps") as file:
            found = {line[line.index(_SHARED_MEMORY) :].rstrip("\n") for line in file if _SHARED_MEMORY in line}
        for name in os.listdir(f"/proc/{pid}/fd"):
            found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    except OSError:
        pass
    return {path for path in found if path.startswith(_SHARED_MEMORY) and not path.endswith(" (deleted)")}
