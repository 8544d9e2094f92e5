"""Weights from a seed instead of a checkpoint: to measure and to verify a model of which there is only a config.json, or to train one.

Each element is a pure function of (seed, tensor name, its index in the whole tensor), so the full weights have the same bits at any tp
size, and each rank fills its own share where it lies.
"""

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tp_residual.checkpoint.load import LoadReport
from tp_residual.parallel.blocks import ParameterBlock

STD = 0.02  # of matrices and biases, as most models are initialised; norm weights lie around one
_NORMAL_STREAMS = (0, 0x2545F4914F6CDD1D, 0x5851F42D4C957F2D)  # apart in many bits
_CHUNK_ELEMENTS = 1 << 20  # bounds the int64 temporaries to 8 MB each


@dataclass(frozen=True)
class Fill:
    """What a tensor is filled with: `mean + scale * z`, a constant where scale is 0.

    uniform: z in [-1, 1), in 2**24 steps. normal: z of variance one, the sum of twelve uniforms less its mean. That has no values beyond
    6 and is exact in fp32, where a logarithm or a cosine would have other bits in a vector's tail, so at another tp size.
    """

    mean: float = 0.0
    scale: float = 0.0
    kind: Literal["normal", "uniform"] = "normal"


def wide_uniform(block: ParameterBlock) -> Fill:
    """Standard deviation STD, norm weights around one: no two weights alike, and good for a forward pass of any depth."""
    if len(block.global_shape) == 1 and not block.name.endswith("bias"):
        return Fill(1.0, 0.1, "uniform")
    return Fill(0.0, 3**0.5 * STD, "uniform")


@torch.no_grad()
def fill_random(
    blocks: Iterable[ParameterBlock],
    seed: int,
    *,
    rule: Callable[[ParameterBlock], Fill] = wide_uniform,
    progress: Callable[[int, int], None] | None = None,
) -> LoadReport:
    """Fill every block; nothing is read. rule: from the block's name and global shape alone, so that all holders agree."""
    blocks = list(blocks)
    total = sum(block.of(block.parameter).numel() * block.parameter.element_size() for block in blocks)
    done = 0
    for block in blocks:
        target, fill = block.of(block.parameter), rule(block)
        rows_per_chunk = max(1, _CHUNK_ELEMENTS // max(1, target[:1].numel()))
        for first in range(0, target.shape[0], rows_per_chunk):
            piece = target[first : first + rows_per_chunk]
            piece.copy_(_values(block, fill, first, piece.shape, seed, piece.device))
            done += piece.numel() * piece.element_size()
            if progress is not None:
                progress(done, total)
    held = {id(block.parameter): block.parameter.untyped_storage().nbytes() for block in blocks}
    return LoadReport(len({block.name for block in blocks}), 0, sum(held.values()), {})


def _values(
    block: ParameterBlock, fill: Fill, first: int, shape: torch.Size, seed: int, device: torch.device
) -> Tensor:
    """The values of rows [first, first + shape[0]) of a block, by their indices in the whole tensor."""
    if fill.scale == 0:
        return torch.full(shape, fill.mean, device=device)
    starts = [0] * len(shape)
    starts[block.dim] = block.globe[0]
    starts[0] += first
    counter = element_index(starts, shape, block.global_shape, device) ^ stream_key(seed, block.name)
    if fill.kind == "normal":
        return fill.mean + fill.scale * _normal(counter)
    uniform = uniform_bits(counter).float() * 2.0**-23 - 1.0  # exact in fp32, in [-1, 1)
    return fill.mean + fill.scale * uniform


def element_index(
    starts: Sequence[int], shape: Sequence[int], global_shape: Sequence[int], device: torch.device
) -> Tensor:
    """For each element of a part `shape`, cut out of a tensor of global_shape at `starts`, its position in the whole, row by row."""
    index = torch.zeros(tuple(shape), dtype=torch.int64, device=device)
    for axis, (start, size) in enumerate(zip(starts, shape, strict=True)):
        stride = math.prod(global_shape[axis + 1 :])
        positions = torch.arange(start, start + size, device=device) * stride
        index += positions.view(-1, *(1,) * (len(shape) - 1 - axis))
    return index


def stream_key(seed: int, name: str) -> int:
    """As a signed 64-bit integer, which torch can take."""
    mixed = (seed * 0x9E3779B97F4A7C15 + zlib.crc32(name.encode()) * 0xD1B54A32D192ED03) & (1 << 64) - 1
    return mixed - (1 << 64) if mixed >= 1 << 63 else mixed


def mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), in wrapping int64."""
    x = x + -0x61C8864680B583EB
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & (1 << 33) - 1)


def uniform_bits(counter: Tensor) -> Tensor:
    """24 bits of the mixed counter, from 0 up."""
    return mix(counter) >> 40 & (1 << 24) - 1


def _normal(counter: Tensor) -> Tensor:
    """Twelve 16-bit integers, four from each of three hashes. Their sum is exact in fp32, its standard deviation 2**16 to 1e-9."""
    total = torch.zeros_like(counter)
    for stream in _NORMAL_STREAMS:
        bits = mix(counter ^ stream)
        for shift in (0, 16, 32, 48):
            total += bits >> shift & 0xFFFF
    return (total - 6 * 0xFFFF).float() * 2.0**-16
