"""Our own side of `bench peers`: the engine, on every rank, told by rank 0 what it reads on stdin. Speaks what the peers' workers speak."""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any, TextIO

import torch

import tp_residual
from tp_residual.inference.engine import Engine
from tp_residual.inference.loading import load_model
from tp_residual.inference.paged_cache import kv_block_bytes
from tp_residual.inference.request import EngineLimits, GenerationSettings, Request
from tp_residual.inference.scheduler import BLOCK_SIZE, blocks_for
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.packing import pack_weights


class OurEngine:
    """What `LLM` makes, without a tokenizer. Greedy, nothing but the number of tokens ends a sequence. Every rank calls it alike."""

    def __init__(self, request: Mapping[str, Any], group: TensorParallelGroup) -> None:
        """request: a `load`. Its cache has room for max_batch sequences of max_tokens, and a pass for all prompts of a batch."""
        model, _ = load_model(request["model"], group, dtype=getattr(torch, request["dtype"]))
        model.requires_grad_(False).eval()
        packing = pack_weights(model, group.device, model.dtype)
        self.how = f"weights {str(model.dtype).removeprefix('torch.')}, linears {packing.form} ({packing.reason})"
        a_block = max(kv_block_bytes(model.layout, rank, BLOCK_SIZE, model.dtype) for rank in range(group.size))
        blocks = request["max_batch"] * blocks_for(request["max_tokens"], BLOCK_SIZE)
        limits = EngineLimits(
            max_model_len=request["max_tokens"],
            kv_memory=blocks * a_block,
            max_num_seqs=max(EngineLimits().max_num_seqs, request["max_batch"]),
            max_batched_tokens=max(EngineLimits().max_batched_tokens, request["max_batch"] * request["max_prompt"]),
        )
        self._engine = Engine(model, group, limits)
        self._prompts: list[list[int]] = []

    def prefill(self, prompts: list[list[int]], times: int) -> tuple[list[list[int]], float]:
        self._prompts = prompts
        began = time.perf_counter()
        for _ in range(times):
            ids, _ = self._run(1)
        return ids, time.perf_counter() - began

    def decode(self, steps: int) -> tuple[list[list[int]], float]:
        """Timed from the moment at which every sequence has its first token."""
        ids, seconds = self._run(1 + steps)
        return [row[1:] for row in ids], seconds

    def _run(self, tokens: int) -> tuple[list[list[int]], float]:
        settings = GenerationSettings(max_new_tokens=tokens, ignore_eos=True)
        rows = {self._engine.add(Request(prompt, settings)): row for row, prompt in enumerate(self._prompts)}
        ids: list[list[int]] = [[] for _ in rows]
        began: float | None = None
        while self._engine.has_work:
            for event in self._engine.step():
                assert event.token_id is not None, event
                ids[rows[event.request]].append(event.token_id)
            if began is None and all(ids):
                assert all(len(row) == 1 for row in ids), "a sequence went on before every prompt was computed"
                began = time.perf_counter()
        assert began is not None
        return ids, time.perf_counter() - began


def serve(group: TensorParallelGroup, threads: int) -> None:
    """Until `quit` or the end of rank 0's stdin. What goes wrong ends the rank, as it would in any command."""
    replies = _claim_stdout() if group.rank == 0 else None
    engine: OurEngine | None = None
    for line in _requests(group):
        request = json.loads(line)
        if request["do"] == "load":
            engine = OurEngine(request, group)
            group.share("peers/loaded", "")
            group.enter_phase("step")
            reply: dict[str, Any] = {"ids": engine.prefill([request["prompt"]], 1)[0]}
            reply["how"] = f"tp={group.size}, {threads} threads each, {engine.how}"
            reply["versions"] = {"tp_residual": tp_residual.__version__, "torch": torch.__version__}
        elif request["do"] == "quit":
            reply = {}
        else:
            assert engine is not None, "load comes first"
            if request["do"] == "prefill":
                ids, seconds = engine.prefill(request["prompts"], request["times"])
            else:
                ids, seconds = engine.decode(request["steps"])
            reply = {"ids": ids, "seconds": seconds}
        if replies is not None:
            replies.write(json.dumps(reply) + "\n")
        if request["do"] == "quit":
            break
    group.share("peers/done", "")  # nobody takes the side channel along while another reads it


def _requests(group: TensorParallelGroup) -> Iterator[str]:
    """Rank 0's lines, on every rank; at their end, `quit`."""
    for number in count():
        line = (sys.stdin.readline() or '{"do": "quit"}') if group.rank == 0 else ""
        yield group.share(f"peers/{number}", line)[0]


def _claim_stdout() -> TextIO:
    """The stream of replies; whatever else this process prints goes to stderr."""
    sys.stdout.flush()
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return replies
