"""The doctor: every healthy variant passes, every injected fault is named. Functions named check_* run on every rank."""

from itertools import product

import pytest
import torch
from doctor_faults import FAULTS, SEQUENCE_PARALLEL_ONLY, SEVERAL_RANKS
from residual_oracle import variant, variant_weights
from test_residual_variants import VARIANTS, config_of
from tiny_models import prompts, sharded

from tp_residual.doctor import diagnose
from tp_residual.errors import RequestError
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.residual.config import ResidualConfig
from tp_residual.residual.stream import Stream
from tp_residual.testing import run_ranks

BATCH = prompts(3, longest=9)


def check_healthy(
    group: TensorParallelGroup, names: list[str], dtypes: tuple[torch.dtype, ...] = (torch.float64,)
) -> None:
    for name, sequence_parallel, dtype in product(names, ("off", "on"), dtypes):
        config = config_of(name)
        weights = {key: value.to(dtype) for key, value in variant_weights(config).items()}
        model = sharded(config, group, weights, dtype=dtype, sequence_parallel=sequence_parallel)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        diagnosis = diagnose(model, BATCH)
        assert diagnosis.healthy, (name, sequence_parallel, dtype, diagnosis.faults)
        probes = {finding.probe for finding in diagnosis.findings if finding.status != "skipped"}
        assert {"joins", "reads", "updates", "zero writers"} <= probes
        assert ("skip gradient" in probes) == (dtype.itemsize >= 4)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()), "it changed the model"


REDUCED = ["pre", "post", "ladder", "macaron", "projection", "depth_mix", "gate_static", "two norms, scaled input"]


@pytest.mark.slow
def test_healthy_variants_pass() -> None:
    run_ranks(2, check_healthy, REDUCED, timeout_s=240)


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", (1, 2, 3))
@pytest.mark.parametrize("name", VARIANTS)
def test_every_healthy_variant_passes(name: str, tp_size: int) -> None:
    run_ranks(tp_size, check_healthy, [name], timeout_s=240)


@pytest.mark.slow
def test_healthy_in_lower_precision() -> None:
    run_ranks(2, check_healthy, ["pre", "sandwich", "highway"], (torch.float32, torch.bfloat16), timeout_s=120)


def check_fault(group: TensorParallelGroup, names: list[str], modes: tuple[str, ...]) -> None:
    kept = {name: getattr(Stream, name) for name in ("write", "read", "_join")}
    for name, sequence_parallel in product(names, modes):
        probe, called, inject = FAULTS[name]
        config = variant("llama_biased", ResidualConfig(), num_key_value_heads=4)
        model = sharded(
            config, group, variant_weights(config), dtype=torch.float64, sequence_parallel=sequence_parallel
        )
        inject(model)
        try:
            diagnosis = diagnose(model, BATCH)
        finally:
            for attribute, value in kept.items():
                setattr(Stream, attribute, value)
        found = {finding.probe: finding for finding in diagnosis.faults}
        assert probe in found, (name, sequence_parallel, [(f.probe, f.what, f.where) for f in diagnosis.findings])
        assert called in found[probe].what, (name, sequence_parallel, found[probe])
        if probe in ("joins", "updates"):
            assert "layers.1" in found[probe].where, found[probe]


def test_faults_are_named() -> None:
    names = [name for name in FAULTS if name not in SEQUENCE_PARALLEL_ONLY]
    run_ranks(2, check_fault, names, ("off",), checked=False, timeout_s=240)


@pytest.mark.slow
def test_faults_of_a_token_sharded_stream_are_named() -> None:
    names = [*SEQUENCE_PARALLEL_ONLY, "missing reduction", "mis-based", "skip missing", "skip detached"]
    run_ranks(3, check_fault, names, ("on",), checked=False, timeout_s=240)


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", (1, 2, 3, 4))
def test_every_fault_is_named_at_every_size(tp_size: int) -> None:
    names = [
        name for name in FAULTS if name not in SEQUENCE_PARALLEL_ONLY and (tp_size > 1 or name not in SEVERAL_RANKS)
    ]
    run_ranks(tp_size, check_fault, names, ("off",) if tp_size == 1 else ("off", "on"), checked=False, timeout_s=400)


def test_nothing_to_look_at_is_refused() -> None:
    config = config_of("pre")
    model = sharded(config, TensorParallelGroup.single(), variant_weights(config), dtype=torch.float64)
    for sequences in ([], [[]], [[1], []]):
        with pytest.raises(RequestError, match="at least one"):
            diagnose(model, sequences)
