"""`generate`: check, become ranks, run, print. What is printed on stdout is the result and nothing else."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tp_residual.cli.session import become_ranks, check_session, open_session
from tp_residual.errors import RequestError
from tp_residual.inference.request import GenerationSettings, check_prompts
from tp_residual.inference.tokenizer import Tokenizer
from tp_residual.model.config import ModelConfig

if TYPE_CHECKING:
    from tp_residual.inference.generate import Generation, GenerationTimings
    from tp_residual.model.decoder import CausalLM


@dataclass(frozen=True)
class Job:
    """A request that has passed every check that needs no torch."""

    config: ModelConfig
    tokenizer: Tokenizer | None
    prompts: list[list[int]]
    settings: GenerationSettings
    tp_size: int


def main(arguments: argparse.Namespace, argv: list[str]) -> None:
    job = prepare(arguments)
    become_ranks(argv, job.tp_size)
    run(job, arguments)


def prepare(arguments: argparse.Namespace) -> Job:
    """Everything that can be refused, refused: from files and arguments, which all ranks share."""
    config, tp_size = check_session(arguments)
    settings = GenerationSettings(
        max_new_tokens=arguments.max_new_tokens,
        min_new_tokens=arguments.min_new_tokens,
        ignore_eos=arguments.ignore_eos,
        stop_token_ids=config.eos_token_ids,
    )
    needs_tokenizer = bool(arguments.prompt) or not arguments.json
    tokenizer = Tokenizer.from_dir(arguments.model) if needs_tokenizer else None
    prompts = [_encode(tokenizer, text, arguments.chat) for text in arguments.prompt if tokenizer is not None]
    prompts += [_parse_ids(text) for text in arguments.prompt_ids]
    check_prompts(prompts, config, settings)
    return Job(config, tokenizer, prompts, settings, tp_size)


def _encode(tokenizer: Tokenizer, text: str, chat: bool) -> list[int]:
    if not text:
        raise RequestError("a --prompt is empty; give it some text")
    return tokenizer.apply_chat_template([{"role": "user", "content": text}]) if chat else tokenizer.encode(text)


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise RequestError(f"--prompt-ids {text!r} is not a list of integers; write it as 1,2,3") from None


def run(job: Job, arguments: argparse.Namespace) -> None:
    """One rank's part."""
    from tp_residual.cli.report import print_table
    from tp_residual.inference.generate import GenerationTimings, generate

    session = open_session(arguments, job.config)
    group, model, loaded = session.group, session.model, session.loaded
    prompts: list[list[int]] = json.loads(
        group.share("prompts", json.dumps(job.prompts))[0]
    )  # a template may read the clock
    timings = GenerationTimings()
    printer = _StreamPrinter(job) if group.rank == 0 and not arguments.json and len(prompts) == 1 else None
    results = generate(model, prompts, group, job.settings, on_token=printer, timings=timings)
    shared = [json.loads(text) for text in group.share("bytes", json.dumps([loaded.bytes_read, loaded.bytes_held]))]
    if group.rank == 0:
        if printer is not None:
            printer.finish()
        elif arguments.json:
            _print_json(job, arguments, model, results, timings, session.load_s)
        else:
            for result in results:
                print(f"[{result.index}] {_text(job, result)}")
        sys.stdout.flush()
        print_table(arguments.model, model, group, timings, shared)
    session.close()


class _StreamPrinter:
    """Prints text as its tokens come, holding back characters that are not yet whole."""

    def __init__(self, job: Job) -> None:
        assert job.tokenizer is not None
        self._stream = job.tokenizer.stream()

    def __call__(self, index: int, token_id: int) -> None:
        print(self._stream.step(token_id), end="", flush=True)

    def finish(self) -> None:
        print(self._stream.finish(), flush=True)


def _text(job: Job, result: Generation) -> str:
    return "" if job.tokenizer is None else job.tokenizer.decode(result.token_ids)


def _print_json(
    job: Job,
    arguments: argparse.Namespace,
    model: CausalLM,
    results: list[Generation],
    timings: GenerationTimings,
    load_s: float,
) -> None:
    """One object a prompt; the timings are the batch's, the settings as resolved."""
    boundary = model.boundary_for(timings.prefill_tokens)
    settings = {
        "model": str(arguments.model),
        "tp": model.group.size,
        "device": str(model.group.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "stream_dtype": str(boundary.stream_dtype).removeprefix("torch."),
        "sequence_parallel": arguments.sequence_parallel,
        "boundary": boundary.executor.name,
        "round_reduced": arguments.round_reduced,
        "max_new_tokens": job.settings.max_new_tokens,
        "min_new_tokens": job.settings.min_new_tokens,
        "ignore_eos": job.settings.ignore_eos,
        "stop_token_ids": list(job.settings.stop_token_ids),
        "chat": arguments.chat,
    }
    times = {
        "load_s": round(load_s, 4),
        "prefill_s": round(timings.prefill_s, 4),
        "prefill_tokens": timings.prefill_tokens,
        "decode_s": round(timings.decode_s, 4),
        "decode_tokens": timings.decode_tokens,
        "decode_tokens_per_s": round(timings.decode_tokens_per_s, 2),
    }
    for result in results:
        entry = {
            "index": result.index,
            "text": _text(job, result) if job.tokenizer is not None else None,
            "token_ids": result.token_ids,
            "finish_reason": result.finish_reason,
            "prompt_tokens": result.prompt_tokens,
            "timings": times,
            "settings": settings,
        }
        print(json.dumps(entry, ensure_ascii=False))
