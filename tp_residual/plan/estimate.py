"""Which tp size, TP or SP, one node or several: every layout's predicted times and memory, and what follows from them.

Bytes of weights, KV cache, stream and activations are those of `audit`; a test compares them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tp_residual.audit import ITEMSIZE, audit
from tp_residual.errors import RequestError
from tp_residual.model.config import ModelConfig
from tp_residual.model.layout import ModelLayout
from tp_residual.parallel.splits import Split, check_heads
from tp_residual.plan.boundary import Crossover, Placement, crossover
from tp_residual.plan.forward import Cost, ForwardModel, ForwardPass
from tp_residual.plan.hardware import Hardware
from tp_residual.residual.config import PRE_NORM

Mode = Literal["tp", "sp"]
Step = Literal["prefill", "decode"]


@dataclass(frozen=True)
class PlanRequest:
    """tokens: of prefill passes, each of one prompt. batch: sequences of decode passes, of `context` tokens each. nodes: the most."""

    tp_sizes: tuple[int, ...]
    tokens: tuple[int, ...]
    batch: tuple[int, ...]
    context: int
    nodes: int
    dtype: str

    def check(self, config: ModelConfig, hardware: Hardware) -> None:
        """Raises RequestError or SplitError for what no row could answer."""
        for name, values in (("--tp", self.tp_sizes), ("--tokens", self.tokens), ("--batch", self.batch)):
            if not values:
                raise RequestError(f"{name} has no number; give at least one")
            for value in values:
                if value < 1:
                    raise RequestError(f"{name} {value} must be at least 1")
        for name, value in (("--context", self.context), ("--nodes", self.nodes)):
            if value < 1:
                raise RequestError(f"{name} {value} must be at least 1")
        for name, value in (("--tokens", max(self.tokens)), ("--context", self.context)):
            if value > config.max_sequence_length:
                raise RequestError(f"{name} {value} exceeds {config.length_limit}; use at most that")
        for tp_size in self.tp_sizes:
            check_heads(config.num_attention_heads, tp_size)
        hardware.require_dtype(self.dtype)

    def least_check_bytes(self, config: ModelConfig) -> int:
        """Of all ranks together, for the weights and every pass's own cache at once: what `check` holds at any rate."""
        (tp_size,) = self.tp_sizes
        said = audit(config, tp_size, dtype=self.dtype)
        cached = sum(self.tokens) + sum(self.batch) * self.context
        return sum(share.weight_bytes + cached * share.kv_bytes_per_token for share in said.ranks)


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest rank. kv_cache: of the largest decode batch. max_context_tokens: of all sequences together, beside the rest."""

    weight_bytes: int
    kv_bytes_per_token: int
    kv_cache_bytes: int
    stream_bytes: int
    activation_bytes: int
    needed_bytes: int
    device_bytes: int
    max_context_tokens: int

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.device_bytes


@dataclass(frozen=True)
class PlanRow:
    """One pass of one layout. tokens: of the pass. The time is None where `why` says what keeps the layout from being predicted."""

    tp: int
    nodes: int
    mode: Mode
    step: Step
    tokens: int
    sequences: int
    context: int
    cost: Cost | None
    memory: Memory
    why: str = ""

    @property
    def fits(self) -> bool:
        return not self.why and self.memory.fits

    @property
    def tokens_per_s(self) -> float:
        assert self.cost is not None
        return self.tokens / self.cost.total_us * 1e6

    def as_json(self) -> dict[str, Any]:
        fields = {
            name: getattr(self, name) for name in ("tp", "nodes", "mode", "step", "tokens", "sequences", "context")
        }
        if self.cost is not None:
            times = {"total_us": self.cost.total_us, **asdict(self.cost)}
            rates = {"tokens_per_s": self.tokens_per_s, "tokens_per_s_per_rank": self.tokens_per_s / self.tp}
            fields |= {name: round(value, 3) for name, value in (times | rates).items()}
        return fields | asdict(self.memory) | {"fits": self.memory.fits, "why": self.why}


@dataclass(frozen=True)
class Plan:
    """crossovers: by (tp, nodes), of those that can be predicted."""

    request: PlanRequest
    rows: tuple[PlanRow, ...]
    crossovers: dict[tuple[int, int], Crossover]
    notes: tuple[str, ...]

    def fastest(self, step: Step, size: int, *, per_rank: bool = False, nodes: int | None = None) -> PlanRow | None:
        """Of the rows that fit: by tokens/s, or those of a rank. size: sequences of a decode pass, tokens of a prefill. None: nothing fits.

        Among equals the fewest ranks, then TP, which needs no second form of the stream.
        """
        rows = [
            row
            for row in self.rows
            if row.step == step
            and (row.sequences if step == "decode" else row.tokens) == size
            and row.fits
            and nodes in (None, row.nodes)
        ]
        return max(rows, key=lambda row: row.tokens_per_s / (row.tp if per_rank else 1), default=None)


def plan(config: ModelConfig, hardware: Hardware, request: PlanRequest) -> Plan:
    """Raises RequestError, SplitError for a request that no row could answer; a layout that does not fit is a row that says so."""
    request.check(config, hardware)
    rows: list[PlanRow] = []
    crossings: dict[tuple[int, int], Crossover] = {}
    for tp_size in sorted(request.tp_sizes):
        layout = ModelLayout.of(config, tp_size)
        for place in placements(tp_size, request.nodes, hardware):
            why = impossible(hardware, place)
            rows += _rows(hardware, layout, place, request, why)
            if not why:
                token_bytes = config.hidden_size * ITEMSIZE[request.dtype]
                crossings[tp_size, place.nodes] = crossover(hardware, place, token_bytes)
    notes = list(config.warnings)
    if config.residual != PRE_NORM:
        notes.append(
            f"residual connection {config.residual.name}: sums and sublayers are counted; what its scales, gates, further norms and "
            "projections cost, and what it hides behind other work, is not"
        )
    return Plan(request, tuple(rows), crossings, tuple(notes))


def placements(tp_size: int, nodes: int, hardware: Hardware) -> list[Placement]:
    """On one node up to `nodes`, as many ranks on each; the smallest number of nodes that has room is always there to say why not."""
    found = [Placement(tp_size, count) for count in range(1, nodes + 1) if tp_size % count == 0]
    roomy = [place for place in found if place.ranks_per_node <= hardware.places_per_node]
    return roomy or found[-1:]


def impossible(hardware: Hardware, place: Placement) -> str:
    """Why nothing can be predicted for a placement; empty when it can."""
    if place.ranks_per_node > hardware.places_per_node:
        return f"{place.ranks_per_node} ranks on a node of {hardware.places_per_node} {hardware.kind}; use more --nodes"
    if place.ranks_per_node > 1 and hardware.link_latency_us is None:
        return "the hardware file has no link between ranks of a node; measure with --tp 2 or more, or add one"
    if place.nodes > 1 and hardware.inter_node_gb_s is None:
        return "the hardware file has no inter_node_gb_s; add it to predict several nodes"
    return ""


def _rows(
    hardware: Hardware, layout: ModelLayout, place: Placement, request: PlanRequest, why: str
) -> Iterator[PlanRow]:
    model = ForwardModel(hardware, layout, place, request.dtype)
    work: list[tuple[Step, ForwardPass]] = [("prefill", ForwardPass(1, tokens)) for tokens in request.tokens]
    work += [("decode", ForwardPass(batch, 1, request.context - 1)) for batch in request.batch]
    modes: Sequence[Mode] = ("tp",) if place.tp_size == 1 else ("tp", "sp")
    for mode in modes:
        memory = memory_of(hardware, layout, place, request, sequence_parallel=mode == "sp")
        for step, each in work:
            cost = None if why else model.cost(each, sequence_parallel=mode == "sp")
            yield PlanRow(
                place.tp_size, place.nodes, mode, step, each.tokens, each.sequences, each.context, cost, memory, why
            )


def memory_of(
    hardware: Hardware, layout: ModelLayout, place: Placement, request: PlanRequest, *, sequence_parallel: bool
) -> Memory:
    """The bytes that `audit` gives for the largest pass and batch, without its list of every block, which takes seconds at tp=64."""
    config, itemsize, ranks = layout.config, ITEMSIZE[request.dtype], range(layout.tp_size)
    tensors = list(layout.tensors(sequence_parallel=sequence_parallel))
    weights = [itemsize * sum(tensor.local_elements(rank) for tensor in tensors) for rank in ranks]
    kv_head = 2 * config.num_hidden_layers * config.head_dim * itemsize
    kv_token = [kv_head * layout.heads.key_value.size(rank) for rank in ranks]
    tokens = max(*request.tokens, *request.batch)
    local_tokens = max(Split.ceil_chunks(tokens, layout.tp_size).sizes) if sequence_parallel else tokens
    stream = local_tokens * config.hidden_size * itemsize
    attention = [2 * (layout.query_rows.size(rank) + layout.key_value_rows.size(rank)) for rank in ranks]
    widest = max(max(attention[rank], 3 * layout.intermediate.size(rank)) for rank in ranks)
    activations = tokens * itemsize * (2 * config.hidden_size + widest)
    kv_cache = max(request.batch) * request.context * max(kv_token)
    device = int(hardware.memory_gb * 1e9 * hardware.share(min(place.ranks_per_node, hardware.places_per_node)))
    room = (max(0, device - stream - activations - held) // each for held, each in zip(weights, kv_token, strict=True))
    needed = max(weights) + kv_cache + stream + activations
    return Memory(max(weights), max(kv_token), kv_cache, stream, activations, needed, device, min(room))
