"""Everything that one GPU can prove in six minutes: `python benchmarks/gpu_check.py --output DIR`.

Kernels bit for bit against the contract on the CPU and on the GPU, gradients against fp64, symmetric kernels with several ranks in one
launch, CUDA graphs, greedy text against the CPU, checkpoint loading, and add+norm's speed beside a copy and every installed peer.

Writes DIR/gpu_check.json, in the format of `python -m tp_residual bench ... --output`, and DIR/gpu_check.txt, which is also printed;
progress goes to stderr. Exit code 0: all checks passed, or there is no CUDA device, which is said in one line. 1: a check failed or was not
finished. Each section is a process of its own with its own time, so that what breaks one of them leaves the others' results.
"""

import argparse
import ctypes
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from _gpu_figures import figures, table
from _gpu_record import FAIL, PASS, Recorder, Records, describe

ROOT = Path(__file__).resolve().parents[1]
TOTAL_S = 345.0
MARGIN_S = 4.0  # between the moment when a section begins nothing new and the one when it is ended
PR_SET_PDEATHSIG = 1
ON_CPU = 4  # times as much time: the interpreter on a busy machine


@dataclass(frozen=True)
class Section:
    """seconds: from the start of its process until that is ended. alone: nothing else runs beside what takes times."""

    module: str
    function: str
    seconds: float
    alone: bool = False


SECTIONS = {
    "variants": Section("_gpu_add_norm", "check_variants", 90),
    "sizes": Section("_gpu_add_norm", "check_sizes", 90),
    "backward": Section("_gpu_add_norm", "check_backward", 90),
    "symmetric": Section("_gpu_symmetric", "check_symmetric", 120),
    "graphs": Section("_gpu_graphs", "check_graphs", 60),
    "generation": Section("_gpu_model", "check_generation", 40),
    "decode graphs": Section("_gpu_model", "check_decode_graphs", 30),
    "peers": Section("_gpu_speed", "find_peers", 120),
    "loading": Section("_gpu_model", "check_loading", 30, alone=True),
    "speed": Section("_gpu_speed", "measure_speed", 120, alone=True),
}


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(f"gpu_check: skipped, torch {torch.__version__} finds no CUDA device here; nothing was checked")
        return 0
    if arguments.section is not None:
        run_section(arguments)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # sections and scratch end as for Ctrl-C
    arguments.output.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=arguments.output, prefix=".gpu_check-") as scratch:
        records = run_all(arguments.only or list(SECTIONS), Path(scratch), arguments)
    return report(records, arguments, time.monotonic() - began)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="for the report; made if need be")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="this section; may be repeated")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: how the script itself is tested"
    )
    jobs = max(1, len(os.sched_getaffinity(0)) // 2)
    parser.add_argument("--jobs", type=int, default=jobs, help="sections at a time, of those that take no times")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.jobs < 1:
        parser.error(f"--jobs {arguments.jobs} must be at least 1")
    return arguments


# -- a section, in its own process


def run_section(arguments: argparse.Namespace) -> None:
    """output: a folder for this section alone."""
    section = SECTIONS[arguments.section]
    record = Recorder(arguments.output / "records", arguments.section, arguments.seconds - MARGIN_S)
    from _gpu_operands import Setting  # the parent needs nothing of the package before the end

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # ends with its parent, whose process group it has left
    torch.set_float32_matmul_precision("highest")  # vendors' images turn TF32 on by a variable
    on_cpu = arguments.device == "cpu"
    # threads that wait for each other on a busy machine take a hundred times as long
    torch.set_num_threads(1 if on_cpu else 4)
    setting = Setting(torch.device("cpu" if on_cpu else "cuda:0"), small=on_cpu, scratch=arguments.output)
    getattr(importlib.import_module(section.module), section.function)(record, setting)


class Running:
    """A section's process, and what became of it."""

    def __init__(self, name: str, seconds: float, folder: Path, device: str) -> None:
        self.name, self.seconds, self.folder, self.began = name, seconds, folder, time.monotonic()
        folder.mkdir()
        command = [sys.executable, str(Path(__file__).resolve()), "--section", name, "--seconds", str(seconds)]
        # a session of its own, so that compilers it started end with it
        self.process = subprocess.Popen(
            [*command, "--output", str(folder), "--device", device],
            env=environment(device),
            start_new_session=True,
            stdout=sys.stderr.fileno(),  # stdout is the report's
        )

    @property
    def over(self) -> bool:
        return self.process.poll() is not None or time.monotonic() - self.began > self.seconds

    def end(self) -> Records:
        """Ends it if need be. What it wrote, and a failed check where it did not end well."""
        code = self.process.poll()
        if code is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        records = Records.read(self.folder / "records")
        if code is None:
            return with_failure(records, self.name, f"ended after its {self.seconds:.0f} s")
        if code != 0:
            ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return with_failure(records, self.name, f"its process ended with {ended}; stderr has the reason")
        if not records.checks and not records.notes:
            return with_failure(records, self.name, "it checked nothing")
        return records


def run_all(names: list[str], scratch: Path, arguments: argparse.Namespace) -> Records:
    """Sections that take no times side by side, as most of their time is a compiler's; then the others one by one."""
    slack = ON_CPU if arguments.device == "cpu" else 1
    deadline, found = time.monotonic() + TOTAL_S * slack, dict[str, Records]()
    for alone in (False, True):
        waiting, running = [name for name in names if SECTIONS[name].alone == alone], list[Running]()
        try:
            while waiting or running:
                while waiting and len(running) < (1 if alone else arguments.jobs):
                    name = waiting.pop(0)
                    seconds = min(SECTIONS[name].seconds * slack, deadline - time.monotonic())
                    if seconds > MARGIN_S:
                        running.append(Running(name, seconds, scratch / name, arguments.device))
                    else:
                        found[name] = with_failure(Records(), name, "not begun: the time of all sections was over")
                for each in [each for each in running if each.over]:
                    running.remove(each)
                    found[each.name] = each.end()
                time.sleep(0.05)
        finally:
            for each in running:
                each.end()
    records = Records()
    for name in names:
        records.extend(found[name])
    return records


def environment(device: str) -> dict[str, str]:
    """The package is found beside this folder; on CPU, kernels run in Triton's interpreter."""
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    changed = {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    return os.environ | changed | ({"TRITON_INTERPRET": "1"} if device == "cpu" else {})


def with_failure(records: Records, name: str, text: str) -> Records:
    check = {"section": name, "name": "the section runs to its end", "status": FAIL, "comparisons": 0, "text": text}
    records.add("checks", check)
    print(f"{name}: {describe(check)}", file=sys.stderr, flush=True)
    return records


# -- the report


def report(records: Records, arguments: argparse.Namespace, seconds: float) -> int:
    sys.path.insert(0, str(ROOT))
    from tp_residual.bench.machine import commit, hardware, versions
    from tp_residual.bench.results import Result, replace_file

    result = Result(
        what="gpu-check",
        hardware=hardware(len(os.sched_getaffinity(0))),
        versions=versions(),
        commit=commit(),
        command=" ".join(["python benchmarks/gpu_check.py", *sys.argv[1:]]),
        settings={"ranks": 1, "device": arguments.device, "seconds": round(seconds, 1)},
        rows=[{"what": "check", **check} for check in records.checks] + records.rows,
        notes=records.notes,
    )
    result.write_json(str(arguments.output / "gpu_check.json"))
    text = summary(records, dict(result.hardware), dict(result.versions), result.commit, seconds)
    replace_file(str(arguments.output / "gpu_check.txt"), text)
    print(text, end="")
    return 0 if records.good else 1


def summary(
    records: Records, hardware: dict[str, object], versions: dict[str, str], commit: str, seconds: float
) -> str:
    """What failed first, then all checks, figures, tables, notes."""
    gpus = hardware.get("gpus")
    device = gpus[0] if isinstance(gpus, list) and gpus else "CPU, small sizes"
    named = ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton", "CUDA") if name in versions)
    failed = [check for check in records.checks if check["status"] != PASS]
    verdict = "all checks passed" if records.good else f"{len(failed)} of {len(records.checks)} checks did not pass"
    lines = [f"gpu_check: {verdict} in {seconds:.0f} s", f"{device}; {named}; commit {commit}", ""]
    lines += [f"{check['section']}: {describe(check)}" for check in failed] + [""] * bool(failed)
    lines += [f"{check['section']}: {describe(check)}" for check in records.checks if check["status"] == PASS]
    speeds = [row for row in records.rows if row["section"] == "speed"]
    if speeds:
        taken = (
            f"add+norm in bfloat16: {speeds[0]['timing']} timing, medians of interleaved rounds, GB/s of four passes"
        )
        lines += ["", taken, *table(speeds), ""]
        lines += [f"figure {'met' if figure.met else 'missed'}: {figure.text}" for figure in figures(speeds)]
    for row in records.rows:
        if row["section"] == "loading":
            lines += [
                "",
                f"load: {row['bytes'] / 1e9:.2f} GB at {row['GB_s']} GB/s, {row['percent_of_limit']} % of {row['limit']}",
            ]
    return "\n".join([*lines, *(f"note: {note}" for note in records.notes)]) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
