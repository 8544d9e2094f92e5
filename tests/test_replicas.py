"""Replicas: several models that share one file. Same texts and the same file as one model alone; each line once; ends that are said.

Functions named check_* run on every rank.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_generate import cli_model, command

from tp_residual.cli import main
from tp_residual.cli.arguments import parse
from tp_residual.cli.launch import resolve_tp
from tp_residual.cli.session import check_session
from tp_residual.errors import CollectiveError, RequestError
from tp_residual.inference import replicas
from tp_residual.inference.batch_file import AnswerFile
from tp_residual.inference.replicas import SharedWork
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.testing import RanksFailed, run_ranks

# ---- who takes what ----


def replica_of(world: TensorParallelGroup, tp_size: int) -> TensorParallelGroup:
    if tp_size == 1:
        return TensorParallelGroup.single()
    first = world.rank // tp_size * tp_size
    return TensorParallelGroup.from_ranks(range(first, first + tp_size))


def check_sharing(
    world: TensorParallelGroup, tp_size: int, total: int, most: int
) -> tuple[list[list[int]], list[list[int]]]:
    """(what this rank took, what `write` got here). The first replica is slow."""
    group = replica_of(world, tp_size)
    written: list[list[int]] = []
    inside: list[int] = []

    def write(answer: list[int]) -> None:
        inside.append(answer[0])
        time.sleep(0.08)
        assert inside == [answer[0]], "two answers are written at the same time"
        inside.clear()
        written.append(list(answer))
        world.store.set(f"written/{answer[0]}", "")

    taken = []
    with SharedWork(world, group, write) as work:
        world.share("ready", "")
        while places := work.take(total, most):
            taken.append(list(places))
            time.sleep(1.0 if work.replica == 0 else 0.05)
            if group.rank == 0:
                for place in places:
                    work.deliver((place, work.replica))
            work.check()
        assert not work.take(total, most)
        work.finish()
    assert all(world.store.check([f"written/{place}"]) for place in range(total)), "left before all was written"
    world.share("over", "")  # a replica's rank 0 keeps its side channel, in which another may still read
    return taken, written


@pytest.mark.parametrize(("ranks", "tp_size"), [pytest.param(3, 1, marks=pytest.mark.slow), (4, 2)])
def test_every_place_is_worked_on_once_by_whoever_is_free(ranks: int, tp_size: int) -> None:
    results = run_ranks(ranks, check_sharing, tp_size, 23, 2)
    taken = [places for places, _ in results]
    by_replica = taken[::tp_size]
    assert all(taken[rank] == by_replica[rank // tp_size] for rank in range(ranks)), "ranks of a replica disagree"
    assert sorted(place for pieces in by_replica for piece in pieces for place in piece) == list(range(23))
    assert all(pieces == sorted(pieces) and len(piece) <= 2 for pieces in by_replica for piece in pieces)
    assert len(by_replica[0]) < min(map(len, by_replica[1:])), "the slow one has as much work as the others"
    answers = [[place, replica] for replica, pieces in enumerate(by_replica) for piece in pieces for place in piece]
    assert sorted(results[0][1]) == sorted(answers) and not any(written for _, written in results[1:])


@pytest.mark.parametrize(("total", "largest"), [(0, 0), (1, 1), (5, 2), (40, 8)])
def test_a_short_list_is_not_left_to_one_replica(total: int, largest: int) -> None:
    results = run_ranks(2, check_sharing, 1, total, 8)
    sizes = [len(piece) for pieces, _ in results for piece in pieces]
    assert sum(sizes) == len(results[0][1]) == total and max(sizes, default=0) == largest


def test_one_replica_takes_in_order_what_it_has_room_for() -> None:
    group = TensorParallelGroup.single()
    with SharedWork(group, group, print) as work:
        taken = [list(work.take(7, most)) for most in (3, 1, 5, 5)]
        work.finish()
    assert taken == [[0, 1, 2], [3], [4, 5, 6], []]


# ---- what goes wrong ----


def work_for_ever(work: SharedWork) -> None:
    while work.take(1000, 1):
        for _ in range(10):
            time.sleep(0.02)
            work.check()


def check_failing_write(world: TensorParallelGroup, deliverer: int) -> None:
    def write(answer: str) -> None:
        raise RequestError(f"no room for {answer}")

    with SharedWork(world, replica_of(world, 1), write) as work:
        if world.rank == 1:
            world.store.set("in", "")
        world.store.wait(["in"])  # before rank 0 leaves
        if world.rank == deliverer:
            work.deliver("this")
        work_for_ever(work)


@pytest.mark.parametrize("deliverer", [0, 1])
def test_an_answer_that_cannot_be_written_ends_everybody(deliverer: int) -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(2, check_failing_write, deliverer)
    errors = failure.value.exceptions
    assert isinstance(errors[0], RequestError) and str(errors[0]) == "no room for this"
    gone = r"rank 1 of 2 \(replica 1\): (rank 0, which writes the answers, is gone|the process of rank 0 has ended)"
    assert isinstance(errors[1], CollectiveError) and re.match(gone, str(errors[1]))


def check_dead(world: TensorParallelGroup, victim: int) -> None:
    with SharedWork(world, replica_of(world, 1), print) as work:
        if world.rank == victim:
            time.sleep(0.5)
            os._exit(9)
        work_for_ever(work)


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_dead_rank_is_named_by_the_other_replicas(victim: int) -> None:
    began = time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        run_ranks(3, check_dead, victim)
    assert time.monotonic() - began < 15 and failure.value.exit_codes[victim] == 9
    others = {0, 1, 2} - {victim}
    assert others == set(failure.value.exceptions)
    for rank in others:
        error = failure.value.exceptions[rank]
        where = rf"rank {rank} of 3 \(replica {rank}\): "
        ended = (
            rf"(.*the process of rank {victim} has ended|rank {victim}, which writes the answers, is gone).*are kept"
        )
        assert isinstance(error, CollectiveError) and re.match(where + ended, str(error)), error


def check_silent(world: TensorParallelGroup) -> str:
    """As on two machines of which one is cut off: nothing closes, no process is known to have ended."""
    replicas._SILENCE_S = 1.5
    if world.rank == 1:
        SharedWork._beat = lambda self: None  # type: ignore[method-assign]
    with pytest.raises(CollectiveError) as failure, SharedWork(world, replica_of(world, 1), print) as work:
        work_for_ever(work)
    world.share("over", "")
    return str(failure.value)


def test_a_silent_rank_is_given_up_and_gives_up() -> None:
    first, second = run_ranks(2, check_silent)
    assert first == (
        "rank 0 of 2 (replica 0): rank 1 (replica 1) has been silent for 1.5 s; delivered answers are kept"
    )
    assert second == (
        "rank 1 of 2 (replica 1): rank 0, which writes the answers, could not be reached for 1.5 s; delivered answers are kept"
    )


# ---- the file ----


def test_a_finished_file_is_in_the_order_of_the_prompts(tmp_path: Path) -> None:
    path, link = tmp_path / "out", tmp_path / "link"
    link.symlink_to(path)
    answers = AnswerFile(link, "run1")
    path.chmod(0o640)
    places = [(10, 0), (2, 1), (0, 0), (2, 0)]
    for index, sample in places:
        answers.write(index, sample, {"text": "über\u2028" * index})
    assert [(entry["index"], entry["sample"]) for entry in map(json.loads, path.read_text().split("\n")[:-1])] == places
    assert answers.finish() is None
    ordered = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    assert [(entry["index"], entry["sample"]) for entry in ordered] == sorted(places)
    assert [entry["text"] for entry in ordered] == ["über\u2028" * index for index, _ in sorted(places)]
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o640 and len(list(tmp_path.iterdir())) == 2
    AnswerFile(path, "run1", resume=True).close()


def test_a_file_that_cannot_be_put_in_order_is_kept_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "out"
    answers = AnswerFile(path, "run1")
    answers.write(1, 0, {})
    answers.write(0, 0, {})
    before = path.read_bytes()
    (tmp_path / ".out.in_order").mkdir()  # where the second file would be
    assert answers.finish() == f"--output {path} keeps the order in which answers were finished: Is a directory"
    assert path.read_bytes() == before
    AnswerFile(path, "run1", resume=True).close()


def test_a_file_that_another_run_puts_in_order_meanwhile_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out"
    first = AnswerFile(path, "run1")
    first.write(1, 0, {})
    first.write(0, 0, {})
    plain_open = os.open

    def open_and_wait(*arguments: Any) -> int:
        opened = plain_open(*arguments)
        monkeypatch.setattr(os, "open", plain_open)
        first.finish()
        return opened

    monkeypatch.setattr(os, "open", open_and_wait)
    with pytest.raises(RequestError, match="is being written by another run"):
        AnswerFile(path, "run1", resume=True)


# ---- sizes ----


def launched(monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world_size))


def test_sizes_follow_from_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert [resolve_tp(*given) for given in [(None,), (2,), (2, 3), (None, 3)]] == [(1, 1), (2, 1), (2, 3), (1, 3)]
    launched(monkeypatch, 12)
    given = [(None, None), (12, None), (3, None), (None, 3), (3, 4), (1, 12)]
    assert [resolve_tp(*each) for each in given] == [(12, 1), (12, 1), (3, 4), (4, 3), (3, 4), (1, 12)]


@pytest.mark.parametrize(
    ("tp_size", "count", "message"),
    [
        (5, None, "world size 12 is no multiple of --tp 5; use 1, 2, 3, 4, 6, 12"),
        (24, None, "world size 12 is no multiple of --tp 24; use 1, 2, 3, 4, 6, 12"),
        (None, 7, "world size 12 is no multiple of --replicas 7; use 1, 2, 3, 4, 6, 12"),
        (3, 2, "--tp 3 and --replicas 2 are 6 ranks, and the launcher's world size is 12; use --replicas 4"),
        (0, None, "--tp 0 must be at least 1"),
        (2, -1, "--replicas -1 must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    monkeypatch: pytest.MonkeyPatch, tp_size: int | None, count: int | None, message: str
) -> None:
    launched(monkeypatch, 12)
    with pytest.raises(RequestError, match=re.escape(message)):
        resolve_tp(tp_size, count)


def test_a_command_about_one_model_refuses_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, 4)
    verify = parse(["verify", "--model", str(cli_model()), "--tp", "2"])
    with pytest.raises(
        RequestError, match="makes 2 replicas of the launcher's 4 ranks, and verify is about one; start 2"
    ):
        check_session(verify)
    assert check_session(parse(["verify", "--model", str(cli_model()), "--tp", "4"]))[1] == 4


def test_prompts_on_the_command_line_are_one_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", str(cli_model()), "--prompt", "a", "--tp", "2", "--replicas", "2"]) == 2
    said = capsys.readouterr().err
    assert "2 replicas share a file of prompts, and --prompt is one batch; put the prompts into a --prompt-file" in said


# ---- the commands ----

COUNT, SAMPLES = 9, 2
SAMPLED = (
    "--temperature", "0.9", "--top-k", "50", "--seed", "3", "--samples", str(SAMPLES), "--max-new-tokens", "6",
    "--threads", "1", "--max-num-seqs", "4",
)  # fmt: skip


@pytest.mark.slow
def test_texts_and_their_file_do_not_depend_on_the_replicas(tmp_path: Path) -> None:
    """tp 1 alone, three replicas of tp 1, and two of tp 2 that go on with a file cut in half: the same bytes."""
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"prompt_ids": [5 + i, 40, *range(i)]}) + "\n" for i in range(1, COUNT + 1)))
    line = ("generate", "--model", str(cli_model()), "--prompt-file", str(source), *SAMPLED)
    alone, three, two = tmp_path / "alone", tmp_path / "three", tmp_path / "two"
    assert main([*line, "--output", str(alone)]) == 0
    expected = alone.read_bytes()
    entries = [json.loads(text) for text in expected.splitlines()]
    assert [(e["index"], e["sample"]) for e in entries] == [(i, s) for i in range(COUNT) for s in range(SAMPLES)]
    assert len({tuple(e["token_ids"]) for e in entries}) > COUNT, "texts that are alike prove little"

    run = command(*line, "--output", str(three), "--tp", "1", "--replicas", "3")
    assert run.returncode == 0 and run.stdout == "", run.stderr
    assert three.read_bytes() == expected
    assert "tp=1" in run.stderr and "replicas=3" in run.stderr and run.stderr.count("settings: ") == 1
    prefilled = [int(number) for number in re.findall(r"^replica \d \(rank \d\): (\d+) tokens", run.stderr, re.M)]
    assert sum(prefilled) == sum(2 + i for i in range(1, COUNT + 1)) and len(prefilled) == 3, "samples share a prompt"

    two.write_bytes(expected[: len(expected) // 2])
    run = command(*line, "--output", str(two), "--resume", "--tp", "2", "--replicas", "2")
    assert run.returncode == 0 and "replica 1 (ranks 2 to 3): " in run.stderr, run.stderr
    assert two.read_bytes() == expected


def rank_of(pid: int) -> int:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return int(next(text for text in variables if text.startswith(b"RANK=")).removeprefix(b"RANK="))


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_a_killed_replica_ends_the_run_and_a_resumed_one_answers_the_rest(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt_ids": [5, 6, 7]}\n' * 60)
    line = [
        "generate", "--model", str(cli_model()), "--prompt-file", str(source), "--output", str(out), "--ignore-eos",
        "--max-new-tokens", "40", "--max-num-seqs", "1", "--replicas", "2",
    ]  # fmt: skip
    process = subprocess.Popen([sys.executable, "-m", "tp_residual", *line], stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 60
        while not (out.exists() and out.read_bytes().count(b"\n") >= 3):
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.01)
        victim = next(pid for pid in children(process.pid) if rank_of(pid) == 1)
        os.kill(victim, signal.SIGKILL)
        began = time.monotonic()
        stderr = process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.wait()
    assert process.returncode != 0 and time.monotonic() - began < 20
    assert re.search(r"rank 0 of 2.*(process of rank 1 has ended|rank 1 is gone)", stderr), stderr
    kept = out.read_bytes()
    answered = {json.loads(text)["index"] for text in kept.splitlines()}
    assert kept.endswith(b"\n") and 3 <= len(answered) < 60
    source_line = [*line, "--resume"]
    run = command(*source_line)
    assert run.returncode == 0, run.stderr
    answers = [json.loads(text) for text in out.read_bytes().splitlines()]
    assert [answer["index"] for answer in answers] == list(range(60))
    assert len({tuple(answer["token_ids"]) for answer in answers}) == 1, "sixty times the same prompt, greedily"


@pytest.mark.slow
def test_scores_and_perplexity_do_not_depend_on_the_replicas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, text = tmp_path / "in.jsonl", tmp_path / "text"
    pairs = [{"prompt_ids": [5, 6 + i], "completion_ids": [7, 8, *range(i)]} for i in range(7)]
    source.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    text.write_text("a stream of sums, über alles; the sum of the partial sums is the stream " * 3)
    base = ("score", "--model", str(cli_model()), "--threads", "1", "--max-num-seqs", "1", "--max-batched-tokens", "7")
    alone, two = tmp_path / "alone", tmp_path / "two"
    assert main([*base, "--file", str(source), "--output", str(alone)]) == 0
    run = command(*base, "--file", str(source), "--output", str(two), "--replicas", "2")
    assert run.returncode == 0, run.stderr
    assert two.read_bytes() == alone.read_bytes() and len(alone.read_bytes().splitlines()) == 7
    capsys.readouterr()
    assert main([*base, "--perplexity", str(text), "--window", "20"]) == 0
    run = command(*base, "--perplexity", str(text), "--window", "20", "--replicas", "3")
    assert run.returncode == 0 and run.stdout == capsys.readouterr().out, run.stderr


def test_ranks_that_find_other_prompts_are_refused(tmp_path: Path) -> None:
    """As two machines whose files differ: one command, two working directories."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        (folder / "in.jsonl").write_text(json.dumps({"prompt_ids": [5, 6 + number]}) + "\n")
    command = (
        sys.executable,
        "-m",
        "tp_residual",
        "generate",
        "--model",
        str(cli_model()),
        "--prompt-file",
        "in.jsonl",
        "--tp",
        "1",
        "--max-new-tokens",
        "4",
    )
    with_port = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    ranks = [
        subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | with_port | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, folder in enumerate(folders)
    ]
    try:
        said = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [2, 2]
    for out, err in said:
        assert out == "" and "ranks differ in the command: the digest of their files is" in err, err


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
