"""Traces of steps: what they are named, which steps are in them, and what happens when they cannot be written.

Functions named check_* run on every rank.
"""

import json
from pathlib import Path

import pytest
from test_engine import CROWD, GREEDY, small_engine, tiny

from tp_residual.errors import RequestError
from tp_residual.inference.profile import StepProfiler
from tp_residual.inference.request import Request, parse_steps
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.testing import run_ranks


@pytest.mark.parametrize("text", ["", "3", "3:", ":4", "4:4", "5:4", "-1:2", "a:b", "1:2:3", "1.0:2"])
def test_steps_that_are_no_range_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match=f"--profile-steps {text!r} is not A:B"):
        parse_steps(text)


def test_steps_are_a_range() -> None:
    assert parse_steps("3:8") == (3, 8)


def check_ranges(group: TensorParallelGroup, folder: str) -> None:
    model = tiny(group)
    engine = small_engine(model)
    engine.profiler = profiler = StepProfiler(folder, (1, 3), model, group)
    for index in range(2):
        engine.add(Request(CROWD[index], GREEDY, index))
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
    assert steps > 4 and profiler.written and group.ranges is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert profiler.path == Path(folder) / f"rank_{group.rank}_of_2.json"
    events = json.loads(profiler.path.read_text())["traceEvents"]
    counts: dict[str, int] = {}
    for event in events:
        if event.get("cat") == "user_annotation":
            counts[event["name"]] = counts.get(event["name"], 0) + 1
    layers = model.config.num_hidden_layers
    assert {name for name in counts if name.startswith("step ")} == {"step 1", "step 2"}
    for layer in range(layers):
        for name in ("", ".self_attn", ".self_attn.qkv_proj", ".mlp.down_proj"):
            assert counts[f"model.layers.{layer}{name}"] == 2
        site = (
            f"model.layers.{layer}.post_attention_layernorm"  # by the norm that reads, as errors and counters have it
        )
        assert counts[f"boundary {site}"] == 2 and counts[f"all_reduce {site}"] == 2
    assert counts["all_gather argmax"] == 2 and counts["lm_head"] == 2
    assert any(event.get("cat") == "cpu_op" for event in events)


def test_each_rank_writes_the_steps_that_were_asked_for_with_names_of_layers_and_tags(tmp_path: Path) -> None:
    run_ranks(2, check_ranges, str(tmp_path / "traces"))
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == ["rank_0_of_2.json", "rank_1_of_2.json"]


def test_work_that_ends_early_is_written_when_it_is_finished(tmp_path: Path) -> None:
    group = TensorParallelGroup.single()
    model = tiny(group)
    engine = small_engine(model)
    engine.profiler = StepProfiler(tmp_path, (0, 100), model, group)
    engine.add(Request(CROWD[1], GREEDY))
    while engine.has_work:
        engine.step()
    assert not engine.profiler.written
    engine.profiler.finish()
    engine.profiler.finish()
    assert engine.profiler.written and "step 0" in engine.profiler.path.read_text()


def test_a_trace_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    group = TensorParallelGroup.single()
    model = tiny(group)
    (tmp_path / "file").write_text("")
    profiler = StepProfiler(tmp_path / "file" / "in_it", (0, 1), model, group)
    with pytest.raises(RequestError, match=r"--profile .*in_it: the trace cannot be written"), profiler.step():
        pass
    assert group.ranges is None
