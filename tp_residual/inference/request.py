"""What may be asked of a generation, checked from values every rank shares. Imports no torch: the launcher's parent checks too."""

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike

from tp_residual.errors import RequestError
from tp_residual.model.config import ModelConfig
from tp_residual.model.fields import Fields, is_integer, is_number, model_dir, named, present, read_json

MIN_TEMPERATURE = 1e-6  # below, logits of ordinary size overflow fp32, in which they are divided


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How the next token is drawn; the defaults are greedy decoding. Filters apply in this order, as in Transformers.

    repetition_penalty: logits of tokens seen so far, prompt included, are divided by it (multiplied where negative); 1 is off. Applies to
    greedy decoding as well. temperature: 0 takes the largest logit, and then no filter may be set. top_k: 0 is off. top_p: the smallest
    set of at least this mass; 1 is off. min_p: at least this share of the likeliest token's probability; 0 is off. n: samples a prompt.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    n: int = 1

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            if not is_number(getattr(self, name)):
                raise RequestError(f"{name}={getattr(self, name)!r} must be a finite number")
        for name in ("top_k", "seed", "n"):
            if not is_integer(getattr(self, name)):
                raise RequestError(f"{name}={getattr(self, name)!r} must be an integer")
        if self.temperature < 0 or 0 < self.temperature < MIN_TEMPERATURE:
            raise RequestError(
                f"temperature={self.temperature:g} must be at least {MIN_TEMPERATURE:g}, or 0 for greedy decoding"
            )
        if self.top_k < 0:
            raise RequestError(f"top_k={self.top_k} must be at least 1, or 0 for no limit")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p={self.top_p:g} must be above 0 and at most 1; 1 keeps every token")
        if not 0 <= self.min_p <= 1:
            raise RequestError(f"min_p={self.min_p:g} must be between 0 and 1; 0 keeps every token")
        if self.repetition_penalty <= 0:
            raise RequestError(f"repetition_penalty={self.repetition_penalty:g} must be above 0; 1 changes nothing")
        if not 0 <= self.seed < 1 << 64:
            raise RequestError(f"seed={self.seed} must be between 0 and 2**64 - 1")
        if self.n < 1:
            raise RequestError(f"n={self.n} must be at least 1")
        if self.greedy and self.n > 1:
            raise RequestError(f"n={self.n} greedy samples would be the same; use n=1, or a temperature above 0")
        if self.greedy and (self.top_k, self.top_p, self.min_p) != (0, 1, 0):
            raise RequestError(
                f"temperature=0 is greedy, where top_k={self.top_k}, top_p={self.top_p:g} and min_p={self.min_p:g} mean nothing; "
                "leave them out, or give a temperature above 0"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @classmethod
    def resolve(
        cls,
        model: str | PathLike[str],
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int = 0,
        n: int = 1,
    ) -> "SamplingSettings":
        """What is given, over DIR/generation_config.json, over greedy decoding.

        Greedy unless generation_config says do_sample, or a temperature or filter is given; temperature is then 1 unless said.
        temperature=0 leaves the file's filters aside. What the file does not name is off, top_k included.
        """
        directory = model_dir(model)
        source = directory / "generation_config.json"
        with named(str(source)):
            file = Fields(read_json(source) if present(source) else {})

            def number(name: str, off: float) -> float:
                value = file.take(name, None, "a finite number or null", lambda v: v is None or is_number(v))
                return off if value is None else float(value)

            sampled = file.take("do_sample", None, "true, false or null", lambda v: v is None or isinstance(v, bool))
            defaults = {name: number(name, off) for name, off in (("temperature", 1.0), ("top_p", 1.0), ("min_p", 0.0))}
            file_top_k = file.integer_or_null("top_k", None) or 0
            file_penalty = number("repetition_penalty", 1.0)
        penalty = file_penalty if repetition_penalty is None else repetition_penalty
        asked = [value for value in (temperature, top_k, top_p, min_p) if value is not None]
        greedy = temperature == 0 or (not asked and not sampled)
        if greedy:
            return cls(
                top_k=top_k or 0,
                top_p=1.0 if top_p is None else top_p,
                min_p=min_p or 0.0,
                repetition_penalty=penalty,
                seed=seed,
                n=n,
            )
        return cls(
            temperature=defaults["temperature"] if temperature is None else temperature,
            top_k=file_top_k if top_k is None else top_k,
            top_p=defaults["top_p"] if top_p is None else top_p,
            min_p=defaults["min_p"] if min_p is None else min_p,
            repetition_penalty=penalty,
            seed=seed,
            n=n,
        )


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """How many tokens, which are drawn, what ends a sequence, and what is told about it.

    min_new_tokens: stop tokens cannot be chosen before that many. ignore_eos: stop tokens are ordinary tokens. stop: text ends before the
    first of these strings. logprobs, prompt_logprobs: the log-probability of each new (prompt) token and of that many likeliest
    ones, of the model's own distribution, before penalty, temperature and filters; None: not computed.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    sampling: SamplingSettings = SamplingSettings()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "min_new_tokens", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if not is_integer(value) and not (value is None and name.endswith("logprobs")):
                raise RequestError(f"{name}={value!r} is not a whole number")
        for name, kind in (("stop", str), ("stop_token_ids", int)):
            value = getattr(self, name)
            if isinstance(value, str) or not all(isinstance(each, kind) for each in value):
                raise RequestError(f"{name}={value!r} is not a tuple of {kind.__name__}; write ({value!r},) for one")
        if not isinstance(self.sampling, SamplingSettings):
            raise RequestError(f"sampling={self.sampling!r} is no SamplingSettings")
        if self.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise RequestError(
                f"min_new_tokens={self.min_new_tokens} must be between 0 and max_new_tokens={self.max_new_tokens}"
            )
        if "" in self.stop:
            raise RequestError("a stop string is empty, and every text begins with it; give it some text")
        if self.stop and self.min_new_tokens:
            raise RequestError(
                f"min_new_tokens={self.min_new_tokens} holds back stop tokens, not stop strings {list(self.stop)}; leave one out"
            )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and count < 0:
                raise RequestError(f"{name}={count} must be at least 0")


DEFAULT_MAX_NUM_SEQS = 32
MOST_SEQS = 4096  # each has a row of every table, whether it runs or not
DEFAULT_MAX_BATCHED_TOKENS = 1024


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """What an engine may use; all ranks give the same.

    max_model_len: prompt and new tokens of one sequence; None: as many as the model has positions for and the cache room. kv_memory: bytes
    of cache a rank; None: a share of what is free. max_num_seqs: sequences that run at once. A decode step on a CPU reads the weights once
    for all of them, and from about 32 on computes for as long as it reads. max_batched_tokens: of one forward pass; a longer prompt is cut.
    More tokens make no GEMM faster from some hundreds on, and everyone who decodes waits for the pass; activations grow with them.
    """

    max_model_len: int | None = None
    kv_memory: int | None = None
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS
    max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS

    def __post_init__(self) -> None:
        for name in ("max_model_len", "kv_memory", "max_num_seqs", "max_batched_tokens"):
            value = getattr(self, name)
            if value is None and name in ("max_model_len", "kv_memory"):
                continue
            if not is_integer(value) or value < 1:
                raise RequestError(f"{name}={value!r} must be a whole number of at least 1")
        if self.max_num_seqs > MOST_SEQS:
            raise RequestError(
                f"max_num_seqs={self.max_num_seqs} is more than the {MOST_SEQS} sequences that may run at once; use 1 to {MOST_SEQS}: "
                "others wait their turn"
            )
        if self.max_batched_tokens < self.max_num_seqs:
            raise RequestError(
                f"max_batched_tokens={self.max_batched_tokens} is less than max_num_seqs={self.max_num_seqs}, and a pass has one of each "
                f"sequence that runs; use at least {self.max_num_seqs}, or fewer sequences"
            )


def check_limits(limits: EngineLimits, config: ModelConfig) -> None:
    """Raises RequestError for a length that the model has no positions for."""
    if limits.max_model_len is not None and limits.max_model_len > config.max_sequence_length:
        raise RequestError(
            f"max_model_len={limits.max_model_len} exceeds {config.length_limit}; use at most {config.max_sequence_length}"
        )


@dataclass(frozen=True)
class Request:
    """A prompt to be continued. index: its place in the list it comes from, which keys the noise of sampling."""

    prompt_ids: Sequence[int]
    settings: GenerationSettings = GenerationSettings()
    index: int = 0


@dataclass(frozen=True)
class ScoreRequest:
    """A completion whose tokens' log-probabilities are wanted, and those of `count` likeliest tokens beside each."""

    context_ids: Sequence[int]
    completion_ids: Sequence[int]
    count: int = 0
    index: int = 0


def shorter(prompt_tokens: int, longest: int) -> str:
    """The way out for a sequence of more than `longest` tokens."""
    room = longest - prompt_tokens
    if room > 0:
        return f"shorten the prompt or ask for at most {room} new token{'' if room == 1 else 's'}"
    return f"shorten the prompt to fewer than {longest} tokens"


def check_against_vocabulary(config: ModelConfig, settings: GenerationSettings) -> None:
    """Raises RequestError for a count of tokens that the vocabulary does not have."""
    counts = {
        "top_k": settings.sampling.top_k,
        "logprobs": settings.logprobs,
        "prompt_logprobs": settings.prompt_logprobs,
    }
    for name, count in counts.items():
        if count is not None and count > config.vocab_size:
            raise RequestError(
                f"{name}={count} exceeds the vocabulary of {config.vocab_size} tokens; use at most that many"
            )


def check_prompts(
    prompts: Sequence[Sequence[int]],
    config: ModelConfig,
    settings: GenerationSettings,
    *,
    first_index: int = 0,
    lengths: bool = True,
) -> None:
    """Raises RequestError for a prompt that is empty, too long, or has an id outside the vocabulary, and for more tokens than it has.

    lengths=False: too long is no error here, since whoever runs the prompts refuses those alone.
    """
    check_against_vocabulary(config, settings)
    check_prompts_fit(prompts, config, settings.max_new_tokens, first_index=first_index, lengths=lengths)


def check_prompts_fit(
    prompts: Sequence[Sequence[int]],
    config: ModelConfig,
    max_new_tokens: int,
    *,
    first_index: int = 0,
    lengths: bool = True,
) -> None:
    """The part that is about prompts, which may be those from `first_index` on of a longer list."""
    if not prompts:
        raise RequestError("no prompt was given; pass at least one")
    for index, prompt in enumerate(prompts, first_index):
        if not prompt:
            raise RequestError(f"prompt {index} is empty: it has 0 tokens; give it at least one")
        needed, longest = len(prompt) + max_new_tokens, config.max_sequence_length
        if not lengths:
            needed = 0
        if needed > longest and max_new_tokens:
            raise RequestError(
                f"prompt {index} has {len(prompt)} tokens and max_new_tokens={max_new_tokens}: {needed} exceeds "
                f"{config.length_limit}; {shorter(len(prompt), longest)}"
            )
        if needed > longest:
            raise RequestError(f"sequence {index} has {needed} tokens, more than {config.length_limit}; shorten it")
        for token_id in (min(prompt), max(prompt)):
            if not 0 <= token_id < config.vocab_size:
                raise RequestError(
                    f"prompt {index} has token id {token_id}, outside the vocabulary of {config.vocab_size} ids; "
                    f"use 0 to {config.vocab_size - 1}"
                )


def check_pairs(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    config: ModelConfig,
    count: int,
    *,
    first_index: int = 0,
    lengths: bool = True,
) -> None:
    """Raises RequestError for (context, completion) pairs that cannot be scored, or not beside `count` likeliest tokens."""
    check_against_vocabulary(config, GenerationSettings(logprobs=count))
    if not pairs:
        raise RequestError("nothing to score was given; pass at least one context and completion")
    for index, (context, completion) in enumerate(pairs, first_index):
        if not context or not completion:
            which = "context" if not context else "completion"
            raise RequestError(f"sequence {index} has a {which} of 0 tokens; give it at least one")
    check_prompts_fit(
        [[*context, *completion] for context, completion in pairs], config, 0, first_index=first_index, lengths=lengths
    )


def parse_steps(text: str) -> tuple[int, int]:
    """`A:B`: steps A to B - 1, the first being 0. Raises RequestError."""
    first, colon, last = text.partition(":")
    if not colon or not first.isdecimal() or not last.isdecimal() or int(first) >= int(last):
        raise RequestError(
            f"--profile-steps {text!r} is not A:B with whole numbers A < B; 3:8 are five steps from 3 on"
        )
    return int(first), int(last)
