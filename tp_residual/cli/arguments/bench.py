"""`bench` and its questions."""

import argparse

from tp_residual.cli.arguments.common import DTYPES, Commands, add_layout, add_machine, add_model


def add_bench(commands: Commands) -> None:
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
    add_model(gemm)
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
        add_model(command)
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
        add_layout(command, sequence_parallel="both" if command is memory else "auto", several_tp=command is scaling)
        add_machine(command)
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
    add_model(command)
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
    _add_bench_files(command)
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
