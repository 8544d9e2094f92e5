"""From backward to step: buckets, sums that cannot be forgotten, clipping and NaN like the unsharded twin's, and DDP around it all.

Functions named check_* run on every rank.
"""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import Oracle
from test_backward import block_errors, build, logits_of
from test_blocks import Layer, Replicated, global_tensors, set_gradients
from tiny_models import config, prompts, random_weights, sharded
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tp_residual.errors import LayoutError, TrainingError, UserError
from tp_residual.model.attention_backend import NoCache, TokenBatch
from tp_residual.parallel.blocks import grad_norm, parameter_blocks, sync_gradients
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.testing import expect_collectives, hostile_values, hostile_weights_, run_ranks
from tp_residual.training import (
    attach,
    clip_grad_norm,
    next_token_targets,
    require_finite,
    vocab_parallel_cross_entropy,
)

INFINITY = float("inf")

# ---- buckets ----


def check_buckets(group: TensorParallelGroup) -> None:
    """Any limit gives the same sums, cuts through tensors included; the number of collectives follows from it."""
    for bucket_bytes in (40, 1000, 10**9):
        layer = Layer(group)
        hostile_weights_(layer, seed=0)
        summands = [global_tensors(layer, group, seed=10 + rank) for rank in range(group.size)]
        nan = float("nan")  # neither gradient is one run of memory
        layer.input_layernorm.weight.grad = torch.full((12,), nan, dtype=torch.float64)[::2]
        layer.qkv_proj.weight.grad = torch.full_like(layer.qkv_proj.weight.t(), nan).contiguous().t()
        truth = set_gradients(layer, group, summands)
        blocks = parameter_blocks(layer)
        everybody = tuple(range(group.size))
        elements = sum(
            block.of(block.parameter).numel()
            for block in blocks
            if block.partial_gradient and block.holders == everybody
        )
        with expect_collectives(group, all_reduce=-(-elements // max(1, bucket_bytes // 8))):
            sync_gradients(blocks, group, bucket_bytes=bucket_bytes)
        for block, expected in truth.items():
            found = block.of(block.parameter.grad)
            assert torch.allclose(found, expected, rtol=1e-13, atol=0), f"{block.name}{block.globe} at {bucket_bytes}"


def check_fp32_beside_fp64(group: TensorParallelGroup) -> None:
    """fp32 gradients are summed in fp32 though fp64 ones exist, and fp64 ones in fp64."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = Replicated(group, True), Replicated(group, True)
            self.narrow.weight = nn.Parameter(self.narrow.weight.float())

    mixed = Mixed()
    mixed.wide.weight.grad = torch.full_like(mixed.wide.weight, 1.0 if group.rank == 0 else 2.0**-40)
    mixed.narrow.weight.grad = torch.full_like(mixed.narrow.weight, 1.0 if group.rank == 0 else 2.0**-20)
    with expect_collectives(group, all_reduce=2):
        sync_gradients(parameter_blocks(mixed), group)
    assert (mixed.wide.weight.grad == 1 + (group.size - 1) * 2.0**-40).all()
    assert (mixed.narrow.weight.grad == 1 + (group.size - 1) * 2.0**-20).all()


def test_buckets_of_any_size_hold_the_same_sums() -> None:
    run_ranks(2, check_buckets, checked=False)
    run_ranks(2, check_fp32_beside_fp64)


# ---- a forgotten sum ----


class Step:
    """A tiny model with q/k norms (partial with and without sequence parallelism), its optimizer and what one step does."""

    def __init__(self, group: TensorParallelGroup, sequence_parallel: str, **options: Any) -> None:
        self.group = group
        self.model, _ = build("qwen3", group, sequence_parallel=sequence_parallel)
        self.blocks = parameter_blocks(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, **options)
        self.guard = attach(self.model, self.optimizer, group)

    def backward(self) -> None:
        logits = logits_of(self.model)
        logits.backward(hostile_values(*logits.shape, seed=1))

    def sync(self) -> None:
        sync_gradients(self.blocks, self.group)


def check_forgotten(group: TensorParallelGroup) -> None:
    for sequence_parallel in ("off", "on"):
        step = Step(group, sequence_parallel, foreach=True)
        before = [parameter.detach().clone() for parameter in step.model.parameters()]
        step.backward()
        with pytest.raises(
            LayoutError, match=r"optimizer\.step\(\): the gradient of model\.layers\.0\..* call sync_gradients"
        ):
            step.optimizer.step()
        assert all(map(torch.equal, before, step.model.parameters())), "it trained before it raised"
        step.sync()
        step.optimizer.step()
        # the next step's gradients are new ones
        step.optimizer.zero_grad()
        step.backward()
        with pytest.raises(LayoutError, match="summand"):
            step.optimizer.step()
        # several micro-batches, then the sum
        step.backward()
        step.sync()
        clip_grad_norm(step.blocks, group, 0.1)
        step.optimizer.step()


def test_a_step_without_the_sum_raises() -> None:
    run_ranks(2, check_forgotten)
    run_ranks(3, check_forgotten, checked=False)


def check_accumulation(group: TensorParallelGroup) -> None:
    step = Step(group, "off", fused=True)
    # one more micro-batch after the sum
    step.backward()
    step.sync()
    step.backward()
    with pytest.raises(LayoutError, match="accumulated onto its sum"):
        step.optimizer.step()
    with pytest.raises(LayoutError, match=r"sync_gradients\(\): .* was summed, and then more was accumulated"):
        step.sync()
    # twice the sum
    step.optimizer.zero_grad()
    step.backward()
    step.sync()
    with pytest.raises(LayoutError, match="has been summed already"):
        step.sync()
    step.optimizer.step()
    # zeroed in place, a gradient is a new one
    step.optimizer.zero_grad(set_to_none=False)
    step.backward()
    with pytest.raises(LayoutError, match="summand"):
        step.optimizer.step()
    step.sync()
    step.optimizer.step()
    # a gradient by hand has not been summed; none at all needs no sum
    step.optimizer.zero_grad()
    step.optimizer.step()
    for parameter in step.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(LayoutError, match="summand"):
        step.optimizer.step()
    # after remove() nobody looks
    step.guard.remove()
    step.backward()
    step.optimizer.step()


def check_one_rank_alone(group: TensorParallelGroup) -> None:
    """One rank's fault is everybody's error, in checked mode, with its rank."""
    step = Step(group, "off")
    step.backward()
    step.sync()
    if group.rank == 1:
        norm = step.model.get_parameter("model.layers.0.self_attn.q_norm.weight")
        norm.grad = torch.ones_like(norm)
    with pytest.raises(
        LayoutError, match=r"rank 1 of 2: optimizer\.step\(\): the gradient of model\.layers\.0\.self_attn\.q_norm"
    ):
        step.optimizer.step()


def test_accumulation_after_the_sum_and_a_second_sum_raise() -> None:
    run_ranks(2, check_accumulation)
    run_ranks(2, check_one_rank_alone)


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    group = TensorParallelGroup.single()
    layer = Layer(group)
    optimizer = torch.optim.SGD([*layer.parameters(), nn.Parameter(torch.ones(3))])
    with pytest.raises(LayoutError, match=r"shape \[3\] in the optimizer's group 0 belongs to no block"):
        attach(layer, optimizer, group)


# ---- clipping ----


def check_clipping(group: TensorParallelGroup) -> None:
    for (name, sequence_parallel), p in product((("qwen3", "on"), ("llama_biased", "off")), (1.0, 2.0, INFINITY)):
        model, oracle = build(name, group, sequence_parallel=sequence_parallel)
        blocks = parameter_blocks(model)
        for module, logits in ((model, logits_of(model)), (oracle, oracle(prompts(3, longest=9)).logits)):
            module.zero_grad()
            logits.backward(hostile_values(*logits.shape, seed=4))
        sync_gradients(blocks, group)
        whole = float(grad_norm(blocks, group, p))
        for max_norm in (10 * whole, whole / 7):  # first not clipped, then clipped
            expected = nn.utils.clip_grad_norm_(oracle.parameters(), max_norm, norm_type=p)
            found = clip_grad_norm(blocks, group, max_norm, p)
            assert torch.allclose(found, expected, rtol=1e-10), (name, p, found, expected)
            assert max(block_errors(blocks, oracle).values()) < 1e-10, (name, p)
    with pytest.raises(UserError, match="max_norm=0 must be positive"):
        clip_grad_norm(blocks, group, 0)


@pytest.mark.parametrize("tp_size", (2, 4))
def test_clipped_gradients_are_the_twins(tp_size: int) -> None:
    run_ranks(tp_size, check_clipping)


def check_bf16_norm(group: TensorParallelGroup) -> float:
    model = sharded(config("llama"), group, random_weights(config("llama")), dtype=torch.bfloat16)
    blocks = parameter_blocks(model)
    for block in blocks:
        if block.parameter.grad is None:
            block.parameter.grad = torch.empty_like(block.parameter)
        full = hostile_values(*block.global_shape, seed=sum(map(ord, block.name)))
        block.of(block.parameter.grad).copy_(block.of_full(full))
    return float(clip_grad_norm(blocks, group, 1.0))


def test_the_norm_of_bf16_gradients_does_not_depend_on_how_they_are_split() -> None:
    alone, shared = run_ranks(1, check_bf16_norm)[0], run_ranks(4, check_bf16_norm)
    assert len(set(shared)) == 1
    # fp64 inside, one rounding to fp32; a norm accumulated in bf16 is off by 1e-3
    assert abs(shared[0] / alone - 1) < 2e-7


# ---- what is not finite ----


def check_not_finite(group: TensorParallelGroup) -> list[str]:
    """One bad element, on each rank and of each kind in turn: nothing is scaled, and the text is everybody's."""
    texts = []
    for bad_rank, value, p in product(range(group.size), (float("nan"), INFINITY), (2.0, INFINITY)):
        layer = Layer(group)
        hostile_weights_(layer, seed=0)
        set_gradients(layer, group, [global_tensors(layer, group, seed=10 + rank) for rank in range(group.size)])
        blocks = parameter_blocks(layer)
        require_finite(grad_norm(blocks, group), blocks, group, step=1)
        if group.rank == bad_rank:
            layer.o_proj.weight.grad[2, 1] = value
            layer.final_norm.weight.grad[0] = value
        kept = [parameter.grad.clone() for parameter in layer.parameters()]
        with pytest.raises(TrainingError) as error:
            require_finite(clip_grad_norm(blocks, group, 1.0, p), blocks, group, step=7)
        assert all(
            torch.equal(a.nan_to_num(), b.grad.nan_to_num()) for a, b in zip(kept, layer.parameters(), strict=True)
        )
        kind = "NaN" if value != value else "infinite"
        where = f"{kind} on rank {bad_rank} of {group.size}"
        expected = f"step 7: the gradient of o_proj.weight is {where}; the last of 2 such tensors: final_norm.weight is {where}"
        assert str(error.value) == expected
        texts.append(str(error.value))
    big = nn.Parameter(torch.ones(2, dtype=torch.float64))
    layer.final_norm.weight = big
    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, 1e200)  # squares overflow, the gradients do not
    blocks = parameter_blocks(layer)
    with pytest.raises(TrainingError, match="step 3: the gradient norm is inf, though every gradient is finite"):
        require_finite(clip_grad_norm(blocks, group, 1.0), blocks, group, step=3)
    return texts


def test_a_gradient_that_is_not_finite_is_named_by_all_ranks() -> None:
    texts = run_ranks(2, check_not_finite)
    assert texts[0] == texts[1]
    run_ranks(1, check_not_finite)


# ---- data parallel x tensor parallel ----


class LossOf(nn.Module):
    """What DDP wraps: its forward is the whole of model and loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: list[list[int]]) -> torch.Tensor:
        tokens = TokenBatch.prefill(batch)
        logits = self.model(tokens, NoCache()).local_logits
        head = self.model.lm_head
        return vocab_parallel_cross_entropy(logits, next_token_targets(tokens), head.split, head.group, reduction="sum")


def check_grid(world: TensorParallelGroup) -> None:
    """Ranks 0 1 / 2 3 share a model, 0 2 / 1 3 a shard of it. Replicas see different sequences, of different numbers of tokens."""
    size, tp_size = world.size, world.size // 2
    tensor_groups = [dist.new_group(list(range(first, first + tp_size))) for first in (0, tp_size)]
    data_groups = [dist.new_group([shard, shard + tp_size]) for shard in range(tp_size)]
    replica, shard = divmod(world.rank, tp_size)
    assert size == 4
    group = TensorParallelGroup(tensor_groups[replica], timeout_s=30, checked=True, transport="torch")
    data = data_groups[shard]
    batches = [[prompts(3, seed=number, longest=7)[:2], prompts(3, seed=number, longest=9)[2:]] for number in range(3)]
    for name, sequence_parallel in (("qwen3", "on"), ("llama", "off")):
        weights = random_weights(config(name))
        model = sharded(config(name), group, weights, dtype=torch.float64, sequence_parallel=sequence_parallel)
        oracle = Oracle(config(name), weights)
        parallel = DistributedDataParallel(LossOf(model), process_group=data)
        blocks = parameter_blocks(model)
        optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3) for module in (model, oracle)]
        attach(model, optimizers[0], group)
        for step, shares in enumerate(batches):
            count = sum(len(prompt) - 1 for share in shares for prompt in share)
            # DDP averages over replicas: times their number, over the tokens of all
            (parallel(shares[replica]) * len(shares) / count).backward()
            sync_gradients(blocks, group)
            whole = [prompt for share in shares for prompt in share]
            targets = torch.tensor([token for prompt in whole for token in (*prompt[1:], -100)])
            nn.functional.cross_entropy(oracle(whole).logits, targets).backward()
            if step == 0:
                assert max(block_errors(blocks, oracle).values()) < 1e-10, name
            expected = nn.utils.clip_grad_norm_(oracle.parameters(), 0.5)
            assert torch.allclose(clip_grad_norm(blocks, group, 0.5), expected, rtol=1e-7), name
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        trained = dict(oracle.named_parameters())
        for block in (
            blocks
        ):  # AdamW divides by roots of squares: a relative error of 1e-10 in a gradient near eps grows by as much
            assert torch.allclose(
                block.of(block.parameter), block.of_full(trained[block.name]), rtol=1e-6, atol=1e-8
            ), block.name
    group.close()


def test_a_2_by_2_grid_with_ddp_equals_the_twin() -> None:
    run_ranks(4, check_grid, timeout_s=90)
