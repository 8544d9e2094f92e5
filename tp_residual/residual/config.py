"""Which residual connection a model has: small orthogonal fields, what they may not mean together, and the plan they make of a depth.

`ResidualConfig` is all that the decoder knows of a variant. `plan_layers` turns it into sublayers with their norms, scales and parameters;
modules, the parameter layout, `explain` and the documentation read that one plan. Imports no torch.
"""

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from tp_residual.errors import ConfigError

Topology = Literal["sequential", "parallel", "ladder", "macaron"]
Placement = Literal["pre", "post", "sandwich", "output", "none"]
Learned = Literal["none", "scalar", "vector"]
Gate = Literal["none", "static", "scalar", "vector", "lowrank"]
Coupling = Literal["complement", "variance"]
Shortcut = Literal["identity", "projection", "lowrank"]
Drop = Literal["none", "stochastic_depth", "layer_drop"]


@dataclass(frozen=True, kw_only=True)
class ResidualConfig:
    """One residual connection. x is the stream, F a sublayer, n a norm, u what F writes; the default is Pre-Norm, `x + F(n(x))`.

    topology: `sequential`; `parallel` (attention and MLP read the same x and write one sum), with parallel_norms 1 or 2; `ladder` (each
    sublayer reads the stream without the update just before it, from layer ladder_from on); `macaron` (half an MLP, attention, half an
    MLP). placement: `pre`; `post`, `n(x + F(x))`; `sandwich`, `x + n(F(n(x)))`; `output`, `x + n(F(x))`; `none`, `x + F(x)`.
    norm: its kind.

    skip_scale, update_scale: constants of x and u; skip_scale `deepnorm` is `(2L)^(1/4)`. update_scale_by_depth: divide update_scale by
    the root of the number of layers. input_scale_by_depth: what layer l (from 1) reads is multiplied by `1 / sqrt(l)`. embed_scale: of x_0.
    learned_skip, learned_update: a learned scalar or vector on top, from learned_skip_init, learned_update_init.

    gate: `g = sigmoid(z)` with z learned as it is (`static`, a vector), or linear in x: one value a token (`scalar`), a value for each
    channel (`vector`), or that through gate_rank channels (`lowrank`); gate_bias is where z starts. gate_coupling: `complement`,
    `(1 - g) x + g u`; `variance`, `sqrt(1 - g^2) x + g u`, with z divided by gate_temperature.
    shortcut: `projection`, `W x` for x, from `W = 1`; `lowrank`, `x + B A x` over shortcut_rank channels, from `B = 0`; shortcut_shared:
    one for the whole model. depth_mix: after each layer x becomes a learned weighted sum of all layers' streams.

    skip_layers: the layers that keep their skip connections (None: all). skip_channels: how many leading channels the skip carries.
    drop: `stochastic_depth` (in training sublayer updates are dropped at rates that grow linearly to drop_rate, otherwise scaled by the
    probability to keep them) or `layer_drop` (whole layers, drop_rate each, unscaled).
    final_norm: before the head; None: unless the stream is normed already.
    """

    topology: Topology = "sequential"
    placement: Placement = "pre"
    norm: Literal["rms", "layer"] = "rms"
    parallel_norms: int = 1
    ladder_from: int = 0
    skip_scale: float | Literal["deepnorm"] = 1.0
    update_scale: float = 1.0
    update_scale_by_depth: bool = False
    input_scale_by_depth: bool = False
    embed_scale: float = 1.0
    learned_skip: Learned = "none"
    learned_skip_init: float = 1.0
    learned_update: Learned = "none"
    learned_update_init: float = 1.0
    gate: Gate = "none"
    gate_bias: float = -2.0
    gate_rank: int = 8
    gate_coupling: Coupling = "complement"
    gate_temperature: float = 1.0
    shortcut: Shortcut = "identity"
    shortcut_rank: int = 8
    shortcut_shared: bool = False
    depth_mix: bool = False
    skip_layers: tuple[int, ...] | None = None
    skip_channels: int | None = None
    drop: Drop = "none"
    drop_rate: float = 0.0
    final_norm: bool | None = None

    def __post_init__(self) -> None:
        for name, kind in _CHOICES.items():
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(f"residual {name}={getattr(self, name)!r} is not one of {', '.join(get_args(kind))}")
        for name in _NUMBERS:
            value = getattr(self, name)
            if name == "skip_scale" and value == "deepnorm":
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not -_LARGEST <= value <= _LARGEST:
                raise ConfigError(f"residual {name}={str(value)[:40]} must be a finite number")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"residual {name}={getattr(self, name)!r} must be true or false")
        if self.final_norm is not None and not isinstance(self.final_norm, bool):
            raise ConfigError(f"residual final_norm={self.final_norm!r} must be true, false or null")
        for name in ("gate_rank", "shortcut_rank", "parallel_norms"):
            _require_integer(name, getattr(self, name), 1)
        _require_integer("ladder_from", self.ladder_from, 0)
        if self.skip_channels is not None:
            _require_integer("skip_channels", self.skip_channels, 0)
        if self.skip_layers is not None:
            if not isinstance(self.skip_layers, tuple) or len(set(self.skip_layers)) != len(self.skip_layers):
                raise ConfigError(f"residual skip_layers={self.skip_layers!r} must be a list of different layers")
            for layer in self.skip_layers:
                _require_integer("skip_layers", layer, 0)
        for condition, message in self._contradictions():
            if condition:
                raise ConfigError(f"residual config without meaning: {message}")

    def _contradictions(self) -> Iterator[tuple[bool, str]]:
        """(whether it holds, what is wrong and the way out)."""
        defaults = {field.name: field.default for field in fields(self)}
        for name, owner, meaning in _DEPENDENT:
            value, chosen = getattr(self, name), getattr(self, owner)
            yield (
                value != defaults[name] and chosen not in meaning,
                f"{name}={value} with {owner}={chosen}, where it does nothing; leave it out, or use {owner}={' or '.join(meaning)}",
            )
        yield self.parallel_norms not in (1, 2), f"parallel_norms={self.parallel_norms!r}; a layer has 1 or 2"
        yield (
            self.parallel_norms == 2 and self.topology != "parallel",
            f"parallel_norms=2 with topology={self.topology}; only topology=parallel shares a read",
        )
        yield (
            self.parallel_norms == 2 and self.placement not in ("pre", "sandwich"),
            f"parallel_norms=2 with placement={self.placement}, which has no norm before a sublayer; use pre or sandwich",
        )
        yield (
            self.topology == "ladder" and self.placement not in ("pre", "sandwich"),
            f"topology=ladder with placement={self.placement}: its sublayers read an older stream through a norm of their own; "
            "use pre or sandwich",
        )
        yield (
            self.topology == "ladder" and (self.gate != "none" or self.shortcut != "identity" or self.depth_mix),
            "topology=ladder with a gate, a shortcut or depth_mix: they need the complete stream, which a ladder reads a sublayer late; "
            "use topology=sequential",
        )
        scaled = self.skip_scale != 1 or self.learned_skip != "none"
        yield (
            self.topology == "ladder" and (scaled or self.skip_layers is not None or self.skip_channels is not None),
            "topology=ladder with a scaled, learned or masked skip: a sublayer reads x before that is done to it; use topology=sequential",
        )
        yield (
            self.ladder_from > 0 and self.topology != "ladder",
            f"ladder_from={self.ladder_from} without topology=ladder",
        )
        yield (
            self.gate != "none" and self.learned_update != "none",
            f"gate={self.gate} with learned_update={self.learned_update}: both learn the size of the update; keep one",
        )
        yield (
            self.gate != "none" and self.learned_skip != "none",
            f"gate={self.gate} with learned_skip={self.learned_skip}: both learn the size of the skip; keep one",
        )
        yield (
            self.gate_coupling == "variance" and self.gate != "static",
            f"gate_coupling=variance with gate={self.gate}; it is defined for gate=static",
        )
        yield self.gate_temperature <= 0, f"gate_temperature={self.gate_temperature} must be above 0"
        yield (
            self.shortcut_shared and self.shortcut == "identity",
            "shortcut_shared with shortcut=identity, which has no parameters to share; use projection or lowrank",
        )
        yield (
            self.shortcut == "projection" and self.learned_skip != "none",
            f"shortcut=projection with learned_skip={self.learned_skip}: the projection contains it; keep one",
        )
        yield (
            self.shortcut != "identity" and (self.skip_layers is not None or self.skip_channels is not None),
            f"shortcut={self.shortcut} with a masked skip; a mask is for the identity",
        )
        yield (
            self.shortcut == "projection" and self.gate != "none",
            f"shortcut=projection with gate={self.gate}: the projection is in the sum that the gate would scale apart; use lowrank",
        )
        yield (
            self.placement == "post" and self.depth_mix,
            "placement=post with depth_mix: the mixture would undo the norm; use pre",
        )
        yield (
            self.placement == "post" and self.final_norm is True,
            "placement=post with final_norm=true: the stream is normed already, the second norm would undo the last one's weight",
        )
        yield not 0 <= self.drop_rate < 1, f"drop_rate={self.drop_rate} must be at least 0 and below 1"
        yield (
            (self.drop == "none") != (self.drop_rate == 0),
            f"drop={self.drop} with drop_rate={self.drop_rate}; give both or neither",
        )
        yield (
            self.drop != "none" and self.placement == "post",
            f"drop={self.drop} with placement=post: a dropped sublayer would leave out its norm as well; use pre, sandwich or output",
        )
        yield (
            self.drop != "none" and self.topology == "ladder",
            f"drop={self.drop} with topology=ladder: what a sublayer reads would depend on what was dropped; use sequential",
        )
        yield (
            self.input_scale_by_depth and self.placement not in ("pre", "sandwich"),
            f"input_scale_by_depth with placement={self.placement}: it scales what a norm returns; use pre or sandwich",
        )
        yield (
            self.skip_scale != "deepnorm" and self.skip_scale <= 0,
            f"skip_scale={self.skip_scale} must be above 0; mask with skip_layers",
        )
        yield (
            self.skip_scale == "deepnorm" and self.placement != "post",
            f"skip_scale=deepnorm with placement={self.placement}: without the norm after it the stream grows as a power of the depth",
        )
        yield self.embed_scale == 0, "embed_scale=0 erases the input"
        yield self.update_scale == 0, "update_scale=0 erases what every sublayer writes"

    @classmethod
    def preset(cls, name: str, **changes: Any) -> "ResidualConfig":
        """A variant by name, with changed fields. Raises ConfigError for an unknown name, suggesting the nearest."""
        if name not in PRESETS:
            lower = str(name).lower().replace("-", "_")
            near = [
                known
                for known in PRESETS
                if lower == known or (lower.startswith((known, f"{known}_")) and len(known) > 2)
            ]
            near = sorted(near, key=len, reverse=True) or difflib.get_close_matches(lower, PRESETS, 1, 0.5)
            hint = f"did you mean {near[0]}? There" if near else "there"
            raise ConfigError(f"residual preset {name!r} is not known; {hint} are {', '.join(PRESETS)}")
        return replace(PRESETS[name].config, **changes) if changes else PRESETS[name].config

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | str, source: str = "residual") -> "ResidualConfig":
        """A preset's name, or fields as in JSON, among them perhaps `preset`. Raises ConfigError for what is not a field."""
        if isinstance(values, str):
            return cls.preset(values)
        if not isinstance(values, Mapping):
            raise ConfigError(f"{source}={values!r} must be a preset's name or an object of fields")
        known = {field.name for field in fields(cls)}
        given = dict(values)
        base = given.pop("preset", "pre")
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, 1, 0.5)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ConfigError(f"{source} has the field {name!r}, which is not one{hint}")
        if isinstance(given.get("skip_layers"), list):
            given["skip_layers"] = tuple(given["skip_layers"])
        if not isinstance(base, str):
            raise ConfigError(f"{source} has preset={base!r}; use the name of one, or leave it out")
        return cls.preset(base, **given)

    def to_dict(self) -> dict[str, Any]:
        """The fields that differ from the default, as JSON holds them; `from_dict` of it is equal to this."""
        default = ResidualConfig()
        return {
            field.name: list(value) if isinstance(value := getattr(self, field.name), tuple) else value
            for field in fields(self)
            if getattr(self, field.name) != getattr(default, field.name)
        }

    @property
    def has_final_norm(self) -> bool:
        return self.placement not in ("post", "none") if self.final_norm is None else self.final_norm

    @property
    def shortcut_within_sum(self) -> bool:
        """Whether a projected skip can be a part of the sublayer's sum: nothing but constants may stand between that sum and the add."""
        return (
            self.shortcut == "projection"
            and self.placement in ("pre", "post", "none")
            and self.learned_update == "none"
        )

    @property
    def name(self) -> str:
        """The preset that this is, or `custom`."""
        return next((name for name, preset in PRESETS.items() if preset.config == self), "custom")

    @property
    def notes(self) -> tuple[str, ...]:
        """What is legal and yet known to go wrong."""
        notes = []
        if self.placement == "output":
            notes.append(
                "placement=output without q/k norm: attention scores grow with the stream; use a model with qk_norm"
            )
        if self.placement == "none" and self.learned_update == "none" and self.gate == "none":
            notes.append(
                "placement=none without a learned scale: the stream's variance doubles at every sublayer; use rezero"
            )
        if self.skip_layers is not None or self.skip_channels is not None:
            notes.append("a masked skip saves no work that counts: the add is 2 D of about 24 D^2 operations a token")
        return tuple(notes)

    def require_depth(self, num_layers: int, hidden_size: int) -> None:
        """Raises ConfigError for fields that a model of this size cannot have."""
        if self.topology == "ladder" and self.ladder_from >= num_layers:
            raise ConfigError(
                f"residual ladder_from={self.ladder_from} leaves none of the {num_layers} layers; use 0 to {num_layers - 1}"
            )
        for layer in self.skip_layers or ():
            if layer >= num_layers:
                raise ConfigError(
                    f"residual skip_layers has {layer}, and there are {num_layers} layers; use 0 to {num_layers - 1}"
                )
        if self.skip_channels is not None and self.skip_channels > hidden_size:
            raise ConfigError(f"residual skip_channels={self.skip_channels} is above hidden_size={hidden_size}")
        for kind, rank in ((self.gate, self.gate_rank), (self.shortcut, self.shortcut_rank)):
            if kind == "lowrank" and rank > hidden_size:
                raise ConfigError(
                    f"residual rank {rank} is above hidden_size={hidden_size}, so not a low one; use vector or projection"
                )


_CHOICES: dict[str, Any] = {
    "topology": Topology,
    "placement": Placement,
    "norm": Literal["rms", "layer"],
    "learned_skip": Learned,
    "learned_update": Learned,
    "gate": Gate,
    "gate_coupling": Coupling,
    "shortcut": Shortcut,
    "drop": Drop,
}
_NUMBERS = (
    "skip_scale",
    "update_scale",
    "embed_scale",
    "learned_skip_init",
    "learned_update_init",
    "gate_bias",
    "gate_temperature",
    "drop_rate",
)
_LARGEST = 1e30  # of any constant: far beyond use, and finite in every dtype that computes with it

# fields that mean something only beside another one: (field, its owner, the owner's values that give it a meaning)
_DEPENDENT: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("gate_bias", "gate", ("static", "scalar", "vector", "lowrank")),
    ("gate_temperature", "gate", ("static", "scalar", "vector", "lowrank")),
    ("gate_rank", "gate", ("lowrank",)),
    ("shortcut_rank", "shortcut", ("lowrank",)),
    ("learned_skip_init", "learned_skip", ("scalar", "vector")),
    ("learned_update_init", "learned_update", ("scalar", "vector")),
)
_FLAGS = ("update_scale_by_depth", "input_scale_by_depth", "shortcut_shared", "depth_mix")


def _require_integer(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"residual {name}={value!r} must be an integer of at least {least}")


PRE_NORM = ResidualConfig()


@dataclass(frozen=True)
class Preset:
    """equation: of one sublayer, with x the stream, F the sublayer and n a norm. source: where it comes from."""

    config: ResidualConfig
    equation: str
    source: str


PRESETS: dict[str, Preset] = {
    "pre": Preset(PRE_NORM, "x + F(n(x))", "Pre-Norm, arXiv 2002.04745; Llama, Qwen, Mistral"),
    "post": Preset(ResidualConfig(placement="post", norm="layer"), "n(x + F(x))", "Post-Norm, arXiv 1706.03762"),
    "sandwich": Preset(
        ResidualConfig(placement="sandwich"), "x + n(F(n(x)))", "CogView, arXiv 2105.13290; Gemma 2, GLM-4"
    ),
    "output": Preset(ResidualConfig(placement="output"), "x + n(F(x))", "OLMo 2, arXiv 2501.00656"),
    "none": Preset(
        ResidualConfig(placement="none"), "x + F(x)", "no norm at all: for Fixup, and to show what norms do"
    ),
    "parallel": Preset(ResidualConfig(topology="parallel"), "x + A(n(x)) + M(n(x))", "GPT-J; PaLM, arXiv 2204.02311"),
    "parallel2": Preset(
        ResidualConfig(topology="parallel", parallel_norms=2),
        "x + A(n(x)) + M(m(x)), norms n and m",
        "GPT-NeoX, arXiv 2204.06745",
    ),
    "ladder": Preset(
        ResidualConfig(topology="ladder"), "x_i+1 = x_i + F_i+1(n(x_i-1))", "Ladder Residual, arXiv 2501.06589"
    ),
    "macaron": Preset(
        ResidualConfig(topology="macaron"),
        "x + M(n(x))/2; x + A(n(x)); x + M'(n(x))/2",
        "Macaron Net, arXiv 1906.02762",
    ),
    "rezero": Preset(
        ResidualConfig(placement="none", learned_update="scalar", learned_update_init=0.0),
        "x + a F(x), a from 0",
        "arXiv 2003.04887",
    ),
    "layerscale": Preset(
        ResidualConfig(learned_update="vector", learned_update_init=1e-4),
        "x + v * F(n(x)), v from 1e-4",
        "arXiv 2103.17239",
    ),
    "depth_weighted": Preset(
        ResidualConfig(learned_update="scalar", learned_update_init=1.0),
        "x + a F(n(x)), a from 1",
        "a learned weight for each depth",
    ),
    "deepnorm": Preset(
        ResidualConfig(placement="post", norm="layer", skip_scale="deepnorm"),
        "n((2L)^(1/4) x + F(x))",
        "DeepNet, arXiv 2203.00555",
    ),
    "granite": Preset(
        ResidualConfig(update_scale=0.22, embed_scale=12.0),
        "x + 0.22 F(n(x)), x_0 times 12",
        "Granite 3's residual and embedding multipliers",
    ),
    "minicpm": Preset(
        ResidualConfig(update_scale=1.4, update_scale_by_depth=True, embed_scale=12.0),
        "x + 1.4/sqrt(L) F(n(x)), x_0 times 12",
        "MiniCPM, arXiv 2404.06395",
    ),
    "lns": Preset(
        ResidualConfig(input_scale_by_depth=True), "x + F(n(x) / sqrt(l))", "LayerNorm scaling, arXiv 2502.05795"
    ),
    "highway": Preset(
        ResidualConfig(gate="vector"), "(1-g) x + g F(n(x)), g = sigmoid(W x + b)", "Highway networks, arXiv 1505.00387"
    ),
    "gate_scalar": Preset(
        ResidualConfig(gate="scalar"), "(1-g) x + g F(n(x)), one g a token", "the scalar form of the dynamic gate"
    ),
    "gate_lowrank": Preset(
        ResidualConfig(gate="lowrank"),
        "(1-g) x + g F(n(x)), g = sigmoid(B A x + b)",
        "the low-rank form of the dynamic gate",
    ),
    "gate_static": Preset(
        ResidualConfig(placement="sandwich", gate="static", gate_coupling="variance", gate_temperature=0.3),
        "sqrt(1-g^2) x + g n(F(n(x))), g = sigmoid(w / 0.3)",
        "a learned vector that keeps the variance",
    ),
    "projection": Preset(
        ResidualConfig(shortcut="projection"), "W x + F(n(x)), W from 1", "projection shortcuts, arXiv 1512.03385"
    ),
    "lowrank": Preset(
        ResidualConfig(shortcut="lowrank"), "x + B A x + F(n(x)), B from 0", "a low-rank learned shortcut"
    ),
    "shared_projection": Preset(
        ResidualConfig(shortcut="projection", shortcut_shared=True),
        "W x + F(n(x)), one W for all",
        "one projection for the whole model",
    ),
    "depth_mix": Preset(
        ResidualConfig(depth_mix=True), "after layer l: sum_j a_lj x_j", "DenseFormer, arXiv 2402.02622"
    ),
    "stochastic_depth": Preset(
        ResidualConfig(drop="stochastic_depth", drop_rate=0.5),
        "x + b F(n(x)), b random; p F at inference",
        "arXiv 1603.09382",
    ),
    "layer_drop": Preset(
        ResidualConfig(drop="layer_drop", drop_rate=0.2), "layers left out at random", "LayerDrop, arXiv 1909.11556"
    ),
}


# -- the plan


@dataclass(frozen=True)
class ConnectionPlan:
    """How one update joins the stream, all constants worked out. name: where its parameters live, below the layer."""

    name: str
    update_norm: str | None = None
    post_norm: str | None = None
    update_scale: float = 1.0
    skip_scale: float = 1.0

    @property
    def is_plain(self) -> bool:
        """Whether it is `x + u`."""
        return self == ConnectionPlan(self.name)


@dataclass(frozen=True)
class SublayerPlan:
    """One read and one write. modules: what runs, all of it on what was read, written as one sum. read_norms: for all modules or for each
    of them; None reads the stream itself. lag: how many of the newest updates what it reads may lack. keep: the probability with which
    training runs it.
    """

    layer: int
    modules: tuple[str, ...]
    read_norms: tuple[str | None, ...]
    connection: ConnectionPlan
    input_scale: float = 1.0
    lag: int = 0
    keep: float = 1.0


# module -> norm before or after it: the names of Llama checkpoints where one norm stands before a sublayer, of Gemma 2's and OLMo 2's where
# one stands after it.
_PRE_NAMES = {"self_attn": "input_layernorm", "mlp": "post_attention_layernorm"}
_SANDWICH_NAMES = {"self_attn": "input_layernorm", "mlp": "pre_feedforward_layernorm"}
_AFTER_NAMES = {"self_attn": "post_attention_layernorm", "mlp": "post_feedforward_layernorm"}


def norm_before(config: ResidualConfig, module: str) -> str:
    names = _SANDWICH_NAMES if config.placement == "sandwich" else _PRE_NAMES
    return names.get(module, f"pre_{module}_layernorm")


def norm_after(module: str) -> str:
    return _AFTER_NAMES.get(module, f"post_{module}_layernorm")


def layer_modules(config: ResidualConfig, *, cross_attention: bool = False) -> tuple[tuple[str, ...], ...]:
    """The modules of one layer, by sublayer."""
    if config.topology == "parallel":
        return (("self_attn", "cross_attn", "mlp"),) if cross_attention else (("self_attn", "mlp"),)
    middle: tuple[tuple[str, ...], ...] = (("self_attn",), ("cross_attn",)) if cross_attention else (("self_attn",),)
    return (("first_mlp",), *middle, ("mlp",)) if config.topology == "macaron" else (*middle, ("mlp",))


def plan_layers(
    config: ResidualConfig, num_layers: int, *, cross_attention: bool = False
) -> tuple[tuple[SublayerPlan, ...], ...]:
    """The sublayers of each layer."""
    groups = layer_modules(config, cross_attention=cross_attention)
    total = num_layers * len(groups)
    layers = []
    for layer in range(num_layers):
        sublayers = []
        for index, modules in enumerate(groups):
            number = layer * len(groups) + index
            connection = _connection(config, modules, layer, num_layers)
            keep = 1.0
            if config.drop == "stochastic_depth":
                keep = 1.0 - config.drop_rate * (number + 1) / total
            before: tuple[str | None, ...] = (None,)
            if config.placement in ("pre", "sandwich"):
                each = tuple(norm_before(config, module) for module in modules)
                before = each if config.parallel_norms == 2 else each[:1]
            lags = config.topology == "ladder" and layer >= config.ladder_from
            scale = 1.0 / math.sqrt(layer + 1) if config.input_scale_by_depth else 1.0
            sublayers.append(SublayerPlan(layer, modules, before, connection, scale, int(lags), keep))
        layers.append(tuple(sublayers))
    return tuple(layers)


def _connection(config: ResidualConfig, modules: tuple[str, ...], layer: int, num_layers: int) -> ConnectionPlan:
    update_scale = config.update_scale
    if config.update_scale_by_depth:
        update_scale /= math.sqrt(num_layers)
    if config.topology == "macaron" and modules[0] in ("first_mlp", "mlp"):
        update_scale *= 0.5
    skip_scale = (2 * num_layers) ** 0.25 if config.skip_scale == "deepnorm" else config.skip_scale
    if config.skip_layers is not None and layer not in config.skip_layers:
        skip_scale = 0.0
    after = norm_after(modules[-1] if len(modules) > 1 else modules[0])
    return ConnectionPlan(
        f"{modules[-1]}_residual",
        after if config.placement in ("sandwich", "output") else None,
        after if config.placement == "post" else None,
        update_scale,
        skip_scale,
    )


@dataclass(frozen=True)
class ParameterPlan:
    """One parameter that a connection adds. name: below the connection. init: what it starts from; `identity` for a projection, `normal`
    for small random values. columns: split by columns over ranks when the stream is replicated, inside the sublayer's own sum.
    """

    name: str
    shape: tuple[int, ...]
    init: float | Literal["identity", "normal"]
    columns: bool = False


def connection_parameters(config: ResidualConfig, hidden: int) -> tuple[ParameterPlan, ...]:
    """What each connection learns beside its norms; a shared shortcut is in `shortcut_parameters` alone."""
    found = []
    for name, kind, start in (
        ("skip_scale", config.learned_skip, config.learned_skip_init),
        ("update_scale", config.learned_update, config.learned_update_init),
    ):
        if kind != "none":
            found.append(ParameterPlan(name, (1,) if kind == "scalar" else (hidden,), start))
    gate = config.gate
    if gate in ("scalar", "vector"):
        found.append(ParameterPlan("gate.weight", (1 if gate == "scalar" else hidden, hidden), "normal"))
    elif gate == "lowrank":
        found.append(ParameterPlan("gate.down", (config.gate_rank, hidden), "normal"))
        found.append(ParameterPlan("gate.up", (hidden, config.gate_rank), "normal"))
    if gate != "none":
        found.append(ParameterPlan("gate.bias", (1 if gate == "scalar" else hidden,), config.gate_bias))
    if not config.shortcut_shared:
        found += [replace(each, name=f"shortcut.{each.name}") for each in shortcut_parameters(config, hidden)]
    return tuple(found)


def shortcut_parameters(config: ResidualConfig, hidden: int) -> tuple[ParameterPlan, ...]:
    """Names relative to the shortcut."""
    if config.shortcut == "projection":
        return (ParameterPlan("weight", (hidden, hidden), "identity", columns=config.shortcut_within_sum),)
    if config.shortcut == "lowrank":
        rank = config.shortcut_rank
        return (ParameterPlan("down", (rank, hidden), "normal"), ParameterPlan("up", (hidden, rank), 0.0))
    return ()
