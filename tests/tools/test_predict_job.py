"""The job of `fastloop predict`: what it is given, which files it depends on, and the folder of its parts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fastloop.recipe import Inference, Recipe
from fastloop_tools.inference.output import PredictionOutput
from fastloop_tools.inference.predict import describe, read_source


def make_recipe(data: dict[str, Any], split: str) -> Recipe:
    """A recipe in the current folder that predicts a split with the model in ``model/``."""
    Path("model").mkdir(exist_ok=True)
    inference = Inference(Path("model").resolve(), split, chunk=4)
    return Recipe(data=data, source=Path("recipe.yaml").resolve(), inference=inference)


def depends_on(data: dict[str, Any], split: str, file: str) -> bool:
    """Whether a change of a file makes a job on a split another one."""
    recipe = make_recipe(data, split)
    before = describe(recipe, "run", None)
    facts = Path(file).stat() if Path(file).exists() else None
    Path(file).write_text("changed")
    if facts is not None:
        os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    return describe(recipe, "run", None) != before


@pytest.mark.parametrize("text", ["a good film " * 50, "ä" * 200, "." + "y" * 300])
def test_a_text_that_is_longer_than_a_name_may_be_is_a_text(text):
    with pytest.raises(OSError, match="too long"):
        Path(text).stat()
    assert read_source(text) == [text]


def test_a_job_on_a_split_depends_on_its_own_files():
    for name in ("train.csv", "test.csv", "extra.csv"):
        Path(name).write_text("a,label")  # as long as the changed file
    data = {"files": {"train": ["train.csv", "extra.csv"], "test": "te*.csv"}}
    assert not depends_on(data, "test", "train.csv")
    assert depends_on(data, "test", "test.csv")
    assert depends_on(data, "validation", "extra.csv"), "rows for validation are held out from those of train"


def test_a_job_on_a_split_of_images_depends_on_its_folder():
    for split in ("train", "test"):
        Path("images", split, "cat").mkdir(parents=True)
        Path("images", split, "cat", "1.png").write_text(split)
    data = {"images": "images"}
    assert not depends_on(data, "test", "images/train/cat/1.png")
    assert depends_on(data, "test", "images/test/cat/2.png")
    assert depends_on(data, "validation", "images/train/cat/2.png"), "those for validation are held out from train"


def test_a_job_holds_a_hash_of_its_files():
    Path("images").mkdir()
    data = {"images": "images"}
    few = describe(make_recipe(data, "test"), "run", None)
    for number in range(30):
        Path("images", f"{number}.png").write_text("")
    many = describe(make_recipe(data, "test"), "run", None)
    assert few != many
    assert len(str(few)) == len(str(many))


def test_a_folder_among_the_parts_is_removed_with_them():
    inner = Path("out.csv.parts", "copied")
    inner.mkdir(parents=True)
    (inner / "00000000").write_text("label\n")
    output = PredictionOutput(Path("out.csv"), {"command": "mine"})
    try:
        assert sorted(path.name for path in output.folder.iterdir()) == [".lock", "job.json"]
    finally:
        output.close()


def test_a_folder_of_parts_that_another_job_removes_is_made_again(monkeypatch):
    folder = Path("out.csv.parts")
    mkdir = Path.mkdir
    calls = []

    def removed_at_once(path: Path, *arguments: Any, **options: Any) -> None:
        mkdir(path, *arguments, **options)
        if path == folder:
            calls.append(path)
            if len(calls) == 1:
                path.rmdir()  # as the other job does, which ends at this moment

    monkeypatch.setattr(Path, "mkdir", removed_at_once)
    output = PredictionOutput(Path("out.csv"), {"command": "mine"})
    try:
        assert len(calls) == 2
        assert folder.joinpath("job.json").is_file()
    finally:
        output.close()
