"""Every residual variant written out: the oracle's attention and MLP, and equations taken from the papers, by preset fields.

Nothing of the product's connection, stream or plan is used but the parameters' names.
"""

import math
from collections.abc import Sequence

import torch
from oracle import Oracle, OracleOutput
from tiny_models import config as tiny_config
from torch import Tensor

from tp_residual.model.config import ModelConfig
from tp_residual.model.layout import ModelLayout
from tp_residual.residual.config import ResidualConfig


def variant(name: str, residual: ResidualConfig, **changes: object) -> ModelConfig:
    return tiny_config(name, residual=residual.to_dict(), **changes)


def variant_weights(config: ModelConfig, seed: int = 4) -> dict[str, Tensor]:
    """Random values for every tensor of the layout, none at its special starting point: norms and scales around 1, the rest 0.2 wide."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for tensor in ModelLayout.of(config, 1).tensors(sequence_parallel=False):
        value = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        near_one = ("norm" in tensor.name and tensor.name.endswith("weight")) or tensor.name.endswith("_scale")
        weights[tensor.name] = 1 + 0.3 * value if near_one else 0.2 * value
    return weights


class ResidualOracle(Oracle):
    """config.residual's equations in one process. kept: (layer, sublayer) places that run; all unless given. inference: survival scales."""

    kept: set[tuple[int, int]] | None = None
    inference = True

    def forward(self, sequences: Sequence[Sequence[int]]) -> OracleOutput:
        config, r = self.config, self.config.residual
        streams, updates = dict[str, Tensor](), dict[str, Tensor]()
        x = self.stack("model", sequences, config.num_hidden_layers, streams, updates)
        final = self.normed(x, "model.norm") if r.has_final_norm else x
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        logits = torch.einsum("td,vd->tv", final, self.get_parameter(f"{head}.weight"))
        return OracleOutput(logits, streams, updates, final)

    def stack(
        self,
        stack: str,
        sequences: Sequence[Sequence[int]],
        num_layers: int,
        streams: dict[str, Tensor],
        updates: dict[str, Tensor],
        *,
        causal: bool = True,
        memory: Sequence[Tensor] | None = None,
        embedding: str | None = None,
    ) -> Tensor:
        """x_L of one stack. memory: the encoder's output by sequence."""
        r = self.config.residual
        lengths = [len(sequence) for sequence in sequences]
        ids = torch.tensor([token for sequence in sequences for token in sequence])
        x = self.get_parameter(f"{embedding or stack}.embed_tokens.weight")[ids] * r.embed_scale
        streams[f"{stack}.embed_tokens"] = x
        history, newest = [x], torch.zeros_like(x)
        middle = [("self_attn",)] if memory is None else [("self_attn",), ("cross_attn",)]
        groups = [*middle, ("mlp",)]
        if r.topology == "parallel":
            groups = [tuple(module for group in groups for module in group)]
        if r.topology == "macaron":
            groups = [("first_mlp",), *middle, ("mlp",)]
        total, number = num_layers * len(groups), 0
        for layer in range(num_layers):
            path = f"{stack}.layers.{layer}"
            for index, modules in enumerate(groups):
                number += 1
                if self.kept is not None and (layer, index) not in self.kept:
                    continue
                read = x - newest if r.topology == "ladder" and layer >= r.ladder_from else x
                update = torch.zeros_like(x)
                for module in modules:
                    y = read
                    if r.placement in ("pre", "sandwich"):
                        shared = r.topology == "parallel" and r.parallel_norms == 1
                        y = self.normed(y, f"{path}.{self.before(modules[0] if shared else module)}")
                    if r.input_scale_by_depth:
                        y = y / math.sqrt(layer + 1)
                    update = update + self.sublayer(y, f"{path}.{module}", layer, lengths, causal, memory)
                after = f"{path}.{self.after(modules[-1])}"
                if r.placement in ("sandwich", "output"):
                    update = self.normed(update, after)
                update = update * r.update_scale
                if r.update_scale_by_depth:
                    update = update / math.sqrt(num_layers)
                if r.topology == "macaron" and modules[0] in ("first_mlp", "mlp"):
                    update = update / 2
                if r.drop == "stochastic_depth" and self.inference:
                    update = update * (1 - r.drop_rate * number / total)
                own = f"{path}.{modules[-1]}_residual"
                if r.learned_update != "none":
                    update = update * self.get_parameter(f"{own}.update_scale")
                if r.gate != "none":
                    x_part, update = self.gated(x, update, f"{own}.gate")
                else:
                    x_part = x
                if r.shortcut != "identity":
                    shared_path = f"{stack}.residual_shortcut"
                    x_part = self.shortcut(x_part, shared_path if r.shortcut_shared else f"{own}.shortcut")
                alpha = (2 * num_layers) ** 0.25 if r.skip_scale == "deepnorm" else r.skip_scale
                if r.skip_layers is not None and layer not in r.skip_layers:
                    alpha = 0.0
                x_part = x_part * alpha
                if r.learned_skip != "none":
                    x_part = x_part * self.get_parameter(f"{own}.skip_scale")
                if r.skip_channels is not None:
                    x_part = torch.cat([x_part[:, : r.skip_channels], 0 * x_part[:, r.skip_channels :]], 1)
                x, newest = x_part + update, update
                if r.placement == "post":
                    x = self.normed(x, after)
                streams[own], updates[own] = x, update
            history.append(x)
            if r.depth_mix:
                weights = self.get_parameter(f"{stack}.depth_mix.{layer}")
                x = sum((w * state for w, state in zip(weights, history, strict=True)), torch.zeros_like(x))
        return x

    def before(self, module: str) -> str:
        if module == "self_attn":
            return "input_layernorm"
        if module == "mlp":
            return (
                "pre_feedforward_layernorm"
                if self.config.residual.placement == "sandwich"
                else "post_attention_layernorm"
            )
        return f"pre_{module}_layernorm"

    def after(self, module: str) -> str:
        return {"self_attn": "post_attention_layernorm", "mlp": "post_feedforward_layernorm"}.get(
            module, f"post_{module}_layernorm"
        )

    def normed(self, x: Tensor, path: str) -> Tensor:
        if self.config.residual.norm == "rms":
            return self.norm(x, path)
        return self.norm(x - x.mean(-1, keepdim=True), path) + self.get_parameter(f"{path}.bias")

    def sublayer(
        self, y: Tensor, path: str, layer: int, lengths: list[int], causal: bool, memory: Sequence[Tensor] | None
    ) -> Tensor:
        if path.endswith("self_attn"):
            if causal:
                heads = [self.attention(part, path, self.config.sliding_window[layer]) for part in y.split(lengths)]
            else:
                heads = [self.to_all(part, part, path, rotated=True) for part in y.split(lengths)]
            return self.linear(torch.cat(heads), f"{path}.o_proj")
        if path.endswith("cross_attn"):
            assert memory is not None
            heads = [
                self.to_all(part, m, path, rotated=False) for part, m in zip(y.split(lengths), memory, strict=True)
            ]
            return self.linear(torch.cat(heads), f"{path}.o_proj")
        gate = self.linear(y, f"{path}.gate_proj")
        return self.linear(gate / (1 + (-gate).exp()) * self.linear(y, f"{path}.up_proj"), f"{path}.down_proj")

    def to_all(self, x: Tensor, source: Tensor, path: str, *, rotated: bool) -> Tensor:
        """Every query to every key."""
        config = self.config
        q = self.linear(x, f"{path}.q_proj").view(len(x), -1, config.head_dim)
        k, v = (self.linear(source, f"{path}.{n}_proj").view(len(source), -1, config.head_dim) for n in "kv")
        if rotated:
            if config.qk_norm:
                q, k = self.norm(q, f"{path}.q_norm"), self.norm(k, f"{path}.k_norm")
            position = torch.arange(len(x))
            q, k = self.rotate(q, position), self.rotate(k, position)
        each = config.num_attention_heads // config.num_key_value_heads
        heads = [
            (torch.einsum("id,jd->ij", q[:, h], k[:, h // each]) / config.head_dim**0.5).softmax(-1) @ v[:, h // each]
            for h in range(config.num_attention_heads)
        ]
        return torch.cat(heads, dim=-1)

    def gated(self, x: Tensor, update: Tensor, path: str) -> tuple[Tensor, Tensor]:
        r, z = self.config.residual, self.get_parameter(f"{path}.bias")
        if r.gate in ("scalar", "vector"):
            z = z + x @ self.get_parameter(f"{path}.weight").T
        elif r.gate == "lowrank":
            z = z + x @ self.get_parameter(f"{path}.down").T @ self.get_parameter(f"{path}.up").T
        g = 1 / (1 + (-z / r.gate_temperature).exp())
        carry = (1 - g * g).sqrt() if r.gate_coupling == "variance" else 1 - g
        return carry * x, g * update

    def shortcut(self, x: Tensor, path: str) -> Tensor:
        if self.config.residual.shortcut == "projection":
            return x @ self.get_parameter(f"{path}.weight").T
        return x + x @ self.get_parameter(f"{path}.down").T @ self.get_parameter(f"{path}.up").T


class EncoderDecoderOracle(ResidualOracle):
    """Both stacks; logits of the targets."""

    def forward(
        self, batch: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]], layers: tuple[int, int]
    ) -> Tensor:  # type: ignore[override]
        (sources, targets), r, tied = batch, self.config.residual, self.config.tie_word_embeddings
        x = self.stack("encoder", sources, layers[0], {}, {}, causal=False)
        x = self.normed(x, "encoder.norm") if r.has_final_norm else x
        memory = x.split([len(source) for source in sources])
        embedding = "encoder" if tied else "decoder"
        y = self.stack("decoder", targets, layers[1], {}, {}, memory=memory, embedding=embedding)
        y = self.normed(y, "decoder.norm") if r.has_final_norm else y
        return y @ self.get_parameter(f"{'encoder.embed_tokens' if tied else 'lm_head'}.weight").T
