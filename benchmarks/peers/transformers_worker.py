"""Transformers: one process, or tensor parallel by its own plan (`tp_plan="auto"`) where torchrun starts it.

A forward pass a step over a DynamicCache, which is what `generate` does with less around it. Rank 0 reads requests and hands them on.
"""

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import transformers
from protocol import claim_stdout, columns, end_with_parent, serve


class TransformersEngine:
    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache: Any = None
        self._first = torch.empty(0, dtype=torch.long)
        self._prompt_tokens = 0

    @torch.inference_mode()
    def prefill(self, prompts: list[list[int]], times: int) -> tuple[list[list[int]], float]:
        ids = torch.tensor(prompts)
        self._prompt_tokens = ids.shape[1]
        began = time.perf_counter()
        for _ in range(times):
            self._cache = transformers.DynamicCache(config=self._model.config)
            self._first = self._step(ids)
            first = self._first.tolist()
        seconds = time.perf_counter() - began
        return [[each] for each in first], seconds

    @torch.inference_mode()
    def decode(self, steps: int) -> tuple[list[list[int]], float]:
        if behind := self._cache.get_seq_length() - self._prompt_tokens:
            self._cache.crop(-behind)
        token, chosen = self._first, []
        began = time.perf_counter()
        for _ in range(steps):
            token = self._step(token[:, None])
            chosen.append(token.tolist())  # a server hands each token on as it is chosen
        return columns(chosen), time.perf_counter() - began

    def _step(self, ids: torch.Tensor) -> torch.Tensor:
        output = self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1].argmax(-1)


def load(request: dict[str, Any]) -> tuple[TransformersEngine, str, dict[str, str]]:
    tp = request["tp"]
    threads = len(request["cpus"]) // tp
    torch.set_num_threads(threads)
    plan = {"tp_plan": "auto"} if tp > 1 else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        request["model"], dtype=getattr(torch, request["dtype"]), local_files_only=True, **plan
    ).eval()
    how = f"tp={tp}, {threads} threads each, {model.config._attn_implementation} attention, forward passes over DynamicCache"
    return TransformersEngine(model), how, {"transformers": transformers.__version__, "torch": torch.__version__}


def follow() -> None:
    """A rank that is not the first: does what rank 0 was asked, and says nothing."""
    engine = None
    while True:
        handed: list[Any] = [None]
        dist.broadcast_object_list(handed, src=0)
        request = handed[0]
        if request is None or request["do"] == "quit":
            return
        if request["do"] == "load":
            engine, _, _ = load(request)
            engine.prefill([request["prompt"]], 1)
        elif engine is not None and request["do"] == "prefill":
            engine.prefill(request["prompts"], request["times"])
        elif engine is not None:
            engine.decode(request["steps"])


class _HandedOn:
    """Rank 0's stdin, each line given to the other ranks first."""

    def __iter__(self) -> Any:
        for line in sys.__stdin__ or ():
            dist.broadcast_object_list([json.loads(line)], src=0)
            yield line
        dist.broadcast_object_list([None], src=0)


if __name__ == "__main__":
    end_with_parent()
    replies = claim_stdout()
    if "RANK" not in os.environ:
        serve(load, replies)
    else:
        # idle ranks wait in a broadcast for as long as the other side takes
        dist.init_process_group("gloo", timeout=timedelta(days=1))
        if dist.get_rank() == 0:
            sys.stdin = _HandedOn()  # type: ignore[assignment]
            serve(load, replies)
        else:
            follow()
        dist.destroy_process_group()
