"""What can be asked on the command line. A misspelt option is an error, never a guess."""

import argparse
from typing import TypeAlias

from tp_residual import __version__

DTYPES = ("float32", "bfloat16", "float16")
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tp_residual", description="Tensor-parallel decoding built around the residual stream.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"tp_residual {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_audit(commands)
    _add_env(commands)
    return parser.parse_args(argv)


def _add_generate(commands: Commands) -> None:
    command = commands.add_parser(
        "generate",
        help="continue prompts greedily",
        description="Continue one or more prompts. Text or JSON on stdout, everything else on stderr.",
        epilog="Under torchrun every rank runs this command; outside it, --tp N starts N ranks on this machine.",
        allow_abbrev=False,
    )
    _add_model(command)
    prompts = command.add_argument_group("prompts (each may be repeated: one batch)")
    prompts.add_argument("--prompt", action="append", default=[], metavar="TEXT")
    prompts.add_argument("--prompt-ids", action="append", default=[], metavar="1,2,3", help="token ids instead of text")
    prompts.add_argument(
        "--chat", action="store_true", help="each --prompt is a user message in the model's chat template"
    )
    ends = command.add_argument_group("length")
    ends.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="(default 128)")
    ends.add_argument(
        "--min-new-tokens", type=int, default=0, metavar="N", help="no stop token before N tokens (default 0)"
    )
    ends.add_argument("--ignore-eos", action="store_true", help="go on after a stop token")
    _add_layout(command, sequence_parallel="auto")
    _add_machine(command)
    command.add_argument("--json", action="store_true", help="one JSON object a prompt instead of text")


def _add_audit(commands: Commands) -> None:
    command = commands.add_parser(
        "audit",
        help="who holds what and what it costs, from config.json alone",
        description="Heads, bytes, blocks, collectives and memory of a layout: no ranks, no weights, no torch.",
        allow_abbrev=False,
    )
    _add_model(command)
    command.add_argument("--tp", type=int, required=True, metavar="N", help="tensor-parallel size")
    command.add_argument("--sequence-parallel", choices=("off", "on"), default="off", help="(default off)")
    command.add_argument("--dtype", choices=DTYPES, help="of weights and cache (default: the checkpoint's)")
    command.add_argument("--stream-dtype", choices=DTYPES, help="of the residual stream (default: the weights')")
    command.add_argument("--device-memory", metavar="80GB", help="of each device; says whether the fullest rank fits")
    command.add_argument("--tokens", type=int, default=4096, metavar="N", help="of the largest pass (default 4096)")
    command.add_argument("--sequences", type=int, default=1, metavar="N", help="in the KV cache (default 1)")
    command.add_argument("--context", type=int, metavar="N", help="tokens a sequence (default: the model's maximum)")
    command.add_argument("--blocks", action="store_true", help="list every parameter's blocks as well")
    command.add_argument("--json", action="store_true", help="one JSON object, blocks included")


def _add_env(commands: Commands) -> None:
    command = commands.add_parser(
        "env", help="versions, devices, cores and memory, for a bug report", allow_abbrev=False
    )
    command.add_argument("--json", action="store_true", help="one JSON object")


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model", required=True, metavar="DIR_OR_ID", help="a directory in Hugging Face format, or a hub id"
    )


def _add_layout(command: argparse.ArgumentParser, *, sequence_parallel: str) -> None:
    """sequence_parallel: the command's default."""
    layout = command.add_argument_group("layout and numerics")
    layout.add_argument(
        "--weights", metavar="random:SEED", help="from a seed; only config.json is read (default: the checkpoint)"
    )
    layout.add_argument(
        "--tp", type=int, metavar="N", help="tensor-parallel size (default: torchrun's world size, or 1)"
    )
    layout.add_argument(
        "--sequence-parallel",
        choices=("off", "on", "auto"),
        default=sequence_parallel,
        help=f"shard the stream by tokens (default {sequence_parallel})",
    )
    layout.add_argument(
        "--boundary",
        choices=("auto", "reference", "library"),
        default="auto",
        help="who completes the sums (default auto)",
    )
    layout.add_argument("--dtype", choices=DTYPES, help="of the weights (default: the checkpoint's)")
    layout.add_argument("--stream-dtype", choices=DTYPES, help="of the residual stream (default: the weights')")
    layout.add_argument(
        "--round-reduced", action="store_true", help="round each sum before the add, as a plain all-reduce does"
    )


def _add_machine(command: argparse.ArgumentParser) -> None:
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
        "--timeout", type=float, default=300.0, metavar="S", help="limit of every wait in seconds (default 300)"
    )
