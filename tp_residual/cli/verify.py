"""`verify`: check, become ranks, compare with the unsharded model, print everything; exit code 1 when something is wrong."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tp_residual.checkpoint.files import CheckpointFiles
from tp_residual.cli.session import Session, become_ranks, check_session, open_session, parse_weights
from tp_residual.errors import RequestError, VerificationFailed
from tp_residual.inference.tokenizer import Tokenizer
from tp_residual.model.config import ModelConfig
from tp_residual.residual.config import PRE_NORM
from tp_residual.verify.folders import check_dump_target

if TYPE_CHECKING:
    from tp_residual.verify.against import BitReport
    from tp_residual.verify.oracle import WeightSource
    from tp_residual.verify.report import Comparison, VerifyReport

DEFAULT_TOKENS = 256  # what the rule for 16 bits needs


@dataclass(frozen=True)
class Job:
    """A request that has passed every check that needs no torch. prompts: token ids, or none for random ids."""

    config: ModelConfig
    tp_size: int
    prompts: list[list[int]]
    random_tokens: int
    layers: tuple[int, int] | None


def main(arguments: argparse.Namespace, argv: list[str]) -> None:
    job = prepare(arguments)
    become_ranks(argv, job.tp_size)
    run(job, arguments)


def prepare(arguments: argparse.Namespace) -> Job:
    config, tp_size = check_session(arguments)
    if config.residual != PRE_NORM and arguments.against is None:
        raise RequestError(
            f"verify compares with an unsharded Pre-Norm model, and this one has residual {config.residual.name}; "
            "use verify --against reference, or doctor"
        )
    if arguments.prompt and arguments.seq_len is not None:
        raise RequestError("--prompt and --seq-len exclude each other: text, or that many random ids")
    if arguments.chat and not arguments.prompt:
        raise RequestError("--chat needs a --prompt")
    if not all(arguments.prompt):
        raise RequestError("a --prompt is empty; give it some text")
    if arguments.backward and (arguments.against or arguments.layers or arguments.dump):
        raise RequestError("--backward goes through the whole model: leave out --against, --layers and --dump")
    if arguments.against and (arguments.layers or arguments.dump):
        raise RequestError("--against compares two executors: leave out --layers and --dump")
    if arguments.backward and arguments.sequence_parallel == "auto":
        raise RequestError("--backward needs --sequence-parallel off or on: auto has no gradients")
    if arguments.backward and (arguments.dtype or config.dtype or "float32") in ("bfloat16", "float16"):
        raise RequestError("--backward needs --dtype float32: 16-bit gradients are too coarse to be judged")
    tokens = DEFAULT_TOKENS if arguments.seq_len is None else arguments.seq_len
    if tokens < 1:
        raise RequestError(f"--seq-len {tokens} must be at least 1")
    layers = None if arguments.layers is None else _parse_layers(arguments.layers, config.num_hidden_layers)
    if arguments.dump is not None:
        check_dump_target(arguments.dump)
    prompts = []
    if arguments.prompt:
        tokenizer = Tokenizer.from_dir(arguments.model)
        prompts = [_encode(tokenizer, text, arguments.chat) for text in arguments.prompt]
    for index, ids in enumerate(prompts):
        if not 1 <= len(ids) <= config.max_position_embeddings:
            raise RequestError(
                f"prompt {index} has {len(ids)} tokens; 1 to max_position_embeddings={config.max_position_embeddings} can be compared"
            )
    return Job(config, tp_size, prompts, tokens, layers)


def _encode(tokenizer: Tokenizer, text: str, chat: bool) -> list[int]:
    return tokenizer.apply_chat_template([{"role": "user", "content": text}]) if chat else tokenizer.encode(text)


def _parse_layers(text: str, count: int) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    try:
        layers = int(first or 0), int(last or count)
    except ValueError:
        layers = (-1, -1)
    if not colon or not 0 <= layers[0] < layers[1] <= count:
        raise RequestError(f"--layers {text!r} is not A:B with 0 <= A < B <= {count}; 0:{count} is all of them")
    return layers


def run(job: Job, arguments: argparse.Namespace) -> None:
    """One rank's part. Raises VerificationFailed after everything is printed."""
    from tp_residual.verify.against import verify_against_reference
    from tp_residual.verify.backward import verify_backward
    from tp_residual.verify.run import random_sequences, verify_model

    session = open_session(arguments, job.config)
    model, group = session.model, session.group
    sequences: list[list[int]] = json.loads(group.share("prompts", json.dumps(job.prompts))[0])
    sequences = sequences or random_sequences(job.random_tokens, job.config)
    report: VerifyReport | BitReport
    if arguments.against:
        report = verify_against_reference(model, sequences)
    elif arguments.backward:
        with _Progress(group.rank == 0) as progress:
            report = verify_backward(model, _source(arguments, job.config), sequences, progress=progress)
    else:
        with _Progress(group.rank == 0) as progress:
            report = verify_model(
                model,
                _source(arguments, job.config),
                sequences,
                text=bool(job.prompts),
                layers=job.layers,
                dump=arguments.dump,
                progress=progress,
            )
    if group.rank == 0:
        if arguments.json:
            print(json.dumps({"model": str(arguments.model)} | report.as_json()))
        else:
            _print(report, session, str(arguments.model))
        sys.stdout.flush()
    session.close()
    if not report.passed:
        raise VerificationFailed(report.summary)


def _source(arguments: argparse.Namespace, config: ModelConfig) -> WeightSource:
    from tp_residual.verify.random_source import RandomWeights

    seed = parse_weights(arguments.weights)
    return CheckpointFiles.open(arguments.model) if seed is None else RandomWeights(config, seed)


def _print(report: VerifyReport | BitReport, session: Session, model: str) -> None:
    from tp_residual.verify.against import BitReport

    console = wide_console()
    if isinstance(report, BitReport):
        console.print(escape(report.summary), highlight=False)
        return
    console.print(
        escape(f"{model}: " + ", ".join(f"{name} {value}" for name, value in report.settings.items())), highlight=False
    )
    shown = [c for c in report.comparisons if c.quantity != "normed" or not c.explained]
    table = Table(box=SIMPLE)
    for name in ("module", "value", "largest error", "median", "limit", "max ulp", "token, dim", "of its own", ""):
        table.add_column(name, no_wrap=True)
    for comparison in shown:
        table.add_row(*_row(comparison), style=None if comparison.within_limit and comparison.explained else "bold red")
    console.print(table)
    for name, value in report.figures.items():
        console.print(escape(f"{name.replace('_', ' ')}: {value}"), highlight=False)
    console.print(escape(report.summary), highlight=False)


def wide_console() -> Console:
    """Of a terminal's own width; in a file, wide enough for a row a line."""
    return Console(width=None if sys.stdout.isatty() else 140)


def _row(comparison: Comparison) -> tuple[str, ...]:
    limit = f"{comparison.limit:.1e} {comparison.judged}" if comparison.judged != "none" else ""
    state = (
        "ok" if comparison.within_limit and comparison.explained else "fault" if not comparison.explained else "over"
    )
    return (
        escape(comparison.module),
        comparison.quantity,
        f"{comparison.max_error:.2e}",
        f"{comparison.median_error:.2e}",
        limit,
        f"{comparison.max_ulp:.3g}",
        f"{comparison.worst_token}, {comparison.worst_dimension}",
        f"{comparison.local_error:.1e}",
        state,
    )


class _Progress:
    """Rank 0's bar of layers done, where stderr is a terminal."""

    def __init__(self, shown: bool) -> None:
        from rich.progress import Progress

        self._bar = Progress(console=Console(stderr=True), transient=True) if shown and sys.stderr.isatty() else None

    def __enter__(self) -> _Progress:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("the unsharded model", total=None)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
