"""Files of prompts and answers: whole lines only, each prompt answered once, whatever ended the run before; stop strings; finite checks.

Functions named check_* run on every rank.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_generate import cli_model, command
from tiny_models import config, prompts, random_weights, sharded

from tp_residual.errors import GenerationError, RequestError
from tp_residual.inference.batch_file import PROMPT_KINDS, AnswerFile, answered, read_lines
from tp_residual.inference.generate import Generation, generate
from tp_residual.inference.loading import load_model
from tp_residual.inference.request import GenerationSettings, SamplingSettings
from tp_residual.inference.stop_strings import StoppableText
from tp_residual.inference.tokenizer import Tokenizer
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.testing import RanksFailed, run_ranks

# ---- answers ----


def lines(path: Path) -> list[dict[str, Any]]:
    content = path.read_bytes()
    assert content == b"" or content.endswith(b"\n"), "half a line"
    return [json.loads(line) for line in content.splitlines()]


def test_answers_survive_any_cut(tmp_path: Path) -> None:
    """A kill may leave any prefix of the file: for each, the whole lines count and the rest goes."""
    path = tmp_path / "out"
    answers = AnswerFile(path, "run1")
    for index in range(3):
        answers.write(index, 0, {"text": "über\nzwei" * index})
    answers.close()
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        kept = sum(end <= cut for end in ends)
        resumed = AnswerFile(path, "run1", resume=True)
        assert resumed.done == {(index, 0) for index in range(kept)}
        for index in range(kept, 3):
            resumed.write(index, 0, {"text": "über\nzwei" * index})
        resumed.close()
        assert path.read_bytes() == whole


def test_files_that_are_not_this_runs_are_refused_and_left_alone(tmp_path: Path) -> None:
    ours = '{"run": "run1", "index": 0, "sample": 0}\n'
    cases = [
        (ours, False, "bytes already; add --resume"),
        (
            ours.replace("run1", "run2"),
            True,
            "is of run run2 and this one is run run1: its prompts, model or settings differ",
        ),
        (ours + ours, True, "line 2 answers index 0 a second time"),
        ("hello\n", True, "line 1 is no answer of ours"),
        (ours + "a text without a newline", True, "ends in half a line that is not ours"),
        ("[1]\n", True, "line 1 is no answer of ours"),
    ]
    for number, (content, resume, message) in enumerate(cases):
        path = tmp_path / f"out{number}"
        path.write_text(content)
        with pytest.raises(RequestError, match=message):
            AnswerFile(path, "run1", resume=resume)
        assert path.read_text() == content
    with pytest.raises(RequestError, match="is not a regular file"):
        AnswerFile(tmp_path, "run1")
    with pytest.raises(RequestError, match="is not a regular file"):
        answered("/dev/zero", "run1", resume=False)  # of which reading would never end
    with pytest.raises(RequestError, match="cannot be written: No such file"):
        AnswerFile(tmp_path / "nowhere" / "out", "run1")
    with pytest.raises(RequestError, match="is not a regular file"):
        answered(tmp_path, "run1", resume=True)


def test_two_writers_are_one_too_many(tmp_path: Path) -> None:
    first = AnswerFile(tmp_path / "out", "run1")
    with pytest.raises(RequestError, match="is being written by another run"):
        AnswerFile(tmp_path / "out", "run1", resume=True)
    first.close()
    AnswerFile(tmp_path / "out", "run1", resume=True).close()


FULL_DISK = """
import resource, sys
from tp_residual.errors import RequestError
from tp_residual.inference.batch_file import AnswerFile
resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
answers = AnswerFile(sys.argv[1], "run1")
try:
    for index in range(100):
        answers.write(index, 0, {"text": "x" * 90})
except RequestError as error:
    print(error)
"""


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "out"
    said = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=True
    ).stdout
    kept = lines(path)
    assert len(kept) == 3 and "after 3 whole answers, which are kept; make room" in said
    AnswerFile(path, "run1", resume=True).write(3, 0, {})
    assert len(lines(path)) == 4


# ---- prompts ----


def test_prompt_files_that_cannot_be_read_name_the_line(tmp_path: Path) -> None:
    cases = [
        (b"", "has 0 lines"),
        (b'{"prompt": "a"}\n\n', "line 2 is not JSON"),
        (b'{"prompt": "a"}\n{"prompt": "a", "id": 3}\n', "line 2 is .*; write"),
        (b'["a"]', "line 1 is"),
        (b"\xff\n", "is not UTF-8"),
    ]
    for content, message in cases:
        path = tmp_path / "in"
        path.write_bytes(content)
        with pytest.raises(RequestError, match=message):
            read_lines(path, PROMPT_KINDS)


TEXTS = ["the sum", "a stream of sums", "über alles", "the partial sums", "is", "the stream is the sum", "sums of sums"]


def prompt_file(folder: Path) -> tuple[Path, list[list[int]]]:
    """Text, ids and messages; and their ids."""
    tokenizer = Tokenizer.from_dir(cli_model())
    entries: list[dict[str, Any]] = [{"prompt": text} for text in TEXTS]
    entries[2] = {"prompt_ids": [5, 6, 7]}
    entries[4] = {"messages": [{"role": "user", "content": "hi"}]}
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    ids = [tokenizer.encode(text) for text in TEXTS]
    ids[2], ids[4] = [5, 6, 7], tokenizer.apply_chat_template(entries[4]["messages"])
    return path, ids


SETTINGS = GenerationSettings(max_new_tokens=5, sampling=SamplingSettings(temperature=0.9, top_k=50, seed=3, n=2))
FLAGS = ("--temperature", "0.9", "--top-k", "50", "--seed", "3", "--n", "2", "--max-new-tokens", "5", "--ignore-eos")


def test_a_resumed_run_answers_each_prompt_once(tmp_path: Path) -> None:
    """Killed after each number of answers, in the middle of the next line; then resumed at another tp and batch size."""
    source, ids = prompt_file(tmp_path)
    out = tmp_path / "out.jsonl"
    base = ("generate", "--model", str(cli_model()), "--prompt-file", str(source), *FLAGS)
    first = command(*base, "--output", str(out), "--batch-size", "3")
    assert first.returncode == 0 and first.stdout == "", first.stderr
    assert "temperature=0.9 top_k=50" in first.stderr and "seed=3 n=2" in first.stderr
    model, _ = load_model(cli_model(), TensorParallelGroup.single())
    expected = {(r.index, r.sample): r.token_ids for r in generate(model, ids, model.group, SETTINGS)}
    answers = lines(out)
    assert {(a["index"], a["sample"]): a["token_ids"] for a in answers} == expected and len(answers) == 14
    whole = out.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    out.write_bytes(whole[: ends[4] + 30])
    second = command(*base, "--output", str(out), "--resume", "--tp", "2", "--batch-size", "2")
    assert second.returncode == 0, second.stderr
    assert out.read_bytes()[: ends[4]] == whole[: ends[4]], "what was there stays"
    resumed = lines(out)
    assert {(a["index"], a["sample"]): a["token_ids"] for a in resumed} == expected and len(resumed) == 14
    third = command(*base, "--output", str(out), "--resume")
    assert third.returncode == 0 and len(lines(out)) == 14, "nothing left to do"
    other = command(*base, "--output", str(out), "--resume", "--seed", "4")
    assert other.returncode == 2 and "its prompts, model or settings differ" in other.stderr
    source.write_text(source.read_text().replace("the sum", "the sun"))
    changed = command(*base, "--output", str(out), "--resume")
    assert changed.returncode == 2 and "its prompts, model or settings differ" in changed.stderr
    assert len(lines(out)) == 14


def killed_and_resumed(folder: Path, prompts: int, kills: int) -> None:
    """SIGKILL while answers are written, `kills` times; the answers so far are whole, and a resumed run adds the rest."""
    source, out = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt_ids": [5 + i % 300, 1 + i % 7]}) + "\n" for i in range(prompts)))
    arguments = (
        "generate", "--model", str(cli_model()), "--prompt-file", str(source), "--output", str(out), *FLAGS,
        "--max-num-seqs", "6", "--max-batched-tokens", "9", "--kv-memory", "40K", "--resume",
    )  # fmt: skip
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    killed = b""
    for kill in range(1, kills + 1):
        process = subprocess.Popen(
            [sys.executable, "-m", "tp_residual", *arguments], env=environment, stderr=subprocess.DEVNULL
        )
        try:
            end = time.monotonic() + 90
            while not out.exists() or out.read_bytes().count(b"\n") < kill * prompts * 2 // (kills + 2):
                assert time.monotonic() < end and process.poll() is None
                time.sleep(0.002)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        content = out.read_bytes()
        assert content.startswith(killed[: killed.rfind(b"\n") + 1]), "what was there stays"
        killed = content
    assert killed.count(b"\n") < 2 * prompts
    run = command(*arguments, timeout=300)
    assert run.returncode == 0, run.stderr
    answers = lines(out)
    assert [(a["index"], a["sample"]) for a in answers] == [(i, s) for i in range(prompts) for s in range(2)]
    for line in killed[: killed.rfind(b"\n") + 1].splitlines():
        entry = json.loads(line)
        assert answers[2 * entry["index"] + entry["sample"]] == entry
    model, _ = load_model(cli_model(), TensorParallelGroup.single())
    for index in (0, prompts // 2, prompts - 1):
        alone = generate(model, [[5 + index % 300, 1 + index % 7]], model.group, SETTINGS, indices=[index])
        assert [answers[2 * index + s]["token_ids"] for s in range(2)] == [result.token_ids for result in alone]


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    killed_and_resumed(tmp_path, 100, 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_prompts_and_five_kills(tmp_path: Path) -> None:
    killed_and_resumed(tmp_path, 1000, 5)


@pytest.mark.parametrize("tp_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_prompt_that_never_fits_is_refused_alone(tmp_path: Path, tp_size: int) -> None:
    """Its line says why, the others are answered as if it were not there, and the command fails at the end."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts = [[5, 6, 7], [9] * 60, [8, 30], [4] * 11]
    source.write_text("".join(json.dumps({"prompt_ids": prompt}) + "\n" for prompt in prompts))
    arguments = (
        "generate", "--model", str(cli_model()), "--prompt-file", str(source), "--max-new-tokens", "6", "--ignore-eos",
        "--tp", str(tp_size), "--max-model-len", "16", "--output", str(out),
    )  # fmt: skip
    run = command(*arguments)
    assert run.returncode == 2, run.stderr
    answers = lines(out)
    model, _ = load_model(cli_model(), TensorParallelGroup.single())
    settings = GenerationSettings(max_new_tokens=6)
    for index in (0, 2):
        assert answers[index]["token_ids"] == generate(model, [prompts[index]], model.group, settings)[0].token_ids
    for index in (1, 3):
        answer = answers[index]
        assert (answer["finish_reason"], answer["token_ids"], answer["text"]) == ("refused", [], None)
        needed = len(prompts[index]) + 6
        message = (
            f"prompt {index}: {needed - 6} tokens of prompt and max_new_tokens=6: {needed} exceeds max_model_len=16"
        )
        assert answer["error"].startswith(message) and f"refused: {message}" in run.stderr
    assert run.stderr.count("error") == 1 and "Traceback" not in run.stderr
    assert "2 of 4 answers are refusals: these prompts can never fit, and their lines say why" in run.stderr
    again = command(*arguments, "--resume")
    assert again.returncode == 0 and lines(out) == answers, "a refusal is an answer"


LIMITS = {
    "no length": (
        ("--max-model-len", "0"),
        "--max-model-len '0' is not a whole number of at least 1; use one, or auto",
    ),
    "longer than the model": (("--max-model-len", "65"), "max_model_len=65 exceeds max_position_embeddings=64"),
    "no size": (("--kv-memory", "much"), "--kv-memory 'much' is not a size"),
    "too little": (
        ("--kv-memory", "7K", "--max-model-len", "32"),
        "use max_model_len of at most 16, or give kv_memory",
    ),
    "no sequence": (("--max-num-seqs", "0"), "max_num_seqs=0 must be a whole number of at least 1"),
    "no tokens": (("--max-batched-tokens", "-4"), "max_batched_tokens=-4 must be a whole number of at least 1"),
    "no folder for traces": (("--profile", "/dev/null"), "--profile /dev/null cannot be a folder for traces: "),
    "more than anybody runs": (("--max-num-seqs", "4097"), "max_num_seqs=4097 is more than the 4096 sequences"),
    "more sequences than tokens": (("--max-num-seqs", "9", "--max-batched-tokens", "8"), "is less than max_num_seqs=9"),
    "a prompt beyond the limit": (("--max-model-len", "5"), "exceeds max_model_len=5; shorten the prompt"),
}


@pytest.mark.parametrize("case", LIMITS)
def test_bad_limits_are_refused_in_one_message(case: str) -> None:
    options, message = LIMITS[case]
    request = ("--model", str(cli_model()), "--prompt-ids", "5,6", "--json", "--max-new-tokens", "4")
    run = command("generate", *request, *options, timeout=30)
    assert run.returncode == 2 and run.stdout == "" and message in run.stderr, run.stderr
    assert run.stderr.count("error: ") == 1 and "Traceback" not in run.stderr


@pytest.mark.slow
def test_the_limits_are_said_and_change_no_text(tmp_path: Path) -> None:
    request = ("generate", "--model", str(cli_model()), "--tp", "2", "--max-new-tokens", "6", "--ignore-eos", "--json")
    prompts = [argument for ids in ("5,6,7,8,9,10,11", "9,30", "4") for argument in ("--prompt-ids", ids)]
    plain = command(*request, *prompts)
    tight = command(*request, *prompts, "--max-num-seqs", "2", "--max-batched-tokens", "3", "--kv-memory", "10K")
    assert plain.returncode == tight.returncode == 0, tight.stderr
    first, second = ([json.loads(text)["token_ids"] for text in run.stdout.splitlines()] for run in (plain, tight))
    assert first == second and len(first) == 3
    assert (
        "KV cache: 2048 tokens in 128 blocks of 16" in plain.stderr
        and "32 requests of max_model_len=64 fit" in plain.stderr
    )
    assert (
        "KV cache: 32 tokens in 2 blocks of 16" in tight.stderr
        and "max_num_seqs=2 max_batched_tokens=3" in tight.stderr
    )
    assert "max_model_len: 32 instead of 64" in tight.stderr and "1 requests of max_model_len=32 fit" in tight.stderr


def test_without_output_answers_go_to_stdout_and_logprobs_are_in_them(tmp_path: Path) -> None:
    source, ids = prompt_file(tmp_path)
    run = command(
        "generate", "--model", str(cli_model()), "--prompt-file", str(source), "--tp", "2", "--max-new-tokens", "3",
        "--logprobs", "2", "--prompt-logprobs", "0", "--check-finite",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    answers = [json.loads(line) for line in run.stdout.splitlines()]
    assert sorted(answer["index"] for answer in answers) == list(range(7))
    for answer in answers:
        assert [token["token_id"] for token in answer["logprobs"]] == answer["token_ids"]
        assert all(len(token["top"]) == 2 and token["top"][0][0] == token["token_id"] for token in answer["logprobs"])
        of_prompt = answer["prompt_logprobs"]
        assert of_prompt[0] is None and [token["token_id"] for token in of_prompt[1:]] == ids[answer["index"]][1:]


BAD_OPTIONS = {
    "negative temperature": (("--temperature", "-1"), "temperature=-1 must be at least"),
    "top_p": (("--top-p", "1.5"), "top_p=1.5 must be above 0 and at most 1"),
    "k beyond": (("--top-k", "321"), "top_k=321 exceeds the vocabulary of 320 tokens"),
    "greedy samples": (("--n", "2"), "n=2 greedy samples would be the same"),
    "greedy filter": (("--temperature", "0", "--top-p", "0.5"), "temperature=0 is greedy"),
    "logprobs in text": (("--logprobs", "2"), "--logprobs is printed as JSON; add --json"),
    "empty stop": (("--stop", ""), "a stop string is empty"),
    "stop and minimum": (("--stop", "x", "--min-new-tokens", "2"), "holds back stop tokens, not stop strings"),
    "output of nothing": (("--output", "x"), "--output goes with --prompt-file"),
    "two sources": (("--prompt-file", "x"), "--prompt-file and --prompt are both given"),
    "resume of nothing": (("--resume",), "--resume goes on with a file"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options_are_refused_in_one_message(case: str) -> None:
    options, message = BAD_OPTIONS[case]
    request = ("--model", str(cli_model()), "--tp", "2", "--prompt", "x", "--max-new-tokens", "4")
    run = command("generate", *request, *options, timeout=30)
    assert run.returncode == 2 and run.stdout == "" and message in run.stderr, run.stderr
    assert run.stderr.count("error: ") == 1 and "Traceback" not in run.stderr


# ---- stop strings ----


def stopped(tokens: list[str], stop: tuple[str, ...]) -> tuple[str, bool, list[str]]:
    """Text, whether it was stopped, and what came out at each step; tokens are pieces of text."""

    class Pieces:
        def step(self, token_id: int) -> str:
            return tokens[token_id]

        def finish(self) -> str:
            return ""

    text = StoppableText(Pieces(), stop)  # type: ignore[arg-type]
    out = [text.step(number) for number in range(len(tokens))]
    out.append(text.finish())
    assert "".join(out) == text.text
    return text.text, text.stopped, out


STOPS: list[tuple[list[str], tuple[str, ...], str, bool]] = [
    (["ab", "c", "de"], ("cd",), "ab", True),
    (["ab", "c", "xe"], ("cd",), "abcxe", False),
    (["a", "a", "a", "b"], ("aab",), "a", True),
    (["abc"], ("cd",), "abc", False),
    (["xENDy"], ("END",), "x", True),
    (["x", "E", "N", "D", "y"], ("END", "N"), "xE", True),
    (["one two"], ("two", "one"), "", True),
    (["ü", "b", "er"], ("über",), "", True),
    (["no", "ne"], (), "none", False),
]


@pytest.mark.parametrize(("tokens", "stop", "text", "ended"), STOPS)
def test_text_ends_before_a_stop_string(tokens: list[str], stop: tuple[str, ...], text: str, ended: bool) -> None:
    ours, was_stopped, steps = stopped(tokens, stop)
    assert (ours, was_stopped) == (text, ended)
    if ended:
        assert not any(piece in "".join(steps) for piece in stop)


def check_stop(group: TensorParallelGroup, directory: str, stop: str, settings: GenerationSettings) -> list[Generation]:
    model, _ = load_model(directory, group)
    tokenizer = Tokenizer.from_dir(directory)
    told: list[Generation] = []
    batch = [[5, 6, 7], [9, 30]]
    free = generate(model, batch, group, settings, tokenizer=tokenizer)
    results = generate(model, batch, group, replace(settings, stop=(stop,)), tokenizer=tokenizer, on_finish=told.append)
    assert sorted(result.index for result in told) == [0, 1]
    with pytest.raises(RequestError, match="are text, and no tokenizer was given"):
        generate(model, batch, group, replace(settings, stop=(stop,)))
    return [*free, *results]


def test_generation_ends_at_a_stop_string_across_tokens() -> None:
    """The stop string is the last letter of one token and the first of the next, where they first meet."""
    model, _ = load_model(cli_model(), TensorParallelGroup.single())
    tokenizer = Tokenizer.from_dir(cli_model())
    for seed in range(50):
        settings = GenerationSettings(max_new_tokens=12, sampling=SamplingSettings(temperature=2.0, seed=seed))
        tokens = generate(model, [[5, 6, 7]], model.group, settings)[0].token_ids
        text, pieces = tokenizer.decode(tokens), [tokenizer.decode([token]) for token in tokens]
        stops = [a[-1] + b[0] for a, b in itertools.pairwise(pieces[2:9]) if a and b and (a[-1] + b[0]).isascii()]
        stop = next(
            (stop for stop in stops if text.count(stop) == 1 and not any(stop in piece for piece in pieces)), None
        )
        if stop is not None:
            break
    assert stop is not None
    shares = run_ranks(2, check_stop, str(cli_model()), stop, settings)
    assert shares[0] == shares[1]
    free, _, ended, _ = shares[0]
    assert free.text == text and free.finish_reason == "length"
    assert ended.text == text[: text.index(stop)] and ended.finish_reason == "stop"
    assert ended.token_ids == tokens[: len(ended.token_ids)] and len(ended.token_ids) < len(tokens)
    assert stop in tokenizer.decode(ended.token_ids)


# ---- where values stop being finite ----


def check_finite(group: TensorParallelGroup, place: str, value: float, sequence_parallel: str) -> None:
    weights = random_weights(config("llama"), dtype=torch.float32)
    model = sharded(config("llama"), group, weights, sequence_parallel=sequence_parallel)
    layer = model.model.layers[1]
    if group.rank == 1 and place != "norm":
        {"mlp": layer.mlp.down_proj, "head": model.lm_head}[place].weight.data[0, 0] = value
    if place == "norm":
        layer.post_attention_layernorm.weight.data[3] = value
    generate(model, prompts(3), group, GenerationSettings(max_new_tokens=2), check_finite=True)


@pytest.mark.parametrize(
    ("place", "value", "sequence_parallel", "message"),
    [
        ("mlp", float("nan"), "off", "in the update of model.layers.1.mlp.*, on rank [1]"),
        ("mlp", float("inf"), "on", "in the update of model.layers.1.mlp.*, on rank [1]"),
        ("norm", float("nan"), "off", "in the output of model.layers.1.post_attention_layernorm, on rank [0, 1, 2]"),
        ("head", float("inf"), "off", "in the logits, on rank [1]"),
    ],
)
def test_the_first_value_that_is_not_finite_is_named(
    place: str, value: float, sequence_parallel: str, message: str
) -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(3, check_finite, place, value, sequence_parallel)
    assert sorted(failure.value.exceptions) == [0, 1, 2]
    start, _, end = message.partition(".*")
    for error in failure.value.exceptions.values():
        assert isinstance(error, GenerationError) and start in str(error) and str(error).endswith(end)
