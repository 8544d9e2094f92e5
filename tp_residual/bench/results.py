"""Result files: what was measured, on what, with which versions and command. Imports no torch, so that two files are compared at once.

`{what, hardware, versions, commit, command, settings, notes, rows}`; a row is flat, its lists are raw samples. docs/benchmarks.md has
the fields.
"""

import csv
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from tp_residual.errors import RequestError

Row: TypeAlias = dict[str, Any]

# what a row is a measurement of: rows of two files are the same when these are
IDENTITY = {
    "collectives": ("transport", "collective", "place", "pair", "root", "dtype", "bytes", "ranks"),
    "bandwidth": ("kernel", "device", "dtype", "threads", "ranks", "bytes"),
    "boundary": ("executor", "transport", "call", "mode", "tokens", "hidden", "dtype", "order", "ranks"),
    "add-norm": ("form", "order", "tokens", "hidden", "dtype", "ranks"),
    "generate": (
        "step", "model", "batch", "prompt_tokens", "new_tokens", "max_batched_tokens", "dtype", "sequence_parallel", "ranks",
    ),
    "memory": ("mode", "model", "batch", "prompt_tokens", "new_tokens", "max_batched_tokens", "dtype", "ranks"),
    "gemm": ("linear", "out_features", "in_features", "tokens", "dtype", "ranks"),
    "scaling": (
        "step", "model", "batch", "prompt_tokens", "new_tokens", "max_batched_tokens", "dtype", "sequence_parallel", "ranks",
    ),
}  # fmt: skip
# the rows of these are amounts of memory, and have no samples: what every row must have instead
AMOUNTS = {
    "memory": ("weights_bytes", "packed_bytes", "cache_bytes", "stream_bytes", "peak_anonymous_bytes", "bound_bytes")
}


@dataclass(frozen=True)
class Result:
    """settings: those under which every row was measured. notes: what did not run, and why."""

    what: str
    hardware: Mapping[str, Any]
    versions: Mapping[str, str]
    commit: str
    command: str
    settings: Mapping[str, Any]
    rows: Sequence[Row]
    notes: Sequence[str] = field(default_factory=tuple)

    def write_json(self, path: str) -> None:
        """A row a line, whole or not at all."""
        fields = asdict(self)
        rows = fields.pop("rows")
        head = json.dumps(fields, indent=1, allow_nan=False)[:-2]
        lines = ",\n  ".join(json.dumps(row, allow_nan=False) for row in rows)
        replace_file(path, f'{head},\n "rows": [\n  {lines}\n ]\n}}\n')

    def write_csv(self, path: str) -> None:
        """The rows without their raw samples."""
        flat = [{key: value for key, value in row.items() if not isinstance(value, list)} for row in self.rows]
        text = StringIO()
        writer = csv.DictWriter(text, list(dict.fromkeys(key for row in flat for key in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
        replace_file(path, text.getvalue())


def load(path: str) -> Result:
    """Raises RequestError for a file that is missing, or is no result of `bench`."""
    try:
        fields = json.loads(Path(path).read_text())
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RequestError(f"{path} is not JSON ({error}); give a file that `bench ... --output` wrote") from error
    wanted = [name for name in Result.__dataclass_fields__ if name != "notes"]
    missing = [name for name in wanted if name not in fields] if isinstance(fields, dict) else wanted
    if missing:
        raise RequestError(f"{path} has no {', '.join(missing)}; give a file that `bench ... --output` wrote")
    if fields["what"] not in IDENTITY:
        raise RequestError(f"{path} is a result of {fields['what']!r}, not of one of {', '.join(IDENTITY)}")
    _check_rows(path, fields)
    return Result(**{name: fields[name] for name in Result.__dataclass_fields__ if name in fields})


def _check_rows(path: str, fields: Mapping[str, Any]) -> None:
    """Raises RequestError for a file that was damaged or edited, naming what."""

    def refuse(where: str, why: str) -> NoReturn:
        raise RequestError(f"{path}: {where} {why}; the file is damaged: measure again with `bench ... --output`")

    for name in ("hardware", "settings"):
        if not isinstance(fields[name], dict):
            refuse(name, f"is {fields[name]!r}, not an object")
    if not isinstance(fields["rows"], list) or not fields["rows"]:
        refuse("rows", "is no list of measurements")
    for number, row in enumerate(fields["rows"]):
        where = f"row {number}"
        if not isinstance(row, dict):
            refuse(where, f"is {row!r}, not an object")
        for name in IDENTITY[fields["what"]]:
            if isinstance(row.get(name), list | dict):
                refuse(where, f"has {name}={row[name]!r}, which is no name or number")
        if fields["what"] in AMOUNTS:
            for name in AMOUNTS[fields["what"]]:
                if not _is_amount(row.get(name)):
                    refuse(where, f"has {name}={row.get(name)!r}, which is no number of bytes")
            continue
        if not isinstance(row.get("limit"), str):
            refuse(where, f"has limit={row.get('limit')!r}, not the name of one")
        for name in ("samples_us", "limit_samples_us"):
            samples = row.get(name)
            if not isinstance(samples, list) or not any(_is_time(us) for us in samples):
                refuse(where, f"has {name}={samples!r}, not a list with times")
            if wrong := [us for us in samples if us is not None and not _is_time(us)]:
                refuse(where, f"has {wrong[0]!r} among its {name}, which is no time above 0")
        for name, value in row.items():
            if name.endswith("_us") and not isinstance(value, list) and not _is_time(value):
                refuse(where, f"has {name}={value!r}, which is no time above 0")


def _is_time(us: object) -> bool:
    return isinstance(us, int | float) and not isinstance(us, bool) and 0 < us < float("inf")


def _is_amount(nbytes: object) -> bool:
    return isinstance(nbytes, int) and not isinstance(nbytes, bool) and nbytes >= 0


def check_target(option: str, path: str) -> None:
    """Raises RequestError when `path` could not be written at the end of a run."""
    folder = Path(path).parent
    if Path(path).is_dir():
        raise RequestError(f"{option} {path} is a folder; name a file in it")
    if Path(path).exists() and not Path(path).is_file():  # a device, which the new file would replace
        raise RequestError(f"{option} {path} is not a regular file; name one")
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RequestError(f"{option} {path} cannot be written: {error.strerror} ({folder})") from error


PLOT_SUFFIXES = (".png", ".pdf", ".svg")


def check_plot_target(path: str) -> None:
    """The same for a picture, for which matplotlib must be installed."""
    if Path(path).suffix.lower() not in PLOT_SUFFIXES:
        raise RequestError(
            f"--plot {path} does not end in one of {', '.join(PLOT_SUFFIXES)}, the kinds of picture that are written"
        )
    if find_spec("matplotlib") is None:
        raise RequestError("--plot needs matplotlib, which is not installed; install tp_residual with its extra `plot`")
    check_target("--plot", path)


def replace_file(path: str, content: str | bytes) -> None:
    """Written beside it and renamed: a reader sees the old file or the new one."""
    data = content.encode() if isinstance(content, str) else content
    handle, name = tempfile.mkstemp(dir=Path(path).parent, prefix=f".{Path(path).name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # mkstemp's own mode is 0600
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
