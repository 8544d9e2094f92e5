"""The way back from a ModelConfig to what config.json holds: for models that were trained here. Imports no torch."""

from dataclasses import asdict
from typing import Any

from tp_residual.model.config import MUST_AGREE, ModelConfig
from tp_residual.model.families import FAMILIES
from tp_residual.residual.config import PRE_NORM

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def config_values(config: ModelConfig, *, dtype: str | None = None) -> dict[str, Any]:
    """config.json of this model: `ModelConfig.from_dict` of it is equal to `config`, and so does Transformers understand it.

    dtype: of the weights, where it is another than the config's. The field `residual` is there when the connection is not Pre-Norm;
    Transformers ignores it, and such a model is then another one there.
    """
    family = FAMILIES[config.model_type]
    rope: dict[str, Any] = {"rope_type": config.rope_type, "rope_theta": config.rope_theta}
    if config.rope_type != "default":
        rope["factor"] = config.rope_factor
    if config.rope_scaling is not None:
        scaling = asdict(config.rope_scaling)
        of_llama3 = ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
        others = ("low_freq_factor", "high_freq_factor")
        rope |= {
            name: value
            for name, value in scaling.items()
            if (name in of_llama3 if config.rope_type == "llama3" else name not in others)
        }
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": config.hidden_act,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0]
        if len(config.eos_token_ids) == 1
        else list(config.eos_token_ids) or None,
        "pad_token_id": config.pad_token_id,
        "dtype": dtype or config.dtype,
    }
    values |= {
        rule: getattr(config, fact)
        for fact in sorted(set(MUST_AGREE.values()))
        if isinstance(rule := getattr(family, fact), str)
    }
    window = next((each for each in config.sliding_window if each is not None), None)
    if family.windows == "all":
        values["sliding_window"] = window
    elif family.windows == "upper":
        kinds = ["full_attention" if each is None else "sliding_attention" for each in config.sliding_window]
        values |= {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": kinds}
    if config.residual != PRE_NORM:
        values["residual"] = config.residual.to_dict()
    return values
