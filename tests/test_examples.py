"""The examples run, and README shows what runs."""

import subprocess
import sys
from pathlib import Path

import pytest
from test_generate import cli_model

ROOT = Path(__file__).parents[1]


def run(*line: str) -> str:
    done = subprocess.run([sys.executable, *line], capture_output=True, text=True, check=False, timeout=100, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_layer_of_ones_own_is_proven_as_readme_shows() -> None:
    source = (ROOT / "examples" / "prove_a_layer.py").read_text()
    shown = source[source.index("def twin():") : source.index("if __name__")].rstrip()
    assert shown in (ROOT / "README.md").read_text()
    assert shown.count("\n") < 30
    out = run("examples/prove_a_layer.py")
    assert [line.partition(":")[0] for line in out.splitlines()] == ["tp=1", "tp=2", "tp=3", "tp=4"]


@pytest.mark.slow
def test_the_failures_that_the_docs_show() -> None:
    said = {scene: run("examples/failures.py", scene).splitlines() for scene in ("kill", "skip", "mismatch")}
    assert "waiting in #2 all_reduce tag='layer 1' shape=[4] dtype=float32, gave up:" in said["kill"][0]
    assert "rank 1: its process has ended" in said["kill"][0]
    assert said["kill"][1] == "rank 1: ended with exit code 9"
    for scene, first, second in (
        ("skip", "tag='layer 1' shape=[4]", "tag='layer 2' shape=[4]"),
        ("mismatch", "tag='layer 1' shape=[4]", "tag='layer 1' shape=[5]"),
    ):
        assert len(said[scene]) == 2
        assert all(f"at #2 all_reduce {call}" in line for line in said[scene] for call in (first, second))


def test_generation_from_python() -> None:
    model = str(cli_model())
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    texts = run(*launcher, "examples/generate.py", model)
    assert [line.split()[0] for line in texts.splitlines()] == ["0", "1"]
