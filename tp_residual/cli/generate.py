"""`generate`: check, become ranks, run, print. What is printed on stdout is the result and nothing else."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tp_residual.bench.request import parse_size
from tp_residual.cli.launch import under_launcher
from tp_residual.cli.session import become_ranks, check_shared_session, open_session
from tp_residual.errors import RequestError
from tp_residual.inference.batch_file import (
    PROMPT_KINDS,
    AnswerFile,
    answered,
    digest,
    encode_prompt,
    read_lines,
    run_name,
)
from tp_residual.inference.request import (
    DEFAULT_MAX_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    EngineLimits,
    GenerationSettings,
    Request,
    SamplingSettings,
    ScoreRequest,
    check_limits,
    check_prompts,
    parse_steps,
)
from tp_residual.inference.scheduler import check_length
from tp_residual.inference.tokenizer import Tokenizer
from tp_residual.model.config import ModelConfig

DEFAULT_PROFILE_STEPS = "4:8"  # a prompt takes the first; the next ones record and warm up

if TYPE_CHECKING:
    from tp_residual.cli.session import Session
    from tp_residual.inference.engine import Engine
    from tp_residual.inference.logprobs import TokenLogProb
    from tp_residual.inference.profile import StepProfiler
    from tp_residual.inference.replicas import SharedWork
    from tp_residual.inference.results import Generation, GenerationTimings
    from tp_residual.model.decoder import CausalLM
    from tp_residual.parallel.group import TensorParallelGroup


@dataclass(frozen=True)
class Job:
    """A request that has passed every check that needs no torch. run: what a prompt file's answers are marked with."""

    config: ModelConfig
    limits: EngineLimits
    tokenizer: Tokenizer | None
    prompts: list[list[int]]
    settings: GenerationSettings
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
    _check_combination(arguments, tp_size, replicas)
    limits = parse_limits(arguments, config)
    settings = GenerationSettings(
        max_new_tokens=arguments.max_new_tokens,
        min_new_tokens=arguments.min_new_tokens,
        ignore_eos=arguments.ignore_eos,
        stop_token_ids=config.eos_token_ids,
        stop=tuple(arguments.stop),
        sampling=SamplingSettings.resolve(
            arguments.model,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            min_p=arguments.min_p,
            repetition_penalty=arguments.repetition_penalty,
            seed=arguments.seed,
            n=arguments.n,
        ),
        logprobs=arguments.logprobs,
        prompt_logprobs=arguments.prompt_logprobs,
    )
    tokenizer = cache(lambda: Tokenizer.from_dir(arguments.model))
    entries: list[dict[str, Any]]
    if arguments.prompt_file is not None:
        entries = read_lines(arguments.prompt_file, PROMPT_KINDS)
        places = [f"{arguments.prompt_file}, line {number}" for number in range(1, len(entries) + 1)]
        needs_tokenizer = bool(settings.stop) or any("prompt_ids" not in entry for entry in entries)
    else:
        entries = [{"prompt": text} for text in arguments.prompt]
        entries += [{"prompt_ids": _parse_ids(text)} for text in arguments.prompt_ids]
        places = ["--prompt"] * len(entries)
        needs_tokenizer = bool(arguments.prompt) or bool(settings.stop) or not arguments.json
        if "" in arguments.prompt:
            raise RequestError("a --prompt is empty; give it some text")
    if needs_tokenizer:
        if not arguments.json and arguments.prompt_ids and not Path(arguments.model, "tokenizer.json").exists():
            raise RequestError(
                f"{arguments.model} has no tokenizer.json, which text needs; add --json for token ids alone"
            )
        tokenizer()
    prompts = [
        encode_prompt(entry, tokenizer, chat=arguments.chat, where=place)
        for entry, place in zip(entries, places, strict=True)
    ]
    # of a file, a prompt that is too long is refused alone, when its turn comes
    check_prompts(prompts, config, settings, lengths=arguments.prompt_file is None)
    if arguments.prompt_file is None and limits.max_model_len is not None:
        check_length(max(map(len, prompts)), settings.max_new_tokens, limits.max_model_len)
    name = ""
    if arguments.prompt_file is not None:
        name = run_name(
            digest(arguments.prompt_file), arguments.chat, settings, arguments.dtype, arguments.stream_dtype,
            arguments.round_reduced, *model_identity(arguments),
        )  # fmt: skip
        if arguments.output is not None and not under_launcher():  # early; under a launcher rank 0 looks, for all
            answered(arguments.output, name, resume=arguments.resume)
    return Job(config, limits, tokenizer() if needs_tokenizer else None, prompts, settings, tp_size, replicas, name)


def model_identity(arguments: argparse.Namespace) -> list[object]:
    """What tells one model directory from another without reading its weights: names and sizes stand for those."""
    folder = Path(arguments.model)
    small = [digest(folder / name) for name in ("config.json", "tokenizer.json", "tokenizer_config.json")]
    weights = sorted((path.name, path.stat().st_size) for path in folder.glob("*.safetensors"))
    return [*small, getattr(arguments, "weights", None), weights]


def _check_combination(arguments: argparse.Namespace, tp_size: int, replicas: int) -> None:
    """Options that would mean nothing beside each other."""
    if replicas > 1 and arguments.prompt_file is None:
        raise RequestError(
            f"{replicas} replicas share a file of prompts, and --prompt is one batch; "
            f"put the prompts into a --prompt-file, or use --tp {tp_size * replicas}"
        )
    told = arguments.json or arguments.prompt_file is not None
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(arguments, name) is not None and not told:
            raise RequestError(f"--{name.replace('_', '-')} is printed as JSON; add --json")
    if arguments.prompt_file is not None and (arguments.prompt or arguments.prompt_ids):
        raise RequestError("--prompt-file and --prompt are both given; put the prompts into the file")
    if arguments.prompt_file is None:
        if arguments.output is not None:
            raise RequestError("--output goes with --prompt-file; give one, or leave it out")
    if arguments.profile is None and arguments.profile_steps is not None:
        raise RequestError(f"--profile-steps {arguments.profile_steps} are those of a --profile; name its folder")
    arguments.profile_steps = arguments.profile_steps or DEFAULT_PROFILE_STEPS
    parse_steps(arguments.profile_steps)
    if arguments.profile is not None:
        try:
            os.makedirs(arguments.profile, exist_ok=True)
        except OSError as error:
            raise RequestError(
                f"--profile {arguments.profile} cannot be a folder for traces: {error.strerror}"
            ) from None
    check_output(arguments)


def check_output(arguments: argparse.Namespace) -> None:
    if arguments.resume and arguments.output is None:
        raise RequestError("--resume goes on with a file; name it with --output")


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise RequestError(f"--prompt-ids {text!r} is not a list of integers; write it as 1,2,3") from None


def run(job: Job, arguments: argparse.Namespace) -> None:
    """One rank's part."""
    from tp_residual.cli.report import print_table

    session = open_session(arguments, job.config, inference=True, replicas=job.replicas, run=job.run)
    world, group, model, loaded = session.world, session.group, session.model, session.loaded
    if world.rank == 0:
        prefill = min(sum(map(len, job.prompts)), job.limits.max_batched_tokens)
        resolved = resolved_settings(job, arguments, model, prefill)
        shown = {key: value for key, value in resolved.items() if key != "model"}
        print("settings: " + " ".join(f"{key}={value}" for key, value in shown.items()), file=sys.stderr)
    engine = open_engine(session, job.limits, tokenizer=job.tokenizer, check_finite=arguments.check_finite)
    timings, refused = engine.timings, 0
    profiler = _profiler(arguments, session)
    engine.profiler = profiler
    if arguments.prompt_file is not None:
        refused = _answer_file(job, arguments, session, engine)
    else:
        _answer_prompts(job, arguments, session, engine)
    if profiler is not None:
        profiler.finish()
        if world.rank == 0:
            said = f"in {arguments.profile}" if profiler.written else f"none: there were {profiler.steps} steps"
            print(f"profile of steps {arguments.profile_steps}: {said}", file=sys.stderr)
    ours = [loaded.bytes_read, loaded.bytes_held, timings.prefill_tokens, timings.decode_tokens]
    shared = [json.loads(text) for text in world.share("bytes and tokens", json.dumps(ours))]
    if world.rank == 0:
        sys.stdout.flush()
        if timings.prefill_tokens:
            print_table(arguments.model, model, group, timings, [each[:2] for each in shared[: group.size]])
        if job.replicas > 1:
            print_replicas([each[2:] for each in shared[:: group.size]], group.size)
    session.close()
    fail_for_refused(refused, len(job.prompts) * job.settings.sampling.n, "answers")


def _profiler(arguments: argparse.Namespace, session: Session) -> StepProfiler | None:
    if arguments.profile is None:
        return None
    from tp_residual.inference.profile import StepProfiler

    steps = parse_steps(arguments.profile_steps)
    return StepProfiler(arguments.profile, steps, session.model, session.group, session.world)


def print_replicas(tokens: list[list[int]], tp_size: int) -> None:
    """tokens: (prefill, decode) by replica. The table above is about the first."""
    for replica, (prefill, decode) in enumerate(tokens):
        ranks = name_ranks(replica * tp_size, tp_size)
        print(f"replica {replica} ({ranks}): {prefill} tokens of prefill, {decode} of decode", file=sys.stderr)


def name_ranks(first: int, count: int) -> str:
    return f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"


def _answer_prompts(job: Job, arguments: argparse.Namespace, session: Session, engine: Engine) -> None:
    """All prompts at once; printed at the end, or, when it is one text, as it comes."""
    group, samples = session.group, job.settings.sampling.n
    prompts: list[list[int]] = json.loads(
        group.share("prompts", json.dumps(job.prompts))[0]
    )  # a template may read the clock
    streams = group.rank == 0 and not arguments.json and len(prompts) * samples == 1
    for index, prompt in enumerate(prompts):
        engine.add(Request(prompt, job.settings, index))
    results: list[Generation] = []
    while engine.has_work:
        for event in engine.step():
            if streams:
                print(event.text, end="\n" if event.generation is not None else "", flush=True)
            if event.generation is not None:
                results.append(event.generation)
    if group.rank != 0 or streams:
        return
    results.sort(key=lambda result: (result.index, result.sample))
    if arguments.json:
        settings = resolved_settings(job, arguments, session.model, engine.timings.prefill_tokens)
        times = _times(engine.timings, session.load_s)
        for result in results:
            entry = {"index": result.index, "sample": result.sample, **_answer(result)}
            print(json.dumps(entry | {"timings": times, "settings": settings}, ensure_ascii=False))
    else:
        for result in results:
            print(f"[{result.index}{f'.{result.sample}' if samples > 1 else ''}] {result.text}")


def _answer_file(job: Job, arguments: argparse.Namespace, session: Session, engine: Engine) -> int:
    """The prompts that have not all their answers yet; each answer is written when it is there. How many were refused."""
    from tp_residual.inference.replicas import SharedWork
    from tp_residual.inference.results import Generation

    world, group, samples = session.world, session.group, job.settings.sampling.n
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
        if group.rank == 0 and (result.index, result.sample) not in done:
            work.deliver((result.index, result.sample, _answer(result)))

    def refuse(index: int, message: str) -> None:
        for sample in range(samples):
            finished(Generation(index, len(job.prompts[index]), sample, finish_reason="refused", error=message))

    left = [i for i in range(len(job.prompts)) if any((i, sample) not in done for sample in range(samples))]
    prompts = _same_prompts(job.prompts, group)
    with (
        AnswerProgress(world.rank == 0, len(done), len(job.prompts) * samples) as progress,
        SharedWork(world, group, write) as work,
    ):
        work_through(
            engine, work, left, lambda index: Request(prompts[index], job.settings, index), finished, refuse, samples
        )
    close_answers(answers)
    return refused


def _same_prompts(prompts: list[list[int]], group: TensorParallelGroup) -> list[list[int]]:
    """Rank 0's, where ranks made other ids of the same file: a chat template may read the clock."""
    ours = run_name(prompts)
    if len(set(group.share("digest of the prompts", ours))) == 1:
        return prompts
    theirs: list[list[int]] = json.loads(group.share("prompts", json.dumps(prompts) if group.rank == 0 else "")[0])
    return theirs


def work_through(
    engine: Engine,
    work: SharedWork,
    left: Sequence[int],
    request: Callable[[int], Request | ScoreRequest],
    finished: Callable[[Generation], None],
    refuse: Callable[[int, str], None] | None = None,
    samples: int = 1,
) -> None:
    """The requests of the places `left` of a file, taken a few at a time as the engine has room, until all replicas are done.

    refuse(place, why): of one that can never be served; without it, that is an error.
    """
    more = True
    while more or engine.has_work:
        if more and engine.room:
            taken = work.take(len(left), max(1, engine.room // samples))
            more = len(taken) > 0
            for index in (left[place] for place in taken):
                try:
                    engine.add(request(index))
                except RequestError as error:
                    if refuse is None:
                        raise
                    refuse(index, str(error))
        for event in engine.step():
            if event.generation is not None:
                finished(event.generation)
        work.check()
    work.finish()


def parse_limits(arguments: argparse.Namespace, config: ModelConfig) -> EngineLimits:
    """What is not given follows from what is: as many sequences as a pass has tokens for, and a pass at least as large."""
    length, seqs, tokens = arguments.max_model_len, arguments.max_num_seqs, arguments.max_batched_tokens
    if length != "auto" and not (length.isdecimal() and int(length) > 0):
        raise RequestError(f"--max-model-len {length!r} is not a whole number of at least 1; use one, or auto")
    limits = EngineLimits(
        max_model_len=None if length == "auto" else int(length),
        kv_memory=None if arguments.kv_memory is None else parse_size("--kv-memory", arguments.kv_memory),
        max_num_seqs=min(DEFAULT_MAX_NUM_SEQS, max(tokens or DEFAULT_MAX_NUM_SEQS, 1)) if seqs is None else seqs,
        max_batched_tokens=max(DEFAULT_MAX_BATCHED_TOKENS, seqs or 0) if tokens is None else tokens,
    )
    check_limits(limits, config)
    return limits


def open_engine(
    session: Session, limits: EngineLimits, *, tokenizer: Tokenizer | None = None, check_finite: bool = False
) -> Engine:
    """With what the limits came to on stderr. The memory of a machine is divided by all its ranks, whichever replica they belong to."""
    from tp_residual.inference.engine import Engine

    world = session.world
    here = sum(process.host == world.processes[world.rank].host for process in world.processes)
    engine = Engine(
        session.model,
        session.group,
        limits,
        tokenizer=tokenizer,
        check_finite=check_finite,
        memory_sharers=max(1, here),
    )
    if world.rank == 0:
        print(engine.describe(), file=sys.stderr)
    return engine


def fail_for_refused(refused: int, total: int, what: str) -> None:
    """After everything else is done and written: rank 0 makes the command fail. Counts are those of this run."""
    if refused:
        raise RequestError(
            f"{refused} of {total} {what} are refusals: these prompts can never fit, and their lines say why"
        )


def open_answers(
    world: TensorParallelGroup, arguments: argparse.Namespace, run: str
) -> tuple[AnswerFile | None, set[tuple[int, int]]]:
    """Rank 0's file, and what it holds already, on every rank. Whatever is wrong with it is raised on every rank."""
    answers, said = None, ""
    if world.rank == 0:
        try:
            answers = AnswerFile(arguments.output, run, resume=arguments.resume)
            said = json.dumps({"done": sorted(answers.done)})
        except RequestError as error:
            said = json.dumps({"error": str(error)})
    told = json.loads(world.share("answers", said)[0])
    if "error" in told:
        raise RequestError(told["error"])
    return answers, {(index, sample) for index, sample in told["done"]}


def close_answers(answers: AnswerFile | None) -> None:
    """After the last of them."""
    if answers is not None and (unordered := answers.finish()):
        print(f"tp_residual: warning: {unordered}", file=sys.stderr)


class AnswerProgress:
    """Rank 0's bar of answers. Silent where stderr is no terminal."""

    def __init__(self, shown: bool, done: int, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not (shown and sys.stderr.isatty()))
        self._task = self._bar.add_task("answers", total=total, completed=done)

    def __enter__(self) -> AnswerProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self) -> None:
        self._bar.advance(self._task)


def _answer(result: Generation) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
    }
    if result.error is not None:
        answer["error"] = result.error
    if result.logprobs is not None:
        answer["logprobs"] = [logprob_entry(each) for each in result.logprobs]
    if result.prompt_logprobs is not None:
        answer["prompt_logprobs"] = [None, *(logprob_entry(each) for each in result.prompt_logprobs)]
    return answer


def logprob_entry(token: TokenLogProb) -> dict[str, Any]:
    """JSON has no infinity: a token that cannot be has the log-probability null."""
    top = [[token_id, _number(log_prob)] for token_id, log_prob in token.top]
    return {"token_id": token.token_id, "logprob": _number(token.log_prob), "top": top}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def resolved_settings(job: Job, arguments: argparse.Namespace, model: CausalLM, prefill_tokens: int) -> dict[str, Any]:
    """What was decided, from flags, files and defaults; the boundary of a prefill of that many tokens."""
    boundary = model.boundary_for(prefill_tokens)
    return {
        "model": str(arguments.model),
        "tp": model.group.size,
        "replicas": job.replicas,
        "device": str(model.group.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "stream_dtype": str(boundary.stream_dtype).removeprefix("torch."),
        "sequence_parallel": arguments.sequence_parallel,
        "boundary": boundary.executor.name,
        "residual": model.config.residual.name,
        "round_reduced": arguments.round_reduced,
        "max_new_tokens": job.settings.max_new_tokens,
        "min_new_tokens": job.settings.min_new_tokens,
        "ignore_eos": job.settings.ignore_eos,
        "stop_token_ids": list(job.settings.stop_token_ids),
        "stop": list(job.settings.stop),
        "chat": arguments.chat,
        "greedy": job.settings.sampling.greedy,
        **asdict(job.settings.sampling),
    }


def _times(timings: GenerationTimings, load_s: float) -> dict[str, float]:
    """The batch's."""
    return {
        "load_s": round(load_s, 4),
        "prefill_s": round(timings.prefill_s, 4),
        "prefill_tokens": timings.prefill_tokens,
        "decode_s": round(timings.decode_s, 4),
        "decode_tokens": timings.decode_tokens,
        "decode_tokens_per_s": round(timings.decode_tokens_per_s, 2),
    }
