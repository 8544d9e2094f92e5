"""Decode steps of fixed shapes: the same tokens as steps of any shape, whoever fills them up. Captured only on CUDA (see `gpu_check`); here
the same shapes, buffers and padding are computed eagerly.

Functions named check_* run on every rank.
"""

import pytest
import torch
from test_engine import CROWD, GREEDY, drain, tiny

from tp_residual.inference.decode_graphs import DecodeGraphs
from tp_residual.inference.engine import Engine
from tp_residual.inference.paged_cache import CacheCapacity, PagedKVCache
from tp_residual.inference.request import EngineLimits, Request
from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.testing import run_ranks


def engine_with_graphs(model: CausalLM, seqs: int) -> tuple[Engine, DecodeGraphs]:
    limits = EngineLimits(max_num_seqs=seqs, max_batched_tokens=64)
    engine = Engine(model, model.group, limits, capacity=CacheCapacity(100, 4, 64))
    assert isinstance(engine.cache, PagedKVCache) and engine.replay is None, "nothing is captured on a CPU"
    # nobody may read what nobody wrote
    engine.cache.kv.fill_(float("nan"))
    engine.replay = DecodeGraphs(model, engine.cache, seqs)
    return engine, engine.replay


def check_same_tokens(group: TensorParallelGroup, name: str) -> None:
    model = tiny(group, name)
    limits = EngineLimits(max_num_seqs=12, max_batched_tokens=64)
    plain = Engine(model, group, limits, capacity=CacheCapacity(100, 4, 64))
    numbers = [plain.add(Request(prompt, GREEDY, index)) for index, prompt in enumerate(CROWD)]
    results = drain(plain)
    expected = [results[number, 0].token_ids for number in numbers]
    for seqs in (1, 3, 12):
        engine, graphs = engine_with_graphs(model, seqs)
        numbers = [engine.add(Request(prompt, GREEDY, index)) for index, prompt in enumerate(CROWD)]
        results = drain(engine)
        assert [results[number, 0].token_ids for number in numbers] == expected, seqs
        sizes = {rows for rows, _ in graphs.sizes}
        assert sizes and sizes <= {1, 2, 4, 8, seqs}, sizes
        assert all(width & (width - 1) == 0 for _, width in graphs.sizes)


@pytest.mark.parametrize(
    "name", ["llama", pytest.param("mistral", marks=pytest.mark.slow)]
)  # uneven heads at two ranks; a window
def test_steps_of_fixed_shapes_choose_the_same_tokens(name: str) -> None:
    run_ranks(2, check_same_tokens, name)


def test_rows_that_only_fill_up_write_nowhere_and_are_not_returned() -> None:
    group = TensorParallelGroup.single()
    engine, graphs = engine_with_graphs(tiny(group), 4)
    cache = engine.cache
    assert isinstance(cache, PagedKVCache)
    for index in range(3):  # a step of three in a shape of four
        engine.add(Request(CROWD[index], GREEDY, index))
    engine.step()
    held = cache.kv[:, :, : cache.num_blocks].clone()
    with torch.inference_mode():
        parts = engine.scheduler.schedule()
        logits = graphs.run(parts, engine.scheduler.tables)
    assert logits.shape[0] == 3 and logits.isfinite().all()
    now = cache.kv[:, :, : cache.num_blocks]
    changed = (now != held) & ~(now.isnan() & held.isnan())
    blocks = changed.any(dim=(0, 1, 3, 4, 5)).nonzero()[:, 0].tolist()
    written = [engine.scheduler.tables[part.sequence.row][part.context // 4] for part in parts]
    assert sorted(blocks) == sorted(written)
    assert cache.kv[:, :, cache.scratch_block].isfinite().any(), "the filling row wrote somewhere else"
