"""Random states of datasets and samplers, independent of the training's."""

from __future__ import annotations

from typing import Any

from torch.utils.data._utils import worker  # a test looks for its private name

from fastloop.runtime.random_states import cpu_random_states, restore_random_states, seed_all


class IsolatedRandomState:
    """A context with its own random states, in which ``get_worker_info()`` is None. Each entry continues with the
    states of the last exit.

    The random numbers inside do not depend on training. They repeat when a resumed run skips to its position.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.inner: dict[str, Any] | None = None

    def __enter__(self) -> None:
        self.info, worker._worker_info = worker._worker_info, None
        self.outer = cpu_random_states()
        if self.inner is None:
            seed_all(self.seed)
        else:
            restore_random_states(self.inner)

    def __exit__(self, *error: object) -> None:
        self.inner = cpu_random_states()
        restore_random_states(self.outer)
        worker._worker_info = self.info
