"""The sharded decoder is the unsharded one: against the oracle in fp64, against Transformers in fp32, and what each rank holds and sends.

Functions named check_* run on every rank.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from oracle import Oracle, OracleOutput
from tiny_models import MODELS, config, prompts, random_weights, sharded
from torch import Tensor

from tp_residual.checkpoint.files import CheckpointFiles
from tp_residual.errors import ConfigError, RequestError
from tp_residual.inference.loading import load_model
from tp_residual.kernels.contract import NormSpec, norm
from tp_residual.model.attention_backend import NoCache, TokenBatch
from tp_residual.model.config import ModelConfig
from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.blocks import parameter_blocks
from tp_residual.parallel.collectives import summed
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.partial import Partial
from tp_residual.parallel.vocabulary import vocab_parallel_argmax
from tp_residual.residual.boundary import Site
from tp_residual.testing import (
    RowCache,
    expect_collectives,
    hostile_values,
    nan_filled_memory,
    relative_error,
    run_ranks,
)

TP_SIZES = (1, 2, 3, 4)
LAYOUTS = list(product(("off", "on"), ("reference", "library")))  # sequence parallelism, boundary

# fp64 rounding is 1e-16 an operation, grown over sums of some tens of terms in six updates. The smallest fault there is, one wrong row of
# one update, changes a token by more than 1e-3.
FP64 = 1e-12

# Two fp32 computations in different order: the oracle in fp32 and Transformers differ by up to 2e-6 here.
FP32 = 2e-5


# ---- the oracle and the models are what they claim ----


@pytest.mark.parametrize("name", MODELS)
def test_the_oracle_equals_transformers(name: str) -> None:
    oracle = Oracle(config(name), random_weights(config(name)), torch.float32)
    for prompt in prompts(3):
        with torch.no_grad():
            theirs = tiny_models.reference(name)(torch.tensor([prompt]), output_hidden_states=True)
            ours = oracle([prompt])
        assert relative_error(ours.logits, theirs.logits[0]) < FP32
        states = ours.hidden_states()
        # Transformers returns the last layer's output only after the final norm
        for state, reference in zip((*states[:-2], states[-1]), theirs.hidden_states, strict=True):
            assert relative_error(state, reference[0]) < FP32


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 5}),
        ("qwen2", {"max_window_layers": 2}),
        ("qwen2", {"use_sliding_window": False}),
        ("llama_biased", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
        ("llama", {"rope_theta": 9000.0}),
        ("llama", {"rms_norm_eps": 1e-2}),
    ],
)
def test_an_option_of_a_tiny_model_can_be_seen(name: str, changes: dict[str, Any]) -> None:
    weights, batch = random_weights(config(name)), prompts(1)
    with torch.no_grad():
        plain, other = (Oracle(c, weights)(batch).logits for c in (config(name), config(name, **changes)))
    assert relative_error(other, plain) > 1e-3


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("qwen2", "_proj.bias"),
        ("llama_biased", "o_proj.bias"),
        ("llama_biased", "down_proj.bias"),
        ("qwen3", "q_norm.weight"),
    ],
)
def test_a_tensor_of_a_tiny_model_can_be_seen(name: str, kind: str) -> None:
    weights, batch = random_weights(config(name)), prompts(1)
    altered = {key: tensor * 0.9 if key.endswith(kind) else tensor for key, tensor in weights.items()}
    with torch.no_grad():
        plain, other = (Oracle(config(name), w)(batch).logits for w in (weights, altered))
    assert altered.keys() == weights.keys() and relative_error(other, plain) > 1e-3


# ---- against the oracle ----


def check_forward(
    model: CausalLM, batch: list[list[int]], expected: OracleOutput, *, hidden_states: bool = False
) -> None:
    """Logits and every pre-norm state, each rank's own rows of it, with exactly the collectives of the layout.

    One boundary an update, the embedding's and two a layer; hidden states are gathered when they are asked for and lie sharded.
    """
    group, layers = model.group, model.config.num_hidden_layers
    tokens = TokenBatch.prefill(batch)
    boundary = model.boundary_for(len(tokens.token_ids))
    rows = slice(*boundary.token_split(len(tokens.token_ids)).ranges[group.rank])
    seen: list[tuple[str, Tensor, Tensor | None]] = []

    def tap(site: Site, partial: Partial | None, residual: Tensor, normed: Tensor | None) -> None:
        seen.append((site.update, residual, normed))

    boundaries = 2 * layers + 1 if group.size > 1 else 0
    if boundary.sequence_parallel:
        gathers = boundaries + (layers + 2 if hidden_states and group.size > 1 else 0)
        allowed = {"reduce_scatter": boundaries, "all_gather": gathers}
    else:
        allowed = {"all_reduce": boundaries}
    with expect_collectives(group, **allowed):
        out = model(tokens, NoCache(), output_hidden_states=hidden_states, taps=(tap,))
    logits = model.lm_head.gather(out.local_logits) if group.size > 1 else out.local_logits
    assert relative_error(logits, expected.logits) < FP64
    assert [update for update, _, _ in seen] == list(expected.streams)
    for update, residual, _ in seen:
        assert relative_error(residual, expected.streams[update][rows]) < FP64, update
    assert relative_error(seen[-1][2], expected.final) < FP64
    assert (out.hidden_states is None) == (not hidden_states)
    if out.hidden_states is not None:
        for state, reference in zip(out.hidden_states, expected.hidden_states(), strict=True):
            assert relative_error(state, reference) < FP64


@torch.no_grad()
def check_equals_oracle(group: TensorParallelGroup) -> None:
    for name in MODELS:
        weights = random_weights(config(name))
        batches = [prompts(1), prompts(3, seed=1)]
        expected = [Oracle(config(name), weights)(batch) for batch in batches]
        for sequence_parallel, boundary in LAYOUTS:
            model = sharded(
                config(name),
                group,
                weights,
                dtype=torch.float64,
                sequence_parallel=sequence_parallel,
                boundary=boundary,
            )
            for batch, reference in zip(batches, expected, strict=True):
                check_forward(model, batch, reference, hidden_states=boundary == "library")


@pytest.mark.parametrize("tp_size", TP_SIZES)
def test_logits_and_every_stream_state_equal_the_oracle(tp_size: int) -> None:
    run_ranks(tp_size, check_equals_oracle)


@torch.no_grad()
def check_few_tokens(group: TensorParallelGroup) -> None:
    changed = config("llama", num_hidden_layers=1)
    weights = random_weights(changed)
    model = sharded(changed, group, weights, dtype=torch.float64, sequence_parallel="on")
    oracle = Oracle(changed, weights)
    for count in range(1, 10):
        for batch in ([prompts(1, longest=10)[0][:count]], [[token] for token in range(count)]):
            expected = oracle(batch)
            check_forward(model, batch, expected, hidden_states=True)
            last = model(TokenBatch.prefill(batch), NoCache(), logit_rows=torch.tensor([count - 1])).local_logits
            assert relative_error(model.lm_head.gather(last), expected.logits[-1:]) < FP64


def test_one_to_nine_tokens_at_tp_4_under_sequence_parallelism() -> None:
    run_ranks(4, check_few_tokens)


@torch.no_grad()
def check_vocabulary(group: TensorParallelGroup, vocab_size: int) -> None:
    changed = config("llama", vocab_size=vocab_size, num_hidden_layers=1)
    weights, batch = random_weights(changed), [[vocab_size - 1, 0, 1], [5 % vocab_size]]
    expected = Oracle(changed, weights)(batch)
    for sequence_parallel in ("off", "on"):
        model = sharded(changed, group, weights, dtype=torch.float64, sequence_parallel=sequence_parallel)
        check_forward(model, batch, expected)
        local_logits = model(TokenBatch.prefill(batch), NoCache()).local_logits
        with expect_collectives(group, all_gather=1):
            chosen = vocab_parallel_argmax(local_logits, model.lm_head.split, group, 0)
        assert chosen.tolist() == expected.logits.argmax(-1).tolist()
        with pytest.raises(RequestError, match=f"token id {vocab_size} is outside the vocabulary of {vocab_size} ids"):
            model(TokenBatch.prefill([[vocab_size]]), NoCache())


@pytest.mark.parametrize(
    ("tp_size", "vocab_size"),
    [pytest.param(5, 101, marks=pytest.mark.slow), pytest.param(8, 101, marks=pytest.mark.slow), (8, 10), (4, 3)],
)
def test_any_vocabulary_at_any_size(tp_size: int, vocab_size: int) -> None:
    run_ranks(tp_size, check_vocabulary, vocab_size)


# ---- with a cache ----

# Calls of (row, tokens): a prefill alone; decode beside a prefill; a later chunk of a prompt beside a decode and a one-token
# prompt; decode of all three beside each other, in another order of rows.
CALLS = [
    [(2, 6)],
    [(2, 1), (0, 9)],
    [(2, 5), (0, 1), (1, 1)],
    [(1, 4), (2, 1), (0, 2)],
    [(0, 1), (1, 1), (2, 1)],
    [(1, 1)],
]


def mixed_calls(sequences: Sequence[Sequence[int]]) -> Iterator[list[tuple[int, int, list[int]]]]:
    done = [0] * len(sequences)
    for call in CALLS:
        parts = []
        for row, count in call:
            parts.append((row, done[row], list(sequences[row][done[row] : done[row] + count])))
            done[row] += count
        yield parts
    assert done == [len(sequence) for sequence in sequences]


@torch.no_grad()
def check_cached(group: TensorParallelGroup) -> None:
    lengths = [sum(count for call in CALLS for row, count in call if row == wanted) for wanted in range(3)]
    sequences = [prompts(1, seed=row, longest=length)[0] for row, length in enumerate(lengths)]
    for name in MODELS:
        weights = random_weights(config(name))
        expected = [Oracle(config(name), weights)([sequence]).logits for sequence in sequences]
        for sequence_parallel in ("off", "on"):
            model = sharded(config(name), group, weights, dtype=torch.float64, sequence_parallel=sequence_parallel)
            with nan_filled_memory():
                cache = RowCache(model.layout, group, rows=3, max_tokens=max(lengths), dtype=torch.float64)
                for parts in mixed_calls(sequences):
                    logits = model.lm_head.gather(model(TokenBatch.of(parts), cache).local_logits)
                    reference = torch.cat([expected[row][context : context + len(ids)] for row, context, ids in parts])
                    assert relative_error(logits, reference) < FP64, (name, sequence_parallel, parts)


@pytest.mark.parametrize("tp_size", (1, 2, pytest.param(4, marks=pytest.mark.slow)))
def test_cached_chunks_and_mixed_batches_equal_the_full_forward(tp_size: int) -> None:
    run_ranks(tp_size, check_cached)


# ---- 16-bit weights ----


@pytest.mark.parametrize("name", MODELS)
def test_each_family_rounds_its_norm_where_transformers_does(name: str) -> None:
    """Their reciprocal root is another one, so a few results differ; with the weight on the wrong side of the rounding, many do."""
    model = tiny_models.reference(name, torch.bfloat16).model
    theirs = [model.norm, *((model.layers[0].self_attn.q_norm,) if config(name).qk_norm else ())]
    for module in theirs:
        x = hostile_values(400, module.weight.shape[0], seed=1, dtype=torch.bfloat16)
        with torch.no_grad():
            expected = module(x)
            differing = [
                float((norm(x, module.weight, None, spec, torch.bfloat16) != expected).float().mean())
                for after in (config(name).weight_after_cast, not config(name).weight_after_cast)
                for spec in [NormSpec(config(name).rms_norm_eps, weight_after_cast=after)]
            ]
        assert differing[0] < 0.01 < 0.1 < differing[1]


@torch.no_grad()
def medians(model: CausalLM, batch: list[list[int]], expected: OracleOutput) -> dict[str, float]:
    """The median over tokens of each state's and each update's relative error; updates completed in rank order from the tap's partials."""
    group, errors = model.group, dict[str, float]()
    rows = slice(*model.boundary_for(sum(map(len, batch))).token_split(sum(map(len, batch))).ranges[group.rank])

    def median(value: Tensor, reference: Tensor) -> float:
        value, reference = value.double(), reference.double()
        return float(((value - reference).norm(dim=-1) / reference.norm(dim=-1)).median())

    def tap(site: Site, partial: Partial | None, residual: Tensor, normed: Tensor | None) -> None:
        assert partial is not None and normed is not None
        assert residual.dtype == model.boundary_for(1).stream_dtype and normed.dtype == torch.bfloat16
        if residual.dtype == torch.float32 and site.update != "model.embed_tokens" and residual.numel():
            # an fp32 stream that was rounded to 16 bits on the way would look like this
            assert float((residual != residual.bfloat16()).float().mean()) > 0.1, site
        update = partial.value if group.size == 1 else summed(group, partial.value, "test", True)
        if partial.bias is not None:
            update = update.float() + partial.bias.float()
        errors[f"update {site.update}"] = median(update, expected.updates[site.update])
        whole = residual
        if residual.shape[0] != update.shape[0]:
            whole = torch.zeros(update.shape, dtype=residual.dtype)
            whole[rows] = residual
            whole = summed(group, whole, "test", True)
        errors[f"state {site.update}"] = median(whole, expected.streams[site.update])

    logits = model(TokenBatch.prefill(batch), NoCache(), taps=(tap,)).local_logits
    errors["state logits"] = median(logits if group.size == 1 else model.lm_head.gather(logits), expected.logits)
    return errors


def check_bf16(group: TensorParallelGroup) -> None:
    generator = torch.Generator().manual_seed(5)
    batch = torch.randint(0, 101, (8, 40), generator=generator).tolist()  # 320 tokens, for steady medians
    for name in ("llama", "llama_biased", "qwen3"):
        weights = random_weights(config(name), dtype=torch.bfloat16)
        with torch.no_grad():
            expected = Oracle(config(name), weights, torch.float32)(batch)
        for stream_dtype, sequence_parallel in product((torch.bfloat16, torch.float32), ("off", "on")):
            options: dict[str, Any] = {"dtype": torch.bfloat16, "stream_dtype": stream_dtype}
            alone = medians(sharded(config(name), TensorParallelGroup.single(), weights, **options), batch, expected)
            model = sharded(config(name), group, weights, sequence_parallel=sequence_parallel, **options)
            errors = medians(model, batch, expected)
            for what, error in errors.items():
                # the judgement of the project's numerics: a state may lose half as much again to sharding, an update twice as much
                limit = 2.0 if what.startswith("update") else 1.5
                if alone[what] > 0:
                    assert error <= limit * alone[what], (
                        name,
                        stream_dtype,
                        sequence_parallel,
                        what,
                        error,
                        alone[what],
                    )
                else:
                    assert error == 0, (name, what)  # the embedding in an fp32 stream: a copy


@pytest.mark.parametrize(
    "tp_size", (2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow))
)
def test_bf16_weights_lose_no_more_than_unsharded_ones(tp_size: int) -> None:
    run_ranks(tp_size, check_bf16)


# ---- against Transformers, from a directory ----


@torch.no_grad()
def check_equals_transformers(
    group: TensorParallelGroup, references: dict[str, tuple[str, list[tuple[Tensor, list[Tensor]]]]]
) -> None:
    for name, (directory, outputs) in references.items():
        for sequence_parallel in ("off", "on"):
            model, _ = load_model(directory, group, sequence_parallel=sequence_parallel)
            out = model(TokenBatch.prefill(prompts(3)), NoCache(), output_hidden_states=True)
            assert (
                relative_error(model.lm_head.gather(out.local_logits), torch.cat([logits for logits, _ in outputs]))
                < FP32
            ), name
            states = (*out.hidden_states[:-2], out.hidden_states[-1])  # theirs holds the last state only normed
            for state, parts in zip(states, zip(*(states for _, states in outputs), strict=True), strict=True):
                assert relative_error(state, torch.cat(parts)) < FP32, name


@pytest.mark.parametrize("tp_size", TP_SIZES)
def test_a_loaded_model_equals_transformers(tp_size: int) -> None:
    references = {}
    for name in MODELS:
        outputs = []
        for prompt in prompts(3):
            with torch.no_grad():
                out = tiny_models.reference(name)(torch.tensor([prompt]), output_hidden_states=True)
            outputs.append((out.logits[0], [state[0] for state in out.hidden_states]))
        references[name] = str(tiny_models.saved(name)), outputs
    run_ranks(tp_size, check_equals_transformers, references)


# ---- what a rank holds and reads ----


def check_share(group: TensorParallelGroup, directory: Path, name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Every block holds the elements it declares, bit for bit; returns what this rank holds."""
    full = {name: tensor.to(dtype) for name, tensor in random_weights(config(name)).items()}
    progress: list[tuple[int, int]] = []
    model, report = load_model(directory, group, progress=lambda done, total: progress.append((done, total)))
    assert model.dtype == dtype and not report.casts
    blocks = parameter_blocks(model)
    assert {block.name for block in blocks} <= full.keys() == set(CheckpointFiles.open(directory).tensors)
    for block in blocks:
        assert block.parameter.dtype == dtype
        assert torch.equal(block.of(block.parameter), block.of_full(full[block.name])), block.name
    parameters = list(model.parameters())
    for parameter in parameters:
        assert parameter.is_contiguous() and parameter.storage_offset() == 0
        assert parameter.untyped_storage().nbytes() == parameter.numel() * dtype.itemsize, (
            "a storage larger than its share"
        )
    elements = sum(parameter.numel() for parameter in parameters)  # a tied embedding once
    assert report.bytes_read == report.bytes_held == elements * dtype.itemsize
    assert progress[-1] == (report.bytes_read, report.bytes_read) and report.tensors == len(full)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == model.config.tie_word_embeddings
    return {
        "blocks": [(block.name, block.dim, block.globe, block.holders) for block in blocks],
        "shapes": {key: tuple(parameter.shape) for key, parameter in model.named_parameters()},
    }


@pytest.mark.parametrize(
    "tp_size", (pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow), 4)
)
@pytest.mark.parametrize(
    ("name", "dtype", "max_shard_size"),
    [*((name, torch.float32, "50GB") for name in MODELS), ("qwen3", torch.bfloat16, "20KB")],
)
def test_all_shares_together_are_the_checkpoint(
    tp_size: int, name: str, dtype: torch.dtype, max_shard_size: str
) -> None:
    directory = tiny_models.saved(name, dtype, max_shard_size)
    assert (directory / "model.safetensors.index.json").exists() == (max_shard_size != "50GB")
    shares = run_ranks(tp_size, check_share, directory, name, dtype)
    full = random_weights(config(name))
    copies = {key: torch.zeros(tensor.shape, dtype=torch.int) for key, tensor in full.items()}
    owned = {key: torch.zeros(tensor.shape, dtype=torch.int) for key, tensor in full.items()}
    for rank, share in enumerate(shares):
        for key, dim, (start, stop), holders in share["blocks"]:
            assert rank in holders
            copies[key].narrow(dim, start, stop - start).add_(1)
            if rank == min(holders):
                owned[key].narrow(dim, start, stop - start).add_(1)
    for key, count in copies.items():
        assert bool((count >= 1).all()) and bool((owned[key] == 1).all()), key
        split = not key.endswith("norm.weight") and not key.endswith(("o_proj.bias", "down_proj.bias"))
        shared = key.endswith(("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias"))
        assert bool((count == 1).all()) if split and not shared else bool((count <= tp_size).all()), key


# Written out by hand: 9 query and 3 KV heads of 8, hidden 45, 59 intermediate features, 101 ids.
LLAMA_SHAPES = {
    2: [{"qkv": 5 + 2 + 2, "q": 5, "inner": 30, "vocab": 51}, {"qkv": 4 + 2 + 2, "q": 4, "inner": 29, "vocab": 50}],
    3: [{"qkv": 3 + 1 + 1, "q": 3, "inner": inner, "vocab": vocab} for inner, vocab in ((20, 34), (20, 34), (19, 33))],
    4: [
        {"qkv": 3 + 1 + 1, "q": 3, "inner": 15, "vocab": 26},
        {"qkv": 2 + 1 + 1, "q": 2, "inner": 15, "vocab": 25},
        {"qkv": 2 + 2 + 2, "q": 2, "inner": 15, "vocab": 25},
        {"qkv": 2 + 1 + 1, "q": 2, "inner": 14, "vocab": 25},
    ],
}


@pytest.mark.parametrize("tp_size", LLAMA_SHAPES)
def test_parameter_shapes_of_each_rank(tp_size: int) -> None:
    shares = run_ranks(tp_size, check_share, tiny_models.saved("llama"), "llama", torch.float32)
    for share, sizes in zip(shares, LLAMA_SHAPES[tp_size], strict=True):
        expected = {
            "model.embed_tokens.weight": (sizes["vocab"], 45),
            "lm_head.weight": (sizes["vocab"], 45),
            "model.norm.weight": (45,),
        }
        for layer in (f"model.layers.{number}" for number in range(2)):
            expected[f"{layer}.self_attn.qkv_proj.weight"] = (sizes["qkv"] * 8, 45)
            expected[f"{layer}.self_attn.o_proj.weight"] = (45, sizes["q"] * 8)
            expected[f"{layer}.mlp.gate_up_proj.weight"] = (2 * sizes["inner"], 45)
            expected[f"{layer}.mlp.down_proj.weight"] = (45, sizes["inner"])
            expected |= {f"{layer}.{name}.weight": (45,) for name in ("input_layernorm", "post_attention_layernorm")}
        assert share["shapes"] == expected


def test_a_cast_is_reported() -> None:
    model, report = load_model(tiny_models.saved("qwen3"), TensorParallelGroup.single(), dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert report.casts == {("float32", "bfloat16"): len(random_weights(config("qwen3")))}


def test_a_misspelt_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="sequence_parallel='yes' is not one of off, on, auto"):
        CausalLM(config("llama"), TensorParallelGroup.single(), sequence_parallel="yes")
    assert isinstance(config("llama"), ModelConfig)
