"""What the lens has found about one prompt: plain numbers, the same on every rank. Imports no torch.

Tokens are counted within the prompt. A *component* is what wrote to the stream: the embedding, each attention, each MLP.
"""

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

Kind = Literal["embedding", "attention", "mlp"]


@dataclass(frozen=True)
class Site:
    """One write. layer: -1 for the embedding."""

    name: str
    kind: Kind
    layer: int

    @property
    def label(self) -> str:
        return "embedding" if self.layer < 0 else f"{self.layer} {self.kind}"


def sites(num_hidden_layers: int) -> list[Site]:
    """In the order of the stream: the embedding, then two a layer. Named after the module that makes the update."""
    found = [Site("model.embed_tokens", "embedding", -1)]
    for layer in range(num_hidden_layers):
        found.append(Site(f"model.layers.{layer}.self_attn.o_proj", "attention", layer))
        found.append(Site(f"model.layers.{layer}.mlp.down_proj", "mlp", layer))
    return found


@dataclass(frozen=True)
class Write:
    """One write and the stream after it, by token: `norm` = |x|, `update_norm` = |u|, `cosine` = cos(u, x before). L2 norms."""

    site: Site
    norm: list[float]
    update_norm: list[float]
    cosine: list[float]


@dataclass(frozen=True)
class Component:
    """share: `<u, x_L> / |x_L|^2` at the position; mean_share: over the window. logit: `<u, direction of the logit>`."""

    site: Site
    share: float
    mean_share: float
    logit: float


@dataclass(frozen=True)
class LeftOver:
    """What the components do not say. share, stream_logit: of x_L minus the writes, which is the stream's own rounding.

    head_logit: the model's logit minus x_L's dot product with the direction: the roundings of the normed value and of the logit.
    share_bound: what rounding can leave at most; more means that the stream is not the sum of its writes.
    """

    share: float
    share_bound: float
    stream_logit: float
    head_logit: float

    @property
    def is_rounding(self) -> bool:
        return abs(self.share) <= self.share_bound


@dataclass(frozen=True)
class Attention:
    """Head by head what one attention wrote, at the position. bias_*: of o_proj's, which belongs to no head (0 without one)."""

    layer: int
    shares: list[float]
    logits: list[float]
    bias_share: float
    bias_logit: float


@dataclass(frozen=True)
class Likely:
    """What the head makes of a state at one position. top: (token id, log-probability), the likeliest first, equal ones by rising id.

    final_*: of the token the whole model predicts there; rank 1 is the likeliest. kl: KL(whole model || this state), in nats.
    """

    top: list[tuple[int, float]]
    final_log_prob: float
    final_rank: int
    kl: float


@dataclass(frozen=True)
class State:
    """The stream after `layer` (-1: the embedding), read by the final norm and the head at each position of the window."""

    layer: int
    window: list[Likely]

    @property
    def label(self) -> str:
        return "embedding" if self.layer < 0 else str(self.layer)


@dataclass(frozen=True)
class PromptLens:
    """position: whose logit is taken apart. window: the positions up to it that the logit lens shows. final_ids: predicted at those.

    logit: of target, minus that of versus if there is one. norm_bias_logit: of the final norm's bias (0 without one). layer_cosine:
    cos(x before, x after) by layer and token. head_owners: the rank that each query head lives on.
    """

    token_ids: list[int]
    hidden_size: int
    position: int
    window: list[int]
    final_ids: list[int]
    writes: list[Write]
    layer_cosine: list[list[float]]
    target: int
    versus: int | None
    logit: float
    norm_bias_logit: float
    components: list[Component]
    left_over: LeftOver
    attentions: list[Attention]
    head_owners: list[int]
    states: list[State]

    @cached_property
    def by_site(self) -> dict[tuple[int, Kind], Component]:
        return {(component.site.layer, component.site.kind): component for component in self.components}

    @property
    def measured(self) -> list[int]:
        """The tokens that means are over: all but the first, whose norm is often hundreds of times the others'."""
        return list(range(1, len(self.token_ids))) or [0]

    def mean(self, values: list[float]) -> float:
        """Over the measured tokens."""
        return math.fsum(values[token] for token in self.measured) / len(self.measured)

    def rms(self, norm: float) -> float:
        return norm / math.sqrt(self.hidden_size)

    def relative_writes(self, index: int) -> list[float]:
        """|u| / |x before| by token, of a write that is not the first."""
        before, write = self.writes[index - 1], self.writes[index]
        return [_over(update, norm) for update, norm in zip(write.update_norm, before.norm, strict=True)]

    def as_json(self) -> dict[str, Any]:
        """Only finite numbers: others are null."""
        fields: dict[str, Any] = _finite(asdict(self))
        left = self.left_over
        return fields | {
            "sum_of_shares": math.fsum(c.share for c in self.components),
            "sum_of_logits": math.fsum(c.logit for c in self.components) + self.norm_bias_logit,
            "sums_hold": left.is_rounding,
        }


def _over(value: float, norm: float) -> float:
    return value / norm if norm else math.nan


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
