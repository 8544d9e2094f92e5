"""`explain`: what it says is what the model does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from residual_oracle import variant, variant_weights
from test_residual_variants import BATCH, VARIANTS, config_of
from tiny_models import sharded

from tp_residual.explain import explain, explain_model
from tp_residual.model.attention_backend import NoCache, TokenBatch
from tp_residual.model.layout import ModelLayout
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.residual.config import PRESETS, ResidualConfig
from tp_residual.testing import expect_collectives, run_ranks

DOCS = Path(__file__).parent.parent / "docs" / "residuals.md"


@pytest.mark.parametrize("name", VARIANTS)
def test_extra_parameters_are_those_of_the_layout(name: str) -> None:
    """A Macaron layer's second MLP is a sublayer, not a part of the connection."""

    def count(residual: ResidualConfig) -> int:
        tensors = ModelLayout.of(variant("qwen3", residual), 1).tensors(sequence_parallel=False)
        return sum(tensor.local_elements(0) for tensor in tensors if ".first_mlp." not in tensor.name)

    config = variant("qwen3", VARIANTS[name])
    assert explain_model(config).extra_parameters == count(VARIANTS[name]) - count(ResidualConfig())


def check_backward_collectives(group: TensorParallelGroup, names: list[str]) -> None:
    for name in names:
        config = config_of(name)
        found = explain_model(config)
        model = sharded(config, group, variant_weights(config), dtype=torch.float64).eval()
        total = config.num_hidden_layers * found.sums_per_layer + 1
        gathers = (
            config.num_hidden_layers * found.sums_per_layer if "all-gather" in found.collectives["backward"] else 0
        )
        with expect_collectives(group, all_reduce=total):
            local = model(TokenBatch.prefill(BATCH), NoCache()).local_logits
        with expect_collectives(group, all_reduce=total, all_gather=gathers):
            local.sum().backward()


def test_collectives_forward_and_back_are_those_that_run() -> None:
    names = [
        "pre",
        "post",
        "sandwich",
        "parallel",
        "parallel2",
        "ladder",
        "macaron",
        "highway",
        "projection",
        "lowrank",
        "depth_mix",
    ]
    run_ranks(2, check_backward_collectives, names, timeout_s=120)


def test_every_preset_is_in_the_documentation_with_its_equation_and_collectives() -> None:
    text = DOCS.read_text()
    for name, preset in PRESETS.items():
        found = explain(preset.config)
        assert f"| `{name}` | `{preset.equation}` | {found.sums_per_layer} |" in text, name


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tp_residual", "explain", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command() -> None:
    said = json.loads(run("--residual", "ladder", "--json").stdout)
    assert said["sums_per_layer"] == 2 and "ladder" in said["settings"]["topology"]
    assert len(json.loads(run("--all", "--json").stdout)) == len(PRESETS)
    wrong = run("--residual", "sandwhich")
    assert wrong.returncode == 2 and "did you mean sandwich" in wrong.stderr and "Traceback" not in wrong.stderr
    assert run().returncode == 2


def test_of_a_model_directory(tmp_path: Path) -> None:
    from tiny_models import MODELS

    values = MODELS["qwen3"] | {"residual": {"preset": "post", "skip_scale": "deepnorm"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    done = run("--model", str(tmp_path), "--tp", "2")
    assert done.returncode == 0, done.stderr
    assert "deepnorm" in done.stdout and "summed over its holders" in done.stdout
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen3"] | {"residual": {"placement": "pots"}}))
    wrong = run("--model", str(tmp_path))
    assert wrong.returncode == 2 and "placement='pots'" in wrong.stderr


def test_the_custom_equation_is_put_together() -> None:
    assert explain(ResidualConfig(placement="post", gate="vector")).equation == "n((1-g) x + g F(x))"
    assert explain(ResidualConfig(shortcut="lowrank", learned_update="scalar")).equation == "(x + B A x) + a F(n(x))"
