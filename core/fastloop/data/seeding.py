"""Random states of datasets and samplers, independent of the training's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastloop.data.workers import replace_worker_info


def seed_all(seed: int) -> None:
    """Seed the CPU generators, which datasets use. Generators of other devices belong to training and keep their states."""
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


class IsolatedRandomState:
    """A context with its own random states, in which ``get_worker_info()`` is None. Each entry continues with the states of the last exit.

    The random numbers inside do not depend on training. They repeat when a resumed run skips to its position.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.inner: tuple[Any, Any, Tensor] | None = None

    def __enter__(self) -> None:
        self.info = replace_worker_info(None)
        self.outer = self._states()
        if self.inner is None:
            seed_all(self.seed)
        else:
            self._restore(self.inner)

    def __exit__(self, *error: object) -> None:
        self.inner = self._states()
        self._restore(self.outer)
        replace_worker_info(self.info)

    @staticmethod
    def _states() -> tuple[Any, Any, Tensor]:
        return random.getstate(), np.random.get_state(), torch.get_rng_state()

    @staticmethod
    def _restore(states: tuple[Any, Any, Tensor]) -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
