"""The command line: arguments to library calls. Commands are imported when they are called, so that checks come before torch."""

import argparse
import contextlib
import os
import sys
import traceback
from importlib import import_module

from tp_residual.cli.arguments import parse
from tp_residual.cli.launch import leave, prepare_rank, under_launcher
from tp_residual.cli.output import ResultStream
from tp_residual.errors import CollectiveError, GenerationError, UserError, VerificationFailed
from tp_residual.inference.hub import CONFIG_ONLY, EVERYTHING, resolve_model

USER_ERROR, INTERRUPTED = 2, 130


def main(argv: list[str] | None = None) -> int:
    """0, or a message on stderr and 2 for what the caller can put right, 1 for what failed on the way, 130 after Ctrl-C.

    Under a launcher a failed rank leaves at once: the interpreter's own exit can wait for a collective that never returns.
    """
    results = ResultStream(sys.stdout)
    try:
        if under_launcher():
            prepare_rank()
        code = _parse_and_run(sys.argv[1:] if argv is None else argv, results)
    except KeyboardInterrupt:
        if int(os.environ.get("RANK", "0")) == 0:
            print("tp_residual: interrupted; what is finished is kept", file=sys.stderr, flush=True)
        code = INTERRUPTED
    results.flush()
    if results.error is not None:
        code = _say(f"results were lost: stdout: {results.error.strerror}; write them to a place with room", 1)
    if code and under_launcher():
        leave(code, shared_error=code == USER_ERROR)
    return code


def _parse_and_run(argv: list[str], results: ResultStream) -> int:
    arguments = parse(argv)
    with contextlib.redirect_stdout(results):
        return _run(arguments, argv)


def _run(arguments: argparse.Namespace, argv: list[str]) -> int:
    try:
        if getattr(arguments, "model", None) is not None:
            config_only = arguments.command in ("audit", "explain") or getattr(arguments, "weights", None) is not None
            config_only |= arguments.command == "plan" and not arguments.check
            arguments.model = resolve_model(arguments.model, CONFIG_ONLY if config_only else EVERYTHING)
        import_module(f"tp_residual.cli.{arguments.command}").main(arguments, argv)
        return 0
    except UserError as error:
        return _say(str(error), USER_ERROR)
    except (CollectiveError, GenerationError, VerificationFailed) as error:
        return _say(str(error), 1)
    except Exception:
        traceback.print_exc()
        return 1


def _say(message: str, code: int) -> int:
    rank = f" (rank {os.environ['RANK']})" if under_launcher() else ""
    print(f"tp_residual: error{rank}: {message}", file=sys.stderr, flush=True)
    return code
