"""When one rank fails, the launcher ends the others, and each says where it was."""

import re
import subprocess
import sys
import time
from pathlib import Path


def test_ranks_ended_by_sigterm_print_their_last_record() -> None:
    script = Path(__file__).parent / "scripts" / "failing_rank.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(script)]
    began = time.monotonic()
    outcome = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert outcome.returncode != 0
    assert time.monotonic() - began < 55, "rank 0 waited for its own limit instead of being ended"
    # rank 0 may also hear from gloo that its peer is gone, before the launcher's signal
    where = "waiting in #2 all_gather tag='the stuck one' shape=[2, 3] dtype=float32"
    assert where in outcome.stderr, outcome.stderr
    last = r"last completed #1 all_reduce tag='warm up' shape=\[4\] dtype=float32"
    assert re.search(rf"rank 1 of 3 ended by SIGTERM \(rank (2|0, 2) is gone\): {last}", outcome.stderr), outcome.stderr
