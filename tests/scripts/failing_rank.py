"""Under torchrun with 3 ranks: rank 2 fails while rank 0 waits in a collective and rank 1 computes."""

import sys
import time

import torch

from tp_residual.cli.launch import TimeLimits, open_group, prepare_rank

prepare_rank()
group = open_group("cpu", TimeLimits())
group.run("all_reduce", "warm up", torch.ones(4), lambda transport, x: transport.all_reduce(x))
print(f"rank {group.rank} is up", file=sys.stderr, flush=True)
if group.rank == 2:
    time.sleep(1.5)
    raise SystemExit("rank 2 fails on purpose")
if group.rank == 1:
    time.sleep(60)
group.run("all_gather", "the stuck one", torch.ones(2, 3), lambda transport, x: transport.all_gather(x))
