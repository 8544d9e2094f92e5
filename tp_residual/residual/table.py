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
        try:
            for entry in content["table"]:
                limits = [piece["up_to_bytes"] for piece in entry["ranges"]]
                if limits[-1] is not None or sorted(limits[:-1]) != limits[:-1]:
                    raise ValueError(f"ranges up to {limits} do not rise to null")
                for name in ("device", "transport", "world", "dtype", "mode", "order"):
                    entry[name]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise RequestError(f"--boundary-table {path} has a broken entry: {error!r}; write it again") from None
        return cls(content["table"], str(path))

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
