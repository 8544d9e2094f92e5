"""Log-probabilities of given tokens under the model's own distribution, from a log-sum-exp that every rank shares.

A row's normaliser is summed in fp64 from the logits as the head gave them; no rank ever holds a whole row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from tp_residual.errors import GenerationError, RequestError
from tp_residual.inference.request import check_pairs
from tp_residual.model.attention_backend import NoCache, TokenBatch
from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.partial import Partial
from tp_residual.parallel.splits import Split
from tp_residual.parallel.vocabulary import request_checksum, require_same_request, summarize_rows
from tp_residual.residual.boundary import Site

CHUNK_ROWS = 256  # rows of logits held at a time when every token of a sequence is scored


@dataclass(frozen=True)
class TokenLogProb:
    """top: (token id, log-probability) of the likeliest tokens, by falling probability, equal ones by rising id."""

    token_id: int
    log_prob: float
    top: list[tuple[int, float]] = field(default_factory=list)


def token_log_probs(
    local_logits: Float[Tensor, "rows local_vocab"],
    token_ids: Sequence[int],
    count: int,
    split: Split,
    group: TensorParallelGroup,
) -> list[TokenLogProb]:
    """One all-gather of 3 + 2 * count fp64 numbers a row and rank. Raises GenerationError on every rank for NaN or infinite logits."""
    targets = torch.tensor(token_ids, dtype=torch.long, device=local_logits.device)
    summary = summarize_rows(local_logits, count, split, group, tag="log_probs", targets=targets)
    normalizer = summary.log_normalizer[:, None]
    if not bool(normalizer.isfinite().all()):
        raise GenerationError(
            "a row of logits is NaN, or infinite; the weights or the dtype cannot represent this model"
        )
    log_probs = (summary.target_logits - normalizer[:, 0]).tolist()
    tops = (summary.values[:, :count] - normalizer).tolist()
    ids = summary.ids[:, :count].tolist()
    return [
        TokenLogProb(token_id, log_prob, list(zip(top_ids, top, strict=True)))
        for token_id, log_prob, top_ids, top in zip(token_ids, log_probs, ids, tops, strict=True)
    ]


class FinalStates:
    """A tap that keeps what the head reads, so that rows of logits can be made a chunk at a time."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self._states: Tensor | None = None

    def __call__(self, _site: Site, _partial: Partial | None, _residual: Tensor, read: Tensor | None) -> None:
        if read is not None:  # the last read is the head's
            self._states = read

    def log_probs(self, rows: Sequence[int], token_ids: Sequence[int], count: int) -> list[TokenLogProb]:
        """Of token_ids, each predicted at the flattened position in `rows`."""
        assert self._states is not None, "the model has not run with this tap"
        model, result = self._model, list[TokenLogProb]()
        for first in range(0, len(rows), CHUNK_ROWS):
            chunk = torch.tensor(rows[first : first + CHUNK_ROWS], device=self._states.device)
            logits = model.lm_head(self._states.index_select(0, chunk))
            targets = token_ids[first : first + CHUNK_ROWS]
            result += token_log_probs(logits, targets, count, model.lm_head.split, model.group)
        return result


@torch.inference_mode()
def score(
    model: CausalLM, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], group: TensorParallelGroup, *, count: int = 0
) -> list[list[TokenLogProb]]:
    """For each (context, completion), the log-probability of every token of the completion; one pass over all of them.

    All ranks call it with the same arguments and get the same numbers. count: as many of the likeliest tokens beside each. Raises
    RequestError, before any collective, for an empty context or completion, more tokens than positions, and ids outside the vocabulary.
    """
    if model.group is not group:
        raise RequestError("the model was built on another group than the one given to score(); pass model.group")
    check_pairs(pairs, model.config, count)
    require_same_request(group, request_checksum(pairs, count))
    sequences = [[*context, *completion] for context, completion in pairs]
    batch = TokenBatch.prefill(sequences, group.device)
    states = FinalStates(model)
    model(batch, NoCache(), logit_rows=torch.zeros(0, dtype=torch.long, device=group.device), taps=(states,))
    rows, token_ids = list[int](), list[int]()
    for span, (context, completion) in zip(batch.spans, pairs, strict=True):
        rows += range(span.start + len(context) - 1, span.stop - 1)
        token_ids += completion
    scored = iter(states.log_probs(rows, token_ids, count))
    return [[next(scored) for _ in completion] for _, completion in pairs]
