"""`bench generate`, `memory`, `gemm` and `scaling`: what is counted is what was done, an engine that lies is no figure, and amounts add up.

Nothing here judges a speed. Functions named check_* run on every rank.
"""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import config, random_weights, sharded

from tp_residual.bench import gemm as gemm_benchmark
from tp_residual.bench.batches import Batch, Run, run_batch
from tp_residual.bench.children import ChildRefused, run_bench
from tp_residual.bench.compare import compare
from tp_residual.bench.gemm import local_shapes, measure_gemm
from tp_residual.bench.generate import _Times, _Work, make_engine, measure_generate, random_prompts
from tp_residual.bench.limits import slower
from tp_residual.bench.memory import PER_RANK_OVERHEAD, AnonymousPeak, anonymous_bytes, measure_memory
from tp_residual.bench.request import GemmRequest, GenerateRequest, Rules
from tp_residual.bench.results import IDENTITY, Result, load
from tp_residual.bench.scaling import Sizes, measure_sizes, merge
from tp_residual.bench.shares import SHARES, Meter, shares
from tp_residual.bench.timing import Clock, Samples, percentile
from tp_residual.errors import RequestError, UserError, VerificationFailed
from tp_residual.inference.engine import Engine
from tp_residual.inference.results import TokenEvent
from tp_residual.kernels import build
from tp_residual.kernels.linear import packed_form
from tp_residual.model.config import ModelConfig
from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.packing import pack_weights
from tp_residual.testing import run_ranks

QUICK = Rules(iters=3, warmup=1, seconds=1.0)
COMMON = ("--iters", "3", "--max-seconds", "1")
NEW = 4
# heads of 16 dimensions: the compiled attention takes them, so that every counter moves
SHAPE = {"max_position_embeddings": 64, "head_dim": 16}


def silent(*_: object) -> None: ...


def tiny(group: TensorParallelGroup, name: str = "llama", *, packed: bool = True, **options: Any) -> CausalLM:
    shape = config(name, **SHAPE)
    model = sharded(shape, group, random_weights(shape, dtype=torch.float32), **options)
    model.requires_grad_(False).eval()
    if packed:
        pack_weights(model, group.device, model.dtype)
    return model


def request(**changes: Any) -> GenerateRequest:
    return replace(GenerateRequest(config("llama", **SHAPE), (1, 3), (5,), NEW), **changes)


# ---- bad input: a name, exit code 2, and no torch

GENERATE = "generate --model MODEL --weights random:1"
BAD = {
    f"{GENERATE} --batch 0": "--batch 0 must be at least 1",
    f"{GENERATE} --batch 1,x": "--batch '1,x' is not a list of whole numbers",
    f"{GENERATE} --prompt-tokens -4": "--prompt-tokens -4 must be at least 1",
    f"{GENERATE} --prompt-tokens 8 --new-tokens 1": "--new-tokens 1 must be at least 2",
    f"{GENERATE} --prompt-tokens 8,40 --new-tokens 25": (
        "--prompt-tokens 40 and --new-tokens 25: 65 exceeds max_position_embeddings=64; use a prompt of at most 39 tokens"
    ),
    f"{GENERATE} --prompt-tokens 8 --batch 8 --max-batched-tokens 7": (
        "--max-batched-tokens 7 is less than --batch 8, and a pass has a token of each sequence that decodes; use at least 8"
    ),
    f"{GENERATE} --prompt-tokens 8 --batch 999999999": "--batch 999999999 --prompt-tokens 8 needs at least",
    f"{GENERATE} --prompt-tokens 8 --warmup 0": "--warmup 0 must be at least 1",
    f"{GENERATE} --prompt-tokens 8 --iters 0": "--iters 0 must be at least 1",
    f"{GENERATE} --prompt-tokens 8 --tp 10": "num_attention_heads=9 cannot be split over tp_size=10; use 1 to 9",
    f"{GENERATE} --prompt-tokens 8 --output /nowhere/x": "--output /nowhere/x cannot be written",
    f"{GENERATE} --prompt-tokens 8 --cache cold": "unrecognized arguments: --cache",
    "generate --model MODEL": "MODEL has neither model.safetensors",
    "generate --model nowhere": "nowhere",
    "generate": "the following arguments are required: --model",
    "memory --model MODEL --weights random:1 --batch 1,2 --prompt-tokens 8": "--batch 1,2: memory is of one batch",
    "memory --model MODEL --weights random:1 --prompt-tokens 8 --device cuda": "anonymous memory is a CPU rank's",
    "memory --model MODEL --weights random:1 --prompt-tokens 63": "use a prompt of at most 32 tokens",
    "gemm --model MODEL --tokens 1,0": "--tokens 0 must be at least 1",
    "gemm --model MODEL --tp 10": "num_attention_heads=9 cannot be split over tp_size=10",
    "gemm --model MODEL --tokens 9999999999999": "--tokens 9999999999999 needs at least",
    "gemm --model nowhere": "nowhere",
    "scaling --model MODEL --weights random:1 --prompt-tokens 8 --rounds 2": "--rounds 2 must be at least 3",
    "scaling --model MODEL --weights random:1 --prompt-tokens 8 --tp 0,1": "--tp 0 must be at least 1",
    "scaling --model MODEL --weights random:1 --prompt-tokens 8 --tp 10,11": "no tp size of 10,11 is one of the model's",
    "scaling --model MODEL --weights random:1": "--prompt-tokens 1024 and --new-tokens 32: 1056 exceeds",
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json alone: --weights random:SEED needs no more."""
    folder = tmp_path_factory.mktemp("tiny")
    folder.joinpath("config.json").write_text(json.dumps(MODEL | SHAPE))
    return folder


MODEL: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 101, "num_hidden_layers": 2, "rms_norm_eps": 1e-5, "hidden_size": 48, "intermediate_size": 59,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def test_bad_input_is_named_before_torch_is_imported(model_dir: Path, tmp_path: Path) -> None:
    script = """
import contextlib, io, json, os, sys
from tp_residual.cli import main
said = {}
def say(line):
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        try:
            code = main(["bench", *line.replace("MODEL", sys.argv[2]).split()])
        except SystemExit as end:
            code = end.code
    return code, stderr.getvalue()
for line in json.loads(sys.argv[1]):
    said[line] = say(line)
assert "torch" not in sys.modules
print(json.dumps(said))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(list(BAD)), str(model_dir)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    for line, (code, stderr) in json.loads(done.stdout).items():
        assert code == 2 and BAD[line].replace("MODEL", str(model_dir)) in stderr, (line, code, stderr)
        assert stderr.count("\n") == 1, (line, stderr)


@pytest.mark.parametrize("question", ["memory", "scaling"])
def test_what_starts_ranks_itself_is_refused_under_a_launcher(question: str, model_dir: Path) -> None:
    command = f"bench {question} --model {model_dir} --weights random:1 --prompt-tokens 8"
    done = subprocess.run(
        [sys.executable, "-m", "tp_residual", *command.split()],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
    )
    assert done.returncode == 2 and "itself; run it without torchrun" in done.stderr, done.stderr


# ---- engines that do something else


class Hasty(Engine):
    """A token less than it was asked for."""

    def add(self, request: Any) -> int:
        return super().add(replace(request, settings=replace(request.settings, max_new_tokens=NEW - 1)))


class Leaky(Engine):
    """Keeps a block of the cache."""

    def step(self) -> list[TokenEvent]:
        events = super().step()
        if not self.has_work:
            self.pool.allocate(1)
        return events


class Endless(Engine):
    """Works, and says nothing."""

    has_work = True  # type: ignore[assignment]

    def step(self) -> list[TokenEvent]:
        super().step()
        return []


class Deaf(Engine):
    """Tells no token of its first step."""

    def step(self) -> list[TokenEvent]:
        deaf, self.heard = not hasattr(self, "heard"), True
        events = super().step()
        return [] if deaf else events


LIES = {
    Hasty: "batch 3, prompt 5: request 0 generated 3 tokens in 3 steps instead of 4",
    Leaky: "batch 3, prompt 5: 1 blocks of the KV cache were not given back",
    Endless: "batch 3, prompt 5: request 0 has not ended after 27 steps, with 0 tokens",
    Deaf: "batch 3, prompt 5: request 0 generated 4 tokens in 3 steps instead of 4",
}


def check_lies(group: TensorParallelGroup) -> list[str]:
    model, clock, said = tiny(group), Clock(group, QUICK), []
    for kind in LIES:
        honest = make_engine(model, request(batches=(3,)))
        liar = kind(model, group, honest.limits, capacity=honest.capacity)
        with pytest.raises(VerificationFailed) as error:
            measure_generate(clock, liar, request(batches=(3,)), silent)
        said.append(str(error.value))
    return said


def test_an_engine_that_does_something_else_is_no_figure() -> None:
    first, second = run_ranks(2, check_lies)
    assert first == second == [f"rank 0: {lie}" for lie in LIES.values()]


# ---- rows


def check_generate(group: TensorParallelGroup, sequence_parallel: str) -> tuple[list[Any], list[str]]:
    model = tiny(group, sequence_parallel=sequence_parallel)
    engine = make_engine(model, request(prompts=(5, 17)))
    return measure_generate(Clock(group, QUICK), engine, request(prompts=(5, 17)), silent)


@pytest.mark.parametrize("sequence_parallel", [pytest.param("off", marks=pytest.mark.slow), "on"])
def test_every_batch_has_a_row_of_prefill_and_one_of_decode(sequence_parallel: str, tmp_path: Path) -> None:
    (rows, notes), other = run_ranks(2, check_generate, sequence_parallel)
    assert other == (rows, notes)
    cells = [(step, batch, prompt) for batch, prompt in product((1, 3), (5, 17)) for step in ("prefill", "decode")]
    assert [(row["step"], row["batch"], row["prompt_tokens"]) for row in rows] == cells
    compiled = not build.unavailable() and packed_form(torch.device("cpu"), torch.float32)[0] == "panels"
    assert bool(notes) != compiled
    # fullest rank: 5 query and 2 KV heads of 16, 30 of 59 columns, 51 of 101 ids
    layers = 2 * (45 * (5 + 2 * 2) * 16 + 45 * 5 * 16 + 3 * 45 * 30)
    head = 45 * 51
    for row in rows:
        kept, rounds = [us for us in row["samples_us"] if us is not None], 3
        decode = row["step"] == "decode"
        assert row["rounds"] == rounds and len(row["samples_us"]) == rounds * (NEW - 1 if decode else 1)
        assert len(row["limit_samples_us"]) == len(row["samples_us"]) and len(row["rank_p50_us"]) == 2
        assert row["p50_us"] == pytest.approx(percentile(kept, 50), rel=1e-4)
        tokens = row["batch"] * (1 if decode else row["prompt_tokens"])
        assert row["tokens_per_s"] == pytest.approx(1e6 * tokens / row["p50_us"], rel=1e-4)
        if decode:
            assert row["weight_bytes"] == 4 * (layers + head)
            assert row["weight_GB_s"] == pytest.approx(row["weight_bytes"] / row["p50_us"] / 1e3, rel=1e-4)
            assert row["itl_p50_us"] >= min(kept) and "ttft_p50_us" not in row
            # one limit a round, beside each of its steps
            assert row["limit_samples_us"][0] == row["limit_samples_us"][1] == row["limit_samples_us"][NEW - 2]
        else:
            n = row["prompt_tokens"]
            attention = 2 * 4 * 5 * 16 * n * (n + 1) // 2
            assert row["flops"] == row["batch"] * (2 * n * layers + 2 * head + attention)
            assert row["ttft_p99_us"] <= max(kept) * 1.001 and "itl_p50_us" not in row
        if compiled:
            parts = [row[f"{part}_share"] for part in SHARES]
            assert all(0 <= part <= 1 for part in parts) and sum(parts) == pytest.approx(1), parts
            assert all(row[f"{part}_share"] > 0 for part in SHARES), row
        assert (row["timing"], row["cache"], row["boundary"]) == ("host", "warm", rows[0]["boundary"])
    identities = {tuple(row[key] for key in IDENTITY["generate"]) for row in rows}
    assert len(identities) == len(rows)
    file = str(tmp_path / "rows.json")
    result("generate", rows).write_json(file)
    assert {each.verdict for each in compare(load(file), load(file))} == {"same"}


def result(what: str, rows: list[Any], **settings: Any) -> Result:
    common = {"ranks": 2, "threads": 1, "device": "cpu", "pin": False, "cache": "warm"}
    return Result(what, {"cpu": "c", "gpus": []}, {"torch": "t"}, "0" * 10, "command", common | settings, rows)


def test_without_packed_weights_the_shares_that_nobody_counts_are_missing() -> None:
    group = TensorParallelGroup.single()
    engine = make_engine(tiny(group, packed=False), request(batches=(1,)))
    rows, notes = measure_generate(Clock(group, QUICK), engine, request(batches=(1,)), silent)
    for row in rows:
        assert row["gemm_share"] is row["python_share"] is None and row["form"] == "plain"
        assert 0 < row["boundary_share"] < 1 and 0 < row["sampler_share"] < 1
    assert "gemm share of decode: no compiled kernel does linear here, and only those are counted" in notes


def test_the_limits_of_a_pass_by_hand() -> None:
    """Attention by counting what each token sees: with mistral's window of 4, at most four keys."""
    group = TensorParallelGroup.single()
    model = tiny(group, "mistral")
    shape, work = model.config, _Work.of(model)
    assert shape.sliding_window[0] is not None and shape.sliding_window[0] < 17
    seen = sum(min(token + 1, window or 17) for window in shape.sliding_window for token in range(17))
    batch = Batch(random_prompts(3, 17, shape.vocab_size), NEW)
    q, kv, hidden = shape.num_attention_heads, shape.num_key_value_heads, shape.hidden_size
    layer = hidden * (2 * q + 2 * kv) * shape.head_dim + 3 * hidden * shape.intermediate_size
    attention = 4 * q * shape.head_dim * seen
    head = hidden * shape.vocab_size
    expected = 3 * (2 * 17 * shape.num_hidden_layers * layer + 2 * head + attention)
    assert work.prefill_flops(batch) == expected
    assert work.read_bytes == 4 * (shape.num_hidden_layers * layer + head)


def test_times_are_maxima_over_ranks() -> None:
    run = Run([1.0, 1.0, 1.0], [1.0, 2.0, 3.0], [[0, 1, 2], [0, 1, 2]], {})
    everybody = [
        {"ends": [[1.0, 2.5, 3.0]], "steps": [[1.0, 1.5, 0.5]]},
        {"ends": [[1.25, 2.0, 3.5]], "steps": [[1.25, 0.75, 1.5]]},
    ]
    times = _Times.of(everybody, [run])
    assert times.prefill.us == (1.25e6,) and times.decode.us == (1.5e6, 1.5e6)
    assert times.first_tokens_us == [1.25e6, 1.25e6] and times.between_us == [1.25e6, 1e6] * 2
    assert times.decode.rank_p50_us == (1e6, 1.125e6)


def test_a_step_of_decode_is_one_in_which_every_request_decodes() -> None:
    """Prompts cut in pieces of at most 6 tokens: the first request decodes while the last one's prompt is computed."""
    group = TensorParallelGroup.single()
    asked = request(batches=(3,), prompts=(9,), new_tokens=12, max_batched_tokens=6)
    engine = make_engine(tiny(group), asked)
    run = run_batch(engine, Batch(random_prompts(3, 9, 101), 12), Meter(group))
    assert not run.wrong and [len(steps) for steps in run.token_steps] == [12] * 3
    first = [steps[0] for steps in run.token_steps]
    assert first == sorted(set(first)) and run.last_first == first[-1]
    # while the last has none the first has had some, and when the first ends the last still decodes
    assert run.full_steps == list(range(run.last_first + 1, run.token_steps[0][-1] + 1)) != []
    assert run.spent_s["prefill"]["seconds"] == pytest.approx(run.ends_s[run.last_first], rel=0.2)
    assert run.spent_s["decode"]["seconds"] == pytest.approx(sum(run.steps_s[run.last_first + 1 :]))
    short = request(batches=(3,), prompts=(9,), new_tokens=2, max_batched_tokens=3)
    with pytest.raises(RequestError, match="--max-batched-tokens 3 the first request has ended before the last one"):
        measure_generate(Clock(group, QUICK), make_engine(engine.model, short), short, silent)


def test_the_slower_of_two_limits_has_every_round() -> None:
    a, b = (Samples(us, (3.0, 1.0), 1, 1) for us in ((1.0, None, 5.0, 4.0), (None, 9.0, 2.0, 4.5)))
    assert slower(a, b).us == (4.5, 9.0, 5.0, 4.5)  # medians 4 and 4.5
    assert a.scaled(2).us == (2.0, None, 10.0, 8.0) and a.scaled(2).rank_p50_us == (6.0, 2.0)


def test_prompts_are_the_same_on_every_rank_and_no_two_alike() -> None:
    prompts = random_prompts(3, 17, 101)
    assert prompts == random_prompts(3, 17, 101) and len({tuple(prompt) for prompt in prompts}) == 3


# ---- shares


def spent(seconds: float, **parts: float) -> dict[str, float]:
    names = ("gemm", "attention", "elementwise", "boundary", "sampler")
    inside = {f"{name} inside": 0.0 for name in names[:3]}
    return {
        **dict.fromkeys(names, 0.0),
        **inside,
        **{k.replace("_", " "): v for k, v in parts.items()},
        "seconds": seconds,
    }


def test_what_runs_inside_a_boundary_is_counted_once() -> None:
    # of 2 s of elementwise kernels, 1.5 s lie in boundaries: so a quarter of what the timed phases have is their own
    watched = spent(9.0, gemm=4.0, attention=1.0, elementwise=2.0, elementwise_inside=1.5, boundary=2.0)
    timed = [spent(10.0, gemm=4.0, attention=1.0, elementwise=2.0, boundary=2.0, sampler=0.5)] * 2
    found = shares(timed, watched)
    assert found == pytest.approx(
        {"gemm": 0.4, "attention": 0.1, "elementwise": 0.05, "boundary": 0.2, "sampler": 0.05, "python": 0.2}
    )
    still = shares(timed, spent(9.0, gemm=4.0, elementwise=2.0, boundary=2.0))
    assert still["attention"] is still["python"] is None and still["elementwise"] == pytest.approx(0.2)


def test_kernels_inside_boundaries_are_told_from_those_outside() -> None:
    """In a group of one, without gradients, the boundary is the compiled add and norm."""
    if build.unavailable():
        pytest.skip(f"no compiled kernels: {build.unavailable()}")
    group = TensorParallelGroup.single()
    engine = make_engine(tiny(group, sequence_parallel="auto"), request(batches=(3,)))
    batch, meter = Batch(random_prompts(3, 5, 101), NEW), Meter(group)
    run_batch(engine, batch, meter)
    plain = run_batch(engine, batch, meter).spent_s["decode"]
    assert plain["elementwise"] > 0 == plain["elementwise inside"], "nobody watched"
    with meter.watching():
        watched = run_batch(engine, batch, meter).spent_s["decode"]
    assert group.ranges is None
    assert 0 < watched["elementwise inside"] < watched["elementwise"]  # rotation and silu * up are outside
    assert watched["gemm inside"] == watched["attention inside"] == 0 < watched["gemm"]
    assert watched["elementwise inside"] < watched["boundary"]


# ---- memory


def test_the_peak_of_anonymous_memory_is_seen_and_is_of_its_phase() -> None:
    peak = AnonymousPeak()
    with peak.watching():
        with peak.phase("before"):
            pass
        with peak.phase("load"):
            block = torch.ones(64 << 20, dtype=torch.uint8)
            time.sleep(0.1)
            del block
        with peak.phase("after"):
            pass
    assert peak.peaks["load"] >= peak.peaks["before"] + (60 << 20)
    # the allocator gives so large a block back at once
    assert peak.ends["load"] <= peak.peaks["load"] - (60 << 20) and peak.peaks["after"] < peak.peaks["load"]
    assert 0 < anonymous_bytes()


def check_memory(group: TensorParallelGroup, sequence_parallel: str) -> tuple[Any, int, int]:
    peak = AnonymousPeak()
    with peak.watching():
        with peak.phase("load"):
            model = tiny(group, "llama_biased", sequence_parallel=sequence_parallel)
        rows, notes = measure_memory(model, request(batches=(3,), config=model.config), peak)
    assert not notes
    (row,) = rows
    held = sum(each.numel() * 4 for each in model.parameters() if each.device.type == "cpu")  # a tied weight is one
    return row, max(peak.peaks.values()), held


@pytest.mark.parametrize(("sequence_parallel", "mode"), [("off", "tp"), ("on", "sp")])
def test_memory_is_the_most_of_any_rank_and_within_what_it_is_made_of(
    sequence_parallel: str, mode: str, tmp_path: Path
) -> None:
    (row, first, *held), (other, second, _), (*_, third) = run_ranks(3, check_memory, sequence_parallel)
    assert row == other and row["mode"] == mode
    assert row["weights_bytes"] == max(*held, third)
    assert row["peak_anonymous_bytes"] >= max(first, second) and row["rank_peak_anonymous_bytes"][0] == first
    # 15 tokens of 48 in fp32; over three ranks 5 each
    assert row["stream_bytes"] == 4 * 48 * (15 if mode == "tp" else 5)
    if packed_form(torch.device("cpu"), torch.float32)[0] == "panels":
        # the tied head stays beside its packed copy; panels fill up to whole ones
        assert row["extra_bytes"] >= 4 * 48 * 34 and row["packed_bytes"] > row["extra_bytes"]
        assert row["weights_bytes"] < row["packed_bytes"], "packed weights are given back"
    # 3 sequences of 9 tokens: a block of 16 each, in 2 layers, keys and values, 1 head of 16
    assert row["cache_bytes"] == 3 * 16 * 2 * 2 * 16 * 4 and row["cache_used_bytes"] == row["cache_bytes"]
    bound = row["weights_bytes"] + row["packed_bytes"] + row["cache_bytes"] + PER_RANK_OVERHEAD
    assert row["bound_bytes"] <= bound and row["over_bytes"] <= row["peak_anonymous_bytes"] - row["bound_bytes"]
    file = str(tmp_path / "memory.json")
    result("memory", [row]).write_json(file)
    assert load(file).rows == [row]
    with pytest.raises(RequestError, match="results of memory are amounts and have no samples"):
        compare(load(file), load(file))
    for wrong in (-1, "much", None, 1.5, True):
        result("memory", [row | {"peak_anonymous_bytes": wrong}]).write_json(file)
        with pytest.raises(RequestError, match=r"row 0 has peak_anonymous_bytes=.* no number of bytes"):
            load(file)


# ---- gemm


def check_gemm(group: TensorParallelGroup) -> tuple[Any, Any, dict[str, tuple[int, int]]]:
    asked = GemmRequest(config("llama", **SHAPE), (1, 7), "float32")
    return *measure_gemm(Clock(group, QUICK), asked, silent), local_shapes(asked.config, 2, group.rank)


@pytest.mark.slow
def test_every_linear_is_measured_as_its_fullest_rank_has_it() -> None:
    (rows, notes, first), (others, _, second) = run_ranks(2, check_gemm)
    assert rows == others and not notes
    fullest = {
        "qkv_proj": (144, 45),
        "o_proj": (45, 80),
        "gate_up_proj": (60, 45),
        "down_proj": (45, 30),
        "lm_head": (51, 45),
    }
    assert first == fullest and second["qkv_proj"] == (128, 45) and second["lm_head"] == (50, 45)
    found = {(row["linear"], row["tokens"]): row for row in rows}
    assert set(found) == set(product(fullest, (1, 7)))
    for (name, tokens), row in found.items():
        out, features = fullest[name]
        assert (row["out_features"], row["in_features"], row["weight_bytes"]) == (out, features, 4 * out * features)
        assert row["flops"] == 2 * tokens * out * features
        assert row["TFLOP_s"] == pytest.approx(row["flops"] / row["p50_us"] / 1e6, rel=1e-4)
        assert row["copies"] * row["weight_bytes"] > gemm_benchmark.flush_bytes(torch.device("cpu"))
        assert row["form"] == packed_form(torch.device("cpu"), torch.float32)[0]
    # those of one linear share their rounds, and so the reading of its weight: more FLOP take no less
    assert all(
        a <= b
        for name in fullest
        for a, b in zip(found[name, 1]["limit_samples_us"], found[name, 7]["limit_samples_us"], strict=True)
    )


def test_shapes_are_those_of_the_model(model_dir: Path) -> None:
    group, shape = TensorParallelGroup.single(), ModelConfig.from_dict(MODEL | SHAPE, "tiny")
    model = sharded(shape, group, random_weights(shape, dtype=torch.float32))
    linears = {name: module for name, module in model.named_modules() if name.endswith(("proj", "head"))}
    theirs = {name.rpartition(".")[2]: tuple(module.weight.shape) for name, module in linears.items()}
    assert local_shapes(shape, 1, 0) == theirs


def test_a_wrong_product_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gemm_benchmark._Weights.linear
    monkeypatch.setattr(gemm_benchmark._Weights, "linear", lambda self, x: right(self, x) * 1.01)
    asked = GemmRequest(config("llama", **SHAPE), (5,), "float32")
    with pytest.raises(VerificationFailed, match="wrong result, nothing was timed: qkv_proj of 5 tokens"):
        measure_gemm(Clock(TensorParallelGroup.single(), QUICK), asked, silent)


def test_no_input_is_a_row_of_any_ranks_weight() -> None:
    """Their product would be the sum of 576 squares, far beyond what the check takes for the size of a sum."""
    group = TensorParallelGroup.single()
    for group.rank in range(3):
        weight = gemm_benchmark._Weights(Clock(group, QUICK), 5, 576, torch.bfloat16).weight
        for tokens in range(1, 4):
            x = gemm_benchmark._random(tokens, 576, torch.bfloat16, group.device, seed=tokens)
            assert (x.double() @ weight.double().T).abs().max() < 6 * 576**0.5


# ---- scaling


def sample_row(ranks: int, threads: int, us: list[float], **changes: Any) -> dict[str, Any]:
    return {
        "step": "decode", "batch": 1, "prompt_tokens": 5, "ranks": ranks, "threads": threads, "model": "m",
        "samples_us": us, "limit_samples_us": [10.0] * len(us), "limit": "l", "p50_us": percentile(us, 50), "tokens_per_s": 1e6 / us[0],
        "percent_of_limit": 50.0, "late_samples": 1, "rank_p50_us": us[:1] * ranks, "gemm_share": 0.5, "attention_share": None,
    } | changes  # fmt: skip


def test_a_speedup_is_the_median_of_pairs() -> None:
    """The machine doubles its speed after the first round: of the medians, 200 / 100 would be 2."""
    one = [[400.0, 400.0], [200.0, 200.0], [200.0, 200.0]]
    two = [[200.0, 200.0], [100.0, 80.0], [160.0, 160.0]]
    found = Sizes(
        {
            2: [result("generate", [sample_row(2, 1, us)]) for us in two],
            1: [result("generate", [sample_row(1, 2, us)]) for us in one],
        }
    )
    first, second = merge(found)
    assert (first["ranks"], first["speedup"], first["efficiency"]) == (1, 1.0, 1.0)
    assert second["samples_us"] == [200.0, 200.0, 100.0, 80.0, 160.0, 160.0] and second["p50_us"] == 160.0
    assert second["speedup"] == 2.0 and second["speedup_min"] == 1.25 and second["speedup_max"] == 200 / 90
    assert second["efficiency"] == 2.0  # two ranks of one thread take the cores of one rank of two
    assert (second["samples"], second["late_samples"], second["rounds"], second["against_ranks"]) == (6, 3, 3, 1)
    assert second["gemm_share"] == 0.5 and second["attention_share"] is None
    wider = Sizes({1: found.results[1], 2: [result("generate", [sample_row(2, 2, us)]) for us in two]})
    assert merge(wider)[1]["efficiency"] == 1.0
    cuda = {"device": "cuda"}
    on_gpus = {size: [replace(each, settings=cuda) for each in results] for size, results in found.results.items()}
    assert merge(Sizes(on_gpus))[1]["efficiency"] == 1.0


def test_sizes_take_turns_and_a_refused_one_is_a_note() -> None:
    asked: list[int] = []

    class Refused(UserError): ...

    def run(size: int) -> Result:
        asked.append(size)
        if size == 3:
            raise Refused("three is a crowd")
        return replace(result("generate", [sample_row(size, 1, [1.0])]), notes=("no attention",))

    found = measure_sizes([1, 2, 3], 3, run, Refused, silent)
    assert asked == [1, 2, 3, 2, 1, 1, 2]
    assert {size: len(results) for size, results in found.results.items()} == {1: 3, 2: 3}
    assert found.notes == ["tp=3: three is a crowd", "tp=1: no attention", "tp=2: no attention"]
    with pytest.raises(RequestError, match="no tp size of 3 runs here: tp=3: three is a crowd"):
        measure_sizes([3], 3, run, Refused, silent)


# ---- children


def test_a_child_that_refuses_is_quoted(model_dir: Path) -> None:
    with pytest.raises(ChildRefused, match=r"^--batch 0 must be at least 1$"):
        run_bench(["generate", "--model", str(model_dir), "--weights", "random:1", "--batch", "0"], "it")


def test_a_benchmark_that_is_ended_leaves_no_child(tmp_path: Path) -> None:
    script = """
import sys
from tp_residual.bench.children import run_bench
run_bench(["bandwidth", "--tp", "2", "--iters", "1000000", "--max-seconds", "900", "--bytes", "1M"], "it")
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", script], env=os.environ | {"TMPDIR": str(tmp_path)}, stderr=subprocess.DEVNULL
    )
    ends = time.monotonic() + 120
    while len(descendants(parent.pid)) < 3:  # the launcher and its two ranks
        assert time.monotonic() < ends and parent.poll() is None
        time.sleep(0.05)
    theirs = descendants(parent.pid)
    parent.send_signal(signal.SIGTERM)
    parent.wait(60)
    assert not [pid for pid in theirs if Path(f"/proc/{pid}").exists()]  # at once: they are waited for
    assert not list(tmp_path.iterdir())


def descendants(pid: int) -> list[int]:
    """Of a process, all generations."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(") ")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(entry.name))
    found, waiting = list[int](), [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


# ---- the commands


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tp_residual", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=400)


RUNS = {
    "generate": ("--tp", "2", "--batch", "1,3", "--prompt-tokens", "5,9", "--new-tokens", "3", *COMMON),
    "gemm": ("--tp", "2", "--tokens", "1,9", "--warmup", "1", *COMMON),
    "memory": ("--tp", "2", "--batch", "3", "--prompt-tokens", "9", "--new-tokens", "3"),
    "scaling": ("--tp", "2,1,10", "--batch", "1", "--prompt-tokens", "5,9", "--new-tokens", "3", *COMMON),
}


@pytest.mark.parametrize(
    "question", ["generate", *(pytest.param(each, marks=pytest.mark.slow) for each in ("gemm", "memory", "scaling"))]
)
def test_a_command_writes_what_it_prints(question: str, model_dir: Path, tmp_path: Path) -> None:
    output, rows_file, picture = (str(tmp_path / name) for name in ("r.json", "r.csv", "r.png"))
    weights = () if question == "gemm" else ("--weights", "random:3")
    files = ("--output", output, "--csv", rows_file, "--plot", picture)
    done = bench(question, "--model", str(model_dir), *weights, *RUNS[question], *files)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100
    found = load(output)
    assert found.what == question and f"bench {question} --model" in found.command
    cells = {
        "generate": lambda row: (row["step"], row["batch"], row["prompt_tokens"]),
        "gemm": lambda row: (row["linear"], row["tokens"]),
        "memory": lambda row: row["mode"],
        "scaling": lambda row: (row["step"], row["prompt_tokens"], row["ranks"], row["rounds"]),
    }
    expected: dict[str, Any] = {
        "generate": set(product(("prefill", "decode"), (1, 3), (5, 9))),
        "gemm": set(product(("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"), (1, 9))),
        "memory": {"tp", "sp"},
        "scaling": set(product(("prefill", "decode"), (5, 9), (1, 2), (3,))),
    }
    assert {cells[question](row) for row in found.rows} == expected[question]
    assert len(list(csv.DictReader(Path(rows_file).read_text().splitlines()))) == len(found.rows)
    assert Path(picture).read_bytes().startswith(b"\x89PNG") and os.path.getsize(picture) > 10_000
    if question == "scaling":
        assert found.notes[0].startswith("tp=10: num_attention_heads=9 cannot be split over tp_size=10")
    if question != "memory":
        assert {each.verdict for each in compare(found, found)} == {"same"}
