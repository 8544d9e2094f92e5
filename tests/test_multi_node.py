"""launch/single_node, multi_node and slurm.sbatch: their command lines; two agents on loopback, and two network namespaces as two hosts.

Where a run is real, an agent is a process tree of its own, as on a machine of its own, and all traffic stays on loopback or inside the
namespaces made here.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_generate import cli_model

from tp_residual.inference.generate import generate
from tp_residual.inference.loading import load_model
from tp_residual.inference.request import GenerationSettings
from tp_residual.parallel.group import TensorParallelGroup

LAUNCH = Path(__file__).resolve().parents[1] / "launch"
IDS, NEW_TOKENS = [5, 6, 7], 6

# ---- command lines: a stand-in for Python says how it was asked to start, and knows the route ----

STAND_IN = f"""\
#!/usr/bin/env bash
case $1 in
-m) echo "gloo=${{GLOO_SOCKET_IFNAME:-}} nccl=${{NCCL_SOCKET_IFNAME:-}} omp=$OMP_NUM_THREADS path=$PYTHONPATH: $*" ;;
*_route.py) [[ -n $ROUTE ]] && echo "$ROUTE" ;;
*) exec {sys.executable} "$@" ;;
esac
"""
PREFIX = f"omp=1 path={LAUNCH.parent}: -m torch.distributed.run"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    unset = ("PYTHONPATH", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "RANKS")
    return {name: value for name, value in os.environ.items() if name not in unset} | {
        "PYTHON": str(python),
        "ROUTE": "10.0.0.1 10.0.0.2 eth1",
    }


def start(script: str, *arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([LAUNCH / script, *arguments], env=env, capture_output=True, text=True, timeout=60)


def test_single_node_is_torchrun_on_one_machine(environment: dict[str, str]) -> None:
    run = start("single_node", "4", "generate", "--model", "a b", "--tp", "2", env=environment)
    assert run.stdout == (
        f"gloo= nccl= {PREFIX} --standalone --nproc-per-node 4 -m tp_residual generate --model a b --tp 2\n"
    )
    assert run.stderr == ""


JOIN = "--rdzv-backend c10d --rdzv-id tp_residual --rdzv-endpoint"


@pytest.mark.parametrize(
    ("route", "head", "expected"),
    [
        (
            "10.0.0.1 10.0.0.2 eth1",
            "node0",
            f"{JOIN} 10.0.0.1:29500 --rdzv-conf is_host=0 --local-addr 10.0.0.2",
        ),
        (
            "10.0.0.1 10.0.0.1 eth1",
            "node0:4000",
            f"{JOIN} 10.0.0.1:4000 --rdzv-conf is_host=1 --local-addr 10.0.0.1",
        ),
        ("127.0.0.1 127.0.0.1 lo", "localhost", f"{JOIN} 127.0.0.1:29500 --local-addr 127.0.0.1"),
    ],
)
def test_multi_node_knows_who_hosts_and_by_which_interface(
    environment: dict[str, str], route: str, head: str, expected: str
) -> None:
    run = start("multi_node", "3", head, "2", "generate", "--model", "m", env=environment | {"ROUTE": route})
    interface = route.split()[2]
    command = f"--nnodes 3 --nproc-per-node 2 {expected} -m tp_residual generate --model m"
    assert run.stdout == f"gloo={interface} nccl={interface} {PREFIX} {command}\n", run.stderr
    assert f"address {route.split()[1]} ({interface}), meeting 3 machines at" in run.stderr


def test_an_interface_that_is_named_stays_and_none_is_made_up(environment: dict[str, str]) -> None:
    line = ("multi_node", "2", "node0", "1", "env")
    given = start(*line, env=environment | {"NCCL_SOCKET_IFNAME": "ib0"})
    assert given.stdout.startswith("gloo=eth1 nccl=ib0 ")
    unknown = start(*line, env=environment | {"ROUTE": "10.0.0.1 10.0.0.9"})
    assert unknown.stdout.startswith("gloo= nccl= ") and "(no interface found)" in unknown.stderr


def test_the_route_is_this_machines(environment: dict[str, str]) -> None:
    route = subprocess.run(
        [sys.executable, LAUNCH / "_route.py", "localhost", "9"], capture_output=True, text=True, check=True
    )
    assert route.stdout == "127.0.0.1 127.0.0.1 lo\n"


SRUN = """\
#!/usr/bin/env bash
echo "srun $*"
"${@:2}"
"""


def test_slurm_starts_multi_node_on_each_machine(environment: dict[str, str], tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "srun").write_text(SRUN)
    (tools / "scontrol").write_text(
        '#!/usr/bin/env bash\n[[ $* == "show hostnames gpu[3-4]" ]] && printf "gpu3\\ngpu4\\n"\n'
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)
    job = {
        "PATH": f"{tools}:{environment['PATH']}",
        "SLURM_JOB_ID": "71234",
        "SLURM_JOB_NODELIST": "gpu[3-4]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_SUBMIT_DIR": str(LAUNCH.parent),
    }
    run = start("slurm.sbatch", "generate", "--model", "m", env=environment | job)
    assert run.returncode == 0, run.stderr
    asked, started = run.stdout.splitlines()
    assert asked == "srun --kill-on-bad-exit=1 launch/multi_node 2 gpu3:21234 4 generate --model m"
    assert "--nnodes 2 --nproc-per-node 4" in started and "--rdzv-endpoint 10.0.0.1:21234" in started
    refused = [
        (environment, "no SLURM job; start it with sbatch"),
        (environment | job | {"SLURM_SUBMIT_DIR": str(tmp_path)}, "has no launch/multi_node; submit from the checkout"),
        (environment | job | {"SLURM_GPUS_ON_NODE": ""}, "the job has no GPUs and RANKS is not set"),
    ]
    for env, message in refused:
        run = start("slurm.sbatch", "generate", env=env)
        assert run.returncode == 2 and message in run.stderr and run.stdout == ""
    assert "COMMAND is needed" in start("slurm.sbatch", env=environment | job).stderr


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        (("single_node", "generate"), 2, "RANKS and COMMAND are needed"),
        (("single_node", "0", "generate"), 2, "RANKS '0' is not a number above 0"),
        (("multi_node", "2", "node0", "8"), 2, "NODES, HEAD, RANKS and COMMAND are needed"),
        (("multi_node", "two", "node0", "8", "env"), 2, "NODES 'two' is not a number above 0"),
        (("multi_node", "2", "node0", "-1", "env"), 2, "RANKS '-1' is not a number above 0"),
        (("multi_node", "2", "127.0.0.1:99999", "8", "env"), 2, "port 99999 of HEAD is not between 1 and 65535"),
        (("multi_node", "2", "a:b:1", "8", "env"), 2, "HEAD 'a:b:1' is not a name or IPv4 address"),
        (("multi_node", "2", "node0", "8", "env"), 1, "finds no address of HEAD 'node0', or no way to it"),
    ],
)
def test_wrong_arguments_are_named(environment: dict[str, str], line: tuple[str, ...], code: int, message: str) -> None:
    run = start(*line, env=environment | {"ROUTE": ""})
    assert run.returncode == code and run.stdout == "" and message in run.stderr
    assert run.stderr.count("\n") == 1


def test_a_head_that_its_own_hosts_file_hides_is_refused(environment: dict[str, str]) -> None:
    run = start("multi_node", "2", "node0", "8", "env", env=environment | {"ROUTE": "127.0.1.1 127.0.0.1 lo"})
    assert run.returncode == 1 and "HEAD 'node0' is 127.0.1.1 on this machine (/etc/hosts)" in run.stderr


def test_an_interpreter_without_torch_is_named(environment: dict[str, str], tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.write_text(f'#!/usr/bin/env bash\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    for python in (bare, tmp_path / "nowhere"):
        run = start("single_node", "2", "env", env=environment | {"PYTHON": str(python)})
        assert run.returncode == 1 and f"{python} does not run or has no torch; launch/quickstart makes" in run.stderr


@pytest.mark.parametrize("script", ["single_node", "multi_node"])
def test_help_is_the_comment_at_the_top(environment: dict[str, str], script: str) -> None:
    run = start(script, "--help", env=environment)
    assert run.returncode == 0 and f"usage: launch/{script}" in run.stdout and "set -euo" not in run.stdout


# ---- two agents ----


@contextmanager
def agents(head: str, *command: str, hosts: tuple[tuple[str, ...], ...] = ((), ())) -> Iterator[list["Agent"]]:
    """One rank an agent. hosts: what runs each agent's command elsewhere. All are gone afterwards."""
    started: list[Agent] = []
    try:
        for number, host in enumerate(hosts):
            started.append(Agent([*host, str(LAUNCH / "multi_node"), str(len(hosts)), head, "1", *command], number))
        yield started
    finally:
        for agent in started:
            agent.kill()


class Agent:
    def __init__(self, command: list[str], number: int) -> None:
        self.number = number
        self.process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHON": sys.executable},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def kill(self) -> None:
        """Its ranks end with it."""
        self.process.kill()
        self.process.communicate(timeout=30)

    def result(self, seconds: float) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err

    def ranks(self) -> list[int]:
        """The processes whose parent it is."""
        running = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        return [pid for pid in running if stat(pid)[1] == str(self.process.pid)]


def stat(pid: int) -> list[str]:
    """(state, parent) of a process; X for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return ["X", ""]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def alone() -> list[int]:
    model, _ = load_model(cli_model(), TensorParallelGroup.single())
    return generate(model, [IDS], model.group, GenerationSettings(max_new_tokens=NEW_TOKENS))[0].token_ids


GREEDY = (
    "generate", "--model", "MODEL", "--prompt-ids", ",".join(map(str, IDS)), "--json", "--ignore-eos",
    "--max-new-tokens", str(NEW_TOKENS),
)  # fmt: skip


def greedy() -> list[str]:
    return [str(cli_model()) if word == "MODEL" else word for word in GREEDY]


def check_answers(results: list[tuple[int, str, str]]) -> None:
    assert [code for code, _, _ in results] == [0, 0], results
    printed = [out for _, out, _ in results if out]
    assert len(printed) == 1, "rank 0 prints, on one of the two"
    answer = json.loads(printed[0])
    assert answer["token_ids"] == alone() and answer["settings"]["tp"] == 2


def test_two_agents_on_loopback_answer_as_one_process() -> None:
    with agents(f"127.0.0.1:{free_port()}", *greedy()) as two:
        check_answers([agent.result(90) for agent in two])


def long_run(folder: Path, *options: str) -> tuple[list[str], Path]:
    """A request that takes minutes, and where its first answers appear."""
    source, out = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text('{"prompt_ids": [5, 6, 7]}\n' * 2000)
    return [
        "generate", "--model", str(cli_model()), "--prompt-file", str(source), "--output", str(out), "--batch-size", "1",
        "--max-new-tokens", "50", "--ignore-eos", *options,
    ], out  # fmt: skip


def wait_for_answers(out: Path, two: list[Agent], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not (out.exists() and b"\n" in out.read_bytes()):
        assert time.monotonic() < end and all(agent.process.poll() is None for agent in two)
        time.sleep(0.05)


def gone(pids: list[int], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while any(stat(pid)[0] not in "ZX" for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.slow
def test_a_killed_agent_ends_the_other_with_a_message(tmp_path: Path) -> None:
    command, out = long_run(tmp_path)
    with agents(f"127.0.0.1:{free_port()}", *command) as two:
        wait_for_answers(out, two)
        ranks = [pid for agent in two for pid in agent.ranks()]
        assert len(ranks) == 2
        killed, other = two
        killed.process.send_signal(signal.SIGKILL)
        began = time.monotonic()
        code, _, stderr = other.result(60)
        assert code != 0 and time.monotonic() - began < 30
        assert "rank 0 of 2" in stderr or "rank 1 of 2" in stderr, stderr
        assert gone(ranks, 10), "an orphan computes on"
    assert out.read_bytes().endswith(b"\n"), "whole answers are kept"


# ---- two hosts ----


@contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them: 10.77.0.1 and 10.77.0.2. Removed afterwards, the cable with them."""
    if shutil.which("ip") is None:
        pytest.skip("iproute2's ip is not here")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    names = f"tp_residual-a{os.getpid()}", f"tp_residual-b{os.getpid()}"
    made = []
    try:
        for name in names:
            probe = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
            if probe.returncode:
                pytest.skip(f"no network namespace can be made here: {probe.stderr.strip()}")
            made.append(name)
        ip(f"link add veth0 netns {names[0]} type veth peer name veth1 netns {names[1]}")
        for number, name in enumerate(names):
            ip(f"-n {name} addr add 10.77.0.{number + 1}/24 dev veth{number}")
            for interface in ("lo", f"veth{number}"):
                ip(f"-n {name} link set {interface} up")
        yield names
    finally:
        for name in made:
            ip(f"netns del {name}")


def ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True)


def in_namespaces(names: tuple[str, str]) -> tuple[tuple[str, ...], ...]:
    return tuple(("ip", "netns", "exec", name) for name in names)


@pytest.mark.slow
def test_two_hosts_answer_as_one_process() -> None:
    """The machine where they meet is the second: rank 0 is on the first by its address all the same."""
    with two_hosts() as names, agents("10.77.0.2:29500", *greedy(), hosts=in_namespaces(names)) as two:
        results = [agent.result(90) for agent in two]
    check_answers(results)
    assert results[0][1], "the lower address has rank 0"
    assert [f"address 10.77.0.{number + 1} (veth{number})" in results[number][2] for number in range(2)] == [True, True]


@pytest.mark.slow
def test_replicas_that_are_cut_off_from_each_other_end(tmp_path: Path) -> None:
    """Nothing is closed when a cable is cut: only silence tells. torchrun itself hangs then, on the side that did not host it."""
    command, out = long_run(tmp_path, "--tp", "1")
    with two_hosts() as names, agents("10.77.0.1:29500", *command, hosts=in_namespaces(names)) as two:
        wait_for_answers(out, two)
        ranks = [pid for agent in two for pid in agent.ranks()]
        assert len(ranks) == 2
        ip(f"-n {names[1]} link set veth1 down")
        code, _, stderr = two[0].result(60)
        assert code != 0 and "rank 1 (replica 1) has been silent for 10 s; delivered answers are kept" in stderr
        assert gone(ranks, 30)
        two[1].process.kill()
        stderr = two[1].result(30)[2]
        assert "rank 1 of 2 (replica 1): rank 0, which writes the answers, could not be reached for 10 s" in stderr
