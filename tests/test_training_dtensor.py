"""Exported DTensors hold the checkpoint's tensors, and what no placement expresses is refused by name.

Functions named check_* run on every rank.
"""

import pytest
import torch
from tiny_models import config, random_weights, sharded
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import tp_residual
from tp_residual.errors import LayoutError, UserError
from tp_residual.parallel.blocks import parameter_blocks
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.testing import run_ranks
from tp_residual.training import to_dtensor


def check_export(group: TensorParallelGroup, inexpressible: set[str]) -> None:
    """9/3 heads, 59 features, 101 ids: over 2 ranks heads are 5 and 4 and KV head 1 is shared, over 3 all are ceil chunks."""
    weights = random_weights(config("llama"))
    model = sharded(config("llama"), group, weights, dtype=torch.float64)
    mesh = DeviceMesh("cpu", list(group.ranks), mesh_dim_names=("tp",))
    wanted = None
    if inexpressible:
        with pytest.raises(LayoutError, match=rf"how {group.size} ranks hold ") as error:
            to_dtensor(model, mesh)
        named = str(error.value).partition(" ranks hold ")[2].partition(":")[0].split(", ")
        assert {name.split(".")[-2] for name in named} == inexpressible
        wanted = set(weights) - set(named)
    exported = to_dtensor(model, mesh, names=wanted)
    assert list(exported) == [
        name for name in dict.fromkeys(b.name for b in parameter_blocks(model)) if wanted is None or name in wanted
    ]
    for name, tensor in exported.items():
        assert isinstance(tensor, DTensor) and tensor.shape == weights[name].shape and not tensor.requires_grad
        assert torch.equal(tensor.full_tensor(), weights[name]), name
        sharded_dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        expected = Replicate() if name.endswith("norm.weight") or group.size == 1 else Shard(sharded_dim)
        assert tensor.placements == (expected,), name
    down = exported["model.norm.weight"].to_local()
    down.fill_(3)
    assert (model.get_parameter("model.norm.weight") == 3).all(), "a view of the parameter"
    with pytest.raises(UserError, match=r"no tensor model\.layers\.0\.qkv_proj\.weight"):
        to_dtensor(model, mesh, names=["model.layers.0.qkv_proj.weight"])


def test_full_tensors_are_the_checkpoints() -> None:
    run_ranks(2, check_export, {"q_proj", "k_proj", "v_proj", "o_proj"})
    run_ranks(3, check_export, set())


def test_ranks_agree_where_only_some_hold_a_ceil_chunk() -> None:
    # 9 heads are 3, 2, 2, 2 and 101 ids 26, 25, 25, 25, where ceil chunks are 3, 3, 3, 0 and 26, 26, 26, 23; 59 features are 15, 15, 15, 14
    run_ranks(4, check_export, {"q_proj", "k_proj", "v_proj", "o_proj", "embed_tokens", "lm_head"})


def check_replicated_heads(group: TensorParallelGroup) -> None:
    """8 query heads over one KV head that both ranks hold: whole, as are norms and the biases of row-parallel layers."""
    weights = random_weights(config("llama_biased"))
    model = sharded(config("llama_biased"), group, weights, dtype=torch.float64)
    exported = to_dtensor(model, DeviceMesh("cpu", list(group.ranks)))
    for name, tensor in exported.items():
        assert torch.equal(tensor.full_tensor(), weights[name]), name
        whole = (
            "norm.weight",
            "k_proj.weight",
            "k_proj.bias",
            "v_proj.weight",
            "v_proj.bias",
            "o_proj.bias",
            "down_proj.bias",
        )
        assert (tensor.placements == (Replicate(),)) == name.endswith(whole), name


def test_tensors_that_every_rank_holds_are_replicated() -> None:
    run_ranks(2, check_replicated_heads)


def check_meshes(group: TensorParallelGroup) -> None:
    model = sharded(config("llama"), group, random_weights(config("llama")), dtype=torch.float64)
    with pytest.raises(UserError, match=r"the mesh holds ranks \[1, 0\], the model's group \[0, 1\]"):
        to_dtensor(model, DeviceMesh("cpu", [1, 0]))
    with pytest.raises(UserError, match=r"\[\[0\], \[1\]\]"):
        to_dtensor(model, DeviceMesh("cpu", [[0], [1]]))


def test_another_mesh_is_refused() -> None:
    run_ranks(2, check_meshes)


def test_the_package_exports_it_lazily() -> None:
    assert tp_residual.to_dtensor is to_dtensor
    with pytest.raises(AttributeError, match="no attribute 'to_dtensors'"):
        _ = tp_residual.to_dtensors  # type: ignore[attr-defined]
