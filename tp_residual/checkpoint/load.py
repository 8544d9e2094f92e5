"""From a checkpoint to this rank's parameters: prove that everything fits, then read this rank's ranges and no more.

Two steps, so that ranks fail together. `plan_load` judges blocks against headers, and what it refuses every rank
refuses in the same words, because each rank names the same tensors (a rank whose share is empty has an empty block).
`load_checkpoint` copies from the mapped file into the preallocated parameter, one tensor at a time, casting on the way.
It never makes a slice contiguous: of a row slice `.contiguous()` is no copy but a view that keeps the file mapped, of a
column slice it is a second copy of the share.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tp_residual.checkpoint.files import CheckpointFiles, TensorInfo, listed, read_header
from tp_residual.errors import CheckpointError
from tp_residual.parallel.blocks import ParameterBlock

# What loads as a weight. FP8 does not: without its scales it is half of a quantised tensor.
WEIGHT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
IGNORED_SUFFIX = ".rotary_emb.inv_freq"  # a buffer in old Llama checkpoints; recomputed from config.json
CHUNK_BYTES = 8 << 20  # bounds the temporaries of a cast on the way to a GPU, and of comparisons

Source = TensorInfo | Tensor  # a full tensor: in a file, or in memory
T = TypeVar("T", TensorInfo, Tensor)


@dataclass(frozen=True)
class LoadPlan:
    blocks: tuple[ParameterBlock, ...]  # in the order of the files' data
    sources: dict[str, TensorInfo]  # block name -> the tensor it is read from
    bytes_to_read: int


@dataclass(frozen=True)
class LoadReport:
    tensors: int  # the checkpoint's tensors that were used, the same on every rank
    bytes_read: int  # this rank's elements, in the checkpoint's dtypes
    bytes_held: int  # the storage of this rank's parameters
    casts: dict[tuple[str, str], int]  # ("float32", "bfloat16") -> how many tensors


def plan_load(
    blocks: Sequence[ParameterBlock], files: CheckpointFiles, *, tied_head: str | None, tied_to: str | None
) -> LoadPlan:
    """Checks that blocks and checkpoint fit, from headers alone; CheckpointError lists everything that does not.

    `tied_head` names the head and `tied_to` the embedding where config.json ties them; else both are None. A tied
    checkpoint may hold a head all the same. Equal to the embedding: fine (only this comparison reads data, all of both
    on every rank, so that ranks agree). Different: refused, either choice would be a guess. Without an embedding: it is
    the embedding (of tied tensors safetensors' own `save_model` keeps the alphabetically first).
    """
    where = str(files.directory)
    sources, twins = _match(blocks, files.tensors, where, tied_head, tied_to)
    if twins:
        with _Reader() as reader:
            _refuse_unequal(twins, [reader.slices(info) for info in twins], where)
    order = {name: position for position, name in enumerate(files.tensors)}
    return LoadPlan(
        blocks=tuple(sorted(blocks, key=lambda block: (order[sources[block.name].name], block.globe))),
        sources=sources,
        bytes_to_read=sum(_elements(block) * _torch_dtype(sources[block.name]).itemsize for block in blocks),
    )


def load_checkpoint(plan: LoadPlan, *, progress: Callable[[int, int], None] | None = None) -> LoadReport:
    """Fills every parameter of the plan, calling `progress(bytes_read, bytes_to_read)` as it goes.

    A file that vanished, shrank or changed since it was planned is refused before anything is read. One that is
    truncated during the read kills the process with SIGBUS, as with any mapped file. No parameter keeps a file mapped.
    """
    for file in dict.fromkeys(info.file for info in plan.sources.values()):
        now = read_header(file)
        if any(now.get(info.name) != info for info in plan.sources.values() if info.file == file):
            raise CheckpointError(f"{file} has changed since it was checked; start again once nothing writes to it")
    bytes_read = 0
    with _Reader() as reader:
        for block in plan.blocks:
            info = plan.sources[block.name]
            whole, dtype = reader.slices(info), _torch_dtype(info)
            for piece, index in _pieces(block, dtype.itemsize):
                _copy(piece, whole[index], f"{info.file}: {info.name}")
                bytes_read += piece.numel() * dtype.itemsize
                if progress is not None:
                    progress(bytes_read, plan.bytes_to_read)
    casts = {block.name: (_torch_dtype(plan.sources[block.name]), block.parameter.dtype) for block in plan.blocks}
    held = {id(block.parameter): block.parameter.untyped_storage().nbytes() for block in plan.blocks}
    return LoadReport(
        tensors=len(plan.sources),
        bytes_read=bytes_read,
        bytes_held=sum(held.values()),
        casts=dict(Counter((_spell(old), _spell(new)) for old, new in casts.values() if old != new)),
    )


def load_state_dict_blocks(
    blocks: Sequence[ParameterBlock],
    tensors: Mapping[str, Tensor],
    *,
    tied_head: str | None = None,
    tied_to: str | None = None,
) -> None:
    """Fills every block from a full state dict in memory, under the checks of `plan_load`.

    This is how a sharded module gets the weights of its unsharded twin.
    """
    where = "the state dict"
    sources, twins = _match(blocks, tensors, where, tied_head, tied_to)
    if twins:
        _refuse_unequal(twins, twins, where)
    for block in blocks:
        whole = sources[block.name]
        for piece, index in _pieces(block, whole.itemsize):
            _copy(piece, whole[index], f"{where}: {block.name}")


# ---- checks ----


def _match(
    blocks: Sequence[ParameterBlock], found: Mapping[str, T], where: str, tied_head: str | None, tied_to: str | None
) -> tuple[dict[str, T], tuple[T, T] | None]:
    """The source of each block's name; and, where both are there although tied, (head, embedding) for a comparison."""
    check_tiling(blocks)
    available = {name: source for name, source in found.items() if not name.endswith(IGNORED_SUFFIX)}
    twins = None
    if tied_head is not None and tied_to is not None and tied_head in available:
        head = available.pop(tied_head)
        if tied_to in available:
            twins = head, available[tied_to]
        else:
            available[tied_to] = head

    expected = {block.name: tuple(block.global_shape) for block in blocks}
    sources = {name: available[name] for name in expected if name in available}
    missing = expected.keys() - sources.keys()
    unexpected = available.keys() - sources.keys()
    misshapen = [
        f"{name} {tuple(source.shape)} instead of {expected[name]}"
        for name, source in sources.items()
        if tuple(source.shape) != expected[name]
    ]
    mistyped = [f"{name} {source.dtype}" for name, source in sources.items() if not _is_weight(source)]
    complaints = {
        "missing": missing,
        "unexpected": unexpected,
        "of the wrong shape": misshapen,
        f"in a dtype other than {', '.join(WEIGHT_DTYPES)}": mistyped,
    }
    if problems := [f"{len(names)} {what}: {listed(names)}" for what, names in complaints.items() if names]:
        way_out = "use unquantised weights that belong to this config.json"
        if any(name.endswith("lm_head.weight") for name in missing):
            way_out += ", or set tie_word_embeddings=true there if the head is meant to be the embedding"
        raise CheckpointError(f"{where} does not fit the model; tensors {'; '.join(problems)}; {way_out}")
    return sources, twins


def check_tiling(blocks: Sequence[ParameterBlock]) -> None:
    """Every element of every parameter is written exactly once: else the module that made the blocks is at fault."""
    blocks_of: dict[int, list[ParameterBlock]] = {}
    for block in blocks:
        _check_block(block)
        blocks_of.setdefault(id(block.parameter), []).append(block)
    for siblings in blocks_of.values():
        dims = {block.dim for block in siblings}
        rows = sorted(block.local for block in siblings if block.local[0] < block.local[1])
        ends = [0, *(stop for _, stop in rows)]
        starts = [*(start for start, _ in rows), siblings[0].parameter.shape[siblings[0].dim]]
        if len(dims) > 1 or starts != ends:
            raise CheckpointError(
                f"the blocks {listed({block.name for block in siblings})} of one parameter of shape "
                f"{tuple(siblings[0].parameter.shape)} cover {rows} of dim {dims}, not each index exactly once; "
                "correct the blocks that its module declares"
            )


def _check_block(block: ParameterBlock) -> None:
    local_shape, global_shape, dim = tuple(block.parameter.shape), tuple(block.global_shape), block.dim
    (start, stop), (global_start, global_stop) = block.local, block.globe
    fits = (
        0 <= dim < len(local_shape) == len(global_shape)
        and local_shape[:dim] + local_shape[dim + 1 :] == global_shape[:dim] + global_shape[dim + 1 :]
        and 0 <= start <= stop <= local_shape[dim]
        and 0 <= global_start <= global_stop <= global_shape[dim]
        and stop - start == global_stop - global_start
    )
    if not fits:
        raise CheckpointError(
            f"the block {block.name} of a parameter of shape {local_shape} has dim {dim}, local {block.local}, global "
            f"{block.globe} of {global_shape}, which do not fit; correct the blocks that its module declares"
        )


def _refuse_unequal(twins: tuple[Source, Source], rows: Sequence[Any], where: str) -> None:
    """`rows[i][start:stop]` gives rows of twin i."""
    if not (tuple(twins[0].shape) == tuple(twins[1].shape) and _is_weight(twins[0]) and _equal_rows(twins, rows)):
        raise CheckpointError(
            f"{where}: tie_word_embeddings=true, but the head's weight is there too and differs from the embedding's; "
            "set tie_word_embeddings=false in config.json to use it, or remove it from the checkpoint"
        )


def _equal_rows(twins: tuple[Source, Source], rows: Sequence[Any]) -> bool:
    dtype = torch.promote_types(_torch_dtype(twins[0]), _torch_dtype(twins[1]))
    count, width = twins[0].shape
    step = max(1, CHUNK_BYTES // max(1, width * dtype.itemsize))
    chunks = [slice(start, start + step) for start in range(0, count, step)]
    return all(torch.equal(rows[0][chunk].to(dtype), rows[1][chunk].to(dtype)) for chunk in chunks)


def _is_weight(source: Source) -> bool:
    return source.dtype in WEIGHT_DTYPES or source.dtype in WEIGHT_DTYPES.values()


def _torch_dtype(source: Source) -> torch.dtype:
    return source.dtype if isinstance(source, Tensor) else WEIGHT_DTYPES[source.dtype]


def _spell(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- reading ----


class _Reader:
    """Safetensors files, each mapped at first use; leaving the context unmaps them."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.files: dict[Path, Any] = {}

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.files.clear()
        self.stack.close()

    def slices(self, info: TensorInfo) -> Any:
        """An object whose `[index]` is a view of the mapped tensor."""
        try:
            if info.file not in self.files:
                self.files[info.file] = self.stack.enter_context(safe_open(info.file, framework="pt"))
            return self.files[info.file].get_slice(info.name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {info.file}: {error}; download or save it again") from error


def _elements(block: ParameterBlock) -> int:
    across = math.prod(size for dim, size in enumerate(block.global_shape) if dim != block.dim)
    return (block.local[1] - block.local[0]) * across


def _pieces(block: ParameterBlock, itemsize: int) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
    """The block in row chunks of about CHUNK_BYTES: each a view of the parameter and its index in the full tensor."""
    share = block.parameter.detach().narrow(block.dim, block.local[0], block.local[1] - block.local[0])
    if share.numel() == 0:
        return
    rows = max(1, CHUNK_BYTES // (share[0].numel() * itemsize))
    for row in range(0, share.shape[0], rows):
        piece = share[row : row + rows]
        starts = [block.globe[0] * (dim == block.dim) + row * (dim == 0) for dim in range(share.dim())]
        yield piece, tuple(slice(start, start + size) for start, size in zip(starts, piece.shape, strict=True))


@torch.no_grad()
def _copy(piece: Tensor, values: Tensor, name: str) -> None:
    piece.copy_(values)
    limit = torch.finfo(piece.dtype).max
    if limit < torch.finfo(values.dtype).max and not torch.isfinite(piece).all():
        raise CheckpointError(
            f"{name} has values that are not finite in {_spell(piece.dtype)} (limit {limit:g}); load a wider dtype"
        )
