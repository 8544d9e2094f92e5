"""What does a rank hold, and at most while it loads and generates? Weights, packed copies, cache, stream, and anonymous memory.

Anonymous is as the kernel counts it: pages that are the process's own, unlike those of the checkpoint's mapped files.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from tp_residual.bench.batches import Batch, run_batch
from tp_residual.bench.generate import describe, make_engine, random_prompts
from tp_residual.bench.request import GenerateRequest
from tp_residual.bench.results import Row
from tp_residual.bench.shares import Meter
from tp_residual.errors import VerificationFailed
from tp_residual.inference.engine import Engine
from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.packing import linears
from tp_residual.parallel.vocabulary import VocabParallelHead

MODES = {"off": "tp", "on": "sp", "auto": "auto"}  # as --sequence-parallel is given, and as rows name it
PER_RANK_OVERHEAD = 300 * 10**6  # what Python, torch and one pass may take beside what the model is made of

_EVERY_S = 0.002


class AnonymousPeak:
    """The most anonymous memory of this process, by phase: looked at every 2 ms, and at the end of each phase.

    What comes and goes between two looks is missed; torch gives large blocks back at once, so a pass of some milliseconds is seen.
    """

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self.ends: dict[str, int] = {}
        self._phase, self._ended = "", threading.Event()
        self._lock = threading.Lock()

    @contextmanager
    def watching(self) -> Iterator["AnonymousPeak"]:
        thread = threading.Thread(target=self._watch, name="anonymous memory", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            thread.join()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._phase = name
        self._look()
        yield
        self.ends[name] = self._look()
        self._phase = ""

    def _look(self) -> int:
        with self._lock:
            phase, now = self._phase, anonymous_bytes()
            if phase:
                self.peaks[phase] = max(self.peaks.get(phase, 0), now)
            return now

    def _watch(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self._look()


def anonymous_bytes() -> int:
    """Resident pages of this process that no file stands behind, huge ones included; shared memory is not among them."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise VerificationFailed("/proc/self/status has no RssAnon: this kernel does not tell how much memory is anonymous")


def measure_memory(model: CausalLM, request: GenerateRequest, peak: AnonymousPeak) -> tuple[list[Row], list[str]]:
    """`(rows, notes)`: one row, each of its bytes the most of any rank. `peak` has seen the phase "load".

    Raises VerificationFailed on every rank when the batch is not generated as asked for.
    """
    group = model.group
    with peak.phase("run"):
        engine = make_engine(model, request)
        batch = Batch(
            random_prompts(request.batches[0], request.prompts[0], model.config.vocab_size), request.new_tokens
        )
        wrong = run_batch(engine, batch, Meter(group)).wrong
    for rank, text in enumerate(group.share("bench/memory/run", wrong)):
        if text:
            raise VerificationFailed(f"rank {rank}: {text}")
    ours = _ours(model, engine, peak)
    everybody = [
        {name: int(value) for name, value in (field.split("=") for field in text.split())}
        for text in group.share("bench/memory/bytes", " ".join(f"{name}={value}" for name, value in ours.items()))
    ]
    most = {name: max(each[name] for each in everybody) for name in ours}
    worst = max(everybody, key=lambda each: each["over_bytes"])
    packed = next((module.packed for module in linears(model) if module.packed is not None), None)
    row: Row = {
        "mode": MODES[model.sequence_parallel],
        "model": describe(model.config),
        "batch": batch.size,
        "prompt_tokens": batch.prompt_tokens,
        "new_tokens": batch.new_tokens,
        "max_batched_tokens": engine.limits.max_batched_tokens,
        "dtype": str(model.dtype).removeprefix("torch."),
        "form": "plain" if packed is None else packed.form,
        "ranks": group.size,
        **most,
        "bound_bytes": worst["bound_bytes"],  # of the rank that is nearest to its own, or furthest beyond
        "over_bytes": worst["over_bytes"],
        "rank_peak_anonymous_bytes": [each["peak_anonymous_bytes"] for each in everybody],
    }
    return [row], []


def _ours(model: CausalLM, engine: Engine, peak: AnonymousPeak) -> dict[str, int]:
    packed = [(module, module.packed) for module in linears(model) if module.packed is not None]
    held = {
        tensor.data_ptr(): tensor.numel() * tensor.element_size()
        for tensor in chain(model.parameters(), model.buffers())
        if tensor.device.type != "meta"
    }
    weights, copies = sum(held.values()), sum(each.nbytes for _, each in packed)
    most = max(peak.peaks.values())
    bound = weights + copies + engine.cache.nbytes + PER_RANK_OVERHEAD
    return {
        "weights_bytes": weights,
        "packed_bytes": copies,
        "extra_bytes": sum(
            each.nbytes for module, each in packed if isinstance(module, VocabParallelHead) and module.tied
        ),
        "cache_bytes": engine.cache.nbytes,
        "cache_used_bytes": engine.timings.kv_used_bytes,
        "stream_bytes": _stream_bytes(model, engine.timings.largest_prefill),
        "load_peak_anonymous_bytes": peak.peaks["load"],
        "loaded_anonymous_bytes": peak.ends["load"],
        "run_peak_anonymous_bytes": peak.peaks["run"],
        "peak_anonymous_bytes": most,
        "bound_bytes": bound,
        "over_bytes": most - bound,
    }


def _stream_bytes(model: CausalLM, tokens: int) -> int:
    """Of the residual between two boundaries, in the largest pass: every token's, or this rank's share of them."""
    boundary = model.boundary_for(tokens)
    share = boundary.token_split(tokens).size(model.group.rank)
    return share * model.config.hidden_size * boundary.stream_dtype.itemsize
