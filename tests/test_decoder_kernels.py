"""The compiled rotary, SwiGLU, cache and attention kernels against plain torch, and their independence of the batch, bit for bit."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tp_residual.kernels import build, decoder
from tp_residual.model.attention_backend import HeadGroups, attend_sequence
from tp_residual.parallel.splits import HeadSplit

F32, BF16, F16 = DTYPES = (torch.float32, torch.bfloat16, torch.float16)

pytestmark = pytest.mark.skipif(
    bool(build.unavailable()) or not decoder.attention_block(16, F32), reason="no compiled kernels for this CPU"
)


def random(*shape: int, seed: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 16, 64, 80])
def test_rope_has_plain_torchs_bits(dtype: torch.dtype, head_dim: int) -> None:
    fused = random(7, 9 * head_dim, seed=1, dtype=dtype)
    x = fused[:, head_dim : 6 * head_dim].unflatten(
        -1, (5, head_dim)
    )  # a part of a fused projection: rows lie further apart
    angles = random(7, head_dim // 2, seed=2).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    low, high = x.chunk(2, dim=-1)
    expected = (x * cos[:, None] + torch.cat([-high, low], dim=-1) * sin[:, None]).to(dtype)
    assert torch.equal(decoder.rope(x, cos, sin), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_rounds_as_plain_torch_does(dtype: torch.dtype) -> None:
    fused = torch.cat([random(5, 1003, seed=1) * 20, random(5, 1003, seed=2)], dim=1).to(dtype)
    fused[0, :4] = torch.tensor([float("nan"), float("inf"), -200.0, 0.0])
    gate, up = fused.split(1003, dim=1)
    got, exact = decoder.silu_mul(gate, up), F.silu(gate.double()) * up.double()
    assert got[0, 0].isnan() and got[0, 3] == 0
    assert got[0, 1] == up[0, 1] * float("inf") and float(got[0, 2].abs()) < 1e-30
    # one rounding of silu and one of the product (half a unit each), and in fp32 more of exp and of the division; below 0.01 a silu may be
    # a subnormal fp16
    units = 4.0 if dtype == F32 else 1.01
    finite = exact.isfinite()
    finite[0, 2] = False
    error = ((got.double() - exact).abs() / exact.abs().clamp_min(1e-2))[finite].max().item()
    assert error <= units * torch.finfo(dtype).eps
    if dtype != F32:  # and so nearly always the same number
        assert (got != F.silu(gate) * up)[finite].float().mean() < 2e-3


class Sequences:
    """Ragged sequences with blocks scattered over a cache whose unused places are NaN."""

    def __init__(
        self, lengths: list[int], heads: tuple[int, int, int], head_dim: int, dtype: torch.dtype, seed: int = 0
    ) -> None:
        split = HeadSplit.of(*heads)
        self.groups, self.head_dim, self.dtype = HeadGroups(split, 0, torch.device("cpu")), head_dim, dtype
        query_heads, kv_heads = split.query.size(0), split.key_value.size(0)
        self.block = decoder.attention_block(head_dim, dtype)
        self.lengths = lengths
        self.q = [random(n, query_heads, head_dim, seed=seed + 10 * i, dtype=dtype) for i, n in enumerate(lengths)]
        self.k = [random(n, kv_heads, head_dim, seed=seed + 10 * i + 1, dtype=dtype) for i, n in enumerate(lengths)]
        self.v = [random(n, kv_heads, head_dim, seed=seed + 10 * i + 2, dtype=dtype) for i, n in enumerate(lengths)]
        counts = [-(-n // self.block) for n in lengths]
        order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
        self.tables = torch.full((len(lengths), max(counts) + 1), -(1 << 30), dtype=torch.int32)
        for row, count in enumerate(counts):
            self.tables[row, :count] = torch.tensor([order.pop() for _ in range(count)])
        blocks = sum(counts) + 3
        self.keys = torch.full((blocks, kv_heads, head_dim, self.block), float("nan"), dtype=dtype)
        self.values = torch.full((blocks, kv_heads, self.block, head_dim), float("nan"), dtype=dtype)
        per_kv = torch.bincount(torch.tensor(split.kv_index(0)), minlength=kv_heads)
        self.heads = torch.stack([per_kv.cumsum(0) - per_kv, per_kv], dim=1).contiguous()

    def slots(self, row: int, first: int, last: int) -> list[int]:
        return [int(self.tables[row, at // self.block]) * self.block + at % self.block for at in range(first, last)]

    def run(self, parts: list[tuple[int, int, int]], window: int | None = None) -> list[Tensor]:
        """parts: (row, tokens before, one past the last) of what one forward pass computes."""
        slots = torch.tensor([slot for part in parts for slot in self.slots(*part)])
        pieces = [torch.cat([each[row][a:b] for row, a, b in parts]) for each in (self.q, self.k, self.v)]
        decoder.append(pieces[1], pieces[2], self.keys, self.values, slots)
        spans, at = [], 0
        for row, before, end in parts:
            spans.append([at, at + end - before, row, before])
            at += end - before
        out = decoder.attend(pieces[0], self.keys, self.values, torch.tensor(spans), self.tables, self.heads, window)
        return list(out.split([end - before for _, before, end in parts]))

    def expected(self, row: int, window: int | None = None) -> Tensor:
        """In fp64."""
        q, k, v = (each[row].double() for each in (self.q, self.k, self.v))
        return attend_sequence(q, k.transpose(0, 1), v.transpose(0, 1), self.groups, window)


@pytest.mark.parametrize("heads", [(1, 1, 1), (9, 3, 2), (14, 2, 2), (9, 3, 1), (14, 2, 1)])
@pytest.mark.parametrize("window", [None, 1, 37, 64])
def test_attention_is_plain_attention(heads: tuple[int, int, int], window: int | None) -> None:
    for dtype, bound in ((F32, 2e-6), (BF16, 4e-3), (F16, 5e-4)):  # a rounding of the output; in fp32, sums of 150 keys
        sequences = Sequences([1, 15, 16, 17, 64, 65, 150], heads, 32, dtype)
        got = sequences.run([(row, 0, n) for row, n in enumerate(sequences.lengths)], window)
        for row, out in enumerate(got):
            expected = sequences.expected(row, window)
            error = (out.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
            assert error.max() <= bound, (dtype, row, error.max())


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("window", [None, 50])
def test_a_query_has_the_same_bits_in_any_company_and_any_piece_of_its_prompt(
    head_dim: int, window: int | None
) -> None:
    lengths = [130, 3, 77]
    whole = Sequences(lengths, (9, 3, 2), head_dim, BF16)
    together = whole.run([(row, 0, n) for row, n in enumerate(lengths)], window)
    alone = Sequences(lengths, (9, 3, 2), head_dim, BF16)
    for row, n in enumerate(lengths):
        assert torch.equal(alone.run([(row, 0, n)], window)[0], together[row])
    pieces = Sequences(lengths, (9, 3, 2), head_dim, BF16)
    for at in range(0, 130, 13):  # a prompt in pieces, beside sequences that are decoded
        parts = [(0, at, at + 13)] + [(row, at, at + 1) for row in (1, 2) if at < lengths[row]]
        for (row, first, last), out in zip(parts, pieces.run(parts, window), strict=True):
            if row == 0:
                assert torch.equal(out, together[0][first:last])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(whole.run([(0, 0, 130)], window)[0], together[0])
    finally:
        torch.set_num_threads(threads)


def test_what_is_not_a_number_stays_visible_and_only_where_it_belongs() -> None:
    sequences = Sequences([40, 40, 40], (4, 2, 1), 16, F32)
    sequences.q[0][20, 1, 3] = float("nan")  # one head of one query
    sequences.k[1][10, 1, 0] = float("nan")  # every later query of the heads that read KV head 1
    sequences.v[2][:, 0, 5] = float("inf")
    nan_q, nan_k, inf_v = sequences.run([(row, 0, 40) for row in range(3)])
    assert nan_q.isnan().any(dim=-1).nonzero().tolist() == [[20, 1]]
    assert nan_k.isnan().any(dim=-1)[10:, 2:].all() and not nan_k.isnan()[:, :2].any() and not nan_k[:10].isnan().any()
    # infinity, or NaN where a query shares a tile with keys it does not see (0 * inf), as in torch's kernel
    assert not inf_v[:, :2, 5].isfinite().any() and inf_v[:, 2:].isfinite().all()


def test_large_scores_neither_overflow_nor_vanish() -> None:
    sequences = Sequences([200], (2, 1, 1), 16, F32)
    sequences.q[0] *= 1e4
    sequences.k[0][:, :, 0] = torch.linspace(-1e3, 1e3, 200)[:, None]
    got, expected = sequences.run([(0, 0, 200)])[0], sequences.expected(0)
    # scores of 1e7 are known to 1 in fp32: a softmax that is not one key's is not determined, so one where it is
    sharp = expected.isclose(sequences.v[0].double()[[0]], atol=1e-9).all(dim=-1) | expected.isclose(
        sequences.v[0].double(), atol=1e-9
    ).all(dim=-1)
    assert sharp.float().mean() > 0.5 and got.isfinite().all()
    assert torch.allclose(got[sharp].double(), expected[sharp], atol=1e-6)
