"""What a person sees on stderr: a progress bar while loading, and one table afterwards."""

import sys
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from tp_residual.inference.results import GenerationTimings
from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.group import TensorParallelGroup


class LoadProgress:
    """Rank 0's bar of bytes read; called with (done, total). Silent where stderr is no terminal."""

    def __init__(self, shown: bool) -> None:
        self._bar: Progress | None = None
        if shown and sys.stderr.isatty():
            columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("loading", total=None)

    def __enter__(self) -> "LoadProgress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)


def print_table(
    model_dir: str, model: CausalLM, group: TensorParallelGroup, timings: GenerationTimings, rank_bytes: list[list[int]]
) -> None:
    """rank_bytes: (bytes read, bytes held) by rank."""
    config = model.config
    prefill, decode = model.boundary_for(timings.largest_prefill), model.boundary_for(1)
    table = Table(show_header=False, title="tp_residual", title_justify="left")
    table.add_row(
        "model",
        f"{escape(model_dir)} ({config.model_type}, {config.num_hidden_layers} layers, hidden {config.hidden_size})",
    )
    table.add_row("device", f"{group.device.type}, weights {_dtype(model.dtype)}, stream {_dtype(decode.stream_dtype)}")
    table.add_row("tp", str(group.size))
    table.add_row("mode", f"prefill {_mode(prefill.sequence_parallel)}, decode {_mode(decode.sequence_parallel)}")
    table.add_row("executor", decode.executor.name)
    heads = model.layout.heads
    for rank, (query, key_value) in enumerate(zip(heads.query.ranges, heads.key_value.ranges, strict=True)):
        read, held = rank_bytes[rank]
        table.add_row(
            f"rank {rank}",
            f"query heads {_run(query)}, KV heads {_run(key_value)}; read {_mb(read)}, holds {_mb(held)} of weights",
        )
    table.add_row("KV cache", f"{_mb(timings.kv_used_bytes)} used at most of {_mb(timings.kv_cache_bytes)} on rank 0")
    table.add_row(
        "prefill",
        f"{timings.prefill_tokens} tokens in {timings.prefill_s:.2f} s, {timings.prefill_tokens_per_s:.1f} tokens/s",
    )
    table.add_row(
        "decode",
        f"{timings.decode_tokens} tokens in {timings.decode_s:.2f} s, {timings.decode_tokens_per_s:.1f} tokens/s",
    )
    if group.size > 1 and timings.decode_s:
        share, each = timings.decode_boundary_s / timings.decode_s, 2 * config.num_hidden_layers + 1
        us = timings.decode_boundary_s / timings.decode_passes / each * 1e6
        table.add_row("boundaries", f"{share:.1%} of decode: {each} a pass, {us:.0f} us each, waits for peers included")
    table.add_row("collectives", _collectives_per_layer(model, group))
    Console(stderr=True).print(table)


def _collectives_per_layer(model: CausalLM, group: TensorParallelGroup) -> str:
    """From the counters, not from the design: what one layer's two boundaries ran, divided by the passes."""
    if group.size == 1:
        return "none"
    passes = group.counters.calls["argmax", "all_gather"]
    last = f"model.layers.{model.config.num_hidden_layers - 1}."
    by_kind: dict[str, int] = {}
    for (tag, kind), calls in group.counters.calls.items():
        if tag.startswith(last):
            by_kind[kind] = by_kind.get(kind, 0) + calls
    layer = ", ".join(f"{calls / passes:g} {kind}" for kind, calls in sorted(by_kind.items()))
    return f"{layer} a layer and pass; {sum(group.counters.calls.values())} in {passes} passes"


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _mode(sequence_parallel: bool) -> str:
    return "sequence parallel" if sequence_parallel else "tensor parallel"


def _run(heads: tuple[int, int]) -> str:
    return f"{heads[0]}-{heads[1] - 1}" if heads[1] - heads[0] > 1 else str(heads[0])


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"
