"""How fast are a model's own linears, shard by shard? Each distinct shape that a rank holds, at each number of tokens.

Every rank computes its own shard at once; the figure is the slowest rank's. Weights take turns, more of them than the last-level cache
holds, as a model's layers do. Against the slower of two limits: reading the weight once, and its FLOP at the peak of a large product.
"""

from itertools import count

import torch
from torch import Tensor

from tp_residual.bench.limits import Product, read_of, require_product, slower
from tp_residual.bench.machine import flush_bytes
from tp_residual.bench.request import GemmRequest
from tp_residual.bench.results import Row
from tp_residual.bench.timing import Candidate, Clock, Progress
from tp_residual.kernels.linear import PackedWeight, linear, packed_form
from tp_residual.model.config import ModelConfig
from tp_residual.model.layout import ModelLayout

LIMIT = "the slower of reading the weight and its FLOP at the peak of a large product, every rank at once"
_CHECKED_ROWS = 4
_WEIGHT_SEED = 1 << 31  # beyond any number of tokens, which seeds an input; torch takes 32 bits of a seed


def local_shapes(config: ModelConfig, tp_size: int, rank: int) -> dict[str, tuple[int, int]]:
    """`(out_features, in_features)` of a rank's linears by their module's name; of those alike the first."""
    layout, hidden = ModelLayout.of(config, tp_size), config.hidden_size
    queries, key_values = layout.query_rows.size(rank), layout.key_value_rows.size(rank)
    inner = layout.intermediate.size(rank)
    return {
        "qkv_proj": (queries + 2 * key_values, hidden),
        "o_proj": (hidden, queries),
        "gate_up_proj": (2 * inner, hidden),
        "down_proj": (hidden, inner),
        "lm_head": (layout.vocabulary.size(rank), hidden),
    }


def measure_gemm(clock: Clock, request: GemmRequest, progress: Progress) -> tuple[list[Row], list[str]]:
    """`(rows, notes)`: a row for each linear and number of tokens; all of one linear are timed in the same rounds.

    A result is compared with fp64 first: VerificationFailed before anything is timed.
    """
    group, dtype = clock.group, getattr(torch, request.dtype)
    by_rank = [local_shapes(request.config, group.size, rank) for rank in range(group.size)]
    form, reason = packed_form(clock.device, dtype)
    product = Product(clock, dtype)
    rows: list[Row] = []
    measured: dict[tuple[tuple[int, int], ...], str] = {}
    notes = [f"packed weights: {reason}"] if form == "plain" else []
    for done, name in enumerate(by_rank[0]):
        shapes = tuple(shapes[name] for shapes in by_rank)
        if shapes in measured:
            notes.append(f"{name}: it has the shapes of {measured[shapes]}")
            continue
        if empty := [rank for rank, (out, features) in enumerate(shapes) if not out * features]:
            notes.append(f"{name}: ranks {empty} hold none of it")
            continue
        measured[shapes] = name
        progress(done, len(by_rank[0]), name)
        rows += _one_linear(clock, request, name, shapes, product)
    return rows, notes


def _one_linear(
    clock: Clock, request: GemmRequest, name: str, shapes: tuple[tuple[int, int], ...], product: Product
) -> list[Row]:
    group, dtype, device = clock.group, getattr(torch, request.dtype), clock.device
    form, _ = packed_form(device, dtype)
    out, features = shapes[group.rank]
    weights = _Weights(clock, out, features, dtype)
    candidates = {"read": read_of(out * features * dtype.itemsize, device), "product": product.candidate}
    for tokens in request.tokens:
        x = _random(tokens, features, dtype, device, seed=tokens)
        rows = slice(0, _CHECKED_ROWS)
        require_product(clock, f"{name} of {tokens} tokens", weights.linear(x)[rows], x[rows], weights.weight)
        candidates[str(tokens)] = weights.candidate(x)
    samples = clock.interleaved(candidates)
    elements = max(rows * columns for rows, columns in shapes)
    out, features = max(shapes, key=lambda shape: shape[0] * shape[1])
    found: list[Row] = []
    for tokens in request.tokens:
        taken, flops, nbytes = samples[str(tokens)], 2 * tokens * elements, elements * dtype.itemsize
        us = taken.percentile(50)
        found.append(
            {
                "linear": name,
                "out_features": out,
                "in_features": features,
                "tokens": tokens,
                "dtype": request.dtype,
                "form": form,
                "ranks": group.size,
                "threads": torch.get_num_threads(),
                "weight_bytes": nbytes,
                "copies": _copies(nbytes, device),
                "weight_GB_s": nbytes / us / 1e3,
                "flops": flops,
                "TFLOP_s": flops / us / 1e6,
                **clock.fields(taken, LIMIT, slower(samples["read"], product.limit_of(samples["product"], flops))),
            }
        )
    return found


class _Weights:
    """One weight as often as it takes to be read from memory each time, in the form that a model has it."""

    def __init__(self, clock: Clock, out: int, features: int, dtype: torch.dtype) -> None:
        device = clock.device
        form, _ = packed_form(device, dtype)
        self.weight = _random(out, features, dtype, device, seed=_WEIGHT_SEED + clock.group.rank)
        self.copies = _copies(self.weight.numel() * dtype.itemsize, device)
        self._turn = count()
        if form == "plain":
            self._plain = [self.weight.clone() for _ in range(self.copies)]
            self._packed: list[PackedWeight] | None = None
        else:
            self._packed = [PackedWeight(self.weight, form) for _ in range(self.copies)]

    def linear(self, x: Tensor) -> Tensor:
        at = next(self._turn) % self.copies
        if self._packed is None:
            return linear(x, self._plain[at], None)
        return linear(x, self.weight, self._packed[at])

    def candidate(self, x: Tensor) -> Candidate:
        return Candidate(lambda: self.linear(x))


def _copies(nbytes: int, device: torch.device) -> int:
    """So many that when the turn of one comes again, twice the last-level cache has been read since."""
    return 1 + -(-flush_bytes(device) // nbytes)


def _random(rows: int, columns: int, dtype: torch.dtype, device: torch.device, *, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).to(device, dtype)
