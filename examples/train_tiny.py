"""Train a small model on a text, under tensor parallelism: `torchrun --standalone --nproc-per-node 2 examples/train_tiny.py`.

Without torchrun it trains in this one process, to the same losses up to rounding: weights and batches follow from the seed alone, so the
number of ranks and sequence parallelism change who computes what and nothing else. In OUTPUT there are then

    checkpoint/   weights, AdamW's moments, step and losses so far: --resume goes on from it, with any number of ranks
    model/        a model directory: python -m tp_residual generate --model OUTPUT/model --prompt "On the "
    loss.json     settings and the loss, gradient norm and speed of every step
    loss.png      the same as a picture (needs matplotlib)
"""

import argparse
import hashlib
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from tp_residual.bench.results import replace_file
from tp_residual.checkpoint.save import save_sharded, save_whole
from tp_residual.checkpoint.state import Manifest, load_training
from tp_residual.cli.launch import TimeLimits, leave, open_group, prepare_rank, under_launcher
from tp_residual.errors import CollectiveError, TrainingError, UserError
from tp_residual.inference.generate import generate
from tp_residual.inference.request import GenerationSettings, SamplingSettings
from tp_residual.model.attention_backend import NoCache, TokenBatch
from tp_residual.model.config import ModelConfig
from tp_residual.model.config_values import config_values
from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.blocks import parameter_blocks, sync_gradients
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.splits import check_heads
from tp_residual.residual.config import PRESETS
from tp_residual.training import (
    GPT2,
    DeepNorm,
    Fixup,
    RebuiltReads,
    attach,
    checkpoint_layers,
    chunked_cross_entropy,
    clip_grad_norm,
    final_hidden,
    init_weights,
    require_finite,
)

TEXT = Path(__file__).parent / "data" / "harbour.txt"
VOCABULARY = 256  # a token is a byte
HELD_OUT = 10  # one part in so many, the text's end, is not trained on
EVALUATED = 16  # windows of it
WARM_UP = 20  # steps
LAST = 20  # the steps whose mean is "the training loss at the end"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    speaks = int(os.environ.get("LOCAL_RANK", "0")) == 0
    if under_launcher():
        prepare_rank()
    torch.set_num_threads(1)  # these matrices are too small to be divided further
    group = None
    try:
        text = read_text(Path(arguments.text), arguments.context)
        config = model_config(arguments)
        check_heads(config.num_attention_heads, int(os.environ.get("WORLD_SIZE", "1")))
        others = [read_other(Path(folder), settings_of(arguments, text)) for folder in arguments.against]
        group = open_group(arguments.device, TimeLimits())
        speaks = group.rank == 0
        digest = hashlib.sha256(text).hexdigest()[:16]
        group.require_agreement("the command", vars(arguments) | {"the digest of their texts": digest})
        group.enter_phase("step")
        run = Run.begin(arguments, config, text, group)
        try:
            run.train()
        finally:
            run.report(others)
        run.finish()
        group.share("done", "")  # the side channel lives in rank 0: nobody leaves while another still reads it
        group.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    except (UserError, TrainingError, CollectiveError) as error:
        if speaks:
            print(f"train_tiny: {error}", file=sys.stderr)
        if group is None or group.size == 1:
            return 2 if isinstance(error, UserError) else 1
        leave(2 if isinstance(error, UserError) else 1, shared_error=True)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("train_tiny.py", description="train a small model on a text, byte by byte")
    parser.add_argument("--text", default=str(TEXT), metavar="FILE", help="any file; the shipped text unless given")
    parser.add_argument("--output", default="train_tiny_out", metavar="DIR")
    parser.add_argument("--resume", action="store_true", help="go on from OUTPUT/checkpoint, with any number of ranks")
    parser.add_argument("--residual", default="pre", metavar="PRESET", help=", ".join(PRESETS))
    parser.add_argument("--sequence-parallel", choices=("on", "off"), default="off")
    parser.add_argument(
        "--recompute", choices=("none", "reads", "layers"), default="none", help="keep less for backward"
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8, help="windows a step")
    parser.add_argument("--context", type=int, default=128, help="bytes a window")
    parser.add_argument("--lr", type=float, default=1e-3, help="the largest; warms up, then falls as 1/sqrt(step)")
    parser.add_argument("--clip", type=float, default=1.0, help="the largest gradient norm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "float64", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    parser.add_argument(
        "--against", nargs="*", default=[], metavar="DIR", help="other runs' OUTPUT, to compare losses with"
    )
    arguments = parser.parse_args(argv)
    for name in ("steps", "batch", "context", "save_every", "layers"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(arguments, name)} must be at least 1")
    for name in ("lr", "clip"):
        if not 0 < getattr(arguments, name) < math.inf:
            parser.error(f"--{name} {getattr(arguments, name)} must be a finite number above 0")
    return arguments


# ---- data: bytes of a file


def read_text(file: Path, context: int) -> bytes:
    """Raises UserError for a file that cannot be read or is too short to train and to hold something out."""
    try:
        text = file.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the text {file}: {error.strerror}; give a readable file with --text") from error
    needed = HELD_OUT * (context + 1)
    if len(text) < needed:
        raise UserError(
            f"the text {file} has {len(text)} bytes, and --context {context} needs at least {needed}: one part in {HELD_OUT} is held "
            "out; give a longer text or a smaller --context"
        )
    return text


def unigram_entropy(text: bytes) -> float:
    """In nats a byte: the loss of the best model that looks at no context."""
    return -sum(count / len(text) * math.log(count / len(text)) for count in Counter(text).values())


@dataclass(frozen=True)
class Data:
    train: Tensor
    held_out: Tensor

    @classmethod
    def of(cls, text: bytes) -> "Data":
        ids = torch.tensor(list(text))
        border = len(ids) - len(ids) // HELD_OUT
        return cls(ids[:border], ids[border:])

    def batch(self, seed: int, step: int, count: int, context: int, device: torch.device) -> tuple[TokenBatch, Tensor]:
        """What step `step` trains on: a function of seed and step, so that every rank knows it and nothing has to be saved."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.train) - context, (count,), generator=generator)
        return windows(self.train, starts.tolist(), context, device)

    def evaluation(self, context: int, device: torch.device) -> tuple[TokenBatch, Tensor]:
        starts = range(0, len(self.held_out) - context, context)[:EVALUATED]
        return windows(self.held_out, list(starts), context, device)


def windows(ids: Tensor, starts: list[int], context: int, device: torch.device) -> tuple[TokenBatch, Tensor]:
    """The windows that begin there, and for each of their bytes the next one."""
    cut = torch.stack([ids[start : start + context + 1] for start in starts])
    return TokenBatch.prefill(cut[:, :-1].tolist(), device), cut[:, 1:].reshape(-1).to(device)


# ---- the model


def model_config(arguments: argparse.Namespace) -> ModelConfig:
    """Four heads over two key-value heads: even at tp 1, 2 and 4, uneven at 3."""
    return ModelConfig.from_dict(
        {
            "model_type": "llama",
            "hidden_size": arguments.hidden,
            "intermediate_size": arguments.hidden * 8 // 3,
            "num_hidden_layers": arguments.layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": max(512, 2 * arguments.context),
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": None,
            "residual": arguments.residual,
            "dtype": arguments.dtype,
        },
        "the options of train_tiny.py",
    )


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Each byte is the token of its value; bytes that are no characters of their own are spelled as in GPT-2's tokenizer."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    spelled = {byte: chr(byte) if byte in printable else chr(next(others)) for byte in range(256)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={text: byte for byte, text in spelled.items()}, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return made


def settings_of(arguments: argparse.Namespace, text: bytes) -> dict[str, Any]:
    """What makes two runs the same run. Ranks, sequence parallelism and recomputation do not, nor where it stops."""
    names = ("residual", "batch", "context", "lr", "clip", "seed", "hidden", "layers", "dtype")
    return {"text": hashlib.sha256(text).hexdigest()[:16]} | {name: getattr(arguments, name) for name in names}


def refuse_other_settings(folder: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    for name, value in ours.items():
        if theirs.get(name) != value:
            raise UserError(
                f"{folder} is of another run: {name} is {theirs.get(name)} there and {value} here; give it the same, or another folder"
            )


def read_other(folder: Path, ours: dict[str, Any]) -> dict[str, Any]:
    """Another run's loss.json. Raises UserError for one that cannot be read, or is of other settings."""
    try:
        found = json.loads((folder / "loss.json").read_text())
        theirs, _ = found["settings"], found["losses"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--against {folder}: no loss.json that can be read ({type(error).__name__}: {error}); give the --output of another run"
        ) from error
    refuse_other_settings(folder, theirs, ours)
    return {"folder": str(folder)} | found


# ---- a run


@dataclass
class Run:
    """One rank's side of a training run. losses, norms: by step, of the steps that are done, resumed ones included."""

    arguments: argparse.Namespace
    settings: dict[str, Any]
    config: ModelConfig
    text: bytes
    data: Data
    group: TensorParallelGroup
    model: CausalLM
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    speed: float = 0.0
    saved_step: int | None = None

    @classmethod
    def begin(
        cls, arguments: argparse.Namespace, config: ModelConfig, text: bytes, group: TensorParallelGroup
    ) -> "Run":
        folder, settings = Path(arguments.output) / "checkpoint", settings_of(arguments, text)
        state = None
        if arguments.resume:
            state = Manifest.read(folder).state
            refuse_other_settings(folder, state.get("settings", {}), settings)
        elif folder.exists():
            raise UserError(f"{folder} holds a run already; add --resume to go on, or give another --output")
        dtype = getattr(torch, arguments.dtype)
        model = CausalLM(config, group, dtype=dtype, sequence_parallel=arguments.sequence_parallel)
        rule = {"deepnorm": DeepNorm(), "none": Fixup()}.get(arguments.residual, GPT2())
        init_weights(model, rule, arguments.seed, num_layers=config.num_hidden_layers)
        if arguments.recompute == "layers":
            checkpoint_layers(model.model.layers)
        matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95)
        )
        attach(model, optimizer, group)
        run = cls(arguments, settings, config, text, Data.of(text), group, model, optimizer)
        if state is not None:
            loaded = load_training(folder, parameter_blocks(model), group, optimizer=optimizer)
            run.losses, run.norms = state["losses"], state["norms"]
            run.held_out = [(step, loss) for step, loss in state["held_out"]]
            run.saved_step = run.step
            if group.rank == 0:
                print(f"resumed at step {run.step}, saved by {loaded.tp_size} ranks, on {group.size}")
        return run

    @property
    def step(self) -> int:
        """How many are done: where the data goes on, too."""
        return len(self.losses)

    def train(self) -> None:
        """Until --steps. Raises TrainingError for a NaN, naming the last good checkpoint."""
        try:
            with progress_bar(self.group.rank == 0, self.arguments.steps, self.step) as show:
                while self.step < self.arguments.steps:
                    began = time.perf_counter()
                    self.one_step()
                    seconds = time.perf_counter() - began
                    tokens_per_s = self.arguments.batch * self.arguments.context / seconds
                    self.speed = tokens_per_s if not self.speed else 0.9 * self.speed + 0.1 * tokens_per_s
                    show(self.step, self.losses[-1], self.speed)
                    if self.step % self.arguments.save_every == 0 and self.step < self.arguments.steps:
                        self.save()
            if self.saved_step != self.step:
                self.save()
        except TrainingError as error:
            kept = f"the last good checkpoint, of step {self.saved_step}, is kept in {self.arguments.output}/checkpoint"
            none = "nothing had been saved yet: see --save-every"
            raise TrainingError(f"{error}; {none if self.saved_step is None else kept}") from error

    def one_step(self) -> None:
        arguments, model = self.arguments, self.model.train()
        number = self.step + 1
        batch, targets = self.data.batch(arguments.seed, number, arguments.batch, arguments.context, self.group.device)
        model.set_step(arguments.seed, number)
        for options in self.optimizer.param_groups:
            options["lr"] = arguments.lr * min(number / WARM_UP, (WARM_UP / number) ** 0.5)
        if arguments.recompute == "reads":
            with RebuiltReads(model) as reads:
                hidden, _ = final_hidden(model, batch, NoCache(), taps=(reads,))
        else:
            hidden, _ = final_hidden(model, batch, NoCache())
        loss = chunked_cross_entropy(hidden, model.lm_head, targets)
        loss.backward()
        blocks = parameter_blocks(model)
        sync_gradients(blocks, self.group)
        norm = clip_grad_norm(blocks, self.group, arguments.clip)
        require_finite(norm, blocks, self.group, step=number)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))
        self.norms.append(float(norm))

    @torch.no_grad()
    def evaluate(self) -> float:
        """The loss on the text's end, with nothing dropped at random."""
        batch, targets = self.data.evaluation(self.arguments.context, self.group.device)
        self.model.eval()
        hidden, _ = final_hidden(self.model, batch, NoCache())
        return float(chunked_cross_entropy(hidden, self.model.lm_head, targets))

    def save(self) -> None:
        loss = self.evaluate()
        if not math.isfinite(loss):
            raise TrainingError(f"step {self.step}: the weights give a loss of {loss} on the held-out text")
        self.held_out.append((self.step, loss))
        state = {"settings": self.settings, "losses": self.losses, "norms": self.norms, "held_out": self.held_out}
        folder = Path(self.arguments.output) / "checkpoint"
        save_sharded(folder, parameter_blocks(self.model), self.group, optimizer=self.optimizer, state=state)
        self.saved_step = self.step

    def report(self, others: list[dict[str, Any]]) -> None:
        """loss.json and loss.png, by rank 0, of whatever has been done."""
        if self.group.rank != 0:
            return
        entropy = unigram_entropy(self.text)
        output = Path(self.arguments.output)
        output.mkdir(parents=True, exist_ok=True)
        last = self.losses[-LAST:]
        result = {
            "settings": self.settings,
            "ranks": self.group.size,
            "sequence_parallel": self.arguments.sequence_parallel,
            "recompute": self.arguments.recompute,
            "unigram_entropy": entropy,
            "loss_at_the_end": sum(last) / len(last) if last else None,
            "held_out": self.held_out,
            "tokens_per_s": self.speed,
            "losses": self.losses,
            "norms": self.norms,
        }
        replace_file(str(output / "loss.json"), json.dumps(result, indent=1) + "\n")
        for other in others:
            pairs = list(zip(self.losses, other["losses"], strict=False))
            largest = max((abs(a - b) for a, b in pairs), default=0.0)
            print(
                f"largest difference of a loss from {other['folder']} (tp {other['ranks']}): {largest:.2g} in {len(pairs)} steps"
            )
        try:
            draw(result, others, str(output / "loss.png"))
        except ModuleNotFoundError as error:
            print(f"no plot: {error}; the numbers are in {output}/loss.json", file=sys.stderr)

    def finish(self) -> None:
        """The model for everybody, a sample, and the verdict."""
        output, group = Path(self.arguments.output), self.group
        save_whole(
            output / "model",
            parameter_blocks(self.model),
            group,
            config=config_values(self.config),
            files={"tokenizer.json": byte_tokenizer().to_str()},
        )
        self.model.requires_grad_(False).eval()
        prompt = self.data.held_out[:16].tolist()
        sampling = SamplingSettings(temperature=0.7, seed=self.arguments.seed)
        (sample,) = generate(self.model, [prompt], group, GenerationSettings(max_new_tokens=200, sampling=sampling))
        if group.rank != 0:
            return
        entropy, training = unigram_entropy(self.text), sum(self.losses[-LAST:]) / len(self.losses[-LAST:])
        step, held_out = self.held_out[-1]
        continued = bytes(sample.token_ids).decode(errors="replace")
        print(f"a sample, after {bytes(prompt).decode(errors='replace')!r}:\n{continued}\n")
        print(f"unigram entropy of the text  {entropy:.4f} nats a byte")
        print(f"training loss, last {LAST} steps  {training:.4f}, {entropy - training:.4f} below")
        print(f"held-out loss at step {step:<6} {held_out:.4f}, {entropy - held_out:.4f} below")
        print(f"{self.speed:.0f} tokens/s on {group.size} ranks; written to {output}: checkpoint/, model/, loss.json")


@contextmanager
def progress_bar(shown: bool, steps: int, done: int) -> Iterator[Any]:
    """A function of (step, loss, tokens/s): a bar on a terminal, a line now and then elsewhere, nothing on other ranks."""
    console = Console(stderr=True)
    if not shown or not console.is_terminal:
        every = max(1, steps // 10)

        def line(step: int, loss: float, speed: float) -> None:
            if shown and (step % every == 0 or step == steps):
                print(f"step {step}/{steps}  loss {loss:.4f}  {speed:.0f} tokens/s", file=sys.stderr, flush=True)

        yield line
        return
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TextColumn("{task.fields[speed]:.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=steps, completed=done, loss=math.nan, speed=0.0)
        yield lambda step, loss, speed: progress.update(task, completed=step, loss=loss, speed=speed)


def draw(result: dict[str, Any], others: list[dict[str, Any]], path: str) -> None:
    """The losses over the steps; beside them, where there are other runs, how far theirs are away."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * (2 if others else 1), 4.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2 if others else 1, squeeze=False)[0]
    losses, entropy = result["losses"], result["unigram_entropy"]
    steps = range(1, len(losses) + 1)
    axes[0].plot(steps, losses, linewidth=0.8, alpha=0.8, label="training, each step")
    if result["held_out"]:
        axes[0].plot(*zip(*result["held_out"], strict=True), "o-", markersize=4, label="held-out text")
    axes[0].axhline(entropy, color="grey", linestyle="--", linewidth=1, label=f"unigram entropy {entropy:.3f}")
    axes[0].axhline(entropy - 0.5, color="grey", linestyle=":", linewidth=1, label="0.5 nats below")
    axes[0].set(
        xlabel="step", ylabel="nats a byte", title=f"{describe(result)}, residual {result['settings']['residual']}"
    )
    axes[0].grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    for other in others:
        differences = (abs(a - b) for a, b in zip(losses, other["losses"], strict=False))
        largest = [each or math.nan for each in accumulate(differences, max)]  # equal bits have no place on a log axis
        axes[1].plot(range(1, len(largest) + 1), largest, linewidth=1.2, label=describe(other))
    if others:
        axes[1].set_yscale("log")
        name = result["settings"]["dtype"]
        axes[1].set(
            xlabel="step",
            ylabel="nats a byte",
            title=f"largest difference so far from the losses of {describe(result)}, {name}",
        )
        axes[1].grid(alpha=0.3)
        axes[1].legend(fontsize=8)
    figure.savefig(path, format="png")


def describe(result: dict[str, Any]) -> str:
    return f"tp {result['ranks']}{', sequence parallel' if result['sequence_parallel'] == 'on' else ''}"


if __name__ == "__main__":
    sys.exit(main())
