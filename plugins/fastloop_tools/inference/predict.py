"""``fastloop predict``: the predictions of a trained model for a file, for texts or for a split."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastloop import Problem, __version__
from fastloop.cli.arguments import NoCode, With, Without, names, output_file
from fastloop.cli.messages import show_messages
from fastloop.distributed import ranks, signals
from fastloop.errors import UsageError
from fastloop.recipe import Inference, Recipe, secrets
from fastloop.recipe.paths import nothing_at
from fastloop.splits import PREDICT
from fastloop_tools.inference.evaluate import Target
from fastloop_tools.inference.output import PREDICTION_FORMATS, PredictionOutput

if TYPE_CHECKING:
    from fastloop.run import Run
    from fastloop_tools.inference.keep import KeepOption

log = logging.getLogger("fastloop")


def predict(
    target: Target,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE|-|TEXT [RECIPE] [KEY=VALUE]...",
            help="A file with the recipe's column of texts, an image, or a folder of images; -: a text or a path a "
            "line from stdin; or a text. With --split, none of them.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        output_file(
            "--out", f"File to write: {', '.join(PREDICTION_FORMATS)}. Without it: JSON lines on stdout.", Path
        ),
    ] = None,
    split: Annotated[str | None, typer.Option(metavar="NAME", help="Predict a split of the recipe's data.")] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B",
            help="Columns of FILE, or of a split's file, to write before the predictions; all: every one; NAME=COLUMN: "
            "by another name. May be repeated.",
        ),
    ] = None,
    chunk: Annotated[int, typer.Option(min=1, metavar="ROWS", help="Rows to read, predict and write at once.")] = 4096,
    with_: With = None,
    without: Without = None,
    no_code: NoCode = False,
) -> None:
    """Predict the samples of a file, a text or a split.

    A classifier gives the label, its probability, and the probability of each class in a column `probability_NAME`. A
    language model gives texts, and a module its outputs. Images also have the name of their file.

    Files and splits are predicted with the plugins that `auto` selects; `--without auto` turns it off. Rows keep their
    order. An interrupted job with --out continues after the last complete chunk, if the same command is
    repeated.
    """
    from fastloop_tools.inference.target import load, open_inference

    if ranks.world_size() > 1:
        raise UsageError("predict uses one process.", code="one-process-only", remedy="Start it without a launcher.")
    if out is None:
        import rich

        rich.reconfigure(stderr=True)  # log messages must not mix with predictions
    show_messages()
    words = list(arguments or ())
    if split is None and not words:
        raise UsageError(
            code="nothing-to-predict",
            found="nothing to predict",
            expected="a FILE, - for stdin, a TEXT, or --split NAME",
        )
    name = None if split is not None else words.pop(0)
    source = None if name is None else read_source(name)
    if out is not None and isinstance(source, Path) and out.exists() and out.samefile(source):
        raise UsageError(
            "this is the file to predict, which the predictions would replace.",
            code="file-in-use",
            place=f"--out {out}",
            remedy="Give another file.",
        )
    kept = read_keep(keep, source, out)
    recipe = load(target, words, Inference(Path(), split or PREDICT, source, chunk=chunk), names(with_), names(without))
    job = None  # stdout and stdin cannot continue
    if out is not None and name != "-":
        job = describe(recipe, target, name) | {"keep": kept.listed}
    with closing(PredictionOutput(out, job)) as output, signals.on_signals(signals.stop_now):
        if not output.complete:
            assert recipe.inference is not None
            recipe.inference = dataclasses.replace(recipe.inference, start=len(output.parts) * chunk)
            from fastloop_tools.inference.chunks import Chunks

            reader = Chunks(name, kept)
            with open_inference(recipe, [reader]) as run:
                reader.lines = None
                if output.parts:
                    log.info("predict: continues after %d rows of an interrupted job", len(output.parts) * chunk)
                predict_chunks(run, reader.chunks, kept, output, threaded=name != "-")
        output.finish()
    if out is not None:
        typer.echo(f"written to {out}")


def read_source(name: str) -> Path | Iterable[str]:
    """The argument FILE, - or TEXT as a path, which may be a folder, or as texts.

    A text may end with the suffix of a file, such as "see the new data.csv". One that begins with the path of a folder
    is no text.

    Raises:
        UsageError: It is an empty text, or has the suffix of a file that does not exist.
    """
    if name == "-":
        return (line.rstrip("\r\n") for line in sys.stdin)
    if not name.strip():
        raise UsageError(
            code="nothing-to-predict", found="an empty text to predict", expected="a FILE, - for stdin, or a TEXT"
        )
    if len(name) < 4096:
        from fastloop_plugins.rows.suffixes import COMPRESSIONS, CONLL, FORMATS, installed_formats

        path = Path(name)
        try:
            exists = path.exists()
        except OSError:  # the text is longer than a name may be, such as 255 bytes
            return [name]
        if exists:
            return path
        if "\n" in name:
            return [name]
        if path.is_symlink():
            raise UsageError(f"{nothing_at(path)}.", code="file-missing", place=name)
        is_named_as_file = name.lower().endswith((*FORMATS, *installed_formats(), CONLL, *COMPRESSIONS))
        is_in_folder = path.name != name and path.parent.is_dir()
        if is_named_as_file and (" " not in name or is_in_folder):
            raise UsageError(f"{nothing_at(path)}.", code="file-missing", place=name)
        if is_named_as_file:
            log.warning(
                Problem("there is no such file, so this is the text to predict.", code="file-missing", place=name)
            )
    return [name]


def read_keep(keep: list[str] | None, source: Path | Iterable[str] | None, out: Path | None) -> KeepOption:
    """The option ``--keep``.

    Raises:
        UsageError: The texts have no columns, or the output has no place for them.
    """
    from fastloop_tools.inference.keep import KeepOption

    listed = names(keep)
    if listed and source is not None and not isinstance(source, Path):
        raise UsageError(
            "found texts, which have no columns. Predict a FILE, or leave out --keep.",
            code="exclusive-options",
            place="--keep",
        )
    if listed and out is not None and out.suffix == ".npy":
        raise UsageError(
            ".npy holds one column, and --keep adds others.",
            code="exclusive-options",
            place=f"--out {out}",
            remedy="Write .parquet.",
        )
    return KeepOption(listed)


def describe(recipe: Recipe, target: str, name: str | None) -> dict[str, Any]:
    """Everything that determines the predictions: recipe, model, input and version. Files by a hash of their paths
    and states."""
    from fastloop_plugins.rows.content_hashes import state_of

    assert recipe.inference is not None
    assert recipe.inference.model is not None
    paths = sorted(path for path in recipe.inference.model.iterdir() if path.is_file())
    sources: list[Path] = []
    if isinstance(recipe.inference.source, Path):
        sources.append(recipe.inference.source)
    elif name is None:
        sources += data_paths(recipe, recipe.inference.split)
    for source in sources:
        path = source.resolve()
        if path.is_dir():
            paths += sorted(inner for inner in path.rglob("*") if inner.is_file())
        else:
            paths.append(path)
    digest = hashlib.blake2b(digest_size=16)  # a folder of images may have millions
    for path in paths:
        digest.update(json.dumps([str(path), *astuple(state_of(path))]).encode())
    return {
        "version": __version__,
        "recipe": secrets.hidden(recipe.to_dict()),
        "input": [name, recipe.inference.split, recipe.inference.chunk],
        "files": digest.hexdigest(),
    }


def data_paths(recipe: Recipe, split: str) -> list[Path]:
    """The files and folders that the section ``data`` names for a split: of rows, of images, and of code. Those of all
    splits, if the section names none for this one: it may be a part of another."""
    from fastloop.recipe.paths import PATTERN
    from fastloop_plugins.rows.paths import find_matches

    data = recipe.data
    named: list[Any] = [str(data.get("module") or "").partition(":")[0]]
    files = data.get("files")
    own = files.get(split) if isinstance(files, Mapping) else None
    if own:
        named += [data.get("images"), data.get("name")]
        named += own if isinstance(own, list) else [own]
    else:
        named += [_folder_of_split(recipe, data.get(key), split) for key in ("images", "name")]
        named += _all_files(data)
    paths: list[Path] = []
    for item in named:
        if not isinstance(item, str) or not item:
            continue
        path = recipe.find(item)
        if path.exists():
            paths.append(path)
        elif PATTERN.search(item):
            paths += find_matches(recipe, item)
    return paths


def _folder_of_split(recipe: Recipe, folder: Any, split: str) -> Any:
    """A folder of images or of saved rows -> its folder of a split, such as ``images/test``; the folder itself, if it
    has no such one."""
    splits = recipe.data.get("splits")
    name = splits.get(split, split) if isinstance(splits, Mapping) else split
    if not isinstance(folder, str) or not folder or not isinstance(name, str):
        return folder
    inner = recipe.find(folder) / name
    return str(inner) if inner.is_dir() else folder


def _all_files(data: Mapping[str, Any]) -> list[Any]:
    """The files of all splits and sources."""
    files: list[Any] = []
    sections = [data, *(source for source in data.get("sources") or () if isinstance(source, Mapping))]
    for section in sections:
        listed = section.get("files")
        for item in listed.values() if isinstance(listed, Mapping) else [listed]:
            files += item if isinstance(item, list) else [item]
    return files


def predict_chunks(run: Run, chunks: Iterator[Any], kept: KeepOption, output: PredictionOutput, threaded: bool) -> None:
    """Predict chunks in order.

    Args:
        chunks: Datasets, beginning with the split of the run.
        kept: Columns of the rows of these chunks.
        threaded: Whether to read the next chunk in a thread meanwhile. A thread that waits for stdin would block the
            exit.
    """
    from concurrent.futures import ThreadPoolExecutor  # only here: the help imports this module

    from accelerate.utils import set_seed

    from fastloop_tools.inference.predictions import predict_dataset

    with ThreadPoolExecutor(1) as pool:
        chunk = next(chunks)
        while chunk is not None:
            following = pool.submit(next, chunks, None) if threaded else None
            set_seed(run.recipe.train.seed + len(output.parts))  # so that sampled texts do not depend on interruptions
            columns = predict_dataset(run, run.loaders.replace(run.loaders.first_split, chunk))
            chunk = next(chunks, None) if following is None else following.result()
            kept.check_names(columns)
            rows = kept.take(count=len(next(iter(columns.values()))))
            if chunk is None:
                kept.finish()
            output.add(rows | columns, last=chunk is None, types=kept.types)
