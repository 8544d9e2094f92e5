"""Under torch.compile the boundary and the collectives stay opaque: the same bits, the same record, one graph, no recompilation."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tp_residual.kernels.contract import NormSpec
from tp_residual.parallel.collectives import invariant_to_column_input, partial_to_invariant
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.linear import ColumnParallelLinear, RowParallelLinear
from tp_residual.parallel.partial import Partial
from tp_residual.parallel.splits import Split
from tp_residual.residual.boundary import Boundary
from tp_residual.residual.norms import RMSNorm
from tp_residual.residual.stream import Stream
from tp_residual.testing import expect_collectives, hostile_values, hostile_weights_, run_ranks

HIDDEN, INNER, TOKENS = 24, 40, 5


class LinearLayer(nn.Module):
    """norm, column, row, write: only GEMMs between the boundaries, so that a compiler has nothing of its own to round differently."""

    def __init__(self, group: TensorParallelGroup, *, sequence_parallel: bool) -> None:
        super().__init__()
        features = Split.even(INNER, group.size)
        self.norm = RMSNorm(HIDDEN, NormSpec(1e-5), group, partial_gradient=sequence_parallel)
        self.up = ColumnParallelLinear(HIDDEN, {"up": features}, group)
        self.down = RowParallelLinear(features, HIDDEN, group, bias=True, sequence_parallel=sequence_parallel)

    def forward(self, stream: Stream) -> Stream:
        x, stream = stream.read(self.norm)
        return stream.write(self.down(self.up(x)))


def run(layers: nn.ModuleList, boundary: Boundary, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    stream = Stream.start(Partial(value, boundary.group, "embed"), boundary)
    for layer in layers:
        stream = layer(stream)
    y, stream = stream.read(layers[0].norm)
    assert stream.residual is not None
    return stream.residual, y


def compile_body(group: TensorParallelGroup) -> None:
    for sequence_parallel in (False, True):
        layers = nn.ModuleList(LinearLayer(group, sequence_parallel=sequence_parallel) for _ in range(2))
        hostile_weights_(layers, seed=group.rank)
        boundary = Boundary(group, "reference", sequence_parallel=sequence_parallel)
        per_boundary = {"reduce_scatter": 3, "all_gather": 3} if sequence_parallel else {"all_reduce": 3}

        torch._dynamo.reset()
        compiled = torch.compile(run, fullgraph=True, backend="inductor")
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
            for call in range(3):
                value = hostile_values(TOKENS, HIDDEN, seed=call, rank=group.rank, dtype=torch.float32)
                with expect_collectives(group, **per_boundary):
                    got = compiled(layers, boundary, value)
                for ours, eager in zip(got, run(layers, boundary, value), strict=True):
                    assert torch.equal(ours, eager)

        torch._dynamo.reset()
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")  # the backward is traced as well
        gradients = []
        for function in (compiled, run):
            layers.zero_grad()
            value = hostile_values(TOKENS, HIDDEN, seed=7, rank=group.rank, dtype=torch.float32).requires_grad_()
            residual, y = function(layers, boundary, value)
            cotangents = [
                hostile_values(*t.shape, seed=8 + i, rank=group.rank, dtype=torch.float32)
                for i, t in enumerate((residual, y))
            ]
            torch.autograd.backward((residual, y), cotangents)
            gradients.append([value.grad, *(parameter.grad.clone() for parameter in layers.parameters())])
        for ours, eager in zip(*gradients, strict=True):
            assert torch.equal(ours, eager)

    def moves(x: torch.Tensor) -> torch.Tensor:
        return partial_to_invariant(Partial(invariant_to_column_input(x, group, tag="in") * 3, group, "row"), tag="out")

    x = hostile_values(TOKENS, HIDDEN, seed=3, dtype=torch.float32).requires_grad_()
    (eager_grad,) = torch.autograd.grad(moves(x).sum(), x)
    compiled_moves = torch.compile(moves, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled_moves(x), moves(x))
    assert torch.equal(torch.autograd.grad(compiled_moves(x).sum(), x)[0], eager_grad)


def opcheck_body(group: TensorParallelGroup) -> None:
    for sequence_parallel in (False, True):
        boundary = Boundary(group, "reference", sequence_parallel=sequence_parallel)
        local = boundary.token_split(TOKENS).size(group.rank)
        values = [
            hostile_values(*shape, seed=i, rank=group.rank, dtype=torch.float32).requires_grad_()
            for i, shape in enumerate([(local, HIDDEN), (TOKENS, HIDDEN), (HIDDEN,), (HIDDEN,)])
        ]
        arguments = (*values, None, TOKENS, local, boundary.handle, "gathered", "rms", 1e-5, 0.0, False, "tag")
        torch.library.opcheck(torch.ops.tp_residual.boundary.default, arguments)
    x = hostile_values(4, 6, seed=1, rank=group.rank, dtype=torch.float32).requires_grad_()
    for name, sizes in (
        ("partial_to_invariant", []),
        ("invariant_to_column_input", []),
        ("partial_to_shard", [3, 1]),
        ("invariant_to_shard", [3, 1]),
    ):
        torch.library.opcheck(
            getattr(torch.ops.tp_residual, name).default, (x, group.handle, group.rank, "tag", 0, sizes, True)
        )
    shard = x[: [3, 1][group.rank]].detach().requires_grad_()
    for name in ("shard_to_column_input", "shard_to_invariant"):
        torch.library.opcheck(
            getattr(torch.ops.tp_residual, name).default, (shard, group.handle, group.rank, "tag", 0, [3, 1], True)
        )


def check(name: str) -> None:
    # torch's compiler warns about its own internals; warnings of ours are errors everywhere else
    run_ranks(2, globals()[name], timeout_s=240, warning_filter="ignore")


@pytest.mark.slow
@pytest.mark.parametrize("body", ["compile_body", "opcheck_body"])
@pytest.mark.timeout(300)
def test_compiled_streams_keep_their_bits_and_their_record(body: str, tmp_path: Path) -> None:
    """In a process of its own: the shape checks that these tests install wrap dataclasses in code that cannot be traced.

    Twice: the second time, each rank finds in the compiler's cache on disk what the other rank has compiled.
    """
    code = f"import test_compile; test_compile.check({body!r})" + f"; test_compile.check({body!r})" * (
        body == "compile_body"
    )
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    outcome = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
