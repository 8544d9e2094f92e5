"""What the equations mean: sums of updates, who mixes tokens, where the add belongs, and which formulas are one model."""

import math
import os
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.claims.claim import Bound, Claim, Found, NotRun
from benchmarks.claims.workload import EqualLengths, boundary, decoder, layer_of, norm_of, random_batch
from tp_residual.inference.loading import load_model
from tp_residual.model.attention_backend import NoCache, TokenBatch
from tp_residual.model.decoder import CausalLM
from tp_residual.model.rope import rope_tables
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.partial import Partial
from tp_residual.residual.boundary import Boundary
from tp_residual.residual.config import ResidualConfig, plan_layers
from tp_residual.residual.connection import Connection
from tp_residual.residual.stream import Layout, Stream
from tp_residual.testing import relative_error, run_ranks
from tp_residual.training.init import GPT2, ZeroWriters
from tp_residual.verify.capture import run_sharded

DEMO_MODEL = "TP_RESIDUAL_DEMO_MODEL"
PROMPT = [[504, 3575, 282, 4649, 314, 253, 2066, 351, 1195, 4767, 30, 657, 314, 3594, 28, 527, 357, 314]]
FP64 = torch.float64
NAMES = {"self_attn": "attention", "mlp": "MLP"}
BIASES = (-1.0, -2.0, -4.0)


# -- the stream is a sum


def _telescoping(group: TensorParallelGroup, folder: str) -> dict[str, float]:
    """Of the run as it is, and of one in which a connection in the middle adds its update twice."""
    model, _ = load_model(folder, group, dtype=torch.float32)
    found = {}
    for name in ("whole", "doubled"):
        if name == "doubled":
            config, layer = model.config, layer_of(model, model.config.num_hidden_layers // 2)
            plan = replace(layer.sublayers[-1].connection, update_scale=2.0)
            options: Any = {"sequence_parallel": False, "dtype": model.dtype}
            layer.add_module(plan.name, Connection(config.residual, plan, config.hidden_size, group, **options))
        run = run_sharded(model, PROMPT).whole
        if run is not None:
            expected = run.streams[0].double() + sum(update.double() for update in run.updates[1:])
            found[name] = relative_error(run.streams[-1].double(), expected)
            found["updates"] = len(run.updates) - 1
    return found


@cache
def _demo(folder: str) -> dict[str, float]:
    return run_ranks(2, _telescoping, folder, timeout_s=120, checked=False)[0]


def telescoping(broken: bool) -> Found:
    folder = os.environ.get(DEMO_MODEL, "")
    if not folder:
        raise NotRun(f"needs a checkpoint: set {DEMO_MODEL} to a model's folder")
    found = _demo(folder)
    return Found(
        {"x_L against the sum": found["doubled" if broken else "whole"]},
        {"updates": f"{found['updates']:.0f}, at tp=2 in fp32, summed in fp64"},
    )


# -- who mixes tokens


@torch.no_grad()
def mixing(broken: bool) -> Found:
    """Tokens whose update changes, or not, against what is said of the sublayer, when token 5 of 9 is another."""
    tokens, j = 9, 5
    model = decoder("pre", layers=1, hidden=32)
    layer, batch = layer_of(model, 0), TokenBatch.prefill([[0] * tokens])
    rope = rope_tables(model.config, batch.positions, model.dtype, batch.sequence_lengths)
    x = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(1))
    other = x.clone()
    other[j] += torch.randn(32, generator=torch.Generator().manual_seed(2))

    def changed(module: str) -> Tensor:
        updates = []
        for residual in (x, other):
            stream = Stream.resume(residual, tokens, Layout.REPLICATED, boundary(model.dtype))
            read, _ = stream.read(norm_of(layer, "input_layernorm"))
            run = layer.self_attn(read, rope, batch, NoCache()) if module == "self_attn" else layer.mlp(read)
            updates.append(run.value)
        return (updates[0] != updates[1]).any(-1)

    position = torch.arange(tokens)
    expected = {"self_attn": position >= j, "mlp": position == j}
    swapped = {"self_attn": "mlp", "mlp": "self_attn"}
    return Found(
        {
            f"{NAMES[name]}, tokens": float((changed(swapped[name] if broken else name) != expected[name]).sum())
            for name in expected
        }
    )


# -- where the add belongs


@torch.no_grad()
def _identity(group: TensorParallelGroup) -> dict[str, float]:
    """|x_L| / |x_0| of eight sublayers that write nothing: the skip joined behind the sum, or as part of each rank's summand."""
    owner, found = Boundary(group), {}
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    for name, config in (
        ("after", ResidualConfig.preset("none")),
        ("before", ResidualConfig(placement="none", skip_layers=())),
    ):
        stream = Stream.start(Partial(x / group.size, group, "embedding"), owner)
        for plan in (plan for layer in plan_layers(config, 4) for plan in layer):
            connection = Connection(config, plan.connection, 16, group, sequence_parallel=False, dtype=x.dtype)
            read, stream = stream.read(None)
            update = read if name == "before" else torch.zeros_like(read)
            stream = stream.write(Partial(update, group, plan.connection.name), connection)
        out, _ = stream.read(None)
        found[name] = float(out.norm() / x.norm())
    return found


@cache
def _added_once() -> dict[str, float]:
    return run_ranks(2, _identity, checked=False)[0]


def identity_once(broken: bool) -> Found:
    return Found({"|x_L| / |x_0|": _added_once()["before" if broken else "after"]})


# -- which formulas are one model


def _copied(target: CausalLM, source: CausalLM) -> CausalLM:
    """With the weights of another model, by name; a Macaron layer's first MLP has those of its second."""
    values = dict(source.named_parameters())
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            name = name.replace("first_mlp", "mlp")
            if name in values:
                parameter.copy_(values[name])
    return target


@torch.no_grad()
def _last_state(model: CausalLM, batch: TokenBatch) -> Tensor:
    states = model(batch, EqualLengths(), output_hidden_states=True).hidden_states
    assert states is not None
    return states[model.config.num_hidden_layers]


@torch.no_grad()
def _by_formula(model: CausalLM, batch: TokenBatch, formula: str) -> Tensor:
    """One layer on the embedding, written out: S3's line with two sublayers, or the paper's."""
    layer = layer_of(model, 0)
    norm, rope = (
        norm_of(layer, "input_layernorm"),
        rope_tables(model.config, batch.positions, FP64, batch.sequence_lengths),
    )
    assert norm is not None
    x = model.model.embed_tokens(batch.token_ids).value

    def attention(y: Tensor) -> Tensor:
        return layer.self_attn(norm(y), rope, batch, EqualLengths()).value

    def mlp(y: Tensor) -> Tensor:
        return layer.mlp(norm(y)).value

    if formula == "x + F(x) + G(x)":
        return x + attention(x) + mlp(x)
    first = x + mlp(x) / 2
    second = first + attention(first)
    return second + mlp(second) / 2


def macaron(broken: bool) -> Found:
    options = {"layers": 1, "hidden": 32, "dtype": FP64}
    batch, source = random_batch(2, 6), decoder("pre", **options)  # type: ignore[arg-type]
    states = {name: _last_state(_copied(decoder(name, **options), source), batch) for name in ("parallel", "macaron")}  # type: ignore[arg-type]
    literal, paper = (_by_formula(source, batch, formula) for formula in ("x + F(x) + G(x)", "Strang"))
    if broken:
        literal, paper = paper, literal
    return Found(
        {
            "S3's - parallel block": relative_error(literal, states["parallel"]),
            "the paper's - macaron": relative_error(paper, states["macaron"]),
        }
    )


@torch.no_grad()
def other_models(broken: bool) -> Found:
    """Logits with the same weights, GPT-2's init, relative to the sequential decoder's."""
    batch, found = random_batch(4, 16), {}
    source = decoder("pre", layers=8, rule=GPT2(0.125))
    expected = _logits(source, batch)
    for kind in ("ladder", "parallel"):
        model = _copied(decoder("pre" if broken else kind, layers=8), source)
        found[kind] = float((_logits(model, batch) - expected).norm() / expected.norm())
    return Found(found)


@torch.no_grad()
def _logits(model: CausalLM, batch: TokenBatch) -> Tensor:
    return model(batch, EqualLengths()).local_logits


def multiplier(broken: bool) -> Found:
    """x + r F(n(x)) against pre-norm with the embedding divided by r, in fp64 and with an eps that counts for nothing."""
    r, batch = 0.22, random_batch(4, 16)
    model = decoder(ResidualConfig(update_scale=r), layers=4, dtype=FP64)
    plain = _copied(decoder(ResidualConfig(embed_scale=1.0 if broken else 1 / r), layers=4, dtype=FP64), model)
    expected = _logits(model, batch)
    return Found({"logits": relative_error(_logits(plain, batch), expected)})


def depth_mix(broken: bool) -> Found:
    """Logits of the depth mixture at its start against pre-norm's."""
    batch, plain = random_batch(4, 16), decoder("pre", layers=4)
    model = _copied(decoder("depth_mix", layers=4), plain)
    if broken:
        with torch.no_grad():
            for weights in model.model.depth_mix.parameters():  # type: ignore[union-attr]
                weights += 0.01
    return Found({"largest difference": float((_logits(model, batch) - _logits(plain, batch)).abs().max())})


def highway(broken: bool) -> Found:
    """What 24 gates with bias b let through of x_0, the updates being zero: (1 - sigmoid(b))^24."""
    values = {}
    for bias in BIASES:
        config = ResidualConfig(placement="none", gate="static", gate_bias=-bias if broken else bias)
        model = decoder(config, layers=12, dtype=FP64, rule=ZeroWriters(0.1))
        with torch.no_grad():
            states = model(random_batch(2, 4), EqualLengths(), output_hidden_states=True).hidden_states
        assert states is not None
        values[f"b = {bias:g}"] = float(states[12].norm() / states[0].norm()) * (1 + math.exp(bias)) ** 24
    return Found(values, {"let through": ", ".join(f"{(1 + math.exp(b)) ** -24:.2g} with b = {b:g}" for b in BIASES)})


CLAIMS = [
    Claim(
        "telescoping",
        "x_L = x_0 + sum of (a_l + m_l).",
        "S0 2.3",
        "right",
        "a real checkpoint at tp=2: streams and summands from taps, updates completed in rank order. Relative, the worst token.",
        {"x_L against the sum": Bound(0, 1e-5)},
        "one connection of a middle layer adds its update twice",
        telescoping,
        quick=False,
    ),
    Claim(
        "mixing",
        "Attention mixes tokens, the MLP does not.",
        "S0 1",
        "right",
        "token 5 of 9 is changed: attention's update changes at 5 to 8, the MLP's at 5 alone, the others keep every bit. The figures "
        "are tokens that do otherwise.",
        {"attention, tokens": Bound(0, 0), "MLP, tokens": Bound(0, 0)},
        "each sublayer in the other's place",
        mixing,
    ),
    Claim(
        "identity-once",
        "Partial sums must be completed before the residual is added: the identity counts once.",
        "S0 3.3",
        "right",
        "eight sublayers that write nothing, tp=2.",
        {"|x_L| / |x_0|": Bound(1, 1)},
        "each rank adds the residual to its summand: 2^8",
        identity_once,
    ),
    Claim(
        "macaron",
        "x + F(x) + G(x), as S3 writes Macaron Net, is the parallel block; Macaron Net is two half steps of an MLP around attention.",
        "S3 7.2; arXiv 1906.02762",
        "wrong",
        "S3's line read with two sublayers; with one sublayer it would be x + 2 F(x). Neither has a residual in front and one behind.",
        {"S3's - parallel block": Bound(0, 1e-12), "the paper's - macaron": Bound(0, 1e-12)},
        "each formula for the other",
        macaron,
    ),
    Claim(
        "other-models",
        "Ladder and parallel block are other models, not approximations: the same weights give other logits.",
        "arXiv 2501.06589; arXiv 2204.02311",
        "right",
        "relative difference of logits to the sequential decoder's, 8 layers, GPT-2's init.",
        {"ladder": Bound(0.03, 1.0), "parallel": Bound(0.03, 1.0)},
        "the sequential decoder itself",
        other_models,
    ),
    Claim(
        "multiplier",
        "A constant residual multiplier r is the embedding divided by r.",
        "Granite 3's config",
        "right",
        "norms do not see the scale, but for eps: fp64, eps of 1e-6 beside a stream of one.",
        {"logits": Bound(0, 1e-5)},
        "the embedding as it was",
        multiplier,
    ),
    Claim(
        "depth-mix",
        "A depth mixture starts as pre-norm, so that only training can tell them apart.",
        "arXiv 2402.02622; S3 4.2",
        "right",
        "every bit of the logits.",
        {"largest difference": Bound(0, 0)},
        "weights off by 0.01",
        depth_mix,
    ),
    Claim(
        "gate-carry",
        "A gate that starts half open erases the input: after N sublayers (1 - sigmoid(b))^N of it is left.",
        "arXiv 1505.00387; S3 7.1",
        "in part",
        "measured / theory, 24 sublayers that write zero. S3 does not say that the gate's bias must start far below zero.",
        {f"b = {bias:g}": Bound(0.999, 1.001) for bias in BIASES},
        "the sign of b",
        highway,
    ),
]
