"""Tensor-parallel decoding built around the residual stream.

This file imports nothing: the command line checks its arguments before torch is loaded. `to_dtensor` is loaded on first use.
"""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "to_dtensor":
        from tp_residual.training.dtensor import to_dtensor

        return to_dtensor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
