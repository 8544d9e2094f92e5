"""This machine as `Hardware`: what the product's own linears, boundaries and layers reach here, all ranks at once.

No figure is of the model that is predicted later: shapes are fixed, so that `check` compares a prediction with something else than itself.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

import torch

from tp_residual.bench.bandwidth import copy_bandwidth
from tp_residual.bench.boundary import measure_boundary
from tp_residual.bench.collectives import measure_collectives, transports
from tp_residual.bench.machine import flush_bytes, hardware
from tp_residual.bench.request import CollectivesRequest, ShapesRequest
from tp_residual.bench.timing import Candidate, Clock
from tp_residual.checkpoint.random_weights import fill_random
from tp_residual.errors import RequestError
from tp_residual.inference.engine import Engine
from tp_residual.inference.paged_cache import make_cache
from tp_residual.inference.request import EngineLimits, GenerationSettings, Request
from tp_residual.inference.scheduler import BLOCK_SIZE, blocks_for
from tp_residual.machine import available_memory
from tp_residual.model.attention_backend import HeadGroups, TokenBatch
from tp_residual.model.config import ModelConfig
from tp_residual.model.decoder import CausalLM
from tp_residual.model.layout import ModelLayout
from tp_residual.parallel.blocks import parameter_blocks
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.linear import ColumnParallelLinear
from tp_residual.parallel.packing import pack_weights
from tp_residual.parallel.splits import Split
from tp_residual.plan.hardware import Hardware

STEPS_PER_LAYER = (
    10  # launches that ForwardModel counts for one token: five of attention, three of the MLP, two boundaries
)

_TINY_HIDDEN, _TINY_LENGTH = 64, 1024
_TINY = {
    "model_type": "llama", "hidden_size": _TINY_HIDDEN, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
    "vocab_size": 64, "max_position_embeddings": _TINY_LENGTH, "rms_norm_eps": 1e-5,
}  # fmt: skip
_DEEP, _SHALLOW = 18, 2
_HEADS, _HEAD_DIM, _QUERIES = 8, 64, 512
_SMALL, _LARGE = 2**10, 2**26
_WEIGHT_COPIES = 3


def measure_hardware(clock: Clock, dtypes: Sequence[str], say: Callable[[str], None]) -> Hardware:
    """Every rank calls it and gets the same. say: is told what comes now."""
    group, device = clock.group, clock.device
    on_cpu, threads = device.type == "cpu", torch.get_num_threads()
    total = group.size if on_cpu else 1  # cores and memory are shared: what ranks reach together is the node's
    say("memory")
    memory = copy_bandwidth(clock, 2 * flush_bytes(device)) * total
    gemm, weight, attention = {}, {}, {}
    for name in dtypes:
        dtype = getattr(torch, name)
        say(f"linears and attention in {name}")
        weight[name], gemm[name] = (rate * total for rate in _linears(clock, dtype))
        attention[name] = _attention(clock, dtype) * total
    say("a layer with nothing to do")
    launch_us = _layer_us(clock) / STEPS_PER_LAYER
    say("exchange")
    link = {} if group.size == 1 else _memory_link(clock, launch_us) if on_cpu else _link(clock, launch_us)
    facts = hardware(group.size * threads)
    gpus = facts["gpus"]
    name = f"{gpus[0] if isinstance(gpus, list) and gpus else facts['cpu']}, tp {group.size}, threads {threads}"
    device_bytes = available_memory() if on_cpu else torch.cuda.get_device_properties(device).total_memory
    found = Hardware(
        name=name,
        source="measured",
        memory_gb=_short(min(clock.gather(device_bytes)) / 1e9),
        memory_gb_s=_short(memory),
        gemm_tflops=gemm,
        attention_tflops=attention,
        weight_gb_s=weight,
        launch_us=_short(launch_us),
        notes=f"all ranks at once, torch {torch.__version__}",
        cores=group.size * threads if on_cpu else None,
        devices_per_node=None if on_cpu else group.size,
        **link,
    )
    return Hardware.from_json(clock.gather(found.to_json())[0])


def _linears(clock: Clock, dtype: torch.dtype) -> tuple[float, float]:
    """GB/s at which one token's linear reads its weights, from more of them than caches hold; TFLOP/s over many tokens."""
    device, alone = clock.device, TensorParallelGroup.single(clock.device)
    features = 2048 if device.type == "cpu" else 8192
    outputs = -(-flush_bytes(device) // (dtype.itemsize * features * (_WEIGHT_COPIES - 1)))

    def linear(inputs: int, out: int) -> ColumnParallelLinear:
        made = ColumnParallelLinear(inputs, {"": Split.even(out, 1)}, alone, dtype=dtype)
        torch.nn.init.normal_(made.weight, std=0.02)
        made.requires_grad_(False)
        pack_weights(made, device, dtype)
        return made

    copies = [linear(features, outputs) for _ in range(_WEIGHT_COPIES)]
    turn = count()
    one = torch.randn(1, features, device=device).to(dtype)
    many, side = (256, 1024) if device.type == "cpu" else (4096, 8192)
    square, x = linear(side, side), torch.randn(many, side, device=device).to(dtype)
    with torch.inference_mode():
        samples = clock.interleaved(
            {
                "one": Candidate(lambda: copies[next(turn) % _WEIGHT_COPIES](one)),
                "many": Candidate(lambda: square(x)),
            }
        )
    read = dtype.itemsize * features * outputs / samples["one"].percentile(50) / 1e3
    return _short(read), _short(2 * many * side * side / samples["many"].percentile(50) / 1e6)


def _attention(clock: Clock, dtype: torch.dtype) -> float:
    """TFLOP/s of causal attention over one prompt in the paged cache, counting only the keys that are seen."""
    q, k, v = (torch.randn(_QUERIES, _HEADS, _HEAD_DIM, device=clock.device).to(dtype) for _ in range(3))
    alone, blocks = TensorParallelGroup.single(clock.device), blocks_for(_QUERIES, BLOCK_SIZE)
    heads = {"num_attention_heads": _HEADS, "num_key_value_heads": _HEADS, "hidden_size": _HEADS * _HEAD_DIM}
    config = ModelConfig.from_dict(_TINY | heads | {"head_dim": _HEAD_DIM, "num_hidden_layers": 1}, "heads alone")
    layout = ModelLayout.of(config, 1)
    cache = make_cache(layout, alone, blocks, BLOCK_SIZE, dtype)
    groups = HeadGroups(layout.heads, 0, clock.device)
    batch = TokenBatch.of([(0, 0, [0] * _QUERIES)], clock.device)
    with torch.inference_mode():
        cache.begin([list(range(blocks))], batch)
        cache.append(0, k, v, batch)
        samples = clock.interleaved({"attention": Candidate(lambda: cache.attend(0, q, batch, groups, None))})
    flops = 4 * _HEADS * _HEAD_DIM * _QUERIES * (_QUERIES + 1) / 2
    return _short(flops / samples["attention"].percentile(50) / 1e6)


def _layer_us(clock: Clock) -> float:
    """Of one more layer of a model so small that nothing but fixed costs is left, without other ranks: in a decode step of the engine."""
    alone = TensorParallelGroup.single(clock.device)
    candidates = {}
    for layers in (_SHALLOW, _DEEP):
        model = CausalLM(ModelConfig.from_dict(_TINY | {"num_hidden_layers": layers}, "a tiny model"), alone)
        fill_random(parameter_blocks(model), 0)
        model.requires_grad_(False).eval()
        pack_weights(model, alone.device, model.dtype)
        engine = Engine(model, alone, EngineLimits(max_num_seqs=1))
        candidates[str(layers)] = Candidate(partial(_decode_step, engine))
    samples = clock.interleaved(candidates)
    deep, shallow = (samples[str(layers)].percentile(50) for layers in (_DEEP, _SHALLOW))
    return max(deep - shallow, 0.1) / (_DEEP - _SHALLOW)


def _decode_step(engine: Engine) -> None:
    """The one sequence is replaced when it ends, which is seldom enough for a median not to see."""
    if not engine.has_work:
        engine.add(Request([1] * 8, GenerationSettings(max_new_tokens=_TINY_LENGTH - 8, ignore_eos=True)))
    engine.step()


def _memory_link(clock: Clock, launch_us: float) -> dict[str, float | str]:
    """Ranks on cores: what a boundary of one token takes beyond an operator that has no peers to wait for."""
    with transports(clock.group) as available:
        request = ShapesRequest((1,), (_TINY_HIDDEN,), ("float32",), ("shared",), operator=True)
        rows, notes = measure_boundary(clock, request, available, lambda *_: None)
    us = [row["p50_us"] for row in rows if row["mode"] == "tp" and row["call"] == "operator"]
    if not us:
        raise RequestError(
            f"the boundary `shared` does not run here ({'; '.join(notes)}); give every rank the same host"
        )
    return {"link_latency_us": _short(max(us[0] - launch_us, 0.1)), "boundary": "fused"}


def _link(clock: Clock, launch_us: float) -> dict[str, float | str | tuple[str, ...]]:
    """GPUs: NCCL's all-reduce of a small and a large buffer, as a ring."""
    with transports(clock.group) as available:
        request = CollectivesRequest(_SMALL, _LARGE, _LARGE / _SMALL, "bfloat16", ("all_reduce",), ("nccl",))
        rows, _ = measure_collectives(clock, request, available, lambda *_: None)
    small, large = sorted((row["bytes"], row["p50_us"]) for row in rows if row["place"] == "out")
    ranks = clock.group.size
    crossed = 2 * (ranks - 1) / ranks * (large[0] - small[0])
    return {
        "link_gb_s": _short(crossed / max(large[1] - small[1], 0.1) / 1e3),
        "link_latency_us": _short(max(small[1] - launch_us, 0.1) / (2 * (ranks - 1))),
        "algorithms": ("ring",),
        "boundary": "separate",
    }


def _short(value: float) -> float:
    return float(f"{value:.4g}")
