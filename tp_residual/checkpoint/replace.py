"""One folder takes the place of another, at a single point in time: before it the old one is there, after it the new one.

Linux exchanges two names in one call. Where a file system cannot (NFS), there are two renames, and between them the old folder is called
`.NAME.old`: `restore_interrupted` gives it its name back, and everything here that opens a checkpoint begins with that.
"""

import ctypes
import errno
import os
import shutil
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_CANNOT = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EXDEV)


def scratch_of(path: Path) -> Path:
    """Beside it, so on its file system, and by a fixed name: what an interrupted save left there is found by the next."""
    return path.with_name(f".{path.name}.writing")


def retired_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def restore_interrupted(path: Path) -> None:
    """After an interruption between two renames, the old folder has its name back."""
    if retired_of(path).is_dir() and not path.exists():
        os.rename(retired_of(path), path)


def take_place(new: Path, path: Path) -> None:
    """`new` is called `path` from here on, and what was there is gone. Both stand in one folder, which is synchronised."""
    retired = retired_of(path)
    if not path.exists():
        os.rename(new, path)
        sync_folder(path.parent)
    elif _exchanged(new, path):
        sync_folder(path.parent)
        shutil.rmtree(new, ignore_errors=True)  # by now the old one; what stays of it is removed by the next save
    else:
        if retired.exists():
            shutil.rmtree(retired)
        os.rename(path, retired)
        try:
            os.rename(new, path)
        except OSError:
            os.rename(retired, path)
            raise
        sync_folder(path.parent)
    shutil.rmtree(retired, ignore_errors=True)


def _exchanged(one: Path, other: Path) -> bool:
    """Whether the two names were exchanged, by the kernel."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(other))


def sync_folder(folder: Path) -> None:
    """The folder's entries are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
