"""The types of hooks' results, as ``hookspecs`` annotates them, and whether a value has one."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer
from torch.utils.data import BatchSampler

from fastloop import hookspecs
from fastloop.state import Batch, Output

TYPES = {
    "BatchSampler": BatchSampler,
    "Batch": Batch,
    "Future": Future,
    "LRScheduler": LRScheduler,
    "Optimizer": Optimizer,
    "Output": Output,
    "Tensor": Tensor,
    "nn": nn,
}
"""Names in the annotations of hookspecs that hookspecs imports for type checkers alone."""


def return_type(hook: str) -> str:
    """The annotation of a hook's result, as hookspecs writes it."""
    return str(getattr(hookspecs, hook).__annotations__["return"])


def _result_type(hook: str) -> Any:
    """The type of a hook's result, such as ``dict[str, float] | None``: hookspecs' annotations are texts."""
    names = vars(hookspecs) | TYPES
    if hook == "build_metrics":
        from torchmetrics import MetricCollection  # takes a second to import

        names["MetricCollection"] = MetricCollection
    return eval(return_type(hook), names) or NoneType


def find_wrong_type(hook: str, result: Any) -> str:
    """The type of a result, and the expected one; empty if the result has it. None is no result."""
    expected_type = _result_type(hook)
    if result is not None and _matches(result, expected_type):
        return ""
    annotation = return_type(hook)
    expected = "no result" if annotation == "None" else annotation.removesuffix(" | None")
    returned = "None" if result is None else f"a {type(result).__name__}{_wrong_item(result, expected_type)}"
    problem = f"{returned}, expected {expected}"
    if inspect.isgenerator(result):
        problem += ". An implementation with a yield is marked @hookimpl(wrapper=True)"
    return problem


def _matches(value: Any, expected: Any) -> bool:
    kind = get_origin(expected)
    parts = get_args(expected)
    if kind is UnionType:
        return any(_matches(value, part) for part in parts)
    if kind is tuple:
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(_matches, value, parts))
    if kind in (dict, Mapping):
        return isinstance(value, kind) and _find_wrong_item(value, *parts) is None
    if kind is Iterable and isinstance(value, str):
        return False  # its characters are no samples
    if expected is float:
        return isinstance(value, float | int)
    return expected is Any or isinstance(value, kind or expected)


def _find_wrong_item(mapping: Mapping[Any, Any], key_type: Any, value_type: Any) -> Any:
    """The first key of a mapping that has another type, or whose value has another type; None: all are right.

    Values such as ``Sequence[Any]`` are not checked: a tensor stands for a sequence.
    """
    for key, value in mapping.items():
        if not _matches(key, key_type) or not (get_origin(value_type) or _matches(value, value_type)):
            return key
    return None


def _wrong_item(result: Any, expected: Any) -> str:
    """The item of a mapping that has another type than expected, for a message: `` with 'loss': 'high'``."""
    for part in (expected, *get_args(expected)):
        if get_origin(part) in (dict, Mapping) and isinstance(result, Mapping):
            key = _find_wrong_item(result, *get_args(part))
            if key is not None:
                value = result[key]
                is_plain = value is None or isinstance(value, str | int | float)
                return f" with {key!r}: {value!r:.60}" if is_plain else f" with {key!r}: a {type(value).__name__}"
    return ""
