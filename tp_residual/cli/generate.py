"""`generate`: check, become ranks, run, print. What is printed on stdout is the result and nothing else."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tp_residual.checkpoint.files import CheckpointFiles
from tp_residual.cli.launch import open_group, relaunch, resolve_tp, threads_per_rank, under_launcher
from tp_residual.errors import RequestError
from tp_residual.inference.request import GenerationSettings, check_prompts
from tp_residual.inference.tokenizer import Tokenizer
from tp_residual.model.config import ModelConfig
from tp_residual.parallel.splits import check_heads

if TYPE_CHECKING:
    from tp_residual.inference.generate import Generation, GenerationTimings
    from tp_residual.model.decoder import CausalLM
    from tp_residual.parallel.group import TensorParallelGroup


@dataclass(frozen=True)
class Job:
    """A request that has passed every check that needs no torch."""

    config: ModelConfig
    tokenizer: Tokenizer | None
    prompts: list[list[int]]
    settings: GenerationSettings
    tp_size: int


def main(arguments: argparse.Namespace, argv: list[str]) -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    job = prepare(arguments)
    if job.tp_size > 1 and not under_launcher():
        relaunch(argv, job.tp_size)
    run(job, arguments)


def prepare(arguments: argparse.Namespace) -> Job:
    """Everything that can be refused, refused: from files and arguments, which all ranks share."""
    tp_size = resolve_tp(arguments.tp)
    threads_per_rank(arguments.threads)
    if arguments.timeout <= 0:
        raise RequestError(f"--timeout {arguments.timeout:g} must be above 0 seconds")
    config = ModelConfig.from_dir(arguments.model)
    check_heads(config.num_attention_heads, tp_size)
    CheckpointFiles.open(arguments.model)
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
    import torch

    from tp_residual.cli.report import LoadProgress, print_table
    from tp_residual.inference.generate import GenerationTimings, generate
    from tp_residual.inference.loading import load_model

    began = time.perf_counter()
    torch.set_num_threads(threads_per_rank(arguments.threads))
    group = open_group(arguments.device, arguments.timeout)
    group.require_agreement("the command", vars(arguments) | {"config.json": job.config})
    prompts: list[list[int]] = json.loads(
        group.share("prompts", json.dumps(job.prompts))[0]
    )  # rank 0's: a chat template may read the clock
    if group.rank == 0:
        for warning in job.config.warnings:
            print(f"tp_residual: warning: {warning}", file=sys.stderr)
    with LoadProgress(group.rank == 0) as progress:
        model, loaded = load_model(
            arguments.model,
            group,
            dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
            stream_dtype=getattr(torch, arguments.stream_dtype) if arguments.stream_dtype else None,
            sequence_parallel=arguments.sequence_parallel,
            boundary=arguments.boundary,
            round_reduced=arguments.round_reduced,
            progress=progress,
        )
    model.requires_grad_(False)
    if group.rank == 0:
        for (old, new), count in loaded.casts.items():
            print(f"cast {count} tensors from {old} to {new}", file=sys.stderr)
        if arguments.sequence_parallel == "auto" and group.size > 1:
            print(f"sequence parallel: auto, from {model.auto_threshold_tokens()} tokens a pass on", file=sys.stderr)
    loaded_after = time.perf_counter() - began
    timings = GenerationTimings()
    printer = _StreamPrinter(job) if group.rank == 0 and not arguments.json and len(job.prompts) == 1 else None
    results = generate(model, prompts, group, job.settings, on_token=printer, timings=timings)
    shared = [json.loads(text) for text in group.share("bytes", json.dumps([loaded.bytes_read, loaded.bytes_held]))]
    if group.rank == 0:
        if printer is not None:
            printer.finish()
        elif arguments.json:
            _print_json(job, arguments, model, results, timings, loaded_after)
        else:
            for result in results:
                print(f"[{result.index}] {_text(job, result)}")
        sys.stdout.flush()
        print_table(arguments.model, model, group, timings, shared)
    _finish(group)


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
    loaded_after: float,
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
        "load_s": round(loaded_after, 4),
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


def _finish(group: TensorParallelGroup) -> None:
    import torch.distributed as dist

    group.share("done", "")  # nobody closes the side channel while another still reads it
    group.close()
    if dist.is_initialized():
        dist.destroy_process_group()
