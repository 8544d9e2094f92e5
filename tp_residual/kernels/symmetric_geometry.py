"""Sizes and launch shapes of the symmetric-memory kernels: pure functions of values that all ranks share. No torch, no Triton.

Two ranks that disagree here wait for each other for ever, so whoever needs a size asks here: the allocation, the kernels, the dispatcher.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

MAX_WORLD = 16  # peers whose rows a program holds in registers at once
MAX_HIDDEN = 16384  # a row stays in registers
MAX_BLOCKS = 64  # programs of a launch; all must be resident at once, since each waits for its twin on every peer
PHASES = 2  # meetings in a call: partial sums are there; results are there
PIECE_BYTES = 32 << 20  # of partial sums in one launch; longer inputs are run in pieces

_ALIGNMENT = 128
_FLAG_BYTES = 8
_COPY_ELEMENTS = 32768  # 64 registers a thread in fp32

# Two-shot costs one more meeting and moves 2 (N - 1) / N of the bytes instead of N - 1. Both from NVLink machines; `bench` overrides them.
SECOND_MEETING_S = 5e-6
LINK_BYTES_PER_S = 300e9


@dataclass(frozen=True)
class Workspace:
    """One rank's share of the symmetric memory, in bytes from its start: two slots of partial sums, two of results, flags.

    Calls alternate between the slots. Results hold the rows that this rank owns. Flags: int64 `[PHASES, MAX_BLOCKS, world]`.
    """

    world: int
    piece_bytes: int = PIECE_BYTES

    @property
    def result_bytes(self) -> int:
        return _aligned(-(-self.piece_bytes // self.world))

    @property
    def results(self) -> int:
        return 2 * self.piece_bytes

    @property
    def flags(self) -> int:
        return self.results + 2 * self.result_bytes

    @property
    def nbytes(self) -> int:
        return _aligned(self.flags + PHASES * MAX_BLOCKS * self.world * _FLAG_BYTES)

    def __post_init__(self) -> None:
        if self.piece_bytes <= 0 or self.piece_bytes % _ALIGNMENT:
            raise ValueError(f"piece_bytes={self.piece_bytes} is not a positive multiple of {_ALIGNMENT}")
        if not 1 <= self.world <= MAX_WORLD:
            raise ValueError(f"world={self.world} is not between 1 and {MAX_WORLD}")


@dataclass(frozen=True)
class Piece:
    """One launch: `count` rows from `first`, of the whole input (one-shot) or of each rank's chunk (two-shot)."""

    first: int
    count: int
    blocks: int


@dataclass(frozen=True)
class Geometry:
    """How a sum of rows is run.

    one-shot: each rank reads everything and computes every row. two-shot: a rank computes its chunk and reads the other chunks' results.
    chunk: rows a rank owns (the last ranks may own fewer). block: the row length as a power of two. copy_rows: rows that a program copies
    at once.
    """

    two_shot: bool
    chunk: int
    block: int
    copy_rows: int
    warps: int
    pieces: tuple[Piece, ...]


def row_geometry(
    tokens: int, hidden: int, itemsize: int, space: Workspace, *, two_shot: bool, max_blocks: int = MAX_BLOCKS
) -> Geometry:
    """tokens, hidden: of the input on each rank. itemsize: bytes of the widest element that travels (partial sum or result)."""
    chunk = -(-tokens // space.world)
    rows, rows_at_once = tokens, space.piece_bytes // (hidden * itemsize)
    if two_shot:
        rows, rows_at_once = chunk, rows_at_once // space.world
    if not rows_at_once:
        raise ValueError(
            f"a workspace with piece_bytes={space.piece_bytes} cannot hold a row of {hidden} x {itemsize} bytes for {space.world} ranks"
        )
    block = 1 << (hidden - 1).bit_length()
    copy_rows = min(4, 1 << (space.world - 1).bit_length(), max(1, _COPY_ELEMENTS // block))
    warps = max(1, min(16, block // 256))
    return Geometry(two_shot, chunk, block, copy_rows, warps, tuple(_pieces(rows, rows_at_once, max_blocks)))


def flat_geometry(length: int, tile: int, itemsize: int, space: Workspace, max_blocks: int = MAX_BLOCKS) -> list[Piece]:
    """Launches of a gather of `length` elements from each rank, a program taking a tile at a time; first and count in elements."""
    at_once = space.piece_bytes // itemsize
    return [
        Piece(first, count := min(at_once, length - first), min(max_blocks, -(-count // tile)))
        for first in range(0, length, at_once)
    ]


def crossover_bytes(
    world: int, second_meeting_s: float = SECOND_MEETING_S, link_bytes_per_s: float = LINK_BYTES_PER_S
) -> float:
    """Size of the input in bytes above which two-shot is faster; infinite for two ranks, where both move the same.

    one-shot: a + (N - 1) S / B. two-shot: a + second_meeting_s + 2 (N - 1) / N S / B, with B = link_bytes_per_s.
    """
    if world <= 2:
        return math.inf
    return second_meeting_s * link_bytes_per_s * world / ((world - 1) * (world - 2))


def _pieces(rows: int, rows_at_once: int, max_blocks: int) -> Iterator[Piece]:
    for first in range(0, rows, rows_at_once):
        count = min(rows_at_once, rows - first)
        yield Piece(first, count, min(count, max_blocks))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
