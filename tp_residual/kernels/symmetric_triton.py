# mypy: disable-error-code="no-untyped-def"
"""Collective + residual add + norm as one kernel over peers' memory, and the collectives alone.

Each rank has a `Workspace` of memory that every peer can read and write, and a table of where the peers' workspaces are in its own address
space. A program handles the same rows as its twin, the program of the same number on each peer, and meets only its twins.

A call, on each rank (state: this rank's own memory, kept between calls):

    epoch = state[block] + 1                    the number of this call: equal in all programs and on all ranks
    own workspace, slot epoch % 2 <- x
    meet(phase 0, epoch)                        "my partial sums are there"
    rows <- sum over peers 0, 1, ... of their slot epoch % 2, then add and norm
    two-shot:  own workspace, results <- own rows;  meet(phase 1, epoch);  everybody's rows <- their results
    state[...] = epoch

meet: a release at system scope of `epoch` into one's own flag at each peer, then an acquire of one's flags until all are >= epoch.
Flags belong to one (phase, program, sender) each, only grow, and are never reset, so a launch replayed in a CUDA graph needs no
preparation. They are 64 bits wide: at a million calls a second they last 290,000 years, so there is no wrap to handle.

Why nothing is overwritten while a peer reads it, without a meeting at the end: a slot is written again two calls later, by call c + 2.
That kernel starts when call c + 1 has ended on this rank, and each program of c + 1 met its twins, so every peer had started call c + 1,
so every peer's call c had ended, reads included. It holds whatever the number of programs in each of the three calls, because state
carries one count for all programs: those not launched are counted by those that are. It needs launches of one workspace to follow one
another without overlap: one stream, no programmatic dependent launch.

Seam for a multicast (multimem) twin: `_sum_of_peers` and the two copies are the only accesses to peers' data. Its sums are not in rank
order, so it would be another numeric class. Seam for a GEMM that writes its partial sums in place: the first copy.

A meeting that lasts longer than limit_ns writes a report (who waited for whom), makes this and all later calls return NaN, and ends.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from tp_residual.kernels.contract import AddNormSpec
from tp_residual.kernels.symmetric_geometry import MAX_BLOCKS, Geometry, Piece, Workspace, flat_geometry, row_geometry
from tp_residual.kernels.triton_rows import DTYPES, load_parameter, normalize, round_to

STATE_WORDS = 2 * MAX_BLOCKS + 1  # by program: calls so far, clock; then whether a meeting has expired
REPORT_WORDS = 8  # 1 when written, rank, peer, phase, program, epoch, the peer's last epoch, ranks of the call
GATHER_TILE = 4096  # 32-bit words a program copies at once

_FAILED = tl.constexpr(2 * MAX_BLOCKS)
_STATE_WORDS = tl.constexpr(STATE_WORDS)
_REPORT_WORDS = tl.constexpr(REPORT_WORDS)
_MAX_BLOCKS = tl.constexpr(MAX_BLOCKS)
_POLLS = tl.constexpr(256)  # between two looks at the clock
_INTERPRETED_POLL_NS = tl.constexpr(1_000_000)  # the interpreter has no clock; a poll takes about this long there
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _at(table_ptr, peer, offset, DTYPE: tl.constexpr):
    """Pointer into one peer's workspace; `_each_at`: pointers `[ROWS, 1]` into several."""
    # an address from a table carries no alignment, and without the hint each access would be as wide as one element
    return tl.multiple_of((tl.load(table_ptr + peer) + offset).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _each_at(table_ptr, peers, offset, DTYPE: tl.constexpr):
    return tl.multiple_of((tl.load(table_ptr + peers) + offset).to(tl.pointer_type(DTYPE)), (16, 16))


@triton.jit
def _elapsed(state_ptr, block, waited, started, first):
    """`(ns since started, started)`, equal in all threads: one reads the clock, or they would leave a loop at different turns."""
    if _INTERPRETED:
        return waited + _POLLS * _INTERPRETED_POLL_NS, started
    else:
        word_ptr = state_ptr + _MAX_BLOCKS + block
        tl.store(word_ptr, globaltimer())
        tl.debug_barrier()
        now = tl.load(word_ptr, volatile=True)
        tl.debug_barrier()
        started = tl.where(first, now, started)
        return now - started, started


@triton.jit
def _meet(
    table_ptr,
    state_ptr,
    report_ptr,
    rank,
    epoch,
    limit_ns,
    PHASE: tl.constexpr,
    FLAGS: tl.constexpr,
    WORLD: tl.constexpr,
    PEERS: tl.constexpr,
):
    """True when a peer did not come in time. What every peer's twin wrote before it met may be read afterwards."""
    block = tl.program_id(0)
    peers = tl.arange(0, PEERS)
    real = peers < WORLD
    flags = FLAGS + (PHASE * _MAX_BLOCKS + block) * WORLD * 8
    theirs = tl.load(table_ptr + peers, mask=real, other=0) + (flags + rank * 8)
    ours = tl.load(table_ptr + rank) + flags + peers * 8
    tl.debug_barrier()  # what all threads have written comes before the release by one of them
    tl.atomic_xchg(theirs.to(tl.pointer_type(tl.int64)), epoch, mask=real, sem="release", scope="sys")
    flag_ptrs = ours.to(tl.pointer_type(tl.int64))
    seen = tl.atomic_add(flag_ptrs, tl.zeros((PEERS,), tl.int64), mask=real, sem="acquire", scope="sys")
    late = tl.sum((real & (seen < epoch)).to(tl.int32), axis=0)
    waited = epoch * 0
    started = epoch * 0
    first = late > 0
    while (late > 0) & (waited < limit_ns):
        polls = 0
        while (late > 0) & (polls < _POLLS):
            seen = tl.atomic_add(flag_ptrs, tl.zeros((PEERS,), tl.int64), mask=real, sem="acquire", scope="sys")
            late = tl.sum((real & (seen < epoch)).to(tl.int32), axis=0)
            polls += 1
        waited, started = _elapsed(state_ptr, block, waited, started, first)
        first = late < 0
    if late > 0:
        if tl.atomic_cas(state_ptr + _FAILED, epoch * 0, epoch * 0 + 1) == 0:
            peer = tl.min(tl.where(real & (seen < epoch), peers, WORLD), axis=0)
            last = tl.sum(tl.where(peers == peer, seen, 0), axis=0)
            tl.store(report_ptr + 1, rank)
            tl.store(report_ptr + 2, peer)
            tl.store(report_ptr + 3, PHASE)
            tl.store(report_ptr + 4, block)
            tl.store(report_ptr + 5, epoch)
            tl.store(report_ptr + 6, last)
            tl.store(report_ptr + 7, WORLD)
            tl.debug_barrier()
            tl.atomic_xchg(report_ptr, epoch * 0 + 1, sem="release", scope="sys")
    tl.debug_barrier()  # the acquire by one thread comes before what all of them read
    return late > 0


@triton.jit
def _begin(state_ptr, limit_ns):
    """`(epoch of this call, how long it may wait)`: not at all once a meeting has expired."""
    epoch = tl.load(state_ptr + tl.program_id(0)) + 1
    return epoch, tl.where(tl.load(state_ptr + _FAILED) == 0, limit_ns.to(tl.int64), epoch * 0)


@triton.jit
def _end(state_ptr, epoch):
    # also for the programs that a larger launch would have: every count is the number of calls
    blocks = tl.arange(0, _MAX_BLOCKS)
    tl.store(state_ptr + blocks, epoch, mask=blocks % tl.num_programs(0) == tl.program_id(0))


@triton.jit
def _columns_of_row(columns, row, rows, HIDDEN: tl.constexpr):
    # both as tensors: the interpreter cannot mask with a scalar comparison
    return (columns < HIDDEN) & (row + columns * 0 < rows)


@triton.jit
def _sum_of_peers(table_ptr, slot, elements, mask, DTYPE: tl.constexpr, WORLD: tl.constexpr):
    """Rank 0's elements of the slot, plus rank 1's, and so on, in fp32."""
    total = tl.load(_at(table_ptr, 0, slot, DTYPE) + elements, mask=mask, other=0.0).to(tl.float32)
    for peer in tl.static_range(1, WORLD):
        total += tl.load(_at(table_ptr, peer, slot, DTYPE) + elements, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def _added(
    total,
    residual_ptr,
    bias_ptr,
    row,
    columns,
    mask,
    ROUND_UPDATE: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """round(sum + bias) + residual, in fp32. row: of the residual."""
    if bias_ptr is not None:
        total += load_parameter(bias_ptr, HIDDEN, BLOCK)
    total = round_to(total, ROUND_UPDATE).to(tl.float32)
    if residual_ptr is not None:
        total = tl.load(residual_ptr + row * HIDDEN + columns, mask=mask, other=0.0).to(tl.float32) + total
    return total


@triton.jit
def _store_normed(
    normed_ptrs,
    x,
    weight_ptr,
    norm_bias_ptr,
    mask,
    eps,
    weight_offset,
    LAYER: tl.constexpr,
    WEIGHT_AFTER_CAST: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """normed = norm(x) * weight + bias of a row in fp32, zero beyond HIDDEN, rounded as normed_ptrs are. contract.norm, bit for bit."""
    DTYPE: tl.constexpr = normed_ptrs.dtype.scalar.element_ty
    centred, r = normalize(x, eps, LAYER, True, HIDDEN, 1, BLOCK, LEVELS)
    normed = centred * r
    scale = load_parameter(weight_ptr, HIDDEN, BLOCK)
    if weight_offset is not None:
        scale += weight_offset
    if WEIGHT_AFTER_CAST:
        normed = round_to(normed, DTYPE).to(tl.float32) * scale
        normed = round_to(normed, DTYPE).to(tl.float32)
    else:
        normed *= scale
    if norm_bias_ptr is not None:
        normed += load_parameter(norm_bias_ptr, HIDDEN, BLOCK)
    tl.store(normed_ptrs, round_to(normed, DTYPE), mask=mask)


@triton.jit(do_not_specialize=["rank", "tokens", "first", "count", "limit_ns"])
def one_shot_kernel(
    table_ptr,
    state_ptr,
    report_ptr,
    x_ptr,
    residual_ptr,
    bias_ptr,
    weight_ptr,
    norm_bias_ptr,
    stream_ptr,
    normed_ptr,
    rank,
    tokens,
    first,
    count,
    limit_ns,
    eps,
    weight_offset,
    ROUND_UPDATE: tl.constexpr,
    LAYER: tl.constexpr,
    WEIGHT_AFTER_CAST: tl.constexpr,
    PIECE: tl.constexpr,
    FLAGS: tl.constexpr,
    WORLD: tl.constexpr,
    PEERS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """stream = (sum over ranks of x + bias + residual).to(stream dtype); normed = norm(stream), on every rank

    x, residual, stream, normed: `[tokens, HIDDEN]`, contiguous; rows `first` to `first + count`. An absent operand or output is None.
    The second axis of the grid counts ranks simulated in one launch, whose tensors are stacked; it is 1 otherwise.
    """
    here = tl.program_id(1)
    rank = rank + here
    state_ptr += here * _STATE_WORDS
    report_ptr += here * _REPORT_WORDS
    stacked = here.to(tl.int64) * tokens
    epoch, limit = _begin(state_ptr, limit_ns)
    slot = (epoch % 2) * PIECE
    columns = tl.arange(0, BLOCK)[None, :]
    mask = columns < HIDDEN
    X: tl.constexpr = x_ptr.dtype.element_ty

    i = tl.program_id(0).to(tl.int64)
    while i < count:
        x = tl.load(x_ptr + (stacked + first + i) * HIDDEN + columns, mask=mask)
        tl.store(_at(table_ptr, rank, slot, X) + i * HIDDEN + columns, x, mask=mask)
        i += tl.num_programs(0)
    late = _meet(table_ptr, state_ptr, report_ptr, rank, epoch, limit, 0, FLAGS, WORLD, PEERS)
    i = tl.program_id(0).to(tl.int64)
    while i < count:
        row = stacked + first + i
        total = _sum_of_peers(table_ptr, slot, i * HIDDEN + columns, mask, X, WORLD)
        total = tl.where(late, float("nan"), total)
        total = _added(total, residual_ptr, bias_ptr, row, columns, mask, ROUND_UPDATE, HIDDEN, BLOCK)
        rounded = round_to(total, stream_ptr.dtype.element_ty)
        tl.store(stream_ptr + row * HIDDEN + columns, rounded, mask=mask)
        if normed_ptr is not None:
            _store_normed(
                normed_ptr + row * HIDDEN + columns, rounded.to(tl.float32), weight_ptr, norm_bias_ptr, mask,
                eps, weight_offset, LAYER, WEIGHT_AFTER_CAST, HIDDEN, BLOCK, LEVELS,
            )  # fmt: skip
        i += tl.num_programs(0)
    _end(state_ptr, epoch)


@triton.jit(do_not_specialize=["rank", "tokens", "chunk", "first", "count", "limit_ns"])
def two_shot_kernel(
    table_ptr,
    state_ptr,
    report_ptr,
    x_ptr,
    residual_ptr,
    bias_ptr,
    weight_ptr,
    norm_bias_ptr,
    stream_ptr,
    normed_ptr,
    rank,
    tokens,
    chunk,
    first,
    count,
    limit_ns,
    eps,
    weight_offset,
    SHARDED: tl.constexpr,
    GATHER: tl.constexpr,
    COPY_ROWS: tl.constexpr,
    GATHER_ROWS: tl.constexpr,
    ROUND_UPDATE: tl.constexpr,
    LAYER: tl.constexpr,
    WEIGHT_AFTER_CAST: tl.constexpr,
    PIECE: tl.constexpr,
    RESULTS: tl.constexpr,
    RESULT_BYTES: tl.constexpr,
    FLAGS: tl.constexpr,
    WORLD: tl.constexpr,
    PEERS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """stream = (sum over ranks of x + bias + residual).to(stream dtype) of this rank's rows; normed = norm(stream)

    x: `[tokens, HIDDEN]`; rank r owns rows r * chunk to (r + 1) * chunk, as far as there are. SHARDED: residual and stream are this
    rank's rows, and what travels back is normed (GATHER: `[tokens, HIDDEN]`; otherwise nothing travels and normed is this rank's rows).
    Not SHARDED: all are `[tokens, HIDDEN]`, stream travels, and each rank normalises all of it: the same bits, half the traffic.
    Rows `first` to `first + count` of each chunk. The second axis of the grid is as in `one_shot_kernel`.
    """
    here = tl.program_id(1)
    rank = rank + here
    state_ptr += here * _STATE_WORDS
    report_ptr += here * _REPORT_WORDS
    stacked = here.to(tl.int64) * tokens
    stacked_chunk = here.to(tl.int64) * chunk
    epoch, limit = _begin(state_ptr, limit_ns)
    slot = (epoch % 2) * PIECE
    results = RESULTS + (epoch % 2) * RESULT_BYTES
    columns = tl.arange(0, BLOCK)[None, :]
    X: tl.constexpr = x_ptr.dtype.element_ty
    RESULT: tl.constexpr = (normed_ptr if SHARDED and normed_ptr is not None else stream_ptr).dtype.element_ty

    i = tl.program_id(0).to(tl.int64)
    while i < count:
        step = 0
        while step < WORLD:
            owner = step + tl.arange(0, COPY_ROWS)[:, None]
            row = owner * chunk + first + i
            mask = (columns < HIDDEN) & (row < tl.minimum(owner * chunk + chunk, tokens)) & (owner < WORLD)
            x = tl.load(x_ptr + (stacked + row) * HIDDEN + columns, mask=mask)
            tl.store(_at(table_ptr, rank, slot, X) + (owner * count + i) * HIDDEN + columns, x, mask=mask)
            step += COPY_ROWS
        i += tl.num_programs(0)
    late = _meet(table_ptr, state_ptr, report_ptr, rank, epoch, limit, 0, FLAGS, WORLD, PEERS)

    i = tl.program_id(0).to(tl.int64)
    while i < count:
        row = rank * chunk + first + i
        mask = _columns_of_row(columns, row, tokens, HIDDEN)
        kept = stacked + row
        if SHARDED:
            kept = stacked_chunk + first + i
        total = _sum_of_peers(table_ptr, slot, (rank * count + i) * HIDDEN + columns, mask, X, WORLD)
        total = tl.where(late, float("nan"), total)
        total = _added(total, residual_ptr, bias_ptr, kept, columns, mask, ROUND_UPDATE, HIDDEN, BLOCK)
        rounded = round_to(total, stream_ptr.dtype.element_ty)
        mine = _at(table_ptr, rank, results, RESULT) + i * HIDDEN + columns
        if SHARDED:
            tl.store(stream_ptr + kept * HIDDEN + columns, rounded, mask=mask)
            if normed_ptr is not None:
                if not GATHER:
                    mine = normed_ptr + kept * HIDDEN + columns
                _store_normed(
                    mine, rounded.to(tl.float32), weight_ptr, norm_bias_ptr, mask,
                    eps, weight_offset, LAYER, WEIGHT_AFTER_CAST, HIDDEN, BLOCK, LEVELS,
                )  # fmt: skip
        else:
            tl.store(mine, rounded, mask=mask)
        i += tl.num_programs(0)

    if GATHER:
        limit = tl.where(late, epoch * 0, limit)
        late = late | _meet(table_ptr, state_ptr, report_ptr, rank, epoch, limit, 1, FLAGS, WORLD, PEERS)
        i = tl.program_id(0).to(tl.int64)
        while i < count:
            step = 0
            while step < WORLD:
                steps = step + tl.arange(0, GATHER_ROWS)[:, None]
                owner = (rank + steps) % WORLD  # not all from rank 0 first
                row = owner * chunk + first + i
                mask = (columns < HIDDEN) & (row < tl.minimum(owner * chunk + chunk, tokens)) & (steps < WORLD)
                value = tl.load(
                    _each_at(table_ptr, owner, results, RESULT) + i * HIDDEN + columns, mask=mask, other=0.0
                )
                value = tl.where(late, float("nan"), value.to(tl.float32))
                out = (stacked + row) * HIDDEN + columns
                if SHARDED:
                    tl.store(normed_ptr + out, round_to(value, RESULT), mask=mask)
                else:
                    tl.store(stream_ptr + out, round_to(value, RESULT), mask=mask)
                    if normed_ptr is not None:
                        _store_normed(
                            normed_ptr + out, value, weight_ptr, norm_bias_ptr, mask,
                            eps, weight_offset, LAYER, WEIGHT_AFTER_CAST, HIDDEN, BLOCK, LEVELS,
                        )  # fmt: skip
                step += GATHER_ROWS
            i += tl.num_programs(0)
    _end(state_ptr, epoch)


@triton.jit(do_not_specialize=["rank", "limit_ns"])
def all_gather_kernel(
    table_ptr,
    state_ptr,
    report_ptr,
    x_ptr,
    out_ptr,
    rank,
    length,
    first,
    count,
    limit_ns,
    PIECE: tl.constexpr,
    FLAGS: tl.constexpr,
    WORLD: tl.constexpr,
    PEERS: tl.constexpr,
    TILE: tl.constexpr,
):
    """out = torch.stack([each rank's x]); words `first` to `first + count` of x

    x: `[length]` 32-bit words, out: `[WORLD, length]`. The second axis of the grid is as in `one_shot_kernel`.
    """
    here = tl.program_id(1)
    rank = rank + here
    state_ptr += here * _STATE_WORDS
    report_ptr += here * _REPORT_WORDS
    x_ptr += here.to(tl.int64) * length
    out_ptr += here.to(tl.int64) * length * WORLD
    epoch, limit = _begin(state_ptr, limit_ns)
    slot = (epoch % 2) * PIECE
    words = tl.arange(0, TILE)

    start = tl.program_id(0).to(tl.int64) * TILE
    while start < count:
        mask = start + words < count
        value = tl.load(x_ptr + first + start + words, mask=mask)
        tl.store(_at(table_ptr, rank, slot, tl.int32) + start + words, value, mask=mask)
        start += tl.num_programs(0) * TILE
    late = _meet(table_ptr, state_ptr, report_ptr, rank, epoch, limit, 0, FLAGS, WORLD, PEERS)
    start = tl.program_id(0).to(tl.int64) * TILE
    while start < count:
        mask = start + words < count
        for step in tl.static_range(WORLD):
            peer = (rank + step) % WORLD
            value = tl.load(_at(table_ptr, peer, slot, tl.int32) + start + words, mask=mask)
            value = tl.where(late, -1, value)  # NaN in every floating-point type
            tl.store(out_ptr + peer.to(tl.int64) * length + first + start + words, value, mask=mask)
        start += tl.num_programs(0) * TILE
    _end(state_ptr, epoch)


# -- launches


@dataclass(frozen=True)
class Peers:
    """The workspaces of a group as one rank sees them.

    table: int64 `[world]`, their addresses, 16-byte aligned; each is `space.nbytes` long and zero before the first call. state: int64
    `[STATE_WORDS]` zeros beside the kernels. report: int64 `[REPORT_WORDS]` zeros that kernels can write and the host can read.
    limit_ns: how long a meeting may take. memory: keeps the addresses valid. simulated: how many ranks a launch runs, from `rank` on;
    their states, reports and tensors are stacked along dimension 0.
    """

    space: Workspace
    rank: int
    table: Tensor
    state: Tensor
    report: Tensor
    limit_ns: int
    memory: object = None
    simulated: int = 1

    def arguments(self, piece: Piece) -> dict[str, Any]:
        return dict(
            table_ptr=self.table,
            state_ptr=self.state,
            report_ptr=self.report,
            rank=self.rank,
            first=piece.first,
            count=piece.count,
            limit_ns=self.limit_ns,
            PIECE=self.space.piece_bytes,
            FLAGS=self.space.flags,
            WORLD=self.space.world,
            PEERS=triton.next_power_of_2(self.space.world),
        )

    def options(self, warps: int) -> dict[str, Any]:
        options: dict[str, Any] = {
            "num_warps": warps,
            "enable_fp_fusion": False,  # a product and a sum with one rounding would not be the contract's
            "maxnreg": min(255, 65536 // (32 * warps)),  # or the assembler spills to make room for a second program
        }
        if self.simulated > 1:
            options["launch_cooperative_grid"] = True  # more programs than fit are then an error and not a hang
        return options

    def run(self, kernel: Any, piece: Piece, warps: int, arguments: dict[str, Any]) -> None:
        device = self.table.device
        with (
            torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        ):  # Triton launches on the current device
            kernel[(piece.blocks, self.simulated)](**self.arguments(piece), **arguments, **self.options(warps))

    def expired(self) -> str | None:
        """Who waited for whom, once a meeting has expired. Reads host memory: no synchronisation, and late by what is in flight."""
        for written, rank, peer, phase, block, epoch, last, world in self.report.view(-1, REPORT_WORDS).tolist():
            if written:
                return (
                    f"rank {rank} of {world} waited {self.limit_ns / 1e9:g} s for rank {peer} to bring its "
                    f"{('summands', 'results')[phase]} of call {epoch}; the last that rank {peer} brought were of call {last} "
                    f"(program {block})"
                )
        return None


def row_arguments(
    peers: Peers,
    geometry: Geometry,
    spec: AddNormSpec,
    x: Tensor,
    stream: Tensor,
    normed: Tensor | None,
    *,
    sharded: bool,
    gather: bool,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
) -> dict[str, Any]:
    """What the kernel of this geometry is told about a request, beside the peers and the piece."""
    norm, hidden = spec.norm, x.shape[-1]
    arguments = dict(
        x_ptr=x,
        residual_ptr=residual,
        bias_ptr=bias,
        weight_ptr=weight,
        norm_bias_ptr=norm_bias,
        stream_ptr=stream,
        normed_ptr=normed,
        tokens=x.shape[-2],
        eps=None if norm is None else norm.eps,
        weight_offset=None if norm is None or norm.weight_offset == 0.0 else norm.weight_offset,
        ROUND_UPDATE=DTYPES[spec.round_update or torch.float32],
        LAYER=norm is not None and norm.kind == "layer",
        WEIGHT_AFTER_CAST=norm is not None and norm.weight_after_cast and spec.output_dtype != torch.float32,
        HIDDEN=hidden,
        BLOCK=geometry.block,
        LEVELS=geometry.block.bit_length() - 1,
    )
    if geometry.two_shot:
        arguments |= dict(
            chunk=geometry.chunk,
            SHARDED=sharded,
            GATHER=gather,
            COPY_ROWS=geometry.copy_rows,
            GATHER_ROWS=1 if normed is not None and not sharded else geometry.copy_rows,
            RESULTS=peers.space.results,
            RESULT_BYTES=peers.space.result_bytes,
        )
    return arguments


def reduce_add_norm(
    peers: Peers,
    geometry: Geometry,
    spec: AddNormSpec,
    x: Tensor,
    stream: Tensor,
    normed: Tensor | None,
    *,
    sharded: bool,
    gather: bool,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
) -> None:
    """`stream, normed = contract.add_norm(spec, residual, rank-order sum of the ranks' x, update_bias=bias, ...)`, into given tensors.

    x: `[tokens, hidden]` on each rank; contiguous like all others, each fp32, bf16 or fp16. sharded: residual and stream are this rank's
    rows of chunks of ceil(tokens / world), and normed is those rows or, with gather, `[tokens, hidden]`. Otherwise all are
    `[tokens, hidden]`. spec: without scales and update norm. Sharded needs a two-shot geometry.
    """
    kernel = two_shot_kernel if geometry.two_shot else one_shot_kernel
    arguments = row_arguments(
        peers, geometry, spec, x, stream, normed, sharded=sharded, gather=gather or not sharded,
        residual=residual, bias=bias, weight=weight, norm_bias=norm_bias,
    )  # fmt: skip
    for piece in geometry.pieces:
        peers.run(kernel, piece, geometry.warps, arguments)


def all_gather(peers: Peers, x: Tensor, out: Tensor, max_blocks: int = MAX_BLOCKS) -> None:
    """`out = torch.stack([x of each rank])`. x: int32 `[length]`, out: int32 `[world, length]`, contiguous."""
    length = x.shape[-1]
    arguments = dict(x_ptr=x, out_ptr=out, length=length, TILE=GATHER_TILE)
    for piece in flat_geometry(length, GATHER_TILE, x.element_size(), peers.space, max_blocks):
        peers.run(all_gather_kernel, piece, 8, arguments)


# -- several ranks on one device


def simulated_peers(
    world: int, device: torch.device | str, *, piece_bytes: int = 1 << 20, limit_s: float = 10.0
) -> Peers:
    """`world` ranks in each launch, on one CUDA device: the same kernels, with the rank on the second axis of the grid.

    Not for Triton's interpreter, which runs programs one after another: the first would wait for ever for its twin.
    """
    space = Workspace(world, piece_bytes)
    memory = torch.zeros(world, space.nbytes, dtype=torch.uint8, device=device)
    table = memory.data_ptr() + torch.arange(world, dtype=torch.int64, device=device) * space.nbytes
    state = torch.zeros(world, STATE_WORDS, dtype=torch.int64, device=device)
    report = torch.zeros(world, REPORT_WORDS, dtype=torch.int64, pin_memory=True)
    return Peers(space, 0, table, state, report, int(limit_s * 1e9), memory, world)


def simulate(
    peers: Peers,
    spec: AddNormSpec,
    x: Tensor,
    *,
    two_shot: bool,
    sharded: bool = False,
    gather: bool = True,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    max_blocks: int,
) -> tuple[Tensor, Tensor | None]:
    """`(stream, normed)` of every simulated rank, stacked: what `reduce_add_norm` gives each of them.

    x: `[world, tokens, hidden]`, the ranks' summands. residual: `[world, rows, hidden]`, where a shard has ceil(tokens / world) rows; those
    that the last ranks do not own stay NaN in the results. max_blocks: programs of each rank; world times as many must be resident
    on the device at once, so at most its multiprocessors / world.
    """
    world, tokens, hidden = x.shape
    itemsize = max(x.element_size(), spec.stream_dtype.itemsize, spec.output_dtype.itemsize)
    geometry = row_geometry(tokens, hidden, itemsize, peers.space, two_shot=two_shot, max_blocks=max_blocks)
    kept = geometry.chunk if sharded else tokens
    stream = x.new_full((world, kept, hidden), float("nan"), dtype=spec.stream_dtype)
    normed = None
    if spec.norm is not None:
        rows = tokens if gather or not sharded else kept
        normed = x.new_full((world, rows, hidden), float("nan"), dtype=spec.output_dtype)
    reduce_add_norm(
        peers, geometry, spec, x, stream, normed, sharded=sharded, gather=gather,
        residual=residual, bias=bias, weight=weight, norm_bias=norm_bias,
    )  # fmt: skip
    return stream, normed
