"""Attention by libraries that only a GPU has, over stand-ins that compute what their documentation says, from what they are given.

What a stand-in cannot show is that the libraries do so: on CUDA each is put to a trial before it is taken (`gpu_check` runs it).
"""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny_models import config
from tp_residual.inference import paged_attention
from tp_residual.inference.paged_attention import (
    TRIAL_LIMIT,
    FlashInferAttention,
    PagedAttention,
    PagedPass,
    SdpaAttention,
    VarlenAttention,
    choose_attention,
    trial_error,
)
from tp_residual.inference.paged_cache import PagedKVCache
from tp_residual.model.attention_backend import HeadGroups, TokenBatch
from tp_residual.model.layout import ModelLayout
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.splits import HeadSplit

CPU = torch.device("cpu")


def one_sequence(q: Tensor, k: Tensor, v: Tensor, left: int, causal: bool = True) -> Tensor:
    """`[queries, heads, dim]` over `[keys, kv_heads, dim]`, aligned at the end: equations, no kernel. left: -1 for all."""
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    behind = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    hidden = torch.zeros_like(behind, dtype=torch.bool)
    if causal:
        hidden |= behind < 0
    if left >= 0:
        hidden |= behind > left
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)


def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    *, window_size: tuple[int, int], enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """torch.nn.attention.varlen.varlen_attn as documented."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and window_size[1] == 0
    assert query.shape[1] == key.shape[1] or (enable_gqa and query.shape[1] % key.shape[1] == 0)
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
    q, k = cu_seq_q.tolist(), cu_seq_k.tolist()
    assert q[-1] == len(query) and k[-1] == len(key) == len(value)
    parts = [
        one_sequence(query[q[i] : q[i + 1]], key[k[i] : k[i + 1]], value[k[i] : k[i + 1]], window_size[0])
        for i in range(len(q) - 1)
    ]
    return torch.cat(parts)


class Wrapper:
    """flashinfer.BatchPrefillWithPagedKVCacheWrapper as documented; a plan is kept in the workspace."""

    def __init__(self, workspace: Tensor, kv_layout: str) -> None:
        assert kv_layout == "HND" and workspace.dtype == torch.uint8
        self.workspace, self.plans = workspace, 0

    def plan(
        self, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, last_page_len: Tensor, qo_heads: int, kv_heads: int,
        head_dim: int, page_size: int, *, causal: bool, window_left: int, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert all(each.dtype == torch.int32 for each in (qo_indptr, kv_indptr, kv_indices, last_page_len))
        assert qo_heads % kv_heads == 0 and bool((last_page_len >= 1).all() and (last_page_len <= page_size).all())
        assert len(kv_indices) == kv_indptr[-1]
        self.places = [each.tolist() for each in (qo_indptr, kv_indptr, kv_indices, last_page_len)]
        self.shape, self.causal, self.left = (qo_heads, kv_heads, head_dim, page_size), causal, window_left
        self.types = q_data_type, kv_data_type
        self.plans += 1
        self.workspace[:8] = torch.randint(256, (8,), dtype=torch.uint8)
        self.stamp = self.workspace[:8].clone()

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        assert torch.equal(self.stamp, self.workspace[:8]), "another wrapper planned in this workspace"
        keys, values = paged_kv_cache
        assert (q.shape[1], keys.shape[1], q.shape[2], keys.shape[2]) == self.shape and self.types == (
            q.dtype,
            keys.dtype,
        )
        qo, kv, indices, last = self.places
        parts = []
        for i, length in enumerate(last):
            pages = indices[kv[i] : kv[i + 1]]
            total = (len(pages) - 1) * self.shape[3] + length
            k, v = (each[pages].transpose(1, 2).flatten(0, 1)[:total] for each in (keys, values))
            parts.append(one_sequence(q[qo[i] : qo[i + 1]], k, v, self.left, self.causal))
        return torch.cat(parts)


FLASHINFER = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper)


def make(name: str) -> PagedAttention:
    return VarlenAttention(varlen_attn) if name == "varlen" else FlashInferAttention(FLASHINFER, CPU)


@pytest.mark.parametrize("name", ["varlen", "flashinfer"])
@pytest.mark.parametrize(("heads", "kv_heads", "tp_size", "rank"), [(4, 2, 1, 0), (9, 3, 2, 0), (9, 3, 2, 1)])
def test_what_libraries_are_given_is_what_sdpa_computes(
    name: str, heads: int, kv_heads: int, tp_size: int, rank: int
) -> None:
    """Pieces of prompts beside decode steps, layers with and without a window, over several passes; 5 query heads on 2 KV heads too."""
    groups = HeadGroups(HeadSplit.of(heads, kv_heads, tp_size), rank, CPU)
    draw = torch.Generator().manual_seed(3)
    keys, values = (
        torch.randn(2, 9, groups.kv_heads, 4, 8, generator=draw, dtype=torch.float64) for _ in range(2)
    )  # layers, blocks, heads, block size, head_dim
    tables = torch.tensor([[7, 2, 5, 0], [0, 3, 8, 0], [1, 4, 6, 0]], dtype=torch.int32)
    ours, exact = make(name), SdpaAttention()
    for parts in ([(0, 0, 5), (2, 3, 1), (1, 6, 4)], [(1, 10, 1), (0, 7, 1)], [(2, 11, 1)], [(0, 8, 4)]):
        batch = TokenBatch.of([(row, context, [0] * count) for row, context, count in parts])
        for attention in (ours, exact):
            attention.begin(PagedPass(tables, batch, 4))
        for layer, window in ((0, None), (1, 3), (0, 3), (1, None)):
            q = torch.randn(len(batch.token_ids), len(groups.kv_of_query), 8, generator=draw, dtype=torch.float64)
            got, expected = (each.attend(keys[layer], values[layer], q, groups, window) for each in (ours, exact))
            # 1e-12: fp64 sums of a few terms in another order
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_flashinfer_plans_once_a_pass_for_each_window() -> None:
    groups = HeadGroups(HeadSplit.of(4, 2, 1), 0, CPU)
    attention = FlashInferAttention(FLASHINFER, CPU)
    keys = torch.zeros(3, 2, 16, 8)
    for _ in range(2):
        attention.begin(PagedPass(torch.tensor([[2]], dtype=torch.int32), TokenBatch.of([(0, 0, [1, 2])]), 16))
        for window in (None, 4, None, 4, 4):
            attention.attend(keys, keys, torch.zeros(2, 4, 8), groups, window)
    assert {window: wrapper.plans for window, wrapper in attention._wrappers.items()} == {None: 2, 4: 2}


def test_a_trial_tells_right_from_wrong() -> None:
    groups = HeadGroups(HeadSplit.of(9, 3, 2), 0, CPU)
    right = VarlenAttention(varlen_attn)
    assert trial_error(right, groups, 64, torch.bfloat16) < TRIAL_LIMIT / 2
    wrong: list[Any] = [
        lambda *args, **kwargs: varlen_attn(*args, **{**kwargs, "window_size": (-1, 0)}),
        lambda q, *args, **kwargs: varlen_attn(q.flip(1), *args, **kwargs),
        lambda *args, **kwargs: varlen_attn(*args, **kwargs) * float("nan"),
    ]
    for fault in wrong:
        assert not trial_error(VarlenAttention(fault), groups, 64, torch.bfloat16) < TRIAL_LIMIT


class OnCuda(HeadGroups):
    """Heads that say they are on a GPU: what is chosen there, without one."""

    def __init__(self) -> None:
        super().__init__(HeadSplit.of(4, 2, 1), 0, CPU)
        self.kv_of_query = SimpleNamespace(device=torch.device("cuda"))  # type: ignore[assignment]


def test_the_first_that_passes_its_trial_is_taken(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """And who was passed over is said, with the reason."""
    caplog.set_level("INFO", logger="tp_residual")
    modules: dict[str, Any] = {"torch.nn.attention.varlen": SimpleNamespace(varlen_attn=varlen_attn)}

    def load(name: str) -> Any:
        if name not in modules:
            raise ImportError(name)
        return modules[name]

    errors = {"FlashInfer": 0.0, "torch.nn.attention.varlen": 0.0}

    def trial(attention: PagedAttention, *_: Any) -> float:
        if errors[attention.name] < 0:
            raise RuntimeError("nvcc: not found\nand a page of log")
        return errors[attention.name]

    monkeypatch.setattr(paged_attention, "import_module", load)
    monkeypatch.setattr(paged_attention, "trial_error", trial)
    monkeypatch.setattr(FlashInferAttention, "__init__", lambda self, *_: None)

    def chosen(dtype: torch.dtype = torch.bfloat16, head_dim: int = 64) -> tuple[str, str]:
        caplog.clear()
        attention = choose_attention(OnCuda(), head_dim, dtype)
        return attention.name, caplog.messages[-1]

    name, said = chosen()
    assert name == "torch.nn.attention.varlen" and "FlashInfer is not installed" in said
    modules["flashinfer"] = FLASHINFER
    assert chosen() == ("FlashInfer", "attention: FlashInfer")
    assert chosen(head_dim=80)[0] == "torch.nn.attention.varlen"
    assert chosen(torch.float32)[0] == SdpaAttention.name
    errors["FlashInfer"] = -1
    name, said = chosen()
    assert name == "torch.nn.attention.varlen" and "(nvcc: not found)" in said
    errors["torch.nn.attention.varlen"] = float("nan")
    name, said = chosen()
    assert name == SdpaAttention.name and "torch.nn.attention.varlen is wrong by nan%" in said
    groups = HeadGroups(HeadSplit.of(4, 2, 1), 0, CPU)
    assert choose_attention(groups, 64, torch.bfloat16).name == SdpaAttention.name, "on the CPU nothing is tried"


def test_a_cache_asks_whom_it_was_given() -> None:
    layout, group = ModelLayout.of(config("llama"), 1), TensorParallelGroup.single()
    caches = [PagedKVCache(layout, group, 6, 4, torch.float64, each) for each in (None, VarlenAttention(varlen_attn))]
    groups = HeadGroups(layout.heads, 0, CPU)
    batch = TokenBatch.of([(0, 0, [1] * 6), (1, 0, [1])])
    draw = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(7, heads, 8, generator=draw, dtype=torch.float64) for heads in (9, 3, 3))
    results = []
    for cache in caches:
        cache.begin([[5, 1], [0]], batch)
        cache.append(1, k, v, batch)
        results.append(cache.attend(1, q, batch, groups, None))
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)
