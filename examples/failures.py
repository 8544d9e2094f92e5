"""Three ways for ranks to part, and what is said: `python examples/failures.py kill`, `skip` or `mismatch`."""

import os
import sys
import time

import torch

from tp_residual.testing import RanksFailed, run_ranks


def all_reduce(group, tag, size=4):
    group.run("all_reduce", tag, torch.ones(size), lambda transport, x: transport.all_reduce(x))


def kill(group):
    all_reduce(group, "layer 0")
    if group.rank == 1:
        time.sleep(1)  # until rank 0 waits in the next one
        os._exit(9)  # as the kernel's out-of-memory killer would
    all_reduce(group, "layer 1")


def skip(group):
    all_reduce(group, "layer 0")
    if group.rank == 0:
        all_reduce(group, "layer 1")
    all_reduce(group, "layer 2")


def mismatch(group):
    all_reduce(group, "layer 0")
    all_reduce(group, "layer 1", size=4 + group.rank)


if __name__ == "__main__":
    scenes = {"kill": kill, "skip": skip, "mismatch": mismatch}
    if len(sys.argv) != 2 or sys.argv[1] not in scenes:
        sys.exit(f"usage: python examples/failures.py {'|'.join(scenes)}")
    try:
        # skipped and mismatched collectives are named where ranks compare their records first (--check-collectives)
        run_ranks(2, scenes[sys.argv[1]], checked=sys.argv[1] != "kill", collective_timeout_s=10)
    except RanksFailed as error:
        for rank, exception in sorted(error.exceptions.items()):
            print(f"rank {rank}: {exception}")
        for rank, code in sorted(error.exit_codes.items()):
            print(f"rank {rank}: ended with exit code {code}")
