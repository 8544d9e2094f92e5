"""What can be asked on the command line. A misspelt option is an error, never a guess."""

import argparse
import difflib
import os
from typing import Any, NoReturn, TypeAlias

from tp_residual import __version__
from tp_residual.inference.request import DEFAULT_MAX_BATCHED_TOKENS, DEFAULT_MAX_NUM_SEQS

DTYPES = ("float32", "bfloat16", "float16")
Commands: TypeAlias = "argparse._SubParsersAction[_Parser]"


class _Parser(argparse.ArgumentParser):
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


def parse(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="tp_residual", description="Tensor-parallel decoding built around the residual stream.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"tp_residual {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_score(commands)
    _add_audit(commands)
    _add_plan(commands)
    _add_verify(commands)
    _add_compare(commands)
    _add_lens(commands)
    _add_explain(commands)
    _add_doctor(commands)
    _add_env(commands)
    _add_bench(commands)
    return parser.parse_args(argv)


def _add_generate(commands: Commands) -> None:
    command = commands.add_parser(
        "generate",
        help="continue prompts",
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
    _add_layout(command, sequence_parallel="auto", replicas=True)
    _add_machine(command)
    command.add_argument("--json", action="store_true", help="one JSON object a prompt instead of text")


def _add_score(commands: Commands) -> None:
    command = commands.add_parser(
        "score",
        help="log-likelihoods of completions, or the perplexity of a text",
        description="How likely the model finds given tokens. JSON on stdout, everything else on stderr.",
        allow_abbrev=False,
    )
    _add_model(command)
    files = command.add_argument_group("files")
    what = files.add_mutually_exclusive_group(required=True)
    what.add_argument("--perplexity", metavar="FILE", help="of a text, in windows")
    _add_files(files, "--file", 'one {"prompt": ..., "completion": ...} a line, or prompt_ids and completion_ids', what)
    command.add_argument("--window", type=int, metavar="N", help="tokens a window (default: positions, at most 2048)")
    command.add_argument("--logprobs", type=int, metavar="K", help="the K likeliest tokens beside each (default 0)")
    _add_engine(command)
    _add_layout(command, sequence_parallel="auto", replicas=True)
    _add_machine(command)


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


def _add_plan(commands: Commands) -> None:
    command = commands.add_parser(
        "plan",
        help="which tp size, TP or SP, one node or several: predicted times and memory",
        description="Predicts prefill, decode, memory and TP against SP from config.json and a hardware file: no ranks, no torch.",
        epilog="--measure FILE writes this machine as a hardware file; --check runs the model and prints every prediction's error.",
        allow_abbrev=False,
    )
    command.add_argument("--model", metavar="DIR_OR_ID", help="a directory in Hugging Face format, or a hub id")
    command.add_argument("--hardware", metavar="FILE_OR_PRESET", help="docs/plan.md has the presets and the format")
    layouts = command.add_argument_group("what to predict")
    layouts.add_argument("--tp", metavar="N,N,...", help="tensor-parallel sizes (default: those of 1,2,4,8 that fit)")
    layouts.add_argument("--nodes", type=int, default=1, metavar="N", help="the most nodes to spread over (default 1)")
    layouts.add_argument("--tokens", metavar="N,N,...", help="of prefill passes, one prompt each (default 1,128,4096)")
    layouts.add_argument("--batch", default="1", metavar="N,N,...", help="sequences of decode passes (default 1)")
    layouts.add_argument("--context", type=int, metavar="N", help="tokens a decoding sequence has (default 1024)")
    layouts.add_argument("--dtype", choices=DTYPES, help="of weights, cache and stream (default: the checkpoint's)")
    here = command.add_argument_group("this machine")
    here.add_argument("--measure", metavar="FILE", help="write it as a hardware file, from --tp ranks at once")
    here.add_argument("--check", action="store_true", help="run the same passes with --tp ranks and compare")
    here.add_argument("--weights", metavar="random:SEED", help="of --check: from a seed; only config.json is read")
    here.add_argument("--iters", type=int, default=20, metavar="N", help="samples of each figure (default 20)")
    here.add_argument(
        "--max-seconds", type=float, default=20.0, metavar="S", help="of each set of figures (default 20)"
    )
    here.add_argument("--threads", type=int, metavar="N", help="CPU threads a rank (default: cores / local ranks)")
    here.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default auto)")
    here.add_argument("--timeout", action="append", default=[], metavar="[PHASE=]S", help="as for generate")
    files = command.add_argument_group("files")
    files.add_argument("--output", metavar="FILE", help="JSON with rows")
    files.add_argument("--plot", metavar="FILE", help="a picture (PNG; needs the extra `plot`)")


def _add_doctor(commands: Commands) -> None:
    command = commands.add_parser(
        "doctor",
        help="what is wrong with a residual connection, by name",
        description="One pass and its gradients, each step judged in fp64 from its own inputs. Exit code 1 when something is wrong.",
        epilog="Without --model: a tiny decoder with the connection of --residual, in fp64, and its growth with depth.",
        allow_abbrev=False,
    )
    command.add_argument("--model", metavar="DIR_OR_ID", help="a directory in Hugging Face format, or a hub id")
    tokens = command.add_argument_group("tokens")
    tokens.add_argument("--input-ids", action="append", default=[], metavar="1,2,3", help="may be repeated: one batch")
    tokens.add_argument("--seq-len", type=int, default=32, metavar="N", help="else so many random ids (default 32)")
    command.add_argument(
        "--init", choices=("normal", "gpt2", "variance_over_root_n"), help="of the example (default normal)"
    )
    files = command.add_argument_group("output")
    files.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the table")
    files.add_argument("--output", metavar="FILE", help="the same JSON")
    files.add_argument("--plot", metavar="FILE.png", help="a picture (needs the extra `plot`)")
    _add_layout(command, sequence_parallel="off")
    _add_machine(command)


def _add_explain(commands: Commands) -> None:
    command = commands.add_parser(
        "explain",
        help="what a residual connection means and costs",
        description="Equation, collectives, kernel, gradients to be summed and memory of a residual connection: no ranks, no weights.",
        allow_abbrev=False,
    )
    command.add_argument("--residual", metavar="PRESET", help="a residual connection by name")
    command.add_argument("--model", metavar="DIR_OR_ID", help="the one that a model's config.json asks for")
    command.add_argument("--all", action="store_true", help="every preset, a line each")
    command.add_argument(
        "--tp", type=int, default=2, metavar="N", help="of the counts by rule, with --model (default 2)"
    )
    command.add_argument("--json", action="store_true", help="JSON instead of tables")


def _add_verify(commands: Commands) -> None:
    command = commands.add_parser(
        "verify",
        help="compare with the unsharded model: every state, update and the logits, or every gradient",
        description="Is the sharded model the unsharded one? Exit code 1, with the first culprit by name, when it is not.",
        epilog="Without --prompt: random ids, for which the limits of float32 are four times wider.",
        allow_abbrev=False,
    )
    _add_model(command)
    tokens = command.add_argument_group("tokens")
    tokens.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be repeated: one batch")
    tokens.add_argument("--chat", action="store_true", help="each --prompt is a user message in the chat template")
    tokens.add_argument("--seq-len", type=int, metavar="N", help="that many random ids (default 256)")
    what = command.add_argument_group("what to compare")
    what.add_argument("--layers", metavar="A:B", help="only layers A to B - 1, from our own state before A")
    what.add_argument(
        "--against", choices=("reference",), help="the executor of --boundary with `reference`, bit for bit, instead"
    )
    what.add_argument("--backward", action="store_true", help="every gradient instead (float32 only)")
    what.add_argument("--dump", metavar="DIR", help="write every pre-norm state there as well, for `compare`")
    _add_layout(command, sequence_parallel="off")
    _add_machine(command)
    command.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def _add_compare(commands: Commands) -> None:
    command = commands.add_parser(
        "compare",
        help="two dumps of `verify --dump`, or of another framework: where do they part?",
        description="Two runs of the same tokens, of any tp size, layout, dtype or framework. Exit code 1 when they part.",
        allow_abbrev=False,
    )
    command.add_argument("dump_a", metavar="DIR_A", help="the reference")
    command.add_argument("dump_b", metavar="DIR_B")
    command.add_argument("--limit", type=float, metavar="X", help="of a token's relative error (default: by dtype)")
    command.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def _add_lens(commands: Commands) -> None:
    command = commands.add_parser(
        "lens",
        help="look into the residual stream: norms, who wrote what, what the stream says layer by layer",
        description="Norms and writes by layer, shares of the final stream and of one logit (by head), and the logit lens.",
        epilog="Nothing is gathered to look at it but the rows that are shown; sums that do not hold are said in red.",
        allow_abbrev=False,
    )
    _add_model(command)
    prompts = command.add_argument_group("prompts (each may be repeated)")
    prompts.add_argument("--prompt", action="append", default=[], metavar="TEXT")
    prompts.add_argument("--input-ids", action="append", default=[], metavar="1,2,3", help="token ids instead of text")
    prompts.add_argument("--prompt-file", metavar="FILE", help='one {"prompt": ...} or {"prompt_ids": [...]} a line')
    prompts.add_argument("--chat", action="store_true", help="each prompt is a user message in the chat template")
    what = command.add_argument_group("what to look at")
    what.add_argument("--position", type=int, default=-1, metavar="N", help="whose logit (default -1: the last)")
    what.add_argument("--token", metavar="TEXT", help="whose logit is taken apart (default: the likeliest)")
    what.add_argument("--token-id", type=int, metavar="ID", help="the same by id")
    what.add_argument("--versus", metavar="TEXT", help="minus the logit of this token")
    what.add_argument("--versus-id", type=int, metavar="ID", help="the same by id")
    what.add_argument("--top", type=int, default=5, metavar="K", help="likeliest tokens of each layer (default 5)")
    what.add_argument("--layers", metavar="A:B", help="show only layers A to B - 1")
    what.add_argument("--window", type=int, default=12, metavar="N", help="positions of the logit lens (default 12)")
    files = command.add_argument_group("files")
    files.add_argument("--output", metavar="FILE", help="everything as JSON")
    files.add_argument(
        "--plot", metavar="PATH", help="FILE.png, or a folder for one picture of each kind (needs `plot`)"
    )
    _add_layout(command, sequence_parallel="off")
    _add_machine(command)
    command.add_argument("--json", action="store_true", help="one JSON object instead of tables")


def _add_env(commands: Commands) -> None:
    command = commands.add_parser(
        "env", help="versions, devices, cores and memory, for a bug report", allow_abbrev=False
    )
    command.add_argument("--json", action="store_true", help="one JSON object")


def _add_bench(commands: Commands) -> None:
    command = commands.add_parser(
        "bench",
        help="time generation, linears, collectives, memory, boundaries and add+norm beside their limits; compare two results",
        description="Tables on stdout, figures with raw samples in files. Everything is checked before it is timed.",
        allow_abbrev=False,
    )
    questions: Commands = command.add_subparsers(dest="question", required=True, metavar="QUESTION")
    collectives = questions.add_parser(
        "collectives",
        help="every collective of every transport that runs, as nccl-tests shows them",
        allow_abbrev=False,
    )
    sizes = collectives.add_argument_group("what to time")
    sizes.add_argument("--min-bytes", default="1K", metavar="SIZE", help="of the full buffer (default 1K)")
    sizes.add_argument("--max-bytes", default="16M", metavar="SIZE", help="(default 16M)")
    sizes.add_argument("--factor", type=float, default=4.0, metavar="X", help="from one size to the next (default 4)")
    sizes.add_argument("--dtype", choices=DTYPES, default="float32", help="(default float32)")
    sizes.add_argument(
        "--collective", action="append", default=[], metavar="NAME", help="may be repeated (default: all, and p2p)"
    )
    sizes.add_argument(
        "--transport", action="append", default=[], metavar="NAME", help="may be repeated (default: all that run)"
    )
    sizes.add_argument("--root", type=int, default=0, metavar="RANK", help="of a broadcast (default 0)")
    sizes.add_argument("--check", type=int, default=1, metavar="N", help="checked calls of each size (default 1)")
    bandwidth = questions.add_parser(
        "bandwidth", help="memory bandwidth by thread count, GEMM peak, cost of a call: the limits", allow_abbrev=False
    )
    arrays = bandwidth.add_argument_group("what to time")
    arrays.add_argument("--bytes", metavar="SIZE", help="of each array (default: four times the last-level cache)")
    arrays.add_argument(
        "--gemm-size",
        type=int,
        metavar="N",
        help="M = N = K (default 1024 on CPU, less where it is slow; 8192 on CUDA)",
    )
    boundary = questions.add_parser(
        "boundary", help="sum, residual add and norm: every executor that runs, TP against SP", allow_abbrev=False
    )
    shapes = _add_bench_shapes(boundary, "1,16,128,1024,4096", "896,4096")
    shapes.add_argument(
        "--boundary", action="append", default=[], metavar="NAME", help="an executor; may be repeated (default: all)"
    )
    shapes.add_argument("--operator", action="store_true", help="time the calls through the torch operator as well")
    add_norm = questions.add_parser(
        "add-norm", help="the fused kernel against the operations it replaces", allow_abbrev=False
    )
    shapes = _add_bench_shapes(add_norm, "1,16,256,4096", "4096,8192")
    shapes.add_argument("--compile", action="store_true", help="time torch.compile of the operations as well")
    gemm = questions.add_parser(
        "gemm", help="a model's own linears, shard by shard, packed as it has them", allow_abbrev=False
    )
    _add_model(gemm)
    shapes = gemm.add_argument_group("what to time")
    shapes.add_argument("--tokens", default="1,8,32,128,1024", metavar="N,N,...", help="(default 1,8,32,128,1024)")
    shapes.add_argument("--dtype", choices=DTYPES, help="of the weights (default: the checkpoint's)")
    for question in (collectives, bandwidth, boundary, add_norm, gemm):
        _add_bench_rules(question, tune=question is boundary)
    _add_bench_models(questions)
    _add_bench_peers(questions)
    comparison = questions.add_parser(
        "compare", help="two result files: what differs beyond the spread of the samples", allow_abbrev=False
    )
    comparison.add_argument("old", metavar="OLD")
    comparison.add_argument("new", metavar="NEW")
    comparison.add_argument(
        "--fail-over", type=float, metavar="PCT", help="exit code 1 when a row is slower by more than PCT percent"
    )


def _add_bench_models(questions: Commands) -> None:
    """Those that run a model through the engine."""
    generate = questions.add_parser(
        "generate",
        help="prefill and decode of the engine, beside its limits; where a step's time goes",
        description="Whole batches of random prompts, exactly as long as asked for. Each is a row for prefill and one for decode.",
        allow_abbrev=False,
    )
    memory = questions.add_parser(
        "memory",
        help="weights, packed copies, cache, stream and peak of a rank, TP against SP",
        description="One batch in each mode, in processes of its own. CPU ranks only.",
        allow_abbrev=False,
    )
    scaling = questions.add_parser(
        "scaling",
        help="`generate` over tp sizes of this machine, in turn",
        description="Starts `bench generate` once for each tp size and round; run it without torchrun.",
        allow_abbrev=False,
    )
    for command in (generate, memory, scaling):
        several, default = command is not memory, "1,8,32" if command is not memory else "1"
        _add_model(command)
        what = command.add_argument_group("what to measure")
        what.add_argument(
            "--batch",
            default=default,
            metavar="N,N,..." if several else "N",
            help=f"requests at once (default {default})",
        )
        default = "16,128,1024" if several else "128"
        what.add_argument(
            "--prompt-tokens",
            default=default,
            metavar="N,N,..." if several else "N",
            help=f"of each (default {default})",
        )
        what.add_argument("--new-tokens", type=int, default=32, metavar="N", help="of each, exactly (default 32)")
        what.add_argument(
            "--max-batched-tokens", type=int, metavar="N", help="of a pass (default: all prompts of a batch at once)"
        )
        _add_layout(command, sequence_parallel="both" if command is memory else "auto", several_tp=command is scaling)
        _add_machine(command)
        if several:
            rules = command.add_argument_group("how to measure")
            if command is scaling:
                rules.add_argument("--rounds", type=int, default=3, metavar="N", help="over all sizes (default 3)")
            rules.add_argument("--iters", type=int, default=10, metavar="N", help="batches of each row (default 10)")
            rules.add_argument("--warmup", type=int, default=1, metavar="N", help="batches before them (default 1)")
            rules.add_argument(
                "--max-seconds",
                type=float,
                default=60.0,
                metavar="S",
                help="of each row; at least 3 batches (default 60)",
            )
        _add_bench_files(command)


def _add_bench_peers(questions: Commands) -> None:
    command = questions.add_parser(
        "peers",
        help="this project against Transformers, vLLM and llama.cpp, in turn in one run",
        description="Both sides stay loaded and take turns in short slices; a ratio is the median of pairs. Starts every side itself.",
        epilog="benchmarks/peers/make_*_env makes an environment for a peer; docs/benchmarks.md says how figures are taken.",
        allow_abbrev=False,
    )
    _add_model(command)
    what = command.add_argument_group("what to measure")
    what.add_argument(
        "--peers",
        default="transformers,vllm,llama.cpp",
        metavar="NAME,...",
        help="transformers, transformers-tp, vllm, llama.cpp (default: all but transformers-tp)",
    )
    what.add_argument("--metrics", default="decode,prefill,start", metavar="NAME,...", help="(default: all three)")
    what.add_argument(
        "--batch", default="1,8,32", metavar="N,N,...", help="sequences (default 1,8,32); prefill: the least"
    )
    what.add_argument("--prompt-tokens", default="128", metavar="N,N,...", help="of each sequence (default 128)")
    what.add_argument("--dtype", choices=DTYPES, help="of the weights (default: the checkpoint's)")
    what.add_argument(
        "--weights", metavar="random:SEED", help="a checkpoint is written for all sides; only config.json is read"
    )
    rules = command.add_argument_group("how to measure")
    rules.add_argument("--rounds", type=int, default=20, metavar="N", help="pairs of slices (default 20)")
    rules.add_argument("--starts", type=int, default=3, metavar="N", help="cold starts of each side (default 3)")
    rules.add_argument(
        "--slice-s", type=float, default=2.0, metavar="S", help="of the slower side (default and most 2)"
    )
    rules.add_argument("--load-limit", type=float, default=900.0, metavar="S", help="for a start (default 900)")
    rules.add_argument("--limit", type=float, default=600.0, metavar="S", help="for any other answer (default 600)")
    machine = command.add_argument_group("machine")
    machine.add_argument("--tp", type=int, metavar="N", help="our ranks, and the peers' where they can (default 1)")
    machine.add_argument(
        "--threads", type=int, metavar="N", help="cores, and threads of a side in all (default: all cores)"
    )
    machine.add_argument(
        "--peer-env",
        action="append",
        default=[],
        metavar="PEER=DIR",
        help="its environment, with bin/python; may be repeated (default: this one)",
    )
    files = command.add_argument_group("files")
    files.add_argument("--output", metavar="FILE", help="JSON with hardware, versions, command, rows and raw samples")
    files.add_argument("--csv", metavar="FILE", help="the rows")
    files.add_argument("--plot", metavar="FILE", help="a picture (PNG; needs the extra `plot`)")
    # our own side, started by `bench peers`: not for a person, so without help
    worker = questions.add_parser("peers-worker", allow_abbrev=False)
    worker.add_argument("--tp", type=int, default=1)
    worker.add_argument("--threads", type=int)


def _add_bench_shapes(command: argparse.ArgumentParser, tokens: str, hidden: str) -> "argparse._ArgumentGroup":
    shapes = command.add_argument_group("what to time")
    shapes.add_argument("--tokens", metavar="N,N,...", help=f"(default {tokens})")
    shapes.add_argument("--hidden", metavar="N,N,...", help=f"(default {hidden})")
    shapes.add_argument(
        "--dtype", choices=DTYPES, action="append", default=[], help="may be repeated (default bfloat16)"
    )
    return shapes


def _add_bench_rules(command: argparse.ArgumentParser, *, tune: bool) -> None:
    rules = command.add_argument_group("how to time")
    rules.add_argument("--iters", type=int, default=50, metavar="N", help="samples of each row (default 50)")
    rules.add_argument("--warmup", type=int, default=5, metavar="N", help="calls before the first (default 5)")
    rules.add_argument("--cache", choices=("warm", "cold"), default="warm", help="before each sample (default warm)")
    rules.add_argument(
        "--max-seconds", type=float, default=10.0, metavar="S", help="of each shape; at least 5 samples (default 10)"
    )
    files = _add_bench_files(command)
    if tune:
        files.add_argument(
            "--tune", metavar="FILE", help="the fastest executor by byte range, as the dispatcher reads it"
        )
    machine = command.add_argument_group("machine")
    machine.add_argument("--tp", type=int, metavar="N", help="ranks (default: torchrun's world size, or 1)")
    machine.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default auto)")
    machine.add_argument("--threads", type=int, metavar="N", help="CPU threads a rank (default: cores / local ranks)")
    machine.add_argument("--pin", action="store_true", help="each rank on cores of its own")
    machine.add_argument(
        "--timeout",
        action="append",
        default=[],
        metavar="[PHASE=]S",
        help="limit of every wait in seconds, as for generate",
    )


def _add_bench_files(command: argparse.ArgumentParser) -> "argparse._ArgumentGroup":
    files = command.add_argument_group("files")
    files.add_argument("--output", metavar="FILE", help="JSON with hardware, versions, command, rows and raw samples")
    files.add_argument("--csv", metavar="FILE", help="the rows")
    files.add_argument("--plot", metavar="FILE", help="a picture (PNG; needs the extra `plot`)")
    return files


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model", required=True, metavar="DIR_OR_ID", help="a directory in Hugging Face format, or a hub id"
    )


def _add_layout(
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
