"""Generation from Python, with a process group of one's own: `torchrun --standalone --nproc-per-node 2 examples/generate.py DIR`."""

import sys

import torch.distributed as dist

from tp_residual.inference.generate import generate
from tp_residual.inference.loading import load_model
from tp_residual.inference.request import GenerationSettings
from tp_residual.inference.tokenizer import Tokenizer
from tp_residual.parallel.group import TensorParallelGroup

model_dir = sys.argv[1]
dist.init_process_group("gloo")
group = (
    TensorParallelGroup.from_world()
)  # or .from_ranks([...]) for some of the ranks, or .single() without torch.distributed
model, report = load_model(model_dir, group, sequence_parallel="auto")
tokenizer = Tokenizer.from_dir(model_dir)
prompts = [tokenizer.encode("The capital of France is"), tokenizer.encode("2, 4, 6, 8,")]
settings = GenerationSettings(max_new_tokens=16, stop_token_ids=model.config.eos_token_ids)
for result in generate(model, prompts, group, settings):
    if group.rank == 0:
        print(result.index, repr(tokenizer.decode(result.token_ids)))
group.share("done", "")  # the side channel lives in rank 0: nobody leaves while another still reads it
dist.destroy_process_group()
