"""How much of a direction each component wrote, from summands that stay where they are.

`<sum of summands, d> = sum of <summand, d>`: each rank multiplies its own, each head where it lives, and one scalar a component and
row is summed in rank order. Everything is in fp64, so what the components leave over is the model's rounding and not the lens's.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tp_residual.kernels.contract import normalize
from tp_residual.lens.observe import Watch
from tp_residual.model.decoder import CausalLM, DecoderLayer
from tp_residual.parallel.collectives import last_dim_shard_to_invariant, partial_to_invariant
from tp_residual.parallel.partial import Partial
from tp_residual.residual.norms import RMSNorm


def head_rows(model: CausalLM, token_ids: Sequence[int]) -> Float[Tensor, "ids hidden"]:
    """The head's weights of some tokens, on every rank: one all-reduce of rows that one rank has each, and the others add 0 to."""
    head = model.lm_head
    start, stop = head.split.ranges[model.group.rank]
    rows = torch.zeros(len(token_ids), head.hidden_size, dtype=torch.float64, device=model.group.device)
    for row, token_id in enumerate(token_ids):
        if start <= token_id < stop:
            rows[row] = head.weight[token_id - start].double()
    return partial_to_invariant(Partial(rows, model.group, "lens.head_rows"), tag="lens.head_rows", ordered=True)


def logit_directions(
    norm: RMSNorm, final: Float[Tensor, "rows hidden"], unembed: Float[Tensor, "rows hidden"]
) -> tuple[Float[Tensor, "rows hidden"], Float[Tensor, " rows"]]:
    """`(d, b)` with `logit = <x_L, d> + b`: the final norm's r frozen at what it is for x_L, its weight and the head's row in d.

    LayerNorm's centring is a symmetric projection, so it is applied to d once and not to every component.
    """
    _, r = normalize(final, norm.spec)
    directions = unembed * (norm.weight.double() + norm.spec.weight_offset)
    if norm.spec.kind == "layer":
        directions = directions - directions.mean(dim=-1, keepdim=True)
    bias = unembed.new_zeros(len(unembed)) if norm.bias is None else unembed @ norm.bias.double()
    return directions * r, bias


def written_along(
    seen: Watch, directions: Float[Tensor, "rows hidden"], chosen: Tensor | None = None
) -> Float[Tensor, "sites rows"]:
    """Of each component, `<u, d>` row by row. chosen: which of the kept rows the directions are for (all)."""
    local, biases = [], []
    for summand, bias in seen.kept_summands:
        rows = summand if chosen is None else summand.index_select(0, chosen)
        local.append((rows.double() * directions).sum(dim=-1))
        biases.append(_along_bias(bias, directions))
    owed = Partial(torch.stack(local), seen.group, "lens.components")
    return partial_to_invariant(owed, tag="lens.components", ordered=True) + torch.stack(biases)


def heads_along(
    seen: Watch, directions: Float[Tensor, "rows hidden"], chosen: Tensor
) -> tuple[Float[Tensor, "layers rows heads"], Float[Tensor, "layers rows"]]:
    """Of each query head, `<o_proj[:, head] @ its output, d>`, where the head lives; and of o_proj's bias."""
    local, biases = [], []
    for number, layer in enumerate(seen.model.model.layers):
        assert isinstance(layer, DecoderLayer)
        outputs = seen.kept_heads[number].index_select(0, chosen).double()
        pulled = directions @ layer.self_attn.o_proj.weight.double()
        local.append((outputs * pulled).unflatten(-1, (-1, layer.self_attn.head_dim)).sum(dim=-1))
        biases.append(_along_bias(layer.self_attn.o_proj.bias, directions))
    query = seen.model.layout.heads.query
    return last_dim_shard_to_invariant(torch.stack(local), query, seen.group, tag="lens.heads"), torch.stack(biases)


def _along_bias(bias: Tensor | None, directions: Float[Tensor, "rows hidden"]) -> Float[Tensor, " rows"]:
    return directions.new_zeros(len(directions)) if bias is None else directions @ bias.double()
