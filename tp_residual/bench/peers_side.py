"""One side of a comparison: a worker in processes of its own, spoken to in JSON lines, stopped while it idles, waited for with a limit."""

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tp_residual.bench.peers_processes import ProcessTree
from tp_residual.errors import GenerationError, VerificationFailed

_IDLE_S = 0.5  # for so long it is watched, right after it has worked
_SPINS = 0.04  # of one core: above that it is stopped while others run
_TICKS_S = 0.02  # two of the clock's ticks: less than that is nothing
_LEAVE_S = 20.0  # after `quit`
_LOG_TAIL = 4096


class SideFailed(GenerationError):
    """A side that died, did not answer in time, or answered with an error. reason: what is known of it."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason


class WrongCount(VerificationFailed):
    """A side that generated another number of tokens than it was asked for: a speed in tokens a second would mean nothing."""


@dataclass(frozen=True)
class SideSpec:
    """command: of the worker; load: its first request. tp, threads: ranks, and threads of all of them together. folder: where it runs."""

    name: str
    command: tuple[str, ...]
    load: Mapping[str, Any]
    tp: int
    threads: int
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    folder: str | None = None


@dataclass(frozen=True)
class Work:
    """What one slice did: tokens in (prefill) or out (decode), and its own seconds of them."""

    tokens: int
    seconds: float
    ids: list[list[int]]

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Side:
    """Starts the worker at once. `load` waits for it; `stop_if_spinning` is called before another side works, any request continues it."""

    def __init__(self, spec: SideSpec, log: Path, *, load_limit_s: float, limit_s: float) -> None:
        self.spec, self._log = spec, log
        self._limit_s, self._load_limit_s = limit_s, load_limit_s
        self._buffer = b""
        self._stopped = self._ended = False
        self.spins = False
        self.idle_cpu_s = self.idle_s = 0.0
        self.start_s = 0.0
        self.loaded: Mapping[str, Any] = {}
        self._began = time.perf_counter()
        with log.open("ab") as errors:
            try:
                self._worker = subprocess.Popen(
                    spec.command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=spec.environment,
                    cwd=spec.folder,
                    # Ctrl-C is ours to answer. And the kernel continues and ends a stopped group whose last outside parent has died.
                    process_group=0,
                )
            except OSError as error:
                raise SideFailed(spec.name, f"{spec.command[0]} cannot be started: {error.strerror}") from error
        assert self._worker.stdin is not None and self._worker.stdout is not None
        self._requests, self._replies = self._worker.stdin.fileno(), self._worker.stdout.fileno()
        os.set_blocking(self._requests, False)
        self._tree = ProcessTree(self._worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.quit()
        self.end()

    def load(self) -> None:
        """Until the worker has its first token. start_s: since its command was given."""
        self.loaded = self._ask({"do": "load", **self.spec.load}, self._load_limit_s)
        self.start_s = time.perf_counter() - self._began
        self._require_counts("load", self.loaded["ids"], 1, 1)
        self._tree.note_segments()

    def prefill(self, prompts: Sequence[Sequence[int]], times: int = 1) -> Work:
        """Every prompt, anew each time, to its first token. tokens: of all prompts, all times."""
        reply = self._ask({"do": "prefill", "prompts": prompts, "times": times}, self._limit_s)
        self._require_counts("prefill", reply["ids"], len(prompts), 1)
        return self._work(reply, times * sum(map(len, prompts)))

    def decode(self, batch: int, steps: int) -> Work:
        """From the ends of the last prefill's prompts, behind their first tokens."""
        reply = self._ask({"do": "decode", "steps": steps}, self._limit_s)
        self._require_counts("decode", reply["ids"], batch, steps)
        return self._work(reply, batch * steps)

    def watch_idle(self) -> None:
        """Does it keep cores busy while nobody asks it anything? Called right after it has worked: threads spin for a while then."""
        before, began = self._tree.cpu_seconds(), time.perf_counter()
        time.sleep(_IDLE_S)
        taken, passed = self._tree.cpu_seconds() - before, time.perf_counter() - began
        self.spins = self.spins or taken > max(_TICKS_S, _SPINS * passed)

    def stop_if_spinning(self) -> None:
        if self.spins and not self._stopped:
            self._tree.stop()
            self._stopped = True

    def idle(self) -> "_Idle":
        """A context in which others work: what this side takes of the cores meanwhile is added up."""
        return _Idle(self, self._tree)

    def quit(self) -> None:
        """Asks the worker to leave, and gives it a moment to."""
        if self._ended:
            return
        self._tree.note_segments()
        self._ask({"do": "quit"}, self._limit_s)
        try:
            self._worker.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            pass

    def end(self) -> None:
        """Leaves nothing of it behind, whatever state it is in."""
        if not self._ended:
            self._tree.end()
            for pipe in (self._worker.stdin, self._worker.stdout):
                assert pipe is not None
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass
            self._ended = True

    def _ask(self, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        if self._stopped:
            self._tree.resume()
            self._stopped = False
        what = request["do"]
        line = self._exchange(json.dumps(request).encode() + b"\n", what, limit_s)
        try:
            reply = json.loads(line)
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            raise self._failed(f"answered {what} with {line[:80]!r}, which is no JSON object")
        if "error" in reply:
            raise self._failed(f"{what}: {reply['error']}")
        return reply

    def _exchange(self, data: bytes, what: str, limit_s: float) -> bytes:
        """Both pipes at once: a worker that reads nothing must not block whoever writes to it."""
        ends = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._replies, selectors.EVENT_READ)
            selector.register(self._requests, selectors.EVENT_WRITE)
            while b"\n" not in self._buffer:
                ready = selector.select(max(0.0, ends - time.monotonic()))
                if not ready and time.monotonic() >= ends:
                    raise self._failed(f"no answer to {what} within {limit_s:g} s; it was ended")
                for key, _ in ready:
                    if key.fd == self._replies:
                        read = os.read(self._replies, 1 << 16)
                        if not read:
                            raise self._failed(f"{self._how_it_ended()} during {what}{self._last_words()}")
                        self._buffer += read
                    else:
                        try:
                            data = data[os.write(self._requests, data) :]
                        except BrokenPipeError:
                            data = b""  # its end is read from the other pipe
                        if not data:
                            selector.unregister(self._requests)
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _failed(self, why: str) -> SideFailed:
        self.end()
        return SideFailed(self.spec.name, why)

    def _how_it_ended(self) -> str:
        try:
            code = self._worker.wait(1.0)
        except subprocess.TimeoutExpired:
            return "closed its stdout"
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def _last_words(self) -> str:
        """The last line of its log, where the reason usually stands."""
        with self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - _LOG_TAIL))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        return f": {lines[-1][:300]}" if lines else ""

    def _require_counts(self, what: str, ids: Sequence[Sequence[int]], rows: int, each: int) -> None:
        if len(ids) != rows:
            self.end()
            raise WrongCount(f"{self.spec.name} answered {what} for {len(ids)} sequences where {rows} were asked for")
        for row, tokens in enumerate(ids):
            if len(tokens) != each:
                self.end()
                raise WrongCount(
                    f"{self.spec.name} generated {len(tokens)} tokens in {what} for sequence {row} of {rows} where {each} were asked for"
                )

    def _work(self, reply: Mapping[str, Any], tokens: int) -> Work:
        seconds = reply["seconds"]
        if not isinstance(seconds, int | float) or not 0 < seconds < 1e6:
            raise self._failed(f"says that its work took {seconds!r} seconds")
        return Work(tokens, seconds, reply["ids"])


class _Idle:
    def __init__(self, side: Side, tree: ProcessTree) -> None:
        self._side, self._tree = side, tree

    def __enter__(self) -> None:
        self._side.stop_if_spinning()
        self._cpu_s, self._began = self._tree.cpu_seconds(), time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._side.idle_cpu_s += self._tree.cpu_seconds() - self._cpu_s
        self._side.idle_s += time.perf_counter() - self._began
