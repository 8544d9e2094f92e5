"""What every command with ranks does: check without torch, become ranks, open the group, load the model, leave together."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tp_residual.checkpoint.files import CheckpointFiles
from tp_residual.cli.cores import cores_of_this_rank, pin, threads_per_rank
from tp_residual.cli.launch import (
    TimeLimits,
    open_group,
    parse_timeouts,
    resolve_tp,
    under_launcher,
    watch_group,
)
from tp_residual.cli.spawn import run_ranks_here
from tp_residual.errors import RequestError
from tp_residual.model.config import ModelConfig
from tp_residual.parallel.splits import check_heads
from tp_residual.residual.config import PRE_NORM, ResidualConfig
from tp_residual.residual.table import BoundaryTable

if TYPE_CHECKING:
    from tp_residual.checkpoint.load import LoadReport
    from tp_residual.model.decoder import CausalLM
    from tp_residual.parallel.group import TensorParallelGroup, TransportChoice


def check_session(arguments: argparse.Namespace) -> tuple[ModelConfig, int]:
    """(config, tp size), for a command that runs one replica; after everything that the common options can have wrong. Imports no torch."""
    config, tp_size, replicas = check_shared_session(arguments)
    if replicas > 1:
        raise RequestError(
            f"--tp {tp_size} makes {replicas} replicas of the launcher's {tp_size * replicas} ranks, and {arguments.command} is about one; "
            f"start {tp_size} ranks, or use --tp {tp_size * replicas}"
        )
    return config, tp_size


def check_shared_session(arguments: argparse.Namespace) -> tuple[ModelConfig, int, int]:
    """(config, tp size, replicas), for a command that divides its work among replicas; the same checks."""
    tp_size, replicas = resolve_tp(arguments.tp, getattr(arguments, "replicas", None))
    threads_per_rank(arguments.threads)
    parse_timeouts(arguments.timeout)
    config = ModelConfig.from_dir(arguments.model)
    if arguments.residual is not None:
        config = config.with_residual(
            ResidualConfig.preset(arguments.residual),
            trained=parse_weights(arguments.weights) is None,
            force=arguments.force_residual,
        )
    check_heads(config.num_attention_heads, tp_size)
    if parse_weights(arguments.weights) is None:
        CheckpointFiles.open(arguments.model)
    if arguments.boundary_table is not None:
        BoundaryTable.from_file(arguments.boundary_table)
    return config, tp_size, replicas


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


def become_ranks(argv: list[str], ranks: int) -> None:
    """Returns in a rank; outside a launcher, with more than one rank to be, runs them and exits as they did."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    if ranks > 1 and not under_launcher():
        raise SystemExit(run_ranks_here(argv, ranks))


@dataclass(frozen=True)
class Session:
    """One rank, ready. group: its replica's ranks. world: all ranks; the same object where there is one replica."""

    world: TensorParallelGroup
    group: TensorParallelGroup
    model: CausalLM
    loaded: LoadReport
    load_s: float

    def close(self) -> None:
        """Every rank calls it: nobody closes the side channel while another still reads it."""
        import torch.distributed as dist

        self.world.share("done", "")
        self.group.close()
        self.world.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def open_session(
    arguments: argparse.Namespace, config: ModelConfig, *, inference: bool = False, replicas: int = 1, run: str = ""
) -> Session:
    """The groups and the model's share, with what was decided on rank 0's stderr. Ranks that were started differently are refused.

    inference: the model will do nothing else, so its weights are packed and gone afterwards. run: a digest of the files and settings that
    all ranks must have alike.
    """
    cores = cores_of_this_rank(arguments.threads)
    pin(cores.pinned)
    import torch

    from tp_residual.cli.report import LoadProgress
    from tp_residual.inference.loading import load_model
    from tp_residual.parallel.packing import pack_weights

    began = time.perf_counter()
    torch.set_num_threads(cores.threads)
    limits = parse_timeouts(arguments.timeout)
    # who completes the sums decides what they travel by
    transport: TransportChoice = arguments.boundary if arguments.boundary in ("auto", "shared") else "torch"
    checked = arguments.check_collectives
    world = open_group(arguments.device, limits, checked=checked, transport=transport if replicas == 1 else "torch")
    world.require_agreement("the command", vars(arguments) | {"config.json": config, "the digest of their files": run})
    compared = world.size > 1 and not arguments.weights
    weights = CheckpointFiles.open(arguments.model).fingerprint() if compared else None
    table = None if arguments.boundary_table is None else BoundaryTable.from_file(arguments.boundary_table)
    world.require_agreement("the model's files", {"weights": weights, "boundary table": table and table.digest()})
    group = _replica(world, world.size // replicas, limits, transport)
    world.enter_phase("load")
    group.enter_phase("load")
    if world.rank != 0:
        logging.getLogger("tp_residual").setLevel(logging.WARNING)  # every replica decides alike: it is said once
    if world.rank == 0:
        for warning in config.warnings:
            print(f"tp_residual: warning: {warning}", file=sys.stderr)
    with LoadProgress(world.rank == 0) as progress:
        model, loaded = load_model(
            arguments.model,
            group,
            dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
            stream_dtype=getattr(torch, arguments.stream_dtype) if arguments.stream_dtype else None,
            sequence_parallel=arguments.sequence_parallel,
            boundary=arguments.boundary,
            boundary_table=table,
            round_reduced=arguments.round_reduced,
            random_seed=parse_weights(arguments.weights),
            residual=config.residual,
            force_residual=True,  # it has been checked
            progress=progress,
        )
    model.requires_grad_(False).eval()
    if inference:
        packing = pack_weights(model, group.device, model.dtype)
        if world.rank == 0:
            print(f"linears: {packing}", file=sys.stderr)
    if group.device.type == "cpu":
        shown = world.share("cores", f"rank {world.rank}: {cores}")
        if world.rank == 0:
            print("cores: " + "; ".join(shown), file=sys.stderr)
    if world.rank == 0 and config.residual != PRE_NORM:
        print(f"residual: {config.residual.name} {config.residual.to_dict()}", file=sys.stderr)
    if world.rank == 0:
        for (old, new), count in loaded.casts.items():
            print(f"cast {count} tensors from {old} to {new}", file=sys.stderr)
        if arguments.sequence_parallel == "auto" and group.size > 1:
            print(f"sequence parallel: auto, from {model.auto_threshold_tokens()} tokens a pass on", file=sys.stderr)
    world.share("loaded", "")  # under the load's limit: no step begins before the slowest has loaded
    world.enter_phase("step")
    group.enter_phase("step")
    return Session(world, group, model, loaded, time.perf_counter() - began)


def _replica(
    world: TensorParallelGroup, tp_size: int, limits: TimeLimits, transport: TransportChoice
) -> TensorParallelGroup:
    """Those of `world`'s ranks that hold a model together with this one: tp_size consecutive ones."""
    from tp_residual.parallel.group import TensorParallelGroup

    if tp_size == world.size:
        return world
    if tp_size == 1:
        return TensorParallelGroup.single(world.device)
    first = world.rank // tp_size * tp_size
    group = TensorParallelGroup.from_ranks(
        world.ranks[first : first + tp_size],
        device=world.device,
        timeout_s=limits.default_s,
        limits=limits.by_phase,
        checked=world.checked,
        transport=transport,
    )
    group.enter_phase("start")
    watch_group(group)
    return group
