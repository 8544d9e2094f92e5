"""The group: any part of WORLD, its side channel, and what it says when ranks part ways, wait too long or lose a
peer.
"""

import logging
import os
import re
import signal
import time

import pytest
import torch

from tp_residual.errors import CollectiveError
from tp_residual.parallel import liveness
from tp_residual.parallel.collectives import partial_to_invariant
from tp_residual.parallel.group import TensorParallelGroup, group_of
from tp_residual.parallel.partial import Partial
from tp_residual.testing import RanksFailed, expect_collectives, hostile_values


def sum_over(group, x, tag="sum"):
    return group.run("all_reduce", tag, x, lambda transport, t: transport.all_reduce(t))


def gather_over(group, x, tag="gather"):
    return group.run("all_gather", tag, x, lambda transport, t: transport.all_gather(t))


def check_every_kind(group, own):
    """All five collectives, of a group and of a part of it, against what they mean. own(rank): that rank's input."""
    everybody = [own(rank) for rank in range(group.size)]
    x = everybody[group.rank]
    kept = x.clone()
    rows = slice(2 * group.rank, 2 * group.rank + 2)
    total = sum(everybody)
    for kind, collective, expected in (
        ("all_reduce", lambda transport, t: transport.all_reduce(t), total),
        ("reduce_scatter", lambda transport, t: transport.reduce_scatter(t), total[rows]),
        ("all_gather", lambda transport, t: transport.all_gather(t), torch.cat(everybody)),
        ("all_to_all", lambda transport, t: transport.all_to_all(t), torch.cat([y[rows] for y in everybody])),
        *(("broadcast", lambda transport, t, r=r: transport.broadcast(t, r), everybody[r]) for r in range(group.size)),
    ):
        for layout in (x, x.t().contiguous().t()):
            with expect_collectives(group, **{kind: 1}):
                out = group.run(kind, "test", layout, collective)
            assert torch.allclose(out, expected, rtol=1e-14, atol=0), kind
            assert torch.equal(layout, kept), f"{kind} wrote to its input"
            assert out.data_ptr() != layout.data_ptr(), f"{kind} returned its input"


def rank_data(size):
    return lambda rank: hostile_values(2 * size, 3, seed=1, rank=rank)


def check_transport(group):
    check_every_kind(group, rank_data(group.size))
    for members in ((0, 2), (1, 2), (0, 1, 2)):
        if group.rank in members and group.size == 3:
            part = group.subgroup(members)
            assert part is group.subgroup(members) and part.ranks == members
            check_every_kind(part, rank_data(part.size))


@pytest.mark.parametrize("size", [2, 3])
def test_every_collective_of_a_group_and_of_parts_of_it(ranks, size):
    ranks(size, check_transport)


def check_explicit_group(group):
    if group.rank not in (1, 3):
        return None
    part = TensorParallelGroup.from_ranks([1, 3], timeout_s=20)
    assert (part.size, part.ranks, part.rank) == (2, (1, 3), {1: 0, 3: 1}[group.rank])
    check_every_kind(part, rank_data(2))
    part.store.set(f"hello/{part.rank}", f"from {part.rank}")
    assert part.store.get(f"hello/{1 - part.rank}") == f"from {1 - part.rank}".encode()
    assert part.share("name", f"rank {group.rank}") == ["rank 1", "rank 3"]
    assert not group.record.last and not group.counters.calls, "nothing of WORLD may be used"
    return float(sum_over(part, torch.tensor([float(group.rank)]))[0])


def test_a_group_of_ranks_1_and_3_of_4(ranks):
    assert ranks(4, check_explicit_group) == [None, 4.0, None, 4.0]


def check_two_groups(group):
    """A model on each half, and one over all: records, numbers and counters do not mix."""
    half = TensorParallelGroup.from_ranks([0, 1] if group.rank < 2 else [2, 3], timeout_s=20)
    for _ in range(3):
        a = sum_over(half, torch.tensor([1.0 + group.rank]), tag="half")
        b = sum_over(group, torch.tensor([1.0 + group.rank]), tag="whole")
        assert a == (3 if group.rank < 2 else 7) and b == 10
    y = partial_to_invariant(Partial(torch.tensor([[1.0 + group.rank]]), half, "test"), tag="move")
    assert y == (3 if group.rank < 2 else 7)
    assert group.counters.calls == {("whole", "all_reduce"): 3}
    assert half.counters.calls == {("half", "all_reduce"): 3, ("move", "all_reduce"): 1}
    assert (group.record.number, half.record.number) == (3, 4)
    assert group_of(group.handle) is group and group_of(half.handle) is half
    handle = half.handle
    half.close()
    with pytest.raises(KeyError):
        group_of(handle)


def test_two_groups_at_once(ranks):
    ranks(4, check_two_groups)


def check_counters_and_record(group):
    assert str(group.record) == "no collective yet"
    sum_over(group, torch.ones(3, 4), tag="a")
    sum_over(group, torch.ones(5, dtype=torch.bfloat16), tag="a")
    gather_over(group, torch.ones(2, dtype=torch.float64), tag="b")
    assert group.counters.calls == {("a", "all_reduce"): 2, ("b", "all_gather"): 1}
    assert group.counters.bytes == {("a", "all_reduce"): 3 * 4 * 4 + 5 * 2, ("b", "all_gather"): 2 * 8}
    assert group.counters.by_kind() == {"all_reduce": 2, "all_gather": 1}
    assert str(group.record) == "last completed #3 all_gather tag='b' shape=[2] dtype=float64"
    assert not group.record.in_flight
    group.counters.reset()
    assert group.counters.by_kind() == {} and group.record.number == 3


def test_counters_and_record(ranks):
    ranks(2, check_counters_and_record, checked=False)


def test_a_group_of_one_needs_no_torch_distributed():
    group = TensorParallelGroup.single()
    assert (group.rank, group.size, group.ranks) == (0, 1, (0,)) and not torch.distributed.is_initialized()
    with expect_collectives(group):
        assert partial_to_invariant(Partial(torch.ones(2), group, "test"), tag="t").tolist() == [1, 1]


# -- when it goes wrong


def skip_one(whole, limit_s):
    group = TensorParallelGroup.from_world(timeout_s=limit_s, limits={"start": 20})  # below the process group's
    sum_over(group, torch.ones(2), tag="both")
    if group.rank == 1:
        time.sleep(limit_s + 3)
        return None
    start = time.monotonic()
    with pytest.raises(CollectiveError) as error:
        sum_over(group, torch.ones(4, 3, dtype=torch.float64), tag="only rank 0")
    return time.monotonic() - start, str(error.value)


def test_an_expired_wait_names_rank_number_tag_shape_and_limit(ranks):
    seconds, message = ranks(2, skip_one, 1.0, collective_timeout_s=20.0, checked=False)[0]
    assert 0.9 < seconds < 4.5, seconds  # and two more to look for the peer's report
    for part in ("rank 0 of 2", "#2 all_reduce", "tag='only rank 0'", "shape=[4, 3]", "dtype=float64", "limit 1 s"):
        assert part in message, message
    assert "rank 1: no report, so dead or computing; it last said: last completed #1 all_reduce tag='both'" in message


def part_ways(group):
    """Ranks in different collectives: both expire, and each quotes the other."""
    with pytest.raises(CollectiveError) as error:
        if group.rank == 0:
            sum_over(group, torch.ones(2), tag="mlp")
            sum_over(group, torch.ones(2), tag="never")
        else:
            gather_over(group, torch.ones(3), tag="logits")
            gather_over(group, torch.ones(3), tag="never")
    return str(error.value)


def test_ranks_in_different_collectives_quote_each_other(ranks):
    messages = ranks(2, part_ways, collective_timeout_s=1.0, checked=False)
    assert "rank 0 of 2" in messages[0] and "rank 1: waiting in #" in messages[0] and "all_gather" in messages[0]
    assert "rank 1 of 2" in messages[1] and "rank 0: waiting in #" in messages[1] and "all_reduce" in messages[1]


def lose_a_peer(group, how):
    sum_over(group, torch.ones(2), tag="alive")
    if group.rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("my own fault")
    start = time.monotonic()
    try:
        sum_over(group, torch.ones(2), tag="bereft")
    except CollectiveError as error:
        raise CollectiveError(f"after {time.monotonic() - start:.2f} s: {error}") from None


@pytest.mark.parametrize("how", ["killed", "raised"])
def test_a_lost_peer_is_noticed_in_seconds(ranks, how):
    start = time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        ranks(3, lose_a_peer, how, collective_timeout_s=60, checked=False)
    assert time.monotonic() - start < 20
    if how == "killed":
        assert failure.value.exit_codes[1] == -signal.SIGKILL
    else:
        assert isinstance(failure.value.exceptions[1], ValueError)
    message = str(failure.value.exceptions.get(0) or failure.value.exceptions[2])
    assert "waiting in #2 all_reduce tag='bereft'" in message and "rank 1: its process has ended" in message
    assert float(message.split()[1]) < 4.5, message


def skip_one_checked(group):
    sum_over(group, torch.ones(2), tag="first")
    try:
        if group.rank != 1:
            sum_over(group, torch.ones(2, 2), tag="skipped by rank 1")
        gather_over(group, torch.ones(3), tag="next")
    except CollectiveError as error:
        return str(error)
    return None


def test_checked_mode_shows_both_records_when_one_skips(ranks):
    start = time.monotonic()
    messages = ranks(3, skip_one_checked, checked=True, collective_timeout_s=20)
    assert time.monotonic() - start < 10  # by comparing, not by waiting
    for rank, message in enumerate(messages):
        assert f"rank {rank} is at #2" in message and "parted ways" in message
        assert "#2 all_reduce tag='skipped by rank 1' shape=[2, 2]" in message
        assert "#2 all_gather tag='next' shape=[3]" in message
        assert "from test_group:" in message  # where each of them was called


def stop_early_checked(group):
    sum_over(group, torch.ones(2), tag="first")
    if group.rank == 1:
        time.sleep(2.5)
        return None
    with pytest.raises(CollectiveError) as error:
        sum_over(group, torch.ones(2), tag="second")
    return str(error.value)


def leave_after_parting(group):
    """Rank 0 leaves as soon as it knows, and the side channel with it; rank 1 comes late."""
    if group.rank == 1:
        time.sleep(1)
    try:
        sum_over(group, torch.ones(2 + group.rank), tag="parted")
    except CollectiveError as error:
        print(error, flush=True)
        os._exit(40 if "shape=[2]" in str(error) and "shape=[3]" in str(error) else 3)


def test_a_rank_that_leaves_after_parting_lets_the_others_read(ranks):
    with pytest.raises(RanksFailed) as failure:
        ranks(2, leave_after_parting, checked=True, collective_timeout_s=20)
    assert failure.value.exit_codes == {0: 40, 1: 40}


def part_by_call_site(group):
    """The same number, kind, tag, shape and dtype from two places."""
    x = torch.ones(2)
    with pytest.raises(CollectiveError) as error:
        if group.rank == 0:
            group.run("all_reduce", "t", x, lambda transport, t: transport.all_reduce(t))
        else:
            group.run("all_reduce", "t", x, lambda transport, t: transport.all_reduce(t))
    here, there = re.findall(r"from test_group:(\d+)", str(error.value))
    assert here != there and "parted ways" in str(error.value)


def test_checked_mode_compares_call_sites(ranks):
    ranks(2, part_by_call_site, checked=True)


def lose_a_peer_in_the_side_channel(group):
    if group.rank == 1:
        time.sleep(0.3)
        os._exit(7)
    group.share("never", "")


def test_a_peer_that_dies_while_another_waits_in_the_side_channel_is_named(ranks):
    start = time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        ranks(2, lose_a_peer_in_the_side_channel, collective_timeout_s=50)
    assert time.monotonic() - start < 15 and failure.value.exit_codes == {1: 7}
    message = str(failure.value.exceptions[0])
    assert "waiting for every rank's 'never'" in message and "the process of rank 1 has ended" in message


def wait_for_a_slow_peer(group):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("tp_residual").addHandler(handler)
    liveness.FIRST_NOTICE_S = 1.5
    sum_over(group, torch.ones(2), tag="before")
    if group.rank == 2:
        time.sleep(4)
    sum_over(group, torch.ones(2), tag="awaited")
    return records


def test_waiting_for_a_slow_peer_is_said_once_by_the_lowest_waiting_rank(ranks):
    said = ranks(3, wait_for_a_slow_peer, checked=False)
    assert 1 <= len(said[0]) <= 2 and not said[2], said  # at 1.5 s and, twice as long after, perhaps at 3
    assert len(said[1]) <= 1, said  # it may look before rank 0 has published that it waits
    line = said[0][0]
    assert "rank 0 of 3 has been waiting in #2 all_reduce tag='awaited'" in line and "limit 30 s" in line, line
    assert "rank 2: last completed #1 all_reduce tag='before'" in line and "rank 1: " not in line, line


def check_phases(whole):
    group = TensorParallelGroup.from_world(timeout_s=20, limits={"step": 0.5})
    group.enter_phase("load")
    if group.rank == 1:
        time.sleep(1.5)
    sum_over(group, torch.ones(2), tag="within the default")
    group.enter_phase("step")
    if group.rank == 1:
        time.sleep(4)
        return
    with pytest.raises(CollectiveError, match=r"tag='too late'.*gave up.*\[limit 0.5 s of step"):
        sum_over(group, torch.ones(2), tag="too late")


def test_a_phase_has_its_own_limit(ranks):
    ranks(2, check_phases, checked=False)


def test_checked_mode_names_the_rank_that_did_not_come(ranks):
    message = ranks(2, stop_early_checked, checked=True, collective_timeout_s=1.0)[0]
    assert "rank 0 of 2 has been waiting for rank 1 to reach #2 all_reduce tag='second'" in message
    assert "for 1 s (limit 1 s); missing: rank 1 (last completed #1 all_reduce tag='first'" in message


def run_checked(group):
    with expect_collectives(group, all_reduce=3):
        return [float(sum_over(group, torch.tensor([float(group.rank)]))) for _ in range(3)]


def test_checked_mode_changes_nothing_else(ranks):
    assert ranks(3, run_checked, checked=True) == [[3.0] * 3] * 3


def call_from_ranks_alone(group):
    if group.rank == 0:
        with pytest.raises(
            CollectiveError, match=r"could not set up a group of global ranks \[0, 1\].*each of them must"
        ):
            TensorParallelGroup.from_ranks([0, 1], timeout_s=1)


def test_a_group_that_not_all_members_make(ranks):
    ranks(2, call_from_ranks_alone)


def count_keys(group):
    keys = []
    for call in range(12):
        group.run("all_reduce", f"call {call}", torch.ones(3), lambda transport, x: transport.all_reduce(x))
        keys.append(group.store.num_keys())
    return keys


def test_checked_mode_leaves_no_trail_in_the_side_channel(ranks):
    for keys in ranks(3, count_keys, checked=True):
        assert max(keys[4:]) <= max(keys[:4]) + 6  # two calls of three ranks, whatever they are at
