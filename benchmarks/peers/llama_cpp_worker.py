"""llama.cpp through its C interface, as llama-cpp-python binds it. Runs in an environment of `make_llama_cpp_env`.

The model is a GGUF file of the same weights (`write_gguf.py`). Keys and values of a prompt stay in its memory; a decode removes what was
behind them.
"""

import time
from typing import Any

import llama_cpp as c
import numpy as np
from protocol import claim_stdout, columns, end_with_parent, serve


class LlamaEngine:
    def __init__(self, model: Any, context: Any, rows: int, max_batch_tokens: int) -> None:
        self._context, self._memory = context, c.llama_get_memory(context)
        self._vocab_size = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
        self._batch = c.llama_batch_init(max_batch_tokens, 0, rows)
        self._lengths: list[int] = []
        self._first: list[int] = []

    def prefill(self, prompts: list[list[int]], times: int) -> tuple[list[list[int]], float]:
        seconds = 0.0
        for _ in range(times):
            c.llama_memory_clear(self._memory, True)
            began = time.perf_counter()
            self._first = self._step([(row, 0, prompt) for row, prompt in enumerate(prompts)])
            seconds += time.perf_counter() - began
        self._lengths = [len(prompt) for prompt in prompts]
        return [[token] for token in self._first], seconds

    def decode(self, steps: int) -> tuple[list[list[int]], float]:
        for row, length in enumerate(self._lengths):
            c.llama_memory_seq_rm(self._memory, row, length, -1)
        tokens, chosen = self._first, []
        began = time.perf_counter()
        for step in range(steps):
            tokens = self._step([(row, self._lengths[row] + step, [token]) for row, token in enumerate(tokens)])
            chosen.append(tokens)
        return columns(chosen), time.perf_counter() - began

    def _step(self, parts: list[tuple[int, int, list[int]]]) -> list[int]:
        """One pass over (row, tokens before, ids) of each sequence; the greedy id behind each."""
        batch, ends = self._batch, []
        batch.n_tokens = 0
        for row, context, ids in parts:
            for position, token in enumerate(ids, context):
                at = batch.n_tokens
                batch.token[at], batch.pos[at] = token, position
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, row
                batch.logits[at] = position == context + len(ids) - 1
                batch.n_tokens = at + 1
            ends.append(batch.n_tokens - 1)
        if code := c.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode answered {code}")
        return [
            int(np.ctypeslib.as_array(c.llama_get_logits_ith(self._context, end), (self._vocab_size,)).argmax())
            for end in ends
        ]


def load(request: dict[str, Any]) -> tuple[LlamaEngine, str, dict[str, str]]:
    threads, rows = len(request["cpus"]), request["max_batch"]
    c.llama_backend_init()
    model = c.llama_model_load_from_file(request["gguf"].encode(), c.llama_model_default_params())
    if not model:
        raise RuntimeError("llama.cpp could not read the GGUF file; its log says why")
    params = c.llama_context_default_params()
    params.n_ctx = rows * request["max_tokens"]
    params.n_batch = rows * request["max_prompt"]
    params.n_seq_max = rows
    params.n_threads = params.n_threads_batch = threads
    context = c.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError("llama.cpp made no context; its log says why")
    how = f"one process, {threads} threads, ubatch {params.n_ubatch}, else llama.cpp's defaults"
    return LlamaEngine(model, context, rows, params.n_batch), how, {"llama-cpp-python": c.__version__}


if __name__ == "__main__":
    end_with_parent()
    serve(load, claim_stdout())
