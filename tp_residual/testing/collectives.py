"""Expected collectives: what a piece of code is allowed to communicate, exactly."""

from collections.abc import Iterator
from contextlib import contextmanager

from tp_residual.parallel.group import TensorParallelGroup


@contextmanager
def expect_collectives(
    group: TensorParallelGroup,
    *,
    all_reduce: int = 0,
    reduce_scatter: int = 0,
    all_gather: int = 0,
    all_to_all: int = 0,
    broadcast: int = 0,
) -> Iterator[None]:
    """Raises AssertionError unless exactly these collectives ran on `group` inside the block (those of its subgroups
    are their own).

    The message lists what ran by tag. Nothing is reset.
    """
    before = dict(group.counters.calls)
    yield
    ran = {
        key: calls - before.get(key, 0) for key, calls in group.counters.calls.items() if calls != before.get(key, 0)
    }
    expected = {
        "all_reduce": all_reduce,
        "reduce_scatter": reduce_scatter,
        "all_gather": all_gather,
        "all_to_all": all_to_all,
        "broadcast": broadcast,
    }
    found = {kind: sum(calls for (_, k), calls in ran.items() if k == kind) for kind in expected}
    if found != expected:
        wrong = ", ".join(f"{kind}: {found[kind]} instead of {n}" for kind, n in expected.items() if found[kind] != n)
        by_tag = ", ".join(f"{tag!r} {kind} x{calls}" for (tag, kind), calls in sorted(ran.items()))
        raise AssertionError(f"rank {group.rank} of {group.size} ran {wrong} (all that ran: {by_tag or 'nothing'})")
