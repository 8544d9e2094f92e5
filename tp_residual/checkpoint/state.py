"""What a training checkpoint is: its one JSON file, what must hold of it, and how it is read at any tp size.

A folder with `training.json`, safetensors files, and perhaps `config.json`. The JSON lists every tensor with dtype, shape and the pieces
that together are the whole of it, and every file with its size and SHA-256. Weights have the checkpoint's names; a tensor of optimizer
state has its weight's name and the kind behind it: `lm_head.weight.exp_avg`. It is written last, so a folder that has it is complete.

A piece is a run of one dimension, `[start, stop)` along `dim`, so saved pieces and the blocks that want them are boxes: a block copies what
each piece and it have in common, whichever way either was cut.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from tp_residual.checkpoint.agreement import agree, in_phase
from tp_residual.checkpoint.files import listed, read_header
from tp_residual.checkpoint.load import CHUNK_BYTES, WEIGHT_DTYPES, check_tiling
from tp_residual.checkpoint.replace import restore_interrupted
from tp_residual.errors import CheckpointError
from tp_residual.parallel.blocks import ParameterBlock
from tp_residual.parallel.group import TensorParallelGroup

TRAINING_FILE = "training.json"
FORMAT, VERSION = "tp_residual training checkpoint", 1
DTYPE_NAMES = {dtype: name for name, dtype in WEIGHT_DTYPES.items()}
WEIGHT = ""  # the kind of a weight itself, beside exp_avg and the like

_WAY_OUT = "restore the whole folder from one save, or take an older checkpoint"


def tensor_name(name: str, kind: str) -> str:
    return f"{name}.{kind}" if kind else name


# ---- the manifest ----


@dataclass(frozen=True)
class Piece:
    """`[start, stop)` along `dim` of a tensor, in a file of the folder."""

    file: str
    dim: int
    start: int
    stop: int

    def key(self, name: str, shape: Sequence[int]) -> str:
        """Its name in the file: the tensor's, indexed as in Python unless it is all of it."""
        if not shape or (self.start, self.stop) == (0, shape[self.dim]):
            return name
        return f"{name}[{':, ' * self.dim}{self.start}:{self.stop}]"

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        return (*whole[: self.dim], self.stop - self.start, *whole[self.dim + 1 :])


@dataclass(frozen=True)
class SavedTensor:
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class SavedFile:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class SavedGroup:
    """One of the optimizer's parameter groups: the tensors in it and its options."""

    names: tuple[str, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class SavedOptimizer:
    """scalars: by weight and kind, (dtype, value): `step`. kinds of elementwise state are tensors of the manifest."""

    name: str
    groups: tuple[SavedGroup, ...]
    kinds: dict[str, tuple[str, ...]]
    scalars: dict[str, dict[str, tuple[str, float]]]


@dataclass(frozen=True)
class Manifest:
    """training.json. state: what the caller gave to be kept. generators: their states, hexadecimal."""

    tp_size: int
    tensors: dict[str, SavedTensor]
    files: dict[str, SavedFile]
    optimizer: SavedOptimizer | None = None
    state: dict[str, Any] = field(default_factory=dict)
    generators: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION} | asdict(self), indent=1, allow_nan=False)

    @classmethod
    def read(cls, folder: str | Path) -> Manifest:
        """Of a checkpoint folder, checked for itself: every element of every tensor is in exactly one piece. Opens no other file.

        Raises CheckpointError.
        """
        source = Path(folder) / TRAINING_FILE
        try:
            raw = source.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder} has no {TRAINING_FILE}; give a folder that save_sharded() or save_whole() wrote"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"cannot read {source}: {error}; {_WAY_OUT}") from error
        try:
            values = json.loads(raw)
            if values.pop("format") != FORMAT:
                raise KeyError("format")
            version = values.pop("version")
            if version != VERSION:
                raise CheckpointError(
                    f"{source} has version {version!r}, this program reads version {VERSION}; use the program that wrote it"
                )
            manifest = cls._of(values)
        except CheckpointError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{source} is broken ({type(error).__name__}: {error}), so no training checkpoint; {_WAY_OUT}"
            ) from error
        for name, tensor in manifest.tensors.items():
            problem = tiling_problem(name, tensor.shape, ((each.dim, each.start, each.stop) for each in tensor.pieces))
            if problem or any(piece.file not in manifest.files for piece in tensor.pieces):
                raise CheckpointError(
                    f"{source} is broken: {problem or name + ' lies in an unlisted file'}; {_WAY_OUT}"
                )
        if outside := [name for name in manifest.files if Path(name).name != name]:
            raise CheckpointError(f"{source} names files outside its folder: {listed(outside)}; {_WAY_OUT}")
        return manifest

    @classmethod
    def _of(cls, values: dict[str, Any]) -> Manifest:
        tensors = {
            name: SavedTensor(each["dtype"], tuple(each["shape"]), tuple(Piece(**piece) for piece in each["pieces"]))
            for name, each in values.pop("tensors").items()
        }
        files = {name: SavedFile(**each) for name, each in values.pop("files").items()}
        saved = values.pop("optimizer")
        optimizer = None
        if saved is not None:
            optimizer = SavedOptimizer(
                saved["name"],
                tuple(SavedGroup(tuple(each["names"]), dict(each["options"])) for each in saved["groups"]),
                {name: tuple(kinds) for name, kinds in saved["kinds"].items()},
                {
                    name: {kind: (str(dtype), value) for kind, (dtype, value) in each.items()}
                    for name, each in saved["scalars"].items()
                },
            )
        return cls(tensors=tensors, files=files, optimizer=optimizer, **values)

    def weights(self) -> dict[str, SavedTensor]:
        """Without the optimizer's tensors."""
        kinds = self.optimizer.kinds if self.optimizer is not None else {}
        others = {tensor_name(name, kind) for name, each in kinds.items() for kind in each}
        return {name: tensor for name, tensor in self.tensors.items() if name not in others}


def tiling_problem(name: str, shape: Sequence[int], runs: Iterable[tuple[int, int, int]]) -> str:
    """What is wrong with `(dim, start, stop)` runs that should hold each element of the tensor once; nothing if they do."""
    runs = list(runs)
    dims = {dim for dim, _, _ in runs}
    if len(dims) != 1 or not 0 <= next(iter(dims)) < len(shape):
        return f"{name} of shape {tuple(shape)} is cut along dims {sorted(dims)}"
    spans = sorted((start, stop) for _, start, stop in runs)
    starts = [*(start for start, _ in spans), shape[next(iter(dims))]]
    if starts != [0, *(stop for _, stop in spans)]:
        return f"the pieces {spans} of {name} are not each of 0 to {shape[next(iter(dims))]} exactly once"
    return ""


# ---- what an optimizer knows of a parameter ----


def elementwise_state(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, name: str
) -> tuple[dict[str, Tensor], dict[str, tuple[str, float]]]:
    """Its state of the parameter's shape, and its scalars as (dtype, value). Raises CheckpointError for state that is neither."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, tuple[str, float]] = {}
    for kind, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, Tensor) and value.shape == parameter.shape and value.dtype in DTYPE_NAMES:
            tensors[kind] = value
        elif isinstance(value, Tensor) and value.numel() == 1:
            scalars[kind] = (str(value.dtype).removeprefix("torch."), value.item())
        elif isinstance(value, int | float) and not isinstance(value, bool):
            scalars[kind] = ("", value)
        elif value is not None:
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps {kind} of {name} as {_describe(value)}, which has no block of its own; use an optimizer "
                "that treats parameters element by element, such as AdamW"
            )
    return tensors, scalars


def saved_groups(optimizer: torch.optim.Optimizer, blocks: Sequence[ParameterBlock]) -> tuple[SavedGroup, ...]:
    """The optimizer's groups by tensor names, the same on every rank. Raises CheckpointError for an option that JSON cannot hold."""
    names: dict[int, list[str]] = {}
    for block in blocks:
        names.setdefault(id(block.parameter), []).append(block.name)
    groups = []
    for number, options in enumerate(optimizer.param_groups):
        own = dict.fromkeys(name for parameter in options["params"] for name in names.get(id(parameter), ()))
        values = {key: _plain(key, value, number) for key, value in options.items() if key != "params"}
        groups.append(SavedGroup(tuple(own), values))
    return tuple(groups)


def _plain(key: str, value: Any, number: int) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(key, each, number) for each in value]
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise CheckpointError(
        f"option {key}={value!r} of the optimizer's group {number} cannot be saved; use a finite number"
    )


def _describe(value: Any) -> str:
    return f"a tensor {list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


# ---- reading ----


@dataclass(frozen=True)
class LoadedTraining:
    """state: what the save was given. tp_size: of the ranks that saved. bytes_read: this rank's, digests not counted."""

    state: dict[str, Any]
    tp_size: int
    bytes_read: int


def load_training(
    path: str | Path,
    blocks: Sequence[ParameterBlock],
    group: TensorParallelGroup,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    generators: Mapping[str, torch.Generator] | None = None,
) -> LoadedTraining:
    """Fill the parameters, and the state and options of `optimizer` where one is given, with the bits that were saved, at any tp size.

    All ranks call it alike. Every file is read once and compared with its digest, divided among the ranks; then each rank reads its own
    ranges. generators: set to the states that were saved under these names.

    Raises CheckpointError on every rank, before a parameter is written: for a folder that is incomplete, torn or mixed from several saves;
    for tensors that are missing, unexpected, or of another shape or dtype; and for an optimizer that was not saved or is grouped otherwise.
    """
    folder = Path(path)
    generators = dict(generators or {})
    with in_phase(group, "load"):
        problem = ""
        try:
            if group.rank == 0:
                restore_interrupted(folder)
        except OSError as error:
            problem = f"cannot restore {folder}: {error}"
        agree(group, problem)
        manifest = None
        identity = problem = ""
        try:
            manifest = Manifest.read(folder)
            identity = hashlib.sha256((folder / TRAINING_FILE).read_bytes()).hexdigest()
            _check_files(folder, manifest, group)
            _check_fit(folder, manifest, blocks, optimizer, generators)
        except (CheckpointError, OSError) as error:
            problem = str(error)
        identities = agree(group, problem, identity)
        if len(set(identities)) > 1:
            raise CheckpointError(
                f"ranks see different {folder / TRAINING_FILE}; give all ranks one folder on a shared file system, or equal copies"
            )
        assert manifest is not None
        bytes_read = 0
        try:
            bytes_read = _fill(folder, manifest, blocks, optimizer)
        except (OSError, SafetensorError) as error:
            problem = f"cannot read {folder}: {error}"
        agree(group, problem)
    for name, generator in generators.items():
        generator.set_state(torch.frombuffer(bytearray.fromhex(manifest.generators[name]), dtype=torch.uint8))
    return LoadedTraining(manifest.state, manifest.tp_size, bytes_read)


def _check_files(folder: Path, manifest: Manifest, group: TensorParallelGroup) -> None:
    """Every file by name, size and header; this rank's share of them by digest."""
    wanted: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {name: {} for name in manifest.files}
    for name, tensor in manifest.tensors.items():
        for piece in tensor.pieces:
            wanted[piece.file][piece.key(name, tensor.shape)] = tensor.dtype, piece.shape(tensor.shape)
    for number, (name, saved) in enumerate(manifest.files.items()):
        file = folder / name
        mixed = f"it is torn, or from another save than {folder / TRAINING_FILE}; {_WAY_OUT}"
        if not file.is_file():
            raise CheckpointError(f"{file} is not there, and {TRAINING_FILE} lists it; {_WAY_OUT}")
        if file.stat().st_size != saved.bytes:
            raise CheckpointError(f"{file} has {file.stat().st_size} bytes instead of {saved.bytes}: {mixed}")
        if number % group.size == group.rank:
            with file.open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
            if found != saved.sha256:
                raise CheckpointError(f"{file} has SHA-256 {found[:16]}... instead of {saved.sha256[:16]}...: {mixed}")
        if wanted[name] and wanted[name] != {key: (info.dtype, info.shape) for key, info in read_header(file).items()}:
            raise CheckpointError(f"{file} holds other tensors than {TRAINING_FILE} says; {_WAY_OUT}")


def _check_fit(
    folder: Path,
    manifest: Manifest,
    blocks: Sequence[ParameterBlock],
    optimizer: torch.optim.Optimizer | None,
    generators: Mapping[str, torch.Generator],
) -> None:
    check_tiling(blocks)
    weights = manifest.weights()
    expected = {block.name: (tuple(block.global_shape), DTYPE_NAMES[block.parameter.dtype]) for block in blocks}
    problems = {
        "missing": expected.keys() - weights.keys(),
        "unexpected": weights.keys() - expected.keys(),
        "of another shape": [
            f"{name} {weights[name].shape} instead of {shape}"
            for name, (shape, _) in expected.items()
            if name in weights and weights[name].shape != shape
        ],
        "of another dtype": [
            f"{name} {weights[name].dtype} instead of {dtype}"
            for name, (_, dtype) in expected.items()
            if name in weights and weights[name].dtype != dtype
        ],
    }
    if said := [f"{len(names)} {what}: {listed(names)}" for what, names in problems.items() if names]:
        raise CheckpointError(
            f"{folder} does not fit the model; tensors {'; '.join(said)}; build the model with the settings and the dtype it was saved with"
        )
    if unknown := generators.keys() - manifest.generators.keys():
        there = listed(manifest.generators) or "none"
        raise CheckpointError(f"{folder} has no generator {listed(unknown)}; there: {there}; save it under that name")
    if optimizer is None:
        return
    if manifest.optimizer is None:
        raise CheckpointError(
            f"{folder} was saved without an optimizer; load it with optimizer=None, which starts with fresh moments"
        )
    name = type(optimizer).__name__
    if name != manifest.optimizer.name:
        raise CheckpointError(f"{folder} was saved with {manifest.optimizer.name}, not {name}; use that optimizer")
    ours = [set(each.names) for each in saved_groups(optimizer, blocks)]
    theirs = [set(each.names) for each in manifest.optimizer.groups]
    for number, (mine, saved) in enumerate(zip(ours, theirs, strict=False)):
        if mine != saved:
            raise CheckpointError(
                f"{folder}: the optimizer's group {number} differs from the one that was saved in {listed(mine ^ saved)}; "
                "group the parameters as they were"
            )
    if len(ours) != len(theirs):
        raise CheckpointError(
            f"{folder} was saved with {len(theirs)} parameter groups, the optimizer has {len(ours)}; group the parameters as they were"
        )
    for parameter, members in _by_parameter(blocks):
        known = {
            (manifest.optimizer.kinds.get(name, ()), tuple(sorted(manifest.optimizer.scalars.get(name, {}).items())))
            for name in {block.name for block in members}
        }
        if len(known) > 1:
            raise CheckpointError(
                f"{folder}: {listed({block.name for block in members})} are one parameter of shape {list(parameter.shape)} here and have "
                "different optimizer states or steps; load with optimizer=None"
            )


def _by_parameter(blocks: Sequence[ParameterBlock]) -> list[tuple[nn.Parameter, list[ParameterBlock]]]:
    members: dict[nn.Parameter, list[ParameterBlock]] = {}
    for block in blocks:
        members.setdefault(block.parameter, []).append(block)
    return list(members.items())


@torch.no_grad()
def _fill(
    folder: Path, manifest: Manifest, blocks: Sequence[ParameterBlock], optimizer: torch.optim.Optimizer | None
) -> int:
    bytes_read = 0
    with _Pieces(folder) as pieces:
        for block in blocks:
            bytes_read += pieces.copy(block, block.parameter, block.name, manifest.tensors[block.name])
        if optimizer is None:
            return bytes_read
        assert manifest.optimizer is not None
        stepped = {id(parameter) for options in optimizer.param_groups for parameter in options["params"]}
        for parameter, members in _by_parameter(blocks):
            name = members[0].name
            kinds, scalars = manifest.optimizer.kinds.get(name, ()), manifest.optimizer.scalars.get(name, {})
            if id(parameter) not in stepped:
                continue
            optimizer.state.pop(parameter, None)
            if not kinds and not scalars:
                continue
            state: dict[str, Any] = {}
            options = next(each for each in optimizer.param_groups if any(p is parameter for p in each["params"]))
            place = parameter.device if options.get("capturable") or options.get("fused") else torch.device("cpu")
            for kind, (spelled, value) in scalars.items():
                state[kind] = torch.tensor(value, dtype=getattr(torch, spelled), device=place) if spelled else value
            for kind in kinds:
                dtype = WEIGHT_DTYPES[manifest.tensors[tensor_name(name, kind)].dtype]
                state[kind] = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
                for block in members:
                    whole = tensor_name(block.name, kind)
                    bytes_read += pieces.copy(block, state[kind], whole, manifest.tensors[whole])
            optimizer.state[parameter] = state
        for options, saved in zip(optimizer.param_groups, manifest.optimizer.groups, strict=True):
            for key, value in saved.options.items():
                old = options.get(key)
                if isinstance(old, Tensor):
                    old.fill_(value)
                else:
                    options[key] = tuple(value) if isinstance(old, tuple) else value
    return bytes_read


class _Pieces:
    """The files of a folder, each mapped at first use; leaving the context unmaps them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.stack = folder, ExitStack()
        self.files: dict[str, Any] = {}

    def __enter__(self) -> _Pieces:
        return self

    def __exit__(self, *error: object) -> None:
        self.files.clear()
        self.stack.close()

    def copy(self, block: ParameterBlock, target: Tensor, name: str, saved: SavedTensor) -> int:
        """Into the block's part of `target`, shaped like the parameter; the bytes read."""
        view = block.of(target.detach())
        copied = 0
        for piece in saved.pieces:
            common = _common(block, piece, saved.shape)
            if common is None:
                continue
            if piece.file not in self.files:
                opened = safe_open(self.folder / piece.file, framework="pt")
                self.files[piece.file] = self.stack.enter_context(opened)
            source = self.files[piece.file].get_slice(piece.key(name, saved.shape))
            origin = [block.globe[0] * (dim == block.dim) for dim in range(len(saved.shape))]
            corner = [piece.start * (dim == piece.dim) for dim in range(len(saved.shape))]
            for box in row_chunks(common, view.element_size()):
                there = tuple(slice(a - c, b - c) for (a, b), c in zip(box, corner, strict=True))
                here = tuple(slice(a - c, b - c) for (a, b), c in zip(box, origin, strict=True))
                view[here].copy_(source[there])
                copied += math.prod(b - a for a, b in box)
        if copied != view.numel():
            raise CheckpointError(f"{self.folder}: {copied} of the {view.numel()} elements of {name} were found")
        return copied * view.element_size()


Box = list[tuple[int, int]]


def _common(block: ParameterBlock, piece: Piece, shape: Sequence[int]) -> Box | None:
    """What both hold, by dimension, in the whole tensor's indices."""
    box = []
    for dim, size in enumerate(shape):
        start, stop = 0, size
        if dim == block.dim:
            start, stop = max(start, block.globe[0]), min(stop, block.globe[1])
        if dim == piece.dim:
            start, stop = max(start, piece.start), min(stop, piece.stop)
        if start >= stop:
            return None
        box.append((start, stop))
    return box


def row_chunks(box: Box, itemsize: int) -> Iterator[Box]:
    """The box cut by rows into parts of about CHUNK_BYTES."""
    (first, last), rest = box[0], box[1:]
    rows = max(1, CHUNK_BYTES // max(1, itemsize * math.prod(stop - start for start, stop in rest)))
    for row in range(first, last, rows):
        yield [(row, min(row + rows, last)), *rest]
