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
        near_one = "norm" in tensor.name and tensor.name.endswith("weight") or tensor.name.endswith("_scale")
        weights[tensor.name] = 1 + 0.3 * value if near_one else 0.2 * value
    return weights


class ResidualOracle(Oracle):
    """config.residual's equations in one process. kept: (layer, sublayer) places that run; all unless given. inference: survival scales."""

    kept: set[tuple[int, int]] | None = None
    inference = True

    def forward(self, sequences: Sequence[Sequence[int]]) -> OracleOutput:
        config, r = self.config, self.config.residual
        lengths = [len(sequence) for sequence in sequences]
        ids = torch.tensor([token for sequence in sequences for token in sequence])
        streams, updates = dict[str, Tensor](), dict[str, Tensor]()
        x = self.get_parameter("model.embed_tokens.weight")[ids] * r.embed_scale
        streams["model.embed_tokens"] = x
        history, newest = [x], torch.zeros_like(x)
        groups = [("self_attn",), ("mlp",)]
        if r.topology == "parallel":
            groups = [("self_attn", "mlp")]
        if r.topology == "macaron":
            groups = [("first_mlp",), ("self_attn",), ("mlp",)]
        total, number = config.num_hidden_layers * len(groups), 0
        for layer in range(config.num_hidden_layers):
            path = f"model.layers.{layer}"
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
                    update = update + self.sublayer(y, f"{path}.{module}", layer, lengths)
                after = f"{path}.{self.after(modules[-1])}"
                if r.placement in ("sandwich", "output"):
                    update = self.normed(update, after)
                update = update * r.update_scale
                if r.update_scale_by_depth:
                    update = update / math.sqrt(config.num_hidden_layers)
                if r.topology == "macaron" and modules[0] != "self_attn":
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
                    x_part = self.shortcut(
                        x_part, "model.residual_shortcut" if r.shortcut_shared else f"{own}.shortcut"
                    )
                alpha = (2 * config.num_hidden_layers) ** 0.25 if r.skip_scale == "deepnorm" else r.skip_scale
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
                weights = self.get_parameter(f"model.depth_mix.{layer}")
                x = sum((w * state for w, state in zip(weights, history, strict=True)), torch.zeros_like(x))
        final = self.normed(x, "model.norm") if r.has_final_norm else x
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        logits = torch.einsum("td,vd->tv", final, self.get_parameter(f"{head}.weight"))
        return OracleOutput(logits, streams, updates, final)

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

    def sublayer(self, y: Tensor, path: str, layer: int, lengths: list[int]) -> Tensor:
        if path.endswith("self_attn"):
            heads = [self.attention(part, path, self.config.sliding_window[layer]) for part in y.split(lengths)]
            return self.linear(torch.cat(heads), f"{path}.o_proj")
        gate = self.linear(y, f"{path}.gate_proj")
        return self.linear(gate / (1 + (-gate).exp()) * self.linear(y, f"{path}.up_proj"), f"{path}.down_proj")

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
