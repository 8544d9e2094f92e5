"""`bench generate`, `memory` and `scaling`: a model through the engine, in ranks of this process or in processes of their own."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from tp_residual.bench.children import ChildRefused, run_bench
from tp_residual.bench.request import (
    GenerateRequest,
    Rules,
    at_least,
    parse_list,
    require_memory,
)
from tp_residual.bench.results import Result, Row
from tp_residual.cli.bench_output import BenchProgress, check_targets, finish
from tp_residual.cli.cores import threads_per_rank
from tp_residual.cli.launch import under_launcher
from tp_residual.cli.session import Session, become_ranks, check_session, open_session
from tp_residual.errors import RequestError, UserError, VerificationFailed
from tp_residual.machine import available_memory
from tp_residual.model.config import ModelConfig
from tp_residual.model.layout import ModelLayout
from tp_residual.parallel.splits import check_heads

_GPU = "/dev/nvidia0"  # torch would know, and is not imported yet
_LAYOUT = (
    "weights", "residual", "sequence_parallel", "boundary", "boundary_table", "dtype", "stream_dtype", "device", "threads",
)  # fmt: skip
_FLAGS = ("force_residual", "round_reduced", "check_collectives")


def main(arguments: argparse.Namespace, argv: list[str]) -> None:
    {"generate": _generate, "memory": _memory, "scaling": _scaling}[arguments.question](arguments, argv)


def _generate(arguments: argparse.Namespace, argv: list[str]) -> None:
    config, tp_size = check_session(arguments)
    request = _request(arguments, config, tp_size)
    rules = _rules(arguments)
    check_targets(arguments)
    usable = len(os.sched_getaffinity(0))
    become_ranks(argv, tp_size)
    _measure(arguments, argv, config, usable, rules, lambda session: _generate_rows(session, request, rules))


def _generate_rows(session: Session, request: GenerateRequest, rules: Rules) -> tuple[list[Row], list[str]]:
    from tp_residual.bench.generate import make_engine, measure_generate
    from tp_residual.bench.timing import Clock

    with BenchProgress("generate", session.group.rank == 0) as progress:
        engine = make_engine(session.model, request)
        return measure_generate(Clock(session.group, rules), engine, request, progress)


def _memory(arguments: argparse.Namespace, argv: list[str]) -> None:
    """One mode in ranks of this process; or each in processes of its own, since what one has touched would count for the next."""
    both = arguments.sequence_parallel == "both"
    if both:
        arguments.sequence_parallel = "off"
    config, tp_size = check_session(arguments)
    request = _request(arguments, config, tp_size)
    for option, values in (("--batch", request.batches), ("--prompt-tokens", request.prompts)):
        if len(values) > 1:
            raise RequestError(f"{option} {','.join(map(str, values))}: memory is of one batch; give one number")
    if arguments.device == "cuda" or (arguments.device == "auto" and os.path.exists(_GPU)):
        raise RequestError(f"--device {arguments.device}: anonymous memory is a CPU rank's; add --device cpu")
    check_targets(arguments)
    if both and tp_size > 1:
        if under_launcher():
            raise RequestError(
                "bench memory starts the ranks of each mode itself; run it without torchrun, or give --sequence-parallel on or off"
            )
        _memory_of_both(arguments, argv, tp_size)
        return
    usable = len(os.sched_getaffinity(0))
    become_ranks(argv, tp_size)
    from tp_residual.bench.memory import AnonymousPeak, measure_memory

    with AnonymousPeak().watching() as peak:

        def open_watched() -> Session:
            with peak.phase("load"):
                return open_session(arguments, config, inference=True)

        _measure(
            arguments, argv, config, usable, Rules(1, 0), lambda session: measure_memory(session.model, request, peak), open_watched
        )  # fmt: skip


def _memory_of_both(arguments: argparse.Namespace, argv: list[str], tp_size: int) -> None:
    found: list[Result] = []
    for choice, mode in (("off", "TP"), ("on", "SP")):
        print(f"bench memory: {mode}", file=sys.stderr, flush=True)
        arguments.sequence_parallel = choice
        found.append(run_bench(["memory", *_options(arguments, tp_size)], f"bench memory, {mode}"))
    rows = [row for result in found for row in result.rows]
    notes = dict.fromkeys(note for result in found for note in result.notes)
    result = replace(found[0], command=_command(argv), rows=rows, notes=tuple(notes))
    finish(arguments, result)


def _scaling(arguments: argparse.Namespace, argv: list[str]) -> None:
    if under_launcher():
        raise RequestError("bench scaling starts the ranks of each tp size itself; run it without torchrun")
    sizes = sorted(parse_list("--tp", arguments.tp))
    for size in sizes:
        at_least("--tp", size, 1)
    from tp_residual.bench.scaling import FEWEST_ROUNDS, measure_sizes, merge

    at_least("--rounds", arguments.rounds, FEWEST_ROUNDS)
    config, _ = check_session(argparse.Namespace(**vars(arguments) | {"tp": 1}))
    rules = _rules(arguments)
    check_targets(arguments)
    possible, notes = list[int](), list[str]()
    for size in sizes:
        try:
            check_heads(config.num_attention_heads, size)
        except UserError as error:
            notes.append(f"tp={size}: {error}")
        else:
            _request(arguments, config, size)
            possible.append(size)
    if not possible:
        raise RequestError(f"no tp size of {arguments.tp} is one of the model's: {'; '.join(notes)}")

    def run(size: int) -> Result:
        options = [*_options(arguments, size), *_rule_options(arguments)]
        return run_bench(["generate", *options], f"bench generate --tp {size}")

    def say(text: str) -> None:
        print(f"bench scaling: {text}", file=sys.stderr, flush=True)

    found = measure_sizes(possible, arguments.rounds, run, ChildRefused, say)
    first = next(iter(found.results.values()))[0]
    threads = [str(results[0].settings["threads"]) for results in found.results.values()]
    settings = {
        **first.settings,
        "ranks": ",".join(map(str, found.results)),
        "threads": ",".join(threads),
        **vars(rules),
        "rounds": arguments.rounds,
    }
    result = replace(
        first,
        what="scaling",
        command=_command(argv),
        settings=settings,
        rows=merge(found),
        notes=(*notes, *found.notes),
    )
    finish(arguments, result)


def _options(arguments: argparse.Namespace, tp_size: int) -> list[str]:
    """The same model, batches, layout and machine, for a child of one tp size."""
    options = [
        "--model", str(arguments.model), "--tp", str(tp_size), "--batch", arguments.batch,
        "--prompt-tokens", arguments.prompt_tokens, "--new-tokens", str(arguments.new_tokens),
    ]  # fmt: skip
    for name in ("max_batched_tokens", *_LAYOUT):
        if (value := getattr(arguments, name)) is not None:
            options += [_option(name), str(value)]
    options += [_option(name) for name in _FLAGS if getattr(arguments, name)]
    for limit in arguments.timeout:
        options += ["--timeout", limit]
    return options


def _rule_options(arguments: argparse.Namespace) -> list[str]:
    return [
        text for name in ("iters", "warmup", "max_seconds") for text in (_option(name), str(getattr(arguments, name)))
    ]


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _request(arguments: argparse.Namespace, config: ModelConfig, tp_size: int) -> GenerateRequest:
    """After everything about it that can be wrong and needs no torch."""
    request = GenerateRequest(
        config,
        parse_list("--batch", arguments.batch),
        parse_list("--prompt-tokens", arguments.prompt_tokens),
        arguments.new_tokens,
        arguments.max_batched_tokens,
    )
    if arguments.device == "cpu" or not os.path.exists(_GPU):
        dtype = arguments.dtype or config.dtype or "float32"
        needed = request.least_bytes(ModelLayout.of(config, tp_size), dtype)
        what = f"--batch {max(request.batches)} --prompt-tokens {max(request.prompts)}"
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", tp_size))
        require_memory(what, needed * ranks // tp_size, available_memory(), "this machine")
    return request


def _rules(arguments: argparse.Namespace) -> Rules:
    at_least("--warmup", arguments.warmup, 1)  # the counters are learned from one batch that is not timed
    return Rules(arguments.iters, arguments.warmup, seconds=arguments.max_seconds)


def _measure(
    arguments: argparse.Namespace,
    argv: list[str],
    config: ModelConfig,
    usable: int,
    rules: Rules,
    measure: Callable[[Session], tuple[list[Row], Sequence[str]]],
    open_: Callable[[], Session] | None = None,
) -> None:
    """One rank's part, from the open session to the written result."""
    import torch

    threads = threads_per_rank(arguments.threads)
    session = open_session(arguments, config, inference=True) if open_ is None else open_()
    logging.getLogger("tp_residual").setLevel(logging.WARNING)
    group = session.group
    try:
        with torch.no_grad():
            rows, notes = measure(session)
    except (UserError, VerificationFailed):
        group.share("done", "")  # all ranks raise it: none takes the side channel along while another reads
        raise
    pinned = len(os.sched_getaffinity(0)) < usable
    settings = {"ranks": group.size, "threads": threads, "device": group.device.type, "pin": pinned, **vars(rules)}
    rank = group.rank
    session.close()  # the others leave now: drawing a first picture can take long
    if rank == 0:
        from tp_residual.bench.machine import commit, hardware, versions

        found = hardware(usable), versions(), commit(), _command(argv)
        finish(arguments, Result(arguments.question, *found, settings, rows, tuple(notes)))


def _command(argv: list[str]) -> str:
    return " ".join(["python -m tp_residual", *argv])
