"""How one axis is divided over the ranks of a group: the only place that decides it.

Parameter shapes, checkpoint slices, head maps and token shards all read the same `Split`, so that they cannot disagree. Nothing
here needs torch: the command line checks a layout before torch is loaded.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tp_residual.errors import SplitError


@dataclass(frozen=True)
class Split:
    """One contiguous range `[start, stop)` a rank, in units that are never cut (a head, a quantisation block).

    Ranges may be empty, and may overlap where ranks hold the same unit (a shared KV head).
    """

    total: int
    ranges: tuple[tuple[int, int], ...]
    unit: int = 1

    def __post_init__(self) -> None:
        for start, stop in self.ranges:
            assert 0 <= start <= stop <= self.total, (start, stop, self.total)
            assert start % self.unit == 0 and (stop % self.unit == 0 or stop == self.total), (start, stop, self.unit)

    @classmethod
    def even(cls, total: int, parts: int, unit: int = 1) -> "Split":
        """As evenly as whole units allow, the first ranks taking one more: 9 over 2 is 5 and 4."""
        units, rest = divmod(total, unit)
        if rest:
            raise SplitError(f"size {total} is not a multiple of its unit {unit}; choose a size that is")
        base, extra = divmod(units, parts)
        edges = [0]
        for part in range(parts):
            edges.append(edges[-1] + (base + (part < extra)) * unit)
        return cls(total, tuple(itertools.pairwise(edges)), unit)

    @classmethod
    def ceil_chunks(cls, total: int, parts: int) -> "Split":
        """Chunks of `ceil(total / parts)`, short ones only at the tail: 5 over 4 is 2, 2, 1, 0.

        The rule for tokens: what a gather of equal, tail-padded chunks returns is then the tokens in order, without a copy.
        """
        chunk = -(-total // parts)
        return cls(total, tuple((min(r * chunk, total), min((r + 1) * chunk, total)) for r in range(parts)))

    @classmethod
    def replicated(cls, total: int, parts: int) -> "Split":
        """Every rank holds everything."""
        return cls(total, ((0, total),) * parts)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.ranges)

    def size(self, rank: int) -> int:
        start, stop = self.ranges[rank]
        return stop - start

    def scaled(self, factor: int) -> "Split":
        """The same split of an axis in which each element here is `factor` elements there (heads -> rows)."""
        return Split(self.total * factor, tuple((a * factor, b * factor) for a, b in self.ranges), self.unit * factor)

    def segments(self) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """`(start, stop, holders)` in order: the maximal runs that the same ranks hold."""
        edges = sorted({edge for r in self.ranges if r[0] < r[1] for edge in r})
        for start, stop in itertools.pairwise(edges):
            holders = tuple(rank for rank, (a, b) in enumerate(self.ranges) if a <= start and stop <= b)
            if holders:
                yield start, stop, holders


@dataclass(frozen=True)
class HeadSplit:
    """Query heads as evenly as possible; a rank holds the KV heads that its query heads use.

    One rule for any number of KV heads: 9 query over 3 KV heads at tp=2 is query [0-4] with KV {0, 1} and query [5-8] with KV {1, 2}.
    """

    query: Split
    key_value: Split

    @classmethod
    def of(cls, num_attention_heads: int, num_key_value_heads: int, tp_size: int) -> "HeadSplit":
        """Raises SplitError when there are more ranks than query heads (a rank without a head would only wait)."""
        check_heads(num_attention_heads, tp_size)
        group = num_attention_heads // num_key_value_heads
        query = Split.even(num_attention_heads, tp_size)
        key_value = Split(num_key_value_heads, tuple((a // group, (b - 1) // group + 1) for a, b in query.ranges))
        return cls(query, key_value)

    def kv_index(self, rank: int) -> tuple[int, ...]:
        """For each local query head, the local index of the KV head that it reads."""
        group = self.query.total // self.key_value.total
        first = self.key_value.ranges[rank][0]
        return tuple(head // group - first for head in range(*self.query.ranges[rank]))


def check_heads(num_attention_heads: int, tp_size: int) -> None:
    """Raises SplitError unless every rank gets a query head."""
    if not 1 <= tp_size <= num_attention_heads:
        legal = "1" if num_attention_heads == 1 else f"1 to {num_attention_heads}"
        raise SplitError(
            f"num_attention_heads={num_attention_heads} cannot be split over tp_size={tp_size}; use {legal}"
        )
