"""The logit lens: the final norm and the vocabulary-parallel head on the stream of every layer. No rank ever holds a row of logits."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tp_residual.errors import GenerationError
from tp_residual.kernels.contract import norm
from tp_residual.lens.observe import Watch
from tp_residual.lens.result import Likely
from tp_residual.parallel.collectives import partial_to_invariant
from tp_residual.parallel.partial import Partial
from tp_residual.parallel.vocabulary import RowSummary, summarize_rows


class FinalPrediction:
    """What the whole model says at the kept rows, which every state is compared with."""

    def __init__(self, seen: Watch, local_logits: Float[Tensor, "rows local_vocab"]) -> None:
        self._seen, self.local_logits = seen, local_logits
        # any target makes equal logits come lowest id first
        anything = torch.zeros(len(local_logits), dtype=torch.long, device=local_logits.device)
        self.summary = self.summarize(local_logits, 1, anything)
        self.ids: Int[Tensor, " rows"] = self.summary.ids[:, 0]

    def summarize(self, local_logits: Float[Tensor, "rows local_vocab"], count: int, targets: Tensor) -> RowSummary:
        """Raises GenerationError, on every rank, for logits that are NaN or infinite."""
        split = self._seen.model.lm_head.split
        summary = summarize_rows(local_logits, count, split, self._seen.group, tag="lens.logits", targets=targets)
        if not bool(summary.log_normalizer.isfinite().all()):
            raise GenerationError(
                "a row of logits is NaN, or infinite; the weights or the dtype cannot represent this model"
            )
        return summary

    def logits(self, token_ids: Int[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """The model's own logit of one token a row."""
        return self.summarize(self.local_logits, 0, token_ids).target_logits

    def compare(self, site: int, count: int) -> list[Likely]:
        """The state after write `site` at every kept row. Collectives: gathers of the rows (token-sharded) and of 3 + 2 * count
        numbers a row, and an all-reduce of two.
        """
        seen, model = self._seen, self._seen.model
        final = seen.final_norm
        normed = norm(seen.kept_residuals[site], final.weight, final.bias, final.spec, model.dtype)
        logits = model.lm_head(seen.whole_rows(normed))
        summary = self.summarize(logits, count, self.ids)
        above, kl = self._local_comparison(logits, summary)
        owed = Partial(torch.stack([above, kl]), seen.group, "lens.comparison")
        above, kl = partial_to_invariant(owed, tag="lens.comparison", ordered=True).unbind(0)
        log_probs = summary.values[:, :count] - summary.log_normalizer[:, None]
        columns = (
            summary.ids[:, :count],
            log_probs,
            summary.target_logits - summary.log_normalizer,
            above + 1,
            kl.clamp(min=0),  # of equal distributions, a sum of roundings
        )
        return [
            Likely(list(zip(ids, values, strict=True)), log_prob, int(rank), divergence)
            for ids, values, log_prob, rank, divergence in zip(*(column.tolist() for column in columns), strict=True)
        ]

    def _local_comparison(
        self, local_logits: Float[Tensor, "rows local_vocab"], summary: RowSummary
    ) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
        """This rank's summands: how many of its tokens come before the predicted one, and of KL(whole model || this state)."""
        start, stop = self._seen.model.lm_head.split.ranges[self._seen.group.rank]
        wide, own_ids = local_logits.double(), torch.arange(start, stop, device=local_logits.device)
        predicted = summary.target_logits[:, None]
        before = (wide > predicted) | ((wide == predicted) & (own_ids < self.ids[:, None]))
        whole = self.local_logits.double() - self.summary.log_normalizer[:, None]
        terms = whole.exp() * (whole - (wide - summary.log_normalizer[:, None]))
        return before.sum(dim=-1).double(), terms.where(whole > -torch.inf, 0).sum(dim=-1)
