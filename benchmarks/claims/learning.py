"""Which connections learn at depth 12 without warm-up: 150 steps on a Markov chain, so bounds are losses after a number of steps."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F

from benchmarks.claims.claim import Bound, Claim, Found
from benchmarks.claims.workload import GROUP, EqualLengths, Markov, decoder
from tp_residual.model.attention_backend import TokenBatch
from tp_residual.parallel.blocks import parameter_blocks
from tp_residual.residual.config import ResidualConfig
from tp_residual.training import clip_grad_norm
from tp_residual.training.init import DeepNorm, InitRule, Normal

HIDDEN, STEPS = 64, 150


@dataclass(frozen=True)
class Setting:
    """preset: `masked` is pre-norm without any skip."""

    preset: str
    layers: int = 12
    lr: float = 3e-3
    clip: float | None = None


@cache
def losses(setting: Setting) -> tuple[float, ...]:
    """One a step. AdamW, betas 0.9 and 0.98, no warm-up."""
    config = ResidualConfig(skip_layers=()) if setting.preset == "masked" else ResidualConfig.preset(setting.preset)
    rule: InitRule = DeepNorm(HIDDEN**-0.5) if setting.preset == "deepnorm" else Normal(HIDDEN**-0.5)
    model = decoder(config, layers=setting.layers, hidden=HIDDEN, rule=rule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.lr, betas=(0.9, 0.98), weight_decay=0.01)
    blocks, found = parameter_blocks(model), []
    for data in Markov().batches(STEPS):
        batch = TokenBatch.prefill(data[:, :-1].tolist())
        loss = F.cross_entropy(model(batch, EqualLengths()).local_logits, data[:, 1:].flatten())
        loss.backward()
        if setting.clip is not None:
            clip_grad_norm(blocks, GROUP, setting.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found.append(loss.item())
    return tuple(found)


def final(setting: Setting) -> float:
    """Mean of the last ten."""
    return sum(losses(setting)[-10:]) / 10


PRE, POST, DEEPNORM, MASKED = (Setting(name) for name in ("pre", "post", "deepnorm", "masked"))
POST_CLIPPED, PRE_CLIPPED = (replace(setting, clip=1.0) for setting in (POST, PRE))
SHALLOW = Setting("post", layers=6, lr=1e-3)

LEARNS, STUCK = Bound(high=1.6), Bound(low=3.0)


def _compare(settings: dict[str, Setting], twins: dict[str, Setting]) -> Callable[[bool], Found]:
    def measure(broken: bool) -> Found:
        used = twins if broken else settings
        return Found(
            {name: final(setting) for name, setting in used.items()},
            {"loss": _scale()} if DEEPNORM in settings.values() and not broken else {},
            {name: list(enumerate(losses(setting), 1)) for name, setting in used.items()},
        )

    return measure


def _scale() -> str:
    task = Markov()
    return f"{task.unigram_entropy:.2f} nats for a model that uses nothing of its input, {task.conditional_entropy:.2f} at best"


_TASK = "loss after 150 steps of AdamW at 3e-3 without warm-up on a Markov chain, L = 12, mean of the last ten"

CLAIMS = [
    Claim(
        "learns",
        "At depth 12, without warm-up and at a rate that pre-norm takes well, post-norm does not learn; DeepNorm does.",
        "S3 4.1; arXiv 2203.00555",
        "right",
        _TASK + ".",
        {"pre": LEARNS, "post": STUCK, "deepnorm": LEARNS},
        "plain post-norm for those that learn, pre-norm for the one that does not",
        _compare({"pre": PRE, "post": POST, "deepnorm": DEEPNORM}, {"pre": POST, "post": PRE, "deepnorm": POST}),
        quick=False,
        has_curves=True,
    ),
    Claim(
        "clipping",
        "Clipping does not rescue it.",
        "S3 5.1; S0 4",
        "wrong",
        "S3 names clipping and AdamW as cures of unstable depth: here AdamW is on, and clipping changes nothing. S0 is right: a residual "
        "connection does not replace initialisation, optimizer and numerics.",
        {"post, clipped at 1": STUCK},
        "pre-norm, clipped alike",
        _compare({"post, clipped at 1": POST_CLIPPED}, {"post, clipped at 1": PRE_CLIPPED}),
        quick=False,
    ),
    Claim(
        "no-skip",
        "Without its skip connections the same decoder learns nothing.",
        "S3 5.2; S0 1",
        "right",
        "pre-norm with every skip masked.",
        {"masked": STUCK},
        "the skips put back",
        _compare({"masked": MASKED}, {"masked": PRE}),
        quick=False,
    ),
    Claim(
        "shallow",
        "Below 12 layers the plain connection is enough.",
        "S3 8",
        "in part",
        "post-norm with L = 6 at a rate of 1e-3. The rate matters as much as the depth, and S3 names none.",
        {"post, L=6, lr 1e-3": LEARNS},
        "12 layers at 3e-3",
        _compare({"post, L=6, lr 1e-3": SHALLOW}, {"post, L=6, lr 1e-3": POST}),
        quick=False,
    ),
]
