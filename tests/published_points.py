"""Timings that others published, and what `plan`'s formulas say of the same operation with the constants of a preset.

H100 and A100 with NVLink, bf16, decimal units but MiB where a source counts so. Nothing is fitted to a point. The presets' constants were
chosen with these sources in sight: agreement shows that one set of constants serves all of them, not that it was foretold.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tp_residual.model.config import ModelConfig
from tp_residual.model.layout import ModelLayout
from tp_residual.plan.boundary import Placement, boundary_us
from tp_residual.plan.collectives import collective_us
from tp_residual.plan.forward import ForwardModel, ForwardPass
from tp_residual.plan.hardware import PRESETS, Hardware

# Beyond 30 %, with the error: single kernels of a few microseconds, timed with events that a graph does not pay (the first three), and
# NCCL, which switches protocols by size (a ring's latencies are too long for 8 ranks and too short for a slow path of two).
OUTSIDE = {
    "add+norm, 64 tokens": -0.36,
    "scatter, norm, gather, 64 tokens": -0.40,
    "scatter, norm, gather, 128 tokens": -0.34,
    "ring all-reduce, 2 ranks, 2.0 MiB": -0.59,
    "ring all-reduce, 6 ranks, 0.5 MiB": 0.37,
    "ring all-reduce, 8 ranks, 0.5 MiB": 0.74,
}

H100, A100 = PRESETS["h100-nvlink"], PRESETS["a100-nvlink"]
BY = {name: replace(H100, algorithms=(name,)) for name in ("one_shot", "two_shot", "ring", "multimem")}
# as if nothing had to cross between ranks; the fused boundary's launch and add+norm stay
FREE = replace(H100, link_gb_s=1e9, link_latency_us=1e-9)
TOKEN_BYTES = 2 * 8192


@dataclass(frozen=True)
class Point:
    """predicted and published in the same unit: us, ms or tokens/s."""

    name: str
    predicted: float
    published: float

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def points() -> Iterator[Point]:
    yield from _tokenweave_kernels()
    yield from _all_reduces()
    yield from _decode()
    yield from _prefill()


def _tokenweave_kernels() -> Iterator[Point]:
    """Eight H100, hidden 8192 (TokenWeave, MLSys 2026, its committed CSVs): us of add+norm, NCCL's and the switch's all-reduce,
    reduce-scatter + norm of a share + all-gather by the switch, and all of that in one kernel.
    """
    for tokens, *us in (
        (64, 8.4, 36.0, 16.5, 37.6, 17.1),
        (128, 9.6, 54.9, 20.2, 43.0, 21.7),
        (256, 11.9, 66.5, 28.1, 54.0, 30.1),
        (512, 18.3, 94.7, 43.7, 77.4, 45.1),
        (1024, 29.9, 137.2, 74.8, 124.1, 75.4),
        (2048, 51.8, 219.7, 135.9, 216.9, 137.1),
        (4096, 96.3, 347.6, 257.2, 405.9, 258.2),
        (8192, 184.2, 646.1, 500.2, 780.3, 502.3),
        (32768, 712.4, 2402.0, 1957.0, 3025.0, 1966.0),
    ):
        one, eight, nbytes = Placement(1, 1), Placement(8, 1), tokens * TOKEN_BYTES
        separate = replace(BY["multimem"], boundary="separate")
        predicted = {
            "add+norm": boundary_us(H100, one, tokens, TOKEN_BYTES, sequence_parallel=False),
            "ring all-reduce": collective_us("all_reduce", nbytes, BY["ring"], 1, 8),
            "multimem all-reduce": collective_us("all_reduce", nbytes, BY["multimem"], 1, 8),
            "scatter, norm, gather": boundary_us(separate, eight, tokens, TOKEN_BYTES, sequence_parallel=True),
            "one kernel": boundary_us(BY["multimem"], eight, tokens, TOKEN_BYTES, sequence_parallel=True),
        }
        for (name, value), published in zip(predicted.items(), us, strict=True):
            yield Point(f"{name}, {tokens} tokens", value, published)
    for collective, published in (("reduce_scatter", 29.0), ("all_gather", 30.0)):
        predicted_us = collective_us(collective, 64 * TOKEN_BYTES, BY["ring"], 1, 8)  # type: ignore[arg-type]
        yield Point(f"ring {collective}, 64 tokens", predicted_us, published)


def _all_reduces() -> Iterator[Point]:
    """H100, us (vLLM pull requests 24111, 2 and 6 ranks, and 42324, 8 ranks)."""
    for algorithm, ranks, mib, us in (
        ("one_shot", 2, 0.5, 7), ("ring", 2, 0.5, 11), ("one_shot", 2, 2.0, 13), ("ring", 2, 2.0, 37),
        ("one_shot", 6, 0.5, 13), ("multimem", 6, 0.5, 13), ("ring", 6, 0.5, 23),
        ("one_shot", 6, 2.0, 38), ("multimem", 6, 2.0, 21), ("ring", 6, 2.0, 43),
        ("one_shot", 6, 4.0, 70), ("multimem", 6, 4.0, 31), ("ring", 6, 4.0, 53),
        ("ring", 8, 0.5, 24), ("multimem", 8, 0.5, 11), ("two_shot", 8, 0.5, 15),
        ("ring", 8, 4.0, 50), ("multimem", 8, 4.0, 27), ("two_shot", 8, 4.0, 37),
        ("ring", 8, 16.0, 121), ("multimem", 8, 16.0, 87), ("two_shot", 8, 16.0, 125),
        ("ring", 8, 64.0, 316), ("multimem", 8, 64.0, 320), ("two_shot", 8, 64.0, 468),
    ):  # fmt: skip
        predicted = collective_us("all_reduce", mib * 2**20, BY[algorithm], 1, ranks)
        yield Point(f"{algorithm} all-reduce, {ranks} ranks, {mib} MiB", predicted, us)


def _llama(**sizes: int) -> ModelConfig:
    values = {
        "model_type": "llama",
        "max_position_embeddings": 1 << 17,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    return ModelConfig.from_dict(values | sizes, "published sizes")


_70B = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
}  # fmt: skip
LLAMA_2_7B = _llama(
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    vocab_size=32000,
)
LLAMA_2_70B, LLAMA_3_70B = _llama(**_70B, vocab_size=32000), _llama(**_70B, vocab_size=128256)


def _us(hardware: Hardware, config: ModelConfig, tp_size: int, work: ForwardPass) -> float:
    model = ForwardModel(hardware, ModelLayout.of(config, tp_size), Placement(tp_size, 1), "bfloat16")
    return model.cost(work, sequence_parallel=False).total_us


def _decode() -> Iterator[Point]:
    """Tokens/s of one sequence. gpt-fast's README, A100; Ladder Residual (ICML 2025), H100 and NCCL, with communication and without."""
    for name, config, tp_size, rate in (
        ("7B", LLAMA_2_7B, 1, 104.9), ("7B", LLAMA_2_7B, 8, 328.4), ("70B", LLAMA_2_70B, 8, 62.5)
    ):  # fmt: skip
        yield Point(
            f"gpt-fast decode {name}, tp {tp_size}", 1e6 / _us(A100, config, tp_size, ForwardPass(1, 1, 100)), rate
        )
    nccl = replace(BY["ring"], boundary="separate")
    for tp_size, standard, free in ((8, 77.4, 110.6), (4, 59.4, 69.0)):
        work = ForwardPass(1, 1, 1024)
        yield Point(f"70B decode, NCCL, tp {tp_size}", 1e6 / _us(nccl, LLAMA_3_70B, tp_size, work), standard)
        yield Point(f"70B decode, no communication, tp {tp_size}", 1e6 / _us(FREE, LLAMA_3_70B, tp_size, work), free)


def _prefill() -> Iterator[Point]:
    """Llama-3.3-70B, tp 8, H100, ms (TokenWeave): vLLM with the switch's all-reduce, and with communication removed."""
    switch = replace(BY["multimem"], boundary="separate")
    for tokens, baseline, free in (
        (1024, 53.7, 41.9), (4096, 179.0, 145.0), (16384, 744.0, 610.0), (65536, 3918.0, 3338.0)
    ):  # fmt: skip
        work = ForwardPass(1, tokens)
        yield Point(f"70B prefill, {tokens} tokens", _us(switch, LLAMA_3_70B, 8, work) / 1e3, baseline)
        yield Point(f"70B prefill, no communication, {tokens} tokens", _us(FREE, LLAMA_3_70B, 8, work) / 1e3, free)
