"""The testing kit itself: what it says when ranks raise, die or hang, and that the twin check sees the faults it is
for.
"""

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tp_residual.parallel.blocks import replicated_block
from tp_residual.parallel.collectives import invariant_to_column_input, partial_to_invariant
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.linear import ColumnParallelLinear, RowParallelLinear
from tp_residual.parallel.partial import Partial
from tp_residual.parallel.splits import Split
from tp_residual.testing import (
    RanksFailed,
    assert_equals_twin,
    expect_collectives,
    hostile_layouts,
    hostile_values,
    hostile_weights_,
    nan_filled_memory,
    nan_padded,
    relative_error,
    run_ranks,
    runner,
    set_preload,
)


def sum_over_ranks(group: TensorParallelGroup, x: Tensor, tag: str = "test") -> Tensor:
    return group.run("all_reduce", tag, x, lambda transport, t: transport.all_reduce(t)) if group.size > 1 else x


# -- run_ranks


def describe_self(group, x, offset=0):
    return group.rank, group.size, torch.get_num_threads(), x * (group.rank + 1) + offset


@pytest.mark.parametrize("world_size", [1, 3])
def test_results_come_back_in_rank_order(world_size):
    x = torch.arange(5.0)
    results = run_ranks(world_size, describe_self, x, offset=2)
    assert [result[:3] for result in results] == [(rank, world_size, 1) for rank in range(world_size)]
    for rank, result in enumerate(results):
        assert torch.equal(result[3], x * (rank + 1) + 2)


def test_four_ranks_start_in_a_blink(ranks):
    ranks(4, describe_self, torch.ones(1))  # the server is up now
    times = []
    for _ in range(3):
        start = time.monotonic()
        ranks(4, describe_self, torch.ones(1))
        times.append(time.monotonic() - start)
    assert min(times) < 1.5, times  # 0.2 s on a quiet machine; importing torch in each rank would take 4


def raise_on_one(group, bad):
    if group.rank == bad:
        raise KeyError("a rank of its own mind")
    sum_over_ranks(group, torch.ones(3), tag="the others")


@pytest.mark.parametrize("bad", [0, 2])
def test_an_exception_of_one_rank_is_the_first_thing_said(bad):
    start = time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        run_ranks(3, raise_on_one, bad, timeout_s=60)
    assert time.monotonic() - start < 12
    assert isinstance(failure.value.exceptions[bad], KeyError)
    assert "in raise_on_one" in failure.value.tracebacks[bad]
    assert f"rank {bad} raised KeyError: 'a rank of its own mind'" in str(failure.value).splitlines()[1]
    others = [failure.value.records[rank] for rank in range(3) if rank != bad]
    assert all("tag='the others'" in record for record in others), others


def raise_everywhere(group):
    raise ValueError(f"rank {group.rank} objects")


def test_every_rank_is_quoted():
    with pytest.raises(RanksFailed, match="3 of 3 ranks failed") as failure:
        run_ranks(3, raise_everywhere)
    for rank in range(3):
        assert f"rank {rank} objects" in str(failure.value)
        assert isinstance(failure.value.exceptions[rank], ValueError)


def hang_on_one(group, where):
    sum_over_ranks(group, torch.ones(2), tag="before")
    if group.rank == 1 and where == "sleep":
        time.sleep(1000)
    if group.rank == 1 and where == "returned":
        return
    sum_over_ranks(group, torch.ones(4, 3), tag="after")


@pytest.mark.parametrize("where", ["sleep", "returned"])
def test_a_hang_is_killed_with_stacks_and_records(where):
    start = time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        run_ranks(2, hang_on_one, where, timeout_s=1.5, collective_timeout_s=100, checked=False)
    assert time.monotonic() - start < 6
    error = failure.value
    assert "waiting in #2 all_reduce tag='after' shape=[4, 3] dtype=float32" in error.records[0]
    assert "in hang_on_one" in error.stacks[0] and "transport.py" in error.stacks[0]
    assert "rank 0 still running after 1.5 s; waiting in #2" in str(error)
    if where == "sleep":
        assert "last completed #1 all_reduce tag='before' shape=[2]" in error.records[1]
        assert "in hang_on_one" in error.stacks[1]
    assert not any("answer_caller" in stack or "rank.py" in stack for stack in error.stacks.values())


def die_on_one(group, how):
    if group.rank == 1:
        if how == "exit":
            os._exit(7)
        if how == "segfault":
            import ctypes

            ctypes.string_at(0)
        os.kill(os.getpid(), 9)
    time.sleep(1000)


@pytest.mark.parametrize(
    ("how", "words", "code"),
    [
        ("exit", "exit code 7", 7),
        ("segfault", "killed by SIGSEGV", -11),
        ("kill", "killed by SIGKILL (out of memory?)", -9),
    ],
)
def test_a_dead_rank_is_named_and_the_others_are_not_waited_for(monkeypatch, how, words, code):
    monkeypatch.setattr(runner, "_GRACE_S", 0.5)
    start = time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        run_ranks(2, die_on_one, how, timeout_s=60)
    assert time.monotonic() - start < 5
    assert failure.value.exit_codes == {1: code}
    assert f"rank 1 died before it returned: {words}" in str(failure.value).splitlines()[1]
    assert "rank 0 killed, still running" in str(failure.value)
    if how == "segfault":
        assert "in die_on_one" in failure.value.stacks[1]


def die_after_returning(group):
    if group.rank == 0:
        from multiprocessing import util

        util.Finalize(None, os._exit, args=(3,), exitpriority=1)


def test_a_rank_must_exit_with_zero():
    with pytest.raises(RanksFailed, match="rank 0 died after it had returned: exit code 3"):
        run_ranks(2, die_after_returning)


def warn(group):
    warnings.warn("something is odd", stacklevel=1)
    return "went on"


def test_warnings_are_errors_unless_asked_otherwise():
    with pytest.raises(RanksFailed, match="something is odd"):
        run_ranks(1, warn)
    assert run_ranks(1, warn, warning_filter="ignore") == ["went on"]


def return_a_lambda(group):
    return lambda: None


def test_what_cannot_be_pickled_is_said():
    with pytest.raises(TypeError, match=r"function .*<lambda>.* cannot be sent .* module level"):
        run_ranks(2, lambda group: None)
    with pytest.raises(TypeError, match=r"argument 1 .* cannot be sent"):
        run_ranks(2, describe_self, 1, lambda: None)
    with pytest.raises(RanksFailed, match="rank 0 returned a function that cannot be sent back"):
        run_ranks(1, return_a_lambda)
    with pytest.raises(ValueError, match="world_size=0"):
        run_ranks(0, describe_self)


def environment(group):
    return os.environ.get("TP_RESIDUAL_TEST_VARIABLE"), os.environ.get("MASTER_PORT"), os.environ.get("PYTHONPATH")


def test_ranks_see_the_callers_environment_but_not_its_launch(monkeypatch):
    monkeypatch.setenv("TP_RESIDUAL_TEST_VARIABLE", "now")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert run_ranks(1, environment) == [("now", None, None)]


def own_pid(group):
    return os.getpid()


def test_nothing_is_left_behind():
    before = set(os.listdir("/dev/shm"))
    pids = run_ranks(3, own_pid)
    with pytest.raises(RanksFailed):
        run_ranks(2, hang_on_one, "sleep", timeout_s=1, collective_timeout_s=100)
    assert set(os.listdir("/dev/shm")) == before
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


SLEEPER = """
import os, pathlib, time
from tp_residual.testing import run_ranks

def sleep(group, folder):
    pathlib.Path(folder, str(os.getpid())).touch()
    time.sleep(1000)

if __name__ == "__main__":
    run_ranks(2, sleep, "pids")
"""


def test_ranks_end_with_a_killed_caller(tmp_path):
    (tmp_path / "sleeper.py").write_text(SLEEPER)  # and functions of a script are importable in ranks
    (tmp_path / "pids").mkdir()
    (tmp_path / "tmp").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "TMPDIR": str(tmp_path / "tmp")}
    caller = subprocess.Popen([sys.executable, "sleeper.py"], cwd=tmp_path, env=environment)
    try:
        wait_until(lambda: len(os.listdir(tmp_path / "pids")) == 2, 60)
    finally:
        caller.kill()
        caller.wait()
    pids = os.listdir(tmp_path / "pids")
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 5)
    assert not [name for name in os.listdir(tmp_path / "tmp") if name.startswith("tp_residual")]


def wait_until(condition, limit_s):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"not within {limit_s} s"
        time.sleep(0.05)


def test_preload_is_set_before_the_first_ranks():
    run_ranks(1, own_pid)
    with pytest.raises(RuntimeError, match="no effect"):
        set_preload(["json"])
    set_preload(["shape_checks", "pytest", "torch._dynamo"])  # what it is already


def test_the_plugin_does_not_load_torch():
    code = "import sys, tp_residual.testing.plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, timeout=60).returncode == 0


@pytest.mark.ranks_timeout(0.5)
def test_the_fixture_takes_its_limit_from_the_marker(ranks):
    with pytest.raises(RanksFailed, match=r"rank 1 still running after 0.5 s"):
        ranks(2, hang_on_one, "sleep", collective_timeout_s=100)


# -- expect_collectives


def count_collectives(group):
    with expect_collectives(group, all_reduce=2):
        sum_over_ranks(group, torch.ones(1))
        sum_over_ranks(group, torch.ones(1))
    with expect_collectives(group):
        pass
    messages = []
    for expected, calls in (
        ({"all_reduce": 1}, 2),
        ({"all_reduce": 2}, 1),
        ({"all_reduce": 1, "all_gather": 1}, 1),
        ({}, 1),
    ):
        try:
            with expect_collectives(group, **expected):
                for _ in range(calls):
                    sum_over_ranks(group, torch.ones(1), tag="seen")
        except AssertionError as error:
            messages.append(str(error))
    return messages


def test_expected_collectives_are_exact():
    for messages in run_ranks(2, count_collectives):
        assert len(messages) == 4
        assert "all_reduce: 2 instead of 1" in messages[0] and "'seen' all_reduce x2" in messages[0]
        assert "all_gather: 0 instead of 1" in messages[2]


# -- hostile data


def test_hostile_values_differ_and_repeat():
    draws = [hostile_values(4, 6, seed=seed, rank=rank) for seed in range(3) for rank in range(4)]
    everything = torch.stack(draws).flatten()
    assert everything.unique().numel() == everything.numel()
    assert torch.equal(draws[5], hostile_values(4, 6, seed=1, rank=1))
    assert hostile_values(3, seed=0, dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(5,), (4, 6), (2, 3, 4), (0, 3)])
def test_hostile_layouts_have_the_same_values_in_other_memory(shape):
    x = hostile_values(*shape, seed=0)
    layouts = hostile_layouts(x)
    assert set(layouts) == {"transposed", "sliced", "strided", "expanded", "scalar"}
    for name, tensor in layouts.items():
        assert tensor.shape == x.shape
        if name in ("transposed", "sliced", "strided"):
            assert torch.equal(tensor, x), name
    if x.numel():
        assert layouts["expanded"].stride(0) == 0 and set(layouts["scalar"].stride()) == {0}
        assert len(shape) == 1 or not layouts["transposed"].is_contiguous()
        whole = layouts["sliced"].as_strided((layouts["sliced"].untyped_storage().nbytes() // 8,), (1,), 0)
        assert whole.isnan().any()


def test_nan_memory():
    padded = nan_padded(hostile_values(3, 2, seed=0))
    assert padded.as_strided((6, 2), (2, 1), 0)[3:].isnan().all() and not padded.isnan().any()
    with nan_filled_memory():
        assert torch.empty(100).isnan().all() and torch.ones(1).new_empty(100).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_relative_error_is_per_token():
    reference = torch.tensor([[1000.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    value = reference.clone()
    assert relative_error(value, reference) == 0
    value[1, 1] = 1.5
    assert relative_error(value, reference) == pytest.approx(0.5)  # a norm over all would say 0.0005
    value[2, 0] = 1e-9
    assert relative_error(value, reference) == float("inf")
    assert relative_error(value, reference, floor=1.0) == pytest.approx(0.5)
    value[0, 0] = float("nan")
    assert relative_error(value, reference, floor=1.0) == float("inf")


# -- the twin check: a two-layer block with every role of parameter, and each fault it must see

HIDDEN, INTERMEDIATE, TOKENS = 6, 10, 5


class Twin(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(INTERMEDIATE // 5, dtype=torch.float64))
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, dtype=torch.float64)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, dtype=torch.float64)

    def forward(self, x):
        h = torch.tanh(self.up_proj(x)).view(-1, INTERMEDIATE // 2, 2) * self.scale
        return self.down_proj(h.reshape(-1, INTERMEDIATE))


class Scale(nn.Module):
    """A replicated vector that each rank uses on its own features: its gradient is partial."""

    def __init__(self, group, partial_gradient):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, dtype=torch.float64))
        self.size, self.partial_gradient = group.size, partial_gradient

    def declare_blocks(self, prefix):
        yield replicated_block("scale", self.weight, self.size, partial_gradient=self.partial_gradient)


class Sharded(nn.Module):
    def __init__(self, group, fault):
        super().__init__()
        self.group, self.fault = group, fault
        split = Split.even(INTERMEDIATE // 2, group.size).scaled(2)
        self.own_scale = Scale(group, partial_gradient=fault != "gradient not summed")
        self.up_proj = ColumnParallelLinear(HIDDEN, {"": split}, group, bias=True, dtype=torch.float64)
        self.down_proj = RowParallelLinear(split, HIDDEN, group, bias=True, dtype=torch.float64)

    def forward(self, x):
        given = x
        if self.fault != "no sum in backward":
            x = invariant_to_column_input(x, self.group, tag="in")
        h = torch.tanh(self.up_proj(x))
        h = (h.view(x.shape[0], -1, 2) * self.own_scale.weight).reshape(h.shape)
        partial = self.down_proj(h)
        if self.fault == "bias in every summand":
            partial = Partial(partial.value + partial.bias, self.group, "down_proj")
        if self.fault == "no sum":
            return partial.value + partial.bias
        y = partial_to_invariant(partial, tag="out")
        if self.fault == "summed twice":
            y = partial_to_invariant(Partial(y, self.group, "y"), tag="again")
        if self.fault == "backward summed twice":
            y = invariant_to_column_input(y, self.group, tag="again")
        if self.fault == "input written to":
            given.data.add_(1)  # unseen by autograd
        return y


def run_twin_check(group, fault):
    twin = Twin()
    hostile_weights_(twin, seed=1)
    x = hostile_values(TOKENS, HIDDEN, seed=2)
    sharded = Sharded(group, fault)
    if fault == "gradient averaged":
        sharded.own_scale.weight.register_hook(lambda grad: grad / group.size)
    if fault == "wrong slice":
        sharded.up_proj.weight.register_hook(lambda grad: grad.roll(1, 0))
    if fault == "forward off by 1e-8":
        forward = sharded.forward
        sharded.forward = lambda x: forward(x) * (1 + 1e-8)
    errors = assert_equals_twin(group, sharded, twin, (x,))
    return sorted(errors)


@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_twin_check_accepts_what_is_right(tp_size):
    names = run_ranks(tp_size, run_twin_check, None)[0]
    assert {"output 0", "gradient of input 0", "grad_norm p=1", "grad_norm p=2", "grad_norm p=inf"} <= set(names)
    for name in ("scale", "up_proj.weight", "up_proj.bias", "down_proj.weight", "down_proj.bias"):
        assert any(entry.startswith(f"gradient of {name}[") for entry in names), (name, names)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no sum", "output 0 differs"),
        (
            "summed twice",
            "output 0 differs from the twin's: relative error 1.00e+00 > 1e-10 (it is 2 times the twin's)",
        ),
        ("no sum in backward", "gradient of input 0 differs"),
        ("backward summed twice", "gradient of down_proj.weight[0:6] along dim 1 differs"),
        ("bias in every summand", "output 0 differs"),
        ("gradient not summed", "gradient of scale[0:2] along dim 0 differs"),
        ("gradient averaged", "(it is 0.5 times the twin's)"),
        ("wrong slice", "gradient of up_proj.weight"),
        ("input written to", "input 0 was written to"),
        ("forward off by 1e-8", "output 0 differs from the twin's: relative error 1.00e-08"),
    ],
)
def test_twin_check_sees(fault, words):
    with pytest.raises(RanksFailed) as failure:
        run_ranks(2, run_twin_check, fault)
    assert words in str(failure.value)
    assert all(isinstance(error, AssertionError) for error in failure.value.exceptions.values())
    assert "rank 0 of 2: " in str(failure.value)


def test_twin_check_without_ranks():
    group = TensorParallelGroup.single()
    with pytest.raises(ValueError, match="no default tolerance"):
        twin = nn.Linear(2, 2)
        sharded = ColumnParallelLinear(2, {"": Split.even(2, 1)}, group)
        assert_equals_twin(group, sharded, twin, (torch.ones(1, 2),))
