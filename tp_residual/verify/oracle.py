"""The unsharded decoder that verdicts rest on: plain torch in fp64 or fp32, one layer at a time from the checkpoint.

It shares no code with the package's model, residual and kernels: sizes come from `ModelConfig`, tensors by their checkpoint names, and
each step is written out once more. At most one layer's weights are in memory (and the embedding or the head, while they are used).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tp_residual.checkpoint.files import CheckpointFiles
from tp_residual.errors import CheckpointError
from tp_residual.model.config import ModelConfig

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens", "lm_head", "model.norm"
ATTENTION, MLP = "self_attn.o_proj", "mlp.down_proj"  # the two writes of a layer, by the module that makes the update
NORM_OF = {ATTENTION: "input_layernorm", MLP: "post_attention_layernorm"}

WeightSource = CheckpointFiles | Mapping[str, Tensor]


def site_names(num_hidden_layers: int) -> list[str]:
    """The modules that write to the stream, in order: the embedding, then two a layer. A state is named after the last that wrote."""
    return [EMBEDDING, *(f"model.layers.{layer}.{name}" for layer in range(num_hidden_layers) for name in NORM_OF)]


def norm_names(num_hidden_layers: int) -> list[str]:
    """The norm that reads the state of each site of `site_names`."""
    layers = [f"model.layers.{layer}.{name}" for layer in range(num_hidden_layers) for name in NORM_OF.values()]
    return [*layers, FINAL_NORM]


def read_tensor(source: WeightSource, name: str) -> Tensor:
    """A whole tensor in its own dtype. Raises CheckpointError when it is not there or cannot be read."""
    if isinstance(source, CheckpointFiles):
        if name not in source.tensors:
            raise CheckpointError(
                f"{source.directory} has no tensor {name}; use weights that belong to this config.json"
            )
        file = source.tensors[name].file
        try:
            with safe_open(file, framework="pt") as opened:
                return opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {file}: {error}; download or save it again") from error
    if name not in source:
        raise CheckpointError(f"the given weights have no tensor {name}")
    return source[name].detach()


def has_tensor(source: WeightSource, name: str) -> bool:
    return name in (source.tensors if isinstance(source, CheckpointFiles) else source)


@dataclass(frozen=True)
class OracleState:
    """After one write: `stream` is the residual before any norm, `update` what `site` has added to it, both `[tokens, hidden]`."""

    site: str
    stream: Tensor
    update: Tensor


class Oracle:
    """One model's arithmetic. Activations are `[tokens, ...]`, sequences one after the other; each starts at position 0."""

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        *,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config, self.source, self.dtype, self.device = config, source, dtype, torch.device(device)

    # -- weights

    def tensor(self, name: str) -> Tensor:
        return read_tensor(self.source, name).to(self.device, self.dtype)

    def embedding_name(self) -> str:
        """A tied checkpoint may hold either name alone."""
        name = f"{EMBEDDING}.weight"
        return f"{HEAD}.weight" if self.config.tie_word_embeddings and not has_tensor(self.source, name) else name

    def head_name(self) -> str:
        return self.embedding_name() if self.config.tie_word_embeddings else f"{HEAD}.weight"

    def layer_weights(self, layer: int) -> dict[str, Tensor]:
        """Names without `model.layers.N.`"""
        config = self.config
        names = [f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
        names += [f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")]
        names += [f"{name}.weight" for name in NORM_OF.values()]
        if config.qkv_bias:
            names += [f"self_attn.{name}.bias" for name in ("q_proj", "k_proj", "v_proj")]
        if config.o_bias:
            names.append("self_attn.o_proj.bias")
        if config.mlp_bias:
            names += [f"mlp.{name}.bias" for name in ("gate_proj", "up_proj", "down_proj")]
        if config.qk_norm:
            names += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
        return {name: self.tensor(f"model.layers.{layer}.{name}") for name in names}

    # -- steps

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        root = (x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + self.config.rms_norm_eps).sqrt()
        return weight * (x / root)

    def sublayer(
        self,
        weights: Mapping[str, Tensor],
        layer: int,
        name: str,
        x: Float[Tensor, "tokens hidden"],
        lengths: Sequence[int],
    ) -> Float[Tensor, "tokens hidden"]:
        """The whole update of `name` (ATTENTION or MLP) for the normed input x."""
        config = self.config
        if name == MLP:
            update = self.mlp(weights, x, range(config.intermediate_size))
        else:
            share = config.num_attention_heads // config.num_key_value_heads
            pairs = [(head, head // share) for head in range(config.num_attention_heads)]
            update = self.attention(weights, layer, x, lengths, pairs)
        bias = weights.get(f"{name}.bias")
        return update if bias is None else update + bias

    def mlp(self, weights: Mapping[str, Tensor], x: Tensor, features: range, *, swapped: bool = False) -> Tensor:
        """What the given intermediate features contribute, without the bias. swapped: gate and up exchanged."""
        rows = slice(features.start, features.stop)

        def projected(name: str) -> Tensor:
            bias = weights.get(f"mlp.{name}.bias")
            y = x @ weights[f"mlp.{name}.weight"][rows].mT
            return y if bias is None else y + bias[rows]

        gate, up = projected("gate_proj"), projected("up_proj")
        if swapped:
            gate, up = up, gate
        return (gate * torch.sigmoid(gate) * up) @ weights[f"{MLP}.weight"][:, rows].mT

    def attention(
        self,
        weights: Mapping[str, Tensor],
        layer: int,
        x: Tensor,
        lengths: Sequence[int],
        pairs: Sequence[tuple[int, int]],
    ) -> Tensor:
        """What the given (query head, KV head it reads) pairs contribute, without the bias."""
        total = torch.zeros_like(x)
        for query, key_value in pairs:
            total = total + self.head(weights, layer, x, lengths, query, key_value)
        return total

    def head(
        self, weights: Mapping[str, Tensor], layer: int, x: Tensor, lengths: Sequence[int], query: int, key_value: int
    ) -> Tensor:
        """One query head's contribution `[tokens, hidden]` when it reads KV head `key_value`."""
        size, window = self.config.head_dim, self.config.sliding_window[layer]
        q = self._project(weights, x, "q", query)
        k = self._project(weights, x, "k", key_value)
        v = self._project(weights, x, "v", key_value)
        outputs, start = [], 0
        for length in lengths:
            rows = slice(start, start + length)
            at = torch.arange(length, device=x.device)
            scores = self._rotated(q[rows], at) @ self._rotated(k[rows], at).mT * size**-0.5
            back = at[:, None] - at[None, :]
            hidden = back < 0 if window is None else (back < 0) | (back >= window)
            outputs.append(torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=1) @ v[rows])
            start += length
        return torch.cat(outputs) @ weights[f"{ATTENTION}.weight"][:, query * size : (query + 1) * size].mT

    def _project(self, weights: Mapping[str, Tensor], x: Tensor, which: str, head: int) -> Tensor:
        size = self.config.head_dim
        rows = slice(head * size, (head + 1) * size)
        y = x @ weights[f"self_attn.{which}_proj.weight"][rows].mT
        bias = weights.get(f"self_attn.{which}_proj.bias")
        y = y if bias is None else y + bias[rows]
        scale = weights.get(f"self_attn.{which}_norm.weight")
        return y if scale is None else self.norm(y, scale)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Each pair (i, i + head_dim / 2) turned as a complex number by position x frequency. x: one whole sequence."""
        half, scaling = x.shape[-1] // 2, self.config.rope_scaling
        frequencies = torch.tensor(self._frequencies(x.shape[0]), dtype=torch.float64, device=x.device)
        angle = positions.double()[:, None] * frequencies
        length = torch.full_like(angle, 1.0 if scaling is None else scaling.attention_factor)
        turn = torch.polar(length, angle).to(torch.complex128 if x.dtype == torch.float64 else torch.complex64)
        turned = torch.complex(x[:, :half], x[:, half:]) * turn
        return torch.cat([turned.real, turned.imag], dim=1)

    def _frequencies(self, length: int) -> list[float]:
        """Of each pair, in a sequence of `length` tokens, as the rope type says."""
        config, size, theta = self.config, self.config.head_dim, self.config.rope_theta
        factor, scaling = config.rope_factor, config.rope_scaling
        if config.rope_type == "dynamic" and length > config.max_position_embeddings:
            theta *= (factor * length / config.max_position_embeddings - factor + 1) ** (size / (size - 2))
        plain = [theta ** (-2 * pair / size) for pair in range(size // 2)]
        if config.rope_type == "linear":
            return [frequency / factor for frequency in plain]
        if scaling is None:
            return plain
        trained = scaling.original_max_position_embeddings
        if config.rope_type == "llama3":
            changed = []
            for frequency in plain:
                turns = trained * frequency / (2 * math.pi)  # over the length of pretraining
                if turns >= scaling.high_freq_factor:
                    changed.append(frequency)
                elif turns <= scaling.low_freq_factor:
                    changed.append(frequency / factor)
                else:
                    span = scaling.high_freq_factor - scaling.low_freq_factor
                    kept = (turns - scaling.low_freq_factor) / span
                    changed.append(frequency * (kept + (1 - kept) / factor))
            return changed
        assert config.rope_type == "yarn", config.rope_type
        first, last = (
            size / 2 * math.log(trained / (2 * math.pi * turns)) / math.log(theta)
            for turns in (scaling.beta_fast, scaling.beta_slow)
        )
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, size - 1)
        changed = []
        for pair, frequency in enumerate(plain):
            divided = min(max((pair - first) / ((last - first) or 0.001), 0.0), 1.0)
            changed.append(frequency * (1 - divided + divided / factor))
        return changed

    # -- the whole

    def embed(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        ids = torch.tensor([token for sequence in sequences for token in sequence])
        return read_tensor(self.source, self.embedding_name())[ids].to(self.device, self.dtype)

    def states(self, sequences: Sequence[Sequence[int]]) -> Iterator[OracleState]:
        """The stream after the embedding and after every write."""
        lengths = [len(sequence) for sequence in sequences]
        stream = self.embed(sequences)
        yield OracleState(EMBEDDING, stream, stream)
        for layer in range(self.config.num_hidden_layers):
            weights = self.layer_weights(layer)
            for name, norm in NORM_OF.items():
                update = self.sublayer(weights, layer, name, self.norm(stream, weights[f"{norm}.weight"]), lengths)
                stream = stream + update
                yield OracleState(f"model.layers.{layer}.{name}", stream, update)

    def logits(self, stream: Tensor) -> Float[Tensor, "tokens vocab"]:
        """From the last state."""
        return self.norm(stream, self.tensor(f"{FINAL_NORM}.weight")) @ self.tensor(self.head_name()).mT
