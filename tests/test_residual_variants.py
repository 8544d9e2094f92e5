"""Every residual connection, at every tp, with the stream replicated and token-sharded: the equations of `residual_oracle`, in fp64.

Functions named check_* run on every rank.
"""

from itertools import product
from typing import Any

import pytest
import torch
from residual_oracle import ResidualOracle, variant, variant_weights
from test_backward import block_errors, logits_of
from tiny_models import prompts, sharded

from tp_residual.errors import ConfigError
from tp_residual.model.attention_backend import NoCache, TokenBatch
from tp_residual.model.config import ModelConfig
from tp_residual.model.layout import ModelLayout
from tp_residual.parallel.blocks import parameter_blocks, sync_gradients
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.residual.config import PRESETS, ResidualConfig, plan_layers
from tp_residual.testing import (
    RowCache,
    assert_equals_twin,
    expect_collectives,
    hostile_values,
    relative_error,
    run_ranks,
)

# fp64 rounding is 1e-16 an operation, through two layers; a fault is a factor of tp, or a missing term, in some block. Softmax and sigmoid
# of values up to some tens cost two digits.
RTOL = 1e-9

BATCH = prompts(3, longest=9)

# What no preset has: combinations whose parts meet.
COMBINED = {
    "post with rms and a gate": ResidualConfig(placement="post", gate="vector"),
    "sandwich ladder, scaled": ResidualConfig(topology="ladder", placement="sandwich", update_scale=0.7),
    "ladder from layer 1": ResidualConfig(topology="ladder", ladder_from=1),
    "parallel sandwich": ResidualConfig(topology="parallel", placement="sandwich", norm="layer"),
    "two norms, scaled input": ResidualConfig(
        topology="parallel", parallel_norms=2, norm="layer", input_scale_by_depth=True
    ),
    "macaron post": ResidualConfig(topology="macaron", placement="post", norm="layer"),
    "learned skip and update": ResidualConfig(learned_skip="vector", learned_update="scalar", update_scale=0.5),
    "masked layers": ResidualConfig(skip_layers=(1,)),
    "masked channels": ResidualConfig(skip_channels=11, placement="output"),
    "projection, scaled": ResidualConfig(shortcut="projection", update_scale=0.5, skip_scale=0.9, placement="post"),
    "projection beside an output norm": ResidualConfig(shortcut="projection", placement="output"),
    "low rank and gate": ResidualConfig(shortcut="lowrank", shortcut_rank=3, gate="scalar"),
    "shared low rank": ResidualConfig(shortcut="lowrank", shortcut_rank=3, shortcut_shared=True),
    "mixed depth without norms": ResidualConfig(depth_mix=True, placement="none", learned_update="vector"),
}
VARIANTS = {name: preset.config for name, preset in PRESETS.items()} | COMBINED


def config_of(name: str) -> ModelConfig:
    """A family with q/k norm, uneven heads and prime sizes; every third variant has biases."""
    residual = VARIANTS[name]
    family = "llama_biased" if list(VARIANTS).index(name) % 3 == 0 else "qwen3"
    return variant(family, residual)


def check_variant(group: TensorParallelGroup, names: list[str]) -> None:
    for name, sequence_parallel in product(names, ("off", "on")):
        config = config_of(name)
        weights = variant_weights(config)
        oracle = ResidualOracle(config, weights)
        model = sharded(config, group, weights, dtype=torch.float64, sequence_parallel=sequence_parallel)
        if config.residual.drop == "none":
            model.train()
        else:
            model.eval()
        try:
            assert_equals_twin(
                group, model, oracle, [BATCH], run=logits_of, run_twin=lambda twin, batch: twin(batch).logits, rtol=RTOL
            )
        except AssertionError as error:
            raise AssertionError(f"{name}, sequence parallel {sequence_parallel}: {error}") from error
        check_inference(model.eval(), oracle)


def check_inference(model: object, oracle: ResidualOracle) -> None:
    """Without gradients, where executors do more of it in one pass: whole, and token by token through a cache."""
    with torch.no_grad():
        expected = oracle(BATCH).logits
        # 1e-9 as above
        assert relative_error(logits_of(model), expected) < RTOL
        layout = model.layout
        longest = max(map(len, BATCH))
        cache = RowCache(layout, model.group, rows=len(BATCH), max_tokens=longest, dtype=torch.float64)
        parts = {}
        for position in range(longest):
            rows = [row for row, prompt in enumerate(BATCH) if position < len(prompt)]
            batch = TokenBatch.of([(row, position, [BATCH[row][position]]) for row in rows])
            logits = model.lm_head.gather(model(batch, cache).local_logits)
            parts |= {(row, position): logits[index] for index, row in enumerate(rows)}
        stepped = torch.stack([parts[row, p] for row, prompt in enumerate(BATCH) for p in range(len(prompt))])
        assert relative_error(stepped, expected) < RTOL


# One of each kind of arithmetic; all of them, at all sizes, are slow.
REDUCED = [
    "post",
    "sandwich",
    "parallel2",
    "ladder",
    "macaron",
    "gate_lowrank",
    "projection",
    "depth_mix",
    "learned skip and update",
]


@pytest.mark.parametrize(
    ("tp_size", "names"),
    [(2, REDUCED), pytest.param(3, ["post", "projection", "gate_lowrank"], marks=pytest.mark.slow)],
)
def test_variants_equal_their_equations(tp_size: int, names: list[str]) -> None:
    run_ranks(tp_size, check_variant, names, timeout_s=240)


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", (1, 2, 3, 4))
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_equals_its_equations(name: str, tp_size: int) -> None:
    run_ranks(tp_size, check_variant, [name], timeout_s=240)


def test_the_layout_names_what_the_model_has() -> None:
    for name in VARIANTS:
        config = config_of(name)
        for sequence_parallel in (False, True):
            layout = ModelLayout.of(config, 1)
            expected = [(t.name, t.shape) for t in layout.tensors(sequence_parallel=sequence_parallel)]
            model = sharded(
                config,
                TensorParallelGroup.single(),
                variant_weights(config),
                sequence_parallel="on" if sequence_parallel else "off",
            )
            assert sorted((b.name, b.global_shape) for b in parameter_blocks(model)) == sorted(expected), name


# ---- collectives ----


# What a forward pass runs beside the embedding's: sums a layer, and gathers a layer where these differ under sequence parallelism.
SUMS = {"parallel": 1, "parallel2": 1, "macaron": 3}


def check_collectives(group: TensorParallelGroup, names: list[str]) -> None:
    for name, sequence_parallel in product(names, ("off", "on")):
        config = config_of(name)
        model = sharded(
            config, group, variant_weights(config), dtype=torch.float64, sequence_parallel=sequence_parallel
        )
        sums = config.num_hidden_layers * SUMS.get(name, 2) + 1
        allowed = {"all_reduce": sums} if sequence_parallel == "off" else {"reduce_scatter": sums, "all_gather": sums}
        for mode in (torch.no_grad(), torch.enable_grad()):
            with mode, expect_collectives(group, **allowed):
                model.eval()(TokenBatch.prefill(BATCH), NoCache())


def test_collectives_of_each_preset() -> None:
    run_ranks(2, check_collectives, list(PRESETS), timeout_s=120)


# ---- a variant's own parameters matter ----


def check_parameters_matter(group: TensorParallelGroup, names: list[str]) -> None:
    for name in names:
        config = config_of(name)
        model = sharded(config, group, variant_weights(config), dtype=torch.float64)
        plain = {t.name for t in ModelLayout.of(variant("qwen3", ResidualConfig()), 1).tensors(sequence_parallel=False)}
        plain |= {
            t.name
            for t in ModelLayout.of(variant("llama_biased", ResidualConfig()), 1).tensors(sequence_parallel=False)
        }
        own = [block for block in parameter_blocks(model) if block.name not in plain and block.parameter.numel()]
        before = logits_of(model.eval())
        before.backward(hostile_values(*before.shape, seed=2))
        sync_gradients(parameter_blocks(model), group)
        others = {id(block.parameter) for block in own}
        with torch.no_grad():
            for parameter in model.parameters():
                if id(parameter) in others:
                    assert parameter.grad is not None and bool(parameter.grad.any()), name
                    parameter -= 0.1 * parameter.grad / parameter.grad.norm()
        if own:
            assert relative_error(logits_of(model), before) > 1e-6, f"{name}: its own parameters changed nothing"


def test_the_parameters_of_a_variant_learn_and_matter() -> None:
    run_ranks(
        2,
        check_parameters_matter,
        ["rezero", "gate_static", "highway", "lowrank", "shared_projection", "depth_mix", "sandwich"],
    )


# ---- what starts as something else ----


def first_logits(residual: ResidualConfig, base: ModelConfig, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """With the weights of Pre-Norm where it has them, and each other parameter at its start."""
    config = variant("qwen3", residual)
    model = sharded(base, TensorParallelGroup.single(), weights, dtype=torch.float64)
    other = type(model)(config, TensorParallelGroup.single(), dtype=torch.float64)
    state = model.state_dict()
    missing, unexpected = other.load_state_dict(state, strict=False)
    assert not unexpected and missing
    return logits_of(other.eval())


@pytest.mark.parametrize("name", ("projection", "lowrank", "shared_projection", "depth_mix", "depth_weighted"))
def test_starts_exactly_as_pre_norm(name: str) -> None:
    base = variant("qwen3", ResidualConfig())
    weights = variant_weights(base)
    expected = logits_of(sharded(base, TensorParallelGroup.single(), weights, dtype=torch.float64))
    assert torch.equal(first_logits(PRESETS[name].config, base, weights), expected)


# ---- what is dropped ----


def check_drop(group: TensorParallelGroup, preset: str) -> None:
    config = variant("qwen3", ResidualConfig.preset(preset, drop_rate=0.6), num_hidden_layers=3)
    weights = variant_weights(config)
    seen = set[frozenset[tuple[int, int]]]()
    for sequence_parallel in ("off", "on"):
        model = sharded(config, group, weights, dtype=torch.float64, sequence_parallel=sequence_parallel).train()
        if sequence_parallel == "off":
            with pytest.raises(ConfigError, match="set_step"):
                logits_of(model)
        oracle = ResidualOracle(config, weights)
        oracle.inference = False
        for step in range(6):
            model.set_step(3, step)
            sampler, layers = model.model.sampler, model.layout.plan
            oracle.kept = {
                (number, index)
                for number, layer in enumerate(layers)
                for index, sublayer in enumerate(layer)
                if not sampler.drops_layer(number)
                and (sublayer.keep == 1 or sampler.keeps(f"{number}.{index}", sublayer.keep))
            }
            seen.add(frozenset(oracle.kept))
            sums = len(oracle.kept) + 1
            allowed = (
                {"all_reduce": sums} if sequence_parallel == "off" else {"reduce_scatter": sums, "all_gather": sums}
            )
            if group.size > 1:
                with expect_collectives(group, **allowed):
                    local = model(TokenBatch.prefill(BATCH), NoCache()).local_logits
            else:
                local = model(TokenBatch.prefill(BATCH), NoCache()).local_logits
            logits, reference = model.lm_head.gather(local), oracle(BATCH).logits
            assert relative_error(logits, reference) < RTOL
            model.zero_grad()
            oracle.zero_grad()
            cotangent = hostile_values(*logits.shape, seed=step)
            logits.backward(cotangent)
            reference.backward(cotangent)
            blocks = parameter_blocks(model)
            sync_gradients(blocks, group)
            assert max(block_errors(blocks, oracle).values()) < RTOL
    assert len(seen) > 2, "the same was dropped at every step"


@pytest.mark.parametrize("preset", ("stochastic_depth", "layer_drop"))
def test_what_training_drops_runs_no_collective_and_is_alike_on_all_ranks(preset: str) -> None:
    run_ranks(2, check_drop, preset)


def test_everything_dropped_is_the_embedding() -> None:
    config = variant("qwen3", ResidualConfig(drop="layer_drop", drop_rate=0.999999))
    weights = variant_weights(config)
    model = sharded(config, TensorParallelGroup.single(), weights, dtype=torch.float64).train()
    model.set_step(0, 0)
    oracle = ResidualOracle(config, weights)
    oracle.kept = set()
    assert relative_error(logits_of(model), oracle(BATCH).logits) < RTOL


# ---- the ladder's dependencies ----


def test_a_ladder_sublayer_does_not_see_the_update_before_it() -> None:
    """Change what the first attention writes: the first MLP's update stays, the second attention's changes."""
    config = variant("qwen3", PRESETS["ladder"].config)
    weights = variant_weights(config)
    changed = weights | {
        "model.layers.0.self_attn.o_proj.weight": weights["model.layers.0.self_attn.o_proj.weight"] * 2
    }
    seen = []
    for each in (weights, changed):
        model = sharded(config, TensorParallelGroup.single(), each, dtype=torch.float64)
        updates: dict[str, torch.Tensor] = {}
        for path in ("layers.0.mlp", "layers.1.self_attn"):
            module = model.model.get_submodule(path)
            module.register_forward_hook(
                lambda _m, _i, out, path=path, kept=updates: kept.update({path: out.value.detach()})
            )
        logits_of(model)
        seen.append(updates)
    assert torch.equal(seen[0]["layers.0.mlp"], seen[1]["layers.0.mlp"])
    assert relative_error(seen[0]["layers.1.self_attn"], seen[1]["layers.1.self_attn"]) > 1e-3


# ---- executors ----


def check_executors_agree(group: TensorParallelGroup, dtype: torch.dtype, names: list[str]) -> None:
    """Constants and norms are the executor's: over shared memory the bits of `reference`."""
    for name, sequence_parallel in product(names, ("off", "on")):
        config = config_of(name)
        weights = {key: value.to(dtype) for key, value in variant_weights(config).items()}
        outputs = []
        for boundary in ("reference", "shared"):
            model = sharded(config, group, weights, dtype=dtype, sequence_parallel=sequence_parallel, boundary=boundary)
            with torch.no_grad():
                outputs.append(logits_of(model.eval()))
        assert torch.equal(*outputs), f"{name}, sequence parallel {sequence_parallel}"
        assert bool(outputs[0].isfinite().all())


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_shared_memory_gives_the_bits_of_reference(dtype: torch.dtype) -> None:
    names = [
        "sandwich",
        "output",
        "post",
        "deepnorm",
        "granite",
        "macaron",
        "stochastic_depth",
        "ladder",
        "gate_static",
    ]
    run_ranks(2, check_executors_agree, dtype, names, transport="shared", checked=False, timeout_s=120)


def check_with_and_without_gradients(group: TensorParallelGroup, names: list[str]) -> None:
    """Composed of moves and plain arithmetic, or by the executor in one pass: the same bits, in 16 bits as well."""
    for name, sequence_parallel, round_reduced in product(names, ("off", "on"), (False, True)):
        config = config_of(name)
        weights = {key: value.bfloat16() for key, value in variant_weights(config).items()}
        model = sharded(
            config, group, weights, dtype=torch.bfloat16, sequence_parallel=sequence_parallel,
            boundary="reference", round_reduced=round_reduced,
        ).eval()  # fmt: skip
        with torch.no_grad():
            executed = logits_of(model)
        assert torch.equal(executed, logits_of(model).detach()), (name, sequence_parallel, round_reduced)


def test_gradients_change_no_bits() -> None:
    names = ["sandwich", "post", "granite", "macaron", "stochastic_depth", "macaron post", "sandwich ladder, scaled"]
    run_ranks(2, check_with_and_without_gradients, names, timeout_s=120)


# ---- configs ----


MEANINGLESS = {
    "parallel_norms=2": dict(parallel_norms=2),
    "topology=ladder with placement": dict(topology="ladder", placement="post"),
    "ladder_from": dict(ladder_from=1),
    "both learn the size of the update": dict(gate="vector", learned_update="scalar"),
    "shortcut_shared": dict(shortcut_shared=True),
    "gate_coupling=variance": dict(gate="vector", gate_coupling="variance"),
    "drop_rate": dict(drop="layer_drop"),
    "second norm": dict(placement="post", final_norm=True),
    "input_scale_by_depth": dict(placement="post", input_scale_by_depth=True),
    "grows as a power": dict(skip_scale="deepnorm"),
    "is not one of": dict(placement="middle"),
    "finite number": dict(update_scale=float("nan")),
    "at least 1": dict(gate="lowrank", gate_rank=0),
    "true or false": dict(depth_mix=1),
    "true, false or null": dict(final_norm="no"),
    "gate_rank=4 with gate=none": dict(gate_rank=4),
    "learned_update_init=0.5 with learned_update=none": dict(learned_update_init=0.5),
    "scaled, learned or masked skip": dict(topology="ladder", learned_skip="vector"),
    "erases what every sublayer writes": dict(update_scale=0),
    "different layers": dict(skip_layers=(0, 0)),
    "must be a list": dict(skip_layers=3),
    "parallel_norms=True": dict(parallel_norms=True),
    "update_scale=1000": dict(update_scale=10**400),
}


@pytest.mark.parametrize("message", MEANINGLESS)
def test_configs_without_meaning_are_refused(message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ResidualConfig(**MEANINGLESS[message])  # type: ignore[arg-type]


def test_names_are_suggested() -> None:
    with pytest.raises(ConfigError, match="did you mean sandwich"):
        ResidualConfig.preset("sandwhich")
    for name, meant in (("PRE", "pre"), ("pre-norm", "pre"), ("gate-lowrank", "gate_lowrank")):
        with pytest.raises(ConfigError, match=f"did you mean {meant}\\?"):
            ResidualConfig.preset(name)
    with pytest.raises(ConfigError, match="preset=5"):
        ResidualConfig.from_dict({"preset": 5})
    with pytest.raises(ConfigError, match="did you mean placement"):
        ResidualConfig.from_dict({"placment": "post"})


@pytest.mark.parametrize("name", VARIANTS)
def test_a_config_survives_json(name: str) -> None:
    assert ResidualConfig.from_dict(VARIANTS[name].to_dict()) == VARIANTS[name]
    assert (VARIANTS[name].name == name) == (name in PRESETS)


def test_a_model_without_the_layers_that_a_config_names_is_refused() -> None:
    for residual, message in (
        (ResidualConfig(skip_layers=(2,)), "skip_layers"),
        (ResidualConfig(topology="ladder", ladder_from=2), "ladder_from"),
        (ResidualConfig(skip_channels=1000), "skip_channels"),
        (ResidualConfig(gate="lowrank", gate_rank=1000), "rank 1000"),
    ):
        with pytest.raises(ConfigError, match=message):
            variant("qwen3", residual)


def test_the_plan_of_each_topology() -> None:
    assert [s.modules for s in plan_layers(PRESETS["macaron"].config, 1)[0]] == [
        ("first_mlp",),
        ("self_attn",),
        ("mlp",),
    ]
    assert [s.connection.update_scale for s in plan_layers(PRESETS["macaron"].config, 1)[0]] == [0.5, 1.0, 0.5]
    assert [s.lag for layer in plan_layers(VARIANTS["ladder from layer 1"], 2) for s in layer] == [0, 0, 1, 1]
    assert plan_layers(PRESETS["deepnorm"].config, 8)[0][0].connection.skip_scale == 2.0
    assert plan_layers(PRESETS["lns"].config, 4)[3][0].input_scale == 0.5
    dropped = plan_layers(PRESETS["stochastic_depth"].config, 2)  # linearly from 1 to 1 - 0.5
    assert [s.keep for layer in dropped for s in layer] == [0.875, 0.75, 0.625, 0.5]


# ---- sums that are started early ----


def check_early(group: TensorParallelGroup) -> None:
    """Over gloo a ladder's sums are on their way while the next sublayer computes: the same values, the same number of collectives."""
    config = config_of("ladder")
    weights = variant_weights(config)
    oracle = ResidualOracle(config, weights)
    for sequence_parallel, boundary in product(("off", "on"), ("reference", "library")):
        model = sharded(
            config, group, weights, dtype=torch.float64, sequence_parallel=sequence_parallel, boundary=boundary
        )
        open_sums, most, started = [0], [0], group.start

        def start(
            *arguments: Any, counts: tuple[list[int], list[int]] = (open_sums, most), inner: Any = started
        ) -> Any:
            counts[0][0] += 1
            counts[1][0] = max(counts[1][0], counts[0][0])
            wait = inner(*arguments)

            def end() -> torch.Tensor:
                counts[0][0] -= 1
                return wait()

            return end

        group.start = start  # type: ignore[method-assign]
        try:
            sums = 2 * config.num_hidden_layers + 1
            allowed = (
                {"all_reduce": sums} if sequence_parallel == "off" else {"reduce_scatter": sums, "all_gather": sums}
            )
            with torch.no_grad(), expect_collectives(group, **allowed):
                local = model(TokenBatch.prefill(BATCH), NoCache()).local_logits
            logits = model.lm_head.gather(local)
        finally:
            group.start = started  # type: ignore[method-assign]
        assert open_sums == [0] and most == [2], "no sum was on its way during a sublayer"
        assert relative_error(logits, oracle(BATCH).logits) < RTOL
        if boundary == "reference":
            with torch.enable_grad():
                assert torch.equal(logits, logits_of(model)), "starting a sum early changed its bits"


@pytest.mark.parametrize("tp_size", (2, 3))
def test_ladder_sums_are_started_early(tp_size: int) -> None:
    run_ranks(tp_size, check_early)
