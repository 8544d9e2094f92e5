"""Text to ids and back: against Transformers where it has the same step, and every way a tokenizer directory is bad."""

import json
import random
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tp_residual.errors import ConfigError, RequestError
from tp_residual.inference.tokenizer import Tokenizer

CORPUS = ["hello world", "The capital of France is Paris.", "user assistant system", "naïve café, 你好世界 🙂🙃"]
CHATML = """{%- for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# What Transformers' environment gives to templates: block trimming, loop controls, namespaces, helpers, None tools.
HELPERS = """{% if tools is defined and tools is none and documents is none %}
  no tools{{ bos_token }}
{% endif %}
{% set ns = namespace(n=0) %}
{% for message in messages %}
  {% if message.role == "skip" %}{% continue %}{% endif %}
  {% if message.role == "stop" %}{% break %}{% endif %}
  {% if message.role == "bad" %}{{ raise_exception("role <" ~ message.role ~ "> is not known") }}{% endif %}
  {% set ns.n = ns.n + 1 %}
  {% generation %}{% set inner = "x" %}{{ message | tojson }}{% endgeneration %}{{ inner }}
  {{ {"<b>": [message.content, "é & '"]} | tojson(indent=2) }}{{ [1, 2] | tojson(separators=(",", ":")) }}
{% endfor %}
{{ ns.n }} {{ strftime_now("%Y-%m") }} {{ eos_token }}|{{ unk_token }}|{{ nothing }}
"""
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "  What is <b>'x' & \"y\"</b>?\n"},
    {"role": "skip", "content": "not shown"},
    {"role": "assistant", "content": "naïve 你好 🙂", "extra": 3},
    {"role": "stop", "content": "nor this"},
    {"role": "bad", "content": "nor that"},
]
SPECIAL = {
    "bos_token": "<|im_start|>",
    "eos_token": {"content": "<|im_end|>", "__type": "AddedToken"},
    "pad_token": None,
}


def byte_level() -> tokenizers.Tokenizer:
    """Of the GPT-2 kind: a character of several bytes is several tokens unless it was learnt."""
    vocabulary = tokenizers.Tokenizer(models.BPE())
    vocabulary.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    vocabulary.train_from_iterator(CORPUS, trainer)
    vocabulary.add_tokens([AddedToken("<plain>", special=False)])
    vocabulary.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", vocabulary.token_to_id("<|im_start|>"))]
    )
    return vocabulary


def byte_fallback() -> tokenizers.Tokenizer:
    """Of the Llama-2 kind: what is not in the vocabulary becomes byte tokens, spaces become a mark in front."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁helowrd", "▁h", "ll", "▁w"]
    vocabulary = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[("▁", "h"), ("l", "l"), ("▁", "w")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    vocabulary.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    vocabulary.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    vocabulary.add_special_tokens(["<unk>", "<s>", "</s>"])
    return vocabulary


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback}


def save(directory: Path, vocabulary: tokenizers.Tokenizer | None = None, **config: Any) -> Path:
    (vocabulary or byte_level()).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(SPECIAL | config))
    return directory


# --- encode and decode


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["hello world", " naïve  café, 你好世界 🙂🙃\n", "", "a<|im_end|>b <plain>"])
def test_encode_and_decode_equal_transformers(tmp_path: Path, kind: str, text: str) -> None:
    ours = Tokenizer.from_dir(save(tmp_path, KINDS[kind]()))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if kind == "byte_level":
        assert ids[0] == ours.vocabulary.token_to_id("<|im_start|>")  # the post-processor's
        assert ours.decode(ids) == text.replace("<|im_end|>", "")  # special tokens vanish, other added ones do not


def test_saved_truncation_and_padding_do_not_touch_prompts(tmp_path: Path) -> None:
    vocabulary = byte_level()
    vocabulary.enable_truncation(2)
    vocabulary.enable_padding(length=9)
    tokenizer = Tokenizer.from_dir(save(tmp_path, vocabulary))
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"
    assert len(tokenizer.encode("")) == 1


def test_ids_beyond_the_vocabulary_decode_to_nothing(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(save(tmp_path))
    ids = tokenizer.encode("hello")
    assert tokenizer.vocab_size == tokenizer.vocabulary.get_vocab_size()
    assert tokenizer.decode([*ids, tokenizer.vocab_size, 10**6]) == "hello"


def test_text_that_is_no_unicode_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(save(tmp_path, chat_template=CHATML))
    with pytest.raises(RequestError, match="not valid Unicode"):
        tokenizer.encode("caf\udce9")
    with pytest.raises(RequestError, match="not valid Unicode"):
        tokenizer.apply_chat_template([{"role": "user", "content": "caf\udce9"}])


# --- stream


@pytest.mark.parametrize("kind", KINDS)
def test_stream_gives_whole_characters(kind: str) -> None:
    tokenizer = Tokenizer(KINDS[kind](), "here", {}, None)
    text = "hello 漢字 🚀, world ÿ"
    ids = tokenizer.encode(text)
    stream = tokenizer.stream()
    steps = [stream.step(token) for token in ids]
    assert not any("\N{REPLACEMENT CHARACTER}" in step for step in steps)
    assert steps.count("") > 5  # characters of several tokens were held back
    assert "".join(steps) + stream.finish() == text
    assert stream.finish() == ""
    assert len("".join(steps)) >= len(text) - 1  # it does stream: nothing but a last character may wait for the end


@pytest.mark.parametrize("kind", KINDS)
def test_stream_equals_decode_on_any_ids(kind: str) -> None:
    # What a model with random weights writes: broken characters, special tokens inside them, ids without a name.
    tokenizer = Tokenizer(KINDS[kind](), "here", {}, None)
    size = tokenizer.vocab_size
    real = tokenizer.encode("hello 你好 🙂 wörld  x")
    for seed in range(600):
        source = random.Random(seed)
        pool = [*real, 0, 1, 2, size, size + 7] if seed % 2 else range(size + 2)
        ids = [source.choice(pool) for _ in range(source.randrange(25))]
        stream = tokenizer.stream()
        steps = [stream.step(token) for token in ids]
        whole = tokenizer.decode(ids)
        assert whole.startswith("".join(steps)), ids
        assert "".join(steps) + stream.finish() == whole, ids


def test_streams_are_independent() -> None:
    tokenizer = Tokenizer(byte_level(), "here", {}, None)
    texts = ["hello 你好", "world 🙂 é"]
    ids = [tokenizer.encode(text) for text in texts]
    streams = [tokenizer.stream(), tokenizer.stream()]
    found = ["", ""]
    for step in range(max(map(len, ids))):
        for i in range(2):
            if step < len(ids[i]):
                found[i] += streams[i].step(ids[i][step])
    assert found == texts


# --- chat templates


@pytest.mark.parametrize("template", [CHATML, HELPERS], ids=["chatml", "helpers"])
@pytest.mark.parametrize("place", ["string", "list", "file"])
def test_chat_equals_transformers(tmp_path: Path, template: str, place: str) -> None:
    named = [{"name": "tool_use", "template": "wrong"}, {"name": "default", "template": template}]
    save(tmp_path, chat_template={"string": template, "list": named, "file": "wrong"}[place])
    if place == "file":  # comes before tokenizer_config.json
        (tmp_path / "chat_template.jinja").write_text(template)
    ours, theirs = Tokenizer.from_dir(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for messages in (CHAT, CHAT[:1], CHAT[2:3]):
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ours.render_chat(messages) == text
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ours.apply_chat_template(messages) == ids


def test_helpers_render_what_they_say(tmp_path: Path) -> None:
    # Against a text written by hand, so that the comparison above cannot agree on nothing.
    template = "{{ bos_token }}{{ messages | tojson }}{{ eos_token }}{% if add_generation_prompt %}>{% endif %}"
    tokenizer = Tokenizer.from_dir(save(tmp_path, chat_template=template))
    message = {"role": "user", "content": "<é>"}
    for messages in ([message], (MappingProxyType(message),)):  # any sequence of any mapping
        text = tokenizer.render_chat(messages)
        assert text == '<|im_start|>[{"role": "user", "content": "<é>"}]<|im_end|>>'


def test_a_template_that_raises_is_a_refused_request(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(save(tmp_path, chat_template=HELPERS))
    with pytest.raises(RequestError, match="refused the messages: role <bad> is not known"):
        tokenizer.apply_chat_template(CHAT[4:])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[5].content + 'x' }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0].update({'role': 'x'}) }}",
    ],
)
def test_a_template_that_fails_or_reaches_out_is_a_refused_request(tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer.from_dir(save(tmp_path, chat_template=template))
    message = {"role": "user", "content": "hello"}
    with pytest.raises(RequestError, match="refused the messages"):
        tokenizer.apply_chat_template([message])
    assert message == {"role": "user", "content": "hello"}


def test_a_broken_template_names_its_line(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(save(tmp_path, chat_template="a\n{% if %}"))
    assert tokenizer.encode("hello")  # plain prompts do not need it
    with pytest.raises(ConfigError, match="broken at line 2"):
        tokenizer.apply_chat_template(CHAT[:1])


@pytest.mark.parametrize("template", [None, [{"name": "tool_use", "template": "x"}]])
def test_chat_without_a_template_is_refused(tmp_path: Path, template: Any) -> None:
    tokenizer = Tokenizer.from_dir(save(tmp_path, chat_template=template))
    with pytest.raises(RequestError, match="no chat template for plain chats; prompt without --chat"):
        tokenizer.apply_chat_template(CHAT[:1])


@pytest.mark.parametrize(
    "messages", [[], ["hello"], [{"role": "user"}], [{"content": "x"}], [{"role": "user", "content": ["x"]}]]
)
def test_messages_that_are_none_are_refused(tmp_path: Path, messages: Any) -> None:
    tokenizer = Tokenizer.from_dir(save(tmp_path, chat_template=CHATML))
    with pytest.raises(RequestError, match="message"):
        tokenizer.apply_chat_template(messages)


# --- directories


def test_tokenizer_config_may_be_absent(tmp_path: Path) -> None:
    (save(tmp_path) / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_text("[{{ bos_token }}]{{ messages[0].content }}")
    assert Tokenizer.from_dir(tmp_path).render_chat([{"role": "user", "content": "x"}]) == "[]x"


@pytest.mark.parametrize(
    ("files", "parts"),
    [
        ({}, ["has no tokenizer.json", "add the file"]),
        ({"tokenizer.model": ""}, ["tokenizer.model is there, a format that is not read", "save_pretrained"]),
        ({"vocab.json": "{}", "merges.txt": ""}, ["vocab.json is there"]),
        ({"tokenizer.json": "{"}, ["tokenizer.json is not valid JSON: line 1, column 2"]),
        ({"tokenizer.json": ""}, ["tokenizer.json is not valid JSON: line 1, column 1"]),
        ({"tokenizer.json": "{}"}, ["tokenizer.json is not a tokenizer that can be read"]),
        ({"tokenizer.json": "[]"}, ["tokenizer.json holds [], not a JSON object"]),
        ({"tokenizer.json": None, "tokenizer_config.json": "{,}"}, ["tokenizer_config.json is not valid JSON: line 1"]),
        ({"tokenizer.json": None, "tokenizer_config.json": '{"bos_token": 1}'}, ["_config.json: bos_token=1 must be"]),
        ({"tokenizer.json": None, "tokenizer_config.json": '{"eos_token": {}}'}, ["_config.json: eos_token={} must"]),
        ({"tokenizer.json": None, "tokenizer_config.json": '{"chat_template": [1]}'}, ["chat_template=[1] must be"]),
        ({"tokenizer.json": None, "tokenizer_config.json": '{"chat_template": [{}]}'}, ["chat_template=[{}] must be"]),
        ({"tokenizer.json": None, "chat_template.jinja": b"\xff"}, ["chat_template.jinja cannot be read", "utf-8"]),
    ],
)
def test_bad_directories_are_one_clear_message(tmp_path: Path, files: dict[str, Any], parts: list[str]) -> None:
    for name, content in files.items():
        if content is None:
            byte_level().save(str(tmp_path / name))
        else:
            (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        Tokenizer.from_dir(tmp_path)
    message = str(caught.value)
    assert all(part in message for part in parts) and str(tmp_path) in message and "\n" not in message


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent does not exist"):
        Tokenizer.from_dir(tmp_path / "absent")
