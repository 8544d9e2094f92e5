"""How an axis is divided: every small case, against the properties a split must have."""

import subprocess
import sys
from itertools import pairwise, product
from pathlib import Path

import pytest

from tp_residual.errors import SplitError
from tp_residual.parallel.splits import HeadSplit, Split

SMALL = list(product(range(13), range(1, 13)))


def held(split: Split) -> list[int]:
    return [index for start, stop in split.ranges for index in range(start, stop)]


@pytest.mark.parametrize("rule", [Split.even, Split.ceil_chunks])
def test_every_small_axis_is_cut_once_and_in_order(rule):
    for total, parts in SMALL:
        split = rule(total, parts)
        assert len(split.ranges) == parts
        assert held(split) == list(range(total)), (total, parts)
        assert split.sizes == tuple(split.size(rank) for rank in range(parts)) and sum(split.sizes) == total


def test_even_differs_by_one_unit_and_the_first_ranks_take_more():
    for total, parts in SMALL:
        sizes = Split.even(total, parts).sizes
        assert max(sizes) - min(sizes) <= 1 and list(sizes) == sorted(sizes, reverse=True)
        assert Split.even(total * 4, parts, unit=4).sizes == tuple(4 * size for size in sizes)
    assert Split.even(9, 2).sizes == (5, 4)
    with pytest.raises(SplitError, match="size 10 is not a multiple of its unit 4"):
        Split.even(10, 2, unit=4)


def test_token_chunks_are_equal_but_for_the_tail():
    for total, parts in SMALL:
        sizes = Split.ceil_chunks(total, parts).sizes
        chunk = -(-total // parts)
        full, rest = divmod(total, chunk) if chunk else (0, 0)
        assert sizes == (chunk,) * full + (rest,) * (full < parts) + (0,) * (parts - full - 1)
    assert Split.ceil_chunks(5, 4).sizes == (2, 2, 1, 0)


def test_segments_tile_the_axis_and_name_all_holders():
    for (total, parts), rule in product(SMALL, (Split.even, Split.ceil_chunks, Split.replicated)):
        split = rule(total, parts)
        segments = list(split.segments())
        assert [i for start, stop, _ in segments for i in range(start, stop)] == list(range(total))
        for start, stop, holders in segments:
            for index in range(start, stop):
                assert holders == tuple(r for r, (a, b) in enumerate(split.ranges) if a <= index < b)
        for before, after in pairwise(segments):
            assert before[2] != after[2]  # maximal runs


def test_scaled_is_the_same_split_in_rows():
    split = HeadSplit.of(9, 3, 2).key_value
    assert split.ranges == ((0, 2), (1, 3))
    assert split.scaled(64).ranges == ((0, 128), (64, 192)) and split.scaled(64).total == 192
    assert split.scaled(64).unit == 64
    assert list(split.scaled(64).segments()) == [(0, 64, (0,)), (64, 128, (0, 1)), (128, 192, (1,))]


HEADS = [(9, 3), (14, 2), (8, 1), (8, 8), (12, 4), (5, 5), (6, 2), (32, 8)]


@pytest.mark.parametrize(("query_heads", "kv_heads"), HEADS)
def test_each_rank_holds_exactly_the_kv_heads_its_queries_read(query_heads, kv_heads):
    group = query_heads // kv_heads
    for tp_size in range(1, query_heads + 1):
        heads = HeadSplit.of(query_heads, kv_heads, tp_size)
        assert held(heads.query) == list(range(query_heads)) and min(heads.query.sizes) >= 1
        for rank in range(tp_size):
            start, stop = heads.query.ranges[rank]
            kv_start, kv_stop = heads.key_value.ranges[rank]
            assert set(range(kv_start, kv_stop)) == {head // group for head in range(start, stop)}
            index = heads.kv_index(rank)
            assert [kv_start + i for i in index] == [head // group for head in range(start, stop)]
        segments = list(heads.key_value.segments())
        assert [i for a, b, _ in segments for i in range(a, b)] == list(range(kv_heads))
        assert all(holders for _, _, holders in segments)


def test_uneven_heads_by_hand():
    heads = HeadSplit.of(9, 3, 2)
    assert heads.query.ranges == ((0, 5), (5, 9)) and heads.key_value.ranges == ((0, 2), (1, 3))
    assert heads.kv_index(0) == (0, 0, 0, 1, 1) and heads.kv_index(1) == (0, 1, 1, 1)
    assert HeadSplit.of(9, 3, 4).key_value.ranges == ((0, 1), (1, 2), (1, 3), (2, 3))
    assert HeadSplit.of(14, 2, 3).query.ranges == ((0, 5), (5, 10), (10, 14))
    assert HeadSplit.of(14, 2, 3).key_value.ranges == ((0, 1), (0, 2), (1, 2))
    assert HeadSplit.of(8, 1, 3).key_value.ranges == ((0, 1),) * 3


def test_more_ranks_than_query_heads_is_refused_with_the_way_out():
    message = "num_attention_heads=9 cannot be split over tp_size=12; use 1 to 9"
    with pytest.raises(SplitError, match=message):
        HeadSplit.of(9, 3, 12)
    with pytest.raises(SplitError, match="tp_size=0"):
        HeadSplit.of(9, 3, 0)


def test_splits_need_no_torch():
    code = "import sys, tp_residual.parallel.splits; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, timeout=60).returncode == 0
