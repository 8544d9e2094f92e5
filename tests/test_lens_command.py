"""`lens` as a command: its tables, JSON and pictures; what it refuses before any model is read."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from test_generate import cli_model, command

from tp_residual.bench import results
from tp_residual.cli import main
from tp_residual.inference.tokenizer import Tokenizer
from tp_residual.lens.request import single_token, token_text, visible

PROMPT = "the stream of sums, über"


def png_size(content: bytes) -> tuple[int, int]:
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(content[16:20]), int.from_bytes(content[20:24])


def test_tables_and_json_of_two_ranks(tmp_path: Path) -> None:
    out, prompts = tmp_path / "lens.json", tmp_path / "prompts.jsonl"
    prompts.write_text(f'{json.dumps({"prompt": PROMPT})}\n{{"prompt_ids": [5, 6, 319]}}\n')
    run = command(
        "lens", "--model", str(cli_model()), "--tp", "2", "--sequence-parallel", "on", "--prompt-file", str(prompts),
        "--output", str(out), "--token", "s", "--versus-id", "7", "--top", "4", "--window", "3",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert all(len(line) <= 100 for line in run.stdout.splitlines()), "fits 100 columns"
    tokenizer = Tokenizer.from_dir(cli_model())
    target = single_token("s", tokenizer, "--token")
    result = json.loads(out.read_text())
    assert result["settings"]["tp"] == 2 and result["settings"]["sequence_parallel"] is True
    first, second = result["prompts"]
    assert first["token_ids"] == tokenizer.encode(PROMPT) and second["token_ids"] == [5, 6, 319]
    for lens in (first, second):
        assert (lens["target"], lens["versus"]) == (target, 7) and lens["sums_hold"] is True
        # fp32: five writes and a logit of size 10, each rounded by 2**-24
        assert lens["sum_of_shares"] == pytest.approx(1, abs=1e-5)
        assert lens["sum_of_logits"] == pytest.approx(lens["logit"], abs=1e-4)
        assert len(lens["window"]) == 3 and all(len(likely["top"]) == 4 for likely in lens["states"][0]["window"])
        assert lens["head_owners"] == [0] * 5 + [1] * 4
    assert result["token_texts"][str(target)] == "s"
    # the numbers of the table are those of the JSON
    assert f"= {first['logit']:.4f}" in run.stdout and f"= {second['logit']:.4f}" in run.stdout
    embedding = re.search(r"embedding +([+-][\d.]+) +([+-][\d.]+) ", run.stdout)
    assert embedding is not None
    assert float(embedding[1]) == pytest.approx(first["components"][0]["share"], abs=1e-4)
    assert float(embedding[2]) == pytest.approx(first["components"][0]["logit"], abs=1e-3)


def test_one_picture_and_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One token, and layer 1 alone: nothing to take a mean over, nothing of the embedding."""
    picture = tmp_path / "lens.png"
    arguments = ["lens", "--model", str(cli_model()), "--input-ids", "7", "--layers", "1:2", "--plot", str(picture)]
    assert main([*arguments, "--json"]) == 0
    (lens,) = json.loads(capsys.readouterr().out)["prompts"]
    assert [state["layer"] for state in lens["states"]] == [1] and len(lens["components"]) == 5
    assert lens["writes"][0]["cosine"] == [None], "the first write has nothing to point along"
    assert png_size(picture.read_bytes())[0] > 1000
    assert main(arguments) == 0
    assert "the sums include 1 layers that are not shown" in capsys.readouterr().out


def test_a_folder_gets_one_picture_of_each_kind_and_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tp_residual.lens import plots

    monkeypatch.setattr(plots, "pictures", lambda lens, text, title: {"heads": text(lens.token_ids[0]).encode()})
    arguments = ["lens", "--model", str(cli_model()), "--input-ids", "310", "--plot", str(tmp_path / "pictures")]
    assert main(arguments) == 0 and main([*arguments, "--input-ids", "311"]) == 0
    found = {path.name: path.read_bytes() for path in (tmp_path / "pictures").iterdir()}
    assert found == {"heads.png": b"#310", "heads_1.png": b"#310", "heads_2.png": b"#311"}


def test_texts_are_drawn_as_they_are() -> None:
    """Not as mathematics, and by id where the font has no letter: matplotlib's warnings are errors here."""
    from test_lens import ALONE, build

    from tp_residual.lens import plots
    from tp_residual.lens.request import LensRequest
    from tp_residual.lens.run import look

    lens = look(build(ALONE, "llama", torch.float32), [[1, 2, 3, 4]], LensRequest())[0]
    texts = {1: "$x$", 2: " 中文", 3: "\\frac{", 4: "_a^b"}
    drawn = plots.pictures(lens, lambda token: texts.get(token, f"${token}"), "a $title_ of 100 %")
    assert list(drawn) == ["stream", "components", "heads", "logit_lens"]
    assert all(500 < size < 3000 for content in drawn.values() for size in png_size(content)[:1])
    assert plots._drawable("中", 5) == "#5" and plots._drawable(" the\n", 5) == "\u2423the\\n"


def test_tokens_are_shown_as_what_they_write() -> None:
    tokenizer = Tokenizer.from_dir(cli_model())
    assert token_text(None, 5) == "#5" and token_text(tokenizer, 310) == "#310", "an id that no token has"
    assert token_text(tokenizer, 1) == "<s>", "special tokens as well"
    pieces = [token_text(tokenizer, token) for token in tokenizer.encode("a stream, ü")]
    assert "".join(pieces).startswith("a stream, ")
    assert visible(" a\tb\n") == "\u2423a\\tb\\n"
    half = tokenizer.vocabulary.token_to_id("Ã")  # the first byte of ü
    assert token_text(tokenizer, half) == "Ã"


REFUSED: list[tuple[tuple[str, ...], str]] = [
    ((), "give --prompt, --input-ids or a --prompt-file"),
    (("--prompt", ""), "a --prompt is empty; give it some text"),
    (("--input-ids", ""), "prompt 0 is empty: it has 0 tokens"),
    (("--input-ids", "1,x"), "--input-ids '1,x' is not a list of integers; write it as 1,2,3"),
    (("--input-ids", "1,320"), "prompt 0 has token id 320, outside the vocabulary of 320 ids; use 0 to 319"),
    (("--prompt", "a", "--prompt-file", "x"), "give --prompt, --input-ids or a --prompt-file, not both"),
    (("--prompt-file", "nowhere.jsonl"), "nowhere.jsonl cannot be read: No such file"),
    (("--input-ids", "1", "--chat"), "--chat needs a --prompt"),
    (("--prompt", "a", "--token", "sum of"), "--token 'sum of' is "),
    (("--prompt", "a", "--token", ""), "--token '' is no token"),
    (("--prompt", "a", "--token", "s", "--token-id", "4"), "--token 's' and --token-id 4 are both given"),
    (("--prompt", "a", "--versus-id", "999"), "versus id 999 is outside the vocabulary of 320 ids"),
    (("--prompt", "a", "--token-id", "4", "--versus-id", "4"), "token 4 versus itself is always 0"),
    (("--prompt", "a", "--layers", "1:9"), "layers 1:9 must be A:B with 0 <= A < B <= 2"),
    (("--prompt", "a", "--layers", "x"), "--layers 'x' is not A:B, as 8:16 for layers 8 to 15"),
    (("--prompt", "a", "--position", "7"), "position 7 is outside prompt 0 of 1 tokens"),
    (("--prompt", "a", "--top", "0"), "top=0 must be between 1 and the vocabulary's 320"),
    (("--prompt", "a", "--output", "/nowhere/x.json"), "--output /nowhere/x.json cannot be written: No such file"),
    (("--prompt", "a", "--plot", "/nowhere/x.png"), "--plot /nowhere/x.png cannot be written: No such file"),
    (("--prompt", "a", "--plot", "/nowhere/x/pictures"), "cannot be written: No such file"),
    (("--prompt", "a", "--plot", "/dev/null"), "--plot /dev/null is neither a name ending in .png nor a folder"),
    (
        ("--prompt", "a", "--prompt", "b", "--plot", "x.png"),
        "is one picture of one prompt, and there are 2; name a folder",
    ),
    (("--prompt", "a", "--tokn", "s"), "unrecognized arguments: --tokn"),
]


def refusal(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    try:
        code = main(["lens", "--model", str(cli_model()), "--tp", "2", *arguments])
    except SystemExit as exit_:
        code = exit_.code  # type: ignore[assignment]
    told: Any = capsys.readouterr()
    assert code == 2 and told.out == "" and told.err.count("error") == 1, told.err
    return str(told.err)


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_what_cannot_be_shown_is_refused_before_ranks_start(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(arguments, capsys)


def test_a_text_of_several_tokens_is_told_which(capsys: pytest.CaptureFixture[str]) -> None:
    ids = Tokenizer.from_dir(cli_model()).encode("sum of")
    told = refusal(("--prompt", "a", "--token", "sum of"), capsys)
    assert f"is {len(ids)} tokens: {ids[0]} " in told and "choose it with --token-id" in told


def test_pictures_without_matplotlib_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(results, "find_spec", lambda name: None)
    for path in ("x.png", "pictures"):
        told = refusal(("--prompt", "a", "--plot", str(tmp_path / path)), capsys)
        assert "needs matplotlib, which is not installed; install tp_residual with its extra `plot`" in told
    assert list(tmp_path.iterdir()) == []
