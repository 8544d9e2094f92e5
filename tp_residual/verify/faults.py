"""Faults to order, in a built model: the proof that `verify` sees and names what it claims to.

    undo = inject(model, "missing reduction", layer=3)      on every rank alike
    report = verify_model(model, weights, sequences)        report.culprit.kind == "missing reduction"
    undo()

Reductions, scales and the stale residual are broken where the layer's attention update is completed, inside the boundary; the other
faults sit in the layer's modules. Weights are altered in place and put back by `undo`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor

from tp_residual.errors import RequestError
from tp_residual.kernels.contract import add, norm, widen
from tp_residual.model.attention import Attention
from tp_residual.model.attention_backend import HeadGroups
from tp_residual.model.decoder import CausalLM, DecoderLayer
from tp_residual.parallel.collectives import gathered, summed
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.linear import ColumnParallelLinear, RowParallelLinear, check_input
from tp_residual.parallel.partial import Partial
from tp_residual.parallel.splits import Split
from tp_residual.residual.boundary import BoundaryRequest, Executor

FAULTS = (
    "missing reduction",
    "double reduction",
    "wrong scale",
    "stale residual",
    "bias times tp",
    "wrong KV-head map",
    "swapped gate/up",
    "norm weight not offset",
    "weights shifted by a row",
)
WRONG_SCALE = 1.5


def inject(model: CausalLM, kind: str, layer: int) -> Callable[[], None]:
    """Break `model` in `layer`; returns what repairs it. Every rank calls it with the same arguments.

    Raises RequestError where the model has no such thing to break: no o_proj bias, a single KV head, one rank.
    """
    if kind not in FAULTS:
        raise RequestError(f"fault {kind!r} is not one of {', '.join(FAULTS)}")
    if not 0 <= layer < model.config.num_hidden_layers:
        raise RequestError(f"layer {layer} is outside the model's {model.config.num_hidden_layers} layers")
    if model.group.size == 1 and kind in ("missing reduction", "double reduction", "bias times tp"):
        raise RequestError(f"{kind!r} needs at least 2 ranks; tp is 1")
    module = model.model.layers[layer]
    assert isinstance(module, DecoderLayer)
    if kind in FAULTS[:4]:
        return _break_boundary(model, kind, layer)
    if kind == "bias times tp":
        return _bias_in_every_rank(module.self_attn.o_proj)
    if kind == "wrong KV-head map":
        return _wrong_heads(model, module.self_attn)
    if kind == "swapped gate/up":
        return _swap_gate_up(module.mlp.gate_up_proj)
    if kind == "norm weight not offset":
        return _alter(module.get_parameter("post_attention_layernorm.weight"), lambda weight: weight - 1)
    # a rank in the middle or at the end; its rows of q_proj, k_proj and v_proj
    chosen = model.group.rank == model.group.size - 1
    return _alter(module.self_attn.qkv_proj.weight, lambda weight: weight.roll(-1, 0)) if chosen else _nothing


def _nothing() -> None:
    pass


def _alter(parameter: torch.nn.Parameter, change: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    kept = parameter.detach().clone()
    with torch.no_grad():
        parameter.copy_(change(kept))

    def undo() -> None:
        with torch.no_grad():
            parameter.copy_(kept)

    return undo


class _FaultyExecutor:
    """The model's own executor, but for the boundary whose tag is `tag`."""

    def __init__(self, inner: Executor, kind: str, tag: str) -> None:
        self.inner, self.kind, self.tag = inner, kind, tag
        self.name, self.ordered = inner.name, inner.ordered
        self.before: Tensor | None = None

    def supports(self, request: BoundaryRequest, group: TensorParallelGroup) -> str | None:
        return self.inner.supports(request, group)

    def run(
        self,
        request: BoundaryRequest,
        group: TensorParallelGroup,
        tag: str,
        tokens: Split,
        residual: Tensor | None,
        partial: Tensor | None,
        bias: Tensor | None,
        weight: Tensor | None,
        norm_bias: Tensor | None,
        update_weight: Tensor | None = None,
        update_norm_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        stale, self.before = self.before, residual
        if tag == self.tag:
            assert partial is not None and residual is not None
            if self.kind == "missing reduction":
                own = widen(partial)[slice(*tokens.ranges[group.rank])]
                new = add(residual, own if bias is None else own + widen(bias), request.stream_dtype)
                assert weight is not None and request.norm is not None
                normed = norm(new, weight, norm_bias, request.norm, request.output_dtype)
                return new, gathered(group, normed, tag, 0, tokens) if request.sequence_parallel else normed
            if self.kind == "double reduction":
                partial = summed(group, partial, tag, True)
            elif self.kind == "wrong scale":
                partial = partial * WRONG_SCALE
            else:
                residual = torch.zeros_like(residual) if stale is None else stale
        return self.inner.run(request, group, tag, tokens, residual, partial, bias, weight, norm_bias)


def _break_boundary(model: CausalLM, kind: str, layer: int) -> Callable[[], None]:
    kept = {mode: boundary.executor for mode, boundary in model.boundaries.items()}
    tag = f"model.layers.{layer}.post_attention_layernorm"
    for mode, boundary in model.boundaries.items():
        boundary.executor = _FaultyExecutor(kept[mode], kind, tag)

    def undo() -> None:
        for mode, boundary in model.boundaries.items():
            boundary.executor = kept[mode]

    return undo


def _override(module: torch.nn.Module, name: str, function: Callable[..., object]) -> Callable[[], None]:
    object.__setattr__(module, name, MethodType(function, module))
    return lambda: object.__delattr__(module, name)


def _bias_in_every_rank(o_proj: RowParallelLinear) -> Callable[[], None]:
    if o_proj.bias is None:
        raise RequestError("'bias times tp' needs a model whose o_proj has a bias")

    def forward(self: RowParallelLinear, x: Tensor) -> Partial:
        check_input(x, self.in_split.size(self.group.rank), "RowParallelLinear", (self.name,))
        return Partial(F.linear(x, self.weight, self.bias), self.group, self.name)

    return _override(o_proj, "forward", forward)


def _swap_gate_up(gate_up_proj: ColumnParallelLinear) -> Callable[[], None]:
    def split(self: ColumnParallelLinear, y: Tensor) -> tuple[Tensor, ...]:
        return y.split(self.local_sizes, dim=-1)[::-1]

    return _override(gate_up_proj, "split", split)


@dataclass(frozen=True)
class _RolledHeads:
    """A HeadSplit whose query heads read the next local KV head."""

    key_value: Split
    wrong: tuple[int, ...]

    def kv_index(self, rank: int) -> tuple[int, ...]:
        return self.wrong


def _wrong_heads(model: CausalLM, attention: Attention) -> Callable[[], None]:
    """Query heads read the next KV head of their rank; where no rank has a choice, ranks hold a KV head of their neighbour's."""
    heads, group, size = model.layout.heads, model.group, model.config.head_dim
    if heads.key_value.total == 1:
        raise RequestError("'wrong KV-head map' needs at least 2 KV heads; this model has 1")
    local = heads.key_value.size(group.rank)
    if any(1 < count < len(heads.kv_index(rank)) for rank, count in enumerate(heads.key_value.sizes)):
        kept = attention.groups
        wrong = tuple((index + 1) % local for index in heads.kv_index(group.rank))
        if 1 < local < len(wrong):
            attention.groups = HeadGroups(_RolledHeads(heads.key_value, wrong), group.rank, group.device)  # type: ignore[arg-type]

        def undo() -> None:
            attention.groups = kept

        return undo
    projection = attention.qkv_proj
    _, k, v = projection.weight.detach().split(projection.local_sizes)
    last = torch.stack([k[-size:], v[-size:]])
    q_rows, k_rows = projection.local_sizes[:2]
    if group.size == 1:  # every query head has a KV head of its own: exchange them
        return _alter(projection.weight, lambda w: torch.cat([w[:q_rows], k.roll(size, 0), v.roll(size, 0)]))
    everybody = group.run("all_gather", "fault", last[None], lambda transport, t: transport.all_gather(t))
    theirs = everybody[(group.rank + 1) % group.size]

    def change(weight: Tensor) -> Tensor:
        changed = weight.clone()
        changed[q_rows : q_rows + size] = theirs[0]
        changed[q_rows + k_rows : q_rows + k_rows + size] = theirs[1]
        return changed

    return _alter(projection.weight, change)
