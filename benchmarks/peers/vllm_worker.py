"""vLLM on the CPU, through its offline `LLM` and the engine it steps. Runs in an environment of `make_vllm_env`.

vLLM keeps the prompts' keys and values by its prefix cache, so that a decode begins where the prompts end; a prefill empties that cache.
"""

import os
import time
from itertools import count
from typing import Any

from protocol import claim_stdout, end_with_parent, serve

_PAGE_TOKENS = 16


class VllmEngine:
    def __init__(self, llm: Any, sampling: Any) -> None:
        self._llm, self._sampling = llm, sampling
        self._names = count()
        self._prompts: list[list[int]] = []

    def prefill(self, prompts: list[list[int]], times: int) -> tuple[list[list[int]], float]:
        self._prompts = prompts
        seconds = 0.0
        for _ in range(times):
            if not self._llm.reset_prefix_cache():
                raise RuntimeError("vLLM did not empty its prefix cache")
            began = time.perf_counter()
            ids, _ = self._run(1)
            seconds += time.perf_counter() - began
        return ids, seconds

    def decode(self, steps: int) -> tuple[list[list[int]], float]:
        """Timed from the moment at which the last sequence has its first token."""
        ids, after_first = self._run(1 + steps)
        return [row[1:] for row in ids], after_first

    def _run(self, tokens: int) -> tuple[list[list[int]], float]:
        engine = self._llm.llm_engine
        params = self._sampling(
            temperature=0.0, ignore_eos=True, max_tokens=tokens, min_tokens=tokens, detokenize=False
        )
        order = [f"{next(self._names)}" for _ in self._prompts]
        for name, prompt in zip(order, self._prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        started: set[str] = set()
        done: dict[str, list[int]] = {}
        all_started = time.perf_counter()
        early = 0
        while len(done) < len(order):
            for output in engine.step():
                so_far = list(output.outputs[0].token_ids)
                if so_far and output.request_id not in started:
                    started.add(output.request_id)
                    if len(started) == len(order):
                        all_started = time.perf_counter()
                if len(started) < len(order) and len(so_far) > 1:
                    early += 1
                if output.finished:
                    done[output.request_id] = so_far
        ended = time.perf_counter()
        if early:
            raise RuntimeError(
                f"vLLM decoded {early} tokens before every prompt was computed; raise max_num_batched_tokens"
            )
        return [done[name] for name in order], ended - all_started


def load(request: dict[str, Any]) -> tuple[VllmEngine, str, dict[str, str]]:
    tp, cpus = request["tp"], request["cpus"]
    each = len(cpus) // tp
    groups = [cpus[rank * each : (rank + 1) * each] for rank in range(tp)]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, group)) for group in groups)
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(request["cache_gib"])
    if request["max_batch"] > 1:
        # its scheduler in this process: in one of its own it begins with the first prompt before it has heard of the others
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"

    import torch
    import vllm

    llm = vllm.LLM(
        model=request["model"],
        dtype=request["dtype"],
        tensor_parallel_size=tp,
        max_model_len=-(-request["max_tokens"] // _PAGE_TOKENS) * _PAGE_TOKENS,
        max_num_seqs=max(request["max_batch"], 1),
        max_num_batched_tokens=max(2048, request["max_batch"] * request["max_prompt"]),
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
    )
    how = f"tp={tp}, threads bound to {os.environ['VLLM_CPU_OMP_THREADS_BIND']}, torch.compile as vLLM sets it, prefix cache on"
    return VllmEngine(llm, vllm.SamplingParams), how, {"vllm": vllm.__version__, "torch": torch.__version__}


if __name__ == "__main__":  # its own processes import this file again
    end_with_parent()
    serve(load, claim_stdout())
