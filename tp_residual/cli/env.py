"""`env`: what this machine and its software are, as a bug report needs it."""

import argparse
import json
import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tp_residual import __version__
from tp_residual.machine import available_memory, cpu_quota

_PACKAGES = ("torch", "triton", "safetensors", "tokenizers", "transformers", "numpy")


def main(arguments: argparse.Namespace, argv: list[str]) -> None:
    facts = collect()
    if arguments.json:
        print(json.dumps(facts))
        return
    table = Table(show_header=False, title="tp_residual env", title_justify="left")
    for name, value in facts.items():
        table.add_row(name, escape(value))  # [madvise] is no markup
    Console().print(table)


def collect() -> dict[str, str]:
    """Name to fact; what is absent says so."""
    import torch

    facts = {"tp_residual": __version__, "python": platform.python_version(), "system": platform.platform()}
    facts |= {package: _version(package) for package in _PACKAGES}
    facts["cpu"] = _cpu_model()
    usable = sorted(os.sched_getaffinity(0))
    facts["cores"] = f"{os.cpu_count()} in the machine, usable: {','.join(map(str, usable))}{_quota()}"
    facts["torch threads"] = str(torch.get_num_threads())
    facts["memory"] = _memory()
    facts["huge pages"] = _read("/sys/kernel/mm/transparent_hugepage/enabled") or "not available"
    facts["/dev/shm"] = _free("/dev/shm")
    gpus = torch.cuda.device_count()
    facts["GPUs"] = ", ".join(_gpu(index) for index in range(gpus)) or "none"
    if gpus:
        facts["CUDA"] = str(torch.version.cuda)
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        pairs = [(a, b) for a in range(gpus) for b in range(gpus) if a < b]
        linked = [f"{a}-{b}" for a, b in pairs if torch.cuda.can_device_access_peer(a, b)]
        facts["peer access"] = f"{len(linked)} of {len(pairs)} pairs" + (f": {', '.join(linked)}" if linked else "")
    return facts


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _cpu_model() -> str:
    lines = [line for line in _read("/proc/cpuinfo").splitlines() if line.startswith("model name")]
    return lines[0].partition(":")[2].strip() if lines else platform.machine()


def _quota() -> str:
    """The cgroups' CPU limit, which the list of usable cores does not show."""
    quota = cpu_quota()
    return "" if quota is None else f", quota {quota:g} cores"


def _memory() -> str:
    fields = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    total = int(fields.get("MemTotal", "0 kB").split()[0]) * 1024
    return f"{total / 1e9:.1f} GB, {available_memory() / 1e9:.1f} GB available"


def _free(path: str) -> str:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return "not available"
    return f"{usage.total / 1e9:.1f} GB, {usage.free / 1e9:.1f} GB free"


def _gpu(index: int) -> str:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return (
        f"{index}: {properties.name}, {properties.total_memory / 1e9:.0f} GB, sm_{properties.major}{properties.minor}"
    )
