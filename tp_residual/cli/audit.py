"""`audit`: prints what `tp_residual.audit` finds, as tables or as JSON."""

import argparse
import json
import re
import sys

from rich.console import Console
from rich.table import Table

from tp_residual.audit import Audit, audit
from tp_residual.errors import RequestError
from tp_residual.model.config import ModelConfig

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def main(arguments: argparse.Namespace, argv: list[str]) -> None:
    """Raises RequestError, after printing everything, when the layout has a violation."""
    found = audit(
        ModelConfig.from_dir(arguments.model),
        arguments.tp,
        sequence_parallel=arguments.sequence_parallel == "on",
        dtype=arguments.dtype,
        stream_dtype=arguments.stream_dtype,
        tokens=arguments.tokens,
        sequences=arguments.sequences,
        context=arguments.context,
        device_bytes=None if arguments.device_memory is None else parse_bytes(arguments.device_memory),
    )
    if arguments.json:
        print(json.dumps(found.as_json()))
    else:
        _print_tables(found, blocks=arguments.blocks)
    sys.stdout.flush()
    if found.violations:
        raise RequestError("; ".join(found.violations))


def parse_bytes(text: str) -> int:
    """ "80GB" and "80GiB" alike with or without a space; a bare number is bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise RequestError(f"--device-memory {text!r} is not a size; write it as 80GB or 80GiB")
    nbytes = int(float(match[1]) * _UNITS[match[2].upper()])
    if nbytes < 1:
        raise RequestError(f"--device-memory {text!r} must be above 0")
    return nbytes


def _print_tables(found: Audit, *, blocks: bool) -> None:
    console = Console()
    mode = "sequence parallel" if found.sequence_parallel else "tensor parallel"
    first, last = found.legal_tp_sizes
    summary = Table(show_header=False, title=f"{found.model_type}, tp={found.tp_size}, {mode}", title_justify="left")
    summary.add_row(
        "parameters", f"{found.parameters / 1e9:.3f} billion, weights {found.dtype}, stream {found.stream_dtype}"
    )
    summary.add_row("legal tp sizes", f"{first} to {last}")
    if found.ranks:
        for name, collectives in found.collectives_per_layer.items():
            text = "; ".join(
                f"{c.count} {c.kind}, {c.payload_bytes_per_token} B a token, {c.wire_bytes_per_token:.0f} B on a ring"
                for c in collectives
            )
            summary.add_row(f"{name.replace('_', ' ')}, a layer", text or "no collective")
        summary.add_row(
            "weights, fullest rank",
            f"{_gb(max(share.weight_bytes for share in found.ranks))}, {found.imbalance:.3f} x the mean",
        )
        summary.add_row(
            "KV cache", f"{_gb(found.kv_cache_bytes)} for {found.sequences} sequences of {found.context} tokens"
        )
        summary.add_row("stream", f"{_gb(found.stream_bytes)} for {found.tokens} tokens")
        summary.add_row("activations", f"about {_gb(found.activation_bytes)} for {found.tokens} tokens")
        room = (
            ""
            if found.device_bytes is None
            else f" of {_gb(found.device_bytes)}: {'fits' if found.fits else 'does not fit'}"
        )
        summary.add_row("needed, fullest rank", f"{_gb(found.needed_bytes)}{room}")
    console.print(summary)
    if found.ranks:
        ranks = Table("rank", "query heads", "KV heads", "intermediate", "vocabulary", "weights", "KV bytes a token")
        for share in found.ranks:
            spans = (share.query_heads, share.key_value_heads, share.intermediate, share.vocabulary)
            cells = [_span(span) for span in spans]
            ranks.add_row(str(share.rank), *cells, _gb(share.weight_bytes), str(share.kv_bytes_per_token))
        console.print(ranks)
    if blocks:
        for block in found.blocks:  # plain lines, for grep
            holders = ",".join(map(str, block["holders"]))
            print(
                f"{block['tensor']} dim {block['dim']} rank {block['rank']}: local {_span(block['local'])} global {_span(block['global'])} "
                f"holders {holders} owner {block['owner']} gradient {block['gradient']}"
            )
    for note in found.notes:
        console.print(f"note: {note}", highlight=False)


def _span(span: tuple[int, int]) -> str:
    return "none" if span[0] == span[1] else f"{span[0]}-{span[1] - 1}" if span[1] - span[0] > 1 else str(span[0])


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.2f} MB"
