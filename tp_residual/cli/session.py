"""What every command with ranks does: check without torch, become ranks, open the group, load the model, leave together."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tp_residual.checkpoint.files import CheckpointFiles
from tp_residual.cli.launch import check_timeout, open_group, relaunch, resolve_tp, threads_per_rank, under_launcher
from tp_residual.errors import RequestError
from tp_residual.model.config import ModelConfig
from tp_residual.parallel.splits import check_heads

if TYPE_CHECKING:
    from tp_residual.checkpoint.load import LoadReport
    from tp_residual.model.decoder import CausalLM
    from tp_residual.parallel.group import TensorParallelGroup


def check_session(arguments: argparse.Namespace) -> tuple[ModelConfig, int]:
    """(config, tp size), after everything that the common options can have wrong. Imports no torch."""
    tp_size = resolve_tp(arguments.tp)
    threads_per_rank(arguments.threads)
    check_timeout(arguments.timeout)
    config = ModelConfig.from_dir(arguments.model)
    check_heads(config.num_attention_heads, tp_size)
    if parse_weights(arguments.weights) is None:
        CheckpointFiles.open(arguments.model)
    return config, tp_size


def parse_weights(text: str | None) -> int | None:
    """None for a checkpoint, or the seed of `random:SEED`."""
    if text is None:
        return None
    kind, _, seed = text.partition(":")
    if kind != "random" or not seed.isdecimal() or int(seed) >= 1 << 63:
        raise RequestError(
            f"--weights {text!r} is not random:SEED with a whole number below 2**63; leave it out to read the checkpoint"
        )
    return int(seed)


def become_ranks(argv: list[str], tp_size: int) -> None:
    """Returns in a rank; outside a launcher, with more than one rank to be, becomes the launcher instead."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    if tp_size > 1 and not under_launcher():
        relaunch(argv, tp_size)


@dataclass(frozen=True)
class Session:
    """One rank, ready."""

    group: TensorParallelGroup
    model: CausalLM
    loaded: LoadReport
    load_s: float

    def close(self) -> None:
        """Every rank calls it: nobody closes the side channel while another still reads it."""
        import torch.distributed as dist

        self.group.share("done", "")
        self.group.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def open_session(arguments: argparse.Namespace, config: ModelConfig) -> Session:
    """The group and the model's share, with what was decided on rank 0's stderr. Ranks that were started differently are refused."""
    import torch

    from tp_residual.cli.report import LoadProgress
    from tp_residual.inference.loading import load_model

    began = time.perf_counter()
    torch.set_num_threads(threads_per_rank(arguments.threads))
    group = open_group(arguments.device, arguments.timeout, checked=arguments.check_collectives)
    group.require_agreement("the command", vars(arguments) | {"config.json": config})
    if group.rank == 0:
        for warning in config.warnings:
            print(f"tp_residual: warning: {warning}", file=sys.stderr)
    with LoadProgress(group.rank == 0) as progress:
        model, loaded = load_model(
            arguments.model,
            group,
            dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
            stream_dtype=getattr(torch, arguments.stream_dtype) if arguments.stream_dtype else None,
            sequence_parallel=arguments.sequence_parallel,
            boundary=arguments.boundary,
            round_reduced=arguments.round_reduced,
            random_seed=parse_weights(arguments.weights),
            progress=progress,
        )
    model.requires_grad_(False)
    if group.rank == 0:
        for (old, new), count in loaded.casts.items():
            print(f"cast {count} tensors from {old} to {new}", file=sys.stderr)
        if arguments.sequence_parallel == "auto" and group.size > 1:
            print(f"sequence parallel: auto, from {model.auto_threshold_tokens()} tokens a pass on", file=sys.stderr)
    return Session(group, model, loaded, time.perf_counter() - began)
