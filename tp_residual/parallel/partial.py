"""`Partial`: the type of a sum that is still owed.

A row-parallel linear returns one. It is deliberately not a tensor: whatever would treat a summand as the sum raises, by name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from tp_residual.errors import LayoutError
from tp_residual.kernels.contract import widen
from tp_residual.parallel.group import TensorParallelGroup


def refused(operation: str) -> Callable[..., NoReturn]:
    """A method that refuses the operator it is bound to. Python's own TypeError would not say whose sum is owed."""

    def method(self: "Partial", *_: object) -> NoReturn:
        self.refuse(operation)

    return method


@dataclass(frozen=True, eq=False)
class Partial:
    """This rank's summand of `[tokens, hidden]`; the true value is the sum over the group, plus `bias` once.

    value: in the dtype of the GEMM that made it. source: the module that made it, for messages.
    """

    value: Tensor
    group: TensorParallelGroup
    source: str
    bias: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    def __add__(self, other: object) -> "Partial":
        """Partial + Partial is the summand of both, in fp32 at least: one collective for two updates (a parallel block)."""
        if not isinstance(other, Partial):
            self.refuse("+")
        if other.group is not self.group or other.shape != self.shape:
            raise LayoutError(
                f"cannot add the partial sums of {self.source} {list(self.shape)} and {other.source} {list(other.shape)}: "
                "they need the same shape and the same group"
            )
        biases = [widen(bias) for bias in (self.bias, other.bias) if bias is not None]
        return Partial(
            widen(self.value) + widen(other.value),
            self.group,
            f"{self.source} + {other.source}",
            sum(biases[1:], biases[0]) if biases else None,
        )

    def refuse(self, operation: str) -> NoReturn:
        """Raises the LayoutError of an operation that needs the sum itself."""
        raise LayoutError(
            f"{operation} on the output of {self.source}, which is a partial sum over {self.group.size} ranks and not a tensor yet; "
            "write it to the stream, or complete it with partial_to_invariant() or partial_to_token_shard()"
        )

    __radd__ = refused("+")
    __sub__ = __rsub__ = __neg__ = refused("-")
    __mul__ = __rmul__ = refused("*")
    __truediv__ = __rtruediv__ = refused("/")
    __matmul__ = __rmatmul__ = refused("@")
    __getitem__ = refused("indexing")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{name!r}: the output of {self.__dict__.get('source')} is a partial sum, not a tensor")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        for value in (*args, *(kwargs or {}).values()):
            for item in value if isinstance(value, list | tuple) else (value,):  # torch.cat takes a list
                if isinstance(item, Partial):
                    item.refuse(getattr(func, "__name__", str(func)))
        raise LayoutError(f"{func} does not take a partial sum")
