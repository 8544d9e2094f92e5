"""Under torchrun: ranks that say who they are, then all-reduce for minutes."""

import os
import sys
import time

import torch

from tp_residual.cli.launch import TimeLimits, leave, open_group, prepare_rank
from tp_residual.errors import CollectiveError

prepare_rank()
group = open_group("cpu", TimeLimits())
sys.stdout.write(f"{group.rank} {os.getpid()}\n")
sys.stdout.flush()
end = time.monotonic() + 90
try:
    while time.monotonic() < end:
        group.run("all_reduce", "endless", torch.ones(4), lambda transport, x: transport.all_reduce(x))
        time.sleep(0.01)
except CollectiveError as error:
    print(error, file=sys.stderr, flush=True)
    leave(1)
