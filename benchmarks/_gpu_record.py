"""What a section of gpu_check finds, written down a line at a time, so that a section that dies leaves what it had. Imports no torch."""

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PASS, FAIL, INCOMPLETE = "pass", "fail", "incomplete"


@dataclass
class Records:
    """checks: `{section, name, status, comparisons, text}`. rows: measurements, with their `section`. notes: what did not run, and why."""

    checks: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return bool(self.checks) and all(check["status"] == PASS for check in self.checks)

    def add(self, kind: str, value: Any) -> None:
        getattr(self, kind).append(value)

    @classmethod
    def read(cls, path: Path) -> "Records":
        """All whole lines of a recorder's file; a last one that was cut off is left out."""
        records = cls()
        text = path.read_text() if path.exists() else ""
        for line in text.splitlines(keepends=True):
            if line.endswith("\n"):
                records.add(*json.loads(line))
        return records

    def extend(self, other: "Records") -> None:
        self.checks += other.checks
        self.rows += other.rows
        self.notes += other.notes


class Recorder:
    """One section's part in its own process. seconds: of this section, after which no further comparison is begun."""

    def __init__(self, path: Path, section: str, seconds: float) -> None:
        self.path, self.section = path, section
        self._began, self._seconds = time.monotonic(), seconds

    @property
    def remaining_s(self) -> float:
        return self._began + self._seconds - time.monotonic()

    def check(self, name: str, outcomes: Iterable[str | None]) -> bool:
        """Each outcome is a comparison: None, or what is wrong. Ends with the first that is wrong; an exception is wrong, too."""
        compared, status, text = 0, PASS, ""
        try:
            for outcome in outcomes:
                compared += 1
                if outcome is not None:
                    status, text = FAIL, outcome
                    break
                if self.remaining_s < 0:
                    status, text = INCOMPLETE, f"the section's {self._seconds:.0f} s were over"
                    break
        except Exception as error:
            status, text = FAIL, f"{type(error).__name__}: {error}".strip()
            traceback.print_exc()
        if status == PASS and not compared:
            status, text = FAIL, "nothing was compared"
        check = {"section": self.section, "name": name, "status": status, "comparisons": compared, "text": text}
        self._write("checks", check)
        self.say(describe(check))
        return status == PASS

    def measure(self, name: str, measure: Callable[[], object]) -> None:
        """Runs what makes rows; an exception is a check that failed, and the next measurement runs all the same."""
        try:
            measure()
        except Exception as error:
            traceback.print_exc()
            failure = f"{type(error).__name__}: {error}".strip()
            self.check(name, [failure])

    def row(self, row: Mapping[str, Any]) -> None:
        self._write("rows", {"section": self.section, **row})

    def note(self, text: str) -> None:
        self._write("notes", f"{self.section}: {text}")
        self.say(f"note: {text}")

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:5.1f} s] {self.section}: {text}", file=sys.stderr, flush=True)

    def _write(self, kind: str, value: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([kind, value]) + "\n")


def describe(check: Mapping[str, Any]) -> str:
    text = f"{check['status'].upper()} {check['name']} ({check['comparisons']} comparisons)"
    return f"{text}: {check['text']}" if check["text"] else text


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines, the first row a heading; text to the left, what begins with a digit to the right."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    right = [all(row[at][:1].isdigit() for row in rows[1:]) for at in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in rows
    ]
