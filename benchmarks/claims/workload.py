"""What the claims are measured on: the product's decoder at small sizes, sublayers of one's own on its stream, and a task to learn."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from tp_residual.checkpoint.random_weights import Fill
from tp_residual.kernels.contract import NormSpec
from tp_residual.model.attention_backend import HeadGroups, TokenBatch
from tp_residual.model.config import ModelConfig
from tp_residual.model.decoder import CausalLM, DecoderLayer
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.partial import Partial
from tp_residual.residual.boundary import Boundary, Site
from tp_residual.residual.config import ResidualConfig, plan_layers
from tp_residual.residual.connection import Connection
from tp_residual.residual.norms import RMSNorm
from tp_residual.residual.stream import Stream
from tp_residual.training.init import InitRule, Normal, init_weights

GROUP = TensorParallelGroup.single()

Sublayer = Callable[[Tensor], Tensor]


def decoder(
    residual: str | ResidualConfig,
    *,
    layers: int,
    hidden: int = 64,
    heads: int = 4,
    vocabulary: int = 32,
    rule: InitRule | None = None,
    overrides: Mapping[str, Fill] | None = None,
    seed: int = 1,
    group: TensorParallelGroup = GROUP,
    dtype: torch.dtype = torch.float32,
    stream_dtype: torch.dtype | None = None,
    sequence_parallel: str = "off",
    boundary: str = "auto",
    filled: bool = True,
) -> CausalLM:
    """A Llama with another residual connection. rule: Normal with `1 / sqrt(hidden)` unless given; the embedding has variance one, so that
    the stream begins there and the sublayers' share of it can be read off. filled: or all weights zero, which takes no time.
    """
    values = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 8 * hidden // 3,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "residual": residual if isinstance(residual, str) else residual.to_dict(),
    }
    config = ModelConfig.from_dict(values, "benchmarks.claims")
    model = CausalLM(
        config,
        group,
        dtype=dtype,
        stream_dtype=stream_dtype,
        sequence_parallel=sequence_parallel,
        boundary=boundary,
    )
    if not filled:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        return model
    fills = {"model.embed_tokens.weight": Fill(scale=1.0), **(overrides or {})}
    init_weights(model, rule or Normal(hidden**-0.5), seed, num_layers=layers, overrides=fills)
    return model


def layer_of(model: CausalLM, number: int) -> DecoderLayer:
    layer = model.model.layers[number]
    assert isinstance(layer, DecoderLayer)
    return layer


def norm_of(layer: DecoderLayer, name: str | None) -> RMSNorm | None:
    norm = None if name is None else layer.get_submodule(name)
    assert norm is None or isinstance(norm, RMSNorm)
    return norm


class EqualLengths:
    """Attention backend for sequences of one length, in one call; the product's own takes them one by one. Differentiable."""

    def __init__(self) -> None:
        self._current: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, layer: int, k: Tensor, v: Tensor, batch: TokenBatch) -> None:
        self._current[layer] = k, v

    def attend(self, layer: int, q: Tensor, batch: TokenBatch, groups: HeadGroups, window: int | None) -> Tensor:
        k, v = self._current.pop(layer)
        q, k, v = (each.unflatten(0, (len(batch.spans), -1)).transpose(1, 2) for each in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)


def random_batch(sequences: int, tokens: int, vocabulary: int = 32, seed: int = 5) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)
    return TokenBatch.prefill(torch.randint(vocabulary, (sequences, tokens), generator=generator).tolist())


def mean_square(x: Tensor) -> float:
    return float(x.double().pow(2).mean())


@torch.no_grad()
def stream_growth(model: CausalLM, batch: TokenBatch) -> tuple[float, float]:
    """Mean square of the stream before the first layer and behind the last."""
    states = model(batch, EqualLengths(), output_hidden_states=True).hidden_states
    assert states is not None
    return mean_square(states[0]), mean_square(states[model.config.num_hidden_layers])


@dataclass
class Passage:
    """What went through a stack. residuals: before the first sublayer and behind each; updates: what each wrote; out: what is read last."""

    residuals: list[Tensor] = field(default_factory=list)
    updates: list[Tensor] = field(default_factory=list)
    out: Tensor | None = None

    def __call__(self, site: Site, partial: Partial | None, residual: Tensor, normed: Tensor | None) -> None:
        self.residuals.append(residual)
        if partial is not None and len(self.residuals) > 1:
            self.updates.append(partial.value)


@cache
def boundary(dtype: torch.dtype) -> Boundary:
    """Kept: a backward pass looks it up."""
    return Boundary(GROUP, stream_dtype=dtype, output_dtype=dtype)


def through(sublayers: Sequence[Sublayer], config: ResidualConfig, x: Tensor) -> Passage:
    """Any functions of `[tokens, hidden]` as sublayers on the product's stream, with its connections; two of them are one layer.

    Norms are LayerNorms without weights of their own. A final norm is read, if the config has one.
    """
    norm = RMSNorm(x.shape[-1], NormSpec(1e-5, "layer"), GROUP, partial_gradient=False, dtype=x.dtype)
    norm.requires_grad_(False)
    plans = [plan for layer in plan_layers(config, -(-len(sublayers) // 2)) for plan in layer]
    passage = Passage()
    stream = Stream.start(Partial(x, GROUP, "embedding"), boundary(x.dtype), (passage,))
    for function, plan in zip(sublayers, plans, strict=True):
        reads = plan.read_norms[0] is not None
        read, stream = stream.read(norm if reads else None)
        connection = Connection(
            config,
            plan.connection,
            x.shape[-1],
            GROUP,
            sequence_parallel=False,
            dtype=x.dtype,
            update_norm=norm if plan.connection.update_norm is not None else None,
            post_norm=norm if plan.connection.post_norm is not None else None,
        )
        stream = stream.write(Partial(function(read), GROUP, plan.connection.name), connection)
    passage.out, _ = stream.read(norm if config.has_final_norm else None)
    return passage


def matrices(count: int, hidden: int, std: float, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(hidden, hidden, generator=generator, dtype=dtype) * std for _ in range(count)]


# -- a task


class Markov:
    """A first-order chain over 32 symbols: what a model must learn is the last token's row of a table.

    Transition rows are `softmax(3 z)`. A model that uses nothing of its input ends at the entropy of single symbols, 3.27 nats; the
    chain's own is 1.21.
    """

    symbols, sequences, length = 32, 16, 32

    def __init__(self) -> None:
        logits = 3 * torch.randn(self.symbols, self.symbols, generator=torch.Generator().manual_seed(0))
        self.transition = logits.softmax(-1)
        self.stationary = torch.full((self.symbols,), 1 / self.symbols)
        for _ in range(500):
            self.stationary = self.stationary @ self.transition

    @property
    def unigram_entropy(self) -> float:
        return float(-(self.stationary * self.stationary.log()).sum())

    @property
    def conditional_entropy(self) -> float:
        return float(-(self.stationary @ (self.transition * self.transition.log()).sum(-1)))

    def batches(self, count: int, seed: int = 7) -> list[Tensor]:
        """Each `[sequences, length + 1]`."""
        generator = torch.Generator().manual_seed(seed)
        found = []
        for _ in range(count):
            columns = [torch.multinomial(self.stationary, self.sequences, replacement=True, generator=generator)]
            for _ in range(self.length):
                columns.append(torch.multinomial(self.transition[columns[-1]], 1, generator=generator)[:, 0])
            found.append(torch.stack(columns, 1))
        return found


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
