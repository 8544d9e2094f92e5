"""examples/train_tiny.py: the same losses at any tp, resumed or not, below the unigram entropy; refusals by name; the shipped text.

Functions named check_* run on every rank.
"""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.testing import run_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def imported(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def example() -> ModuleType:
    return sys.modules.get("train_tiny") or imported("train_tiny", EXAMPLES / "train_tiny.py")


SMALL = ("--hidden", "32", "--layers", "2", "--batch", "3", "--context", "24", "--lr", "3e-2")


def curve(group: TensorParallelGroup, folder: Path, *options: str, **changes: Any) -> list[float]:
    """The losses of a run in this process; rank 0's files go where they should."""
    module = example()
    arguments = module.parse([*SMALL, "--output", str(folder), *options])
    for name, value in changes.items():
        setattr(arguments, name, value)
    text = module.read_text(Path(arguments.text), arguments.context)
    run = module.Run.begin(arguments, module.model_config(arguments), text, group)
    assert len(run.model.lm_head.weight) == 256 // group.size or group.size == 3, "each rank has its share"
    run.train()
    losses: list[float] = run.losses
    return losses


def check_curves(world: TensorParallelGroup, folder: Path) -> dict[str, list[float]]:
    """By tp size and mode, on the first ranks of four; and one that stops at tp 2 and goes on at tp 3."""
    # each rank makes as many groups as its peers, or torch names them differently
    pair = TensorParallelGroup.from_ranks([0, 1] if world.rank < 2 else [world.rank])
    two = pair if world.rank < 2 else None
    three = TensorParallelGroup.from_ranks([0, 1, 2]) if world.rank < 3 else None
    groups = {1: TensorParallelGroup.single() if world.rank == 0 else None, 2: two, 3: three, 4: world}
    curves = {}
    for dtype, steps in (("float64", "5"), ("float32", "5")):
        for size, mode, recompute in (
            (1, "off", "none"),
            (2, "off", "layers"),
            (2, "on", "reads"),
            (4, "off", "none"),
            (4, "on", "layers"),
        ):
            group = groups[size]
            if group is not None:
                name = f"{dtype} tp {size} {mode}"
                options = ("--dtype", dtype, "--steps", steps, "--sequence-parallel", mode, "--recompute", recompute)
                curves[name] = curve(group, folder / name, *options)
    if two is not None:
        curve(two, folder / "resumed", "--dtype", "float64", "--steps", "3")
    world.share("three steps", "")
    if three is not None:
        resumed = ("--dtype", "float64", "--steps", "5", "--resume", "--sequence-parallel", "on")
        curves["resumed"] = curve(three, folder / "resumed", *resumed)
    world.share("done", "")  # rank 0 keeps the smaller groups' side channels
    return curves


@pytest.mark.slow
def test_curves_are_the_same_at_any_tp_and_when_resumed(tmp_path: Path) -> None:
    by_rank = run_ranks(4, check_curves, tmp_path, checked=False)
    curves = by_rank[0]
    assert all(theirs[name] == curves[name] for theirs in by_rank for name in theirs), "ranks report one loss"
    truth = torch.tensor(curves["float64 tp 1 off"], dtype=torch.float64)
    assert len(truth) == 5 and truth[0] - truth[-1] > 0.05, "it learns"
    for name, losses in curves.items():
        error = float((torch.tensor(losses, dtype=torch.float64) - truth).abs().max())
        # fp64: 1e-16 a sum, grown by AdamW's division by small moments. fp32: 1e-7 a sum, the same growth
        assert error < (2e-5 if "float32" in name else 1e-9), f"{name} is {error} away"


def run_example(*options: str, ranks: int = 1, code: int = 0) -> subprocess.CompletedProcess[str]:
    start = (*TORCHRUN, str(ranks)) if ranks > 1 else (sys.executable,)
    line = (*start, str(EXAMPLES / "train_tiny.py"), *options)
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=110, cwd=EXAMPLES.parent)
    assert (done.returncode == 0) == (code == 0), done.stdout + done.stderr
    return done


@pytest.mark.slow
def test_under_torchrun_with_a_text_of_ones_own_then_resumed_alone(tmp_path: Path) -> None:
    text, out = tmp_path / "mine.txt", tmp_path / "out"
    text.write_text("".join(f"{n} times {n} is {n * n}, ünd\n" for n in range(400)))
    options = (*SMALL, "--text", str(text), "--output", str(out), "--residual", "gate_lowrank")
    first = run_example(*options, "--steps", "10", "--sequence-parallel", "on", "--save-every", "6", ranks=2)
    assert "unigram entropy of the text" in first.stdout and "step 10/10" in first.stderr
    found = json.loads((out / "loss.json").read_text())
    assert found["ranks"] == 2 and len(found["losses"]) == 10 and [step for step, _ in found["held_out"]] == [6, 10]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    again = run_example(*options, "--steps", "14", "--resume", "--against", str(out))
    assert "resumed at step 10, saved by 2 ranks, on 1" in again.stdout
    assert "in 10 steps" in again.stdout and "(tp 2): 0 " in again.stdout  # its own first ten
    resumed = json.loads((out / "loss.json").read_text())["losses"]
    assert len(resumed) == 14 and resumed[:10] == found["losses"]
    generated = subprocess.run(
        (
            sys.executable,
            "-m",
            "tp_residual",
            "generate",
            "--model",
            str(out / "model"),
            "--prompt",
            "3 times ü",
            "--max-new-tokens",
            "5",
        ),
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        cwd=EXAMPLES.parent,
    )
    assert generated.returncode == 0, generated.stderr

    other = run_example(*options, "--resume", "--seed", "1", code=2).stderr
    assert "checkpoint is of another run: seed is 0 there and 1 here" in other
    started = run_example(*options, code=2).stderr
    assert "holds a run already; add --resume" in started


def main_says(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    code = example().main(list(options))
    return code, capsys.readouterr().err


def test_bad_input_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    empty, short, out = tmp_path / "empty", tmp_path / "short", ("--output", str(tmp_path / "out"))
    empty.write_bytes(b"")
    short.write_bytes(b"x" * 1289)
    assert main_says(capsys, "--text", str(tmp_path / "no"), *out) == (
        2,
        f"train_tiny: cannot read the text {tmp_path}/no: No such file or directory; give a readable file with --text\n",
    )
    assert (
        "empty has 0 bytes, and --context 128 needs at least 1290" in main_says(capsys, "--text", str(empty), *out)[1]
    )
    assert "short has 1289 bytes" in main_says(capsys, "--text", str(short), *out)[1]
    assert (
        "residual preset 'sandwhich' is not known; did you mean sandwich?"
        in main_says(capsys, "--residual", "sandwhich", *out)[1]
    )
    assert "out/checkpoint has no training.json" in main_says(capsys, "--resume", *out)[1]
    assert "no loss.json that can be read" in main_says(capsys, "--against", str(tmp_path), *out)[1]
    (tmp_path / "loss.json").write_text('{"settings": {"text": "other"}, "losses": []}')
    assert "is of another run: text is other there and" in main_says(capsys, "--against", str(tmp_path), *out)[1]
    monkeypatch.setenv("WORLD_SIZE", "5")
    assert "num_attention_heads=4 cannot be split over tp_size=5; use 1 to 4" in main_says(capsys, *out)[1]
    with pytest.raises(SystemExit):
        main_says(capsys, "--steps", "0", *out)
    assert not (tmp_path / "out").exists()


def test_nan_stops_the_run_and_keeps_the_last_good_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From step 5 on one weight is NaN. And a picture is not needed for any of it."""
    module, out = example(), tmp_path / "out"
    whole_step = module.Run.one_step

    def poisoned(run: Any) -> None:
        if run.step == 4:
            with torch.no_grad():
                run.model.model.layers[1].mlp.down_proj.weight[3, 2] = float("nan")
        whole_step(run)

    monkeypatch.setattr(module.Run, "one_step", poisoned)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    code, said = main_says(capsys, *SMALL, "--steps", "9", "--save-every", "2", "--output", str(out))
    assert code == 1
    assert "train_tiny: step 5: the gradient of model.embed_tokens.weight is NaN on rank 0 of 1" in said
    assert f"the last good checkpoint, of step 4, is kept in {out}/checkpoint" in said
    assert "no plot: " in said and "the numbers are in" in said
    assert len(json.loads((out / "loss.json").read_text())["losses"]) == 4
    assert (
        module.Manifest.read(out / "checkpoint").state["losses"]
        == json.loads((out / "loss.json").read_text())["losses"]
    )


def test_the_shipped_text_is_what_its_grammar_writes() -> None:
    text = (EXAMPLES / "data" / "harbour.txt").read_bytes()
    assert text.decode() == imported("make_text", EXAMPLES / "data" / "make_text.py").text()
    assert len(text) > 100_000
    counts = [text.count(bytes([byte])) / len(text) for byte in range(256)]
    expected = -sum(p * math.log(p) for p in counts if p)
    assert example().unigram_entropy(text) == pytest.approx(expected, abs=1e-12)


@pytest.mark.slow
def test_the_default_run_ends_far_below_the_unigram_entropy(tmp_path: Path) -> None:
    run_example("--output", str(tmp_path / "out"), ranks=2)
    found = json.loads((tmp_path / "out" / "loss.json").read_text())
    assert found["loss_at_the_end"] < found["unigram_entropy"] - 0.5
    assert found["held_out"][-1][1] < found["unigram_entropy"] - 0.5
