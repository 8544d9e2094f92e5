"""Where NaN or infinity first appeared: the module and the ranks, from taps on the stream."""

import torch
from torch import Tensor

from tp_residual.errors import GenerationError
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.partial import Partial
from tp_residual.residual.boundary import Site


class FiniteCheck:
    """A tap for one forward pass; afterwards `require` names the first value that is not finite. Costs a pass over each value.

    Looks, at each boundary, at this rank's summand, at the residual after the add and at the normed value; then at the logits.
    """

    def __init__(self, group: TensorParallelGroup) -> None:
        self._group, self._names, self._flags = group, list[str](), list[Tensor]()

    def __call__(self, site: Site, partial: Partial | None, residual: Tensor, normed: Tensor | None) -> None:
        if partial is not None:
            self._look(f"the update of {site.update}", partial.value)
        self._look(f"the residual after {site.update or 'nothing'}", residual)
        if normed is not None:
            self._look(f"the output of {site.norm}", normed)

    def require(self, local_logits: Tensor) -> None:
        """One all-gather. Raises GenerationError on every rank."""
        self._look("the logits", local_logits)
        bad = torch.stack(self._flags).nonzero()[:, 0].tolist()
        first = torch.tensor([bad[0] if bad else len(self._names)], device=self._group.device)
        if self._group.size > 1:
            first = self._group.run("all_gather", "check_finite", first, lambda transport, t: transport.all_gather(t))
        places = first.tolist()
        earliest = min(places)
        if earliest < len(self._names):
            ranks = [rank for rank, place in enumerate(places) if place == earliest]
            raise GenerationError(f"NaN or infinity first appeared in {self._names[earliest]}, on rank {ranks}")
        self._names.clear()
        self._flags.clear()

    def _look(self, name: str, value: Tensor) -> None:
        self._names.append(name)
        self._flags.append(~value.isfinite().all())
