"""A real checkpoint for those who cannot make weights from a seed: those that `--weights random:SEED` means, as Transformers saves them."""

import json
from pathlib import Path

import torch

from tp_residual.checkpoint.files import ITEM_BYTES, CheckpointFiles
from tp_residual.checkpoint.save import save_whole
from tp_residual.inference.loading import load_model
from tp_residual.parallel.blocks import parameter_blocks
from tp_residual.parallel.group import TensorParallelGroup

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def write_random_checkpoint(model_dir: str, seed: int, dtype: str, target: Path) -> None:
    """config.json of `model_dir`, with weights of `dtype`: the same bits that ranks of any number fill their shares with."""
    group = TensorParallelGroup.single(torch.device("cpu"))
    model, _ = load_model(model_dir, group, dtype=getattr(torch, dtype), random_seed=seed)
    config = json.loads((Path(model_dir) / "config.json").read_text())
    for name in ("torch_dtype", "dtype"):
        config.pop(name, None)
    save_whole(target, parameter_blocks(model), group, config={**config, "torch_dtype": dtype})
    group.close()


def weight_bytes_of_a_step(model_dir: str, dtype: str, tied: bool) -> int:
    """What a decode step has to read at least, in `dtype`: every weight once, but for an embedding that is not the head, too."""
    size = ITEM_BYTES[{"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[dtype]]
    unread = _HEAD if tied else _EMBEDDING
    tensors = CheckpointFiles.open(model_dir).tensors
    return sum(info.nbytes // ITEM_BYTES[info.dtype] * size for name, info in tensors.items() if name != unread)
