"""Add+norm on the device: every variant bit for bit against the contract on the CPU and on the device; gradients against fp64."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from _gpu_operands import (
    BF16,
    FP16,
    FP32,
    FP64,
    NAN,
    Setting,
    add_norm,
    difference,
    meaning,
    moved,
    operands_for,
    random,
    same_bits,
    to,
    triton_kernels,
)
from _gpu_record import Recorder
from torch import Tensor

from tp_residual.kernels import contract
from tp_residual.kernels.add_norm import fused_add_rmsnorm
from tp_residual.kernels.add_norm_operands import Operands
from tp_residual.kernels.contract import AddNormSpec, NormSpec

RMS, LAYER = NormSpec(1e-6), NormSpec(1e-5, "layer")
SPECS = {
    "rms": AddNormSpec(BF16, BF16, RMS),
    "layer": AddNormSpec(FP32, FP32, LAYER),
    "sandwich": AddNormSpec(BF16, BF16, RMS, NormSpec(1e-5, "layer", 0.25), 0.3, 1.7, BF16),
    "fp32 stream": AddNormSpec(FP32, BF16, RMS),
    "weight offset": AddNormSpec(FP16, FP16, NormSpec(1e-5, weight_offset=1.0)),
    "weight after cast": AddNormSpec(BF16, BF16, NormSpec(1e-5, weight_after_cast=True)),
    "layer, weight after cast": AddNormSpec(FP16, BF16, NormSpec(1e-5, "layer", weight_after_cast=True)),
    "sandwich, fp32 stream": AddNormSpec(FP32, FP16, LAYER, NormSpec(1e-5), 0.3, 1.0, FP16),
    "add": AddNormSpec(BF16, BF16),
    "scaled add": AddNormSpec(FP32, BF16, None, None, 0.3, 1.7, BF16),
}
# with more rows than one program takes where a program takes several, and a ragged last one
TOKENS = {1: 1030, 2: 600, 3: 300, 8: 131, 64: 19, 100: 9}


def check_variants(record: Recorder, setting: Setting) -> None:
    with torch.no_grad(), triton_kernels(setting.device):
        record.check("every variant is the contract", every_variant(setting))
        record.check("ties, subnormals, infinities, NaN", special_values(setting))


def check_sizes(record: Recorder, setting: Setting) -> None:
    with torch.no_grad(), triton_kernels(setting.device):
        record.check("every hidden size", every_size(setting))
        record.check("residual or update alone, norm only, add only", subsets(setting))
        record.check("strided rows", strided_rows(setting))
        record.check("in place, and fused_add_rmsnorm", in_place(setting))
        record.check("fast order is near fp64, and a row's own", fast_order(setting))


def check_backward(record: Recorder, setting: Setting) -> None:
    with triton_kernels(setting.device):
        record.check("gradients against fp64", gradients(setting))
        record.check("gradients have the same bits every time", repeated_gradients(setting))


def compare(what: str, spec: AddNormSpec, operands: Operands, device: torch.device) -> Iterator[str | None]:
    """Twice: the kernel into poisoned outputs against the contract on the CPU, and the contract on the device against that on the CPU."""
    expected, there = meaning(spec, operands), to(operands, device)
    shape = operands.rows.shape
    residual_out = torch.full(shape, NAN, dtype=spec.stream_dtype, device=device)
    normed_out = None if spec.norm is None else torch.full(shape, NAN, dtype=spec.output_dtype, device=device)
    found = add_norm(spec, there, residual_out=residual_out, normed_out=normed_out)
    yield difference(what, found, expected, "the contract on CPU")
    if device.type == "cuda":
        yield difference(f"{what}: the contract in plain torch on {device}", meaning(spec, there), expected, "CPU's")


def every_variant(setting: Setting) -> Iterator[str | None]:
    for hidden in (24,) if setting.small else (100, 4096):
        for name, spec in SPECS.items():
            yield from compare(f"{name}, 5 x {hidden}", spec, operands_for(spec, 5, hidden), setting.device)
        for name in ("rms", "layer", "sandwich", "fp32 stream"):
            other = BF16 if SPECS[name].output_dtype is FP32 else FP32
            operands = operands_for(SPECS[name], 5, hidden, update=other, weights=FP32)
            yield from compare(f"{name} with an update in {other}, 5 x {hidden}", SPECS[name], operands, setting.device)


def every_size(setting: Setting) -> Iterator[str | None]:
    sizes = (1, 3, 64) if setting.small else (1, 2, 3, 8, 64, 576, 896, 1500, 2880, 8192, 16384)
    for hidden in sizes:
        tokens = 7 if setting.small else TOKENS.get(hidden, 257)
        for name in ("rms", "layer", "sandwich") if hidden in (1, 64, 8192, 16384) else ("rms", "layer"):
            operands = operands_for(SPECS[name], tokens, hidden)
            yield from compare(f"{name}, {tokens} x {hidden}", SPECS[name], operands, setting.device)


def subsets(setting: Setting) -> Iterator[str | None]:
    scaled = replace(SPECS["rms"], skip_scale=0.5, update_scale=2.5)
    for hidden in (16,) if setting.small else (100, 4096):
        for name, spec in (("rms", SPECS["rms"]), ("add", SPECS["add"]), ("scaled", scaled)):
            every = operands_for(spec, 7, hidden)
            parts = {
                "residual alone": every._replace(update=None, update_bias=None),
                "update alone": every._replace(residual=None),
                "update without its bias": every._replace(residual=None, update_bias=None),
            }
            for part, operands in parts.items():
                yield from compare(f"{name}, {part}, 7 x {hidden}", spec, operands, setting.device)
        residual, weight = random(7, hidden, seed=1, dtype=BF16), random(hidden, seed=2)
        there = residual.to(setting.device)
        kept, normed = add_norm(SPECS["rms"], Operands(there, None, weight=weight.to(setting.device)))
        assert normed is not None
        equal = kept is there and same_bits(normed, contract.norm(residual, weight, None, RMS, BF16))
        yield None if equal else f"a norm alone differs, or copies its residual, at 7 x {hidden}"


def strided_rows(setting: Setting) -> Iterator[str | None]:
    """Column slices of wider buffers at every alignment, rows repeated by a zero stride; what lies beside an output stays as it was."""
    spec, tokens = SPECS["rms"], 5
    shapes = [(64, 72, 0), (64, 67, 1)]
    if not setting.small:
        shapes += [(1500, 1501, 1), (4096, 8192, 4096)]
    for hidden, width, offset in shapes:
        residual = random(tokens, width, seed=1, dtype=BF16)
        updates = (
            random(tokens, width + 3, seed=2, dtype=BF16)[:, :hidden],
            random(1, hidden, seed=3, dtype=BF16).expand(tokens, hidden),
        )
        weight = random(hidden, seed=4, dtype=BF16)
        columns = slice(offset, offset + hidden)
        for update in updates:
            what = f"{hidden} of {width} columns from {offset}"
            outs = [torch.full((tokens, width + i), NAN, dtype=BF16, device=setting.device) for i in range(2)]
            there = Operands(
                residual.to(setting.device)[:, columns], moved(update, setting.device), weight=weight.to(setting.device)
            )
            found = add_norm(spec, there, residual_out=outs[0][:, columns], normed_out=outs[1][:, columns])
            expected = meaning(spec, Operands(residual[:, columns], update, weight=weight))
            yield difference(what, found, expected, "the contract on CPU")
            for out in outs:
                out[:, columns] = NAN
            clean = all(bool(out.isnan().all()) for out in outs)
            yield None if clean else f"{what}: something was written beside the rows"


def in_place(setting: Setting) -> Iterator[str | None]:
    for hidden in (8, 24) if setting.small else (8, 100, 4096, 16384):
        for stream in (BF16, FP32):
            spec = AddNormSpec(stream, BF16, RMS)
            operands = operands_for(spec, 67, hidden)._replace(update_bias=None)
            expected, what = meaning(spec, operands), f"67 x {hidden} in place, {stream} residual"
            there = to(operands, setting.device)
            found = add_norm(spec, there, residual_out=there.residual, normed_out=there.update)
            yield difference(what, found, expected, "the contract on CPU")
            for offset in (0.0, 1.0) if hidden < 1000 else (0.0,):
                spec = AddNormSpec(stream, BF16, NormSpec(1e-6, weight_offset=offset))
                expected, there = meaning(spec, operands), to(operands, setting.device)
                residual, update, weight = there.residual, there.update, there.weight
                assert residual is not None and update is not None and weight is not None
                fused_add_rmsnorm(update, residual, weight, 1e-6, weight_offset=offset)
                yield difference(f"fused_add_rmsnorm, {what}", (residual, update), expected, "the contract on CPU")


def special_values(setting: Setting) -> Iterator[str | None]:
    hidden = 64
    for dtype in (BF16, FP16, FP32):
        residual = random(9, hidden, seed=1) * torch.logspace(-44, 44, hidden)[None]
        residual[1:3] = 0.0
        residual[2, ::2] = -0.0
        residual[3, 5], residual[4, 6], residual[5, 7] = float("inf"), float("-inf"), NAN
        between_bf16 = 1 + 2.0**-9 + torch.arange(hidden) * 2.0**-8  # half-way between neighbours
        residual[6], residual[7] = between_bf16, -between_bf16
        residual[8] = 1 + torch.arange(hidden) * 2.0**-11  # and in fp16
        operands = Operands(residual, torch.zeros(9, hidden), weight=random(hidden, seed=2))
        for norm in (RMS, NormSpec(1e-6, "layer")):
            spec = AddNormSpec(dtype, dtype, norm)
            yield from compare(f"special values, {norm.kind}, {dtype}", spec, operands, setting.device)


def fast_order(setting: Setting) -> Iterator[str | None]:
    for hidden in (8, 100) if setting.small else (100, 1024, 4096, 16384):
        for norm in (RMS, LAYER):
            spec = AddNormSpec(FP32, FP32, norm)
            operands = to(operands_for(spec, 5, hidden), setting.device)
            wide = Operands(*(None if t is None else t.double() for t in operands))
            expected = meaning(replace(spec, stream_dtype=FP64, output_dtype=FP64), wide)[1]
            normed = _fast(spec, operands)
            assert expected is not None
            error = float((normed - expected).abs().max() / expected.abs().max())
            # fp32's 6e-8 times the few dozen roundings of the longest chain of a row's sum, and rsqrt.approx's 1e-7
            yield None if error < 1e-5 else f"fast order, {norm.kind}, hidden {hidden}: off by {error:.1e} from fp64"
            assert operands.residual is not None and operands.update is not None
            alone = [
                _fast(spec, operands._replace(residual=r, update=u))
                for r, u in zip(operands.residual.split(1), operands.update.split(1), strict=True)
            ]
            same = same_bits(torch.cat(alone), normed)
            yield (
                None
                if same
                else f"fast order, {norm.kind}, hidden {hidden}: a row alone has other bits than in a batch"
            )


def _fast(spec: AddNormSpec, operands: Operands) -> Tensor:
    normed = add_norm(spec, operands, order="fast")[1]
    assert normed is not None
    return normed


# -- backward

# eps: one value alone is normed to its sign, whose gradient is nothing but rounding at a small one
GRADIENT_SPECS = {
    "rms": AddNormSpec(FP32, FP32, NormSpec(1e-2)),
    "layer": AddNormSpec(FP32, FP32, NormSpec(1e-2, "layer", 1.0)),
    "sandwich": AddNormSpec(FP32, FP32, NormSpec(1e-2), NormSpec(1e-2, "layer", 1.0), 0.3, 1.7),
    "sandwich, mixed": AddNormSpec(FP32, BF16, NormSpec(1e-2), NormSpec(1e-2, "layer", 1.0), 0.3, 1.7, BF16),
    "bf16": AddNormSpec(BF16, BF16, NormSpec(1e-2)),
    "add": AddNormSpec(BF16, BF16),
}
# the ends of the range, several rows a program, several tiles a program
GRADIENT_SIZES = ((1, 5), (3, 900), (100, 2600), (1024, 700), (4096, 1500))
LARGE_GRADIENT_SIZES = ((8192, 257), (16384, 65))


def _cotangents(spec: AddNormSpec, tokens: int, hidden: int, device: torch.device) -> list[Tensor]:
    dtypes = [spec.stream_dtype, *([] if spec.norm is None else [spec.output_dtype])]
    return [random(tokens, hidden, seed=20 + i, dtype=dtype).to(device) for i, dtype in enumerate(dtypes)]


def _gradients(spec: AddNormSpec, operands: Operands, cotangents: list[Tensor]) -> list[Tensor]:
    leaves = Operands(*(None if t is None else t.detach().requires_grad_() for t in operands))
    outputs = [t for t in add_norm(spec, leaves) if t is not None]
    return list(torch.autograd.grad(outputs, [t for t in leaves if t is not None], cotangents))


def gradient_errors(spec: AddNormSpec, operands: Operands, cotangents: list[Tensor]) -> list[float]:
    """Of each operand's gradient, against autograd through the contract in fp64 on the same device; relative, of values of order one."""
    wide_spec = replace(spec, stream_dtype=FP64, output_dtype=FP64, round_update=None)
    leaves = Operands(*(None if t is None else t.detach().double().requires_grad_() for t in operands))
    outputs = [t for t in meaning(wide_spec, leaves) if t is not None]
    given = [t for t in leaves if t is not None]
    expected = torch.autograd.grad(outputs, given, [t.double() for t in cotangents])
    found = _gradients(spec, operands, cotangents)
    return [
        float((ours.double() - theirs).norm() / max(float(theirs.norm()), theirs.numel() ** 0.5))
        for ours, theirs in zip(found, expected, strict=True)
    ]


def _gradient_cases(setting: Setting) -> Iterator[tuple[str, int, int]]:
    if setting.small:
        yield from ((name, 9, hidden) for name in GRADIENT_SPECS for hidden in (1, 24))
        return
    yield from ((name, tokens, hidden) for hidden, tokens in GRADIENT_SIZES for name in GRADIENT_SPECS)
    yield from ((name, tokens, hidden) for hidden, tokens in LARGE_GRADIENT_SIZES for name in ("rms", "bf16"))


def gradients(setting: Setting) -> Iterator[str | None]:
    for name, tokens, hidden in _gradient_cases(setting):
        spec = GRADIENT_SPECS[name]
        operands = to(operands_for(spec, tokens, hidden), setting.device)
        errors = gradient_errors(spec, operands, _cotangents(spec, tokens, hidden, setting.device))
        # fp32: some hundred roundings of 6e-8. 16 bits: the stream is rounded once before the norm reads it and each gradient once
        # after it, 2^-9 of the value each, and the norm's derivative is at most some times its input's error
        limit = 1e-5 if all(t is None or t.dtype is FP32 for t in operands) and spec.stream_dtype is FP32 else 2e-2
        for which, error in enumerate(errors):
            wrong = f"gradient {which} of {name}, {tokens} x {hidden}: off by {error:.1e} from fp64, limit {limit:.0e}"
            yield None if error < limit else wrong


def repeated_gradients(setting: Setting) -> Iterator[str | None]:
    for name, tokens, hidden in (
        (("sandwich", 9, 24),) if setting.small else (("sandwich", 2600, 100), ("bf16", 1500, 4096))
    ):
        spec = GRADIENT_SPECS[name]
        operands = to(operands_for(spec, tokens, hidden), setting.device)
        cotangents = _cotangents(spec, tokens, hidden, setting.device)
        first = _gradients(spec, operands, cotangents)
        for _ in range(2 if setting.small else 20):
            again = _gradients(spec, operands, cotangents)
            same = all(same_bits(a, b) for a, b in zip(first, again, strict=True))
            yield None if same else f"the gradients of {name}, {tokens} x {hidden}, have other bits in another run"
