"""Where a dump may be written. Imports no torch: the command line asks before ranks start."""

import os
import tempfile
from os import PathLike
from pathlib import Path

from tp_residual.errors import RequestError


def check_dump_target(directory: str | PathLike[str]) -> Path:
    """The absolute path, or RequestError unless it is free and its parent is a writable folder."""
    target = Path(directory).absolute()
    if target.exists() or target.is_symlink():
        raise RequestError(f"{target} exists already; give the dump a new name, or remove it first")
    try:
        os.rmdir(
            tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent)
        )  # permissions do not tell for root, or for /proc
    except OSError as error:
        raise RequestError(
            f"{target.parent} is not a folder that can be written to ({error.strerror}); make it first, or name another"
        ) from None
    return target
