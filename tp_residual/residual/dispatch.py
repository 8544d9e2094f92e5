"""Which executor answers how many bytes: several behind one, and the formula where nothing was measured."""

import math
from collections.abc import Sequence

from torch import Tensor

from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.splits import Split
from tp_residual.residual.request import BoundaryRequest, Executor

# Seconds and bytes a second of a call over S bytes, from published timings of 8 H100 with NVLink: a two-shot kernel over peers' memory;
# NCCL's all-reduce followed by a fused add+norm, whose four passes it adds.
_SYMMETRIC = 9.7e-6, 150e9
_LIBRARY = 24e-6 + 6.8e-6, 1 / (1 / 210e9 + 4 / 3.0e12)


def symmetric_limit_bytes() -> float:
    """Size of `[tokens, hidden]` from which the library's collective and a separate add+norm are the faster way."""
    (fixed, rate), (library_fixed, library_rate) = _SYMMETRIC, _LIBRARY
    return math.inf if rate >= library_rate else (library_fixed - fixed) / (1 / rate - 1 / library_rate)


class BySize:
    """Several executors, each for the calls up to a size in bytes of `[tokens, hidden]`; the last for all larger ones.

    The choice is a pure function of the size, which all ranks share. ordered: only if all of them are.
    """

    def __init__(self, ranges: Sequence[tuple[float, Executor]]) -> None:
        assert ranges and math.isinf(ranges[-1][0])
        self.ranges = tuple(ranges)
        self.ordered = all(executor.ordered for _, executor in ranges)
        self.name = ", ".join(
            executor.name if math.isinf(limit) else f"{executor.name} up to {limit:.3g} bytes"
            for limit, executor in ranges
        )

    def supports(self, request: BoundaryRequest, group: TensorParallelGroup) -> str | None:
        reasons = (executor.supports(request, group) for _, executor in self.ranges)
        return next((reason for reason in reasons if reason), None)

    def run(
        self,
        request: BoundaryRequest,
        group: TensorParallelGroup,
        tag: str,
        tokens: Split,
        residual: Tensor | None,
        partial: Tensor | None,
        bias: Tensor | None,
        weight: Tensor | None,
        norm_bias: Tensor | None,
        update_weight: Tensor | None = None,
        update_norm_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        given = partial if partial is not None else residual
        assert given is not None
        nbytes = tokens.total * given.shape[-1] * request.stream_dtype.itemsize
        executor = next(executor for limit, executor in self.ranges if nbytes <= limit)
        operands = residual, partial, bias, weight, norm_bias, update_weight, update_norm_bias
        return executor.run(request, group, tag, tokens, *operands)
