"""The whole tensors of `--weights random:SEED`, made one at a time when the oracle asks for them."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from tp_residual.checkpoint.random_weights import fill_random
from tp_residual.model.config import ModelConfig
from tp_residual.model.layout import ModelLayout
from tp_residual.parallel.blocks import ParameterBlock


class RandomWeights(Mapping[str, Tensor]):
    """What a checkpoint of these weights would hold, in fp32; each rank's share has been filled from the same values."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.seed = seed
        self.shapes = {
            tensor.name: tensor.shape for tensor in ModelLayout.of(config, 1).tensors(sequence_parallel=False)
        }

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shapes[name]
        whole = nn.Parameter(torch.empty(shape))
        rows = (0, shape[0])
        fill_random([ParameterBlock(name, whole, 0, rows, rows, shape, (0,), False)], self.seed)
        return whole.detach()

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)
