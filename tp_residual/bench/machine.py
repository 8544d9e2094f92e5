"""What a figure was measured on: hardware, versions, commit. Nothing here names the machine or its folders."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import tp_residual

_DEFAULT_CACHE_BYTES = 32 * 2**20
_PACKAGES = ("torch", "triton", "numpy")


def hardware(usable_cores: int) -> dict[str, object]:
    """Only what does not change between two runs on the same machine: two files are compared when these are equal.

    usable_cores: before ranks are pinned.
    """
    facts: dict[str, object] = {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "usable_cores": usable_cores,
        "last_level_cache_bytes": last_level_cache_bytes(),
        "memory_GiB": round(int((_field("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) / 2**20),
        "gpus": [],
    }
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        facts["gpus"] = [
            f"{each.name}, {each.total_memory / 1e9:.0f} GB, sm_{each.major}{each.minor}" for each in devices
        ]
    return facts


def versions() -> dict[str, str]:
    found = {"tp_residual": tp_residual.__version__, "python": platform.python_version(), "kernel": platform.release()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    if torch.cuda.is_available():
        found["CUDA"] = str(torch.version.cuda)
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def commit() -> str:
    """Of the checkout that this package runs from, `+` behind it where files differ; `unknown` for an installed one."""
    package = Path(tp_residual.__file__).resolve().parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(package), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        git(
            "ls-files", "--error-unmatch", "__init__.py"
        )  # an environment inside somebody's checkout is not that checkout
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def last_level_cache_bytes() -> int:
    """Of the largest cache that core 0 sees; 32 MiB where the kernel does not tell."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20}[text[-1]] if text[-1] in "KM" else int(text))
    return max(sizes, default=_DEFAULT_CACHE_BYTES)


def flush_bytes(device: torch.device) -> int:
    """What must be written so that nothing of before is left in the last-level cache: twice its size."""
    if device.type == "cuda":
        return 2 * torch.cuda.get_device_properties(device).L2_cache_size
    return 2 * last_level_cache_bytes()


def _field(path: str, name: str) -> str:
    """The first `name: value` of a file of the kernel, or nothing."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
