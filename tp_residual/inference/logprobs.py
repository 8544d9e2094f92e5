"""Log-probabilities of given tokens under the model's own distribution, from a log-sum-exp that every rank shares.

A row's normaliser is summed in fp64 from the logits as the head gave them; no rank ever holds a whole row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from tp_residual.errors import GenerationError
from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.partial import Partial
from tp_residual.parallel.splits import Split
from tp_residual.parallel.vocabulary import summarize_rows
from tp_residual.residual.boundary import Site

CHUNK_ROWS = 256  # rows of logits held at a time when every token of a sequence is scored


@dataclass(frozen=True)
class TokenLogProb:
    """top: (token id, log-probability) of the likeliest tokens, by falling probability, equal ones by rising id."""

    token_id: int
    log_prob: float
    top: list[tuple[int, float]] = field(default_factory=list)

    def cut(self, count: int) -> "TokenLogProb":
        """With that many likeliest tokens at most."""
        return self if len(self.top) <= count else replace(self, top=self.top[:count])


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
