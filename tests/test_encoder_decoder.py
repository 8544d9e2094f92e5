"""An encoder-decoder under tensor and sequence parallelism: three residuals a decoder layer. Functions named check_* run on every rank."""

from itertools import product

import pytest
import torch
from residual_oracle import EncoderDecoderOracle, variant
from tiny_models import prompts
from torch import Tensor

from tp_residual.checkpoint.load import load_state_dict_blocks
from tp_residual.errors import LayoutError
from tp_residual.model.attention_backend import NoCache, TokenBatch
from tp_residual.model.config import ModelConfig
from tp_residual.model.encoder_decoder import EncoderDecoder
from tp_residual.parallel.blocks import parameter_blocks
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.residual.config import PRESETS, ResidualConfig
from tp_residual.testing import RowCache, assert_equals_twin, expect_collectives, relative_error, run_ranks

RTOL = 1e-9  # fp64, as for the decoder's variants

SOURCES, TARGETS = prompts(3, seed=1, longest=7), prompts(3, seed=2, longest=5)
LAYERS = 3, 2  # of the encoder and of the decoder
VARIANTS = {
    "pre": PRESETS["pre"].config,
    "post": PRESETS["post"].config,
    "sandwich": PRESETS["sandwich"].config,
    "parallel": PRESETS["parallel"].config,
    "ladder": PRESETS["ladder"].config,
    "macaron": PRESETS["macaron"].config,
    "highway": PRESETS["highway"].config,
    "deepnorm": PRESETS["deepnorm"].config,
    "shared_projection": PRESETS["shared_projection"].config,
    "rezero": PRESETS["rezero"].config,
}


def config_of(name: str) -> ModelConfig:
    return variant("llama_biased" if name in ("post", "parallel") else "llama", VARIANTS[name])


def build(
    config: ModelConfig, group: TensorParallelGroup, weights: dict[str, Tensor], *, sp: bool = False
) -> EncoderDecoder:
    model = EncoderDecoder(
        config, group, num_encoder_layers=LAYERS[0], dtype=torch.float64, sequence_parallel="on" if sp else "off"
    )
    load_state_dict_blocks(parameter_blocks(model), weights)
    return model


def weights_of(config: ModelConfig) -> dict[str, Tensor]:
    """By the names and shapes that the unsharded model has."""
    model = EncoderDecoder(config, TensorParallelGroup.single(), num_encoder_layers=LAYERS[0], dtype=torch.float64)
    shapes = {block.name: block.global_shape for block in parameter_blocks(model)}
    generator = torch.Generator().manual_seed(5)
    weights = {}
    for name, shape in sorted(shapes.items()):
        value = torch.randn(shape, generator=generator, dtype=torch.float64)
        near_one = ("norm" in name and name.endswith("weight")) or name.endswith("_scale")
        weights[name] = 1 + 0.3 * value if near_one else 0.2 * value
    return weights


def logits_of(model: EncoderDecoder, sources: list[list[int]] = SOURCES) -> Tensor:
    return model.lm_head.gather(
        model(model.encode(TokenBatch.prefill(sources)), TokenBatch.prefill(TARGETS), NoCache())
    )


def check_equals_oracle(group: TensorParallelGroup, names: list[str]) -> None:
    for name, sp in product(names, (False, True)):
        config = config_of(name)
        weights = weights_of(config)
        model, oracle = build(config, group, weights, sp=sp), EncoderDecoderOracle(config, weights)
        try:
            assert_equals_twin(
                group, model, oracle, [],
                run=logits_of, run_twin=lambda twin: twin((SOURCES, TARGETS), LAYERS), rtol=RTOL,
            )  # fmt: skip
        except AssertionError as error:
            raise AssertionError(f"{name}, sequence parallel {sp}: {error}") from error
        with torch.no_grad():
            assert relative_error(logits_of(model.eval()), oracle((SOURCES, TARGETS), LAYERS)) < RTOL


@pytest.mark.parametrize(
    ("tp_size", "names"), [(2, ["pre", "post", "ladder"]), pytest.param(3, ["post", "macaron"], marks=pytest.mark.slow)]
)
def test_outputs_and_gradients_equal_the_equations(tp_size: int, names: list[str]) -> None:
    run_ranks(tp_size, check_equals_oracle, names, timeout_s=120)


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", (1, 2, 3, 4))
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_equals_its_equations(name: str, tp_size: int) -> None:
    run_ranks(tp_size, check_equals_oracle, [name], timeout_s=240)


def check_collectives(group: TensorParallelGroup) -> None:
    """Two sums a layer of the encoder, three of the decoder, two embeddings; going back, the same, the memory's completed once."""
    for name, sp in product(("pre", "post"), (False, True)):
        config = config_of(name)
        model = build(config, group, weights_of(config), sp=sp)
        sums = 2 * LAYERS[0] + 3 * LAYERS[1] + 2
        allowed = {"reduce_scatter": sums, "all_gather": sums} if sp else {"all_reduce": sums}
        with expect_collectives(group, **allowed):
            local = model(model.encode(TokenBatch.prefill(SOURCES)), TokenBatch.prefill(TARGETS), NoCache())
        with expect_collectives(group, **allowed):
            local.sum().backward()


def test_collectives_of_both_stacks() -> None:
    run_ranks(2, check_collectives)


def check_decoding(group: TensorParallelGroup) -> None:
    config = config_of("post")
    model = build(config, group, weights_of(config)).eval()
    with torch.no_grad():
        expected = logits_of(model)
        memory = model.encode(TokenBatch.prefill(SOURCES)).keep()
        cache = RowCache(model.layout, group, rows=3, max_tokens=5, dtype=torch.float64)
        got, sizes = {}, set()
        for position in range(max(map(len, TARGETS))):
            rows = [row for row, target in enumerate(TARGETS) if position < len(target)]
            batch = TokenBatch.of([(row, position, [TARGETS[row][position]]) for row in rows])
            logits = model.lm_head.gather(model(memory, batch, cache))
            got |= {(row, position): logits[index] for index, row in enumerate(rows)}
            sizes.add(memory.nbytes)
    stepped = torch.stack([got[row, p] for row, target in enumerate(TARGETS) for p in range(len(target))])
    assert relative_error(stepped, expected) < RTOL
    assert len(sizes) == 1 and sizes.pop() > 0, "the kept keys and values grew with the decoder"


def test_decoding_token_by_token_equals_the_whole() -> None:
    run_ranks(2, check_decoding)


def test_without_cross_writers_the_source_does_not_matter() -> None:
    config = config_of("pre")
    weights = weights_of(config)
    silent = {name: 0 * value if "cross_attn.o_proj" in name else value for name, value in weights.items()}
    other = [[(token + 1) % 101 for token in source] for source in SOURCES]
    for given, same in ((weights, False), (silent, True)):
        model = build(config, TensorParallelGroup.single(), given)
        assert torch.equal(logits_of(model), logits_of(model, other)) is same


def test_a_missing_memory_and_a_row_without_source_are_named() -> None:
    config = config_of("pre")
    model = build(config, TensorParallelGroup.single(), weights_of(config))
    with pytest.raises(LayoutError, match=r"decoder\.layers\.0\.cross_attn needs the encoder's output"):
        model(None, TokenBatch.prefill(TARGETS), NoCache())
    with pytest.raises(LayoutError, match="row 2 has no source"):
        model(model.encode(TokenBatch.prefill(SOURCES[:2])), TokenBatch.prefill(TARGETS), NoCache())


def test_layer_configs_of_another_depth() -> None:
    with pytest.raises(Exception, match="skip_layers"):
        EncoderDecoder(
            variant("llama", ResidualConfig(skip_layers=(1,))), TensorParallelGroup.single(), num_encoder_layers=1
        )
