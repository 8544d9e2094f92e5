"""Ranks over a shared segment, for tests: opening one, and building a wrong protocol on purpose."""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from tp_residual.kernels import build
from tp_residual.parallel import shared as shared_module
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.shared import SharedTransport
from tp_residual.parallel.transport import TorchTransport

SOURCES = Path(build.__file__).parent / "csrc"

# what is broken -> (a text of shared.cpp, what stands there instead)
FAULTS = {
    "the wait for the peers is dropped": ("if (!wait_for_all(c, e.patient)) {", "if (false) {"),
    "one buffer for all steps": ("int64_t((step + 1) & 1)", "int64_t(0)"),
    "the wait stops one step early": ("__ATOMIC_ACQUIRE) > c.step;", "__ATOMIC_ACQUIRE) >= c.step;"),
}


_names = count()


def opened(group: TensorParallelGroup, **options: Any) -> SharedTransport | str:
    """A segment of its own, whatever the group has already; every rank calls this equally often."""
    return SharedTransport.open(group, name=f"test {next(_names)}", **options)


def plain(group: TensorParallelGroup) -> TorchTransport:
    """gloo, whatever the group's transport is."""
    assert group.process_group is not None
    return TorchTransport(group.process_group, group.limits, device=group.device)


@contextmanager
def over_segment(group: TensorParallelGroup, **options: Any) -> Iterator[SharedTransport]:
    """The group's transport is a shared one inside; after an error it is left as it is, for peers to notice."""
    before, transport = group.transport, opened(group, **options)
    assert isinstance(transport, SharedTransport), transport
    group.transport = transport
    yield transport
    group.transport = before
    transport.close()


def build_with_fault(fault: str, folder: Path) -> str | None:
    """The library with this text of shared.cpp exchanged, compiled; None without a compiler."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        return None
    old, new = FAULTS[fault]
    text = (SOURCES / "shared.cpp").read_text()
    assert text.count(old) == 1, f"{fault}: shared.cpp holds {old!r} {text.count(old)} times"
    (folder / "shared.cpp").write_text(text.replace(old, new))
    target = folder / "faulty.so"
    options = ["-std=c++17", "-O0", "-ffp-contract=off", "-shared", "-fPIC", f"-I{SOURCES}"]
    subprocess.run([compiler, *options, str(folder / "shared.cpp"), "-o", str(target)], check=True)
    return str(target)


def use_library(path: str) -> None:
    """From now on, in this process."""
    shared_module.library = lambda: ctypes.CDLL(path)  # type: ignore[assignment]
    shared_module._functions.cache_clear()
