"""Reward functions: checked before a model is loaded, called with the arguments that they name, and their results."""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any

from fastloop import FastloopError, RecipeError
from fastloop_plugins.toolkit import counted, did_you_mean, import_object, importing_bitsandbytes, typed_clause

if TYPE_CHECKING:
    from fastloop import Recipe

OWN_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments of reward functions beside the columns of ``data.columns``: those of TRL."""
OWN_VALUES = ("reward", "reward_spread", "groups_without_signal", "completion_tokens", "truncated")
"""Values of a step that grpo logs beside ``rewards/NAME``."""
OWN_COLUMNS = ("step", "prompt", "completion", "tokens", "ended", "reward", "advantage")
"""Columns of ``rows/completions.jsonl`` beside ``rewards/NAME``."""


@dataclass
class RewardInputs:
    """The completions and other values that reward functions get as arguments, and what these functions log.

    Attributes:
        values: Argument -> a value for each completion, such as ``prompts`` and the further columns.
        step: The steps that the run has done.
        last_step: The number of steps of the run.
        metrics: Name -> the values that ``log_metric`` was called with.
        extra: Name -> a value for each completion, by ``log_extra``.
    """

    values: Mapping[str, Sequence[Any]]
    step: int
    last_step: int
    metrics: dict[str, list[float]] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of completions."""
        return len(self.values["completions"])

    def log_metric(self, name: str, value: float) -> None:
        check_name("log_metric", name, OWN_VALUES)
        self.metrics.setdefault(name, []).append(float(value))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        check_name("log_extra", column, OWN_COLUMNS)
        self.extra[column] = list(values)

    def arguments(self, names: Collection[str] | None) -> dict[str, Any]:
        """The arguments of a reward function. Each completion has copies of its values, so that a function may change
        them: another completion of the prompt and another function read those of the file.

        Args:
            names: The arguments that it takes; None: all.
        """
        arguments: dict[str, Any] = {
            "trainer_state": trainer_state(self.step, self.last_step),
            "log_extra": self.log_extra,
            "log_metric": self.log_metric,
        }
        for name, values in self.values.items():
            if names is None or name in names:
                arguments[name] = [copy.deepcopy(value) for value in values]
        if names is None:
            return arguments
        return {name: value for name, value in arguments.items() if name in names}


def check_name(function: str, name: str, own: Collection[str]) -> None:
    """Raise an error if a reward function logs under a name of grpo, whose values it would replace."""
    if name in own or name.startswith("rewards/"):
        raise ValueError(f"{function}: grpo itself logs {name!r}: choose another name")


@dataclass(frozen=True)
class RewardFunction:
    """A reward function of a recipe.

    Attributes:
        name: Its name in logs: that of the function, or the whole reference if two functions have the same name.
        weight: Its factor in the sum of rewards.
        parameters: The arguments that it takes; None: all, by ``**kwargs``.
        place: The recipe, its key and the reference, for messages.
    """

    name: str
    function: Callable[..., Any]
    weight: float
    parameters: frozenset[str] | None
    place: str

    def __call__(self, inputs: RewardInputs) -> list[float]:
        """The rewards of completions; NaN where the function returned None: it does not apply.

        Raises:
            FastloopError: The function raised, or it returned something else than a number or None for each completion.
        """
        try:
            result = self.function(**inputs.arguments(self.parameters))
            if inspect.isawaitable(result):
                result = asyncio.run(wait_for(result))
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            line = [frame for frame in frames if frame.filename != __file__ or frame is frames[0]][-1]
            problem = f"raised {typed_clause(error)} ({line.filename}, line {line.lineno})"
            raise FastloopError(f"{self.place} {problem}.", code="call-failed") from error
        return self.read(result, inputs)

    def read(self, result: Any, inputs: RewardInputs) -> list[float]:
        """The numbers that the function returned, see ``__call__``."""
        if hasattr(result, "tolist"):  # a tensor or an array
            result = result.tolist()
        if not isinstance(result, Sequence) or isinstance(result, str):
            kind = type(result).__name__
            raise FastloopError(
                f"{self.place} returned a {kind}, expected a list of {inputs.count} numbers.", code="wrong-result"
            )
        if len(result) != inputs.count:
            raise FastloopError(
                f"{self.place} returned {counted(len(result), 'value')} for {counted(inputs.count, 'completion')}.",
                code="wrong-result",
            )
        rewards = []
        for value, completion in zip(result, inputs.values["completions"], strict=True):
            if value is None:
                rewards.append(math.nan)
            elif isinstance(value, Real) and math.isfinite(value):
                rewards.append(float(value))
            else:
                raise FastloopError(
                    f"{self.place} returned {value!r} for the completion {completion!r:.200}, expected a finite "
                    "number, or None if it does not apply.",
                    code="wrong-result",
                )
        return rewards


def try_functions(functions: Sequence[RewardFunction], inputs: RewardInputs) -> None:
    """Call reward functions before training.

    Raises:
        RecipeError: One of them fails.
    """
    for function in functions:
        try:
            function(inputs)
        except FastloopError as error:
            raise RecipeError(error.problem.text, code=error.problem.code) from error.__cause__


def trainer_state(step: int, last_step: int) -> Any:
    """The ``TrainerState`` of transformers after a step of a run of ``last_step`` steps."""
    with importing_bitsandbytes():  # transformers' Trainer imports it
        from transformers import TrainerState

    return TrainerState(global_step=step, max_steps=last_step)


async def wait_for(result: Any) -> Any:
    """The result of an async reward function."""
    return await result


def load_rewards(
    recipe: Recipe, references: Sequence[str], weights: Sequence[float] | None, columns: Sequence[str]
) -> list[RewardFunction]:
    """Import the reward functions of a recipe.

    Args:
        references: ``file.py:name``, relative to the recipe, or ``package.module:name``.
        weights: One for each; None: 1.
        columns: The names of ``data.columns``.

    Raises:
        RecipeError: A function cannot be imported, is none, or needs an argument that there is not, or a column has the
            name of an argument.
    """
    where = f"{recipe.where}: plugins.grpo"
    for name in columns:
        if name in OWN_ARGUMENTS:
            raise RecipeError(
                f"reward functions get an argument {name!r} from grpo, which the column of this name would replace.",
                code="name-taken",
                place=f"{recipe.where}: data.columns",
                remedy="Rename the column in the file.",
            )
    if not references:
        raise RecipeError(
            "the list is empty.",
            code="missing-value",
            place=f"{where}.rewards",
            remedy="Name a function: file.py:name.",
        )
    if weights is not None and len(weights) != len(references):
        raise RecipeError(
            code="wrong-weights",
            place=f"{where}.reward_weights",
            found=f"{len(weights)} weights for {len(references)} functions",
            expected="one for each",
        )
    names = [reference.rpartition(":")[2] for reference in references]
    functions = []
    for place, reference in enumerate(references):
        if references.count(reference) > 1:
            raise RecipeError(
                f"{reference} is listed twice.",
                code="listed-twice",
                place=f"{where}.rewards",
                remedy="Give it a larger weight instead.",
            )
        function = import_object(reference, recipe, "plugins.grpo.rewards")
        parameters = check_parameters(function, f"{where}.rewards: {reference}", columns)
        name = names[place] if names.count(names[place]) == 1 else reference
        weight = 1.0 if weights is None else weights[place]
        label = f"{where}.rewards: {reference}"
        functions.append(RewardFunction(name, function, weight, parameters, label))
    return functions


def check_parameters(function: Any, place: str, columns: Sequence[str]) -> frozenset[str] | None:
    """The arguments that a reward function takes; None: all.

    Raises:
        RecipeError: It is no function, or needs an argument that there is not.
    """
    if not callable(function):
        raise RecipeError(f"{place} is a {type(function).__name__}, expected a function.", code="wrong-type")
    known = {*OWN_ARGUMENTS, *columns}
    taken = set()
    takes_all = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_all = True
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            continue
        taken.add(parameter.name)
        if parameter.default is parameter.empty and parameter.name not in known:
            raise RecipeError(
                f"{place} needs the argument {parameter.name!r}, and no column has this name.",
                code="unknown-column",
                remedy=(
                    f"{did_you_mean(parameter.name, known)} Name the columns that it reads: "
                    f"data.columns=[{parameter.name}]."
                ),
            )
    return None if takes_all else frozenset(taken & known)


def sum_rewards(functions: Sequence[RewardFunction], rewards: Mapping[str, Sequence[float]]) -> list[float]:
    """The weighted sum of the rewards of each completion, without those that do not apply; NaN: none applies.

    Args:
        rewards: Name of a function -> its reward of each completion; NaN: it does not apply.
    """
    sums = []
    for values in zip(*(rewards[function.name] for function in functions), strict=True):
        applied = []
        for function, value in zip(functions, values, strict=True):
            if not math.isnan(value):
                applied.append(function.weight * value)
        sums.append(math.fsum(applied) if applied else math.nan)
    return sums
