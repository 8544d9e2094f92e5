"""`score`: log-likelihoods of completions, or the perplexity of a text. JSON on stdout or in --output, everything else on stderr."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tp_residual.cli.generate import (
    AnswerProgress,
    check_output,
    close_answers,
    fail_for_refused,
    logprob_entry,
    model_identity,
    open_answers,
    open_engine,
    parse_limits,
    work_through,
)
from tp_residual.cli.launch import under_launcher
from tp_residual.cli.session import become_ranks, check_shared_session, open_session
from tp_residual.errors import RequestError
from tp_residual.inference.batch_file import PAIR_KINDS, answered, digest, encode_pair, read_lines, run_name
from tp_residual.inference.request import EngineLimits, ScoreRequest, check_pairs
from tp_residual.inference.tokenizer import Tokenizer
from tp_residual.model.config import ModelConfig

if TYPE_CHECKING:
    from tp_residual.cli.session import Session
    from tp_residual.inference.engine import Engine
    from tp_residual.inference.logprobs import TokenLogProb
    from tp_residual.inference.results import Generation


@dataclass(frozen=True)
class Job:
    """pairs: (context, completion); those of a perplexity are the windows of the text."""

    config: ModelConfig
    limits: EngineLimits
    pairs: list[tuple[list[int], list[int]]]
    count: int
    tp_size: int
    replicas: int
    run: str


def main(arguments: argparse.Namespace, argv: list[str]) -> None:
    job = prepare(arguments)
    become_ranks(argv, job.tp_size * job.replicas)
    run(job, arguments)


def prepare(arguments: argparse.Namespace) -> Job:
    """Everything that can be refused, refused: from files and arguments, which all ranks share."""
    config, tp_size, replicas = check_shared_session(arguments)
    check_output(arguments)
    limits = parse_limits(arguments, config)
    tokenizer = cache(lambda: Tokenizer.from_dir(arguments.model))
    if arguments.perplexity is not None:
        for option in ("output", "logprobs"):
            if getattr(arguments, option) is not None:
                raise RequestError(f"--{option} goes with --file; --perplexity prints one object")
        pairs = windows(_text_ids(arguments.perplexity, tokenizer()), arguments.window, config)
    else:
        if arguments.window is not None:
            raise RequestError(f"--window {arguments.window} goes with --perplexity; leave it out")
        entries = read_lines(arguments.file, PAIR_KINDS)
        pairs = [
            encode_pair(entry, tokenizer, where=f"{arguments.file}, line {number}")
            for number, entry in enumerate(entries, 1)
        ]
    count = arguments.logprobs or 0
    check_pairs(pairs, config, count, lengths=arguments.file is None)  # those of a file are refused one by one
    name = ""
    if arguments.file is not None:
        name = run_name(
            "score", digest(arguments.file), count, arguments.dtype, arguments.stream_dtype, arguments.round_reduced,
            *model_identity(arguments),
        )  # fmt: skip
        if arguments.output is not None and not under_launcher():
            answered(arguments.output, name, resume=arguments.resume)
    return Job(config, limits, pairs, count, tp_size, replicas, name)


def _text_ids(path: str, tokenizer: Tokenizer) -> list[int]:
    try:
        ids = tokenizer.encode(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8: {error.reason} at byte {error.start}; convert it") from None
    if len(ids) < 2:
        raise RequestError(f"{path} has {len(ids)} tokens, of which the first cannot be predicted; give it at least 2")
    return ids


def windows(ids: list[int], window: int | None, config: ModelConfig) -> list[tuple[list[int], list[int]]]:
    """Pieces of at most `window` tokens, each beginning with the last token of the one before: all but the first are scored once."""
    longest = config.max_sequence_length
    window = min(longest, 2048) if window is None else window
    if not 2 <= window <= longest:
        raise RequestError(f"--window {window} must be between 2 and {config.length_limit}")
    return [(ids[at : at + 1], ids[at + 1 : at + window]) for at in range(0, len(ids) - 1, window - 1)]


def run(job: Job, arguments: argparse.Namespace) -> None:
    """One rank's part."""
    session = open_session(arguments, job.config, inference=True, replicas=job.replicas, run=job.run)
    if session.world.rank == 0:
        model = session.model
        first = sum(len(context) + len(completion) for context, completion in job.pairs[:1])
        boundary = model.boundary_for(min(first, job.limits.max_batched_tokens))
        print(
            f"settings: tp={session.group.size} replicas={job.replicas} device={session.group.device} "
            f"dtype={str(model.dtype).removeprefix('torch.')} "
            f"stream_dtype={str(boundary.stream_dtype).removeprefix('torch.')} "
            f"sequence_parallel={arguments.sequence_parallel} boundary={boundary.executor.name}",
            file=sys.stderr,
        )
    engine = open_engine(session, job.limits)
    refused = 0
    if arguments.perplexity is not None:
        _perplexity(job, arguments, session, engine)
    else:
        refused = _score_file(job, arguments, session, engine)
    session.close()
    fail_for_refused(refused, len(job.pairs), "scores")


def _perplexity(job: Job, arguments: argparse.Namespace, session: Session, engine: Engine) -> None:
    from tp_residual.inference.replicas import SharedWork

    sums: dict[int, float] = {}

    def keep(window: tuple[int, float]) -> None:
        index, sums[index] = window
        progress.advance()

    def finished(result: Generation) -> None:
        if session.group.rank == 0:
            assert result.prompt_logprobs is not None
            work.deliver((result.index, math.fsum(token.log_prob for token in result.prompt_logprobs)))

    with (
        AnswerProgress(session.world.rank == 0, 0, len(job.pairs)) as progress,
        SharedWork(session.world, session.group, keep) as work,
    ):
        work_through(
            engine, work, range(len(job.pairs)), lambda index: ScoreRequest(*job.pairs[index], 0, index), finished
        )
    if session.world.rank == 0:
        scored = sum(len(completion) for _, completion in job.pairs)
        total = math.fsum(sums[index] for index in range(len(job.pairs)))
        answer = {
            "file": arguments.perplexity,
            "tokens": scored + 1,
            "scored_tokens": scored,
            "window": max(len(context) + len(completion) for context, completion in job.pairs),
            "sum": total,
            "perplexity": math.exp(-total / scored),
        }
        print(json.dumps(answer, ensure_ascii=False))


def _score_file(job: Job, arguments: argparse.Namespace, session: Session, engine: Engine) -> int:
    """How many were refused."""
    from tp_residual.inference.replicas import SharedWork

    world, group = session.world, session.group
    answers, done = open_answers(world, arguments, job.run)
    refused = 0

    def write(answer: tuple[int, int, dict[str, Any]]) -> None:
        nonlocal refused
        assert answers is not None
        answers.write(*answer)
        progress.advance()
        if "error" in answer[2]:
            refused += 1
            print(f"tp_residual: refused: {answer[2]['error']}", file=sys.stderr)

    def finished(result: Generation) -> None:
        if group.rank == 0:
            work.deliver(
                (result.index, 0, _answer(job.pairs[result.index][0], result.prompt_logprobs or [], job.count))
            )

    def refuse(index: int, message: str) -> None:
        if group.rank == 0:
            nothing = {"context_tokens": len(job.pairs[index][0]), "tokens": [], "sum": None, "error": message}
            work.deliver((index, 0, nothing))

    left = [i for i in range(len(job.pairs)) if (i, 0) not in done]
    with (
        AnswerProgress(world.rank == 0, len(done), len(job.pairs)) as progress,
        SharedWork(world, group, write) as work,
    ):
        work_through(
            engine, work, left, lambda index: ScoreRequest(*job.pairs[index], job.count, index), finished, refuse
        )
    close_answers(answers)
    return refused


def _answer(context: list[int], tokens: list[TokenLogProb], count: int) -> dict[str, Any]:
    entries = [logprob_entry(token) for token in tokens]
    if not count:
        entries = [{name: entry[name] for name in ("token_id", "logprob")} for entry in entries]
    return {"context_tokens": len(context), "tokens": entries, "sum": math.fsum(token.log_prob for token in tokens)}
