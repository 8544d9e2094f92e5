"""Greedy generation: the tokens Transformers generates, on every rank, whatever the layout; and the command line around it.

Functions named check_* run on every rank.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from tiny_models import MODELS, config, prompts, random_weights, sharded

from tp_residual.errors import GenerationError, RequestError
from tp_residual.inference import sampling
from tp_residual.inference.generate import Generation, GenerationTimings, generate
from tp_residual.inference.loading import load_model
from tp_residual.inference.request import GenerationSettings, check_prompts
from tp_residual.model import decoder
from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.vocabulary import Choice, vocab_parallel_choice
from tp_residual.testing import RanksFailed, run_ranks

NEW_TOKENS = 8
PROMPTS = prompts(3)


def greedy(name: str, prompt: list[int], **options: Any) -> list[int]:
    """Transformers' tokens. An id that no model has stands for no stop token at all."""
    options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": [10**6]} | options
    with torch.no_grad():
        out = tiny_models.reference(name).generate(torch.tensor([prompt]), do_sample=False, pad_token_id=0, **options)
    return out[0, len(prompt) :].tolist()


# ---- tokens ----


class Told:
    """An on_token that remembers."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __call__(self, index: int, token_id: int) -> None:
        self.calls.append((index, token_id))


def check_tokens(group: TensorParallelGroup, expected: dict[str, tuple[str, list[list[int]]]]) -> list[list[list[int]]]:
    tokens = []
    for name, (directory, theirs) in expected.items():
        for sequence_parallel in ("off", "on") if name != "llama" else ("off", "on", "auto"):
            model, _ = load_model(directory, group, sequence_parallel=sequence_parallel)
            settings, timings, told = GenerationSettings(max_new_tokens=NEW_TOKENS), GenerationTimings(), Told()
            results = generate(model, PROMPTS, group, settings, on_token=told, timings=timings)
            ours = [result.token_ids for result in results]
            assert ours == theirs, (name, sequence_parallel)
            assert told.calls == [(row, ours[row][step]) for step in range(NEW_TOKENS) for row in range(3)]
            assert (timings.prefill_tokens, timings.decode_tokens) == (sum(map(len, PROMPTS)), 3 * (NEW_TOKENS - 1))
            assert [(result.index, result.prompt_tokens, result.finish_reason) for result in results] == [
                (row, len(prompt), "length") for row, prompt in enumerate(PROMPTS)
            ]
            if sequence_parallel == "off":
                alone = [
                    generate(model, [prompt], group, GenerationSettings(max_new_tokens=3))[0].token_ids
                    for prompt in PROMPTS
                ]
                assert alone == [text[:3] for text in theirs], "a prompt's text depends on what else is in the batch"
            tokens.append(ours)
    return tokens


@pytest.mark.parametrize(
    "tp_size", (1, 2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow))
)
def test_greedy_tokens_equal_transformers(tp_size: int) -> None:
    expected = {name: (str(tiny_models.saved(name)), [greedy(name, prompt) for prompt in PROMPTS]) for name in MODELS}
    assert all(len(set(tokens)) > 4 for _, texts in expected.values() for tokens in texts), (
        "degenerate text proves little"
    )
    shares = run_ranks(tp_size, check_tokens, expected)
    assert all(share == shares[0] for share in shares)


# ---- ends ----


def check_ends(group: TensorParallelGroup, directory: str, requests: list[dict[str, Any]]) -> list[list[Generation]]:
    model, _ = load_model(directory, group)
    return [generate(model, PROMPTS, group, GenerationSettings(**request)) for request in requests]


def test_stop_tokens_and_lengths_as_in_transformers() -> None:
    free = [greedy("qwen2", prompt) for prompt in PROMPTS]
    stops = [free[0][3], free[1][4]]
    limits = ((NEW_TOKENS, 0), (NEW_TOKENS, 3), (NEW_TOKENS, 4), (NEW_TOKENS, 5), (5, 5), (1, 0))
    requests: list[dict[str, Any]] = [{"max_new_tokens": most, "min_new_tokens": least} for most, least in limits]
    expected = [[greedy("qwen2", prompt, eos_token_id=stops, **request) for prompt in PROMPTS] for request in requests]
    assert expected[0] == expected[1] != expected[2] != expected[3] != free, "the first stop is the fourth token"
    assert {tokens[-1] in stops for tokens in expected[0]} == {True, False}, (
        "some prompts have to stop and some to run on"
    )
    ours = [request | {"stop_token_ids": tuple(stops)} for request in requests]
    ours.append({"max_new_tokens": NEW_TOKENS, "stop_token_ids": tuple(stops), "ignore_eos": True, "min_new_tokens": 5})
    expected.append(free)
    for batches in run_ranks(3, check_ends, str(tiny_models.saved("qwen2")), ours):
        for request, results, texts in zip(ours, batches, expected, strict=True):
            assert [result.token_ids for result in results] == texts, request
            stopped = [not request.get("ignore_eos") and tokens[-1] in stops for tokens in texts]
            assert [result.finish_reason for result in results] == ["stop" if stop else "length" for stop in stopped]


# ---- ranks that disagree, NaN ----


def tiny(group: TensorParallelGroup, **options: Any) -> CausalLM:
    return sharded(config("llama"), group, random_weights(config("llama"), dtype=torch.float32), **options)


def check_disagreement(group: TensorParallelGroup, where: str) -> None:
    """Rank 1 alone takes another token at the third step, or is given other prompts or settings."""
    model, batch, settings = tiny(group), [list(prompt) for prompt in PROMPTS], GenerationSettings(max_new_tokens=8)
    steps = 0

    def choice(*arguments: Any) -> Choice:
        nonlocal steps
        steps += 1
        chosen = vocab_parallel_choice(*arguments)
        if where == "token" and group.rank == 1 and steps == 3:
            chosen.ids[0] = (chosen.ids[0] + 1) % 101
        return chosen

    sampling.vocab_parallel_choice = choice
    if where == "prompt" and group.rank == 1:
        batch[0][0] = (batch[0][0] + 1) % 101
    if where == "settings" and group.rank == 1:
        settings = replace(settings, min_new_tokens=2)
    try:
        generate(model, batch, group, settings)
    except GenerationError as error:
        raise GenerationError(f"{error} (step {steps})") from error


@pytest.mark.parametrize(("where", "step"), [("token", 4), ("prompt", 1), ("settings", 1)])
def test_ranks_that_disagree_are_noticed_at_once_by_all(where: str, step: int) -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(3, check_disagreement, where)
    assert sorted(failure.value.exceptions) == [0, 1, 2]
    for error in failure.value.exceptions.values():
        assert isinstance(error, GenerationError) and "disagree" in str(error) and f"(step {step})" in str(error)


def check_nan(group: TensorParallelGroup) -> None:
    model = tiny(group)
    if group.rank == 1:
        with torch.no_grad():
            model.lm_head.weight[3, 3] = torch.nan
    generate(model, PROMPTS, group, GenerationSettings(max_new_tokens=4))


def test_nan_logits_are_an_error_on_every_rank() -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(3, check_nan)
    assert sorted(failure.value.exceptions) == [0, 1, 2]
    for error in failure.value.exceptions.values():
        assert (
            isinstance(error, GenerationError)
            and "logits are NaN on rank [1]" in str(error)
            and "--dtype float32" in str(error)
        )


# ---- requests that are refused ----

REFUSED = [
    ([], {}, "no prompt was given"),
    ([[1], []], {}, "prompt 1 is empty: it has 0 tokens"),
    (
        [[1] * 60],
        {},
        "prompt 0 has 60 tokens and max_new_tokens=5: 65 exceeds max_position_embeddings=64; .* at most 4 new tokens",
    ),
    ([[1] * 70], {}, "shorten the prompt to fewer than 64 tokens"),
    ([[1], [3, 101]], {}, "prompt 1 has token id 101, outside the vocabulary of 101 ids; use 0 to 100"),
    ([[5, -1]], {}, "prompt 0 has token id -1"),
    ([[1]], {"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
    ([[1]], {"min_new_tokens": 6}, "min_new_tokens=6 must be between 0 and max_new_tokens=5"),
]


@pytest.mark.parametrize(("batch", "settings", "message"), REFUSED)
def test_what_cannot_be_generated_is_refused(batch: list[list[int]], settings: dict[str, int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check_prompts(batch, config("llama"), GenerationSettings(**{"max_new_tokens": 5} | settings))


def test_a_prompt_may_fill_every_position() -> None:
    model = tiny(TensorParallelGroup.single())
    result = generate(model, [[1] * 59], model.group, GenerationSettings(max_new_tokens=5))
    assert len(result[0].token_ids) == 5


def check_refused_before_any_collective(group: TensorParallelGroup) -> None:
    model = tiny(group)
    for batch, settings, message in REFUSED[:6]:
        with pytest.raises(RequestError, match=message):
            generate(model, batch, group, GenerationSettings(**{"max_new_tokens": 5} | settings))
    with pytest.raises(RequestError, match=r"another group .* pass model.group"):
        generate(model, PROMPTS, TensorParallelGroup.single(), GenerationSettings())
    assert not group.counters.calls


def test_generate_refuses_on_every_rank_before_any_collective() -> None:
    run_ranks(2, check_refused_before_any_collective)


# ---- automatic sequence parallelism ----


def check_auto(group: TensorParallelGroup, threshold_tokens: int) -> list[list[int]]:
    """With the threshold between prompt and decode, both layouts serve one generation."""
    texts = {}
    for sequence_parallel in ("off", "auto", "on"):
        model = tiny(group, sequence_parallel=sequence_parallel)
        decoder.AUTO_SEQUENCE_PARALLEL_BYTES = -(-threshold_tokens * 45 * 4 // group.size)
        assert model.auto_threshold_tokens() == threshold_tokens
        group.counters.reset()
        texts[sequence_parallel] = [
            r.token_ids for r in generate(model, PROMPTS, group, GenerationSettings(max_new_tokens=6))
        ]
        calls = group.counters.by_kind()
        boundaries, passes = 2 * 2 + 1, 6
        sharded_passes = {"off": 0, "auto": 1, "on": passes}[sequence_parallel]
        assert calls.get("reduce_scatter", 0) == boundaries * sharded_passes
        assert calls.get("all_reduce", 0) == boundaries * (passes - sharded_passes)
        assert calls["all_gather"] == boundaries * sharded_passes + passes
        for tokens in (threshold_tokens - 1, threshold_tokens):
            expected = {"off": False, "on": True, "auto": tokens >= threshold_tokens}[sequence_parallel]
            assert model.boundary_for(tokens).sequence_parallel == expected
    assert texts["auto"] == texts["off"] == texts["on"]
    return texts["auto"]


def test_both_sides_of_the_automatic_threshold_agree() -> None:
    first, second = run_ranks(2, check_auto, sum(map(len, PROMPTS)))
    assert first == second


def check_auto_is_off_for_decode(group: TensorParallelGroup) -> None:
    model = tiny(group, sequence_parallel="auto")
    model.config = replace(model.config, hidden_size=8192)  # boundary_for reads nothing else of it
    assert not any(model.boundary_for(tokens).sequence_parallel for tokens in range(1, 65))
    assert model.boundary_for(1 << 15).sequence_parallel
    assert not any(parameter.requires_grad for parameter in model.parameters()), (
        "a norm weight's gradient depends on the layout"
    )
    alone = tiny(TensorParallelGroup.single(), sequence_parallel="auto")
    assert not alone.boundary_for(1 << 30).sequence_parallel


def test_automatic_means_tensor_parallel_for_few_tokens() -> None:
    run_ranks(2, check_auto_is_off_for_decode)


# ---- the command line ----


def cli_model() -> Path:
    """The tiny llama with a byte-level BPE vocabulary of its own, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tiny_models.saved("llama_text")
    if not (folder / "tokenizer.json").exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<pad>", "<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(
            ["the sum of the partial sums is the stream", "a stream of sums, über alles"], trainer
        )
        tokenizer.save(str(folder / "tokenizer.json"))
        template = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}{% endfor %}</s>assistant:"
        values = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
        (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


def command(*arguments: str, launcher: tuple[str, ...] = (), timeout: float = 60) -> subprocess.CompletedProcess[str]:
    launch = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in launch}
    environment |= {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, *launcher, "-m", "tp_residual", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
    )


def torchrun(ranks: int) -> tuple[str, ...]:
    return "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)


def test_the_command_relaunches_itself_and_prints_json_lines() -> None:
    texts = ["the stream", "a sum of sums, über"]
    run = command(
        "generate", "--model", str(cli_model()), "--tp", "2", "--json", "--max-new-tokens", "6", "--ignore-eos",
        *(argument for text in texts for argument in ("--prompt", text)), "--prompt-ids", "5,6,7",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    entries = [json.loads(line) for line in run.stdout.splitlines()]
    model, _ = load_model(cli_model(), TensorParallelGroup.single())
    from tp_residual.inference.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_dir(cli_model())
    batch = [*(tokenizer.encode(text) for text in texts), [5, 6, 7]]
    expected = generate(model, batch, model.group, GenerationSettings(max_new_tokens=6))
    assert [entry["index"] for entry in entries] == [0, 1, 2]
    assert [entry["token_ids"] for entry in entries] == [result.token_ids for result in expected]
    assert [entry["text"] for entry in entries] == [tokenizer.decode(result.token_ids) for result in expected]
    for entry in entries:
        assert (
            entry["finish_reason"] == "length"
            and entry["settings"]["tp"] == 2
            and entry["settings"]["boundary"] == "shared"
        )
        assert entry["timings"]["prefill_tokens"] == sum(map(len, batch)) and entry["timings"]["decode_tokens"] == 15
    for fact in ("query heads 0-4, KV heads 0-1", "query heads 5-8, KV heads 1-2", "2 all_reduce a layer"):
        assert fact in run.stderr


def test_under_torchrun_stdout_is_the_text_alone() -> None:
    request = ("--max-new-tokens", "6", "--ignore-eos", "--chat", "--prompt", "the sum")
    layout = ("--tp", "3", "--sequence-parallel", "on", "--boundary", "library")
    run = command("generate", "--model", str(cli_model()), *request, *layout, launcher=torchrun(3))
    assert run.returncode == 0, run.stderr
    from tp_residual.inference.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_dir(cli_model())
    model, _ = load_model(cli_model(), TensorParallelGroup.single())
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "the sum"}])
    result = generate(model, [prompt], model.group, GenerationSettings(max_new_tokens=6))[0]
    assert run.stdout == tokenizer.decode(result.token_ids) + "\n"
    assert "2 all_gather, 2 reduce_scatter a layer" in run.stderr


def broken_dir(name: str, config_text: str | None = None, *, without: tuple[str, ...] = ()) -> Path:
    """A copy of the command line's model, by links, with another config.json or without some files."""
    folder = tiny_models.scratch_dir() / f"broken-{name}"
    folder.mkdir()
    for file in cli_model().iterdir():
        if file.name not in without and not (file.name == "config.json" and config_text is not None):
            (folder / file.name).symlink_to(file)
    if config_text is not None:
        (folder / "config.json").write_text(config_text)
    return folder


BAD_INPUT = {
    "more ranks than heads": (("--tp", "10"), "num_attention_heads=9 cannot be split over tp_size=10; use 1 to 9"),
    "no ranks": (("--tp", "0"), "--tp 0 must be at least 1"),
    "empty prompt": (("--prompt", ""), "a --prompt is empty"),
    "empty ids": (("--prompt-ids", ""), "prompt 1 is empty"),
    "too long": (("--max-new-tokens", "64"), "exceeds max_position_embeddings=64"),
    "id outside": (("--prompt-ids", "5,320"), "token id 320, outside the vocabulary of 320 ids; use 0 to 319"),
    "ids not numbers": (("--prompt-ids", "5;6"), "--prompt-ids '5;6' is not a list of integers"),
    "misspelt option": (("--promt", "x"), "unrecognized arguments: --promt x"),
    "abbreviated option": (("--max-new", "4"), "unrecognized arguments: --max-new 4"),
    "misspelt choice": (("--sequence-parallel", "yes"), "invalid choice: 'yes'"),
    "no such directory": (("--model", "nowhere"), "model directory nowhere does not exist"),
    "not a directory": (("--model", __file__), "is not a directory"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_refused_in_one_message(case: str) -> None:
    arguments, message = BAD_INPUT[case]
    run = command(
        "generate",
        "--model",
        str(cli_model()),
        "--tp",
        "2",
        "--prompt",
        "x",
        "--max-new-tokens",
        "5",
        *arguments,
        timeout=10,
    )
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.count("error: ") == 1 and message in run.stderr and "Traceback" not in run.stderr


def test_bad_directories_are_refused_in_one_message() -> None:
    text = (cli_model() / "config.json").read_text()
    nine = text.replace('"num_attention_heads": 9', '"num_attention_heads": "nine"')
    cases = [
        (broken_dir("json", text[:-20]), "is not valid JSON: line"),
        (broken_dir("values", nine), 'num_attention_heads="nine" must be an integer'),
        (broken_dir("no-tokenizer", without=("tokenizer.json",)), "has no tokenizer.json"),
        (broken_dir("no-weights", without=("model.safetensors",)), "has neither model.safetensors nor"),
        (broken_dir("no-config", without=("config.json",)), "has no config.json"),
    ]
    for folder, message in cases:
        run = command(
            "generate", "--model", str(folder), "--tp", "2", "--prompt", "x", "--max-new-tokens", "5", timeout=10
        )
        assert run.returncode == 2 and run.stdout == ""
        assert run.stderr.count("error: ") == 1 and message in run.stderr and "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("ranks", "arguments", "message"),
    [
        (2, ("--tp", "3"), "the launcher's world size 2 is no multiple of --tp 3; use 1, 2"),
        pytest.param(
            2,
            ("--device", "cuda"),
            "local ranks=2 is more than visible GPUs=0; use --device cpu",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_rank_refuses_and_the_launcher_fails(ranks: int, arguments: tuple[str, ...], message: str) -> None:
    run = command(
        "generate",
        "--model",
        str(cli_model()),
        "--prompt",
        "x",
        "--max-new-tokens",
        "5",
        *arguments,
        launcher=torchrun(ranks),
    )
    assert run.returncode != 0 and run.stdout == ""
    # the launcher may end the second rank before it has spoken; torchrun's own report is not ours
    said = [line for line in run.stderr.splitlines() if line.startswith("tp_residual: error")]
    assert 1 <= len(said) <= ranks and all(message in line for line in said)
