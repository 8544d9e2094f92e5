"""Initialisation and dropout: the same bits at any tp size, with the statistics that the rule says.

Functions named check_* run on every rank.
"""

import math
from itertools import product
from typing import Any

import pytest
import torch
from tiny_models import config, prompts, random_weights, sharded
from torch import Tensor

from tp_residual.checkpoint.random_weights import Fill
from tp_residual.errors import LayoutError, UserError
from tp_residual.model.attention_backend import NoCache, TokenBatch
from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.blocks import parameter_blocks, sync_gradients
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.linear import RowParallelLinear
from tp_residual.parallel.partial import Partial
from tp_residual.parallel.splits import HeadSplit, Split
from tp_residual.testing import hostile_values, run_ranks
from tp_residual.training import (
    GPT2,
    RULES,
    DeepNorm,
    DropoutStream,
    Fixup,
    Normal,
    VarianceOverRootN,
    ZeroWriters,
    checkpoint_layers,
    init_weights,
)
from tp_residual.training.init import InitRule

# ---- initialisation ----


def shares(
    group: TensorParallelGroup, name: str, rule: InitRule, seed: int, build_more: bool = False
) -> list[tuple[Any, ...]]:
    """build_more: rank 0 draws and builds something else first, which may not matter."""
    if build_more and group.rank == 0:
        torch.rand(7)
        CausalLM(config("llama"), TensorParallelGroup.single())
    model = CausalLM(config(name), group, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    init_weights(model, rule, seed, num_layers=config(name).num_hidden_layers)
    return [(b.name, b.dim, b.globe, b.of(b.parameter).detach().clone()) for b in parameter_blocks(model)]


@pytest.mark.parametrize(("name", "rule", "sizes"), [("llama", GPT2(), (2, 4)), ("qwen2", DeepNorm(), (3,))])
def test_every_tp_size_begins_with_slices_of_the_same_weights(
    name: str, rule: InitRule, sizes: tuple[int, ...]
) -> None:
    """9/3 and 14/2 heads, a vocabulary of 101: nothing divides. bf16, and in any order of construction."""
    whole = {tensor: value for tensor, _, _, value in shares(TensorParallelGroup.single(), name, rule, 7)}
    assert all(value.isfinite().all() for value in whole.values())
    matrices = [value for value in whole.values() if value.dim() > 1]
    assert all(value.unique().numel() > 100 for value in matrices)
    for size in sizes:
        seen: dict[str, list[Tensor]] = {}
        for rank_shares in run_ranks(size, shares, name, rule, 7, build_more=True):
            for tensor, dim, (start, stop), value in rank_shares:
                assert torch.equal(value, whole[tensor].narrow(dim, start, stop - start)), (size, tensor)
                seen.setdefault(tensor, []).append(value)
        o_proj = seen["model.layers.0.self_attn.o_proj.weight"]
        assert not any(torch.equal(a, b) for a in o_proj for b in o_proj if a is not b), "two shards are alike"
    other = {tensor: value for tensor, _, _, value in shares(TensorParallelGroup.single(), name, rule, 8)}
    assert not any(torch.equal(value, other[tensor]) for tensor, value in whole.items() if value.dim() > 1)


def standard_deviations(rule: InitRule, name: str = "llama_biased", layers: int = 8) -> dict[str, float]:
    """By kind of matrix, and what norms and biases begin with."""
    changed = config(name, num_hidden_layers=layers, tie_word_embeddings=False)
    model = CausalLM(changed, TensorParallelGroup.single())
    fills = init_weights(model, rule, 3, num_layers=layers)
    found: dict[str, list[Tensor]] = {}
    for block in parameter_blocks(model):
        kind, leaf = block.name.split(".")[-2:]
        found.setdefault(kind if leaf == "weight" else "bias", []).append(block.of(block.parameter.detach()).flatten())
    assert set(fills) == {block.name for block in parameter_blocks(model)}
    for kind in ("input_layernorm", "post_attention_layernorm", "norm"):
        assert all((value == 1).all() for value in found.pop(kind))
    assert all((value == 0).all() for value in found.pop("bias"))
    return {kind: float(torch.cat(values).std()) for kind, values in found.items()}


INNER = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
WRITERS = ("o_proj", "down_proj")


def test_rules_give_the_standard_deviations_they_say() -> None:
    """8 layers; the smallest kind has 8 x 288 draws: 1.5 % standard error of a standard deviation, 5 % is above three."""
    layers, h, f, q, kv = 8, 48, 71, 48, 6
    xavier = {
        "q_proj": (2 / (h + q)) ** 0.5,
        "k_proj": (2 / (h + kv)) ** 0.5,
        "v_proj": (2 / (h + kv)) ** 0.5,
        "gate_proj": (2 / (h + f)) ** 0.5,
        "up_proj": (2 / (h + f)) ** 0.5,
        "o_proj": (2 / (h + q)) ** 0.5,
        "down_proj": (2 / (h + f)) ** 0.5,
    }
    beta = (8 * layers) ** -0.25
    ends = {"embed_tokens": 0.02, "lm_head": 0.02}
    expected: list[tuple[InitRule, dict[str, float]]] = [
        (Normal(0.05), {kind: 0.05 for kind in (*INNER, *WRITERS, *ends)}),
        (GPT2(), {kind: 0.02 for kind in (*INNER, *ends)} | {kind: 0.02 / 4 for kind in WRITERS}),
        (VarianceOverRootN(), {kind: 0.02 for kind in (*INNER, *ends)} | {kind: 0.02 / 8**0.25 for kind in WRITERS}),
        (VarianceOverRootN(whole_branch=True), ends | {kind: 0.02 / 8**0.25 for kind in (*INNER, *WRITERS)}),
        (
            Fixup(0.1),
            {"embed_tokens": 0.1, "lm_head": 0.0} | {kind: 0.1 / 4 for kind in INNER} | {kind: 0.0 for kind in WRITERS},
        ),
        (
            DeepNorm(),
            ends | {kind: std * (1 if kind in ("q_proj", "k_proj") else beta) for kind, std in xavier.items()},
        ),
        (ZeroWriters(), {kind: 0.02 for kind in (*INNER, *ends)} | {kind: 0.0 for kind in WRITERS}),
    ]
    assert {type(rule) for rule, _ in expected} == set(RULES.values())
    for rule, stds in expected:
        found = standard_deviations(rule)
        assert found.keys() == stds.keys()
        for kind, std in stds.items():
            assert math.isclose(found[kind], std, rel_tol=0.05), (rule, kind, found[kind], std)


def test_normal_values_are_normal() -> None:
    """4 million draws: moments to three standard errors, the share beyond 1, 2 and 3, none beyond 6, and no two neighbours related."""
    group = TensorParallelGroup.single()
    head = RowParallelLinear(Split.even(2000, 1), 2000, group)
    init_weights(head, Normal(1.0), 5, num_layers=1)
    z = head.weight.detach().double()
    n = z.numel()
    assert abs(float(z.mean())) < 3 / n**0.5 and abs(float(z.var()) - 1) < 3 * (2 / n) ** 0.5
    # twelve uniforms: excess kurtosis -0.1, by design
    assert abs(float((z**4).mean()) - 2.9) < 3 * (96 / n) ** 0.5
    for edge, share in ((1.0, 0.3173), (2.0, 0.0455), (3.0, 0.0027)):
        # that kurtosis moves 0.4 % from the middle to beyond 1
        assert abs(float((z.abs() > edge).double().mean()) - share) < 0.005
    assert float(z.abs().max()) < 6
    for pair in (z[:, 1:] * z[:, :-1], z[1:] * z[:-1]):
        assert abs(float(pair.mean())) < 4 / n**0.5


def test_overrides_and_what_rules_do_not_know() -> None:
    group = TensorParallelGroup.single()
    model = CausalLM(config("llama"), group)
    overrides = {"*.o_proj.weight": Fill(mean=0.5), "model.norm.weight": Fill(mean=2.0)}
    fills = init_weights(model, Normal(), 0, num_layers=2, overrides=overrides)
    assert (model.get_parameter("model.layers.1.self_attn.o_proj.weight") == 0.5).all()
    assert (model.get_parameter("model.norm.weight") == 2).all() and fills["lm_head.weight"] == Fill(scale=0.02)
    with pytest.raises(UserError, match=r"overrides for '\*\.oproj\.weight' fit no tensor"):
        init_weights(model, Normal(), 0, num_layers=2, overrides={"*.oproj.weight": Fill()})


# ---- dropout ----


STREAM = DropoutStream(seed=11, p=0.3, step=5)


def masks(group: TensorParallelGroup) -> dict[str, Tensor]:
    """Of ones, so that what comes back is the mask. Nine tokens; six query heads over 2 or 3 KV heads of 4 channels."""
    tokens, heads = Split.ceil_chunks(9, group.size), HeadSplit.of(9, 3, group.size)
    whole, query, kv = (
        torch.ones(9, 6),
        torch.ones(9, heads.query.size(group.rank), 4),
        torch.ones(9, heads.key_value.size(group.rank), 4),
    )
    return {
        "replicated": STREAM.replicated(whole, "embedding"),
        "token shard": STREAM.token_shard(whole[: tokens.size(group.rank)], "embedding", tokens, group),
        "query heads": STREAM.shard(query, "q", 1, heads.query, group),
        "kv heads": STREAM.shard(kv, "k", 1, heads.key_value, group),
        "partial": STREAM.partial(Partial(whole, group, "o_proj"), "embedding").value,
        "features": STREAM.shard(
            torch.ones(9, Split.even(7, group.size).size(group.rank)), "mlp", -1, Split.even(7, group.size), group
        ),
    }


@pytest.mark.parametrize("tp_size", (2, 4))
def test_masks_are_slices_of_the_unsharded_ones(tp_size: int) -> None:
    alone = masks(TensorParallelGroup.single())
    by_rank = run_ranks(tp_size, masks)
    heads = HeadSplit.of(9, 3, tp_size)
    splits = {
        "token shard": (0, Split.ceil_chunks(9, tp_size)),
        "query heads": (1, heads.query),
        "kv heads": (1, heads.key_value),
        "features": (1, Split.even(7, tp_size)),
    }
    for rank, found in enumerate(by_rank):
        assert torch.equal(found["replicated"], alone["replicated"]) and torch.equal(found["partial"], alone["partial"])
        for name, (dim, split) in splits.items():
            start, stop = split.ranges[rank]
            assert torch.equal(found[name], alone[name].narrow(dim, start, stop - start)), (name, rank)
    assert not torch.equal(by_rank[0]["query heads"][:, :2], by_rank[1]["query heads"][:, :2]), (
        "heads of two ranks have one mask"
    )
    assert not torch.equal(by_rank[0]["token shard"][:2], by_rank[1]["token shard"][:2])


def test_masks_differ_by_seed_step_site_and_replica_and_keep_the_mean() -> None:
    x = torch.ones(400, 500)
    first = STREAM.replicated(x, "a")
    values = first.unique()
    assert values.numel() == 2 and values[0] == 0 and math.isclose(float(values[1]), 1 / 0.7, rel_tol=1e-6)
    # 200,000 draws at p = 0.3: standard error 0.001
    assert abs(float((first == 0).double().mean()) - 0.3) < 4e-3
    others = [
        STREAM.replicated(x, "b"),
        STREAM.at(6).replicated(x, "a"),
        DropoutStream(12, 0.3, 5).replicated(x, "a"),
        DropoutStream(11, 0.3, 5, replica=1).replicated(x, "a"),
    ]
    for other in others:
        both = float(((first == 0) & (other == 0)).double().mean())
        assert abs(both - 0.09) < 3e-3, "two streams drop the same elements"
    assert torch.equal(first, STREAM.at(6).at(5).replicated(x, "a"))
    assert DropoutStream(0, 0.0).replicated(x, "a") is x


def test_dropout_refusals() -> None:
    group = TensorParallelGroup.single()
    for p in (-0.1, 1.0, float("nan")):
        with pytest.raises(UserError, match="must be at least 0 and below 1"):
            DropoutStream(0, p)
    with pytest.raises(
        LayoutError, match=r"dropout site: dimension 0 of \[3, 2\] should hold 4 of 4 elements on rank 0"
    ):
        STREAM.token_shard(torch.ones(3, 2), "site", Split.even(4, 1), group)
    with pytest.raises(LayoutError, match=r"the bias of o_proj is added after the sum and would not be dropped"):
        STREAM.partial(Partial(torch.ones(2, 2), group, "o_proj", torch.ones(2)), "site")


def with_dropout(model: CausalLM, stream: DropoutStream) -> None:
    """On every update and the embedding, before the sum."""
    for path, module in model.named_modules():
        if path.endswith(("self_attn", "mlp", "embed_tokens")):
            module.register_forward_hook(lambda _module, _inputs, update, path=path: stream.partial(update, path))


def gradients(
    group: TensorParallelGroup, name: str, sequence_parallel: str, checkpointed: bool
) -> list[tuple[Any, ...]]:
    model = sharded(
        config(name), group, random_weights(config(name)), dtype=torch.float64, sequence_parallel=sequence_parallel
    )
    with_dropout(model, STREAM)
    if checkpointed:
        checkpoint_layers(model.model.layers)
    logits = model.lm_head.gather(model(TokenBatch.prefill(prompts(3, longest=9)), NoCache()).local_logits)
    logits.backward(hostile_values(*logits.shape, seed=2))
    blocks = parameter_blocks(model)
    sync_gradients(blocks, group)
    return [(b.name, b.dim, b.globe, b.of(b.parameter.grad).clone()) for b in blocks if b.parameter.grad is not None]


def test_training_with_dropout_is_the_same_at_any_tp_size_and_recomputed() -> None:
    """With and without sequence parallelism and checkpointed layers: gradients equal those of one rank, to fp64 rounding."""
    alone = {name: value for name, _, _, value in gradients(TensorParallelGroup.single(), "llama", "off", False)}
    recomputed = {name: value for name, _, _, value in gradients(TensorParallelGroup.single(), "llama", "off", True)}
    assert all(torch.equal(value, recomputed[name]) for name, value in alone.items())
    for (sequence_parallel, checkpointed), size in zip(
        product(("off", "on"), (False, True)), (2, 3, 3, 2), strict=True
    ):
        for rank_gradients in run_ranks(size, gradients, "llama", sequence_parallel, checkpointed):
            for name, dim, (start, stop), value in rank_gradients:
                expected = alone[name].narrow(dim, start, stop - start)
                error = float((value - expected).norm() / expected.norm()) if expected.numel() else 0.0
                assert error < 1e-10, (size, sequence_parallel, checkpointed, name, error)
