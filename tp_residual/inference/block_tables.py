"""Block tables as a tensor that kernels read: the blocks of each row's sequence, in order."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from tp_residual.model.attention_backend import TokenBatch


class BlockTables:
    """Rewritten only where a table is another list than last time: no pass does work proportional to its context."""

    def __init__(self, num_blocks: int, device: torch.device) -> None:
        self._num_blocks = num_blocks
        self._known: list[list[int]] = []  # what each row was last written from
        self.tensor: Int[Tensor, "rows blocks"] = torch.zeros(0, num_blocks, dtype=torch.int32, device=device)

    def update(self, tables: Sequence[list[int]], batch: TokenBatch) -> None:
        """The rows of this pass. A table is a list that is replaced when it changes, never altered."""
        if len(self._known) < len(tables):
            self.tensor = self.tensor.new_zeros(len(tables), self._num_blocks)
            self._known = [[] for _ in tables]
        for span in batch.spans:
            table = tables[span.row]
            if self._known[span.row] is not table:
                self.tensor[span.row, : len(table)] = torch.tensor(table, dtype=torch.int32)
                self._known[span.row] = table
