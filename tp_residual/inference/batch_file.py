"""Files of prompts in, files of answers out: one JSON object a line, each answer written whole, at once and once.

An answer carries the run it belongs to, so that a file needs no header and a resumed run knows its own. What a killed writer or a
full disk left of a line ends in no newline; it is cut off before anything else is written. Imports no torch.
"""

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from tp_residual.errors import RequestError
from tp_residual.inference.tokenizer import Tokenizer
from tp_residual.model.fields import is_integer, show


def read_lines(path: str | PathLike[str], kinds: Sequence[frozenset[str]]) -> list[dict[str, Any]]:
    """One JSON object a line, each with exactly the fields of one of `kinds`. Raises RequestError with the line's number."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8: {error.reason} at byte {error.start}; convert it") from None
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    if not lines:
        raise RequestError(f"{path} has 0 lines; give it at least one")
    wanted = " or ".join(
        "{" + ", ".join(f'"{name}": ...' for name in sorted(kind, reverse=True)) + "}" for kind in kinds
    )
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{path}, line {number} is not JSON ({error}); write {wanted}") from None
        if not isinstance(entry, dict) or frozenset(entry) not in kinds:
            raise RequestError(f"{path}, line {number} is {show(entry)}; write {wanted}")
        entries.append(entry)
    return entries


PROMPT_KINDS = (frozenset({"prompt"}), frozenset({"prompt_ids"}), frozenset({"messages"}))


def encode_prompt(entry: Mapping[str, Any], tokenizer: Callable[[], Tokenizer], *, chat: bool, where: str) -> list[int]:
    """The ids of one line of PROMPT_KINDS. tokenizer: asked only where text needs one. where: for errors."""
    if "prompt_ids" in entry:
        return _ids(entry["prompt_ids"], "prompt_ids", where)
    try:
        if "messages" in entry:
            if not isinstance(entry["messages"], list):
                raise RequestError(f"messages={show(entry['messages'])} is not a list of messages")
            return tokenizer().apply_chat_template(entry["messages"])
        prompt = _text(entry["prompt"], "prompt", where)
        return (
            tokenizer().apply_chat_template([{"role": "user", "content": prompt}])
            if chat
            else tokenizer().encode(prompt)
        )
    except RequestError as error:
        raise RequestError(f"{where}: {error}") from None


PAIR_KINDS = (frozenset({"prompt", "completion"}), frozenset({"prompt_ids", "completion_ids"}))


def encode_pair(
    entry: Mapping[str, Any], tokenizer: Callable[[], Tokenizer], *, where: str
) -> tuple[list[int], list[int]]:
    """(context, completion) ids of one line of PAIR_KINDS.

    Text is encoded in one piece, as a model would see it: the context is as much of the prompt's own tokens as that begins with.
    """
    if "prompt_ids" in entry:
        return _ids(entry["prompt_ids"], "prompt_ids", where), _ids(entry["completion_ids"], "completion_ids", where)
    prompt = _text(entry["prompt"], "prompt", where)
    alone, whole = (
        tokenizer().encode(prompt),
        tokenizer().encode(prompt + _text(entry["completion"], "completion", where)),
    )
    context = 0
    while context < min(len(alone), len(whole)) and alone[context] == whole[context]:
        context += 1
    return whole[:context], whole[context:]


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(f"{where}: {name}={show(value)} is not a text; give it some")
    return value


def _ids(value: Any, name: str, where: str) -> list[int]:
    if not isinstance(value, list) or not all(map(is_integer, value)):
        raise RequestError(f"{where}: {name}={show(value)} is not a list of token ids")
    return value


def run_name(*parts: object) -> str:
    """A short digest of all that decides a run's answers."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def digest(path: str | PathLike[str]) -> str:
    """Of a file's bytes; "" where there is no file."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return ""


def answered(path: str | PathLike[str], run: str, *, resume: bool) -> tuple[set[tuple[int, int]], int]:
    """The (index, sample) of the whole lines in `path`, and how many bytes those lines take. Changes nothing.

    Raises RequestError for a file that is there without `resume`, and for one that holds anything but answers of `run`.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # a device, of which reading may never end
        raise RequestError(f"--output {path} is not a regular file; name one")
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        return set(), 0
    except OSError as error:
        raise RequestError(f"--output {path} cannot be read: {error.strerror or error}") from None
    if content and not resume:
        raise RequestError(
            f"--output {path} has {len(content)} bytes already; add --resume to go on with it, or name another"
        )
    end = content.rfind(b"\n") + 1  # what follows is a line that was never finished
    done = set[tuple[int, int]]()
    for number, line in enumerate(content[:end].splitlines(), 1):
        try:
            entry = json.loads(line)
            key, theirs = (entry["index"], entry["sample"]), entry["run"]
        except (ValueError, KeyError, TypeError):
            raise RequestError(f"--output {path}, line {number} is no answer of ours; name another file") from None
        if theirs != run:
            raise RequestError(
                f"--output {path} is of run {theirs} and this one is run {run}: its prompts, model or settings differ; "
                "repeat that run's command, or name another file"
            )
        if key in done:
            raise RequestError(
                f"--output {path}, line {number} answers index {key[0]} a second time; name another file"
            )
        done.add(key)
    if content[end:] and not content[end:].startswith(b'{"run": '[: len(content) - end]):
        raise RequestError(f"--output {path} ends in half a line that is not ours; name another file")
    return done, end


class AnswerFile:
    """Appends answers, each a whole line that is on the disk when `write` returns. path None: stdout. One writer at a time.

    Lines come in the order in which answers are finished; `finish` puts those of a file into the order of the prompts.
    """

    def __init__(self, path: str | PathLike[str] | None, run: str, *, resume: bool = False) -> None:
        self.path, self.run = path, run
        self.done: set[tuple[int, int]] = set()
        self._file = -1
        if path is None:
            return
        if os.path.exists(path) and not os.path.isfile(path):
            raise RequestError(f"--output {path} is not a regular file; name one")
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(self._file), os.stat(path)):
                raise BlockingIOError  # another run has just put its lines in order, and this is what the file was before
        except BlockingIOError:
            raise RequestError(
                f"--output {path} is being written by another run; wait for it, or name another file"
            ) from None
        except OSError as error:
            raise RequestError(f"--output {path} cannot be written: {error.strerror or error}") from None
        self.done, self._end = answered(path, run, resume=resume)
        os.ftruncate(self._file, self._end)

    def write(self, index: int, sample: int, answer: dict[str, Any]) -> None:
        """Once for each (index, sample). A line that does not fit is taken back, and RequestError raised."""
        assert (index, sample) not in self.done, (index, sample)
        entry = {"run": self.run, "index": index, "sample": sample} | answer
        line = json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n"
        if self.path is None:
            sys.stdout.write(line)
            sys.stdout.flush()
        else:
            self._append(line.encode())
        self.done.add((index, sample))

    def _append(self, line: bytes) -> None:
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._file, rest) :]
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, self._end)
            raise RequestError(
                f"--output {self.path}: {error.strerror or error} after {len(self.done)} whole answers, which are kept; "
                "make room and repeat the command with --resume"
            ) from None
        self._end += len(line)

    def finish(self) -> str | None:
        """After the last answer: a file's lines are put in the order of (index, sample), all at once, and it is closed.

        Returns why they stay as they are, where there is no room for a second file beside this one; None otherwise.
        """
        try:
            if self.path is not None:
                self._put_in_order(os.path.realpath(self.path))
        except OSError as error:
            return f"--output {self.path} keeps the order in which answers were finished: {error.strerror or error}"
        finally:
            self.close()
        return None

    def _put_in_order(self, path: str) -> None:
        lines = Path(path).read_bytes().splitlines(keepends=True)
        ordered = sorted(lines, key=_place)
        if lines == ordered:
            return
        folder, name = os.path.split(path)
        beside = os.path.join(folder, f".{name}.in_order")  # a killed run may have left one; the lock is ours
        try:
            with open(beside, "wb") as file:
                os.fchmod(file.fileno(), os.fstat(self._file).st_mode & 0o777)
                file.writelines(ordered)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except OSError:
            Path(beside).unlink(missing_ok=True)
            raise

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _place(line: bytes) -> tuple[int, int]:
    entry = json.loads(line)
    return entry["index"], entry["sample"]
