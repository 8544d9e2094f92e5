"""benchmarks/gpu_check.py, as far as it goes without a GPU: every section at small sizes on the CPU, and that nothing bad goes unseen."""

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import _gpu_add_norm  # noqa: E402 - the script's own folder is where it looks for its parts
import _gpu_graphs  # noqa: E402
import _gpu_peers  # noqa: E402
import _gpu_speed  # noqa: E402
import _gpu_symmetric  # noqa: E402
import gpu_check  # noqa: E402
from _gpu_figures import figures, table  # noqa: E402
from _gpu_model import differing_ids  # noqa: E402
from _gpu_operands import Setting, difference, operands_for, same_bits  # noqa: E402
from _gpu_record import FAIL, INCOMPLETE, PASS, Recorder, Records  # noqa: E402

from tp_residual.bench.results import Result  # noqa: E402
from tp_residual.bench.shapes import NORM  # noqa: E402
from tp_residual.bench.timing import Samples  # noqa: E402
from tp_residual.inference.generate import Generation  # noqa: E402
from tp_residual.inference.logprobs import TokenLogProb  # noqa: E402
from tp_residual.kernels import contract  # noqa: E402

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def run_script(
    *arguments: str | Path, folder: Path = BENCHMARKS, timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(folder / "gpu_check.py"), *map(str, arguments)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


# -- the whole script


def test_without_cuda_it_says_so_in_one_line(tmp_path: Path) -> None:
    done = run_script("--output", tmp_path / "new")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1 and "skipped" in done.stdout and "no CUDA device" in done.stdout
    assert done.stderr == "" and not (tmp_path / "new").exists()


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    output = tmp_path_factory.mktemp("gpu_check") / "report"
    return run_script("--device", "cpu", "--jobs", "2", "--output", output), output


@pytest.mark.slow
@pytest.mark.timeout(320)  # the first of these waits for the run, half a minute on an idle machine
def test_every_section_runs(small_run: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, output = small_run
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((output / "gpu_check.json").read_text())
    checks = [row for row in report["rows"] if row["what"] == "check"]
    assert {check["status"] for check in checks} == {PASS} and all(check["comparisons"] for check in checks)
    assert {check["section"] for check in checks} == set(gpu_check.SECTIONS) - {"peers"}
    notes: dict[str, list[str]] = {}
    for note in report["notes"]:
        section, said, _ = note.split(": ", 2)
        notes.setdefault(section, []).append(said)
    assert notes.pop("peers") == list(_gpu_peers.PEERS)
    assert len(notes.pop("decode graphs")) == 4 and not notes  # who attends, by heads and their size
    assert sorted(path.name for path in output.iterdir()) == ["gpu_check.json", "gpu_check.txt"]


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_the_report_is_one_of_bench(small_run: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, output = small_run
    text = (output / "gpu_check.json").read_text()
    assert str(output.parent) not in text.replace(json.loads(text)["command"], "")
    report = Result(**json.loads(text))
    assert report.what == "gpu-check" and report.hardware["usable_cores"] and "torch" in report.versions
    assert done.stdout == (output / "gpu_check.txt").read_text()
    assert done.stdout.startswith("gpu_check: all checks passed in ") and report.commit in done.stdout
    rows = [row for row in report.rows if row["what"] == "add-norm"]
    assert {(row["cache"], row["launch"]) for row in rows} == {("warm", "graph"), ("cold", "eager")}
    assert {row["form"] for row in rows} >= {"fused", "fused in place", "add, rms_norm", "separate"}
    for row in rows:
        pairs = zip(row["limit_samples_us"], row["samples_us"], strict=True)
        assert row["percent_of_limit"] == pytest.approx(100 * statistics.median(a / b for a, b in pairs), rel=1e-3)
        least = 4 * row["tokens"] * row["hidden"] * 2
        assert row["least_bytes"] == least and row["useful_GB_s"] == pytest.approx(
            least / row["p50_us"] / 1e3, abs=6e-3
        )
    (load,) = (row for row in report.rows if row["what"] == "load")
    assert load["GB_s"] == pytest.approx(load["bytes"] / min(load["seconds"]) / 1e9, rel=0.3, abs=1e-3)


BROKEN = """
import os, time
def check_variants(record, setting):
    record.check("before", [None])
    os.abort()
def check_sizes(record, setting):
    record.check("before", [None])
    raise ImportError("no such thing")
def check_backward(record, setting):
    time.sleep(600)
"""


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    folder = tmp_path / "benchmarks"
    shutil.copytree(BENCHMARKS, folder, ignore=shutil.ignore_patterns("results", "__pycache__"))
    return folder


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_a_section_that_breaks_leaves_the_others_and_exits_with_1(copied: Path, tmp_path: Path) -> None:
    (copied / "_gpu_add_norm.py").write_text(BROKEN)
    script = copied / "gpu_check.py"
    assert '"check_backward", 90)' in script.read_text()
    script.write_text(script.read_text().replace('"check_backward", 90)', '"check_backward", 1.5)'))
    only = [word for name in ("variants", "backward", "sizes", "loading") for word in ("--only", name)]
    done = run_script("--device", "cpu", "--output", tmp_path / "out", *only, folder=copied)
    assert done.returncode == 1, done.stderr
    rows = json.loads((tmp_path / "out" / "gpu_check.json").read_text())["rows"]
    found = {(row["section"], row["name"]): row for row in rows if row["what"] == "check"}
    end = "the section runs to its end"
    assert found["variants", "before"]["status"] == found["sizes", "before"]["status"] == PASS
    assert "signal SIGABRT" in found["variants", end]["text"] and "exit code 1" in found["sizes", end]["text"]
    assert "ended after its 6 s" in found["backward", end]["text"]
    assert found["loading", "a checkpoint arrives bit for bit"]["status"] == PASS
    assert "ImportError: no such thing" in done.stderr
    assert "3 of 6 checks did not pass" in done.stdout and "backward: FAIL" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"), [(["--jobs", "0", "--output", "x"], "--jobs 0"), ([], "--output"), (["--only", "x"], "'x'")]
)
def test_bad_arguments_are_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(arguments)
    assert ended.value.code == 2 and said in capsys.readouterr().err


# -- records


@pytest.fixture
def record(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path / "records", "section", 60)


def failing() -> Iterator[str | None]:
    yield None
    yield "7 is not 8"
    raise AssertionError("nothing is compared after a difference")


def raising() -> Iterator[str | None]:
    yield None
    raise RuntimeError("the device is gone")


def test_checks_are_recorded_as_they_end(record: Recorder) -> None:
    assert record.check("good", [None, None]) and not record.check("bad", failing())
    assert not record.check("raising", raising()) and not record.check("empty", [])
    record.measure("measured", lambda: 1 // 0)
    record.row({"p50_us": 1.0})
    record.note("a note")
    with record.path.open("a") as file:
        file.write('["checks", {"cut')  # as a process that is killed leaves it
    read = Records.read(record.path)
    assert [(check["status"], check["comparisons"]) for check in read.checks] == [
        (PASS, 2), (FAIL, 2), (FAIL, 1), (FAIL, 0), (FAIL, 1),
    ]  # fmt: skip
    texts = [check["text"] for check in read.checks]
    assert texts[1:4] == ["7 is not 8", "RuntimeError: the device is gone", "nothing was compared"]
    assert "ZeroDivisionError" in texts[4]
    assert read.rows == [{"section": "section", "p50_us": 1.0}] and read.notes == ["section: a note"]
    assert not read.good and not Records().good and Records.read(Path("nowhere")).checks == []


def test_a_check_that_has_no_time_left_is_not_passed(tmp_path: Path) -> None:
    record = Recorder(tmp_path / "records", "section", -1)
    assert not record.check("late", [None, None])
    (check,) = Records.read(record.path).checks
    assert check["status"] == INCOMPLETE and check["comparisons"] == 1


# -- comparisons


def test_equal_bits_tell_zeros_apart_and_take_any_nan() -> None:
    x = torch.tensor([0.0, 1.0, float("nan"), float("inf")])
    assert same_bits(x, x.clone()) and same_bits(x.bfloat16(), x.bfloat16()) and same_bits(x, x * torch.tensor(1.0))
    assert not same_bits(x, torch.tensor([-0.0, 1.0, float("nan"), float("inf")]))
    assert not same_bits(x, torch.tensor([0.0, 1.0, 1.0, float("inf")]))
    assert not same_bits(x, x.double()) and not same_bits(x, x[:3])


def test_a_difference_is_counted_and_named() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert (
        difference("rows", (x, x), (x, x), "the contract") is None
        and difference("rows", (x, None), (x, None), "") is None
    )
    assert difference("rows", (x, x + (x == 2)), (x, x), "the contract") == (
        "rows: normed differs from the contract in 1 of 6 elements"
    )
    assert difference("rows", (x, None), (x, x), "it") == "rows: normed is missing"


def test_wrong_gradients_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = _gpu_add_norm.GRADIENT_SPECS["rms"]
    operands = operands_for(spec, 5, 16)
    cotangents = _gpu_add_norm._cotangents(spec, 5, 16, CPU)
    assert max(_gpu_add_norm.gradient_errors(spec, operands, cotangents)) < 1e-5
    right = _gpu_add_norm._gradients
    for which in range(3):
        off = lambda *of, at=which: [g * (1 + 3e-5 * (i == at)) for i, g in enumerate(right(*of))]  # noqa: E731
        monkeypatch.setattr(_gpu_add_norm, "_gradients", off)
        errors = _gpu_add_norm.gradient_errors(spec, operands, cotangents)
        assert errors[which] > 1e-5 and sum(error > 1e-5 for error in errors) == 1


@pytest.mark.parametrize("form", _gpu_symmetric.FORMS)
def test_one_wrong_element_on_one_rank_is_named(form: str, tmp_path: Path) -> None:
    setting = Setting(CPU, True, tmp_path)
    call = _gpu_symmetric.Call.make(_gpu_symmetric.SMALL_REQUEST, 3, 5, CPU, 1)
    stream, normed = call.expected
    assert normed is not None
    sharded = _gpu_symmetric.FORMS[form]["sharded"]
    found = [
        _gpu_symmetric._shards(rows, 3) if shard else rows.expand(3, *rows.shape).clone()
        for rows, shard in ((stream, sharded), (normed, form == "SP shard"))
    ]
    peers = _gpu_symmetric.peers_of(3, setting)
    assert call.judge(peers, form, (found[0], found[1]), "as it should be") is None
    for which, name in enumerate(("stream", "normed")):
        other = [rows.clone() for rows in found]
        other[which][1, 0, 7] += 1
        said = call.judge(peers, form, (other[0], other[1]), "one element off")
        assert said is not None and f"{name} differs from the contract on the device on ranks [1]" in said
    peers.report[1, 0] = 1
    assert "waited" in str(call.judge(peers, form, (found[0], found[1]), "late"))


def test_shards_are_ceil_chunks_with_nothing_behind_the_last_row() -> None:
    rows = torch.arange(10.0).view(5, 2)
    shards = _gpu_symmetric._shards(rows, 3)
    assert shards.shape == (3, 2, 2) and shards[:2].equal(rows[:4].view(2, 2, 2))
    assert shards[2, 0].equal(rows[4]) and shards[2, 1].isnan().all()


def generation(*steps: tuple[int, list[tuple[int, float]]]) -> Generation:
    logprobs = [TokenLogProb(token, dict(top).get(token, top[0][1]), top) for token, top in steps]
    return Generation(0, 1, token_ids=[token for token, _ in steps], logprobs=logprobs)


def test_greedy_ids_may_differ_only_where_the_cpu_cannot_decide() -> None:
    clear, close = [(4, -0.1), (5, -0.2)], [(6, -0.1), (7, -0.10000001)]
    expected = generation((4, clear), (6, close), (4, clear))
    assert differing_ids(expected, expected) is None
    assert differing_ids(generation((4, clear), (7, close), (9, clear)), expected) is None
    assert "new token 0 is 5, on CPU 4" in str(differing_ids(generation((5, clear), (6, close), (4, clear)), expected))
    assert "too close a call" in str(differing_ids(generation((7, close)), generation((6, close))))
    off = generation((4, [(4, -0.1003), (5, -0.2)]), (6, close), (4, clear))
    assert "log-probability of new token 0" in str(differing_ids(off, expected))


def test_what_is_captured_has_run_before_and_runs_again_by_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    @contextmanager
    def within(name: str) -> Iterator[None]:
        said.append(f"enter {name}")
        yield
        said.append(f"leave {name}")

    def stream(name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, wait_stream=lambda other: said.append(f"{name} waits for {other.name}"))

    graph = SimpleNamespace(name="graph", replay=lambda: said.append("replay"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream("aside"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream("current"))
    monkeypatch.setattr(torch.cuda, "stream", lambda of: within(of.name))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda of: within(of.name))
    _gpu_graphs.captured(lambda: said.append("run"), torch.device("cuda"))()
    assert said == [
        "aside waits for current", "enter aside", "run", "run", "leave aside", "current waits for aside",
        "enter graph", "run", "leave graph", "replay",
    ]  # fmt: skip


# -- speed


def test_samples_of_a_graph_are_of_one_call() -> None:
    samples = _gpu_speed._per_call(Samples((40.0, None, 60.0), (50.0,), 2, 1), 20)
    assert samples == Samples((2.0, None, 3.0), (2.5,), 40, 1)


def row(form: str, p50_us: float, percent: float, **changes: Any) -> dict[str, Any]:
    return {
        "form": form, "order": "fast" if changes.get("peer") else "contract", "in_place": form != "fused", "peer": False,
        "tokens": 16384, "hidden": 4096, "bytes": 16384 * 4096 * 2, "cache": "warm", "launch": "graph",
        "p50_us": p50_us, "p95_us": p50_us, "useful_GB_s": 1.0, "percent_of_limit": percent,
    } | changes  # fmt: skip


def test_figures_are_met_or_missed_like_against_like() -> None:
    rows = [
        row("fused", 10.0, 95.0),
        row("fused in place", 9.0, 94.9),
        row("fused", 1.0, 99.0, order="fast"),
        row("Liger", 9.5, 90.0, peer=True, in_place=False),
        row("vLLM", 9.5, 90.0, peer=True),
        row("fused in place", 2.0, 50.0, tokens=1, bytes=8192),
        row("vLLM", 2.0, 50.0, tokens=1, bytes=8192, peer=True),
    ]
    found = [(figure.met, figure.text) for figure in figures(rows)]
    shape = "16384 x 4096, warm cache"
    assert found == [
        (True, f"fused: 95.0 % of a same-run copy at {shape}, target 95 %"),
        (False, f"fused in place: 94.9 % of a same-run copy at {shape}, target 95 %"),
        (False, f"fused 10.00 us, Liger 9.50 us: 0.95 times as fast at {shape}"),
        (True, f"fused in place 9.00 us, vLLM 9.50 us: 1.06 times as fast at {shape}"),
        (True, "fused in place 2.00 us, vLLM 2.00 us: 1.00 times as fast at 1 x 4096, warm cache"),
    ]
    lines = table(rows)
    assert len(lines) == 1 + len(rows) and lines[0].split()[:3] == ["tokens", "hidden", "cache"]
    assert lines[1].split()[0] == "1" and len({len(line) for line in lines[1:]}) == 1


def test_a_peer_is_named_with_its_version_or_its_reason() -> None:
    def opened() -> Any:
        raise AssertionError("nothing is imported to find out")

    there, absent = _gpu_peers.Peer("numpy", True, opened), _gpu_peers.Peer("no_such_package", True, opened)
    peers = {"good": there, "absent": absent, "broken": there}
    usable, missing = _gpu_peers.discover(peers, lambda name: "no nvcc" if name == "broken" else None)
    assert list(usable) == ["good"] and usable["good"].startswith("numpy ") and usable["good"] != "numpy "
    assert missing["absent"] == "not installed" and missing["broken"].endswith("does not work here: no nvcc")


def test_a_peer_is_tried_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert "took more than" in str(_gpu_peers.attempt("FlashInfer", CPU, 0.0))
    if _gpu_peers.find_spec("sgl_kernel") is None:
        assert "No module named 'sgl_kernel'" in str(_gpu_peers.attempt("sgl-kernel", CPU, 100))


def in_place(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    new, normed = separate(input, residual, weight, eps)
    residual.copy_(new)
    input.copy_(normed)


def separate(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    spec = contract.AddNormSpec(BF16, BF16, replace(NORM, eps=eps))
    new, normed = contract.add_norm(spec, residual, input, weight=weight)
    assert normed is not None
    return new, normed


class LigerFunction:
    @staticmethod
    def apply(
        X: Tensor,
        R: Tensor,
        W: Tensor,
        eps: float,
        offset: float = 0.0,
        casting_mode: str = "llama",
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor]:
        assert offset == 0.0 and casting_mode == "llama" and not in_place
        return separate(X, R, W, eps)[::-1]  # type: ignore[return-value]


# as each package documents it
PEER_FUNCTIONS: dict[str, tuple[str, str, Any]] = {
    "FlashInfer": ("flashinfer.norm", "fused_add_rmsnorm", in_place),
    "sgl-kernel": ("sgl_kernel", "fused_add_rmsnorm", in_place),
    "vLLM": ("vllm._custom_ops", "fused_add_rms_norm", in_place),
    "Liger": ("liger_kernel.ops.fused_add_rms_norm", "LigerFusedAddRMSNormFunction", LigerFunction),
}


@pytest.mark.parametrize("name", _gpu_peers.PEERS)
def test_a_peer_is_called_as_it_documents(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, function, stand_in = PEER_FUNCTIONS[name]
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{function: stand_in}))  # type: ignore[arg-type]
    _gpu_peers.try_peer(name, CPU)

    def of_another_eps(*arguments: Any) -> Any:
        called: Callable[..., Any] = getattr(stand_in, "apply", stand_in)
        return called(*arguments[:3], 0.5, *arguments[4:])

    changed = SimpleNamespace(apply=of_another_eps) if name == "Liger" else of_another_eps
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{function: changed}))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="elements are not an add"):
        _gpu_peers.try_peer(name, CPU)
