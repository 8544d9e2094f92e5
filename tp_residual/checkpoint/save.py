"""From this rank's parameters to a checkpoint: each block by its owner, all ranks or none, the old one kept until the new one is whole.

`save_sharded` writes a file a rank, at the speed of all their disks; `save_whole` the files that Transformers and `load_model` read,
through rank 0, a few megabytes of a tensor at a time. Both may hold the optimizer's state, and `load_training` reads both at any tp size.

A save goes through these states, of which a kill at any point leaves one:

1. the old folder stands, `.NAME.writing` beside it is incomplete (the next save removes it);
2. every file of `.NAME.writing` is on the disk, training.json last; the old folder stands;
3. the two have exchanged names (see `replace`); the new one stands, the old one is being removed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tp_residual.checkpoint.agreement import agree, in_phase
from tp_residual.checkpoint.files import INDEX_FILE, ITEM_BYTES, listed
from tp_residual.checkpoint.load import WEIGHT_DTYPES, check_tiling
from tp_residual.checkpoint.replace import restore_interrupted, scratch_of, sync_folder, take_place
from tp_residual.checkpoint.state import (
    DTYPE_NAMES,
    TRAINING_FILE,
    WEIGHT,
    Manifest,
    Piece,
    SavedFile,
    SavedOptimizer,
    SavedTensor,
    elementwise_state,
    row_chunks,
    saved_groups,
    tensor_name,
    tiling_problem,
)
from tp_residual.errors import CheckpointError
from tp_residual.parallel.blocks import ParameterBlock
from tp_residual.parallel.group import TensorParallelGroup

CONFIG_FILE = "config.json"
MAX_SHARD_BYTES = 5_000_000_000
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class SaveReport:
    """tensors: the checkpoint's, those of the optimizer counted. bytes_written: of all ranks together."""

    path: Path
    tensors: int
    bytes_written: int


def save_sharded(
    path: str | Path,
    blocks: Sequence[ParameterBlock],
    group: TensorParallelGroup,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    state: Mapping[str, Any] | None = None,
    generators: Mapping[str, torch.Generator] | None = None,
    config: Mapping[str, Any] | None = None,
    files: Mapping[str, str] | None = None,
) -> SaveReport:
    """The folder `path`, for `load_training`: `rank-00001-of-00002.safetensors` and so on, each rank's owned blocks, and training.json.

    All ranks call it alike; with data parallelism, those of one replica. optimizer: its state goes along (AdamW's `exp_avg`, `exp_avg_sq`,
    `step`), and its options. state: plain data, kept as it is (step, position in the data, settings). generators: that are alike on all
    ranks. config, files: config.json and further small files, written by rank 0. A checkpoint that is there is replaced once this one is
    complete; anything else that is there is refused.

    Raises CheckpointError on every rank, and leaves the old checkpoint: when any rank cannot write; for weights or optimizer state with a
    NaN or an infinity; where ranks that hold the same elements differ in them.
    """
    with in_phase(group, "save"):
        save = _Save(path, blocks, group, optimizer, state, generators, config, files)
        try:
            return save.publish(save.write_sharded())
        except BaseException:
            save.discard()
            raise


def save_whole(
    path: str | Path,
    blocks: Sequence[ParameterBlock],
    group: TensorParallelGroup,
    *,
    config: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
    state: Mapping[str, Any] | None = None,
    generators: Mapping[str, torch.Generator] | None = None,
    files: Mapping[str, str] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> SaveReport:
    """A model directory: `model.safetensors` (or shards and an index) with the checkpoint's own tensors, config.json, and training.json.

    `load_model` reads it, Transformers too where it knows the architecture, and `load_training`. config: what config.json holds, as
    `config_values` of a ModelConfig. Optimizer state is in files of its own, `optimizer.safetensors`. Rank 0 writes; no rank ever holds
    more of another's share than some megabytes. The rest, and what is raised, is as in `save_sharded`.
    """
    with in_phase(group, "save"):
        save = _Save(path, blocks, group, optimizer, state, generators, config, files)
        try:
            return save.publish(save.write_whole(max_shard_bytes))
        except BaseException:
            save.discard()
            raise


# ---- what is saved ----


@dataclass(frozen=True)
class _Record:
    """What a rank tells the others of one of its blocks. dtypes: by kind. digest: where it has several holders. bad: what is not finite."""

    name: str
    dim: int
    start: int
    stop: int
    shape: tuple[int, ...]
    owned: bool
    dtypes: dict[str, str]
    scalars: dict[str, tuple[str, float]]
    digest: str
    bad: str


Written = dict[str, tuple[SavedFile, dict[str, list[Piece]]]]  # file -> its size and digest, tensor -> pieces in it


class _Save:
    """One save, as one rank sees it. Made on all ranks together; from then on every rank knows all blocks."""

    def __init__(
        self,
        path: str | Path,
        blocks: Sequence[ParameterBlock],
        group: TensorParallelGroup,
        optimizer: torch.optim.Optimizer | None,
        state: Mapping[str, Any] | None,
        generators: Mapping[str, torch.Generator] | None,
        config: Mapping[str, Any] | None,
        files: Mapping[str, str] | None,
    ) -> None:
        self.path = Path(os.path.realpath(path))  # beside a link's target there is room for a folder to be renamed
        self.scratch = scratch_of(self.path)
        self.group, self.optimizer, self.state = group, optimizer, dict(state or {})
        self.small = dict(files or {})
        if config is not None:
            self.small[CONFIG_FILE] = json.dumps(config, indent=2, allow_nan=False) + "\n"
        self.generators = {
            name: bytes(generator.get_state().tolist()).hex() for name, generator in (generators or {}).items()
        }
        self.local: dict[tuple[str, str, int], tuple[ParameterBlock, Tensor]] = {}  # (name, kind, start)
        problem, shared = "", None
        try:
            check_tiling(blocks)
            json.dumps(self.state, allow_nan=False)
            groups = () if optimizer is None else saved_groups(optimizer, blocks)
            records = [self._record(block) for block in blocks]
            shared = [
                [list(vars(record).values()) for record in records],
                [[each.names, each.options] for each in groups],
                hashlib.sha256(json.dumps([self.state, self.generators]).encode()).hexdigest(),
            ]
            self.groups = groups
        except (CheckpointError, TypeError, ValueError) as error:
            problem = str(error) if isinstance(error, CheckpointError) else f"state cannot be saved as JSON: {error}"
        everybody = agree(group, problem, shared)
        self.records = [
            [_Record(name, dim, start, stop, tuple(shape), *rest) for name, dim, start, stop, shape, *rest in theirs]
            for theirs, _, _ in everybody
        ]
        for rank, (_, groups_there, digest) in enumerate(everybody):
            if groups_there != everybody[0][1] or digest != everybody[0][2]:
                raise CheckpointError(
                    f"ranks 0 and {rank} differ in the state, the generators or the optimizer's options that they save; save what all "
                    "ranks share"
                )
        self.tensors, self.segments = self._layout()
        agree(group, self._make_room() if group.rank == 0 else "")

    def _record(self, block: ParameterBlock) -> _Record:
        states: dict[str, Tensor] = {}
        scalars: dict[str, tuple[str, float]] = {}
        if self.optimizer is not None:
            states, scalars = elementwise_state(self.optimizer, block.parameter, block.name)
        if block.parameter.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{block.name} is {block.parameter.dtype}; save one of {', '.join(WEIGHT_DTYPES)}")
        bad, digest, shared = "", hashlib.sha256(), len(block.holders) > 1
        for kind, tensor in {WEIGHT: block.parameter.detach(), **states}.items():
            view = block.of(tensor)
            if not bad and not bool(torch.isfinite(view).all()):
                bad = kind or "weight"
            if shared:
                for part in _row_parts(view):
                    digest.update(_bytes_of(part))
            self.local[block.name, kind, block.globe[0]] = block, view
        dtypes = {kind: DTYPE_NAMES[tensor.dtype] for kind, tensor in {WEIGHT: block.parameter, **states}.items()}
        return _Record(
            block.name,
            block.dim,
            *block.globe,
            tuple(block.global_shape),
            block.owner == self.group.rank,
            dtypes,
            scalars,
            digest.hexdigest()[:16] if shared else "",
            bad,
        )

    def _layout(self) -> tuple[dict[str, dict[str, _Record]], dict[str, list[tuple[int, _Record]]]]:
        """({weight: {kind: a record of it}}, {weight: (owner, block), in order}), the same on every rank.

        Raises CheckpointError unless each element is owned once, replicas are equal, and everything is finite.
        """
        owned: dict[str, list[tuple[int, _Record]]] = {}
        replicas: dict[tuple[str, int, int], tuple[int, _Record]] = {}
        for rank, records in enumerate(self.records):
            for record in records:
                where = f"{record.name}[{record.start}:{record.stop}]"
                if record.bad:
                    raise CheckpointError(
                        f"{record.bad} of {record.name} is not finite on rank {rank} of {self.group.size}; it is not saved, and an earlier "
                        "checkpoint is left as it is"
                    )
                if record.start == record.stop:
                    owned.setdefault(record.name, [])
                    continue
                first, other = replicas.setdefault((record.name, record.start, record.stop), (rank, record))
                if (other.digest, other.scalars) != (record.digest, record.scalars):
                    raise CheckpointError(
                        f"ranks {first} and {rank} both hold {where} and differ in it, so that saving would change the model; synchronise "
                        "gradients before each step"
                    )
                if record.owned:
                    owned.setdefault(record.name, []).append((rank, record))
        tensors = {}
        for name, segments in owned.items():
            segments.sort(key=lambda segment: segment[1].start)
            first_record = segments[0][1] if segments else None
            alike = first_record is not None and all(
                (record.shape, record.dtypes, record.scalars)
                == (first_record.shape, first_record.dtypes, first_record.scalars)
                for _, record in segments
            )
            if first_record is None or not alike:
                raise CheckpointError(
                    f"ranks do not agree in shape, dtype or optimizer state of {name}; step all parameters alike"
                )
            runs = [(record.dim, record.start, record.stop) for _, record in segments]
            if problem := tiling_problem(name, first_record.shape, runs):
                raise CheckpointError(f"{problem}; correct the blocks that its module declares")
            tensors[name] = dict.fromkeys(first_record.dtypes, first_record)
        return tensors, owned

    # ---- the folder

    def _make_room(self) -> str:
        """An empty scratch folder, by rank 0; or what is wrong."""
        try:
            restore_interrupted(self.path)
            if problem := _foreign(self.path):
                return problem
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.scratch.exists():
                shutil.rmtree(self.scratch)
            self.scratch.mkdir()
        except OSError as error:
            return _say(error, self.path)
        return ""

    def discard(self) -> None:
        """The scratch folder is of no use any more."""
        if self.group.rank == 0:
            shutil.rmtree(self.scratch, ignore_errors=True)

    # ---- writing

    def write_sharded(self) -> Written:
        """This rank's file: its owned blocks."""
        name = f"rank-{self.group.rank + 1:05}-of-{self.group.size:05}.safetensors"
        own: list[tuple[str, Piece, Tensor]] = []
        for weight, segments in self.segments.items():
            for rank, record in segments:
                if rank == self.group.rank:
                    piece = Piece(name, record.dim, record.start, record.stop)
                    own += [
                        (tensor_name(weight, kind), piece, self.local[weight, kind, record.start][1])
                        for kind in record.dtypes
                    ]
        own.sort(key=lambda each: -each[2].element_size())
        pieces: dict[str, list[Piece]] = {}
        problem, saved = "", None
        try:
            shapes = {weight: next(iter(kinds.values())).shape for weight, kinds in self.tensors.items()}
            whole = {
                tensor_name(weight, kind): shapes[weight] for weight in self.tensors for kind in self.tensors[weight]
            }
            header = [
                (piece.key(tensor, whole[tensor]), DTYPE_NAMES[view.dtype], tuple(view.shape))
                for tensor, piece, view in own
            ]
            with _TensorFile(self.scratch / name, header) as file:
                for tensor, piece, view in own:
                    pieces.setdefault(tensor, []).append(piece)
                    for part in _row_parts(view):
                        file.add(part)
                saved = file.finish()
        except OSError as error:
            problem = _say(error, self.scratch / name)
        told = agree(self.group, problem, None if saved is None else [name, vars(saved), _plain_pieces(pieces)])
        return {
            name: (SavedFile(**size), {key: [Piece(**each) for each in runs] for key, runs in found.items()})
            for name, size, found in told
        }

    def write_whole(self, max_shard_bytes: int) -> Written:
        """Rank 0 writes every file, from pieces that owners send."""
        if max_shard_bytes < 1:
            raise CheckpointError(f"max_shard_bytes={max_shard_bytes} must be at least 1")
        written: Written = {}
        names: dict[str, list[tuple[str, str]]] = {"model": [], "optimizer": []}
        for weight, kinds in self.tensors.items():
            for kind in kinds:
                names["optimizer" if kind else "model"].append((weight, kind))
        for stem, tensors in names.items():
            shards = self._shards(tensors, max_shard_bytes)
            for number, shard in enumerate(shards, 1):
                many = f"{stem}-{number:05}-of-{len(shards):05}.safetensors"
                file = f"{stem}.safetensors" if len(shards) == 1 else many
                pieces = {
                    tensor_name(weight, kind): [Piece(file, 0, 0, self.tensors[weight][kind].shape[0])]
                    for weight, kind in shard
                }
                written[file] = self._write_shard(file, shard), pieces
        return written

    def _shards(self, tensors: list[tuple[str, str]], limit: int) -> list[list[tuple[str, str]]]:
        shards: list[list[tuple[str, str]]] = []
        size = limit + 1
        for weight, kind in tensors:
            record = self.tensors[weight][kind]
            nbytes = math.prod(record.shape) * ITEM_BYTES[record.dtypes[kind]]
            if size + nbytes > limit:
                shards.append([])
                size = 0
            shards[-1].append((weight, kind))
            size += nbytes
        return shards

    def _write_shard(self, name: str, tensors: list[tuple[str, str]]) -> SavedFile:
        """All ranks take part to the end, whatever rank 0's disk does: then they fail together."""

        def dtype_of(weight: str, kind: str) -> str:
            return self.tensors[weight][kind].dtypes[kind]

        tensors = sorted(tensors, key=lambda each: -ITEM_BYTES[dtype_of(*each)])
        header = [
            (tensor_name(weight, kind), dtype_of(weight, kind), self.tensors[weight][kind].shape)
            for weight, kind in tensors
        ]
        problem, file = "", None

        def attempt(action: Callable[[], None]) -> None:
            nonlocal problem
            if self.group.rank == 0 and not problem:
                try:
                    action()
                except OSError as error:
                    problem = _say(error, self.scratch / name)

        def begin() -> None:
            nonlocal file
            file = _TensorFile(self.scratch / name, header)

        def add(part: Tensor) -> Callable[[], None]:
            def action() -> None:
                assert file is not None
                file.add(part)

            return action

        attempt(begin)
        try:
            for weight, kind in tensors:
                shape, dtype = self.tensors[weight][kind].shape, WEIGHT_DTYPES[dtype_of(weight, kind)]
                for box in row_chunks([(0, size) for size in shape], dtype.itemsize):
                    attempt(add(self._gather(weight, kind, box, dtype)))
            saved: list[Any] = [None]

            def finish() -> None:
                assert file is not None
                saved[0] = vars(file.finish())

            attempt(finish)
        finally:
            if file is not None:
                file.close()
        return SavedFile(**agree(self.group, problem, saved[0])[0])

    def _gather(self, weight: str, kind: str, box: list[tuple[int, int]], dtype: torch.dtype) -> Tensor:
        """Rows of a whole tensor, on rank 0; elsewhere nothing of use."""
        rows = box[0]
        here = self.group.rank == 0
        out = torch.empty([stop - start for start, stop in box] if here else 0, dtype=dtype)
        for owner, record in self.segments[weight]:
            spans = list(box)
            spans[record.dim] = max(record.start, spans[record.dim][0]), min(record.stop, spans[record.dim][1])
            shape = [stop - start for start, stop in spans]
            if min(shape) <= 0:
                continue
            part = None
            if owner == self.group.rank:
                view = self.local[weight, kind, record.start][1]
                first = spans[0][0] - (record.start if record.dim == 0 else 0)
                part = view.narrow(0, first, shape[0]).contiguous()
            if owner != 0:
                payload = (
                    torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device=self.group.device)
                    if part is None
                    else part.reshape(-1).view(torch.uint8)
                )

                def send(transport: Any, x: Tensor, root: int = owner) -> Tensor:
                    sent: Tensor = transport.broadcast(x, root)
                    return sent

                sent = self.group.run("broadcast", f"save {tensor_name(weight, kind)}", payload, send)
                part = sent.view(dtype).view(shape)
            if here:
                assert part is not None
                start = spans[record.dim][0] - (rows[0] if record.dim == 0 else 0)
                out.narrow(record.dim, start, shape[record.dim]).copy_(part)
        return out

    # ---- the end

    def publish(self, written: Written) -> SaveReport:
        """All ranks' files are complete: the rest of the folder, and its place."""
        problem = ""
        tensors = self._saved_tensors(written)
        if self.group.rank == 0:
            try:
                self._complete(written, tensors)
                take_place(self.scratch, self.path)
            except (OSError, CheckpointError) as error:
                problem = _say(error, self.path) if isinstance(error, OSError) else str(error)
        agree(self.group, problem)
        return SaveReport(self.path, len(tensors), sum(size.bytes for size, _ in written.values()))

    def _saved_tensors(self, written: Written) -> dict[str, SavedTensor]:
        pieces: dict[str, list[Piece]] = {}
        for _, found in written.values():
            for name, runs in found.items():
                pieces.setdefault(name, []).extend(runs)
        return {
            tensor_name(weight, kind): SavedTensor(
                record.dtypes[kind],
                record.shape,
                tuple(sorted(pieces[tensor_name(weight, kind)], key=lambda piece: piece.start)),
            )
            for weight, kinds in self.tensors.items()
            for kind, record in kinds.items()
        }

    def _complete(self, written: Written, tensors: dict[str, SavedTensor]) -> None:
        for name, (size, _) in written.items():
            file = self.scratch / name
            if not file.is_file() or file.stat().st_size != size.bytes:
                raise CheckpointError(
                    f"{name} was written and rank 0 does not see it in {self.scratch}; save to a file system that all ranks share"
                )
        model_files = [name for name in written if name.startswith("model-")]
        if len(model_files) > 1:
            weight_map = {key: name for name in model_files for key in written[name][1]}
            total = sum(written[name][0].bytes for name in model_files)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            self.small[INDEX_FILE] = json.dumps(index, indent=2) + "\n"
        if taken := [
            name for name in self.small if name in written or name == TRAINING_FILE or Path(name).name != name
        ]:
            raise CheckpointError(
                f"files cannot have the names {listed(taken)}, which a checkpoint uses or which leave its folder"
            )
        saved_files = {name: size for name, (size, _) in written.items()}
        for name, text in self.small.items():
            data = text.encode()
            _write_small(self.scratch / name, data)
            saved_files[name] = SavedFile(len(data), hashlib.sha256(data).hexdigest())
        optimizer = None
        if self.optimizer is not None:
            any_record = {weight: next(iter(kinds.values())) for weight, kinds in self.tensors.items()}
            optimizer = SavedOptimizer(
                type(self.optimizer).__name__,
                self.groups,
                {weight: tuple(kind for kind in record.dtypes if kind) for weight, record in any_record.items()},
                {weight: record.scalars for weight, record in any_record.items()},
            )
        manifest = Manifest(self.group.size, tensors, saved_files, optimizer, self.state, self.generators)
        _write_small(self.scratch / TRAINING_FILE, manifest.to_json().encode())
        sync_folder(self.scratch)


def _foreign(path: Path) -> str:
    """Why what is at `path` may not be replaced; nothing if it may."""
    if not path.exists():
        return ""
    if not path.is_dir():
        return f"{path} is a file; give the name of a folder"
    present = set(os.listdir(path))
    if not present:
        return ""
    try:
        known = {TRAINING_FILE, *Manifest.read(path).files}
    except CheckpointError as error:
        return f"{path} is there and holds no checkpoint that could be replaced ({error}); give another folder, or remove it"
    if foreign := present - known:
        return f"{path} holds {listed(foreign)}, which saving would remove; move that, or give another folder"
    return ""


def _say(error: OSError, file: Path) -> str:
    full = "; free space or give another folder" if error.errno in _FULL else ""
    return f"cannot write {error.filename or file}: {error.strerror or error}{full}; an earlier checkpoint is left as it was"


def _plain_pieces(pieces: dict[str, list[Piece]]) -> dict[str, list[dict[str, Any]]]:
    return {name: [vars(piece) for piece in runs] for name, runs in pieces.items()}


def _row_parts(view: Tensor) -> list[Tensor]:
    """Some megabytes of it at a time, as views."""
    box = [(0, size) for size in view.shape]
    return [view[start:stop] for (start, stop), *_ in row_chunks(box, view.element_size())]


def _bytes_of(part: Tensor) -> Any:
    return part.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()


def _write_small(file: Path, data: bytes) -> None:
    with file.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _reserve(handle: int, size: int) -> None:
    """A full disk is found before anything is written or sent. A file system that cannot reserve shows it later."""
    try:
        os.posix_fallocate(handle, 0, size)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno in _FULL:
            raise


class _TensorFile:
    """A safetensors file, written in order. `header`: (name, dtype, shape), wide dtypes first so that each tensor is aligned."""

    def __init__(self, path: Path, header: Sequence[tuple[str, str, tuple[int, ...]]]) -> None:
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without it, Transformers refuses the file
        end = 0
        for name, dtype, shape in header:
            nbytes = math.prod(shape) * ITEM_BYTES[dtype]
            entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
            end += nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.expected, self.written, self.digest = 8 + len(text) + end, 0, hashlib.sha256()
        self.stream = path.open("xb")
        try:
            _reserve(self.stream.fileno(), self.expected)
            self._write(len(text).to_bytes(8, "little") + text)
        except BaseException:
            self.stream.close()
            raise

    def __enter__(self) -> _TensorFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def add(self, part: Tensor) -> None:
        self._write(_bytes_of(part))

    def finish(self) -> SavedFile:
        """On the disk, all of it."""
        assert self.written == self.expected, f"{self.written} of {self.expected} bytes were added"
        self.stream.flush()
        os.fsync(self.stream.fileno())
        return SavedFile(self.written, self.digest.hexdigest())

    def close(self) -> None:
        with suppress(OSError):  # its buffer may not fit on the disk; that has been said
            self.stream.close()

    def _write(self, data: Any) -> None:
        self.stream.write(data)
        self.digest.update(data)
        self.written += len(data)
