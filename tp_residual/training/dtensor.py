"""Parameters as torch's DTensors, for tools that know those: under checkpoint names, as views, where a torch placement fits."""

from collections import defaultdict
from collections.abc import Collection

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tp_residual.errors import LayoutError, UserError
from tp_residual.parallel.blocks import ParameterBlock, parameter_blocks
from tp_residual.parallel.group import TensorParallelGroup


def to_dtensor(model: nn.Module, mesh: DeviceMesh, *, names: Collection[str] | None = None) -> dict[str, DTensor]:
    """`{checkpoint tensor name: DTensor}` of `model` (a module with its `group`) over a one-dimensional mesh of the group's ranks.

    `Shard(dim)` where the ranks hold what `torch.chunk` would give them (ceil chunks, so 101 rows over 3 ranks but not over 4),
    `Replicate()` where each holds everything. Fused parameters come apart: q, k and v are three tensors. Local tensors are detached views
    of the parameters: writing to one writes to the model. names: only these.

    Raises LayoutError, on every rank and naming all of them, for tensors that no placement expresses: those split otherwise, and those of
    which ranks share a part (key-value heads). UserError for another mesh, and for names that the model does not have. One all-gather.
    """
    group = getattr(model, "group", None)
    if not isinstance(group, TensorParallelGroup):
        raise UserError(f"to_dtensor(): {type(model).__name__} has no tensor-parallel group; give the CausalLM")
    if mesh.ndim != 1 or tuple(mesh.mesh.flatten().tolist()) != group.ranks:
        raise UserError(
            f"to_dtensor(): the mesh holds ranks {mesh.mesh.tolist()}, the model's group {list(group.ranks)}; give the "
            "one-dimensional mesh of that group (a slice mesh['tp'] of a larger one)"
        )
    blocks: dict[str, list[ParameterBlock]] = defaultdict(list)
    for block in parameter_blocks(model):
        blocks[block.name].append(block)
    unknown = [name for name in names or () if name not in blocks]
    if unknown:
        raise UserError(
            f"to_dtensor(): the model has no tensor {', '.join(unknown)}; names are those of the checkpoint"
        )
    wanted = [name for name in blocks if names is None or name in names]
    # 0: neither, 1: a shard, 2: whole, 3: both (a group of one)
    fits = torch.tensor([[_fits(blocks[name], group) for name in wanted]], dtype=torch.uint8, device=group.device)
    if group.size > 1:
        fits = group.run("all_gather", "to_dtensor", fits, lambda transport, t: transport.all_gather(t))
    sharded, whole = (fits & 1).bool().all(dim=0).tolist(), (fits & 2).bool().all(dim=0).tolist()
    neither = [name for name, *can in zip(wanted, sharded, whole, strict=True) if not any(can)]
    if neither:
        raise LayoutError(
            f"no torch placement expresses how {group.size} ranks hold {', '.join(neither)}: Shard() means ceil chunks that no two ranks "
            "share; pass names= without them, or use a tp_size that divides their heads or rows"
        )
    return {
        name: _dtensor(blocks[name], mesh, Replicate() if all_of_it else Shard(blocks[name][0].dim))
        for name, all_of_it in zip(wanted, whole, strict=True)
    }


def _fits(blocks: list[ParameterBlock], group: TensorParallelGroup) -> int:
    total = blocks[0].global_shape[blocks[0].dim]
    chunk = -(-total // group.size)
    held = blocks[0].globe[0], blocks[-1].globe[1]
    expected = min(group.rank * chunk, total), min((group.rank + 1) * chunk, total)
    empty = held[0] == held[1] and expected[0] == expected[1]
    return int(held == expected or empty) + 2 * int(held == (0, total))


def _dtensor(blocks: list[ParameterBlock], mesh: DeviceMesh, placement: Placement) -> DTensor:
    """The blocks of one tensor lie in one run of one parameter, in order."""
    first, last = blocks[0], blocks[-1]
    local = first.parameter.detach().narrow(first.dim, first.local[0], last.local[1] - first.local[0])
    shape = torch.Size(first.global_shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=stride)
