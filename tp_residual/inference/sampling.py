"""Drawing the next token from a row of logits that no rank holds whole.

Every filter keeps the tokens at or above one edge in the order of (falling logit, rising id), so ranks agree on edges from a few candidates
each, and cut their own slice. The draw is Gumbel-max (Gumbel 1954; Maddison et al., arXiv 1411.0030): the largest of logit + noise,
where the noise is a function of (seed, prompt, sample, position, token id) and of nothing else. So it needs no generator state,
and equal logits give the same token on any number of ranks, in any batch. Logits that differ in rounding (another tp size) give
another token only where the two best of logit + noise are closer than that, or an edge is.
"""

import math
import time
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tp_residual.inference.request import SamplingSettings
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.splits import Split
from tp_residual.parallel.vocabulary import summarize_rows, vocab_parallel_choice

TOP_P_CANDIDATES = 256  # a rank at first; doubled until they cover the nucleus

_MASK = (1 << 64) - 1
_WEYL = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014)


class Draw(NamedTuple):
    """What the next token of one sequence follows from, beside its logits. row: its place in the sampler while it runs.

    prompt: its index in the whole file, which with seed, sample and position keys its noise.
    """

    settings: SamplingSettings
    row: int
    prompt: int
    sample: int
    position: int


class Sampler:
    """Chooses the next tokens of sequences, each with settings of its own; every rank holds the same one and gets the same tokens.

    rows: how many sequences run at once.
    """

    def __init__(self, split: Split, group: TensorParallelGroup, rows: int) -> None:
        self.split, self.group, self._rows = split, group, rows
        self._start, self._stop = split.ranges[group.rank]
        self._seen: Tensor | None = None

    def begin(self, row: int, settings: SamplingSettings, token_ids: Sequence[int]) -> None:
        """A sequence takes this row; token_ids: its prompt, which a repetition penalty counts as seen."""
        if settings.repetition_penalty != 1:
            if self._seen is None:
                shape = self._rows, self._stop - self._start
                self._seen = torch.zeros(shape, dtype=torch.bool, device=self.group.device)
            self._seen[row] = False
            self._see(row, token_ids)

    def choose(
        self,
        local_logits: Float[Tensor, "rows local_vocab"],
        draws: Sequence[Draw],
        checksum: int,
        note: int | None = None,
    ) -> tuple[list[int], list[int]]:
        """(the next token of each, every rank's note); raises as `vocab_parallel_choice` does.

        Sequences of equal settings are filtered together, in the order in which their settings first appear: the same on all ranks.
        """
        began = time.perf_counter()
        kinds: dict[tuple[float, ...], list[int]] = {}
        for at, (settings, *_) in enumerate(draws):
            kind = settings.temperature, settings.top_k, settings.top_p, settings.min_p, settings.repetition_penalty
            kinds.setdefault(kind, []).append(at)
        scores = local_logits
        if len(kinds) == 1:
            scores = self._scores(local_logits, draws)
        elif kinds:
            each = [self._scores(local_logits[rows], [draws[at] for at in rows]) for rows in kinds.values()]
            widest = reduce(torch.promote_types, (part.dtype for part in each))
            scores = torch.cat([part.to(widest) for part in each])
            order = [at for rows in kinds.values() for at in rows]
            scores = scores[torch.tensor(order, device=scores.device).argsort()]
        ids, notes = vocab_parallel_choice(scores, self.split, self.group, checksum, note)
        chosen: list[int] = ids.tolist()
        for draw, token_id in zip(draws, chosen, strict=True):
            if draw.settings.repetition_penalty != 1:
                self._see(draw.row, [token_id])
        self.group.counters.sampler_s += time.perf_counter() - began
        return chosen, notes

    def _scores(self, scores: Tensor, draws: Sequence[Draw]) -> Tensor:
        """Whose largest are the tokens; draws of one kind."""
        settings = draws[0].settings
        if settings.repetition_penalty != 1:
            assert self._seen is not None, "begin() comes first"
            seen = self._seen[[draw.row for draw in draws]]
            scores = penalize_repetition(_at_least_fp32(scores), seen, settings.repetition_penalty)
        if settings.greedy:
            return scores
        scores = filter_logits(_at_least_fp32(scores) / settings.temperature, settings, self.split, self.group)
        keys = [noise_key(draw.settings.seed, draw.prompt, draw.sample, draw.position) for draw in draws]
        return add_noise(scores, keys, self._start)

    def _see(self, row: int, token_ids: Sequence[int]) -> None:
        assert self._seen is not None
        self._seen[row, [token_id - self._start for token_id in token_ids if self._start <= token_id < self._stop]] = (
            True
        )


def penalize_repetition(
    local_logits: Float[Tensor, "rows local_vocab"], seen: Bool[Tensor, "rows local_vocab"], penalty: float
) -> Float[Tensor, "rows local_vocab"]:
    """Logits of tokens seen before, divided by the penalty where positive and multiplied where negative (arXiv 1909.05858)."""
    penalized = torch.where(local_logits < 0, local_logits * penalty, local_logits / penalty)
    return penalized.where(seen, local_logits)


def filter_logits(
    scores: Float[Tensor, "rows local_vocab"], settings: SamplingSettings, split: Split, group: TensorParallelGroup
) -> Float[Tensor, "rows local_vocab"]:
    """-inf for what top-k, then top-p, then min-p drop. scores: this rank's slice of the logits divided by the temperature.

    At most one all-gather for top-k (top_k candidates a rank) and for min-p, and one for top-p for each time its candidates double.
    Ties as in Transformers: top-k keeps every token that equals the k-th; of equal ones at the edge of the nucleus as many stay as
    its mass needs, here the lowest ids (there, an unstable sort decides which).
    NaN stays NaN.
    """
    if settings.top_k:
        summary = summarize_rows(scores, settings.top_k, split, group, tag="top_k")
        kth = summary.values[:, settings.top_k - 1, None].to(scores.dtype)
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if settings.top_p < 1:
        value, token_id = (edge[:, None] for edge in nucleus_edge(scores, settings.top_p, split, group))
        ids = torch.arange(*split.ranges[group.rank], device=scores.device)
        value = value.to(scores.dtype)
        scores = scores.masked_fill((scores < value) | ((scores == value) & (ids > token_id)), -torch.inf)
    if settings.min_p > 0:
        peak = summarize_rows(scores, 0, split, group, tag="min_p").peak
        scores = scores.masked_fill(scores.double() < (peak + math.log(settings.min_p))[:, None], -torch.inf)
    return scores


def nucleus_edge(
    scores: Float[Tensor, "rows local_vocab"], top_p: float, split: Split, group: TensorParallelGroup
) -> tuple[Float[Tensor, " rows"], Int[Tensor, " rows"]]:
    """(logit, id) of the last token kept: the first whose mass, with all those before it by falling logit and rising id, reaches top_p.

    From 256 candidates a rank, doubled for the rows whose nucleus they may not cover, at worst to the whole row.
    """
    values = scores.new_empty(scores.shape[0], dtype=torch.float64)
    ids = torch.empty_like(values, dtype=torch.long)
    left, count = torch.arange(scores.shape[0], device=scores.device), TOP_P_CANDIDATES
    while True:
        summary = summarize_rows(scores[left], count, split, group, tag="top_p")
        mass = (summary.values - summary.log_normalizer[:, None]).exp().cumsum(dim=-1)
        before = torch.cat((torch.zeros_like(mass[:, :1]), mass[:, :-1]), dim=-1)
        kept = ((before < top_p) & (summary.values > -torch.inf)).sum(dim=-1).clamp(min=1)
        reached = ((mass >= top_p) & (summary.values > summary.withheld[:, None])).any(dim=-1)
        # a tie among the withheld cannot be ranked: the edge itself has to lie above everything withheld
        done = reached | (summary.withheld == -torch.inf) | summary.log_normalizer.isnan()
        edge = (kept - 1)[:, None]
        values[left], ids[left] = summary.values.gather(1, edge)[:, 0], summary.ids.gather(1, edge)[:, 0]
        left, count = left[~done], 2 * count
        if not len(left):
            return values, ids


# -- noise


def noise_key(seed: int, prompt: int, sample: int, position: int) -> int:
    """64 bits for one draw."""
    key = seed
    for part in (prompt, sample, position):
        key = _mix((_mix(key) + _WEYL * (part + 1)) & _MASK)
    return key


def gumbel_noise(keys: Int[Tensor, "*shape"], token_ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Standard Gumbel noise in fp64, from splitmix64's (token id)-th output after `key`; keys as signed 64-bit integers."""
    bits = keys + (token_ids + 1) * _signed(_WEYL)
    for shift, factor in zip((30, 27), _MIX, strict=True):
        bits = (bits ^ _shift_right(bits, shift)) * _signed(factor)
    bits = bits ^ _shift_right(bits, 31)
    return -(-uniform(bits).log()).log()


def uniform(bits: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Odd multiples of 2**-53 from the upper 52 bits: exact in fp64 and strictly inside (0, 1).

    53 bits plus a half would round to 1, whose noise is infinite, and a zero's is minus infinity.
    """
    return (_shift_right(bits, 12) * 2 + 1).double() * 2.0**-53


def add_noise(
    scores: Float[Tensor, "rows local_vocab"], keys: list[int], start: int
) -> Float[Tensor, "rows local_vocab"]:
    """scores + noise in fp64; tokens at -inf cost nothing. start: the id of the first local token."""
    row, column = (scores != -torch.inf).nonzero(as_tuple=True)
    signed_keys = torch.tensor([_signed(key) for key in keys], device=scores.device)
    noisy = torch.full_like(scores, -torch.inf, dtype=torch.float64)
    noisy[row, column] = scores[row, column].double() + gumbel_noise(signed_keys[row], column + start)
    return noisy


def _mix(bits: int) -> int:
    for shift, factor in zip((30, 27), _MIX, strict=True):
        bits = ((bits ^ bits >> shift) * factor) & _MASK
    return bits ^ bits >> 31


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


def _shift_right(bits: Tensor, shift: int) -> Tensor:
    """Logical: torch's own shift of signed integers repeats the sign."""
    return (bits >> shift) & ((1 << (64 - shift)) - 1)


def _at_least_fp32(logits: Tensor) -> Tensor:
    """Penalty and temperature in fp32, as in Transformers, whose ties are then ours; fp64 stays."""
    return logits if logits.dtype == torch.float64 else logits.float()
