"""The table of claims, at most 100 columns wide, and the JSON beside it."""

import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from benchmarks.claims.claim import SOURCES, Claim, Outcome, short
from tp_residual.bench import machine
from tp_residual.bench.results import replace_file
from tp_residual.errors import RequestError

WIDTH = 100
_STYLE = {"FAILS": "bold red", "TWIN HOLDS": "bold red", "not run": "dim"}


def print_outcomes(outcomes: Sequence[Outcome], console: Console | None = None) -> None:
    console = console or Console(width=WIDTH)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="underline")
    for name in ("claim", "figure", "bound"):
        table.add_column(name, no_wrap=True)
    for name in ("measured", "twin"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("verdict", "source"):
        table.add_column(name, no_wrap=True)
    for outcome in outcomes:
        for number, row in enumerate(outcome.rows):
            table.add_row(
                outcome.claim.id if number == 0 else "",
                escape(row.figure),
                str(row.bound),
                short(row.measured),
                short(row.twin),
                row.verdict,
                outcome.claim.judgement if number == 0 else "",
                style=_STYLE.get(row.verdict),
            )
    console.print(table)
    console.print()
    _say(console, "twin: the same figure where something is broken on purpose; it must lie outside the bound.")
    _say(console, "source: what the figures say of the text that the claim is from.")
    _section(
        console,
        "Where a source is wrong, or says too little",
        [
            f"{each.claim.id} ({each.claim.source}): {each.claim.judgement}: {each.claim.note}"
            for each in outcomes
            if each.claim.judgement != "right"
        ],
    )
    _section(
        console,
        "Reported, without a bound",
        [f"{each.claim.id}: {name}: {text}" for each in outcomes for name, text in each.reported.items()],
    )
    _section(console, "Not run", [f"{each.claim.id}: {each.reason}" for each in outcomes if each.reason])
    rows = [row for each in outcomes for row in each.rows]
    held = sum(row.verdict == "holds" for row in rows)
    _say(console, f"\n{held} of {len(rows)} figures of {len(outcomes)} claims hold, and their twins do not.")


def print_claims(claims: Sequence[Claim], console: Console | None = None) -> None:
    """What there is, without measuring."""
    console = console or Console(width=WIDTH)
    for claim in claims:
        console.print(f"[bold]{claim.id}[/bold]  {escape(claim.source)}", highlight=False)
        lines = [claim.statement, *(f"{figure}: {bound}" for figure, bound in claim.bounds.items())]
        for text in (*lines, f"broken twin: {claim.twin}", claim.note):
            console.print(Padding(escape(text), (0, 0, 0, 4)), highlight=False)
    for name, title in SOURCES.items():
        _say(console, f"{name}: {title}")


def as_json(outcomes: Sequence[Outcome], usable_cores: int) -> dict[str, Any]:
    return {
        "what": "claims",
        "hardware": machine.hardware(usable_cores),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "command": "python -m benchmarks.claims " + " ".join(sys.argv[1:]),
        "sources": SOURCES,
        "claims": [outcome.as_json() for outcome in outcomes],
    }


def write_json(path: str, content: dict[str, Any]) -> None:
    """A claim a line."""
    head = json.dumps({**content, "claims": []}, indent=1, allow_nan=False, ensure_ascii=False)
    lines = ",\n  ".join(json.dumps(claim, allow_nan=False, ensure_ascii=False) for claim in content["claims"])
    assert head.endswith("[]\n}")
    replace_file(path, f"{head[:-4]}[\n  {lines}\n ]\n}}\n")


TABLE, STATEMENTS = "table as measured", "statements"


def write_page(path: str, outcomes: Sequence[Outcome]) -> None:
    """Replace the two generated parts of a Markdown page, each between `<!-- NAME -->` and `<!-- end of NAME -->`."""
    text = Path(path).read_text()
    parts = {TABLE: markdown_table(outcomes), STATEMENTS: markdown_statements([each.claim for each in outcomes])}
    for name, content in parts.items():
        text = replaced_part(text, name, content)
    replace_file(path, text)


def replaced_part(text: str, name: str, content: str) -> str:
    """Raises RequestError for a page without that part."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise RequestError(f"the page has no part between {begin.strip()} and {end}; give docs/claims.md")
    return f"{before}{begin}{content}{end}{after}"


def markdown_table(outcomes: Sequence[Outcome]) -> str:
    lines = [
        "| claim | figure | bound | measured | broken twin | verdict | source |",
        "|---|---|---|---:|---:|---|---|",
    ]
    for outcome in outcomes:
        for number, row in enumerate(outcome.rows):
            first = (f"`{outcome.claim.id}`", outcome.claim.judgement) if number == 0 else ("", "")
            cells = [first[0], row.figure, str(row.bound), short(row.measured), short(row.twin), row.verdict, first[1]]
            lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def markdown_statements(claims: Sequence[Claim]) -> str:
    lines = []
    for claim in claims:
        text = f"**{claim.id}** ({claim.source}). {claim.statement} *{claim.judgement.capitalize()}*: {claim.note} Twin: {claim.twin}."
        lines += [textwrap.fill(text, 140, break_long_words=False, break_on_hyphens=False), ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _section(console: Console, title: str, lines: Sequence[str]) -> None:
    if lines:
        _say(console, f"\n{title}")
        for line in lines:
            console.print(Padding(escape(line), (0, 0, 0, 2)), highlight=False)


def _say(console: Console, text: str) -> None:
    console.print(escape(text), highlight=False)
