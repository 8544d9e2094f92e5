"""Add+norm's Triton kernels, bit for bit, without a GPU: one process runs everything in Triton's interpreter, each test reads its part."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from triton_interpreted import CHECKS

SCRIPT = Path(__file__).parent / "triton_interpreted.py"


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    outcome = subprocess.run(
        [sys.executable, SCRIPT],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    return json.loads(outcome.stdout)


@pytest.mark.timeout(300)  # the first test waits for the process, half a minute on an idle machine
@pytest.mark.parametrize("name", CHECKS)
def test_interpreted_kernels(name: str, report: dict[str, Any]) -> None:
    assert report[name]["failure"] is None
    assert report[name]["comparisons"] >= 6
