"""Ranks that read or write a checkpoint fail together: a file that one of them cannot write is an error on all of them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

from tp_residual.errors import CheckpointError, CollectiveError
from tp_residual.parallel.group import TensorParallelGroup

_asked: WeakKeyDictionary[TensorParallelGroup, int] = WeakKeyDictionary()  # a name is shared once in a group's life


def agree(group: TensorParallelGroup, problem: str, value: Any = None) -> list[Any]:
    """Every rank's value (plain data), by rank. Raises CheckpointError on every rank, with one text, when any rank has a problem."""
    number = _asked[group] = _asked.get(group, 0) + 1
    texts = group.share(f"checkpoint {number}", json.dumps([problem, value]))
    # all have posted this one, so have read the one before: a long run's checkpoints must not fill the side channel
    if number > 1:
        group.store.delete_key(f"share/checkpoint {number - 1}/{group.rank}")
    answers = [json.loads(text) for text in texts]
    said = {rank: text for rank, (text, _) in enumerate(answers) if text}
    if not said:
        return [theirs for _, theirs in answers]
    with suppress(CollectiveError):  # rank 0 takes the side channel along when it leaves: not before all have read why
        group.share(f"checkpoint {number} was read", "")
    rank, text = next(iter(said.items()))
    alike = len(said) == group.size and len(set(said.values())) == 1
    where = "" if alike else f"rank {rank} of {group.size}: "
    raise CheckpointError(f"{where}{text}")


@contextmanager
def in_phase(group: TensorParallelGroup, name: str) -> Iterator[None]:
    """Waits have the limit of phase `name`, where the group has one."""
    before = group.limits.phase
    group.enter_phase(name)
    try:
        yield
    finally:
        group.enter_phase(before)
