"""The vocabulary axis: embedding, head, and what decoding needs of a row of logits without ever gathering it.

Any vocabulary at any tp size, ranks without a row included. Nothing is padded, so no padded id exists to win.
"""

import zlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tp_residual.errors import GenerationError, RequestError
from tp_residual.kernels.linear import PackedWeight, linear
from tp_residual.parallel.blocks import ParameterBlock, split_blocks
from tp_residual.parallel.collectives import last_dim_shard_to_invariant
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.linear import check_input, uninitialized
from tp_residual.parallel.partial import Partial
from tp_residual.parallel.splits import Split


class VocabParallelEmbedding(nn.Module):
    """Rows of the vocabulary this rank holds, zeros for the others: a Partial that the first boundary completes, exactly.

    In: ids `[tokens]`, replicated. Out: Partial of `[tokens, hidden]` in the weight's dtype.
    """

    def __init__(
        self,
        split: Split,
        hidden_size: int,
        group: TensorParallelGroup,
        *,
        name: str,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.split, self.hidden_size, self.group, self.name = split, hidden_size, group, name
        self.weight = uninitialized(split.size(group.rank), hidden_size, dtype=dtype, group=group)

    def forward(self, token_ids: Int[Tensor, " tokens"]) -> Partial:
        start, stop = self.split.ranges[self.group.rank]
        if token_ids.device.type == "cpu" and token_ids.numel() and not torch.compiler.is_compiling():
            check_token_ids(int(token_ids.min()), int(token_ids.max()), self.split.total)
        if start == stop:
            # zeros that depend on the weight: a rank outside the graph would miss the collectives of its backward
            zeros = self.weight.new_zeros(token_ids.shape[0], 0) @ self.weight
            return Partial(zeros, self.group, self.name)
        mine = (token_ids >= start) & (token_ids < stop)
        rows = F.embedding((token_ids - start).where(mine, 0), self.weight)
        return Partial(rows.where(mine[:, None], 0), self.group, self.name)

    def declare_blocks(self, prefix: str) -> Iterable[ParameterBlock]:
        yield from split_blocks(
            f"{prefix}weight", self.weight, 0, self.split, (self.split.total, self.hidden_size), self.group.rank
        )


class VocabParallelHead(nn.Module):
    """Logits of the vocabulary rows this rank holds. A tied head is given the embedding's parameter: one storage.

    In: column input `[rows, hidden]`, replicated. Out: `[rows, local_vocab]`, sharded along the last dimension.
    """

    def __init__(
        self,
        split: Split,
        hidden_size: int,
        group: TensorParallelGroup,
        *,
        tied_to: VocabParallelEmbedding | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.split, self.hidden_size, self.group, self.tied = split, hidden_size, group, tied_to is not None
        self.weight = (
            tied_to.weight
            if tied_to is not None
            else uninitialized(split.size(group.rank), hidden_size, dtype=dtype, group=group)
        )
        self.packed: PackedWeight | None = None

    def forward(self, x: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows local_vocab"]:
        check_input(x, self.hidden_size, "VocabParallelHead", ("lm_head",))
        return linear(x, self.weight, self.packed)

    def gather(
        self, local_logits: Float[Tensor, "rows local_vocab"], *, tag: str = "logits"
    ) -> Float[Tensor, "rows vocab"]:
        """The whole row of logits on every rank: one all-gather; gradient complete (invariant)."""
        return last_dim_shard_to_invariant(local_logits, self.split, self.group, tag=tag)

    def declare_blocks(self, prefix: str) -> Iterable[ParameterBlock]:
        if not self.tied:
            yield from split_blocks(
                f"{prefix}weight", self.weight, 0, self.split, (self.split.total, self.hidden_size), self.group.rank
            )


def check_token_ids(smallest: int, largest: int, vocab_size: int) -> None:
    """Raises RequestError for an id outside the vocabulary: vocabulary-parallel, it would silently embed to zeros."""
    if smallest < 0 or largest >= vocab_size:
        wrong = smallest if smallest < 0 else largest
        raise RequestError(f"token id {wrong} is outside the vocabulary of {vocab_size} ids; use 0 to {vocab_size - 1}")


def vocab_parallel_argmax(
    local_logits: Float[Tensor, "rows local_vocab"], split: Split, group: TensorParallelGroup, checksum: int
) -> Int[Tensor, " rows"]:
    """Greedy ids `[rows]`, the same on every rank by construction: all choose from the same gathered candidates.

    Ties go to the lowest id. One all-gather of (logit, id, checksum) a row, in fp64, which holds each exactly. checksum: any integer
    below 2**53 that all ranks must agree on (the tokens so far); a rank that differs is named. Raises GenerationError on every rank
    when they disagree or a logit is NaN.
    """
    return vocab_parallel_choice(local_logits, split, group, checksum).ids


class Choice(NamedTuple):
    """The same on every rank. notes: what each rank had to tell the others, by rank; empty where none was given."""

    ids: Int[Tensor, " rows"]
    notes: list[int]


def vocab_parallel_choice(
    local_logits: Float[Tensor, "rows local_vocab"],
    split: Split,
    group: TensorParallelGroup,
    checksum: int,
    note: int | None = None,
) -> Choice:
    """`vocab_parallel_argmax`, of any number of rows, and in the same all-gather one integer below 2**53 from each rank: a row more."""
    start, stop = split.ranges[group.rank]
    rows = local_logits.shape[0]
    told = 0 if note is None else 1
    candidate = torch.full((1, rows + told, 3), float(checksum), dtype=torch.float64, device=local_logits.device)
    if stop > start:
        value, index = local_logits.max(dim=-1)
        candidate[0, :rows, 0], candidate[0, :rows, 1] = value, index + start
    else:
        candidate[0, :rows, 0], candidate[0, :rows, 1] = -torch.inf, split.total
    if note is not None:
        candidate[0, rows, 0], candidate[0, rows, 1] = note, 0
    if group.size > 1:
        candidate = group.run("all_gather", "argmax", candidate, lambda transport, t: transport.all_gather(t))
    # numpy's calls take a third of torch's, and these are a dozen in every step
    value, ids, checksums = np.moveaxis(candidate.cpu().numpy(), -1, 0)
    if (checksums != checksums[0]).any():
        theirs = [int(c) for c in checksums[:, 0]]
        raise GenerationError(
            f"ranks disagree about prompts, settings or the tokens so far (checksums by rank: {theirs}); stopping before they drift further"
        )
    if np.isnan(value).any():
        ranks = sorted({int(r) for r in np.isnan(value).nonzero()[0]})
        raise GenerationError(
            f"logits are NaN on rank {ranks}; the weights or the dtype cannot represent this model (try --dtype float32)"
        )
    notes = [int(each) for each in value[:, rows]] if told else []
    value, ids = value[:, :rows], ids[:, :rows]
    best = np.where(value == value.max(axis=0), ids, split.total).min(axis=0)
    return Choice(torch.from_numpy(best.astype(np.int64)), notes)


class RowSummary(NamedTuple):
    """What all ranks know of each row of logits after `summarize_rows`: the same numbers on every rank, in fp64.

    values, ids: candidates by falling value, equal ones by rising id; -inf and `vocab` where a rank had fewer to send.
    withheld: no token that is missing among them has a larger value (-inf: none is missing, or only those of -inf).
    """

    peak: Float[Tensor, " rows"]
    log_normalizer: Float[Tensor, " rows"]
    target_logits: Float[Tensor, " rows"]
    values: Float[Tensor, "rows candidates"]
    ids: Int[Tensor, "rows candidates"]
    withheld: Float[Tensor, " rows"]


def summarize_rows(
    local_logits: Float[Tensor, "rows local_vocab"],
    count: int,
    split: Split,
    group: TensorParallelGroup,
    *,
    tag: str,
    targets: Int[Tensor, " rows"] | None = None,
) -> RowSummary:
    """log sum exp of whole rows, the logits of `targets`, and each rank's `count` largest: one all-gather of 3 + 2 * count numbers a row.

    Logits are widened to fp64 and summed there. NaN and +inf make a row's log_normalizer NaN, on every rank. targets: replicated ids;
    with them, candidates of equal value are sent lowest id first (without, which of them are sent is left open).
    """
    start, stop = split.ranges[group.rank]
    rows, local = local_logits.shape[0], stop - start
    count = min(count, max(split.sizes))
    sent = local_logits.new_full((1, rows, 3 + 2 * count), -torch.inf, dtype=torch.float64)
    sent[0, :, 1], sent[0, :, 3 + count :] = 0, split.total
    if local and rows:
        wide = local_logits.double()
        peak = wide.max(dim=-1).values
        sent[0, :, 0] = peak
        sent[0, :, 1] = (wide - _finite(peak)[:, None]).exp().sum(dim=-1)
        if targets is not None:
            mine = (targets >= start) & (targets < stop)
            theirs = wide.gather(1, (targets - start).where(mine, 0)[:, None])[:, 0]
            sent[0, :, 2] = theirs.where(mine, -torch.inf)
        if count:
            few = min(count, local)
            values, index = _largest(local_logits, few, lowest_id_first=targets is not None)
            sent[0, :, 3 : 3 + few], sent[0, :, 3 + count : 3 + count + few] = values, index + start
    if group.size > 1:
        sent = group.run("all_gather", tag, sent, lambda transport, t: transport.all_gather(t))
    peaks, sums, target_logits = sent[:, :, :3].unbind(-1)
    peak = peaks.max(dim=0).values
    total = (sums * (peaks - _finite(peak)).exp()).sum(dim=0)
    values, ids = (sent[:, :, at : at + count].transpose(0, 1).flatten(1) for at in (3, 3 + count))
    ids, by_id = ids.sort(dim=-1, stable=True)
    values, by_value = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, by_value).long()
    withholds = torch.tensor([size > count for size in split.sizes], device=sent.device)
    least = sent[:, :, 2 + count] if count else peaks
    withheld = least.where(withholds[:, None], -torch.inf).max(dim=0).values
    return RowSummary(peak, _finite(peak) + total.log(), target_logits.max(dim=0).values, values, ids, withheld)


def request_checksum(*request: object) -> int:
    """Of anything with a repr that is the same on all ranks; below 2**53, so that fp64 carries it."""
    return zlib.crc32(repr(request).encode())


def require_same_request(group: TensorParallelGroup, checksum: int) -> None:
    """Raises GenerationError on every rank unless all bring the same checksum: before collectives whose shapes a request decides."""
    if group.size == 1:
        return
    ours = torch.tensor([[checksum]], dtype=torch.float64, device=group.device)
    theirs = [int(c) for c in group.run("all_gather", "request", ours, lambda transport, t: transport.all_gather(t))]
    if len(set(theirs)) > 1:
        raise GenerationError(
            f"ranks disagree about prompts or settings (checksums by rank: {theirs}); give all ranks the same request"
        )


def _finite(peak: Tensor) -> Tensor:
    """What to subtract before exp: a row whose largest logit is -inf has nothing to subtract. +inf and NaN stay, and spread."""
    return peak.where(peak != -torch.inf, 0)


def _largest(
    x: Float[Tensor, "rows local_vocab"], count: int, *, lowest_id_first: bool
) -> tuple[Float[Tensor, "rows count"], Int[Tensor, "rows count"]]:
    """topk, which leaves open which of several equal values it takes; a stable sort of the rows where that shows, if asked."""
    values, index = x.topk(count, dim=-1)
    if lowest_id_first:
        least = values[:, -1:]
        tied = ((x >= least).sum(dim=-1) > count) & (least[:, 0] > -torch.inf)
        if bool(tied.any()):
            index[tied] = x[tied].sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return values, index
