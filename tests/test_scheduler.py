"""The scheduler alone: what it promises, over thousands of random steps. No ranks, no torch."""

import random
import subprocess
import sys

import pytest

from tp_residual.errors import RequestError
from tp_residual.inference.scheduler import BlockPool, Scheduled, Scheduler, Sequence, blocks_for, cached_tokens


def scheduler(
    blocks: int = 40,
    block_size: int = 4,
    seqs: int = 5,
    tokens: int = 11,
    longest: int = 60,
    *,
    whole_prompts: bool = False,
) -> Scheduler:
    return Scheduler(BlockPool(blocks, block_size), seqs, tokens, longest, whole_prompts=whole_prompts)


def run_step(engine: Scheduler, kept: dict[int, dict[int, int]]) -> list[Scheduled]:
    """One pass without a model. kept: what the cache holds, block by block, offset by offset: written, copied and read as a cache would."""
    parts = engine.schedule()
    size = engine.pool.block_size
    for sequence, context, ids in parts:
        for position, token in enumerate(ids, context):
            kept.setdefault(sequence.blocks[position // size], {})[position % size] = token
    for sequence, context, ids in parts:
        whole = sequence.prompt_ids + sequence.generated_ids
        seen = [kept[sequence.blocks[p // size]][p % size] for p in range(context + len(ids))]
        assert seen == whole[: context + len(ids)], "another sequence has written into this one's blocks"
    for sequence, _, _ in parts:
        if sequence.needs_token and not sequence.generated_ids:
            followers, copies = engine.fork(sequence)
            for source, target in copies:
                kept[target] = dict(kept[source])
            for each in (sequence, *followers):
                each.generated_ids.append(1000 * each.request + each.sample)
        elif sequence.needs_token:
            sequence.generated_ids.append(sequence.generated_ids[-1] + 1)
    return parts


def over(sequence: Sequence) -> bool:
    return len(sequence.generated_ids) == sequence.max_new_tokens and not sequence.prefilling


@pytest.mark.parametrize("seed", range(6))
def test_a_random_life_keeps_every_promise(seed: int) -> None:
    chance = random.Random(seed)
    engine = scheduler(
        blocks=chance.choice((16, 40, 200)), seqs=chance.choice((1, 3, 8)), tokens=chance.choice((8, 11, 64))
    )
    pool, kept = engine.pool, dict[int, dict[int, int]]()
    unfinished: dict[int, int] = {}  # samples still to finish, by request in the order of arrival
    started: list[int] = []
    finished = number = 0
    for step in range(4000):
        arriving = step < 3000
        for _ in range(chance.randrange(3) if arriving and len(unfinished) < 30 else 0):
            prompt = [chance.randrange(500) for _ in range(chance.randrange(1, 40))]
            new, samples = chance.randrange(0, 20), chance.choice((1, 1, 1, 2, 5))
            try:
                engine.add(number, prompt, new, samples if new else 1)
            except RequestError as error:
                assert len(prompt) + new > 60 or blocks_for(cached_tokens(len(prompt), new), 4) > pool.num_blocks, error
            else:
                unfinished[number] = samples if new else 1
            number += 1
        parts = run_step(engine, kept)
        if not parts:
            assert not engine.has_work and not unfinished and pool.free_blocks == pool.num_blocks
            continue
        assert 0 < sum(len(ids) for _, _, ids in parts) <= engine.max_batched_tokens
        assert len(engine.running) <= engine.max_num_seqs
        decoding = {s for s in engine.running if s.generated_ids and s.leader is None}
        scheduled = {s for s, _, _ in parts}
        assert all(s in scheduled or len(s.generated_ids) == 1 for s in decoding), "everybody decodes in every step"
        for sequence, _, _ in parts:
            if sequence.request not in started:
                started.append(sequence.request)
        assert started == sorted(started), "first come, first served"
        held = [block for s in engine.running for block in s.blocks]
        assert len(set(held)) + pool.free_blocks == pool.num_blocks, "a block is lost, or free and in use"
        for sequence in engine.running:
            assert len(sequence.blocks) == blocks_for(
                cached_tokens(len(sequence.prompt_ids), sequence.max_new_tokens), 4
            )
            assert engine.tables[sequence.row] is sequence.blocks
        for sequence in [s for s in engine.running if s.leader is None and over(s)]:
            engine.finish(sequence)
            unfinished[sequence.request] -= 1
            finished += 1
            if not unfinished[sequence.request]:
                del unfinished[sequence.request]
        if unfinished and chance.random() < 0.05:
            victim = chance.choice(list(unfinished))
            assert len(engine.cancel(victim)) == unfinished.pop(victim)
            assert not engine.cancel(victim)
    while unfinished:
        run_step(engine, kept)
        for sequence in [s for s in engine.running if s.leader is None and over(s)]:
            engine.finish(sequence)
            unfinished[sequence.request] -= 1
            unfinished = {request: left for request, left in unfinished.items() if left}
    assert pool.free_blocks == pool.num_blocks and engine.room == engine.max_num_seqs and finished > 200


def test_decode_steps_and_a_piece_of_a_prompt_share_a_pass() -> None:
    engine, kept = scheduler(tokens=8), dict[int, dict[int, int]]()
    engine.add(0, [1, 2, 3], 9)
    run_step(engine, kept)
    engine.add(1, list(range(12)), 3)
    shapes = [[(s.request, context, len(ids)) for s, context, ids in run_step(engine, kept)] for _ in range(3)]
    assert shapes == [[(0, 3, 1), (1, 0, 7)], [(0, 4, 1), (1, 7, 5)], [(0, 5, 1), (1, 12, 1)]]


def test_the_head_of_the_queue_is_not_overtaken() -> None:
    """Four blocks are free; the head needs five, and the next, which would fit, waits behind it."""
    engine, kept = scheduler(blocks=10), dict[int, dict[int, int]]()
    (first,) = engine.add(0, [1] * 4, 20)
    run_step(engine, kept)
    assert engine.pool.free_blocks == 4
    engine.add(1, [1] * 9, 11)
    engine.add(2, [1], 1)
    assert [part.sequence.request for part in run_step(engine, kept)] == [0]
    engine.finish(first)
    assert [part.sequence.request for part in run_step(engine, kept)] == [1, 2]


def test_samples_share_the_prompt() -> None:
    engine, kept = scheduler(tokens=64), dict[int, dict[int, int]]()
    engine.add(0, list(range(10)), 7, samples=4)
    parts = run_step(engine, kept)
    assert [len(ids) for _, _, ids in parts] == [10], "computed once"
    tables = [s.blocks for s in engine.running]
    assert all(table[:2] == tables[0][:2] for table in tables) and len({table[2] for table in tables}) == 4
    assert engine.pool.num_blocks - engine.pool.free_blocks == 2 + 4 * 2
    run_step(engine, kept)
    assert len({tuple(s.generated_ids) for s in engine.running}) == 4
    engine.finish(engine.running[0])
    run_step(engine, kept)  # what the others share is still theirs
    for sequence in list(engine.running):
        engine.finish(sequence)
    assert engine.pool.free_blocks == engine.pool.num_blocks


def test_more_samples_than_rows_come_one_group_after_another() -> None:
    engine, kept = scheduler(seqs=3), dict[int, dict[int, int]]()
    engine.add(0, [5, 6], 2, samples=7)
    seen = list[tuple[int, int]]()
    while engine.has_work:
        seen += [(s.sample, len(ids)) for s, _, ids in run_step(engine, kept)]
        for sequence in [s for s in engine.running if s.leader is None and over(s)]:
            engine.finish(sequence)
    assert [sample for sample, count in seen if count == 2] == [0, 3, 6], "each group computes the prompt once"
    assert sorted(sample for sample, count in seen if count == 1) == list(range(7))


@pytest.mark.parametrize(
    ("prompt", "new", "blocks", "message"),
    [
        (
            50,
            11,
            40,
            "50 tokens of prompt and max_new_tokens=11: 61 exceeds max_model_len=60; .* at most 10 new tokens",
        ),
        (70, 1, 40, "shorten the prompt to fewer than 60 tokens"),
        (30, 12, 10, "need 11 blocks of 4 tokens, and the KV cache has 10"),
    ],
)
def test_what_can_never_run_is_refused_and_nothing_else(prompt: int, new: int, blocks: int, message: str) -> None:
    engine, kept = scheduler(blocks=blocks), dict[int, dict[int, int]]()
    engine.add(0, [1, 2], 2)
    with pytest.raises(RequestError, match=message):
        engine.add(1, [1] * prompt, new)
    engine.add(2, [3], 2)
    assert [part.sequence.request for part in run_step(engine, kept)] == [0, 2]


def test_whole_prompts_are_never_cut() -> None:
    engine, kept = scheduler(tokens=8, whole_prompts=True), dict[int, dict[int, int]]()
    engine.add(0, [1] * 5, 9)
    engine.add(1, [1] * 6, 2)
    engine.add(2, [1] * 20, 2)
    shapes = [[(s.request, len(ids)) for s, _, ids in run_step(engine, kept)] for _ in range(3)]
    assert shapes == [[(0, 5)], [(0, 1), (1, 6)], [(0, 1), (1, 1), (2, 20)]]


def test_it_needs_no_torch() -> None:
    code = (
        "import sys, tp_residual.inference.scheduler, tp_residual.inference.request; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
