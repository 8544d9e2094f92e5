"""What several commands share: the parser itself, the model, the layout, the machine."""

import argparse
import difflib
import os
from typing import Any, NoReturn, TypeAlias

DTYPES = ("float32", "bfloat16", "float16")
Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


class Parser(argparse.ArgumentParser):
    """Errors in one line, with the option that was probably meant. Subcommands are parsed by this class as well."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, strangers = self.parse_known_args(args, namespace)
        if strangers:
            options = [option for parser in self._parsers(parsed) for option in parser._option_string_actions]
            near = difflib.get_close_matches(strangers[0].partition("=")[0], options, 1)
            self.error(
                f"unrecognized arguments: {' '.join(strangers)}" + (f"; did you mean {near[0]}?" if near else "")
            )
        return parsed

    def _parsers(self, parsed: argparse.Namespace) -> list[argparse.ArgumentParser]:
        """This one and those of the commands that were chosen."""
        chosen = [
            a.choices[getattr(parsed, a.dest)] for a in self._actions if isinstance(a, argparse._SubParsersAction)
        ]
        return [self, *(inner for parser in chosen for inner in parser._parsers(parsed))]

    def error(self, message: str) -> NoReturn:
        rank = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
        self.exit(2, f"tp_residual: error{rank}: {message}; see {self.prog} --help\n")


def add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model", required=True, metavar="DIR_OR_ID", help="a directory in Hugging Face format, or a hub id"
    )


def add_layout(
    command: argparse.ArgumentParser, *, sequence_parallel: str, replicas: bool = False, several_tp: bool = False
) -> None:
    """sequence_parallel: the command's default. replicas: whether it can divide its work among several. several_tp: --tp is a list."""
    layout = command.add_argument_group("layout and numerics")
    layout.add_argument(
        "--weights", metavar="random:SEED", help="from a seed; only config.json is read (default: the checkpoint)"
    )
    layout.add_argument(
        "--residual",
        metavar="PRESET",
        help="another residual connection (see explain --all; default: the checkpoint's)",
    )
    layout.add_argument(
        "--force-residual", action="store_true", help="also on weights that were trained with another one"
    )
    if several_tp:
        layout.add_argument("--tp", default="1,2", metavar="N,N,...", help="tensor-parallel sizes (default 1,2)")
    else:
        layout.add_argument(
            "--tp", type=int, metavar="N", help="tensor-parallel size (default: torchrun's world size, or 1)"
        )
    if replicas:
        layout.add_argument(
            "--replicas",
            type=int,
            metavar="N",
            help="models of --tp ranks each, sharing the lines of a file (default: torchrun's world size / --tp, or 1)",
        )
    layout.add_argument(
        "--sequence-parallel",
        choices=("off", "on", "auto"),
        default=sequence_parallel,
        help=f"shard the stream by tokens (default {sequence_parallel})",
    )
    layout.add_argument(
        "--boundary",
        choices=("auto", "reference", "library", "shared", "symmetric"),
        default="auto",
        help="who completes the sums (default auto: the fastest that runs here)",
    )
    layout.add_argument(
        "--boundary-table",
        metavar="FILE",
        help="of `bench boundary --tune`: what auto takes, as measured on this machine",
    )
    layout.add_argument("--dtype", choices=DTYPES, help="of the weights (default: the checkpoint's)")
    layout.add_argument("--stream-dtype", choices=DTYPES, help="of the residual stream (default: the weights')")
    layout.add_argument(
        "--round-reduced", action="store_true", help="round each sum before the add, as a plain all-reduce does"
    )


def add_machine(command: argparse.ArgumentParser) -> None:
    machine = command.add_argument_group("machine")
    machine.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="cuda when each local rank has a GPU (default auto)",
    )
    machine.add_argument(
        "--threads", type=int, metavar="N", help="CPU threads a rank (default: usable cores / local ranks)"
    )
    machine.add_argument(
        "--timeout",
        action="append",
        default=[],
        metavar="[PHASE=]S",
        help="limit of every wait for other ranks, or of those of one phase, in seconds; own work has none; may be repeated "
        "(default start=300 load=1800 step=300)",
    )
    machine.add_argument(
        "--check-collectives",
        action="store_true",
        help="before each collective, compare its record on all ranks: names a skipped or mismatched one at once (slow)",
    )
