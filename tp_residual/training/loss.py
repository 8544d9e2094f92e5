"""Cross-entropy over a vocabulary that no rank holds whole: from local logits, and chunk by chunk so that all logits never exist.

Everything a loss needs of a row is its log-normaliser, its target's logit and, for label smoothing, the sum of its logits. One
all-gather brings each rank's share of three numbers a row (four with label smoothing); the rest is arithmetic on `[rows]` that all ranks
do alike. The loss is invariant, and the gradient of a rank's logits needs no collective.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tp_residual.errors import LayoutError, UserError
from tp_residual.kernels.contract import widen
from tp_residual.model.attention_backend import AttentionBackend, TokenBatch
from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.collectives import (
    invariant_to_column_input,
    invariant_to_token_shard,
    token_shard_to_column_input,
)
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.partial import Partial
from tp_residual.parallel.splits import Split
from tp_residual.parallel.vocabulary import VocabParallelHead
from tp_residual.residual.boundary import Site, Tap
from tp_residual.residual.norms import RMSNorm

Reduction = Literal["mean", "sum", "none"]

IGNORE_INDEX = -100


def vocab_parallel_cross_entropy(
    local_logits: Float[Tensor, "rows local_vocab"],
    targets: Int[Tensor, " rows"],
    split: Split,
    group: TensorParallelGroup,
    *,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """`F.cross_entropy(logits, targets)` plus `z_loss * log_normalizer**2`, from each rank's columns; the same on every rank, invariant.

    In: logits sharded by `split` along the last dimension, any size, none included; targets replicated, ignore_index among them. In fp32
    (fp64 logits in fp64), and so is the answer: a scalar, or `[rows]` for reduction="none", zero where ignored. "mean" is over the rows
    that are not ignored; where all are, the loss and its gradients are zero. label_smoothing is spread over the whole vocabulary. One
    all-gather, of three numbers a row (four with label smoothing); none backwards. Differentiable twice.

    Raises LayoutError for logits that are not this rank's columns, UserError for other options and for a target outside the vocabulary.
    """
    _check_options(label_smoothing, z_loss, reduction)
    check_targets(targets, split.total, ignore_index)
    if local_logits.shape != (targets.shape[0], split.size(group.rank)):
        raise LayoutError(
            f"vocab_parallel_cross_entropy(): logits {list(local_logits.shape)} with {targets.shape[0]} targets; rank {group.rank} of "
            f"{group.size} holds {split.size(group.rank)} of {split.total} columns, and logits are not gathered before the loss"
        )
    losses = _row_losses(local_logits, targets, split, group, ignore_index, label_smoothing, z_loss)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / _count(targets, ignore_index)


def chunked_cross_entropy(
    hidden: Float[Tensor, "rows hidden"],
    head: nn.Module,
    targets: Int[Tensor, " rows"],
    *,
    chunk_tokens: int = 1024,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """`vocab_parallel_cross_entropy(head(hidden), ...)`, `chunk_tokens` rows at a time: no more logits exist at once.

    hidden: column input, what the stream's last read returns; its gradient is a summand, as that of any column input. head: a
    VocabParallelHead, or a module with its `split` and `group` that maps rows to local logits. Gradients are computed in the forward pass,
    while a chunk's logits are there, and kept: `[rows, hidden]` and one of the head's size, which sums its chunks in fp32 at least. So the
    head's matrix products are not repeated, and a second derivative raises. One all-gather a chunk; none backwards.

    Raises what `vocab_parallel_cross_entropy` raises, and UserError for chunk_tokens below 1.
    """
    _check_options(label_smoothing, z_loss, reduction)
    if reduction == "none":
        raise UserError(
            "reduction='none' needs a gradient a row, which chunks do not keep; use vocab_parallel_cross_entropy"
        )
    if chunk_tokens < 1:
        raise UserError(f"chunk_tokens={chunk_tokens} must be at least 1")
    if hidden.shape[0] != targets.shape[0]:
        raise LayoutError(
            f"chunked_cross_entropy(): {hidden.shape[0]} rows of hidden states with {targets.shape[0]} targets; a column input holds all "
            "rows on every rank"
        )
    split, group = _vocabulary_of(head)
    check_targets(targets, split.total, ignore_index)

    def chunk_loss(local_logits: Tensor, chunk: Tensor) -> Tensor:
        return _row_losses(local_logits, chunk, split, group, ignore_index, label_smoothing, z_loss).sum()

    total = _Chunked.apply(hidden, targets, head, chunk_loss, chunk_tokens, torch.is_grad_enabled(), *head.parameters())
    return total if reduction == "sum" else total / _count(targets, ignore_index)


def auxiliary_cross_entropy(
    states: Mapping[int, Float[Tensor, "tokens hidden"]],
    weights: Mapping[int, float],
    norm: RMSNorm,
    head: nn.Module,
    targets: Int[Tensor, " tokens"],
    **options: Any,
) -> Tensor:
    """`sum of weights[l] * chunked_cross_entropy(head(norm(x_l)))` over the chosen layers l: early exits that share the model's end.

    states: x_l by l, invariant, as `hidden_states` of the model's output. norm, head: the model's own, so that both learn from every chosen
    layer; a norm whose gradient is partial (sequence parallelism) sees this rank's tokens only. options: of chunked_cross_entropy.
    Raises UserError for a weight whose layer has no state.
    """
    missing = [layer for layer in weights if layer not in states]
    if missing:
        raise UserError(f"auxiliary losses at layers {missing}, but there are states of {sorted(states)} only")
    if not weights:
        raise UserError("auxiliary losses need a weight for at least one layer")
    group = _vocabulary_of(head)[1]
    losses = []
    for layer, weight in sorted(weights.items()):
        tag, x = f"auxiliary.{layer}", states[layer]
        if norm.partial_gradient and group.size > 1:
            split = Split.ceil_chunks(x.shape[0], group.size)
            normed_shard = norm(invariant_to_token_shard(x, split, group, tag=tag))
            normed = token_shard_to_column_input(normed_shard, split, group, tag=tag)
        else:
            normed = invariant_to_column_input(norm(x), group, tag=tag)
        losses.append(weight * chunked_cross_entropy(normed, head, targets, **options))
    return torch.stack(losses).sum()


def final_hidden(
    model: CausalLM,
    batch: TokenBatch,
    backend: AttentionBackend,
    *,
    output_hidden_states: bool = False,
    taps: tuple[Tap, ...] = (),
) -> tuple[Float[Tensor, "tokens hidden"], tuple[Float[Tensor, "tokens hidden"], ...] | None]:
    """What the head would read, a column input, without any logits; and the hidden states, if asked for. For chunked_cross_entropy."""
    reads: list[Tensor | None] = [None]

    def keep_last(_site: Site, _partial: Partial | None, _residual: Tensor, normed: Tensor | None) -> None:
        reads[0] = normed

    none = torch.empty(0, dtype=torch.long, device=batch.token_ids.device)
    out = model(batch, backend, logit_rows=none, output_hidden_states=output_hidden_states, taps=(*taps, keep_last))
    (hidden,) = reads
    assert hidden is not None, "the model's last boundary is the head's read"
    return hidden, out.hidden_states


def next_token_targets(batch: TokenBatch, *, ignore_index: int = IGNORE_INDEX) -> Int[Tensor, " tokens"]:
    """For each token the one after it in its sequence, ignore_index for a sequence's last."""
    targets = batch.token_ids.roll(-1)
    targets[[span.stop - 1 for span in batch.spans if span.stop > span.start]] = ignore_index
    return targets


def check_targets(targets: Int[Tensor, " rows"], vocab_size: int, ignore_index: int) -> None:
    """Raises UserError naming the first target that is neither an id nor ignore_index: no rank would own it, and its loss be wrong."""
    outside = ((targets < 0) | (targets >= vocab_size)) & (targets != ignore_index)
    if bool(outside.any()):
        row = int(outside.nonzero()[0, 0])
        raise UserError(
            f"target {int(targets[row])} in row {row} is outside the vocabulary of {vocab_size} ids; use 0 to {vocab_size - 1}, or "
            f"ignore_index={ignore_index} for rows without a loss"
        )


def _check_options(label_smoothing: float, z_loss: float, reduction: str) -> None:
    if not 0 <= label_smoothing <= 1:
        raise UserError(f"label_smoothing={label_smoothing} must be from 0 to 1")
    if not z_loss >= 0:
        raise UserError(f"z_loss={z_loss} must not be negative")
    if reduction not in ("mean", "sum", "none"):
        raise UserError(f"reduction={reduction!r} is not one of mean, sum, none")


def _vocabulary_of(head: nn.Module) -> tuple[Split, TensorParallelGroup]:
    split, group = getattr(head, "split", None), getattr(head, "group", None)
    if not isinstance(split, Split) or not isinstance(group, TensorParallelGroup):
        raise LayoutError(
            f"{type(head).__name__} has no split and group of a vocabulary; give a {VocabParallelHead.__name__}"
        )
    return split, group


def _count(targets: Tensor, ignore_index: int) -> Tensor:
    return (targets != ignore_index).sum().clamp(min=1)


def _row_losses(
    local_logits: Tensor,
    targets: Tensor,
    split: Split,
    group: TensorParallelGroup,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    """`[rows]`, zero where ignored."""
    start, stop = split.ranges[group.rank]
    mine = (targets >= start) & (targets < stop) & (targets != ignore_index)
    column = (targets - start).where(mine, -1)
    log_normalizer, target_logit, logit_sum = _RowStatistics.apply(local_logits, column, group, label_smoothing > 0)
    losses = log_normalizer - (1 - label_smoothing) * target_logit
    if label_smoothing:
        losses = losses - label_smoothing / split.total * logit_sum
    if z_loss:
        losses = losses + z_loss * log_normalizer.square()
    return losses.where(targets != ignore_index, 0)


class _RowStatistics(torch.autograd.Function):
    """(log sum exp, logit of the target, sum of the logits or nothing) of whole rows, invariant. column: the target's, -1 elsewhere."""

    @staticmethod
    def forward(
        ctx: Any, local_logits: Tensor, column: Tensor, group: TensorParallelGroup, with_sum: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = widen(local_logits)
        rows, local = wide.shape
        sent = wide.new_zeros((1, 3 + with_sum, rows))
        sent[0, 0] = -torch.inf
        if local:
            peak = wide.amax(dim=-1)
            sent[0, 0] = peak
            sent[0, 1] = (wide - _finite(peak)[:, None]).exp_().sum(dim=-1)
            sent[0, 2] = wide.gather(1, column.clamp(min=0)[:, None])[:, 0].where(column >= 0, 0)
            if with_sum:
                sent[0, 3] = wide.sum(dim=-1)
        if group.size > 1:
            sent = group.run("all_gather", "cross_entropy", sent, lambda transport, t: transport.all_gather(t))
        peaks, sums = sent[:, 0], sent[:, 1]
        top = _finite(peaks.amax(dim=0))
        log_normalizer = top + (sums * (peaks - top).exp()).sum(dim=0).log()
        logit_sum = sent[:, 3].sum(dim=0) if with_sum else wide.new_zeros(())
        ctx.group = group
        ctx.save_for_backward(local_logits, column, log_normalizer)
        return log_normalizer, sent[:, 2].sum(dim=0), logit_sum

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        local_logits, column, log_normalizer = ctx.saved_tensors
        # what is the same on all ranks meets this rank's columns: for a second derivative their gradients must be summed
        log_normalizer, of_normalizer, of_target, of_sum = (
            invariant_to_column_input(value, ctx.group, tag="cross_entropy.backward")
            for value in (log_normalizer, *gradients)
        )
        gradient = (widen(local_logits) - log_normalizer[:, None]).exp() * of_normalizer[:, None]
        if local_logits.shape[1]:
            here = (of_target.where(column >= 0, 0))[:, None]
            gradient = gradient.scatter_add(1, column.clamp(min=0)[:, None], here)
            if of_sum.dim():
                gradient = gradient + of_sum[:, None]
        return gradient.to(local_logits.dtype), None, None, None


class _Chunked(torch.autograd.Function):
    """The sum of `chunk_loss(head(rows), targets of the rows)` over chunks, with gradients made on the way."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        head: nn.Module,
        chunk_loss: Callable[[Tensor, Tensor], Tensor],
        chunk_tokens: int,
        learning: bool,
        *parameters: Tensor,
    ) -> Tensor:
        needs_hidden, *needs = (learning and need for need in (ctx.needs_input_grad[0], *ctx.needs_input_grad[6:]))
        wanted = [parameter for parameter, need in zip(parameters, needs, strict=True) if need]
        sums = [torch.zeros_like(parameter, dtype=widen(parameter[:0]).dtype) for parameter in wanted]
        of_hidden = torch.empty_like(hidden) if needs_hidden else None
        total = widen(hidden[:0]).new_zeros(())
        for first in range(0, hidden.shape[0], chunk_tokens):
            rows = slice(first, first + chunk_tokens)
            with torch.enable_grad():
                x = hidden[rows].detach().requires_grad_(needs_hidden)
                loss = chunk_loss(head(x), targets[rows])
            total += loss.detach()
            sources = [x, *wanted] if needs_hidden else wanted
            if sources:
                gradients = list(torch.autograd.grad(loss, sources))
                if of_hidden is not None:
                    of_hidden[rows] = gradients.pop(0)
                for so_far, gradient in zip(sums, gradients, strict=True):
                    so_far += gradient
        kept = [so_far.to(parameter.dtype) for so_far, parameter in zip(sums, wanted, strict=True)]
        ctx.save_for_backward(of_hidden, *kept)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, *kept = ctx.saved_tensors
        made = iter(kept)
        of_parameters = [next(made) if need else None for need in ctx.needs_input_grad[6:]]
        of_hidden, *of_parameters = (
            None if each is None else each * gradient.to(each.dtype) for each in (of_hidden, *of_parameters)
        )
        return (of_hidden, *(None,) * 5, *of_parameters)


def _finite(peak: Tensor) -> Tensor:
    """What to subtract before exp: a row or a share without any finite logit has nothing to subtract. NaN and +inf stay, and spread."""
    return peak.where(peak != -torch.inf, 0)
