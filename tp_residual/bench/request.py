"""What a benchmark is asked, checked before torch is imported: sizes, rules of timing, names."""

import re
from dataclasses import dataclass
from typing import Literal

from tp_residual.errors import RequestError
from tp_residual.inference.scheduler import BLOCK_SIZE, blocks_for
from tp_residual.model.config import ModelConfig
from tp_residual.model.layout import ModelLayout
from tp_residual.residual.table import EXECUTOR_NAMES

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "p2p")
EXECUTORS = (*EXECUTOR_NAMES, "local")  # those of residual.boundary, which imports torch
TRANSPORTS = ("gloo", "shared", "nccl", "symmetric")
# While a benchmark makes an operand, it holds two of fp64.
_MAKING_BYTES = 16
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_UNITS |= {"B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "T": 2**40, "TB": 10**12, "TIB": 2**40}


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

    def least_bytes(self, ranks: int) -> tuple[str, int]:
        """What was asked for, and the least memory of a rank: a buffer in, one out."""
        return f"--max-bytes {self.max_bytes}", 2 * self.max_bytes

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

    def least_bytes(self, ranks: int) -> tuple[str, int]:
        """What was asked for, and the least memory of a rank: three arrays, or three matrices in fp32 and in bf16."""
        arrays, matrices = 3 * (self.array_bytes or 0), 3 * (4 + 2) * (self.gemm_size or 0) ** 2
        return max(
            (f"--bytes {self.array_bytes}", arrays), (f"--gemm-size {self.gemm_size}", matrices), key=lambda of: of[1]
        )


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

    def least_bytes(self, ranks: int) -> tuple[str, int]:
        """What was asked for, and the least memory of a rank for the largest shape: every rank's update, residual, both results, a copy of
        four passes; or all but one operand and the making of the last.
        """
        tokens, hidden, size = max(self.tokens), max(self.hidden), max(ELEMENT_BYTES[name] for name in self.dtypes)
        each = max((ranks + 7) * size, ranks * size + _MAKING_BYTES)
        return f"--tokens {tokens} --hidden {hidden}", tokens * hidden * each


@dataclass(frozen=True)
class GemmRequest:
    """The linears of one model at some numbers of tokens. config: the model's; dtype: of the weights."""

    config: ModelConfig
    tokens: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        for value in self.tokens:
            at_least("--tokens", value, 1)

    def least_bytes(self, ranks: int) -> tuple[str, int]:
        """What was asked for, and the least memory of a rank: the largest weight twice, its input and its output."""
        config, size = self.config, ELEMENT_BYTES[self.dtype]
        widest = max(config.vocab_size, 2 * config.intermediate_size) // ranks
        tokens = max(self.tokens)
        return f"--tokens {tokens}", size * (2 * widest * config.hidden_size + tokens * (config.hidden_size + widest))


@dataclass(frozen=True)
class GenerateRequest:
    """Every batch with every prompt, all of a batch at once. max_batched_tokens: of a pass; None: all prompts of a batch in one.

    Raises RequestError for what no rank could run.
    """

    config: ModelConfig
    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    new_tokens: int
    max_batched_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, values in (("--batch", self.batches), ("--prompt-tokens", self.prompts)):
            for value in values:
                at_least(name, value, 1)
        at_least("--new-tokens", self.new_tokens, 2)  # one comes with the prompt, and one must be decoded
        if self.max_batched_tokens is not None and self.max_batched_tokens < max(self.batches):
            raise RequestError(
                f"--max-batched-tokens {self.max_batched_tokens} is less than --batch {max(self.batches)}, and a pass has a token of "
                f"each sequence that decodes; use at least {max(self.batches)}"
            )
        longest, needed = self.config.max_sequence_length, self.max_tokens
        if needed > longest:
            raise RequestError(
                f"--prompt-tokens {max(self.prompts)} and --new-tokens {self.new_tokens}: {needed} exceeds {self.config.length_limit}; "
                f"use a prompt of at most {max(longest - self.new_tokens, 0)} tokens"
            )

    @property
    def max_tokens(self) -> int:
        """Of one sequence: its prompt and what it generates."""
        return max(self.prompts) + self.new_tokens

    @property
    def batched_tokens(self) -> int:
        """The most tokens of a pass."""
        return self.max_batched_tokens or max(self.batches) * max(self.prompts)

    @property
    def blocks(self) -> int:
        """Of the cache, for the largest batch at its longest."""
        return max(self.batches) * blocks_for(self.max_tokens, BLOCK_SIZE)

    def least_bytes(self, layout: ModelLayout, dtype: str) -> int:
        """Of all ranks of this machine: the share of weights and the cache of each."""
        config, size = self.config, ELEMENT_BYTES[dtype]
        heads = sum(layout.heads.key_value.size(rank) for rank in range(layout.tp_size))
        cache = 2 * config.num_hidden_layers * heads * config.head_dim * self.blocks * BLOCK_SIZE
        weights = sum(
            tensor.local_elements(rank)
            for tensor in layout.tensors(sequence_parallel=False)
            for rank in range(layout.tp_size)
        )
        return size * (cache + weights)


def require_memory(what: str, needed: int, available: int, holder: str) -> None:
    """Raises RequestError, before anything is allocated: an allocation that fails later takes a rank, or the machine, along."""
    if needed > available:
        raise RequestError(
            f"{what} needs at least {needed} bytes and {holder} has {available} available; ask for a smaller one or fewer ranks"
        )


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
