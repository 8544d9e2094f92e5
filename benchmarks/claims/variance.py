"""How the stream's variance grows with depth: under the init rules, the branch scales, and the norms around a sublayer."""

import torch
from torch import Tensor

from benchmarks.claims.claim import Bound, Claim, Found, slope
from benchmarks.claims.workload import Sublayer, decoder, matrices, random_batch, stream_growth, through
from tp_residual.checkpoint.random_weights import Fill
from tp_residual.residual.config import ResidualConfig
from tp_residual.training.init import GPT2, InitRule, Normal, VarianceOverRootN

HIDDEN = 128
STD = HIDDEN**-0.5
DEPTHS = (4, 8, 16, 32)
SEEDS = (1, 2)
WRITERS = ("*.o_proj.weight", "*.down_proj.weight")

PLAIN, S3_RULE, GPT2_RULE = "plain", "variance / sqrt(N)", "std / sqrt(2L)"
RULES: dict[str, InitRule] = {PLAIN: Normal(STD), S3_RULE: VarianceOverRootN(STD), GPT2_RULE: GPT2(STD)}


def _added(rule: InitRule, layers: int) -> float:
    """What all layers together add to the stream's mean square, of one at the start."""
    found = []
    for seed in SEEDS:
        model = decoder("pre", layers=layers, hidden=HIDDEN, rule=rule, seed=seed)
        start, end = stream_growth(model, random_batch(4, 16, seed=seed))
        found.append(end - start)
    return sum(found) / len(found)


def init_rules(broken: bool) -> Found:
    names = list(RULES)
    used = (
        {PLAIN: GPT2_RULE, S3_RULE: GPT2_RULE, GPT2_RULE: S3_RULE} if broken else dict(zip(names, names, strict=True))
    )
    lines = {}
    for name in names:
        if used[name] not in lines:
            lines[used[name]] = {layers: _added(RULES[used[name]], layers) for layers in DEPTHS}
    return Found(
        {name: slope(lines[used[name]]) for name in names},
        series={name: list(line.items()) for name, line in lines.items()},
    )


def linear_stack(broken: bool) -> Found:
    """x + s W x, without norms: activations and gradients after 64 of them against (1 + s^2)^32."""
    count, values = 64, {}
    for name, scale in (("s = 1", 1.0), ("s = 1/sqrt(N)", count**-0.5)):
        used = (count**-0.5 if scale == 1.0 else 1.0) if broken else scale
        forward, backward = [], []
        for seed in range(8):
            sublayers: list[Sublayer] = [
                lambda y, w=w: y @ w  # type: ignore[misc]
                for w in matrices(count, HIDDEN, used * STD, seed, torch.float64)
            ]
            x = torch.randn(32, HIDDEN, generator=torch.Generator().manual_seed(50 + seed), dtype=torch.float64)
            x.requires_grad_(True)
            out = through(sublayers, ResidualConfig.preset("none"), x).out
            assert out is not None
            cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(90 + seed), dtype=torch.float64)
            gradient = torch.autograd.grad((out * cotangent).sum(), x)[0]
            forward.append(_square_ratio(out, x))
            backward.append(_square_ratio(gradient, cotangent))
        theory = (1 + scale**2) ** (count / 2)
        values[f"forward, {name}"] = (sum(forward) / len(forward)) ** 0.5 / theory
        values[f"backward, {name}"] = (sum(backward) / len(backward)) ** 0.5 / theory
    return Found(values, {"theory": f"(1 + s^2)^32: {2.0**32:.2e} and {(1 + 1 / count) ** 32:.3f}"})


def _square_ratio(after: Tensor, before: Tensor) -> float:
    return float(after.detach().pow(2).mean() / before.detach().pow(2).mean())


def _growth(config: ResidualConfig, layers: int, gain: float = 1.0) -> float:
    """Mean square of x_L over that of x_0. gain: of the writers."""
    overrides = dict.fromkeys(WRITERS, Fill(scale=gain * STD))
    found = []
    for seed in SEEDS:
        model = decoder(config, layers=layers, hidden=HIDDEN, overrides=overrides, seed=seed)
        start, end = stream_growth(model, random_batch(4, 16, seed=seed))
        found.append(end / start)
    return sum(found) / len(found)


BY_DEPTH = {
    "pre": ResidualConfig.preset("pre"),
    "LayerNorm scaling": ResidualConfig.preset("lns"),
    "1.4/sqrt(L)": ResidualConfig(update_scale=1.4, update_scale_by_depth=True),
}


def branch_scales(broken: bool) -> Found:
    """Growth through 32 layers over growth through 8."""
    used = {"pre": "1.4/sqrt(L)", "LayerNorm scaling": "pre", "1.4/sqrt(L)": "pre"}
    values = {}
    for name in BY_DEPTH:
        config = BY_DEPTH[used[name] if broken else name]
        values[name] = _growth(config, 32) / _growth(config, 8)
    return Found(values)


def sandwich(broken: bool) -> Found:
    """How much the growth of 8 layers changes when every writer is four times as large."""
    used = {"pre": "sandwich", "sandwich": "pre"} if broken else {"pre": "pre", "sandwich": "sandwich"}
    values = {}
    for name in used:
        config = ResidualConfig.preset(used[name])
        values[name] = (_growth(config, 8, 4.0) - 1) / (_growth(config, 8) - 1)
    return Found(values)


CLAIMS = [
    Claim(
        "init-rules",
        "Scaling the writers down with depth bounds what L layers add to the stream: slopes in L are 1 without, 1/2 with S3's rule "
        "(variance / sqrt(N)), 0 with GPT-2's (std / sqrt(2L)).",
        "S3 3.2",
        "ambiguous",
        "S3 divides the variance by sqrt(N), so the standard deviation by N^(1/4): half-way. GPT-2, from which the rule is known, divides "
        "the standard deviation by the root of the number of adds, 2L. Only that is free of depth.",
        {PLAIN: Bound(0.9, 1.1), S3_RULE: Bound(0.4, 0.6), GPT2_RULE: Bound(-0.1, 0.1)},
        "another of the three rules",
        init_rules,
        quick=False,
        has_curves=True,
    ),
    Claim(
        "linear-stack",
        "The identity does not guarantee stability: N linear sublayers without norms grow as (1 + s^2)^(N/2), which s = 1/sqrt(N) bounds.",
        "S0 2.2; S3 5.1",
        "right",
        "N = 64; figures are measured / theory, of activations and of gradients.",
        {f"{way}, {name}": Bound(0.5, 2) for name in ("s = 1", "s = 1/sqrt(N)") for way in ("forward", "backward")},
        "the other scale",
        linear_stack,
        quick=False,
    ),
    Claim(
        "branch-scales",
        "Under pre-norm the stream's variance grows with depth; LayerNorm scaling makes that logarithmic, 1.4/sqrt(L) free of depth.",
        "arXiv 2502.05795; arXiv 2404.06395",
        "right",
        "growth through 32 layers over growth through 8. That deep layers then do more needs a trained model: not shown here.",
        {"pre": Bound(3, 5), "LayerNorm scaling": Bound(1, 1.6), "1.4/sqrt(L)": Bound(0.85, 1.15)},
        "pre-norm for the scaled ones, 1.4/sqrt(L) for pre-norm",
        branch_scales,
        quick=False,
    ),
    Claim(
        "sandwich",
        "A norm behind the sublayer makes the growth independent of the writers' scale.",
        "arXiv 2502.02732",
        "right",
        "what 8 layers add, with writers four times as large over as they are.",
        {"pre": Bound(12, 18), "sandwich": Bound(0.99, 1.01)},
        "the other placement",
        sandwich,
        quick=False,
    ),
]
