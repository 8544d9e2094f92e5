"""`doctor` on the command line."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models

from tp_residual.doctor.initial import example_config, expected_slope, initialise, probe_init
from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.residual.config import PRESETS, ResidualConfig

SHALLOW = (2, 4, 8, 16)  # half of the command's time is its deepest model


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tp_residual", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_checkpoint_at_tp_2_with_json_and_picture(tmp_path: Path) -> None:
    picture, numbers = tmp_path / "doctor.png", tmp_path / "doctor.json"
    done = run(
        "--model", str(tiny_models.saved("qwen3")), "--tp", "2", "--sequence-parallel", "on", "--seq-len", "9", "--json",
        "--plot", str(picture), "--output", str(numbers),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["healthy"] and said["tp_size"] == 2 and said["sequence_parallel"]
    assert said == json.loads(numbers.read_text())
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert {finding["probe"] for finding in said["findings"] if finding["status"] == "ok"} >= {
        "joins",
        "reads",
        "updates",
        "replicas",
    }


def test_a_fault_is_exit_code_1(tmp_path: Path) -> None:
    """A NaN in the weights: found where it enters."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_models.saved("qwen3"), tmp_path, dirs_exist_ok=True)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(tensors, file)
    done = run("--model", str(tmp_path), "--seq-len", "5")
    assert done.returncode == 1 and "not finite" in done.stderr and "model.layers.1.mlp" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "needs --model DIR, or --residual PRESET"),
        (("--residual", "pots"), "did you mean post"),
        (("--residual", "pre", "--tp", "9"), "4 heads of the example"),
        (("--residual", "pre", "--seq-len", "0"), "must be at least 1"),
        (("--residual", "pre", "--input-ids", "1,x"), "not a list of integers"),
        (("--residual", "pre", "--plot", "x.jpg"), "must end in .png"),
    ],
)
def test_bad_requests(arguments: tuple[str, ...], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


# ---- growth with depth at initialisation ----


@pytest.mark.parametrize("rule", ("normal", "gpt2", "variance_over_root_n"))
def test_the_slope_of_each_rule(rule: str) -> None:
    finding = probe_init(ResidualConfig(), rule, depths=SHALLOW)
    assert finding.status == "ok", finding
    assert len(finding.series) == len(SHALLOW)


def test_an_init_that_is_not_what_it_says_is_named() -> None:
    def builder(real: str, *, again: bool = False) -> Callable[[int, int], CausalLM]:
        def built(depth: int, seed: int) -> CausalLM:
            model = CausalLM(example_config(ResidualConfig(), depth), TensorParallelGroup.single())
            initialise(model, real, seed)
            if again:
                for layer in model.model.layers:
                    layer.self_attn.o_proj.weight.data.div_((2 * depth) ** 0.5)
                    layer.mlp.down_proj.weight.data.div_((2 * depth) ** 0.5)
            return model

        return built

    assert (
        "init not scaled by depth" in probe_init(ResidualConfig(), "gpt2", depths=SHALLOW, build=builder("normal")).what
    )
    assert (
        "init scaled by depth twice"
        in probe_init(ResidualConfig(), "gpt2", depths=SHALLOW, build=builder("gpt2", again=True)).what
    )


def test_what_is_promised() -> None:
    assert expected_slope(ResidualConfig(), "normal") == pytest.approx(1.0)
    assert expected_slope(PRESETS["minicpm"].config, "normal") == pytest.approx(0.0)
    assert expected_slope(ResidualConfig(), "gpt2") == pytest.approx(0.0)
    assert expected_slope(PRESETS["post"].config, "normal") is None
