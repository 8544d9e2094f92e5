"""Vocabulary-parallel cross-entropy is torch's own on the whole logits, in fp64; chunked, its gradients are the unsharded head's.

Functions named check_* run on every rank.
"""

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import Oracle
from test_backward import block_errors
from tiny_models import config, prompts, random_weights, sharded
from torch import Tensor

from tp_residual.errors import LayoutError, UserError
from tp_residual.model.attention_backend import NoCache, TokenBatch
from tp_residual.parallel.blocks import parameter_blocks, sync_gradients
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.splits import Split
from tp_residual.parallel.vocabulary import VocabParallelHead
from tp_residual.testing import expect_collectives, hostile_layouts, hostile_values, relative_error, run_ranks
from tp_residual.training import (
    auxiliary_cross_entropy,
    chunked_cross_entropy,
    final_hidden,
    next_token_targets,
    vocab_parallel_cross_entropy,
)

# fp64 rounding through one row of logits; probabilities are exp(logit - normaliser), with logits of some hundreds: 1e-13, and at most 1
RTOL, ATOL = 1e-12, 1e-12

OPTIONS: list[dict[str, float]] = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 0.01},
    {"label_smoothing": 0.3, "z_loss": 0.1},
]


def torch_loss(logits: Tensor, targets: Tensor, reduction: str = "mean", z_loss: float = 0.0, **options: Any) -> Tensor:
    """Plain torch on the whole rows."""
    losses = F.cross_entropy(logits, targets, reduction="none", **options)
    losses = losses + z_loss * (logits.logsumexp(-1) ** 2) * (targets != -100)
    if reduction == "none":
        return losses
    return losses.sum() / (targets != -100).sum() if reduction == "mean" else losses.sum()


def some_targets(rows: int, vocab: int) -> Tensor:
    """On each rank in turn, the first and the last id among them, and two ignored."""
    targets = torch.arange(rows) * 7 % vocab
    targets[0], targets[-1] = vocab - 1, 0
    targets[2 % rows] = targets[rows // 2] = -100
    return targets


def close(found: Tensor, expected: Tensor) -> bool:
    return bool(torch.allclose(found, expected, rtol=RTOL, atol=ATOL))


def check_against_torch(group: TensorParallelGroup) -> None:
    for vocab, options, reduction in product((101, 3), OPTIONS, ("mean", "sum", "none")):
        split = Split.even(vocab, group.size)  # of 3 over 4 ranks one holds none
        start, stop = split.ranges[group.rank]
        logits = hostile_values(11, vocab, seed=vocab)
        logits[1] *= 300  # log-probabilities of -200 and below
        targets = some_targets(11, vocab)
        whole = logits.clone().requires_grad_()
        local = logits[:, start:stop].clone().requires_grad_()
        kept = local.detach().clone()
        with expect_collectives(group, all_gather=int(group.size > 1)):
            loss = vocab_parallel_cross_entropy(local, targets, split, group, reduction=reduction, **options)  # type: ignore[arg-type]
        expected = torch_loss(whole, targets, reduction, **options)
        assert close(loss, expected), (vocab, options, reduction, loss, expected)
        cotangent = hostile_layouts(hostile_values(*loss.shape, seed=3))["strided"] if loss.dim() else torch.tensor(1.7)
        cotangent = cotangent.to(loss.dtype)
        expected.backward(cotangent.clone())
        with expect_collectives(group):
            loss.backward(cotangent)
        assert local.grad is not None and whole.grad is not None
        assert close(local.grad, whole.grad[:, start:stop]), (vocab, options, reduction)
        assert torch.equal(local.detach(), kept), "the logits were written to"


@pytest.mark.parametrize("tp_size", (1, 2, 4))
def test_loss_and_gradient_are_torchs(tp_size: int) -> None:
    run_ranks(tp_size, check_against_torch, checked=False)


def check_second_derivatives(group: TensorParallelGroup) -> None:
    """The gradient's gradient, with a cotangent that differs everywhere: wrong by what other ranks' columns contribute, if not summed."""
    vocab, rows = 7, 4
    split, targets = Split.even(vocab, group.size), torch.tensor([6, 0, -100, 3])
    start, stop = split.ranges[group.rank]
    logits, direction = hostile_values(rows, vocab, seed=1), hostile_values(rows, vocab, seed=2)
    whole, local = logits.clone().requires_grad_(), logits[:, start:stop].clone().requires_grad_()
    options: dict[str, Any] = {"label_smoothing": 0.2, "z_loss": 0.3}
    (first,) = torch.autograd.grad(torch_loss(whole, targets, **options), whole, create_graph=True)
    (expected,) = torch.autograd.grad(first, whole, direction)
    loss = vocab_parallel_cross_entropy(local, targets, split, group, **options)
    (first,) = torch.autograd.grad(loss, local, create_graph=True)
    (found,) = torch.autograd.grad(first, local, direction[:, start:stop])
    assert close(found, expected[:, start:stop])


def test_second_derivatives_are_right() -> None:
    run_ranks(2, check_second_derivatives)


def check_edges(group: TensorParallelGroup) -> None:
    split = Split.even(5, group.size)
    start, stop = split.ranges[group.rank]
    # all ignored: nothing, and not NaN
    local = hostile_values(3, 5, seed=1)[:, start:stop].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(local, torch.full((3,), -100), split, group, label_smoothing=0.1)
    loss.backward()
    assert loss == 0 and local.grad is not None and not local.grad.any()
    # no rows at all
    assert vocab_parallel_cross_entropy(local[:0], torch.zeros(0, dtype=torch.long), split, group) == 0
    # a NaN or an infinity on any rank reaches all
    for bad, value in product(range(5), (float("nan"), float("inf"))):
        logits = hostile_values(2, 5, seed=1)
        logits[0, bad] = value
        losses = vocab_parallel_cross_entropy(
            logits[:, start:stop], torch.tensor([1, 2]), split, group, reduction="none"
        )
        assert losses[0].isnan() and losses[1].isfinite(), (bad, losses)
    # columns of -inf, a whole rank's too: masked ids take no part
    logits = hostile_values(2, 5, seed=1)
    logits[:, :3] = -torch.inf
    found = vocab_parallel_cross_entropy(logits[:, start:stop], torch.tensor([3, 4]), split, group)
    assert close(found, F.cross_entropy(logits, torch.tensor([3, 4])))
    # 16-bit logits: fp32 arithmetic, gradients in their own dtype
    half = hostile_values(4, 5, seed=2).bfloat16()
    whole, local = half.float().requires_grad_(), half[:, start:stop].clone().requires_grad_()
    targets = torch.tensor([4, 0, 1, 2])
    loss, expected = vocab_parallel_cross_entropy(local, targets, split, group), F.cross_entropy(whole, targets)
    loss.backward()
    expected.backward()
    assert loss.dtype == torch.float32 and torch.allclose(loss, expected, rtol=1e-6)
    assert local.grad is not None and whole.grad is not None and local.grad.dtype == torch.bfloat16
    assert (
        torch.equal(local.grad, whole.grad[:, start:stop].bfloat16())
        or relative_error(local.grad, whole.grad[:, start:stop]) < 5e-3
    )


@pytest.mark.parametrize("tp_size", (1, 4))
def test_ignored_rows_infinities_and_16_bit_logits(tp_size: int) -> None:
    run_ranks(tp_size, check_edges)


def check_refusals(group: TensorParallelGroup) -> None:
    """The same words on every rank, before any collective."""
    split = Split.even(5, group.size)
    start, stop = split.ranges[group.rank]
    logits = hostile_values(3, 5, seed=1)
    local, targets = logits[:, start:stop], torch.tensor([0, 4, 2])
    head = VocabParallelHead(split, 4, group, dtype=torch.float64)
    x = hostile_values(3, 4, seed=2)
    with expect_collectives(group):
        for wrong in (5, -1):
            bad = torch.tensor([0, wrong, 2])
            for call in (
                lambda bad=bad: vocab_parallel_cross_entropy(local, bad, split, group),
                lambda bad=bad: chunked_cross_entropy(x, head, bad),
            ):
                with pytest.raises(
                    UserError, match=rf"target {wrong} in row 1 is outside the vocabulary of 5 ids; use 0 to 4"
                ):
                    call()
        with pytest.raises(LayoutError, match="logits are not gathered before the loss"):
            vocab_parallel_cross_entropy(logits, targets, split, group)
        with pytest.raises(UserError, match=r"label_smoothing=1\.5"):
            vocab_parallel_cross_entropy(local, targets, split, group, label_smoothing=1.5)
        with pytest.raises(UserError, match="chunk_tokens=0"):
            chunked_cross_entropy(x, head, targets, chunk_tokens=0)
        with pytest.raises(UserError, match="reduction='none'"):
            chunked_cross_entropy(x, head, targets, reduction="none")
        with pytest.raises(LayoutError, match="2 rows of hidden states with 3 targets"):
            chunked_cross_entropy(x[:2], head, targets)


def test_refusals() -> None:
    run_ranks(2, check_refusals)


# ---- chunks ----


def check_chunks(group: TensorParallelGroup) -> None:
    for vocab, chunk_tokens, options in product((13, 2), (1, 4, 100), OPTIONS[-1:]):
        split = Split.even(vocab, group.size)
        start, stop = split.ranges[group.rank]
        rows = 9
        head = VocabParallelHead(split, 6, group, dtype=torch.float64)
        weight = hostile_values(vocab, 6, seed=4).requires_grad_()
        with torch.no_grad():
            head.weight.copy_(weight[start:stop])
        x, targets = hostile_values(rows, 6, seed=5).requires_grad_(), some_targets(rows, vocab)
        twin_x = x.detach().clone().requires_grad_()
        with expect_collectives(group, all_gather=-(-rows // chunk_tokens) if group.size > 1 else 0):
            loss = chunked_cross_entropy(x, head, targets, chunk_tokens=chunk_tokens, **options)  # type: ignore[arg-type]
        expected = torch_loss(twin_x @ weight.T, targets, **options)
        assert close(loss, expected)
        with expect_collectives(group):
            (2.5 * loss).backward()
        (2.5 * expected).backward()
        assert (
            head.weight.grad is not None and weight.grad is not None and x.grad is not None and twin_x.grad is not None
        )
        assert close(head.weight.grad, weight.grad[start:stop])
        whole = x.grad if group.size == 1 else group.run("all_reduce", "test", x.grad, lambda t, v: t.all_reduce(v))
        assert close(whole, twin_x.grad), "a column input's gradients are summands"
        with torch.no_grad():
            assert close(chunked_cross_entropy(x, head, targets, chunk_tokens=chunk_tokens, **options), expected)  # type: ignore[arg-type]
    # only what is asked for
    head.weight.requires_grad_(False)
    x.grad = None
    chunked_cross_entropy(x, head, targets).backward()
    assert x.grad is not None
    head.weight.requires_grad_(True)
    head.weight.grad = None
    chunked_cross_entropy(x.detach(), head, targets).backward()
    assert head.weight.grad is not None


@pytest.mark.parametrize("tp_size", (1, 3))
def test_chunked_gradients_are_the_unsharded_heads(tp_size: int) -> None:
    run_ranks(tp_size, check_chunks, checked=False)


class Widest(torch.utils._python_dispatch.TorchDispatchMode):
    """The most elements of any floating tensor made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.elements = max(self.elements, tensor.numel())
        return out


def test_logits_exist_a_chunk_at_a_time() -> None:
    group, rows, vocab, hidden, chunk = TensorParallelGroup.single(), 64, 50, 3, 4
    head = VocabParallelHead(Split.even(vocab, 1), hidden, group, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(hostile_values(vocab, hidden, seed=1))
    x, targets = hostile_values(rows, hidden, seed=2).requires_grad_(), some_targets(rows, vocab)
    with Widest() as chunked:
        chunked_cross_entropy(x, head, targets, chunk_tokens=chunk).backward()
    assert chunked.elements == max(chunk * vocab, rows * hidden)
    with Widest() as whole:
        vocab_parallel_cross_entropy(head(x), targets, head.split, group).backward()
    assert whole.elements == rows * vocab


# ---- with the model ----


def check_model(group: TensorParallelGroup, names: list[str]) -> None:
    """Loss, auxiliary losses at x_0 and x_1, and every block's gradient, SP on and off, tied and untied heads."""
    batch = prompts(3, longest=9)
    tokens = TokenBatch.prefill(batch)
    targets = next_token_targets(tokens)
    assert targets.tolist()[:9] == [*batch[0][1:], -100] and targets[9] == -100
    weights = {0: 0.5, 1: 0.25}
    for name, sequence_parallel in product(names, ("off", "on")):
        full = random_weights(config(name))
        model = sharded(config(name), group, full, dtype=torch.float64, sequence_parallel=sequence_parallel)
        oracle = Oracle(config(name), full)
        hidden, states = final_hidden(model, tokens, NoCache(), output_hidden_states=True)
        assert states is not None
        options: dict[str, Any] = {"chunk_tokens": 5, "label_smoothing": 0.1}
        loss = chunked_cross_entropy(hidden, model.lm_head, targets, **options)
        norm = model.model.norm
        assert norm is not None
        loss = loss + auxiliary_cross_entropy(dict(enumerate(states)), weights, norm, model.lm_head, targets, **options)
        loss.backward()

        out = oracle(batch)
        head = oracle.get_parameter(
            "model.embed_tokens.weight" if config(name).tie_word_embeddings else "lm_head.weight"
        )
        expected = torch_loss(out.logits, targets, label_smoothing=0.1)
        for layer, weight in weights.items():
            logits = oracle.norm(out.hidden_states()[layer], "model.norm") @ head.T
            expected = expected + weight * torch_loss(logits, targets, label_smoothing=0.1)
        expected.backward()
        assert torch.allclose(loss, expected, rtol=1e-11)
        blocks = parameter_blocks(model)
        sync_gradients(blocks, group)
        worst = max(block_errors(blocks, oracle).items(), key=lambda item: item[1])
        assert worst[1] < 1e-10, (name, sequence_parallel, worst)


@pytest.mark.parametrize(("tp_size", "names"), [(2, ["llama", "llama_biased"]), (3, ["qwen3"])])
def test_chunked_and_auxiliary_losses_of_a_model_equal_the_twins(tp_size: int, names: list[str]) -> None:
    run_ranks(tp_size, check_model, names)


def test_auxiliary_losses_need_their_states() -> None:
    group = TensorParallelGroup.single()
    model = sharded(config("llama"), group, random_weights(config("llama")), dtype=torch.float64)
    norm = model.model.norm
    assert norm is not None
    with pytest.raises(UserError, match=r"layers \[7\], but there are states of \[0\] only"):
        auxiliary_cross_entropy({0: hostile_values(2, 45, seed=1)}, {7: 1.0}, norm, model.lm_head, torch.tensor([1, 2]))
