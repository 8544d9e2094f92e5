"""What a residual connection means and costs, from its config alone: equation, collectives, kernel, gradients to be summed, memory.

Every entry is worked out from the plan that the modules and the parameter layout are built from. Imports no torch.
"""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from tp_residual.model.config import ModelConfig
from tp_residual.model.layout import ModelLayout
from tp_residual.residual.config import (
    PRESETS,
    ResidualConfig,
    SublayerPlan,
    connection_parameters,
    plan_layers,
    shortcut_parameters,
)

# Where no model is named: the shape of an 8-billion-parameter decoder.
EXAMPLE_LAYERS, EXAMPLE_HIDDEN = 32, 4096


@dataclass(frozen=True)
class Synced:
    """Parameters that every rank holds whole. tp, sp: how their gradients become whole under a replicated and a token-sharded stream."""

    parameters: str
    tp: str
    sp: str


@dataclass(frozen=True)
class Explanation:
    """name: the preset, or `custom`. equation, source: of a preset. sums_per_layer: collectives a layer that complete a sum, forward.
    collectives: of a layer, forward, and what going back differs in. kernel: what one boundary runs at inference. extra_parameters: what
    the connection adds to Pre-Norm's norms, elements of the whole model. extra_streams: values of the stream's size kept beside it.
    """

    name: str
    equation: str
    source: str
    num_layers: int
    hidden_size: int
    sums_per_layer: int
    collectives: dict[str, str]
    kernel: str
    extra_parameters: int
    extra_streams: str
    synced: tuple[Synced, ...]
    settings: dict[str, Any]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def explain(
    residual: ResidualConfig, num_layers: int = EXAMPLE_LAYERS, hidden_size: int = EXAMPLE_HIDDEN
) -> Explanation:
    """Raises ConfigError when a model of this size cannot have it."""
    residual.require_depth(num_layers, hidden_size)
    preset = PRESETS.get(residual.name)
    plan = plan_layers(residual, num_layers)
    sums = len(plan[0])
    return Explanation(
        name=residual.name,
        equation=preset.equation if preset else _equation(residual),
        source=preset.source if preset else "",
        num_layers=num_layers,
        hidden_size=hidden_size,
        sums_per_layer=sums,
        collectives={
            "tensor_parallel": f"{sums} all-reduce",
            "sequence_parallel": f"{sums} reduce-scatter + {sums} all-gather",
            "backward": "as many"
            + (f", and {sums} all-gather for the projection" if residual.shortcut_within_sum else ""),
            "exposed": _exposed(residual, sums),
        },
        kernel=kernel(residual),
        extra_parameters=_parameters(residual, num_layers, hidden_size)
        - _parameters(ResidualConfig(), num_layers, hidden_size),
        extra_streams=_streams(residual, num_layers),
        synced=_synced(residual, plan[0], hidden_size),
        settings=residual.to_dict(),
        notes=residual.notes,
    )


def explain_model(config: ModelConfig) -> Explanation:
    """Of a model directory's config.json."""
    return explain(config.residual, config.num_hidden_layers, config.hidden_size)


def kernel(residual: ResidualConfig) -> str:
    """What an executor runs for one update at inference: one pass where all is constant, else the collective and plain operations."""
    learned = [
        name
        for name, present in (
            ("a learned skip scale", residual.learned_skip != "none"),
            ("a learned update scale", residual.learned_update != "none"),
            ("a gate", residual.gate != "none"),
            ("a shortcut", residual.shortcut != "identity"),
            ("a channel mask", residual.skip_channels is not None),
        )
        if present
    ]
    if learned:
        return f"collective, then plain operations: {', '.join(learned)}"
    steps = {
        "pre": "sum, add, norm",
        "sandwich": "sum, norm, add, norm",
        "output": "sum, norm, add",
        "post": "sum, add, norm; the normed value is the new residual",
        "none": "sum, add",
    }[residual.placement]
    if residual.parallel_norms == 2:
        steps = "sum, add; then both norms on gathered tokens"
    if residual.depth_mix:
        steps = "sum, add; mixture of depths; norm"
    scaled = (
        residual.skip_scale != 1
        or residual.update_scale != 1
        or residual.update_scale_by_depth
        or residual.topology == "macaron"
        or residual.skip_layers is not None
        or residual.drop == "stochastic_depth"
    )
    return f"one pass: {steps}{', with constant scales' if scaled else ''}"


def _equation(residual: ResidualConfig) -> str:
    """Put together from the fields, for what is no preset."""
    inner = "F(n(x))" if residual.placement in ("pre", "sandwich") else "F(x)"
    if residual.input_scale_by_depth:
        inner = "F(n(x) / sqrt(l))"
    update = f"n({inner})" if residual.placement in ("sandwich", "output") else inner
    if residual.update_scale != 1 or residual.update_scale_by_depth:
        update = f"{residual.update_scale:g}{'/sqrt(L)' if residual.update_scale_by_depth else ''} {update}"
    if residual.learned_update != "none":
        update = f"{'a' if residual.learned_update == 'scalar' else 'v *'} {update}"
    skip = {"identity": "x", "projection": "W x", "lowrank": "(x + B A x)"}[residual.shortcut]
    if residual.skip_scale == "deepnorm":
        skip = f"(2L)^(1/4) {skip}"
    elif residual.skip_scale != 1:
        skip = f"{residual.skip_scale:g} {skip}"
    if residual.skip_layers is not None or residual.skip_channels is not None:
        skip = f"mask * {skip}"
    if residual.learned_skip != "none":
        skip = f"s * {skip}"
    if residual.gate != "none":
        carry = "(1-g)" if residual.gate_coupling == "complement" else "sqrt(1-g^2)"
        skip, update = f"{carry} {skip}", f"g {update}"
    whole = f"{skip} + {update}"
    return f"n({whole})" if residual.placement == "post" else whole


def _exposed(residual: ResidualConfig, sums: int) -> str:
    if residual.topology == "ladder":
        text = "none inside, two waits at the end, where the transport can start sums early"
        return text if residual.ladder_from == 0 else f"{sums} in the first {residual.ladder_from} layers; then {text}"
    if residual.drop == "layer_drop":
        return f"{sums} a layer that runs; a dropped one has none"
    if residual.drop == "stochastic_depth":
        return f"{sums}; in training only those of the sublayers that run"
    return str(sums)


def _parameters(residual: ResidualConfig, num_layers: int, hidden: int) -> int:
    """Norms and what connections learn; not the second MLP of a Macaron layer, which is a sublayer."""
    each = 1 if residual.norm == "rms" else 2
    norms = sum(
        len([name for name in sublayer.read_norms if name is not None])
        + (sublayer.connection.update_norm is not None)
        + (sublayer.connection.post_norm is not None)
        for layer in plan_layers(residual, num_layers)
        for sublayer in layer
    )
    total = (norms + residual.has_final_norm) * each * hidden
    sublayers = num_layers * len(plan_layers(residual, 1)[0])
    total += sublayers * sum(_elements(each.shape) for each in connection_parameters(residual, hidden))
    if residual.shortcut_shared:
        total += sum(_elements(each.shape) for each in shortcut_parameters(residual, hidden))
    if residual.depth_mix:
        total += sum(layer + 2 for layer in range(num_layers))
    return total


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _streams(residual: ResidualConfig, num_layers: int) -> str:
    if residual.depth_mix:
        return f"{num_layers}: the streams of all layers so far"
    if residual.topology == "ladder":
        return "1: the update that is on its way"
    return "none"


def _synced(residual: ResidualConfig, sublayers: tuple[SublayerPlan, ...], hidden: int) -> tuple[Synced, ...]:
    several = any(len(sublayer.read_norms) > 1 for sublayer in sublayers)
    norms = [
        name for s in sublayers for name in (*s.read_norms, s.connection.update_norm, s.connection.post_norm) if name
    ]
    found = []
    if norms or residual.has_final_norm:
        named = ", ".join(dict.fromkeys(norms)) or "norm"
        found.append(
            Synced(
                named, "summed: each rank sees its columns' gradient" if several else "complete", "summed over ranks"
            )
        )
    parameters = [
        *connection_parameters(residual, hidden),
        *(shortcut_parameters(residual, hidden) if residual.shortcut_shared else ()),
    ]
    for columns in (False, True):
        names = ", ".join(each.name for each in parameters if each.columns is columns)
        if names:
            found.append(
                Synced(names, "sharded by columns, inside the sum" if columns else "complete", "summed over ranks")
            )
    if residual.depth_mix:
        found.append(Synced("depth_mix", "complete", "summed over ranks"))
    return tuple(found)


def blocks_by_rule(config: ModelConfig, tp_size: int, *, sequence_parallel: bool) -> Counter[str]:
    """How many of a model's tensors are sharded, replicated with complete gradients, or summed over their holders."""
    found: Counter[str] = Counter()
    for tensor in ModelLayout.of(config, tp_size).tensors(sequence_parallel=sequence_parallel):
        blocks = list(tensor.blocks(0))
        shared = any(len(block.holders) > 1 for block in blocks)
        partial = any(block.partial_gradient for block in blocks)
        found["summed over its holders" if partial else "replicated, complete" if shared else "sharded"] += 1
    return found
