"""`lens`: check, become ranks, look, print tables, write JSON and pictures."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tp_residual.bench.results import check_plot_target, check_target, replace_file
from tp_residual.cli.session import Session, become_ranks, check_session, open_session
from tp_residual.errors import RequestError, UserError
from tp_residual.inference.batch_file import PROMPT_KINDS, encode_prompt, read_lines
from tp_residual.inference.tokenizer import Tokenizer
from tp_residual.lens.request import LensRequest, parse_layers, single_token, token_text, visible
from tp_residual.lens.result import Component, PromptLens
from tp_residual.model.config import ModelConfig

if TYPE_CHECKING:
    from tp_residual.parallel.group import TensorParallelGroup

WIDTH = 100
STRONGEST_HEADS = 8


@dataclass(frozen=True)
class Job:
    """A request that has passed every check that needs no torch. tokenizer: None where ids are all there is."""

    config: ModelConfig
    tp_size: int
    prompts: list[list[int]]
    request: LensRequest
    tokenizer: Tokenizer | None


def main(arguments: argparse.Namespace, argv: list[str]) -> None:
    job = prepare(arguments)
    become_ranks(argv, job.tp_size)
    run(job, arguments)


def prepare(arguments: argparse.Namespace) -> Job:
    """Everything that can be refused, refused: from files and arguments, which all ranks share."""
    config, tp_size = check_session(arguments)
    tokenizer = cache(lambda: Tokenizer.from_dir(arguments.model))
    given = bool(arguments.prompt or arguments.input_ids)
    if given == (arguments.prompt_file is not None):
        raise RequestError("give --prompt, --input-ids or a --prompt-file" + (", not both" if given else ""))
    if arguments.chat and not (arguments.prompt or arguments.prompt_file):
        raise RequestError("--chat needs a --prompt")
    if "" in arguments.prompt:
        raise RequestError("a --prompt is empty; give it some text")
    if arguments.prompt_file is not None:
        entries: list[dict[str, Any]] = read_lines(arguments.prompt_file, PROMPT_KINDS)
        places = [f"{arguments.prompt_file}, line {number}" for number in range(1, len(entries) + 1)]
    else:
        entries = [{"prompt": text} for text in arguments.prompt]
        entries += [{"prompt_ids": _parse_ids(text)} for text in arguments.input_ids]
        places = ["--prompt"] * len(entries)
    prompts = [
        encode_prompt(entry, tokenizer, chat=arguments.chat, where=place)
        for entry, place in zip(entries, places, strict=True)
    ]
    request = LensRequest(
        target=_chosen_token(arguments, "token", tokenizer),
        versus=_chosen_token(arguments, "versus", tokenizer),
        position=arguments.position,
        window=arguments.window,
        top=arguments.top,
        layers=None if arguments.layers is None else parse_layers(arguments.layers),
    )
    request.check(prompts, config)
    if arguments.output is not None:
        check_target("--output", arguments.output)
    if arguments.plot is not None:
        _check_plot(arguments.plot, len(prompts))
    if arguments.output and arguments.plot and os.path.realpath(arguments.output) == os.path.realpath(arguments.plot):
        raise RequestError(f"--output and --plot are both {arguments.output}; give each its own")
    named = Path(arguments.model, "tokenizer.json").exists()
    return Job(config, tp_size, prompts, request, tokenizer() if named else None)


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise RequestError(f"--input-ids {text!r} is not a list of integers; write it as 1,2,3") from None


def _chosen_token(arguments: argparse.Namespace, name: str, tokenizer: Any) -> int | None:
    text, token_id = getattr(arguments, name), getattr(arguments, f"{name}_id")
    if text is not None and token_id is not None:
        raise RequestError(f"--{name} {text!r} and --{name}-id {token_id} are both given; leave one out")
    return token_id if text is None else single_token(text, tokenizer(), f"--{name}")


def _check_plot(path: str, prompts: int) -> None:
    """One picture, or a folder for one of each kind."""
    if path.endswith(".png"):
        if prompts > 1:
            raise RequestError(f"--plot {path} is one picture of one prompt, and there are {prompts}; name a folder")
        check_plot_target(path)
        return
    if Path(path).exists() and not Path(path).is_dir():
        raise RequestError(f"--plot {path} is neither a name ending in .png nor a folder; choose one")
    # the folder is made when there is something to put into it; its parent must allow that
    check_plot_target(str((Path(path) if Path(path).is_dir() else Path(path).absolute().parent) / "any.png"))


def run(job: Job, arguments: argparse.Namespace) -> None:
    """One rank's part."""
    from tp_residual.lens.run import look

    session = open_session(arguments, job.config)
    group = session.group
    # a chat template may read the clock
    prompts: list[list[int]] = json.loads(group.share("prompts", json.dumps(job.prompts))[0])
    found = look(session.model, prompts, job.request)
    settings = _settings(session, sum(map(len, prompts)), str(arguments.model))
    session.close()  # before rank 0 draws, which can take longer than the others would wait in silence
    if group.rank != 0:
        return
    if arguments.json:
        print(json.dumps(_as_json(job, found, settings), ensure_ascii=False, allow_nan=False))
    else:
        _print(job, found, settings)
    sys.stdout.flush()
    _write(job, arguments, found, settings)


def _settings(session: Session, tokens: int, model: str) -> dict[str, Any]:
    boundary = session.model.boundary_for(tokens)
    return {
        "model": model,
        "tp": session.group.size,
        "device": session.group.device.type,
        "dtype": _dtype(session.model.dtype),
        "stream_dtype": _dtype(boundary.stream_dtype),
        "sequence_parallel": boundary.sequence_parallel,
        "boundary": boundary.executor.name,
        "lens_bytes": _bytes(session.group, lens=True),
        "model_bytes": _bytes(session.group, lens=False),
    }


def _bytes(group: TensorParallelGroup, *, lens: bool) -> int:
    """What this rank put into collectives, for looking or for the pass itself."""
    return sum(count for (tag, _), count in group.counters.bytes.items() if tag.startswith("lens.") == lens)


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _write(job: Job, arguments: argparse.Namespace, found: list[PromptLens], settings: dict[str, Any]) -> None:
    """Raises UserError for a target that can no longer be written."""
    try:
        if arguments.output is not None:
            text = json.dumps(_as_json(job, found, settings), ensure_ascii=False, allow_nan=False, indent=1)
            replace_file(arguments.output, text + "\n")
        if arguments.plot is not None:
            _write_pictures(job, arguments.plot, found, settings)
    except OSError as error:
        raise UserError(f"{error.filename or 'a result'} could not be written: {error.strerror or error}") from error


def _write_pictures(job: Job, path: str, found: list[PromptLens], settings: dict[str, Any]) -> None:
    from tp_residual.lens.plots import one_picture, pictures

    def text(token_id: int) -> str:
        return token_text(job.tokenizer, token_id)

    title = f"{Path(settings['model']).resolve().name}, tp={settings['tp']}, {settings['dtype']}"
    if path.endswith(".png"):
        replace_file(path, one_picture(found[0], text, title))
        return
    Path(path).mkdir(exist_ok=True)
    for number, lens in enumerate(found, 1):
        for name, picture in pictures(lens, text, title).items():
            ending = f"_{number}" if len(found) > 1 else ""
            replace_file(str(Path(path, f"{name}{ending}.png")), picture)


def _as_json(job: Job, found: list[PromptLens], settings: dict[str, Any]) -> dict[str, Any]:
    ids = {token for lens in found for token in (*lens.token_ids, *lens.final_ids, lens.target)}
    ids |= {token for lens in found for s in lens.states for likely in s.window for token, _ in likely.top}
    ids |= {lens.versus for lens in found if lens.versus is not None}
    texts = {str(token): token_text(job.tokenizer, token) for token in sorted(ids)}
    return {"settings": settings, "prompts": [lens.as_json() for lens in found], "token_texts": texts}


# ---- tables ----


def _print(job: Job, found: list[PromptLens], settings: dict[str, Any]) -> None:
    console = Console(width=min(WIDTH, Console().width) if sys.stdout.isatty() else WIDTH)

    def say(text: str, style: str = "") -> None:
        console.print(escape(text), style=style, highlight=False)

    mode = "sequence parallel" if settings["sequence_parallel"] else "tensor parallel"
    say(
        f"{settings['model']}: tp={settings['tp']} ({mode}), {settings['device']}, weights {settings['dtype']}, "
        f"stream {settings['stream_dtype']}, boundary {settings['boundary']}"
    )
    if settings["tp"] > 1:
        say(
            f"collectives, a rank: {settings['model_bytes'] / 1e6:.2f} MB for the pass, {settings['lens_bytes'] / 1e6:.2f} MB to look at it"
        )
    for number, lens in enumerate(found, 1):
        _Prompt(job, lens, console, f"prompt {number} of {len(found)}").print()


class _Prompt:
    """One prompt's tables."""

    def __init__(self, job: Job, lens: PromptLens, console: Console, which: str) -> None:
        self.job, self.lens, self.console, self.which = job, lens, console, which
        self.shown = job.request.shown_layers(job.config)

    def print(self) -> None:
        lens = self.lens
        texts = "|".join(self.token(token) for token in lens.token_ids[-24:])
        more = "...|" if len(lens.token_ids) > 24 else ""
        self.say(f"\n{self.which}, {len(lens.token_ids)} tokens: {more}{texts}")
        self.say(f"predicted after position {lens.position}: {self.token(lens.final_ids[-1])}")
        self.stream()
        self.contributions()
        self.heads()
        self.logit_lens()

    def say(self, text: str, style: str = "") -> None:
        self.console.print(escape(text), style=style, highlight=False)

    def token(self, token_id: int) -> str:
        return visible(token_text(self.job.tokenizer, token_id))

    def short(self, token_id: int, width: int) -> str:
        text = self.token(token_id)
        return escape(text if len(text) <= width else f"{text[: width - 1]}…")

    def table(self, title: str, *columns: str) -> Table:
        table = Table(box=SIMPLE, title=escape(title), title_justify="left", title_style="bold", pad_edge=False)
        for number, name in enumerate(columns):
            table.add_column(escape(name), justify="right" if number else "left", no_wrap=True)
        return table

    def stream(self) -> None:
        lens = self.lens
        over = "all tokens but the first" if len(lens.token_ids) > 1 else "the one token"
        table = self.table(
            f"The stream: rms of x; |u|/|x| and cos(u, x) of each write; cos(x before, x after). Means over {over}",
            "after layer", "rms x", "first", f"at {lens.position}",
            "attn |u|/|x|", "cos", "mlp |u|/|x|", "cos", "in/out cos",
        )  # fmt: skip
        if self.shown.start == 0:
            table.add_row("embedding", *self.norms(0), "", "", "", "", "")
        for layer in self.shown:
            writes = []
            for index in (2 * layer + 1, 2 * layer + 2):
                relative = lens.mean(lens.relative_writes(index))
                writes += [f"{relative:.3f}", f"{lens.mean(lens.writes[index].cosine):+.2f}"]
            in_out = f"{lens.mean(lens.layer_cosine[layer]):.3f}"
            table.add_row(str(layer), *self.norms(2 * layer + 2), *writes, in_out)
        self.console.print(table)

    def norms(self, index: int) -> list[str]:
        lens, norm = self.lens, self.lens.writes[index].norm
        return [f"{lens.rms(value):.3g}" for value in (lens.mean(norm), norm[0], norm[lens.position])]

    def contributions(self) -> None:
        lens, of = self.lens, self.subject()
        table = self.table(
            f"Who wrote the final stream at position {lens.position}, and {of} = {lens.logit:.4f}",
            "layer", "share attn", "mlp", "logit attn", "mlp", "logit so far", "its strongest head",
        )  # fmt: skip
        start = lens.components[0]
        sum_logit = start.logit + lens.norm_bias_logit
        table.add_row("embedding", f"{start.share:+.4f}", "", f"{start.logit:+.3f}", "", f"{sum_logit:+.3f}", "")
        if lens.norm_bias_logit:
            table.add_row("final norm's bias", "", "", f"{lens.norm_bias_logit:+.3f}", "", "", "")
        skipped = 0
        for attention in lens.attentions:
            attn, mlp = (self.component(attention.layer, kind) for kind in ("attention", "mlp"))
            sum_logit += attn.logit + mlp.logit
            if attention.layer not in self.shown:
                skipped += 1
                continue
            head = max(range(len(attention.logits)), key=lambda at: abs(attention.logits[at]))
            table.add_row(
                str(attention.layer), f"{attn.share:+.4f}", f"{mlp.share:+.4f}", f"{attn.logit:+.3f}",
                f"{mlp.logit:+.3f}", f"{sum_logit:+.3f}", f"head {head}: {attention.logits[head]:+.3f}",
            )  # fmt: skip
        table.add_section()
        left = lens.left_over
        shares = math.fsum(c.share for c in lens.components)
        logits = math.fsum(c.logit for c in lens.components) + lens.norm_bias_logit
        table.add_row("sum", f"{shares:.6f}", "", f"{logits:+.5f}", "", "", "")
        over = left.stream_logit + left.head_logit
        table.add_row("left over", f"{left.share:+.1e}", "", f"{over:+.1e}", "", "", "rounding")
        self.console.print(table)
        if skipped:
            self.say(f"the sums include {skipped} layers that are not shown")
        if not left.is_rounding:
            self.say(
                f"the shares leave {left.share:+.2e} over, and rounding explains at most {left.share_bound:.1e}: "
                "this stream is not the sum of what was written to it",
                style="bold red",
            )

    def component(self, layer: int, kind: Any) -> Component:
        return self.lens.by_site[layer, kind]

    def subject(self) -> str:
        lens = self.lens
        name = self.token(lens.target)
        return f"logit of {name}" if lens.versus is None else f"logit of {name} minus {self.token(lens.versus)}"

    def heads(self) -> None:
        lens = self.lens
        every = [(logit, a.layer, head) for a in lens.attentions for head, logit in enumerate(a.logits)]
        every.sort(key=lambda each: -abs(each[0]))
        table = self.table(
            f"Heads with the largest part in the {self.subject()}",
            "layer", "head", "on rank", "logit", "share of the stream", "of its attention",
        )  # fmt: skip
        for logit, layer, head in every[:STRONGEST_HEADS]:
            whole = self.component(layer, "attention").logit
            table.add_row(
                str(layer), str(head), str(lens.head_owners[head]), f"{logit:+.3f}",
                f"{lens.attentions[layer].shares[head]:+.4f}", f"{logit / whole:.0%}" if whole else "",
            )  # fmt: skip
        self.console.print(table)

    def logit_lens(self) -> None:
        lens, columns = self.lens, min(self.job.request.top, 3)
        final = self.token(lens.final_ids[-1])
        table = self.table(
            f"Logit lens at position {lens.position}: what the head makes of each state; KL from it to the whole model's answer",
            "after layer", *(f"{ordinal} likeliest" for ordinal in ("", "2nd", "3rd")[:columns]),
            f"p({final if len(final) <= 10 else 'answer'})", "rank", "KL",
        )  # fmt: skip
        for state in lens.states:
            likely = state.window[-1]
            tops = [f"{self.short(token, 14)} {_probability(value)}" for token, value in likely.top[:columns]]
            table.add_row(
                state.label, *tops, _probability(likely.final_log_prob), f"{likely.final_rank:,}", f"{likely.kl:.3f}"
            )
        self.console.print(table)


def _probability(log_prob: float) -> str:
    probability = math.exp(log_prob)
    return f"{probability:.1%}" if probability >= 0.0005 else "<0.1%"
