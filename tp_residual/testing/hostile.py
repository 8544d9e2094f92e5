"""Data that do not let a fault cancel itself.

A wrong collective passes a test whose inputs are equal on all ranks, symmetric, constant or ones, and memory handling
passes one whose tensors are contiguous and whose unused memory happens to be zero. Everything here is deterministic by
seed.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def hostile_values(*shape: int, seed: int, rank: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal values around 0.25, drawn anew for every seed and rank, with scales from 0.5 to 1.5 along the first
    dimension.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    if shape:
        values = values * torch.linspace(0.5, 1.5, shape[0], dtype=torch.float64).view(-1, *(1,) * (len(shape) - 1))
    return (values + 0.25).to(dtype)


def hostile_weights_(module: nn.Module, seed: int) -> None:
    """Fill every parameter: matrices of about unit gain, vectors (norm weights, biases) between 0.5 and 2.5, none of
    them equal.
    """
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            values = hostile_values(*parameter.shape, seed=seed, rank=index)
            if parameter.dim() > 1:
                values = (values - 0.25) / math.sqrt(parameter.shape[-1])
            else:
                values = 0.5 + values.abs().clamp(max=2.0)
            parameter.copy_(values)


def nan_padded(x: Tensor, rows: int = 3) -> Tensor:
    """A tensor equal to `x` that is the head of a buffer with `rows` more rows of NaN behind it."""
    padding = x.new_full((rows, *x.shape[1:]), math.nan)
    return torch.cat([x.detach(), padding])[: x.shape[0]]


def hostile_layouts(x: Tensor) -> dict[str, Tensor]:
    """Tensors of x's shape whose memory is not plain, by name; `.contiguous()` of each has the same values.

    transposed, sliced, strided: x's values, NaN in the memory between them. expanded: x's first row in every row
    (stride 0); scalar: one value everywhere, the gradient that `y.sum().backward()` sends. x has at least one
    dimension.
    """
    x = x.detach()
    order = list(range(x.dim()))[::-1]
    wider = [size + 3 for size in x.shape]
    sliced = x.new_full(wider, math.nan)[tuple(slice(2, 2 + size) for size in x.shape)]
    strided = x.new_full([2 * size for size in x.shape], math.nan)[(slice(None, None, 2),) * x.dim()]
    first = x[:1] if x.numel() else x.new_zeros((1, *x.shape[1:]))
    scalar = x.reshape(-1)[:1].view((1,) * x.dim()) if x.numel() else x.new_zeros((1,) * x.dim())
    return {
        "transposed": x.permute(order).contiguous().permute(order),
        "sliced": sliced.copy_(x),
        "strided": strided.copy_(x),
        "expanded": first.expand(x.shape),
        "scalar": scalar.expand(x.shape),
    }


@contextmanager
def nan_filled_memory() -> Iterator[None]:
    """Inside, memory that torch allocates uninitialised is full of NaN: whoever reads it before writing it is seen.

    torch's own switch, which belongs to its deterministic mode: inside, an operation without a deterministic form
    raises.
    """
    switch: Any = torch.utils.deterministic  # a module whose class has the property
    fill, mode = switch.fill_uninitialized_memory, torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")  # torch.use_deterministic_algorithms() also loads inductor
    switch.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        switch.fill_uninitialized_memory = fill
