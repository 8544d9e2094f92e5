"""`compare`: two dumps of `verify --dump` (or of another framework) state by state; exit code 1 where they part."""

import argparse
import json
import sys

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tp_residual.errors import RequestError, VerificationFailed


def main(arguments: argparse.Namespace, argv: list[str]) -> None:
    if arguments.limit is not None and not arguments.limit > 0:
        raise RequestError(f"--limit {arguments.limit:g} must be above 0")
    from tp_residual.verify.compare import compare_dumps

    report = compare_dumps(arguments.dump_a, arguments.dump_b, limit=arguments.limit)
    if arguments.json:
        print(json.dumps(report.as_json()))
    else:
        console = Console(width=None if sys.stdout.isatty() else 140)
        for name, run in zip("AB", report.runs, strict=True):
            console.print(
                escape(f"{name}: " + ", ".join(f"{key} {value}" for key, value in run.items())), highlight=False
            )
        table = Table(box=SIMPLE)
        for name in (
            "state",
            "largest error",
            "median",
            f"limit, {report.judged}",
            "max ulp",
            "seq., token, dim",
            "ranks",
            "",
        ):
            table.add_column(name, no_wrap=True)
        for each in report.comparisons:
            table.add_row(
                escape(each.site),
                f"{each.max_error:.2e}",
                f"{each.median_error:.2e}",
                f"{each.limit:.1e}",
                f"{each.max_ulp:.3g}",
                f"{each.sequence}, {each.position}, {each.dimension}",
                f"{each.rank_a}, {each.rank_b}",
                "ok" if each.agrees else "differs",
                style=None if each.agrees else "bold red",
            )
        console.print(table)
        for name, sites in (("A", report.only_a), ("B", report.only_b)):
            if sites:
                console.print(escape(f"only in {name}: {', '.join(sites)}"), highlight=False)
        console.print(escape(report.summary), highlight=False)
    sys.stdout.flush()
    if not report.passed:
        raise VerificationFailed(report.summary)
