"""The decoder: embedding, layers that map stream to stream, final norm, head. It names no collective."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tp_residual.errors import ConfigError
from tp_residual.kernels.contract import NormSpec, norm
from tp_residual.model.attention import Attention
from tp_residual.model.attention_backend import AttentionBackend, TokenBatch
from tp_residual.model.config import ModelConfig
from tp_residual.model.layout import ModelLayout
from tp_residual.model.mlp import MLP
from tp_residual.model.rope import RopeTables, rope_tables
from tp_residual.parallel.collectives import token_shard_to_invariant
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.vocabulary import VocabParallelEmbedding, VocabParallelHead
from tp_residual.residual.boundary import Boundary, Site, Tap
from tp_residual.residual.norms import RMSNorm
from tp_residual.residual.stream import Stream
from tp_residual.residual.table import BoundaryTable

SEQUENCE_PARALLEL_CHOICES = ("off", "on", "auto")

# `auto` turns sequence parallelism on from this many activation bytes a rank on: below it, splitting an all-reduce into
# reduce-scatter and all-gather costs a second fixed cost and saves nothing (8xH100: break-even near 4k tokens at hidden 8192).
AUTO_SEQUENCE_PARALLEL_BYTES = 8 << 20


class DecoderLayer(nn.Module):
    """One Pre-Norm layer (arXiv 2002.04745)."""

    def __init__(
        self,
        layout: ModelLayout,
        layer: int,
        group: TensorParallelGroup,
        *,
        sequence_parallel: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        config = layout.config
        spec = NormSpec(config.rms_norm_eps, weight_after_cast=config.weight_after_cast)

        def layer_norm(name: str) -> RMSNorm:
            path = f"model.layers.{layer}.{name}"
            return RMSNorm(config.hidden_size, spec, group, partial_gradient=sequence_parallel, name=path, dtype=dtype)

        self.input_layernorm = layer_norm("input_layernorm")
        self.self_attn = Attention(layout, layer, group, sequence_parallel=sequence_parallel, dtype=dtype)
        self.post_attention_layernorm = layer_norm("post_attention_layernorm")
        self.mlp = MLP(layout, layer, group, sequence_parallel=sequence_parallel, dtype=dtype)

    def forward(self, stream: Stream, rope: RopeTables, batch: TokenBatch, backend: AttentionBackend) -> Stream:
        x, stream = stream.read(self.input_layernorm)
        stream = stream.write(self.self_attn(x, rope, batch, backend))
        x, stream = stream.read(self.post_attention_layernorm)
        return stream.write(self.mlp(x))


class Decoder(nn.Module):
    """Everything below the head; parameter names as in the checkpoint's `model.`"""

    def __init__(
        self, layout: ModelLayout, group: TensorParallelGroup, *, sequence_parallel: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        config = layout.config
        self.embed_tokens = VocabParallelEmbedding(
            layout.vocabulary, config.hidden_size, group, name="model.embed_tokens", dtype=dtype
        )
        self.layers = nn.ModuleList(
            DecoderLayer(layout, layer, group, sequence_parallel=sequence_parallel, dtype=dtype)
            for layer in range(config.num_hidden_layers)
        )
        spec = NormSpec(config.rms_norm_eps, weight_after_cast=config.weight_after_cast)
        self.norm = RMSNorm(
            config.hidden_size, spec, group, partial_gradient=sequence_parallel, name="model.norm", dtype=dtype
        )


class CausalLMOutput(NamedTuple):
    """local_logits: `[rows, local_vocab]`, this rank's vocabulary. hidden_states: x_0 ... x_L and the final norm's output, or None.

    The states are invariant: a replicated loss may read them.
    """

    local_logits: Float[Tensor, "rows local_vocab"]
    hidden_states: tuple[Float[Tensor, "tokens hidden"], ...] | None


class CausalLM(nn.Module):
    """A decoder-only language model on one tensor-parallel group. Weights are uninitialised until loaded.

    sequence_parallel: `on` shards the stream by tokens between boundaries, `auto` does so for large batches only. With gradients it is
    fixed (`auto` freezes the parameters): a norm weight's gradient is partial in one mode and complete in the other.
    boundary, boundary_table: see `Boundary`. stream_dtype: of the residual, the weights' dtype unless given.
    """

    def __init__(
        self,
        config: ModelConfig,
        group: TensorParallelGroup,
        *,
        dtype: torch.dtype = torch.float32,
        stream_dtype: torch.dtype | None = None,
        sequence_parallel: str = "off",
        boundary: str = "auto",
        boundary_table: BoundaryTable | None = None,
        round_reduced: bool = False,
    ) -> None:
        super().__init__()
        if sequence_parallel not in SEQUENCE_PARALLEL_CHOICES:
            raise ConfigError(
                f"sequence_parallel={sequence_parallel!r} is not one of {', '.join(SEQUENCE_PARALLEL_CHOICES)}"
            )
        self.config, self.group, self.dtype, self.sequence_parallel = config, group, dtype, sequence_parallel
        sharded = sequence_parallel == "on"
        self.layout = ModelLayout.of(config, group.size)
        self.model = Decoder(self.layout, group, sequence_parallel=sharded, dtype=dtype)
        self.lm_head = VocabParallelHead(
            self.layout.vocabulary,
            config.hidden_size,
            group,
            tied_to=self.model.embed_tokens if config.tie_word_embeddings else None,
            dtype=dtype,
        )
        if sequence_parallel == "auto":
            self.requires_grad_(False)
        modes = {"off": (False,), "on": (True,), "auto": (False, True)}[sequence_parallel]
        self.boundaries = {
            mode: Boundary(
                group,
                boundary,
                sequence_parallel=mode,
                stream_dtype=stream_dtype or dtype,
                output_dtype=dtype,
                round_reduced=round_reduced,
                gradients=sequence_parallel != "auto",
                norms=(self.model.norm.spec,),
                table=boundary_table,
            )
            for mode in modes
        }

    def boundary_for(self, tokens: int) -> Boundary:
        """The boundary of a forward pass over `tokens` tokens: the one place where `auto` decides, from the token count alone."""
        if self.sequence_parallel != "auto":
            return self.boundaries[self.sequence_parallel == "on"]
        nbytes = tokens * self.config.hidden_size * self.dtype.itemsize
        return self.boundaries[self.group.size > 1 and nbytes >= AUTO_SEQUENCE_PARALLEL_BYTES * self.group.size]

    def auto_threshold_tokens(self) -> int:
        """The token count from which `auto` is sequence-parallel."""
        return -(-AUTO_SEQUENCE_PARALLEL_BYTES * self.group.size // (self.config.hidden_size * self.dtype.itemsize))

    def forward(
        self,
        batch: TokenBatch,
        backend: AttentionBackend,
        *,
        logit_rows: Int[Tensor, " rows"] | None = None,
        output_hidden_states: bool = False,
        taps: tuple[Tap, ...] = (),
    ) -> CausalLMOutput:
        """Prefill, decode and any mixture are this one function of flattened tokens. logit_rows: the tokens that need logits (all)."""
        states: list[Tensor] = []
        if output_hidden_states:
            taps = (*taps, lambda site, _partial, residual, _normed: _keep_layer_input(states, site, residual))
        boundary = self.boundary_for(batch.token_ids.shape[0])
        lengths = batch.sequence_lengths if self.config.rope_type == "dynamic" else None
        rope = rope_tables(self.config, batch.positions, self.dtype, lengths)
        stream = Stream.start(self.model.embed_tokens(batch.token_ids), boundary, taps)
        for layer in self.model.layers:
            stream = layer(stream, rope, batch, backend)
        x, stream = stream.read(self.model.norm)
        hidden_states = None
        if output_hidden_states:
            # normalised again, to the same bits: x is a column input, whose gradient is a partial sum, and a reader's is complete
            final_norm, residual = self.model.norm, stream.residual
            assert residual is not None
            states.append(norm(residual, final_norm.weight, final_norm.bias, final_norm.spec, self.dtype))
            if boundary.sequence_parallel:
                split = boundary.token_split(stream.tokens)
                states = [token_shard_to_invariant(state, split, self.group, tag="hidden_states") for state in states]
            hidden_states = tuple(states)
        return CausalLMOutput(self.lm_head(x if logit_rows is None else x.index_select(0, logit_rows)), hidden_states)


def _keep_layer_input(states: list[Tensor], site: Site, residual: Tensor) -> None:
    """x_l is the residual that layer l's first norm reads; x_L the one that the final norm reads."""
    if not site.norm.endswith("post_attention_layernorm"):
        states.append(residual)
