"""The paged cache: the same attention as over contiguous keys, bit for bit; copies; and how many blocks ranks agree on.

Functions named check_* run on every rank.
"""

from typing import Any

import pytest
import torch
from tiny_models import config

from tp_residual.errors import RequestError
from tp_residual.inference import paged_cache
from tp_residual.inference.paged_cache import (
    CacheCapacity,
    PagedKVCache,
    agree_on_capacity,
    free_memory,
    kv_block_bytes,
)
from tp_residual.inference.request import EngineLimits
from tp_residual.inference.scheduler import BlockCopy
from tp_residual.model.attention_backend import HeadGroups, TokenBatch
from tp_residual.model.layout import ModelLayout
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.testing import RanksFailed, RowCache, run_ranks

ONE = TensorParallelGroup.single()
LAYOUT = ModelLayout.of(config("llama"), 1)


def values(tokens: int, heads: int, seed: int) -> torch.Tensor:
    return torch.randn(tokens, heads, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("window", [None, 3, 7])
@pytest.mark.parametrize("block_size", [4, 16])
def test_attention_is_that_of_contiguous_keys(block_size: int, window: int | None) -> None:
    """Three sequences in pieces, in scattered blocks, one of whose tables is replaced on the way."""
    groups = HeadGroups(LAYOUT.heads, 0, torch.device("cpu"))
    plain = RowCache(LAYOUT, ONE, rows=3, max_tokens=32, dtype=torch.float32)
    paged = PagedKVCache(LAYOUT, ONE, 40, block_size)
    tables = [[7, 2, 31, 12, 9, 20, 21, 22], [0, 39, 5, 6, 10, 11, 13, 14], [1, 3, 4, 8, 15, 16, 17, 18]]
    passes = [[(0, 0, 5), (1, 0, 1)], [(0, 5, 4), (1, 1, 1), (2, 0, 9)], [(2, 9, 1), (0, 9, 1), (1, 2, 6)], [(1, 8, 1)]]
    for number, parts in enumerate(passes):
        batch = TokenBatch.of([(row, context, [1] * count) for row, context, count in parts])
        tokens = batch.token_ids.shape[0]
        if number == 2:
            tables[2] = list(tables[2])
        paged.begin(tables, batch)
        for layer in range(2):
            q, k, v = values(tokens, 9, number), values(tokens, 3, 10 + number + layer), values(tokens, 3, 20 + number)
            for cache in (plain, paged):
                cache.append(layer, k, v, batch)
            ours, theirs = (cache.attend(layer, q, batch, groups, window) for cache in (paged, plain))
            assert torch.equal(ours, theirs), (number, layer)
    tables[0] = tables[1]  # a row is taken by another sequence
    again = TokenBatch.of([(0, 9, [1])])
    paged.begin(tables, again)
    q, k, v = values(1, 9, 50), values(1, 3, 51), values(1, 3, 52)
    paged.append(0, k, v, again)
    moved = TokenBatch.of([(1, 9, [1])])
    plain.append(0, k, v, moved)
    assert torch.equal(paged.attend(0, q, again, groups, window), plain.attend(0, q, moved, groups, window))


def test_a_block_is_copied_in_all_layers() -> None:
    cache = PagedKVCache(LAYOUT, ONE, 6, 4)
    cache.kv.normal_()
    before = cache.kv.clone()
    cache.copy_blocks([])
    cache.copy_blocks([BlockCopy(2, 4), BlockCopy(2, 5)])
    assert torch.equal(cache.kv[:, :, [4, 5]], before[:, :, [2, 2]]) and torch.equal(
        cache.kv[:, :, :4], before[:, :, :4]
    )


def test_a_block_takes_what_it_says() -> None:
    for name, tp_size in (("llama", 2), ("qwen2", 3)):
        layout = ModelLayout.of(config(name), tp_size)
        for rank in range(tp_size):
            group = TensorParallelGroup.single()
            group.rank = rank
            cache = PagedKVCache(layout, group, 5, 16, torch.bfloat16)
            assert cache.nbytes == 5 * kv_block_bytes(layout, rank, 16, torch.bfloat16)


# ---- how many ----


def capacity(**limits: Any) -> CacheCapacity:
    return agree_on_capacity(LAYOUT, ONE, EngineLimits(**limits), torch.float32)


BLOCK = kv_block_bytes(LAYOUT, 0, 16, torch.float32)


def test_capacity_follows_from_memory_and_from_what_can_be_used() -> None:
    assert BLOCK == 2 * 2 * 3 * 16 * 8 * 4
    assert capacity(kv_memory=10 * BLOCK + 5, max_num_seqs=8) == CacheCapacity(10, 16, 64)
    assert capacity(kv_memory=1000 * BLOCK, max_num_seqs=3) == CacheCapacity(12, 16, 64), "no more than can be used"
    assert capacity(kv_memory=10**9, max_num_seqs=3, max_model_len=17).num_blocks == 6
    assert capacity(kv_memory=3 * BLOCK) == CacheCapacity(3, 16, 48), "auto shrinks"
    assert (capacity(kv_memory=9 * BLOCK).full_length_requests, capacity(kv_memory=9 * BLOCK).tokens) == (2, 144)
    assert capacity(kv_memory=3 * BLOCK, max_model_len=48).max_model_len == 48


def test_what_does_not_fit_is_refused_with_numbers() -> None:
    cases: list[tuple[dict[str, int], str]] = [
        (
            {"kv_memory": 3 * BLOCK, "max_model_len": 49},
            f"kv_memory={3 * BLOCK} bytes on rank 0 hold 48 tokens .* max_model_len=49 needs more; use max_model_len of at most 48, "
            f"or give kv_memory of at least {4 * BLOCK}",
        ),
        (
            {"kv_memory": BLOCK - 1},
            f"hold 0 tokens .* blocks of 16; give kv_memory of at least {BLOCK}, or {4 * BLOCK} for",
        ),
        ({"max_model_len": 65}, "max_model_len=65 exceeds max_position_embeddings=64; use at most 64"),
        ({"kv_memory": 0}, "kv_memory=0 must be a whole number of at least 1"),
        ({"max_num_seqs": 8, "max_batched_tokens": 7}, "max_batched_tokens=7 is less than max_num_seqs=8"),
    ]
    for limits, message in cases:
        with pytest.raises(RequestError, match=message):
            capacity(**limits)


def test_memory_that_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="bytes could not be allocated on rank 0"):
        paged_cache.make_cache(LAYOUT, ONE, 1 << 45, 16, torch.float32)


def test_free_memory_is_a_share_divided_by_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_cache, "available_memory", lambda: 8000)
    assert free_memory(ONE, 1) == 8000 * paged_cache.CPU_SHARE
    assert free_memory(ONE, 4) == 2000 * paged_cache.CPU_SHARE


def check_agreement(group: TensorParallelGroup, memories: list[int], longest: int | None) -> CacheCapacity:
    layout = ModelLayout.of(config("llama"), group.size)
    limits = EngineLimits(kv_memory=memories[group.rank], max_model_len=longest, max_num_seqs=8)
    found = agree_on_capacity(layout, group, limits, torch.float32)
    assert group.counters.by_kind() == {"all_gather": 1}
    return found


def test_ranks_agree_on_what_the_poorest_holds() -> None:
    two = BLOCK * 2 // 3  # two of three KV heads
    assert run_ranks(2, check_agreement, [20 * two, 9 * two], None) == [CacheCapacity(9, 16, 64)] * 2
    assert run_ranks(2, check_agreement, [2 * two, 9 * two], None) == [CacheCapacity(2, 16, 32)] * 2
    with pytest.raises(RanksFailed) as failure:
        run_ranks(2, check_agreement, [20 * two, 2 * two + 7], 64)
    assert sorted(failure.value.exceptions) == [0, 1]
    for error in failure.value.exceptions.values():
        assert isinstance(error, RequestError) and f"kv_memory={2 * two + 7} bytes on rank 1 hold 32 tokens" in str(
            error
        )
