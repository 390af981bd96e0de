"""Checks that the launcher's processes and the settings of ``accelerate launch`` agree with the recipe."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from fastloop.distributed.ranks import world_size
from fastloop.errors import PluginError
from fastloop.plugins.plugin import hookimpl
from fastloop.problem import Problem

if TYPE_CHECKING:
    from fastloop.plugins.manager import PluginSet
    from fastloop.recipe import Recipe
    from fastloop.run import Run

logger = logging.getLogger("fastloop")

STRATEGIES = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM")
"""Variables of the strategies that ``accelerate launch`` can request. In fastloop, plugins of the same names implement
them."""
PARALLELISM = "ACCELERATE_USE_PARALLELISM_CONFIG"
"""Variable of the division of processes that ``accelerate launch`` can request. Accelerate reads it itself, under each
strategy."""

LAUNCHED = ("ACCELERATE_MIXED_PRECISION", "MASTER_ADDR", "MASTER_PORT")
"""Variables that ``accelerate launch`` sets together for several processes. Without ``--multi_gpu``, it starts one."""
COUNTS = ("WORLD_SIZE", "RANK")
"""Variables that each of several processes has."""

MULTI_GPU = "accelerate launch --multi_gpu --num_processes N -m fastloop train RECIPE"


def warn_of_one_process(recipe: Recipe) -> None:
    """Warn if a launcher with variables for several processes started one."""
    is_launched = all(name in os.environ for name in LAUNCHED)
    if is_launched and not any(name in os.environ for name in COUNTS):
        logger.warning(
            Problem(
                "accelerate launch was asked for several processes and started one. It starts several only with "
                "--multi_gpu, or with `distributed_type: MULTI_GPU` in its configuration file, also on a CPU.",
                code="one-process",
                place=recipe.where,
                remedy="Use:",
                command=MULTI_GPU,
            )
        )


@hookimpl(specname="before_fit")
def report_one_process(run: Run) -> None:
    """Log that a run with a strategy for several processes trains on one."""
    strategy = run.plugins.in_slot("strategy")
    if run.world_size == 1 and strategy is not None:
        logger.info(
            "the run has one process, and the strategy %r is for several: start N of them with --nproc N", strategy
        )


@hookimpl(trylast=True)
def check_recipe(recipe: Recipe, plugins: PluginSet) -> None:
    """Compare the launcher's settings with the recipe, then remove its request for a strategy: a plugin sets that up.

    Raises:
        PluginError: They contradict each other.
    """
    if world_size() == 1 and recipe.inference is None:
        warn_of_one_process(recipe)
    launcher = f"{recipe.where}: accelerate's configuration asks for"
    _check_strategy(launcher, plugins.in_slot("strategy"))
    _check_precision(launcher, recipe, plugins)
    compiler = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "")
    if compiler.upper() not in ("NO", ""):
        raise PluginError(
            f"{launcher} the compiler {compiler!r} (ACCELERATE_DYNAMO_BACKEND).",
            code="launcher-differs",
            remedy="Take it out there, and list 'compile' here.",
        )
    steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "")
    if steps not in ("1", "", "auto"):
        raise PluginError(
            f"{launcher} {steps} accumulation steps (ACCELERATE_GRADIENT_ACCUMULATION_STEPS).",
            code="launcher-differs",
            remedy="Take it out there, and set train.batch_size and train.micro_batch_size here.",
        )
    for variable in STRATEGIES:
        os.environ.pop(variable, None)


def _check_strategy(launcher: str, strategy: str | None) -> None:
    """Compare the strategy that the launcher asks for with that of the recipe.

    Args:
        launcher: The beginning of the message.
        strategy: The plugin in the slot; None: the recipe lists none.

    Raises:
        PluginError: The launcher asks for another one, or for a division of the processes.
    """
    for variable in STRATEGIES:
        asked = variable.removeprefix("ACCELERATE_USE_").lower().replace("_", "-")
        if os.environ.get(variable, "").lower() in ("true", "1") and asked != strategy:
            listed = f"the recipe lists {strategy!r}" if strategy else "the recipe lists no strategy"
            raise PluginError(
                f"{launcher} {asked!r} ({variable}), and {listed}.",
                code="launcher-differs",
                remedy=f"Take it out there, or list {asked!r} here.",
            )
    if os.environ.get(PARALLELISM, "").lower() in ("true", "1", "yes"):
        raise PluginError(
            f"{launcher} a parallelism_config ({PARALLELISM}).",
            code="launcher-differs",
            remedy=(
                "Take it out there. List context-parallel, tensor-parallel, or fsdp with tensor or shard_within here."
            ),
        )


def _check_precision(launcher: str, recipe: Recipe, plugins: PluginSet) -> None:
    """Compare the mixed precision that the launcher asks for with that of the recipe.

    Args:
        launcher: The beginning of the message.

    Raises:
        PluginError: The recipe has another one.
    """
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "")
    if asked in ("no", ""):
        return
    precision = plugins.configure(recipe).mixed_precision
    if asked != precision:
        raise PluginError(
            f"{launcher} mixed precision {asked!r} (ACCELERATE_MIXED_PRECISION), and the recipe's is {precision!r}.",
            code="launcher-differs",
            remedy="Remove it there, or list a plugin in the slot 'precision' here with the same precision.",
        )
