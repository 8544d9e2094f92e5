"""The commands that say what a layout, a residual connection, a model or a machine is."""

from tp_residual.cli.arguments.common import DTYPES, Commands, add_layout, add_machine, add_model


def add_audit(commands: Commands) -> None:
    command = commands.add_parser(
        "audit",
        help="who holds what and what it costs, from config.json alone",
        description="Heads, bytes, blocks, collectives and memory of a layout: no ranks, no weights, no torch.",
        allow_abbrev=False,
    )
    add_model(command)
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


def add_plan(commands: Commands) -> None:
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


def add_verify(commands: Commands) -> None:
    command = commands.add_parser(
        "verify",
        help="compare with the unsharded model: every state, update and the logits, or every gradient",
        description="Is the sharded model the unsharded one? Exit code 1, with the first culprit by name, when it is not.",
        epilog="Without --prompt: random ids, for which the limits of float32 are four times wider.",
        allow_abbrev=False,
    )
    add_model(command)
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
    add_layout(command, sequence_parallel="off")
    add_machine(command)
    command.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def add_compare(commands: Commands) -> None:
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


def add_lens(commands: Commands) -> None:
    command = commands.add_parser(
        "lens",
        help="look into the residual stream: norms, who wrote what, what the stream says layer by layer",
        description="Norms and writes by layer, shares of the final stream and of one logit (by head), and the logit lens.",
        epilog="Nothing is gathered to look at it but the rows that are shown; sums that do not hold are said in red.",
        allow_abbrev=False,
    )
    add_model(command)
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
    add_layout(command, sequence_parallel="off")
    add_machine(command)
    command.add_argument("--json", action="store_true", help="one JSON object instead of tables")


def add_explain(commands: Commands) -> None:
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


def add_doctor(commands: Commands) -> None:
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
    add_layout(command, sequence_parallel="off")
    add_machine(command)


def add_env(commands: Commands) -> None:
    command = commands.add_parser(
        "env", help="versions, devices, cores and memory, for a bug report", allow_abbrev=False
    )
    command.add_argument("--json", action="store_true", help="one JSON object")
