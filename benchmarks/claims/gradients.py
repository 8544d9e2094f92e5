"""How gradients pass: against depth under both placements of the norm, along the identity, and where a learned scale starts at zero."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.claims.claim import Bound, Claim, Found, slope
from benchmarks.claims.workload import (
    EqualLengths,
    Passage,
    Sublayer,
    decoder,
    layer_of,
    matrices,
    mean_square,
    norm_of,
    random_batch,
    through,
)
from tp_residual.model.attention_backend import NoCache, TokenBatch
from tp_residual.model.rope import rope_tables
from tp_residual.parallel.blocks import parameter_blocks
from tp_residual.residual.config import ResidualConfig
from tp_residual.residual.stream import Layout, Stream
from tp_residual.training.init import DeepNorm, InitRule, Normal

HIDDEN, SEQUENCES, TOKENS, CLASSES = 128, 4, 32, 64
SEEDS = range(6)
DEPTHS = (16, 32, 64, 128)
NAMES = {"self_attn": "attention", "mlp": "MLP"}
OTHER = {"pre": "post", "post": "pre"}


def _paper_model(placement: str, depth: int, seed: int) -> tuple[Passage, Tensor, Tensor]:
    """The model of arXiv 2002.04745's theorem: attention that weighs all tokens alike, then a ReLU MLP as wide as the stream, every matrix
    N(0, 1/D). Returns what passed, the last MLP's second matrix and the loss of random targets.
    """
    values, first, second = (matrices(depth, HIDDEN, HIDDEN**-0.5, 10 * seed + k) for k in range(3))
    generator = torch.Generator().manual_seed(1000 + seed)
    x = torch.randn(SEQUENCES * TOKENS, HIDDEN, generator=generator)
    head = torch.randn(HIDDEN, CLASSES, generator=generator) * HIDDEN**-0.5
    targets = torch.randint(CLASSES, (len(x),), generator=generator)
    second[-1].requires_grad_(True)

    def attention(layer: int) -> Sublayer:
        def attend(y: Tensor) -> Tensor:
            means = y.unflatten(0, (SEQUENCES, TOKENS)).mean(1, keepdim=True) @ values[layer]
            return means.expand(-1, TOKENS, -1).flatten(0, 1)

        return attend

    def mlp(layer: int) -> Sublayer:
        return lambda y: torch.relu(y @ first[layer]) @ second[layer]

    sublayers = [kind(layer) for layer in range(depth) for kind in (attention, mlp)]
    passage = through(sublayers, ResidualConfig(placement=placement, norm="layer"), x)  # type: ignore[arg-type]
    assert passage.out is not None
    return passage, second[-1], F.cross_entropy(passage.out @ head, targets)


@cache
def last_layer_gradients(placement: str) -> dict[int, float]:
    found = {}
    for depth in DEPTHS:
        norms = []
        for seed in SEEDS:
            _, weight, loss = _paper_model(placement, depth, seed)
            norms.append(float(torch.autograd.grad(loss, weight)[0].norm()))
        found[depth] = sum(norms) / len(norms)
    return found


def gradient_depth(broken: bool) -> Found:
    post, pre = (last_layer_gradients(OTHER[kind] if broken else kind) for kind in ("post", "pre"))
    values = {"slope, post-norm": slope(post), "slope, pre-norm": slope(pre), "gap": slope(post) - slope(pre)}
    return Found(values, series={"post-norm": list(post.items()), "pre-norm": list(pre.items())})


@torch.no_grad()
def state_norm(broken: bool) -> Found:
    """Means over seeds: the lemma is of expectations over the weights."""
    depth = 16
    ahead, behind = ([0.0] * depth for _ in range(2))
    for seed in SEEDS:
        for kind, states in (("post", ahead), ("pre", behind)):
            passage, _, _ = _paper_model(OTHER[kind] if broken else kind, depth, seed)
            for layer in range(1, depth + 1):
                x = passage.residuals[2 * layer]
                if kind == "post":  # what the norm behind the MLP reads
                    x = passage.residuals[2 * layer - 1] + passage.updates[2 * layer - 1]
                states[layer - 1] += mean_square(x) / len(SEEDS)
    inside = [1 + layer / 2 <= x <= 1 + 3 * layer / 2 for layer, x in enumerate(behind, 1)]
    return Found(
        {"post, farthest from 1.5": max(abs(x - 1.5) for x in ahead), "pre, layers inside": sum(inside) / depth}
    )


def jacobian(broken: bool) -> Found:
    """Of both sublayers of a product layer in fp64, by differentiating the stream and the sublayer apart."""
    model = decoder("post" if broken else "pre", layers=1, hidden=16, heads=2, dtype=torch.float64)
    layer, tokens, hidden = layer_of(model, 0), 3, 16
    batch = TokenBatch.prefill([[0] * tokens])
    rope = rope_tables(model.config, batch.positions, torch.float64, batch.sequence_lengths)
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    values = {}
    for sublayer in layer.sublayers:
        name = sublayer.modules[0]
        norm = norm_of(layer, sublayer.read_norms[0])

        def passed(residual: Tensor) -> tuple[Tensor, Tensor]:
            """(the new residual, the update)"""
            stream = Stream.resume(residual, tokens, Layout.REPLICATED, model.boundary_for(tokens))
            read, stream = stream.read(norm)  # noqa: B023 - called before the next turn
            module = getattr(layer, name)  # noqa: B023
            update = module(read, rope, batch, NoCache()) if name == "self_attn" else module(read)  # noqa: B023
            connection = getattr(layer, sublayer.connection.name)  # noqa: B023
            new = stream.write(update, connection).complete().residual
            assert new is not None
            return new, update.value

        whole, branch = torch.autograd.functional.jacobian(passed, x)
        identity = torch.eye(tokens * hidden, dtype=torch.float64).view_as(whole)
        values[f"{NAMES[name]}: |J - I - dF|"] = float((whole - identity - branch).abs().max() / whole.abs().max())
    return Found(values)


def survival(broken: bool) -> Found:
    """|dL/dx_0| / |dL/dx_32| of 32 tanh sublayers, weights 0.5 / sqrt(D)."""
    depth, values = 32, {}
    for name, skip in (("with the skip", True), ("without it", False)):
        config = ResidualConfig(placement="none", skip_layers=None if skip is not broken else ())
        sublayers: list[Sublayer] = [
            lambda y, w=w: torch.tanh(y @ w)  # type: ignore[misc]
            for w in matrices(depth, HIDDEN, 0.5 * HIDDEN**-0.5, seed=2, dtype=torch.float64)
        ]
        generator = torch.Generator().manual_seed(4)
        x, cotangent = (torch.randn(16, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))
        passage = through(sublayers, config, x.requires_grad_(True))
        assert passage.out is not None
        gradient = torch.autograd.grad((passage.out * cotangent).sum(), x)[0]
        values[name] = float(gradient.norm() / cotangent.norm())
    return Found(values)


def rezero(broken: bool) -> Found:
    """Gradients of a ReZero decoder at step 0, and behind one step of SGD."""
    config = ResidualConfig.preset("rezero", learned_update_init=0.1) if broken else ResidualConfig.preset("rezero")
    model, batch = decoder(config, layers=4), random_batch(4, 16)
    scales = [p for name, p in model.named_parameters() if name.endswith("update_scale")]
    branch = [
        block.parameter
        for block in parameter_blocks(model)
        if any(part in block.name for part in ("self_attn.", "mlp."))
    ]

    def gradients() -> None:
        model.zero_grad(set_to_none=True)
        logits = model(batch, EqualLengths()).local_logits
        F.cross_entropy(logits, batch.token_ids.roll(-1)).backward()

    gradients()
    at_start = max(float(p.grad.abs().max()) for p in branch if p.grad is not None)
    moving = min(float(p.grad.abs().max()) for p in scales if p.grad is not None)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    gradients()
    behind = min(float(p.grad.abs().max()) for p in branch if p.grad is not None)
    return Found(
        {"sublayers, step 0": at_start},
        {"least gradient": f"of a scale at step 0: {moving:.1e}; of a sublayer's matrix after one step: {behind:.1e}"},
    )


def deepnorm_step(broken: bool) -> Found:
    """How far one SGD step on the sublayers moves the logits, at depth 6 and at depth 48."""
    hidden, changes = 64, {}
    rule: InitRule
    kind, rule = ("post", Normal(hidden**-0.5)) if broken else ("deepnorm", DeepNorm(hidden**-0.5))
    for depth in (6, 48):
        model, batch = decoder(kind, layers=depth, hidden=hidden, rule=rule), random_batch(4, 16)
        branch = {block.parameter for block in parameter_blocks(model) if ".layers." in block.name}
        before = model(batch, EqualLengths()).local_logits
        F.cross_entropy(before, batch.token_ids.roll(-1)).backward()
        torch.optim.SGD([p for p in branch if p.grad is not None and p.dim() > 1], lr=0.05).step()
        with torch.no_grad():
            after = model(batch, EqualLengths()).local_logits
            changes[depth] = float((after - before).norm() / before.norm())
    return Found({f"change, depth {depth}": change for depth, change in changes.items()})


_PAPER = "arXiv 2002.04745"

CLAIMS = [
    Claim(
        "gradient-depth",
        "At initialisation the last layer's gradient does not shrink with depth L under post-norm, and falls as L^-0.5 under pre-norm.",
        f"{_PAPER}, theorem 1; S3 4.1",
        "right",
        "log-log slopes over L = 16 to 128 (shallower ones bend the fit). The theorem is an upper bound: its dependence on the width and "
        "a decay towards early layers are not seen in this model.",
        {
            "slope, post-norm": Bound(-0.2, 0.2),
            "slope, pre-norm": Bound(-0.65, -0.38),
            "gap": Bound(low=0.3),
        },
        "the other placement of the norm",
        gradient_depth,
        quick=False,
        has_curves=True,
    ),
    Claim(
        "state-norm",
        "At initialisation E|x|^2/d is 3/2 ahead of each post-norm, and between 1 + l/2 and 1 + 3l/2 behind pre-norm layer l.",
        f"{_PAPER}, lemma 2",
        "right",
        "16 layers, means over six draws of the weights: the lemma is of expectations, and a single draw strays to 1.3 and 1.7.",
        {
            "post, farthest from 1.5": Bound(0, 0.1),
            "pre, layers inside": Bound(1, 1),
        },
        "the other placement of the norm",
        state_norm,
    ),
    Claim(
        "jacobian",
        "A pre-norm sublayer's Jacobian is I + dF/dx.",
        "S0 2.2",
        "right",
        "fp64, attention and MLP of a decoder layer.",
        {"attention: |J - I - dF|": Bound(0, 1e-12), "MLP: |J - I - dF|": Bound(0, 1e-12)},
        "a norm on the skip path (post-norm)",
        jacobian,
    ),
    Claim(
        "survival",
        "Through the skip a gradient survives 32 layers in which the main path alone loses it.",
        "S0 2.2; S3 3.3",
        "right",
        "|dL/dx_0| / |dL/dx_32|; the main path is 32 tanh layers with weights 0.5 / sqrt(D).",
        {"with the skip": Bound(1, 5), "without it": Bound(0, 1e-8)},
        "the skip masked, and put back",
        survival,
    ),
    Claim(
        "rezero",
        "With x + a F(x), a = 0, the first step moves the scalars only.",
        "arXiv 2003.04887; S3 4.2",
        "right",
        "S3's “depth-weighted residual” does not say where its weights start; at 0 it is ReZero.",
        {"sublayers, step 0": Bound(0, 0)},
        "a starts at 0.1",
        rezero,
    ),
    Claim(
        "deepnorm-step",
        "DeepNorm bounds how far one step moves the output, whatever the depth.",
        "arXiv 2203.00555",
        "right",
        "relative change of the logits by one step of SGD, lr 0.05, on the sublayers. Adam undoes the scale of gradients: not so "
        "with it.",
        {
            "change, depth 6": Bound(0, 0.03),
            "change, depth 48": Bound(0, 0.03),
        },
        "plain post-norm",
        deepnorm_step,
        quick=False,
    ),
]
