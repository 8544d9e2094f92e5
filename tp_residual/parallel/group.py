"""The tensor-parallel group: an object that is passed in, never looked up by the layers.

It may be any subset of WORLD's ranks. It owns the transport, the record and the counters, and a key-value side channel for checks
before and between collectives.
"""

import json
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from itertools import count
from typing import Literal
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from tp_residual.errors import CollectiveError, UserError
from tp_residual.kernels.build import unavailable
from tp_residual.kernels.recording import Collective
from tp_residual.parallel.liveness import Process, WaitReporter, said
from tp_residual.parallel.record import CollectiveRecord, Counters, Limits, call_site
from tp_residual.parallel.shared import SharedTransport
from tp_residual.parallel.transport import CudaWatchdog, PeerTransport, TorchTransport, Transport

logger = logging.getLogger("tp_residual")

TransportChoice = Literal["auto", "torch", "shared"]

_NO_RANGE = nullcontext()
_PEER_REPORT_S = 2.0  # how long an expired wait looks for the reports of its peers

# torch.library operators take integers, not objects: this maps the integer back. Weak, so that it keeps no group alive.
_groups: WeakValueDictionary[int, "TensorParallelGroup"] = WeakValueDictionary()
_handles = count()


def group_of(handle: int) -> "TensorParallelGroup":
    """The live group behind an operator's integer argument."""
    return _groups[handle]


class TensorParallelGroup:
    """Rank, size and the one way to run a collective among `ranks` (global ranks, in group order).

    timeout_s: seconds after which any wait ends with a CollectiveError; limits: other ones by phase (`enter_phase`; `start` is
    this set-up). checked: before
    each collective, all ranks compare its record through the side channel, so that a rank that skipped one is named at once (slow:
    for finding faults).

    transport: `torch` is the process group; `shared` a memory segment of CPU ranks on one host, a UserError where there can be none;
    `auto` the segment where it can be had, with one log line. The process group stays beside it, as `library`.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        *,
        device: torch.device | str = "cpu",
        timeout_s: float = 60.0,
        limits: Mapping[str, float] | None = None,
        checked: bool = False,
        transport: TransportChoice = "auto",
    ) -> None:
        self.process_group = process_group
        self.device = torch.device(device)
        self.limits = Limits(timeout_s, limits)
        self.checked = checked
        self.record = CollectiveRecord()
        self.counters = Counters()
        self.ranges: Callable[[str], AbstractContextManager[object]] | None = None  # a profiler's, while it watches
        self.handle = next(_handles)
        self._subgroups: dict[tuple[int, ...], TensorParallelGroup] = {}
        self._watchdog: CudaWatchdog | None = None
        self._reporter: WaitReporter | None = None
        self._entered = threading.Lock()
        self.transport: Transport | None = None
        self.library: TorchTransport | None = None
        self.store: dist.Store = dist.HashStore()
        self.rank, self.size = 0, 1
        self.ranks: tuple[int, ...] = (0,)
        self.processes: tuple[Process, ...] = ()  # by rank, once they have told each other
        if process_group is not None:
            self.rank, self.size = process_group.rank(), process_group.size()
            self.ranks = tuple(dist.get_process_group_ranks(process_group))
        if process_group is not None and self.size > 1:
            self.enter_phase("start")
            self.transport = self.library = TorchTransport(process_group, self.limits, device=self.device)
            self.store = side_channel = self._open_side_channel()
            if self.device.type == "cuda":
                self._watchdog = CudaWatchdog(self.limits, self._end_after_device_hang)
            self.processes = tuple(map(Process.from_json, self.share("process", Process.own().to_json())))
            self._reporter = WaitReporter(self.rank, self.size, self.record, self.limits, side_channel.clone())  # type: ignore[attr-defined]
            if transport != "torch":
                self._share_memory(forced=transport == "shared")
            self.enter_phase("")
        _groups[self.handle] = self

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> "TensorParallelGroup":
        """A group of one, without torch.distributed."""
        return cls(None, device=device)

    @classmethod
    def from_world(
        cls,
        *,
        device: torch.device | str = "cpu",
        timeout_s: float = 60.0,
        limits: Mapping[str, float] | None = None,
        checked: bool = False,
        transport: TransportChoice = "auto",
    ) -> "TensorParallelGroup":
        """All ranks of an initialised torch.distributed."""
        return cls(
            dist.group.WORLD, device=device, timeout_s=timeout_s, limits=limits, checked=checked, transport=transport
        )

    @classmethod
    def from_ranks(
        cls,
        ranks: Sequence[int],
        *,
        device: torch.device | str = "cpu",
        timeout_s: float = 60.0,
        limits: Mapping[str, float] | None = None,
        checked: bool = False,
        transport: TransportChoice = "auto",
    ) -> "TensorParallelGroup":
        """The given global ranks; only they call this, and nothing of WORLD is used.

        All of them must have made equally many torch process groups before: torch names the new one after that number.
        """
        try:
            longest = timedelta(seconds=Limits(timeout_s, limits).longest)
            members = dist.new_group(list(ranks), timeout=longest, use_local_synchronization=True)
        except RuntimeError as error:
            raise CollectiveError(
                f"could not set up a group of global ranks {list(ranks)}: {first_line(error)}; each of them must call from_ranks(), "
                "and all of them must have made equally many process groups before"
            ) from error
        return cls(members, device=device, timeout_s=timeout_s, limits=limits, checked=checked, transport=transport)

    def subgroup(self, members: tuple[int, ...]) -> "TensorParallelGroup":
        """These ranks of this group, with a record and counters of their own. Only they use it; nothing is set up for it."""
        if members == tuple(range(self.size)):
            return self
        if members not in self._subgroups:
            assert self.library is not None, "a subgroup has no subgroups"
            part = TensorParallelGroup(None, device=self.device, checked=self.checked)
            part.limits = self.limits
            part.rank, part.size = members.index(self.rank), len(members)
            part.ranks = tuple(self.ranks[member] for member in members)
            part.processes = tuple(self.processes[member] for member in members)
            part.transport = PeerTransport(self.library, members)
            part.store = dist.PrefixStore(f"subgroup/{members}", self.store)
            part._watchdog = self._watchdog
            self._subgroups[members] = part
        return self._subgroups[members]

    def close(self) -> None:
        for subgroup in self._subgroups.values():
            subgroup.close()
        if isinstance(self.transport, SharedTransport):
            self.transport.close()
        if self._reporter is not None:
            self._reporter.close()
        if self._watchdog is not None:
            self._watchdog.close()
        _groups.pop(self.handle, None)

    @property
    def transport_name(self) -> str:
        """`shared`, or the process group's backend; `none` in a group of one."""
        if self.process_group is None or self.size == 1:
            return "none"
        if isinstance(self.transport, SharedTransport):
            return "shared"
        return "nccl" if self.device.type == "cuda" else "gloo"

    @contextmanager
    def over_library(self) -> Iterator[None]:
        """Within it, collectives go through the process group, whatever this group's transport is: for checks of one by the other."""
        own, self.transport = self.transport, self.library
        try:
            yield
        finally:
            self.transport = own

    def _share_memory(self, *, forced: bool) -> None:
        """Take a shared segment as transport, all ranks or none."""
        if self.device.type != "cpu":
            opened: SharedTransport | str = f"the ranks' device is {self.device.type}, not cpu"
        else:
            opened = SharedTransport.open(self)
        if not isinstance(opened, str):
            self.transport = opened
        elif forced:
            self._let_peers_read("no shared memory")
            raise UserError(f"transport='shared' cannot run here: {opened}; leave the choice to transport='auto'")
        elif self.rank == 0 and self.device.type == "cpu":
            why = (
                "there are no compiled kernels" if opened == unavailable() else opened
            )  # which the build has explained
            logger.info("transport: %s, since shared memory cannot be used: %s", self.transport_name, why)

    def enter_phase(self, name: str) -> None:
        """From here on this rank's waits have the limit of phase `name`, and say so when they expire."""
        self.limits.phase = name

    def run(self, kind: str, tag: str, x: Tensor, collective: Callable[[Transport, Tensor], Tensor]) -> Tensor:
        """Run `collective(transport, x)` with x contiguous, recorded and counted as `kind` under `tag`.

        Raises CollectiveError, naming rank, number, tag, shape and dtype, when it expires or a peer is gone.
        """
        transport, record = self.transport, self.record
        assert transport is not None, "a group of one runs no collective"
        if not self._entered.acquire(False):
            raise CollectiveError(
                f"rank {self.rank} of {self.size} entered {kind} tag={tag!r} while another thread is {record}; "
                "two threads would interleave differently on each rank: give each its own group"
            )
        try:
            x = x.contiguous()
            record.enter(kind, tag, x, call_site() if self.checked else "")
            if self.checked:
                self._compare_with_peers(str(record.last))
            try:
                with _NO_RANGE if self.ranges is None else self.ranges(f"{kind} {tag}"):
                    out = collective(transport, x)
            except RuntimeError as error:
                raise CollectiveError(self._explain(error)) from error
            self._watch_device(str(record.last))
            record.in_flight = False
            self.counters.add(tag, kind, x.nbytes)
            return out
        finally:
            self._entered.release()

    def wait_for_recorded(self, collective: Collective, number: int, go_on: Callable[[], object]) -> None:
        """A collective of a recorded pass that did not end at once: its `number`-th since the group was made."""
        record = self.record
        record.number = number - 1
        record.enter(collective.kind, collective.tag, collective.shape)
        try:
            go_on()
        except RuntimeError as error:
            raise CollectiveError(self._explain(error)) from error
        record.in_flight = False

    def count_recorded(self, collectives: Sequence[Collective], before: int) -> None:
        """A recorded pass has made these, after `before` others: into the record and the counters, as if each had gone through `run`."""
        if collectives:
            self.record.number = before + len(collectives) - 1
            self.record.enter(collectives[-1].kind, collectives[-1].tag, collectives[-1].shape)
            self.record.in_flight = False
        for each in collectives:
            self.counters.add(each.tag, each.kind, each.shape.nbytes)

    def range(self, name: str) -> AbstractContextManager[object]:
        """A named part of what this rank does, for a profiler that watches."""
        return _NO_RANGE if self.ranges is None else self.ranges(name)

    def start(
        self, kind: str, tag: str, x: Tensor, begin: Callable[[Transport, Tensor], Callable[[], Tensor]]
    ) -> Callable[[], Tensor]:
        """As `run`, but `begin(transport, x)` only starts the collective. Returns what waits for it: called once, in the order started."""
        ends: list[Callable[[], Tensor]] = []

        def started(transport: Transport, x: Tensor) -> Tensor:
            ends.append(begin(transport, x))
            return x

        self.run(kind, tag, x, started)
        call = str(self.record.last)

        def wait() -> Tensor:
            self.record.since, self.record.waits_for = time.monotonic(), f"the end of {call}"
            try:
                out = ends[0]()
            except RuntimeError as error:
                raise CollectiveError(self._explain(error)) from error
            finally:
                self.record.waits_for = ""
            self._watch_device(call)
            return out

        return wait

    def _watch_device(self, call: str) -> None:
        if self._watchdog is not None and not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event()
            event.record()
            self._watchdog.watch(call, event)

    # -- the side channel

    def share(self, name: str, value: str) -> list[str]:
        """Every rank's value, in rank order, through the side channel. `name` is used once in a group's life."""
        self.store.set(f"share/{name}/{self.rank}", value)
        keys = [f"share/{name}/{peer}" for peer in range(self.size)]
        self._wait_for_keys(keys, f"every rank's {name!r}")
        try:
            return [self.store.get(key).decode() for key in keys]
        except RuntimeError as error:
            raise CollectiveError(self._side_channel_gone(f"reading every rank's {name!r}", error)) from error

    def dead_peers(self) -> list[int]:
        """Ranks whose processes are known to have ended; only those of this host can be known."""
        return [rank for rank, process in enumerate(self.processes) if rank != self.rank and process.is_gone()]

    def _wait_for_keys(self, keys: list[str], what: str) -> None:
        """Returns when all keys are there. Raises CollectiveError at the limit, when the side channel goes, or when a local peer dies."""
        try:
            if self.store.check(keys):
                return
            self.record.since, self.record.waits_for = time.monotonic(), what
            pause, look = 5e-5, time.monotonic() + 0.25
            while not self.store.check(keys):  # not wait(), which logs a warning of its own and hears of no dead peer
                now = time.monotonic()
                if now - self.record.since > self.limits.seconds:
                    missing = ", ".join(
                        f"rank {key.rpartition('/')[2]} ({said(self.store, int(key.rpartition('/')[2]))})"
                        for key in keys
                        if not self.store.check([key])
                    )
                    raise CollectiveError(
                        f"rank {self.rank} of {self.size} has been {self.record} for {self.limits.seconds:g} s ({self.limits}); "
                        f"missing: {missing}"
                    )
                if now > look:
                    look = now + 0.25
                    if (dead := self.dead_peers()) and not self.store.check(keys):
                        gone = ", ".join(map(str, dead))
                        raise CollectiveError(
                            f"rank {self.rank} of {self.size} was {self.record}: the process of rank {gone} has ended"
                        )
                time.sleep(pause)
                pause = min(pause * 1.5, 5e-3)
        except RuntimeError as error:
            if isinstance(error, CollectiveError):
                raise
            raise CollectiveError(self._side_channel_gone(str(self.record), error)) from error
        finally:
            self.record.waits_for = ""

    def require_agreement(self, name: str, values: Mapping[str, object]) -> None:
        """Raises UserError on every rank when they do not all bring the same values, naming the first that differs from rank 0's."""
        ours = {key: str(value) for key, value in values.items()}
        everybody = [json.loads(text) for text in self.share(name, json.dumps(ours))]
        for rank, theirs in enumerate(everybody):
            for key, value in everybody[0].items():
                if theirs.get(key) != value:
                    self._let_peers_read(name)
                    raise UserError(
                        f"ranks differ in {name}: {key} is {value} on rank 0 and {theirs.get(key)} on rank {rank}; start all ranks alike"
                    )

    def _side_channel_gone(self, doing: str, error: Exception) -> str:
        return (
            f"rank {self.rank} of {self.size} was {doing}, and the side channel is gone: {first_line(error)}; rank 0 keeps it, "
            "and says why it left"
        )

    def _open_side_channel(self) -> dist.TCPStore:
        """A TCPStore at the group's rank 0; its address travels once through the group itself."""
        assert self.transport is not None
        limit = timedelta(seconds=self.limits.seconds)
        address = torch.zeros(256, dtype=torch.uint8)
        server = None
        if self.rank == 0:
            host = _own_address()
            server = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
            text = f"{host} {server.port}".encode()
            address[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        try:
            address = self.transport.broadcast(address.to(self.device), 0).cpu()
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {self.rank} of {self.size} could not set up the group: {first_line(error)}"
            ) from error
        if server is not None:
            return server
        host, port = bytes(address.tolist()).rstrip(b"\0").decode().split()
        return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=limit)

    def _compare_with_peers(self, call: str) -> None:
        """Checked mode: everybody's record of this collective must read the same before anybody enters it."""
        number = self.record.number
        self.store.set(f"call/{number}/{self.rank}", call)
        calls = []
        for peer in range(self.size):
            key = f"call/{number}/{peer}"
            self._wait_for_keys([key], f"rank {peer} to reach {call}")
            calls.append(self.store.get(key).decode())
        parted = next((peer for peer in range(self.size) if calls[peer] != call), None)
        if parted is not None:
            self._let_peers_read(f"call {number}")
            raise CollectiveError(
                f"ranks have parted ways: rank {self.rank} is at {call}, rank {parted} is at {calls[parted]}; "
                "one of them skipped, added or reordered a collective"
            )
        if number > 2:  # everybody has posted this number, so has read all of the one before last
            self.store.delete_key(f"call/{number - 2}/{self.rank}")

    def _let_peers_read(self, what: str) -> None:
        """Before all ranks raise the same: rank 0 takes the side channel along when it leaves, and waits for the others to have read why.

        Or for them to be late.
        """
        with suppress(RuntimeError):  # a rank that is too late for rank 0 has read what it raises
            self.store.set(f"read/{what}/{self.rank}", "")
        keys = [f"read/{what}/{peer}" for peer in range(self.size)]
        end = time.monotonic() + _PEER_REPORT_S
        while self.rank == 0 and not self.store.check(keys) and time.monotonic() < end:
            time.sleep(0.01)

    def _explain(self, error: Exception) -> str:
        return (
            f"rank {self.rank} of {self.size} (global rank {self.ranks[self.rank]}), {self.record}, gave up: {first_line(error)} "
            f"[{self.limits}; {self._peer_reports()}]"
        )

    def _peer_reports(self) -> str:
        """What the other ranks say about themselves, when they too have given up within the next seconds."""
        reports: dict[int, str] = {}
        peers = [peer for peer in range(self.size) if peer != self.rank]
        end = time.monotonic() + _PEER_REPORT_S  # for all of them together: a peer may be waiting for this rank to fail
        try:
            self.store.set(f"report/{self.rank}", str(self.record))
            while len(reports) < len(peers) and time.monotonic() < end:
                for peer in peers:
                    if peer not in reports and self.store.check([f"report/{peer}"]):
                        reports[peer] = self.store.get(f"report/{peer}").decode()
                reports |= {peer: "its process has ended" for peer in self.dead_peers() if peer not in reports}
                time.sleep(0.02)
            for peer in peers:
                reports.setdefault(peer, f"no report, so dead or computing; it last said: {said(self.store, peer)}")
        except RuntimeError:
            reports.setdefault(0, "gone, and the side channel with it")
        return "; ".join(f"rank {peer}: {reports.get(peer, 'no report')}" for peer in peers)

    def _end_after_device_hang(self, call: str) -> None:
        print(
            f"tp_residual: rank {self.rank} of {self.size}: {call} has not completed on {self.device} ({self.limits}) "
            f"[{self._peer_reports()}]",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)  # the host may be blocked in a device synchronisation that nothing else ends


def _own_address() -> str:
    """The address under which peers reach this host: the one it uses towards the launcher's, or loopback without one."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master, 9))  # a datagram socket: nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def first_line(error: Exception) -> str:
    """Without gloo's source position in front and its general advice behind."""
    lines = str(error).strip().splitlines()
    line = lines[0] if lines else type(error).__name__
    return re.sub(r"^\[\S+:\d+\] ", "", line).split(". This is typically")[0]
