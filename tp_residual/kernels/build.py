"""Compiles csrc/*.cpp into one shared library, once for a user, node, compiler and CPU, and loads it.

The library lies in `kernels/NODE` under `$XDG_CACHE_HOME/tp_residual` (default `~/.cache/tp_residual`), or, where that cannot be used,
in a folder of this user's own under the temporary directory. A folder or file that another user could have written is never loaded from.
Processes that start together build once: the first locks the folder, the others wait, and take its failure for their own. A library ends
with its own SHA-256, so that one that was cut short or damaged is built again instead of mapped. Needs no torch.
"""

import ctypes
import errno
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
# no contraction: a fused multiply-add is another number. No errno and no traps: both keep square roots and selections from being vectorised
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)
NATIVE = ("-mcpu=native",) if platform.machine() == "aarch64" else ("-march=native",)
COMPILERS = ("c++", "g++", "clang++")
LIMIT_S = 120.0
_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
_WAY_OUT = "set CXX to a C++17 compiler that works here, or unset it if it is set"
DIGEST_SIZE = hashlib.sha256().digest_size

log = logging.getLogger(__name__)


class BuildError(RuntimeError):
    """The kernels cannot be compiled, stored or loaded here; the message says why."""


def library() -> ctypes.CDLL:
    """The compiled kernels. Calls through it release Python's global lock; `holding_lock` gives the functions that keep it.

    Built on the first call on this node (some seconds), loaded on the first in this process. Raises `BuildError`, the same one every time.
    """
    found = _result()
    if isinstance(found, BuildError):
        raise BuildError(str(found))
    return found


@functools.cache
def _result() -> ctypes.CDLL | BuildError:
    try:
        return _find_or_build()
    except BuildError as error:
        if os.environ.get("RANK", "0") == "0":  # the launcher's; all ranks of a machine find the same
            log.info("no compiled CPU kernels, plain torch is used: %s", error)
        return error


def unavailable() -> str | None:
    """Why `library` raises, or None when it does not. Builds if nobody has."""
    try:
        library()
    except BuildError as error:
        return str(error)
    return None


def holding_lock(compiled: ctypes.CDLL) -> ctypes.PyDLL:
    """The same library for calls that keep Python's global lock: right for a microsecond's work, wrong for anything that waits."""
    return ctypes.PyDLL(compiled._name, handle=compiled._handle)


def _find_or_build() -> ctypes.CDLL:
    began = time.time()
    compiler = _compiler()
    name = f"kernels-{_key(compiler)}.so"
    refused = []
    for folder in _folders():
        try:
            private = _made_private(folder)
            with _locked(private):
                return _load(private / name) or _build_or_remember(compiler, private, name, began)
        except (
            OSError
        ) as error:  # unwritable, full, mounted without execution; BuildError is the compiler's and the same everywhere
            refused.append(f"{folder}: {error}")
    raise BuildError(
        "no folder for the compiled kernels; set XDG_CACHE_HOME to one that can be used: " + "; ".join(refused)
    )


def _compiler() -> list[str]:
    """$CXX if it is set, else the first of COMPILERS that is installed."""
    try:
        chosen = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise BuildError(
            f"CXX={os.environ['CXX']} is no command ({error}); unset it or name a C++17 compiler"
        ) from None
    if chosen:
        if shutil.which(chosen[0]) is None:
            raise BuildError(f"CXX={os.environ['CXX']} names no program; unset it or name a C++17 compiler")
        return chosen
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    raise BuildError(f"no C++ compiler: none of {', '.join(COMPILERS)} is in PATH; install one, or set CXX")


def _key(compiler: list[str]) -> str:
    """Changes with whatever may change the library: sources, compiler, flags, and the CPU that it is tuned for."""
    digest = hashlib.sha256()
    for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    for part in (*compiler, _run([*compiler, "--version"]), *FLAGS, *NATIVE, platform.machine(), _cpu_features()):
        digest.update(f"{len(part)} {part}\n".encode())
    return digest.hexdigest()[:24]


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _folders() -> Iterator[Path]:
    """Where the library may lie, the preferred place first."""
    node = platform.node() or "node"
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(base):  # "~" stays where there is no home
        yield Path(base) / "tp_residual" / "kernels" / node
    yield Path(tempfile.gettempdir()) / f"tp_residual-{os.geteuid()}" / "kernels" / node


def _made_private(folder: Path) -> Path:
    """The folder without symbolic links, made if need be.

    Raises `PermissionError` if anyone but this user and root could put a file into it, or put another folder in its place.
    """
    for path in reversed((folder, *folder.parents)):
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)
    real, me = folder.resolve(), os.geteuid()
    for path in (real, *real.parents):
        state = path.stat()
        mode = stat.S_IMODE(state.st_mode)
        if state.st_uid != me and (state.st_uid != 0 or path == real):
            raise PermissionError(f"{path} belongs to user {state.st_uid}, not to user {me}")
        # a private group may write further up (umask 002), and a sticky folder lets nobody move what is another's
        if mode & 0o022 if path == real else mode & 0o002 and not mode & stat.S_ISVTX:
            raise PermissionError(f"{path} can be written by other users (mode {mode:o})")
    return real


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time. The kernel frees the lock of a process that dies."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _load(path: Path) -> ctypes.CDLL | None:
    """The library at `path`, or None if there is none, or it is damaged: mapping a file that was cut short would end the process."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    body, digest = content[:-DIGEST_SIZE], content[-DIGEST_SIZE:]
    return ctypes.CDLL(str(path)) if hashlib.sha256(body).digest() == digest else None


def _build_or_remember(compiler: list[str], folder: Path, name: str, began: float) -> ctypes.CDLL:
    """Called with the lock held. A failure of another process since `began` is this one's: it waited for it, and would only repeat it."""
    failures: dict[str, type[BuildError | OSError]] = {"failed": BuildError, "full": OSError}
    for ending, kind in failures.items():
        left = folder / f"{name}.{ending}"
        with suppress(FileNotFoundError):
            if left.stat().st_mtime > began:
                raise kind(left.read_text() or f"another process has just failed here ({ending})")
    try:
        return _build(compiler, folder, name)
    except (BuildError, OSError) as error:
        with suppress(OSError):  # where nothing can be written, each process has to find out
            (folder / f"{name}.{'failed' if isinstance(error, BuildError) else 'full'}").write_text(str(error))
        raise


def _build(compiler: list[str], folder: Path, name: str) -> ctypes.CDLL:
    """Compiles into a folder of its own and renames, so that no reader sees a part. Called with the lock held."""
    for left in folder.glob("build-*"):  # by a process that was ended
        shutil.rmtree(left, ignore_errors=True)
    log.info("compiling the CPU kernels: some seconds, once on this machine")
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as scratch:
        output = Path(scratch) / name
        # one translation unit: what the files share is compiled once
        (Path(scratch) / "all.cpp").write_text(
            "".join(f'#include "{path}"\n' for path in sorted(SOURCES.glob("*.cpp")))
        )
        command = [*compiler, *FLAGS, f"-I{SOURCES}", str(Path(scratch) / "all.cpp"), "-o", str(output)]
        try:
            _run([*command, *NATIVE], TMPDIR=scratch)
        except BuildError:  # a compiler that does not know this CPU: its default is slower, with the same bits
            _run(command, TMPDIR=scratch)
        try:
            body = output.read_bytes()
        except FileNotFoundError:
            raise BuildError(
                f"{shlex.join(compiler)} ended without an error and wrote no library; {_WAY_OUT}"
            ) from None
        output.write_bytes(body + hashlib.sha256(body).digest())
        os.replace(output, folder / name)
    loaded = _load(folder / name)
    if loaded is None:
        raise OSError(f"{name} was written and reads back differently")
    return loaded


def _run(command: list[str], **environment: str) -> str:
    """Standard output of a compiler's run.

    Raises `BuildError` with the command and its first complaint; OSError if it found no room, which another folder may have.
    """
    try:
        done = subprocess.run(
            command,
            env=os.environ | {"LC_ALL": "C"} | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{shlex.join(command)} did not run: {error}; {_WAY_OUT}") from error
    if done.returncode:
        lines = done.stderr.splitlines() or ["no output"]
        complaint = next((line for line in lines if "error" in line), lines[0])
        if any(full in done.stderr for full in _FULL):
            raise OSError(f"{command[0]} found no room: {complaint.strip()}")
        raise BuildError(f"{shlex.join(command)} failed with code {done.returncode}: {complaint.strip()}; {_WAY_OUT}")
    return done.stdout
