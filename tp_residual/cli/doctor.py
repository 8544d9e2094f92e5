"""`doctor`: what is wrong with a residual connection, by name. Exit code 1 when something is."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tp_residual.bench.results import check_plot_target, check_target, replace_file
from tp_residual.cli.cores import threads_per_rank
from tp_residual.cli.launch import open_group, parse_timeouts, resolve_tp
from tp_residual.cli.session import become_ranks, check_session, open_session
from tp_residual.doctor.report import Diagnosis
from tp_residual.errors import RequestError, UserError, VerificationFailed
from tp_residual.model.config import ModelConfig
from tp_residual.residual.config import ResidualConfig

if TYPE_CHECKING:
    from tp_residual.model.decoder import CausalLM
    from tp_residual.parallel.group import TensorParallelGroup, TransportChoice

_STYLES = {"ok": "green", "fault": "bold red", "note": "yellow", "skipped": "dim"}


@dataclass(frozen=True)
class Job:
    """config: of the model to examine; None: of the example, which has `residual`."""

    config: ModelConfig | None
    residual: ResidualConfig
    tp_size: int
    sequences: list[list[int]] | None
    seq_len: int


def main(arguments: argparse.Namespace, argv: list[str]) -> None:
    """Raises VerificationFailed, after everything is printed and written, for a model that is not healthy."""
    job = prepare(arguments)
    become_ranks(argv, job.tp_size)
    run(job, arguments)


def prepare(arguments: argparse.Namespace) -> Job:
    """Everything that can be refused without torch."""
    if arguments.seq_len < 1:
        raise RequestError(f"--seq-len {arguments.seq_len} must be at least 1")
    if arguments.output is not None:
        check_target("--output", arguments.output)
    if arguments.plot is not None:
        if not arguments.plot.endswith(".png"):
            raise RequestError(f"--plot {arguments.plot} must end in .png")
        check_plot_target(arguments.plot)
    sequences = [_ids(text) for text in arguments.input_ids] or None
    if arguments.model is None:
        if arguments.residual is None:
            raise RequestError("doctor needs --model DIR, or --residual PRESET for an example that has it")
        threads_per_rank(arguments.threads)
        parse_timeouts(arguments.timeout)
        tp_size, _ = resolve_tp(arguments.tp, None)
        if arguments.seq_len > 128:
            raise RequestError(f"--seq-len {arguments.seq_len} is above the example's 128 positions")
        if tp_size > 4:
            raise RequestError(f"--tp {tp_size} is more than the 4 heads of the example; name a --model")
        return Job(None, ResidualConfig.preset(arguments.residual), tp_size, sequences, arguments.seq_len)
    if arguments.init is not None:
        raise RequestError("--init is about the example of --residual PRESET; leave out --model")
    config, tp_size = check_session(arguments)
    longest = max([len(ids) for ids in sequences or []], default=arguments.seq_len)
    if longest > config.max_sequence_length:
        raise RequestError(f"{longest} tokens are too many: {config.length_limit}")
    for ids in sequences or []:
        bad = next((token for token in ids if not 0 <= token < config.vocab_size), None)
        if bad is not None:
            raise RequestError(f"--input-ids has {bad}, which is outside the vocabulary of {config.vocab_size}")
    return Job(config, config.residual, tp_size, sequences, arguments.seq_len)


def _ids(text: str) -> list[int]:
    try:
        ids = [int(part) for part in text.split(",")]
    except ValueError:
        raise RequestError(f"--input-ids {text!r} is not a list of integers; write it as 1,2,3") from None
    return ids


def run(job: Job, arguments: argparse.Namespace) -> None:
    """One rank's part."""
    import torch

    from tp_residual.doctor.initial import probe_init
    from tp_residual.doctor.run import diagnose

    if job.config is not None:
        session = open_session(arguments, job.config)
        model, group, close = session.model, session.group, session.close
    else:
        torch.set_num_threads(threads_per_rank(arguments.threads))
        model, group = _example(job, arguments)
        close = group.close
    sequences = job.sequences
    if sequences is None:
        generator = torch.Generator().manual_seed(0)
        sequences = torch.randint(0, model.config.vocab_size, (1, job.seq_len), generator=generator).tolist()

    def say(what: str) -> None:
        if group.rank == 0:
            print(f"looking at: {what}", file=sys.stderr, flush=True)

    diagnosis = diagnose(model, sequences, progress=say)
    initial = None
    if job.config is None and group.rank == 0:
        say("growth with depth at initialisation")
        initial = probe_init(job.residual, arguments.init or "normal")
    if group.size > 1:
        group.share("doctor done", "")
    close()
    if group.rank != 0:
        return
    if initial is not None:
        diagnosis = diagnosis.with_finding(initial)
    _report(diagnosis, arguments)
    if not diagnosis.healthy:
        names = "; ".join(f"{fault.where}: {fault.what}" if fault.where else fault.what for fault in diagnosis.faults)
        raise VerificationFailed(f"not healthy: {names}")


def _example(job: Job, arguments: argparse.Namespace) -> tuple[CausalLM, TensorParallelGroup]:
    """A tiny decoder with this residual connection, initialised by the rule; in fp64 unless the command says otherwise."""
    import torch

    from tp_residual.doctor.initial import example_config, initialise
    from tp_residual.model.decoder import CausalLM

    transport: TransportChoice = arguments.boundary if arguments.boundary in ("auto", "shared") else "torch"
    limits = parse_timeouts(arguments.timeout)
    group = open_group(arguments.device, limits, checked=arguments.check_collectives, transport=transport)
    model = CausalLM(
        example_config(job.residual, 4),
        group,
        dtype=getattr(torch, arguments.dtype) if arguments.dtype else torch.float64,
        stream_dtype=getattr(torch, arguments.stream_dtype) if arguments.stream_dtype else None,
        sequence_parallel=arguments.sequence_parallel,
        boundary=arguments.boundary,
        round_reduced=arguments.round_reduced,
    )
    initialise(model, arguments.init or "normal", 0)
    return model, group


def _report(diagnosis: Diagnosis, arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(json.dumps(diagnosis.as_json(), allow_nan=True))
    else:
        _print(diagnosis)
    sys.stdout.flush()
    try:
        if arguments.output is not None:
            replace_file(arguments.output, json.dumps(diagnosis.as_json(), indent=1) + "\n")
        if arguments.plot is not None:
            from tp_residual.doctor.plots import picture

            replace_file(arguments.plot, picture(diagnosis, arguments.model or "an example"))
    except OSError as error:
        raise UserError(f"{error.filename or 'a result'} could not be written: {error.strerror or error}") from error


def _print(diagnosis: Diagnosis) -> None:
    console = Console()
    mode = "token-sharded" if diagnosis.sequence_parallel else "replicated"
    title = f"residual {diagnosis.residual}, tp={diagnosis.tp_size}, stream {mode}, {diagnosis.dtype}, {diagnosis.tokens} tokens"
    table = Table("probe", "", "worst", "limit", "what was seen", title=title, title_justify="left")
    for each in diagnosis.findings:
        where = f" at {each.where}" if each.where and each.status == "fault" else ""
        table.add_row(
            each.probe,
            f"[{_STYLES[each.status]}]{each.status}[/]",
            "" if each.value is None else f"{each.value:.2g}",
            "" if each.bound is None else f"{each.bound:.2g}",
            escape(each.what + where),
        )
    console.print(table, highlight=False)
    console.print(
        "healthy" if diagnosis.healthy else f"{len(diagnosis.faults)} of the probes found a fault", highlight=False
    )
