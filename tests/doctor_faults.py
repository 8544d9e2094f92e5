"""Faults of a residual connection, injected into a built model: (probe, what the doctor must call it, how to inject it).

Each is a mistake that somebody could write: into the boundary's executor, a layer, a connection, or the weights of one rank.
"""

from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.collectives import summed
from tp_residual.parallel.partial import Partial
from tp_residual.residual.stream import Owed, Stream
from tp_residual.verify.faults import inject

LAYER = 1


def override(target: object, name: str, function: Callable[..., Any]) -> None:
    object.__setattr__(target, name, MethodType(function, target))


def on_write(model: CausalLM, module: str, change: Callable[[Partial], Partial]) -> None:
    """What a sublayer of LAYER writes is changed on its way to the stream, behind the module itself."""
    layer = model.model.layers[LAYER]
    plain = layer.forward

    def forward(self: Any, stream: Stream, *arguments: Any) -> Stream:
        real = Stream.write

        def write(stream: Stream, update: Partial, *more: Any, **options: Any) -> Stream:
            return real(stream, change(update) if f".{module}." in update.source else update, *more, **options)

        Stream.write = write  # type: ignore[method-assign]
        try:
            return plain(stream, *arguments)
        finally:
            Stream.write = real  # type: ignore[method-assign]

    override(layer, "forward", forward)


def on_join(model: CausalLM, change: Callable[..., tuple[Tensor | None, Owed]]) -> None:
    """What is joined at the completion of LAYER's attention update: change(stream, residual, owed, previous residual)."""
    real, before = Stream._join, list[Tensor | None]()

    def join(stream: Stream, residual: Tensor | None, owed: Owed | None, *more: Any) -> Any:
        before.append(residual)
        if owed is not None and owed.partial.source == f"model.layers.{LAYER}.self_attn.o_proj":
            residual, owed = change(stream, residual, owed, before[-2])
        return real(stream, residual, owed, *more)

    Stream._join = join  # type: ignore[method-assign]


def scaled(factor: float) -> Callable[[Partial], Partial]:
    return lambda p: replace(p, value=p.value * factor, bias=None if p.bias is None else p.bias * factor)


def dropped(model: CausalLM) -> None:
    on_join(model, lambda _s, residual, owed, _b: (residual, replace(owed, partial=scaled(0.0)(owed.partial))))


def join_scaled(factor: float) -> Callable[[CausalLM], None]:
    return lambda model: on_join(
        model, lambda _s, r, owed, _b: (r, replace(owed, partial=scaled(factor)(owed.partial)))
    )


def skip_scaled(factor: float | None) -> Callable[[CausalLM], None]:
    """None: by the number of ranks, as if each rank added the skip to its summand."""
    return lambda model: on_join(
        model, lambda s, r, owed, _b: (r * (s.boundary.group.size if factor is None else factor), owed)
    )


def mis_based(model: CausalLM) -> None:
    on_join(model, lambda _s, _r, owed, before: (before, owed))


def from_verify(kind: str) -> Callable[[CausalLM], None]:
    return lambda model: (inject(model, kind, LAYER), None)[1]


def bias_everywhere(model: CausalLM) -> None:
    on_join(
        model,
        lambda s, r, owed, _b: (
            r,
            replace(owed, partial=replace(owed.partial, bias=owed.partial.bias * s.boundary.group.size)),
        ),
    )


def norm_missing(model: CausalLM) -> None:
    real = Stream.read

    def read(stream: Stream, norm: Any, *arguments: Any, **options: Any) -> Any:
        chosen = None if norm is not None and norm.name == f"model.layers.{LAYER}.post_attention_layernorm" else norm
        return real(stream, chosen, *arguments, **options)

    Stream.read = read  # type: ignore[method-assign]


def other_norm(model: CausalLM) -> None:
    layer = model.model.layers[LAYER]
    layer.post_attention_layernorm = model.model.layers[0].post_attention_layernorm


def replica_off(model: CausalLM) -> None:
    if model.group.rank == model.group.size - 1:
        with torch.no_grad():
            model.model.layers[LAYER].input_layernorm.weight[0] += 0.1


def summed_twice(model: CausalLM) -> None:
    """A row-parallel linear that has completed its own sum: the boundary sums it again."""

    def again(
        stream: Stream, residual: Tensor | None, owed: Owed, _before: Tensor | None
    ) -> tuple[Tensor | None, Owed]:
        value = owed.partial.value
        total = summed(stream.boundary.group, value.detach(), "fault", True)
        return residual, replace(owed, partial=replace(owed.partial, value=total + 0 * value))

    on_join(model, again)


def branch_detached(model: CausalLM) -> None:
    on_write(model, "mlp", lambda p: replace(p, value=p.value.detach() + 0 * p.value))


def skip_detached(model: CausalLM) -> None:
    on_join(model, lambda _s, r, owed, _b: (r.detach() + 0 * r, owed))


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def skip_gradient_doubled(model: CausalLM) -> None:
    on_join(model, lambda _s, r, owed, _b: (_Doubled.apply(r), owed))


def writers_dead(model: CausalLM) -> None:
    def forward(self: Any, x: Tensor) -> Partial:
        return Partial(0 * F.linear(x, self.weight), self.group, self.name, self.bias)

    override(model.model.layers[LAYER].mlp.down_proj, "forward", forward)


def unsynced_norm(model: CausalLM) -> None:
    """Under sequence parallelism a norm's gradient is a sum over tokens; here its block says that it is complete."""
    norm = model.model.layers[LAYER].input_layernorm
    norm.partial_gradient = False


def weight_gradient_averaged(model: CausalLM) -> None:
    """As a training loop that averages over tensor-parallel ranks would leave it."""
    model.model.layers[LAYER].mlp.down_proj.weight.register_hook(lambda grad: grad / 2)


def head_scaled(model: CausalLM) -> None:
    head = model.lm_head
    plain = head.forward
    override(head, "forward", lambda _self, x: 2 * plain(x))


def embedding_scaled(model: CausalLM) -> None:
    table = model.model.embed_tokens
    plain = table.forward
    override(table, "forward", lambda _self, ids: scaled(2.0)(plain(ids)))


def embedding_gradient_doubled(model: CausalLM) -> None:
    model.model.embed_tokens.weight.register_hook(lambda grad: 2 * grad)


def silent_sublayer(model: CausalLM) -> None:
    layer = model.model.layers[LAYER]
    layer.sublayers = layer.sublayers[:1]


def nan_inside(model: CausalLM) -> None:
    with torch.no_grad():
        model.model.layers[LAYER].mlp.down_proj.weight[0, :1] = float("nan")


def rank_reads_own(model: CausalLM) -> None:
    """Sequence parallel: each rank's neighbours' rows are stale."""
    real = Stream._join

    def join(stream: Stream, residual: Tensor | None, owed: Owed | None, *more: Any) -> Any:
        new, read = real(stream, residual, owed, *more)
        norm = more[0]
        if norm is not None and norm.name == f"model.layers.{LAYER}.post_attention_layernorm":
            split = stream.boundary.token_split(stream.tokens)
            rows = torch.zeros_like(read)
            start, stop = split.ranges[stream.boundary.group.rank]
            rows[start:stop] = 1
            read = read * rows
        return new, read

    Stream._join = join  # type: ignore[method-assign]


# name -> (probe, the name that it must be given, injection, whether it needs several ranks, sequence parallel only)
FAULTS: dict[str, tuple[str, str, Callable[[CausalLM], None]]] = {
    "update skipped": ("joins", "update skipped", dropped),
    "update doubled": ("joins", "update doubled", join_scaled(2.0)),
    "update mis-scaled": ("joins", "mis-scaled: 1 times the skip and 1.1 times the update", join_scaled(1.1)),
    "update of the wrong sign": ("joins", "wrong sign", join_scaled(-1.0)),
    "skip missing": ("joins", "skip missing", skip_scaled(0.0)),
    "skip doubled": ("joins", "skip doubled", skip_scaled(2.0)),
    "skip mis-scaled": ("joins", "mis-scaled: 0.9 times the skip", skip_scaled(0.9)),
    "skip on every rank": ("joins", "skip added on every rank", skip_scaled(None)),
    "mis-based": ("joins", "mis-based", mis_based),
    "stale residual": ("joins", "mis-based", from_verify("stale residual")),
    "missing reduction": ("joins", "not summed over ranks", from_verify("missing reduction")),
    "double reduction": ("joins", "update summed twice", summed_twice),
    "bias on every rank": ("joins", "bias added on every rank", bias_everywhere),
    "norm missing": ("reads", "wrong norm: none in the place of", norm_missing),
    "another layer's norm": ("reads", "wrong norm", other_norm),
    "wrong KV-head map": ("updates", "mis-sharded", from_verify("wrong KV-head map")),
    "swapped gate/up": ("updates", "mis-sharded", from_verify("swapped gate/up")),
    "dead writer": ("updates", "dead", writers_dead),
    "sublayer skipped": ("updates", "skipped", silent_sublayer),
    "replica differs": ("replicas", "the parameter model.layers.1.input_layernorm.weight", replica_off),
    "branch detached": ("branch gradient", "dead branch", branch_detached),
    "skip detached": ("skip gradient", "dead skip", skip_detached),
    "skip gradient doubled": ("skip gradient", "mis-scaled skip gradient: 2 times", skip_gradient_doubled),
    "unsummed norm gradient": ("gradient sync", "unsummed gradient", unsynced_norm),
    "weight gradient averaged": ("parameter gradients", "0.5 times what is due", weight_gradient_averaged),
    "head mis-scaled": ("ends", "mis-scaled: 2 times", head_scaled),
    "embedding mis-scaled": ("ends", "mis-scaled: 2 times", embedding_scaled),
    "embedding gradient doubled": ("parameter gradients", "2 times what is due", embedding_gradient_doubled),
    "NaN": ("updates", "not finite", nan_inside),
    "rows of other ranks lost": ("updates", "wrong input", rank_reads_own),
}
SEVERAL_RANKS = {"skip on every rank", "missing reduction", "double reduction", "bias on every rank", "replica differs"}
SEQUENCE_PARALLEL_ONLY = {"unsummed norm gradient", "rows of other ranks lost"}
