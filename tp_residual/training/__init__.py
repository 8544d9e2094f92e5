"""What training needs beside the model: gradients made whole, losses that never hold all logits, init, dropout, checkpointed layers.

A step, with any torch optimizer that treats parameters element by element (`guard = attach(model, optimizer, group)` once before):

    hidden, _ = final_hidden(model, batch, NoCache())
    loss = chunked_cross_entropy(hidden, model.lm_head, next_token_targets(batch))
    loss.backward()
    sync_gradients(blocks, group)
    require_finite(clip_grad_norm(blocks, group, 1.0), blocks, group, step=step)
    optimizer.step()
    optimizer.zero_grad()

With DistributedDataParallel around the model, its averages come during `backward()`, so before `sync_gradients`: sums over replicas and
over holders commute, but only `sync_gradients` sees both done.
"""

from tp_residual.parallel.blocks import grad_norm, parameter_blocks, sync_gradients
from tp_residual.training.checkpointing import RebuiltReads, checkpoint_layers
from tp_residual.training.dropout import DropoutStream
from tp_residual.training.dtensor import to_dtensor
from tp_residual.training.gradients import GradientGuard, attach, clip_grad_norm, require_finite
from tp_residual.training.init import GPT2, RULES, DeepNorm, Fixup, Normal, VarianceOverRootN, ZeroWriters, init_weights
from tp_residual.training.loss import (
    auxiliary_cross_entropy,
    chunked_cross_entropy,
    final_hidden,
    next_token_targets,
    vocab_parallel_cross_entropy,
)

__all__ = [
    "GPT2",
    "RULES",
    "DeepNorm",
    "DropoutStream",
    "Fixup",
    "GradientGuard",
    "Normal",
    "RebuiltReads",
    "VarianceOverRootN",
    "ZeroWriters",
    "attach",
    "auxiliary_cross_entropy",
    "checkpoint_layers",
    "chunked_cross_entropy",
    "clip_grad_norm",
    "final_hidden",
    "grad_norm",
    "init_weights",
    "next_token_targets",
    "parameter_blocks",
    "require_finite",
    "sync_gradients",
    "to_dtensor",
    "vocab_parallel_cross_entropy",
]
