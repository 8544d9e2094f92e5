"""What `bench peers` is asked, checked before anything starts: whom to measure, on which cores, how often. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tp_residual.bench.request import at_least, one_of
from tp_residual.errors import RequestError

METRICS = ("decode", "prefill", "start")
PEERS = ("transformers", "transformers-tp", "vllm", "llama.cpp")
DTYPES = ("bfloat16", "float32", "float16")
MOST_STEPS = 256  # tokens of one slice and sequence: what every side's cache has room for behind the prompt
_LONGEST_SLICE_S = 2.0  # the machine's own speed changes within ten seconds


@dataclass(frozen=True)
class PeersRequest:
    """environments: a folder with bin/python for a peer; others run in this interpreter's environment.

    cpus: of all sides, each using every one of them. slice_s: the longest that one side runs before the other does, unless a single step
    takes longer. load_limit_s, limit_s: after which a side that does not answer is ended, while it loads and else.
    """

    model: str
    tp: int
    cpus: tuple[int, ...]
    dtype: str
    vocab_size: int
    heads: tuple[int, int]  # query, key-value
    max_position_embeddings: int
    batches: tuple[int, ...] = (1, 8, 32)
    prompts: tuple[int, ...] = (128,)
    peers: tuple[str, ...] = ("transformers", "vllm", "llama.cpp")
    metrics: tuple[str, ...] = METRICS
    environments: Mapping[str, str] = field(default_factory=dict)
    rounds: int = 20
    starts: int = 3
    slice_s: float = 2.0
    load_limit_s: float = 900.0
    limit_s: float = 600.0

    def __post_init__(self) -> None:
        one_of("--peers", self.peers, PEERS)
        one_of("--metrics", self.metrics, METRICS)
        one_of("--dtype", (self.dtype,), DTYPES)
        one_of("--peer-env", tuple(self.environments), PEERS)
        for name, values in (("--batch", self.batches), ("--prompt-tokens", self.prompts)):
            for value in values:
                at_least(name, value, 1)
        at_least("--tp", self.tp, 1)
        at_least("--rounds", self.rounds, 1)
        at_least("--starts", self.starts, 1)
        if not 0 < self.slice_s <= _LONGEST_SLICE_S:
            raise RequestError(
                f"--slice-s {self.slice_s:g} is not between 0 and {_LONGEST_SLICE_S:g} seconds: the machine's own speed changes "
                "within ten, so sides that take turns must do so more often"
            )
        if not self.cpus or len(self.cpus) % self.tp:
            raise RequestError(
                f"{len(self.cpus)} cores do not divide among --tp {self.tp} ranks; use --threads with a multiple of {self.tp}"
            )
        for name, limit in (("--load-limit", self.load_limit_s), ("--limit", self.limit_s)):
            if not 0 < limit < 1e6:
                raise RequestError(f"{name} {limit:g} is not between 0 and 1e6 seconds")
        if self.max_tokens > self.max_position_embeddings:
            raise RequestError(
                f"--prompt-tokens {max(self.prompts)} and {MOST_STEPS} new tokens are more than "
                f"max_position_embeddings={self.max_position_embeddings}; use at most {self.max_position_embeddings - MOST_STEPS - 1}"
            )

    @property
    def max_tokens(self) -> int:
        """Of any sequence: its prompt, the first token, and the most that a slice decodes."""
        return max(self.prompts) + MOST_STEPS + 1

    def peer_tp(self, peer: str) -> int:
        """How many ranks a peer has: as many as we do where it can. vLLM and Transformers divide heads evenly or not at all."""
        if peer == "transformers-tp":
            return self.tp
        query, key_value = self.heads
        fits = query % self.tp == 0 and (key_value % self.tp == 0 or self.tp % key_value == 0)
        return self.tp if peer == "vllm" and fits else 1


def usable_cpus(usable: Sequence[int], tp: int, threads: int | None) -> tuple[int, ...]:
    """The cores that every side gets: the first `threads`, or as many of all as divide among tp ranks."""
    if tp > len(usable):
        raise RequestError(
            f"--tp {tp} is more than the {len(usable)} usable cores; a rank without a core of its own tells nothing"
        )
    if threads is None:
        return tuple(usable[: len(usable) // tp * tp])
    if not 1 <= threads <= len(usable):
        raise RequestError(f"--threads {threads} is not between 1 and the {len(usable)} usable cores")
    return tuple(usable[:threads])


def parse_environments(texts: Sequence[str]) -> dict[str, str]:
    """Of `vllm=DIR` each."""
    found = {}
    for text in texts:
        peer, equals, folder = text.partition("=")
        if not equals or not folder:
            raise RequestError(f"--peer-env {text!r} is not PEER=DIR; write it as vllm=DIR")
        found[peer] = str(Path(folder).absolute())
    return found


def parse_names(text: str) -> tuple[str, ...]:
    """Of `a,b,c`, once each."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))
