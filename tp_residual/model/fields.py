"""Reading one JSON object so that nothing in it is dropped in silence.

An option that is read over is a model that runs and answers wrongly. So a field is either asked for by name (and its
type checked), known to be harmless, refused unless it has its neutral value, or reported as unknown. Imports no torch.
"""

import difflib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from tp_residual.errors import ConfigError

# Names that change nothing we compute: bookkeeping, training, outputs, classifier heads, and the sampling defaults
# that Transformers once kept in config.json and now drops on reading.
HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures attention_dropout
    attn_implementation chunk_size_feed_forward embd_pdrop finetuning_task gradient_checkpointing hidden_dropout
    id2label initializer_range is_decoder is_llama_config label2id model_max_length name_or_path num_labels
    output_attentions output_hidden_states output_past problem_type resid_pdrop return_dict task_specific_params
    tie_last_hidden_states tokenizer_class torchscript transformers.js_config transformers_version unsloth_fixed
    unsloth_version use_bfloat16 use_cache

    cls_token_id decoder_start_token_id mask_token_id prefix sep_token_id unk_token_id

    assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens
    min_length no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams
    num_return_sequences output_scores remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens
    target_lookbehind temperature top_k top_p typical_p
    """.split()
)

NESTED = tuple("text_config vision_config audio_config llm_config language_config thinker_config talker_config".split())

# What is not built, the values that do not ask for it (null never does), and the names that ask for it otherwise.
_NOT_BUILT: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("quantised weights", (), "quantization_config compression_config"),
    ("nested and multimodal models", (), " ".join(NESTED)),
    ("encoders and cross-attention", (False,), "is_encoder_decoder add_cross_attention tie_encoder_decoder"),
    ("mixtures of experts", (0, []), "num_experts num_local_experts n_routed_experts n_shared_experts mlp_only_layers"),
    ("mixtures of experts", (0,), "num_experts_per_tok moe_intermediate_size"),
    ("layers unlike each other", ({},), "per_layer_config block_configs pruned_heads"),
    ("multi-token prediction", (0,), "num_nextn_predict_layers"),
    ("low-rank (MLA) attention", (0,), "q_lora_rank kv_lora_rank"),
    ("partial rotary embeddings", (1,), "partial_rotary_factor rotary_pct"),
    ("layers without rotary embeddings", ([], 0), "no_rope_layers no_rope_layer_interval"),
    ("a second rotary base", (), "rope_local_base_freq local_rope_theta"),
    ("interleaved rotary pairs", (False,), "rope_interleaved"),
    ("multimodal rotary embeddings", (False,), "use_mrope mrope_section mrope_interleaved"),
    ("scaled rotary embeddings", (1,), "attention_factor mscale mscale_all_dim"),
    ("other position encodings", (False, "rope"), "alibi use_alibi position_embedding_type"),
    ("capped logits", (), "attn_logit_softcapping final_logit_softcapping attn_logit_softcap logit_softcap"),
    ("scaled branches", (1,), "residual_multiplier embedding_multiplier lm_head_multiplier scale_emb"),
    ("scaled logits", (1,), "logits_scaling logit_scale"),
    ("other attention scales", (), "attention_multiplier query_pre_attn_scalar scale_depth"),
    ("clipped queries, keys and values", (), "clip_qkv"),
    ("chunked attention", (), "attention_chunk_size"),
    ("gated attention", (False,), "attn_output_gate gated_attention use_gated_attention use_attention_gate"),
    ("gated attention", (False,), "headwise_attn_output_gate elementwise_attn_output_gate"),
    ("parallel attention and MLP", (False,), "parallel_attn use_parallel_residual"),
    ("projections cut up for pretraining", (1,), "pretraining_tp"),
)
REFUSED = {name: (feature, neutral) for feature, neutral, names in _NOT_BUILT for name in names.split()}


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    limit = sys.float_info.max  # neither NaN, nor infinity, nor an integer too long for a float
    return isinstance(value, int | float) and not isinstance(value, bool) and -limit <= value <= limit


def show(value: Any) -> str:
    """A value as config.json spells it, short enough for a message."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else text[:77] + "..."


@contextmanager
def named(source: str) -> Iterator[None]:
    """Puts `source` in front of what is wrong, where the message does not begin with it yet."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(str(error) if str(error).startswith(source) else f"{source}: {error}") from None


def model_dir(path: str | PathLike[str]) -> Path:
    """`path` as a directory that exists, or ConfigError."""
    directory = Path(path)
    try:
        if directory.is_dir():
            return directory
        problem = "is not a directory" if directory.exists() else "does not exist"
    except (OSError, ValueError) as error:  # a parent that may not be searched, a loop of links, a NUL in the name
        problem = f"cannot be read ({error})"
    raise ConfigError(f"model directory {directory} {problem}; give a directory with config.json in it")


def present(path: Path) -> bool:
    """Whether to try reading `path`: yes also where we may not even ask, since the attempt then says why."""
    try:
        return path.exists()
    except OSError:
        return True


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object. Whatever is wrong with the file is a ConfigError that names it and, where it can, the place."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}; make it a readable file") from None
    except (ValueError, RecursionError) as error:  # JSONDecodeError, UnicodeDecodeError and ConfigError among them
        reason = str(error)
        if isinstance(error, json.JSONDecodeError):
            reason = f"line {error.lineno}, column {error.colno}: {error.msg}"
        raise ConfigError(f"{path} is not valid JSON: {reason}; correct it or download it again") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds {show(values)}, not a JSON object; correct it or download it again")
    return values


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ConfigError(f"{name} is given twice")
        values[name] = value
    return values


NEAR_MISS = (
    0.88  # difflib's ratio: num_key_value_head is 0.97 from its field, unrelated names of real configs stay below 0.8
)
REQUIRED: Any = object()  # the default of a field that must be there


class Fields:
    """A JSON object that checks the type of what it is asked for and remembers the names, to judge the rest at last."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self.values, self.prefix, self.used = values, prefix, set[str]()

    def take(self, name: str, default: Any, kind: str, fits: Callable[[Any], bool]) -> Any:
        self.used.add(name)
        if name in self.values:
            if not fits(self.values[name]):
                raise ConfigError(f"{self.prefix}{name}={show(self.values[name])} must be {kind}; correct it")
            return self.values[name]
        if default is REQUIRED:
            raise ConfigError(f"{self.prefix}{name} is missing; the model cannot be built without it")
        return default

    def integer(self, name: str, default: int = REQUIRED) -> int:
        value: int = self.take(name, default, "an integer", is_integer)
        return value

    def integer_or_null(self, name: str, default: int | None) -> int | None:
        value: int | None = self.take(name, default, "an integer or null", lambda v: v is None or is_integer(v))
        return value

    def number(self, name: str, default: float = REQUIRED) -> float:
        return float(self.take(name, default, "a finite number", is_number))

    def flag(self, name: str, default: bool = False) -> bool:
        value: bool = self.take(name, default, "true or false", lambda v: isinstance(v, bool))
        return value

    def text(self, name: str, default: str = REQUIRED) -> str:
        value: str = self.take(name, default, "a string", lambda v: isinstance(v, str))
        return value

    def text_or_null(self, name: str) -> str | None:
        value: str | None = self.take(name, None, "a string or null", lambda v: v is None or isinstance(v, str))
        return value

    def object_or_null(self, name: str) -> dict[str, Any] | None:
        value: dict[str, Any] | None
        value = self.take(name, None, "an object or null", lambda v: v is None or isinstance(v, dict))
        return value

    def list_or_null(self, name: str) -> list[Any] | None:
        value: list[Any] | None
        value = self.take(name, None, "a list or null", lambda v: v is None or isinstance(v, list))
        return value

    def token_ids(self, name: str, default: int | None) -> tuple[int, ...]:
        """One id, a list of them, or null; without repeats, in the order given."""

        def fits(value: Any) -> bool:
            return value is None or all(map(is_integer, value if isinstance(value, list) else [value]))

        value = self.take(name, default, "a token id, a list of them, or null", fits)
        return () if value is None else tuple(dict.fromkeys(value if isinstance(value, list) else [value]))

    def check_neutral(self, name: str) -> None:
        feature, neutral = REFUSED[name]
        value = self.values.get(name)
        if value is not None and value not in neutral:
            allowed = " or ".join(["null", *map(show, neutral)])
            raise ConfigError(
                f"{self.prefix}{name}={show(value)} is refused: {feature} are not built; use a model that has {allowed}"
            )

    def unknown(self) -> list[str]:
        """Judges what nobody asked for: refuses what is not neutral, returns the names that nothing is known about."""
        left = [name for name in self.values if name not in self.used and name not in HARMLESS]
        for name in left:
            if name in REFUSED:
                self.check_neutral(name)
        strangers = [name for name in left if name not in REFUSED]
        for name in strangers:
            near = difflib.get_close_matches(name, sorted(self.used), 1, NEAR_MISS)
            if near:
                raise ConfigError(
                    f"{self.prefix}{name} is not a field, and {self.prefix}{near[0]} is; correct or remove it"
                )
        return [self.prefix + name for name in strangers]
