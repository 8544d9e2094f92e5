"""What a layout costs and who holds what, from config.json alone: no ranks, no weights, no torch.

Everything that would go wrong is listed at once, so that a size is chosen before a machine is rented.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from tp_residual.errors import RequestError
from tp_residual.model.config import ModelConfig
from tp_residual.model.layout import ModelLayout

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Collective:
    """One kind of collective of one layer. payload_bytes: a rank's input a token. wire_bytes: what a rank sends a token in a ring."""

    kind: str
    count: int
    payload_bytes_per_token: int
    wire_bytes_per_token: float


@dataclass(frozen=True)
class RankShare:
    """Ranges are `[first, last + 1)`; bytes are of this rank."""

    rank: int
    query_heads: tuple[int, int]
    key_value_heads: tuple[int, int]
    intermediate: tuple[int, int]
    vocabulary: tuple[int, int]
    weight_bytes: int
    kv_bytes_per_token: int


@dataclass(frozen=True)
class Audit:
    """The whole answer; `as_json` is what `--json` prints."""

    model_type: str
    tp_size: int
    dtype: str
    stream_dtype: str
    sequence_parallel: bool
    parameters: int
    legal_tp_sizes: tuple[int, int]
    ranks: tuple[RankShare, ...] = ()
    imbalance: float = 1.0  # largest share of weights over the mean
    blocks: tuple[dict[str, Any], ...] = ()
    collectives_per_layer: dict[str, tuple[Collective, ...]] = field(default_factory=dict)
    tokens: int = 0
    sequences: int = 1
    context: int = 0
    stream_bytes: int = 0
    activation_bytes: int = 0
    kv_cache_bytes: int = 0
    needed_bytes: int = 0
    device_bytes: int | None = None
    violations: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool | None:
        """None when no device memory was given."""
        return None if self.device_bytes is None else self.needed_bytes <= self.device_bytes

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"fits": self.fits}


def audit(
    config: ModelConfig,
    tp_size: int,
    *,
    sequence_parallel: bool = False,
    dtype: str | None = None,
    stream_dtype: str | None = None,
    tokens: int = 4096,
    sequences: int = 1,
    context: int | None = None,
    device_bytes: int | None = None,
) -> Audit:
    """tokens: of the largest forward pass. sequences, context: how many sequences of how many tokens the KV cache must hold.

    Bytes are exact for weights, KV cache and stream; activations are the largest that live at once in one layer, an estimate.
    """
    dtype = dtype or config.dtype or "float32"
    stream_dtype = stream_dtype or dtype
    context = config.max_sequence_length if context is None else context
    for name, value in (("tokens", tokens), ("sequences", sequences), ("context", context)):
        if value < 1:
            raise RequestError(f"{name}={value} must be at least 1")
    for name in (dtype, stream_dtype):
        if name not in ITEMSIZE:
            raise RequestError(f"dtype={name} is not one of {', '.join(ITEMSIZE)}")
    heads = config.num_attention_heads
    whole = ModelLayout.of(config, 1)
    parameters = sum(tensor.local_elements(0) for tensor in whole.tensors(sequence_parallel=False))
    found = Audit(
        config.model_type,
        tp_size,
        dtype,
        stream_dtype,
        sequence_parallel,
        parameters,
        (1, heads),
        notes=tuple(config.warnings),
    )
    violations = list(_violations(config, tp_size, context))
    if not 1 <= tp_size <= heads:
        return Audit(**(_fields(found) | {"violations": tuple(violations)}))

    layout, itemsize = ModelLayout.of(config, tp_size), ITEMSIZE[dtype]
    tensors = list(layout.tensors(sequence_parallel=sequence_parallel))
    kv_head_bytes = 2 * config.num_hidden_layers * config.head_dim * itemsize
    ranks = tuple(
        RankShare(
            rank,
            layout.heads.query.ranges[rank],
            layout.heads.key_value.ranges[rank],
            layout.intermediate.ranges[rank],
            layout.vocabulary.ranges[rank],
            itemsize * sum(tensor.local_elements(rank) for tensor in tensors),
            kv_head_bytes * layout.heads.key_value.size(rank),
        )
        for rank in range(tp_size)
    )
    blocks = tuple(
        {
            "tensor": tensor.name,
            "parameter": tensor.parameter,
            "shape": tensor.shape,
            "dim": tensor.dim,
            "rank": rank,
            "local": block.local,
            "global": block.globe,
            "holders": block.holders,
            "owner": min(block.holders),
            "gradient": "partial" if block.partial_gradient else "complete",
        }
        for tensor in tensors
        for rank in range(tp_size)
        for block in tensor.blocks(rank)
    )
    weights = [share.weight_bytes for share in ranks]
    local_tokens = -(-tokens // tp_size) if sequence_parallel else tokens
    stream_bytes = local_tokens * config.hidden_size * ITEMSIZE[stream_dtype]
    activation_bytes = tokens * itemsize * max(_layer_width(layout, rank) for rank in range(tp_size))
    kv_cache_bytes = sequences * context * max(share.kv_bytes_per_token for share in ranks)
    needed = max(weights) + kv_cache_bytes + stream_bytes + activation_bytes
    if device_bytes is not None and needed > device_bytes:
        violations.append(
            f"needs {_gb(needed)} on the fullest rank and the device has {_gb(device_bytes)}: {_gb(needed - device_bytes)} too much "
            f"(weights {_gb(max(weights))}, KV cache {_gb(kv_cache_bytes)}); use a larger tp, fewer sequences or a shorter context"
        )
    return Audit(
        **(
            _fields(found)
            | {
                "ranks": ranks,
                "imbalance": max(weights) * tp_size / sum(weights),
                "blocks": blocks,
                "collectives_per_layer": _collectives(layout, itemsize),
                "tokens": tokens,
                "sequences": sequences,
                "context": context,
                "stream_bytes": stream_bytes,
                "activation_bytes": activation_bytes,
                "kv_cache_bytes": kv_cache_bytes,
                "needed_bytes": needed,
                "device_bytes": device_bytes,
                "violations": tuple(violations),
                "notes": (*found.notes, *_notes(layout)),
            }
        )
    )


def _fields(found: Audit) -> dict[str, Any]:
    return {name: getattr(found, name) for name in found.__dataclass_fields__}


def _violations(config: ModelConfig, tp_size: int, context: int) -> Iterator[str]:
    heads = config.num_attention_heads
    if not 1 <= tp_size <= heads:
        legal = "1" if heads == 1 else f"1 to {heads}"
        yield f"num_attention_heads={heads} cannot be split over tp_size={tp_size}; use {legal}"
    if context > config.max_sequence_length:
        yield f"context={context} exceeds {config.length_limit}; use at most that"


def _notes(layout: ModelLayout) -> Iterator[str]:
    shared = [(start, stop, holders) for start, stop, holders in layout.heads.key_value.segments() if len(holders) > 1]
    for start, stop, holders in shared:
        heads = f"KV head {start}" if stop - start == 1 else f"KV heads {start}-{stop - 1}"
        yield f"{heads}: held by ranks {', '.join(map(str, holders))}; gradients of k_proj and v_proj are summed over them"
    for name, split in (("intermediate features", layout.intermediate), ("vocabulary rows", layout.vocabulary)):
        empty = [str(rank) for rank, size in enumerate(split.sizes) if not size]
        if empty:
            yield f"no {name} on rank {', '.join(empty)}: there are {split.total} for {layout.tp_size} ranks"


def _layer_width(layout: ModelLayout, rank: int) -> int:
    """Elements a token that one rank holds at once at the widest point of a layer: normed input, update, and the wider sublayer."""
    attention = layout.query_rows.size(rank) * 2 + layout.key_value_rows.size(rank) * 2
    return 2 * layout.config.hidden_size + max(attention, 3 * layout.intermediate.size(rank))


def _collectives(layout: ModelLayout, itemsize: int) -> dict[str, tuple[Collective, ...]]:
    """Of one layer. A ring all-reduce sends 2 (n - 1) / n of its payload a rank, a reduce-scatter or all-gather (n - 1) / n."""
    tp_size = layout.tp_size
    if tp_size == 1:
        return {"tensor_parallel": (), "sequence_parallel": ()}
    sums, ring = len(layout.plan[0]), (tp_size - 1) / tp_size
    payload = sums * layout.config.hidden_size * itemsize
    return {
        "tensor_parallel": (Collective("all_reduce", sums, payload, 2 * ring * payload),),
        "sequence_parallel": (
            Collective("reduce_scatter", sums, payload, ring * payload),
            Collective("all_gather", sums, payload // tp_size, ring * payload),
        ),
    }


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"
