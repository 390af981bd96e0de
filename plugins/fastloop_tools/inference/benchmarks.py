"""``fastloop evaluate --tasks``: evaluate a language model with the library lm-eval."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Any

from fastloop import no_code
from fastloop.distributed import ranks
from fastloop.errors import FastloopError, UsageError, did_you_mean
from fastloop.problem import clause, typed_clause
from fastloop.recipe import Inference, Recipe, Train
from fastloop.recipe.paths import nothing_at

SPLIT = "lm-eval"
"""The value of ``split`` in the results, and the beginning of their file's name."""
COLUMNS = {"stderr": "{:.4f}", "shots": "{}", "samples": "{}"}
"""Key of a row -> how it is printed."""


def evaluate_tasks(
    target: str, arguments: Sequence[str], tasks: Sequence[str], folder: Path | None, trusted: bool
) -> dict[str, Any]:
    """Evaluate tasks of lm-eval on one process. Returns a record as ``saved.save`` takes it.

    Args:
        target: RUN or MODEL. A MODEL needs no recipe.
        arguments: RECIPE and overrides. ``train.eval_batch_size``, ``train.device`` and ``model.trust_remote_code``
            count.
        folder: A folder of further task files.
        trusted: Whether the code of these files may run.

    Raises:
        UsageError: lm-eval is not installed, the model is not a language model, or there is no such task.
        FastloopError: lm-eval failed.
    """
    if ranks.world_size() > 1:
        raise UsageError(
            "uses one process.", code="one-process-only", place="--tasks", remedy="Start it without a launcher."
        )
    check_folder(folder, trusted)
    recipe, model = find_model(target, arguments)
    train = recipe.train if recipe else Train()
    remote = bool(recipe and recipe.model.get("trust_remote_code"))
    if recipe is not None and remote:
        no_code.refuse(f"{recipe.where}: model.trust_remote_code", f"it runs the Python code that ships with {model}")
    check_model(model, remote)
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise UsageError(
            f"lm-eval cannot be imported ({clause(error)}).",
            code="not-installed",
            place="--tasks",
            remedy="Install it:",
            command="pip install 'fastloop-train[lm-eval]'",
        ) from None
    from fastloop.runtime.hardware import this_machine

    manager = find_tasks(tasks, folder)
    started = perf_counter()
    device = this_machine(train.device).device
    try:
        loaded = HFLM(
            pretrained=str(model),
            device=device,
            batch_size=train.eval_batch_size or train.micro_batch_size or train.batch_size,
            trust_remote_code=remote,
            # if a context with the beginning of a choice is another context, the cache mixes up their log-likelihoods
            logits_cache=False,
        )
        results: Any = lm_eval.simple_evaluate(loaded, tasks=list(tasks), task_manager=manager, log_samples=False)
    except Exception as error:
        raise FastloopError(
            f"lm-eval {metadata.version('lm-eval')} failed: {typed_clause(error)}.",
            code="benchmark-failed",
            place=f"--tasks {','.join(tasks)}",
        ) from error
    rows = read_results(results)
    command = ["--tasks", ",".join(tasks)]
    if folder is not None:
        command += ["--task-folder", str(folder)]
    return {
        "model": target,
        "split": SPLIT,
        "file": None,
        "arguments": [*command, *arguments],
        "metrics": {f"{row['task']} {row['metric']}": row["value"] for row in rows},
        "classes": [],
        "confusion": [],
        "tasks": rows,
        "lm_eval": metadata.version("lm-eval"),
        "device": device,
        "world_size": 1,
        "seconds": perf_counter() - started,
    }


def check_folder(folder: Path | None, trusted: bool) -> None:
    """Check that the folder exists, and that its code may run.

    Raises:
        UsageError: One of them is not so.
    """
    if folder is None:
        return
    if not folder.is_dir():
        raise UsageError(f"{nothing_at(folder, 'folder')}.", code="file-missing", place=f"--task-folder {folder}")
    if no_code.is_forbidden():
        raise UsageError(
            f"task files run code, which {no_code.OPTION} refuses.",
            code="code-refused",
            place=f"--task-folder {folder}",
            remedy="Leave one of the two out.",
        )
    if not trusted:
        raise UsageError(
            "task files run code: the functions of !function, metrics, and templates, which lm-eval does not confine.",
            code="code-refused",
            place=f"--task-folder {folder}",
            remedy="Read them first. If you trust them, add --trust-task-code.",
        )


def find_model(target: str, arguments: Sequence[str]) -> tuple[Recipe | None, Path]:
    """The recipe of a run or of the command, and the folder of the exported model.

    Raises:
        UsageError: See ``target.load``.
    """
    from fastloop_tools.inference.target import load

    folder = Path(target)
    if not arguments and (folder / "config.json").is_file() and not (folder.parent / "recipe.yaml").is_file():
        return None, folder.resolve()
    recipe = load(target, arguments, Inference(Path(), "test"))
    assert recipe.inference is not None
    assert recipe.inference.model is not None
    return recipe, recipe.inference.model


def check_model(model: Path, remote: bool) -> None:
    """Check that a model predicts tokens: lm-eval would give another one a new head.

    Args:
        remote: Whether the code that ships with the model may run.

    Raises:
        UsageError: It is not a language model.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )

    from fastloop.runtime.files import read_json_object
    from fastloop_plugins.models.adapters import is_adapter

    if is_adapter(model):
        raise UsageError(
            code="unsupported-model",
            place=f"--tasks: {model}",
            found="an adapter",
            expected="a whole model",
            remedy="Merge it first:",
            command="fastloop export RUN --to safetensors",
        )
    config = read_json_object(model / "config.json")
    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values()}
    architectures = config.get("architectures") or ["no transformers model"]
    own_code = config.get("auto_map") or {}
    if known.intersection(architectures) or (remote and "AutoModelForCausalLM" in own_code):
        return
    raise UsageError(
        code="unsupported-model", place=f"--tasks: {model}", found=", ".join(architectures), expected="a language model"
    )


def find_tasks(tasks: Sequence[str], folder: Path | None) -> Any:
    """A ``TaskManager`` that has the tasks. lm-eval reads its own 14,000 files only if the folder lacks one of them.

    Raises:
        UsageError: There is no such task.
    """
    from lm_eval.tasks import TaskManager

    own = None
    if folder is not None:
        own = TaskManager(include_path=str(folder.resolve()), include_defaults=False)
        if not set(tasks) - set(own.all_subtasks):
            return own
    manager = TaskManager(include_path=str(folder.resolve()) if folder else None)
    for task in tasks:
        if task not in manager.all_tasks:
            own_tasks = f" {folder} has: {', '.join(own.all_tasks) or 'none'}." if own else ""
            raise UsageError(
                f"lm-eval {metadata.version('lm-eval')} has no task "
                f"{task!r}.{own_tasks}{did_you_mean(task, manager.all_tasks)}",
                code="unknown-task",
                place="--tasks",
            )
    return manager


def read_results(results: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each metric of each task and group: ``task``, ``metric``, ``value``, ``stderr`` (None: unknown),
    ``shots`` and ``samples``."""
    rows = []
    for task, values in (results["results"] | results.get("groups", {})).items():
        for key, value in values.items():
            metric, _, chosen = key.partition(",")
            if not chosen or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{chosen}")
            rows.append(
                {
                    "task": task,
                    "metric": metric if chosen == "none" else f"{metric} {chosen}",
                    "value": float(value),
                    "stderr": float(error) if isinstance(error, int | float) else None,
                    "shots": results["n-shot"].get(task),
                    "samples": (results["n-samples"].get(task) or {}).get("effective"),
                }
            )
    return rows


def show_tasks(rows: Sequence[dict[str, Any]]) -> None:
    """Print the results as a table."""
    from fastloop_tools.shared.tables import show_table

    cells = []
    for row in rows:
        line = [row["task"], row["metric"], f"{row['value']:.4f}"]
        for name, form in COLUMNS.items():
            line.append("" if row[name] is None else form.format(row[name]))
        cells.append(line)
    show_table(["task", "metric", "value", *COLUMNS], cells)
