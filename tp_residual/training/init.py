"""Initialisation by rule, with the same bits at any tp size: each element is a function of (seed, tensor name, global index).

A rule says a standard deviation or a constant for each tensor, from its role, its global shape and the model's depth. The shares of a
tensor have its standard deviation, never one of their own: the fan-in of a shard is not the layer's.

`writers` are the row-parallel projections whose output joins the residual stream (`o_proj`, `down_proj`); `branch` is every matrix
of a sublayer, writers included. Embedding, head, norms (weight 1, bias 0) and biases (0) are as usual unless a rule says otherwise.
"""

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from torch import nn

from tp_residual.checkpoint.random_weights import Fill, fill_random
from tp_residual.errors import UserError
from tp_residual.parallel.blocks import DeclaresBlocks, ParameterBlock
from tp_residual.parallel.linear import ColumnParallelLinear, RowParallelLinear
from tp_residual.parallel.vocabulary import VocabParallelEmbedding, VocabParallelHead
from tp_residual.residual.norms import RMSNorm


class Role(StrEnum):
    EMBEDDING = "embedding"
    HEAD = "head"
    PROJECTION = "projection"  # column-parallel: into a sublayer
    WRITER = "writer"  # row-parallel: out of it, onto the stream
    NORM = "norm"
    BIAS = "bias"


@dataclass(frozen=True)
class Target:
    """One checkpoint tensor to fill. shape: the whole tensor's, `[out_features, in_features]`. layers: of the model."""

    name: str
    role: Role
    shape: tuple[int, ...]
    layers: int

    def is_projection(self, *names: str) -> bool:
        return self.name.endswith(tuple(f"{name}.weight" for name in names))


class InitRule(Protocol):
    """How matrices begin; `init_weights` fills norms and biases before a rule is asked."""

    def matrix(self, target: Target) -> Fill: ...


@dataclass(frozen=True)
class Normal:
    """Every matrix has standard deviation `std`."""

    std: float = 0.02

    def matrix(self, target: Target) -> Fill:
        return Fill(scale=self.std)


@dataclass(frozen=True)
class GPT2:
    """Writers have `std / sqrt(N)` with N = 2L adds to the stream (adds: another number of them): its variance does not grow with depth."""

    std: float = 0.02
    adds: int | None = None

    def matrix(self, target: Target) -> Fill:
        adds = self.adds if self.adds is not None else 2 * target.layers
        return Fill(scale=self.std / adds**0.5 if target.role is Role.WRITER else self.std)


@dataclass(frozen=True)
class VarianceOverRootN:
    """The *variance* is divided by `sqrt(N)`, N the number of layers: the standard deviation by `N^(1/4)`, half-way to GPT-2's rule.

    whole_branch: of every matrix of a sublayer, and not of its writer alone.
    """

    std: float = 0.02
    whole_branch: bool = False

    def matrix(self, target: Target) -> Fill:
        scaled = target.role is Role.WRITER or (self.whole_branch and target.role is Role.PROJECTION)
        return Fill(scale=self.std * target.layers**-0.25 if scaled else self.std)


@dataclass(frozen=True)
class Fixup:
    """arXiv 1901.09321, for models without norms: branch matrices times `B^(-1/(2m-2))`, B = 2L branches of m = 2 matrices in a row,
    so `1 / sqrt(2L)`; the last of each branch (the writer) and an untied head are zero.
    """

    std: float = 0.02

    def matrix(self, target: Target) -> Fill:
        if target.role in (Role.WRITER, Role.HEAD):
            return Fill()
        return Fill(scale=self.std * (2 * target.layers) ** -0.5 if target.role is Role.PROJECTION else self.std)


@dataclass(frozen=True)
class DeepNorm:
    """arXiv 2203.00555, decoder only: value, writers and the MLP's matrices times `beta = (8L)^(-1/4)`; query and key are not scaled.

    std: of a matrix before that; None: Xavier's, `sqrt(2 / (fan_in + fan_out))` of the whole tensor, for a sublayer's matrices, and
    0.02 for embedding and head. The stream's skip scale, `(2L)^(1/4)`, is the residual connection's.
    """

    std: float | None = None

    def matrix(self, target: Target) -> Fill:
        in_branch = target.role in (Role.PROJECTION, Role.WRITER)
        std = self.std
        if std is None:
            std = (2 / sum(target.shape)) ** 0.5 if in_branch else 0.02
        scaled = in_branch and not target.is_projection("q_proj", "k_proj")
        return Fill(scale=std * (8 * target.layers) ** -0.25 if scaled else std)


@dataclass(frozen=True)
class ZeroWriters:
    """Writers are zero: the stream leaves the last layer bit for bit as the embedding began it."""

    std: float = 0.02

    def matrix(self, target: Target) -> Fill:
        return Fill() if target.role is Role.WRITER else Fill(scale=self.std)


Rule = Normal | GPT2 | VarianceOverRootN | Fixup | DeepNorm | ZeroWriters

RULES: dict[str, type[Rule]] = {
    "normal": Normal,
    "gpt2": GPT2,
    "variance_over_root_n": VarianceOverRootN,
    "fixup": Fixup,
    "deepnorm": DeepNorm,
    "zero_writers": ZeroWriters,
}


def init_weights(
    model: nn.Module, rule: InitRule, seed: int, *, num_layers: int, overrides: Mapping[str, Fill] | None = None
) -> dict[str, Fill]:
    """Fill the parallel linears, embeddings, heads and norms of `model`; what it did, by checkpoint tensor name.

    overrides: by name, or a pattern as of a file (`*.o_proj.weight`), before the rule; also for parameters of other modules, which
    otherwise keep what they were made with. Raises UserError for an override that fits no tensor. Every rank calls it alike.
    """
    if isinstance(rule, str):
        raise UserError(f"rule={rule!r} is a name; pass a rule, RULES[{rule!r}](...), of {', '.join(RULES)}")
    if num_layers < 1:
        raise UserError(f"num_layers={num_layers} must be at least 1")
    overrides = dict(overrides or {})
    unused = set(overrides)
    fills: dict[str, Fill] = {}
    chosen: list[ParameterBlock] = []
    for block, role, start in _blocks_with_roles(model):
        pattern = next((each for each in overrides if fnmatch.fnmatchcase(block.name, each)), None)
        if pattern is not None:
            unused.discard(pattern)
            fills[block.name] = overrides[pattern]
        elif role in (Role.NORM, Role.BIAS):
            fills[block.name] = Fill(mean=start)
        elif role is not None:
            fills[block.name] = rule.matrix(Target(block.name, role, block.global_shape, num_layers))
        else:
            continue
        chosen.append(block)
    if unused:
        raise UserError(f"overrides for {', '.join(map(repr, sorted(unused)))} fit no tensor of the model")
    fill_random(chosen, seed, rule=lambda block: fills[block.name])
    return fills


def _blocks_with_roles(model: nn.Module) -> Iterable[tuple[ParameterBlock, Role | None, float]]:
    """Every block, its role and the constant that a norm or a bias begins with."""
    for path, module in model.named_modules():
        if not isinstance(module, DeclaresBlocks):
            continue
        for block in module.declare_blocks(f"{path}." if path else ""):
            role = _role(module, block)
            one = 1.0 - module.spec.weight_offset if isinstance(module, RMSNorm) else 1.0
            yield block, role, one if role is Role.NORM else 0.0


def _role(module: object, block: ParameterBlock) -> Role | None:
    known: dict[type, Role] = {
        ColumnParallelLinear: Role.PROJECTION,
        RowParallelLinear: Role.WRITER,
        VocabParallelEmbedding: Role.EMBEDDING,
        VocabParallelHead: Role.HEAD,
        RMSNorm: Role.NORM,
    }
    role = next((role for kind, role in known.items() if isinstance(module, kind)), None)
    return Role.BIAS if role is not None and block.name.endswith(".bias") else role
