"""What `plan` writes to files, and what a check found. Imports no torch."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tp_residual.bench.results import replace_file
from tp_residual.model.config import ModelConfig
from tp_residual.plan.estimate import Plan
from tp_residual.plan.hardware import Hardware


@dataclass(frozen=True)
class CheckedPass:
    """error: predicted over measured, minus 1. p5_us, p95_us: the spread of the measured samples."""

    tp: int
    mode: str
    step: str
    tokens: int
    sequences: int
    context: int
    predicted_us: float
    measured_us: float
    p5_us: float
    p95_us: float
    samples: int

    @property
    def error(self) -> float:
        return self.predicted_us / self.measured_us - 1

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"error": self.error}


def write_plan(path: str, found: Plan, config: ModelConfig, hardware: Hardware, command: str) -> None:
    """Rows, crossovers and all that they follow from; `source` in the hardware says whether any of it was measured."""
    crossings = [
        {"tp": tp_size, "nodes": nodes, "tokens": each.tokens, "reason": each.reason}
        for (tp_size, nodes), each in found.crossovers.items()
    ]
    rows = [row.as_json() for row in found.rows]
    _write(path, "plan", config, hardware, command, asdict(found.request), found.notes, rows, crossovers=crossings)


def write_check(
    path: str,
    rows: Sequence[CheckedPass],
    config: ModelConfig,
    hardware: Hardware,
    command: str,
    settings: dict[str, Any],
) -> None:
    _write(path, "plan check", config, hardware, command, settings, (), [row.as_json() for row in rows])


def _write(
    path: str,
    what: str,
    config: ModelConfig,
    hardware: Hardware,
    command: str,
    settings: dict[str, Any],
    notes: Sequence[str],
    rows: Sequence[dict[str, Any]],
    crossovers: Sequence[dict[str, Any]] = (),
) -> None:
    try:
        package = version("tp_residual")
    except PackageNotFoundError:
        package = "not installed"
    model = {name: getattr(config, name) for name in _MODEL_FIELDS}
    content = {
        "what": what,
        "hardware": hardware.to_json(),
        "versions": {"tp_residual": package},
        "command": command,
        "model": model,
        "settings": settings,
        "notes": list(notes),
        "crossovers": list(crossovers),
        "rows": rows,
    }
    replace_file(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


_MODEL_FIELDS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "tie_word_embeddings",
)  # fmt: skip
