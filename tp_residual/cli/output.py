"""Standard output that may end before the results do.

A reader that has gone (`| head -1`) is no error, and no reason for one rank to stop while the others wait in a collective: what is
left is dropped. A full disk loses results: that is remembered, and reported once every rank is through.
"""

import os
import sys
from typing import Any, TextIO


class ResultStream:
    """Stands in for sys.stdout. error: the first failure that lost output, if any."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream  # None where the process was started with stdout closed
        self.error: OSError | None = None
        self._dropping = stream is None

    def write(self, text: str) -> int:
        if not self._dropping:
            self._guard(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        if not self._dropping:
            self._guard(lambda stream: stream.flush())

    def _guard(self, operation: Any) -> None:
        try:
            operation(self._stream)
        except OSError as error:
            self._dropping = True
            if not isinstance(error, BrokenPipeError):
                self.error = error
            # what is buffered would fail once more when the interpreter flushes it at exit
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), sys.__stdout__.fileno() if sys.__stdout__ is not None else 1)

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
