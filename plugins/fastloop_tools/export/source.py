"""The exported model to convert: the one of a run, or one that is made from a checkpoint or an adapter."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fastloop import Problem
from fastloop.cli.messages import only_warnings, show_messages
from fastloop.cli.startup import started_from
from fastloop.errors import CheckpointError, UsageError
from fastloop.problem import clause
from fastloop.recipe import Inference, Recipe, load_recipe
from fastloop.runtime.files import check_links
from fastloop.runtime.step_folders import step_folder
from fastloop_plugins.models.adapters import is_adapter
from fastloop_tools.inference.target import SELECTION, load, warn_about_older_model

log = logging.getLogger("fastloop")


def find_weights(
    target: str,
    arguments: Sequence[str],
    checkpoint: str | None,
    adapter: bool,
    with_plugins: Iterable[str],
    without_plugins: Iterable[str],
) -> tuple[Recipe, Path]:
    """The recipe, and the weights to export: the folder of an exported model, of a checkpoint, or of an adapter.

    Args:
        target: RUN or MODEL.
        arguments: RECIPE and overrides.
        checkpoint: ``last``, ``best``, or the name of a folder in the run's ``checkpoints``; None: the exported model.
        adapter: Whether to export the adapter alone.

    Raises:
        UsageError: There is no such model or checkpoint, or it has no adapter.
    """
    if checkpoint is None:
        recipe = load(target, arguments, Inference(Path(), "test"), with_plugins, without_plugins)
        assert recipe.inference is not None
        assert recipe.inference.model is not None
        weights = recipe.inference.model
        show_messages()
        warn_about_older_model(weights)
    else:
        run = Path(target)
        if not (run / "recipe.yaml").is_file():
            raise UsageError(
                code="not-a-run",
                place=f"{target}: --checkpoint {checkpoint}",
                found="no recipe.yaml",
                expected="a run folder, such as runs/quickstart",
            )
        check_links(run)
        wrong = next((argument for argument in arguments if "=" not in argument), None)
        if wrong:
            raise UsageError(
                "found a recipe for --checkpoint, which uses the recipe of its run.",
                code="exclusive-options",
                place=str(wrong),
                remedy="Leave it out.",
            )
        recipe = load_recipe(str(run / "recipe.yaml"), arguments, with_plugins, without_plugins)
        recipe.source = recipe.source and started_from(recipe.source)
        weights = find_checkpoint(run, checkpoint)
    if adapter and not recipe.has_plugin("lora"):
        raise UsageError(
            "--to adapter: the recipe trains no adapter: it does not list the plugin lora.",
            code="no-adapter",
            place=str(target),
        )
    if adapter and checkpoint is None and not is_adapter(weights):  # the adapter is merged into the exported model
        weights = find_checkpoint_of_model(Path(target))
    return recipe, weights


def find_checkpoint_of_model(run: Path) -> Path:
    """The folder of the checkpoint whose weights the run has exported, verified.

    Raises:
        UsageError: No checkpoint has them, or ``run`` is no run folder.
        CheckpointError: It is damaged.
    """
    try:
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        summary = {}
    step = summary.get("model_step")
    best = summary.get("best") or {}
    folders = []
    if step is not None and step == best.get("step"):
        folders.append(run / str(best.get("path")))
    if step is not None and summary.get("model_weights") == "trained":
        folders.append(step_folder(run, step))
    for folder in folders:
        if folder.is_dir():
            return find_checkpoint(run, folder.name)
    raise UsageError(
        "--to adapter: in the exported model, the adapter is merged into the weights, and no checkpoint of a run has "
        "the same weights. The checkpoints of a run have adapters alone: add --checkpoint last, or best.",
        code="no-adapter",
        place=str(run),
    )


def find_checkpoint(run: Path, name: str) -> Path:
    """The folder of a checkpoint, verified.

    Raises:
        CheckpointError: There is none of this name, or it is damaged.
    """
    from fastloop import checkpoint

    if name == "last":
        newest = checkpoint.find_newest(run)
        for warning in newest.skipped:
            log.warning(Problem(f"{warning}.", code="damaged-checkpoint"))
        return newest.checkpoint
    folders = sorted(path for path in (run / "checkpoints").glob("[!.]*") if path.is_dir())
    if name == "best":
        chosen = [path for path in folders if path.name.startswith("best-")]
    else:
        chosen = [path for path in folders if path.name == name]
    if len(chosen) > 1:
        chosen = [path for path in chosen if path == best_of(run)]
    if not chosen:
        names = ", ".join(path.name for path in folders) or "none"
        hint = " The plugin checkpoint-best keeps the best one." if name == "best" else ""
        raise CheckpointError(
            f"there is no checkpoint {name!r}. There are: {names}.", code="no-checkpoint", place=str(run), remedy=hint
        )
    problem = checkpoint.verify(chosen[0])
    if problem:
        raise CheckpointError(f"{chosen[0]}: damaged: {problem}.", code="damaged-checkpoint")
    return chosen[0]


def make_model(recipe: Recipe, weights: Path, adapter: bool, scratch: Path) -> Path:
    """The folder of an exported model. If ``weights`` is another one, build the model as in training, load them and
    export it.

    Args:
        recipe: The recipe of the weights.
        weights: A result of ``find_weights``.
        adapter: Whether to export the adapter alone; otherwise adapters are merged.
        scratch: A temporary folder.

    Raises:
        UsageError: The weights are not those of the recipe's model.
    """
    is_checkpoint = (weights / "manifest.json").is_file()
    if not is_checkpoint and is_adapter(weights) == adapter:
        return weights
    from fastloop import checkpoint
    from fastloop.cli.startup import start_run
    from fastloop.plugins.resolve import resolve

    show_messages()
    folder = scratch / "model"
    with only_warnings(), start_run(resolve(training_recipe(recipe, adapter, scratch))) as run:
        if is_checkpoint:
            try:
                run.strategy.load_model_state(run, checkpoint.read(weights)[0])
            except RuntimeError as error:
                raise CheckpointError(
                    f"not a checkpoint of this model: {clause(error)}.",
                    code="damaged-checkpoint",
                    place=str(weights),
                ) from None
        else:
            model: Any = run.unwrap_model()
            model.load_adapter(str(weights), "default")
        run.hooks.export_model(run=run, folder=folder)
    return folder


def best_of(run: Path) -> Path | None:
    """The best checkpoint that a run's summary names; None: unknown."""
    try:
        return run / str(json.loads((run / "summary.json").read_text(encoding="utf-8"))["best"]["path"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def training_recipe(recipe: Recipe, adapter: bool, scratch: Path) -> Recipe:
    """The recipe that builds the model of training on one process, without plugins that only observe or publish."""
    from fastloop.plugins.resolve import load_listed

    plugins = dict(recipe.plugins)
    if plugins.get("auto") == SELECTION:  # predictions add it; it would select for a training that does not happen
        plugins["auto"] = False
    for name, options in recipe.plugins.items():
        cls = load_listed(recipe, name) if options is not False else None
        if cls is not None and (cls.slot == "strategy" or cls.read_only or cls.publishes):
            plugins[name] = False
    options = plugins.get("lora", False)
    if options is not False:
        plugins["lora"] = {**options, "merge": not adapter}
    output = scratch / "runs" / Path(recipe.output or "run").name  # the README has the name of the run
    return dataclasses.replace(recipe, plugins=plugins, output=str(output), inference=None)
