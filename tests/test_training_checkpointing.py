"""Checkpointed layers: the same bits, the residual alone between layers; and what autograd keeps of a plain layer, byte by byte.

Functions named check_* run on every rank.
"""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from tiny_models import config, prompts, random_weights, sharded
from torch import Tensor

from tp_residual.checkpoint.random_weights import Fill
from tp_residual.errors import UserError
from tp_residual.model.attention_backend import NoCache, TokenBatch
from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.blocks import parameter_blocks
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.residual.config import PRESETS
from tp_residual.testing import hostile_values, run_ranks
from tp_residual.training import Normal, RebuiltReads, checkpoint_layers, init_weights

LADDER_FROM_1 = replace(PRESETS["ladder"].config, ladder_from=1)
BATCH = prompts(3, longest=9)


def by_kind(group: TensorParallelGroup) -> dict[str, int]:
    return {kind: calls for kind, calls in group.counters.by_kind().items() if calls}


def check_bits_and_collectives(group: TensorParallelGroup, cases: list[tuple[str, str]]) -> None:
    """Logits, hidden states and gradients keep their bits. Recomputed: the sum inside a layer, and under SP both gathers."""
    for (name, boundary), sequence_parallel in product(cases, ("off", "on")):
        layers, runs = config(name).num_hidden_layers, []
        for every in (None, 1, 2):
            options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "boundary": boundary}
            model = sharded(config(name), group, random_weights(config(name)), dtype=torch.float64, **options)
            names_before = [path for path, _ in model.named_parameters()]
            handle = None if every is None else checkpoint_layers(model.model.layers, every=every)
            assert [path for path, _ in model.named_parameters()] == names_before and parameter_blocks(model)
            group.counters.reset()
            out = model(TokenBatch.prefill(BATCH), NoCache(), output_hidden_states=True)
            forward = by_kind(group)
            group.counters.reset()
            out.local_logits.backward(hostile_values(*out.local_logits.shape, seed=5, rank=group.rank))
            backward = by_kind(group)
            assert out.hidden_states is not None
            runs.append(
                (every, forward, backward, [out.local_logits, *out.hidden_states], [p.grad for p in model.parameters()])
            )
            if handle is not None:
                with pytest.raises(UserError, match=r"checkpointed already; remove\(\) first"):
                    checkpoint_layers(model.model.layers)
                handle.remove()
                assert not any("forward" in vars(layer) for layer in model.model.layers)
        _, plain_forward, plain_backward, values, gradients = runs[0]
        for every, forward, backward, other_values, other_gradients in runs[1:]:
            assert forward == plain_forward, "the same collectives, some of them earlier"
            chosen = len(range(0, layers, every or 1))
            again = (
                {"all_reduce": chosen}
                if sequence_parallel == "off"
                else {"reduce_scatter": chosen, "all_gather": 2 * chosen}
            )
            extra = Counter(again) if group.size > 1 else Counter()
            assert Counter(backward) - Counter(plain_backward) == extra, (name, sequence_parallel, every)
            for first, second in zip([*values, *gradients], [*other_values, *other_gradients], strict=True):
                assert first is not None and torch.equal(first, second), (name, sequence_parallel, boundary, every)


@pytest.mark.parametrize(
    ("tp_size", "cases"), [(2, [("llama_biased", "reference"), ("llama", "library")]), (3, [("qwen3", "reference")])]
)
def test_values_and_gradients_keep_their_bits(tp_size: int, cases: list[tuple[str, str]]) -> None:
    run_ranks(tp_size, check_bits_and_collectives, cases)


def check_rebuilt_reads(group: TensorParallelGroup, names: list[str]) -> None:
    """Gradients keep their bits, also when the context has ended before the backward pass; only gathers are repeated."""
    for name, sequence_parallel, dtype in product(names, ("off", "on"), (torch.float64, torch.bfloat16)):
        runs = []
        for rebuilt in (False, True):
            weights = random_weights(config(name), dtype=dtype)
            model = sharded(config(name), group, weights, dtype=dtype, sequence_parallel=sequence_parallel)
            with RebuiltReads(model) if rebuilt else nullcontext() as reads:
                out = model(TokenBatch.prefill(BATCH), NoCache(), taps=() if reads is None else (reads,))
            group.counters.reset()
            out.local_logits.backward(hostile_values(*out.local_logits.shape, seed=5, rank=group.rank, dtype=dtype))
            runs.append((by_kind(group), [parameter.grad for parameter in model.parameters()]))
        (plain, gradients), (again, other) = runs
        reads_of_model = 2 * config(name).num_hidden_layers + 1
        extra = Counter(all_gather=reads_of_model) if sequence_parallel == "on" and group.size > 1 else Counter()
        assert Counter(again) - Counter(plain) == extra, (name, sequence_parallel)
        for first, second in zip(gradients, other, strict=True):
            assert first is not None and torch.equal(first, second), (name, sequence_parallel, dtype)


@pytest.mark.parametrize(("tp_size", "names"), [(3, ["llama", "qwen3"])])
def test_rebuilt_reads_keep_the_bits(tp_size: int, names: list[str]) -> None:
    run_ranks(tp_size, check_rebuilt_reads, names)


def check_variants(group: TensorParallelGroup, presets: list[str]) -> None:
    """Whatever the residual connection: each parameter, those of connections too, has other values, and its gradient keeps its bits."""
    for preset, sequence_parallel in product(presets, ("off", "on")):
        residual = LADDER_FROM_1 if preset == "ladder from layer 1" else PRESETS[preset].config
        variant = replace(config("qwen3"), residual=residual)
        runs = []
        for how in ("plain", "checkpointed", "rebuilt"):
            model = CausalLM(variant, group, dtype=torch.float64, sequence_parallel=sequence_parallel).eval()
            init_weights(model, Normal(), 3, num_layers=2, overrides={"*": Fill(0.1, 0.3)})
            if how == "checkpointed":
                checkpoint_layers(model.model.layers)
            with RebuiltReads(model) if how == "rebuilt" else nullcontext() as reads:
                out = model(TokenBatch.prefill(BATCH), NoCache(), taps=() if reads is None else (reads,))
            out.local_logits.backward(hostile_values(*out.local_logits.shape, seed=5, rank=group.rank))
            runs.append([out.local_logits, *(p.grad for p in model.parameters())])
        for how, run in zip(("checkpointed", "rebuilt"), runs[1:], strict=True):
            for first, second in zip(runs[0], run, strict=True):
                same = first is second is None or (
                    first is not None and second is not None and torch.equal(first, second)
                )
                assert same, (preset, sequence_parallel, how)


def test_any_residual_connection_keeps_its_bits() -> None:
    run_ranks(2, check_variants, ["ladder from layer 1", "post"])


@pytest.mark.slow
def test_every_residual_connection_keeps_its_bits() -> None:
    run_ranks(3, check_variants, list(PRESETS), timeout_s=110)


def test_every_must_be_positive() -> None:
    model = CausalLM(config("llama"), TensorParallelGroup.single())
    with pytest.raises(UserError, match="every=0 must be an integer of at least 1"):
        checkpoint_layers(model.model.layers, every=0)


# ---- memory ----

# Wide enough that what is per token and layer stands out: T tokens, h hidden, q and k query and KV channels, f features.
WIDE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 96,
    "intermediate_size": 240,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "max_position_embeddings": 256,
}
TOKENS = 128


class Saved:
    """Unique storages that autograd keeps, parameters left out."""

    def __init__(self, model: CausalLM) -> None:
        self.ignored = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.storages: dict[int, tuple[int, Tensor]] = {}

    def __enter__(self) -> "Saved":
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.ignored:
            # held, so that its address is not given away again
            self.storages[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    def bytes(self) -> int:
        return sum(nbytes for nbytes, _ in self.storages.values())


class CountedReads(RebuiltReads):
    """Counts what its hooks keep: the residuals in place of the values that are made again."""

    def __init__(self, model: CausalLM, saved: Saved) -> None:
        super().__init__(model)
        self.saved = saved

    def _pack(self, tensor: Tensor) -> Any:
        kept = super()._pack(tensor)
        self.saved._pack(kept if isinstance(kept, Tensor) else kept.residual)
        return kept


def saved_bytes(group: TensorParallelGroup, layers: int, sequence_parallel: str, how: str) -> int:
    changed = config("llama", **WIDE, num_hidden_layers=layers)
    model = sharded(changed, group, random_weights(changed, dtype=torch.float32), sequence_parallel=sequence_parallel)
    if how == "checkpointed":
        checkpoint_layers(model.model.layers)
    batch = TokenBatch.prefill([torch.arange(TOKENS).remainder(64).tolist()])
    with Saved(model) as saved:
        if how == "rebuilt":
            with CountedReads(model, saved) as reads:
                out = model(batch, NoCache(), taps=(reads,))
        else:
            out = model(batch, NoCache())
    nbytes = saved.bytes()
    out.local_logits.sum().backward()
    return nbytes


def check_bytes_per_layer(group: TensorParallelGroup) -> dict[str, float]:
    """What two more layers add, halved."""
    return {
        f"{mode} {how}": (saved_bytes(group, 4, setting, how) - saved_bytes(group, 2, setting, how)) / 2
        for (mode, setting), how in product((("TP", "off"), ("SP", "on")), ("plain", "rebuilt", "checkpointed"))
    }


@pytest.mark.parametrize("tp_size", (2, pytest.param(4, marks=pytest.mark.slow)))
def test_bytes_that_a_layer_keeps(tp_size: int) -> None:
    """Exactly: of a boundary the new residual, in its layout, and the normed value once, as a matrix product's input. The rest is split.

    Fused rope, attention and gated MLP would keep `T (4h + (2h + 2k + 3f) / t)` elements. Ours keep keys and values repeated for their
    query heads, the heads' output in two layouts, and silu(gate): `5q + heads + 4f` in place of `2h + 2k + 3f`. Under sequence parallelism
    residuals are shards and the products' inputs are whole, unless they are rebuilt. Checkpointed: the residual, and nothing else.
    """
    h, q, f, heads = (WIDE[name] for name in ("hidden_size", "hidden_size", "intermediate_size", "num_attention_heads"))
    index_bytes = 8 * heads // tp_size  # which KV head a query head reads
    split = (5 * q + heads + 4 * f) // tp_size
    element = 4 * TOKENS
    for found in run_ranks(tp_size, check_bytes_per_layer):
        assert found == {
            "TP plain": element * (4 * h + split) + index_bytes,
            "TP rebuilt": element * (2 * h + split) + index_bytes,
            "TP checkpointed": element * h,
            "SP plain": element * (2 * h // tp_size + 2 * h + split) + index_bytes,
            "SP rebuilt": element * (2 * h // tp_size + split) + index_bytes,
            "SP checkpointed": element * h // tp_size,
        }
