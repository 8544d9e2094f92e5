"""Weights from a seed instead of a checkpoint: to measure and to verify a model of which there is only a config.json.

Each element is a pure function of (seed, tensor name, its index in the whole tensor), so the full weights have the same bits at any tp
size, and each rank fills its own share where it lies.
"""

import zlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from tp_residual.checkpoint.load import LoadReport
from tp_residual.parallel.blocks import ParameterBlock

STD = 0.02  # of matrices and biases, as most models are initialised; norm weights lie around one
_CHUNK_ELEMENTS = 1 << 20  # bounds the int64 temporaries to 8 MB each


@torch.no_grad()
def fill_random(
    blocks: Iterable[ParameterBlock], seed: int, *, progress: Callable[[int, int], None] | None = None
) -> LoadReport:
    """Fill every block; nothing is read. Uniform values: exact in every dtype's rounding, equal on every device."""
    blocks = list(blocks)
    total = sum(block.of(block.parameter).numel() * block.parameter.element_size() for block in blocks)
    done = 0
    for block in blocks:
        target = block.of(block.parameter)
        rows_per_chunk = max(1, _CHUNK_ELEMENTS // max(1, target[:1].numel()))
        for first in range(0, target.shape[0], rows_per_chunk):
            piece = target[first : first + rows_per_chunk]
            piece.copy_(_values(block, first, piece.shape, seed, piece.device))
            done += piece.numel() * piece.element_size()
            if progress is not None:
                progress(done, total)
    held = {id(block.parameter): block.parameter.untyped_storage().nbytes() for block in blocks}
    return LoadReport(len({block.name for block in blocks}), 0, sum(held.values()), {})


def _values(block: ParameterBlock, first: int, shape: torch.Size, seed: int, device: torch.device) -> Tensor:
    """The values of rows [first, first + shape[0]) of a block, by their indices in the whole tensor."""
    starts = [0] * len(shape)
    starts[block.dim] = block.globe[0]
    starts[0] += first
    index = torch.zeros(shape, dtype=torch.int64, device=device)
    for axis, (start, size) in enumerate(zip(starts, shape, strict=True)):
        stride = 1
        for inner in block.global_shape[axis + 1 :]:
            stride *= inner
        positions = torch.arange(start, start + size, device=device) * stride
        index += positions.view(-1, *(1,) * (len(shape) - 1 - axis))
    uniform = _mix(index ^ _key(seed, block.name)) * 2.0**-23 - 1.0  # 24 bits: exact in fp32, in [-1, 1)
    if len(block.global_shape) == 1 and not block.name.endswith("bias"):
        return 1.0 + 0.1 * uniform
    return (3**0.5 * STD) * uniform


def _key(seed: int, name: str) -> int:
    mixed = (seed * 0x9E3779B97F4A7C15 + zlib.crc32(name.encode()) * 0xD1B54A32D192ED03) & (1 << 64) - 1
    return mixed - (1 << 64) if mixed >= 1 << 63 else mixed


def _mix(x: Tensor) -> Tensor:
    """Bits of x spread over 24 (the finaliser of splitmix64, in wrapping int64), as fp32."""
    x = x + -0x61C8864680B583EB
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    x = x ^ (x >> 31 & (1 << 33) - 1)
    return (x >> 40 & (1 << 24) - 1).float()
