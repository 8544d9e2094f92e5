"""Does the stream grow with depth at initialisation as the config and the init rule say? One process, tiny models of several depths."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tp_residual.doctor.report import Finding
from tp_residual.model.attention_backend import NoCache, TokenBatch
from tp_residual.model.config import ModelConfig
from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.residual.config import ResidualConfig, plan_layers
from tp_residual.training.init import RULES, InitRule, init_weights

DEPTHS = (4, 8, 16, 32)
_HIDDEN = 64
# Matrices keep the scale of a normed input, as sublayers of trained models nearly do; the embedding's variance is one.
_STD = _HIDDEN**-0.5
# The slope's own scatter over seeds is 0.05 to 0.1 at these sizes; a rule that is not applied, or applied twice, moves it by 1.
_TOLERANCE = 0.3


def example_config(residual: ResidualConfig, num_layers: int) -> ModelConfig:
    """A decoder small enough to be built at any depth in a moment."""
    values = {
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": 2 * _HIDDEN,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 128,
        "max_position_embeddings": 128,
        "residual": residual.to_dict(),
    }
    return ModelConfig.from_dict(values, "the example")


def initialise(model: CausalLM, rule: str, seed: int) -> None:
    """By a rule of `training.init.RULES`, at the scale that keeps the variance of a normed input."""
    factory: Any = RULES[rule]
    made: InitRule = factory(std=_STD)
    layers = model.config.num_hidden_layers
    init_weights(model, made, seed, num_layers=layers)
    with torch.no_grad():
        model.model.embed_tokens.weight.div_(_STD)


def probe_init(
    residual: ResidualConfig,
    rule: str,
    *,
    build: Callable[[int, int], CausalLM] | None = None,
    depths: Sequence[int] = DEPTHS,
) -> Finding:
    """The slope, in depth, of the variance that all updates add to the stream, on log scales: 1 when every layer adds as much, 0 when the
    rule divides it by their number, -1 when it is divided twice. build(layers, seed): another initialised model than the rule's own.
    """
    due = expected_slope(residual, rule)
    if due is None:
        return Finding("init slope", "skipped", f"no growth is promised for residual {residual.name} with init {rule}")
    added = []
    for depth in depths:
        values = []
        for seed in (0, 1):
            model = build(depth, seed) if build is not None else _built(residual, rule, depth, seed)
            values.append(_added_variance(model))
        added.append(sum(values) / len(values))
    slope = _slope([math.log(d) for d in depths], [math.log(v) for v in added])
    text = f"the variance that updates add grows as depth^{slope:.2f}, due is depth^{due:.2f} (init {rule})"
    if abs(slope - due) <= _TOLERANCE:
        return Finding("init slope", "ok", text, "", slope, due, tuple(added))
    named = (
        "init not scaled by depth"
        if slope > due
        else "init scaled by depth twice"
        if slope - due < -0.7
        else "init scaled too much"
    )
    return Finding("init slope", "fault", f"{named}: {text}", "", slope, due, tuple(added))


def expected_slope(residual: ResidualConfig, rule: str) -> float | None:
    """From the plan's constants and the rule; None where a norm of the stream, a gate or a learned scale decides."""
    by_rule = {"normal": 0.0, "gpt2": -1.0, "variance_over_root_n": -0.5}
    plain = (
        residual.placement == "pre"
        and residual.gate == "none"
        and residual.learned_update == residual.learned_skip == "none"
        and residual.shortcut == "identity"
        and residual.skip_scale == 1
        and not residual.input_scale_by_depth
        and residual.skip_layers is None
        and residual.skip_channels is None
    )
    if rule not in by_rule or not plain:
        return None
    totals = [
        sum((s.connection.update_scale * s.keep) ** 2 for layer in plan_layers(residual, depth) for s in layer)
        for depth in DEPTHS
    ]
    return by_rule[rule] + _slope([math.log(d) for d in DEPTHS], [math.log(t) for t in totals])


def _built(residual: ResidualConfig, rule: str, depth: int, seed: int) -> CausalLM:
    model = CausalLM(example_config(residual, depth), TensorParallelGroup.single())
    initialise(model, rule, seed)
    return model


@torch.no_grad()
def _added_variance(model: CausalLM) -> float:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, (4, 32), generator=generator).tolist()
    states = model.eval()(TokenBatch.prefill(ids), NoCache(), output_hidden_states=True).hidden_states
    assert states is not None
    first, last = states[0].double(), states[-2].double()
    return float((last - first).square().mean() / first.square().mean())


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)
