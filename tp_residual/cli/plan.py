"""`plan`: predict without torch; `--measure`: this machine as a hardware file; `--check`: predictions against its own passes."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from tp_residual.bench.request import Rules, parse_list, require_memory
from tp_residual.bench.results import check_plot_target, check_target
from tp_residual.checkpoint.files import CheckpointFiles
from tp_residual.cli.cores import threads_per_rank
from tp_residual.cli.launch import open_group, parse_timeouts, resolve_tp
from tp_residual.cli.session import become_ranks, parse_weights
from tp_residual.errors import RequestError, UserError, VerificationFailed
from tp_residual.machine import available_memory
from tp_residual.model.config import ModelConfig
from tp_residual.plan.boundary import Placement
from tp_residual.plan.estimate import PlanRequest, impossible, plan
from tp_residual.plan.hardware import DTYPES, PRESETS, Hardware

if TYPE_CHECKING:
    from tp_residual.bench.timing import Clock

T = TypeVar("T")
_TP_SIZES = (1, 2, 4, 8)
_DEFAULT_TOKENS, _DEFAULT_CONTEXT = "1,128,4096", 1024


def main(arguments: argparse.Namespace, argv: list[str]) -> None:
    if arguments.measure is not None and (
        arguments.check or arguments.model is not None or arguments.hardware is not None
    ):
        raise RequestError("--measure describes this machine: it goes with --tp, --dtype, --threads and --device alone")
    if arguments.measure is not None:
        _measure(arguments, argv)
        return
    if arguments.model is None or arguments.hardware is None:
        raise RequestError(
            f"plan needs --model DIR and --hardware FILE or one of {', '.join(PRESETS)}; or --measure FILE to describe this machine"
        )
    config, hardware = ModelConfig.from_dir(arguments.model), Hardware.load(arguments.hardware)
    request = _request(arguments, config, hardware)
    request.check(config, hardware)
    if arguments.output is not None:
        check_target("--output", arguments.output)
    if arguments.check:
        _check(arguments, argv, config, hardware, request)
        return
    if arguments.weights is not None:
        raise RequestError("--weights is of --check, which runs the model; leave it out")
    if arguments.plot is not None:
        check_plot_target(arguments.plot)
    from tp_residual.plan.result import write_plan
    from tp_residual.plan.tables import print_plan

    found = plan(config, hardware, request)
    if arguments.output is not None:
        write_plan(arguments.output, found, config, hardware, " ".join(["python -m tp_residual", *argv]))
    if arguments.plot is not None:
        from tp_residual.plan.plots import write_plot

        write_plot(found, hardware, arguments.plot)
    print_plan(found, hardware)
    sys.stdout.flush()


def _request(arguments: argparse.Namespace, config: ModelConfig, hardware: Hardware) -> PlanRequest:
    """What was not given: those of 1, 2, 4, 8 ranks that the heads and the nodes have room for, and at most the model's length."""
    longest = config.max_sequence_length
    room = min(config.num_attention_heads, max(1, arguments.nodes) * hardware.places_per_node)
    given = None if arguments.tp is None else parse_list("--tp", arguments.tp)
    tokens = parse_list("--tokens", arguments.tokens or _DEFAULT_TOKENS)
    if arguments.tokens is None:
        tokens = tuple(dict.fromkeys(min(size, longest) for size in tokens))
    return PlanRequest(
        given or tuple(size for size in _TP_SIZES if size <= room),
        tokens,
        parse_list("--batch", arguments.batch),
        min(_DEFAULT_CONTEXT, longest) if arguments.context is None else arguments.context,
        arguments.nodes,
        arguments.dtype or config.dtype or "float32",
    )


def _one_tp(option: str, given: str | None) -> int:
    sizes = (1,) if given is None else parse_list("--tp", given)
    if len(sizes) != 1:
        raise RequestError(
            f"{option} runs ranks of one tp size and --tp is {given}; give one, and start it again for another"
        )
    return sizes[0]


def _check(
    arguments: argparse.Namespace, argv: list[str], config: ModelConfig, hardware: Hardware, request: PlanRequest
) -> None:
    tp_size = _one_tp("--check", arguments.tp)
    if arguments.plot is not None:
        raise RequestError("--plot draws predictions; leave it out with --check")
    if hardware.source != "measured":
        raise RequestError(
            f"--check compares a description of this machine with it, and {hardware.name} is a datasheet's; write one with --measure FILE"
        )
    if request.nodes != 1:
        raise RequestError(f"--check runs on this machine alone and --nodes is {request.nodes}; leave it out")
    if why := impossible(hardware, Placement(tp_size, 1)):
        raise RequestError(f"--check at tp={tp_size}: {why}")
    seed = parse_weights(arguments.weights)
    if seed is None:
        CheckpointFiles.open(arguments.model)
    request = PlanRequest((tp_size,), request.tokens, request.batch, request.context, 1, request.dtype)
    if hardware.cores is not None:
        least = request.least_check_bytes(config)
        require_memory(f"--check with {tp_size} ranks", least, available_memory(), "this machine")
    from tp_residual.plan.result import CheckedPass, write_check
    from tp_residual.plan.tables import print_check

    def run(clock: Clock, say: Callable[[str], None]) -> list[CheckedPass]:
        from tp_residual.plan.check import check_plan

        return check_plan(clock, arguments.model, hardware, request, random_seed=seed, say=say)

    rows = _as_ranks(arguments, argv, tp_size, run)
    if rows is not None:
        if arguments.output is not None:
            command = " ".join(["python -m tp_residual", *argv])
            write_check(arguments.output, rows, config, hardware, command, vars(request))
        print_check(rows, hardware)
        sys.stdout.flush()


def _measure(arguments: argparse.Namespace, argv: list[str]) -> None:
    tp_size = _one_tp("--measure", arguments.tp)
    for option, value in (("--output", arguments.output), ("--plot", arguments.plot), ("--weights", arguments.weights)):
        if value is not None:
            raise RequestError(f"{option} is not of --measure, which writes its one file; leave it out")
    check_target("--measure", arguments.measure)
    dtypes = (arguments.dtype,) if arguments.dtype else DTYPES[:2]

    def run(clock: Clock, say: Callable[[str], None]) -> Hardware:
        from tp_residual.plan.measure import measure_hardware

        return measure_hardware(clock, dtypes, say)

    found = _as_ranks(arguments, argv, tp_size, run)
    if found is not None:
        found.write(arguments.measure)
        print(f"{arguments.measure}: {found.origin()}")
        sys.stdout.flush()


def _as_ranks(
    arguments: argparse.Namespace, argv: list[str], tp_size: int, run: Callable[[Clock, Callable[[str], None]], T]
) -> T | None:
    """`run` on every rank; its result on rank 0, nothing on the others."""
    tp_size, replicas = resolve_tp(tp_size)
    if replicas > 1:
        raise RequestError(f"--tp {tp_size} is not the launcher's world size {tp_size * replicas}; use that size")
    threads = threads_per_rank(arguments.threads)
    parse_timeouts(arguments.timeout)
    rules = Rules(arguments.iters, 1, "warm", arguments.max_seconds)
    become_ranks(argv, tp_size)
    import torch
    import torch.distributed as dist

    from tp_residual.bench.timing import Clock

    torch.set_num_threads(threads)
    group = open_group(arguments.device, parse_timeouts(arguments.timeout))
    group.require_agreement("the command", vars(arguments))
    group.enter_phase("load")
    logging.getLogger("tp_residual").setLevel(logging.WARNING)  # each boundary would announce itself

    def say(text: str) -> None:
        if group.rank == 0:
            print(f"plan: {text}", file=sys.stderr, flush=True)

    try:
        with torch.no_grad():
            result = run(Clock(group, rules), say)
    except (UserError, VerificationFailed):
        group.share("done", "")  # all ranks raise it: none takes the side channel along while another reads
        raise
    group.share("done", "")
    rank = group.rank
    group.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return result if rank == 0 else None
