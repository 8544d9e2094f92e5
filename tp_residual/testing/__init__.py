"""Prove a layout: run a function on N ranks in a blink, and compare a sharded module with its unsharded twin.

    run_ranks(4, check)                     check(group) on four ranks (in pytest: the fixture `ranks`)
    assert_equals_twin(group, sharded, ...) outputs, input gradients, every block's gradient, norms; in fp64
    expect_collectives(group, all_reduce=2) exactly these collectives happen inside, and no other
    RowCache(...)                           the simplest KV cache: a model token by token, without an engine
    hostile_values(...), hostile_layouts(x) data and gradients that do not let a fault cancel itself

Names are loaded on first use: pytest imports this package in every run of every project that has it installed, and
torch takes a second.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tp_residual.testing.collectives import expect_collectives
    from tp_residual.testing.hostile import (
        hostile_layouts,
        hostile_values,
        hostile_weights_,
        nan_filled_memory,
        nan_padded,
    )
    from tp_residual.testing.row_cache import RowCache
    from tp_residual.testing.runner import RanksFailed, run_ranks, set_preload
    from tp_residual.testing.twin import assert_equals_twin, relative_error

__all__ = [
    "RanksFailed",
    "RowCache",
    "assert_equals_twin",
    "expect_collectives",
    "hostile_layouts",
    "hostile_values",
    "hostile_weights_",
    "nan_filled_memory",
    "nan_padded",
    "relative_error",
    "run_ranks",
    "set_preload",
]

_HOME = {
    "expect_collectives": "collectives",
    "RanksFailed": "runner",
    "RowCache": "row_cache",
    "run_ranks": "runner",
    "set_preload": "runner",
    "assert_equals_twin": "twin",
    "relative_error": "twin",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME.get(name, 'hostile')}"), name)
