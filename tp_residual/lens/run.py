"""`look`: one pass over the prompts, and everything the lens shows of it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tp_residual.errors import RequestError
from tp_residual.lens.attribution import head_rows, heads_along, logit_directions, written_along
from tp_residual.lens.logit_lens import FinalPrediction
from tp_residual.lens.observe import Watch, watch
from tp_residual.lens.request import LensRequest
from tp_residual.lens.result import Attention, Component, LeftOver, Likely, PromptLens, State, Write
from tp_residual.model.attention_backend import Span, TokenBatch
from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.vocabulary import request_checksum, require_same_request

_OWN_ROUNDING = 1e-12  # of a share: the lens's sums in fp64, of hidden_size products a component


@torch.no_grad()
def look(model: CausalLM, sequences: Sequence[Sequence[int]], request: LensRequest) -> list[PromptLens]:
    """All ranks call it with the same arguments and get the same numbers.

    Raises RequestError, before any collective, for a request that makes no sense for this model and these prompts, and for a residual
    that is not the sum of its writes; after the pass, on every rank, for a likeliest token versus itself. GenerationError for logits that
    are NaN or infinite, and ranks with different requests.
    """
    request.check(sequences, model.config)
    require_same_request(model.group, request_checksum(sequences, request))
    batch = TokenBatch.prefill([list(ids) for ids in sequences], model.group.device)
    places = [_Place(span, request) for span in batch.spans]
    seen, local_logits = watch(model, batch, [row for place in places for row in place.rows])
    prediction = FinalPrediction(seen, local_logits)
    focus, ends = list[int](), 0
    for place in places:
        ends += len(place.rows)
        focus.append(ends - 1)  # the window ends with the position
    chosen = torch.tensor(focus, device=model.group.device)
    stream = seen.figures()
    sums = _Sums(seen, prediction, chosen, request)
    shown = request.shown_layers(model.config)
    border = {layer: 2 * layer + 2 for layer in ([-1] if shown.start == 0 else []) + list(shown)}
    states = {layer: prediction.compare(site, request.top) for layer, site in border.items()}
    found, first = [], 0
    for index, (place, ids) in enumerate(zip(places, sequences, strict=True)):
        rows = slice(first, first + len(place.rows))
        first = rows.stop
        found.append(_assemble(index, place, list(ids), seen, prediction, stream, sums, states, rows))
    return found


class _Place:
    """Where in the flattened batch a prompt's window is."""

    def __init__(self, span: Span, request: LensRequest) -> None:
        length = span.stop - span.start
        self.tokens = slice(span.start, span.stop)
        self.position = request.position % length
        self.window = list(range(max(0, self.position + 1 - request.window), self.position + 1))
        self.rows = [span.start + position for position in self.window]


class _Sums:
    """Shares of the final stream and of the chosen logit, by component and by head."""

    def __init__(self, seen: Watch, prediction: FinalPrediction, chosen: Tensor, request: LensRequest) -> None:
        model = seen.model
        final = seen.whole_rows(seen.kept_residuals[-1]).double()
        self.final_norm = final.norm(dim=-1)
        towards_final = final / self.final_norm.square()[:, None]
        self.shares = written_along(seen, towards_final)
        self.head_shares, self.bias_shares = heads_along(seen, towards_final[chosen], chosen)

        predicted = prediction.ids[chosen].tolist()
        self.versus = request.versus
        self.targets = predicted if request.target is None else [request.target] * len(predicted)
        for target in self.targets:
            if target == request.versus:
                raise RequestError(
                    f"token {target} is the likeliest itself; give another token as versus, or say which token is compared with it"
                )
        wanted = sorted({*self.targets, *([] if request.versus is None else [request.versus])})
        rows = dict(zip(wanted, head_rows(model, wanted), strict=True))
        unembed = torch.stack([rows[target] for target in self.targets])
        logits = self._logits(prediction, self.targets, chosen)
        if request.versus is not None:
            unembed = unembed - rows[request.versus]
            logits = logits - self._logits(prediction, [request.versus] * len(predicted), chosen)
        self.logits = logits
        directions, self.norm_bias_logits = logit_directions(seen.final_norm, final[chosen], unembed)
        self.component_logits = written_along(seen, directions, chosen)
        self.head_logits, self.bias_logits = heads_along(seen, directions, chosen)
        of_stream = (final[chosen] * directions).sum(dim=-1)
        self.stream_logits = of_stream - self.component_logits.sum(dim=0)
        self.left_at_head = logits - of_stream - self.norm_bias_logits

    @staticmethod
    def _logits(prediction: FinalPrediction, token_ids: list[int], chosen: Tensor) -> Tensor:
        """token_ids: one a prompt; the kept rows that are nobody's position are asked for any token."""
        everywhere = torch.zeros_like(prediction.ids)
        everywhere[chosen] = torch.tensor(token_ids, device=chosen.device)
        return prediction.logits(everywhere)[chosen]


def _assemble(
    index: int,
    place: _Place,
    token_ids: list[int],
    seen: Watch,
    prediction: FinalPrediction,
    stream: Tensor,
    sums: _Sums,
    states: dict[int, list[Likely]],
    rows: slice,
) -> PromptLens:
    """One prompt's part, as plain numbers. rows: its window among the kept rows, its position the last of them."""
    model, focus = seen.model, rows.stop - 1
    config, boundary = model.config, model.boundary_for(len(stream))
    norms, updates, cosines, border_cosines = stream[place.tokens].permute(2, 1, 0).tolist()
    shares = sums.shares[:, rows]
    # each write rounds each element of the stream by at most half its last place; as much again for the sums themselves
    rounded = sum(norm[place.position] for norm in norms) * torch.finfo(boundary.stream_dtype).eps
    if boundary.round_reduced:
        rounded += sum(update[place.position] for update in updates) * torch.finfo(model.dtype).eps
    left = LeftOver(
        1.0 - float(shares[:, -1].sum()),
        rounded / float(sums.final_norm[focus]) + _OWN_ROUNDING,
        float(sums.stream_logits[index]),
        float(sums.left_at_head[index]),
    )
    components = [
        Component(site, share, mean, logit)
        for site, share, mean, logit in zip(
            seen.sites,
            shares[:, -1].tolist(),
            shares.mean(dim=1).tolist(),
            sums.component_logits[:, index].tolist(),
            strict=True,
        )
    ]
    attentions = [
        Attention(
            layer,
            sums.head_shares[layer, index].tolist(),
            sums.head_logits[layer, index].tolist(),
            float(sums.bias_shares[layer, index]),
            float(sums.bias_logits[layer, index]),
        )
        for layer in range(config.num_hidden_layers)
    ]
    return PromptLens(
        token_ids=token_ids,
        hidden_size=config.hidden_size,
        position=place.position,
        window=place.window,
        final_ids=prediction.ids[rows].tolist(),
        writes=[Write(*each) for each in zip(seen.sites, norms, updates, cosines, strict=True)],
        layer_cosine=border_cosines[2::2],
        target=sums.targets[index],
        versus=sums.versus,
        logit=float(sums.logits[index]),
        norm_bias_logit=float(sums.norm_bias_logits[index]),
        components=components,
        left_over=left,
        attentions=attentions,
        head_owners=[rank for rank, size in enumerate(model.layout.heads.query.sizes) for _ in range(size)],
        states=[State(layer, likely[rows]) for layer, likely in states.items()],
    )
