"""Shape checks, here and in the ranks; `ranks` itself is the package's own fixture (tp_residual.testing.plugin)."""

import shape_checks  # noqa: F401 - before any module that it should check

from tp_residual.testing import set_preload

# torch._dynamo: optimizers and activation checkpointing import it in every rank, over a second of CPU each time
set_preload(["shape_checks", "pytest", "torch._dynamo"])
