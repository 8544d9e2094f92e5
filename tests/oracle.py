"""The unsharded decoder every sharded one is judged by: plain torch, one process, its own arithmetic.

It shares no code with the package's model, residual or kernels. It takes sizes from `ModelConfig` and tensors by their checkpoint names,
computes one sequence at a time with every attention score written out, and returns the residual after every write: a norm hides a
wrong scale, so the pre-norm stream is what has to be right. Parameters keep their checkpoint names, and it is differentiable.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tp_residual.model.config import ModelConfig


class OracleOutput(NamedTuple):
    """logits `[tokens, vocab]`, sequences one after the other. streams, updates: after and of each write, by the writing module."""

    logits: Tensor
    streams: dict[str, Tensor]
    updates: dict[str, Tensor]
    final: Tensor  # what the final norm returns

    def hidden_states(self) -> tuple[Tensor, ...]:
        """x_0 ... x_L and the final norm's output: the states at layer borders."""
        return (*(state for name, state in self.streams.items() if not name.endswith("o_proj")), self.final)


class Oracle(nn.Module):
    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        for name, tensor in weights.items():
            *path, leaf = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(leaf, nn.Parameter(tensor.to(dtype, copy=True)))

    def forward(self, sequences: Sequence[Sequence[int]]) -> OracleOutput:
        config, streams, updates = self.config, dict[str, Tensor](), dict[str, Tensor]()
        lengths = [len(sequence) for sequence in sequences]
        ids = torch.tensor([token for sequence in sequences for token in sequence])

        def write(name: str, stream: Tensor | None, update: Tensor) -> Tensor:
            updates[name] = update
            streams[name] = update if stream is None else stream + update
            return streams[name]

        x = write("model.embed_tokens", None, self.get_parameter("model.embed_tokens.weight")[ids])
        for layer in range(config.num_hidden_layers):
            path = f"model.layers.{layer}"
            heads = [
                self.attention(part, f"{path}.self_attn", config.sliding_window[layer])
                for part in self.norm(x, f"{path}.input_layernorm").split(lengths)
            ]
            x = write(f"{path}.self_attn.o_proj", x, self.linear(torch.cat(heads), f"{path}.self_attn.o_proj"))
            y = self.norm(x, f"{path}.post_attention_layernorm")
            gate = self.linear(y, f"{path}.mlp.gate_proj")
            y = gate / (1 + (-gate).exp()) * self.linear(y, f"{path}.mlp.up_proj")
            x = write(f"{path}.mlp.down_proj", x, self.linear(y, f"{path}.mlp.down_proj"))
        final = self.norm(x, "model.norm")
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        return OracleOutput(
            torch.einsum("td,vd->tv", final, self.get_parameter(f"{head}.weight")), streams, updates, final
        )

    def attention(self, x: Tensor, path: str, window: int | None) -> Tensor:
        """One sequence `[length, hidden]` to its heads' outputs `[length, heads * head_dim]`."""
        config, length = self.config, x.shape[0]
        q, k, v = (
            self.linear(x, f"{path}.{name}").view(length, -1, config.head_dim)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        if config.qk_norm:
            q, k = self.norm(q, f"{path}.q_norm"), self.norm(k, f"{path}.k_norm")
        position = torch.arange(length)
        q, k = self.rotate(q, position), self.rotate(k, position)
        group = config.num_attention_heads // config.num_key_value_heads
        outputs = []
        for head in range(config.num_attention_heads):
            scores = torch.einsum("id,jd->ij", q[:, head], k[:, head // group]) / config.head_dim**0.5
            distance = position[:, None] - position
            visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            outputs.append(scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v[:, head // group])
        return torch.cat(outputs, dim=-1)

    def rotate(self, x: Tensor, position: Tensor) -> Tensor:
        """Element i turns with element i + head_dim / 2 by position / factor * theta^(-2i / head_dim)."""
        config, half = self.config, self.config.head_dim // 2
        i = torch.arange(half, dtype=self.dtype)
        angle = (
            position.to(self.dtype)[:, None] / config.rope_factor * config.rope_theta ** (-2 * i / config.head_dim)
        )[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)

    def norm(self, x: Tensor, path: str) -> Tensor:
        return (
            x
            / (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt()
            * self.get_parameter(f"{path}.weight")
        )

    def linear(self, x: Tensor, path: str) -> Tensor:
        y = torch.einsum("...i,oi->...o", x, self.get_parameter(f"{path}.weight"))
        module = self.get_submodule(path)
        return y + module.bias if "bias" in dict(module.named_parameters()) else y
