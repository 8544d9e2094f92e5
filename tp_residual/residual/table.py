"""Which executor answers how many bytes, as measured on this machine by `bench boundary --tune FILE`; docs/benchmarks.md has the format.

Imports no torch: a table that cannot be used is refused before any rank starts.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from tp_residual.errors import RequestError

TABLE_FORMAT = "tp_residual boundary table 1"
EXECUTOR_NAMES = ("reference", "library", "shared", "symmetric")
_SITUATION = ("device", "transport", "world", "dtype", "mode", "order")


class BoundaryTable:
    """A measured table: which executors, by situation and size."""

    def __init__(self, entries: Sequence[Mapping[str, Any]], source: str) -> None:
        self._entries, self._source = entries, source

    @classmethod
    def from_file(cls, path: str | PathLike[str]) -> "BoundaryTable":
        """RequestError for a file that is no such table."""
        try:
            content = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise RequestError(f"--boundary-table {path} cannot be read as JSON: {error}") from None
        if not isinstance(content, dict) or content.get("format") != TABLE_FORMAT:
            raise RequestError(
                f"--boundary-table {path} is not in the format {TABLE_FORMAT!r}; write one with `bench boundary --tune`"
            )
        entries = content.get("table")
        if not isinstance(entries, list):
            raise RequestError(f"--boundary-table {path} has no list `table`; write it again")
        for number, entry in enumerate(entries, 1):
            if fault := _fault_of(entry):
                raise RequestError(f"--boundary-table {path}, entry {number}: {fault}; write it again")
        return cls(entries, str(path))

    def ranges(self, **situation: object) -> list[tuple[float, str]] | None:
        """`(bytes, executor's name)` for device, transport, world, dtype, mode (tp, sp) and order (contract, any); None if not measured."""
        for entry in self._entries:
            if all(entry[name] == value for name, value in situation.items()):
                return [
                    (math.inf if piece["up_to_bytes"] is None else float(piece["up_to_bytes"]), piece["executor"])
                    for piece in entry["ranges"]
                ]
        return None

    def digest(self) -> str:
        """Equal for tables that say the same."""
        return hashlib.sha256(json.dumps(self._entries, sort_keys=True).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return self._source


def _fault_of(entry: Any) -> str | None:
    """What is wrong with one entry of a table."""
    if not isinstance(entry, dict):
        return f"{entry!r} is not an object"
    if missing := [name for name in (*_SITUATION, "ranges") if name not in entry]:
        return f"{', '.join(missing)} is missing"
    pieces = entry["ranges"]
    if not isinstance(pieces, list) or not pieces or not all(isinstance(piece, dict) for piece in pieces):
        return f"ranges={pieces!r} is not a list of ranges"
    for piece in pieces:
        if piece.get("executor") not in EXECUTOR_NAMES:
            return f"executor={piece.get('executor')!r} is not one of {', '.join(EXECUTOR_NAMES)}"
    *limits, last = [piece.get("up_to_bytes", 0) for piece in pieces]
    numbers = all(type(limit) in (int, float) and limit > 0 and math.isfinite(limit) for limit in limits)
    if last is not None or not numbers or sorted(set(limits)) != limits:
        return f"up_to_bytes={[*limits, last]} are not positive numbers that rise, then null"
    return None
