"""`bench peers`: who takes turns with whom and how, what the pairs say, and that a peer's fault has a name and leaves nothing behind.

Peers are fakes that speak the workers' protocol and compute nothing (fake_peer.py); our own side is real in one test. Nothing here judges a
speed.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_peer import SPINNER
from tiny_models import MODELS, saved

from tp_residual.bench import peers_side
from tp_residual.bench.peers_request import MOST_STEPS, PeersRequest, usable_cpus
from tp_residual.bench.peers_rounds import Prober, Round, run_rounds, start_row, throughput_row, times_of
from tp_residual.bench.peers_run import CHECK_PROMPTS, Findings, measure_peers, prompts_of
from tp_residual.bench.peers_side import Side, SideFailed, SideSpec, Work
from tp_residual.bench.peers_specs import PeerMissing, our_spec
from tp_residual.bench.peers_weights import weight_bytes_of_a_step, write_random_checkpoint
from tp_residual.bench.results import Row
from tp_residual.checkpoint.files import CheckpointFiles
from tp_residual.cli import main
from tp_residual.errors import RequestError
from tp_residual.inference.generate import generate
from tp_residual.inference.loading import load_model
from tp_residual.inference.request import GenerationSettings
from tp_residual.parallel.group import TensorParallelGroup

FAKE = Path(__file__).with_name("fake_peer.py")
WORKERS = Path(__file__).parents[1] / "benchmarks" / "peers"
REQUEST = PeersRequest(
    "nowhere", 1, (0,), "float32", 101, (9, 3), 4096,
    batches=(1, 2), prompts=(5,), rounds=4, starts=2, slice_s=1.0, load_limit_s=60, limit_s=60,
)  # fmt: skip


@pytest.fixture(autouse=True)
def watched_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_side, "_IDLE_S", 0.15)


def fake(name: str, folder: Path, *options: str) -> SideSpec:
    command = (sys.executable, str(FAKE), str(folder / f"{name}.journal"), *options)
    return SideSpec(name, command, {"prompt": [1, 2, 3]}, 1, 1)


@pytest.fixture(scope="module")
def prober() -> Iterator[Prober]:
    with Prober(2, 1, 16 << 20) as prober:
        yield prober


def measure(
    folder: Path,
    prober: Prober,
    *peers: SideSpec | PeerMissing,
    request: PeersRequest = REQUEST,
    ours: tuple[str, ...] = (),
) -> Findings:
    def make(peer: SideSpec | PeerMissing) -> Callable[[], SideSpec]:
        def made() -> SideSpec:
            if isinstance(peer, PeerMissing):
                raise peer
            return peer

        return made

    names = [peer.name if isinstance(peer, SideSpec) else "missing" for peer in peers]
    specs = {name: make(peer) for name, peer in zip(names, peers, strict=True)}
    return measure_peers(request, fake("ours", folder, *ours), specs, prober, 10**9, folder, lambda text: None)


def processes_with(text: str) -> list[int]:
    """Live processes whose command line holds `text`."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            try:
                line = Path(f"/proc/{name}/cmdline").read_bytes().decode()
            except OSError:
                continue
            if text in line:
                found.append(int(name))
    return found


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_until(what: Callable[[], bool], seconds: float = 20.0) -> bool:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if what():
            return True
        time.sleep(0.02)
    return False


@contextmanager
def loaded(spec: SideSpec, folder: Path) -> Iterator[Side]:
    with Side(spec, folder / f"{spec.name}.log", load_limit_s=60, limit_s=60) as side:
        side.load()
        yield side


# ---- turns and statistics


def requests_in(folder: Path, name: str) -> list[tuple[int, int, str]]:
    """(began, ended, what) of every request that a fake answered."""
    lines = [line.split() for line in (folder / f"{name}.journal").read_text().splitlines()]
    begins = [(int(at), what) for at, _, kind, what in lines if kind == "begin"]
    ends = [int(at) for at, _, kind, _ in lines if kind == "end"]
    return [(began, ended, what) for (began, what), ended in zip(begins, ends, strict=True)]


def test_sides_take_turns_and_the_order_within_a_pair_alternates(tmp_path: Path, prober: Prober) -> None:
    with loaded(fake("ours", tmp_path), tmp_path) as ours, loaded(fake("peer", tmp_path), tmp_path) as peer:
        for side in (ours, peer):
            side.prefill([[4, 5]])
        rounds = run_rounds(ours, peer, prober, 4, lambda side: side.decode(1, 3))
    assert [each.ours.tokens for each in rounds] == [3] * 4
    spans = sorted(
        (began, ended, name)
        for name in ("ours", "peer")
        for began, ended, what in requests_in(tmp_path, name)
        if what == "decode"
    )
    assert [name for _, _, name in spans] == ["ours", "peer", "peer", "ours"] * 2
    assert all(before[1] < after[0] for before, after in pairwise(spans)), "two sides ran at once"


def test_a_ratio_is_the_median_of_pairs(tmp_path: Path, prober: Prober) -> None:
    """The machine halves its speed after two of five rounds: the ratio of medians would say 1.25, or 0.8."""
    ours = [1.0, 1.0, 2.0, 2.0, 2.0]
    peer = [1.25, 1.25, 2.5, 2.5, 1.5]
    rounds = [Round(Work(10, mine, []), Work(10, other, []), 50.0) for mine, other in zip(ours, peer, strict=True)]
    row = throughput_row(rounds, weight_bytes=2 * 10**9, steps=10)
    assert (row["ratio_median"], row["ratio_min"], row["ratio_max"], row["rounds"]) == (1.25, 0.75, 1.25, 5)
    assert row["ours"] == 5.0 and row["peer_value"] == pytest.approx(10 / 1.5, rel=1e-4)
    # 20 GB in 2 s of 50 GB/s
    assert row["percent_of_read_limit"] == 20.0 and row["peer_percent_of_read_limit"] == pytest.approx(
        20 / 1.5 / 50 * 100, rel=1e-4
    )
    assert row["read_limit_gb_s"] == 50.0 and row["ours_samples"] == [10.0, 10.0, 5.0, 5.0, 5.0]
    assert throughput_row(rounds, None, 1)["percent_of_read_limit"] is None
    start = start_row([2.0, 4.0, 8.0], [6.0, 4.0, 80.0])
    assert (start["ours"], start["peer_value"], start["ratio_median"], start["ratio_max"]) == (4.0, 6.0, 3.0, 10.0)


def test_a_slice_is_as_long_as_the_slower_side_may_take() -> None:
    assert times_of(2.0, [0.01, 0.05], 256) == 40
    assert times_of(2.0, [0.001, 0.002], 256) == 256
    assert times_of(2.0, [0.1, 9.0], 256) == 1


def test_rows_of_a_run(tmp_path: Path, prober: Prober) -> None:
    # 4 steps in 0.5 s warm: slices of 1 s are 8 steps
    found = measure(tmp_path, prober, fake("vllm", tmp_path, "--seconds", "0.5"), ours=("--seconds", "0.25"))
    assert not found.failures and found.measured
    assert [(row["metric"], row["batch"], row["prompt"]) for row in found.rows] == [
        ("start_s", 1, 16), ("prefill_tok_s", 1, 5), ("decode_tok_s", 1, 5), ("decode_tok_s", 2, 5),
    ]  # fmt: skip
    start, prefill, decode, batched = found.rows
    assert start["rounds"] == 2 and len(start["ours_samples"]) == 2 and start["ours"] > 0.01
    assert prefill["ratio_median"] == 1.0 and prefill["ours"] == 20.0 and prefill["percent_of_read_limit"] is None
    assert (decode["ratio_median"], decode["steps"], decode["rounds"]) == (2.0, 8, 4)
    assert (batched["ours"], batched["peer_value"], batched["same_first_tokens"]) == (64.0, 32.0, 1.0)
    assert decode["peer"] == "vllm" and decode["peer_tp"] == 1 and decode["read_limit_gb_s"] > 0.1
    assert found.sides["vllm"]["how"] == "fake" and found.sides["vllm"]["stopped_while_idle"] is False
    # both were started anew for the second start, in the other order
    pids = {
        name: {line.split()[1] for line in (tmp_path / f"{name}.journal").read_text().splitlines()}
        for name in ("ours", "vllm")
    }
    assert [len(each) for each in pids.values()] == [2, 2]
    loads = sorted((began, name) for name in pids for began, _, what in requests_in(tmp_path, name) if what == "load")
    assert [name for _, name in loads] == ["ours", "vllm", "vllm", "ours"]


def test_prompts_differ_and_are_the_same_each_time() -> None:
    prompts = prompts_of(REQUEST, 8, 16)
    assert prompts == prompts_of(REQUEST, 8, 16)
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 8
    assert all(0 <= token < 101 for prompt in prompts for token in prompt)


# ---- a side that idles


def test_what_spins_is_stopped_while_another_works(tmp_path: Path, prober: Prober) -> None:
    """Its grandchild in a session of its own, too; and it goes on afterwards."""
    with loaded(fake("spinner", tmp_path, "--fault", "spin"), tmp_path) as side:
        assert wait_until(lambda: len(processes_with(SPINNER)) >= 2)
        side.watch_idle()
        assert side.spins
        with side.idle():
            states = [state_of(pid) for pid in processes_with(SPINNER) + processes_with(str(tmp_path))]
            assert len(states) >= 3 and set(states) == {"T"}
            time.sleep(0.3)
        assert side.idle_cpu_s / side.idle_s < 0.2, "a stopped tree takes no time"
        side.prefill([[1]])
        assert set(map(state_of, processes_with(str(tmp_path)))) != {"T"}
    assert wait_until(lambda: not processes_with(SPINNER)), "the spinner outlived its side"


def test_what_sleeps_is_not_stopped(tmp_path: Path) -> None:
    with loaded(fake("sleeper", tmp_path), tmp_path) as side:
        side.watch_idle()
        assert not side.spins
        with side.idle():
            assert "T" not in map(state_of, processes_with(str(tmp_path)))


# ---- faults


FAULTS = {
    "lies": "generated 3 tokens in decode for sequence 0 of 1 where 4 were asked for|generated 1 tokens in decode",
    "crash": "ended with exit code 3 during decode: out of luck",
    "hang": "no answer to decode within 2 s; it was ended",
    "babbles": "answered decode with b'not json', which is no JSON object",
    "refuses": "load: ValueError: 9 heads over 2 ranks",
    "cannot start": "ended with exit code 1 during load: ImportError: libmissing.so: cannot open",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_a_row_with_its_reason_and_the_others_go_on(tmp_path: Path, prober: Prober, fault: str) -> None:
    request = replace(REQUEST, batches=(1,), metrics=("decode",), rounds=2, limit_s=2.0)
    began = time.monotonic()
    found = measure(tmp_path, prober, fake("bad", tmp_path, "--fault", fault), fake("good", tmp_path), request=request)
    assert time.monotonic() - began < 30
    bad, good = found.rows
    assert bad["peer"] == "bad" and any(text in bad["reason"] for text in FAULTS[fault].split("|")), bad
    assert good["peer"] == "good" and "ratio_median" in good and found.measured
    assert bool(found.failures) == (fault == "lies"), "a wrong count fails the run"
    assert not processes_with(str(tmp_path))


def test_another_model_is_no_peer(tmp_path: Path, prober: Prober) -> None:
    found = measure(
        tmp_path, prober, fake("other", tmp_path, "--salt", "1"), request=replace(REQUEST, metrics=("decode",))
    )
    assert f"only 0 of {CHECK_PROMPTS} first tokens are ours's" in found.rows[0]["reason"] and not found.measured


def test_a_missing_peer_is_named(tmp_path: Path, prober: Prober) -> None:
    nowhere = SideSpec("gone", (str(tmp_path / "no-such-program"),), {}, 1, 1)
    found = measure(tmp_path, prober, PeerMissing("there is none"), nowhere)
    assert [row["peer"] for row in found.rows] == ["missing", "gone"]
    assert found.rows[0]["reason"] == "there is none"
    assert "cannot be started: No such file or directory" in found.rows[1]["reason"]
    assert not found.measured and not found.failures


def test_our_own_fault_ends_the_run(tmp_path: Path, prober: Prober) -> None:
    with pytest.raises(SideFailed, match="ours: ended with exit code 3 during decode: out of luck"):
        measure(tmp_path, prober, fake("good", tmp_path), ours=("--fault", "crash"))
    assert not processes_with(str(tmp_path))


def test_shared_memory_that_a_peer_leaves_is_removed_and_no_other(tmp_path: Path) -> None:
    other = Path(f"/dev/shm/tp_residual_test_{os.getpid()}")
    other.write_bytes(b"x")
    try:
        with loaded(fake("leaves", tmp_path, "--fault", "segment", "--reads", str(other)), tmp_path):
            (pid,) = processes_with(str(tmp_path))
            left = Path(f"/dev/shm/fake_peer_{pid}")
            assert left.exists()
        assert not left.exists() and other.exists()
    finally:
        other.unlink()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_benchmark_leaves_no_side_not_even_a_stopped_one(tmp_path: Path, number: signal.Signals) -> None:
    """SIGKILL leaves it no time: then the kernel continues and ends a group that has been stopped."""
    script = f"""
import signal, time
from pathlib import Path
from tp_residual.bench.peers_side import Side, SideSpec
from tp_residual.cli.bench_peers import _interrupt
signal.signal(signal.SIGTERM, _interrupt)
spec = SideSpec("worker", {fake("worker", tmp_path).command!r}, dict(prompt=[1]), 1, 1)
with Side(spec, Path({str(tmp_path / "log")!r}), load_limit_s=60, limit_s=60) as side:
    side.load()
    side.spins = True
    side.stop_if_spinning()
    print("ready", flush=True)
    time.sleep(60)
"""
    program = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    (worker,) = [pid for pid in processes_with(f"{tmp_path}/worker.journal") if pid != program.pid]
    assert state_of(worker) == "T"
    program.send_signal(number)
    program.communicate(timeout=20)
    assert wait_until(lambda: not processes_with(f"{tmp_path}/worker.journal"))


# ---- the memory's limit


def test_the_prober_reads_and_waits(prober: Prober) -> None:
    """A byte a nanosecond is 1 GB/s; a thousand GB/s is no memory of one machine."""
    assert 0.1 < prober.read_gb_s() < 5000
    assert wait_until(lambda: {state_of(each.pid) for each in prober._probers} == {"S"}), "a prober runs unasked"


# ---- our own side


def test_our_side_generates_what_generate_does(tmp_path: Path) -> None:
    directory = saved("llama")
    request = replace(REQUEST, model=str(directory), tp=2, cpus=(0, 1))
    spec = our_spec(request, [3, 1, 4], tmp_path, 1 << 20)
    spec = replace(spec, load={**spec.load, "max_tokens": 40})  # this one has 64 positions
    prompts = prompts_of(request, 2, 5)
    with Side(spec, tmp_path / "ours.log", load_limit_s=100, limit_s=60) as side:
        side.load()
        first = side.prefill(prompts, 2)
        more = [side.decode(2, 6) for _ in range(2)]
    assert first.tokens == 20 and more[0].tokens == 12
    group = TensorParallelGroup.single(torch.device("cpu"))
    model, _ = load_model(directory, group, dtype=torch.float32)
    expected = [
        each.token_ids
        for each in generate(model, prompts, group, GenerationSettings(max_new_tokens=7, ignore_eos=True))
    ]
    assert [a + b for a, b in zip(first.ids, more[0].ids, strict=True)] == expected
    assert more[0].ids == more[1].ids, "a decode begins where the prompts end, each time"
    assert side.start_s > 0.1 and side.loaded["how"].startswith("tp=2, 1 threads each")


# ---- the same weights for everybody


def test_a_random_checkpoint_is_what_the_seed_means(tmp_path: Path) -> None:
    directory = saved("qwen2")
    write_random_checkpoint(str(directory), 7, "bfloat16", tmp_path / "model")
    files = CheckpointFiles.open(tmp_path / "model")
    assert {info.dtype for info in files.tensors.values()} == {"BF16"}
    group = TensorParallelGroup.single(torch.device("cpu"))
    written, _ = load_model(tmp_path / "model", group)
    seeded, _ = load_model(directory, group, dtype=torch.bfloat16, random_seed=7)
    assert written.dtype == torch.bfloat16
    ours = dict(seeded.named_parameters())
    assert all(torch.equal(value, ours[name]) for name, value in written.named_parameters())


@pytest.mark.parametrize(("name", "tied"), [("llama", False), ("qwen2", True)])
def test_weight_bytes_are_what_a_step_reads(name: str, tied: bool) -> None:
    sizes = MODELS[name]
    embedding = sizes["vocab_size"] * sizes["hidden_size"]
    files = CheckpointFiles.open(saved(name))
    elements = sum(int(np.prod(info.shape)) for info in files.tensors.values())
    has_head = "lm_head.weight" in files.tensors
    assert weight_bytes_of_a_step(str(saved(name)), "bfloat16", tied) == 2 * (elements - embedding * has_head)


@pytest.fixture(scope="module")
def write_gguf() -> Callable[..., int]:
    pytest.importorskip("gguf")
    spec = importlib.util.spec_from_file_location("write_gguf", WORKERS / "write_gguf.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.write_gguf


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_gguf_file_holds_the_same_model(name: str, tmp_path: Path, write_gguf: Callable[..., int]) -> None:
    """Transformers reads both back, and undoes llama.cpp's order of rows by code of its own."""
    from transformers import AutoModelForCausalLM

    config = json.loads((saved(name) / "config.json").read_text()) | {"use_sliding_window": False, "layer_types": None}
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").symlink_to(saved(name) / "model.safetensors")
    write_gguf(folder, folder / "model.gguf", "float32")
    right = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32)
    ids = torch.tensor([[3, 1, 4, 1, 5, 92, 65]])
    with torch.no_grad():
        # the same arithmetic on the same bits
        assert torch.equal(read(ids).logits, right(ids).logits)


def test_a_gguf_file_keeps_the_bits_of_bf16(tmp_path: Path, write_gguf: Callable[..., int]) -> None:
    from gguf import GGUFReader
    from safetensors.torch import load_file

    folder = saved("qwen3", torch.bfloat16)
    count = write_gguf(folder, tmp_path / "model.gguf")
    weights = load_file(folder / "model.safetensors")
    tensors = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "model.gguf").tensors}
    assert len(tensors) == count == len(weights)
    matrix = tensors["blk.1.ffn_down.weight"]
    assert matrix.tensor_type.name == "BF16"
    expected = weights["model.layers.1.mlp.down_proj.weight"]
    assert np.array_equal(matrix.data.view(np.int16).reshape(expected.shape), expected.view(torch.int16).numpy())
    norm = tensors["blk.0.attn_q_norm.weight"]
    assert norm.tensor_type.name == "F32"
    assert np.array_equal(norm.data, weights["model.layers.0.self_attn.q_norm.weight"].float().numpy())


def test_a_model_without_a_gguf_form_is_refused_by_name(tmp_path: Path, write_gguf: Callable[..., int]) -> None:
    program = str(WORKERS / "write_gguf.py")
    for name, dtype, why in (
        ("llama_biased", "float32", "rope scaling"),
        ("mistral", "float32", "a sliding window is not written"),
        ("llama", "bfloat16", "is fp32, and in bf16 it would have other values; use float32"),
        ("llama", "float16", "dtype float16 is not one of bfloat16, float32"),
    ):
        done = subprocess.run(
            [sys.executable, program, str(saved(name)), str(tmp_path / "x.gguf"), dtype], capture_output=True, text=True
        )
        assert done.returncode == 1 and why in done.stderr and "Traceback" not in done.stderr, done.stderr


# ---- the command


BAD = {
    "--tp 0": "--tp 0 must be at least 1",
    "--tp 10": "num_attention_heads=9 cannot be split over tp_size=10",
    "--peers vllm,lama": "--peers 'lama' is not one of transformers, transformers-tp, vllm, llama.cpp",
    "--metrics speed": "--metrics 'speed' is not one of decode, prefill, start",
    "--batch 0": "--batch 0 must be at least 1",
    "--batch 1,x": "--batch '1,x' is not a list of whole numbers",
    "--batch 100000000": "this machine has",
    "--prompt-tokens 4000": f"--prompt-tokens 4000 and {MOST_STEPS} new tokens are more than max_position_embeddings=4096",
    "--rounds 0": "--rounds 0 must be at least 1",
    "--slice-s 3": "--slice-s 3 is not between 0 and 2 seconds",
    "--threads 1000": "--threads 1000 is not between 1 and",
    "--peer-env vllm": "--peer-env 'vllm' is not PEER=DIR",
    "--peer-env lama=x": "--peer-env 'lama' is not one of",
    "--weights seven": "--weights 'seven' is not random:SEED",
    "--output nowhere/x.json": "--output nowhere/x.json cannot be written",
}


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Only a config: what is asked is checked before weights are."""
    folder = tmp_path_factory.mktemp("long")
    (folder / "config.json").write_text(json.dumps(MODELS["llama"] | {"max_position_embeddings": 4096}))
    return folder


@pytest.mark.parametrize("options", BAD)
def test_bad_input_has_a_name(options: str, long_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "peers", "--model", str(long_model)]
    if "--weights" not in options:
        argv += ["--weights", "random:1"]
    assert main([*argv, *options.split()]) == 2
    assert BAD[options] in capsys.readouterr().err


def test_cores_are_divided_among_ranks() -> None:
    assert usable_cpus(range(4, 9), 2, None) == (4, 5, 6, 7)
    assert usable_cpus([0, 1, 2], 1, 2) == (0, 1)
    with pytest.raises(RequestError, match="--tp 3 is more than the 2 usable cores"):
        usable_cpus([0, 1], 3, None)
    with pytest.raises(RequestError, match="3 cores do not divide among --tp 2 ranks"):
        replace(REQUEST, tp=2, cpus=(0, 1, 2))


def test_a_peer_has_as_many_ranks_as_it_can() -> None:
    request = replace(REQUEST, tp=2, cpus=(0, 1))
    assert [request.peer_tp(peer) for peer in ("vllm", "transformers", "transformers-tp", "llama.cpp")] == [1, 1, 2, 1]
    assert replace(request, heads=(14, 2)).peer_tp("vllm") == 2


def test_no_peer_is_exit_code_1_and_a_row_with_the_reason(long_model: Path, tmp_path: Path) -> None:
    target = tmp_path / "peers.json"
    command = [
        *(sys.executable, "-m", "tp_residual", "bench", "peers", "--model", str(long_model), "--weights", "random:1"),
        *("--peers", "vllm,llama.cpp", "--peer-env", f"vllm={tmp_path}", "--peer-env", f"llama.cpp={tmp_path}"),
        *("--output", str(target), "--plot", str(tmp_path / "peers.png")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done.stderr
    assert "no peer of vllm, llama.cpp could be measured here" in done.stderr and "Traceback" not in done.stderr
    rows: list[Row] = json.loads(target.read_text())["rows"]
    assert [row["peer"] for row in rows] == ["vllm", "llama.cpp"]
    assert all("there is no bin/python in that folder" in row["reason"] for row in rows)
    assert "not here: vllm: --peer-env vllm: there is no bin/python" in " ".join(done.stdout.split())
    assert (tmp_path / "peers.png").stat().st_size > 1000


@pytest.mark.slow
def test_transformers_is_measured_for_real(long_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    target = tmp_path / "peers.json"
    command = [
        *(sys.executable, "-m", "tp_residual", "bench", "peers", "--model", str(long_model), "--weights", "random:1"),
        *("--peers", "transformers", "--batch", "1,2", "--prompt-tokens", "7", "--rounds", "3", "--starts", "2"),
        *("--dtype", "float32", "--slice-s", "0.2", "--output", str(target)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    rows = json.loads(target.read_text())["rows"]
    assert [(row["metric"], row["batch"]) for row in rows] == [
        ("start_s", 1), ("prefill_tok_s", 1), ("decode_tok_s", 1), ("decode_tok_s", 2),
    ]  # fmt: skip
    assert all(row["same_first_tokens"] == 1.0 for row in rows[1:]), "fp32: the same model says the same"
