"""Gives some parameters another learning rate, weight decay or argument.

On by default if the recipe has one of its keys.

    train:
      weight_decay: 0.01
      decay_biases_and_norms: false                  # weight decay 0 for biases and norms
      layer_lr_decay: 0.9                            # lower layers learn more slowly
      parameter_groups:
        - {match: "head.*", lr: 1.0e-3}
        - {match: ["*.embeddings.*"], weight_decay: 0, betas: [0.9, 0.95]}
    plugins:
      - parameter-groups                             # needs no entry

In patterns of parameter names, ``*`` stands for any characters, dots included. The other keys are arguments of the
optimizer; a later entry overrides an earlier one. Schedules multiply the rate of each group. With ``n`` blocks, block
``i`` (from 0) learns with ``lr * layer_lr_decay ** (n - i)``, parameters before the first block with exponent ``n +
1``, and those after the last block with ``lr``. An ``lr`` of an entry does not decay. Method: Clark et al., "ELECTRA",
2020.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastloop import Plugin, RecipeError, hookimpl, option
from fastloop.errors import did_you_mean
from fastloop.options import parse
from fastloop.problem import counted

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from fastloop import Run
    from fastloop.recipe import Recipe


@dataclass(kw_only=True)
class Group:
    """The checked keys of an entry of ``train.parameter_groups``."""

    match: str | list[str] = option("Pattern of parameter names, or a list of them.")
    lr: float = option("Learning rate.", default=0.0, ge=0)
    weight_decay: float = option("Weight decay.", default=0.0, ge=0)


class ParameterGroups(Plugin):
    """Gives some parameters their own learning rate, weight decay or other arguments.

    Regroups the parameters of the optimizer that the run has, whichever plugin built it.
    """

    name = "parameter-groups"
    numerics = "bitwise"  # the keys of the recipe change training, with any plugin list

    patterns: list[tuple[str, list[str], dict[str, Any]]]  # key, patterns and options of each group

    @classmethod
    def auto_enable(cls, recipe: Recipe) -> str | None:
        if recipe.train.parameter_groups:
            return "train.parameter_groups is set"
        if recipe.train.layer_lr_decay:
            return "train.layer_lr_decay is set"
        if not recipe.train.decay_biases_and_norms:
            return "train.decay_biases_and_norms is set"
        return None

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        self.where = f"{recipe.where}: train.parameter_groups"
        self.patterns = []
        for index, entry in enumerate(recipe.train.parameter_groups or []):
            where = f"{self.where}[{index}]"
            known = {key: value for key, value in entry.items() if key in ("match", "lr", "weight_decay")}
            checked = parse(Group, known, where)
            arguments = {str(key): value for key, value in entry.items() if key != "match"}
            if not arguments:
                raise RecipeError(
                    code="missing-value",
                    place=where,
                    found="only match",
                    expected="an argument of the optimizer beside it, such as lr",
                )
            patterns = [checked.match] if isinstance(checked.match, str) else checked.match
            self.patterns.append((where, patterns, arguments))

    @hookimpl(wrapper=True)
    def build_optimizer(self, run: Run, model: nn.Module) -> Generator[None, Any, Any]:
        optimizer = yield
        if self.auto_enable(run.recipe):
            arguments = self._arguments(run, model)
            scales = self._scales(run, model)
            members = list(optimizer.values()) if isinstance(optimizer, Mapping) else [optimizer]
            for member in members:
                self._regroup(member, arguments, scales)
        return optimizer

    def _arguments(self, run: Run, model: nn.Module) -> dict[int, dict[str, Any]]:
        """Parameter's ``id`` -> its own arguments."""
        from fastloop_plugins.training._patterns import matching, parameters_by_name

        parameters = parameters_by_name(model)
        by_parameter: dict[int, dict[str, Any]] = {id(parameter): {} for parameter in parameters.values()}
        if not run.recipe.train.decay_biases_and_norms:
            for parameter in biases_and_norms(model):
                by_parameter.setdefault(id(parameter), {})["weight_decay"] = 0.0
        for where, patterns, arguments in self.patterns:
            for pattern in patterns:
                matched = [parameters[name] for name in matching(pattern, parameters, where)]
                trained = [parameter for parameter in matched if parameter.requires_grad]
                if not trained:
                    raise RecipeError(
                        f"{pattern!r} matches only parameters that are not trained.",
                        code="nothing-trained",
                        place=where,
                        remedy="Remove it.",
                    )
                for parameter in trained:
                    by_parameter[id(parameter)] |= arguments
        return by_parameter

    def _scales(self, run: Run, model: nn.Module) -> dict[int, float]:
        """Parameter's ``id`` -> factor of its learning rate; without ``layer_lr_decay``, empty.

        With two blocks and a decay of 0.5, the embeddings have layer 0 and the factor 0.125, the blocks have 0.25 and
        0.5, and the head has layer 3 and 1. A parameter between two blocks belongs to the block before it.
        """
        from fastloop_plugins.models.blocks import outermost, transformer_blocks

        decay = run.recipe.train.layer_lr_decay
        if decay is None:
            return {}
        blocks = outermost(transformer_blocks(model))
        if not blocks:
            where = f"{run.recipe.where}: train.layer_lr_decay: {type(model).__name__}"
            raise RecipeError(
                f"{where} has no list of repeated blocks.",
                code="unsupported-model",
                remedy="Set rates by name: train.parameter_groups.",
            )
        layers: dict[int, int] = {}
        for layer, block in enumerate(blocks, start=1):
            for parameter in block.parameters():
                layers[id(parameter)] = layer
        head = len(blocks) + 1
        newest = 0  # layer of the last block so far
        scales = {}
        for parameter in model.parameters():
            if id(parameter) in layers:
                newest = layers[id(parameter)]
                layer = newest
            elif newest < len(blocks):
                layer = newest
            else:  # after the last block
                layer = head
            scales[id(parameter)] = decay ** (head - layer)
        return scales

    def _regroup(
        self, optimizer: Optimizer, arguments: Mapping[int, dict[str, Any]], scales: Mapping[int, float]
    ) -> None:
        """Split the groups of an optimizer. Parameters without arguments of their own come first, so ``train/lr`` is
        their rate."""
        groups = optimizer.param_groups
        optimizer.param_groups = []
        for group in groups:
            by_arguments: dict[str, ArgumentGroup] = {as_key({}): ArgumentGroup({})}
            for parameter in group["params"]:
                own: dict[str, Any] = {}
                scale = scales.get(id(parameter), 1.0)
                if scale != 1.0:
                    own["lr"] = group["lr"] * scale
                own |= arguments.get(id(parameter), {})
                unknown = own.keys() - group.keys()
                if unknown:
                    key = min(unknown)
                    raise RecipeError(
                        f"{type(optimizer).__name__} has no argument {key!r} for a group of parameters.",
                        code="unknown-argument",
                        place=self.where,
                        remedy=did_you_mean(key, group.keys() - {"params"}),
                    )
                part = by_arguments.setdefault(as_key(own), ArgumentGroup(own))
                part.parameters.append(parameter)
            for part in by_arguments.values():
                if part.parameters:
                    optimizer.add_param_group({**group, **part.arguments, "params": part.parameters})
                    self.log.info("%s with %s", counted(len(part.parameters), "parameter"), part.describe())


def as_key(arguments: Mapping[str, Any]) -> str:
    """Equal arguments as equal text, in any order: their values may be lists, which no mapping has as keys."""
    return repr(sorted(arguments.items()))


@dataclass
class ArgumentGroup:
    """The parameters of a group that have the same arguments of their own."""

    arguments: dict[str, Any]
    parameters: list[nn.Parameter] = field(default_factory=list)

    def describe(self) -> str:
        """The arguments as text: ``lr 0.001, weight_decay 0.0``."""
        values = [f"{key} {value}" for key, value in sorted(self.arguments.items())]
        return ", ".join(values) or "train's values"


def biases_and_norms(model: nn.Module) -> Iterator[nn.Parameter]:
    """The biases of a model, and the weights of its norms.

    A bias has ``bias`` in its name, such as ``in_proj_bias`` of attention or ``bias_hh_l0`` of a GRU; or it is the
    table of a module with such a name, such as ``relative_attention_bias`` of T5. The weights of norms are those of
    torch's classes, and the parameters with at most one dimension of other classes whose name contains ``Norm``.
    """
    from torch import nn

    norms = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
    for path, module in model.named_modules():
        is_norm = isinstance(module, norms)
        is_named_norm = "norm" in type(module).__name__.lower()
        is_bias_table = path.endswith("bias")
        for name, parameter in module.named_parameters(recurse=False):
            is_vector_of_norm = is_named_norm and parameter.ndim <= 1
            if is_norm or is_vector_of_norm or is_bias_table or "bias" in name.lower():
                yield parameter
