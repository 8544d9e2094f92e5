"""`--weights random:SEED`: the same full weights at any tp size, different for every tensor and seed, and good for a forward pass."""

from typing import Any

import pytest
import tiny_models
import torch

from tp_residual.checkpoint.random_weights import STD, fill_random
from tp_residual.cli.session import parse_weights
from tp_residual.errors import RequestError
from tp_residual.inference.loading import load_model
from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.blocks import parameter_blocks
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.testing import run_ranks


def splitmix(index: int, key: int) -> int:
    """The published generator, in Python's unbounded integers."""
    mask = (1 << 64) - 1
    x = ((index ^ key) + 0x9E3779B97F4A7C15) & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return (x ^ x >> 31) >> 40


def shares(group: TensorParallelGroup, name: str, seed: int, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    model = CausalLM(tiny_models.config(name), group, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    fill_random(parameter_blocks(model), seed)
    return [(b.name, b.dim, b.globe, b.of(b.parameter).detach().clone()) for b in parameter_blocks(model)]


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_every_tp_size_holds_slices_of_the_same_weights(name: str) -> None:
    whole = {tensor: value for tensor, _, _, value in shares(TensorParallelGroup.single(), name, 7, torch.bfloat16)}
    for size in (2, 3):
        for rank_shares in run_ranks(size, shares, name, 7, torch.bfloat16):
            for tensor, dim, (start, stop), value in rank_shares:
                assert torch.equal(value, whole[tensor].narrow(dim, start, stop - start)), tensor


def test_values_are_the_published_generators_and_differ_everywhere() -> None:
    from tp_residual.checkpoint.random_weights import stream_key

    tensors = {tensor: value for tensor, _, _, value in shares(TensorParallelGroup.single(), "llama", 7, torch.float32)}
    name = "model.layers.1.mlp.down_proj.weight"
    flat = tensors[name].reshape(-1)
    for index in (0, 1, 17, flat.numel() - 1):
        uniform = splitmix(index, stream_key(7, name) % (1 << 64)) * 2.0**-23 - 1
        assert flat[index].item() == pytest.approx(3**0.5 * STD * uniform, rel=1e-6)
    assert flat.unique().numel() > 0.99 * flat.numel()
    matrices = torch.cat([value.reshape(-1) for value in tensors.values() if value.dim() > 1])
    # 40,000 draws: the standard error of the mean is 1e-4, of the standard deviation 0.3 %
    assert abs(matrices.mean()) < 5e-4 and abs(matrices.std() / STD - 1) < 0.02
    gate, up = tensors["model.layers.0.mlp.gate_proj.weight"], tensors["model.layers.0.mlp.up_proj.weight"]
    assert not torch.equal(gate, up)
    again = {tensor: value for tensor, _, _, value in shares(TensorParallelGroup.single(), "llama", 8, torch.float32)}
    assert not any(torch.equal(value, again[tensor]) for tensor, value in tensors.items())


def test_only_config_json_is_needed(tmp_path: Any) -> None:
    import json

    (tmp_path / "config.json").write_text(json.dumps(tiny_models.MODELS["qwen2"]))
    model, report = load_model(tmp_path, TensorParallelGroup.single(), random_seed=3)
    assert report.bytes_read == 0 and report.bytes_held == sum(p.numel() * 4 for p in model.parameters())
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("text", ["random", "random:", "random:x", "random:-1", "zeros:1", f"random:{1 << 63}"])
def test_other_spellings_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="is not random:SEED"):
        parse_weights(text)
    assert parse_weights("random:12") == 12 and parse_weights(None) is None
