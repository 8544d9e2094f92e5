"""How fast does the engine generate, and where does a step's time go? Prefill and decode of whole batches, through the product's engine.

All requests of a batch are added at once, to ranks that were released together, and generate exactly as many tokens as asked for. Prefill
lasts from there until the last request has its first token; a decode step is one in which every request gets one. What it is held against
is measured in the same rounds (`limits.py`).
"""

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from statistics import fmean
from typing import Any, Literal

import torch

from tp_residual.bench.batches import Batch, Run, run_batch
from tp_residual.bench.limits import Product, read_of
from tp_residual.bench.request import GenerateRequest
from tp_residual.bench.results import Row
from tp_residual.bench.shares import SHARES, Meter, shares, why_missing
from tp_residual.bench.timing import Candidate, Clock, Progress, Samples, percentile
from tp_residual.errors import RequestError, VerificationFailed
from tp_residual.inference.engine import Engine
from tp_residual.inference.paged_cache import CacheCapacity
from tp_residual.inference.request import EngineLimits
from tp_residual.inference.scheduler import BLOCK_SIZE
from tp_residual.model.config import ModelConfig
from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.packing import linears
from tp_residual.parallel.vocabulary import VocabParallelHead

DECODE_LIMIT = "reading this rank's linears and head once, every rank at once"
PREFILL_LIMIT = "a product of as many FLOP in the weights' dtype, every rank at once"

FEWEST_ROUNDS = 3
_WARM_STEPS = 3  # an engine runs a step of a new size, records the next, and replays from then on
_STEPS: tuple[Literal["prefill", "decode"], ...] = ("prefill", "decode")


def make_engine(model: CausalLM, request: GenerateRequest) -> Engine:
    """With a cache of exactly what the largest batch needs."""
    limits = EngineLimits(max_num_seqs=max(request.batches), max_batched_tokens=request.batched_tokens)
    return Engine(model, model.group, limits, capacity=CacheCapacity(request.blocks, BLOCK_SIZE, request.max_tokens))


def describe(config: ModelConfig) -> str:
    """What a model is, without the folder that it came from."""
    return f"{config.model_type}, {config.num_hidden_layers} layers, hidden {config.hidden_size}"


def random_prompts(batch: int, tokens: int, vocab_size: int) -> list[list[int]]:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(batch)
    drawn: list[list[int]] = torch.randint(0, vocab_size, (batch, tokens), generator=generator).tolist()
    return drawn


def measure_generate(
    clock: Clock, engine: Engine, request: GenerateRequest, progress: Progress
) -> tuple[list[Row], list[str]]:
    """`(rows, notes)`: two rows, prefill and decode, for each batch and prompt.

    Raises VerificationFailed on every rank when a request generates another number of tokens than it was asked for, or when blocks of the
    cache are not given back.
    """
    work = _Work.of(engine.model)
    limits = _Limits(Product(clock, engine.model.dtype), read_of(work.read_bytes, clock.device), work)
    cells = [(batch, prompt) for batch in request.batches for prompt in request.prompts]
    rows: list[Row] = []
    missing = dict[str, None]()
    for done, (batch, prompt) in enumerate(cells):
        progress(done, len(cells), f"batch {batch}, prompt {prompt}")
        rows += _cell(clock, engine, limits, Batch(random_prompts(batch, prompt, work.vocab_size), request.new_tokens))
    for row in rows:
        for name in SHARES:
            if row[f"{name}_share"] is None:
                missing[f"{name} share of {row['step']}: {why_missing(name, clock.device)}"] = None
    return rows, list(missing)


# -- limits


@dataclass(frozen=True)
class _Work:
    """What a pass needs of the fullest rank at least. read_bytes: this rank's own, since that is what it reads for the limit."""

    model: CausalLM
    read_bytes: int
    linear_elements: int
    head_elements: int

    @classmethod
    def of(cls, model: CausalLM) -> "_Work":
        layers, head, nbytes = 0, 0, 0
        for module in linears(model):
            elements = module.weight.numel()
            nbytes += elements * module.weight.element_size()
            if isinstance(module, VocabParallelHead):
                head += elements
            else:
                layers += elements
        return cls(model, nbytes, layers, head)

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    def prefill_flops(self, batch: Batch) -> int:
        """Of this rank: linears of every token, the head of each prompt's last, scores and sums of the keys that each token sees."""
        config, layout, tokens = self.model.config, self.model.layout, batch.prompt_tokens
        keys = sum(_seen_keys(tokens, window) for window in config.sliding_window)
        attention = 4 * layout.query_rows.size(self.model.group.rank) * keys
        return batch.size * (2 * tokens * self.linear_elements + 2 * self.head_elements + attention)


def _seen_keys(tokens: int, window: int | None) -> int:
    full = min(tokens, window or tokens)
    return full * (full + 1) // 2 + (tokens - full) * full


@dataclass(frozen=True)
class _Limits:
    product: Product
    read: Candidate
    work: _Work


# -- rows


@dataclass
class _Rounds:
    """What this rank has taken, by round: batches, and the limits' (late ns, us)."""

    runs: list[Run]
    read: list[tuple[int, float]]
    product: list[tuple[int, float]]


def _cell(clock: Clock, engine: Engine, limits: _Limits, batch: Batch) -> list[Row]:
    meter = Meter(clock.group)

    def run() -> Run:
        taken: list[Run] = []
        clock.sample(Candidate(lambda: taken.append(run_batch(engine, batch, meter)), host=True))
        _require(clock, taken[0].wrong)
        return taken[0]

    with meter.watching():  # which engines see: nothing is replayed then, and every boundary is told
        watched = run()
    if not watched.full_steps:
        raise RequestError(
            f"{batch}: with --max-batched-tokens {engine.limits.max_batched_tokens} the first request has ended before the last one has "
            "its first token, so that no step decodes all of them; raise it, or --new-tokens"
        )
    warm_steps = 0
    for number in count():
        warm = run()
        warm_steps += len(warm.full_steps)
        if number + 1 >= clock.rules.warmup and warm_steps >= _WARM_STEPS:
            break
    seconds = max(clock.gather(warm.ends_s[-1]))
    most = min(clock.rules.iters, max(FEWEST_ROUNDS, int(clock.rules.seconds / seconds)))
    rounds = _Rounds([], [], [])
    for candidate in (limits.read, limits.product.candidate):
        candidate.run()
    gc.collect()
    for number in range(most):
        # forwards and backwards: what a batch leaves in the caches meets each limit as often
        if number % 2:
            rounds.runs.append(run())
        rounds.read.append(clock.sample(limits.read))
        rounds.product.append(clock.sample(limits.product.candidate))
        if not number % 2:
            rounds.runs.append(run())
    return _rows(clock, engine, limits, batch, rounds, watched)


def _require(clock: Clock, wrong: str) -> None:
    """Raises VerificationFailed on every rank when one has something to say."""
    for rank, text in enumerate(clock.gather(wrong)):
        if text:
            raise VerificationFailed(f"rank {rank}: {text}")


def _rows(clock: Clock, engine: Engine, limits: _Limits, batch: Batch, rounds: _Rounds, watched: Run) -> list[Row]:
    on_host = clock.device.type == "cpu"
    told = {step: shares((run.spent_s[step] for run in rounds.runs), watched.spent_s[step]) for step in _STEPS}
    flops = limits.work.prefill_flops(batch)
    everybody = clock.gather(
        {
            "steps": [run.steps_s for run in rounds.runs],
            "ends": [run.ends_s for run in rounds.runs],
            "read": rounds.read,
            "product": rounds.product,
            "shares": told,
            "flops": flops,
            "bytes": limits.work.read_bytes,
        }
    )
    times = _Times.of(everybody, rounds.runs)
    read, product = (_limit_samples([rank[name] for rank in everybody]) for name in ("read", "product"))
    flops = max(rank["flops"] for rank in everybody)
    nbytes = max(rank["bytes"] for rank in everybody)
    per_step = [len(run.full_steps) for run in rounds.runs]
    common = _common(engine, batch, clock)
    rows: list[Row] = []
    for step in _STEPS:
        if step == "prefill":
            samples, name, limit = times.prefill, PREFILL_LIMIT, limits.product.limit_of(product, flops)
            waits, tokens = ("ttft", times.first_tokens_us), batch.size * batch.prompt_tokens
            rates: Row = {"flops": flops, "TFLOP_s": flops / samples.percentile(50) / 1e6}
        else:
            samples, name, limit = times.decode, DECODE_LIMIT, _repeated(read, per_step)
            waits, tokens = ("itl", times.between_us), batch.size
            rates = {"weight_bytes": nbytes, "weight_GB_s": nbytes / samples.percentile(50) / 1e3}
        everybodys = [rank["shares"][step] for rank in everybody]
        rows.append(
            {
                "step": step,
                **common,
                "rounds": len(rounds.runs),
                "tokens_per_s": 1e6 * tokens / samples.percentile(50),
                **{f"{waits[0]}_p{q}_us": percentile(waits[1], q) for q in (50, 95, 99)},
                **rates,
                **{f"{part}_share": _mean(each[part] for each in everybodys) if on_host else None for part in SHARES},
                **clock.fields(samples, name, limit),
                "timing": "host",
            }
        )
    return rows


def _common(engine: Engine, batch: Batch, clock: Clock) -> Row:
    model = engine.model
    packed = next((module.packed for module in linears(model) if module.packed is not None), None)
    return {
        "model": describe(model.config),
        "batch": batch.size,
        "prompt_tokens": batch.prompt_tokens,
        "new_tokens": batch.new_tokens,
        "max_batched_tokens": engine.limits.max_batched_tokens,
        "dtype": str(model.dtype).removeprefix("torch."),
        "sequence_parallel": model.sequence_parallel,
        "ranks": clock.group.size,
        "threads": torch.get_num_threads(),
        "form": "plain" if packed is None else packed.form,
        "boundary": " and ".join(dict.fromkeys(each.executor.name for each in model.boundaries.values())),
    }


@dataclass(frozen=True)
class _Times:
    """Maxima over ranks."""

    prefill: Samples
    decode: Samples
    first_tokens_us: list[float]
    between_us: list[float]

    @classmethod
    def of(cls, everybody: Sequence[Mapping[str, Any]], runs: Sequence[Run]) -> "_Times":
        """runs: whose tokens came with which step, which all ranks decide alike."""
        first, between = list[float](), list[float]()
        for number, run in enumerate(runs):
            ends = [max(each) for each in zip(*(rank["ends"][number] for rank in everybody), strict=True)]
            for steps in run.token_steps:
                first.append(1e6 * ends[steps[0]])
                between += [1e6 * (ends[b] - ends[a]) for a, b in pairwise(steps)]
        prefill = [[1e6 * rank["ends"][at][run.last_first] for at, run in enumerate(runs)] for rank in everybody]
        decode = [
            [1e6 * rank["steps"][at][step] for at, run in enumerate(runs) for step in run.full_steps]
            for rank in everybody
        ]
        return cls(_slowest(prefill), _slowest(decode), first, between)


def _slowest(by_rank: Sequence[Sequence[float]]) -> Samples:
    return Samples.of(by_rank, [[0] * len(times) for times in by_rank], 1)


def _limit_samples(by_rank: Sequence[Sequence[tuple[int, float]]]) -> Samples:
    return Samples.of([[us for _, us in rank] for rank in by_rank], [[late for late, _ in rank] for rank in by_rank], 1)


def _repeated(samples: Samples, counts: Sequence[int]) -> Samples:
    """Each round's sample beside each of its steps."""
    us = tuple(us for us, count in zip(samples.us, counts, strict=True) for _ in range(count))
    return Samples(us, samples.rank_p50_us, samples.calls, samples.late)


def _mean(values: Iterable[float | None]) -> float | None:
    """None when a rank has none."""
    each = list(values)
    known = [value for value in each if value is not None]
    return fmean(known) if len(known) == len(each) else None
