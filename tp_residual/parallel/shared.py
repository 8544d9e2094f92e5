"""Ranks of one host that exchange through a memory segment: a transport whose waits cost a microsecond instead of a wake-up.

The protocol, and why two buffers a rank are enough, is in `kernels/csrc/shared.cpp`. This file sets the segment up, keeps the time, and
watches the peers: a call that has to wait comes back every 50 ms, so that signals are handled, a dead peer is named at once and a
late one at the limit. After any error the transport is dead: its ranks may no longer agree about the step they are in.
"""

import contextlib
import ctypes
import functools
import json
import mmap
import os
import secrets
import select
import time
from collections.abc import Sequence
from ctypes import Structure, addressof, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tp_residual.kernels.build import library, unavailable
from tp_residual.kernels.recording import active
from tp_residual.parallel.liveness import Process
from tp_residual.parallel.record import Limits
from tp_residual.parallel.transport import require_chunks

DIRECTORY = "/dev/shm"
MAX_RANKS = 64

_HEADER = 4096  # the token; then the ranks' lines, then their slots, each on a page of its own
_LINE = 256
_TOKEN_BYTES = 32
_SLOT_PER_RANK, _SLOT_LIMIT = 128 * 1024, 1024 * 1024

# The smallest total of a rank's foreign reads for which every rank no longer computes all rows itself.
_ONE_SHOT_BYTES = 32 * 1024
_PIECE_BYTES = (
    128 * 1024
)  # what a rank writes and its peers read before the next piece: it stays in the second-level cache

_LIMIT_NS = 50_000_000
_DONE, _PENDING, PENDING_IN_GATHER, _DIFFERENT = range(4)
_FORMS = ("all_reduce", "all_reduce", "reduce_scatter", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
ONE_SHOT, TWO_SHOT, SCATTER, SCATTER_GATHER, _GATHER, _ALL_TO_ALL, _BROADCAST = range(len(_FORMS))

# as tpr::DType, and on from there
DTYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float64: 3,
    torch.int64: 4,
    torch.int32: 5,
    torch.int16: 6,
    torch.int8: 7,
    torch.uint8: 8,
}


class Rows(Structure):
    """Rows in this rank's memory; see csrc/shared.cpp."""

    _fields_ = [("data", c_void_p), ("row", c_int64), ("first", c_int64)]


class Exchange(Structure):
    """What to do, and how far it is; see csrc/shared.cpp."""

    _fields_ = [
        ("spec", c_void_p),
        ("input", Rows),
        ("residual", Rows),
        ("out", Rows * 2),
        ("update", c_void_p),
        ("scratch", c_void_p),
        ("rows", c_int64),
        ("width", c_int64),
        ("piece_bytes", c_int64),
        ("signature", c_uint64),
        ("form", c_int32),
        ("dtype", c_int32),
        ("residual_dtype", c_int32),
        ("root", c_int32),
        ("stage", c_int64),
        ("published", c_int32),
        ("patient", c_int32),
    ]


class _Channel(Structure):
    _fields_ = [
        ("lines", c_void_p),
        ("slots", c_void_p),
        ("slot_bytes", c_int64),
        ("step", c_uint64),
        ("spin_ns", c_int64),
        ("yield_ns", c_int64),
        ("sleep_ns", c_int64),
        ("limit_ns", c_int64),
        ("rank", c_int32),
        ("size", c_int32),
    ]


class _NoSegment(Exception):
    """The reason is the message."""


@dataclass(frozen=True)
class _NotOpened:
    """There was a segment, and some rank could not have it."""

    reason: str


@dataclass(frozen=True)
class _Made:
    """Rank 0's segment, and the descriptor that keeps it until all ranks have mapped it."""

    path: str
    token: str
    descriptor: int
    named: bool

    def let_go(self) -> None:
        os.close(self.descriptor)
        if self.named:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


@dataclass(frozen=True)
class _Peer:
    rank: int
    pidfd: int


class Members(Protocol):
    """What a TensorParallelGroup says about itself."""

    rank: int
    size: int
    processes: tuple[Process, ...]
    limits: Limits

    def share(self, name: str, value: str) -> list[str]: ...


class SharedTransport:
    """The five collectives, sums in rank order; see `Transport`. Made by `open`.

    Raises RuntimeError when a peer is gone, has closed its side, is in another collective or does not come within the limit. From then
    on every call raises. 16-bit summands are added in fp32 and rounded once.

    one_shot_bytes: up to `bytes * (size - 1)` of this, each rank adds all summands itself; above, its share of them. plans, turn: what the
    boundary has prepared for this transport, and the right to use it.
    """

    def __init__(
        self, segment: mmap.mmap, slot_bytes: int, rank: int, peers: Sequence["_Peer"], cores: int, limits: Limits
    ) -> None:
        self.rank, self.size, self.slot_bytes = rank, len(peers) + 1, slot_bytes
        self.one_shot_bytes, self.piece_bytes = _ONE_SHOT_BYTES, _PIECE_BYTES
        self.plans: dict[Any, Any] = {}
        self.turn = [True]  # popped by the thread that uses the plans, since popping is atomic
        self._segment, self._peers, self._limits = segment, peers, limits
        self._dead = ""
        self._only = 0  # where the one exchange that may run is, while it is unfinished; -1 once this transport is dead
        self._anchor: ctypes.c_char | None = ctypes.c_char.from_buffer(segment)  # keeps the mapping where it is
        address = addressof(self._anchor)
        crowded = self.size > cores  # the late peer may be waiting for this very core
        self._channel = _Channel(
            lines=address + _HEADER,
            slots=address + _slots_at(self.size),
            slot_bytes=slot_bytes,
            spin_ns=0 if crowded else 5_000,
            yield_ns=100_000 if crowded else 1_000_000,
            sleep_ns=50_000,
            limit_ns=_LIMIT_NS,
            rank=rank,
            size=self.size,
        )
        self._channel_at = addressof(self._channel)
        self._library = _functions()
        self._advance = self._library.tpr_exchange
        self._poll = select.poll()
        for peer in peers:
            self._poll.register(peer.pidfd, select.POLLIN)

    @classmethod
    def open(
        cls, group: Members, *, name: str = "shared", slot_bytes: int | None = None, directory: str = DIRECTORY
    ) -> "SharedTransport | str":
        """A transport among the ranks of `group`, or the reason why there is none; the same answer on every rank.

        All ranks call it, since they decide together through its side channel, where a group's second segment needs another `name`. It
        takes `2 * size * slot_bytes` in `directory`, reserved before anybody uses it. It has no name there, so that nothing is left however
        the ranks end; only where a file without one cannot be made or opened does it have a name until all ranks have mapped it. Raises
        CollectiveError when a rank does not come.
        """
        size = group.size
        if not 2 <= size <= MAX_RANKS:
            return f"a group of {size} is not one of 2 to {MAX_RANKS} ranks"
        slot_bytes = slot_bytes or min(_SLOT_PER_RANK * size, _SLOT_LIMIT)
        slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        total = _slots_at(size) + 2 * size * slot_bytes
        opened = cls._attempt(group, f"{name} segment", slot_bytes, total, directory, named=False)
        if isinstance(opened, _NotOpened):
            opened = cls._attempt(group, f"{name} named segment", slot_bytes, total, directory, named=True)
        return opened.reason if isinstance(opened, _NotOpened) else opened

    @classmethod
    def _attempt(
        cls, group: Members, name: str, slot_bytes: int, total: int, directory: str, *, named: bool
    ) -> "SharedTransport | str | _NotOpened":
        made: _Made | None = None
        path = ""
        offer: dict[str, Any] = {"reason": unavailable() or "", "cores": sorted(os.sched_getaffinity(0))}
        try:
            if group.rank == 0 and not offer["reason"]:
                try:
                    made = _create(directory, total, named)
                    offer |= {"path": made.path, "token": made.token}
                except _NoSegment as error:
                    offer["reason"] = str(error)
            offers = [json.loads(text) for text in group.share(name, json.dumps(offer))]
            path = offers[0].get("path", "")
            if reason := _first_reason([theirs["reason"] for theirs in offers]):
                return reason
            cores = len(set().union(*(theirs["cores"] for theirs in offers)))
            mapped: SharedTransport | str
            try:
                segment, peers = _map(path, offers[0]["token"], total), _watch(group)
                mapped = cls(segment, slot_bytes, group.rank, peers, cores, group.limits)
            except _NoSegment as error:
                mapped = str(error)
            reason = _first_reason(group.share(f"{name} mapped", mapped if isinstance(mapped, str) else ""))
            if reason and isinstance(mapped, SharedTransport):
                mapped.close()
            return _NotOpened(reason) if reason else mapped
        finally:
            if made is not None:
                made.let_go()
            elif path and not _is_nameless(path):
                with contextlib.suppress(OSError):  # every rank tries: the one that made it may be dead
                    os.unlink(path)

    def close(self) -> None:
        """Leave. Peers that still wait for this rank hear of it at once."""
        if self._anchor is None:
            return
        self._die("it is closed")
        for peer in self._peers:
            os.close(peer.pidfd)
        self._anchor = None
        self._segment.close()

    def gone(self) -> list[int]:
        """Ranks whose process has ended."""
        ended = {descriptor for descriptor, _ in self._poll.poll(0)}
        return [peer.rank for peer in self._peers if peer.pidfd in ended]

    # -- the collectives

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.ordered_all_reduce(x).to(x.dtype)

    def ordered_all_reduce(self, x: Tensor) -> Tensor:
        """The sum, 16-bit types widened to fp32 and not rounded back."""
        out = torch.empty(x.shape, dtype=_wide(x))
        small = x.numel() * x.element_size() * (self.size - 1) <= self.one_shot_bytes
        self._sum(ONE_SHOT if small else TWO_SHOT, x, out, 0)
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self.ordered_reduce_scatter(x).to(x.dtype)

    def ordered_reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's chunk of the sum, 16-bit types widened to fp32 and not rounded back."""
        require_chunks("reduce_scatter", x, self.size)
        out = torch.empty((x.shape[0] // self.size, *x.shape[1:]), dtype=_wide(x))
        self._sum(SCATTER, x, out, self.rank * out.numel())
        return out

    def all_gather(self, x: Tensor) -> Tensor:
        out = x.new_empty((x.shape[0] * self.size, *x.shape[1:]))
        self._move(_GATHER, x, out, x.numel() * x.element_size())
        return out

    def all_to_all(self, x: Tensor) -> Tensor:
        require_chunks("all_to_all", x, self.size)
        out = torch.empty_like(x)
        self._move(_ALL_TO_ALL, x, out, x.numel() // self.size * x.element_size())
        return out

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        out = torch.empty_like(x)
        self._move(_BROADCAST, x, out, x.numel() * x.element_size(), root)
        return out

    # -- for the boundary

    def scratch_floats(self, width: int) -> int:
        """What a row of `width` elements needs beside its sum, 64-byte aligned."""
        floats: int = self._library.tpr_scratch_floats(width)
        return floats

    def signature(self, form: int, fused: bool, dtype: int, row: int, rows: int) -> int:
        """What ranks in the same exchange have in common, in 64 bits."""
        return form << 60 | fused << 59 | dtype << 54 | (row & 0xFFFFF) << 34 | rows & 0x3FFFFFFFF

    def run(self, exchange_at: int, stop_before_gather: bool = False) -> int:
        """Carry out the Exchange at this address, or go on with it. 0, or PENDING_IN_GATHER if asked to stop there."""
        if self._only and self._only != exchange_at:
            raise RuntimeError(
                f"the shared transport of rank {self.rank} is dead: {self._dead or 'an exchange was abandoned'}"
            )
        if (recording := active()) is not None and exchange_at not in recording.noted_exchanges:
            recording.refuse("an exchange outside of a boundary")
        return self._drive(exchange_at, None, stop_before_gather)

    def go_on(self, exchange_at: int, status: int) -> None:
        """End an Exchange of a recorded program, which has come back with this status."""
        self._drive(exchange_at, status, stop_before_gather=False)

    @property
    def is_usable(self) -> bool:
        """Not closed, nor given up, nor in the middle of an exchange: what compiled functions may be called with `channel_at`."""
        return self._only == 0

    @property
    def channel_at(self) -> int:
        """The address of what the compiled functions know this transport by."""
        return self._channel_at

    # -- inside

    def _drive(self, exchange_at: int, status: int | None, stop_before_gather: bool) -> int:
        """status: of a call that has been made; None to make the first."""
        try:
            if status is None:
                status = self._advance(self._channel_at, exchange_at)
            if status:
                status = self._wait(exchange_at, status, stop_before_gather)
            if status or self._only:
                self._only = exchange_at if status else 0
            return status
        except BaseException as error:
            self._die(str(error) or type(error).__name__)
            raise

    def _sum(self, form: int, x: Tensor, out: Tensor, first: int) -> None:
        code = DTYPES.get(x.dtype)
        if code is None:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise RuntimeError(f"the shared transport does not add {x.dtype}; it adds {known}")
        exchange = Exchange(form=form, dtype=code, rows=x.numel(), piece_bytes=self.piece_bytes)
        exchange.input = Rows(x.data_ptr(), x.element_size(), 0)
        exchange.out[0] = Rows(out.data_ptr(), out.element_size(), first)
        exchange.signature = self.signature(form, False, code, x.element_size(), x.numel())
        self.run(addressof(exchange))

    def _move(self, form: int, x: Tensor, out: Tensor, nbytes: int, root: int = 0) -> None:
        exchange = Exchange(form=form, rows=nbytes, root=root)
        exchange.input.data, exchange.out[0].data = x.data_ptr(), out.data_ptr()
        exchange.signature = self.signature(form, False, 0, root, nbytes)
        self.run(addressof(exchange))

    def _wait(self, exchange_at: int, status: int, stop_before_gather: bool) -> int:
        """The first call came back without an end: go on until there is one, looking after the peers in between."""
        limit_s = self._limits.seconds
        end = time.monotonic() + limit_s
        while status in (_PENDING, PENDING_IN_GATHER):
            if stop_before_gather and status == PENDING_IN_GATHER:
                return status
            expired = time.monotonic() > end
            # before it is asked who is missing: a rank may publish its last step and leave
            gone, left = self.gone(), self._ranks(self._library.tpr_left)
            missing = self._ranks(self._library.tpr_missing)
            for rank in missing:
                if rank in gone:
                    raise RuntimeError(f"the process of rank {rank} has ended")
                if rank in left:
                    raise RuntimeError(
                        f"rank {rank} has left the shared transport, closed or after an error of its own"
                    )
            if expired and missing:
                raise RuntimeError(f"waited {limit_s:g} s for rank {', '.join(map(str, missing))}")
            status = self._advance(self._channel_at, exchange_at)
        if status == _DIFFERENT:
            doing = [_describe(self._library.tpr_signature(self._channel_at, rank)) for rank in range(self.size)]
            raise RuntimeError(
                "ranks are in different collectives: " + ", ".join(f"rank {r}: {d}" for r, d in enumerate(doing))
            )
        return status

    def _ranks(self, mask_of: Any) -> list[int]:
        mask = mask_of(self._channel_at)
        return [rank for rank in range(self.size) if mask >> rank & 1]

    def _die(self, reason: str) -> None:
        if not self._dead:
            self._dead, self._only = reason, -1
            self._library.tpr_leave(self._channel_at)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype


def _slots_at(size: int) -> int:
    lines = _HEADER + size * _LINE
    return -(-lines // mmap.PAGESIZE) * mmap.PAGESIZE


def _first_reason(reasons: Sequence[str]) -> str:
    """Empty when nobody has one."""
    rank = next((rank for rank, reason in enumerate(reasons) if reason), None)
    if rank is None:
        return ""
    return reasons[rank] if len(set(reasons)) == 1 else f"rank {rank}: {reasons[rank]}"


def _create(directory: str, total: int, named: bool) -> _Made:
    """A new file of `total` bytes that are really there, so that no write to it can end in SIGBUS. Raises _NoSegment.

    Unless `named`, and where the file system can, it has no name: peers open it through /proc, as a descriptor of this process.
    """
    made: _Made | None = None
    token = secrets.token_hex(_TOKEN_BYTES // 2)
    try:
        if not named:
            with contextlib.suppress(OSError):  # not every file system can; what else is wrong shows below
                descriptor = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
                made = _Made(f"/proc/{os.getpid()}/fd/{descriptor}", token, descriptor, named=False)
        if made is None:
            path = os.path.join(directory, f"tp_residual-{secrets.token_hex(16)}")
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            made = _Made(path, token, descriptor, named=True)
    except OSError as error:
        raise _NoSegment(f"no file can be made in {directory}: {error.strerror}") from error
    try:
        os.fchmod(made.descriptor, 0o600)  # whatever the umask
        os.posix_fallocate(made.descriptor, 0, total)
        os.pwrite(made.descriptor, token.encode(), 0)
    except OSError as error:
        made.let_go()
        room = os.statvfs(directory)
        raise _NoSegment(
            f"the segment needs {total} bytes and {directory} has {room.f_bavail * room.f_frsize} free ({error.strerror}); "
            "enlarge it (docker run --shm-size, mount -o remount,size=)"
        ) from error
    return made


def _is_nameless(path: str) -> bool:
    return path.startswith("/proc/")


def _map(path: str, token: str, total: int) -> mmap.mmap:
    """The segment of that name, if it is the one that holds the token: another host has no such file."""
    try:
        # a descriptor in /proc is a link, which is to be followed
        follow = 0 if _is_nameless(path) else os.O_NOFOLLOW
        descriptor = os.open(path, os.O_RDWR | follow | os.O_CLOEXEC)
    except OSError as error:
        raise _NoSegment(
            f"rank 0's segment {path} cannot be opened ({error.strerror}); only ranks of one host, in one container, share memory"
        ) from error
    try:
        if os.fstat(descriptor).st_size != total:
            raise _NoSegment(
                f"{path} is not rank 0's segment: it has {os.fstat(descriptor).st_size} bytes, not {total}"
            )
        segment = mmap.mmap(descriptor, total)
    except OSError as error:
        raise _NoSegment(f"{path} cannot be mapped: {error.strerror}") from error
    finally:
        os.close(descriptor)
    if segment[:_TOKEN_BYTES] != token.encode():
        segment.close()
        raise _NoSegment(f"{path} is not rank 0's segment: it does not hold the token that rank 0 sent")
    return segment


def _watch(group: Members) -> list[_Peer]:
    peers: list[_Peer] = []
    try:
        for rank, process in enumerate(group.processes):
            if process.host != group.processes[group.rank].host:
                raise _NoSegment(f"rank {rank} is in another process-id namespace, where its death would go unnoticed")
            if rank != group.rank:
                peers.append(_Peer(rank, os.pidfd_open(process.pid)))
    except (OSError, _NoSegment) as error:
        for peer in peers:
            os.close(peer.pidfd)
        if isinstance(error, OSError):
            raise _NoSegment(f"process {process.pid} of rank {rank} cannot be watched: {error.strerror}") from error
        raise
    return peers


def _describe(signature: int) -> str:
    form, fused = _FORMS[signature >> 60], signature >> 59 & 1
    row, rows = signature >> 34 & 0xFFFFF, signature & 0x3FFFFFFFF
    if signature >> 60 >= _GATHER:
        return f"{form} of {rows} bytes" + (f" from rank {row}" if signature >> 60 == _BROADCAST else "")
    return f"{form} of {rows} {'rows' if fused else 'elements'} of {row} bytes" + (
        " with add and norm" if fused else ""
    )


@functools.cache
def _functions() -> ctypes.CDLL:
    functions = library()
    for name, result, arguments in (
        ("tpr_exchange", c_int32, (c_void_p, c_void_p)),
        ("tpr_missing", c_uint64, (c_void_p,)),
        ("tpr_left", c_uint64, (c_void_p,)),
        ("tpr_leave", None, (c_void_p,)),
        ("tpr_scratch_floats", c_int64, (c_int64,)),
        ("tpr_signature", c_uint64, (c_void_p, c_int32)),
    ):
        function = getattr(functions, name)
        function.restype, function.argtypes = result, arguments
    for structure, size in ((_Channel, functions.tpr_sizeof_channel()), (Exchange, functions.tpr_sizeof_exchange())):
        assert ctypes.sizeof(structure) == size, (structure, ctypes.sizeof(structure), size)
    return functions
