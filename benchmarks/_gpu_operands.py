"""Operands and comparisons that the checks on kernels share, and how a check is sure that Triton's kernels are what ran."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tp_residual.kernels import add_norm as public
from tp_residual.kernels import contract
from tp_residual.kernels.add_norm_operands import Operands
from tp_residual.kernels.contract import AddNormSpec

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
NAN = float("nan")


@dataclass(frozen=True)
class Setting:
    """small: sizes for Triton's interpreter, a row of which takes milliseconds. scratch: this section's folder, deleted later."""

    device: torch.device
    small: bool
    scratch: Path


def random(*shape: int, seed: int, dtype: torch.dtype = FP32) -> Tensor:
    """On CPU; off centre and of spread 3, in fp64 before it is rounded."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=FP64) * 3 + 0.7).to(dtype)


def operands_for(
    spec: AddNormSpec,
    tokens: int,
    hidden: int,
    *,
    update: torch.dtype | None = None,
    weights: torch.dtype | None = None,
    seed: int = 0,
) -> Operands:
    """On CPU; everything the spec can use. update, weights: their dtypes, the output's unless given."""
    inner, outer = spec.update_norm, spec.norm
    parameters = [random(hidden, seed=10 * seed + 3 + i, dtype=weights or spec.output_dtype) for i in range(5)]
    used = (
        True,
        inner is not None,
        inner is not None and inner.kind == "layer",
        outer is not None,
        outer is not None and outer.kind == "layer",
    )
    return Operands(
        random(tokens, hidden, seed=10 * seed + 1, dtype=spec.stream_dtype),
        random(tokens, hidden, seed=10 * seed + 2, dtype=update or spec.output_dtype),
        *(t if use else None for t, use in zip(parameters, used, strict=True)),
    )


def to(operands: Operands, device: torch.device) -> Operands:
    return Operands(*(None if t is None else t.to(device) for t in operands))


def moved(rows: Tensor, device: torch.device) -> Tensor:
    """With its strides, which `.to` does not keep for views of a buffer."""
    if rows.stride(0) < rows.shape[1]:
        return rows[:1].to(device).expand(rows.shape)
    held = torch.empty(rows.shape[0], rows.stride(0), dtype=rows.dtype, device=device)[:, : rows.shape[1]]
    return held.copy_(rows)


def meaning(spec: AddNormSpec, operands: Operands) -> tuple[Tensor, Tensor | None]:
    return contract.add_norm(spec, operands.residual, operands.update, **operands.parameters())


def add_norm(spec: AddNormSpec, operands: Operands, **options: Any) -> tuple[Tensor, Tensor | None]:
    """The public function, which `triton_kernels` is about."""
    parameters: dict[str, Any] = operands.parameters()
    return public.add_norm(spec, operands.residual, operands.update, **parameters, **options)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """On any two devices: equal bits, where one NaN is as good as another and zeros have a sign."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    expected = expected.to(found.device)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    equal = found.contiguous().view(integer) == expected.contiguous().view(integer)
    return bool((equal | (found.isnan() & expected.isnan())).all())


def difference(
    what: str, found: tuple[Tensor, Tensor | None], expected: tuple[Tensor, Tensor | None], against: str
) -> str | None:
    for name, ours, theirs in zip(("new residual", "normed"), found, expected, strict=True):
        if ours is None or theirs is None:
            if ours is not theirs:
                return f"{what}: {name} is {'missing' if ours is None else 'too much'}"
        elif not same_bits(ours, theirs):
            wrong = int((ours.cpu() != theirs.cpu()).sum()) if ours.shape == theirs.shape else ours.numel()
            return f"{what}: {name} differs from {against} in {wrong} of {ours.numel()} elements"
    return None


@contextmanager
def triton_kernels(device: torch.device) -> Iterator[None]:
    """Inside, add+norm runs its Triton kernels: as it does by itself on CUDA, and in the interpreter on CPU.

    Raises RuntimeError where it would not.
    """
    chosen = public.implementation
    if device.type != "cuda":
        public.implementation = lambda *_: "triton"
    try:
        rows = torch.zeros(1, 8, device=device)
        if (taken := public.implementation(AddNormSpec(FP32, FP32), rows, ())) != "triton":
            raise RuntimeError(f"add_norm on {device} runs {taken!r} and not Triton's kernels; is Triton installed?")
        yield
    finally:
        public.implementation = chosen
