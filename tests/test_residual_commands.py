"""Residual connections on the command line: from config.json, from a flag, and refused where the weights were trained otherwise."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tp_residual", *arguments], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that says it was trained as a ladder."""
    folder = tmp_path_factory.mktemp("ladder")
    shutil.copytree(tiny_models.saved("llama"), folder, dirs_exist_ok=True)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"residual": "ladder"}))
    return folder


def generate(model: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return run("generate", "--model", str(model), "--prompt-ids", "3,4,5,6", "--max-new-tokens", "8", "--json", *more)


def token_ids(done: subprocess.CompletedProcess[str]) -> list[int]:
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[0])["token_ids"])


@pytest.mark.slow
def test_the_connection_of_config_json_is_used_at_any_tp(model: Path) -> None:
    alone = generate(model)
    assert "residual: ladder" in alone.stderr
    ids = token_ids(alone)
    assert token_ids(generate(model, "--tp", "2")) == ids
    assert token_ids(generate(tiny_models.saved("llama"))) != ids, "a ladder computed what Pre-Norm does"
    assert token_ids(generate(tiny_models.saved("llama"), "--residual", "ladder", "--force-residual")) == ids


def test_weights_trained_otherwise_are_refused(model: Path) -> None:
    for arguments in (("--residual", "pre"), ("--residual", "parallel")):
        done = generate(model, *arguments)
        assert (
            done.returncode == 2 and "trained with residual ladder" in done.stderr and "--force-residual" in done.stderr
        )
        assert "Traceback" not in done.stderr
    wrong = generate(model, "--residual", "lader")
    assert wrong.returncode == 2 and "did you mean ladder" in wrong.stderr


def test_random_weights_take_any_connection(model: Path) -> None:
    assert len(token_ids(generate(model, "--residual", "gate_lowrank", "--weights", "random:3"))) == 8


def test_verify_says_what_it_compares_with(model: Path) -> None:
    done = run("verify", "--model", str(model), "--seq-len", "8")
    assert done.returncode == 2 and "Pre-Norm" in done.stderr and "ladder" in done.stderr
