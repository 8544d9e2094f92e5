"""How each side is started: its command, its environment, what it is told to load. A side that cannot be is a reason, never a guess."""

import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tp_residual.bench.peers_request import PeersRequest
from tp_residual.bench.peers_side import SideSpec
from tp_residual.errors import RequestError

OURS = "tp_residual"
START_PROMPT_TOKENS = 16  # of the prompt that a start is timed with
_GGUF_LIMIT_S = 600.0
# the package, by which its worker and the script that makes its environment are named, too
_PACKAGES = {
    "transformers": "transformers",
    "transformers-tp": "transformers",
    "vllm": "vllm",
    "llama.cpp": "llama_cpp",
}
# what a launcher or a shell may have set for its own processes, and would mean something else in a side's
_NOT_INHERITED = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)
_OTHER_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


class PeerMissing(RequestError):
    """A peer that cannot be run here; the message is the reason."""


def worker_programs() -> Path:
    """The folder of the peers' workers, which is in a checkout and not in an installed package."""
    folder = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"
    if not folder.is_dir():
        raise RequestError(
            f"bench peers needs the workers in {folder.name}/ of a checkout, and this package is not run from one"
        )
    return folder


def our_spec(request: PeersRequest, prompt: list[int], scratch: Path, cache_bytes: int) -> SideSpec:
    threads = len(request.cpus)
    command = (
        *(sys.executable, "-m", "tp_residual", "bench", "peers-worker"),
        *("--tp", f"{request.tp}", "--threads", f"{threads // request.tp}"),
    )
    load = _load(request, prompt, request.tp, cache_bytes)
    return SideSpec(OURS, command, load, request.tp, threads, _environment(scratch))


def peer_spec(
    peer: str, request: PeersRequest, prompt: list[int], scratch: Path, cache_bytes: int, programs: Path
) -> SideSpec:
    """Raises PeerMissing when there is no such environment, or no form of the model that this peer reads."""
    python, package = sys.executable, _PACKAGES[peer]
    maker = f"benchmarks/peers/make_{package}_env DIR"
    if peer in request.environments:
        python = os.path.join(request.environments[peer], "bin", "python")
        if not os.access(python, os.X_OK):
            raise PeerMissing(f"--peer-env {peer}: there is no bin/python in that folder; make it with {maker}")
    environment = _environment(scratch)
    if python != sys.executable:
        environment = {name: value for name, value in environment.items() if name not in _OTHER_PYTHON}
    # a start of minutes that ends in "No module named" would tell the same
    if subprocess.run(
        [python, "-c", f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"]
    ).returncode:
        raise PeerMissing(
            f"{package} is not installed in its environment; make one with {maker} and pass --peer-env {peer}=DIR"
        )
    tp = request.peer_tp(peer)
    load = _load(request, prompt, tp, cache_bytes)
    if peer == "llama.cpp":
        load |= {"gguf": str(_gguf(request, python, scratch, programs))}
    ranks = (
        ()
        if peer != "transformers-tp"
        else (*("-m", "torch.distributed.run", "--standalone"), f"--nproc-per-node={tp}")
    )
    command = (python, *ranks, str(programs / f"{package}_worker.py"))
    return SideSpec(peer, command, load, tp, len(request.cpus), environment, str(scratch))


def _load(request: PeersRequest, prompt: list[int], tp: int, cache_bytes: int) -> dict[str, object]:
    return {
        "model": os.path.abspath(request.model),
        "dtype": request.dtype,
        "tp": tp,
        "cpus": list(request.cpus),
        "prompt": prompt,
        "max_batch": max(request.batches),
        "max_prompt": max(request.prompts),
        "max_tokens": request.max_tokens,
        "cache_gib": max(1, math.ceil(cache_bytes / 2**30)),
    }


def _environment(scratch: Path) -> Mapping[str, str]:
    """Temporary files go where the benchmark removes them; nothing is asked of a hub."""
    inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    return inherited | {"TMPDIR": str(scratch), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _gguf(request: PeersRequest, python: str, scratch: Path, programs: Path) -> Path:
    """The same weights as llama.cpp reads them, written once, in its environment."""
    target = scratch / "model.gguf"
    if not target.exists():
        command = [python, str(programs / "write_gguf.py"), os.path.abspath(request.model), str(target), request.dtype]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_GGUF_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise PeerMissing(f"its GGUF file was not written within {_GGUF_LIMIT_S:g} s") from error
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            target.unlink(missing_ok=True)
            raise PeerMissing(f"its GGUF file could not be written: {lines[-1][:300]}")
    return target
