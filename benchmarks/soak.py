"""Does an engine stay as it is? Mixed requests with random cancels for some minutes; memory, threads and descriptors must be flat.

    python -m benchmarks.soak --model DIR --tp 2 --minutes 20 --output soak.json --plot soak.png

Prompts of 1 to 200 tokens, 1 to 64 new ones, greedy and sampled, several samples, stop ids, prompts that can never fit; one in five is
cancelled by a rank of its own choosing, alone. Whenever nothing runs, every block must be free.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tp_residual.bench.machine import commit, hardware, versions
from tp_residual.bench.results import replace_file
from tp_residual.errors import RequestError
from tp_residual.inference.engine import Engine
from tp_residual.inference.loading import load_model
from tp_residual.inference.request import EngineLimits, GenerationSettings, Request, SamplingSettings
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.packing import pack_weights
from tp_residual.testing import run_ranks

SAMPLE_S = 5.0
AGREE_EVERY = 64  # steps between two looks at the clock that all ranks share
# Of the run: until then allocators and libraries take what they keep.
WARM_UP = 0.2
# A leak of a kilobyte a request shows as more than this in twenty minutes; allocators move by a few hundred kilobytes.
MOST_GROWTH_BYTES = 16 << 20


def soak(
    group: TensorParallelGroup, model_dir: str, minutes: float, seed: int = 0, random_weights: bool = False
) -> dict[str, Any]:
    """One rank's part. Returns its samples and what was done."""
    torch.set_num_threads(1)
    model, _ = load_model(model_dir, group, dtype=torch.bfloat16, random_seed=seed if random_weights else None)
    model.requires_grad_(False).eval()
    pack_weights(model, group.device, model.dtype)
    engine = Engine(
        model, group, EngineLimits(max_model_len=512, kv_memory=64 << 20, max_num_seqs=12, max_batched_tokens=256)
    )
    shared, own = random.Random(seed), random.Random(1_000 + seed + group.rank)
    began, samples, counts = (
        time.monotonic(),
        [],
        dict.fromkeys(("added", "refused", "ended", "cancelled", "tokens"), 0),
    )
    running: dict[int, int] = {}  # how many samples of it have not ended
    steps, going = 0, True
    while going or engine.has_work:
        while going and len(running) < 16 and shared.random() < 0.7:
            try:
                request = _request(shared, counts["added"], model.config.vocab_size)
                running[engine.add(request)] = request.settings.sampling.n
                counts["added"] += 1
            except RequestError:
                counts["refused"] += 1
        if running and own.random() < 0.01:
            engine.cancel(own.choice(list(running)))
        for event in engine.step():
            counts["tokens"] += event.token_id is not None
            if event.generation is not None:
                counts["cancelled" if event.generation.finish_reason == "cancelled" else "ended"] += 1
                running[event.request] -= 1
                if not running[event.request]:
                    del running[event.request]
        if not engine.has_work:
            assert engine.pool.free_blocks == engine.pool.num_blocks, "blocks are lost"
        steps += 1
        if steps % AGREE_EVERY == 0:
            going = _all(group, time.monotonic() - began < minutes * 60)
        if not samples or time.monotonic() - began > samples[-1]["s"] + SAMPLE_S:
            samples.append({"s": round(time.monotonic() - began, 1), **usage(), **counts, "steps": steps})
    assert engine.pool.free_blocks == engine.pool.num_blocks, "blocks are lost"
    return {"rank": group.rank, "steps": steps, **counts, "samples": samples}


def usage() -> dict[str, int]:
    """Of this process: anonymous bytes, threads, descriptors."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {
        "anonymous_bytes": int(status["RssAnon"].split()[0]) * 1024,
        "threads": int(status["Threads"]),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def growth(samples: Sequence[dict[str, Any]]) -> dict[str, int]:
    """From the first half to the second of what comes after the warm-up, by medians of memory and by the most of the others."""
    kept = samples[int(len(samples) * WARM_UP) :]
    first, second = kept[: len(kept) // 2], kept[len(kept) // 2 :]
    found = {}
    for name in ("anonymous_bytes", "threads", "descriptors"):
        early, late = (sorted(each[name] for each in half) for half in (first, second))
        at = (lambda values: values[len(values) // 2]) if name == "anonymous_bytes" else max
        found[name] = at(late) - at(early)
    return found


def is_flat(samples: Sequence[dict[str, Any]]) -> bool:
    grown = growth(samples)
    return grown["anonymous_bytes"] <= MOST_GROWTH_BYTES and grown["threads"] <= 0 and grown["descriptors"] <= 0


def _request(shared: random.Random, number: int, vocab_size: int) -> Request:
    length = shared.choice((1, 2, 15, 16, 17, 40, 120, 200)) if shared.random() < 0.98 else 600
    sampling = SamplingSettings()
    if shared.random() < 0.5:
        sampling = SamplingSettings(
            temperature=0.9,
            top_k=shared.choice((0, 20)),
            top_p=shared.choice((1.0, 0.9)),
            seed=number,
            n=shared.choice((1, 1, 3)),
        )
    settings = GenerationSettings(
        max_new_tokens=shared.randint(1, 64),
        stop_token_ids=(shared.randrange(vocab_size),) if shared.random() < 0.3 else (),
        sampling=sampling,
        logprobs=shared.choice((None, None, None, 2)),
    )
    return Request([shared.randrange(vocab_size) for _ in range(length)], settings, number)


def _all(group: TensorParallelGroup, going: bool) -> bool:
    if group.size == 1:
        return going
    told = torch.tensor([int(going)], device=group.device)
    return bool(group.run("all_gather", "soak", told, lambda transport, t: transport.all_gather(t)).min())


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--random-weights", action="store_true", help="only config.json is read")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--output")
    parser.add_argument("--plot")
    arguments = parser.parse_args()
    limit_s = arguments.minutes * 60 + 600
    ranks = run_ranks(
        arguments.tp, soak, arguments.model, arguments.minutes, 0, arguments.random_weights,
        timeout_s=limit_s, collective_timeout_s=120.0, checked=False, transport="shared",
    )  # fmt: skip
    for each in ranks:
        each["growth"] = growth(each["samples"])
        print(
            f"rank {each['rank']}: {each['steps']} steps, {each['tokens']} tokens, {each['ended']} continuations ended, "
            f"{each['cancelled']} cancelled, {each['refused']} requests refused; grown: {each['growth']}"
        )
    if arguments.output:
        found = {
            "what": "soak",
            "hardware": hardware(len(os.sched_getaffinity(0))),
            "versions": versions(),
            "commit": commit(),
            "ranks": ranks,
        }
        found["command"] = f"python -m benchmarks.soak --model DIR --tp {arguments.tp} --minutes {arguments.minutes:g}"
        replace_file(arguments.output, json.dumps(found, indent=1) + "\n")
    if arguments.plot:
        _plot(ranks, arguments.plot)
    sys.exit(0 if all(is_flat(each["samples"]) for each in ranks) else 1)


def _plot(ranks: Sequence[dict[str, Any]], path: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (name, label, scale) in zip(
        figure.subplots(3, 1, sharex=True),
        (("anonymous_bytes", "anonymous MB", 1e-6), ("threads", "threads", 1), ("descriptors", "descriptors", 1)),
        strict=True,
    ):
        for each in ranks:
            axis.plot(
                [s["s"] / 60 for s in each["samples"]],
                [s[name] * scale for s in each["samples"]],
                label=f"rank {each['rank']}",
            )
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
    axis.set_xlabel("minutes")
    figure.axes[0].legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
