"""The modules of a model that ``lora`` trains in full."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from fastloop_plugins.models.wrapped import transformers_model

if TYPE_CHECKING:
    from torch import Tensor, nn

CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForImageClassification")
"""How the names of transformers' classifiers end."""
HEADS = ("classifier", "score")
"""Names of heads that peft knows. They stand for the head of a model that does not define its base model."""
CONTAINERS = ("ModuleList", "ModuleDict", "ParameterList", "ParameterDict")
"""Classes of torch without a forward of their own, which peft cannot replace by a copy."""


def classifier_head(model: nn.Module) -> set[str]:
    """Names of the parameters of a classifier's head; empty for another model."""
    classifier: Any = transformers_model(model)
    if classifier is None or not type(classifier).__name__.endswith(CLASSIFIERS):
        return set()
    if classifier.base_model is classifier:
        return {name for name, _ in model.named_parameters() if name.startswith(tuple(f"{head}." for head in HEADS))}
    inside = {id(parameter) for parameter in classifier.base_model.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) not in inside}


def owning_modules(model: nn.Module, names: Collection[str]) -> list[str]:
    """The largest modules that have only the named parameters, such as ``classifier`` for ``classifier.dense.weight``
    and ``classifier.out.weight``.

    A parameter that a module shares with another one, or that lies beside parameters that are not named, is in none.
    """
    wanted = {id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False) if name in names}
    uses = _uses(model)
    chosen: list[str] = []
    for name, module in model.named_modules():
        if not name or type(module).__name__ in CONTAINERS:
            continue
        if any(name.startswith(f"{outer}.") for outer in chosen):
            continue
        own = Counter(id(parameter) for _, parameter in _named(module))
        if own and all(parameter in wanted and count == uses[parameter] for parameter, count in own.items()):
            chosen.append(name)
    return chosen


def running_statistics(wrapped: nn.Module) -> list[str]:
    """Names of the layers of batch norm whose running statistics are not saved with the adapters of a model of peft."""
    from peft.utils import ModulesToSaveWrapper
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

    saved: set[int] = set()
    for module in wrapped.modules():
        if isinstance(module, ModulesToSaveWrapper):
            saved |= {id(part) for part in module.modules()}
    names = []
    for name, module in wrapped.named_modules():
        if isinstance(module, BatchNorm) and module.track_running_stats and id(module) not in saved:
            names.append(name.removeprefix("base_model.model."))
    return names


def _uses(model: nn.Module) -> Counter[int]:
    """The number of names of each parameter."""
    return Counter(id(parameter) for _, parameter in _named(model))


def _named(module: nn.Module) -> list[tuple[str, Tensor]]:
    return list(module.named_parameters(remove_duplicate=False))
