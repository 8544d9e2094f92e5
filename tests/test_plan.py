"""`plan`: a model computed on paper, published figures, `audit`'s bytes, and what must hold of any hardware."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from published_points import OUTSIDE, points

from tp_residual.audit import audit
from tp_residual.bench.boundary import passes
from tp_residual.bench.request import Rules
from tp_residual.bench.timing import Clock
from tp_residual.errors import RequestError, SplitError
from tp_residual.model.config import ModelConfig
from tp_residual.model.layout import ModelLayout
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.plan.boundary import Crossover, Placement, boundary_us, crossover
from tp_residual.plan.check import check_plan
from tp_residual.plan.estimate import Plan, PlanRequest, plan
from tp_residual.plan.forward import Cost, ForwardModel, ForwardPass, seen_keys
from tp_residual.plan.hardware import PRESETS, Hardware
from tp_residual.plan.measure import measure_hardware
from tp_residual.plan.result import CheckedPass
from tp_residual.plan.tables import print_check, verdicts
from tp_residual.testing import run_ranks

# 1e8 flop/s, 1e8 B/s of memory, 1e7 B/s of link: every term of the tiny model below counts.
PAPER = Hardware(
    name="paper", source="datasheet", devices_per_node=2, memory_gb=1e-3, memory_gb_s=0.1, gemm_tflops={"float32": 1e-4}, launch_us=1.0,
    link_gb_s=0.01, link_latency_us=3.0, algorithms=("ring",),
)  # fmt: skip
ONE_LAYER = ModelConfig.from_dict(
    {
        "model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 32, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    },
    "on paper",
)  # fmt: skip
MEASURED = replace(
    PRESETS["cpu-2core"],
    source="measured",
    notes="",
    inter_node_gb_s=None,
    inter_node_latency_us=None,
    memory_efficiency=1.0,
)


def request(**changes: Any) -> PlanRequest:
    return PlanRequest(
        **(
            {"tp_sizes": (1, 2), "tokens": (1, 64), "batch": (1, 3), "context": 10, "nodes": 1, "dtype": "float32"}
            | changes
        )
    )


def model(
    config: ModelConfig, hardware: Hardware, tp_size: int, dtype: str = "float32", nodes: int = 1
) -> ForwardModel:
    return ForwardModel(hardware, ModelLayout.of(config, tp_size), Placement(tp_size, nodes), dtype)


# ---- on paper: one layer, tp=2: each rank one query and one KV head of 4, 8 intermediate features, 16 vocabulary rows, fp32


def near(cost: Cost, **us: float) -> None:
    assert {name: getattr(cost, name) for name in us} == pytest.approx(us, rel=1e-12)


def test_decode_on_paper() -> None:
    found = model(ONE_LAYER, PAPER, 2).cost(ForwardPass(1, 1, context=9), sequence_parallel=False)
    near(
        found,
        # bytes over 100 B/us (arithmetic is below): qkv 8x12 weights and 20 values, o_proj 4x8 and 12, gate/up 8x16 and 24,
        # down 8x8 and 16, head 8x16 and 24
        gemm_us=(4 * (96 + 20) + 4 * (32 + 12) + 4 * (128 + 24) + 4 * (64 + 16) + 4 * (128 + 24)) / 100,
        attention_us=4
        * (2 * 4 + 2 * 10 * 4)
        / 100,  # q and out; 10 keys and values of 4 (160 flop would take 1.6 us, these 3.52)
        # embedding 16 values, rope 16, cache 16, swiglu 3 x 8, the row 16, its logits 16
        elementwise_us=4 * (16 + 16 + 16 + 24 + 16 + 16) / 100,
        launch_us=1 + 5 + 3 + 3,
        # three boundaries: launch, two steps of 3 us, 2 x 32 / 2 bytes over 10 B/us; launch, 4 x 32 bytes. One gather of 2 x 16 / 2 bytes.
        boundary_us=3 * (1 + 6 + 3.2 + 1 + 1.28) + (1 + 3 + 1.6),
    )
    assert found.total_us == pytest.approx(84.48)


def test_prefill_on_paper() -> None:
    """16 tokens: arithmetic now takes longer than memory, 136 pairs of query and key."""
    found = model(ONE_LAYER, PAPER, 2).cost(ForwardPass(1, 16), sequence_parallel=True)
    near(
        found,
        gemm_us=2 * 16 * (8 * 12 + 4 * 8 + 8 * 16 + 8 * 8) / 100 + 4 * (128 + 24) / 100,
        attention_us=4 * 4 * 136 / 100,
        elementwise_us=4 * 16 * (16 + 16 + 16 + 24) / 100 + 4 * (16 + 16) / 100,
        launch_us=12,
        # reduce-scatter and all-gather: launch, one step, 512 / 2 bytes; between them add and norm of 8 tokens
        boundary_us=3 * (2 * (1 + 3 + 25.6) + 1 + 4 * 8 * 32 / 100) + 5.6,
    )


def test_two_nodes_on_paper() -> None:
    """tp=2, a rank on each: ring steps and bytes of the network instead of the link's."""
    hardware = replace(PAPER, inter_node_gb_s=0.002, inter_node_latency_us=20.0)
    found = model(ONE_LAYER, hardware, 2, nodes=2).cost(ForwardPass(1, 1, context=9), sequence_parallel=False)
    near(found, boundary_us=3 * (1 + 40 + 16 + 1 + 1.28) + (1 + 20 + 8))


def test_four_ranks_on_two_nodes_by_levels() -> None:
    """All-reduce of 256 B: scatter within (1 step, 128 B), ring over the nodes of 128 B (2 steps, 128 B), gather within."""
    hardware = replace(PAPER, inter_node_gb_s=0.002, inter_node_latency_us=20.0)
    assert boundary_us(hardware, Placement(4, 2), 8, 32, sequence_parallel=False) == pytest.approx(
        1 + (3 + 12.8) + (40 + 64) + (3 + 12.8) + 1 + 4 * 256 / 100
    )


def test_the_slowest_rank_decides() -> None:
    """9 query and 3 KV heads at tp=2: rank 0 has 5 and 2, rank 1 4 and 2; 59 features are 30 and 29, 101 rows 51 and 50."""
    config = tiny_models.config("llama")
    found = model(config, PAPER, 2).cost(ForwardPass(1, 1), sequence_parallel=False)
    d, h = config.head_dim, config.hidden_size
    weights = 2 * (h * d * (5 + 4) + 5 * d * h + 3 * 30 * h) + 51 * h  # two layers
    values = 2 * ((h + 9 * d) + (5 * d + h) + (h + 60) + (30 + h)) + h + 51
    assert found.gemm_us == pytest.approx(4 * (weights + values) / 100)


@pytest.mark.parametrize("window", [None, 1, 3, 5, 100])
def test_keys_that_are_seen(window: int | None) -> None:
    for queries, context in ((1, 0), (1, 7), (4, 0), (4, 2), (9, 4)):
        counted = sum(min(context + i + 1, window or 10**9) for i in range(queries))
        assert seen_keys(queries, context, window) == counted


def test_passes_through_memory_are_those_of_bench() -> None:
    for ranks in (2, 3, 4, 8):
        hardware = Hardware(
            name="c", source="datasheet", cores=ranks, memory_gb=1, memory_gb_s=ranks, gemm_tflops={"float32": 1}, launch_us=1e-9,
            link_latency_us=1e-9,
        )  # fmt: skip
        for mode, sequence_parallel in (("tp", False), ("sp", True)):
            us = boundary_us(hardware, Placement(ranks, 1), 24 * ranks, 1000, sequence_parallel=sequence_parallel)
            assert us == pytest.approx(passes(mode, ranks) * 24 * ranks, rel=1e-6)


# ---- published


def test_published_points() -> None:
    """Within 30 %: one set of constants for all, where one collective is published with values 1.5 times apart. Those outside are named."""
    found = {each.name: each.error for each in points()}
    outside = {name: error for name, error in found.items() if abs(error) > 0.30}
    assert set(outside) == set(OUTSIDE), outside
    for name, error in outside.items():
        assert error == pytest.approx(OUTSIDE[name], abs=0.02), name
    errors = sorted(map(abs, found.values()))
    assert len(found) == 87 and errors[len(errors) // 2] < 0.15


def test_sharding_with_multimem_and_separate_norms_never_pays_as_published() -> None:
    hardware = replace(PRESETS["h100-nvlink"], algorithms=("multimem",), boundary="separate")
    found = crossover(hardware, Placement(8, 1), 2 * 8192)
    assert found.tokens is None and "two collectives cost more" in found.reason


# ---- what must hold of any hardware

PLACES = [Placement(2, 1), Placement(4, 1), Placement(8, 1), Placement(2, 2), Placement(8, 2), Placement(6, 3)]


@pytest.mark.parametrize("name", PRESETS)
def test_a_crossover_is_where_the_times_cross(name: str) -> None:
    for changes in ({}, {"boundary": "separate"}):
        hardware = replace(PRESETS[name], **changes)
        for place in PLACES:
            if place.ranks_per_node > hardware.places_per_node:
                continue
            found = crossover(hardware, place, 2 * 8192)

            def gain(tokens: int, hardware: Hardware = hardware, place: Placement = place) -> float:
                tp, sp = (boundary_us(hardware, place, tokens, 2 * 8192, sequence_parallel=sp) for sp in (False, True))
                return tp - sp

            if found.tokens is None:
                assert gain(1 << 20) <= 0
            else:
                assert gain(found.tokens) > 0 and (found.tokens == 1 or gain(found.tokens - 1) <= 0)
                assert all(gain(1 << k) > 0 for k in range(21) if 1 << k >= found.tokens)


def test_some_crossover_exists_and_some_does_not() -> None:
    """So that the test above compares something."""
    ring = replace(PRESETS["h100-nvlink"], algorithms=("ring",), boundary="separate")
    assert crossover(ring, Placement(8, 1), 2 * 8192).tokens is not None
    assert crossover(PRESETS["h100-nvlink"], Placement(8, 1), 2 * 8192).tokens is None
    assert crossover(ring, Placement(1, 1), 2) == Crossover(None, "one rank has nothing to shard")


@pytest.mark.parametrize("name", PRESETS)
def test_better_hardware_is_never_slower(name: str) -> None:
    hardware, config = PRESETS[name], tiny_models.config("llama")
    better = {
        field: 2 * getattr(hardware, field)
        for field in ("memory_gb_s", "link_gb_s", "inter_node_gb_s")
        if getattr(hardware, field)
    }
    better |= {
        field: getattr(hardware, field) / 2 for field in ("launch_us", "link_latency_us", "inter_node_latency_us")
    }
    better |= {"gemm_tflops": {dtype: 2 * rate for dtype, rate in hardware.gemm_tflops.items()}}
    wanted = request(tp_sizes=(1, 2, 4), nodes=2, batch=(1, 64))
    before = plan(config, hardware, wanted).rows
    helped = 0
    for field, value in better.items():
        for old, new in zip(before, plan(config, replace(hardware, **{field: value}), wanted).rows, strict=True):
            if old.cost is not None and new.cost is not None:
                assert new.cost.total_us <= old.cost.total_us, field
                helped += new.cost.total_us < old.cost.total_us
    assert helped > len(before)


def test_time_grows_with_work() -> None:
    for sequence_parallel in (False, True):
        each = model(tiny_models.config("qwen2"), PRESETS["h100-nvlink"], 2, "bfloat16")
        times = [each.cost(ForwardPass(1, n), sequence_parallel=sequence_parallel).total_us for n in (1, 8, 64, 512)]
        times += [each.cost(ForwardPass(512, 1, c), sequence_parallel=sequence_parallel).total_us for c in (10**4,)]
        assert all(a < b for a, b in pairwise(times))


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_memory_is_audits(name: str) -> None:
    config = tiny_models.config(name)
    wanted = request(tp_sizes=(1, 3, 8), batch=(2, 5), tokens=(1, 33))
    for row in plan(config, replace(PAPER, devices_per_node=8), wanted).rows:
        said = audit(
            config, row.tp, sequence_parallel=row.mode == "sp", dtype="float32", tokens=33, sequences=5, context=10
        )
        memory = row.memory
        assert memory.weight_bytes == max(share.weight_bytes for share in said.ranks)
        assert memory.kv_bytes_per_token == max(share.kv_bytes_per_token for share in said.ranks)
        assert (memory.stream_bytes, memory.activation_bytes, memory.kv_cache_bytes, memory.needed_bytes) == (
            said.stream_bytes, said.activation_bytes, said.kv_cache_bytes, said.needed_bytes
        )  # fmt: skip


def test_the_most_context_fits_and_one_token_more_does_not() -> None:
    config, hardware = tiny_models.config("llama"), replace(PAPER, memory_gb=2e-4)
    (row,) = (
        row
        for row in plan(config, hardware, request(tp_sizes=(2,), batch=(1,), tokens=(1,))).rows
        if row.step == "prefill" and row.mode == "tp"
    )
    most, memory = row.memory.max_context_tokens, row.memory
    needed = memory.needed_bytes - memory.kv_cache_bytes
    assert (
        0 < most
        and needed + most * memory.kv_bytes_per_token <= 200_000 < needed + (most + 1) * memory.kv_bytes_per_token
    )


def test_ranks_on_cores_share_memory_and_bandwidth() -> None:
    rows = plan(tiny_models.config("llama"), MEASURED, request(tp_sizes=(1, 2))).rows
    one, two = (next(row for row in rows if row.tp == tp) for tp in (1, 2))
    assert (one.memory.device_bytes, two.memory.device_bytes) == (16 * 10**9, 8 * 10**9)
    assert one.cost is not None and two.cost is not None
    assert two.cost.gemm_us > 0.99 * one.cost.gemm_us  # half the weights at half the rate; rank 0 has a head more


def test_the_passes_that_are_predicted() -> None:
    """A decoding sequence has `context` tokens with the new one; a prompt has none before it."""
    rows = plan(ONE_LAYER, PAPER, request(tp_sizes=(1,))).rows
    assert [(row.step, row.tokens, row.sequences, row.context) for row in rows] == [
        ("prefill", 1, 1, 0), ("prefill", 64, 1, 0), ("decode", 1, 1, 9), ("decode", 3, 3, 9)
    ]  # fmt: skip


# ---- what follows


def decided(**changes: Any) -> tuple[Plan, list[str]]:
    found = plan(ONE_LAYER, replace(PAPER, **changes), request())
    return found, list(verdicts(found))


def test_the_best_layouts() -> None:
    free = {"link_gb_s": 1e6, "link_latency_us": 1e-6, "launch_us": 1e-6}
    for changes, best in (({}, 1), (free, 2)):
        found, lines = decided(**changes)
        chosen = found.fastest("decode", 1)
        assert chosen is not None and chosen.cost is not None and chosen.tp == best
        others = [
            row.cost.total_us
            for row in found.rows
            if row.step == "decode" and row.sequences == 1 and row.cost is not None
        ]
        assert chosen.cost.total_us == min(others) and len(others) == 3
        assert any(line.startswith(f"decode of 1 sequence: fastest with tp={best}") for line in lines)


def test_what_does_not_fit_is_a_row_that_says_so() -> None:
    found, lines = decided(memory_gb=1e-6)
    assert found.fastest("decode", 1) is None and "decode of 1 sequence: no layout fits" in lines
    assert all(row.cost is not None and not row.fits for row in found.rows)
    assert any(line.startswith("tp=2 on one node does not fit: ") for line in lines)


def test_what_cannot_be_placed_is_a_row_that_says_so() -> None:
    for changes, nodes, why in (
        ({"devices_per_node": 1}, 1, "2 ranks on a node of 1 GPUs; use more --nodes"),
        ({"devices_per_node": 1}, 2, "the hardware file has no inter_node_gb_s; add it to predict several nodes"),
        (
            {"link_gb_s": None, "link_latency_us": None, "algorithms": ()},
            1,
            "the hardware file has no link between ranks of a node",
        ),
    ):
        found = plan(ONE_LAYER, replace(PAPER, **changes), request(nodes=nodes))
        two = [row for row in found.rows if row.tp == 2]
        assert two and all(row.cost is None and not row.fits and row.why.startswith(why) for row in two)
        best = found.fastest("decode", 1)
        assert best is not None and best.tp == 1
        assert any(line.startswith(f"not predicted: tp=2: {why}") for line in verdicts(found))


def test_one_node_or_several() -> None:
    """Ranks on cores share their memory's bandwidth: a second node brings another one, and its network decides."""
    config, hardware = tiny_models.config("llama"), replace(PRESETS["cpu-2core"], launch_us=1e-3)
    wanted = request(tp_sizes=(1, 2), nodes=2)
    slow = replace(hardware, inter_node_latency_us=1e4)
    fast = replace(hardware, inter_node_latency_us=1e-3, inter_node_gb_s=1e3)
    for each, nodes, text in ((slow, 1, "one node; the best on several"), (fast, 2, "2 nodes, ")):
        found = plan(config, each, wanted)
        best = found.fastest("decode", 3)
        assert best is not None and best.nodes == nodes
        assert any(line.startswith(f"decode of 3 sequences: {text}") for line in verdicts(found))


# ---- hardware files


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_files_that_say_datasheet(name: str, tmp_path: Path) -> None:
    hardware = PRESETS[name]
    assert hardware.name == name and hardware.source == "datasheet"
    assert hardware.origin().startswith("datasheet peaks") and "nothing was measured" in hardware.origin()
    hardware.write(str(tmp_path / "file.json"))
    assert Hardware.load(str(tmp_path / "file.json")) == hardware == Hardware.load(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_gbs": 3}, "unknown field 'memory_gbs'; did you mean memory_gb_s?"),
        ({"memory_gb": None}, "memory_gb=None must be a finite number above 0"),
        ({"memory_gb_s": -1}, "memory_gb_s=-1 must be a finite number above 0"),
        ({"memory_gb_s": "fast"}, "memory_gb_s='fast' must be a finite number above 0"),
        ({"launch_us": True}, "launch_us=True must be a finite number above 0"),
        ({"launch_us": float("nan")}, "launch_us=nan must be a finite number above 0"),
        ({"source": "guessed"}, "source='guessed' is not one of datasheet, measured"),
        ({"boundary": []}, "boundary=[] is not one of fused, separate"),
        ({"gemm_tflops": {}}, "gemm_tflops={} has no dtype"),
        ({"gemm_tflops": {"int4": 1}}, "gemm_tflops dtype='int4' is not one of"),
        ({"gemm_tflops": 3}, "gemm_tflops=3 must be an object by dtype"),
        ({"weight_gb_s": {"float32": 0}}, "weight_gb_s.float32=0 must be a finite number above 0"),
        ({"memory_efficiency": 1.5}, "memory_efficiency=1.5 must be at most 1"),
        ({"cores": 4}, "devices_per_node=2 and cores=4: give one of them"),
        ({"devices_per_node": None}, "devices_per_node=None and cores=None: give one of them"),
        ({"devices_per_node": 2.5}, "devices_per_node=2.5 must be a whole number"),
        ({"devices_per_node": None, "cores": 2}, "link_gb_s and algorithms mean nothing beside cores"),
        ({"link_gb_s": None}, "belong together; give all of them or none"),
        ({"algorithms": []}, "belong together; give all of them or none"),
        ({"algorithms": ["tree"]}, "algorithms entry='tree' is not one of one_shot, two_shot, ring, multimem"),
        ({"algorithms": "ring"}, "algorithms='ring' must be a list"),
        ({"inter_node_gb_s": 1}, "inter_node_gb_s=1 and inter_node_latency_us=None belong together"),
        ({"name": 3}, "name=3 must be text"),
    ],
)
def test_a_bad_hardware_file_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    path.write_text(json.dumps(PAPER.to_json() | changes))
    with pytest.raises(RequestError) as raised:
        Hardware.load(str(path))
    assert message in str(raised.value) and str(path) in str(raised.value)


def test_what_is_no_hardware_file(tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    for text, message in (
        ("{", "is not JSON"),
        ("[1]", "is not an object"),
        ('{"name": "x", "source": "measured"}', "field memory_gb is missing, and memory_gb_s"),
    ):
        path.write_text(text)
        with pytest.raises(RequestError, match=message):
            Hardware.load(str(path))
    with pytest.raises(
        RequestError, match=r"--hardware h100 is no preset \(a100-nvlink, .* and no file that can be read"
    ):
        Hardware.load("h100")


# ---- the command


def command(*options: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-X", "importtime", "-m", "tp_residual", "plan", *options]
    environment = os.environ | {"COLUMNS": "100"}
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=timeout, env=environment)


@pytest.fixture
def model_dir(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(tiny_models.MODELS["llama"] | {"torch_dtype": "bfloat16"}))
    return str(tmp_path)


def test_the_command_predicts_without_torch(model_dir: str, tmp_path: Path) -> None:
    out, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    common = ("--model", model_dir, "--hardware", "h100-nvlink", "--batch", "1,16", "--nodes", "2", "--context", "64")
    done = command(*common, "--output", str(out), "--plot", str(picture))
    assert done.returncode == 0, done.stderr[-2000:]
    assert not [line for line in done.stderr.splitlines() if line.endswith("| torch")]
    assert max(map(len, done.stdout.splitlines())) <= 100 and "…" not in done.stdout
    assert "hardware h100-nvlink: datasheet peaks" in done.stdout and "nothing was measured" in " ".join(
        done.stdout.split()
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(out.read_text())
    assert found["what"] == "plan" and found["hardware"]["source"] == "datasheet"
    # tp 1, 2, 4, 8; on one node and, but for tp=1, on two; SP where there are several ranks; tokens 1 and 64, batch 1 and 16
    assert len(found["rows"]) == (1 + 3 * 2 * 2) * 4
    for row in found["rows"]:
        parts = ("gemm_us", "attention_us", "elementwise_us", "launch_us", "boundary_us")
        assert row["total_us"] == pytest.approx(sum(row[part] for part in parts), abs=0.01)
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["total_us"] * 1e6, rel=1e-3)
    assert {(row["tp"], row["nodes"]) for row in found["crossovers"]} == {
        (1, 1),
        *((t, n) for t in (2, 4, 8) for n in (1, 2)),
    }


def test_bad_requests_are_named_without_torch(model_dir: str, tmp_path: Path) -> None:
    common = ("--model", model_dir, "--hardware", "h100-nvlink")
    measured = tmp_path / "measured.json"
    MEASURED.write(str(measured))
    for options, message in (
        ((*common, "--tp", "2,12"), "num_attention_heads=9 cannot be split over tp_size=12; use 1 to 9"),
        ((*common, "--tp", "two"), "--tp 'two' is not a list of whole numbers"),
        ((*common, "--tp", "0"), "--tp 0 must be at least 1"),
        ((*common, "--batch", "0"), "--batch 0 must be at least 1"),
        ((*common, "--nodes", "0"), "--nodes 0 must be at least 1"),
        ((*common, "--tokens", "65"), "--tokens 65 exceeds max_position_embeddings=64; use at most that"),
        ((*common, "--context", "65"), "--context 65 exceeds max_position_embeddings=64; use at most that"),
        ((*common, "--output", str(tmp_path)), "is a folder; name a file in it"),
        ((*common, "--weights", "random:0"), "--weights is of --check"),
        ((*common, "--check", "--tp", "2"), "--check compares a description of this machine with it, and h100-nvlink is a datasheet's"),
        (("--model", model_dir), "plan needs --model DIR and --hardware FILE or one of a100-nvlink"),
        ((*common[:2], "--hardware", "cpu-2core", "--dtype", "float16"), "has no gemm_tflops for dtype float16; use float32, bfloat16"),
        ((*common[:2], "--hardware", str(measured), "--check", "--tp", "1,2"), "--check runs ranks of one tp size and --tp is 1,2"),
        ((*common[:2], "--hardware", str(measured), "--check", "--tp", "4"), "4 ranks on a node of 2 cores"),
        (
            (*common[:2], "--hardware", str(measured), "--check", "--weights", "random:0", "--batch", "9000000000"),
            "--check with 1 ranks needs at least",
        ),
        (("--measure", str(measured), "--check"), "--measure describes this machine"),
    ):  # fmt: skip
        done = command(*options)
        assert done.returncode == 2 and message in done.stderr, (options, done.stderr[-500:])
        assert "Traceback" not in done.stderr and not [
            line for line in done.stderr.splitlines() if line.endswith("| torch")
        ]


# ---- this machine


def measure(group: TensorParallelGroup) -> None:
    """Of the same rank or of another: one description."""
    # the cost of a step is a difference of two medians, which five samples lost in noise now and then
    clock = Clock(group, Rules(iters=25, warmup=1, seconds=0.5))
    found = measure_hardware(clock, ("float32",), lambda _: None)
    assert found.source == "measured" and found.cores == group.size and not found.devices_per_node
    assert found.link_latency_us is not None and found.inter_node_gb_s is None
    assert len({json.dumps(each) for each in clock.gather(found.to_json())}) == 1
    # a core of any machine: 1 to 1000 GB/s, a GFLOP/s to 10 TFLOP/s, 0.1 us to 0.1 s
    assert 0.3 < found.memory_gb_s < 1000 and 1e-4 < found.gemm_tflops["float32"] < 10 and 0.1 < found.launch_us < 1e5


def test_measuring_this_machine() -> None:
    run_ranks(2, measure)


def compare(group: TensorParallelGroup, folder: str, hardware: dict[str, Any]) -> None:
    clock = Clock(group, Rules(iters=5, warmup=1, seconds=0.05))
    wanted = request(tp_sizes=(group.size,), tokens=(1, 9))
    rows = check_plan(clock, folder, Hardware.from_json(hardware), wanted, random_seed=0, say=lambda _: None)
    predicted = plan(ModelConfig.from_dir(folder), Hardware.from_json(hardware), wanted).rows
    assert [(row.mode, row.step, row.tokens, row.sequences, row.context) for row in rows] == [
        (row.mode, row.step, row.tokens, row.sequences, row.context) for row in predicted
    ]
    for row, said in zip(rows, predicted, strict=True):
        assert said.cost is not None and row.predicted_us == said.cost.total_us
        assert 0 < row.p5_us <= row.measured_us <= row.p95_us and row.samples >= 3
        assert row.error == row.predicted_us / row.measured_us - 1
    # a pass has two layers with five boundaries: more than 10 us and, on any machine, less than a minute
    assert all(10 < row.measured_us < 6e7 for row in rows)


def test_a_check_measures_every_predicted_pass(model_dir: str) -> None:
    run_ranks(2, compare, model_dir, MEASURED.to_json())


def test_a_bad_prediction_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        CheckedPass(2, "tp", "decode", 1, 1, 127, predicted, 1000.0, 900.0, 1100.0, 5)
        for predicted in (1000.0, 1100.0, 10_000.0)
    ]
    print_check(rows, MEASURED)
    out = capsys.readouterr().out
    assert "+900%" in out and "largest 900 %" in out and "median 10 %" in out
    assert "this machine, measured" in out and max(map(len, out.splitlines())) <= 100


def test_more_ranks_than_heads_is_refused() -> None:
    with pytest.raises(SplitError, match="num_attention_heads=9 cannot be split over tp_size=12; use 1 to 9"):
        plan(tiny_models.config("llama"), PAPER, request(tp_sizes=(12,)))
