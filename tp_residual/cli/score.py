"""`score`: log-likelihoods of completions, or the perplexity of a text. JSON on stdout or in --output, everything else on stderr."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tp_residual.cli.generate import (
    BATCH_SIZE,
    AnswerProgress,
    check_output,
    logprob_entry,
    model_identity,
    open_answers,
)
from tp_residual.cli.launch import under_launcher
from tp_residual.cli.session import become_ranks, check_session, open_session
from tp_residual.errors import RequestError
from tp_residual.inference.batch_file import PAIR_KINDS, answered, digest, encode_pair, read_lines, run_name
from tp_residual.inference.request import check_pairs
from tp_residual.inference.tokenizer import Tokenizer
from tp_residual.model.config import ModelConfig

if TYPE_CHECKING:
    from tp_residual.cli.session import Session


@dataclass(frozen=True)
class Job:
    """pairs: (context, completion); those of a perplexity are the windows of the text."""

    config: ModelConfig
    pairs: list[tuple[list[int], list[int]]]
    count: int
    tp_size: int
    run: str


def main(arguments: argparse.Namespace, argv: list[str]) -> None:
    job = prepare(arguments)
    become_ranks(argv, job.tp_size)
    run(job, arguments)


def prepare(arguments: argparse.Namespace) -> Job:
    """Everything that can be refused, refused: from files and arguments, which all ranks share."""
    config, tp_size = check_session(arguments)
    check_output(arguments)
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
    check_pairs(pairs, config, count)
    name = ""
    if arguments.file is not None:
        name = run_name(
            "score", digest(arguments.file), count, arguments.dtype, arguments.stream_dtype, arguments.round_reduced,
            *model_identity(arguments),
        )  # fmt: skip
        if arguments.output is not None and not under_launcher():
            answered(arguments.output, name, resume=arguments.resume)
    return Job(config, pairs, count, tp_size, name)


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
    session = open_session(arguments, job.config)
    if session.group.rank == 0:
        model = session.model
        boundary = model.boundary_for(sum(len(context) + len(completion) for context, completion in job.pairs[:1]))
        print(
            f"settings: tp={session.group.size} device={session.group.device} dtype={str(model.dtype).removeprefix('torch.')} "
            f"stream_dtype={str(boundary.stream_dtype).removeprefix('torch.')} "
            f"sequence_parallel={arguments.sequence_parallel} boundary={boundary.executor.name}",
            file=sys.stderr,
        )
    if arguments.perplexity is not None:
        _perplexity(job, arguments, session)
    else:
        _score_file(job, arguments, session)
    session.close()


def _perplexity(job: Job, arguments: argparse.Namespace, session: Session) -> None:
    from tp_residual.inference.logprobs import score

    total, size = 0.0, arguments.batch_size or 1
    scored = sum(len(completion) for _, completion in job.pairs)
    with AnswerProgress(session.group.rank == 0, 0, len(job.pairs)) as progress:
        for start in range(0, len(job.pairs), size):
            for tokens in score(session.model, job.pairs[start : start + size], session.group):
                total += math.fsum(token.log_prob for token in tokens)
                progress.advance()
    if session.group.rank == 0:
        answer = {
            "file": arguments.perplexity,
            "tokens": scored + 1,
            "scored_tokens": scored,
            "window": max(len(context) + len(completion) for context, completion in job.pairs),
            "sum": total,
            "perplexity": math.exp(-total / scored),
        }
        print(json.dumps(answer, ensure_ascii=False))


def _score_file(job: Job, arguments: argparse.Namespace, session: Session) -> None:
    from tp_residual.inference.logprobs import score

    group = session.group
    answers, done = open_answers(group, arguments, job.run)
    left, size = [i for i in range(len(job.pairs)) if (i, 0) not in done], arguments.batch_size or BATCH_SIZE
    with AnswerProgress(group.rank == 0, len(done), len(job.pairs)) as progress:
        for start in range(0, len(left), size):
            indices = left[start : start + size]
            results = score(session.model, [job.pairs[i] for i in indices], group, count=job.count)
            for index, tokens in zip(indices, results, strict=True):
                if answers is None:
                    continue
                entries = [logprob_entry(token) for token in tokens]
                if not job.count:
                    entries = [{name: entry[name] for name in ("token_id", "logprob")} for entry in entries]
                answer = {
                    "context_tokens": len(job.pairs[index][0]),
                    "tokens": entries,
                    "sum": math.fsum(token.log_prob for token in tokens),
                }
                answers.write(index, 0, answer)
                progress.advance()
    if answers is not None:
        answers.close()
