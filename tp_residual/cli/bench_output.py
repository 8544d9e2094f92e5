"""What every `bench` question does at its ends: targets that can be written, a bar while it runs, files and tables."""

from __future__ import annotations

import argparse
import os
import sys

from rich.console import Console

from tp_residual.bench.results import Result, Row, check_plot_target, check_target
from tp_residual.errors import RequestError


def check_targets(arguments: argparse.Namespace) -> None:
    """Raises RequestError for files that could not be written at the end, and for two that are one."""
    targets = {"--output": arguments.output, "--csv": arguments.csv, "--tune": getattr(arguments, "tune", None)}
    for option, path in targets.items():
        if path is not None:
            check_target(option, path)
    if arguments.plot is not None:
        check_plot_target(arguments.plot)
    given = [path for path in (*targets.values(), arguments.plot) if path is not None]
    if len({os.path.realpath(path) for path in given}) < len(given):
        raise RequestError("two of --output, --csv, --plot and --tune name the same file; give each its own")


def finish(arguments: argparse.Namespace, result: Result, extra: Row | None = None) -> None:
    """Write what was asked for, then print. extra: what the picture needs beside the rows."""
    from tp_residual.bench.tables import print_result

    if arguments.output is not None:
        result.write_json(arguments.output)
    if arguments.csv is not None:
        result.write_csv(arguments.csv)
    if getattr(arguments, "tune", None) is not None:
        from tp_residual.bench.choice import write_dispatch_table

        write_dispatch_table(arguments.tune, result)
    if arguments.plot is not None:
        from tp_residual.bench.plots import write_plot

        write_plot(result, arguments.plot, extra)
    print_result(result)
    sys.stdout.flush()


class BenchProgress:
    """Rank 0's bar of shapes done, where stderr is a terminal."""

    def __init__(self, question: str, shown: bool) -> None:
        from rich.progress import Progress

        self._bar = Progress(console=Console(stderr=True), transient=True) if shown and sys.stderr.isatty() else None
        self._question = question

    def __enter__(self) -> BenchProgress:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self._question, total=None)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int, what: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, description=what)
