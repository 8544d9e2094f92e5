"""A run's pre-norm states in files that any framework can write, and how two of them are read back.

DIR/dump.json       what the states are; DIR/states.safetensors   one tensor `[tokens, hidden]` a state, named by its site

dump.json, all keys required but those marked: `format` ("tp_residual.dump"), `version` (1), `framework`, `model_type`, `dtype` (of the
weights), `stream_dtype`, `hidden_size`, `tp`, `layout` ("replicated" or "token_sharded": how the stream lay on the ranks),
`token_ranges` (`[start, stop)` of the tokens each rank held), `sequences` (lists of token ids; rows of the tensors are their tokens, one
sequence after the other), `sites` (names in the order in which the states arise), and optionally `settings`.

A site is the module whose update was added last: `model.embed_tokens`, `model.layers.N.self_attn.o_proj`, `model.layers.N.mlp.down_proj`.
States are complete and in token order whatever the layout was. A dump appears under its name whole or not at all.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tp_residual.checkpoint.files import read_header
from tp_residual.errors import CheckpointError, RequestError
from tp_residual.model.config import DTYPES
from tp_residual.model.decoder import CausalLM
from tp_residual.model.fields import show
from tp_residual.residual.boundary import Boundary
from tp_residual.verify.folders import check_dump_target
from tp_residual.verify.oracle import site_names

FORMAT, VERSION = "tp_residual.dump", 1
META_FILE, STATES_FILE = "dump.json", "states.safetensors"


@dataclass(frozen=True)
class DumpInfo:
    """What dump.json holds, beside format and version."""

    framework: str
    model_type: str
    dtype: str
    stream_dtype: str
    hidden_size: int
    tp: int
    layout: str
    token_ranges: list[list[int]]
    sequences: list[list[int]]
    sites: list[str]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.sequences))

    def token_at(self, row: int) -> tuple[int, int]:
        """(sequence, position) of a row of the states."""
        for index, ids in enumerate(self.sequences):
            if row < len(ids):
                return index, row
            row -= len(ids)
        raise IndexError(row)


@dataclass(frozen=True)
class Dump:
    """A dump on disk; states are read one at a time."""

    directory: Path
    info: DumpInfo

    def state(self, site: str) -> Tensor:
        with safe_open(self.directory / STATES_FILE, framework="pt") as opened:
            return opened.get_tensor(site)


def write_dump(directory: str | PathLike[str], info: DumpInfo, states: Mapping[str, Tensor]) -> None:
    """states: by site, `[tokens, hidden]`. Refuses a name that is taken; written beside it and renamed at the end."""
    target = check_dump_target(directory)
    if list(states) != info.sites:
        raise RequestError(f"the dump's sites {info.sites} are not its states {list(states)}")
    for site, state in states.items():
        if tuple(state.shape) != (info.tokens, info.hidden_size):
            raise RequestError(
                f"state {site} has shape {list(state.shape)}; {info.tokens} tokens of hidden size {info.hidden_size} are needed"
            )
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        save_file({site: state.detach().cpu().contiguous() for site, state in states.items()}, scratch / STATES_FILE)
        (scratch / META_FILE).write_text(json.dumps({"format": FORMAT, "version": VERSION} | asdict(info), indent=1))
        os.chmod(scratch, 0o755)
        os.rename(scratch, target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def read_dump(directory: str | PathLike[str]) -> Dump:
    """Checks everything but the values: the files, the format, and that each state is there in the right shape."""
    folder = Path(directory)
    try:
        values = json.loads((folder / META_FILE).read_text())
    except (OSError, ValueError) as error:
        raise RequestError(
            f"{folder} is not a dump: {META_FILE} cannot be read ({error}); write one with verify --dump"
        ) from None
    if not isinstance(values, dict) or (values.pop("format", None), values.pop("version", None)) != (FORMAT, VERSION):
        raise RequestError(f"{folder / META_FILE} is not of format {FORMAT!r}, version {VERSION}; write the dump again")
    try:
        info = DumpInfo(**values)
    except TypeError as error:
        raise RequestError(
            f"{folder / META_FILE} has other keys than a dump's: {error}; see docs/dump_format.md"
        ) from None
    _check_types(info, folder / META_FILE)
    try:
        header = read_header(folder / STATES_FILE)
    except CheckpointError as error:
        raise RequestError(f"{folder} is not a whole dump: {error}") from None
    for site in info.sites:
        shape = (info.tokens, info.hidden_size)
        if site not in header or header[site].shape != shape:
            found = "nothing" if site not in header else f"shape {list(header[site].shape)}"
            raise RequestError(f"{folder / STATES_FILE}: {site} should have shape {list(shape)}, and there is {found}")
    return Dump(folder, info)


def _check_types(info: DumpInfo, file: Path) -> None:
    """Raises RequestError naming the first key whose value is of another kind than a dump's."""

    def integers(values: Any) -> bool:
        return isinstance(values, list) and all(type(value) is int for value in values)

    def lists(values: Any, length: int | None = None) -> bool:
        return isinstance(values, list) and all(integers(v) and length in (None, len(v)) for v in values)

    fits = {
        "dtype": info.dtype in DTYPES,
        "stream_dtype": info.stream_dtype in DTYPES,
        "hidden_size": type(info.hidden_size) is int,
        "sequences": lists(info.sequences),
        "token_ranges": lists(info.token_ranges, 2),
        "sites": isinstance(info.sites, list) and all(isinstance(site, str) for site in info.sites),
    }
    for key, right in fits.items():
        if not right:
            raise RequestError(
                f"{file}: {key} is {show(getattr(info, key))}; see docs/dump_format.md for what it should be"
            )


def dump_run(
    directory: str | PathLike[str],
    sequences: Sequence[Sequence[int]],
    streams: Sequence[Tensor],
    model: CausalLM,
    boundary: Boundary,
) -> None:
    """One of our runs. streams: complete, by site (`capture.WholeRun.streams`). Rank 0 alone calls it."""
    sites = site_names(model.config.num_hidden_layers)
    tokens = sum(map(len, sequences))
    info = DumpInfo(
        framework="tp_residual",
        model_type=model.config.model_type,
        dtype=str(model.dtype).removeprefix("torch."),
        stream_dtype=str(boundary.stream_dtype).removeprefix("torch."),
        hidden_size=model.config.hidden_size,
        tp=model.group.size,
        layout="token_sharded" if boundary.sequence_parallel else "replicated",
        token_ranges=[list(run) for run in boundary.token_split(tokens).ranges],
        sequences=[list(ids) for ids in sequences],
        sites=sites,
        settings={"boundary": boundary.executor.name, "round_reduced": boundary.round_reduced},
    )
    write_dump(directory, info, dict(zip(sites, streams, strict=True)))
