"""What can be asked on the command line. A misspelt option is an error, never a guess."""

import argparse

from tp_residual import __version__
from tp_residual.cli.arguments.analysis import (
    add_audit,
    add_compare,
    add_doctor,
    add_env,
    add_explain,
    add_lens,
    add_plan,
    add_verify,
)
from tp_residual.cli.arguments.bench import add_bench
from tp_residual.cli.arguments.common import Parser
from tp_residual.cli.arguments.inference import add_generate, add_score


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="tp_residual", description="Tensor-parallel decoding built around the residual stream.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"tp_residual {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_generate(commands)
    add_score(commands)
    add_audit(commands)
    add_plan(commands)
    add_verify(commands)
    add_compare(commands)
    add_lens(commands)
    add_explain(commands)
    add_doctor(commands)
    add_env(commands)
    add_bench(commands)
    return parser.parse_args(argv)
