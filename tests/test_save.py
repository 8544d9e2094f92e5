"""Checkpoints with optimizer state: the same bits at any tp size, the old one whatever interrupts, refusals by name.

Functions named check_* run on every rank.
"""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from residual_oracle import variant, variant_weights
from safetensors import safe_open
from tiny_models import MODELS, config, prompts, sharded
from torch import Tensor

from tp_residual.checkpoint import replace, save
from tp_residual.checkpoint.load import WEIGHT_DTYPES
from tp_residual.checkpoint.save import save_sharded, save_whole
from tp_residual.checkpoint.state import Manifest, load_training
from tp_residual.errors import CheckpointError, CollectiveError
from tp_residual.inference.loading import load_model
from tp_residual.model.attention_backend import NoCache, TokenBatch
from tp_residual.model.config import ModelConfig
from tp_residual.model.config_values import config_values
from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.blocks import parameter_blocks, sync_gradients
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.residual.config import PRESETS, ResidualConfig
from tp_residual.testing import RanksFailed, run_ranks
from tp_residual.training import next_token_targets, vocab_parallel_cross_entropy

# 9 query heads over 3, 2 and 1 ranks with 3 KV heads: blocks with one and with two holders; and a tied head
PLAIN = ("qwen3", "llama_biased")


def model_config(name: str, preset: str) -> ModelConfig:
    return variant(name, ResidualConfig.preset(preset))


def built(
    group: TensorParallelGroup, name: str, preset: str, sequence_parallel: str, dtype: torch.dtype = torch.float32
) -> tuple[CausalLM, torch.optim.Optimizer]:
    """A model with random weights, and AdamW over two groups with options of their own."""
    wanted = model_config(name, preset)
    weights = {key: value.to(dtype) for key, value in variant_weights(wanted).items()}
    model = sharded(wanted, group, weights, dtype=dtype, sequence_parallel=sequence_parallel)
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 2e-3}], lr=1e-2)
    return model, optimizer


def groups_of(world: TensorParallelGroup) -> dict[int, TensorParallelGroup | None]:
    """Groups of the first 1, 2 and 3 ranks of three, None for ranks outside: one start of ranks for every tp size."""
    assert world.size == 3
    two = TensorParallelGroup.from_ranks([0, 1], checked=True) if world.rank < 2 else None
    return {1: TensorParallelGroup.single() if world.rank == 0 else None, 2: two, 3: world}


def train(model: CausalLM, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        batch = TokenBatch.prefill(prompts(3, seed=step))
        logits = model(batch, NoCache()).local_logits
        loss = vocab_parallel_cross_entropy(logits, next_token_targets(batch), model.lm_head.split, model.group)
        loss.backward()
        sync_gradients(parameter_blocks(model), model.group)
        optimizer.step()
        optimizer.zero_grad()


def store(form: str, path: Path, model: CausalLM, optimizer: torch.optim.Optimizer | None, **options: Any) -> None:
    blocks = parameter_blocks(model)
    if form == "whole":
        save_whole(
            path,
            blocks,
            model.group,
            config=config_values(model.config, dtype="float32"),
            optimizer=optimizer,
            **options,
        )
    else:
        save_sharded(path, blocks, model.group, optimizer=optimizer, **options)


def assembled(folder: Path) -> dict[str, Tensor]:
    """Every tensor whole, put together from the pieces by this file's own arithmetic; NaN where nothing was written."""
    manifest, tensors = Manifest.read(folder), {}
    for name, saved in manifest.tensors.items():
        whole = torch.full(saved.shape, float("nan"), dtype=WEIGHT_DTYPES[saved.dtype])
        for piece in saved.pieces:
            index = [slice(None)] * len(saved.shape)
            index[piece.dim] = slice(piece.start, piece.stop)
            with safe_open(folder / piece.file, framework="pt") as file:
                whole[tuple(index)] = file.get_tensor(piece.key(name, saved.shape))
        tensors[name] = whole
    return tensors


def assert_same(one: Path, other: Path) -> None:
    ours, theirs = assembled(one), assembled(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), f"{name} differs between {one.name} and {other.name}"
        assert torch.isfinite(value).all(), name
    a, b = Manifest.read(one).optimizer, Manifest.read(other).optimizer
    assert a is not None and b is not None
    assert (a.kinds, a.scalars, [each.options for each in a.groups]) == (
        b.kinds,
        b.scalars,
        [each.options for each in b.groups],
    )


# ---- any tp size to any other ----


def first(group: TensorParallelGroup, out: Path, name: str, preset: str, sequence_parallel: str, form: str) -> None:
    model, optimizer = built(group, name, preset, sequence_parallel)
    train(model, optimizer, range(2))
    store(form, out, model, optimizer, state={"step": 2})


def hop(
    group: TensorParallelGroup,
    source: Path,
    out: Path,
    name: str,
    preset: str,
    sequence_parallel: str,
    form: str,
    steps: range = range(0),
) -> None:
    """Load into a model of other weights, whose optimizer has another learning rate; perhaps train; save."""
    torch.manual_seed(3)
    model, optimizer = built(group, name, preset, sequence_parallel)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand_like(parameter))
    for options in optimizer.param_groups:
        options["lr"] = 7.0
    loaded = load_training(source, parameter_blocks(model), group, optimizer=optimizer)
    assert loaded.state == {"step": 2}
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999) and optimizer.param_groups[1]["lr"] == 2e-3
    train(model, optimizer, steps)
    store(form, out, model, optimizer, state=loaded.state)


CHAIN = ((1, "sharded"), (3, "sharded"), (2, "whole"), (1, "sharded"))
CASES = (
    ("qwen3", "pre", ("off", "off", "on", "off")),
    ("llama_biased", "sandwich", ("off", "on", "off", "off")),
    # the projection's columns are sharded where the stream is replicated, and whole on every rank where it is token-sharded
    ("llama", "projection", ("off", "off", "on", "off")),
    ("llama", "gate_lowrank", ("off", "on", "off", "off")),
)


def check_chains(world: TensorParallelGroup, folder: Path) -> None:
    groups = groups_of(world)
    for name, preset, modes in CASES:
        for number, ((size, form), mode) in enumerate(zip(CHAIN, modes, strict=True)):
            out = folder / f"{name}-{preset}-{number}"
            group = groups[size]
            if group is not None and number == 0:
                first(group, out, name, preset, mode, form)
            elif group is not None:
                hop(group, folder / f"{name}-{preset}-{number - 1}", out, name, preset, mode, form)
            world.share(f"saved {out.name}", "")


def test_the_bits_survive_every_change_of_tp(tmp_path: Path) -> None:
    run_ranks(3, check_chains, tmp_path, checked=False)
    for name, preset, _ in CASES:
        folders = [tmp_path / f"{name}-{preset}-{number}" for number in range(len(CHAIN))]
        for (size, _), here in zip(CHAIN, folders, strict=True):
            assert Manifest.read(here).tp_size == size
            assert_same(folders[0], here)
        optimizer = Manifest.read(folders[-1]).optimizer
        assert optimizer is not None and all(kinds == ("exp_avg", "exp_avg_sq") for kinds in optimizer.kinds.values())
        assert all(scalars == {"step": ("float32", 2.0)} for scalars in optimizer.scalars.values())


def check_uninterrupted(world: TensorParallelGroup, folder: Path) -> None:
    """At tp 2 two steps, a save, two steps; and from the save the same two steps at tp 2, 1 and 3."""
    groups = groups_of(world)
    for preset in ("pre", "projection"):
        two = groups[2]
        if two is not None:
            model, optimizer = built(two, "llama", preset, "off")
            train(model, optimizer, range(2))
            store("sharded", folder / f"{preset}-two", model, optimizer, state={"step": 2})
            train(model, optimizer, range(2, 4))
            store("sharded", folder / f"{preset}-four", model, optimizer, state={"step": 4})
        world.share(f"saved {preset}", "")
        for size, mode in ((2, "off"), (1, "off"), (3, "on")):
            group, out = groups[size], folder / f"{preset}-tp{size}"
            if group is not None:
                hop(group, folder / f"{preset}-two", out, "llama", preset, mode, "whole", range(2, 4))


def test_training_goes_on_as_if_uninterrupted(tmp_path: Path) -> None:
    """The same bits at the same tp; to rounding at another, and there the moments matter: without them the weights are far off."""
    run_ranks(3, check_uninterrupted, tmp_path, checked=False)
    for preset in ("pre", "projection"):
        assert_same(tmp_path / f"{preset}-four", tmp_path / f"{preset}-tp2")
        truth, moved = assembled(tmp_path / f"{preset}-four"), assembled(tmp_path / f"{preset}-two")
        for size in (1, 3):
            for name, value in assembled(tmp_path / f"{preset}-tp{size}").items():
                # fp32 sums in another order, 1e-7 each, where AdamW divides by a moment that is nearly zero
                assert torch.allclose(value, truth[name], rtol=1e-3, atol=2e-4), f"{name} at tp {size}"
        far = max(float((moved[name] - truth[name]).abs().max()) for name in moved)
        assert far > 5e-3  # two steps at this learning rate


def test_every_element_is_saved_once_by_its_owner(tmp_path: Path) -> None:
    run_ranks(3, first, tmp_path / "c", "qwen3", "pre", "off", "sharded")
    manifest = Manifest.read(tmp_path / "c")
    elements = sum(value.numel() for value in assembled(tmp_path / "c").values())
    in_files = 0
    for name in manifest.files:
        with safe_open(tmp_path / "c" / name, framework="pt") as file:
            in_files += sum(file.get_tensor(key).numel() for key in file.keys())
    assert in_files == elements
    assert sorted(manifest.files) == [f"rank-0000{rank}-of-00003.safetensors" for rank in (1, 2, 3)]
    down = manifest.tensors["model.layers.0.mlp.down_proj.weight.exp_avg"]
    assert [(piece.dim, piece.start, piece.stop) for piece in down.pieces] == [(1, 0, 16), (1, 16, 32), (1, 32, 47)]


# ---- what others read ----


def check_load_model(group: TensorParallelGroup, folder: Path) -> Tensor:
    model, _ = load_model(folder, group)
    return model(TokenBatch.prefill(prompts(2)), NoCache()).local_logits.detach()


def check_whole_in_shards(group: TensorParallelGroup, out: Path, name: str, transport: str) -> None:
    model, optimizer = built(group, name, "pre", "off")
    train(model, optimizer, range(1))
    store("whole", out / "one", model, optimizer)
    store("whole", out / "many", model, optimizer, max_shard_bytes=20_000, files={"note.txt": "by hand"})


@pytest.mark.parametrize(
    ("name", "transport"), [pytest.param("qwen3", "torch", marks=pytest.mark.slow), ("llama_biased", "shared")]
)
def test_a_whole_save_is_a_model_directory(tmp_path: Path, name: str, transport: str) -> None:
    from transformers import AutoModelForCausalLM

    run_ranks(3, check_whole_in_shards, tmp_path, name, transport, transport=transport)
    one, many = tmp_path / "one", tmp_path / "many"
    assert_same(one, many)
    assert not list(one.glob("*.index.json")) and len(list(many.glob("model-*.safetensors"))) > 3
    assert (many / "note.txt").read_text() == "by hand"
    ids = torch.tensor([prompts(1)[0]])
    for folder in (one, many):
        theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        assert theirs.dtype == torch.float32
        expected = theirs(ids).logits[0].detach()
        ours = run_ranks(1, check_load_model, folder)[0][: ids.shape[1]]
        assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-4)  # fp32 in another order, logits of about 1


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_config_values_give_the_config_back(preset: str) -> None:
    for name in MODELS:
        wanted = model_config(name, preset)
        assert ModelConfig.from_dict(json.loads(json.dumps(config_values(wanted))), name) == wanted
    assert ("residual" in config_values(wanted)) == (preset != "pre")


def test_a_variant_is_loaded_with_its_connection(tmp_path: Path) -> None:
    run_ranks(2, first, tmp_path / "c", "llama", "projection", "off", "whole")
    assert ModelConfig.from_dir(tmp_path / "c").residual == ResidualConfig.preset("projection")
    both = [torch.cat(run_ranks(size, check_load_model, tmp_path / "c"), dim=1) for size in (1, 2)]
    assert torch.allclose(both[0], both[1], rtol=1e-4, atol=1e-4)


# ---- interrupted ----

QUICK: dict[str, Any] = {"num_hidden_layers": 1, "intermediate_size": 7, "vocab_size": 11}


def quick(group: TensorParallelGroup, seed: int) -> CausalLM:
    model = CausalLM(config("llama_biased", **QUICK), group)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for block in parameter_blocks(model):
            full = torch.randn(block.global_shape, generator=generator)
            block.of(block.parameter).copy_(block.of_full(full))
    return model


def seed_in(path: Path, group: TensorParallelGroup) -> int:
    """Which of the two models a checkpoint holds, all of it."""
    model = quick(group, 9)
    number = int(load_training(path, parameter_blocks(model), group).state["seed"])
    expected = quick(group, number)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    return number


class Bomb:
    """Kills this process at its n-th call, before or after what the call does."""

    def __init__(self, fuse: int) -> None:
        self.fuse = fuse

    def tick(self) -> None:
        self.fuse -= 1
        if self.fuse == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, action: Callable[..., Any], *, after: bool = True) -> Callable[..., Any]:
        def with_fuse(*arguments: Any, **options: Any) -> Any:
            self.tick()
            result = action(*arguments, **options)
            if after:
                self.tick()
            return result

        return with_fuse


def check_kills(group: TensorParallelGroup, folder: Path, exchange: bool, form: str) -> tuple[list[int], int]:
    """A child is killed at every step of its save in turn; what the folder holds then, and how many steps there are."""
    path, found = folder / "c", []
    models = {seed: quick(group, seed) for seed in (1, 2, 9)}
    blocks = parameter_blocks(models[9])
    os.fsync = lambda handle: None  # a kill loses nothing that was written, and disks are slow

    def holds() -> int:
        """As `seed_in`, of models made once."""
        number = int(load_training(path, blocks, group).state["seed"])
        pairs = zip(models[9].parameters(), models[number].parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        return number

    store(form, path, models[1], None, state={"seed": 1})
    for fuse in range(1, 500):
        child = os.fork()
        if child == 0:
            try:
                bomb = Bomb(fuse)
                for name in ("fsync", "rename", "mkdir", "unlink", "rmdir"):
                    setattr(os, name, bomb.around(getattr(os, name)))
                save._TensorFile.add = bomb.around(save._TensorFile.add, after=False)
                replace._exchanged = bomb.around(replace._exchanged) if exchange else lambda new, path: False
                store(form, path, models[2], None, state={"seed": 2})
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        found.append(holds())
        if os.WIFEXITED(status):
            assert sorted(each.name for each in folder.iterdir()) == ["c"], "nothing is left behind"
            return found, fuse
        leftover = [each for each in folder.iterdir() if each != path]
        if found[-1] == 2 or (leftover and fuse % 8 == 0):  # what was left is not in the next save's way
            store(form, path, models[1], None, state={"seed": 1})
            assert sorted(each.name for each in folder.iterdir()) == ["c"]
        for each in folder.iterdir():
            if each != path:
                shutil.rmtree(each)
    raise AssertionError("the save never ended")


def check_all_kills(group: TensorParallelGroup, folder: Path) -> None:
    for exchange, form in ((True, "sharded"), (False, "whole")):
        here = folder / f"{form}-{exchange}"
        here.mkdir()
        found, steps = check_kills(group, here, exchange, form)
        assert steps > 30
        assert set(found) == {1, 2} and found == sorted(found), "the old one, then the new one"


def test_killed_at_any_step_one_of_the_two_is_there(tmp_path: Path) -> None:
    run_ranks(1, check_all_kills, tmp_path)


def check_killed_rank(group: TensorParallelGroup, path: Path) -> None:
    store("sharded", path, quick(group, 1), None, state={"seed": 1})
    if group.rank == 1:
        save._TensorFile.finish = lambda self: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,method-assign,return-value]
    store("sharded", path, quick(group, 2), None, state={"seed": 2})


def test_a_rank_that_is_killed_is_named_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, check_killed_rank, tmp_path / "c")
    assert isinstance(failed.value.exceptions[0], CollectiveError)
    assert "the process of rank 1 has ended" in str(failed.value.exceptions[0])
    assert run_ranks(3, check_seed, tmp_path / "c") == [1, 1, 1]


def check_seed(group: TensorParallelGroup, path: Path) -> int:
    return seed_in(path, group)


# ---- disks ----


def refuse(error: int) -> Callable[..., Any]:
    def raising(*_: Any) -> None:
        raise OSError(error, os.strerror(error))

    return raising


def check_disk(group: TensorParallelGroup, path: Path, form: str, where: str, victim: int) -> tuple[str, int]:
    """The text of the error, and what the folder holds afterwards."""
    store(form, path, quick(group, 1), None, state={"seed": 1})
    owner, name = {
        "write": (save._TensorFile, "_write"),
        "reserve": (os, "posix_fallocate"),
        "fsync": (os, "fsync"),
        "rename": (replace, "_exchanged"),
    }[where]
    if group.rank == victim:
        original = getattr(owner, name)
        setattr(owner, name, refuse(errno.ENOSPC))
    with pytest.raises(CheckpointError) as caught:
        store(form, path, quick(group, 2), None, state={"seed": 2})
    if group.rank == victim:
        setattr(owner, name, original)
    group.share(f"rank 0 has cleared up {path.parent}", "")
    assert sorted(each.name for each in path.parent.iterdir()) == [path.name]
    kept = seed_in(path, group)
    store(form, path, quick(group, 3), None, state={"seed": 3})
    assert seed_in(path, group) == 3
    return str(caught.value), kept


FAULTS = (
    ("sharded", "write", 1),
    ("sharded", "reserve", 0),
    ("sharded", "fsync", 1),
    ("sharded", "rename", 0),
    ("whole", "write", 0),
    ("whole", "reserve", 0),
)


def check_disks(group: TensorParallelGroup, folder: Path) -> list[tuple[str, int]]:
    return [check_disk(group, folder / "-".join(map(str, fault)) / "c", *fault) for fault in FAULTS]


def test_a_failing_disk_is_an_error_on_every_rank(tmp_path: Path) -> None:
    said = run_ranks(2, check_disks, tmp_path)
    for (_, _, victim), (text, kept), (other, kept_there) in zip(FAULTS, *said, strict=True):
        assert (kept, kept_there) == (1, 1) and text == other
        assert f"rank {victim} of 2: cannot write" in text and "No space left on device" in text
        assert "an earlier checkpoint is left as it was" in text


def check_file_limit(group: TensorParallelGroup, path: Path) -> str:
    """A limit that the kernel itself enforces, on one rank."""
    store("sharded", path, quick(group, 1), None, state={"seed": 1})
    if group.rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError) as caught:
        store("sharded", path, quick(group, 2), None, state={"seed": 2})
    assert seed_in(path, group) == 1
    return str(caught.value)


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    texts = run_ranks(2, check_file_limit, tmp_path / "c")
    assert texts[0] == texts[1] and "rank 1 of 2: cannot write" in texts[0] and "File too large" in texts[0]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KB; only root may make one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(disk)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def check_full_disk(group: TensorParallelGroup, disk: Path) -> list[str]:
    texts = []
    for form in ("sharded", "whole"):
        path = disk / form
        store(form, path, quick(group, 1), None, state={"seed": 1})
        if group.rank == 0:
            room = shutil.disk_usage(disk).free
            (disk / "ballast").write_bytes(b"x" * (room - 3 * 4096))
        group.share(f"the disk is full {form}", "")
        with pytest.raises(CheckpointError) as caught:
            store(form, path, quick(group, 2), None, state={"seed": 2})
        assert seed_in(path, group) == 1
        texts.append(str(caught.value))
        group.share(f"looked {form}", "")
        if group.rank == 0:
            (disk / "ballast").unlink()
    return texts


def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    ours, theirs = run_ranks(2, check_full_disk, small_disk)
    assert ours == theirs and all("No space left on device" in text for text in ours)


# ---- refused by name ----


FILE = "rank-00002-of-00002.safetensors"


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


HARMS: tuple[tuple[Callable[[Path, Path], object], str], ...] = (
    (lambda one, other: shutil.copy(other / FILE, one / FILE), f"{FILE} has SHA-256"),
    (lambda one, other: flip(one / FILE), f"{FILE} has SHA-256"),
    (lambda one, other: os.truncate(one / FILE, 100), f"{FILE} has 100 bytes instead of"),
    (lambda one, other: (one / FILE).unlink(), f"{FILE} is not there, and training.json lists it"),
    (lambda one, other: os.truncate(one / "training.json", 500), "training.json is broken"),
    (lambda one, other: (one / "training.json").write_text("[]"), "training.json is broken"),
    (lambda one, other: (one / "training.json").unlink(), "has no training.json"),
    (
        lambda one, other: change(one, lambda m: m["tensors"]["model.norm.weight"].update(pieces=[])),
        "norm.weight of shape",
    ),
    (lambda one, other: change(one, overlap), "are not each of 0 to 11 exactly once"),
    (lambda one, other: change(one, lambda m: m.update(version=7)), "has version 7"),
    (
        lambda one, other: change(one, lambda m: m["files"].update({"../x": {"bytes": 1, "sha256": ""}})),
        "outside its folder",
    ),
)


def check_harms(group: TensorParallelGroup, folder: Path) -> list[str]:
    """What each harm is answered with; no parameter is written then."""
    for seed in (1, 2):
        store("sharded", folder / str(seed), quick(group, seed), None, state={"seed": seed})
    texts = []
    for number, (harm, _) in enumerate(HARMS):
        path = folder / f"harmed {number}"
        if group.rank == 0:
            shutil.copytree(folder / "1", path)
            harm(path, folder / "2")
        group.share(path.name, "")
        model, before = quick(group, 9), quick(group, 9)
        with pytest.raises(CheckpointError) as caught:
            load_training(path, parameter_blocks(model), group)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
        texts.append(str(caught.value))
    return texts


def test_a_torn_or_mixed_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    ours, theirs = run_ranks(2, check_harms, tmp_path)
    assert ours == theirs
    for text, (_, said) in zip(ours, HARMS, strict=True):
        assert said in text, text


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((folder / "training.json").read_text())
    edit(manifest)
    (folder / "training.json").write_text(json.dumps(manifest))


def overlap(manifest: dict[str, Any]) -> None:
    manifest["tensors"]["model.embed_tokens.weight"]["pieces"][1]["start"] -= 1


def check_misfits(group: TensorParallelGroup, path: Path) -> None:
    """Another model, dtype, optimizer or grouping; a diverged replica; NaN; state that has no blocks or is no JSON; a foreign folder."""
    model, optimizer = built(group, "llama", "pre", "off")
    train(model, optimizer, range(1))
    blocks = parameter_blocks(model)
    generator = torch.Generator().manual_seed(5)
    torch.rand(3, generator=generator)
    drawn = torch.rand(4, generator=generator.clone_state())
    save_sharded(path, blocks, group, optimizer=optimizer, generators={"data": generator})

    generator.manual_seed(6)
    load_training(path, blocks, group, optimizer=optimizer, generators={"data": generator})
    assert torch.equal(torch.rand(4, generator=generator), drawn)

    def refused(said: str, action: Callable[[], object]) -> None:
        with pytest.raises(CheckpointError, match=said):
            action()

    refused(
        "has no generator dropout; there: data",
        lambda: load_training(path, blocks, group, generators={"dropout": generator}),
    )
    other, _ = built(group, "qwen3", "pre", "off")
    refused(
        r"unexpected: lm_head.weight|of another shape: .*instead of|4 missing: model.layers.0.self_attn.k_norm",
        lambda: load_training(path, parameter_blocks(other), group),
    )
    wide, _ = built(group, "llama", "pre", "off", torch.float64)
    refused(
        "of another dtype: lm_head.weight F32 instead of F64",
        lambda: load_training(path, parameter_blocks(wide), group),
    )
    variant_model, _ = built(group, "llama", "gate_lowrank", "off")
    refused("missing: .*gate.bias", lambda: load_training(path, parameter_blocks(variant_model), group))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    refused("was saved with AdamW, not SGD", lambda: load_training(path, blocks, group, optimizer=sgd))
    one_group = torch.optim.AdamW(model.parameters())
    refused(
        "group 0 differs from the one that was saved in",
        lambda: load_training(path, blocks, group, optimizer=one_group),
    )
    save_sharded(path.with_name("bare"), blocks, group)
    refused("without an optimizer", lambda: load_training(path.with_name("bare"), blocks, group, optimizer=optimizer))
    load_training(path, blocks, group)  # weights alone

    refused("cannot be saved as JSON", lambda: save_sharded(path, blocks, group, state={"loss": float("nan")}))
    if group.size > 1:
        refused("differ in the state", lambda: save_sharded(path, blocks, group, state={"rank": group.rank}))
    odd = torch.optim.Adafactor(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    odd.step()
    refused("Adafactor keeps .*which has no block of its own", lambda: save_sharded(path, blocks, group, optimizer=odd))
    load_training(path, blocks, group)  # that step has set replicas apart
    with torch.no_grad():
        norm = model.model.norm
        assert norm is not None
        if group.size > 1:
            if group.rank == 1:
                norm.weight[3] += 1e-6
            refused(
                r"ranks 0 and 1 both hold model.norm.weight\[0:45\] and differ",
                lambda: save_sharded(path, blocks, group),
            )
        if group.rank == group.size - 1:
            norm.weight[3] = float("nan")
        refused(
            f"weight of model.norm.weight is not finite on rank {group.size - 1}",
            lambda: save_sharded(path, blocks, group),
        )
        norm.weight.fill_(1.5)
        optimizer.state[norm.weight]["exp_avg"][2] = float("inf")
        refused(
            "exp_avg of model.norm.weight is not finite on rank 0",
            lambda: save_sharded(path, blocks, group, optimizer=optimizer),
        )
    assert Manifest.read(path).optimizer is not None, "the first one is still there"
    refused("holds no checkpoint that could be replaced", lambda: save_sharded(path.parent, blocks, group))
    if group.rank == 0:
        (path / "mine.txt").write_text("kept")
        (path.with_name("file")).write_text("")
    group.share("a file of mine", "")
    refused("holds mine.txt, which saving would remove", lambda: save_sharded(path, blocks, group))
    assert (path / "mine.txt").read_text() == "kept"
    refused("is a file; give the name of a folder", lambda: save_sharded(path.with_name("file"), blocks, group))
    refused(
        "files cannot have the names training.json",
        lambda: save_sharded(path.with_name("n"), blocks, group, files={"training.json": ""}),
    )
    group.share("rank 0 has cleared up", "")
    assert not any(each.name.endswith(".writing") for each in path.parent.iterdir())


@pytest.mark.parametrize("size", [1, 2])
def test_misfits_are_refused_and_leave_what_is_there(tmp_path: Path, size: int) -> None:
    run_ranks(size, check_misfits, tmp_path / "c")
