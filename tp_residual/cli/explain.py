"""`explain`: what a residual connection means and costs."""

import argparse
import json
import sys

from rich.console import Console
from rich.table import Table

from tp_residual.errors import RequestError
from tp_residual.explain import Explanation, blocks_by_rule, explain, explain_model
from tp_residual.model.config import ModelConfig
from tp_residual.residual.config import PRESETS, ResidualConfig


def main(arguments: argparse.Namespace, argv: list[str]) -> None:
    given = [arguments.residual is not None, arguments.model is not None, arguments.all]
    if sum(given) != 1:
        raise RequestError("explain takes one of --residual PRESET, --model DIR and --all")
    if arguments.tp < 1:
        raise RequestError(f"--tp {arguments.tp} must be at least 1")
    if arguments.all:
        found = [explain(preset.config) for preset in PRESETS.values()]
        if arguments.json:
            print(json.dumps([each.as_json() for each in found]))
        else:
            _print_overview(found)
        return
    config = None if arguments.model is None else ModelConfig.from_dir(arguments.model)
    one = explain(ResidualConfig.preset(arguments.residual)) if config is None else explain_model(config)
    if arguments.json:
        print(json.dumps(one.as_json()))
    else:
        _print_one(one, config, arguments.tp)
    sys.stdout.flush()


def _print_overview(found: list[Explanation]) -> None:
    console = Console()
    table = Table(
        title=f"residual connections ({found[0].num_layers} layers of hidden size {found[0].hidden_size})",
        title_justify="left",
    )
    for heading in ("preset", "equation", "sums a layer", "adds to Pre-Norm"):
        table.add_column(heading, justify="right" if heading.startswith(("sums", "adds")) else "left")
    for each in found:
        table.add_row(each.name, each.equation, str(each.sums_per_layer), f"{each.extra_parameters:,}")
    console.print(table)


def _print_one(one: Explanation, config: ModelConfig | None, tp_size: int) -> None:
    console = Console()
    shape = f"{one.num_layers} layers of hidden size {one.hidden_size}" + ("" if config else ", an example")
    table = Table(show_header=False, title=f"residual connection: {one.name} ({shape})", title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("equation", one.equation)
    if one.source:
        table.add_row("source", one.source)
    if one.settings:
        table.add_row("differs from pre in", ", ".join(f"{name}={value}" for name, value in one.settings.items()))
    table.add_row("tensor parallel", f"{one.collectives['tensor_parallel']} a layer")
    table.add_row("sequence parallel", f"{one.collectives['sequence_parallel']} a layer")
    table.add_row("going back", f"{one.collectives['backward']} (tensor parallel)")
    table.add_row("exposed, a layer", one.collectives["exposed"])
    table.add_row("at inference", one.kernel)
    table.add_row(
        "adds to Pre-Norm", f"{one.extra_parameters:,} parameters of norms and connections in the whole model"
    )
    table.add_row("kept beside the stream", one.extra_streams)
    console.print(table, highlight=False)
    rules = Table(
        "replicated parameters", "gradient, stream replicated", "gradient, stream token-sharded", title_justify="left"
    )
    for each in one.synced:
        rules.add_row(each.parameters, each.tp, each.sp)
    console.print(rules, highlight=False)
    if config is not None and tp_size > 1:
        for sequence_parallel in (False, True):
            counts = blocks_by_rule(config, tp_size, sequence_parallel=sequence_parallel)
            mode = "token-sharded" if sequence_parallel else "replicated"
            text = ", ".join(f"{count} {rule}" for rule, count in sorted(counts.items()))
            console.print(f"tensors at tp={tp_size}, stream {mode}: {text}", highlight=False)
    for note in one.notes:
        console.print(f"note: {note}", highlight=False)
