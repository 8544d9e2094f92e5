"""What a model directory's weights are, from their headers alone: names, dtypes, shapes, and that the files are whole.

Needs neither torch nor a byte of weights, so a broken download is refused within milliseconds, in the same words on
every rank. The safetensors library checks much of this too, but only when it maps a file, and naming no file.

A safetensors file is 8 bytes (little-endian length of the header), the header (JSON: tensor name -> dtype, shape, data
offsets counted from the header's end), then the data without holes. Format: github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tp_residual.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth")
_FINGERPRINT_SAMPLES, _FINGERPRINT_BYTES = 64, 4096
MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "C64": 8, "BOOL": 1}
ITEM_BYTES |= {"F8_E4M3": 1, "F8_E4M3FNUZ": 1, "F8_E5M2": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1}
ITEM_BYTES |= {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1}


@dataclass(frozen=True)
class TensorInfo:
    name: str
    file: Path
    dtype: str  # as the header spells it: "BF16", "F32", ...
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class CheckpointFiles:
    directory: Path
    tensors: dict[str, TensorInfo]  # file by file, each in the order of its data: reading in this order is sequential

    @staticmethod
    def open(model_dir: str | os.PathLike[str]) -> CheckpointFiles:
        """The weights of a model directory: `model.safetensors`, or the shards of `model.safetensors.index.json`.

        CheckpointError says which file is wrong and what to do about it.
        """
        directory = Path(model_dir)
        try:
            present = {entry.name for entry in os.scandir(directory)}
        except OSError as error:
            raise CheckpointError(
                f"cannot read the model directory {directory}: {error.strerror}; "
                f"give a readable directory with {SINGLE_FILE} or {INDEX_FILE}"
            ) from error
        # Where both are there the single file wins and the index is not looked at, as in Transformers: an index left
        # behind by a merge is then harmless.
        if SINGLE_FILE in present:
            return CheckpointFiles(directory, read_header(directory / SINGLE_FILE))
        if INDEX_FILE in present:
            return CheckpointFiles(directory, _read_shards(directory, present))
        raise CheckpointError(_nothing_to_load(directory, present))

    def fingerprint(self) -> str:
        """Tells one checkpoint from another of the same shapes without reading all of it: every name, dtype, shape and place, and bytes
        taken at even distances from every file. Weights of two trainings differ nearly everywhere.
        """
        seen = hashlib.sha256()
        for file in dict.fromkeys(info.file for info in self.tensors.values()):
            with file.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                seen.update(f"{file.name} {size} ".encode())
                for sample in range(_FINGERPRINT_SAMPLES + 1):
                    stream.seek(max(0, size - _FINGERPRINT_BYTES) * sample // _FINGERPRINT_SAMPLES)
                    seen.update(stream.read(_FINGERPRINT_BYTES))
        for info in self.tensors.values():
            seen.update(f"{info.name} {info.dtype} {info.shape} ".encode())
        return seen.hexdigest()[:16]


def read_header(file: Path) -> dict[str, TensorInfo]:
    """One file's tensors in the order of their data; CheckpointError unless the header is sound and the data whole."""
    try:
        with file.open("rb") as stream:
            file_bytes = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            if not file_bytes:
                raise _broken(file, "it is empty")
            if prefix == b"version ":  # how the text files begin that Git LFS leaves in place of the real ones
                raise CheckpointError(f"{file} is a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
            header_bytes = int.from_bytes(prefix, "little")
            if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, file_bytes - 8):
                raise _broken(file, f"it has {file_bytes} bytes and a header said to take {header_bytes}")
            raw = stream.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}; restore the file or its permissions") from error
    header = _parse_json(file, raw)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _broken(file, "its __metadata__ is not a map of strings")

    end = 0
    tensors = {}
    for start, stop, info in sorted((_check_entry(file, *item) for item in header.items()), key=lambda span: span[:2]):
        if start != end:
            raise _broken(file, f"{info.name} starts at byte {start} of the data, its predecessor ends at {end}")
        tensors[info.name] = info
        end = stop
    if 8 + header_bytes + end != file_bytes:
        raise _broken(file, f"it has {file_bytes} bytes, its header describes {8 + header_bytes + end}")
    return tensors


def listed(names: Iterable[str], limit: int = 10) -> str:
    """The names sorted, `a, b, c and 4 more`."""
    ordered = sorted(names)
    return ", ".join(ordered[:limit]) + (f" and {len(ordered) - limit} more" if len(ordered) > limit else "")


def _check_entry(file: Path, name: str, entry: Any) -> tuple[int, int, TensorInfo]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _broken(file, f"{name} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(f"{file}: {name} has the unknown dtype {dtype!r}; convert the checkpoint to BF16")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise _broken(file, f"{name} has shape {shape} and data_offsets {offsets}")
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    start, stop = offsets
    if stop - start != nbytes:
        raise _broken(file, f"{name} has {stop - start} bytes, {dtype} of shape {shape} takes {nbytes}")
    return start, stop, TensorInfo(name, file, dtype, tuple(shape), nbytes)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _read_shards(directory: Path, present: set[str]) -> dict[str, TensorInfo]:
    index = directory / INDEX_FILE
    try:
        raw = index.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {index}: {error.strerror}; restore the file or its permissions") from error
    shard_of = _parse_json(index, raw).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of or not all(isinstance(name, str) for name in shard_of.values()):
        raise _broken(index, "it has no weight_map from tensor names to file names")
    shards = set(shard_of.values())
    if outside := [shard for shard in shards if Path(shard).name != shard]:
        raise CheckpointError(f"{index} names files outside its directory: {listed(outside)}; put the shards beside it")
    if absent := shards - present:
        raise CheckpointError(f"{index} names files that are not there: {listed(absent)}; download the missing shards")

    way_out = "download the index and its shards again"
    tensors: dict[str, TensorInfo] = {}
    for shard in sorted(shards):
        for name, info in read_header(directory / shard).items():
            if name in tensors:
                raise CheckpointError(f"{name} is in both {tensors[name].file} and {shard}; {way_out}")
            tensors[name] = info
    found_in = {name: info.file.name for name, info in tensors.items()}
    if lacking := [f"{name} in {shard}" for name, shard in shard_of.items() if found_in.get(name) != shard]:
        raise CheckpointError(f"{index} names tensors that their files lack: {listed(lacking)}; {way_out}")
    if unlisted := [f"{name} in {shard}" for name, shard in found_in.items() if name not in shard_of]:
        raise CheckpointError(f"{index} lacks tensors that its files hold: {listed(unlisted)}; {way_out}")
    return tensors


def _nothing_to_load(directory: Path, present: set[str]) -> str:
    wanted = f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}"
    if others := [name for name in present if name.endswith(".safetensors")]:
        return f"{wanted}, but {listed(others)}; restore the index, or rename a single complete file to {SINGLE_FILE}"
    if pickles := [name for name in present if name.endswith(PICKLE_SUFFIXES)]:
        # Loading a pickle runs whatever code is in it.
        return f"{wanted}, only pickle formats, which are refused: {listed(pickles)}; convert them to safetensors"
    return f"{wanted}; download the model's weights in safetensors format"


def _parse_json(file: Path, raw: bytes) -> dict[str, Any]:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(name for name, _ in pairs)
        if len(counts) != len(pairs):
            raise _broken(file, f"it names twice: {listed(name for name, count in counts.items() if count > 1)}")
        return dict(pairs)

    try:
        parsed = json.loads(raw, object_pairs_hook=without_duplicates)
    except CheckpointError:  # a ValueError itself
        raise
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, endless digits; endless nesting
        raise _broken(file, f"its JSON is not valid ({error})") from error
    if not isinstance(parsed, dict):
        raise _broken(file, f"its JSON is a {type(parsed).__name__}, not an object")
    return parsed


def _broken(file: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{file} is broken: {reason}; download or save it again")
