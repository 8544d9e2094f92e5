"""Where a dump may be written. Imports no torch: the command line asks before ranks start."""

import os
from os import PathLike
from pathlib import Path

from tp_residual.errors import RequestError


def check_dump_target(directory: str | PathLike[str]) -> Path:
    """The absolute path, or RequestError unless it is free and its parent is a writable folder."""
    target = Path(directory).absolute()
    if target.exists() or target.is_symlink():
        raise RequestError(f"{target} exists already; give the dump a new name, or remove it first")
    if not target.parent.is_dir() or not os.access(target.parent, os.W_OK | os.X_OK):
        raise RequestError(f"{target.parent} is not a folder that can be written to; make it first")
    return target
