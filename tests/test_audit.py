"""`audit` says what the built model does: the same blocks, bytes and collectives, from config.json alone."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_models

from tp_residual.audit import audit
from tp_residual.errors import RequestError, SplitError
from tp_residual.model.attention_backend import NoCache, TokenBatch
from tp_residual.model.config import ModelConfig
from tp_residual.model.decoder import CausalLM
from tp_residual.model.layout import ModelLayout
from tp_residual.parallel.blocks import parameter_blocks
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.testing import RowCache, run_ranks

# A published 70B shape (Llama 3): 64 query and 8 KV heads, untied.
LLAMA_70B = {
    "model_type": "llama", "hidden_act": "silu", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 128256,
    "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip


@pytest.mark.parametrize("name", tiny_models.MODELS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_layout_is_the_built_models(name: str, sequence_parallel: bool) -> None:
    config = tiny_models.config(name)
    for size in (1, 2, 3, 4, 8):
        layout = ModelLayout.of(config, size)
        found = audit(config, size, sequence_parallel=sequence_parallel, dtype="float32")
        for rank in range(size):
            group = TensorParallelGroup.single("meta")  # stands in for one rank of a group: nothing here communicates
            group.size, group.rank = size, rank
            model = CausalLM(config, group, sequence_parallel="on" if sequence_parallel else "off")
            paths = {id(parameter): path for path, parameter in model.named_parameters()}
            built = [
                (b.name, paths[id(b.parameter)], b.dim, b.local, b.globe, b.global_shape, b.holders, b.partial_gradient)
                for b in parameter_blocks(model)
            ]
            said = [
                (t.name, t.parameter, t.dim, b.local, b.globe, t.shape, b.holders, b.partial_gradient)
                for t in layout.tensors(sequence_parallel=sequence_parallel)
                for b in t.blocks(rank)
            ]
            assert sorted(built) == sorted(said)
            share = found.ranks[rank]
            assert share.weight_bytes == sum(p.numel() * 4 for p in model.parameters())
            cache = RowCache(layout, group, rows=1, max_tokens=7, dtype=model.dtype)
            assert share.kv_bytes_per_token * 7 == cache.nbytes


def count_collectives(group: TensorParallelGroup) -> None:
    """What the counters of a real pass say of one layer: calls and payload bytes a token."""
    config, tokens = tiny_models.config("llama"), 6
    for mode, sequence_parallel in (("tensor_parallel", False), ("sequence_parallel", True)):
        weights = tiny_models.random_weights(config)
        model = tiny_models.sharded(
            config, group, weights, sequence_parallel="on" if sequence_parallel else "off", boundary="library"
        )
        group.counters.reset()
        model(TokenBatch.prefill([list(range(tokens))]), NoCache())
        said = {
            c.kind: (c.count, c.payload_bytes_per_token * tokens)
            for c in audit(config, group.size, dtype="float32").collectives_per_layer[mode]
        }
        counted: dict[str, tuple[int, int]] = {}
        for (tag, kind), calls in group.counters.calls.items():
            if tag.startswith("model.layers.1."):
                before = counted.get(kind, (0, 0))
                counted[kind] = (before[0] + calls, before[1] + group.counters.bytes[tag, kind])
        assert counted == said, mode


def test_collectives_and_bytes_are_those_of_a_real_pass() -> None:
    run_ranks(2, count_collectives)


def test_a_70b_config_at_tp_8() -> None:
    config = ModelConfig.from_dict(LLAMA_70B, "config.json")
    found = audit(config, 8, device_bytes=80 * 10**9)
    assert found.parameters == 70_553_706_496  # the published count
    assert [share.query_heads for share in found.ranks] == [(8 * r, 8 * r + 8) for r in range(8)]
    assert {share.kv_bytes_per_token for share in found.ranks} == {2 * 80 * 128 * 2}
    assert found.fits and not found.violations and found.imbalance == 1.0
    assert len(found.blocks) == 8 * (3 + 80 * 9)
    tight = audit(config, 8, device_bytes=10 * 10**9, context=9000)
    assert tight.fits is False
    assert [violation.split(";")[0] for violation in tight.violations] == [
        "context=9000 exceeds max_position_embeddings=8192",
        f"needs {tight.needed_bytes / 1e9:.2f} GB on the fullest rank and the device has 10.00 GB: "
        f"{tight.needed_bytes / 1e9 - 10:.2f} GB too much (weights 17.64 GB, KV cache 0.37 GB)",
    ]


def test_shared_heads_and_empty_shares_are_noted() -> None:
    config = tiny_models.config("llama")
    assert any("KV head 1: held by ranks 0, 1" in note for note in audit(config, 2).notes)
    small = ModelConfig.from_dict(LLAMA_70B | {"intermediate_size": 3}, "config.json")
    assert "no intermediate features on rank 3: there are 3 for 4 ranks" in audit(small, 4).notes


def test_more_ranks_than_heads() -> None:
    found = audit(tiny_models.config("llama"), 12)
    assert (
        found.violations == ("num_attention_heads=9 cannot be split over tp_size=12; use 1 to 9",) and not found.ranks
    )
    with pytest.raises(SplitError, match="num_attention_heads=9 cannot be split over tp_size=12; use 1 to 9"):
        ModelLayout.of(tiny_models.config("llama"), 12)
    for name in ("tokens", "sequences", "context"):
        with pytest.raises(RequestError, match=f"{name}=0 must be at least 1"):
            audit(tiny_models.config("llama"), 2, **{name: 0})


def command(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    line = [sys.executable, "-X", "importtime", "-m", "tp_residual", "audit", "--model", str(tmp_path), *options]
    return subprocess.run(
        line, capture_output=True, text=True, check=False, timeout=60, env=os.environ | {"COLUMNS": "80"}
    )


def test_the_command(tmp_path: Path) -> None:
    began = time.monotonic()
    done = command(tmp_path, "--tp", "8", "--json", "--device-memory", "80GB")
    assert time.monotonic() - began < 10  # a second on an idle machine, and no torch
    assert done.returncode == 0 and not [line for line in done.stderr.splitlines() if line.endswith("| torch")]
    found = json.loads(done.stdout)
    assert (
        found["fits"] is True
        and len(found["ranks"]) == 8
        and found["blocks"][0]["tensor"] == "model.embed_tokens.weight"
    )
    done = command(tmp_path, "--tp", "8", "--blocks")
    assert (
        "model.layers.79.self_attn.o_proj.weight dim 1 rank 7: local 0-1023 global 7168-8191 holders 7 owner 7 gradient complete"
        in done.stdout
    )
    assert max(len(line) for line in done.stdout.splitlines() if not line.startswith(("model.", "lm_head."))) <= 80
    done = command(tmp_path, "--tp", "8", "--device-memory", "8GiB")
    assert done.returncode == 2 and "needs 18" in done.stderr and "KV cache" in done.stdout
    for options, message in (
        (("--tp", "65"), "num_attention_heads=64 cannot be split over tp_size=65; use 1 to 64"),
        (("--tp", "8", "--device-memory", "lots"), "--device-memory 'lots' is not a size; write it as 80GB or 80GiB"),
        (("--tp", "8", "--tokens", "0"), "tokens=0 must be at least 1"),
    ):
        done = command(tmp_path, *options)
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
