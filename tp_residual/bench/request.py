"""What a benchmark is asked, checked before torch is imported: sizes, rules of timing, names."""

import re
from dataclasses import dataclass
from typing import Literal

from tp_residual.errors import RequestError

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "p2p")
TRANSPORTS = ("gloo", "shared", "nccl", "symmetric")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_UNITS |= {"B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Rules:
    """How samples are taken. iters: samples of each row, at least 5 of them even where `seconds` a shape would not do.

    cache: warm calls again at once; cold writes twice the last-level cache before each sample, which then is one call.
    """

    iters: int = 50
    warmup: int = 5
    cache: Literal["warm", "cold"] = "warm"
    seconds: float = 10.0

    def __post_init__(self) -> None:
        at_least("--iters", self.iters, 1)
        at_least("--warmup", self.warmup, 0)
        if not 0 < self.seconds < 1e6:
            raise RequestError(f"--max-seconds {self.seconds:g} is not between 0 and 1e6")


@dataclass(frozen=True)
class CollectivesRequest:
    """Sizes are of the full buffer in bytes, as nccl-tests counts them; check: checked calls a size, each with its own data."""

    min_bytes: int = 2**10
    max_bytes: int = 2**24
    factor: float = 4.0
    dtype: str = "float32"
    collectives: tuple[str, ...] = COLLECTIVES
    transports: tuple[str, ...] = ()  # none: all that run
    root: int = 0
    check: int = 1

    def __post_init__(self) -> None:
        at_least("--min-bytes", self.min_bytes, 1)
        if self.max_bytes < self.min_bytes:
            raise RequestError(f"--max-bytes {self.max_bytes} is less than --min-bytes {self.min_bytes}")
        if not 1 < self.factor < 1e9:
            raise RequestError(f"--factor {self.factor:g} must be above 1: the next size is that many times the last")
        if self.check < 1:
            raise RequestError(
                f"--check {self.check} must be at least 1: a figure whose result was not checked says nothing"
            )
        one_of("--collective", self.collectives, COLLECTIVES)
        one_of("--transport", self.transports, TRANSPORTS)

    def elements(self, ranks: int) -> list[int]:
        """Of the full buffer, each a multiple of the number of ranks and at least one a rank, smallest first."""
        sizes, nbytes = [], float(self.min_bytes)
        while nbytes <= self.max_bytes:
            sizes.append(max(1, int(nbytes) // (ELEMENT_BYTES[self.dtype] * ranks)) * ranks)
            nbytes = max(nbytes * self.factor, nbytes + 1)
        return list(dict.fromkeys(sizes))


@dataclass(frozen=True)
class BandwidthRequest:
    """array_bytes: of each array (None: four times the last-level cache, at least 64 MiB); gemm_size: M = N = K (None: by device)."""

    array_bytes: int | None = None
    gemm_size: int | None = None

    def __post_init__(self) -> None:
        if self.array_bytes is not None:
            at_least("--bytes", self.array_bytes, 64)
        if self.gemm_size is not None:
            at_least("--gemm-size", self.gemm_size, 16)


@dataclass(frozen=True)
class ShapesRequest:
    """tokens x hidden. executors: names as they are registered; none: all that run."""

    tokens: tuple[int, ...]
    hidden: tuple[int, ...]
    dtypes: tuple[str, ...] = ("bfloat16",)
    executors: tuple[str, ...] = ()
    operator: bool = False
    compiled: bool = False

    def __post_init__(self) -> None:
        for name, values in (("--tokens", self.tokens), ("--hidden", self.hidden)):
            for value in values:
                at_least(name, value, 1)
        one_of("--dtype", self.dtypes, tuple(ELEMENT_BYTES))


def at_least(option: str, value: int, least: int) -> None:
    if value < least:
        raise RequestError(f"{option} {value} must be at least {least}")


def one_of(option: str, values: tuple[str, ...], choices: tuple[str, ...]) -> None:
    for value in values:
        if value not in choices:
            raise RequestError(f"{option} {value!r} is not one of {', '.join(choices)}")


def parse_size(option: str, text: str) -> int:
    """Bytes of `4096`, `64K` (binary, as nccl-tests reads it), `64KB` (decimal) or `64KiB`."""
    match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise RequestError(f"{option} {text!r} is not a size; write it as 4096, 64K, 64KB or 64KiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_list(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers of `1,16,256`, in order and once each."""
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise RequestError(f"{option} {text!r} is not a list of whole numbers such as 1,16,256") from None
