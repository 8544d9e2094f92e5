import torch.nn.functional as F
from torch import nn

from tp_residual.parallel.collectives import invariant_to_column_input
from tp_residual.parallel.linear import ColumnParallelLinear, RowParallelLinear
from tp_residual.parallel.splits import Split
from tp_residual.testing import assert_equals_twin, hostile_values, hostile_weights_, run_ranks


def twin():
    return nn.ModuleDict({"up": nn.Linear(8, 30), "down": nn.Linear(30, 8)}).double()


def run_twin(module, x):
    return module["down"](F.silu(module["up"](x)))


def run(module, x):
    x = invariant_to_column_input(x, module["up"].group, tag="mlp")
    return module["down"](F.silu(module["up"](x)))


def check(group):  # runs on every rank
    split, whole = Split.even(30, group.size), twin()
    hostile_weights_(whole, seed=0)
    up = ColumnParallelLinear(8, {"": split}, group, bias=True, dtype=whole["up"].weight.dtype)
    down = RowParallelLinear(split, 8, group, bias=True, dtype=whole["up"].weight.dtype)
    sharded = nn.ModuleDict({"up": up, "down": down})
    assert_equals_twin(group, sharded, whole, [hostile_values(5, 8, seed=1)], run=run, run_twin=run_twin)


if __name__ == "__main__":
    for size in (1, 2, 3, 4):
        run_ranks(size, check)
        print(f"tp={size}: outputs, input gradients, every parameter gradient and gradient norm equal the twin's")
