"""States of metrics that processes can gather.

Torchmetrics gathers the states of each process before it computes a value. Its collective operations need tensors of
one dtype and one shape, and lists of one length. Otherwise processes wait for each other, or gloo ends them. So the
processes exchange the layout of their states first: a process without samples takes the layout of the others, and any
other difference is an error on each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fastloop.errors import ProcessesDisagree
from fastloop.problem import clause

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

    from fastloop.distributed.processes import Processes

SAME_SHAPE = "Let each update of the metric keep the shape and the dtype of its state."
SAME_ROWS = "Let each update of the metric append tensors that differ in the first dimension only."
SAME_LENGTH = (
    'Add the state with dist_reduce_fx="cat", if its tensors can be concatenated, or let the list have the same length '
    "on each process."
)
REMEDIES = {"tensor": SAME_SHAPE, "concatenated": SAME_ROWS, "list": SAME_LENGTH}
"""Kind of a state -> what to do if processes disagree on its layout."""


@dataclass(frozen=True, order=True)
class StateName:
    """A state of a metric.

    Attributes:
        metric: Place of the metric in the collection: ``auc``, or ``auc.wrapped_metric`` inside a wrapper.
        state: Its name, as in ``Metric.add_state``.
    """

    metric: str
    state: str


@dataclass(frozen=True)
class TensorForm:
    """The dtype and the shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class StateLayout:
    """The facts of a state on one process.

    Attributes:
        kind: ``tensor``; ``concatenated``: a list that torchmetrics concatenates before it gathers; ``list``: any other
            list, of which torchmetrics gathers one tensor after the other.
        was_updated: Whether the metric has seen a sample.
        form: The tensor's form. For a concatenated list, its dtype and the shape of a row; None: it has no tensor.
        rows: Size of the first dimension of a concatenated list.
        elements: Dimensions and dtype of each tensor of a list, such as ``2-d float32``; empty for the other kinds.
        problem: Why the tensors of this process cannot be concatenated; None: they can.
    """

    kind: Literal["tensor", "concatenated", "list"]
    was_updated: bool
    form: TensorForm | None = None
    rows: int = 0
    elements: tuple[str, ...] = ()
    problem: str | None = None

    def __str__(self) -> str:
        if self.problem is not None:
            return f"tensors that cannot be concatenated ({self.problem})"
        if self.kind == "tensor":
            return f"a tensor {self.form}"
        if self.kind == "concatenated":
            return "no rows" if self.form is None else f"{self.rows} rows of {self.form}"
        forms = ", ".join(sorted(set(self.elements)))
        return f"a list of {len(self.elements)} ({forms})" if forms else "an empty list"


@dataclass(frozen=True)
class MetricState:
    """A state of a metric on this process, and its layout. ``read_states`` gives them."""

    metric: Metric
    name: StateName
    layout: StateLayout

    def take_layout(self, goal: StateLayout) -> None:
        """Give the state of a process without rows the layout of other processes. Its value stays the neutral one.

        Args:
            goal: A layout that ``find_goals`` returned for this state.
        """
        assert goal.form is not None
        if self.layout.kind == "concatenated":
            values: list[Tensor] = getattr(self.metric, self.name.state)
            device = values[0].device if values else self.metric.device
            # the list itself stays: metrics of a compute group share it
            values[:] = [torch.empty((0, *goal.form.shape), dtype=goal.form.dtype, device=device)]
            return
        value: Tensor = getattr(self.metric, self.name.state)
        setattr(self.metric, self.name.state, value.to(goal.form.dtype).broadcast_to(goal.form.shape).clone())


def align_states(metrics: MetricCollection, processes: Processes, where: str, split: str) -> None:
    """Let the processes gather the states of metrics. Every process must call it before ``MetricCollection.compute``.

    A state of a process whose metric saw no sample takes the layout of the others: its default in their shape, or a
    tensor without rows. Concatenated lists become one tensor.

    Args:
        where: The recipe, for the message.
        split: The evaluated split, for the message.

    Raises:
        ProcessesDisagree: A state differs in anything else. Names metric, state and two processes.
    """
    if processes.world_size == 1:
        return
    states = list(read_states(metrics))
    own = {state.name: state.layout for state in states}
    gathered: list[dict[StateName, StateLayout]] = processes.all_gather_object(own)
    goals = find_goals(gathered, f"{where}: evaluation of {split}")
    for state in states:
        goal = goals.get(state.name)
        if goal is not None and goal.form != state.layout.form:
            state.take_layout(goal)


def read_states(metrics: MetricCollection) -> Iterator[MetricState]:
    """The states that torchmetrics gathers, in wrapped metrics, too. Concatenates lists, as torchmetrics does later."""
    from torchmetrics import Metric
    from torchmetrics.utilities import dim_zero_cat

    metrics.items(copy_state=False)  # lets the metrics of a compute group share their states
    for place, metric in metrics.named_modules():
        if not isinstance(metric, Metric) or not gathers(metric):
            continue
        for state, reduction in metric._reductions.items():
            value: Tensor | list[Tensor] = getattr(metric, state)
            if isinstance(value, Tensor):
                layout = StateLayout("tensor", metric.update_called, TensorForm(value.dtype, tuple(value.shape)))
            elif reduction is dim_zero_cat:
                layout = concatenate(value, metric.update_called)
            else:
                layout = StateLayout("list", metric.update_called, elements=tuple(map(describe_element, value)))
            yield MetricState(metric, StateName(place, state), layout)


def gathers(metric: Metric) -> bool:
    """Whether torchmetrics gathers the states of a metric. A function of the user's own knows its states."""
    available = metric.distributed_available_fn
    return metric.sync_on_compute and metric.dist_sync_fn is None and (available is None or bool(available()))


def concatenate(values: list[Tensor], was_updated: bool) -> StateLayout:
    """Concatenate the tensors of a list in place. Torchmetrics would leave a single scalar without a dimension."""
    from torchmetrics.utilities import dim_zero_cat

    if not values:
        return StateLayout("concatenated", was_updated)
    if len(values) > 1 or values[0].dim() == 0:
        try:
            values[:] = [dim_zero_cat(values)]
        except (RuntimeError, TypeError) as error:
            problem = clause(error)
            return StateLayout("concatenated", was_updated, problem=problem)
    form = TensorForm(values[0].dtype, tuple(values[0].shape[1:]))
    return StateLayout("concatenated", was_updated, form, len(values[0]))


def describe_element(element: object) -> str:
    """``2-d float32``. The sizes of dimensions may differ: torchmetrics pads them."""
    if isinstance(element, Tensor):
        return f"{element.dim()}-d {str(element.dtype).removeprefix('torch.')}"
    return type(element).__name__  # torchmetrics leaves it where it is


def find_goals(gathered: Sequence[Mapping[StateName, StateLayout]], place: str) -> dict[StateName, StateLayout]:
    """State -> the layout that all processes must have. States without tensors on all processes have none.

    Args:
        gathered: State -> its layout, for each process, in order of rank.
        place: Begins the message.

    Raises:
        ProcessesDisagree: A process has another layout, and cannot take this one.
    """
    goals: dict[StateName, StateLayout] = {}
    for name in sorted(set().union(*gathered)):
        label = f"{place}: the state {name.state!r} of the metric {name.metric!r}"
        layouts: list[StateLayout] = []
        for rank, states in enumerate(gathered):
            if name not in states:
                raise ProcessesDisagree(
                    f"{label} is missing on process {rank}.",
                    code="processes-disagree",
                    remedy="Build the same metrics on each process, and let updates add no metric or state.",
                )
            if states[name].problem is not None:
                raise ProcessesDisagree(
                    f"process {rank} has {states[name]}. {SAME_ROWS}", code="processes-disagree", place=label
                )
            layouts.append(states[name])
        first = find_first(layouts)
        goal = layouts[first]
        for rank, layout in enumerate(layouts):
            if not fits(layout, goal):
                raise ProcessesDisagree(
                    f"{label} differs between processes: process {first} has {goal}, and process {rank} has {layout}. "
                    f"{REMEDIES[goal.kind]}",
                    code="processes-disagree",
                )
        if goal.form is not None:
            goals[name] = goal
    return goals


def find_first(layouts: Sequence[StateLayout]) -> int:
    """The first process whose layout others can take: one with rows, or else one with a tensor, or else the first."""
    for rank, layout in enumerate(layouts):
        if layout.rows or (layout.kind != "concatenated" and layout.was_updated):
            return rank
    for rank, layout in enumerate(layouts):
        if layout.form is not None:
            return rank
    return 0


def fits(layout: StateLayout, goal: StateLayout) -> bool:
    """Whether a state has the layout that it must have, or can take it."""
    if layout.kind != goal.kind:
        return False
    if layout.kind == "list":
        return layout.elements == goal.elements
    if layout.form == goal.form:
        return True
    if layout.kind == "concatenated":
        return layout.rows == 0
    return not layout.was_updated and can_broadcast(layout, goal)


def can_broadcast(layout: StateLayout, goal: StateLayout) -> bool:
    """Whether a default can be given the shape of a state, such as () that of (3,)."""
    assert layout.form is not None
    assert goal.form is not None
    default = torch.empty(layout.form.shape, device="meta")
    try:
        default.broadcast_to(goal.form.shape)
    except RuntimeError:
        return False
    return True
