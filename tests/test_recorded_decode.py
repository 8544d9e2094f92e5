"""Recorded decode steps: the same bits, counters and record as steps that run as always; late and dead peers; what cannot be recorded.

Functions named check_* run on every rank.
"""

import time
from typing import Any

import pytest
import torch
from test_cpu_inference import engine_of, logits_kept, tiny
from test_engine import CROWD, GREEDY, drain
from torch import Tensor

from tp_residual.errors import CollectiveError
from tp_residual.inference.engine import Engine
from tp_residual.inference.recorded_decode import MOST_SEQUENCES, RecordedDecode
from tp_residual.inference.request import GenerationSettings, Request
from tp_residual.kernels import build, decoder
from tp_residual.kernels.linear import PackedWeight, packed_form
from tp_residual.kernels.recording import recording
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.packing import pack_weights
from tp_residual.parallel.shared import SharedTransport
from tp_residual.testing import RanksFailed, run_ranks

F32, BF16 = torch.float32, torch.bfloat16

pytestmark = pytest.mark.skipif(
    bool(build.unavailable())
    or not decoder.attention_block(16, F32)
    or any(packed_form(torch.device("cpu"), dtype)[0] != "panels" for dtype in (F32, BF16)),
    reason="this CPU's linears are no kernels that can be recorded",
)


def recorder(engine: Engine) -> RecordedDecode:
    assert isinstance(engine.replay, RecordedDecode)
    return engine.replay


def run(engine: Engine, requests: int, settings: GenerationSettings = GREEDY) -> tuple[list[list[int]], list[Tensor]]:
    with logits_kept(engine) as kept:
        numbers = [engine.add(Request(CROWD[index], settings, index)) for index in range(requests)]
        results = drain(engine)
    return [results[number, 0].token_ids for number in numbers], kept


def check_same(group: TensorParallelGroup, name: str, dtype: torch.dtype, sequence_parallel: str) -> None:
    model = tiny(group, name, dtype, sequence_parallel=sequence_parallel)
    pack_weights(model, group.device, dtype)

    def counted(engine: Engine, requests: int) -> tuple[Any, list[Tensor]]:
        group.counters.reset()
        first = group.record.number
        tokens, logits = run(engine, requests)
        last = str(group.record.last).partition(" ")[2]
        return (tokens, group.counters.calls, group.counters.bytes, group.record.number - first, last), logits

    for requests in (1, 3, MOST_SEQUENCES):
        plain, recorded = engine_of(model, requests, 64), engine_of(model, requests, 64)
        plain.replay = None
        expected, expected_logits = counted(plain, requests)
        got, logits = counted(recorded, requests)
        assert got == expected
        assert all(torch.equal(a, b) for a, b in zip(logits, expected_logits, strict=True))
        made = recorder(recorded)
        assert not made.refused and requests in made._steps, (made.refused, made._steps.keys())
        program = made._steps[requests].program
        assert program is not None and program.boundary_s > 0


@pytest.mark.parametrize(
    ("tp_size", "name", "dtype", "sequence_parallel"),
    [(1, "llama", BF16, "off"), (2, "qwen2", BF16, "off"), (3, "mistral", F32, "on"), (2, "llama", F32, "auto")],
)
def test_a_recorded_step_is_the_step(tp_size: int, name: str, dtype: torch.dtype, sequence_parallel: str) -> None:
    run_ranks(tp_size, check_same, name, dtype, sequence_parallel, checked=False, transport="shared")


def check_late(group: TensorParallelGroup) -> None:
    """A peer that comes late is waited for in Python, from where the program stopped."""
    model = tiny(group, "llama", F32)
    pack_weights(model, group.device, F32)
    expected, _ = run(engine_of(model, 2, 64), 2)
    engine = engine_of(model, 2, 64)
    waited = []
    wait = group.wait_for_recorded

    def wait_and_note(*arguments: Any) -> None:
        waited.append(arguments[0].tag)
        wait(*arguments)

    group.wait_for_recorded = wait_and_note  # type: ignore[method-assign]
    numbers = [engine.add(Request(CROWD[index], GREEDY, index)) for index in range(2)]
    results, step = {}, 0
    while engine.has_work:
        if group.rank == 1 and step == 4:
            time.sleep(0.3)
        for event in engine.step():
            if event.generation is not None:
                results[event.request] = event.generation.token_ids
        step += 1
    assert [results[number] for number in numbers] == expected
    assert group.rank == 1 or "model.layers.0.input_layernorm" in waited


def test_a_late_peer_is_waited_for() -> None:
    run_ranks(2, check_late, checked=False, transport="shared")


def check_dead(group: TensorParallelGroup) -> None:
    model = tiny(group, "llama", F32)
    pack_weights(model, group.device, F32)
    engine = engine_of(model, 1, 64)
    engine.add(Request(CROWD[0], GenerationSettings(max_new_tokens=20, ignore_eos=True)))
    for step in range(20):
        if group.rank == 1 and step == 6:
            raise SystemExit(3)
        engine.step()


def test_a_dead_peer_is_named_with_the_collective_that_waited() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, check_dead, checked=False, transport="shared")
    text = str(failed.value)
    assert CollectiveError.__name__ in text and "all_reduce tag='model.layers.0.input_layernorm'" in text


def check_closed(group: TensorParallelGroup) -> None:
    """The memory that a program exchanges through is gone: a step must say so, and not touch it."""
    model = tiny(group, "llama", F32)
    pack_weights(model, group.device, F32)
    engine = engine_of(model, 1, 64)
    engine.add(Request(CROWD[0], GenerationSettings(max_new_tokens=20, ignore_eos=True)))
    for _ in range(6):
        engine.step()
    group.share("stepped", "")
    assert isinstance(group.transport, SharedTransport)
    group.transport.close()
    with pytest.raises(CollectiveError, match="it is closed"):
        engine.step()


def test_a_closed_group_is_an_error_and_no_crash() -> None:
    run_ranks(2, check_closed, checked=False, transport="shared")


# ---- what is no noted call ----


def test_an_operator_that_computes_refuses_the_recording() -> None:
    packed, x = PackedWeight(torch.randn(8, 4), "panels"), torch.randn(2, 4)
    with torch.inference_mode(), recording() as current:
        y = packed.linear(x, None)
        y.unflatten(-1, (2, 4)).split([1, 1], dim=1)
    assert not current.foreign
    with torch.inference_mode(), recording() as current:
        packed.linear(x, None).add_(1)
    assert current.foreign == "the operator aten.add_.Tensor"
    with torch.inference_mode(), recording() as current:
        packed.linear(x, None).T.contiguous()
    assert "aten." in current.foreign, "a copy is missing from the program"


def test_a_model_with_norms_of_heads_runs_as_always() -> None:
    """Its q and k norms are torch's."""
    group = TensorParallelGroup.single()
    model = tiny(group, "qwen3", F32)
    pack_weights(model, group.device, F32)
    engine = engine_of(model, 2, 64)
    tokens, _ = run(engine, 2)
    assert "the operator aten." in recorder(engine).refused
    plain = engine_of(model, 2, 64)
    plain.replay = None
    assert run(plain, 2)[0] == tokens


def test_a_program_keeps_the_memory_that_it_uses() -> None:
    packed, x = PackedWeight(torch.randn(40, 30), "panels"), torch.randn(2, 30)
    with torch.inference_mode(), recording() as current:
        y = packed.linear(x, None)
    program, expected = current.program(), packed.linear(x, None)
    del packed, current
    with torch.inference_mode():
        y.zero_()
        program.run(lambda *_: None)
        assert torch.equal(y, expected)
        x.mul_(2)  # fp32, so doubling commutes with every rounding
        program.run(lambda *_: None)
        assert torch.equal(y, 2 * expected)
