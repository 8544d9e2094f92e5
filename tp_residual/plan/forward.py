"""Time of one forward pass: products, attention, elementwise steps, launches and boundaries of every sublayer, the slowest rank deciding.

Ranks meet at each boundary, so that a pass is the sum over sublayers of the slowest rank's time: uneven heads and columns cost what they
cost. The splits are the model's own (`ModelLayout`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import partial

from tp_residual.audit import ITEMSIZE
from tp_residual.model.layout import ModelLayout
from tp_residual.plan.boundary import Placement, boundary_us, memory_gb_s
from tp_residual.plan.collectives import collective_us
from tp_residual.plan.hardware import Hardware

_CANDIDATE_BYTES = 16  # of a row and rank, when the next token is chosen: a value and an id


@dataclass(frozen=True)
class Cost:
    """Microseconds. launch: fixed costs of all steps but boundaries, whose own are in boundary_us."""

    gemm_us: float = 0.0
    attention_us: float = 0.0
    elementwise_us: float = 0.0
    launch_us: float = 0.0
    boundary_us: float = 0.0

    @property
    def total_us(self) -> float:
        return sum(getattr(self, each.name) for each in fields(self))

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


@dataclass(frozen=True)
class ForwardPass:
    """sequences, each with `queries` new tokens after `context` earlier ones; logits of each sequence's last token."""

    sequences: int
    queries: int
    context: int = 0

    @property
    def tokens(self) -> int:
        return self.sequences * self.queries


@dataclass(frozen=True)
class ForwardModel:
    """Predicts passes of one layout on one placement, in one dtype."""

    hardware: Hardware
    layout: ModelLayout
    place: Placement
    dtype: str

    def cost(self, work: ForwardPass, *, sequence_parallel: bool) -> Cost:
        config, tokens = self.layout.config, work.tokens
        boundary = Cost(
            boundary_us=boundary_us(
                self.hardware,
                self.place,
                tokens,
                config.hidden_size * self._itemsize,
                sequence_parallel=sequence_parallel,
            )
        )
        total = self._slowest(lambda rank: self._embedding(tokens)) + boundary
        known: dict[tuple[tuple[str, ...], int | None], Cost] = {}
        for number, sublayers in enumerate(self.layout.plan):
            window = config.sliding_window[number]
            for sublayer in sublayers:
                key = sublayer.modules, window
                if key not in known:
                    known[key] = self._slowest(partial(self._sublayer, *key, work))
                total += known[key] + boundary
        return total + self._head(work.sequences)

    @property
    def _itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def _share(self) -> float:
        return self.hardware.share(self.place.ranks_per_node)

    def _slowest(self, cost: Callable[[int], Cost]) -> Cost:
        return max((cost(rank) for rank in range(self.place.tp_size)), key=lambda each: each.total_us)

    def _sublayer(self, modules: Iterable[str], window: int | None, work: ForwardPass, rank: int) -> Cost:
        """What one rank does between two boundaries."""
        total = Cost()
        for module in modules:
            total += self._attention(work, window, rank) if module == "self_attn" else self._mlp(work.tokens, rank)
        return total

    def _attention(self, work: ForwardPass, window: int | None, rank: int) -> Cost:
        config, tokens = self.layout.config, work.tokens
        q, kv = (split.size(rank) for split in (self.layout.query_rows, self.layout.key_value_rows))
        keys = seen_keys(work.queries, work.context, window)
        context = work.context + work.queries
        read = context if window is None else min(context, window + work.queries - 1)
        rates = self.hardware.attention_tflops
        peak = (
            rates.get(self.dtype, self.hardware.gemm_tflops[self.dtype]) * self.hardware.gemm_efficiency * self._share
        )
        flops = 4 * q * keys * work.sequences
        moved = self._itemsize * (2 * tokens * q + 2 * work.sequences * read * kv)
        calls = 2  # one to keep keys and values, one to attend, for all sequences
        attention = Cost(
            attention_us=max(flops / peak / 1e6, self._memory_us(moved)), launch_us=calls * self.hardware.launch_us
        )
        rotated, kept = 2 * tokens * (q + kv), 2 * tokens * 2 * kv
        steps = self._elementwise(rotated, 1) + self._elementwise(kept, 0)
        if config.qk_norm:
            steps += self._elementwise(rotated, 2)
        return (
            self._gemm(tokens, config.hidden_size, q + 2 * kv)
            + steps
            + attention
            + self._gemm(tokens, q, config.hidden_size)
        )

    def _mlp(self, tokens: int, rank: int) -> Cost:
        hidden, columns = self.layout.config.hidden_size, self.layout.intermediate.size(rank)
        activated = self._elementwise(3 * tokens * columns, 1)  # gate and up in, their product out
        return self._gemm(tokens, hidden, 2 * columns) + activated + self._gemm(tokens, columns, hidden)

    def _embedding(self, tokens: int) -> Cost:
        return self._elementwise(2 * tokens * self.layout.config.hidden_size, 1)

    def _head(self, rows: int) -> Cost:
        """Logits of the rows asked for, each rank's own vocabulary, its likeliest token, and the exchange of those."""
        hidden = self.layout.config.hidden_size

        def one(rank: int) -> Cost:
            columns = self.layout.vocabulary.size(rank)
            return (
                self._elementwise(2 * rows * hidden, 1)
                + self._gemm(rows, hidden, columns)
                + self._elementwise(rows * columns, 1)
            )

        place = self.place
        if place.nodes == 1 and self.hardware.cores is not None:
            exchange = 0.0 if place.tp_size == 1 else self.hardware.launch_us + (self.hardware.link_latency_us or 0.0)
        else:
            nbytes = _CANDIDATE_BYTES * rows * place.tp_size
            exchange = collective_us("all_gather", nbytes, self.hardware, place.nodes, place.ranks_per_node)
        return self._slowest(one) + Cost(boundary_us=exchange)

    def _gemm(self, tokens: int, inputs: int, outputs: int) -> Cost:
        """The slower of arithmetic and memory; the weights at their own rate where the hardware has one."""
        if not inputs or not outputs:
            return Cost()
        hardware, itemsize = self.hardware, self._itemsize
        peak = hardware.gemm_tflops[self.dtype] * hardware.gemm_efficiency * self._share
        weights = itemsize * inputs * outputs
        rate = hardware.weight_gb_s.get(self.dtype)
        read = self._memory_us(weights) if rate is None else weights / (rate * self._share) / 1e3
        memory = read + self._memory_us(itemsize * tokens * (inputs + outputs))
        return Cost(gemm_us=max(2 * tokens * inputs * outputs / peak / 1e6, memory), launch_us=hardware.launch_us)

    def _elementwise(self, elements: int, steps: int) -> Cost:
        if not elements:
            return Cost()
        return Cost(
            elementwise_us=self._memory_us(self._itemsize * elements), launch_us=steps * self.hardware.launch_us
        )

    def _memory_us(self, nbytes: float) -> float:
        return nbytes / memory_gb_s(self.hardware, self.place) / 1e3


def seen_keys(queries: int, context: int, window: int | None) -> int:
    """Keys that all queries of a sequence see together: query i sees the `context + i + 1` up to itself, at most `window` of them."""
    first, last = context + 1, context + queries
    if window is None or last <= window:
        return queries * (first + last) // 2
    if first >= window:
        return queries * window
    growing = window - first
    return growing * (first + window - 1) // 2 + (queries - growing) * window
