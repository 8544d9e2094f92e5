"""What the stream's precision does: error over depth, updates that are swallowed, and whether fusing changes bits."""

import torch

from benchmarks.claims.claim import Bound, Claim, Found
from benchmarks.claims.workload import EqualLengths, decoder, random_batch
from tp_residual.kernels.add_norm import add_norm
from tp_residual.kernels.contract import AddNormSpec, NormSpec
from tp_residual.training.init import GPT2

LAYERS, HIDDEN = 32, 128
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


@torch.no_grad()
def stream_dtype(broken: bool) -> Found:
    """Median over tokens of the relative error of x_L, weights and sublayers in bf16, against fp64 with the same weights."""
    rule, batch, states = GPT2(HIDDEN**-0.5), random_batch(4, 64), {}
    weights = None
    for name, dtype, stream in (("bf16", BF16, BF16), ("fp32", BF16, BF16 if broken else FP32), ("fp64", FP64, FP64)):
        model = decoder("pre", layers=LAYERS, hidden=HIDDEN, rule=rule, dtype=dtype, stream_dtype=stream)
        weights = weights or [parameter.double() for parameter in model.parameters()]
        for parameter, value in zip(model.parameters(), weights, strict=True):
            parameter.copy_(value)
        found = model(batch, EqualLengths(), output_hidden_states=True).hidden_states
        assert found is not None
        states[name] = found[LAYERS].double()
    exact = states["fp64"]
    error = {
        name: float(((states[name] - exact).norm(dim=-1) / exact.norm(dim=-1)).median()) for name in ("bf16", "fp32")
    }
    return Found(
        {"error, bf16 / fp32 stream": error["bf16"] / error["fp32"]},
        {"relative error": f"{error['bf16']:.1e} with a bf16 stream, {error['fp32']:.1e} with an fp32 one"},
    )


def swallow(broken: bool) -> Found:
    """Share of elements that an update of 2^-k of themselves leaves as they are."""
    dtype = FP32 if broken else BF16
    x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(1)).to(BF16).to(dtype)
    lost = {}
    for k in (7, 8, 9):
        new, _ = add_norm(AddNormSpec(dtype, dtype), x, x * 2.0**-k)
        lost[k] = float((new == x).float().mean())
    return Found({"lost at 2^-9": lost[9], "lost at 2^-8": lost[8]}, {"lost at 2^-7": f"{lost[7]:g}"})


def fusion_bits(broken: bool) -> Found:
    """bf16 results of one pass that differ from those of add, round, norm. The twin's pass normalises the sum before it is rounded."""
    x, update = (torch.randn(256, 1024, generator=torch.Generator().manual_seed(k)).to(BF16) for k in (1, 2))
    weight = torch.randn(1024, generator=torch.Generator().manual_seed(3)).to(BF16)
    spec = NormSpec(1e-6)
    rounded, _ = add_norm(AddNormSpec(BF16, BF16), x, update)
    _, apart = add_norm(AddNormSpec(BF16, BF16, spec), rounded, None, weight=weight)
    if broken:
        _, fused = add_norm(AddNormSpec(FP32, BF16, spec), x.float(), update.float(), weight=weight)
    else:
        _, fused = add_norm(AddNormSpec(BF16, BF16, spec), x, update, weight=weight)
    assert fused is not None and apart is not None
    return Found({"share that differs": float((fused != apart).float().mean())})


CLAIMS = [
    Claim(
        "stream-dtype",
        "Over 32 layers an fp32 stream over bf16 sublayers is several times as exact as a bf16 stream.",
        "S0 2.2, 4 (precision)",
        "right",
        "relative error of x_32 against fp64 with the same weights.",
        {"error, bf16 / fp32 stream": Bound(low=2.5)},
        "a bf16 stream for both",
        stream_dtype,
        quick=False,
    ),
    Claim(
        "swallow",
        "A bf16 stream swallows updates of 2^-9 of itself whole, and next to none of 2^-8.",
        "S0 2.2, 4 (precision)",
        "right",
        "of 2^-8 those on a tie: one mantissa of 128. Of 2^-7 none.",
        {"lost at 2^-9": Bound(1, 1), "lost at 2^-8": Bound(0.002, 0.03)},
        "an fp32 stream",
        swallow,
    ),
    Claim(
        "fusion-bits",
        "Fusing add and norm does not change the result.",
        "S0 3.3",
        "ambiguous",
        "true of a kernel that normalises the sum as rounded to the stream's dtype, as here; one that normalises it before "
        "rounding changes about a fifth of the bf16 values by one unit in the last place.",
        {"share that differs": Bound(0, 0)},
        "a kernel that normalises the unrounded sum",
        fusion_bits,
    ),
]
