"""What does fusing the residual add and the norm buy? One kernel against the separate operations it replaces, beside a copy.

Every form computes the same: `new = residual + update; y = rms_norm(new) * weight`, of rows `[tokens, hidden]`. The least traffic is four
passes (residual and update in, both results out); each form's own passes are counted as it is written.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from tp_residual.bench.bandwidth import copy_of, gemm_peak
from tp_residual.bench.request import ShapesRequest
from tp_residual.bench.results import Row
from tp_residual.bench.shapes import NORM, operand, wrong_elements
from tp_residual.bench.timing import Candidate, Clock, Progress
from tp_residual.kernels import contract, cpu
from tp_residual.kernels.add_norm import Order, add_norm, implementation

LIMIT = "one copy that moves the bytes of four passes, on every rank at once"
FEWEST_PASSES = 4
FLOPS = 5  # of each element: add, square, sum, times the inverse root, times the weight

Form = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # (residual, update, weight) -> (new residual, normed)


@dataclass(frozen=True)
class _Form:
    """passes: over `[tokens, hidden]` in the operands' dtype, when nothing stays in a cache."""

    name: str
    order: str
    run: Form
    passes: Callable[[int], float]  # of the element size
    ours: bool = False


def _separate(residual: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """As model code without any fusion is written."""
    new = residual + update
    wide = new.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + NORM.eps)
    return new, (normed * weight).to(new.dtype)


def _into(spec: contract.AddNormSpec) -> Form:
    """Results go where the last ones went, as an engine's do: fresh memory of this size is paid for page by page."""
    kept: dict[torch.Size, tuple[Tensor, Tensor]] = {}

    def form(residual: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        if residual.shape not in kept:
            kept.clear()
            kept[residual.shape] = (
                torch.empty_like(residual, dtype=spec.stream_dtype),
                torch.empty_like(residual, dtype=spec.output_dtype),
            )
        stream, normed = kept[residual.shape]
        add_norm(spec, residual, update, weight=weight, residual_out=stream, normed_out=normed)
        return stream, normed

    return form


def _add_then_norm(residual: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    new = residual + update
    return new, F.rms_norm(new, new.shape[-1:], weight, NORM.eps)


def _both(results: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor]:
    new, normed = results
    assert normed is not None
    return new, normed


def forms(dtype: torch.dtype, *, compiled: bool) -> tuple[list[_Form], list[str]]:
    """Every form that is here, and what is not."""
    spec = contract.AddNormSpec(dtype, dtype, NORM)

    def fused(order: Order) -> Form:
        return lambda residual, update, weight: _both(add_norm(spec, residual, update, weight=weight, order=order))

    notes, orders = [], get_args(Order)
    found = [_Form("fused", order, fused(order), lambda _: FEWEST_PASSES, True) for order in orders]
    found.append(_Form("fused, into", "contract", _into(spec), lambda _: FEWEST_PASSES, True))
    found.append(_Form("add, rms_norm", "fast", _add_then_norm, lambda _: 5))
    # add 3; widen 1 + f; square 2f; mean f; times the root 2f; times the weight 2f; narrow f + 1, with f = 4 bytes / element size
    found.append(_Form("separate", "fast", _separate, lambda size: 5 + 9 * 4 / size))
    if compiled:
        found.append(_Form("torch.compile", "fast", torch.compile(_separate, dynamic=False), lambda _: FEWEST_PASSES))
    else:
        notes.append("torch.compile: add --compile (its first call takes 10 s or more)")
    return found, notes


def measure_add_norm(clock: Clock, request: ShapesRequest, progress: Progress) -> tuple[list[Row], list[str], Row]:
    """`(rows, notes, roof)`: a row for each dtype, shape and form; roof has the machine's TFLOP_s in fp32.

    Contract order must equal the contract in every bit, the others within rounding: VerificationFailed before anything is timed.
    """
    rows: list[Row] = []
    notes: list[str] = []
    if clock.device.type == "cpu" and (reason := cpu.unavailable()):
        notes.append(f"the compiled kernels, so that `fused` is plain torch: {reason}")
    shapes = [(tokens, hidden) for hidden in request.hidden for tokens in request.tokens]
    for number, name in enumerate(request.dtypes):
        found, missing = forms(getattr(torch, name), compiled=request.compiled)
        notes += [note for note in missing if note not in notes]
        for done, (tokens, hidden) in enumerate(shapes):
            progress(number * len(shapes) + done, len(request.dtypes) * len(shapes), f"{tokens} x {hidden} {name}")
            rows += _one_shape(clock, found, tokens, hidden, name)
    return rows, notes, {"TFLOP_s": gemm_peak(clock, torch.float32)}


def _one_shape(clock: Clock, found: list[_Form], tokens: int, hidden: int, name: str) -> list[Row]:
    dtype, device, rank = getattr(torch, name), clock.device, clock.group.rank
    residual = operand("residual", tokens, hidden, dtype, device, rank)
    update = operand("partial", tokens, hidden, dtype, device, rank)
    weight = operand("weight", 1, hidden, dtype, device)
    spec = contract.AddNormSpec(dtype, dtype, NORM)
    ours = implementation(spec, residual, (residual, update, weight))
    expected = contract.add_norm(spec, residual, update, weight=weight)
    payload = residual.numel() * residual.element_size()
    candidates = {"limit": copy_of(FEWEST_PASSES * payload, device)}
    for form in found:
        label = f"{form.name} ({form.order})"
        wrong = 0
        for result, right in zip(form.run(residual, update, weight), expected, strict=True):
            assert right is not None
            wrong += wrong_elements(result, right, bitwise=form.order == "contract")
        clock.require_correct(f"{label}, {tokens} x {hidden} {name}", wrong)
        candidates[label] = Candidate(partial(form.run, residual, update, weight))
    samples = clock.interleaved(candidates)
    rows = []
    for form in found:
        measured = samples[f"{form.name} ({form.order})"]
        counted, us = form.passes(residual.element_size()), measured.percentile(50)
        rows.append(
            {
                "form": form.name,
                "order": form.order,
                "tokens": tokens,
                "hidden": hidden,
                "dtype": name,
                "ranks": clock.group.size,
                "implementation": ours if form.ours else "torch",
                "bytes": payload,
                "passes": counted,
                "least_bytes": FEWEST_PASSES * payload,
                "form_bytes": round(counted * payload),
                "useful_GB_s": FEWEST_PASSES * payload / us / 1e3,
                "GFLOP_s": FLOPS * residual.numel() / us / 1e3,
                **clock.fields(measured, LIMIT, samples["limit"]),
            }
        )
    return rows
