"""Recipes of teachers and students for the tests, and plugins that record a run."""

import atexit
import copy
import os
import tempfile
from pathlib import Path

from fastloop import Plugin, hookimpl
from fastloop.testing import LANGUAGE, TEXTS, train, with_dropout, write_texts

FOLDER = tempfile.TemporaryDirectory()
"""Has the teachers, which ``conftest.py`` trains."""
atexit.register(FOLDER.cleanup)
TASKS = {"texts": TEXTS, "language": LANGUAGE}
OWN = {"output": "run", "plugins": [{"progress": False}]}


def teacher(kind):
    """The run of a teacher."""
    return str(Path(FOLDER.name, f"{kind}-teacher"))


def student(kind):
    """The section ``model`` of a student with the tokenizer of its teacher."""
    return TASKS[kind]["model"] | {"tokenizer": f"{teacher(kind)}/model"}


def recipe(kind, *plugins, data=(), model=(), options=(), **keys):
    """The recipe of a student without dropout."""
    task = with_dropout(TASKS[kind], 0.0)
    given = dict(model) or student(kind) | {"config": task["model"]["config"]}
    distill = {"distill": {"teacher": teacher(kind)} | dict(options)}
    sizes = {"epochs": 1, "batch_size": 8, "lr": 1e-2, "device": "cpu", "seed": 1} | keys
    return OWN | {"model": given, "data": task["data"] | dict(data), "train": sizes, "plugins": [distill, *plugins]}


def train_teachers():
    """Train the teachers: four layers and other widths than the students."""
    before = os.getcwd()
    os.chdir(FOLDER.name)
    write_texts(Path(FOLDER.name))
    for kind, task in TASKS.items():
        config = task["model"]["config"] | {"num_hidden_layers": 4, "hidden_size": 32}
        model = task["model"] | {"config": config}
        keys = {"epochs": 1, "batch_size": 8, "lr": 1e-2, "device": "cpu"}
        train(OWN | {"model": model, "data": task["data"], "train": keys, "output": f"{kind}-teacher"})
    os.chdir(before)


class Double(Plugin):
    """Trains in float64, and keeps the first step's samples and the initial model."""

    name = "double"

    def __init__(self):
        super().__init__()
        self.samples = []

    @hookimpl(trylast=True)
    def before_prepare(self, run, model):
        model.double()
        if run.world_size == 1:
            self.model = copy.deepcopy(model)

    @hookimpl
    def before_step(self, run, batches):
        self.samples = self.samples or [run.datasets["train"][place] for batch in batches for place in batch.ids]


def train_double(recipes):
    """The gradients of the first step of each recipe."""
    return [train(recipe, Double()).gradients for recipe in recipes]
