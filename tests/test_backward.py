"""The whole model's backward pass is the unsharded one's, in fp64, and stays so over optimizer steps.

The twin is the oracle. Functions named check_* run on every rank.
"""

from itertools import product
from typing import Any

import pytest
import torch
from oracle import Oracle
from tiny_models import MODELS, config, prompts, random_weights, sharded
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tp_residual.model.attention_backend import NoCache, TokenBatch
from tp_residual.model.decoder import CausalLM, DecoderLayer
from tp_residual.parallel.blocks import ParameterBlock, parameter_blocks, sync_gradients
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.testing import (
    assert_equals_twin,
    expect_collectives,
    hostile_layouts,
    hostile_values,
    relative_error,
    run_ranks,
)

# fp64 rounding is 1e-16 an operation, and a gradient is a sum over some tens of tokens through two layers. A missing sum, or one too many,
# is wrong by a factor of tp in some block.
RTOL = 1e-10

BATCH = prompts(3, longest=9)
LAYOUTS = list(product(("off", "on"), ("reference", "library")))  # sequence parallelism, boundary


def logits_of(model: CausalLM, batch: list[list[int]] = BATCH) -> Tensor:
    return model.lm_head.gather(model(TokenBatch.prefill(batch), NoCache()).local_logits)


def build(name: str, group: TensorParallelGroup, **options: Any) -> tuple[CausalLM, Oracle]:
    weights = random_weights(config(name))
    return sharded(config(name), group, weights, dtype=torch.float64, **options), Oracle(config(name), weights)


def block_errors(blocks: list[ParameterBlock], oracle: Oracle) -> dict[tuple[str, tuple[int, int], bool], float]:
    """By block: the relative error of its gradient as one vector. A block without a gradient counts as zero."""
    references = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in oracle.named_parameters()}
    errors = {}
    for block in blocks:
        grad = block.parameter.grad
        value = torch.zeros_like(block.parameter) if grad is None else grad
        reference = block.of_full(references[block.name]).reshape(-1)
        key = block.name, block.globe, block.partial_gradient
        errors[key] = relative_error(block.of(value).reshape(-1), reference)
    return errors


# ---- everything at once, every layout ----


def check_equals_twin(group: TensorParallelGroup) -> None:
    """Logits, hidden states, every block's gradient, the embedding's among them, and grad_norm for p = 1, 2, inf."""

    def run(model: CausalLM, batch: list[list[int]]) -> tuple[Tensor, ...]:
        out = model(TokenBatch.prefill(batch), NoCache(), output_hidden_states=True)
        assert out.hidden_states is not None
        return model.lm_head.gather(out.local_logits), *out.hidden_states

    def run_twin(oracle: Oracle, batch: list[list[int]]) -> tuple[Tensor, ...]:
        out = oracle(batch)
        return out.logits, *out.hidden_states()

    for name in MODELS:
        for sequence_parallel, boundary in LAYOUTS:
            model, oracle = build(name, group, sequence_parallel=sequence_parallel, boundary=boundary)
            assert_equals_twin(group, model, oracle, [BATCH], run=run, run_twin=run_twin, rtol=RTOL)


@pytest.mark.parametrize(
    "tp_size", (1, 2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow))
)
def test_outputs_gradients_and_norms_equal_the_twin(tp_size: int) -> None:
    run_ranks(tp_size, check_equals_twin)


def check_collectives(group: TensorParallelGroup) -> None:
    boundaries = 2 * MODELS["llama"]["num_hidden_layers"] + 1
    for sequence_parallel in ("off", "on"):
        model, _ = build("llama", group, sequence_parallel=sequence_parallel)
        local_logits = model(TokenBatch.prefill(BATCH), NoCache()).local_logits
        cotangent = hostile_values(*local_logits.shape, seed=1, rank=group.rank)
        allowed = (
            {"all_reduce": boundaries}
            if sequence_parallel == "off"
            else {"reduce_scatter": boundaries, "all_gather": boundaries}
        )
        with expect_collectives(group, **allowed):
            local_logits.backward(cotangent)


def test_the_backward_pass_mirrors_the_forward_collectives() -> None:
    run_ranks(2, check_collectives)


# ---- incoming gradients ----


def check_hostile_gradients(group: TensorParallelGroup) -> None:
    for name, sequence_parallel in (("llama", "off"), ("qwen3", "on")):
        model, oracle = build(name, group, sequence_parallel=sequence_parallel)
        blocks = parameter_blocks(model)
        logits = logits_of(model)
        reference = oracle(BATCH).logits
        for layout, gradient in hostile_layouts(hostile_values(*reference.shape, seed=3)).items():
            model.zero_grad()
            oracle.zero_grad()
            kept = gradient.clone()
            logits.backward(gradient, retain_graph=True)
            assert torch.equal(gradient, kept), f"{layout} was written to"
            reference.backward(gradient.contiguous(), retain_graph=True)
            sync_gradients(blocks, group)
            assert max(block_errors(blocks, oracle).values()) < RTOL, (name, layout)


@pytest.mark.parametrize("tp_size", (2, 3))
def test_incoming_gradients_of_any_memory_layout(tp_size: int) -> None:
    run_ranks(tp_size, check_hostile_gradients)


# ---- the sync is needed, and only where it is declared ----


def check_sync_matters(group: TensorParallelGroup) -> None:
    for name, sequence_parallel in product(("llama", "qwen3", "llama_biased"), ("off", "on")):
        model, oracle = build(name, group, sequence_parallel=sequence_parallel)
        blocks = parameter_blocks(model)
        gradient = hostile_values(sum(map(len, BATCH)), 101, seed=4)
        logits_of(model).backward(gradient)
        oracle(BATCH).logits.backward(gradient)
        before = block_errors(blocks, oracle)
        sync_gradients(blocks, group)
        after = block_errors(blocks, oracle)
        assert max(after.values()) < RTOL
        for key, error in before.items():
            if key[2]:
                assert error > 1e-3, f"{key}: declared partial, yet complete before the sync"
            else:
                assert error < RTOL, f"{key}: declared complete"
        norms = {key[2] for key in before if key[0].endswith("layernorm.weight")}
        assert norms == {sequence_parallel == "on"}
        assert all(key[2] for key in before if key[0].endswith(("q_norm.weight", "k_norm.weight")))


@pytest.mark.parametrize("tp_size", (2, pytest.param(4, marks=pytest.mark.slow)))
def test_gradients_declared_partial_are_wrong_until_they_are_summed(tp_size: int) -> None:
    run_ranks(tp_size, check_sync_matters)


# ---- activation checkpointing ----


class CheckpointedLayer(torch.nn.Module):
    def __init__(self, layer: DecoderLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *arguments: Any) -> Any:
        return checkpoint(self.layer, *arguments, use_reentrant=False)


def check_checkpointing(group: TensorParallelGroup) -> None:
    for name, (sequence_parallel, boundary) in product(("llama", "qwen3"), LAYOUTS):
        gradients: list[list[Tensor | None]] = []
        collectives: list[int] = []
        for wrap in (False, True):
            model, _ = build(name, group, sequence_parallel=sequence_parallel, boundary=boundary)
            parameters = list(model.parameters())
            if wrap:
                model.model.layers = torch.nn.ModuleList(CheckpointedLayer(layer) for layer in model.model.layers)
            group.counters.reset()
            logits = logits_of(model)
            logits.backward(hostile_values(*logits.shape, seed=5))
            gradients.append([parameter.grad for parameter in parameters])
            collectives.append(sum(group.counters.calls.values()))
        assert collectives[1] > collectives[0], "nothing was recomputed"
        for first, second in zip(*gradients, strict=True):
            assert first is not None and torch.equal(first, second)


def test_checkpointed_layers_give_bitwise_the_same_gradients() -> None:
    run_ranks(2, check_checkpointing)


# ---- optimizer steps ----


def check_adamw(
    group: TensorParallelGroup, cases: list[tuple[str, str]]
) -> list[tuple[str, str, tuple[int, int], bytes]]:
    """In fp64 three steps equal the twin's; in fp32 each block after three steps is returned as bytes."""
    held: list[tuple[str, str, tuple[int, int], bytes]] = []
    for (name, sequence_parallel), dtype in product(cases, (torch.float64, torch.float32)):
        weights = random_weights(config(name), dtype=dtype)
        model = sharded(config(name), group, weights, dtype=dtype, sequence_parallel=sequence_parallel)
        oracle = Oracle(config(name), weights, dtype)
        blocks = parameter_blocks(model)
        optimizers = [
            torch.optim.AdamW(module.parameters(), lr=0.05, weight_decay=0.1, foreach=True)
            for module in (model, oracle)
        ]
        for step in range(3):
            batch = prompts(3, seed=step, longest=9)
            targets = torch.tensor([token for prompt in batch for token in prompt])[1:, None]
            for logits in (logits_of(model, batch), oracle(batch).logits):
                logits.log_softmax(-1)[:-1].gather(1, targets).mean().neg().backward()
            sync_gradients(blocks, group)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        trained = dict(oracle.named_parameters())
        for block in blocks:
            value, reference = block.of(block.parameter.detach()), block.of_full(trained[block.name])
            assert not torch.equal(value, block.of_full(weights[block.name])), block.name
            if dtype == torch.float64:
                # AdamW makes a whole step of a gradient of almost nothing, so elements may part by more than rounding
                assert torch.allclose(value, reference, rtol=0, atol=1e-6), block.name
            else:
                held.append((f"{name} {sequence_parallel}", block.name, block.globe, value.numpy().tobytes()))
    return held


@pytest.mark.parametrize(
    ("tp_size", "cases"),
    [
        (2, [("llama", "off"), ("llama_biased", "on")]),
        pytest.param(3, [("qwen3", "off"), ("qwen3", "on"), ("qwen2", "on")], marks=pytest.mark.slow),
    ],
)
def test_three_adamw_steps_keep_replicas_equal(tp_size: int, cases: list[tuple[str, str]]) -> None:
    copies: dict[tuple[str, str, tuple[int, int]], list[bytes]] = {}
    for held in run_ranks(tp_size, check_adamw, cases):
        for case, name, globe, content in held:
            copies.setdefault((case, name, globe), []).append(content)
    assert max(map(len, copies.values())) == tp_size
    assert [key for key, contents in copies.items() if len(set(contents)) > 1] == []


# ---- frozen parameters ----


def check_frozen(group: TensorParallelGroup, name: str, vocab_size: int = 101) -> None:
    """Each parameter frozen alone, then everything but it: the others' gradients are the twin's, its own is none."""
    changed = config(name, vocab_size=vocab_size, num_hidden_layers=1)
    weights = random_weights(changed)
    batch = [[token % vocab_size for token in prompt] for prompt in BATCH]
    oracle = Oracle(changed, weights)
    gradient = hostile_values(sum(map(len, batch)), vocab_size, seed=6)
    oracle(batch).logits.backward(gradient)
    for sequence_parallel in ("off", "on"):
        model = sharded(changed, group, weights, dtype=torch.float64, sequence_parallel=sequence_parallel)
        blocks = parameter_blocks(model)
        for path, chosen in dict(model.named_parameters()).items():
            for chosen_trains in (False, True):
                for parameter in model.parameters():
                    parameter.requires_grad_((parameter is chosen) == chosen_trains)
                model.zero_grad()
                logits_of(model, batch).backward(gradient)
                sync_gradients(blocks, group)
                trained = [block for block in blocks if block.parameter.requires_grad]
                assert max(block_errors(trained, oracle).values()) < RTOL, (path, chosen_trains)
                assert all(block.parameter.grad is None for block in blocks if not block.parameter.requires_grad)


@pytest.mark.parametrize("name", ("llama", pytest.param("qwen3", marks=pytest.mark.slow)))
def test_any_parameter_may_be_frozen_alone_or_train_alone(name: str) -> None:
    run_ranks(2, check_frozen, name)


@pytest.mark.slow
def test_frozen_parameters_with_ranks_that_hold_no_vocabulary() -> None:
    """A rank without a row of the embedding has nothing to differentiate there, and still takes part in the collectives."""
    run_ranks(4, check_frozen, "llama", 3, timeout_s=40, collective_timeout_s=10)
