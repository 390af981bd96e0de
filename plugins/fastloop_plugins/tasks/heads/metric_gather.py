"""Gathers the states of metrics, also from a process that measured no sample of the split."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torchmetrics import MetricCollection


def gather_everywhere(metrics: MetricCollection) -> MetricCollection:
    """Let every metric without a ``dist_sync_fn`` use ``gather``."""
    from torchmetrics import Metric

    for part in metrics.modules():  # wrappers have the metric that they wrap as a part
        if isinstance(part, Metric) and part.dist_sync_fn is None:
            part.dist_sync_fn = gather
    return metrics


def gather(values: Tensor, group: Any = None) -> list[Tensor]:
    """The values of a state on each process, by rank. Every process must call it.

    Torchmetrics collects samples in lists. Its state of a process without a sample is an empty vector of float32, and
    collective operations need the dtype and the number of dimensions that the other processes have.
    """
    from torch import distributed
    from torchmetrics.utilities.distributed import gather_all_tensors

    forms: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(forms, (values.numel(), values.dtype, values.shape[1:]), group)
    if not values.numel() and (filled := [form for form in forms if form[0]]):
        _, dtype, shape = filled[0]
        values = values.new_empty((0, *shape), dtype=dtype)
    gathered: list[Tensor] = gather_all_tensors(values, group)
    return gathered
