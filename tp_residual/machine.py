"""What the kernel and the cgroups of this process leave it of the machine: the time of cores, and memory. Imports no torch.

Both readers take the least over this process's group and those above it, of version 1 and version 2: a container's limit stands at the root
of what it sees, a batch system's some levels below.
"""

import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")


def cpu_quota(root: Path = _CGROUPS, own: Path = _OWN) -> float | None:
    """Cores whose time this process is granted; None for no limit."""
    quotas = []
    for folder in _groups_above(root, own, ""):
        words = _read(folder / "cpu.max").split()
        if len(words) == 2 and words[0].isdecimal():
            quotas.append(int(words[0]) / int(words[1]))
    for folder in _groups_above(root / "cpu", own, "cpu"):
        limit, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if limit and period:
            quotas.append(limit / period)
    return min(quotas, default=None)


def available_memory(root: Path = _CGROUPS, own: Path = _OWN, meminfo: Path = _MEMINFO) -> int:
    """Bytes that could be had without swapping, and within the memory limits of the groups.

    Of what a group uses, the pages of files are taken for free: the kernel drops them when memory is asked for, and a checkpoint's are
    such once it is read.
    """
    kib = _field(meminfo, "MemAvailable:")
    available = kib * 1024 if kib is not None else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    groups = [(folder / "memory.max", folder / "memory.current", "") for folder in _groups_above(root, own, "")]
    groups += [
        (folder / "memory.limit_in_bytes", folder / "memory.usage_in_bytes", "total_")
        for folder in _groups_above(root / "memory", own, "memory")
    ]
    for limit_file, usage_file, prefix in groups:
        limit, usage = _number(limit_file), _number(usage_file)
        if limit is not None and usage is not None:
            statistics = usage_file.with_name("memory.stat")
            files = sum(_field(statistics, f"{prefix}{state}_file") or 0 for state in ("inactive", "active"))
            available = min(available, max(0, limit - usage + files))
    return available


def _groups_above(root: Path, own: Path, controller: str) -> list[Path]:
    """The folder of this process's group and of each one above it. controller: version 1's; "" for version 2."""
    path = ""
    for line in _read(own).splitlines():
        _, names, place = line.split(":", 2)
        if controller in names.split(","):
            path = place.strip("/")
    folder = root / path
    return [folder, *(above for above in folder.parents if above == root or root in above.parents)]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """None where there is no such file, or it says `max` or -1: no limit."""
    text = _read(path)
    return int(text) if text.isdecimal() else None


def _field(path: Path, name: str) -> int | None:
    for line in _read(path).splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name:
            return int(words[1])
    return None
