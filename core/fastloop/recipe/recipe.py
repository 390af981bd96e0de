"""A recipe and its sections. ``loading`` reads them from a file, and ``overrides`` from the command line.

    model:   {name: distilbert-base-uncased}
    data:    {name: imdb, text: text, label: label, max_length: 512}
    train:   {epochs: 3, batch_size: 12, lr: 5.0e-5}
    plugins:
      - amp: {dtype: bf16}
      - checkpoint-best
    output:  runs/distilbert_imdb

A recipe is data (``safe_yaml``). fastloop writes no values of keys such as token, key or password (``secrets``).

A list of plugins has names, packages or files:

      - my-plugin
      - my-package:my-plugin             # if several packages have a plugin of this name
      - ./my_plugin.py: {rate: 0.5}      # a file, in the current folder or beside the recipe
      - ./my_plugins.py:Second           # the class Second of a file with several plugins

Overrides and ``--without`` accept its ``name`` (``plugins.my-plugin.rate=0.5``) or the listed form. To get the name,
fastloop parses the file. The file's code runs when plugins are resolved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import PositiveInt

from fastloop.options import option
from fastloop.plugins.plugin import Plugin
from fastloop.recipe.other_names import IN_TRAIN
from fastloop.recipe.paths import find_path

SECTIONS = ("model", "data", "train", "plugins", "output")
DEFAULT_EPOCHS = 3
"""Passes over the training data of a recipe that has neither ``train.epochs`` nor ``train.max_steps``."""


@dataclass(kw_only=True)
class Train:
    """The ``train`` section."""

    other_names: ClassVar[Mapping[str, str]] = IN_TRAIN
    """Name of a setting in other trainers -> what a recipe has in its place. ``options.parse`` reads it."""

    # A new key is fixed or free on a resume: list it in ``fastloop.checks.resumed_run``, and add a row to
    # tests/core/checkpoint/test_settings_on_resume.py.
    epochs: int | None = option(
        "Passes over the training data; null: 3, or as many as max_steps needs.", default=None, ge=1
    )
    batch_size: int = option("Samples per optimizer step, over all processes.", default=32, ge=1)
    micro_batch_size: int | None = option(
        "Samples per micro-batch of one process; null: batch_size / world size.", default=None, ge=1
    )
    drop_last: bool = option(
        "Drop the samples at an epoch's end that do not fill an optimizer step of batch_size.", default=False
    )
    eval_batch_size: int | None = option(
        "Samples per evaluation batch of one process; null: as in training.", default=None, ge=1
    )
    lr: float = option("Peak learning rate.", default=5e-5, gt=0)
    optimizer: str | dict[str, Any] = option(
        "A class of torch.optim, package.module:name or file.py:name. With arguments: {name: SGD, momentum: 0.9}.",
        default="AdamW",
    )
    weight_decay: float = option("Weight decay of the optimizer.", default=0.0, ge=0)
    decay_biases_and_norms: bool = option(
        "Whether weight decay also applies to biases and to weights of norms.", default=True
    )
    layer_lr_decay: float | None = option(
        "Multiplies lr once for each layer below the output layer.", default=None, gt=0, le=1
    )
    parameter_groups: list[dict[str, Any]] | None = option(
        "Other arguments for some parameters, by name: [{match: 'head.*', lr: 1.0e-3}].", default=None
    )
    seed: int = option("Seeds initial weights, sample order and dropout.", default=123, ge=0, lt=2**32)
    max_steps: int | None = option("Optimizer steps of the run; null: all steps of the epochs.", default=None, ge=1)
    max_grad_norm: float | None = option(
        "Clip the gradients' total 2-norm to this; null: no clipping.", default=None, gt=0
    )
    log_every: int = option("Steps between two log points.", default=10, ge=1)
    evaluate_every: Literal["epoch"] | PositiveInt | None = option(
        "'epoch', a number of steps, or null: only at the end.", default="epoch"
    )
    save_every: Literal["epoch"] | PositiveInt | None = option(
        "When to save a checkpoint: 'epoch', a number of steps, or null: only on request (Ctrl-C).", default="epoch"
    )
    keep_checkpoints: int = option("Newest checkpoints kept.", default=1, ge=1)
    on_save_error: Literal["continue", "stop"] = option(
        "If a checkpoint cannot be written (full disk, quota): log the error and keep training, or end the run.",
        default="continue",
    )
    on_data_change: Literal["stop", "warn"] = option(
        "If the data differs from the checkpoint's on --resume: stop, or warn and continue.", default="stop"
    )
    device: Literal["auto", "cpu"] = option("'auto': the accelerator, if there is one, else the CPU.", default="auto")

    def __post_init__(self) -> None:
        if self.epochs is None and self.max_steps is None:
            self.epochs = DEFAULT_EPOCHS
        if isinstance(self.optimizer, dict) and not isinstance(self.optimizer.get("name"), str):
            raise ValueError(
                f"optimizer: found {self.optimizer!r} without a name. Expected such as {{name: SGD, momentum: 0.9}}."
            )

    @property
    def optimizer_name(self) -> str:
        """The optimizer's name or reference."""
        return self.optimizer if isinstance(self.optimizer, str) else str(self.optimizer["name"])

    @property
    def optimizer_arguments(self) -> dict[str, Any]:
        """The arguments in ``train.optimizer``. ``train.lr`` and ``train.weight_decay`` are not among them."""
        if isinstance(self.optimizer, str):
            return {}
        return {key: value for key, value in self.optimizer.items() if key != "name"}


@dataclass(frozen=True)
class Inference:
    """The model and the data of a run that does not train, as in `fastloop evaluate` and `fastloop predict`.

    Attributes:
        model: Folder of the exported model, as an absolute path; None: the model as the task builds it.
        split: The only split that the run builds: one of the recipe's data, or ``predict`` for the samples of
            ``source``.
        source: A file or texts to predict; None: the split.
        start: Index of the first sample to predict.
        chunk: Samples to predict at once; 0: the run evaluates the split.
        is_own_data: Whether the data is that of the run; False: another recipe or an override names another source.
    """

    model: Path | None
    split: str
    source: Path | Iterable[str] | None = None
    start: int = 0
    chunk: int = 0
    is_own_data: bool = True


@dataclass(kw_only=True)
class Recipe:
    """A recipe.

    Attributes:
        plugins: Plugin name -> options, in the recipe's order. ``False`` turns a default plugin off.
        selected: Plugin name -> why another plugin, such as ``auto``, added it. ``resolve`` sets it and ``selector``.
        selector: That plugin, which builds the run (``Plugin.build_selected``); None: no plugin is selected.
        references: Plugin name -> its listed form, if that differs: ``package:name``, ``file.py``, ``file.py:Class``.
        source: The recipe's file, for messages and relative paths; None: made in Python.
        inference: The model to evaluate; None: the run trains.
    """

    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    train: Train = field(default_factory=Train)
    plugins: dict[str, dict[str, Any] | Literal[False]] = field(default_factory=dict)
    output: str = "runs/run"
    references: dict[str, str] = field(default_factory=dict)
    source: Path | None = None
    selected: dict[str, str] = field(default_factory=dict)
    selector: Plugin | None = None
    inference: Inference | None = None

    @property
    def where(self) -> str:
        """The recipe's name in messages."""
        return str(self.source) if self.source else "recipe"

    def to_dict(self) -> dict[str, Any]:
        """The recipe as the mapping of its YAML file."""
        return {
            "model": self.model,
            "data": self.data,
            "train": dataclasses.asdict(self.train),
            "plugins": [
                entry if options == {} else {entry: options} for entry, options in self.listed(self.plugins).items()
            ],
            "output": self.output,
        }

    def listed(
        self, plugins: Mapping[str, dict[str, Any] | Literal[False]]
    ) -> dict[str, dict[str, Any] | Literal[False]]:
        """Replace plugin names by their listed form."""
        return {self.references.get(name, name): options for name, options in plugins.items()}

    def has_plugin(self, name: str) -> bool:
        """Whether the recipe lists a plugin, and does not turn it off. A default plugin need not be listed."""
        return self.plugins.get(name, False) is not False

    def leaves_out(self, name: str) -> bool:
        """Whether the recipe or `--without` turns a plugin off. Messages then do not propose to add it."""
        return self.plugins.get(name) is False

    def place(self, name: str) -> str:
        """The key of a plugin in messages, in its listed form."""
        return f"{self.where}: plugins.{self.references.get(name, name)}"

    def find(self, path: str) -> Path:
        """A path relative to the recipe's folder, if it exists only there; else the path as given."""
        return find_path(path, self.source)
