"""What a peer's worker speaks: one JSON object a line, requests on stdin, replies on the stdout it was started with.

Used by worker programs that run in a peer's own environment, so it needs nothing but Python. Whatever the peer itself prints goes to
stderr, which the benchmark keeps as a log.

    {"do": "load", "model": DIR, "prompt": [ids], ...}   -> {"ids": [[first]], "how": text, "versions": {...}}
    {"do": "prefill", "prompts": [[ids], ...], "times": n} -> {"ids": [[first], ...], "seconds": s}
    {"do": "decode", "steps": n}                         -> {"ids": [[n ids], ...], "seconds": s}
    {"do": "quit"}                                       -> {}

A prefill computes every prompt anew `times` times, with nothing kept from the one before; seconds are of all of them together. A decode
goes on from the prompts of the last prefill, each time from their ends, and its seconds do not hold what that takes; its ids are those
after the first new one. What goes wrong is {"error": text}, and the worker ends.
"""

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Engine(Protocol):
    """One loaded model. Greedy, and nothing ends a sequence but the number of tokens asked for."""

    def prefill(self, prompts: list[list[int]], times: int) -> tuple[list[list[int]], float]: ...

    def decode(self, steps: int) -> tuple[list[list[int]], float]: ...


def claim_stdout() -> Any:
    """The stream of replies. From here on, descriptor 1 is stderr, for this process and those it starts."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return replies


def end_with_parent() -> None:
    """The kernel is asked for a SIGKILL when whoever started this process dies: a stopped process hears no other signal."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(load: Callable[[dict[str, Any]], tuple[Engine, str, dict[str, str]]], replies: Any) -> None:
    """Answers requests until `quit` or the end of stdin. load(request) -> (engine, how it was configured, versions)."""
    engine: Engine | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "load":
                engine, how, versions = load(request)
                ids, _ = engine.prefill([request["prompt"]], 1)
                reply: dict[str, Any] = {"ids": ids, "how": how, "versions": versions}
            elif request["do"] == "quit":
                reply = {}
            else:
                assert engine is not None, "load comes first"
                if request["do"] == "prefill":
                    ids, seconds = engine.prefill(request["prompts"], request["times"])
                else:
                    ids, seconds = engine.decode(request["steps"])
                reply = {"ids": ids, "seconds": seconds}
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {one_line(str(error))}"}
        replies.write(json.dumps(reply) + "\n")
        if request["do"] == "quit" or "error" in reply:
            return


def one_line(text: str) -> str:
    return " ".join(text.split())[:500]


def columns(steps: Sequence[Sequence[int]]) -> list[list[int]]:
    """`[steps][rows]` ids as `[rows][steps]`."""
    return [list(row) for row in zip(*steps, strict=True)]
