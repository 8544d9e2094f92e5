"""`generate` and `score`."""

import argparse

from tp_residual.cli.arguments.common import Commands, add_layout, add_machine, add_model
from tp_residual.inference.request import DEFAULT_MAX_BATCHED_TOKENS, DEFAULT_MAX_NUM_SEQS


def add_generate(commands: Commands) -> None:
    command = commands.add_parser(
        "generate",
        help="continue prompts",
        description="Continue one or more prompts. Text or JSON on stdout, everything else on stderr.",
        epilog="Under torchrun every rank runs this command; outside it, --tp N starts N ranks on this machine.",
        allow_abbrev=False,
    )
    add_model(command)
    prompts = command.add_argument_group("prompts (each may be repeated: one batch)")
    prompts.add_argument("--prompt", action="append", default=[], metavar="TEXT")
    prompts.add_argument("--prompt-ids", action="append", default=[], metavar="1,2,3", help="token ids instead of text")
    prompts.add_argument(
        "--chat", action="store_true", help="each --prompt is a user message in the model's chat template"
    )
    _add_files(
        command.add_argument_group("files"),
        "--prompt-file",
        'one {"prompt": ...}, {"prompt_ids": [...]} or {"messages": [...]} a line; answers are JSON lines',
    )
    ends = command.add_argument_group("length")
    ends.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="(default 128)")
    ends.add_argument(
        "--min-new-tokens", type=int, default=0, metavar="N", help="no stop token before N tokens (default 0)"
    )
    ends.add_argument("--ignore-eos", action="store_true", help="go on after a stop token")
    ends.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; may be repeated")
    sampling = command.add_argument_group(
        "sampling (over generation_config.json; greedy unless it or an option says so)"
    )
    sampling.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    sampling.add_argument("--top-k", type=int, metavar="K", help="the K likeliest tokens; 0 is off")
    sampling.add_argument("--top-p", type=float, metavar="P", help="the likeliest tokens of mass P together; 1 is off")
    sampling.add_argument("--min-p", type=float, metavar="P", help="tokens at least P times as likely as the likeliest")
    sampling.add_argument("--repetition-penalty", type=float, metavar="X", help="on tokens seen before; 1 is off")
    sampling.add_argument("--seed", type=int, default=0, metavar="N", help="(default 0)")
    sampling.add_argument(
        "--n",
        "--samples",
        type=int,
        default=1,
        metavar="N",
        help="samples a prompt (default 1); under torchrun --samples, since it takes --n for its own",
    )
    watching = command.add_argument_group("watching")
    watching.add_argument("--logprobs", type=int, metavar="K", help="of each new token and of the K likeliest, in JSON")
    watching.add_argument("--prompt-logprobs", type=int, metavar="K", help="the same for the prompt's tokens")
    watching.add_argument(
        "--check-finite", action="store_true", help="name layer and rank where NaN or infinity first appears"
    )
    watching.add_argument("--profile", metavar="DIR", help="a Chrome trace of each rank's steps, one file a rank")
    watching.add_argument(
        "--profile-steps", metavar="A:B", help="which: A to B - 1, the first being 0 (default 4:8; prefill comes first)"
    )
    _add_engine(command)
    add_layout(command, sequence_parallel="auto", replicas=True)
    add_machine(command)
    command.add_argument("--json", action="store_true", help="one JSON object a prompt instead of text")


def add_score(commands: Commands) -> None:
    command = commands.add_parser(
        "score",
        help="log-likelihoods of completions, or the perplexity of a text",
        description="How likely the model finds given tokens. JSON on stdout, everything else on stderr.",
        allow_abbrev=False,
    )
    add_model(command)
    files = command.add_argument_group("files")
    what = files.add_mutually_exclusive_group(required=True)
    what.add_argument("--perplexity", metavar="FILE", help="of a text, in windows")
    _add_files(files, "--file", 'one {"prompt": ..., "completion": ...} a line, or prompt_ids and completion_ids', what)
    command.add_argument("--window", type=int, metavar="N", help="tokens a window (default: positions, at most 2048)")
    command.add_argument("--logprobs", type=int, metavar="K", help="the K likeliest tokens beside each (default 0)")
    _add_engine(command)
    add_layout(command, sequence_parallel="auto", replicas=True)
    add_machine(command)


def _add_files(
    files: "argparse._ArgumentGroup", name: str, content: str, choice: "argparse._MutuallyExclusiveGroup | None" = None
) -> None:
    """choice: where the input file is one of several."""
    (choice or files).add_argument(name, metavar="FILE", help=content)
    files.add_argument("--output", metavar="FILE", help="answers go here, each a whole line at once (default: stdout)")
    files.add_argument("--resume", action="store_true", help="go on with --output: answer what it does not answer yet")


def _add_engine(command: argparse.ArgumentParser) -> None:
    engine = command.add_argument_group("engine (docs/inference.md)")
    engine.add_argument(
        "--max-model-len",
        metavar="N|auto",
        default="auto",
        help="tokens of one sequence (default auto: the model's positions, or what the cache holds)",
    )
    engine.add_argument(
        "--kv-memory", metavar="SIZE", help="of the KV cache a rank, as 4096M or 4GB (default: a share of what is free)"
    )
    engine.add_argument(
        "--max-num-seqs",
        "--batch-size",
        type=int,
        metavar="N",
        help=f"sequences that run at once (default {DEFAULT_MAX_NUM_SEQS})",
    )
    engine.add_argument(
        "--max-batched-tokens",
        type=int,
        metavar="N",
        help=f"of one forward pass; longer prompts are cut (default {DEFAULT_MAX_BATCHED_TOKENS})",
    )
