"""python -m benchmarks.claims [--only ID,...] [--output FILE.json] [--plot FILE.png] [--page FILE.md] [--list], from the checkout."""

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.claims.claim import Claim, Outcome
from tp_residual.errors import RequestError, UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where every figure is inside its bound and every twin outside, 1 where one is not, 2 for a request that makes no sense."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.claims",
        description="What is said about residual connections, measured, each with a broken twin that must fall outside its bound.",
    )
    parser.add_argument("--only", metavar="ID,...", help="these claims alone")
    parser.add_argument("--output", metavar="FILE.json", help="figures, curves and what they were measured on")
    parser.add_argument("--plot", metavar="FILE.png", help="the curves; needs matplotlib")
    parser.add_argument("--page", metavar="FILE.md", help="put table and statements into this page (docs/claims.md)")
    parser.add_argument("--list", action="store_true", help="statements, bounds and twins, without measuring")
    options = parser.parse_args(arguments)

    import torch

    from benchmarks.claims.registry import CLAIMS
    from benchmarks.claims.report import (
        STATEMENTS,
        TABLE,
        as_json,
        print_claims,
        print_outcomes,
        replaced_part,
        write_json,
        write_page,
    )
    from tp_residual.bench.results import check_plot_target, check_target

    try:
        chosen = _chosen(options.only, CLAIMS)
        if options.output:
            check_target("--output", options.output)
        if options.plot:
            check_plot_target(options.plot)
            if not any(claim.has_curves for claim in chosen):
                raise RequestError("--plot: none of these claims has a curve; leave --plot out, or add gradient-depth")
        if options.page:
            check_target("--page", options.page)
            for part in (TABLE, STATEMENTS):
                replaced_part(Path(options.page).read_text() if Path(options.page).exists() else "", part, "")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.list:
        print_claims(chosen)
        return 0
    torch.set_num_threads(1)  # sizes are small: a second thread waits more than it works
    outcomes = measure(chosen)
    print_outcomes(outcomes)
    content = as_json(outcomes, len(os.sched_getaffinity(0)))
    if options.output:
        write_json(options.output, content)
    if options.plot:
        from benchmarks.claims.plots import write_plot

        write_plot(content, options.plot)
    if options.page:
        write_page(options.page, outcomes)
    return 0 if all(outcome.good for outcome in outcomes) else 1


def measure(claims: Sequence[Claim]) -> list[Outcome]:
    """With a line of progress on stderr."""
    from rich.console import Console
    from rich.progress import Progress

    from benchmarks.claims.claim import run

    outcomes = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(claims))
        for claim in claims:
            progress.update(task, description=claim.id)
            outcomes.append(run(claim))
            progress.console.print(f"{claim.id}: {outcomes[-1].seconds:.1f} s", highlight=False, style="dim")
            progress.advance(task)
    return outcomes


def _chosen(only: str | None, claims: dict[str, Claim]) -> list[Claim]:
    if only is None:
        return list(claims.values())
    names = [name.strip() for name in only.split(",") if name.strip()]
    for name in names:
        if name not in claims:
            near = difflib.get_close_matches(name, claims, 1, 0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise RequestError(f"--only {name!r} is no claim{hint} There are: {', '.join(claims)}")
    if not names:
        raise RequestError(f"--only names no claim; there are: {', '.join(claims)}")
    return [claim for name, claim in claims.items() if name in names]


if __name__ == "__main__":
    sys.exit(main())
