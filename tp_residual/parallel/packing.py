"""Linears of a model for inference: their weights packed once (`kernels/linear.py`), which then stand in the weights' place.

One object decides for the whole model, says what it decided, and is asked again by nobody.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tp_residual.kernels.linear import Form, PackedWeight, empty_on_huge_pages, packed_form, panel_elements
from tp_residual.parallel.linear import ColumnParallelLinear, RowParallelLinear
from tp_residual.parallel.vocabulary import VocabParallelHead

logger = logging.getLogger("tp_residual")

_ALIGNED = 64  # elements: each weight begins a cache line

PACKABLE = ColumnParallelLinear, RowParallelLinear, VocabParallelHead


@dataclass(frozen=True)
class PackingReport:
    """form, and why that one; nbytes: of all packed copies on this rank; extra_bytes: of those whose weight stays beside them."""

    form: Form
    reason: str
    nbytes: int = 0
    extra_bytes: int = 0

    def __str__(self) -> str:
        size = f", {self.nbytes / 1e6:.0f} MB a rank" if self.nbytes else ""
        return f"{self.form}{size} ({self.reason})"


def pack_weights(model: nn.Module, device: torch.device, dtype: torch.dtype) -> PackingReport:
    """Pack every linear, one after the other, and give each weight's memory back: no more than one is held twice.

    A tied head's weight stays, since the embedding looks rows up in it. Afterwards the other weights are on `meta`: they keep name, shape
    and dtype, and whatever would still compute with one raises. For inference: nothing can be trained, saved or audited any more.
    """
    form, reason = packed_form(device, dtype)
    if form == "plain":
        return PackingReport(form, reason)
    nbytes = extra = 0
    memory: Iterator[Tensor] = iter(())
    if form == "panels":
        # one mapping for all: alone, most weights of a small model would be too small for a huge page
        counts = [-(-panel_elements(module.weight) // _ALIGNED) * _ALIGNED for module in linears(model)]
        memory = iter(empty_on_huge_pages(sum(counts), dtype).split(counts))
    for module in linears(model):
        place = next(memory)[: panel_elements(module.weight)] if form == "panels" else None
        packed = module.packed = PackedWeight(module.weight.detach(), form, place)
        nbytes += packed.nbytes
        if isinstance(module, VocabParallelHead) and module.tied:
            extra += packed.nbytes
        else:
            module.weight = nn.Parameter(module.weight.detach().to("meta"), requires_grad=False)
    return PackingReport(form, reason, nbytes, extra)


@contextmanager
def packed_weights(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[PackingReport]:
    """Within it the model computes with packed copies, and keeps its weights: for checks of the very path that `pack_weights` takes."""
    form, reason = packed_form(device, dtype)
    try:
        if form != "plain":
            for module in linears(model):
                module.packed = PackedWeight(module.weight.detach(), form)
        yield PackingReport(form, reason)
    finally:
        for module in linears(model):
            module.packed = None


def linears(model: nn.Module) -> Iterator[ColumnParallelLinear | RowParallelLinear | VocabParallelHead]:
    for module in model.modules():
        if isinstance(module, PACKABLE):
            yield module
