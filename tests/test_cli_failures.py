"""What goes wrong around the command line: lost output, killed launchers and ranks, misspelt options. One line each, nobody left."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_generate import cli_model

from tp_residual.cli import main
from tp_residual.cli.arguments import parse
from tp_residual.cli.cores import threads_per_rank
from tp_residual.cli.launch import parse_timeouts
from tp_residual.errors import RequestError
from tp_residual.model.attention_backend import HeadGroups, attend_sequence
from tp_residual.parallel.splits import HeadSplit

GENERATE = (sys.executable, "-m", "tp_residual", "generate")


def request(*options: str) -> list[str]:
    return [*GENERATE, "--model", str(cli_model()), "--prompt-ids", "5,6,7", "--ignore-eos", *options]


# -- output


def test_a_full_disk_is_said_once_and_a_gone_reader_is_no_error() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            request("--max-new-tokens", "4"), stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.count("results were lost: stdout: No space left on device") == 1
    with subprocess.Popen(
        request("--max-new-tokens", "30"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()  # what `| head -c 0` does
        stderr = process.stderr.read()
    assert process.returncode == 0 and "Traceback" not in stderr and "BrokenPipe" not in stderr
    closed = subprocess.run(
        ["bash", "-c", 'exec "$@" >&-', "-", *request("--max-new-tokens", "2")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert closed.returncode == 0 and "Traceback" not in closed.stderr


# -- processes


def children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def long_run() -> tuple[subprocess.Popen[str], list[int]]:
    """Two ranks in the middle of a generation that would take minutes: the launcher, and its ranks by number."""
    script = Path(__file__).parent / "scripts" / "endless_ranks.py"
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script))
    process = subprocess.Popen(launcher, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    ready = [process.stdout.readline().split() for _ in range(2)]
    pids = {int(rank): int(pid) for rank, pid in ready}
    assert sorted(pids.values()) == sorted(children(process.pid)), (
        "only our own launcher's children are signalled below"
    )
    return process, [pids[0], pids[1]]


def gone_within(pids: list[int], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(running(pid) for pid in pids):
            return True
        time.sleep(0.1)
    return False


def test_ranks_end_with_a_killed_launcher() -> None:
    process, ranks = long_run()
    process.kill()
    try:
        assert gone_within(ranks, 10)
    finally:
        for pid in ranks:
            if running(pid):
                os.kill(pid, signal.SIGKILL)
    assert "ended by SIGTERM" in process.communicate(timeout=20)[1]


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_rank_is_named_by_the_others(victim: int) -> None:
    process, ranks = long_run()
    began = time.monotonic()
    os.kill(ranks[victim], signal.SIGKILL)
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode != 0 and time.monotonic() - began < 10
    other = 1 - victim
    where = r"#\d+ all_reduce tag='endless' shape=\[4\] dtype=float32"
    told_by_launcher = (
        rf"rank {other} of 2 ended by SIGTERM \(rank {victim} is gone\): (waiting in|last completed) {where}"
    )
    told_by_peer = rf"rank {other} of 2 .*waiting in {where}, gave up: .*rank {victim}: (its process has ended|gone)"
    assert re.search(f"{told_by_launcher}|{told_by_peer}", stderr), stderr
    assert gone_within(ranks, 5)


@pytest.mark.parametrize(
    ("phase", "where"),
    [
        pytest.param("import", "starting, no collective yet", marks=pytest.mark.slow),
        ("load", "waiting for every rank's 'loaded', after no collective yet|last completed #|no collective yet"),
        pytest.param(
            "prefill",
            r"#\d+ all_reduce tag='model.layers.1.(input|post_attention)_layernorm' shape=\[3, \d+\]",
            marks=pytest.mark.slow,
        ),
        ("decode", r"#\d+ all_reduce tag='model.layers.1.(input|post_attention)_layernorm' shape=\[1, \d+\]"),
    ],
)
def test_a_rank_that_dies_in_any_phase_ends_the_others_in_ten_seconds(phase: str, where: str) -> None:
    script = str(Path(__file__).parent / "scripts" / "dying_rank.py")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, phase)
    process = subprocess.Popen(
        [*torchrun, *request("--max-new-tokens", "30")[3:]], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode != 0
    said = [line for line in stderr.splitlines() if line.startswith("tp_residual: ") and "rank 0" in line]
    assert re.search(where, said[0]), stderr
    assert phase == "import" or re.search(
        r"rank 1 is gone|rank 1: its process has ended|process of rank 1 has ended", said[0]
    )
    assert "frame #" not in stderr, "torch's C++ stack beside our message"


def own_launcher(*options: str) -> tuple[subprocess.Popen[str], list[int]]:
    """Two ranks under our own launcher, in a session of its own, once both are there."""
    process = subprocess.Popen(
        request("--tp", "2", *options),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    end = time.monotonic() + 20
    while len(children(process.pid)) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    return process, sorted(children(process.pid))


@pytest.mark.parametrize("to", ["terminal", pytest.param("launcher", marks=pytest.mark.slow)])
@pytest.mark.parametrize("after", ["start", "first token"])
def test_ctrl_c_ends_everything_in_three_seconds(to: str, after: str) -> None:
    process, ranks = own_launcher("--max-new-tokens", "60")
    assert process.stdout is not None
    first = process.stdout.read(1) if after == "first token" else ""
    began = time.monotonic()
    if to == "terminal":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=30)[1]
    assert time.monotonic() - began < 3
    assert process.returncode == 130 and "Traceback" not in err, err
    assert "frame #" not in err and "KeyboardInterrupt" not in err, err
    if after == "first token":
        assert first and err.count("interrupted; what is finished is kept") == 1, err
    assert len(ranks) == 2 and gone_within(ranks, 1)


@pytest.mark.slow
def test_ctrl_c_keeps_finished_answers_and_resume_completes_them(tmp_path: Path) -> None:
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": [3 + i, 7]}) + "\n" for i in range(12)))
    command = [
        *GENERATE, "--model", str(cli_model()), "--tp", "2", "--prompt-file", str(prompts), "--output", str(answers),
        "--resume", "--ignore-eos", "--max-new-tokens", "30", "--batch-size", "1",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 40
    while not (answers.exists() and answers.read_text().count("\n") >= 2) and time.monotonic() < end:
        time.sleep(0.02)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=30)[1]
    assert time.monotonic() - began < 3 and process.returncode == 130, err
    kept = answers.read_text().splitlines()
    assert 2 <= len(kept) < 12 and "Traceback" not in err, err
    again = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert again.returncode == 0, again.stderr
    lines = answers.read_text().splitlines()
    assert lines[: len(kept)] == kept
    assert sorted(json.loads(line)["index"] for line in lines) == list(range(12))


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_our_launcher_names_a_killed_rank_and_ends_the_others(victim: int) -> None:
    process, ranks = own_launcher("--max-new-tokens", "60")
    assert process.stdout is not None
    process.stdout.read(1)
    os.kill(ranks[victim], signal.SIGKILL)  # started in order
    began = time.monotonic()
    err = process.communicate(timeout=30)[1]
    assert process.returncode == 137 and time.monotonic() - began < 10
    assert f"tp_residual: error: rank {victim} of 2 was ended by SIGKILL" in err
    assert re.search(rf"rank {1 - victim} of 2.*(waiting in|last completed) #\d+ all_", err), err
    assert "frame #" not in err and gone_within(ranks, 1)


def test_our_launcher_killed_or_terminated_leaves_no_rank() -> None:
    for signal_, code in ((signal.SIGKILL, -9), (signal.SIGTERM, 128 + 15)):
        process, ranks = own_launcher("--max-new-tokens", "60")
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal_)
        process.communicate(timeout=30)
        assert process.returncode == code
        assert len(ranks) == 2 and gone_within(ranks, 5)


def test_no_rank_outlives_a_launcher_whose_output_nobody_reads() -> None:
    """A rank that cannot say where it was must end all the same."""
    process, ranks = own_launcher("--max-new-tokens", "60")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stderr.close()
    process.stdout.close()
    process.kill()
    process.wait()
    assert len(ranks) == 2 and gone_within(ranks, 5)


# -- arguments


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            ["generate", "--model", "m", "--max-new-token", "5"],
            "unrecognized arguments: --max-new-token 5; did you mean --max-new-tokens?",
        ),
        (
            ["generate", "--model", "m", "--tp", "x"],
            "argument --tp: invalid int value: 'x'; see tp_residual generate --help",
        ),
        (["generate", "--model", "m", "--dtype", "fp8"], "argument --dtype: invalid choice: 'fp8'"),
        (["generate"], "the following arguments are required: --model"),
        (["audit", "--model", "m", "--tp", "2", "--sequence-paralel", "on"], "did you mean --sequence-parallel?"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_a_misspelt_command_is_one_line(line: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse(line)
    out, err = capsys.readouterr()
    assert left.value.code == 2 and out == "" and err.count("\n") == 1 and message in err


@pytest.mark.parametrize("text", ["nan", "inf", "1e300", "1e-9", "0", "-1", "load=0", "step=-1"])
def test_a_limit_that_no_clock_keeps_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"is not between 0.1 and 1e\+06 seconds; defaults: start=300"):
        parse_timeouts([text])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("soon", "is not S or PHASE=S"),
        ("load=", "is not S or PHASE=S"),
        ("prefill=3", "phase 'prefill' is not one of start, load, step"),
        ("=3", "phase '' is not one of"),
    ],
)
def test_a_misspelt_limit_is_refused(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse_timeouts([text])


def test_the_last_limit_of_a_phase_counts() -> None:
    assert parse_timeouts([]).by_phase == {"start": 300, "load": 1800, "step": 300}
    assert parse_timeouts(["load=9", "7", "step=5", "step=6"]).by_phase == {"start": 7, "load": 7, "step": 6}
    assert parse_timeouts(["7"]).longest_s == 7 and parse_timeouts(["step=1e5"]).longest_s == 1e5


def test_more_threads_than_cores_are_refused() -> None:
    usable = len(os.sched_getaffinity(0))
    for threads in (0, -1, usable + 1, 100000):
        with pytest.raises(RequestError, match=f"--threads {threads} is not between 1 and the {usable} usable cores"):
            threads_per_rank(threads)
    assert threads_per_rank(usable) == usable and threads_per_rank(None) >= 1


def test_token_ids_without_a_tokenizer_are_shown_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in cli_model().iterdir():
        if not file.name.startswith("tokenizer"):
            (tmp_path / file.name).symlink_to(file)
    line = ["generate", "--model", str(tmp_path), "--prompt-ids", "5,6", "--max-new-tokens", "2"]
    assert main(line) == 2
    out, err = capsys.readouterr()
    assert out == "" and "has no tokenizer.json, which text needs; add --json for token ids alone" in err


# -- NaN


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_attention_does_not_swallow_nan(where: str, queries: int) -> None:
    """torch's CPU kernel answers a query of NaN with zeros, and a broken weight with ordinary text."""
    groups = HeadGroups(HeadSplit.of(5, 1, 1), 0, torch.device("cpu"))
    tensors = {"q": torch.randn(queries, 5, 8), "k": torch.randn(1, 3, 8), "v": torch.randn(1, 3, 8)}
    finite = attend_sequence(**tensors, groups=groups, window=None)
    assert finite.isfinite().all()
    tensors[where].fill_(torch.nan)
    assert attend_sequence(**tensors, groups=groups, window=None).isnan().all()
