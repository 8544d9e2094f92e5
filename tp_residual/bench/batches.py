"""One batch through the engine, exactly as long as asked for: what came when, and what the engine did instead, by name."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tp_residual.bench.shares import difference
from tp_residual.inference.engine import Engine
from tp_residual.inference.request import GenerationSettings, Request


@dataclass(frozen=True)
class Batch:
    prompts: list[list[int]]
    new_tokens: int

    @property
    def size(self) -> int:
        return len(self.prompts)

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompts[0])

    def __str__(self) -> str:
        return f"batch {self.size}, prompt {self.prompt_tokens}"


@dataclass
class Run:
    """One batch on this rank. steps_s: of each step; ends_s: its end, since the batch was added; token_steps: by request, the step of each
    of its tokens; spent_s: what the product's counters say of each phase, `seconds` its whole length; wrong: what it did not do as asked.
    """

    steps_s: list[float]
    ends_s: list[float]
    token_steps: list[list[int]]
    spent_s: dict[str, dict[str, float]]
    wrong: str = ""

    @property
    def last_first(self) -> int:
        """The step in which the last request got its first token."""
        return max(steps[0] for steps in self.token_steps)

    @property
    def full_steps(self) -> list[int]:
        """Those in which every request was decoding: nothing of a prompt, and nobody who had ended."""
        return [step for step in self.token_steps[0] if step > self.last_first and self._everybody(step)]

    def _everybody(self, step: int) -> bool:
        return all(step in steps for steps in self.token_steps)


def run_batch(engine: Engine, batch: Batch, read: Callable[[], dict[str, float]]) -> Run:
    """read: the counters' seconds so far. Ends, whatever the engine does: `wrong` then says what it did."""
    settings = GenerationSettings(max_new_tokens=batch.new_tokens, ignore_eos=True)
    run = Run([], [], [[] for _ in batch.prompts], {})
    # each step computes at least one token, and no step but the last of a sequence computes less than it could
    most_steps = batch.size * (batch.prompt_tokens + batch.new_tokens)
    before, missing = read(), batch.size
    ended = dict[int, int]()
    began = time.perf_counter()
    rows = {
        engine.add(Request(prompt, settings, index)): index for index, prompt in enumerate(batch.prompts)
    }  # every request has one sample
    while engine.has_work and len(run.steps_s) < most_steps:
        step_began = time.perf_counter()
        events = engine.step()
        now = time.perf_counter()
        step = len(run.steps_s)
        run.steps_s.append(now - step_began)
        run.ends_s.append(now - began)
        for event in events:
            row = rows[event.request]
            if event.token_id is not None:
                missing -= not run.token_steps[row]
                run.token_steps[row].append(step)
            if event.generation is not None:
                ended[row] = len(event.generation.token_ids)
        if not missing and "prefill" not in run.spent_s:
            after = read()
            run.spent_s["prefill"] = difference(after, before) | {"seconds": now - began}
            before = after
    seconds = sum(run.steps_s) - (sum(run.steps_s[: run.last_first + 1]) if not missing else 0.0)
    run.spent_s["decode"] = difference(read(), before) | {"seconds": seconds}
    run.wrong = _complaint(engine, batch, run, ended)
    engine.drop(list(rows))
    return run


def _complaint(engine: Engine, batch: Batch, run: Run, ended: Mapping[int, int]) -> str:
    """The first thing that is not as it was asked for, or nothing."""
    for row, steps in enumerate(run.token_steps):
        told, kept = len(steps), ended.get(row)
        if kept is None:
            return f"{batch}: request {row} has not ended after {len(run.steps_s)} steps, with {told} tokens"
        if (told, kept) != (batch.new_tokens, batch.new_tokens):
            return f"{batch}: request {row} generated {kept} tokens in {told} steps instead of {batch.new_tokens}"
    if (free := engine.pool.free_blocks) != engine.pool.num_blocks:
        return f"{batch}: {engine.pool.num_blocks - free} blocks of the KV cache were not given back"
    return ""
