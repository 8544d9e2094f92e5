"""The shared transport: the five collectives over a memory segment, its protocol, and what is left of it when ranks fail."""

import errno
import os
import random
import re
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from shared_segment import FAULTS, build_with_fault, opened, over_segment, plain, use_library

from tp_residual.errors import CollectiveError, LayoutError
from tp_residual.inference.request import SamplingSettings
from tp_residual.inference.sampling import filter_logits
from tp_residual.parallel import shared as shared_module
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.liveness import Process
from tp_residual.parallel.shared import DTYPES, SharedTransport
from tp_residual.parallel.splits import Split
from tp_residual.parallel.transport import PeerTransport, TorchTransport
from tp_residual.parallel.vocabulary import vocab_parallel_argmax
from tp_residual.testing import RanksFailed, expect_collectives

MOVED = (*DTYPES, torch.bool, torch.complex64)
KNOWN_TO_GLOO = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


def values(shape, dtype, rank, seed=0):
    """Different for every rank and element; spread over magnitudes, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + 1009 * rank + sum(shape))
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not dtype.is_floating_point and not dtype.is_complex:
        low = torch.iinfo(dtype).min
        return torch.randint(max(low, -(2**40)), min(torch.iinfo(dtype).max, 2**40), shape, generator=generator).to(
            dtype
        )
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (x * 10.0 ** torch.randint(-3, 3, shape, generator=generator)).to(dtype)


def rank_order_sum(parts):
    wide = [part.float() if part.dtype in (torch.bfloat16, torch.float16) else part for part in parts]
    total = wide[0].clone()
    for part in wide[1:]:
        total = total + part
    return total


# -- the collectives


def check_collectives(group, slot_bytes):
    gloo = plain(group)
    with over_segment(group, slot_bytes=slot_bytes) as transport:
        for dtype in DTYPES:
            for rows, width in ((0, 3), (1, 1), (3, 5), (2, 1777)):
                for transport.one_shot_bytes in (0, 1 << 40):  # each rank adds its share; each rank adds everything
                    check_sums(group, transport, (rows * group.size, width), dtype)
        for dtype in MOVED:
            for shape in ((0, 3), (1, 1), (7, 911), (2, 3, 5), (5,)):
                check_moves(group, transport, gloo if dtype in KNOWN_TO_GLOO else None, shape, dtype)


def check_sums(group, transport, shape, dtype):
    parts = [values(shape, dtype, rank) for rank in range(group.size)]
    x, total = parts[group.rank], rank_order_sum(parts)
    kept, rows = x.clone(), own_rows(group, shape[0])
    for got, expected in (
        (transport.all_reduce(x), total.to(dtype)),
        (transport.ordered_all_reduce(x), total),
        (transport.reduce_scatter(x), total[rows].to(dtype)),
        (transport.ordered_reduce_scatter(x), total[rows]),
    ):
        assert got.dtype == expected.dtype and torch.equal(got, expected), (shape, dtype)
    assert torch.equal(x, kept)


def check_moves(group, transport, gloo, shape, dtype):
    long = (shape[0] * group.size, *shape[1:])
    everybody = [values(long, dtype, rank) for rank in range(group.size)]
    x, kept, rows, root = (
        everybody[group.rank],
        everybody[group.rank].clone(),
        own_rows(group, long[0]),
        shape[0] % group.size,
    )
    for call, expected in (
        (lambda transport: transport.all_gather(x), torch.cat(everybody)),
        (lambda transport: transport.all_to_all(x), torch.cat([y[rows] for y in everybody])),
        (lambda transport: transport.broadcast(x, root), everybody[root]),
    ):
        for wire in (transport, gloo) if gloo is not None else (transport,):
            got = call(wire)
            assert got.dtype == dtype and got.shape == expected.shape and torch.equal(got, expected), (
                shape,
                dtype,
                wire,
            )
        assert torch.equal(x, kept) and (not x.numel() or got.data_ptr() != x.data_ptr())


def own_rows(group, rows):
    return slice(group.rank * rows // group.size, (group.rank + 1) * rows // group.size)


@pytest.mark.parametrize(("size", "slot_bytes"), [(2, None), (3, 4096), (4, 4096)])  # 4096: in many pieces
def test_every_collective_equals_the_plain_ones_and_sums_in_rank_order(ranks, size, slot_bytes):
    ranks(size, check_collectives, slot_bytes)


def scatter_unequal_chunks(group):
    """Over every wire, and nothing has been entered: the next call is served."""
    with over_segment(group) as transport:
        for wire in (transport, plain(group), PeerTransport(plain(group), tuple(range(group.size)))):
            for x in (values((5, 3), torch.float32, group.rank), torch.tensor(1.0)):
                for name in ("reduce_scatter", "ordered_reduce_scatter", "all_to_all"):
                    if hasattr(wire, name):
                        with pytest.raises(LayoutError, match=r"scattered in equal chunks; pad it to a multiple of 2"):
                            getattr(wire, name)(x)
            assert wire.all_reduce(torch.ones(2)).tolist() == [group.size] * 2


def test_what_cannot_be_scattered_equally_is_refused_before_anything_is_written(ranks):
    ranks(2, scatter_unequal_chunks)


def check_through_the_group(group):
    with over_segment(group) as transport:
        with expect_collectives(group, all_reduce=1):
            y = group.run("all_reduce", "sum", torch.ones(3, 2).t(), lambda t, x: t.all_reduce(x))
        assert (y == group.size).all()
        assert group.counters.bytes["sum", "all_reduce"] == 24
        with pytest.raises(RuntimeError, match=r"does not add torch.bool; it adds float32, bfloat16"):
            transport.all_reduce(torch.ones(3).bool())
        assert transport.all_reduce(torch.ones(2)).tolist() == [group.size] * 2  # refused before it was entered


def test_records_and_counters_are_the_groups(ranks):
    ranks(3, check_through_the_group)


def choose_tokens(group):
    """What a decode step asks of the group beside its boundaries."""
    for name in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"):
        setattr(TorchTransport, name, None)
    split = Split.even(100, group.size)
    logits = values((3, 100), torch.float32, 0)
    local = logits[:, slice(*split.ranges[group.rank])]
    with over_segment(group):
        assert vocab_parallel_argmax(local, split, group, 7).tolist() == logits.argmax(-1).tolist()
        settings = SamplingSettings(temperature=1.0, top_k=20, top_p=0.8, min_p=0.01)
        whole = filter_logits(logits, settings, Split.even(100, 1), TensorParallelGroup.single())
        assert torch.equal(filter_logits(local, settings, split, group), whole[:, slice(*split.ranges[group.rank])])


def test_choosing_tokens_does_not_touch_gloo(ranks):
    ranks(3, choose_tokens)


# -- the protocol


def random_calls(group, calls, library=""):
    """Each rank sleeps and dawdles as it likes between calls; sizes from one element to several slots."""
    if library:
        use_library(library)
    plan, own_pace = random.Random(7), random.Random(100 + group.rank)
    with over_segment(group, slot_bytes=4096) as transport:
        for call in range(calls):
            kind = plan.choice(("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"))
            transport.one_shot_bytes = plan.choice((0, 1 << 40))
            rows, root = plan.choice((1, 1, 2, 30, 400)) * group.size, plan.randrange(group.size)
            pace = own_pace.random()
            if pace < 0.1:
                time.sleep(own_pace.random() * 2e-3)
            elif pace < 0.5:
                end = time.perf_counter() + own_pace.random() * 2e-4
                while time.perf_counter() < end:
                    pass
            # rank and call in each element: a stale, a foreign and a torn value all show
            everybody = [(torch.arange(rows) + 1000 * rank + 17 * call).to(torch.int32) for rank in range(group.size)]
            x, own = everybody[group.rank], own_rows(group, rows)
            if kind == "broadcast":
                got, expected = transport.broadcast(x, root), everybody[root]
            else:
                got = getattr(transport, kind)(x)
                total = torch.stack(everybody).sum(0).int()
                gathered, swapped = torch.cat(everybody), torch.cat([y[own] for y in everybody])
                expected = {
                    "all_reduce": total,
                    "reduce_scatter": total[own],
                    "all_gather": gathered,
                    "all_to_all": swapped,
                }[kind]
            assert torch.equal(got, expected), f"call {call}, {kind} of {rows} rows"


@pytest.mark.parametrize("size", [2, 3])
def test_random_calls_with_random_sleeps(ranks, size):
    ranks(size, random_calls, 1500)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_ten_thousand_random_calls_with_random_sleeps(ranks, size):
    ranks(size, random_calls, 10_000, timeout_s=840)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_random_calls_find_a_broken_protocol(ranks, fault, tmp_path):
    library = build_with_fault(fault, tmp_path)
    if library is None:
        pytest.skip("no compiler")
    with pytest.raises(RanksFailed, match=r"call \d+, |different collectives"):
        ranks(2, random_calls, 10_000, library)


def crowd(group, calls):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with over_segment(group) as transport:
        assert transport._channel.spin_ns == 0  # known from the ranks' affinities
        start = time.process_time()
        for call in range(calls):
            assert transport.all_reduce(torch.tensor([float(call)])) == call * group.size
        return (time.process_time() - start) / calls


def test_four_ranks_on_one_core_make_progress(ranks):
    """A rank that only spins takes its whole time slice, 3 ms at least, from the one that it waits for."""
    assert max(ranks(4, crowd, 300, checked=False)) < 1e-3


def late_peer(group):
    with over_segment(group) as transport:
        if group.rank == 1:
            time.sleep(0.4)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        total = transport.all_reduce(torch.full((3,), 1.0 + group.rank))
        return total.tolist(), resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before


def test_a_late_peer_is_waited_for_asleep(ranks):
    (total, switches), other = ranks(2, late_peer)
    assert total == other[0] == [3, 3, 3]
    assert switches > 50  # sleeps of 50 us; a spinning or yielding rank gives its core up by force only


# -- failures


def failing(transport, call, words):
    start = time.monotonic()
    with pytest.raises(RuntimeError) as failure:
        call()
    seconds = time.monotonic() - start
    for word in words:
        assert word in str(failure.value), str(failure.value)
    with pytest.raises(RuntimeError, match="is dead: ") as again:
        transport.all_gather(torch.ones(1))
    assert str(failure.value) in str(again.value)
    return seconds


def kill_one(group):
    transport = opened(group)
    transport.all_reduce(torch.ones(2))
    if group.rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    seconds = failing(transport, lambda: transport.all_reduce(torch.ones(2)), ["the process of rank 1 has ended"])
    raise AssertionError(f"noticed after {seconds:.3f} s")


def test_a_killed_peer_is_named_within_a_second(ranks):
    with pytest.raises(RanksFailed) as failure:
        ranks(3, kill_one)
    for rank in (0, 2):
        message = str(failure.value.exceptions[rank])
        assert message.startswith("noticed after") and float(message.split()[2]) < 1.3, message  # 0.3 s of them asleep


def end_after_the_last(group):
    """Rank 2 comes late, rank 1 leaves as soon as it may, and rank 0 looks around only after that."""
    transport = opened(group)
    if group.rank == 0:
        look = transport.gone
        transport.gone = lambda: time.sleep(0.5) or look()
    if group.rank == 2:
        time.sleep(0.3)
    total = transport.all_reduce(torch.ones(5))
    if group.rank == 1:
        transport.close()
    return float(total.sum())


def test_a_peer_that_is_through_may_leave(ranks):
    assert ranks(3, end_after_the_last) == [15.0] * 3


def never_come(group):
    transport = opened(group)
    group.transport = transport
    if group.rank == 1:
        time.sleep(2.5)
        return None
    start = time.monotonic()
    with pytest.raises(CollectiveError, match=r"all_reduce tag='alone' shape=\[2\].*gave up: waited 0.5 s for rank 1"):
        group.run("all_reduce", "alone", torch.ones(2), lambda t, x: t.all_reduce(x))
    return time.monotonic() - start


def test_a_peer_that_does_not_come_is_named_at_the_limit(ranks):
    assert (
        0.5 < ranks(2, never_come, collective_timeout_s=0.5, checked=False)[0] < 4
    )  # two of them to look for the peer's report


def part_ways(group):
    transport = opened(group)
    calls = (lambda: transport.all_reduce(torch.ones(2)), lambda: transport.all_gather(torch.ones(3)))
    doing = ["rank 0: all_reduce of 2 elements of 4 bytes", "rank 1: all_gather of 12 bytes"]
    return failing(transport, calls[group.rank % 2], ["different collectives", *doing])


def test_ranks_in_different_collectives_are_told_so_at_once(ranks):
    assert max(ranks(3, part_ways)) < 1


def leave(group):
    transport = opened(group)
    if group.rank == 0:
        transport.close()
        transport.close()
        with pytest.raises(RuntimeError, match="of rank 0 is dead: it is closed"):
            transport.broadcast(torch.ones(1), 0)
        return 0.0
    return failing(transport, lambda: transport.broadcast(torch.ones(1), 0), ["rank 0 has left the shared transport"])


def test_a_closed_peer_is_named_at_once(ranks):
    assert max(ranks(2, leave)) < 1


def interrupted(group):
    transport = opened(group)
    if group.rank == 1:
        time.sleep(1)
        assert transport.all_reduce(torch.ones(2)).tolist() == [2, 2]  # what rank 0 had published before
        return failing(transport, lambda: transport.all_reduce(torch.ones(2)), ["rank 0 has left"])

    def handler(signum, frame):
        raise KeyboardInterrupt("by the test")

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        transport.all_reduce(torch.ones(2))
    seconds = time.monotonic() - start
    with pytest.raises(RuntimeError, match="is dead: by the test"):
        transport.all_reduce(torch.ones(2))
    return seconds


def test_a_wait_can_be_interrupted_and_leaves_no_torn_state(ranks):
    seconds = ranks(2, interrupted, collective_timeout_s=20)
    assert 0.25 < seconds[0] < 0.8 and seconds[1] < 1


# -- the segment


SEGMENT = re.compile(r"/#\d+ \(deleted\)$|/tp_residual-[0-9a-f]{32}")  # without a name, and with one


def segments_of(process="self"):
    return {
        line.split(maxsplit=5)[5].strip()
        for line in Path(f"/proc/{process}/maps").open()
        if SEGMENT.search(line.strip())
    }


def two_groups(group):
    other = TensorParallelGroup.from_world(timeout_s=20)
    before = segments_of()
    with over_segment(group) as first, over_segment(other) as second:
        names = segments_of() - before
        assert len(names) == 2 and all(name.startswith("/dev/shm/") and name.endswith(" (deleted)") for name in names)
        for call in range(50):
            a, b = torch.tensor([1.0 + call]), torch.tensor([-1.0 - call])
            results = {}
            order = ((first, a), (second, b)) if call % 2 else ((second, b), (first, a))
            for transport, x in order:
                results[transport] = float(transport.all_reduce(x))
            assert results == {first: float(a) * group.size, second: float(b) * group.size}
    assert segments_of() == before
    other.close()
    return sorted(names)


def test_two_groups_at_once_have_segments_without_names(ranks):
    names = ranks(2, two_groups)
    assert names[0] == names[1]


def look_at_the_file(group, directory):
    seen = []
    map_it = shared_module._map

    def look_and_map(path, token, total):
        status = os.stat(path)
        assert os.listdir(directory) == []  # not even now: ranks that are ended here could not take the name away
        seen.append((status.st_mode & 0o7777, status.st_size == total, status.st_blocks * 512 >= total))
        return map_it(path, token, total)

    shared_module._map = look_and_map
    os.umask(0o277)
    with over_segment(group, directory=directory) as transport:
        assert os.listdir(directory) == []
        transport.all_reduce(torch.ones(1))
    return seen


def test_the_segment_is_private_reserved_and_never_has_a_name(ranks, tmp_path):
    assert ranks(2, look_at_the_file, str(tmp_path)) == [[(0o600, True, True)]] * 2


def without_nameless_files(group, directory, where):
    """A file system that has none, or a /proc that shows no peer's descriptors: then it has a name until it is mapped."""
    open_it = os.open

    def refuse(path, flags, *mode):
        if where == "make" and flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        if where == "open" and str(path).startswith("/proc/") and group.rank == 1:
            raise PermissionError(errno.EACCES, "Permission denied")
        return open_it(path, flags, *mode)

    os.open = refuse
    seen = []
    map_it = shared_module._map
    shared_module._map = lambda path, *rest: seen.append(path) or map_it(path, *rest)
    with over_segment(group, directory=directory) as transport:
        assert transport.all_reduce(torch.ones(1)).tolist() == [group.size]
        assert os.listdir(directory) == []
    return seen[-1]


@pytest.mark.parametrize("where", ["make", "open"])
def test_where_no_nameless_file_can_be_had_it_has_a_name_until_it_is_mapped(ranks, where, tmp_path):
    paths = ranks(3, without_nameless_files, str(tmp_path), where)
    assert len(set(paths)) == 1 and paths[0].startswith(f"{tmp_path}/tp_residual-")


def fail_inside(group, directory, how):
    if how == "killed while opening" and group.rank == 1:
        shared_module._map = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    transport = opened(group, directory=directory)
    transport.all_reduce(torch.ones(3))
    if how == "all killed" or (how == "one killed" and group.rank == 1):
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exception" and group.rank == 1:
        raise ValueError("my own fault")
    transport.all_reduce(torch.ones(3))


@pytest.mark.parametrize("how", ["exception", "one killed", "all killed", "killed while opening"])
def test_no_failure_leaves_a_segment_behind(ranks, how, tmp_path):
    with pytest.raises(RanksFailed):
        ranks(2, fail_inside, str(tmp_path), how, collective_timeout_s=20)
    assert os.listdir(tmp_path) == []


def watched():
    """How many processes."""
    links = [f"/proc/self/fd/{descriptor}" for descriptor in os.listdir("/proc/self/fd")]
    return sum("pidfd" in os.readlink(link) for link in links if os.path.lexists(link))


def reason_of(group, directory, trouble=""):
    if trouble == "other file" and group.rank == 1:
        map_it = shared_module._map
        Path(directory, "another").write_bytes(bytes(shared_module._slots_at(group.size) + 2 * group.size * 4096))
        shared_module._map = lambda path, *rest: map_it(os.path.join(directory, "another"), *rest)
    if trouble == "other host" and group.rank == 1:
        map_it = shared_module._map
        shared_module._map = lambda path, *rest: map_it(path + "-elsewhere", *rest)
    if trouble == "other namespace":
        group.processes = (group.processes[0], Process("another", group.processes[1].pid), *group.processes[2:])
    if trouble == "no library" and group.rank == 1:
        shared_module.unavailable = lambda: "no C++ compiler"
    before = segments_of(), watched()
    answer = opened(group, slot_bytes=4096, directory=directory)
    assert (segments_of(), watched()) == before
    assert isinstance(answer, str), answer
    return answer


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("other file", "rank 1: {} is not rank 0's segment: it does not hold the token"),
        (
            "other host",
            "rank 1: rank 0's segment {} cannot be opened (No such file or directory); only ranks of one host",
        ),
        ("other namespace", "rank 1 is in another process-id namespace"),
        ("no library", "rank 1: no C++ compiler"),
    ],
)
def test_whoever_cannot_share_is_named_on_every_rank_and_nothing_is_left(ranks, trouble, words, tmp_path):
    reasons = ranks(3, reason_of, str(tmp_path), trouble)
    assert len(set(reasons)) == 1
    for part in words.split("{}"):
        assert part in reasons[0], reasons[0]
    assert os.listdir(tmp_path) == (["another"] if trouble == "other file" else [])


def test_a_directory_that_takes_no_file(ranks, tmp_path):
    reasons = ranks(2, reason_of, str(tmp_path / "missing"))
    assert reasons == [f"rank 0: no file can be made in {tmp_path}/missing: No such file or directory"] * 2


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_too_little_memory_is_a_reason_with_both_numbers_and_no_bus_error(ranks, tmp_path):
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20k", "tmpfs", str(tmp_path)], capture_output=True)
    if mount.returncode:
        pytest.skip(f"no mount here: {mount.stderr.decode().strip()}")
    try:
        reasons = ranks(2, reason_of, str(tmp_path))
        assert reasons[0] == reasons[1] and "has 20480 free (No space left on device)" in reasons[0]
        assert f"needs {shared_module._slots_at(2) + 4 * 4096} bytes" in reasons[0]
        assert os.listdir(tmp_path) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def forced_without_room(group):
    """Rank 0 raises first, and its store goes with its group: a peer that still reads must not find it gone."""
    if group.rank == 0:
        shared_module._create = lambda directory, *_: no_room(directory)
    else:
        wait = TensorParallelGroup._wait_for_keys
        TensorParallelGroup._wait_for_keys = lambda self, keys, what: (wait(self, keys, what), time.sleep(0.5))
    try:
        TensorParallelGroup.from_world(timeout_s=20, transport="shared")
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def no_room(directory):
    raise shared_module._NoSegment(f"{directory} has 0 free")


def test_a_forced_segment_that_cannot_be_made_is_the_same_error_on_every_rank(ranks):
    messages = set(ranks(3, forced_without_room))
    assert messages == {
        "UserError: transport='shared' cannot run here: rank 0: /dev/shm has 0 free; leave the choice to transport='auto'"
    }


def test_a_group_of_one_shares_with_nobody():
    assert SharedTransport.open(TensorParallelGroup.single()) == "a group of 1 is not one of 2 to 64 ranks"
