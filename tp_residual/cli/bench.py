"""`bench`: check, become ranks, measure, write the files, print the tables; or compare two files. `bench peers` is in `bench_peers`,
and what runs a model in `bench_model`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tp_residual.bench.compare import compare
from tp_residual.bench.request import (
    EXECUTORS,
    BandwidthRequest,
    CollectivesRequest,
    GemmRequest,
    Rules,
    ShapesRequest,
    at_least,
    one_of,
    parse_list,
    parse_size,
    require_memory,
)
from tp_residual.bench.results import Row, load
from tp_residual.cli.bench_model import main as models
from tp_residual.cli.bench_output import BenchProgress, check_targets, finish
from tp_residual.cli.bench_peers import main as peers
from tp_residual.cli.bench_peers import worker as peers_worker
from tp_residual.cli.cores import own_cores, pin, threads_per_rank
from tp_residual.cli.launch import open_group, parse_timeouts, resolve_tp
from tp_residual.cli.session import become_ranks
from tp_residual.errors import RequestError, UserError, VerificationFailed
from tp_residual.machine import available_memory
from tp_residual.model.config import ModelConfig
from tp_residual.parallel.splits import check_heads

if TYPE_CHECKING:
    from tp_residual.bench.timing import Clock

_GPU = "/dev/nvidia0"  # torch would know, and is not imported yet
_DEFAULT_SHAPES = {"boundary": ("1,16,128,1024,4096", "896,4096"), "add-norm": ("1,16,256,4096", "4096,8192")}


def main(arguments: argparse.Namespace, argv: list[str]) -> None:
    if arguments.question == "compare":
        _compare(arguments)
        return
    if arguments.question in ("peers", "peers-worker"):
        (peers if arguments.question == "peers" else peers_worker)(arguments, argv)
        return
    if arguments.question in ("generate", "memory", "scaling"):
        models(arguments, argv)
        return
    request, tp_size = prepare(arguments)
    rules = _rules(arguments)
    become_ranks(argv, tp_size)
    _run(arguments, argv, rules, request)


def prepare(arguments: argparse.Namespace) -> tuple[Any, int]:
    """`(request, tp size)`, after everything that can be wrong and needs no torch."""
    tp_size, replicas = resolve_tp(arguments.tp)
    if replicas > 1:
        raise RequestError(
            f"--tp {tp_size} is not the launcher's world size {tp_size * replicas}; use --tp {tp_size * replicas} or leave it out"
        )
    threads = threads_per_rank(arguments.threads)
    parse_timeouts(arguments.timeout)
    _rules(arguments)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", tp_size))
    usable = len(os.sched_getaffinity(0))
    if arguments.pin and local_ranks * threads > usable and arguments.threads is not None:
        raise RequestError(
            f"--pin: local ranks={local_ranks} times --threads {threads} is more than the {usable} usable cores; use fewer, or no --pin"
        )
    if arguments.pin and local_ranks > usable:
        raise RequestError(f"--pin: local ranks={local_ranks} is more than the {usable} usable cores; leave --pin out")
    request = _REQUESTS[arguments.question](arguments)
    if arguments.question == "collectives":
        at_least("--root", arguments.root, 0)
        if tp_size < 2:
            raise RequestError("bench collectives needs at least 2 ranks; add --tp 2, or start it under torchrun")
        if arguments.root >= tp_size:
            raise RequestError(f"--root {arguments.root} is not one of the {tp_size} ranks; use 0 to {tp_size - 1}")
    if arguments.device == "cpu" or not os.path.exists(_GPU):
        ranks_here = min(local_ranks, tp_size)
        what, needed = request.least_bytes(tp_size)
        on_ranks = f" on each of {ranks_here} ranks" if ranks_here > 1 else ""
        require_memory(f"{what}{on_ranks}", needed * ranks_here, available_memory(), "this machine")
    check_targets(arguments)
    return request, tp_size


def _rules(arguments: argparse.Namespace) -> Rules:
    return Rules(arguments.iters, arguments.warmup, arguments.cache, arguments.max_seconds)


def _collectives_request(arguments: argparse.Namespace) -> CollectivesRequest:
    given = {"collectives": tuple(arguments.collective)} if arguments.collective else {}
    return CollectivesRequest(
        parse_size("--min-bytes", arguments.min_bytes),
        parse_size("--max-bytes", arguments.max_bytes),
        arguments.factor,
        arguments.dtype,
        transports=tuple(arguments.transport),
        root=arguments.root,
        check=arguments.check,
        **given,
    )


def _bandwidth_request(arguments: argparse.Namespace) -> BandwidthRequest:
    nbytes = None if arguments.bytes is None else parse_size("--bytes", arguments.bytes)
    return BandwidthRequest(nbytes, arguments.gemm_size)


def _shapes_request(arguments: argparse.Namespace) -> ShapesRequest:
    tokens, hidden = _DEFAULT_SHAPES[arguments.question]
    executors = tuple(getattr(arguments, "boundary", ()))
    one_of("--boundary", executors, EXECUTORS)  # before each rank would say it
    return ShapesRequest(
        parse_list("--tokens", arguments.tokens or tokens),
        parse_list("--hidden", arguments.hidden or hidden),
        tuple(arguments.dtype or ("bfloat16",)),
        executors,
        operator=getattr(arguments, "operator", False),
        compiled=getattr(arguments, "compile", False),
    )


def _gemm_request(arguments: argparse.Namespace) -> GemmRequest:
    config = ModelConfig.from_dir(arguments.model)
    check_heads(config.num_attention_heads, resolve_tp(arguments.tp)[0])
    return GemmRequest(config, parse_list("--tokens", arguments.tokens), arguments.dtype or config.dtype or "float32")


_REQUESTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "collectives": _collectives_request,
    "bandwidth": _bandwidth_request,
    "boundary": _shapes_request,
    "add-norm": _shapes_request,
    "gemm": _gemm_request,
}


def _run(arguments: argparse.Namespace, argv: list[str], rules: Rules, request: Any) -> None:
    """One rank's part."""
    threads, usable = threads_per_rank(arguments.threads), len(os.sched_getaffinity(0))
    if arguments.pin:
        pin(own_cores(int(os.environ.get("LOCAL_RANK", "0")), threads, sorted(os.sched_getaffinity(0))))
    import torch
    import torch.distributed as dist

    from tp_residual.bench.machine import commit, hardware, versions
    from tp_residual.bench.results import Result
    from tp_residual.bench.timing import Clock

    torch.set_num_threads(threads)
    group = open_group(arguments.device, parse_timeouts(arguments.timeout))
    group.require_agreement("the command", vars(arguments))
    group.enter_phase("step")
    logging.getLogger("tp_residual").setLevel(logging.WARNING)  # each executor would announce itself
    try:
        if group.device.type == "cuda":
            # the least of all ranks: they refuse it together
            free = group.share("bench/memory", str(torch.cuda.mem_get_info()[0]))
            what, needed = request.least_bytes(group.size)
            require_memory(what, needed, min(map(int, free)), f"a GPU of {group.size}")
        with BenchProgress(arguments.question, group.rank == 0) as progress, torch.no_grad():
            rows, notes, extra = _measure(arguments.question, Clock(group, rules), request, progress)
    except (UserError, VerificationFailed):
        group.share("done", "")  # all ranks raise it: none takes the side channel along while another reads
        raise
    group.share("done", "")
    rank, size, device = group.rank, group.size, group.device.type
    group.close()  # the others leave now: drawing a first picture can take long
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank == 0:
        settings = {"ranks": size, "threads": threads, "device": device, "pin": arguments.pin, **vars(rules)}
        command = " ".join(["python -m tp_residual", *argv])
        result = Result(arguments.question, hardware(usable), versions(), commit(), command, settings, rows, notes)
        finish(arguments, result, extra)


def _measure(question: str, clock: Clock, request: Any, progress: BenchProgress) -> tuple[list[Row], list[str], Row]:
    """`(rows, notes, what the picture needs beside them)`."""
    if question in ("collectives", "boundary"):
        from tp_residual.bench.boundary import measure_boundary
        from tp_residual.bench.collectives import measure_collectives, transports

        measure = measure_collectives if question == "collectives" else measure_boundary
        with transports(clock.group) as available:
            return *measure(clock, request, available, progress), {}
    if question == "bandwidth":
        from tp_residual.bench.bandwidth import measure_bandwidth

        return measure_bandwidth(clock, request, progress), [], {}
    if question == "gemm":
        from tp_residual.bench.gemm import measure_gemm

        return *measure_gemm(clock, request, progress), {}
    from tp_residual.bench.add_norm import measure_add_norm

    return measure_add_norm(clock, request, progress)


def _compare(arguments: argparse.Namespace) -> None:
    """Raises VerificationFailed, after everything is printed, for a regression beyond the spread and above --fail-over."""
    from tp_residual.bench.tables import print_comparisons

    if arguments.fail_over is not None and not arguments.fail_over >= 0:
        raise RequestError(f"--fail-over {arguments.fail_over:g} must be 0 or more percent")
    comparisons = compare(load(arguments.old), load(arguments.new))
    print_comparisons(comparisons)
    sys.stdout.flush()
    if arguments.fail_over is not None:
        slower = [each for each in comparisons if each.regression_percent > arguments.fail_over]
        if slower:
            worst = max(slower, key=lambda each: each.regression_percent)
            raise VerificationFailed(
                f"{len(slower)} of {len(comparisons)} rows are slower by more than {arguments.fail_over:g} %; most of all {worst.name}: "
                f"{worst.regression_percent:.1f} %"
            )
