"""Text to token ids and back, chat templates included, on the `tokenizers` and `jinja2` libraries alone.

Reads what a Hugging Face directory has: tokenizer.json (which also says which special tokens `encode` adds),
tokenizer_config.json for the special tokens' text, and the chat template from chat_template.jinja or, failing that,
from tokenizer_config.json. Templates are code from strangers, so they run in jinja2's immutable sandbox, and with the
environment Transformers gives them, so that they render the same text. Imports neither torch nor Transformers.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers.decoders import DecodeStream

from tp_residual.errors import ConfigError, RequestError
from tp_residual.model.fields import Fields, model_dir, named, present, read_json, show

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
OTHER_FORMATS = ("tokenizer.model", "spiece.model", "tekken.json", "tokenizer.tiktoken", "vocab.json", "vocab.txt")
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class Tokenizer:
    """A model's vocabulary and chat template. `vocab_size` counts the ids it names; a model's may be larger."""

    def __init__(
        self,
        vocabulary: tokenizers.Tokenizer,
        source: str,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
    ) -> None:
        # What tokenizer.json was last trained with must not cut or pad prompts here.
        vocabulary.no_truncation()
        vocabulary.no_padding()
        self.vocabulary, self.source = vocabulary, source
        self.special_tokens, self.chat_template = dict(special_tokens), chat_template
        self.vocab_size: int = vocabulary.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_dir(cls, path: str | PathLike[str]) -> "Tokenizer":
        directory = model_dir(path)
        source, config_source = directory / "tokenizer.json", directory / "tokenizer_config.json"
        if not present(source):
            others = [name for name in OTHER_FORMATS if present(directory / name)]
            found = f" ({', '.join(others)} is there, a format that is not read)" if others else ""
            raise ConfigError(
                f"{directory} has no tokenizer.json{found}; add the file, which AutoTokenizer.save_pretrained writes"
            )
        try:
            vocabulary = tokenizers.Tokenizer.from_file(str(source))
        except Exception as error:  # the library raises nothing narrower
            read_json(source)  # where the file is no JSON, this names the place
            raise ConfigError(f"{source} is not a tokenizer that can be read: {error}; download it again") from None
        config = Fields(read_json(config_source) if present(config_source) else {})
        with named(str(config_source)):
            special_tokens = {name: text for name in SPECIAL_TOKENS if (text := _token_text(config, name)) is not None}
            template = _configured_template(config)
        return cls(vocabulary, str(directory), special_tokens, _template_file(directory) or template)

    def encode(self, text: str) -> list[int]:
        """With the special tokens tokenizer.json puts around a text, often a first `<s>`."""
        return self._encode(text, add_special_tokens=True)

    def decode(self, ids: Sequence[int]) -> str:
        """Without special tokens; ids the vocabulary does not name (a padded vocabulary's) become nothing."""
        text: str = self.vocabulary.decode(list(ids), skip_special_tokens=True)
        return text

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids of `render_chat`. The template writes the special tokens itself, so none are added."""
        return self._encode(self.render_chat(messages), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt for the assistant's answer to `messages`, each a dict with a role and a content, both strings."""
        if not messages:
            raise RequestError("the chat has no message; give at least one")
        for message in messages:
            if not isinstance(message, Mapping) or not _has_text(message, "role", "content"):
                raise RequestError(f"chat message {show(message)} must have a role and a content, both strings")
        template = self._compiled_template
        try:
            return template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self.special_tokens,
            )
        except Exception as error:  # whatever a template's code runs into is this request's failure
            raise RequestError(f"the chat template of {self.source} refused the messages: {error}") from None

    def stream(self) -> "TokenStream":
        return TokenStream(self.vocabulary)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt is not valid Unicode: {error.reason}; give it in UTF-8") from None
        ids: list[int] = self.vocabulary.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    @cached_property
    def _compiled_template(self) -> jinja2.Template:
        if self.chat_template is None:
            raise RequestError(
                f"{self.source} has no chat template for plain chats; prompt without --chat, or add chat_template.jinja"
            )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        try:
            return environment.from_string(self.chat_template)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template of {self.source} is broken at line {error.lineno}: {error.message}; correct it"
            ) from None


class TokenStream:
    """Ids one at a time to text as it becomes certain. All steps and `finish` together give `decode` of all the ids.

    tokenizers' DecodeStream holds back the first tokens of a character. It takes one byte token (`<0xE2>`, in
    vocabularies of the SentencePiece kind) for certain too early: bytes that turn out invalid change the text of the
    whole run, and it raises. So a run of byte tokens, and what would vanish inside it, waits for the token after it.
    """

    def __init__(self, vocabulary: tokenizers.Tokenizer) -> None:
        self._vocabulary, self._decoder = vocabulary, DecodeStream(skip_special_tokens=True)
        self._silent = {token for token, added in vocabulary.get_added_tokens_decoder().items() if added.special}
        self._ids: list[int] = []
        self._waiting: list[int] = []
        self._written = 0

    def step(self, token_id: int) -> str:
        """The text that is now certain and was not before; often a word, "" while a character is incomplete."""
        self._ids.append(token_id)
        self._waiting.append(token_id)
        token = self._vocabulary.id_to_token(token_id)
        if token is None or token_id in self._silent or _BYTE_TOKEN.fullmatch(token):
            return ""
        text: str = self._decoder.step(self._vocabulary, self._waiting) or ""
        self._waiting = []
        self._written += len(text)
        return text

    def finish(self) -> str:
        """What was still waiting when the ids ended: as a rule "", else bytes that never became a character."""
        text: str = self._vocabulary.decode(self._ids, skip_special_tokens=True)[self._written :]
        self._written += len(text)
        return text


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's part for training; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads the attribute by this name and type)

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """jinja2's own tojson escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _token_text(config: Fields, name: str) -> str | None:
    """A special token is a string, or an object whose content is one."""

    def text(value: Any) -> Any:
        return value.get("content") if isinstance(value, dict) else value

    def fits(value: Any) -> bool:
        return value is None or isinstance(text(value), str)

    found: str | None = text(config.take(name, None, "a string, an object with a content, or null", fits))
    return found


def _template_file(directory: Path) -> str | None:
    path = directory / "chat_template.jinja"
    if not present(path):
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _configured_template(config: Fields) -> str | None:
    """One template, or several by name, of which "default" is for plain chats."""

    def fits(value: Any) -> bool:
        if isinstance(value, list):
            return all(isinstance(each, dict) and _has_text(each, "name", "template") for each in value)
        return value is None or isinstance(value, str)

    value = config.take("chat_template", None, "a string, or a list of objects with a name and a template", fits)
    templates = {each["name"]: each["template"] for each in value} if isinstance(value, list) else {"default": value}
    return templates.get("default")


def _has_text(value: Mapping[str, Any], *names: str) -> bool:
    return all(isinstance(value.get(name), str) for name in names)
