"""Threads and cores of a rank: from the affinity mask, the cgroup's quota and the local ranks."""

import os
import subprocess
import sys

import pytest

from tp_residual.cli.cores import choose_cores, name_cores, pin
from tp_residual.errors import RequestError


@pytest.mark.parametrize(
    ("requested", "ranks", "usable", "quota", "threads", "pinned"),
    [
        (None, 2, 2, None, 1, [(0,), (1,)]),
        (None, 1, 2, None, 2, [(0, 1)]),
        (None, 2, 8, None, 4, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (None, 3, 8, None, 2, [(), (), ()]),  # two cores are left over
        (None, 4, 2, None, 1, [(), (), (), ()]),  # more ranks than cores
        (1, 2, 8, None, 1, [(), ()]),  # the others are somebody else's
        (4, 2, 8, None, 4, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (None, 2, 64, 4.0, 2, [(), ()]),  # a quota is time on any core
        (None, 2, 64, 0.5, 1, [(), ()]),
        (8, 2, 64, 4.0, 8, [(), ()]),  # what was asked for wins
        (None, 2, 2, 2.0, 1, [(0,), (1,)]),
    ],
)
def test_the_ranks_of_a_machine_divide_its_cores(
    requested: int | None, ranks: int, usable: int, quota: float | None, threads: int, pinned: list[tuple[int, ...]]
) -> None:
    chosen = [choose_cores(requested, rank, ranks, list(range(usable)), quota) for rank in range(ranks)]
    assert [each.threads for each in chosen] == [threads] * ranks
    assert [each.pinned for each in chosen] == pinned


def test_cores_of_a_mask_need_not_begin_at_0_nor_be_neighbours() -> None:
    assert choose_cores(None, 1, 2, [9, 3, 4, 12], None).pinned == (9, 12)


def test_it_says_what_it_chose_and_why() -> None:
    assert str(choose_cores(None, 1, 2, [0, 1, 2, 4], None)) == "2 threads, cores 2,4 (4 usable cores, 2 ranks here)"
    assert str(choose_cores(None, 0, 1, list(range(8)), 2.5)) == (
        "2 threads, not pinned (8 usable cores, of which the cgroup grants the time of 2.5, 1 rank here)"
    )
    assert str(choose_cores(1, 0, 2, [0, 1], None)) == "1 thread, cores 0 (--threads, 2 ranks here)"
    assert name_cores((0, 1, 2, 5, 7, 8)) == "0-2,5,7-8"


@pytest.mark.parametrize("requested", [0, -1, 3])
def test_more_threads_than_cores_are_refused(requested: int) -> None:
    with pytest.raises(RequestError, match=f"--threads {requested} is not between 1 and the 2 usable cores"):
        choose_cores(requested, 0, 1, [0, 1], None)


def test_a_pinned_process_runs_where_it_was_told() -> None:
    core = min(os.sched_getaffinity(0))
    code = f"import os; from tp_residual.cli.cores import pin; pin(({core},)); print(os.sched_getaffinity(0))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == f"{{{core}}}"
    before = os.sched_getaffinity(0)
    pin(())
    assert os.sched_getaffinity(0) == before
