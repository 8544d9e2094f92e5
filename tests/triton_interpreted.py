"""Add+norm's Triton kernels in Triton's interpreter, on CPU. Run with TRITON_INTERPRET=1: it is read when a kernel is decorated.

Prints one JSON object: for each check below, how many comparisons it made and the first failure or null.
"""

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from tp_residual.kernels import add_norm as public
from tp_residual.kernels import contract, triton_add_norm_backward
from tp_residual.kernels.add_norm_operands import Operands
from tp_residual.kernels.add_norm_triton import add_norm_launch
from tp_residual.kernels.contract import AddNormSpec, NormSpec
from tp_residual.kernels.triton_add_norm_backward import add_norm_backward_launches

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SMALL = (1, 2, 3, 8, 64, 100, 576, 896, 1024)
LARGE = (2880, 4096, 16384)


def random(*shape: int, seed: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3 + 0.7).to(dtype)


def operands_of(
    tokens: int, hidden: int, spec: AddNormSpec, *, stream: torch.dtype, update: torch.dtype, weights: torch.dtype
) -> Operands:
    """All that the spec can use, different in each element."""
    inner, outer = spec.update_norm is not None, spec.norm is not None
    parameters = [random(hidden, seed=3 + i, dtype=weights) for i in range(5)]
    wanted = (True, inner, inner and spec.update_norm.kind == "layer", outer, outer and spec.norm.kind == "layer")  # type: ignore[union-attr]
    return Operands(
        random(tokens, hidden, seed=1, dtype=stream),
        random(tokens, hidden, seed=2, dtype=update),
        *(t if want else None for t, want in zip(parameters, wanted, strict=True)),
    )


def meaning(spec: AddNormSpec, operands: Operands) -> tuple[torch.Tensor, torch.Tensor | None]:
    return contract.add_norm(spec, operands.residual, operands.update, **operands.parameters())


def poisoned(tokens: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((tokens, hidden), float("nan"), dtype=dtype)


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal values, zeros of either sign told apart, any NaN for any NaN."""
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return False
    integer = torch.int32 if got.dtype is FP32 else torch.int16
    bits_equal = got.contiguous().view(integer) == expected.contiguous().view(integer)
    return bool((bits_equal | (got.isnan() & expected.isnan())).all())


def launch(spec: AddNormSpec, operands: Operands, *, fast: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    tokens, hidden = operands.rows.shape
    new_residual = poisoned(tokens, hidden, spec.stream_dtype)
    normed = None if spec.norm is None else poisoned(tokens, hidden, spec.output_dtype)
    add_norm_launch(spec, operands, new_residual, normed, fast=fast).run()
    return new_residual, normed


def differs(spec: AddNormSpec, operands: Operands) -> str | None:
    got, expected = launch(spec, operands), meaning(spec, operands)
    for name, ours, theirs in zip(("new residual", "normed"), got, expected, strict=True):
        if (ours is None) != (theirs is None) or (ours is not None and not same_bits(ours, theirs)):
            return f"{name} differs: {list(operands.rows.shape)}, {spec}"
    return None


RMS = NormSpec(1e-6)
SPECS = {
    "rms": AddNormSpec(BF16, BF16, RMS),
    "offset": AddNormSpec(FP16, FP16, NormSpec(1e-5, weight_offset=1.0)),
    "after_cast": AddNormSpec(BF16, BF16, NormSpec(1e-5, weight_after_cast=True)),
    "after_cast_layer": AddNormSpec(FP16, BF16, NormSpec(1e-5, "layer", weight_after_cast=True)),
    "layer": AddNormSpec(FP32, FP32, NormSpec(1e-5, "layer")),
    "fp32_stream": AddNormSpec(FP32, BF16, RMS),
    "sandwich": AddNormSpec(BF16, BF16, RMS, NormSpec(1e-5, "layer", 0.25), 0.3, 1.7, BF16),
    "sandwich_rms": AddNormSpec(FP32, FP16, NormSpec(1e-6, "layer"), NormSpec(1e-5), 0.3, 1.0, FP16),
    "add": AddNormSpec(BF16, BF16, None),
    "add_scaled": AddNormSpec(FP32, BF16, None, None, 0.3, 1.7, BF16),
}


def check_every_spec() -> Iterator[str | None]:
    for spec in SPECS.values():
        for hidden in (3, 100, 896, 1024, 1500):
            other = BF16 if spec.stream_dtype is FP32 else FP32
            for update, weights in ((spec.stream_dtype, spec.output_dtype), (other, FP32)):
                yield differs(
                    spec, operands_of(3, hidden, spec, stream=spec.stream_dtype, update=update, weights=weights)
                )


def check_every_size() -> Iterator[str | None]:
    for hidden in SMALL + LARGE:
        # more rows than one program takes, in a ragged last one, where a program takes several
        tokens = {1: 1030, 2: 600, 3: 300, 8: 131, 64: 19, 100: 9}.get(hidden, 1 if hidden > 8192 else 2)
        for name in ("rms", "sandwich", "layer"):
            spec = SPECS[name]
            yield differs(spec, operands_of(tokens, hidden, spec, stream=spec.stream_dtype, update=BF16, weights=BF16))


def check_subsets() -> Iterator[str | None]:
    """Residual alone, update alone, each with and without a norm."""
    for hidden in (100, 1024):
        for spec in (SPECS["rms"], SPECS["add"], replace(SPECS["rms"], skip_scale=0.5, update_scale=2.5)):
            every = operands_of(3, hidden, spec, stream=BF16, update=FP32, weights=BF16)
            yield differs(spec, every._replace(update=None, update_bias=None))
            yield differs(spec, every._replace(residual=None))
            yield differs(spec, every._replace(residual=None, update_bias=None))
        # a norm alone writes no residual
        residual, weight = random(3, hidden, seed=1, dtype=BF16), random(hidden, seed=2)
        normed = poisoned(3, hidden, BF16)
        add_norm_launch(SPECS["rms"], Operands(residual, None, weight=weight), None, normed, fast=False).run()
        equal = same_bits(normed, contract.norm(residual, weight, None, RMS, BF16))
        yield None if equal else f"a norm alone differs at {hidden}"


def check_strided_rows() -> Iterator[str | None]:
    """Column slices of wider buffers, any alignment, rows repeated by a zero stride; neighbours of an output stay as they were."""
    spec = SPECS["rms"]
    for hidden, width, offset in ((64, 72, 0), (64, 67, 1), (576, 1152, 576), (1024, 1036, 4), (1500, 1501, 1)):
        tokens = 5
        weight = random(hidden, seed=4, dtype=BF16)
        residual = random(tokens, width, seed=1, dtype=BF16)[:, offset : offset + hidden]
        for update in (
            random(tokens, width + 3, seed=2, dtype=BF16)[:, :hidden],
            random(1, hidden, seed=3, dtype=BF16).expand(tokens, hidden),
        ):
            operands = Operands(residual, update, weight=weight)
            buffers = [poisoned(tokens, width, BF16), poisoned(tokens, width + 1, BF16)]
            new_residual, normed = (buffer[:, offset : offset + hidden] for buffer in buffers)
            add_norm_launch(spec, operands, new_residual, normed, fast=False).run()
            expected = meaning(spec, operands)
            equal = all(same_bits(a, b) for a, b in zip((new_residual, normed), expected, strict=True))  # type: ignore[arg-type]
            yield None if equal else f"strided rows differ: {hidden} of {width} at {offset}"
            new_residual.fill_(float("nan"))
            normed.fill_(float("nan"))
            clean = all(bool(buffer.isnan().all()) for buffer in buffers)
            yield None if clean else f"written beside the rows: {hidden} of {width} at {offset}"


def check_in_place() -> Iterator[str | None]:
    for hidden in (8, 100, 896, 2048):
        for stream in (BF16, FP32):
            spec = AddNormSpec(stream, BF16, RMS)
            operands = operands_of(7, hidden, spec, stream=stream, update=BF16, weights=BF16)._replace(update_bias=None)
            expected = meaning(spec, operands)
            add_norm_launch(spec, operands, operands.residual, operands.update, fast=False).run()
            equal = same_bits(operands.residual, expected[0]) and same_bits(operands.update, expected[1])  # type: ignore[arg-type]
            yield None if equal else f"in place differs at {hidden}, {stream}"


def check_special_values() -> Iterator[str | None]:
    """Ties, overflow, subnormals, infinities, NaN, and a row of zeros."""
    hidden = 64
    for stream in (BF16, FP16, FP32):
        spec = AddNormSpec(stream, stream, RMS)
        residual = random(9, hidden, seed=1) * torch.logspace(-44, 44, hidden)[None]
        residual[1:3] = 0.0
        residual[2, ::2] = -0.0
        residual[3, 5], residual[4, 6], residual[5, 7] = float("inf"), float("-inf"), float("nan")
        residual[5, 9] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(
            FP32
        )  # rounded like a number, it becomes a zero
        ties = (
            torch.arange(hidden, dtype=FP32) * 2.0**-8 + 1.0 + 2.0**-9
        )  # half-way between neighbours in bf16, below and above 1.25
        residual[6], residual[7] = ties, -ties
        residual[8] = 1 + torch.arange(hidden, dtype=FP32) * 2.0**-11  # the same in fp16
        operands = Operands(residual, torch.zeros(9, hidden), weight=random(hidden, seed=2))
        yield differs(spec, operands)
        yield differs(replace(spec, norm=NormSpec(1e-6, "layer")), operands)


def check_fast_order() -> Iterator[str | None]:
    """Close to fp64, and a row's bits do not depend on the rows beside it."""
    for hidden in (8, 100, 1024, 2880):
        for kind in ("rms", "layer"):
            spec = AddNormSpec(FP32, FP32, NormSpec(1e-5, kind))
            operands = operands_of(5, hidden, spec, stream=FP32, update=FP32, weights=FP32)
            wide = Operands(*(None if t is None else t.double() for t in operands))
            expected = meaning(replace(spec, stream_dtype=torch.float64, output_dtype=torch.float64), wide)[1]
            normed = launch(spec, operands, fast=True)[1]
            error = float((normed - expected).abs().max() / expected.abs().max())
            # 1e-5: fp32 epsilon 6e-8 times the few dozen roundings of the longest chain of partial sums
            yield None if error < 1e-5 else f"fast order is off by {error:.1e} at {hidden}, {kind}"
            alone = [
                launch(spec, operands._replace(residual=r, update=u), fast=True)[1]
                for r, u in zip(operands.residual.split(1), operands.update.split(1), strict=True)
            ]
            yield None if torch.equal(torch.cat(alone), normed) else f"a row alone has other bits at {hidden}, {kind}"


def gradient_error(spec: AddNormSpec, operands: Operands, tokens: int, hidden: int) -> str | None:
    """The backward kernels against autograd through the contract in fp64."""
    cotangents = [random(tokens, hidden, seed=20 + i) for i in range(1 + (spec.norm is not None))]
    wide_spec = replace(spec, stream_dtype=torch.float64, output_dtype=torch.float64, round_update=None)
    leaves = Operands(*(None if t is None else t.double().requires_grad_() for t in operands))
    outputs = [t for t in meaning(wide_spec, leaves) if t is not None]
    given = [t for t in leaves if t is not None]
    expected = torch.autograd.grad(outputs, given, [c.double() for c in cotangents])
    out = Operands(*(None if t is None else torch.full_like(t, float("nan")) for t in operands))
    saved = operands._replace(residual=meaning(spec, operands)[0])
    d_normed = cotangents[1] if spec.norm is not None else None
    for step in add_norm_backward_launches(spec, cotangents[0], d_normed, saved, out):
        step.run()
    got = [t for t in out if t is not None]
    for ours, theirs in zip(got, expected, strict=True):
        error = float(
            (ours.double() - theirs).norm() / theirs.norm().clamp(min=1.0)
        )  # a row of one value has gradient zero
        # fp32: some hundred roundings of 6e-8; bf16: one rounding of the operands' gradient, and the stream's own rounding
        limit = 1e-5 if {t.dtype for t in operands if t is not None} == {FP32} else 2e-2
        if not error < limit:
            return f"gradient {list(ours.shape)} is off by {error:.1e}: {tokens} x {hidden}, {spec}"
    return None


def check_gradients() -> Iterator[str | None]:
    # eps 1e-2: one value alone is normed to its sign, whose gradient is nothing but rounding at a small eps
    rms, layer = NormSpec(1e-2), NormSpec(1e-2, "layer", 1.0)
    for hidden, tokens in ((1, 5), (3, 400), (100, 13), (1024, 2), (1500, 2)):
        for spec in (
            AddNormSpec(FP32, FP32, rms),
            AddNormSpec(FP32, FP32, layer),
            AddNormSpec(FP32, FP32, rms, layer, 0.3, 1.7),
            AddNormSpec(FP32, FP32, None, layer, 0.3, 1.7),
            AddNormSpec(FP32, FP32, None),
        ):
            yield gradient_error(
                spec, operands_of(tokens, hidden, spec, stream=FP32, update=FP32, weights=FP32), tokens, hidden
            )
    mixed = AddNormSpec(FP32, BF16, rms, layer, 0.3, 1.7, BF16)
    yield gradient_error(mixed, operands_of(9, 96, mixed, stream=FP32, update=BF16, weights=BF16), 9, 96)
    # a run of tiles for each program, and more programs than one step of the column sum takes
    limit = triton_add_norm_backward.MAX_PROGRAMS
    triton_add_norm_backward.MAX_PROGRAMS = 20
    spec = AddNormSpec(FP32, FP32, rms, layer, 0.3, 1.7)
    yield gradient_error(spec, operands_of(50, 1024, spec, stream=FP32, update=FP32, weights=FP32), 50, 1024)
    triton_add_norm_backward.MAX_PROGRAMS = limit


def check_public_functions() -> Iterator[str | None]:
    """The operators around the kernels, forward and backward, with Triton in the place of plain torch."""
    spec = AddNormSpec(FP32, BF16, RMS, NormSpec(1e-5), 0.3, 1.0)
    cases = (
        (spec, operands_of(5, 100, spec, stream=FP32, update=BF16, weights=FP32)),
        (SPECS["layer"], operands_of(3, 64, SPECS["layer"], stream=FP32, update=FP32, weights=FP32)),
        (SPECS["layer"], Operands(random(4, 64, seed=1).t().contiguous().t(), None, weight=random(64, seed=2))),
        (SPECS["rms"], Operands(random(0, 64, seed=1), random(0, 64, seed=1), weight=random(64, seed=2))),
    )
    plain = public.implementation
    for case, operands in cases:
        results = []
        for choice in (plain, lambda *_: "triton"):
            public.implementation = choice  # type: ignore[assignment]
            leaves = Operands(*(None if t is None else t.detach().requires_grad_() for t in operands))
            outputs = public.add_norm(case, leaves.residual, leaves.update, **leaves.parameters())
            weights = [random(*t.shape, seed=7 + i, dtype=t.dtype) for i, t in enumerate(outputs)]
            gradients = torch.autograd.grad(outputs, [t for t in leaves if t is not None], weights)
            results.append((outputs, gradients))
        public.implementation = plain
        (outputs, gradients), (triton_outputs, triton_gradients) = results
        equal = all(same_bits(a, b) for a, b in zip(outputs, triton_outputs, strict=True))
        yield None if equal else f"add_norm differs from plain torch: {case}"
        for ours, theirs in zip(triton_gradients, gradients, strict=True):
            # the same formula with sums in another order; one unit in the last place where it is rounded to bf16
            tolerance = 1e-2 if ours.dtype is BF16 else 1e-4
            close = ours.dtype == theirs.dtype and torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance)
            yield None if close else f"a gradient of add_norm differs from plain torch: {case}"


CHECKS: dict[str, Callable[[], Iterator[str | None]]] = {
    name.removeprefix("check_"): function for name, function in list(globals().items()) if name.startswith("check_")
}


def main() -> None:
    warnings.simplefilter("ignore")  # numpy's, about overflow and NaN, which are asked for
    report = {}
    for name, check in CHECKS.items():
        outcomes = list(check())
        report[name] = {"comparisons": len(outcomes), "failure": next((text for text in outcomes if text), None)}
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
