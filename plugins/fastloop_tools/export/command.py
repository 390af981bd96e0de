"""``fastloop export``: writes a trained model as safetensors, as an adapter or as ONNX, and uploads it."""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fastloop import Problem
from fastloop.cli.arguments import NoCode, With, Without, choice, names
from fastloop.distributed import ranks, signals
from fastloop.errors import UsageError
from fastloop.export.card import BASE_CONFIG, ModelCard, add_checksum, is_local, is_unedited, remove_checksum, rename
from fastloop.export.text_inputs import TextInputs
from fastloop.plugins.installed import installed_version
from fastloop_tools.inference.evaluate import Arguments, Target

if TYPE_CHECKING:
    from torch import nn

    from fastloop.recipe import Recipe
    from fastloop_tools.export.onnx_model import OnnxExport

log = logging.getLogger("fastloop")

PACKAGES = {"onnx": "1.17", "onnxruntime": "1.20", "onnxscript": "0.2"}
"""Package -> the oldest version that ``--to onnx`` works with. The extra ``onnx`` installs them."""
FORMS = ("safetensors", "adapter", "onnx")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "README.md", ".*")
"""Files of an exported model that an ONNX folder does not have. The others are the tokenizer's and the configuration
with the labels."""


def export(
    target: Target,
    arguments: Arguments = None,
    to: Annotated[
        str,
        choice(
            "--to",
            FORMS,
            "safetensors: all weights, with LoRA merged. adapter: the LoRA weights alone. onnx: needs the extra onnx.",
        ),
    ] = "safetensors",
    quantize: Annotated[
        str | None,
        choice(
            "--quantize",
            ("int8",),
            "Round the weights of linear layers to 8 bits, and show the loss of quality. safetensors: needs the extra "
            "int8.",
        ),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Export this checkpoint of the run: last, best or its folder's name."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where to write [default: beside the model, such as RUN/model-onnx]."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the files in FOLDER.")] = False,
    push: Annotated[
        str | None,
        typer.Option(
            metavar="REPO", help="Also upload to this repository of the Hugging Face hub; a new one is private."
        ),
    ] = None,
    with_: With = None,
    without: Without = None,
    no_code: NoCode = False,
) -> None:
    """Write a trained model in a form that other programs load.

    An ONNX model is compared with the torch model in onnxruntime, on batches of several shapes, and written only if
    both agree.
    """
    from fastloop_tools.export import folder, hub, source
    from fastloop_tools.export import quantize as int8

    if ranks.world_size() > 1:
        raise UsageError("export uses one process.", code="one-process-only", remedy="Start it without a launcher.")
    int8.check(to, quantize)
    if to == "onnx":
        check_packages()
    recipe, weights = source.find_weights(
        target, arguments or (), checkpoint, to == "adapter", names(with_), names(without)
    )
    out = out or default_folder(Path(target), checkpoint and weights.name, f"{to}-{quantize}" if quantize else to)
    folder.check(out, overwrite, weights)
    if push is not None:
        hub.check(push)
    with (
        signals.on_signals(signals.stop_now),
        tempfile.TemporaryDirectory(prefix="fastloop-export-") as scratch,
        folder.written(out) as unfinished,
    ):
        model_folder = source.make_model(recipe, weights, to == "adapter", Path(scratch))
        comparison = write_export(recipe, model_folder, unfinished, to, str(out), Path(target).resolve().name)
        if comparison:
            typer.echo(comparison)
        if quantize:
            write_int8(recipe, model_folder, unfinished, to, comparison)
        if push is not None:
            hub.name_repository(unfinished, push)
    typer.echo(f"written to {out}")
    if push is not None:
        typer.echo(f"uploaded to {hub.upload(out, push)}")


def check_packages() -> None:
    """Check that the packages of the extra ``onnx`` are installed.

    Raises:
        UsageError: One is missing or too old.
    """
    from packaging.version import Version  # only here: the help imports this module

    for package, least in PACKAGES.items():
        installed = installed_version(package)
        if installed is None:
            raise UsageError(
                f"--to onnx: {package}>={least} is not installed.",
                code="not-installed",
                remedy="Install it:",
                command="pip install 'fastloop-train[onnx]'",
            )
        if Version(installed) < Version(least):
            raise UsageError(
                f"--to onnx: needs {package}>={least}, found {installed}.",
                code="not-installed",
                remedy="Upgrade it:",
                command="pip install -U 'fastloop-train[onnx]'",
            )


def default_folder(target: Path, checkpoint: str | None, to: str) -> Path:
    """The folder without ``--out``: in the run folder, or beside the exported model.

    Args:
        checkpoint: The checkpoint's name; None: the exported model.
    """
    if checkpoint is not None or (target / "recipe.yaml").is_file():
        return target / f"{checkpoint or 'model'}-{to}"
    target = target.resolve()
    return target.with_name(f"{target.name}-{to}")


def write_export(recipe: Recipe, model_folder: Path, destination: Path, to: str, name: str, source_name: str) -> str:
    """Write the files of an export. Returns the comparison of an ONNX model with the torch model; empty for another
    one.

    Args:
        recipe: The recipe of the model. An ONNX export sets its ``inference``.
        model_folder: The folder of the exported model.
        destination: The folder to write to.
        name: The final path of ``destination``, for the code in the README.
        source_name: The name of the run or model, for the README.
    """
    exported = None
    task = None
    ignored: tuple[str, ...] = (".*",)
    if to == "onnx":
        from fastloop.recipe import Inference
        from fastloop_tools.export import calls, onnx_model

        ignored = WEIGHTS
        recipe.inference = Inference(model_folder, "test")
        with calls.open_exported(recipe) as (run, has_data):
            recorded = calls.record(run, has_data)
            task = run.plugins.in_slot("task")
            exported = onnx_model.export_onnx(run.unwrap_model(), recorded, destination, source_name)
    shutil.copytree(model_folder, destination, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*ignored))
    config = model_folder / (BASE_CONFIG if to == "adapter" else "config.json")
    given = recipe.model.get("name")
    base = None if given is None else str(given)
    card = ModelCard(
        title=source_name,
        name=name,
        base=base,
        base_is_folder=base is not None and is_local(base, recipe.find(base)),
        task=task,
        labels=read_labels(config),
        texts=TextInputs.of_export(recipe.data, destination),
    )
    write_readme(destination, card, exported)
    return "" if exported is None else str(exported)


def read_labels(config: Path) -> dict[int, str]:
    """The names of classes in the configuration of a model: class -> name. Empty without classes."""
    from fastloop.runtime.files import read_json_object

    names = read_json_object(config).get("id2label") or {}
    return {int(index): str(label) for index, label in names.items()}


def write_readme(destination: Path, card: ModelCard, exported: OnnxExport | None) -> None:
    """Write the README of an export. One that a user has written or edited stays.

    Args:
        card: Its content. The task is that of an ONNX model only.
        exported: The ONNX model; None: the export is a model of transformers.
    """
    from fastloop_tools.export.card import onnx_card

    readme = destination / "README.md"
    if exported is not None:
        page = onnx_card(card, exported, destination)
    elif not readme.exists():  # a model of another program, or of an earlier version
        page = card.render(destination)
    elif is_unedited(readme):
        page = rename(readme.read_text(encoding="utf-8"), card.name)
    else:
        return
    readme.write_text(page, encoding="utf-8")


def write_int8(recipe: Recipe, model_folder: Path, destination: Path, to: str, comparison: str) -> None:
    """Quantize the files of an export, and print the metrics before and after. The README has them, too, unless a user
    has written or edited it.

    Args:
        model_folder: The folder of the exported model.
        destination: The folder of the export.
        comparison: A result of ``write_export``.
    """
    from fastloop_tools.export import quantize as int8
    from fastloop_tools.shared.tables import markdown_table, show_table

    size_before = int8.size_of(destination)

    def quantize(model: nn.Module) -> None:
        if to == "onnx":
            int8.quantize_onnx(destination / "model.onnx")
            int8.use_onnx(model, destination / "model.onnx")
        else:
            int8.quantize_folder(model, model_folder, destination)

    metrics = int8.measure(recipe, model_folder, quantize)
    rows = int8.describe(metrics, size_before, int8.size_of(destination))
    show_table(int8.HEAD, rows)
    readme = destination / "README.md"
    if not is_unedited(readme):
        log.warning(
            Problem(
                "the page stays, since fastloop has not written it, or it was edited. It does not say that the weights "
                "are rounded.",
                code="page-kept",
                place="--quantize int8: README.md",
                remedy="Add the table above.",
            )
        )
        return
    page = int8.describe_rounding(remove_checksum(readme.read_text(encoding="utf-8")), comparison)
    page = "\n".join([page, *markdown_table(int8.HEAD, rows)])
    readme.write_text(add_checksum(page), encoding="utf-8")
