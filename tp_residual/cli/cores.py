"""How many threads a rank computes with, and on which cores: from what this process may use, not from a launcher's OMP_NUM_THREADS=1.

Imports no torch.
"""

import os
from dataclasses import dataclass

from tp_residual.errors import RequestError
from tp_residual.machine import cpu_quota


@dataclass(frozen=True)
class Cores:
    """Of one rank. pinned: the cores that it alone of its job's ranks runs on; () where it is left to the system. reason: why these."""

    threads: int
    pinned: tuple[int, ...]
    reason: str

    def __str__(self) -> str:
        where = f"cores {name_cores(self.pinned)}" if self.pinned else "not pinned"
        return f"{self.threads} thread{'' if self.threads == 1 else 's'}, {where} ({self.reason})"


def choose_cores(
    requested: int | None, local_rank: int, local_ranks: int, usable: list[int], quota: float | None
) -> Cores:
    """usable: the cores of this process's affinity mask; quota: those that its cgroup grants time of, None for no limit.

    Unless `requested`, the ranks of a machine divide its cores. They are pinned, each to its own, exactly if together they take every
    usable core: a job that leaves some free may share them with another like it, and both would pin to the same; and what a quota
    below the mask grants is time, on any core. Raises RequestError for more threads than usable cores.
    """
    usable = sorted(usable)
    if requested is not None and not 1 <= requested <= len(usable):
        raise RequestError(
            f"--threads {requested} is not between 1 and the {len(usable)} usable cores; use 1 to {len(usable)}"
        )
    granted = len(usable) if quota is None else min(len(usable), max(1, int(quota)))
    threads = requested or max(1, granted // local_ranks)
    source = "--threads" if requested is not None else f"{len(usable)} usable cores"
    if requested is None and granted < len(usable):
        source += f", of which the cgroup grants the time of {quota:g}"
    source += f", {local_ranks} rank{'' if local_ranks == 1 else 's'} here"
    if threads * local_ranks != len(usable) or granted < len(usable):
        return Cores(threads, (), source)
    return Cores(threads, own_cores(local_rank, threads, usable), source)


def own_cores(local_rank: int, threads: int, usable: list[int]) -> tuple[int, ...]:
    return tuple(usable[local_rank * threads : (local_rank + 1) * threads])


def cores_of_this_rank(requested: int | None) -> Cores:
    return choose_cores(
        requested,
        int(os.environ.get("LOCAL_RANK", "0")),
        int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        sorted(os.sched_getaffinity(0)),
        cpu_quota(),
    )


def threads_per_rank(requested: int | None) -> int:
    """--threads, or this rank's share of the usable cores. Raises RequestError as `choose_cores` does."""
    return cores_of_this_rank(requested).threads


def pin(cores: tuple[int, ...]) -> None:
    """Before any library has started threads: they inherit it. (): leave it to the system."""
    if cores:
        os.sched_setaffinity(0, cores)


def name_cores(cores: tuple[int, ...]) -> str:
    """0,1,2,5 as 0-2,5."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
