"""What comes out of inference: continuations, the tokens on the way, and how long it took."""

from dataclasses import dataclass, field

from tp_residual.inference.logprobs import TokenLogProb


@dataclass
class Generation:
    """One continuation. token_ids: the new ones, those of the stop included.

    finish_reason: "stop" or "length"; "cancelled"; "refused", and then `error` says why and nothing was generated; "scored" of a completion
    whose log-probabilities alone were asked for, which are then prompt_logprobs.
    text: without special tokens, ending before a stop string; None without a tokenizer. logprobs, prompt_logprobs: as asked for;
    the prompt's first token, which nothing predicts, has none.
    """

    index: int
    prompt_tokens: int
    sample: int = 0
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    text: str | None = None
    logprobs: list[TokenLogProb] | None = None
    prompt_logprobs: list[TokenLogProb] | None = None
    error: str | None = None


@dataclass(frozen=True)
class TokenEvent:
    """One step of one continuation. request: as `Engine.add` named it.

    token_id: None where it ended without one (cancelled, refused, scored). text: what is now certain and was not before; "" without a
    tokenizer. generation: the whole continuation, once it has ended.
    """

    request: int
    index: int
    sample: int
    token_id: int | None
    text: str = ""
    generation: Generation | None = None


@dataclass
class GenerationTimings:
    """Wall-clock seconds and token counts of the two steps, on this rank; of decode also what boundaries took (see `Counters`).

    A pass that mixes both is divided by its tokens: of one with 12 prompt tokens and 4 sequences that decode, a quarter of the time, of the
    boundaries and of the pass itself is decode's. kv_used_bytes: of kv_cache_bytes, what sequences held at once at most. largest_prefill:
    tokens of the largest pass that computed prompts.
    """

    prefill_s: float = 0.0
    prefill_tokens: int = 0
    decode_s: float = 0.0
    decode_tokens: int = 0
    decode_passes: float = 0.0
    decode_boundary_s: float = 0.0
    kv_cache_bytes: int = 0
    kv_used_bytes: int = 0
    largest_prefill: int = 0

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.prefill_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0

    def add_pass(self, prefill_tokens: int, decode_tokens: int, seconds: float, boundary_s: float) -> None:
        decode = decode_tokens / (prefill_tokens + decode_tokens)
        self.prefill_tokens += prefill_tokens
        if prefill_tokens:
            self.largest_prefill = max(self.largest_prefill, prefill_tokens + decode_tokens)
        self.prefill_s += seconds * (1 - decode)
        self.decode_tokens += decode_tokens
        self.decode_s += seconds * decode
        self.decode_passes += decode
        self.decode_boundary_s += boundary_s * decode
