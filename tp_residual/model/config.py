"""A model's sizes and options, read from config.json once and never changed.

`ModelConfig` is all that the rest of the package knows about a checkpoint's architecture. Imports no torch: the command
line checks a request with it before any rank starts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

from tp_residual.errors import ConfigError
from tp_residual.model.families import FAMILIES, Family
from tp_residual.model.fields import NESTED, Fields, is_integer, is_number, model_dir, named, present, read_json, show
from tp_residual.residual.config import PRE_NORM, ResidualConfig

DTYPES = ("bfloat16", "float16", "float32", "float64")
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
LAYER_TYPES = ("full_attention", "sliding_attention")

# Fields that some families read and others fix. Where a family fixes the fact, the field may only repeat it.
MUST_AGREE = {"attention_bias": "qkv_bias", "mlp_bias": "mlp_bias", "use_qk_norm": "qk_norm", "qk_norm": "qk_norm"}

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """What llama3 and yarn need beyond theta and factor. original_max_position_embeddings: the length of pretraining.

    low_freq_factor, high_freq_factor: of llama3. beta_fast, beta_slow, truncate: of yarn (arXiv 2309.00071), whose cosines and sines are
    multiplied by attention_factor.
    """

    original_max_position_embeddings: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.original_max_position_embeddings < 1:
            raise ConfigError(
                f"original_max_position_embeddings={self.original_max_position_embeddings} must be at least 1"
            )
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"low_freq_factor={self.low_freq_factor} must be above 0 and below high_freq_factor={self.high_freq_factor}"
            )
        if not 0 < self.beta_slow < self.beta_fast:
            raise ConfigError(f"beta_slow={self.beta_slow} must be above 0 and below beta_fast={self.beta_fast}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture, every default filled in and every relation checked. Sizes carry the names of config.json.

    `sliding_window` has one entry a layer: None sees all earlier tokens, w the w latest, the token itself among them.
    `warnings` lists what was read but not understood; it takes no part in equality.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str = "silu"
    rope_theta: float
    rope_type: str = "default"
    rope_factor: float = 1.0  # how many times longer than in pretraining; 1 for "default"
    rope_scaling: RopeScaling | None = None  # of "llama3" and "yarn"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    weight_after_cast: bool = True
    sliding_window: tuple[int | None, ...]
    residual: ResidualConfig = PRE_NORM
    dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    warnings: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if not is_integer(value) or value < 1:
                raise ConfigError(f"{name}={show(value)} must be an integer of at least 1")
        for name in ("rms_norm_eps", "rope_theta", "rope_factor"):
            value = getattr(self, name)
            if not is_number(value) or value <= 0:
                raise ConfigError(f"{name}={show(value)} must be a finite number above 0")
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            raise ConfigError(
                f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}; "
                "every KV head must serve equally many query heads"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} must be even: rotary embeddings turn pairs of its elements")
        if self.hidden_act != "silu":
            raise ConfigError(f"hidden_act={show(self.hidden_act)} is not supported; use silu, also called swish")
        if self.rope_type not in ROPE_TYPES:
            raise ConfigError(f"rope_type={show(self.rope_type)} is not supported; use {' or '.join(ROPE_TYPES)}")
        if self.rope_type == "default" and self.rope_factor != 1:
            raise ConfigError(f"rope factor={self.rope_factor} means nothing for rope_type=default; use 1, or linear")
        if self.rope_type != "default" and self.rope_factor < 1:
            raise ConfigError(f"rope factor={self.rope_factor} must be at least 1: a longer context, not a shorter one")
        if (self.rope_scaling is not None) != (self.rope_type in ("llama3", "yarn")):
            raise ConfigError(
                f"rope_type={self.rope_type} with rope_scaling={self.rope_scaling}: only llama3 and yarn have one"
            )
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"dtype={show(self.dtype)} is not supported; use one of {', '.join(DTYPES)}")
        if len(self.sliding_window) != self.num_hidden_layers:
            raise ConfigError(
                f"sliding_window has {len(self.sliding_window)} entries for "
                f"num_hidden_layers={self.num_hidden_layers}; give one a layer"
            )
        for window in self.sliding_window:
            if window is not None and (not is_integer(window) or window < 1):
                raise ConfigError(f"sliding_window={show(window)} must be an integer of at least 1, or null for none")
        self.residual.require_depth(self.num_hidden_layers, self.hidden_size)
        stops = [("eos_token_id", token) for token in self.eos_token_ids]
        for name, value in [("bos_token_id", self.bos_token_id), ("pad_token_id", self.pad_token_id), *stops]:
            if value is not None and (not is_integer(value) or not 0 <= value < self.vocab_size):
                legal = f"0 to {self.vocab_size - 1}"
                raise ConfigError(f"{name}={show(value)} is outside the vocabulary; use {legal}, or null for none")

    def with_residual(self, residual: ResidualConfig, *, trained: bool, force: bool = False) -> "ModelConfig":
        """The same with another residual connection. trained: there are weights that were made for this one.

        Raises ConfigError then, unless forced: the other is another model, not an approximation of this one.
        """
        if residual != self.residual and trained and not force:
            raise ConfigError(
                f"these weights were trained with residual {self.residual.name}, and residual {residual.name} is another model, not an "
                "approximation of it; leave --residual out, take --weights random:SEED, or force it with --force-residual"
            )
        return replace(self, residual=residual)

    def with_layers(self, count: int) -> "ModelConfig":
        """The same with another depth; layers look through the windows that the first ones have."""
        windows = (self.sliding_window * count)[:count]
        return replace(self, num_hidden_layers=count, sliding_window=windows)

    @property
    def max_sequence_length(self) -> int:
        """The longest legal sequence. linear and dynamic configs keep the length of pretraining in max_position_embeddings, yarn in its own
        field, and reach `factor` times that; llama3 configs state the new length themselves.
        """
        if self.rope_type in ("linear", "dynamic"):
            return int(self.max_position_embeddings * self.rope_factor)
        if self.rope_type == "yarn":
            assert self.rope_scaling is not None
            return max(
                self.max_position_embeddings, int(self.rope_scaling.original_max_position_embeddings * self.rope_factor)
            )
        return self.max_position_embeddings

    @property
    def length_limit(self) -> str:
        """max_sequence_length as a message says it."""
        stretched = self.max_sequence_length != self.max_position_embeddings
        text = f"max_position_embeddings={self.max_position_embeddings}"
        return f"{text} stretched to {self.max_sequence_length} by rope_type={self.rope_type}" if stretched else text

    @classmethod
    def from_dir(cls, path: str | PathLike[str]) -> "ModelConfig":
        """Reads DIR/config.json. Stop tokens that DIR/generation_config.json names replace those of config.json."""
        directory = model_dir(path)
        source, generation_source = directory / "config.json", directory / "generation_config.json"
        if not present(source):
            raise ConfigError(f"{directory} has no config.json; give a model directory in Hugging Face format")
        config = cls.from_dict(read_json(source), str(source))
        if not present(generation_source):
            return config
        with named(str(generation_source)):
            stops = Fields(read_json(generation_source)).token_ids("eos_token_id", None)
            return replace(config, eos_token_ids=stops) if stops else config

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str) -> "ModelConfig":
        """`values` is what config.json holds; `source` names it in errors."""
        with named(source):
            return _build(Fields(values))


def _build(fields: Fields) -> ModelConfig:
    for name in NESTED:  # before model_type, which is then another one: the nesting is the better thing to name
        fields.check_neutral(name)
    model_type = fields.text("model_type")
    if model_type not in FAMILIES:
        raise ConfigError(f"model_type={show(model_type)} is not supported; use one of {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    hidden_size, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_hidden_layers = fields.integer("num_hidden_layers")
    kv_heads = fields.integer_or_null("num_key_value_heads", family.num_key_value_heads)
    head_dim = fields.integer_or_null("head_dim", family.head_dim)
    if head_dim is None:
        if heads < 1 or hidden_size % heads:
            raise ConfigError(
                f"hidden_size={hidden_size} is not a multiple of num_attention_heads={heads}; "
                "correct one of them, or give head_dim"
            )
        head_dim = hidden_size // heads
    hidden_act = fields.text("hidden_act", "silu")
    pad_token_id = fields.integer_or_null("pad_token_id", None)
    max_position_embeddings = fields.integer("max_position_embeddings", family.max_position_embeddings)
    rope_theta, rope_type, rope_factor, rope_scaling, rope_unknown = _rope(fields, family, max_position_embeddings)
    config = ModelConfig(
        model_type=model_type,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=fields.number("rms_norm_eps", family.rms_norm_eps),
        hidden_act="silu" if hidden_act == "swish" else hidden_act,
        rope_theta=rope_theta,
        rope_type=rope_type,
        rope_factor=rope_factor,
        rope_scaling=rope_scaling,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=_fact(fields, family.qkv_bias),
        o_bias=_fact(fields, family.o_bias),
        mlp_bias=_fact(fields, family.mlp_bias),
        qk_norm=family.qk_norm,
        weight_after_cast=family.weight_after_cast,
        sliding_window=_windows(fields, family, model_type, num_hidden_layers),
        residual=_residual(fields),
        dtype=_dtype(fields),
        bos_token_id=fields.integer_or_null("bos_token_id", family.bos_token_id),
        eos_token_ids=fields.token_ids("eos_token_id", family.eos_token_id),
        pad_token_id=None if pad_token_id == -1 else pad_token_id,  # -1 is how older Llama configs say "none"
    )
    for name, fact in MUST_AGREE.items():
        fixed = getattr(config, fact)
        if name in fields.values and name not in fields.used and fields.flag(name) != fixed:
            raise ConfigError(
                f"{name}={show(not fixed)} contradicts model_type={model_type}, where it is always {show(fixed)}"
            )
    unknown = fields.unknown() + rope_unknown
    return replace(config, warnings=tuple(f"config.json: unknown field {name} is ignored" for name in unknown))


def _fact(fields: Fields, rule: bool | str) -> bool:
    return fields.flag(rule) if isinstance(rule, str) else rule


def _rope(
    fields: Fields, family: Family, max_position_embeddings: int
) -> tuple[float, str, float, RopeScaling | None, list[str]]:
    """theta, type, factor, scaling and the names not understood, from rope_theta with rope_scaling, or from rope_parameters."""
    theta = fields.number("rope_theta", family.rope_theta)
    old, new = fields.object_or_null("rope_scaling"), fields.object_or_null("rope_parameters")
    if old and new and old != new:
        raise ConfigError(f"rope_scaling={show(old)} and rope_parameters={show(new)} differ; keep one")
    name, values = ("rope_scaling", old) if old else ("rope_parameters", new or {})
    if any(isinstance(value, dict) for value in values.values()):
        raise ConfigError(f"{name}={show(values)} differs between layers, which is not built; use one for all layers")
    rope = Fields(values, prefix=f"{name}.")
    kinds = {rope.text(key) for key in ("rope_type", "type") if key in values} or {"default"}
    if len(kinds) > 1:
        raise ConfigError(f"{name}={show(values)} has two types, in rope_type and in type; keep one")
    kind = kinds.pop()
    if kind not in ROPE_TYPES:
        raise ConfigError(f"{name}.rope_type={show(kind)} is not supported; use {' or '.join(ROPE_TYPES)}")
    inner_theta = rope.number("rope_theta", theta)
    if "rope_theta" in fields.values and inner_theta != theta:
        raise ConfigError(f"rope_theta={theta} and {name}.rope_theta={inner_theta} differ; keep one")
    original = rope.integer("original_max_position_embeddings", max_position_embeddings)
    if kind == "yarn" and values.get("factor") is None and original > 0:
        factor = max_position_embeddings / original
    else:
        factor = rope.number("factor", 1.0) if kind == "default" else rope.number("factor")
    scaling = None
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        original = rope.integer("original_max_position_embeddings")
        scaling = RopeScaling(original_max_position_embeddings=original, low_freq_factor=low, high_freq_factor=high)
    elif kind == "yarn":
        scaling = RopeScaling(
            original_max_position_embeddings=original,
            attention_factor=_yarn_attention_factor(rope, factor),
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            truncate=rope.flag("truncate", True),
        )
    return inner_theta, kind, factor, scaling, rope.unknown()


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    """As given, or `0.1 mscale log(factor) + 1` over the same with mscale_all_dim (arXiv 2309.00071, section 3.4; mscale is DeepSeek's)."""

    def attention_scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all_dim = (rope.number(name, 0.0) for name in ("mscale", "mscale_all_dim"))
    if rope.values.get("attention_factor") is not None:
        return rope.number("attention_factor")
    if mscale and mscale_all_dim:
        return attention_scale(mscale) / attention_scale(mscale_all_dim)
    return attention_scale(1.0)


def _windows(fields: Fields, family: Family, model_type: str, num_hidden_layers: int) -> tuple[int | None, ...]:
    window = fields.integer_or_null("sliding_window", family.sliding_window)
    slides = fields.flag("use_sliding_window", family.windows != "upper")
    first = fields.integer("max_window_layers", family.max_window_layers) if family.windows == "upper" else 0
    if family.windows != "upper" and window is not None and slides != (family.windows == "all"):
        fact = "all its layers slide" if family.windows == "all" else "no layer slides"
        raise ConfigError(
            f"sliding_window={window} with use_sliding_window={show(slides)} contradicts model_type={model_type}, "
            f"where {fact}; use sliding_window=null"
        )
    if not slides:
        window = None
    windows = tuple(window if layer >= first else None for layer in range(num_hidden_layers))
    kinds = fields.list_or_null("layer_types")
    if kinds is None:
        return windows
    if len(kinds) != num_hidden_layers:
        raise ConfigError(
            f"layer_types has {len(kinds)} entries for num_hidden_layers={num_hidden_layers}; give one a layer"
        )
    for kind in kinds:
        if kind not in LAYER_TYPES:
            raise ConfigError(f"layer_types has {show(kind)}, which is not built; use {' or '.join(LAYER_TYPES)}")
    if window is None and "sliding_attention" in kinds:
        raise ConfigError(
            "layer_types has sliding_attention, but no sliding_window is in use; "
            "give sliding_window (and use_sliding_window where the family has it), or make all full_attention"
        )
    wanted = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if family.windows != "upper" and wanted != windows:
        raise ConfigError(f"layer_types={show(kinds)} contradicts model_type={model_type}, where layers are alike")
    return wanted


def _residual(fields: Fields) -> ResidualConfig:
    """The field `residual` is this project's own: a preset's name, or fields of a ResidualConfig."""
    values = fields.values.get("residual")
    fields.used.add("residual")
    return PRE_NORM if values is None else ResidualConfig.from_dict(values, "residual")


def _dtype(fields: Fields) -> str | None:
    """`dtype`, or `torch_dtype` as it was called before Transformers 5."""
    names = {key: fields.text_or_null(key) for key in ("dtype", "torch_dtype")}
    given = {name.removeprefix("torch.") for name in names.values() if name is not None}
    if len(given) > 1:
        raise ConfigError(f"dtype={names['dtype']} and torch_dtype={names['torch_dtype']} differ; keep one")
    return given.pop() if given else None
