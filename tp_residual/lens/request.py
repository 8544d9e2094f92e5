"""What may be asked of the lens, checked from values that every rank shares. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from tp_residual.errors import RequestError
from tp_residual.inference.request import check_prompts_fit
from tp_residual.inference.tokenizer import Tokenizer
from tp_residual.model.config import ModelConfig
from tp_residual.residual.config import PRE_NORM, ResidualConfig


@dataclass(frozen=True, kw_only=True)
class LensRequest:
    """target: the token whose logit is taken apart (None: the likeliest); versus: minus this one's.

    position: of that logit in each prompt, negative from the end. window: that many positions up to it are shown by the logit lens.
    top: likeliest tokens a state. layers: (first, end) of the states shown; the sums are over all of them whatever is shown.
    """

    target: int | None = None
    versus: int | None = None
    position: int = -1
    window: int = 12
    top: int = 5
    layers: tuple[int, int] | None = None

    def check(self, prompts: Sequence[Sequence[int]], config: ModelConfig) -> None:
        """Raises RequestError for what this model cannot show of these prompts."""
        _require_sum_of_writes(config.residual)
        check_prompts_fit(prompts, config, 0)
        for name, token_id in (("token", self.target), ("versus", self.versus)):
            if token_id is not None and not 0 <= token_id < config.vocab_size:
                raise RequestError(
                    f"{name} id {token_id} is outside the vocabulary of {config.vocab_size} ids; use 0 to {config.vocab_size - 1}"
                )
        if self.target is not None and self.target == self.versus:
            raise RequestError(f"token {self.target} versus itself is always 0; give two different tokens")
        if not 1 <= self.top <= config.vocab_size:
            raise RequestError(f"top={self.top} must be between 1 and the vocabulary's {config.vocab_size}")
        if self.window < 1:
            raise RequestError(f"window={self.window} must be at least 1")
        for index, prompt in enumerate(prompts):
            if not -len(prompt) <= self.position < len(prompt):
                raise RequestError(
                    f"position {self.position} is outside prompt {index} of {len(prompt)} tokens; "
                    f"use 0 to {len(prompt) - 1}, or -1 for the last"
                )
        if self.layers is not None:
            first, end = self.layers
            if not 0 <= first < end <= config.num_hidden_layers:
                raise RequestError(
                    f"layers {first}:{end} must be A:B with 0 <= A < B <= {config.num_hidden_layers}, the number of layers"
                )

    def shown_layers(self, config: ModelConfig) -> range:
        return range(*(self.layers or (0, config.num_hidden_layers)))


def _require_sum_of_writes(residual: ResidualConfig) -> None:
    """Raises RequestError for a residual in which a write is not simply added, or is not followed by a norm before the head."""
    # what a sublayer reads may be normed and scaled in any way: it is what is written that must add up
    ending = None if residual.final_norm else residual.final_norm  # None and true are the same here
    written = replace(residual, norm=PRE_NORM.norm, input_scale_by_depth=False, final_norm=ending)
    names = [field.name for field in fields(written)]
    other = [f"{name}={getattr(written, name)}" for name in names if getattr(written, name) != getattr(PRE_NORM, name)]
    if other:
        raise RequestError(
            f"this model's residual has {', '.join(other)}, and lens takes apart streams to which attention and MLP are simply added (pre)"
        )


def parse_layers(text: str) -> tuple[int, int]:
    """`A:B`, layers A to B - 1."""
    first, colon, end = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return int(first), int(end)
    except ValueError:
        raise RequestError(f"--layers {text!r} is not A:B, as 8:16 for layers 8 to 15") from None


def single_token(text: str, tokenizer: Tokenizer, option: str) -> int:
    """The id of a text that is one token, without the special tokens put around a prompt. Raises RequestError, naming them, for more."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{option} is not valid Unicode: {error.reason}; give it in UTF-8") from None
    ids = tokenizer.vocabulary.encode(text, add_special_tokens=False).ids
    if not ids:
        raise RequestError(f"{option} {text!r} is no token; give it some text, or an id with {option}-id")
    if len(ids) > 1:
        parts = ", ".join(f"{token} {token_text(tokenizer, token)!r}" for token in ids)
        spaced = tokenizer.vocabulary.encode(f" {text}", add_special_tokens=False).ids
        hint = f"; {f' {text}'!r}, with a space before it, is one" if len(spaced) == 1 and text[:1] != " " else ""
        raise RequestError(
            f"{option} {text!r} is {len(ids)} tokens: {parts}{hint}; a logit belongs to one token: choose it with {option}-id"
        )
    return int(ids[0])


def token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """What one token writes. A piece of a character is shown as the vocabulary spells it, an id without a name as `#id`."""
    if tokenizer is None:
        return f"#{token_id}"
    text: str = tokenizer.vocabulary.decode([token_id], skip_special_tokens=False)
    spelled: str | None = tokenizer.vocabulary.id_to_token(token_id)
    if not text or "\ufffd" in text:
        return spelled or f"#{token_id}"
    if spelled is not None and spelled.startswith("\u2581") and not text.startswith(" "):
        return f" {text}"  # a decoder of the SentencePiece kind drops the space that begins a text
    return text


def visible(text: str) -> str:
    """On one line, with the space that begins a word to be seen."""
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return escaped.replace(" ", "\u2423")
