"""The soak: what it takes for flat and what not, a short run, and (slow) twenty minutes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_models

from benchmarks.soak import growth, is_flat, soak
from tp_residual.testing import run_ranks

FLAT = {"anonymous_bytes": 300 << 20, "threads": 5, "descriptors": 20}


def samples(**slopes: float) -> list[dict[str, Any]]:
    """A hundred, of which `slopes` grow by so much a sample; the first twenty are noisy."""
    return [
        {name: int(value + slopes.get(name, 0.0) * at + (at < 20) * 100 * at) for name, value in FLAT.items()}
        for at in range(100)
    ]


def test_what_grows_is_seen_and_a_warm_up_is_not() -> None:
    assert is_flat(samples()) and set(growth(samples()).values()) == {0}
    assert is_flat(samples(anonymous_bytes=1e5)), "four megabytes between the halves are an allocator's"
    assert not is_flat(samples(anonymous_bytes=1e6))
    assert not is_flat(samples(threads=0.05))
    assert not is_flat(samples(descriptors=0.05))


def model_dir(folder: Path) -> str:
    """Heads that the compiled attention takes, and positions for the longest request."""
    values = tiny_models.TEXT_MODELS["llama_text"] | {"head_dim": 16, "max_position_embeddings": 1024}
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


@pytest.mark.slow
def test_a_short_run_ends_everything_it_began(tmp_path: Path) -> None:
    ranks = run_ranks(2, soak, model_dir(tmp_path), 0.1, 0, True, checked=False, transport="shared")
    for each in ranks:
        assert each["added"] > 20 and each["tokens"] > 100 and each["ended"] > 10
        assert {name: each[name] for name in ("added", "refused", "ended", "cancelled", "tokens", "steps")} == {
            name: ranks[0][name] for name in ("added", "refused", "ended", "cancelled", "tokens", "steps")
        }
    assert ranks[0]["cancelled"] > 0, "a rank cancels alone, and all hear of it"


@pytest.mark.slow
def test_twenty_minutes_leave_memory_threads_and_descriptors_flat(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.soak",
            "--model",
            model_dir(tmp_path),
            "--random-weights",
            "--minutes",
            "20",
        ],
        cwd=Path(__file__).parents[1],
        timeout=2400,
    )
    assert done.returncode == 0
