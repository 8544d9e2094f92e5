"""Which tokens the next forward pass computes, and which blocks of the cache they go to. Imports no torch.

Decisions follow from what was added, in which order, and from which sequences ended: every rank that is told the same decides the same.
A request is admitted only when blocks for all it may ever need can be set aside, so nothing that runs is ever put back, and nothing
fails for want of memory half way.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from tp_residual.errors import RequestError
from tp_residual.inference.request import shorter

BLOCK_SIZE = 16  # tokens; a larger block wastes more at a sequence's end, a smaller one makes tables longer


def blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def cached_tokens(prompt_tokens: int, max_new_tokens: int) -> int:
    """Tokens whose keys and values are kept: the last new one is never read."""
    return prompt_tokens + max(max_new_tokens, 1) - 1


def blocks_of_samples(prompt_tokens: int, max_new_tokens: int, samples: int, block_size: int) -> int:
    """For so many samples of one prompt: blocks that the prompt fills are shared, the others are each sample's own."""
    shared = prompt_tokens // block_size
    own = blocks_for(cached_tokens(prompt_tokens, max_new_tokens), block_size) - shared
    return shared + samples * own


def check_length(prompt_tokens: int, max_new_tokens: int, max_model_len: int) -> None:
    """Raises RequestError for a sequence that is longer than one may be."""
    needed = prompt_tokens + max_new_tokens
    if needed > max_model_len:
        raise RequestError(
            f"{prompt_tokens} tokens of prompt and max_new_tokens={max_new_tokens}: {needed} exceeds max_model_len={max_model_len}; "
            f"{shorter(prompt_tokens, max_model_len)}"
        )


class BlockPool:
    """Blocks 0 to num_blocks - 1, each free or held by one or more sequences. The last freed is the first given out: its memory is warm."""

    def __init__(self, num_blocks: int, block_size: int = BLOCK_SIZE) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        assert 0 <= count <= len(self._free), (count, len(self._free))
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, blocks: list[int]) -> list[int]:
        """The same blocks, held once more."""
        for block in blocks:
            assert self._holders[block] > 0, block
            self._holders[block] += 1
        return blocks

    def free(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            assert self._holders[block] > 0, block
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free.append(block)


@dataclass(eq=False)
class Sequence:
    """One continuation. computed: tokens whose keys and values are cached, once what is scheduled has run.

    row: its place among the running, and its block table's; -1 while it waits. leader: the sample of the same prompt that computes the
    prompt for this one, until it has.
    """

    request: int
    sample: int
    prompt_ids: list[int]
    max_new_tokens: int
    generated_ids: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    row: int = -1
    leader: "Sequence | None" = None

    @property
    def prefilling(self) -> bool:
        return self.computed < len(self.prompt_ids)

    @property
    def needs_token(self) -> bool:
        """Whether the logits of the last scheduled token choose the next one."""
        return self.max_new_tokens > 0 and self.computed == len(self.prompt_ids) + len(self.generated_ids)


class Scheduled(NamedTuple):
    """Tokens of one sequence in the next forward pass, after `context` earlier ones."""

    sequence: Sequence
    context: int
    ids: list[int]


def only_decodes(parts: Iterable[Scheduled]) -> bool:
    """Whether a pass is one token of each sequence, and each gets another: what can be recorded or captured."""
    return all(len(part.ids) == 1 and part.sequence.needs_token for part in parts)


class BlockCopy(NamedTuple):
    """Between two blocks of the cache."""

    source: int
    target: int


class Scheduler:
    """First come, first served: the head of the queue waits for room, and nobody overtakes it.

    max_num_seqs: sequences that run at once. max_batched_tokens: of one forward pass; at least max_num_seqs, so that each running
    sequence gets its token in every step. max_model_len: prompt and new tokens of one sequence. whole_prompts: a prompt is never cut; one
    of more than max_batched_tokens is a pass of its own.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        max_batched_tokens: int,
        max_model_len: int,
        *,
        whole_prompts: bool = False,
    ) -> None:
        assert max_num_seqs <= max_batched_tokens, (max_num_seqs, max_batched_tokens)
        self.pool, self.max_num_seqs, self.max_batched_tokens = pool, max_num_seqs, max_batched_tokens
        self.max_model_len, self.whole_prompts = max_model_len, whole_prompts
        self.running: list[Sequence] = []
        self.tables: list[list[int]] = [[] for _ in range(max_num_seqs)]  # by row; a list is replaced, never altered
        self._waiting: deque[list[Sequence]] = deque()  # each the samples that share one prefill
        self._rows = list(range(max_num_seqs - 1, -1, -1))

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._waiting)

    @property
    def room(self) -> int:
        """Sequences that could run beside those there are; 0 while any waits, for a row or for blocks."""
        return 0 if self._waiting else len(self._rows)

    def add(self, request: int, prompt_ids: list[int], max_new_tokens: int, samples: int = 1) -> list[Sequence]:
        """Queue `samples` continuations; as many as can run at once share one prefill.

        max_new_tokens=0: the prompt is computed and nothing is chosen. Raises RequestError for what could never run.
        """
        assert prompt_ids
        check_length(len(prompt_ids), max_new_tokens, self.max_model_len)
        block_size = self.pool.block_size
        together = min(samples, self.max_num_seqs)
        while (
            together and blocks_of_samples(len(prompt_ids), max_new_tokens, together, block_size) > self.pool.num_blocks
        ):
            together -= 1
        if not together:
            one = blocks_of_samples(len(prompt_ids), max_new_tokens, 1, block_size)
            raise RequestError(
                f"{len(prompt_ids)} tokens of prompt and max_new_tokens={max_new_tokens} need {one} blocks of {block_size} tokens, and the "
                f"KV cache has {self.pool.num_blocks}; shorten the prompt, ask for fewer new tokens, or raise kv_memory"
            )
        sequences = [Sequence(request, sample, prompt_ids, max_new_tokens) for sample in range(samples)]
        for first in range(0, samples, together):
            self._waiting.append(sequences[first : first + together])
        return sequences

    def schedule(self) -> list[Scheduled]:
        """The tokens of the next pass: one of each sequence that decodes, in the order of admission, then pieces of prompts."""
        parts, left = list[Scheduled](), self.max_batched_tokens
        for sequence in self.running:
            if sequence.leader is None and not sequence.prefilling:
                parts.append(Scheduled(sequence, sequence.computed, sequence.generated_ids[-1:]))
                left -= 1
        decoding = len(parts)
        prefilling = [each for each in self.running if each.leader is None and each.prefilling]
        for sequence in chain(prefilling, self._admissions()):
            wanted = len(sequence.prompt_ids) - sequence.computed
            count = min(wanted, left)
            if self.whole_prompts and count < wanted:
                count = wanted if len(parts) == decoding else 0
            if count > 0:
                context = sequence.computed
                parts.append(Scheduled(sequence, context, sequence.prompt_ids[context : context + count]))
                left -= count
            if left <= 0 or count < wanted:
                break
        for sequence, context, ids in parts:
            sequence.computed = context + len(ids)
        return parts

    def fork(self, leader: Sequence) -> tuple[list[Sequence], list[BlockCopy]]:
        """Once the leader's prompt is computed: its followers, which now run by themselves, and what they must be given of the cache.

        Copies are due before the next pass, in which the leader writes on.
        """
        followers = [each for each in self.running if each.leader is leader]
        filled, rest = divmod(len(leader.prompt_ids), self.pool.block_size)
        for follower in followers:
            follower.leader, follower.computed = None, leader.computed
        copied = followers if rest and leader.max_new_tokens > 1 else []
        return followers, [BlockCopy(leader.blocks[filled], each.blocks[filled]) for each in copied]

    def finish(self, sequence: Sequence) -> None:
        """Its blocks and its row are free at once."""
        self.running.remove(sequence)
        self.pool.free(sequence.blocks)
        self.tables[sequence.row] = []
        self._rows.append(sequence.row)
        sequence.blocks, sequence.row = [], -1

    def cancel(self, request: int) -> list[Sequence]:
        """Take everything of a request out, wherever it is; what that was. Nothing is left of it afterwards."""
        ended = [each for each in self.running if each.request == request]
        for sequence in ended:
            self.finish(sequence)
        for group in [group for group in self._waiting if group[0].request == request]:
            self._waiting.remove(group)
            ended += group
        return ended

    def _admissions(self) -> Iterator[Sequence]:
        """From the head of the queue, leaders of those for whom there are rows and blocks. Asked only while the pass has room."""
        while self._waiting:
            group = self._waiting[0]
            leader, pool = group[0], self.pool
            prompt, new = len(leader.prompt_ids), leader.max_new_tokens
            needed = blocks_of_samples(prompt, new, len(group), pool.block_size)
            if len(group) > len(self._rows) or needed > pool.free_blocks:
                return
            self._waiting.popleft()
            shared = prompt // pool.block_size
            leader.blocks = pool.allocate(blocks_for(cached_tokens(prompt, new), pool.block_size))
            own = len(leader.blocks) - shared
            for sequence in group:
                if sequence is not leader:
                    sequence.leader = leader
                    sequence.blocks = pool.share(leader.blocks[:shared]) + pool.allocate(own)
                sequence.row = self._rows.pop()
                self.tables[sequence.row] = sequence.blocks
                self.running.append(sequence)
            yield leader
