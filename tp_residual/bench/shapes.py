"""What the boundary and add+norm benchmarks share: operands by rank, and when a result is right."""

import torch
from torch import Tensor

from tp_residual.kernels.contract import NormSpec, widen
from tp_residual.testing.hostile import hostile_values

NORM = NormSpec(eps=1e-6)
# Each is rounded at most twice on the way (sum and residual, or norm and weight), and an fp32 row sum may be in any order.
_TOLERANCE_EPS = 4.0


def operand(kind: str, tokens: int, hidden: int, dtype: torch.dtype, device: torch.device, rank: int = 0) -> Tensor:
    """`partial` differs by rank, `residual` and `weight` (one row) are everybody's."""
    seed = {"partial": 1, "residual": 2, "weight": 3}[kind]
    values = hostile_values(tokens, hidden, seed=seed, rank=rank, dtype=dtype)
    return (values[0] if kind == "weight" else values).to(device)


def wrong_elements(found: Tensor, expected: Tensor, *, bitwise: bool) -> int:
    """Elements that differ in any bit; or, of another order of summation, those of tokens whose relative error is beyond rounding."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return max(1, expected.numel())
    if bitwise:
        return int((found != expected).sum()) + int(found.isnan().sum())
    error = (widen(found) - widen(expected)).norm(dim=-1) / widen(expected).norm(dim=-1)
    beyond = ~(error <= _TOLERANCE_EPS * torch.finfo(expected.dtype).eps)  # a NaN is not within
    return int(beyond.sum()) * expected.shape[-1]
