"""The scripts in launch/: what they install, in which order and how often, and that the demo model is all or nothing.

The quick tests run the real shell code over a stand-in for Python that writes down what it is asked to do, so they
need no network. The slow one installs and downloads.
"""

import importlib.util
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
QUESTION = "What is the capital of France? Then tell me a fact about it."

# Answers `-c` with a real interpreter that sees no installed package but those in $FAKE_SITE, and writes down the rest.
FAKE_PYTHON = """\
#!/usr/bin/env bash
set -euo pipefail
[[ $1 == -c ]] && PYTHONPATH=$FAKE_SITE exec "$REAL_PYTHON" -S "$@"
[[ $1 == --version ]] && { echo "Python 3.11.0"; exit; }
echo "$*" >>"$FAKE_LOG"
case "$*" in
"-m venv "*)
    target=${!#}
    mkdir -p "$target/bin" && cp "$0" "$target/bin/python"
    echo "include-system-site-packages = $([[ $* == *--system-site-packages* ]] && echo true || echo false)" >"$target/pyvenv.cfg"
    ;;
"-m pip install "*--report*)
    echo "{\\"install\\": [{\\"metadata\\": {\\"name\\": \\"${FAKE_PLAN:-rich}\\", \\"version\\": \\"9.9\\"}}]}" >"$(sed 's/.*--report \\([^ ]*\\).*/\\1/' <<<"$*")"
    ;;
"-m pip install "*) [[ -z ${FAKE_PIP_FAILS:-} ]] || { echo "no such package"; exit 1; } ;;
*build_demo_model.py*) echo /the/model ;;
esac
"""  # noqa: E501


class Launcher:
    """A copy of what the scripts need, with a stand-in interpreter."""

    def __init__(self, folder: Path) -> None:
        self.tree = folder / "tree"
        shutil.copytree(ROOT / "launch", self.tree / "launch", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", self.tree)
        self.venv = self.tree / ".venv"
        self.site = folder / "site"
        self.site.mkdir()
        self.log = folder / "log"
        self.elsewhere = folder / "elsewhere"
        self.elsewhere.mkdir()
        python = folder / "python"
        python.write_text(FAKE_PYTHON)
        python.chmod(0o755)
        self.env = os.environ | {
            "PYTHON": str(python),
            "REAL_PYTHON": sys.executable,
            "FAKE_SITE": str(self.site),
            "FAKE_LOG": str(self.log),
        }

    def install_torch(self, version: str) -> None:
        info = self.site / "torch-0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Name: torch\nVersion: {version}\n")

    def start(self, script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.tree / "launch" / script, *arguments],
            cwd=self.elsewhere,
            env=self.env | env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def asked(self, beginning: str = "") -> list[str]:
        """What the interpreter was asked since the last call, the command lines that begin so."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [line for line in lines if line.startswith(beginning)]


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path)


def test_first_start_installs_then_generates(launcher: Launcher) -> None:
    done = launcher.start("quickstart")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    asked = launcher.asked()
    installs = [line for line in asked if line.startswith("-m pip install")]
    gpu = Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi")
    assert ["torch==2.13.0" in line for line in installs] == ([False] if gpu else [True, False])
    assert f"--editable {launcher.tree}[demo,plot]" in installs[-1]
    assert asked[-1] == f"-m tp_residual generate --tp 2 --model /the/model --chat --prompt {QUESTION}"


def test_later_start_asks_pip_nothing(launcher: Launcher) -> None:
    launcher.start("quickstart")
    launcher.asked()
    done = launcher.start("quickstart", "--prompt", "hi", "--tp", "3")
    assert done.stderr == ""
    builder, generate = launcher.asked()
    assert builder.endswith("build_demo_model.py")
    assert generate == "-m tp_residual generate --tp 2 --model /the/model --chat --prompt hi --tp 3"


def test_own_model_needs_no_demo_model(launcher: Launcher) -> None:
    launcher.start("quickstart")
    launcher.asked()
    launcher.start("quickstart", "--model=mine", "--prompt=hi")
    assert launcher.asked() == ["-m tp_residual generate --tp 2 --model=mine --prompt=hi"]


def test_extras_accumulate_and_a_new_pyproject_reinstalls(launcher: Launcher) -> None:
    launcher.start("quickstart")
    launcher.asked()
    launcher.start("test", "-k", "one")
    asked = launcher.asked()
    assert "[demo,plot,test]" in [line for line in asked if line.startswith("-m pip install")][-1]
    assert asked[-1] == "-m pytest -k one"
    assert not {"-m ruff check", "-m mypy"} & set(asked)  # with arguments only pytest
    launcher.start("quickstart")
    assert not launcher.asked("-m pip")
    with (launcher.tree / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    launcher.start("quickstart")
    assert "[demo,plot,test]" in launcher.asked("-m pip install")[-1]


def test_all_checks_without_arguments(launcher: Launcher) -> None:
    launcher.start("test", "--venv", "given/env")
    assert launcher.asked()[-3:] == ["-m ruff check", "-m mypy", "-m pytest"]
    assert (launcher.elsewhere / "given" / "env" / "bin" / "python").exists()  # relative to where it was started
    assert not launcher.venv.exists()


def test_failed_install_is_shown_and_tried_again(launcher: Launcher) -> None:
    done = launcher.start("demo_model", FAKE_PIP_FAILS="1")
    assert done.returncode == 1
    assert "no such package" in done.stderr
    assert "error: this command failed: " in done.stderr
    launcher.asked()
    assert launcher.start("demo_model").stdout == "/the/model\n"
    assert launcher.asked("-m pip install")


def test_present_torch_is_checked_and_kept(launcher: Launcher) -> None:
    launcher.install_torch("2.11.0+cu130")
    done = launcher.start("demo_model", "--system-torch")
    assert done.returncode == 0, done.stderr
    asked = launcher.asked()
    assert asked[0].startswith("-m venv --system-site-packages ")
    installs = [line for line in asked if line.startswith("-m pip install")]
    assert ["--dry-run" in line for line in installs] == [True, False]
    assert not any("torch==" in line for line in installs)


@pytest.mark.parametrize("options", [(), ("--system-torch",)])
def test_install_that_would_change_torch_is_refused(launcher: Launcher, options: tuple[str, ...]) -> None:
    launcher.install_torch("2.12.0")
    done = launcher.start("demo_model", *options, FAKE_PLAN="torch")
    assert done.returncode == 1
    assert "installing would change torch from 2.12.0 to 9.9" in done.stderr
    assert all("--dry-run" in line for line in launcher.asked("-m pip install"))


def test_old_torch_is_refused(launcher: Launcher) -> None:
    launcher.install_torch("2.9.1")
    done = launcher.start("demo_model", "--system-torch")
    assert done.returncode == 1
    assert "torch 2.9.1" in done.stderr and "is older than 2.11" in done.stderr
    assert not launcher.asked("-m pip install")


def test_missing_system_torch_is_refused(launcher: Launcher) -> None:
    done = launcher.start("demo_model", "--system-torch")
    assert done.returncode == 1
    assert "torch >= 2.11, is needed" in done.stderr
    assert not launcher.asked()


def test_system_torch_needs_an_environment_made_for_it(launcher: Launcher) -> None:
    launcher.start("demo_model")
    done = launcher.start("demo_model", "--system-torch")
    assert done.returncode == 1
    assert "was made without --system-torch" in done.stderr


def test_unsuitable_python_is_refused(launcher: Launcher) -> None:
    done = launcher.start("quickstart", PYTHON="/bin/false")
    assert done.returncode == 1
    assert "Python >= 3.11" in done.stderr and "/bin/false" in done.stderr
    assert not launcher.venv.exists()


def test_foreign_folder_is_no_environment(launcher: Launcher) -> None:
    (launcher.elsewhere / "data").write_text("precious")
    done = launcher.start("quickstart", "--venv", ".")
    assert done.returncode == 1
    assert "is not empty and no virtual environment" in done.stderr
    assert [path.name for path in launcher.elsewhere.iterdir()] == ["data"]


@pytest.mark.parametrize("script", ["quickstart", "test", "demo_model"])
def test_help_and_argument_errors(launcher: Launcher, script: str) -> None:
    shown = launcher.start(script, "--help")
    assert shown.returncode == 0
    assert f"usage: launch/{script} " in shown.stdout and "--system-torch" in shown.stdout
    for wrong in (["--venv"], ["--venv="]):
        done = launcher.start(script, *wrong)
        assert done.returncode == 2
        assert "--venv needs a directory" in done.stderr
    assert not launcher.asked() and not launcher.venv.exists()


def test_concurrent_starts_install_once(launcher: Launcher) -> None:
    started = [
        subprocess.Popen([launcher.tree / "launch" / "demo_model"], env=launcher.env, stderr=subprocess.DEVNULL)
        for _ in range(3)
    ]
    assert [process.wait(timeout=60) for process in started] == [0, 0, 0]
    asked = launcher.asked()
    assert len([line for line in asked if line.startswith("-m venv")]) == 1
    assert len([line for line in asked if "--editable" in line]) == 1


# --- the demo model ---------------------------------------------------------------------------------------------------


@pytest.fixture
def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_demo_model", ROOT / "launch" / "build_demo_model.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_two_files(model: Path) -> None:
    (model / "config.json").write_text("{}\n")
    (model / "model.safetensors").write_bytes(bytes(range(256)))


def must_not_build(model: Path) -> None:
    raise AssertionError("built again")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_model_is_built_once(builder: ModuleType, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    assert builder.ensure_model(target, make_two_files) == target
    assert names(target) == {"SHA256SUMS", "config.json", "model.safetensors"}
    assert names(target.parent) == {"model", ".model.lock"}
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=target, check=True)
    (target.parent / ".model.lock").unlink()
    builder.ensure_model(target, must_not_build)
    assert names(target.parent) == {"model"}  # a finished model needs no lock, so it may lie on a read-only disk


def damage_bytes(target: Path) -> None:
    with (target / "model.safetensors").open("r+b") as file:
        file.seek(100)
        file.write(b"\0")


def damage_by_removal(target: Path) -> None:
    (target / "config.json").unlink()


def make_outdated(target: Path) -> None:
    manifest = target / "SHA256SUMS"
    manifest.write_text(manifest.read_text().replace("recipe ", "recipe 0"))


@pytest.mark.parametrize("damage", [damage_bytes, damage_by_removal, make_outdated])
def test_damaged_model_is_replaced(builder: ModuleType, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    target = builder.ensure_model(tmp_path / "model", make_two_files)
    damage(target)
    built = []

    def make(model: Path) -> None:
        built.append(model)
        make_two_files(model)

    builder.ensure_model(target, make)
    assert len(built) == 1
    assert (target / "model.safetensors").read_bytes() == bytes(range(256))
    assert names(tmp_path) == {"model", ".model.lock"}
    builder.ensure_model(target, must_not_build)


def test_failed_build_leaves_nothing(builder: ModuleType, tmp_path: Path) -> None:
    def fail(model: Path) -> None:
        make_two_files(model)
        raise builder.BuildError("half-way")

    with pytest.raises(builder.BuildError, match="half-way"):
        builder.ensure_model(tmp_path / "model", fail)
    assert names(tmp_path) == {".model.lock"}


def test_killed_build_leaves_no_half_model(builder: ModuleType, tmp_path: Path) -> None:
    script = f"""
        import os, sys
        sys.path.insert(0, {str(ROOT / "launch")!r})
        from pathlib import Path
        from build_demo_model import ensure_model

        def make(model):
            (model / "config.json").write_text("half")
            os.kill(os.getpid(), {int(signal.SIGKILL)})

        ensure_model(Path({str(tmp_path / "model")!r}), make)
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert killed.returncode == -signal.SIGKILL
    left = names(tmp_path)
    assert len(left) == 2 and "model" not in left
    builder.ensure_model(tmp_path / "model", make_two_files)
    assert names(tmp_path) == {"model", ".model.lock"}


def test_someone_elses_folder_is_kept(builder: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "SHA256SUMS").write_bytes(b"\xff not ours")
    with pytest.raises(builder.BuildError, match="was not made by this script"):
        builder.ensure_model(tmp_path / "model", must_not_build)
    (tmp_path / "model" / "SHA256SUMS").unlink()
    builder.ensure_model(tmp_path / "model", make_two_files)  # an empty folder is anyone's


def test_builder_takes_no_misspelt_option() -> None:
    command = [sys.executable, ROOT / "launch" / "build_demo_model.py", "--dirr", "x"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == "" and "--dirr" in done.stderr


@pytest.mark.skipif("TP_RESIDUAL_DEMO_MODEL" not in os.environ, reason="launch/test builds the demo model and names it")
def test_demo_model_is_an_ordinary_directory() -> None:
    """The facts that other code relies on."""
    demo_model = Path(os.environ["TP_RESIDUAL_DEMO_MODEL"])
    config = json.loads((demo_model / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["model_type"] == "llama"
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["num_hidden_layers"]) == (9, 3, 30)
    assert config["rope_parameters"] == {"rope_theta": 100000.0, "rope_type": "default"}
    assert config["dtype"] == "bfloat16" and config["tie_word_embeddings"] is True
    assert not [name for name in config if "quant" in name or "name_or_path" in name]
    assert json.loads((demo_model / "generation_config.json").read_text())["eos_token_id"] == 2

    weights = demo_model / "model.safetensors"
    assert weights.stat().st_size == 269_060_552
    with weights.open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    header.pop("__metadata__")
    assert len(header) == 272 and "lm_head.weight" not in header
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fresh_machine_builds_a_model_that_answers(tmp_path: Path) -> None:
    """From nothing to the demo model, from another folder; Transformers, which shares no code with us, reads it."""
    tree, model = tmp_path / "tree", tmp_path / "model"
    skip = shutil.ignore_patterns(".venv", ".git", "*.egg-info", "build", ".*_cache", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=skip)
    command = [tree / "launch" / "demo_model", "--dir", "model"]
    first = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True)
    assert first.stdout.splitlines()[-1] == str(model)
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (again.stdout, again.stderr) == (first.stdout, "")

    script = f"""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained({str(model)!r})
        model = AutoModelForCausalLM.from_pretrained({str(model)!r}, dtype=torch.float32)
        chat = [{{"role": "user", "content": {QUESTION!r}}}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        output = model.generate(**prompt, do_sample=False, max_new_tokens=64)[0].tolist()
        length = prompt["input_ids"].shape[1]
        print(length, output[length:], tokenizer.decode(output[length:]))
    """
    python = tree / ".venv" / "bin" / "python"
    answer = subprocess.check_output([python, "-c", textwrap.dedent(script)], cwd=tmp_path, text=True)
    assert answer == "45 [504, 3575, 282, 4649, 314, 7042, 30, 2] The capital of France is Paris.<|im_end|>\n"
