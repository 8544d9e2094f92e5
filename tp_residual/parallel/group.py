"""The tensor-parallel group: an object that is passed in, never looked up by the layers.

It may be any subset of WORLD's ranks. It owns the transport, the record and the counters, and a key-value side channel for checks
before and between collectives.
"""

import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import count
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from tp_residual.errors import CollectiveError, UserError
from tp_residual.parallel.record import CollectiveRecord, Counters
from tp_residual.parallel.transport import CudaWatchdog, PeerTransport, TorchTransport, Transport

_PEER_REPORT_S = 2.0  # how long an expired wait looks for the reports of its peers

# torch.library operators take integers, not objects: this maps the integer back. Weak, so that it keeps no group alive.
_groups: WeakValueDictionary[int, "TensorParallelGroup"] = WeakValueDictionary()
_handles = count()


def group_of(handle: int) -> "TensorParallelGroup":
    """The live group behind an operator's integer argument."""
    return _groups[handle]


class TensorParallelGroup:
    """Rank, size and the one way to run a collective among `ranks` (global ranks, in group order).

    timeout_s: seconds after which any wait ends with a CollectiveError. checked: before each collective, all ranks compare its record
    through the side channel, so that a rank that skipped one is named at once (slow: for finding faults).
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        *,
        device: torch.device | str = "cpu",
        timeout_s: float = 60.0,
        checked: bool = False,
    ) -> None:
        self.process_group = process_group
        self.device = torch.device(device)
        self.timeout_s = timeout_s
        self.checked = checked
        self.record = CollectiveRecord()
        self.counters = Counters()
        self.handle = next(_handles)
        self._subgroups: dict[tuple[int, ...], TensorParallelGroup] = {}
        self._watchdog: CudaWatchdog | None = None
        self._entered = threading.Lock()
        self.transport: Transport | None = None
        self.store: dist.Store = dist.HashStore()
        self.rank, self.size = 0, 1
        self.ranks: tuple[int, ...] = (0,)
        if process_group is not None:
            self.rank, self.size = process_group.rank(), process_group.size()
            self.ranks = tuple(dist.get_process_group_ranks(process_group))
        if process_group is not None and self.size > 1:
            self.transport = TorchTransport(process_group, timeout_s, device=self.device)
            self.store = self._open_side_channel()
            if self.device.type == "cuda":
                self._watchdog = CudaWatchdog(timeout_s, self._end_after_device_hang)
        _groups[self.handle] = self

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> "TensorParallelGroup":
        """A group of one, without torch.distributed."""
        return cls(None, device=device)

    @classmethod
    def from_world(
        cls, *, device: torch.device | str = "cpu", timeout_s: float = 60.0, checked: bool = False
    ) -> "TensorParallelGroup":
        """All ranks of an initialised torch.distributed."""
        return cls(dist.group.WORLD, device=device, timeout_s=timeout_s, checked=checked)

    @classmethod
    def from_ranks(
        cls, ranks: Sequence[int], *, device: torch.device | str = "cpu", timeout_s: float = 60.0, checked: bool = False
    ) -> "TensorParallelGroup":
        """The given global ranks; only they call this, and nothing of WORLD is used.

        All of them must have made equally many torch process groups before: torch names the new one after that number.
        """
        try:
            members = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s), use_local_synchronization=True)
        except RuntimeError as error:
            raise CollectiveError(
                f"could not set up a group of global ranks {list(ranks)}: {_first_line(error)}; each of them must call from_ranks(), "
                "and all of them must have made equally many process groups before"
            ) from error
        return cls(members, device=device, timeout_s=timeout_s, checked=checked)

    def subgroup(self, members: tuple[int, ...]) -> "TensorParallelGroup":
        """These ranks of this group, with a record and counters of their own. Only they use it; nothing is set up for it."""
        if members == tuple(range(self.size)):
            return self
        if members not in self._subgroups:
            assert isinstance(self.transport, TorchTransport), "a subgroup has no subgroups"
            part = TensorParallelGroup(None, device=self.device, timeout_s=self.timeout_s, checked=self.checked)
            part.rank, part.size = members.index(self.rank), len(members)
            part.ranks = tuple(self.ranks[member] for member in members)
            part.transport = PeerTransport(self.transport, members)
            part.store = dist.PrefixStore(f"subgroup/{members}", self.store)
            part._watchdog = self._watchdog
            self._subgroups[members] = part
        return self._subgroups[members]

    def close(self) -> None:
        for subgroup in self._subgroups.values():
            subgroup.close()
        if self._watchdog is not None:
            self._watchdog.close()
        _groups.pop(self.handle, None)

    def run(self, kind: str, tag: str, x: Tensor, collective: Callable[[Transport, Tensor], Tensor]) -> Tensor:
        """Run `collective(transport, x)` with x contiguous, recorded and counted as `kind` under `tag`.

        Raises CollectiveError, naming rank, number, tag, shape and dtype, when it expires or a peer is gone.
        """
        assert self.transport is not None, "a group of one runs no collective"
        if not self._entered.acquire(blocking=False):
            raise CollectiveError(
                f"rank {self.rank} of {self.size} entered {kind} tag={tag!r} while another thread is {self.record}; "
                "two threads would interleave differently on each rank: give each its own group"
            )
        try:
            return self._run(self.transport, kind, tag, x.contiguous(), collective)
        finally:
            self._entered.release()

    def _run(
        self, transport: Transport, kind: str, tag: str, x: Tensor, collective: Callable[[Transport, Tensor], Tensor]
    ) -> Tensor:
        call = self.record.enter(kind, tag, x)
        if self.checked:
            self._compare_with_peers(str(call))
        try:
            out = collective(transport, x)
        except RuntimeError as error:
            raise CollectiveError(self._explain(error)) from error
        if self._watchdog is not None and not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event()
            event.record()
            self._watchdog.watch(str(call), event)
        self.record.leave()
        self.counters.add(tag, kind, x.numel() * x.element_size())
        return out

    # -- the side channel

    def share(self, name: str, value: str) -> list[str]:
        """Every rank's value, in rank order, through the side channel. `name` is used once in a group's life."""
        self.store.set(f"share/{name}/{self.rank}", value)
        keys = [f"share/{name}/{peer}" for peer in range(self.size)]
        try:
            self.store.wait(keys, timedelta(seconds=self.timeout_s))
            return [self.store.get(key).decode() for key in keys]
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {self.rank} of {self.size} waited for every rank's {name} and gave up: {_first_line(error)}"
            ) from error

    def require_agreement(self, name: str, values: Mapping[str, object]) -> None:
        """Raises UserError on every rank when they do not all bring the same values, naming the first that differs from rank 0's."""
        ours = {key: str(value) for key, value in values.items()}
        everybody = [json.loads(text) for text in self.share(name, json.dumps(ours))]
        for rank, theirs in enumerate(everybody):
            for key, value in everybody[0].items():
                if theirs.get(key) != value:
                    raise UserError(
                        f"ranks differ in {name}: {key} is {value} on rank 0 and {theirs.get(key)} on rank {rank}; start all ranks alike"
                    )

    def _open_side_channel(self) -> dist.Store:
        """A TCPStore at the group's rank 0; its address travels once through the group itself."""
        assert self.transport is not None
        limit = timedelta(seconds=self.timeout_s)
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
                f"rank {self.rank} of {self.size} could not set up the group: {_first_line(error)}"
            ) from error
        if server is not None:
            return server
        host, port = bytes(address.tolist()).rstrip(b"\0").decode().split()
        return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=limit)

    def _compare_with_peers(self, call: str) -> None:
        """Checked mode: everybody's record of this collective must read the same before anybody enters it."""
        number = self.record.number
        self.store.set(f"call/{number}/{self.rank}", call)
        for peer in range(self.size):
            try:
                self.store.wait([f"call/{number}/{peer}"], timedelta(seconds=self.timeout_s))
                theirs = self.store.get(f"call/{number}/{peer}").decode()
            except RuntimeError as error:
                raise CollectiveError(
                    f"rank {self.rank} of {self.size} is at {call}; rank {peer} did not reach its collective #{number} "
                    f"in {self.timeout_s:g} s ({self._peer_reports()})"
                ) from error
            if theirs != call:
                raise CollectiveError(
                    f"ranks have parted ways: rank {self.rank} is at {call}, rank {peer} is at {theirs}; "
                    "one of them skipped or added a collective"
                )
        if number > 2:  # everybody has posted this number, so has read all of the one before last
            self.store.delete_key(f"call/{number - 2}/{self.rank}")

    def _explain(self, error: Exception) -> str:
        return (
            f"rank {self.rank} of {self.size} (global rank {self.ranks[self.rank]}), {self.record}, gave up: {_first_line(error)} "
            f"[limit {self.timeout_s:g} s; {self._peer_reports()}]"
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
                    if peer not in reports and self.store.check(
                        [f"report/{peer}"]
                    ):  # not wait(), which logs a warning of its own
                        reports[peer] = self.store.get(f"report/{peer}").decode()
                time.sleep(0.02)
        except RuntimeError:
            reports.setdefault(0, "gone, and the side channel with it")
        silent = "no report, so dead or not waiting in a collective"
        return "; ".join(f"rank {peer}: {reports.get(peer, silent)}" for peer in peers)

    def _end_after_device_hang(self, call: str) -> None:
        print(
            f"tp_residual: rank {self.rank} of {self.size}: {call} has not completed on {self.device} after {self.timeout_s:g} s "
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


def _first_line(error: Exception) -> str:
    """Without gloo's source position in front and its general advice behind."""
    lines = str(error).strip().splitlines()
    line = lines[0] if lines else type(error).__name__
    return re.sub(r"^\[\S+:\d+\] ", "", line).split(". This is typically")[0]
