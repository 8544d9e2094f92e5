"""The path that generation takes on a CPU: packed linears and the compiled cache. What a token is depends on its own sequence, to the bit.

Functions named check_* run on every rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from test_engine import CROWD, GREEDY, drain
from tiny_models import config, random_weights, sharded

from tp_residual.inference.compiled_cache import CompiledKVCache
from tp_residual.inference.engine import Engine
from tp_residual.inference.paged_cache import CacheCapacity, PagedKVCache, make_cache
from tp_residual.inference.request import EngineLimits, GenerationSettings, Request, SamplingSettings
from tp_residual.kernels import build, decoder
from tp_residual.kernels.linear import packed_form
from tp_residual.model.attention_backend import TokenBatch
from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.blocks import parameter_blocks
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.packing import linears, pack_weights, packed_weights
from tp_residual.testing import relative_error, run_ranks

F32, BF16 = torch.float32, torch.bfloat16
WIDE_HEADS = {"head_dim": 16}  # what the compiled attention takes

pytestmark = pytest.mark.skipif(
    bool(build.unavailable()) or not decoder.attention_block(16, F32), reason="no compiled kernels for this CPU"
)


def tiny(group: TensorParallelGroup, name: str, dtype: torch.dtype, **options: Any) -> CausalLM:
    wide = config(name, **WIDE_HEADS)
    return sharded(wide, group, random_weights(wide, dtype=dtype), dtype=dtype, **options)


def engine_of(model: CausalLM, seqs: int, tokens: int, blocks: int = 40) -> Engine:
    limits = EngineLimits(max_num_seqs=seqs, max_batched_tokens=tokens)
    return Engine(model, model.group, limits, capacity=CacheCapacity(blocks, 16, 64))


@contextmanager
def logits_kept(engine: Engine) -> Iterator[list[torch.Tensor]]:
    """What the sampler is given in each step."""
    kept, choose = list[torch.Tensor](), engine._sampler.choose

    def choose_and_keep(logits: torch.Tensor, *others: Any) -> Any:
        kept.append(logits.clone())
        return choose(logits, *others)

    engine._sampler.choose = choose_and_keep  # type: ignore[method-assign]
    yield kept


def check_bits(group: TensorParallelGroup, name: str, dtype: torch.dtype, sequence_parallel: str) -> list[list[int]]:
    model = tiny(group, name, dtype, sequence_parallel=sequence_parallel)
    pack_weights(model, group.device, dtype)
    alone, rows = [], []
    for prompt in CROWD:
        engine = engine_of(model, 1, 64)
        assert isinstance(engine.cache, CompiledKVCache)
        with logits_kept(engine) as kept:
            number = engine.add(Request(prompt, GREEDY))
            alone.append(drain(engine)[number, 0].token_ids)
        rows.append([each[0] for each in kept])
    for seqs, tokens in ((12, 1024), (3, 5)):  # everybody at once; and few, with prompts in pieces
        engine = engine_of(model, seqs, tokens)
        with logits_kept(engine) as kept:
            numbers = [engine.add(Request(prompt, GREEDY, index)) for index, prompt in enumerate(CROWD)]
            results = drain(engine)
        assert [results[number, 0].token_ids for number in numbers] == alone
        if packed_form(group.device, dtype)[0] == "panels":
            everything = {tuple(row.tolist()) for each in kept for row in each}
            for sequence in rows:
                assert all(tuple(row.tolist()) in everything for row in sequence), "logits differ in a bit"
    return alone


@pytest.mark.parametrize(
    ("tp_size", "name", "dtype", "sequence_parallel"),
    [
        (1, "qwen3", BF16, "off"),
        (2, "llama", BF16, "off"),
        (2, "qwen2", F32, "on"),
        pytest.param(3, "llama", F32, "off", marks=pytest.mark.slow),
        (3, "mistral", BF16, "on"),
    ],
)
def test_logits_are_the_same_to_the_bit_alone_in_a_crowd_and_in_pieces(
    tp_size: int, name: str, dtype: torch.dtype, sequence_parallel: str
) -> None:
    shares = run_ranks(tp_size, check_bits, name, dtype, sequence_parallel, checked=False, transport="shared")
    assert all(share == shares[0] for share in shares)
    assert len({tuple(tokens) for tokens in shares[0]}) > 8, "texts that are alike prove little"


def check_against_plain(group: TensorParallelGroup, name: str) -> None:
    """The compiled path and plain torch are one model: the same prompts, prefilled and decoded by given tokens."""
    model = tiny(group, name, F32)
    ids, more = [prompt[:20] for prompt in CROWD[:4]], [7, 3, 100]

    def run(cache: PagedKVCache | CompiledKVCache) -> torch.Tensor:
        tables = [[3 * row + at for at in range(3)] for row in range(4)]
        logits = []
        batch = TokenBatch.of([(row, 0, prompt) for row, prompt in enumerate(ids)])
        for step in range(len(more) + 1):
            if step:
                batch = TokenBatch.of([(row, len(p) + step - 1, [more[step - 1]]) for row, p in enumerate(ids)])
            cache.begin(tables, batch)
            logits.append(model(batch, cache).local_logits)
        return torch.cat(logits)

    with torch.inference_mode():
        plain = run(PagedKVCache(model.layout, group, 12, 16, F32))
        with packed_weights(model, group.device, F32) as report:
            assert report.form != "plain" and all(module.packed is not None for module in linears(model))
            compiled = run(CompiledKVCache(model.layout, group, 12, F32))
    assert all(module.packed is None for module in linears(model))
    # two fp32 computations in different order; a wrong head, window or position changes a row by more than 1e-2
    assert relative_error(compiled, plain) < 2e-5


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_the_compiled_path_is_plain_torchs_model(name: str) -> None:
    run_ranks(2, check_against_plain, name)


def check_samples(group: TensorParallelGroup) -> None:
    """Samples of one prompt share its blocks; the last, partly filled one is copied."""
    model = tiny(group, "llama", F32)
    settings = GenerationSettings(max_new_tokens=8, sampling=SamplingSettings(temperature=1.0, n=4, seed=3))
    engine = engine_of(model, 4, 64)
    number = engine.add(Request(CROWD[0], settings))
    together = drain(engine)
    assert engine.timings.prefill_tokens == len(CROWD[0]), "each sample would compute the prompt again"
    one = engine_of(model, 1, 64)
    alone_number = one.add(Request(CROWD[0], settings))
    alone = drain(one)
    assert [together[number, at].token_ids for at in range(4)] == [alone[alone_number, at].token_ids for at in range(4)]
    assert len({tuple(each.token_ids) for each in together.values()}) == 4


def test_samples_of_a_prompt_fork_its_blocks() -> None:
    check_samples(TensorParallelGroup.single())


# ---- packing ----


def test_packing_replaces_the_weights_and_keeps_their_names_and_shapes() -> None:
    group = TensorParallelGroup.single()
    model = tiny(group, "qwen2", F32)  # tied
    before = {block.name for block in parameter_blocks(model)}
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    report = pack_weights(model, group.device, F32)
    assert report.form != "plain" and report.nbytes > report.extra_bytes > 0
    assert {block.name for block in parameter_blocks(model)} == before
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == shapes
    assert model.model.embed_tokens.weight.device.type == "cpu", "the embedding looks rows up in it"
    assert all(module.weight.device.type == "meta" for module in linears(model) if module is not model.lm_head)
    assert report.nbytes >= sum(p.numel() * 4 for n, p in model.named_parameters() if "proj" in n)


def test_a_head_that_is_not_tied_is_replaced_too() -> None:
    group = TensorParallelGroup.single()
    model = tiny(group, "llama", F32)
    assert not model.lm_head.tied
    report = pack_weights(model, group.device, F32)
    assert report.extra_bytes == 0 and model.lm_head.weight.device.type == "meta"


def test_what_no_kernel_takes_stays_plain() -> None:
    group = TensorParallelGroup.single()
    model = tiny(group, "llama", torch.float64)
    assert pack_weights(model, group.device, torch.float64).form == "plain"
    assert all(module.packed is None and module.weight.device.type == "cpu" for module in linears(model))


def test_the_cache_is_compiled_where_it_can_be() -> None:
    group = TensorParallelGroup.single()
    wide, narrow = (
        tiny(group, "llama", F32),
        sharded(config("llama"), group, random_weights(config("llama"), dtype=F32)),
    )
    assert isinstance(make_cache(wide.layout, group, 4, 16, F32), CompiledKVCache)
    assert isinstance(make_cache(wide.layout, group, 4, 4, F32), PagedKVCache)
    assert isinstance(make_cache(wide.layout, group, 4, 16, torch.float64), PagedKVCache)
    assert narrow.config.head_dim % 16 and isinstance(make_cache(narrow.layout, group, 4, 16, F32), PagedKVCache)
    compiled, plain = make_cache(wide.layout, group, 4, 16, F32), PagedKVCache(wide.layout, group, 4, 16, F32)
    assert compiled.nbytes == plain.nbytes > 0
