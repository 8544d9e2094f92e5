"""From a model directory to a model whose every element has been read: this rank's share of it and no more."""

from collections.abc import Callable
from os import PathLike

import torch

from tp_residual.checkpoint.files import CheckpointFiles
from tp_residual.checkpoint.load import LoadReport, load_checkpoint, plan_load
from tp_residual.checkpoint.random_weights import fill_random
from tp_residual.model.config import ModelConfig
from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.blocks import parameter_blocks
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.residual.config import ResidualConfig
from tp_residual.residual.table import BoundaryTable

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def load_model(
    model_dir: str | PathLike[str],
    group: TensorParallelGroup,
    *,
    dtype: torch.dtype | None = None,
    stream_dtype: torch.dtype | None = None,
    sequence_parallel: str = "off",
    boundary: str = "auto",
    boundary_table: BoundaryTable | None = None,
    round_reduced: bool = False,
    random_seed: int | None = None,
    residual: ResidualConfig | None = None,
    force_residual: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[CausalLM, LoadReport]:
    """dtype: of the weights, the checkpoint's config unless given; the other options as in `CausalLM`. progress(bytes done, bytes).

    random_seed: weights from that seed instead of the checkpoint's; config.json is then all that is read. residual: another connection than
    the checkpoint was trained with, which only force_residual lets pass.

    Raises ConfigError, SplitError or CheckpointError on every rank, before a weight is read.
    """
    config = ModelConfig.from_dir(model_dir)
    if residual is not None:
        config = config.with_residual(residual, trained=random_seed is None, force=force_residual)
    files = CheckpointFiles.open(model_dir) if random_seed is None else None
    model = CausalLM(
        config,
        group,
        dtype=dtype or getattr(torch, config.dtype or "float32"),
        stream_dtype=stream_dtype,
        sequence_parallel=sequence_parallel,
        boundary=boundary,
        boundary_table=boundary_table,
        round_reduced=round_reduced,
    )
    if files is None:
        assert random_seed is not None
        return model, fill_random(parameter_blocks(model), random_seed, progress=progress)
    tied = config.tie_word_embeddings
    plan = plan_load(
        parameter_blocks(model), files, tied_head=HEAD if tied else None, tied_to=EMBEDDING if tied else None
    )
    return model, load_checkpoint(plan, progress=progress)
