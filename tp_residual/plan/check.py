"""Predictions against measured passes of the same model on this machine: what `--check` prints, good or bad."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from tp_residual.bench.timing import Candidate, Clock
from tp_residual.errors import RequestError
from tp_residual.inference.compiled_cache import CompiledKVCache
from tp_residual.inference.loading import load_model
from tp_residual.inference.paged_cache import BlockCache, make_cache
from tp_residual.inference.recorded_decode import RecordedDecode
from tp_residual.inference.scheduler import BLOCK_SIZE, Scheduled, blocks_for
from tp_residual.inference.scheduler import Sequence as ScheduledSequence
from tp_residual.model.attention_backend import TokenBatch
from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.packing import pack_weights
from tp_residual.parallel.vocabulary import vocab_parallel_argmax
from tp_residual.plan.boundary import Placement
from tp_residual.plan.estimate import PlanRequest, impossible, plan
from tp_residual.plan.hardware import Hardware
from tp_residual.plan.result import CheckedPass


def check_plan(
    clock: Clock,
    model_dir: str,
    hardware: Hardware,
    request: PlanRequest,
    *,
    random_seed: int | None,
    say: Callable[[str], None],
) -> list[CheckedPass]:
    """Every rank calls it alike; all get the same rows. request: of one tp size, that of the clock's group, on one node."""
    group = clock.group
    (tp_size,) = request.tp_sizes
    assert tp_size == group.size and request.nodes == 1
    if why := impossible(hardware, Placement(tp_size, 1)):
        raise RequestError(f"--check: nothing to compare, tp={tp_size}: {why}")
    found: list[CheckedPass] = []
    for mode in ("tp", "sp") if tp_size > 1 else ("tp",):
        say(f"model, {mode}")
        model, _ = load_model(
            model_dir,
            group,
            dtype=getattr(torch, request.dtype),
            sequence_parallel="on" if mode == "sp" else "off",
            random_seed=random_seed,
        )
        model.requires_grad_(False).eval()
        pack_weights(model, group.device, model.dtype)
        rows = [row for row in plan(model.config, hardware, request).rows if row.mode == mode]
        candidates = _candidates(model, [(row.sequences, row.tokens // row.sequences, row.context) for row in rows])
        say(f"{len(rows)} passes, {mode}")
        with torch.inference_mode():
            samples = clock.interleaved(candidates)
        for row, measured in zip(rows, samples.values(), strict=True):
            assert row.cost is not None
            p5, p50, p95 = (measured.percentile(q) for q in (5, 50, 95))
            kept = sum(us is not None for us in measured.us)
            found.append(
                CheckedPass(
                    tp_size,
                    mode,
                    row.step,
                    row.tokens,
                    row.sequences,
                    row.context,
                    row.cost.total_us,
                    p50,
                    p5,
                    p95,
                    kept,
                )
            )
        del model, candidates
    return found


def _candidates(model: CausalLM, passes: Sequence[tuple[int, int, int]]) -> dict[str, Candidate]:
    """(sequences, new tokens, context) each: one pass as the engine runs it, and the choice of the likeliest tokens.

    Cached keys are random, not computed.
    """
    group, config = model.group, model.config
    generator = torch.Generator().manual_seed(0)
    candidates = {}
    for number, (sequences, queries, context) in enumerate(passes):
        blocks = blocks_for(context + queries, BLOCK_SIZE)
        tables = [list(range(row * blocks, (row + 1) * blocks)) for row in range(sequences)]
        cache = make_cache(model.layout, group, sequences * blocks, BLOCK_SIZE, model.dtype)
        if context:
            shape = context, model.layout.heads.key_value.size(group.rank), config.head_dim
            earlier = TokenBatch.of([(row, 0, [0] * context) for row in range(sequences)], group.device)
            keys = torch.randn(sequences * shape[0], *shape[1:], generator=generator).to(group.device, model.dtype)
            cache.begin(tables, earlier)
            for layer in range(config.num_hidden_layers):
                cache.append(layer, keys, keys, earlier)
        ids = torch.randint(0, config.vocab_size, (sequences, queries), generator=generator).tolist()
        parts = [
            Scheduled(
                ScheduledSequence(row, 0, [0] * context + part, 1, computed=context + queries, row=row), context, part
            )
            for row, part in enumerate(ids)
        ]
        replay = RecordedDecode(model, cache) if isinstance(cache, CompiledKVCache) else None
        candidates[str(number)] = Candidate(partial(_one_pass, model, cache, replay, parts, tables))
    return candidates


def _one_pass(
    model: CausalLM,
    cache: BlockCache,
    replay: RecordedDecode | None,
    parts: list[Scheduled],
    tables: list[list[int]],
) -> None:
    if replay is not None and replay.serves(parts):
        logits = replay.run(parts, tables)
    else:
        batch = TokenBatch.of([(part.sequence.row, part.context, part.ids) for part in parts], model.group.device)
        cache.begin(tables, batch)
        last = torch.tensor([span.stop - 1 for span in batch.spans], device=model.group.device)
        logits = model(batch, cache, logit_rows=last).local_logits
    vocab_parallel_argmax(logits, model.lm_head.split, model.group, 0)
