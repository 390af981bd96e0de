"""docs/tasks/image-classification.md: its recipe and its commands, on a folder of images, up to the predictions."""

from __future__ import annotations

import csv
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from image_helpers import write_image

from fastloop.testing import assert_problem

PAGE = (Path(__file__).parents[2] / "docs" / "tasks" / "image-classification.md").read_text(encoding="utf-8")
COLORS = {"cat": (200, 120, 40), "dog": (60, 80, 200)}


def write_photos() -> None:
    """The folder that the page shows."""
    for split, first, count in (("train", 1, 12), ("validation", 51, 4), ("test", 61, 4)):
        assert f"{split}/cat/{first:03}.jpg" in PAGE
        for name, color in COLORS.items():
            for number in range(first, first + count):
                write_image(Path("photos", split, name, f"{number:03}.jpg"), color, (64, 48))


@pytest.mark.slow
@pytest.mark.parametrize("source", ["photos.parquet", "saved"])
def test_script_of_the_page_writes_the_images_of_a_dataset(
    source: str, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Image

    write_photos()
    files = sorted(Path("photos/train").rglob("*.jpg"))
    images = [{"bytes": file.read_bytes(), "path": file.name} for file in files]
    columns = {"image": images, "label": [file.parent.name for file in files]}
    train = Dataset.from_dict(columns, Features({"image": Image(), "label": ClassLabel(names=list(COLORS))}))
    if source == "saved":
        DatasetDict({"train": train}).save_to_disk(source)
    else:
        train.to_parquet(source)
    Path("photos.yaml").write_text(f"model: {{name: torchvision/resnet18}}\ndata: {{images: {source}}}\n")
    code, _, err = cli("train", "photos.yaml")
    assert code == 2
    assert_problem(err, f"wrong-format data.images: {source} CLASS docs/tasks/image-classification.md")
    data = {"text": "image", "label": "label"} | (
        {"name": source} if source == "saved" else {"files": {"train": source}}
    )
    model = {"config": {"model_type": "bert", "hidden_size": 16}, "tokenizer": {"kind": "word", "vocab_size": 60}}
    Path("texts.yaml").write_text(json.dumps({"model": model, "data": data}))
    code, _, err = cli("train", "texts.yaml")
    assert code == 2
    assert_problem(err, "invalid-row data.text image-classification docs/tasks/image-classification.md")
    (script,) = re.findall(r'(?ms)^```python title="write_images\.py"\n(.*?)^```$', PAGE)
    monkeypatch.setattr(sys, "argv", ["write_images.py", source, "written"])
    exec(compile(script, "write_images.py", "exec"), {})
    written = sorted(Path("written/train").rglob("*.jpg"))
    assert [file.read_bytes() for file in written] == [file.read_bytes() for file in files]
    assert [file.parent.name for file in written] == [file.parent.name for file in files]


@pytest.mark.slow
def test_commands_of_the_page_train_evaluate_and_predict(cli: Any) -> None:
    from transformers import AutoConfig, AutoModelForImageClassification

    name = "microsoft/resnet-18"  # here, a folder with a smaller model: a test has no network
    assert f"model: {{name: {name}}}" in PAGE
    config = AutoConfig.for_model("resnet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    AutoModelForImageClassification.from_config(config).save_pretrained(name)
    settings = {
        "crop_pct": 0.875,
        "feature_extractor_type": "ConvNextFeatureExtractor",
        "resample": 3,
        "size": {"shortest_edge": 224},
    }
    Path(name, "preprocessor_config.json").write_text(json.dumps(settings))
    write_photos()
    (recipe,) = re.findall(r'(?ms)^```yaml title="photos\.yaml"\n(.*?)^```$', PAGE)
    Path("photos.yaml").write_text(recipe)
    (commands,) = re.findall(r"(?ms)^```sh\n(.*?)^```$", PAGE)
    printed = {}
    for command in commands.splitlines():
        program, *arguments = shlex.split(command)
        assert program == "fastloop"
        code, out, err = cli(*arguments)
        assert code == 0, f"{command}\n{err}"
        printed[command] = out
    assert Path("result.svg").is_file()
    form = json.loads(Path("runs/photos/model/preprocessor_config.json").read_text())
    assert (form["size"], form["crop_pct"], form["resample"]) == ({"shortest_edge": 224}, 0.875, 3)
    assert [row["name"] for row in json.loads(Path("result.json").read_text())["classes"]] == ["cat", "dog"]
    with Path("predictions.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert [row["file"] for row in rows] == [f"{name}/{number:03}.jpg" for name in COLORS for number in range(61, 65)]
    assert list(rows[0]) == ["file", "label", "probability", "probability_cat", "probability_dog"]
    single = json.loads(printed[commands.splitlines()[-1]])
    assert (single["file"], single["label"]) == ("photos/test/cat/061.jpg", rows[0]["label"])
