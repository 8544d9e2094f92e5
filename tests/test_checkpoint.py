"""The checkpoint reader: a broken directory is refused by name, a good one read bit for bit, only this rank's part."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tp_residual.checkpoint import load
from tp_residual.checkpoint.files import INDEX_FILE, MAX_HEADER_BYTES, SINGLE_FILE, CheckpointFiles
from tp_residual.checkpoint.load import LoadReport, load_checkpoint, load_state_dict_blocks, plan_load
from tp_residual.errors import CheckpointError
from tp_residual.parallel.blocks import ParameterBlock
from tp_residual.parallel.splits import Split

UNTIED: dict[str, Any] = {"tied_head": None, "tied_to": None}
TIED = {"tied_head": "lm_head.weight", "tied_to": "embed.weight"}


# ---- builders ----


def numbered(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Every element differs from its neighbours, and bf16 cannot hold most of them."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def shard(name: str, full: Tensor, dim: int, start: int, stop: int, dtype: torch.dtype | None = None) -> ParameterBlock:
    """One block in a parameter of its own, filled with NaN so that an element which is not written shows."""
    shape = list(full.shape)
    shape[dim] = stop - start
    parameter = nn.Parameter(torch.full(shape, torch.nan, dtype=dtype or full.dtype))
    return ParameterBlock(name, parameter, dim, (0, stop - start), (start, stop), tuple(full.shape), (0,), False)


def whole(name: str, full: Tensor, dtype: torch.dtype | None = None) -> ParameterBlock:
    return shard(name, full, 0, 0, full.shape[0], dtype)


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def write_raw(file: Path, header: Any, data: bytes = b"", header_bytes: int | None = None) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw) if header_bytes is None else header_bytes) + raw + data)


def entry(start: int = 0, stop: int = 8, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def write_shards(directory: Path, shards: dict[str, dict[str, Tensor]]) -> dict[str, str]:
    """Writes the shards and the index; returns the weight map for a test to spoil."""
    weight_map: dict[str, str] = {}
    for file, tensors in shards.items():
        save_file(tensors, directory / file)
        weight_map |= dict.fromkeys(tensors, file)
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: Any) -> None:
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def load_from(directory: Path, blocks: list[ParameterBlock], **tied: Any) -> LoadReport:
    return load_checkpoint(plan_load(blocks, CheckpointFiles.open(directory), **(tied or UNTIED)))


# ---- files ----


def test_headers_give_what_was_saved(tmp_path: Path) -> None:
    saved = {
        "a": numbered(3, 5, dtype=torch.bfloat16),
        "b": numbered(7),
        "empty": numbered(0, 4),
        "ids": torch.arange(3),
    }
    save_file(saved, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    found = CheckpointFiles.open(str(tmp_path)).tensors
    assert {name: (info.dtype, info.shape, info.nbytes, info.file.name) for name, info in found.items()} == {
        "a": ("BF16", (3, 5), 30, SINGLE_FILE),
        "b": ("F32", (7,), 28, SINGLE_FILE),
        "empty": ("F32", (0, 4), 0, SINGLE_FILE),
        "ids": ("I64", (3,), 24, SINGLE_FILE),
    }


def test_files_need_no_torch() -> None:
    code = "import sys, tp_residual.checkpoint.files; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_shards_are_read_through_the_index(tmp_path: Path) -> None:
    full = {"a": numbered(4, 3, seed=1), "b": numbered(5, seed=2), "c": numbered(2, 2, seed=3)}
    write_shards(
        tmp_path, {"model-2.safetensors": {"a": full["a"]}, "model-1.safetensors": {"b": full["b"], "c": full["c"]}}
    )
    blocks = [whole(name, tensor) for name, tensor in full.items()]
    report = load_from(tmp_path, blocks)
    assert report.tensors == 3
    for block in blocks:
        assert torch.equal(bits(block.parameter), bits(full[block.name]))


def test_a_single_file_wins_over_an_index(tmp_path: Path) -> None:
    save_file({"a": numbered(2)}, tmp_path / SINGLE_FILE)
    write_index(tmp_path, {"a": "gone.safetensors"})
    assert list(CheckpointFiles.open(tmp_path).tensors) == ["a"]


BROKEN_FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda file: file.write_bytes(b""), "it is empty"),
    "shorter than a length": (lambda file: file.write_bytes(b"\x02\0\0"), "it has 3 bytes"),
    "insane header length": (lambda file: write_raw(file, {}, header_bytes=1 << 60), f"header said to take {1 << 60}"),
    "truncated header": (
        lambda file: write_raw(file, b"{}", header_bytes=3),
        "it has 10 bytes and a header said to take 3",
    ),
    "endless header": (lambda file: write_endless_header(file), f"header said to take {MAX_HEADER_BYTES + 1}"),
    "a Git LFS pointer": (lambda file: file.write_text("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
    "not JSON": (lambda file: write_raw(file, b"{'a': 1}"), "its JSON is not valid"),
    "not UTF-8": (lambda file: write_raw(file, b'{"\xff": 1}'), "its JSON is not valid"),
    "endless nesting": (lambda file: write_raw(file, b'{"a":' + b"[" * 100_000), "its JSON is not valid"),
    "not an object": (lambda file: write_raw(file, [1]), "its JSON is a list, not an object"),
    "a name twice": (
        lambda file: write_raw(file, b'{"a": %b, "a": %b}' % ((json.dumps(entry()).encode(),) * 2), bytes(8)),
        "is broken: it names twice: a;",
    ),
    "metadata": (lambda file: write_raw(file, {"__metadata__": {"n": 1}}), "its __metadata__ is not a map of strings"),
    "no offsets": (lambda file: write_raw(file, {"a": {"dtype": "F32", "shape": [2]}}), "a is not described by dtype"),
    "unknown dtype": (lambda file: write_raw(file, {"a": entry(dtype="F4")}, bytes(8)), "a has the unknown dtype 'F4'"),
    "negative size": (lambda file: write_raw(file, {"a": entry(shape=[-2])}, bytes(8)), r"a has shape \[-2\]"),
    "fractional size": (lambda file: write_raw(file, {"a": entry(shape=[2.0])}, bytes(8)), r"a has shape \[2.0\]"),
    "size true": (lambda file: write_raw(file, {"a": entry(0, 4, [True])}, bytes(4)), r"a has shape \[True\]"),
    "three offsets": (
        lambda file: write_raw(file, {"a": entry() | {"data_offsets": [0, 8, 8]}}, bytes(8)),
        r"data_offsets \[0, 8, 8\]",
    ),
    "shape against offsets": (
        lambda file: write_raw(file, {"a": entry(0, 12)}, bytes(12)),
        r"a has 12 bytes, F32 of shape \[2\] takes 8",
    ),
    "overlap": (
        lambda file: write_raw(file, {"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)),
        "b starts at byte 4 of the data, its predecessor ends at 8",
    ),
    "hole": (
        lambda file: write_raw(file, {"a": entry(0, 8), "b": entry(12, 20)}, bytes(20)),
        "b starts at byte 12 of the data, its predecessor ends at 8",
    ),
    "truncated data": (lambda file: write_raw(file, {"a": entry()}, bytes(7)), "its header describes"),
    "trailing data": (lambda file: write_raw(file, {"a": entry()}, bytes(9)), "its header describes"),
    "a directory": (lambda file: file.mkdir(), "Is a directory"),
    "a dangling link": (lambda file: file.symlink_to("gone"), "No such file"),
}


@pytest.mark.parametrize("case", BROKEN_FILES)
@pytest.mark.parametrize("sharded", [False, True], ids=["single", "shard"])
def test_broken_file(tmp_path: Path, case: str, sharded: bool) -> None:
    spoil, message = BROKEN_FILES[case]
    file = tmp_path / ("model-1.safetensors" if sharded else SINGLE_FILE)
    spoil(file)
    if sharded:
        write_index(tmp_path, {"a": file.name})
    with pytest.raises(CheckpointError, match=message) as caught:
        CheckpointFiles.open(tmp_path)
    assert str(caught.value).count(str(file)) == 1


def replace_by_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def write_endless_header(file: Path) -> None:
    write_raw(file, {}, header_bytes=MAX_HEADER_BYTES + 1)
    os.truncate(file, 2 * MAX_HEADER_BYTES)  # sparse


BROKEN_INDEXES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "not JSON": (lambda directory: (directory / INDEX_FILE).write_text("{"), "its JSON is not valid"),
    "a directory": (lambda directory: replace_by_directory(directory / INDEX_FILE), "Is a directory"),
    "no map": (lambda directory: (directory / INDEX_FILE).write_text('{"metadata": {}}'), "it has no weight_map"),
    "an empty map": (lambda directory: write_index(directory, {}), "it has no weight_map"),
    "a map to numbers": (lambda directory: write_index(directory, {"a": 1}), "it has no weight_map"),
    "a missing shard": (
        lambda directory: (directory / "two.safetensors").unlink(),
        "names files that are not there: two.safetensors; download the missing shards",
    ),
    "a file elsewhere": (
        lambda directory: write_index(directory, {"a": "../one.safetensors"}),
        "names files outside its directory: ../one.safetensors",
    ),
    "a tensor that nothing holds": (
        lambda directory: write_index(
            directory, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
        ),
        "names tensors that their files lack: c in two.safetensors",
    ),
    "a tensor in the other shard": (
        lambda directory: write_index(directory, {"a": "two.safetensors", "b": "one.safetensors"}),
        "names tensors that their files lack: a in two.safetensors, b in one.safetensors",
    ),
    "a tensor left out": (
        lambda directory: save_file({"b": numbered(3), "d": numbered(1)}, directory / "two.safetensors"),
        "lacks tensors that its files hold: d in two.safetensors",
    ),
    "a tensor twice": (
        lambda directory: save_file({"a": numbered(2), "b": numbered(3)}, directory / "two.safetensors"),
        r"a is in both \S+one.safetensors and two.safetensors",
    ),
}


@pytest.mark.parametrize("case", BROKEN_INDEXES)
def test_broken_index(tmp_path: Path, case: str) -> None:
    spoil, message = BROKEN_INDEXES[case]
    write_shards(tmp_path, {"one.safetensors": {"a": numbered(2)}, "two.safetensors": {"b": numbered(3)}})
    assert len(CheckpointFiles.open(tmp_path).tensors) == 2
    spoil(tmp_path)
    with pytest.raises(CheckpointError, match=message) as caught:
        CheckpointFiles.open(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_directories_without_weights(tmp_path: Path) -> None:
    def message(directory: Path) -> str:
        with pytest.raises(CheckpointError) as caught:
            CheckpointFiles.open(directory)
        return str(caught.value)

    assert f"cannot read the model directory {tmp_path}/gone: No such file" in message(tmp_path / "gone")
    assert "has neither model.safetensors nor model.safetensors.index.json; download" in message(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    (tmp_path / "consolidated.00.pth").touch()
    assert "refused: consolidated.00.pth, pytorch_model.bin; convert them to safetensors" in message(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    assert "but model-00001-of-00002.safetensors; restore the index" in message(tmp_path)
    assert "Not a directory" in message(tmp_path / "pytorch_model.bin")


def test_an_unreadable_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")  # raised by hand: root may read everything

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(CheckpointError, match="Permission denied; give a readable directory"):
        CheckpointFiles.open(tmp_path)


# ---- slices ----


@pytest.mark.parametrize("tp_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_rank_reads_its_rows_and_columns(tmp_path: Path, tp_size: int, dtype: torch.dtype) -> None:
    """Rows 7, columns 6 and a vector: at tp 8 some ranks hold nothing, and say so in the same names."""
    full = {"rows": numbered(7, 3, dtype=dtype, seed=1), "columns": numbered(5, 6, dtype=dtype, seed=2)}
    full["bias"] = numbered(7, dtype=dtype, seed=3)
    full["rows"][2] = torch.tensor([-0.0, torch.inf, torch.nan])
    save_file(full, tmp_path / SINGLE_FILE)
    dims = {"rows": 0, "columns": 1, "bias": 0}
    ranges = {name: Split.even(full[name].shape[dim], tp_size).ranges for name, dim in dims.items()}
    parts: dict[str, list[Tensor]] = {name: [] for name in full}
    total = 0
    for rank in range(tp_size):
        blocks = [shard(name, full[name], dim, *ranges[name][rank]) for name, dim in dims.items()]
        report = load_from(tmp_path, blocks)
        elements = sum(block.parameter.numel() for block in blocks)
        assert report == LoadReport(3, elements * dtype.itemsize, elements * dtype.itemsize, {})
        for block in blocks:
            assert block.parameter.untyped_storage().nbytes() == block.parameter.numel() * dtype.itemsize
            parts[block.name].append(block.parameter.detach())
        total += report.bytes_read
    assert total == sum(tensor.nbytes for tensor in full.values())
    for name, dim in dims.items():
        assert torch.equal(bits(torch.cat(parts[name], dim)), bits(full[name]))


def fused_qkv(full: dict[str, Tensor]) -> tuple[nn.Parameter, list[ParameterBlock]]:
    """Rows 2-4 of q, 1-2 of k in two blocks (as where another rank holds the first too), none of a fourth, 0-1 of v."""
    parameter = nn.Parameter(torch.full((7, 4), torch.nan))
    runs = [
        ("q", (0, 3), (2, 5)),
        ("k", (3, 4), (1, 2)),
        ("k", (4, 5), (2, 3)),
        ("none", (5, 5), (2, 2)),
        ("v", (5, 7), (0, 2)),
    ]
    return parameter, [
        ParameterBlock(name, parameter, 0, local, globe, tuple(full[name].shape), (0,), False)
        for name, local, globe in runs
    ]


@pytest.mark.parametrize("chunk_bytes", [1, 40, 1 << 20])
def test_fused_parameters_and_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
    monkeypatch.setattr(load, "CHUNK_BYTES", chunk_bytes)
    full = {name: numbered(6, 4, seed=seed) for seed, name in enumerate(["q", "k", "v", "none", "wide"])}
    save_file(full, tmp_path / SINGLE_FILE)
    parameter, blocks = fused_qkv(full)
    blocks.append(shard("wide", full["wide"], 1, 1, 4))
    expected = torch.cat([full["q"][2:5], full["k"][1:3], full["v"][0:2]])

    steps: list[tuple[int, int]] = []
    plan = plan_load(blocks[::-1], CheckpointFiles.open(tmp_path), **UNTIED)
    assert [block.name for block in plan.blocks] == ["k", "k", "none", "q", "v", "wide"]  # as they lie in the file
    report = load_checkpoint(plan, progress=lambda done, total: steps.append((done, total)))
    assert torch.equal(bits(parameter), bits(expected))
    assert torch.equal(bits(blocks[-1].parameter), bits(full["wide"][:, 1:4]))
    bytes_due = (7 * 4 + 6 * 3) * 4
    assert (report.tensors, report.bytes_read, report.bytes_held) == (5, bytes_due, bytes_due)
    assert steps == sorted(set(steps)) and steps[-1] == (bytes_due, bytes_due)
    assert len(steps) == {1: 13, 40: 7, 1 << 20: 5}[chunk_bytes]  # rows of 16 and 12 bytes

    parameter.data.fill_(torch.nan)
    load_state_dict_blocks(blocks, {name: nn.Parameter(tensor) for name, tensor in full.items()})
    assert torch.equal(bits(parameter), bits(expected)) and parameter.is_leaf and parameter.grad_fn is None


def test_casts_are_reported(tmp_path: Path) -> None:
    full = {
        "a": numbered(5, 4),
        "b": numbered(3, dtype=torch.float16),
        "c": numbered(6, 2, seed=2),
        "same": numbered(2).bfloat16(),
    }
    save_file(full, tmp_path / SINGLE_FILE)
    blocks = [shard("a", full["a"], 1, 1, 3, torch.bfloat16), whole("b", full["b"], torch.bfloat16)]
    parameter = nn.Parameter(torch.zeros(4, 2, dtype=torch.bfloat16))
    blocks += [ParameterBlock("c", parameter, 0, (i, i + 2), (i, i + 2), (6, 2), (0,), False) for i in (0, 2)]
    blocks.append(whole("same", full["same"]))
    report = load_from(tmp_path, blocks)
    assert report.casts == {("float32", "bfloat16"): 2, ("float16", "bfloat16"): 1}  # c counts once for its two blocks
    assert report.bytes_read == 10 * 4 + 3 * 2 + 8 * 4 + 2 * 2
    assert report.bytes_held == (10 + 3 + 8 + 2) * 2
    assert torch.equal(bits(blocks[0].parameter), bits(full["a"][:, 1:3].bfloat16()))
    assert torch.equal(bits(parameter), bits(full["c"][:4].bfloat16()))


def test_a_cast_that_overflows_is_refused(tmp_path: Path) -> None:
    full = {"fine": torch.tensor([65504.0]).bfloat16() / 2, "huge": torch.tensor([1.0, 70000.0]).bfloat16()}
    save_file(full, tmp_path / SINGLE_FILE)
    blocks = [whole(name, tensor, torch.float16) for name, tensor in full.items()]
    with pytest.raises(CheckpointError, match=r"huge has values that are not finite in float16 \(limit 65504\)"):
        load_from(tmp_path, blocks)


# ---- coverage ----


def runs(*local: tuple[int, int], rows: int = 6) -> list[ParameterBlock]:
    parameter = nn.Parameter(torch.zeros(rows, 2))
    return [ParameterBlock("a", parameter, 0, run, run, (6, 2), (0,), False) for run in local]


@pytest.mark.parametrize(
    "blocks",
    [
        runs((0, 2), (3, 6)),
        runs((1, 6)),
        runs((0, 5)),
        runs((0, 4), (3, 6)),
        runs((0, 6), (0, 6)),
        runs((0, 6), (2, 3)),
    ],
    ids=["gap", "gap at the start", "gap at the end", "overlap", "twice", "inside"],
)
def test_blocks_that_do_not_tile_are_refused(tmp_path: Path, blocks: list[ParameterBlock]) -> None:
    save_file({"a": numbered(6, 2)}, tmp_path / SINGLE_FILE)
    for refused in (lambda: load_from(tmp_path, blocks), lambda: load_state_dict_blocks(blocks, {"a": numbered(6, 2)})):
        with pytest.raises(CheckpointError, match=r"blocks a of one parameter of shape \(6, 2\) cover .* exactly once"):
            refused()
    load_from(tmp_path, runs((3, 6), (0, 2), (1, 1), (2, 3)))


@pytest.mark.parametrize(
    ("dim", "local", "globe", "shape"),
    [
        (2, (0, 3), (0, 3), (3, 2)),
        (0, (0, 3), (0, 2), (3, 2)),
        (0, (0, 3), (1, 4), (3, 2)),
        (0, (0, 4), (0, 4), (4, 2)),
        (0, (2, 0), (2, 0), (3, 2)),
        (0, (0, 3), (0, 3), (3, 4)),
        (0, (0, 3), (0, 3), (3,)),
        (1, (0, 2), (0, 2), (3,)),
    ],
    ids=[
        "no such dim",
        "lengths differ",
        "outside the tensor",
        "outside the parameter",
        "backwards",
        "width",
        "a vector",
        "no dim 1",
    ],
)
def test_a_block_that_does_not_fit_is_refused(
    dim: int, local: tuple[int, int], globe: tuple[int, int], shape: tuple[int, ...]
) -> None:
    block = ParameterBlock("a", nn.Parameter(torch.zeros(3, 2)), dim, local, globe, shape, (0,), False)
    with pytest.raises(CheckpointError, match=r"the block a of a parameter of shape \(3, 2\) .* do not fit"):
        load_state_dict_blocks([block], {"a": numbered(*shape)})


def test_blocks_along_both_dims_are_refused() -> None:
    parameter = nn.Parameter(torch.zeros(2, 2))
    blocks = [
        ParameterBlock("a", parameter, dim, run, run, (2, 2), (0,), False) for dim, run in enumerate([(0, 1), (1, 2)])
    ]
    with pytest.raises(CheckpointError, match="not each index exactly once"):
        load_state_dict_blocks(blocks, {"a": numbered(2, 2)})


def test_names_shapes_and_dtypes_are_judged_before_anything_is_written(tmp_path: Path) -> None:
    """All complaints come in one message, from a file and from memory alike."""
    expected = {"good": numbered(2), "gone": numbered(2), "tall": numbered(4, 3), "ids": numbered(2)}
    found = {"good": numbered(2), "tall": numbered(3, 4), "ids": torch.arange(2)}
    found |= {f"extra.{number:02}": numbered(1) for number in range(13)}
    save_file(found, tmp_path / SINGLE_FILE)
    for attempt in (lambda blocks: load_from(tmp_path, blocks), lambda blocks: load_state_dict_blocks(blocks, found)):
        blocks = [whole(name, tensor) for name, tensor in expected.items()]
        with pytest.raises(CheckpointError) as caught:
            attempt(blocks)
        message = str(caught.value)
        assert "1 missing: gone;" in message
        assert "13 unexpected: extra.00, extra.01, " in message and "extra.09 and 3 more;" in message
        assert "1 of the wrong shape: tall (3, 4) instead of (4, 3);" in message
        assert "1 in a dtype other than F64, F32, F16, BF16: ids " in message and "config.json" in message
        assert all(block.parameter.isnan().all() for block in blocks)


def test_eight_bit_floats_are_no_weights(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2).to(torch.float8_e4m3fn)}, tmp_path / SINGLE_FILE)
    with pytest.raises(CheckpointError, match=r"in a dtype other than .*: a F8_E4M3; use unquantised weights"):
        load_from(tmp_path, [whole("a", torch.ones(2))])


def test_an_empty_share_is_judged_too(tmp_path: Path) -> None:
    """So that a rank without rows fails together with the others."""
    save_file({"b": numbered(3)}, tmp_path / SINGLE_FILE)
    with pytest.raises(CheckpointError, match="1 missing: a; 1 unexpected: b"):
        load_from(tmp_path, [shard("a", numbered(3), 0, 3, 3)])


def test_old_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    full = {"a": numbered(2)}
    save_file(full | {"model.layers.0.self_attn.rotary_emb.inv_freq": numbered(4)}, tmp_path / SINGLE_FILE)
    assert load_from(tmp_path, [whole("a", full["a"])]).tensors == 1


# ---- tied heads ----


@pytest.mark.parametrize("in_memory", [False, True], ids=["file", "memory"])
def test_tied_flag_and_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool) -> None:
    monkeypatch.setattr(load, "CHUNK_BYTES", 64)  # four rows: the last row is in the last of three chunks
    embedding = numbered(11, 4)
    other = embedding.clone()
    other[10, 3] += 1e-6

    def attempt(found: dict[str, Tensor], untied: bool = False) -> None:
        block = shard("embed.weight", embedding, 0, 0, 2)  # the difference is in another rank's rows
        blocks = [block, shard("lm_head.weight", embedding, 0, 0, 2)] if untied else [block]
        if in_memory:
            load_state_dict_blocks(blocks, found, **(UNTIED if untied else TIED))
        else:
            save_file(found, tmp_path / SINGLE_FILE)
            load_from(tmp_path, blocks, **(UNTIED if untied else TIED))
        assert torch.equal(block.parameter, embedding[:2])

    attempt({"embed.weight": embedding})
    attempt({"embed.weight": embedding, "lm_head.weight": embedding.clone()})
    attempt({"embed.weight": embedding, "lm_head.weight": embedding.double()})
    attempt({"lm_head.weight": embedding})  # how safetensors' save_model saves a tied model
    for head in (other, embedding[:8].clone(), embedding[:, :3].clone(), embedding.int()):
        with pytest.raises(CheckpointError, match="differs from the embedding's; set tie_word_embeddings=false"):
            attempt({"embed.weight": embedding, "lm_head.weight": head})
    attempt({"embed.weight": embedding, "lm_head.weight": other}, untied=True)
    with pytest.raises(CheckpointError, match=r"1 missing: lm_head.weight; .* set tie_word_embeddings=true"):
        attempt({"embed.weight": embedding}, untied=True)
    with pytest.raises(CheckpointError, match=r"1 missing: embed.weight"):
        attempt({"lm_head.weight": embedding}, untied=True)


# ---- between plan and load ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.unlink(), "cannot read .*two.safetensors: No such file"),
        (lambda file: os.truncate(file, file.stat().st_size - 1), "two.safetensors is broken: it has"),
        (lambda file: save_file({"b": numbered(5).double()}, file), "two.safetensors has changed since it was checked"),
        (lambda file: save_file({"c": numbered(5)}, file), "two.safetensors has changed since it was checked"),
    ],
    ids=["vanished", "truncated", "another dtype", "another name"],
)
def test_a_file_that_changes_after_the_plan(tmp_path: Path, change: Callable[[Path], Any], message: str) -> None:
    full = {"a": numbered(2), "b": numbered(5)}
    write_shards(tmp_path, {"one.safetensors": {"a": full["a"]}, "two.safetensors": {"b": full["b"]}})
    blocks = [whole(name, tensor) for name, tensor in full.items()]
    plan = plan_load(blocks, CheckpointFiles.open(tmp_path), **UNTIED)
    change(tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(plan)
    assert all(block.parameter.isnan().all() for block in blocks)  # refused before anything was written


def test_a_file_that_the_library_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise OSError("Cannot allocate memory")

    save_file({"a": numbered(2)}, tmp_path / SINGLE_FILE)
    monkeypatch.setattr(load, "safe_open", refuse)
    with pytest.raises(CheckpointError, match=r"cannot read .*model.safetensors: Cannot allocate memory"):
        load_from(tmp_path, [whole("a", numbered(2))])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_file_stays_open_or_mapped(tmp_path: Path) -> None:
    full = {"embed.weight": numbered(64, 64), "lm_head.weight": numbered(64, 64)}
    save_file(full, tmp_path / SINGLE_FILE)
    block = whole("embed.weight", full["embed.weight"])
    load_from(tmp_path, [block], **TIED)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert not any(
        str(tmp_path) in str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()
    )


# ---- memory ----

MEASURE = """
import json, sys, threading, time
from pathlib import Path
import torch
from torch import nn
from tp_residual.checkpoint.files import CheckpointFiles
from tp_residual.checkpoint.load import load_checkpoint, plan_load
from tp_residual.parallel.blocks import ParameterBlock

def anonymous():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024

def peak_of(job):
    peak, done = 0, threading.Event()
    def sample():
        nonlocal peak
        while not done.is_set():
            peak = max(peak, anonymous())
            time.sleep(0.0005)
    sampler = threading.Thread(target=sample)
    sampler.start()
    job()
    peak = max(peak, anonymous())
    done.set()
    sampler.join()
    return peak

def measure(directory, dim, dtype):
    files = CheckpointFiles.open(directory)
    shape = list(files.tensors["a"].shape)
    share = [size // 2 if axis == dim else size for axis, size in enumerate(shape)]
    before = anonymous()
    parameter = nn.Parameter(torch.empty(share, dtype=dtype))
    run = (shape[dim] // 2, shape[dim])
    block = ParameterBlock("a", parameter, dim, (0, share[dim]), run, tuple(shape), (0,), False)
    peak = peak_of(lambda: load_checkpoint(plan_load([block], files, tied_head=None, tied_to=None)))
    assert not parameter.detach()[::97].any()
    return {"above": peak - before, "share": parameter.nbytes}

small, large = sys.argv[1:]
measure(small, 1, torch.bfloat16)  # what torch and safetensors load at first use is no part of it
cases = {"rows": (0, torch.float32), "columns": (1, torch.float32), "columns, cast": (1, torch.bfloat16)}
print(json.dumps({name: measure(large, *case) for name, case in cases.items()}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_anonymous_memory_is_the_share(tmp_path: Path) -> None:
    """Half of a 256 MB tensor: above the imports at most the share and 100 MB. The pages of the file do not count."""
    mb = 1 << 20
    for name, rows in (("small", 4), ("large", 8192)):
        (tmp_path / name).mkdir()
        nbytes = rows * 8192 * 4
        write_raw(tmp_path / name / SINGLE_FILE, {"a": entry(0, nbytes, [rows, 8192])})
        with (tmp_path / name / SINGLE_FILE).open("ab") as file:
            file.truncate(file.tell() + nbytes)  # sparse: zeros that take no disk
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "large")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert [result["share"] // mb for result in results.values()] == [128, 128, 64]
    for name, result in results.items():
        print(f"{name}: share {result['share'] / mb:.1f} MB, peak above the imports {result['above'] / mb:.1f} MB")
        assert result["share"] * 0.9 <= result["above"] <= result["share"] + 100 * mb, (name, results)


def test_a_fingerprint_tells_weights_of_one_shape_apart(tmp_path: Path) -> None:
    prints = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        save_file({"w": numbered(300, 700, seed=seed), "b": numbered(3)}, tmp_path / name / SINGLE_FILE)
        prints.append(CheckpointFiles.open(tmp_path / name).fingerprint())
    assert prints[0] == prints[1] != prints[2]
    (tmp_path / "d").mkdir()
    save_file({"v": numbered(300, 700, seed=1), "b": numbered(3)}, tmp_path / "d" / SINGLE_FILE)
    assert CheckpointFiles.open(tmp_path / "d").fingerprint() != prints[0]  # another name for the same bytes
