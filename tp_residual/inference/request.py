"""What may be asked of a generation, checked from values every rank shares. Imports no torch: the launcher's parent checks too."""

from collections.abc import Sequence
from dataclasses import dataclass

from tp_residual.errors import RequestError
from tp_residual.model.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """Greedy decoding: how many tokens, and which end a sequence.

    min_new_tokens: stop tokens cannot be chosen before that many. ignore_eos: stop tokens are ordinary tokens.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise RequestError(
                f"min_new_tokens={self.min_new_tokens} must be between 0 and max_new_tokens={self.max_new_tokens}"
            )


def check_prompts(prompts: Sequence[Sequence[int]], config: ModelConfig, settings: GenerationSettings) -> None:
    """Raises RequestError for a prompt that is empty, too long, or has an id outside the vocabulary."""
    if not prompts:
        raise RequestError("no prompt was given; pass at least one")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise RequestError(f"prompt {index} is empty: it has 0 tokens; give it at least one")
        needed = len(prompt) + settings.max_new_tokens
        if needed > config.max_position_embeddings:
            raise RequestError(
                f"prompt {index} has {len(prompt)} tokens and max_new_tokens={settings.max_new_tokens}: {needed} exceeds "
                f"max_position_embeddings={config.max_position_embeddings}; shorten the prompt or ask for at most "
                f"{max(config.max_position_embeddings - len(prompt), 0)} new tokens"
            )
        for token_id in (min(prompt), max(prompt)):
            if not 0 <= token_id < config.vocab_size:
                raise RequestError(
                    f"prompt {index} has token id {token_id}, outside the vocabulary of {config.vocab_size} ids; "
                    f"use 0 to {config.vocab_size - 1}"
                )
