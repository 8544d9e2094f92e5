"""What a model's step is held against: a plain read of as many bytes, and a matrix product in the weights' own dtype at its best size.

Both are candidates, to be sampled in the same rounds as what they are the limit of, on every rank at once.
"""

from itertools import count

import torch

from tp_residual.bench.machine import flush_bytes
from tp_residual.bench.timing import Candidate, Clock, Samples
from tp_residual.kernels.linear import PackedWeight, empty_on_huge_pages, linear, packed_form

_LEAST_READ_BYTES = 64 * 2**20
# tokens and side of the square weight: of some sizes tried, the one at which the packed linears are fastest; what a GPU is busy with
_PRODUCT = {"cpu": (256, 1024), "cuda": (4096, 8192)}


def read_of(nbytes: int, device: torch.device) -> Candidate:
    """One pass over so many bytes of an array larger than the caches, going on where the last ended: a step's weights, and nothing else.

    torch's sum in fp32, by torch's threads: as fast as the C library's search, and it writes nothing.
    """
    size = 4  # of an element
    wanted = max(1, nbytes // size)
    total = max(wanted, (_LEAST_READ_BYTES + 2 * flush_bytes(device)) // size)
    array = (
        empty_on_huge_pages(total, torch.float32)
        if device.type == "cpu"
        else torch.empty(total, dtype=torch.float32, device=device)
    )
    array.fill_(1.0)
    windows = [array[first : first + wanted] for first in range(0, total - wanted + 1, wanted)]
    turn = count()
    return Candidate(lambda: windows[next(turn) % len(windows)].sum())


class Product:
    """A linear over many tokens, packed as the model's are. flops: of one call."""

    def __init__(self, clock: Clock, dtype: torch.dtype) -> None:
        """Checked against fp64 on its first rows: raises VerificationFailed on every rank."""
        device = clock.device
        tokens, side = _PRODUCT[device.type]
        self.flops = 2 * tokens * side * side
        generator = torch.Generator().manual_seed(clock.group.rank)
        x, weight = (torch.randn(rows, side, generator=generator).to(device, dtype) for rows in (tokens, side))
        form, _ = packed_form(device, dtype)
        packed = None if form == "plain" else PackedWeight(weight, form)
        found = linear(x[:8], weight, packed)
        require_product(clock, f"a product of {tokens} x {side} x {side}", found, x[:8], weight)
        self.candidate = Candidate(lambda: linear(x, weight, packed))

    def limit_of(self, samples: Samples, flops: float) -> Samples:
        """What `flops` would have taken at the speed of these samples."""
        return samples.scaled(flops / self.flops)


def require_product(clock: Clock, what: str, found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Raises VerificationFailed on every rank unless `found` is x @ weight.T."""
    right = x.double() @ weight.double().T
    # operands of standard deviation 1: the sum's own size is sqrt(features), rounded once from fp32, which loses a bit a doubling at most
    tolerance = max(2**-10, 4 * torch.finfo(found.dtype).eps) * max(1, x.shape[1]) ** 0.5
    wrong = int((~((found.double() - right).abs() <= tolerance)).sum())
    clock.require_correct(f"{what} in {str(found.dtype).removeprefix('torch.')}", wrong)


def slower(a: Samples, b: Samples) -> Samples:
    """By round, the longer of two limits: both must be met. Where a sample of one was dropped its median stands, since of three that each
    have dropped fewer than half no round need be common.
    """
    medians = a.percentile(50), b.percentile(50)
    us = tuple(
        max(median if one is None else one for one, median in zip(pair, medians, strict=True))
        for pair in zip(a.us, b.us, strict=True)
    )
    ranks = tuple(max(x, y) for x, y in zip(a.rank_p50_us, b.rank_p50_us, strict=True))
    return Samples(us, ranks, a.calls, a.late)
