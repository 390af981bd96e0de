"""The model of an inference run: the folder of a run, or of an exported model."""

from __future__ import annotations

import dataclasses
import logging
import mimetypes
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from fastloop import Problem
from fastloop.cli import startup
from fastloop.cli.startup import reduced_gc, start_run, started_from
from fastloop.errors import RecipeError, UsageError
from fastloop.plugins.declarations import warn_once
from fastloop.recipe import Inference, Recipe, load_recipe
from fastloop.recipe.paths import nothing_at
from fastloop.runtime.files import check_links, read_json_object
from fastloop.runtime.step_folders import manifest_digests, step_of
from fastloop_plugins.models.hub import check_one_export

if TYPE_CHECKING:
    from fastloop import Plugin
    from fastloop.plugins.resolve import ResolvedRecipe
    from fastloop.run import Run

log = logging.getLogger("fastloop")

SELECTION = {"numerics": "reassociated"}
"""Options of ``auto`` in a recipe that does not list it: metrics stay those of training, up to rounding."""
SOURCE = ("name", "subset", "revision", "files", "sources", "module", "arguments")
"""Options of ``data`` that say where rows come from."""
SHORT = 2**14
"""Bytes of a file to predict, from which on ``auto`` is added: about 40 texts. Selecting takes 0.3 s, in which small
models predict as many on a CPU."""


def load(
    target: str,
    arguments: Sequence[str],
    inference: Inference,
    with_plugins: Iterable[str] = (),
    without_plugins: Iterable[str] = (),
) -> Recipe:
    """The recipe of a run folder or of an exported model, for inference, with ``auto`` if it pays.

    Args:
        target: RUN, with ``recipe.yaml`` and ``model/``, or MODEL, a folder with weights in safetensors files.
        arguments: At most one RECIPE, and overrides. Without RECIPE, the run's own is used.
        inference: Its ``model`` is replaced by the folder found.
        with_plugins: Plugins to add to the recipe's.
        without_plugins: Plugins to leave out.

    Raises:
        UsageError: The target is neither, the run exported no model, or a model comes without a recipe.
    """
    named = [argument for argument in arguments if "=" not in argument]
    overrides = [argument for argument in arguments if "=" in argument]
    if len(named) > 1:
        raise UsageError(
            code="several-recipes",
            found=f"{len(named)} recipes: {', '.join(named)}",
            expected="at most one; overrides are KEY=VALUE",
        )
    place = find_model(target)
    if named:
        recipe_file = named[0]
    elif place.is_of_run:
        recipe_file = str(place.run_recipe)
    else:
        raise UsageError(
            "this exported model has no recipe of its own.",
            code="no-recipe",
            place=str(target),
            remedy=f"Name the recipe that gives its task and data: {target} RECIPE.",
        )
    recipe = load_recipe(recipe_file, overrides, with_plugins, without_plugins)
    if recipe.source:
        recipe.source = started_from(recipe.source)
    is_own_data = True
    if named or any(override.startswith("data") for override in overrides):
        is_own_data = _has_source_of(recipe, recipe_file if place.run is None else str(place.run_recipe))
    recipe.inference = dataclasses.replace(inference, model=place.model.resolve(), is_own_data=is_own_data)
    if not is_short(inference.source):
        recipe.plugins.setdefault("auto", dict(SELECTION))
    return recipe


def _has_source_of(recipe: Recipe, file: str) -> bool:
    """Whether a recipe names the same data as the recipe in a file. One that cannot be read names other data."""
    try:
        own = load_recipe(file)
    except RecipeError:
        return False
    if own.source:
        own.source = started_from(own.source)
    return all(_resolved(recipe.data.get(key), recipe) == _resolved(own.data.get(key), own) for key in SOURCE)


def _resolved(value: Any, recipe: Recipe) -> Any:
    """A setting with the absolute paths of files and folders that exist: ``saved`` and ``./saved`` name the same
    data."""
    if isinstance(value, Mapping):
        return {key: _resolved(item, recipe) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolved(item, recipe) for item in value]
    if isinstance(value, str):
        try:
            path = recipe.find(value)
        except RecipeError:
            return value
        if path.exists():
            return str(path.resolve())
    return value


@dataclass(frozen=True)
class ModelPlace:
    """A model on the disk.

    Attributes:
        model: Its folder.
        run: The run folder that it is in, or beside whose recipe it lies; None: there is no recipe.
    """

    model: Path
    run: Path | None

    @property
    def is_of_run(self) -> bool:
        """Whether the run exported it, so that the run's recipe is its own."""
        return self.run is not None and self.model == self.run / "model"

    @property
    def run_recipe(self) -> Path:
        """The recipe of the run."""
        assert self.run is not None
        return self.run / "recipe.yaml"


def find_model(target: str) -> ModelPlace:
    """The model in RUN/model, or in the folder MODEL.

    Raises:
        UsageError: The target is neither, or the run exported no model.
        RecipeError: The folder holds several exports.
    """
    folder = Path(target)
    if not folder.is_dir():
        raise UsageError(
            f"{nothing_at(folder, 'folder')}.",
            code="not-a-run",
            place=str(target),
            expected="a run folder, such as runs/quickstart, or an exported model",
        )
    run = None
    for place in (folder, folder.parent):
        if run is None and (place / "recipe.yaml").is_file():
            run = place
    if run is not None:
        check_links(run)
    model = folder / "model" if run == folder else folder
    if any(model.glob("*.safetensors")):
        check_one_export(str(target), model)
        return ModelPlace(model, run)
    if run == folder:
        raise UsageError(
            f"this run has exported no model: there are no weights in {model}. It failed, was stopped or still trains.",
            code="no-exported-model",
            place=str(target),
            remedy="To complete it:",
            command=f"fastloop train {quote(str(folder / 'recipe.yaml'))} {quote(f'output={folder}')} --resume",
        )
    raise UsageError(
        "neither a run folder (recipe.yaml, model/) nor an exported model (*.safetensors).",
        code="not-a-run",
        place=str(target),
    )


def warn_about_older_model(model: Path) -> None:
    """Log that the run of an exported model has trained on since: it was resumed, and still trains, was stopped or
    failed. Call it after ``show_messages``."""
    run = model.parent
    summary = read_json_object(run / "summary.json")
    steps = summary.get("steps")
    if model.name != "model" or not isinstance(steps, int):
        return
    is_older = "model_step" in summary and summary["model_step"] is None
    listed = summary.get("checkpoints") or {}
    for name, digest in manifest_digests(run).items():  # no time is compared: a clock may be set back
        step = step_of(Path(name)) or 0
        if listed.get(name) != digest and step > steps:
            is_older = True
            steps = step
    if is_older:
        warn_once(  # an export opens the model several times
            Problem(
                f"the run has reached step {steps}, and has not exported its model since: it was resumed, and still "
                "trains, was stopped or failed. The model is an earlier one.",
                code="older-model",
                place=str(model),
                remedy="For that of the newest checkpoint:",
                command=f"fastloop export {quote(str(run))} --checkpoint last",
            )
        )


def default_split(target: str, arguments: Sequence[str]) -> str:
    """The split that `fastloop evaluate` evaluates by default: ``test``, or ``validation`` for a run whose summary has
    no metrics of a test split, which is logged.

    Args:
        arguments: The recipe and overrides. If they name data, they may add a test split.
    """
    if any("=" not in argument or argument.startswith("data") for argument in arguments):
        return "test"
    summary = read_json_object(Path(target) / "summary.json")
    if summary.get("test") or not summary.get("validation"):
        return "test"
    log.info("%s: the run had no test split, so validation is evaluated (--split NAME: another one)", target)
    return "validation"


def is_short(source: Path | Iterable[str] | None) -> bool:
    """Whether the samples to predict are few: texts of the command line or of stdin, an image, or a small file."""
    if source is None:
        return False
    if not isinstance(source, Path):
        return True
    media_type, _ = mimetypes.guess_type(source)
    if media_type is not None and media_type.startswith("image/"):
        return True
    return source.is_file() and source.stat().st_size < SHORT


def read_file_instead(recipe: Recipe, file: Path) -> None:
    """Make a file the recipe's only data, as the evaluated split."""
    assert recipe.inference is not None
    if not file.is_file():
        raise UsageError(f"{nothing_at(file)}.", code="file-missing", place=f"--file {file}")
    elsewhere = {*SOURCE, "splits", "limit"}
    elsewhere |= {"streaming", "shuffle_buffer", "lanes", "mix"}  # of training rows
    recipe.data = {key: value for key, value in recipe.data.items() if key not in elsewhere}
    recipe.data["files"] = {recipe.inference.split: str(file)}


def open_inference(
    recipe: Recipe, extra: Sequence[Plugin] = (), file: Path | None = None
) -> AbstractContextManager[Run]:
    """``open_run`` for an inference recipe.

    Args:
        extra: Plugin objects to add, before all others.
        file: The file of the option --file; None: the recipe's data.

    Raises:
        UsageError: The recipe or the data is wrong, or the task cannot read ``file``.
    """
    from fastloop.cli.messages import show_messages

    show_messages()
    with reduced_gc():
        resolved = select(recipe)
        startup.start_again(resolved)
    if file is not None:
        check_reads_files(resolved.plugins.task, file)
    names = [name for name in resolved.plugins.names() if name in resolved.recipe.selected]
    if names:
        log.info("auto: selects %s (--without auto: none)", ", ".join(names))
    inference = recipe.inference
    if inference is None or inference.model is None:
        return start_run(resolved, extra)
    warn_about_older_model(inference.model)
    from fastloop_tools.inference.weights import ExportedWeights  # imports torch

    return start_run(resolved, [*extra, ExportedWeights(inference.model)])


def check_reads_files(task: Plugin | None, file: Path) -> None:
    """Raise an error for --file with a task whose section ``data`` has no option ``files``."""
    section: Any = getattr(task, "sections", {}).get("data")
    if section is not None and "files" in {field.name for field in dataclasses.fields(section)}:
        return
    raise UsageError(
        f"the task {task.name if task else 'none'!r} reads no files (data.files).",
        code="unsupported-task",
        place=f"--file {file}",
        remedy="Use `--split NAME`.",
    )


def select(recipe: Recipe) -> ResolvedRecipe:
    """Resolve a recipe. If it fails with the default selection only, resolve it without, and log the error."""
    try:
        return startup.resolve_early(recipe)
    except Exception as error:
        if recipe.plugins.get("auto") != SELECTION:
            raise
        resolved = startup.resolve_early(dataclasses.replace(recipe, plugins=recipe.plugins | {"auto": False}))
        log.warning(Problem(f"selects nothing: {error}", code="nothing-selected", place="auto"))
        return resolved
