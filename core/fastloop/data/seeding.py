"""Random numbers that datasets and samplers draw: seeded apart from those of training."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastloop.data.workers import replace_worker_info


def seed_all(seed: int) -> None:
    """Seed what datasets draw from. The generators of other devices are left alone: they are the training's."""
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


class Alone:
    """While inside, a stream sees no worker, and draws from random generators of its own, which go on where they were at the next entry.

    So what it draws does not depend on what training drew, and is drawn again when a resumed run skips to its place.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.inside: tuple[Any, Any, Tensor] | None = None

    def __enter__(self) -> None:
        self.info = replace_worker_info(None)
        self.outside = self._states()
        if self.inside is None:
            seed_all(self.seed)
        else:
            self._restore(self.inside)

    def __exit__(self, *error: object) -> None:
        self.inside = self._states()
        self._restore(self.outside)
        replace_worker_info(self.info)

    @staticmethod
    def _states() -> tuple[Any, Any, Tensor]:
        return random.getstate(), np.random.get_state(), torch.get_rng_state()

    @staticmethod
    def _restore(states: tuple[Any, Any, Tensor]) -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
