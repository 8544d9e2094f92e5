"""What a sharded run did at every boundary, observed through taps, and made whole for comparison.

The run itself is not changed by being watched: the sums are completed a second time, from the partials that the tap was given, in rank
order. Nothing here judges.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tp_residual.checkpoint.load import load_state_dict_blocks
from tp_residual.kernels.contract import NormSpec, widen
from tp_residual.model.attention_backend import NoCache, TokenBatch
from tp_residual.model.config import ModelConfig
from tp_residual.model.decoder import CausalLM, DecoderLayer
from tp_residual.model.layout import ModelLayout
from tp_residual.model.rope import rope_tables
from tp_residual.parallel.blocks import parameter_blocks
from tp_residual.parallel.collectives import partial_to_invariant, token_shard_to_invariant
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.packing import packed_weights
from tp_residual.parallel.partial import Partial
from tp_residual.parallel.vocabulary import VocabParallelEmbedding, VocabParallelHead
from tp_residual.residual.boundary import Boundary, Site
from tp_residual.residual.norms import RMSNorm
from tp_residual.residual.stream import Stream
from tp_residual.verify.oracle import EMBEDDING, FINAL_NORM, Oracle, read_tensor


@dataclass(frozen=True)
class Observation:
    """What one rank saw at one boundary. partial: its summand; residual: in the stream's layout; normed: whole."""

    site: str
    norm: str
    partial: Tensor
    bias: Tensor | None
    residual: Tensor
    normed: Tensor


class Recorder:
    """A tap that keeps references: a boundary never writes to what it has handed out."""

    def __init__(self) -> None:
        self.seen: list[Observation] = []

    def __call__(self, site: Site, partial: Partial | None, residual: Tensor, normed: Tensor | None) -> None:
        assert partial is not None and normed is not None, (
            "every boundary of the decoder completes a sum and normalises"
        )
        self.seen.append(Observation(site.update, site.norm, partial.value, partial.bias, residual, normed))


@dataclass(frozen=True)
class WholeRun:
    """A run's states in token order on the CPU, by boundary: pre-norm streams, completed updates (wide), normed values; and logits."""

    streams: list[Tensor]
    updates: list[Tensor]
    normed: list[Tensor]
    logits: Tensor


@dataclass(frozen=True)
class ShardedRun:
    """This rank's observations, and on rank 0 the whole of them. unequal: replicas that differ, by boundary: the ranks other than 0's."""

    observed: list[Observation]
    boundary: Boundary
    whole: WholeRun | None
    unequal: list[dict[str, list[int]]]


@torch.no_grad()
def run_sharded(model: CausalLM, sequences: Sequence[Sequence[int]]) -> ShardedRun:
    """One forward pass over the sequences, by the linears that generation computes with. All ranks call it.

    Packed copies stand beside the weights for as long as it lasts: those are what a wrong result is then looked for in.
    """
    group, recorder = model.group, Recorder()
    batch = TokenBatch.prefill([list(ids) for ids in sequences], group.device)
    with packed_weights(model, group.device, model.dtype):
        out = model(batch, NoCache(), taps=(recorder,))
    boundary = model.boundary_for(batch.token_ids.shape[0])
    split = boundary.token_split(batch.token_ids.shape[0])
    streams, updates, normed = [], [], []
    for seen in recorder.seen:
        residual = seen.residual
        if boundary.sequence_parallel:
            residual = token_shard_to_invariant(residual, split, group, tag="verify.stream")
        update = completed(seen, group)
        if group.rank == 0:
            streams.append(residual.cpu())
            updates.append(update.cpu())
            normed.append(seen.normed.cpu())
    logits = model.lm_head.gather(out.local_logits) if group.size > 1 else out.local_logits
    whole = WholeRun(streams, updates, normed, logits.cpu()) if group.rank == 0 else None
    return ShardedRun(recorder.seen, boundary, whole, _unequal_replicas(recorder.seen, boundary, group))


def completed(seen: Observation, group: TensorParallelGroup) -> Tensor:
    """The update, summed in rank order in fp32 at least."""
    bias = None if seen.bias is None else widen(seen.bias)
    owed = Partial(widen(seen.partial), group, seen.site, bias)
    return partial_to_invariant(owed, tag="verify.update", ordered=True)


def _unequal_replicas(
    observed: Sequence[Observation], boundary: Boundary, group: TensorParallelGroup
) -> list[dict[str, list[int]]]:
    """By boundary: which ranks hold another residual (replicated streams) or another normed value than rank 0, bit for bit."""
    if group.size == 1:
        return [{} for _ in observed]
    sums = [
        [_checksum(seen.normed), 0 if boundary.sequence_parallel else _checksum(seen.residual)] for seen in observed
    ]
    own = torch.tensor(sums, dtype=torch.float64, device=group.device)[None]
    everybody = group.run("all_gather", "verify.replicas", own, lambda transport, t: transport.all_gather(t)).cpu()
    differs = everybody != everybody[:1]
    return [
        {
            name: differs[:, site, column].nonzero()[:, 0].tolist()
            for name, column in (("normed", 0), ("stream", 1))
            if bool(differs[:, site, column].any())
        }
        for site in range(len(observed))
    ]


def _checksum(x: Tensor) -> int:
    return zlib.crc32(x.contiguous().cpu().view(torch.uint8).numpy().tobytes())


@torch.no_grad()
def run_single(
    oracle: Oracle,
    sequences: Sequence[Sequence[int]],
    *,
    dtype: torch.dtype,
    stream_dtype: torch.dtype,
    round_reduced: bool,
) -> WholeRun:
    """The same model in the same dtypes at tp=1, one layer in memory at a time: what 16 bits cost without any sharding."""
    config, group, recorder = oracle.config, TensorParallelGroup.single(oracle.device), Recorder()
    layout = ModelLayout.of(config, 1)
    boundary = Boundary(
        group,
        "reference",
        stream_dtype=stream_dtype,
        output_dtype=dtype,
        round_reduced=round_reduced,
        gradients=False,
    )
    batch = TokenBatch.prefill([list(ids) for ids in sequences], group.device)
    rope = rope_tables(config, batch.positions, dtype, batch.sequence_lengths)
    embedding = VocabParallelEmbedding(layout.vocabulary, config.hidden_size, group, name=EMBEDDING, dtype=dtype)
    _fill(embedding, oracle, {"weight": oracle.embedding_name()})
    stream = Stream.start(embedding(batch.token_ids), boundary, (recorder,))
    del embedding
    for layer in range(config.num_hidden_layers):
        module = DecoderLayer(layout, layer, group, sequence_parallel=False, dtype=dtype)
        _fill(module, oracle, {name: f"model.layers.{layer}.{name}" for name in _block_names(module)})
        stream = module(stream, rope, batch, NoCache())
    final = RMSNorm(config.hidden_size, _spec(config), group, partial_gradient=False, name=FINAL_NORM, dtype=dtype)
    _fill(final, oracle, {"weight": f"{FINAL_NORM}.weight"})
    x, _ = stream.read(final)
    head = VocabParallelHead(layout.vocabulary, config.hidden_size, group, dtype=dtype)
    _fill(head, oracle, {"weight": oracle.head_name()})
    return WholeRun(
        [seen.residual.cpu() for seen in recorder.seen],
        [completed(seen, group).cpu() for seen in recorder.seen],
        [seen.normed.cpu() for seen in recorder.seen],
        head(x).cpu(),
    )


def _spec(config: ModelConfig) -> NormSpec:
    return NormSpec(config.rms_norm_eps, weight_after_cast=config.weight_after_cast)


def _block_names(module: nn.Module) -> list[str]:
    return list(dict.fromkeys(block.name for block in parameter_blocks(module)))


def _fill(module: nn.Module, oracle: Oracle, names: dict[str, str]) -> None:
    load_state_dict_blocks(
        parameter_blocks(module), {own: read_tensor(oracle.source, theirs) for own, theirs in names.items()}
    )
