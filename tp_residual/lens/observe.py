"""One forward pass, watched: norms and cosines of every write as it happens, and the few rows that the rest is computed from.

The run is not changed by being watched. Each completed update lives on the ranks as token chunks (a reduce-scatter, in rank order) and
only until its norms are taken; what is kept are this rank's summands, and its heads' outputs, at the chosen rows.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tp_residual.kernels.contract import widen
from tp_residual.lens.result import sites
from tp_residual.model.attention_backend import NoCache, TokenBatch
from tp_residual.model.decoder import CausalLM, DecoderLayer
from tp_residual.parallel.collectives import summed_shard, token_shard_to_invariant
from tp_residual.parallel.partial import Partial
from tp_residual.parallel.splits import Split
from tp_residual.residual.boundary import Site
from tp_residual.residual.norms import RMSNorm

FIGURES = 4  # a write: |x|, |u|, cos(u, x before), cos(x at the last layer border, x)


class Watch:
    """A tap, and hooks on each o_proj. rows: flattened positions to keep, rising.

    figures: `[local tokens, sites, FIGURES]` once the pass is over, of this rank's chunk of the tokens whatever the stream's layout.
    kept_residuals: `[local rows, hidden]` a site, by `row_split`; kept_summands: `[rows, hidden]` a site, with the bias that is added
    to their sum; kept_heads: `[rows, local_heads * head_dim]` a layer, the inputs of o_proj.
    """

    def __init__(self, model: CausalLM, tokens: int, rows: Sequence[int]) -> None:
        self.model, self.group = model, model.group
        self.sites = sites(model.config.num_hidden_layers)
        self.sharded = model.boundary_for(tokens).sequence_parallel
        self.chunks = Split.ceil_chunks(tokens, self.group.size)
        self.rows = torch.tensor(rows, dtype=torch.long, device=self.group.device)
        self.row_split = Split.replicated(len(rows), self.group.size)
        local = self.rows
        if self.sharded:
            ranges = tuple((bisect_left(rows, a), bisect_left(rows, b)) for a, b in self.chunks.ranges)
            self.row_split = Split(len(rows), ranges)
            first, end = ranges[self.group.rank]
            local = self.rows[first:end] - self.chunks.ranges[self.group.rank][0]
        self._local_rows = local
        self._before: Tensor | None = None
        self._border: Tensor | None = None
        self._figures: list[Tensor] = []
        self.kept_residuals: list[Tensor] = []
        self.kept_summands: list[tuple[Tensor, Tensor | None]] = []
        self.kept_heads: dict[int, Tensor] = {}

    def __call__(self, site: Site, owed: Partial | None, residual: Tensor, _normed: Tensor | None) -> None:
        expected = self.sites[len(self._figures)]
        assert owed is not None and site.update == expected.name, f"{site} where {expected.name} writes"
        self.kept_summands.append((owed.value.index_select(0, self.rows), owed.bias))
        self.kept_residuals.append(residual.index_select(0, self._local_rows))
        own = residual if self.sharded else residual[slice(*self.chunks.ranges[self.group.rank])]
        after, update = own.double(), self._own_update(owed).double()
        before = torch.zeros_like(after) if self._before is None else self._before
        border = after if self._border is None else self._border
        columns = [
            after.norm(dim=-1),
            update.norm(dim=-1),
            _cosine(update, before),
            _cosine(border, after),
        ]
        self._figures.append(torch.stack(columns, dim=-1))
        self._before = after
        if expected.kind != "attention":
            self._border = after

    def _own_update(self, owed: Partial) -> Float[Tensor, "local_tokens hidden"]:
        """This rank's tokens of the update, wide: summands travel in their own dtype and are widened where they are added."""
        value = owed.value
        if self.group.size > 1:
            value = summed_shard(self.group, value, "lens.update", 0, self.chunks, ordered=True)
        return widen(value) if owed.bias is None else widen(value) + widen(owed.bias)

    def figures(self) -> Float[Tensor, "tokens sites figures"]:
        """Of all tokens, on every rank: scalars only."""
        assert len(self._figures) == len(self.sites), "a write was not seen"
        local = torch.stack(self._figures, dim=1)
        return token_shard_to_invariant(local, self.chunks, self.group, tag="lens.figures")

    def whole_rows(self, x: Float[Tensor, "local_rows hidden"]) -> Float[Tensor, "rows hidden"]:
        """The kept rows of all ranks; a gather where the stream is token-sharded."""
        if not self.sharded:
            return x
        return token_shard_to_invariant(x, self.row_split, self.group, tag="lens.rows")

    @property
    def final_norm(self) -> RMSNorm:
        norm = self.model.model.norm
        assert norm is not None, "a request for a model without one is refused"
        return norm

    @contextmanager
    def hooked(self) -> Iterator[None]:
        handles = []
        for number, layer in enumerate(self.model.model.layers):
            assert isinstance(layer, DecoderLayer)
            handles.append(layer.self_attn.o_proj.register_forward_pre_hook(partial(self._keep_heads, number)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _keep_heads(self, layer: int, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.kept_heads[layer] = inputs[0].index_select(0, self.rows)


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """NaN where either is zero: of the first write, for one."""
    return (a * b).sum(dim=-1) / (a.norm(dim=-1) * b.norm(dim=-1))


def watch(model: CausalLM, batch: TokenBatch, rows: Sequence[int]) -> tuple[Watch, Float[Tensor, "rows local_vocab"]]:
    """One pass over the batch; the logits are those of the rows."""
    seen = Watch(model, batch.token_ids.shape[0], rows)
    with seen.hooked():
        out = model(batch, NoCache(), logit_rows=seen.rows, taps=(seen,))
    return seen, out.local_logits
