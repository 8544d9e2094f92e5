"""What training leaves out: whole layers or single updates, at random and yet alike on every rank.

A decision is a pure function of seed, step and place. So no rank needs to be told, a recomputation repeats it, and a run can be resumed.
"""

import random

from tp_residual.errors import ConfigError
from tp_residual.residual.config import ResidualConfig


class DepthSampler:
    """Decides for one model. Set seed and step, the same on all ranks, before each training step of a model that drops anything."""

    def __init__(self, config: ResidualConfig) -> None:
        self.layer_drop_rate = config.drop_rate if config.drop == "layer_drop" else 0.0
        self._at: tuple[int, int] | None = None

    def set(self, seed: int, step: int) -> None:
        self._at = seed, step

    def drops_layer(self, layer: int) -> bool:
        """Whether this step leaves out the whole layer: no collective of it is run."""
        return self.layer_drop_rate > 0 and not self.keeps(f"layer {layer}", 1.0 - self.layer_drop_rate)

    def keeps(self, place: str, probability: float) -> bool:
        if self._at is None:
            raise ConfigError(
                "this model leaves out updates in training, and no step is set; call model.set_step(seed, step) alike on all ranks, "
                "or eval()"
            )
        seed, step = self._at
        return random.Random(f"{seed}/{step}/{place}").random() < probability
