"""Symmetric memory between real GPUs: torchrun --standalone --nproc-per-node N tests/multi_gpu_symmetric.py

Bitwise against the contract: every form, dtype and layout, ragged and long inputs, late ranks, 2,000 calls in a row, replays of a CUDA
graph.
Exits with 0 and a line when there are fewer than two CUDA devices.
"""

import itertools
import os
import random
import sys

import torch
import torch.distributed as dist

from tp_residual.kernels.contract import AddNormSpec, NormSpec, add_norm
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.splits import Split
from tp_residual.parallel.symmetric import SymmetricTransport, open_symmetric

RMS, LAYER = NormSpec(1e-5), NormSpec(1e-6, "layer")


def values(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: str) -> torch.Tensor:
    """The same on every rank for a seed; magnitudes spread so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(random.Random(seed).getrandbits(40))
    powers = torch.randint(-3, 3, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * 10.0**powers).to(device, dtype)


def rank_order_sum(xs: list[torch.Tensor]) -> torch.Tensor:
    total = xs[0].float()
    for x in xs[1:]:
        total = total + x.float()
    return total


def check(
    group: TensorParallelGroup, wire: SymmetricTransport, spec: AddNormSpec, tokens: int, hidden: int, sharded: bool
) -> None:
    device, dtype = group.device, spec.output_dtype
    xs = [values((tokens, hidden), dtype, device, f"x {tokens} {hidden} {rank}") for rank in range(group.size)]
    residual = values((tokens, hidden), spec.stream_dtype, device, f"residual {tokens} {hidden}")
    weight, bias = (values((hidden,), dtype, device, f"{name} {hidden}") for name in ("weight", "bias"))
    norm_bias = bias if spec.norm == LAYER else None
    expected, expected_y = add_norm(
        spec, residual, rank_order_sum(xs), update_bias=bias, weight=weight, norm_bias=norm_bias
    )
    own = slice(*Split.ceil_chunks(tokens, group.size).ranges[group.rank]) if sharded else slice(0, tokens)
    stream, normed = wire.reduce_add_norm(
        spec, xs[group.rank], local_tokens=own.stop - own.start if sharded else None,
        residual=residual[own].contiguous(), bias=bias, weight=weight, norm_bias=norm_bias,
    )  # fmt: skip
    label = (spec, tokens, hidden, sharded, wire.crossover_bytes)
    assert torch.equal(stream, expected[own]), label
    assert normed is not None and torch.equal(normed, expected_y), label


def check_graph(group: TensorParallelGroup, wire: SymmetricTransport) -> None:
    """An odd number of calls, so that a replay begins in the other slot than the one before it."""
    x = values((4, 4096), torch.bfloat16, group.device, f"graph {group.rank}")
    weight = torch.ones(4096, dtype=torch.bfloat16, device=group.device)
    spec = AddNormSpec(torch.bfloat16, torch.bfloat16, RMS)
    wire.reduce_add_norm(spec, x, weight=weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            stream, _ = wire.reduce_add_norm(spec, x, weight=weight)
    for turn in range(20):
        xs = [values((4, 4096), torch.bfloat16, group.device, f"graph {turn} {rank}") for rank in range(group.size)]
        x.copy_(xs[group.rank])
        if (turn + group.rank) % 3 == 0:
            torch.cuda._sleep(10_000_000)
        graph.replay()
        assert torch.equal(stream, rank_order_sum(xs).bfloat16()), turn
    wire.check()


def main() -> None:
    if torch.cuda.device_count() < 2:
        print(f"skipped: {torch.cuda.device_count()} CUDA devices, needs 2")
        return
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = TensorParallelGroup.from_world(device=device)
    wire = open_symmetric(group)
    if isinstance(wire, str):
        sys.exit(f"no symmetric memory: {wire}")
    bf16, fp32 = torch.bfloat16, torch.float32
    late = random.Random(group.rank)
    for crossover in (0.0, 1e12):  # always two-shot, always one-shot
        wire.crossover_bytes = crossover
        for spec, (tokens, hidden), sharded in itertools.product(
            (AddNormSpec(bf16, bf16, RMS), AddNormSpec(fp32, bf16, RMS), AddNormSpec(fp32, fp32, LAYER)),
            ((1, 4096), (5, 576), (7, 100), (257, 2880), (3, 16384), (9000, 4096), (1, 1)),
            (False, True),
        ):
            if late.random() < 0.3:
                torch.cuda._sleep(20_000_000)
            check(group, wire, spec, tokens, hidden, sharded)
    x = values((8, 4096), bf16, device, f"many {group.rank}")
    expected = rank_order_sum(
        [values((8, 4096), bf16, device, f"many {rank}") for rank in range(group.size)]
    ).bfloat16()
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(2000):
        if late.random() < 0.05:
            torch.cuda._sleep(1_000_000)
        wrong += (wire.all_reduce(x) != expected).sum()
    assert wrong.item() == 0, f"{wrong.item()} elements in 2,000 all-reduces"
    rows = values((16 * group.size, 100), bf16, device, f"rows {group.rank}")
    everybody = [values((16 * group.size, 100), bf16, device, f"rows {rank}") for rank in range(group.size)]
    own = slice(16 * group.rank, 16 * (group.rank + 1))
    assert torch.equal(wire.reduce_scatter(rows), rank_order_sum(everybody).bfloat16()[own])
    assert torch.equal(wire.all_gather(rows), torch.cat(everybody))
    check_graph(group, wire)
    torch.cuda.synchronize()
    wire.check()
    group.share("done", "")  # nobody unmaps what a peer still reads
    if group.rank == 0:
        print(f"{group.size} ranks: everything bitwise equal to the contract")
    group.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
