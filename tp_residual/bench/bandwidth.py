"""What are the limits? Memory bandwidth by thread count, GEMM peak, and the cost of one call: what every other figure is held against.

Bytes are those that a kernel names (copy: one read, one write). A store may read its line first, which is not counted; add and triad
show it.
"""

import time
from collections.abc import Callable
from functools import partial

import torch

from tp_residual.bench.machine import last_level_cache_bytes
from tp_residual.bench.request import BandwidthRequest
from tp_residual.bench.results import Row
from tp_residual.bench.timing import Candidate, Clock, Progress

PASSES = {"read": 1, "copy": 2, "add": 3, "triad": 3}

_SCALE = 3.0
_LEAST_ARRAY_BYTES = 64 * 2**20
_GEMM_SIZES = {"cpu": 1024, "cuda": 8192}
_PROBE_SIZE, _GEMM_SECONDS = 128, 0.2


def copy_of(moved_bytes: float, device: torch.device) -> Candidate:
    """One copy that moves this many bytes, half of them read and half written: the limit of whatever moves as many."""
    source = torch.ones(max(1, round(moved_bytes / 2)), dtype=torch.uint8, device=device)
    return Candidate(partial(torch.empty_like(source).copy_, source))


def copy_bandwidth(clock: Clock, moved_bytes: int) -> float:
    """GB/s of each rank while all of them copy, from rounds of its own."""
    samples = clock.interleaved({"copy": copy_of(moved_bytes, clock.device)})["copy"]
    return moved_bytes / samples.percentile(50) / 1e3


def launch_latency(clock: Clock) -> float:
    """Microseconds of one call that has next to nothing to do; on CUDA with the wait for it."""
    return clock.interleaved({"launch": _launch(clock.device)})["launch"].percentile(50)


def gemm_peak(clock: Clock, dtype: torch.dtype, size: int | None = None) -> float:
    """TFLOP/s of each rank while all of them multiply square matrices of `size` (None: what is affordable here)."""
    size = size or _affordable_size(clock, dtype)
    samples = clock.interleaved({"gemm": _gemm(clock, dtype, size)})["gemm"]
    return 2 * size**3 / samples.percentile(50) / 1e6


def measure_bandwidth(clock: Clock, request: BandwidthRequest, progress: Progress) -> list[Row]:
    """A row for each kernel and thread count (1, 2, 4, ... up to torch's own), then GEMM and launch at all threads.

    Copy is the limit of the other memory kernels at the same thread count; all of one thread count share rounds. The percentage is of
    bytes a second.
    """
    device, most = clock.device, torch.get_num_threads()
    array_bytes = request.array_bytes or max(_LEAST_ARRAY_BYTES, 4 * last_level_cache_bytes())
    threads = [1] if device.type == "cuda" else sorted({*(2**k for k in range(most.bit_length())), most})
    rows: list[Row] = []
    try:
        for number, count in enumerate(threads):
            progress(number, len(threads) + 1, f"memory, {count} threads")
            torch.set_num_threads(count)
            rows += _memory_rows(clock, array_bytes, count)
    finally:
        torch.set_num_threads(most)
    progress(len(threads), len(threads) + 1, "GEMM and launch")
    return rows + _compute_rows(clock, request.gemm_size, threads[-1])


def _memory_rows(clock: Clock, array_bytes: int, threads: int) -> list[Row]:
    elements = array_bytes // 4
    b = (torch.arange(elements, device=clock.device) % 1013).float()
    c = (torch.arange(elements, device=clock.device) % 509).float()
    a = torch.full_like(b, -1)
    kernels: dict[str, tuple[Callable[[], object], Callable[[], bool]]] = {
        "read": (b.sum, lambda: abs(b.sum().item() / b.double().sum().item() - 1) < 1e-4),
        "copy": (lambda: a.copy_(b), lambda: torch.equal(a, b)),
        "add": (lambda: torch.add(b, c, out=a), lambda: torch.equal(a, b + c)),
        # whole numbers below 2**24: exact with and without a fused multiply-add
        "triad": (lambda: torch.add(b, c, alpha=_SCALE, out=a), lambda: torch.equal(a, b + c * _SCALE)),
    }
    for name, (run, right) in kernels.items():
        run()
        clock.require_correct(f"{name} of {array_bytes} B with {threads} threads", int(not right()))
    samples = clock.interleaved({name: Candidate(run) for name, (run, _) in kernels.items()})
    rows = []
    for name in kernels:
        moved = PASSES[name] * 4 * elements
        rows.append(
            _row(clock, name, "float32", threads, array_bytes)
            | {"moved_bytes": moved}
            | _rates("GB_s", moved / samples[name].percentile(50) / 1e3, clock.group.size)
            | clock.fields(
                samples[name], "copy of as many bytes", samples["copy"].scaled(PASSES[name] / PASSES["copy"])
            )
        )
    return rows


def _compute_rows(clock: Clock, size: int | None, threads: int) -> list[Row]:
    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    sizes = {name: size or _affordable_size(clock, dtype) for name, dtype in dtypes.items()}
    candidates = {name: _gemm(clock, dtype, sizes[name]) for name, dtype in dtypes.items()}
    candidates["launch"] = _launch(clock.device)
    samples = clock.interleaved(candidates)
    rows = []
    for name, dtype in dtypes.items():
        flops, nbytes = 2 * sizes[name] ** 3, 3 * sizes[name] ** 2 * dtype.itemsize
        row = _row(clock, "gemm", name, threads, nbytes) | {"size": sizes[name]}
        rates = _rates("TFLOP_s", flops / samples[name].percentile(50) / 1e6, clock.group.size)
        rows.append(row | {"flops": flops} | rates | clock.fields(samples[name], "itself", samples[name]))
    launch = _row(clock, "launch", "float32", threads, 4)
    rows.append(launch | clock.fields(samples["launch"], "itself", samples["launch"]) | {"timing": "host"})
    return rows


def _row(clock: Clock, kernel: str, dtype: str, threads: int, nbytes: int) -> Row:
    return {
        "kernel": kernel,
        "device": clock.device.type,
        "dtype": dtype,
        "threads": threads,
        "ranks": clock.group.size,
        "bytes": nbytes,
    }


def _rates(unit: str, each: float, ranks: int) -> Row:
    """total: of all ranks, which run at once."""
    return {unit: each, f"total_{unit}": each * ranks}


def _launch(device: torch.device) -> Candidate:
    one = torch.zeros(1, device=device)
    return Candidate(lambda: one.add_(1), host=True)


def _affordable_size(clock: Clock, dtype: torch.dtype) -> int:
    """The usual size, or half of it and so on where a call would take long: a CPU without 16-bit products takes seconds for 1024."""
    size = _GEMM_SIZES[clock.device.type]
    if clock.device.type == "cuda":
        return size
    a = torch.ones(_PROBE_SIZE, _PROBE_SIZE, dtype=dtype)
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        torch.mm(a, a)
        seconds.append(time.perf_counter() - began)
    each = max(clock.gather(min(seconds)))
    while size > _PROBE_SIZE and each * (size / _PROBE_SIZE) ** 3 > _GEMM_SECONDS:
        size //= 2
    return size


def _gemm(clock: Clock, dtype: torch.dtype, size: int) -> Candidate:
    """Checked first, on its first rows, against fp64."""
    generator = torch.Generator().manual_seed(clock.group.rank)
    a, b = (torch.randn(size, size, generator=generator).to(clock.device, dtype) for _ in range(2))
    out = torch.empty_like(a)
    run = partial(torch.mm, a, b, out=out)
    run()
    right = a[:8].double() @ b.double()
    # of the sum's own size, sqrt(size): bf16 inputs are summed in fp32 and rounded once; fp32 loses at most a bit a doubling
    tolerance = (2**-5 if dtype == torch.bfloat16 else 2**-10) * size**0.5
    clock.require_correct(f"GEMM of {size} in {dtype}", int(((out[:8].double() - right).abs() > tolerance).sum()))
    return Candidate(run)
