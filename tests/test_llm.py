"""The Python interface: lists in, results in order; streams that may be left; what is refused; every rank alike.

Functions named check_* run on every rank.
"""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from test_generate import cli_model, torchrun
from tiny_models import prompts

from tp_residual.errors import GenerationError, RequestError
from tp_residual.inference.generate import generate
from tp_residual.inference.llm import LLM
from tp_residual.inference.loading import load_model
from tp_residual.inference.request import EngineLimits, GenerationSettings, SamplingSettings
from tp_residual.inference.tokenizer import Tokenizer
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.testing import RanksFailed, run_ranks

TEXTS = ["the stream", "a sum of sums, über", "the partial sums", "is"]
SETTINGS = GenerationSettings(max_new_tokens=6, ignore_eos=True)
LIMITS = EngineLimits(max_num_seqs=3, max_batched_tokens=7, kv_memory=100_000)


def expected_texts(settings: GenerationSettings) -> list[str]:
    model, _ = load_model(cli_model(), TensorParallelGroup.single())
    tokenizer = Tokenizer.from_dir(cli_model())
    batch = [tokenizer.encode(text) for text in TEXTS]
    results = generate(model, batch, model.group, settings, tokenizer=tokenizer)
    return [result.text or "" for result in results]


def check_llm(group: TensorParallelGroup, directory: str) -> list[Any]:
    with LLM(directory, group=group, limits=LIMITS) as llm:
        pool = llm.engine.pool
        results = llm.generate(TEXTS, SETTINGS)
        assert [result.index for result in results] == [0, 1, 2, 3] and pool.free_blocks == pool.num_blocks
        streamed = [""] * len(TEXTS)
        events = list(llm.stream(TEXTS, SETTINGS))
        for event in events:
            streamed[event.index] += event.text
        assert streamed == [result.text for result in results]
        assert sum(event.generation is not None for event in events) == len(TEXTS) and len(events) >= 6 * len(TEXTS)

        for event in itertools.islice(llm.stream(TEXTS, SETTINGS), 2):  # left in the middle
            assert event.generation is None
        assert pool.free_blocks == pool.num_blocks and not llm.engine.has_work
        stream = llm.stream(TEXTS, SETTINGS)
        next(stream)
        assert pool.free_blocks < pool.num_blocks
        other = llm.generate(TEXTS[1:2], SETTINGS)  # while that one waits to be read
        rest = [event.generation for event in stream if event.generation is not None]
        assert [other[0].token_ids, len(rest)] == [results[1].token_ids, 4]
        unread = llm.stream(TEXTS, SETTINGS)
        next(unread)
        unread.close()  # type: ignore[attr-defined]
        assert pool.free_blocks == pool.num_blocks

        stream = llm.stream(TEXTS[:2], replace(SETTINGS, max_new_tokens=40))
        ends = {}
        for event in stream:
            if event.index == 0 and event.token_id is not None and group.rank == group.size - 1:
                llm.cancel(event.request)
            if event.generation is not None:
                ends[event.index] = event.generation.finish_reason, len(event.generation.token_ids)
        assert ends[0][0] == "cancelled" and ends[0][1] < 5 and ends[1] == ("length", 40), ends
    return [(result.text, result.token_ids) for result in results]


@pytest.mark.parametrize("tp_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_texts_whole_streamed_and_left(tp_size: int) -> None:
    shares = run_ranks(tp_size, check_llm, str(cli_model()))
    assert all(share == shares[0] for share in shares)
    assert [text for text, _ in shares[0]] == expected_texts(SETTINGS)


def test_params_for_each_samples_and_refusals() -> None:
    with LLM(cli_model(), limits=replace(LIMITS, max_model_len=20)) as llm:
        sampled = GenerationSettings(max_new_tokens=4, ignore_eos=True, sampling=SamplingSettings(temperature=1.0, n=2))
        asked = [SETTINGS, sampled, replace(SETTINGS, max_new_tokens=19), SETTINGS]
        results = llm.generate([[5, 6, 7], [5, 9], [8, 8], [9, 30]], asked)
        assert [(r.index, r.sample, len(r.token_ids), r.finish_reason) for r in results] == [
            (0, 0, 6, "length"),
            (1, 0, 4, "length"),
            (1, 1, 4, "length"),
            (2, 0, 0, "refused"),
            (3, 0, 6, "length"),
        ]
        assert results[3].error is not None and "prompt 2: 2 tokens of prompt and max_new_tokens=19" in results[3].error
        free = llm.generate([[5, 6, 7]], replace(SETTINGS, max_new_tokens=9))[0].token_ids
        llm.model.config = replace(llm.model.config, eos_token_ids=(free[3],))
        own = llm.generate([[5, 6, 7]], GenerationSettings(max_new_tokens=9))[0]
        assert own.finish_reason == "stop" and own.token_ids == free[: free.index(free[3]) + 1]
        named = llm.generate([[5, 6, 7]], GenerationSettings(max_new_tokens=9, stop_token_ids=(free[2],)))[0]
        assert named.finish_reason == "stop" and named.token_ids == free[: free.index(free[2]) + 1]


def test_a_stop_string_ends_a_streamed_text() -> None:
    with LLM(cli_model()) as llm:
        free = llm.generate(TEXTS[:1], replace(SETTINGS, max_new_tokens=12))[0].text or ""
        stop = free[4:6]
        events = list(llm.stream(TEXTS[:1], replace(SETTINGS, max_new_tokens=12, stop=(stop,))))
        text = "".join(event.text for event in events)
        assert text == free[: free.index(stop)] and events[-1].generation is not None
        assert events[-1].generation.finish_reason == "stop" and events[-1].generation.text == text


def test_what_is_no_request_is_refused_before_anything_runs() -> None:
    with LLM(tiny_models.saved("llama"), limits=LIMITS) as llm:
        assert llm.tokenizer is None
        cases: list[tuple[Any, Any, str]] = [
            ("the stream", None, "prompts='the stream' is one text; give a list"),
            (["the stream"], None, "is text, and the model has no tokenizer.json"),
            ([[1, 2]], GenerationSettings(stop=("x",)), "the model has no tokenizer.json"),
            ([], None, "no prompt was given"),
            ([[1], []], None, "prompt 1 is empty"),
            ([[1], [101]], None, "prompt 1 has token id 101"),
            ([[1], [2]], [SETTINGS], "2 prompts and 1 params were given"),
            (None, None, "prompts=None is no list of texts"),
            ([5], None, r"prompts=\[5\] is no list of texts, nor of lists of token ids"),
            ([[1]], {"max_new_tokens": 3}, "params={'max_new_tokens': 3} are no GenerationSettings"),
            ([[1, 1.5]], None, r"prompt \[1, 1.5\] has token ids that are no whole numbers"),
            ([[1]], [None], "params=None are no GenerationSettings"),
        ]
        for given, params, message in cases:
            with pytest.raises(RequestError, match=message):
                llm.stream(given, params)
        for number in ("x", -1, None):
            with pytest.raises(RequestError, match=f"request={number!r} is not the number of a request"):
                llm.cancel(number)  # type: ignore[arg-type]
        llm.cancel(12345)  # has ended, or never was
        assert not llm.engine.has_work and len(llm.generate([[1]], SETTINGS)[0].token_ids) == 6
    with pytest.raises(RequestError, match="this LLM is closed"):
        llm.generate([[1]], SETTINGS)


def test_settings_of_the_wrong_kind_are_named() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"max_new_tokens": "8"}, "max_new_tokens='8' is not a whole number"),
        ({"min_new_tokens": None}, "min_new_tokens=None is not a whole number"),
        ({"logprobs": 1.5}, "logprobs=1.5 is not a whole number"),
        ({"stop": "END"}, r"stop='END' is not a tuple of str; write \('END',\) for one"),
        ({"stop_token_ids": ("2",)}, "is not a tuple of int"),
        ({"sampling": {"n": 2}}, "is no SamplingSettings"),
    ]
    for values, message in wrong:
        with pytest.raises(RequestError, match=message):
            GenerationSettings(**values)
    for options, message in (
        ({"limits": {"max_num_seqs": 3}}, "limits={'max_num_seqs': 3} is no tp_residual EngineLimits"),
        ({"dtype": "int8"}, "dtype='int8' is no torch dtype"),
    ):
        with pytest.raises(RequestError, match=message):
            LLM(tiny_models.saved("llama"), **options)  # type: ignore[arg-type]


def check_other_prompts(group: TensorParallelGroup, directory: str) -> None:
    llm = LLM(directory, group=group, limits=LIMITS)
    llm.generate([[1, 2, 3]] * (1 + group.rank), SETTINGS)


def test_ranks_with_other_lists_fail_together() -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(2, check_other_prompts, str(tiny_models.saved("llama")))
    assert sorted(failure.value.exceptions) == [0, 1]
    assert all(isinstance(error, GenerationError) for error in failure.value.exceptions.values())


SCRIPT = """
import json, sys
from tp_residual.inference.llm import LLM
from tp_residual.inference.request import GenerationSettings
with LLM(sys.argv[1]) as llm:
    results = llm.generate(json.loads(sys.argv[2]), GenerationSettings(max_new_tokens=6, ignore_eos=True))
    if llm.group.rank == 0:
        print(json.dumps([llm.group.size, [result.token_ids for result in results]]))
"""


@pytest.mark.slow
def test_under_torchrun_it_is_all_ranks(tmp_path: Path) -> None:
    script, given = tmp_path / "script.py", json.dumps(prompts(3))
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
    directory = str(tiny_models.saved("llama"))
    said = []
    for launcher in ((), torchrun(2)):
        run = subprocess.run(
            [sys.executable, *launcher, str(script), directory, given],
            capture_output=True, text=True, timeout=100, env=environment, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        said.append(json.loads(run.stdout.splitlines()[-1]))
    assert [size for size, _ in said] == [1, 2] and said[0][1] == said[1][1]
