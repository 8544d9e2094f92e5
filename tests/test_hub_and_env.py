"""Hub ids become directories, with a clear word when they cannot; `env` tells what a bug report needs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tp_residual.errors import ConfigError
from tp_residual.inference.hub import CONFIG_ONLY, resolve_model


def test_directories_and_paths_stay_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    for name in ("owner/name", str(tmp_path), "./owner/other", "a/b/c", "name"):
        assert resolve_model(name) == name


def test_an_id_is_downloaded_at_its_revision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []

    def download(repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        calls.append((repo_id, revision, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("owner/name@v1.0", CONFIG_ONLY) == str(tmp_path)
    assert resolve_model("owner/na-me_2.5") == str(tmp_path)
    assert calls[0] == ("owner/name", "v1.0", ["config.json"]) and calls[1][:2] == ("owner/na-me_2.5", None)
    assert "*.safetensors" in calls[1][2] and not any(pattern.endswith((".bin", ".pt")) for pattern in calls[1][2])


def test_offline_is_said_in_one_line(tmp_path: Path) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    line = [sys.executable, "-m", "tp_residual", "generate", "--model", "owner/name", "--prompt", "x", "--tp", "2"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60, env=environment)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.strip() == (
        "tp_residual: error: --model owner/name is no directory here, and as a hub id: the hub cannot be reached and its cache has no "
        "copy: go online, or give a directory"
    )


def test_other_failures_name_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> str:
        raise OSError("No space left on device\nsecond line")

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    with pytest.raises(
        ConfigError, match=r"the download failed \(No space left on device\): try again, or give a directory"
    ):
        resolve_model("owner/name")


def test_env_tells_versions_cores_and_memory() -> None:
    import torch

    line = [sys.executable, "-m", "tp_residual", "env"]
    facts = json.loads(subprocess.run([*line, "--json"], capture_output=True, text=True, check=True, timeout=60).stdout)
    assert facts["torch"].startswith(torch.__version__.partition("+")[0])
    assert str(len(os.sched_getaffinity(0))) and facts["cores"].startswith(f"{os.cpu_count()} in the machine, usable: ")
    assert set(facts) >= {"triton", "memory", "huge pages", "/dev/shm", "GPUs", "cpu", "tp_residual"}
    assert facts["GPUs"] == "none" or "NCCL" in facts
    table = subprocess.run(line, capture_output=True, text=True, check=True, timeout=60).stdout
    pages = facts["huge pages"].split()  # "always [madvise] never": brackets are no markup
    assert all(name in table for name in ("torch threads", "/dev/shm", *pages))
