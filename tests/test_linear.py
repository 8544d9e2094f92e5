"""Sharded linears and the vocabulary against unsharded twins, at sizes that divide and sizes that do not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tp_residual.errors import LayoutError, RequestError
from tp_residual.parallel.blocks import parameter_blocks
from tp_residual.parallel.collectives import (
    invariant_to_column_input,
    invariant_to_token_shard,
    last_dim_shard_to_invariant,
    partial_to_invariant,
    partial_to_token_shard,
    token_shard_to_column_input,
    token_shard_to_invariant,
)
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.linear import ColumnParallelLinear, RowParallelLinear
from tp_residual.parallel.partial import Partial
from tp_residual.parallel.splits import HeadSplit, Split
from tp_residual.parallel.vocabulary import VocabParallelEmbedding, VocabParallelHead, vocab_parallel_argmax
from tp_residual.testing import (
    assert_equals_twin,
    expect_collectives,
    hostile_values,
    hostile_weights_,
    nan_filled_memory,
)

F64 = torch.float64
HIDDEN, HEAD_DIM = 6, 2


# -- the smallest whole: attention-shaped and MLP-shaped blocks of linears


class TwinBlock(nn.Module):
    """q, k, v to per-query-head products (no softmax: every bias keeps a gradient), o; gate and up, down. Biases
    everywhere.
    """

    def __init__(self, query_heads, kv_heads, intermediate):
        super().__init__()
        self.query_heads, self.kv_heads = query_heads, kv_heads
        self.q_proj = nn.Linear(HIDDEN, query_heads * HEAD_DIM, dtype=F64)
        self.k_proj = nn.Linear(HIDDEN, kv_heads * HEAD_DIM, dtype=F64)
        self.v_proj = nn.Linear(HIDDEN, kv_heads * HEAD_DIM, dtype=F64)
        self.o_proj = nn.Linear(query_heads * HEAD_DIM, HIDDEN, dtype=F64)
        self.gate_proj = nn.Linear(HIDDEN, intermediate, dtype=F64)
        self.up_proj = nn.Linear(HIDDEN, intermediate, dtype=F64)
        self.down_proj = nn.Linear(intermediate, HIDDEN, dtype=F64)

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, HEAD_DIM)) for p in (self.q_proj, self.k_proj, self.v_proj))
        group = self.query_heads // self.kv_heads
        h = mix(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
        attended = self.o_proj(h.flatten(1))
        return attended, self.down_proj(F.silu(self.gate_proj(attended)) * self.up_proj(attended))


def mix(q, k, v):
    return torch.tanh(q * k) * v + q


class ShardedBlock(nn.Module):
    def __init__(self, group, query_heads, kv_heads, intermediate, sequence_parallel):
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        heads = HeadSplit.of(query_heads, kv_heads, group.size)
        self.kv_index = list(heads.kv_index(group.rank))
        query, kv = heads.query.scaled(HEAD_DIM), heads.key_value.scaled(HEAD_DIM)
        middle = Split.even(intermediate, group.size)
        options = {"bias": True, "dtype": F64}
        self.qkv_proj = ColumnParallelLinear(HIDDEN, {"q_proj": query, "k_proj": kv, "v_proj": kv}, group, **options)
        self.o_proj = RowParallelLinear(
            query, HIDDEN, group, sequence_parallel=sequence_parallel, name="o_proj", **options
        )
        self.gate_up_proj = ColumnParallelLinear(HIDDEN, {"gate_proj": middle, "up_proj": middle}, group, **options)
        self.down_proj = RowParallelLinear(
            middle, HIDDEN, group, sequence_parallel=sequence_parallel, name="down_proj", **options
        )

    def forward(self, x):
        tokens = Split.ceil_chunks(x.shape[0], self.group.size)
        if self.sequence_parallel:
            x = invariant_to_token_shard(x, tokens, self.group, tag="slice")
        q, k, v = (t.unflatten(-1, (-1, HEAD_DIM)) for t in self.qkv_proj.split(self.qkv_proj(self.enter(x, tokens))))
        h = mix(q, k[:, self.kv_index], v[:, self.kv_index])
        attended = self.leave(self.o_proj(h.flatten(1)), tokens)
        gate, up = self.gate_up_proj.split(self.gate_up_proj(self.enter(attended, tokens)))
        y = self.leave(self.down_proj(F.silu(gate) * up), tokens)
        if self.sequence_parallel:
            return tuple(token_shard_to_invariant(t, tokens, self.group, tag="out") for t in (attended, y))
        return attended, y

    def enter(self, x, tokens):
        if self.sequence_parallel:
            return token_shard_to_column_input(x, tokens, self.group, tag="enter")
        return invariant_to_column_input(x, self.group, tag="enter")

    def leave(self, partial, tokens):
        if self.sequence_parallel:
            return partial_to_token_shard(partial, tokens, tag="leave")
        return partial_to_invariant(partial, tag="leave")


def check_blocks_of_linears(group, heads, intermediate):
    for sequence_parallel in (False, True):
        for tokens in (1, 5, 0):
            twin = TwinBlock(*heads, intermediate)
            hostile_weights_(twin, seed=1)
            with nan_filled_memory():
                sharded = ShardedBlock(group, *heads, intermediate, sequence_parallel)
                assert_equals_twin(group, sharded, twin, (hostile_values(tokens, HIDDEN, seed=2),), seed=3)
    for parameter in sharded.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.numel() * 8
    held = sum(parameter.numel() for parameter in sharded.parameters())
    assert held == sum(block.of(block.parameter).numel() for block in parameter_blocks(sharded))
    shapes = {name: tuple(parameter.shape) for name, parameter in sharded.named_parameters()}
    split = HeadSplit.of(*heads, group.size)
    rows = (split.query.size(group.rank) + 2 * split.key_value.size(group.rank)) * HEAD_DIM
    local = Split.even(intermediate, group.size).size(group.rank)
    assert shapes["qkv_proj.weight"] == (rows, HIDDEN) and shapes["qkv_proj.bias"] == (rows,)
    assert shapes["o_proj.weight"] == (HIDDEN, split.query.size(group.rank) * HEAD_DIM)
    assert shapes["gate_up_proj.weight"] == (2 * local, HIDDEN) and shapes["down_proj.weight"] == (HIDDEN, local)
    assert shapes["o_proj.bias"] == shapes["down_proj.bias"] == (HIDDEN,)


@pytest.mark.parametrize(("heads", "intermediate"), [((9, 3), 10), ((14, 2), 7), ((8, 1), 3)])
@pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
def test_blocks_of_linears_equal_their_twin(ranks, tp_size, heads, intermediate):
    """An intermediate of 3 over 4 ranks leaves one of them without a column."""
    ranks(tp_size, check_blocks_of_linears, heads, intermediate)


class NamedTwin(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.self_attn = nn.Module()
        self.self_attn.k_proj = nn.Linear(HIDDEN, 5, bias=bias, dtype=F64)


class NamedSharded(nn.Module):
    """A projection inside a module: its checkpoint name is the projection's, beside this module's own."""

    def __init__(self, group, bias):
        super().__init__()
        self.self_attn = nn.Module()
        self.self_attn.qkv_proj = ColumnParallelLinear(
            HIDDEN, {"k_proj": Split.even(5, group.size)}, group, bias=bias, dtype=F64
        )


def check_names_and_columns(group):
    split = Split.even(5, group.size)
    for bias in (False, True):
        twin, sharded = NamedTwin(bias), NamedSharded(group, bias)
        hostile_weights_(twin, seed=4)
        several = int(group.size > 1)
        with expect_collectives(group, all_gather=several * (1 + 3), all_reduce=several):  # out and three norms; d_x
            assert_equals_twin(
                group,
                sharded,
                twin,
                (hostile_values(4, HIDDEN, seed=5),),
                run=lambda m, x: last_dim_shard_to_invariant(
                    m.self_attn.qkv_proj(invariant_to_column_input(x, group, tag="in")), split, group, tag="out"
                ),
                run_twin=lambda m, x: m.self_attn.k_proj(x),
            )


@pytest.mark.parametrize("tp_size", [1, 3])
def test_one_column_parallel_projection(ranks, tp_size):
    ranks(tp_size, check_names_and_columns)


# -- the row bias


def check_row_bias(group):
    """100 times the activations: t times counted, it would be off by the whole of it."""
    twin = nn.Linear(8, HIDDEN, dtype=F64)
    hostile_weights_(twin, seed=6)
    with torch.no_grad():
        twin.bias.mul_(100)
    split = Split.even(8, group.size)
    x = hostile_values(3, 8, seed=7)
    sharded = RowParallelLinear(split, HIDDEN, group, bias=True, dtype=F64)
    start, stop = split.ranges[group.rank]
    tokens = Split.ceil_chunks(3, group.size)
    for sequence_parallel in (False, True):
        sharded = RowParallelLinear(split, HIDDEN, group, bias=True, sequence_parallel=sequence_parallel, dtype=F64)

        def run(module, x, sequence_parallel=sequence_parallel):
            partial = module(invariant_to_column_input(x, group, tag="in")[:, start:stop])
            assert isinstance(partial, Partial) and partial.bias is module.bias
            if not sequence_parallel:
                return partial
            return token_shard_to_invariant(partial_to_token_shard(partial, tokens, tag="s"), tokens, group, tag="g")

        assert_equals_twin(group, sharded, twin, (x,), run=run)
    with torch.no_grad():
        y = twin(x)
        wrong = y + (group.size - 1) * twin.bias
        if group.size > 1:
            assert ((wrong - y).norm(dim=1) / y.norm(dim=1)).min() > 0.5  # and the tolerance above is 1e-10


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_the_row_bias_is_added_once(ranks, tp_size):
    ranks(tp_size, check_row_bias)


def check_16_bit_bias(group):
    """Summands (256, 1, 1, 1) and a bias of 1.5: added in rank 0's GEMM it gives 258, and 261 in all, rounded to
    260.
    """
    layer = RowParallelLinear(Split.even(4, 4), 1, group, bias=True, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.fill_(256.0 if group.rank == 0 else 1.0)
        layer.bias.fill_(1.5)
        partial = layer(torch.ones(2, 1, dtype=torch.bfloat16))
        assert partial.value.dtype == torch.bfloat16
        return partial_to_invariant(partial, tag="sum").tolist()


def test_a_16_bit_bias_after_the_sum(ranks):
    assert ranks(4, check_16_bit_bias) == [[[262.0], [262.0]]] * 4  # 260, then 261.5 in steps of 2


def check_frozen(group):
    """Each tensor frozen alone: the others keep their gradients and no rank waits for another."""
    twin = TwinBlock(4, 2, 5)
    hostile_weights_(twin, seed=8)
    x = hostile_values(3, HIDDEN, seed=9)
    for frozen in ("qkv_proj.weight", "o_proj.weight", "o_proj.bias", "down_proj.weight", None):
        sharded = ShardedBlock(group, 4, 2, 5, sequence_parallel=False)
        names = {"qkv_proj.weight": ["q_proj.weight", "k_proj.weight", "v_proj.weight"]}.get(frozen, [frozen])
        for name, parameter in twin.named_parameters():
            parameter.requires_grad_(name not in names)
        for name, parameter in sharded.named_parameters():
            parameter.requires_grad_(name != frozen)
        assert_equals_twin(group, sharded, twin, (x,))


def test_frozen_parameters(ranks):
    ranks(2, check_frozen)


# -- the vocabulary


class TwinVocabulary(nn.Module):
    def __init__(self, vocab_size, tied):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, HIDDEN, dtype=F64)
        self.lm_head = None if tied else nn.Linear(HIDDEN, vocab_size, bias=False, dtype=F64)

    def forward(self, ids):
        h = torch.tanh(self.embed_tokens(ids))
        return h, F.linear(h, self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight)


class ShardedVocabulary(nn.Module):
    def __init__(self, group, vocab_size, tied):
        super().__init__()
        self.group = group
        split = Split.even(vocab_size, group.size)
        self.embed_tokens = VocabParallelEmbedding(split, HIDDEN, group, name="embed_tokens", dtype=F64)
        self.lm_head = VocabParallelHead(split, HIDDEN, group, tied_to=self.embed_tokens if tied else None, dtype=F64)

    def forward(self, ids):
        h = torch.tanh(partial_to_invariant(self.embed_tokens(ids), tag="embed"))
        return h, self.lm_head.gather(self.lm_head(invariant_to_column_input(h, self.group, tag="head")))


def check_vocabulary(group, vocab_size):
    every_id = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(1))
    for ids in (torch.cat([every_id, every_id[:3]]), every_id[:1], every_id[:0]):
        for tied in (False, True):
            twin = TwinVocabulary(vocab_size, tied)
            hostile_weights_(twin, seed=2)
            with nan_filled_memory():
                sharded = ShardedVocabulary(group, vocab_size, tied)
                assert_equals_twin(group, sharded, twin, (ids,), seed=3)
            assert tied == (sharded.lm_head.weight is sharded.embed_tokens.weight)
            assert len([b for b in parameter_blocks(sharded) if b.name == "lm_head.weight"]) == (not tied)
            start, stop = Split.even(vocab_size, group.size).ranges[group.rank]
            weight = sharded.embed_tokens.weight
            assert tuple(weight.shape) == (stop - start, HIDDEN)
            assert weight.untyped_storage().nbytes() == (stop - start) * HIDDEN * 8
    local = sharded.embed_tokens(every_id[:4]).value
    owned = (every_id[:4] >= start) & (every_id[:4] < stop)
    assert (local[~owned] == 0).all()
    bf16 = VocabParallelEmbedding(Split.even(vocab_size, group.size), HIDDEN, group, name="e", dtype=torch.bfloat16)
    assert bf16(every_id).value.dtype == torch.bfloat16


@pytest.mark.parametrize("tp_size", range(1, 9))
def test_a_vocabulary_of_101(ranks, tp_size):
    ranks(tp_size, check_vocabulary, 101)


@pytest.mark.parametrize("vocab_size", [5, 10])
def test_small_vocabularies_at_tp_8(ranks, vocab_size):
    ranks(8, check_vocabulary, vocab_size)


def check_argmax(group, vocab_size):
    split = Split.even(vocab_size, group.size)
    start, stop = split.ranges[group.rank]
    logits = hostile_values(7, vocab_size, seed=1, dtype=torch.float32)
    cases = {"random": logits, "all negative": logits - 1000, "huge": logits * 1e30}
    for winner in range(vocab_size):  # a tie of everything, then of two ids, in each pair of shards
        tied = torch.full((1, vocab_size), -5.0)
        tied[0, winner] = tied[0, vocab_size - 1 - winner] = -4.0
        cases[f"tie with {winner}"] = tied
    cases["all equal"] = torch.full((2, vocab_size), -3.0)
    cases["minus infinity"] = torch.full((2, vocab_size), float("-inf"))
    cases["signed zero"] = torch.tensor([[-0.0, *[0.0] * (vocab_size - 1)]])
    cases["bf16"] = logits.bfloat16()
    cases["no row"] = logits[:0]
    for name, full in cases.items():
        best = full.float().max(dim=-1, keepdim=True).values if len(full) else full
        lowest = torch.tensor(
            [int((row == top).nonzero()[0]) for row, top in zip(full.float(), best, strict=True)]
        ).long()
        with expect_collectives(group, all_gather=int(group.size > 1)):
            ids = vocab_parallel_argmax(full[:, start:stop], split, group, checksum=2**53 - 1)
        assert ids.dtype == torch.int64 and torch.equal(ids, lowest.view(-1)), (name, ids, lowest)


@pytest.mark.parametrize(
    ("tp_size", "vocab_size"), [(1, 101), (3, 101), pytest.param(8, 101, marks=pytest.mark.slow), (8, 10), (8, 5)]
)
def test_argmax_is_the_lowest_of_the_largest(ranks, tp_size, vocab_size):
    ranks(tp_size, check_argmax, vocab_size)


def check_disagreement(group):
    split = Split.even(10, group.size)
    start, stop = split.ranges[group.rank]
    logits = hostile_values(2, 10, seed=1, dtype=torch.float32)
    with pytest.raises(RuntimeError) as error:
        vocab_parallel_argmax(logits[:, start:stop], split, group, checksum=41 if group.rank == 2 else 40)
    assert "ranks disagree" in str(error.value) and "[40, 40, 41]" in str(error.value)
    if group.rank == 1:
        logits[1, start] = float("nan")
    with pytest.raises(RuntimeError, match=r"NaN on rank \[1\]"):
        vocab_parallel_argmax(logits[:, start:stop], split, group, checksum=40)


def test_ranks_that_disagree_are_told_so_everywhere(ranks):
    ranks(3, check_disagreement)


# -- misuse


def test_misuse_is_refused_by_name():
    group = TensorParallelGroup.single()
    column = ColumnParallelLinear(4, {"gate_proj": Split.even(6, 1), "up_proj": Split.even(6, 1)}, group)
    row = RowParallelLinear(Split.even(6, 1), 4, group, name="layers.0.mlp.down_proj")
    embedding = VocabParallelEmbedding(Split.even(10, 1), 4, group, name="embed_tokens")
    head = VocabParallelHead(Split.even(10, 1), 4, group)
    partial = row(torch.zeros(2, 6))
    for layer in (column, head):
        with pytest.raises(LayoutError, match=r"layers\.0\.mlp\.down_proj, which is a partial sum"):
            layer(partial)
    with pytest.raises(
        LayoutError, match=r"RowParallelLinear\(layers\.0\.mlp\.down_proj\) takes 6 features on this rank and got 4"
    ):
        row(torch.zeros(2, 4))
    with pytest.raises(LayoutError, match=r"ColumnParallelLinear\(gate_proj, up_proj\) takes 4 features"):
        column(torch.zeros(2, 6))
    for wrong in (-1, 10):
        with pytest.raises(RequestError, match=f"token id {wrong} is outside the vocabulary of 10 ids; use 0 to 9"):
            embedding(torch.tensor([3, wrong]))
