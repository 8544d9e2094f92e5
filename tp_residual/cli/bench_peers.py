"""`bench peers`: check, make what the sides need, measure them in turn, write and print; and the rank of our own side."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tp_residual.bench.peers_request import (
    PeersRequest,
    parse_environments,
    parse_names,
    usable_cpus,
)
from tp_residual.bench.request import ELEMENT_BYTES, parse_list, require_memory
from tp_residual.bench.results import check_plot_target, check_target
from tp_residual.checkpoint.files import CheckpointFiles
from tp_residual.cli.cores import threads_per_rank
from tp_residual.cli.launch import LONGEST_TIMEOUT_S, open_group, parse_timeouts, under_launcher
from tp_residual.cli.session import become_ranks, parse_weights
from tp_residual.errors import GenerationError, RequestError, VerificationFailed
from tp_residual.machine import available_memory
from tp_residual.model.config import ModelConfig
from tp_residual.parallel.splits import check_heads


def main(arguments: argparse.Namespace, argv: list[str]) -> None:
    """Raises VerificationFailed, after everything is written, when a side generated a wrong count; GenerationError when no peer ran."""
    request, config, seed = _prepare(arguments)
    from tp_residual.bench.machine import commit, hardware, last_level_cache_bytes, versions
    from tp_residual.bench.peers_report import notes_of, print_peers, write_peers_plot
    from tp_residual.bench.peers_rounds import Prober
    from tp_residual.bench.peers_run import measure_peers, prompts_of
    from tp_residual.bench.peers_specs import START_PROMPT_TOKENS, our_spec, peer_spec, worker_programs
    from tp_residual.bench.peers_weights import weight_bytes_of_a_step, write_random_checkpoint
    from tp_residual.bench.results import Result

    programs = worker_programs()
    usable = sorted(os.sched_getaffinity(0))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)  # as Ctrl-C: nothing may be left behind
    os.sched_setaffinity(0, request.cpus)  # every side inherits it
    try:
        with tempfile.TemporaryDirectory(prefix="tp_residual-peers-") as folder:
            scratch = Path(folder)
            if seed is not None:
                print(f"writing weights from seed {seed}", file=sys.stderr, flush=True)
                write_random_checkpoint(request.model, seed, request.dtype, scratch / "model")
                request = replace(request, model=str(scratch / "model"))
            prompt = prompts_of(request, 1, START_PROMPT_TOKENS)[0]
            cache_bytes = _cache_bytes(request, config)
            ours = our_spec(request, prompt, scratch, cache_bytes)
            peers = {
                name: partial(peer_spec, name, request, prompt, scratch, cache_bytes, programs)
                for name in request.peers
            }
            weight_bytes = weight_bytes_of_a_step(request.model, request.dtype, config.tie_word_embeddings)
            array_bytes = max(64 << 20, 4 * last_level_cache_bytes())
            with Prober(request.tp, len(request.cpus) // request.tp, array_bytes) as prober:
                found = measure_peers(request, ours, peers, prober, weight_bytes, scratch)
    finally:
        os.sched_setaffinity(0, usable)
    settings = {
        "ranks": request.tp,
        "threads": len(request.cpus) // request.tp,
        "cores": len(request.cpus),
        "device": "cpu",
        "dtype": request.dtype,
        "rounds": request.rounds,
        "starts": request.starts,
        "slice_s": request.slice_s,
        "weight_bytes_of_a_step": weight_bytes,
        "sides": found.sides,
    }
    command = " ".join(["python -m tp_residual", *argv])
    notes = notes_of(found.rows)
    result = Result("peers", hardware(len(usable)), versions(), commit(), command, settings, found.rows, notes)
    if arguments.output is not None:
        result.write_json(arguments.output)
    if arguments.csv is not None:
        result.write_csv(arguments.csv)
    if arguments.plot is not None:
        write_peers_plot(result, arguments.plot)
    print_peers(result)
    sys.stdout.flush()
    if found.failures:
        raise VerificationFailed("; ".join(found.failures))
    if not found.measured:
        raise GenerationError(f"no peer of {', '.join(request.peers)} could be measured here; the reasons stand above")


def _prepare(arguments: argparse.Namespace) -> tuple[PeersRequest, ModelConfig, int | None]:
    """After everything that can be wrong and needs no torch."""
    if under_launcher():
        raise RequestError("bench peers starts every side itself; run it without torchrun")
    seed = parse_weights(arguments.weights)
    config = ModelConfig.from_dir(arguments.model)
    if seed is None:
        CheckpointFiles.open(arguments.model)
    tp = 1 if arguments.tp is None else arguments.tp
    if tp < 1:
        raise RequestError(f"--tp {tp} must be at least 1")
    check_heads(config.num_attention_heads, tp)
    request = PeersRequest(
        arguments.model,
        tp,
        usable_cpus(sorted(os.sched_getaffinity(0)), tp, arguments.threads),
        arguments.dtype or config.dtype or "float32",
        config.vocab_size,
        (config.num_attention_heads, config.num_key_value_heads),
        config.max_position_embeddings,
        parse_list("--batch", arguments.batch),
        parse_list("--prompt-tokens", arguments.prompt_tokens),
        parse_names(arguments.peers),
        parse_names(arguments.metrics),
        parse_environments(arguments.peer_env),
        arguments.rounds,
        arguments.starts,
        arguments.slice_s,
        arguments.load_limit,
        arguments.limit,
    )
    # both sides are loaded at once
    needed = 2 * _cache_bytes(request, config)
    what = f"--batch {max(request.batches)} --prompt-tokens {max(request.prompts)}"
    require_memory(f"{what} on two sides", needed, available_memory(), "this machine")
    for option, path in (("--output", arguments.output), ("--csv", arguments.csv)):
        if path is not None:
            check_target(option, path)
    if arguments.plot is not None:
        check_plot_target(arguments.plot)
    return request, config, seed


def _cache_bytes(request: PeersRequest, config: ModelConfig) -> int:
    """Keys and values of the largest batch at its longest, on one side."""
    a_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * ELEMENT_BYTES[request.dtype]
    return a_token * max(request.batches) * request.max_tokens


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def worker(arguments: argparse.Namespace, argv: list[str]) -> None:
    """One rank of our own side: what it computes comes over stdin."""
    threads = threads_per_rank(arguments.threads)
    become_ranks(argv, arguments.tp)
    import torch
    import torch.distributed as dist

    from tp_residual.bench.peers_ours import serve

    torch.set_num_threads(threads)
    # whoever speaks to it has limits; here, a stopped side must not find that it waited too long
    group = open_group("cpu", parse_timeouts([f"{LONGEST_TIMEOUT_S:g}"]))
    serve(group, threads)
    group.close()
    if dist.is_initialized():
        dist.destroy_process_group()
