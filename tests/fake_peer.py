"""A worker that speaks what `bench peers` speaks and computes nothing, with the faults that peers have. Imports nothing but Python.

    fake_peer.py JOURNAL [--seconds S,S,...] [--fault NAME] [--salt N] [--reads FILE]

It writes to JOURNAL when it begins and ends each request. seconds: what it says that its decodes took, in turn. salt: of its tokens.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from itertools import cycle

SPINNER = "while True: pass"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("journal")
    parser.add_argument("--seconds", default="0.5")
    parser.add_argument("--fault", default="")
    parser.add_argument("--salt", type=int, default=0)
    parser.add_argument("--reads", help="a file that it has open")
    given = parser.parse_args()
    seconds = cycle(map(float, given.seconds.split(",")))
    prompts: list[list[int]] = []

    def note(what: str) -> None:
        with open(given.journal, "a") as file:
            file.write(f"{time.monotonic_ns()} {os.getpid()} {what}\n")

    def tokens(count: int) -> list[list[int]]:
        return [[(sum(prompt) + given.salt + at) % 97 for at in range(count)] for prompt in prompts]

    if given.reads:
        read = open(given.reads, "rb")
        read.read(1)
    if given.fault == "segment":
        segment = open(f"/dev/shm/fake_peer_{os.getpid()}", "wb")  # kept open, and left behind
        segment.write(b"x" * 4096)
        segment.flush()
    if given.fault == "spin":
        # in a session of its own, and one level further down: its parent's group says nothing of it
        starter = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SPINNER!r}]).wait()"
        subprocess.Popen([sys.executable, "-c", starter], start_new_session=True)
    if given.fault == "cannot start":
        print("something earlier", file=sys.stderr)
        sys.exit("ImportError: libmissing.so: cannot open")
    for line in sys.stdin:
        request = json.loads(line)
        what = request["do"]
        note(f"begin {what}")
        reply: dict[str, object] = {}
        if what == "load":
            prompts = [request["prompt"]]
            reply = {"ids": tokens(1), "how": "fake", "versions": {"fake": "1"}}
            if given.fault == "refuses":
                reply = {"error": "ValueError: 9 heads over 2 ranks"}
        elif what == "prefill":
            prompts = request["prompts"]
            reply = {"ids": tokens(1), "seconds": 0.25 * request["times"]}
        elif what == "decode":
            if given.fault == "crash":
                print("out of luck", file=sys.stderr)
                os._exit(3)
            if given.fault == "hang":
                threading.Event().wait()
            ids = tokens(request["steps"] - (given.fault == "lies"))
            reply = {"ids": ids, "seconds": next(seconds)}
            time.sleep(0.002)
        note(f"end {what}")
        print("not json" if given.fault == "babbles" and what == "decode" else json.dumps(reply), flush=True)
        if what == "quit":
            return


if __name__ == "__main__":
    main()
