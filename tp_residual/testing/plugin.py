"""The pytest plugin: the fixture `ranks`, which is `run_ranks` with this test's time limit.

    def check(group, hidden_size): ...                 # at module level: ranks import it by name

    def test_it(ranks):
        ranks(4, check, hidden_size=64)

The limit is the ini option `ranks_timeout_s`, or the marker `@pytest.mark.ranks_timeout(seconds)`, or the call's own
`timeout_s=`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tp_residual.testing.runner import run_ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "ranks_timeout_s", "seconds after which the ranks of one call are killed and their stacks shown", default="60"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "ranks_timeout(seconds): limit for each call of the `ranks` fixture in this test"
    )


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """`ranks(world_size, function, *args, **kwargs)`: see tp_residual.testing.run_ranks."""
    marker = request.node.get_closest_marker("ranks_timeout")
    limit = float(marker.args[0] if marker else request.config.getini("ranks_timeout_s"))
    return partial(run_ranks, timeout_s=limit)
