"""Dropout whose masks no generator remembers: an element's fate is a function of (seed, step, site, its index in the whole tensor).

So a mask is the same on every rank that holds the element and at any tp size, under sequence parallelism as without it, and in the
recomputation of a checkpointed layer; shards of tokens or heads get different masks because they are different elements. Nothing has
to be saved, restored or forked.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tp_residual.checkpoint.random_weights import element_index, stream_key, uniform_bits
from tp_residual.errors import LayoutError, UserError
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.partial import Partial
from tp_residual.parallel.splits import Split


@dataclass(frozen=True)
class DropoutStream:
    """The masks of one step. An immutable value: a layer that closes over it draws the same masks when it is recomputed.

    p: the share of elements that become zero; the others are multiplied by `1 / (1 - p)`. replica: of data parallelism, whose tokens
    are others. Each `site` names one place in the model; two with one name would get one mask. p=0 changes nothing.
    """

    seed: int
    p: float
    step: int = 0
    replica: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.p < 1:
            raise UserError(f"dropout p={self.p} must be at least 0 and below 1")
        if not (isinstance(self.step, int) and isinstance(self.replica, int) and self.step >= 0 and self.replica >= 0):
            raise UserError(f"dropout step={self.step} and replica={self.replica} must be integers of at least 0")

    def at(self, step: int) -> "DropoutStream":
        return replace(self, step=step)

    def replicated(self, x: Float[Tensor, "..."], site: str) -> Float[Tensor, "..."]:
        """x is whole on every rank: equal masks."""
        return self._apply(x, site, (0,) * x.dim(), x.shape)

    def token_shard(
        self, x_shard: Float[Tensor, "..."], site: str, split: Split, group: TensorParallelGroup
    ) -> Float[Tensor, "..."]:
        """x_shard is this rank's tokens of `split`, along dimension 0: its rows of the mask that `replicated` draws for the whole."""
        return self.shard(x_shard, site, 0, split, group)

    def shard(
        self, x_shard: Float[Tensor, "..."], site: str, dim: int, split: Split, group: TensorParallelGroup
    ) -> Float[Tensor, "..."]:
        """x_shard is this rank's range of `split` along `dim` (tokens, heads, features); ranks that share a head share its mask.

        Raises LayoutError when it holds another number of elements than the split says.
        """
        dim %= x_shard.dim()
        start, stop = split.ranges[group.rank]
        if x_shard.shape[dim] != stop - start:
            raise LayoutError(
                f"dropout {site}: dimension {dim} of {list(x_shard.shape)} should hold {stop - start} of {split.total} elements on rank "
                f"{group.rank} of {group.size}; the value has another layout"
            )
        starts, whole = [0] * x_shard.dim(), list(x_shard.shape)
        starts[dim], whole[dim] = start, split.total
        return self._apply(x_shard, site, starts, whole)

    def partial(self, update: Partial, site: str) -> Partial:
        """Dropout of the sum, before it is made: every rank masks its summand alike, which costs no collective.

        Raises LayoutError for a Partial with a bias, which joins after the sum and would escape.
        """
        if update.bias is not None:
            raise LayoutError(
                f"dropout {site}: the bias of {update.source} is added after the sum and would not be dropped; complete the sum first, "
                "or build the layer without bias"
            )
        return Partial(self.replicated(update.value, site), update.group, update.source)

    def keep(
        self, site: str, starts: Sequence[int], shape: Sequence[int], whole: Sequence[int], device: torch.device
    ) -> Bool[Tensor, "..."]:
        """True for the elements that stay: of the part `shape` at `starts` of a tensor of shape `whole`."""
        key = stream_key(self.seed, f"dropout {self.step} {self.replica} {site}")
        return uniform_bits(element_index(starts, shape, whole, device) ^ key) >= round(self.p * 2**24)

    def _apply(self, x: Tensor, site: str, starts: Sequence[int], whole: Sequence[int]) -> Tensor:
        if self.p == 0:
            return x
        keep = self.keep(site, starts, x.shape, whole, x.device)
        return torch.where(keep, x * (1 / (1 - self.p)), 0)  # autograd keeps one byte an element
