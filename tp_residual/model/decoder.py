"""The decoder: embedding, layers that map stream to stream, final norm, head. It names no collective."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tp_residual.errors import ConfigError
from tp_residual.kernels.contract import NormSpec, norm, widen
from tp_residual.model.attention import Attention
from tp_residual.model.attention_backend import AttentionBackend, TokenBatch
from tp_residual.model.config import ModelConfig
from tp_residual.model.cross_attention import CrossAttention, Memory
from tp_residual.model.layout import ModelLayout
from tp_residual.model.mlp import MLP
from tp_residual.model.rope import RopeTables, rope_tables
from tp_residual.parallel.collectives import token_shard_to_invariant
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.partial import Partial
from tp_residual.parallel.vocabulary import VocabParallelEmbedding, VocabParallelHead
from tp_residual.residual.boundary import Boundary, Site, Tap
from tp_residual.residual.config import ConnectionPlan, ParameterPlan, ResidualConfig, SublayerPlan
from tp_residual.residual.connection import Connection, Replicated, Shortcut
from tp_residual.residual.depth import DepthSampler
from tp_residual.residual.norms import RMSNorm
from tp_residual.residual.stream import Stream
from tp_residual.residual.table import BoundaryTable

SEQUENCE_PARALLEL_CHOICES = ("off", "on", "auto")

# `auto` turns sequence parallelism on from this many activation bytes a rank on: below it, splitting an all-reduce into
# reduce-scatter and all-gather costs a second fixed cost and saves nothing (8xH100: break-even near 4k tokens at hidden 8192).
AUTO_SEQUENCE_PARALLEL_BYTES = 8 << 20


class DecoderLayer(nn.Module):
    """One layer as the residual config plans it: each sublayer reads the stream and writes its update. Names no collective.

    shortcut: the model's, where all connections share one. sampler: decides what training leaves out.
    """

    self_attn: Attention
    cross_attn: CrossAttention
    mlp: MLP

    def __init__(
        self,
        layout: ModelLayout,
        layer: int,
        group: TensorParallelGroup,
        *,
        sequence_parallel: bool,
        dtype: torch.dtype,
        shortcut: Shortcut | None = None,
        sampler: DepthSampler | None = None,
        stack: str = "model",
    ) -> None:
        super().__init__()
        config, residual = layout.config, layout.config.residual
        options: Any = {"sequence_parallel": sequence_parallel, "dtype": dtype}
        self.layer, self.sublayers, self.sampler = layer, layout.plan[layer], sampler
        spec = NormSpec(config.rms_norm_eps, residual.norm, weight_after_cast=config.weight_after_cast)

        def add_norm(name: str | None, *, of_gathered: bool = False) -> RMSNorm | None:
            if name is None:
                return None
            norm = RMSNorm(
                config.hidden_size,
                spec,
                group,
                partial_gradient=sequence_parallel or of_gathered,
                name=f"{stack}.layers.{layer}.{name}",
                dtype=dtype,
            )
            self.add_module(name, norm)
            return norm

        for sublayer in self.sublayers:
            for name in sublayer.read_norms:
                add_norm(name, of_gathered=len(sublayer.read_norms) > 1)
            for name in sublayer.modules:
                kind = {"self_attn": Attention, "cross_attn": CrossAttention}.get(name, MLP)
                path = f"{stack}.layers.{layer}.{name}"
                self.add_module(name, kind(layout, layer, group, path=path, **options))
            plan = sublayer.connection
            connection = Connection(
                residual,
                plan,
                config.hidden_size,
                group,
                update_norm=add_norm(plan.update_norm),
                post_norm=add_norm(plan.post_norm),
                shortcut=shortcut,
                keep=sublayer.keep,
                **options,
            )
            self.add_module(plan.name, connection)

    def forward(
        self,
        stream: Stream,
        rope: RopeTables,
        batch: TokenBatch,
        backend: AttentionBackend,
        memory: Memory | None = None,
    ) -> Stream:
        """memory: what cross-attention reads."""
        for index, sublayer in enumerate(self.sublayers):
            if self.training and sublayer.keep < 1.0:
                assert self.sampler is not None
                if not self.sampler.keeps(f"{self.layer}.{index}", sublayer.keep):
                    continue
            inputs, stream = self._read(stream, sublayer)
            updates = []
            for name, x in zip(sublayer.modules, inputs, strict=True):
                if name == "self_attn":
                    updates.append(self.self_attn(x, rope, batch, backend))
                elif name == "cross_attn":
                    updates.append(self.cross_attn(x, batch, memory))
                else:
                    updates.append(getattr(self, name)(x))
            update = updates[0] if len(updates) == 1 else sum(updates[1:], updates[0])
            stream = stream.write(update, getattr(self, sublayer.connection.name), apart=sublayer.lag > 0)
        return stream

    def _read(self, stream: Stream, sublayer: SublayerPlan) -> tuple[list[Tensor], Stream]:
        """What each module of the sublayer reads."""
        norms = [None if name is None else getattr(self, name) for name in sublayer.read_norms]
        if len(norms) == 1:
            x, stream = stream.read(norms[0], lag=sublayer.lag)
            if sublayer.input_scale != 1.0:
                x = x * sublayer.input_scale
            return [x] * len(sublayer.modules), stream
        # one gather for all norms: each rank computes them on all tokens
        x, stream = stream.read(None, lag=sublayer.lag)
        normed = [norm(x) for norm in norms if norm is not None]
        return [y if sublayer.input_scale == 1.0 else y * sublayer.input_scale for y in normed], stream


class DepthMix(Replicated):
    """After layer l the residual becomes `sum_j a_lj x_j` over the embedding and all layers so far (DenseFormer, arXiv 2402.02622).

    Weights start as "the newest alone", so that the model starts as if without it. No collective: each rank mixes what it holds.
    """

    def __init__(
        self, num_layers: int, group: TensorParallelGroup, *, sequence_parallel: bool, dtype: torch.dtype
    ) -> None:
        plans = [ParameterPlan(str(layer), (layer + 2,), 0.0) for layer in range(num_layers)]
        super().__init__(plans, group, sequence_parallel=sequence_parallel, dtype=dtype)
        with torch.no_grad():
            for weights in self.parameters():
                weights[-1] = 1.0

    def forward(self, layer: int, history: list[Tensor]) -> Tensor:
        weights = getattr(self, str(layer))
        wide = widen(history[0])
        total = wide * weights[0].to(wide.dtype)
        for index, state in enumerate(history[1:], 1):
            total = total + widen(state) * weights[index].to(wide.dtype)
        return total.to(history[0].dtype)


class Decoder(nn.Module):
    """Everything below the head; parameter names as in the checkpoint's `model.`"""

    def __init__(
        self,
        layout: ModelLayout,
        group: TensorParallelGroup,
        *,
        sequence_parallel: bool,
        dtype: torch.dtype,
        stack: str = "model",
    ) -> None:
        """stack: what messages and counters call it."""
        super().__init__()
        config, residual = layout.config, layout.config.residual
        options: Any = {"sequence_parallel": sequence_parallel, "dtype": dtype}
        self.embed_tokens = VocabParallelEmbedding(
            layout.vocabulary, config.hidden_size, group, name=f"{stack}.embed_tokens", dtype=dtype
        )
        self.sampler = DepthSampler(residual)
        self.residual_shortcut = (
            Shortcut(residual, config.hidden_size, group, **options) if residual.shortcut_shared else None
        )
        self.layers = nn.ModuleList(
            DecoderLayer(
                layout, layer, group, shortcut=self.residual_shortcut, sampler=self.sampler, stack=stack, **options
            )
            for layer in range(config.num_hidden_layers)
        )
        self.depth_mix = DepthMix(config.num_hidden_layers, group, **options) if residual.depth_mix else None
        self.norm = None
        if residual.has_final_norm:
            spec = NormSpec(config.rms_norm_eps, residual.norm, weight_after_cast=config.weight_after_cast)
            self.norm = RMSNorm(
                config.hidden_size, spec, group, partial_gradient=sequence_parallel, name=f"{stack}.norm", dtype=dtype
            )
        scale = ConnectionPlan("embedding", update_scale=residual.embed_scale)
        self.embedding = Connection(ResidualConfig(), scale, config.hidden_size, group, **options)

    def connections(self) -> Iterator[Connection]:
        """Every way into the stream, the embedding's first."""
        yield self.embedding
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield from (getattr(layer, sublayer.connection.name) for sublayer in layer.sublayers)

    def forward(
        self,
        stream: Stream,
        rope: RopeTables,
        batch: TokenBatch,
        backend: AttentionBackend,
        watch: "LayerInputs | None" = None,
        memory: Memory | None = None,
    ) -> Stream:
        """All layers. watch: is told where each begins. memory: what cross-attention reads."""
        history = []
        if self.depth_mix is not None:
            stream = stream.complete()
            assert stream.residual is not None
            history.append(stream.residual)
        for number, layer in enumerate(self.layers):
            if self.training and self.sampler.drops_layer(number):
                continue
            if watch is not None:
                watch.next_layer()
            stream = layer(stream, rope, batch, backend, *(() if memory is None else (memory,)))
            if self.depth_mix is not None:
                stream = stream.complete()
                assert stream.residual is not None
                history.append(stream.residual)
                stream = stream.replaced(self.depth_mix(number, history))
        return stream


class LayerInputs:
    """A tap that keeps the residual of each layer's first read: x_0 ... x_(L-1); see CausalLM.forward."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []
        self._begins = False

    def next_layer(self) -> None:
        self._begins = True

    def __call__(self, site: Site, partial: Partial | None, residual: Tensor, normed: Tensor | None) -> None:
        if self._begins:
            self.states.append(residual)
            self._begins = False


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
        joins = list(dict.fromkeys(join for each in self.model.connections() if each.is_static for join in each.joins))
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
                norms=() if self.model.norm is None else (self.model.norm.spec,),
                joins=joins,
                overlap=config.residual.topology == "ladder",
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

    def set_step(self, seed: int, step: int) -> None:
        """What training drops at random follows from these: set both, the same on all ranks, before each step."""
        self.model.sampler.set(seed, step)

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
        """Prefill, decode and any mixture are this one function of flattened tokens. logit_rows: the tokens that need logits (all).

        Hidden states: what each layer's first read made of the stream (a ladder's lacks the newest update), then x_L, then what the head
        reads.
        """
        lengths = batch.sequence_lengths if self.config.rope_type == "dynamic" else None
        rope = rope_tables(self.config, batch.positions, self.dtype, lengths)
        return self.forward_embedded(
            self.model.embed_tokens(batch.token_ids),
            rope,
            batch,
            backend,
            logit_rows=logit_rows,
            output_hidden_states=output_hidden_states,
            taps=taps,
        )

    def forward_embedded(
        self,
        embedded: Partial,
        rope: RopeTables,
        batch: TokenBatch,
        backend: AttentionBackend,
        *,
        logit_rows: Int[Tensor, " rows"] | None = None,
        output_hidden_states: bool = False,
        taps: tuple[Tap, ...] = (),
    ) -> CausalLMOutput:
        """`forward` from the embedding's summands and the rotary tables on."""
        inputs = LayerInputs() if output_hidden_states else None
        if inputs is not None:
            taps = (*taps, inputs)
        boundary = self.boundary_for(embedded.shape[0])
        stream = Stream.start(embedded, boundary, taps, self.model.embedding)
        stream = self.model(stream, rope, batch, backend, inputs)
        final_norm = self.model.norm
        x, stream = stream.read(final_norm)
        hidden_states = None
        if inputs is not None:
            states, residual = inputs.states, stream.residual
            assert residual is not None
            states.append(residual)
            if final_norm is not None:
                # normalised again, to the same bits: x is a column input, whose gradient is a partial sum, and a reader's is complete
                residual = norm(residual, final_norm.weight, final_norm.bias, final_norm.spec, self.dtype)
            states.append(residual)
            if boundary.sequence_parallel:
                split = boundary.token_split(stream.tokens)
                states = [token_shard_to_invariant(state, split, self.group, tag="hidden_states") for state in states]
            hidden_states = tuple(states)
        return CausalLMOutput(self.lm_head(x if logit_rows is None else x.index_select(0, logit_rows)), hidden_states)
