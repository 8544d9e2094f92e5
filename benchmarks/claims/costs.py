"""What a residual connection costs and saves: collectives, passes over memory, bytes kept, operations."""

import statistics
import time
from functools import cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.claims.claim import Bound, Claim, Found
from benchmarks.claims.workload import GROUP, EqualLengths, decoder, random_batch
from tp_residual.bench.add_norm import forms
from tp_residual.kernels.add_norm import add_norm
from tp_residual.kernels.contract import AddNormSpec, NormSpec
from tp_residual.model.attention_backend import AttentionBackend, NoCache, TokenBatch
from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.partial import Partial
from tp_residual.residual.boundary import Site
from tp_residual.residual.config import ResidualConfig
from tp_residual.testing import RowCache, run_ranks

LAYERS = 4


class Residuals:
    """A tap that keeps what the stream was behind each boundary."""

    def __init__(self) -> None:
        self.nbytes: list[int] = []

    def __call__(
        self, site: Site, partial: Partial | None, residual: torch.Tensor, normed: torch.Tensor | None
    ) -> None:
        self.nbytes.append(residual.nbytes)


# -- collectives


def _count_collectives(group: TensorParallelGroup) -> dict[str, tuple[float, float]]:
    """Calls a layer, forward and backward, by residual."""
    found = {}
    for kind in ("pre", "parallel"):
        calls = []
        for layers in (2, 2 + LAYERS):  # the difference: without the embedding's and the head's
            model = decoder(kind, layers=layers, group=group, hidden=32)
            group.counters.reset()
            logits = model(random_batch(2, 5), NoCache()).local_logits
            forward = sum(group.counters.by_kind().values())
            logits.square().sum().backward()
            calls.append((forward, sum(group.counters.by_kind().values()) - forward))
        found[kind] = tuple((b - a) / LAYERS for a, b in zip(*calls, strict=True))
    return found


@cache
def _collectives() -> dict[str, tuple[float, float]]:
    return run_ranks(2, _count_collectives, checked=False)[0]


def parallel_block(broken: bool) -> Found:
    counted = _collectives()
    forward, backward = counted["pre" if broken else "parallel"]
    values = {
        "a layer, forward": forward,
        "a layer, backward": backward,
        "of the sequential's": forward / counted["pre"][0],
    }
    return Found(values)


# -- passes


def _moved(*calls: tuple[torch.Tensor | None, ...]) -> float:
    """Passes over the first operand: each call reads or writes each of its tensors once, one that is handed through not twice."""
    payload = next(tensor for tensor in calls[0] if tensor is not None).nbytes
    distinct = [{tensor.data_ptr(): tensor.nbytes for tensor in call if tensor is not None} for call in calls]
    return sum(sum(call.values()) for call in distinct) / payload


def add_norm_passes(broken: bool) -> Found:
    """The product's kernel in one call, or in two: by the tensors that go in and come out. The weight, one row, is not counted."""
    x, u = (torch.randn(2048, 2048, generator=torch.Generator().manual_seed(k)) for k in range(2))
    weight, spec = torch.ones(2048), NormSpec(1e-6)
    new, _ = add_norm(AddNormSpec(x.dtype, x.dtype), x, u)
    same, normed = add_norm(AddNormSpec(x.dtype, x.dtype, spec), new, None, weight=weight)
    apart = _moved((x, u, new), (new, same, normed))
    fused = _moved((x, u, *add_norm(AddNormSpec(x.dtype, x.dtype, spec), x, u, weight=weight)))
    counted = apart if broken else fused
    values = {"passes": counted, "of the unfused": counted / apart}
    if broken:
        return Found(values)
    by_name = {(form.name, form.order): form for form in forms(x.dtype, compiled=False)[0]}
    into, rms_norm = by_name["fused, into", "contract"], by_name["add, rms_norm", "fast"]
    assert into.passes(4) == fused and rms_norm.passes(4) == apart, "bench add-norm counts otherwise"
    times: dict[str, list[float]] = {into.name: [], rms_norm.name: []}
    for _ in range(9):
        for form in (into, rms_norm):
            began = time.perf_counter()
            form.run(x, u, weight)
            times[form.name].append(time.perf_counter() - began)
    ratio = statistics.median(times[rms_norm.name]) / statistics.median(times[into.name])
    return Found(
        values, {"time, 2048 x 2048 in fp32": f"an add and F.rms_norm take {ratio:.2f} times as long as the fused pass"}
    )


# -- bytes


def stream_size(broken: bool) -> Found:
    """One decode step behind 16 and behind 512 tokens. Keys and values: those in use, which a paged cache would hold."""
    sizes, kept = [], []
    model = decoder("pre", layers=2)
    for context in (16, 512):
        ids = random_batch(1, context + 1).token_ids.tolist()
        tap = Residuals()
        backend: AttentionBackend
        batch = TokenBatch.of([(0, context, ids[-1:])])
        backend = RowCache(model.layout, GROUP, rows=1, max_tokens=513 if broken else context + 1, dtype=model.dtype)
        with torch.inference_mode():
            model(TokenBatch.prefill([ids[:-1]]), backend)
            if broken:  # without a cache every step is the whole sequence
                model(TokenBatch.prefill([ids]), NoCache(), taps=(tap,))
            else:
                model(batch, backend, taps=(tap,))
        sizes.append(max(tap.nbytes))
        kept.append(backend.nbytes)
    return Found(
        {"stream, 512 over 16": sizes[1] / sizes[0], "KV, 512 over 16": kept[1] / kept[0]},
        {"bytes at 512": f"stream {sizes[1]}, keys and values {kept[1]}"},
    )


SP_TOKENS, SP_HIDDEN = 32, 32


@torch.no_grad()
def _states_held(group: TensorParallelGroup) -> dict[str, int]:
    """Bytes of x_0 ... x_L that a rank has before anything is gathered, by sequence parallelism."""
    found = {}
    for mode in ("on", "off"):
        tap = Residuals()
        model = decoder("pre", layers=LAYERS, hidden=SP_HIDDEN, group=group, sequence_parallel=mode)
        model(random_batch(1, SP_TOKENS), NoCache(), taps=(tap,))
        found[mode] = sum(tap.nbytes[::2])
    return found


@cache
def _sharded_states() -> dict[str, int]:
    return run_ranks(2, _states_held, checked=False)[0]


@torch.no_grad()
def hidden_states(broken: bool) -> Found:
    layers, tokens, hidden = LAYERS, 24, 64
    model = decoder("pre", layers=layers, hidden=hidden)
    states = model(random_batch(2, tokens // 2), EqualLengths(), output_hidden_states=True).hidden_states
    assert states is not None
    counted = states if broken else states[:-1]  # the last one is the final norm's output
    sharded = _sharded_states()["off" if broken else "on"]
    return Found(
        {
            "of (L+1) N D b": sum(state.nbytes for state in counted) / ((layers + 1) * tokens * hidden * 4),
            "a rank's, SP at tp=2": sharded / ((layers + 1) * SP_TOKENS * SP_HIDDEN * 4),
        },
        {"at L=32, N=8192, D=4096 in bf16": f"{33 * 8192 * 4096 * 2 / 2**30:.2f} GiB"},
    )


# -- operations


@torch.no_grad()
def _operations(model: CausalLM) -> int:
    """Of the matrix products."""
    with FlopCounterMode(display=False) as counter:
        model(random_batch(1, 2), NoCache())
    return counter.get_total_flops()


def add_share(broken: bool) -> Found:
    """Adds: two a layer, one operation a channel and token each."""
    hidden, layers, tokens = 1024, 2, 2

    def sized(residual: str | ResidualConfig, layers: int) -> CausalLM:
        return decoder(residual, layers=layers, hidden=hidden, heads=8, filled=False)

    whole = _operations(sized("pre", layers))
    if broken:  # leave out the sublayers themselves
        fewer = _operations(sized("pre", 1))
    else:  # a skip on the first layer only
        fewer = _operations(sized(ResidualConfig(skip_layers=(0,)), layers))
    adds = 2 * layers * tokens * hidden
    values = {
        "adds / products": (whole - fewer if broken else adds) / whole,
        "saved by half the skips": 1 - fewer / whole,
    }
    return Found(values, {"adds at D = 4096": f"{2 / (24 * 4096):.1e} of a layer's operations"})


CLAIMS = [
    Claim(
        "parallel-half",
        "A parallel attention + MLP block halves the collectives.",
        "arXiv 2204.02311",
        "right",
        "counted at tp=2. It is another model, not a faster form of the same (see other-models).",
        {
            "a layer, forward": Bound(1, 1),
            "a layer, backward": Bound(1, 1),
            "of the sequential's": Bound(0.5, 0.5),
        },
        "the sequential decoder",
        parallel_block,
    ),
    Claim(
        "add-norm-passes",
        "Fusing the residual add and the norm moves 4 passes over [tokens, hidden] instead of 5.",
        "S0 3.3; S3 5.3",
        "right",
        "against an add and one norm kernel. F.rms_norm on a CPU is several operations, and model code without any fusion moves "
        "more still. Time is reported, not bounded.",
        {"passes": Bound(4, 4), "of the unfused": Bound(0.8, 0.8)},
        "the unfused form",
        add_norm_passes,
    ),
    Claim(
        "stream-size",
        "The stream of a decode step does not grow with the context; keys and values do.",
        "S0 3.2, 4",
        "right",
        "bytes behind 512 tokens over bytes behind 16.",
        {"stream, 512 over 16": Bound(1, 1), "KV, 512 over 16": Bound(513 / 17, 513 / 17)},
        "decoding without a cache; a cache with room for 513 from the start",
        stream_size,
    ),
    Claim(
        "hidden-states",
        "Returning all hidden states costs (L+1) N D b bytes, divided by the ranks under sequence parallelism before they are gathered.",
        "S0 4",
        "right",
        "x_0 ... x_L. Transformers' `hidden_states` also has L+1 entries, but its last one is behind the final norm and x_L is "
        "missing; here there are L+2.",
        {"of (L+1) N D b": Bound(1, 1), "a rank's, SP at tp=2": Bound(0.5, 0.5)},
        "the final norm's output counted as a state; a replicated stream",
        hidden_states,
    ),
    Claim(
        "add-share",
        "The residual add is a negligible share of the work, so a sparse residual saves nothing; leaving out sublayers does.",
        "S3 7.3; S0 1, 4",
        "wrong",
        "S3 says that sparse residual connections lower the amount of computation considerably. They leave out adds: 2 D of about 24 D^2 "
        "operations. S0 says what holds: the shortcut is one of information, not of work.",
        {"adds / products": Bound(0, 1e-4), "saved by half the skips": Bound(0, 1e-4)},
        "half of the layers left out instead of half of the skips",
        add_share,
    ),
]
