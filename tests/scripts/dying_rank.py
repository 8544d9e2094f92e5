"""The command line in one rank of several, under torchrun, where rank 1 kills itself: `dying_rank.py PHASE COMMAND ...`."""

import os
import signal
import sys
import time

import tp_residual.cli
from tp_residual.cli.launch import prepare_rank


def die_as(phase: str) -> None:
    """Put the death where `phase` begins."""
    if phase == "import":
        time.sleep(3)  # until the other can answer a SIGTERM
        os.kill(os.getpid(), signal.SIGKILL)
    import tp_residual.inference.loading as loading
    from tp_residual.model.decoder import CausalLM

    forward, load_model, passes = CausalLM.forward, loading.load_model, []

    def dying_load(*args, **kwargs):
        if phase == "load":
            os.kill(os.getpid(), signal.SIGKILL)
        return load_model(*args, **kwargs)

    def dying_forward(self, *args, **kwargs):
        passes.append(None)
        if len(passes) == {"prefill": 1, "decode": 3}.get(phase):
            self.model.layers[1].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        return forward(self, *args, **kwargs)

    loading.load_model, CausalLM.forward = dying_load, dying_forward


prepare_rank()
if os.environ["RANK"] == "1":
    die_as(sys.argv[1])
sys.exit(tp_residual.cli.main(sys.argv[2:]))
