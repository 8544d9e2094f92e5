"""Who holds what of a model, from its config alone: every checkpoint tensor, its split, its holders and its gradient rule.

The modules take their splits from here, and `audit` prints it without torch, ranks or weights. A test compares it with the blocks of
the built model, so that the two cannot part ways.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tp_residual.model.config import ModelConfig
from tp_residual.parallel.splits import HeadSplit, Split
from tp_residual.residual.config import (
    ParameterPlan,
    SublayerPlan,
    connection_parameters,
    plan_layers,
    shortcut_parameters,
)


@dataclass(frozen=True)
class BlockLayout:
    """One rank's block of a tensor: `[start, stop)` along the tensor's split dimension, here and in the checkpoint."""

    local: tuple[int, int]
    globe: tuple[int, int]
    holders: tuple[int, ...]
    partial_gradient: bool


@dataclass(frozen=True)
class TensorLayout:
    """One checkpoint tensor. parameter: the module parameter that holds a rank's share; offsets: where in it, by rank.

    replicated: every rank holds it whole; its gradient is partial when ranks see different tokens or heads through it.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    split: Split
    parameter: str
    offsets: tuple[int, ...]
    replicated: bool = False
    partial_if_replicated: bool = False

    def local_elements(self, rank: int) -> int:
        elements = self.split.size(rank)
        for axis, size in enumerate(self.shape):
            elements *= 1 if axis == self.dim else size
        return elements

    def blocks(self, rank: int) -> Iterator[BlockLayout]:
        """This rank's blocks, in order; an empty share is one empty block."""
        first, end = self.split.ranges[rank]
        offset = self.offsets[rank] - first
        if first == end:
            yield BlockLayout((first + offset, first + offset), (first, first), (rank,), False)
        for start, stop, holders in self.split.segments():
            if rank in holders:
                partial = self.partial_if_replicated if self.replicated else True
                yield BlockLayout((start + offset, stop + offset), (start, stop), holders, partial and len(holders) > 1)


@dataclass(frozen=True)
class ModelLayout:
    """The splits of one model over `tp_size` ranks. Raises SplitError when there are more ranks than query heads."""

    config: ModelConfig
    tp_size: int
    heads: HeadSplit
    intermediate: Split
    vocabulary: Split
    plan: tuple[tuple[SublayerPlan, ...], ...]

    @classmethod
    def of(cls, config: ModelConfig, tp_size: int, *, cross_attention: bool = False) -> "ModelLayout":
        """cross_attention: of the decoder of an encoder-decoder model."""
        return cls(
            config,
            tp_size,
            HeadSplit.of(config.num_attention_heads, config.num_key_value_heads, tp_size),
            Split.even(config.intermediate_size, tp_size),
            Split.even(config.vocab_size, tp_size),
            plan_layers(config.residual, config.num_hidden_layers, cross_attention=cross_attention),
        )

    @property
    def query_rows(self) -> Split:
        return self.heads.query.scaled(self.config.head_dim)

    @property
    def key_value_rows(self) -> Split:
        return self.heads.key_value.scaled(self.config.head_dim)

    def tensors(self, *, sequence_parallel: bool) -> Iterator[TensorLayout]:
        """Every tensor that the checkpoint must have, in module order."""
        config, hidden = self.config, self.config.hidden_size
        yield self._split("model.embed_tokens.weight", (config.vocab_size, hidden), 0, self.vocabulary)
        residual = config.residual
        if residual.shortcut_shared:
            shared = shortcut_parameters(residual, hidden)
            yield from self._planned("model.residual_shortcut.", shared, sequence_parallel)
        for layer, sublayers in enumerate(self.plan):
            for sublayer in sublayers:
                yield from self._sublayer(f"model.layers.{layer}.", sublayer, sequence_parallel)
        if residual.depth_mix:
            for layer in range(config.num_hidden_layers):
                yield self._whole(f"model.depth_mix.{layer}", layer + 2, sequence_parallel)
        if residual.has_final_norm:
            yield from self._norm("model.norm", sequence_parallel)
        if not config.tie_word_embeddings:
            yield self._split("lm_head.weight", (config.vocab_size, hidden), 0, self.vocabulary)

    def _sublayer(self, prefix: str, sublayer: SublayerPlan, sequence_parallel: bool) -> Iterator[TensorLayout]:
        config, hidden, plan = self.config, self.config.hidden_size, sublayer.connection
        several = len(sublayer.read_norms) > 1  # these are computed on gathered tokens, each rank for its own columns
        for name in sublayer.read_norms:
            if name is not None:
                yield from self._norm(f"{prefix}{name}", sequence_parallel or several)
        for module in sublayer.modules:
            if module == "self_attn":
                attention, rows, kv_rows = f"{prefix}self_attn.", self.query_rows, self.key_value_rows
                projections = {"q_proj": rows, "k_proj": kv_rows, "v_proj": kv_rows}
                yield from self._column(attention, "qkv_proj", projections, config.qkv_bias)
                yield from self._row(f"{attention}o_proj.", rows, config.o_bias, sequence_parallel)
                if config.qk_norm:
                    yield self._whole(f"{attention}q_norm.weight", config.head_dim, True)
                    yield self._whole(f"{attention}k_norm.weight", config.head_dim, True)
            elif module == "cross_attn":
                attention, rows, kv_rows = f"{prefix}cross_attn.", self.query_rows, self.key_value_rows
                yield from self._column(attention, "q_proj", {"q_proj": rows}, config.qkv_bias)
                yield from self._column(attention, "kv_proj", {"k_proj": kv_rows, "v_proj": kv_rows}, config.qkv_bias)
                yield from self._row(f"{attention}o_proj.", rows, config.o_bias, sequence_parallel)
            else:
                gate_up = {"gate_proj": self.intermediate, "up_proj": self.intermediate}
                yield from self._column(f"{prefix}{module}.", "gate_up_proj", gate_up, config.mlp_bias)
                yield from self._row(
                    f"{prefix}{module}.down_proj.", self.intermediate, config.mlp_bias, sequence_parallel
                )
        for after in (plan.update_norm, plan.post_norm):
            if after is not None:
                yield from self._norm(f"{prefix}{after}", sequence_parallel)
        yield from self._planned(
            f"{prefix}{plan.name}.", connection_parameters(config.residual, hidden), sequence_parallel
        )

    def _norm(self, name: str, partial: bool) -> Iterator[TensorLayout]:
        yield self._whole(f"{name}.weight", self.config.hidden_size, partial)
        if self.config.residual.norm == "layer":
            yield self._whole(f"{name}.bias", self.config.hidden_size, partial)

    def _planned(self, prefix: str, plans: Iterable[ParameterPlan], sequence_parallel: bool) -> Iterator[TensorLayout]:
        """What a connection learns: whole on every rank, but for a projection that is part of a replicated stream's sum."""
        for plan in plans:
            name = prefix + plan.name
            if plan.columns and not sequence_parallel:
                yield self._split(name, plan.shape, 1, Split.even(plan.shape[1], self.tp_size))
            else:
                split = Split.replicated(plan.shape[0], self.tp_size)
                yield TensorLayout(name, plan.shape, 0, split, name, (0,) * self.tp_size, True, sequence_parallel)

    def _column(self, prefix: str, fused: str, projections: dict[str, Split], bias: bool) -> Iterator[TensorLayout]:
        hidden = self.config.hidden_size
        for kind in ("weight", "bias") if bias else ("weight",):
            offsets = (0,) * self.tp_size
            for name, split in projections.items():
                shape = (split.total, hidden) if kind == "weight" else (split.total,)
                yield TensorLayout(f"{prefix}{name}.{kind}", shape, 0, split, f"{prefix}{fused}.{kind}", offsets)
                offsets = tuple(offset + size for offset, size in zip(offsets, split.sizes, strict=True))

    def _row(self, prefix: str, split: Split, bias: bool, sequence_parallel: bool) -> Iterator[TensorLayout]:
        yield self._split(f"{prefix}weight", (self.config.hidden_size, split.total), 1, split)
        if bias:
            yield self._whole(f"{prefix}bias", self.config.hidden_size, sequence_parallel)

    def _split(self, name: str, shape: tuple[int, ...], dim: int, split: Split) -> TensorLayout:
        return TensorLayout(name, shape, dim, split, name, (0,) * self.tp_size)

    def _whole(self, name: str, size: int, partial: bool) -> TensorLayout:
        split = Split.replicated(size, self.tp_size)
        return TensorLayout(name, (size,), 0, split, name, (0,) * self.tp_size, True, partial)
