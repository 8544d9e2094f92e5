"""CUDA graphs and torch.compile around the operators: what is captured or traced gives the bits of a plain call, for new inputs, too."""

from collections.abc import Callable, Iterator

import torch
from _gpu_add_norm import GRADIENT_SPECS, SPECS
from _gpu_operands import (
    BF16,
    FP32,
    Setting,
    add_norm,
    difference,
    meaning,
    operands_for,
    same_bits,
    to,
    triton_kernels,
)
from _gpu_record import Recorder
from _gpu_symmetric import FORMS, REQUESTS, SMALL_REQUEST, Call, most_blocks, peers_of
from torch import Tensor

from tp_residual.kernels.add_norm import fused_add_rmsnorm
from tp_residual.kernels.add_norm_operands import Operands
from tp_residual.kernels.contract import AddNormSpec, NormSpec

REPLAYS = 3  # of each graph; once where replaying is running


def captured(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """`run` once more with each call, as a CUDA graph. On CPU, where there is none, `run` itself.

    run: works on tensors that stay where they are. It is called first, since compilation and workspaces cannot be captured.
    """
    if device.type != "cuda":
        return run
    aside = torch.cuda.Stream(device)
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        for _ in range(2):
            run()
    torch.cuda.current_stream(device).wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def check_graphs(record: Recorder, setting: Setting) -> None:
    with triton_kernels(setting.device):
        with torch.no_grad():
            record.check("add_norm in a graph", forward(setting))
            record.check("fused_add_rmsnorm in a graph", fused(setting))
        record.check("gradients in a graph", backward(setting))
        with torch.no_grad():
            for world in (1,) if setting.small else (2, 8):
                for form in list(FORMS)[1:3] if setting.small else FORMS:
                    record.check(f"symmetric {form} in a graph, {world} ranks", symmetric(form, world, setting))
            record.check("torch.compile(fullgraph=True)", compiled(setting))


def _shapes(setting: Setting) -> tuple[tuple[int, int], ...]:
    return ((1, 24), (3, 40)) if setting.small else ((1, 4096), (257, 2880))


def _refill(held: Operands, new: Operands) -> None:
    for target, source in zip(held, new, strict=True):
        if target is not None:
            assert source is not None
            target.copy_(source)


def forward(setting: Setting) -> Iterator[str | None]:
    """Outputs given and outputs allocated inside the graph."""
    for tokens, hidden in _shapes(setting):
        for name in ("rms", "layer", "sandwich"):
            spec = SPECS[name]
            held = to(operands_for(spec, tokens, hidden), setting.device)
            out = torch.empty(tokens, hidden, dtype=spec.stream_dtype, device=setting.device)
            results: list[tuple[Tensor, Tensor | None]] = []

            def run(
                spec: AddNormSpec = spec, held: Operands = held, out: Tensor = out, results: list = results
            ) -> None:
                results[:] = [
                    add_norm(spec, held),
                    add_norm(spec, held, residual_out=out),
                ]

            replay = captured(run, setting.device)
            for number in range(1, 2 if setting.small else 1 + REPLAYS):
                new = operands_for(spec, tokens, hidden, seed=number)
                _refill(held, new)
                replay()
                for found in results:
                    yield difference(
                        f"{name}, {tokens} x {hidden}, replay {number}", found, meaning(spec, new), "the contract"
                    )


def fused(setting: Setting) -> Iterator[str | None]:
    for tokens, hidden in _shapes(setting):
        for stream in (BF16, FP32):
            spec = AddNormSpec(stream, BF16, NormSpec(1e-6))
            held = to(operands_for(spec, tokens, hidden)._replace(update_bias=None), setting.device)

            def run(held: Operands = held) -> None:
                assert held.residual is not None and held.update is not None and held.weight is not None
                fused_add_rmsnorm(held.update, held.residual, held.weight, 1e-6)

            replay = captured(run, setting.device)
            for number in range(1, 2 if setting.small else 1 + REPLAYS):
                new = operands_for(spec, tokens, hidden, seed=number)._replace(update_bias=None)
                _refill(held, new)
                replay()
                assert held.residual is not None
                found, what = (held.residual, held.update), f"{tokens} x {hidden}, {stream} residual, replay {number}"
                yield difference(what, found, meaning(spec, new), "the contract")


def backward(setting: Setting) -> Iterator[str | None]:
    """A training step's part: forward and gradients in one graph; their bits are those of a plain call."""
    spec, (tokens, hidden) = GRADIENT_SPECS["sandwich"], _shapes(setting)[-1]
    held = to(operands_for(spec, tokens, hidden), setting.device)
    cotangents = [torch.full((tokens, hidden), 0.5 + i, device=setting.device) for i in range(2)]
    results: list[Tensor] = []

    def run() -> None:
        leaves = Operands(*(None if t is None else t.detach().requires_grad_() for t in held))
        outputs = add_norm(spec, leaves)
        given = [t for t in leaves if t is not None]
        results[:] = torch.autograd.grad([t for t in outputs if t is not None], given, cotangents)

    replay = captured(run, setting.device)
    replayed, captured_results = [], list(results)
    for number in range(1, 2 if setting.small else 1 + REPLAYS):
        _refill(held, operands_for(spec, tokens, hidden, seed=number))
        replay()
        replayed.append([t.clone() for t in (captured_results if setting.device.type == "cuda" else results)])
    for number, found in enumerate(replayed, 1):
        _refill(held, operands_for(spec, tokens, hidden, seed=number))
        run()
        same = all(same_bits(a, b) for a, b in zip(found, results, strict=True))
        yield None if same else f"gradients of {tokens} x {hidden}, replay {number}, differ from a plain call's"


def symmetric(form: str, world: int, setting: Setting) -> Iterator[str | None]:
    """The number of the call is counted on the device, so a replayed launch is a new call; plain calls go in between."""
    request, peers = SMALL_REQUEST if setting.small else REQUESTS["bf16"], peers_of(world, setting)
    blocks, tokens = most_blocks(world, setting), 3 if setting.small else world + 5
    held = Call.make(request, world, tokens, setting.device, 70).copy()
    results: list[tuple[Tensor, Tensor | None]] = []

    def run() -> None:
        results[:] = [held.run(peers, form, blocks) for _ in range(3)]  # an odd number: slots alternate between replays

    replay = captured(run, setting.device)
    captured_results = list(results)
    for number in range(2 if setting.small else 2 * REPLAYS):
        new = Call.make(request, world, tokens, setting.device, 71 + number % 2)
        held.xs.copy_(new.xs)
        _refill(held.operands, new.operands)
        replay()
        for found in captured_results if setting.device.type == "cuda" else results:
            yield new.judge(peers, form, found, f"replay {number}")
        yield new.judge(
            peers, form, new.run(peers, form, max(1, blocks // 2)), f"between replays {number} and {number + 1}"
        )


def compiled(setting: Setting) -> Iterator[str | None]:
    """Between operations that a compiler would like to fuse it with: the operator's bits stay."""
    spec = SPECS["rms"]

    def layer(residual: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        new, normed = add_norm(spec, Operands(residual, update * 2, weight=weight))
        assert normed is not None
        return new, normed

    # without a C++ compiler's half minute on CPU
    traced = torch.compile(layer, fullgraph=True, backend="aot_eager" if setting.small else "inductor")
    for tokens, hidden in _shapes(setting):
        operands = operands_for(spec, tokens, hidden)
        assert operands.residual is not None and operands.update is not None and operands.weight is not None
        there = to(operands, setting.device)
        found = traced(*there[:2], there.weight)  # type: ignore[arg-type] # none of them is None
        expected = meaning(spec, Operands(operands.residual, operands.update * 2, weight=operands.weight))
        yield difference(f"{tokens} x {hidden}", found, expected, "the contract on CPU")
