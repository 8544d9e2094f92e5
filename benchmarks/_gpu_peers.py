"""Other projects' add+norm, where they are installed: found by name, tried in a process of their own, and only then timed.

Run as a script with a peer's name and a device, it tries that peer once: some compile kernels on their first call, some end the process.
"""

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tp_residual.bench.shapes import NORM, operand, wrong_elements
from tp_residual.kernels import contract

# (residual, update, weight) -> (new residual, normed); in place on the first two where the peer works so
Form = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Peer:
    """package: what is imported. open: imports it; everything that can go wrong with it does so there, or in the first call."""

    package: str
    in_place: bool
    open: Callable[[], Form]


def _in_place(function: Callable[[Tensor, Tensor, Tensor, float], Any]) -> Form:
    def run(residual: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        function(update, residual, weight, NORM.eps)
        return residual, update

    return run


def _flashinfer() -> Form:
    return _in_place(import_module("flashinfer.norm").fused_add_rmsnorm)


def _sgl_kernel() -> Form:
    return _in_place(import_module("sgl_kernel").fused_add_rmsnorm)


def _vllm() -> Form:
    return _in_place(import_module("vllm._custom_ops").fused_add_rms_norm)


def _liger() -> Form:
    function = import_module("liger_kernel.ops.fused_add_rms_norm").LigerFusedAddRMSNormFunction

    def run(residual: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        normed, new = function.apply(update, residual, weight, NORM.eps, 0.0, "llama", False)
        return new, normed

    return run


PEERS = {
    "FlashInfer": Peer("flashinfer", True, _flashinfer),
    "Liger": Peer("liger_kernel", False, _liger),
    "sgl-kernel": Peer("sgl_kernel", True, _sgl_kernel),
    "vLLM": Peer("vllm", True, _vllm),
}


def discover(peers: Mapping[str, Peer], attempt: Callable[[str], str | None]) -> tuple[dict[str, str], dict[str, str]]:
    """`(usable, missing)`: versions of those that can be timed, reasons for the others. attempt: None, or why a peer does not work here."""
    usable, missing = {}, {}
    for name, peer in peers.items():
        if find_spec(peer.package) is None:
            missing[name] = "not installed"
        elif (why := attempt(name)) is not None:
            missing[name] = f"{_version(peer.package)} is installed and does not work here: {why}"
        else:
            usable[name] = _version(peer.package)
    return usable, missing


def attempt(name: str, device: torch.device, seconds: float) -> str | None:
    """Runs this file for one peer; the last line it said when it fails."""
    command = [sys.executable, str(Path(__file__).resolve()), name, str(device)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        return f"its first call took more than {seconds:.0f} s"
    if done.returncode == 0:
        return None
    said = done.stderr.strip().splitlines()
    return said[-1] if said else f"its process ended with {done.returncode}"


def _version(package: str) -> str:
    for distribution in packages_distributions().get(package, ()):
        try:
            return f"{distribution} {version(distribution)}"
        except PackageNotFoundError:
            continue
    return package


def try_peer(name: str, device: torch.device) -> None:
    """Raises what the peer raises, or RuntimeError when what it computes is no add+norm."""
    residual, update = (operand(kind, 2, 4096, torch.bfloat16, device) for kind in ("residual", "partial"))
    weight = operand("weight", 1, 4096, torch.bfloat16, device)
    expected = contract.add_norm(
        contract.AddNormSpec(residual.dtype, residual.dtype, NORM), residual, update, weight=weight
    )
    with torch.no_grad():
        found = PEERS[name].open()(residual.clone(), update.clone(), weight)
    for ours, theirs in zip(expected, found, strict=True):
        assert ours is not None
        if wrong := wrong_elements(theirs, ours, bitwise=False):
            raise RuntimeError(f"{wrong} of {ours.numel()} elements are not an add+norm's")


if __name__ == "__main__":
    try_peer(sys.argv[1], torch.device(sys.argv[2]))
