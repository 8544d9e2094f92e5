"""`verify` passes what is right, and names each fault it claims to know; dumps of any two runs can be compared.

Functions named check_* run on every rank.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle as unsharded
import pytest
import tiny_models
import torch
from tiny_models import MODELS, config, prompts, random_weights, sharded
from torch import Tensor

from tp_residual.checkpoint.files import CheckpointFiles
from tp_residual.cli import main
from tp_residual.errors import RequestError
from tp_residual.inference.loading import load_model
from tp_residual.inference.tokenizer import Tokenizer
from tp_residual.model.config import ModelConfig, RopeScaling
from tp_residual.model.decoder import CausalLM
from tp_residual.model.rope import rope_tables
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.testing import relative_error, run_ranks
from tp_residual.verify import metrics
from tp_residual.verify import run as verification
from tp_residual.verify.against import verify_against_reference
from tp_residual.verify.backward import verify_backward
from tp_residual.verify.compare import compare_dumps
from tp_residual.verify.dump import DumpInfo, read_dump, write_dump
from tp_residual.verify.faults import FAULTS, inject
from tp_residual.verify.metrics import beyond_rounding, difference, token_errors
from tp_residual.verify.oracle import Oracle, site_names
from tp_residual.verify.random_source import RandomWeights
from tp_residual.verify.report import VerifyReport
from tp_residual.verify.run import random_sequences, verify, verify_model
from tp_residual.verify.transformers_dump import dump_transformers

BATCH = prompts(3)


def build(
    group: TensorParallelGroup, name: str, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[CausalLM, dict[str, Tensor]]:
    weights = random_weights(config(name), dtype=dtype)
    return sharded(config(name), group, weights, dtype=dtype, **options), weights


# ---- the oracle ----


@pytest.mark.parametrize("name", MODELS)
def test_the_oracle_equals_the_tests_own(name: str) -> None:
    """Two oracles that share nothing, in fp64: 1e-12 as in test_model."""
    weights = random_weights(config(name))
    with torch.no_grad():
        expected = unsharded.Oracle(config(name), weights)(BATCH)
    ours = Oracle(config(name), weights)
    states = list(ours.states(BATCH))
    assert [state.site for state in states] == list(expected.streams) == site_names(2)
    for state in states:
        assert relative_error(state.stream, expected.streams[state.site]) < 1e-12
        assert relative_error(state.update, expected.updates[state.site]) < 1e-12
    assert relative_error(ours.logits(states[-1].stream), expected.logits) < 1e-12


@pytest.mark.parametrize(
    ("kind", "factor", "scaling"),
    [
        ("linear", 4.0, None),
        ("dynamic", 2.0, None),
        ("llama3", 8.0, RopeScaling(original_max_position_embeddings=64, low_freq_factor=1.0, high_freq_factor=4.0)),
        ("yarn", 4.0, RopeScaling(original_max_position_embeddings=300, attention_factor=1.2)),
        ("yarn", 4.0, RopeScaling(original_max_position_embeddings=300, attention_factor=1.2, truncate=False)),
    ],
)
def test_the_oracles_rotation_is_the_models(kind: str, factor: float, scaling: RopeScaling | None) -> None:
    """test_rope proves the model's tables against Transformers. 80 tokens are more than the 64 positions where "dynamic" begins; 32 pairs
    have frequencies on both sides of every border, and between.
    """
    changed = replace(config("llama"), head_dim=64, rope_type=kind, rope_factor=factor, rope_scaling=scaling)
    x = torch.randn(80, changed.head_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(80)
    cos, sin = rope_tables(changed, positions, torch.float64, torch.full((80,), 80))
    low, high = x.chunk(2, dim=-1)
    expected = x * cos + torch.cat([-high, low], dim=-1) * sin
    assert relative_error(Oracle(changed, {})._rotated(x, positions), expected) < 1e-12


# ---- metrics ----


def test_errors_are_by_token_and_nan_is_infinite() -> None:
    reference = torch.tensor([[3.0, 4.0], [30.0, 40.0], [0.0, 0.0], [1.0, 1.0]])
    value = torch.tensor([[3.0, 4.5], [30.0, 40.5], [0.0, 0.0], [float("nan"), 1.0]])
    assert token_errors(value, reference).tolist() == pytest.approx([0.1, 0.01, 0.0, float("inf")])
    found = difference(value[:3], reference[:3], torch.float32)
    assert (found.worst_token, found.worst_dimension) == (0, 1)
    assert found.max_error == pytest.approx(0.1) and found.median_error == pytest.approx(0.01)
    # the last place of 4.0 in fp32 is 2^-21
    assert found.max_ulp == 0.5 * 2**21


def test_only_what_exceeds_the_allowed_rounding_counts() -> None:
    reference = torch.tensor([[1.0, 1.0], [1.0, 1.0]])
    value = reference + torch.tensor([[0.1, -0.1], [0.1, 0.4]])
    beyond = beyond_rounding(value, reference, torch.full((2, 2), 0.1001), torch.tensor([2.0, 2.0]))
    assert beyond.tolist() == pytest.approx([0.0, 0.29990 / 2], abs=1e-4)


# ---- right models pass ----


def check_right(group: TensorParallelGroup) -> list[str]:
    failures = []
    for name in MODELS:
        for sequence_parallel in ("off", "on"):
            for dtype in (torch.float32, torch.bfloat16) if name in ("llama", "llama_biased") else (torch.float32,):
                model, weights = build(group, name, dtype, sequence_parallel=sequence_parallel)
                report = verify_model(model, weights, BATCH, text=False)
                quantities = [c.quantity for c in report.comparisons]
                # five writes, each with its update, the stream after it and what the next norm made of it
                assert quantities == ["update", "stream", "normed"] * 5 + ["logits"]
                assert report.settings["tokens"] == (256 if dtype == torch.bfloat16 else sum(map(len, BATCH)))
                if dtype == torch.float32:
                    # two orders below the limits: no fault hides in the room that they leave
                    assert max(c.max_error for c in report.comparisons) < 5e-6
                if not report.passed:
                    failures.append(f"{name} {sequence_parallel} {dtype}: {report.summary}")
    return failures


@pytest.mark.parametrize(
    "tp_size", (1, 2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow))
)
def test_right_models_pass(tp_size: int) -> None:
    assert run_ranks(tp_size, check_right, timeout_s=100) == [[]] * tp_size


def check_wider_streams(group: TensorParallelGroup) -> None:
    """fp32 and fp64; bf16 weights with an fp32 stream; sums rounded before the add; the library's order of sums; tokens in part."""
    options: list[tuple[torch.dtype, dict[str, Any]]] = [
        (torch.float64, {}),
        (torch.bfloat16, {"stream_dtype": torch.float32}),
        (torch.bfloat16, {"round_reduced": True, "sequence_parallel": "on"}),
        (torch.float32, {"boundary": "library"}),
        (torch.float32, {"boundary": "library", "sequence_parallel": "on"}),
    ]
    for dtype, option in options:
        model, weights = build(group, "llama", dtype, **option)
        report = verify_model(model, weights, BATCH, text=False)
        assert report.passed, (dtype, option, report.summary)


def test_every_dtype_and_executor_passes() -> None:
    run_ranks(3, check_wider_streams)


def check_reports_are_equal(group: TensorParallelGroup) -> str:
    model, weights = build(group, "llama")
    return json.dumps(verify_model(model, weights, BATCH, text=True).as_json())


def test_every_rank_gets_the_same_report() -> None:
    reports = run_ranks(3, check_reports_are_equal)
    assert len(set(reports)) == 1
    assert VerifyReport.from_json({k: v for k, v in json.loads(reports[0]).items() if k != "passed"}).passed


def check_folder(group: TensorParallelGroup, folder: Path) -> None:
    done: list[tuple[int, int]] = []
    report = verify(folder, group, BATCH, text=False, sequence_parallel="on", progress=lambda *step: done.append(step))
    assert report.passed and report.settings["sequence_parallel"] and report.settings["dtype"] == "float32"
    assert done == ([(1, 2), (2, 2)] if group.rank == 0 else [])


def test_a_model_folder_is_loaded_and_verified() -> None:
    run_ranks(2, check_folder, tiny_models.saved("qwen2"))


def check_random_weights(group: TensorParallelGroup, folder: Path) -> None:
    model, _ = load_model(folder, group, dtype=torch.float32, random_seed=5)
    assert verify_model(model, RandomWeights(model.config, 5), BATCH, text=False).passed
    assert not verify_model(model, RandomWeights(model.config, 6), BATCH, text=False).passed


def test_random_weights_are_verified_from_their_seed() -> None:
    run_ranks(2, check_random_weights, tiny_models.saved("qwen2"))


# ---- faults are named ----


def model_for(kind: str) -> str:
    return "llama_biased" if kind == "bias times tp" else "llama"


def check_faults(group: TensorParallelGroup, dtype: torch.dtype, layers: list[int]) -> list[str]:
    misses = []
    for sequence_parallel in ("off", "on"):
        models = {
            name: build(group, name, dtype, sequence_parallel=sequence_parallel) for name in ("llama", "llama_biased")
        }
        for kind in FAULTS:
            model, weights = models[model_for(kind)]
            for layer in layers:
                undo = inject(model, kind, layer)
                report = verify_model(model, weights, BATCH, text=False)
                undo()
                culprit = report.culprit
                named = culprit is not None and culprit.kind == kind and f".layers.{layer}." in culprit.module
                if not named or report.verdict != "fault" or report.passed:
                    misses.append(f"{kind} in layer {layer}, {sequence_parallel}: {report.summary}")
                elif kind == "weights shifted by a row" and culprit is not None:
                    assert culprit.ranks == (group.size - 1,)
        for model, weights in models.values():
            assert verify_model(model, weights, BATCH, text=False).passed, "a fault was not undone"
    return misses


@pytest.mark.parametrize(
    ("tp_size", "dtype", "layers"),
    [
        (2, torch.float32, [0, 1]),
        pytest.param(3, torch.float32, [0, 1], marks=pytest.mark.slow),
        pytest.param(2, torch.bfloat16, [1], marks=pytest.mark.slow),
    ],
)
def test_each_fault_is_detected_and_named(tp_size: int, dtype: torch.dtype, layers: list[int]) -> None:
    assert run_ranks(tp_size, check_faults, dtype, layers, timeout_s=110) == [[]] * tp_size


def check_other_faults(group: TensorParallelGroup) -> list[tuple[str, str, tuple[int, ...]]]:
    """Faults made by hand, in stored weights, in one rank, in the embedding and in the head."""
    model, weights = build(group, "llama_biased")
    layer = model.model.layers[1]

    def found() -> tuple[str, str, tuple[int, ...]]:
        culprit = verify_model(model, weights, BATCH, text=False).culprit
        assert culprit is not None
        return culprit.module, culprit.kind, culprit.ranks

    def altered(parameter: torch.nn.Parameter, value: Tensor) -> tuple[str, str, tuple[int, ...]]:
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.copy_(value)
            answer = found()
            parameter.copy_(kept)
        return answer

    answers = []
    weight = layer.mlp.gate_up_proj.weight
    gate, up = weight.detach().chunk(2)
    answers.append(altered(weight, torch.cat([up, gate])))
    down = layer.mlp.down_proj.weight
    answers.append(altered(down, down.detach() * (0.5 if group.rank == 1 else 1.0)))
    answers.append(altered(down, down.detach().flip(0) if group.rank == 0 else down.detach()))
    table = model.model.embed_tokens.weight  # tied: the head's as well, but the embedding comes first
    answers.append(altered(table, table.detach().roll(-1, 0) if group.rank == 1 else table.detach()))
    layer.input_layernorm.spec = replace(layer.input_layernorm.spec, weight_offset=1.0)
    answers.append(found())
    layer.input_layernorm.spec = replace(layer.input_layernorm.spec, weight_offset=0.0)
    if group.rank == 1:
        handle = layer.self_attn.o_proj.register_forward_hook(
            lambda _m, _i, out: replace(out, value=out.value.roll(1, 0))
        )
    answers.append(found())
    if group.rank == 1:
        handle.remove()
    return answers


def test_faults_made_by_hand_are_located() -> None:
    answers = run_ranks(2, check_other_faults)[0]
    assert answers == [
        ("model.layers.1.mlp.down_proj", "swapped gate/up", ()),
        ("model.layers.1.mlp.down_proj", "wrong scale", (1,)),
        ("model.layers.1.mlp.down_proj", "wrong weights", (0,)),
        ("model.embed_tokens", "weights shifted by a row", (1,)),
        ("model.layers.1.input_layernorm", "norm weight offset twice", ()),
        ("model.layers.1.self_attn.o_proj", "unknown", (1,)),
    ]


class DriftingRank:
    """The model's executor, whose normed value is wrong in its last bits on rank 1 alone."""

    def __init__(self, inner: Any, tag: str) -> None:
        self.inner, self.tag, self.name, self.ordered = inner, tag, inner.name, inner.ordered

    def supports(self, request: Any, group: TensorParallelGroup) -> None:
        return None

    def run(self, request: Any, group: TensorParallelGroup, tag: str, *arguments: Any) -> tuple[Tensor, Tensor]:
        residual, normed = self.inner.run(request, group, tag, *arguments)
        return residual, normed * (1 + 2**-22) if tag == self.tag and group.rank == 1 else normed


def check_drift(group: TensorParallelGroup) -> str:
    model, weights = build(group, "llama")
    for boundary in model.boundaries.values():
        boundary.executor = DriftingRank(boundary.executor, "model.layers.1.input_layernorm")
    culprit = verify_model(model, weights, BATCH, text=False).culprit
    assert culprit is not None and culprit.ranks == (1,)
    return f"{culprit.module}: {culprit.kind}"


def test_replicas_that_differ_in_their_last_bits_are_named() -> None:
    assert run_ranks(3, check_drift)[0] == "model.layers.1.input_layernorm: ranks disagree"


def check_layers_alone(group: TensorParallelGroup) -> None:
    model, weights = build(group, "llama")
    inject(model, "swapped gate/up", 0)
    assert not verify_model(model, weights, BATCH, text=False, layers=(0, 1)).passed
    later = verify_model(model, weights, BATCH, text=False, layers=(1, 2))
    assert later.passed and later.comparisons[0].module == "model.layers.1.self_attn.o_proj"
    for layers in ((1, 1), (-1, 1), (0, 3)):
        with pytest.raises(RequestError, match="not a range"):
            verify_model(model, weights, BATCH, text=False, layers=layers)


def test_layers_are_judged_from_our_own_state() -> None:
    run_ranks(2, check_layers_alone)


def check_growth(group: TensorParallelGroup) -> str:
    """Limits far below what rounding gives: nothing is wrong with any module."""
    metrics._FP32["stream"] = 1e-9
    model, weights = build(group, "llama")
    report = verify_model(model, weights, BATCH, text=True)
    assert not report.passed and report.culprit is None
    return report.verdict


def test_rounding_that_has_grown_is_no_fault() -> None:
    assert run_ranks(2, check_growth)[0] == "rounding"


def test_faults_that_a_model_cannot_have_are_refused() -> None:
    model, _ = build(TensorParallelGroup.single(), "mistral")
    for kind, layer, reason in (
        ("no such", 0, "not one of"),
        ("wrong scale", 2, "outside"),
        ("missing reduction", 0, "at least 2 ranks"),
        ("wrong KV-head map", 0, "has 1"),
    ):
        with pytest.raises(RequestError, match=reason):
            inject(model, kind, layer)


def check_without_bias(group: TensorParallelGroup) -> None:
    model, _ = build(group, "llama")
    with pytest.raises(RequestError, match="o_proj has a bias"):
        inject(model, "bias times tp", 0)


def test_a_bias_fault_needs_a_bias() -> None:
    run_ranks(2, check_without_bias)


@pytest.mark.parametrize(
    ("sequences", "reason"),
    [([], "nothing to compare"), ([[1], []], "nothing to compare"), ([[1] * 65], "65 tokens"), ([[101]], "outside")],
)
def test_sequences_that_cannot_be_compared_are_refused(sequences: list[list[int]], reason: str) -> None:
    model, weights = build(TensorParallelGroup.single(), "llama")
    with pytest.raises(RequestError, match=reason):
        verify_model(model, weights, sequences, text=False)


# ---- bit for bit ----


def check_against(group: TensorParallelGroup, boundary: str) -> tuple[bool, str]:
    model, _ = build(group, "llama", boundary=boundary)
    report = verify_against_reference(model, BATCH)
    assert model.boundary_for(1).executor.name == boundary == report.executor
    return report.passed, "" if report.first is None else f"{report.first.quantity} of {report.first.module}"


def test_executors_are_compared_bit_for_bit() -> None:
    assert run_ranks(3, check_against, "reference") == [(True, "")] * 3
    # gloo adds in another order: seen in 20-33 % of elements at 3 ranks. The embedding is a sum of one value and zeros, so exact
    assert run_ranks(3, check_against, "library") == [(False, "stream of model.layers.0.self_attn.o_proj")] * 3


# ---- backward ----


def check_backward(group: TensorParallelGroup) -> None:
    for name in ("llama", "llama_biased", "qwen3"):
        for sequence_parallel in ("off", "on"):
            model, weights = build(group, name, sequence_parallel=sequence_parallel)
            model.requires_grad_(False)
            report = verify_backward(model, weights, BATCH)
            assert report.passed, report.summary
            names = {c.module.partition("[")[0] for c in report.comparisons if c.quantity == "gradient"}
            assert names == set(weights)
            assert [c.module for c in report.comparisons if c.quantity == "stream gradient"] == site_names(2)[::-1]
            assert max(c.max_error for c in report.comparisons) < 1e-5
            assert all(p.grad is None and not p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("tp_size", (1, 2, pytest.param(3, marks=pytest.mark.slow)))
def test_right_gradients_pass(tp_size: int) -> None:
    run_ranks(tp_size, check_backward)


def check_backward_faults(group: TensorParallelGroup) -> list[str]:
    answers = []
    for sequence_parallel in ("off", "on"):
        model, weights = build(group, "llama", sequence_parallel=sequence_parallel)
        norms = model.model.layers[1]
        handle = norms.post_attention_layernorm.weight.register_hook(lambda grad: 1.5 * grad)
        answers.append(str(verify_backward(model, weights, BATCH).culprit))
        handle.remove()
        # declared wrongly: summed where it is complete, or left where it is a summand
        norms.input_layernorm.partial_gradient ^= True
        answers.append(str(verify_backward(model, weights, BATCH).culprit))
    with pytest.raises(RequestError, match="float32"):
        verify_backward(build(group, "llama", torch.bfloat16)[0], weights, BATCH)
    with pytest.raises(RequestError, match="auto"):
        verify_backward(build(group, "llama", sequence_parallel="auto")[0], weights, BATCH)
    return answers


def test_wrong_gradients_are_named() -> None:
    scaled, doubled, scaled_too, missing = run_ranks(3, check_backward_faults)[0]
    for answer in (scaled, scaled_too):
        assert (
            answer.startswith("model.layers.1.post_attention_layernorm.weight: wrong scale") and "1.5 times" in answer
        )
    assert doubled.startswith("model.layers.1.input_layernorm.weight: double reduction")
    assert missing.startswith("model.layers.1.input_layernorm.weight: missing reduction")


# ---- dumps ----


def check_dump(group: TensorParallelGroup, folder: Path, fault: str | None, options: dict[str, Any]) -> None:
    options = dict(options)
    dtype = options.pop("dtype", torch.float32)
    model, weights = build(group, "llama", dtype, **options)
    if fault is not None:
        inject(model, fault, 1)
    verify_model(model, weights, BATCH, text=False, dump=folder)


def dumped(folder: Path, tp_size: int, fault: str | None = None, **options: Any) -> Path:
    run_ranks(tp_size, check_dump, folder, fault, options)
    return folder


def test_dumps_of_any_layout_dtype_and_framework_agree(tmp_path: Path) -> None:
    ours = dumped(tmp_path / "ours", 3, sequence_parallel="on")
    dump = read_dump(ours)
    assert dump.info.token_ranges == [[0, 6], [6, 12], [12, 16]] and dump.info.sequences == BATCH
    assert (dump.info.layout, dump.info.tp, dump.info.sites) == ("token_sharded", 3, site_names(2))
    expected = unsharded.Oracle(config("llama"), random_weights(config("llama")))
    with torch.no_grad():
        for site, state in expected(BATCH).streams.items():
            assert relative_error(dump.state(site), state) < 2e-5  # fp32, as in test_model

    dump_transformers(tiny_models.reference("llama"), BATCH, tmp_path / "theirs")
    others = [tmp_path / "theirs", dumped(tmp_path / "tp2", 2), dumped(tmp_path / "bf16", 2, dtype=torch.bfloat16)]
    for other in others:
        report = compare_dumps(ours, other)
        assert report.passed, report.summary
        assert [each.site for each in report.comparisons] == site_names(2)
        assert report.comparisons[-1].max_error > 0, "two runs that were to differ in rounding are the same"


def test_where_two_runs_part_is_named(tmp_path: Path) -> None:
    right = dumped(tmp_path / "right", 2, sequence_parallel="on")
    for dtype in (torch.float32, torch.bfloat16):
        wrong = dumped(tmp_path / f"wrong-{dtype}", 2, "swapped gate/up", dtype=dtype)
        report = compare_dumps(right, wrong)
        assert report.first == "model.layers.1.mlp.down_proj" and not report.passed
        assert report.first in report.summary and not report.comparisons[-1].agrees
    worst = report.comparisons[-1]
    assert worst.rank_a == (0 if sum(map(len, BATCH[: worst.sequence])) + worst.position < 8 else 1)
    assert compare_dumps(right, wrong, limit=10.0).passed


def small_dump(folder: Path, **changes: Any) -> Path:
    info = DumpInfo("test", "llama", "float32", "float32", 2, 1, "replicated", [[0, 3]], [[1, 2], [3]], ["a", "b"])
    info = replace(info, **changes)
    tokens, sites = info.tokens, info.sites
    states = {site: torch.arange(tokens * info.hidden_size).view(tokens, -1) + 1.0 for site in sites}
    write_dump(folder, info, states)
    return folder


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sequences": [[1, 2], [4]]}, "token 0 of sequence 1 is 3 against 4"),
        ({"sequences": [[1, 2, 3]]}, r"\[2\] tokens against \[3\]"),
        ({"hidden_size": 4}, "hidden_size=2"),
        ({"sites": ["c"]}, "no site in common"),
    ],
)
def test_dumps_that_do_not_match_are_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    first, second = small_dump(tmp_path / "a"), small_dump(tmp_path / "b", **changes)
    with pytest.raises(RequestError, match=reason):
        compare_dumps(first, second)


def test_common_states_and_sequences_are_compared(tmp_path: Path) -> None:
    first = small_dump(tmp_path / "a")
    second = small_dump(tmp_path / "b", sites=["b", "c"], sequences=[[1, 2], [3], [5, 6]])
    report = compare_dumps(first, second)
    assert report.passed and (report.only_a, report.only_b) == (("a",), ("c",))


def test_broken_dumps_are_refused(tmp_path: Path) -> None:
    folder = small_dump(tmp_path / "a")
    with pytest.raises(RequestError, match="exists already"):
        small_dump(folder)
    with pytest.raises(RequestError, match="not a folder"):
        small_dump(tmp_path / "absent" / "b")
    meta, states = folder / "dump.json", folder / "states.safetensors"
    kept = meta.read_text()
    for text, reason in (
        ("{", "cannot be read"),
        ("[]", "format"),
        (json.dumps(json.loads(kept) | {"version": 2}), "version 1"),
        (json.dumps(json.loads(kept) | {"more": 2}), "other keys"),
        (json.dumps(json.loads(kept) | {"sites": ["a", "d"]}), "there is nothing"),
        (json.dumps(json.loads(kept) | {"sequences": [[1]]}), r"\[1, 2\]"),
        (json.dumps(json.loads(kept) | {"sequences": [1]}), "sequences is"),
        (json.dumps(json.loads(kept) | {"sites": 3}), "sites is 3"),
        (json.dumps(json.loads(kept) | {"token_ranges": [[0]]}), "token_ranges is"),
        (json.dumps(json.loads(kept) | {"stream_dtype": "int8"}), "stream_dtype is"),
    ):
        meta.write_text(text)
        with pytest.raises(RequestError, match=reason):
            read_dump(folder)
    meta.write_text(kept)
    assert read_dump(folder).state("b").shape == (3, 2)
    states.write_bytes(states.read_bytes()[:-4])
    with pytest.raises(RequestError, match="not a whole dump"):
        read_dump(folder)
    with pytest.raises(RequestError, match="not a dump"):
        read_dump(tmp_path)


def test_a_dump_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="space"):
        small_dump(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


# ---- the command line ----


def command(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = ("--model", tiny_models.saved("llama"), "--seq-len", 40)
    assert command("verify", *model, "--json", "--dump", tmp_path / "a") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["passed"] and answer["settings"]["tokens"] == 40 and answer["culprit"] is None
    assert command("verify", *model, "--layers", "1:", "--dump", tmp_path / "b") == 0
    assert "model.layers.1.mlp.down_proj" in (out := capsys.readouterr().out) and "model.embed" not in out
    assert command("compare", tmp_path / "a", tmp_path / "b") == 0
    assert command("verify", *model, "--against", "reference") == 0
    assert command("verify", *model, "--backward") == 0
    assert command("verify", *model, "--weights", "random:3", "--dump", tmp_path / "c") == 0
    capsys.readouterr()
    assert command("compare", tmp_path / "a", tmp_path / "c", "--json") == 1
    output = capsys.readouterr()
    assert json.loads(output.out)["first"] == "model.embed_tokens" and "the runs part at" in output.err
    monkeypatch.setattr(
        verification, "limits", lambda *_, **__: dict.fromkeys(("stream", "update", "logits", "local"), 0.0)
    )
    assert command("verify", *model) == 1
    output = capsys.readouterr()
    assert "fault" in output.out and "fault: the first culprit is" in output.err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--seq-len", "0"), "--seq-len 0"),
        (("--seq-len", "4", "--prompt", "x"), "exclude each other"),
        (("--chat",), "--chat needs"),
        (("--prompt", ""), "empty"),
        (("--layers", "1"), "A:B"),
        (("--layers", "2:1"), "A:B"),
        (("--layers", "0:9"), "A:B"),
        (("--layers", "a:b"), "A:B"),
        (("--backward", "--layers", "0:1"), "--backward"),
        (("--backward", "--dtype", "bfloat16"), "float32"),
        (("--backward", "--sequence-parallel", "auto"), "auto"),
        (("--against", "reference", "--dump", "x"), "--against"),
        (("--dump", "/"), "exists already"),
        (("--dump", "/proc/x"), "/proc is not a folder that can be written to"),
        (("--tp", "10"), "num_attention_heads=9"),
    ],
)
def test_bad_requests_are_refused(arguments: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("verify", "--model", tiny_models.saved("llama_text"), *arguments) == 2
    assert reason in capsys.readouterr().err


def test_bad_comparisons_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("compare", tmp_path, tmp_path) == 2
    assert command("compare", small_dump(tmp_path / "a"), tmp_path / "a", "--limit", "0") == 2
    assert "--limit 0" in capsys.readouterr().err


# ---- a real model ----

TEXT = (
    "Tensor parallelism splits each weight matrix over several devices. Each device computes a partial sum, and the partial sums are "
    "added by a collective operation. The capital of France is Paris, which lies on the river Seine."
)


def check_demo(group: TensorParallelGroup, folder: str) -> list[str]:
    failures = []
    batches = {
        "text": [Tokenizer.from_dir(folder).encode(TEXT)],
        "random": random_sequences(64, ModelConfig.from_dir(folder)),
    }
    files = CheckpointFiles.open(folder)
    for sequence_parallel in ("off", "on"):
        for dtype in (torch.float32, torch.bfloat16):
            model, _ = load_model(folder, group, dtype=dtype, sequence_parallel=sequence_parallel)
            for kind, batch in batches.items():
                report = verify_model(model, files, batch, text=kind == "text")
                failures += [] if report.passed else [f"{sequence_parallel} {dtype} {kind}: {report.summary}"]
    for kind, layer in (("wrong KV-head map", 1), ("missing reduction", 28), ("weights shifted by a row", 28)):
        undo = inject(model, kind, layer)
        culprit = verify_model(model, files, batches["text"], text=True).culprit
        undo()
        if culprit is None or culprit.kind != kind or f".layers.{layer}." not in culprit.module:
            failures.append(f"{kind}: {culprit}")
    return failures


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif("TP_RESIDUAL_DEMO_MODEL" not in os.environ, reason="launch/test builds the demo model and names it")
@pytest.mark.parametrize("tp_size", (2, 3, 4))
def test_the_demo_model(tp_size: int) -> None:
    folder = os.environ["TP_RESIDUAL_DEMO_MODEL"]
    assert run_ranks(tp_size, check_demo, folder, timeout_s=800)[0] == []
