"""Trains on all samples except those of one fold, and validates on that fold.

`fastloop sweep RECIPE --folds 5` adds it to the runs of a sweep, and trains each fold once. Such a run's recipe has:

    plugins:
      - folds: {number: 0, of: 5}

The samples of ``train`` and ``validation`` are divided into equal folds, with an equal share of each class if every
sample has one: an integer attribute ``labels`` or ``targets`` of the datasets, or the last tensor of a
``TensorDataset``. ``train.seed`` determines the folds. `fastloop evaluate` refuses these two splits of such a run; its
summary has the fold's metrics.

The fold has no random changes of training, such as those of `image-classification`, if the datasets have a method
``as_split``. Otherwise, a warning says that samples change each time that they are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastloop import Plugin, PluginError, Problem, RecipeError, hookimpl, option
from fastloop.problem import counted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastloop import Run
    from fastloop.recipe import Recipe


POOLED = ("train", "validation")
"""The splits whose samples are divided."""


class Folds(Plugin):
    """Validates on one fold of the training data, and trains on the others.

    Replaces the datasets that the task built.
    """

    name = "folds"
    numerics = "changes-training"
    for_inference = True

    number: int = option("The fold to validate on, from 0.", default=0, ge=0)
    of: int = option("Number of folds.", default=5, ge=2)

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        if self.number >= self.of:
            raise RecipeError(
                code="out-of-range",
                place=f"{recipe.where}: plugins.folds.number",
                found=str(self.number),
                expected=f"a number from 0 to {self.of - 1}",
            )
        if recipe.inference is not None and recipe.inference.split in POOLED:
            raise RecipeError(
                "the run trained on parts of the splits train and validation, so their metrics would mislead. Its "
                "summary.json has the metrics of its fold.",
                code="trained-on-split",
                place=f"{recipe.where}: plugins.folds",
                remedy="Evaluate another split: --split test.",
            )

    @hookimpl(wrapper=True)
    def build_datasets(self, run: Run) -> Generator[None, Mapping[str, Any], Mapping[str, Any]]:
        datasets = yield
        if run.recipe.inference is not None:
            return datasets
        where = f"{run.recipe.where}: plugins.folds"
        pooled = [datasets[split] for split in POOLED if split in datasets]
        for dataset in pooled:
            if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
                raise RecipeError(
                    f"{type(dataset).__name__} is iterable.",
                    code="iterable-dataset",
                    place=where,
                    expected="map-style data",
                )
        size = sum(map(len, pooled))
        if size < self.of:
            raise RecipeError(
                code="out-of-range",
                place=f"{where}.of",
                found=f"{self.of} folds for {counted(size, 'sample')}",
                expected=f"at most {size}",
            )
        classes = classes_of(pooled)
        folds = divide(size, self.of, run.recipe.train.seed, classes)
        if changes_when_read(pooled[0]):
            self.log.warning(
                Problem(
                    "the samples of train change each time that they are read. So do those of the fold that the run "
                    "validates on.",
                    code="random-samples",
                    place=where,
                    remedy="Give the dataset a method as_split(split), which returns one without random changes for "
                    "'validation'.",
                )
            )
        train = SampleSubset(as_split(pooled, "train"), (folds != self.number).nonzero()[0])
        validation = SampleSubset(as_split(pooled, "validation"), (folds == self.number).nonzero()[0])
        if classes is not None:
            how = "with an equal share of each class"
        else:
            how = "without regard to classes, which the data does not show"
        self.log.info("%d of %d samples are fold %d of %d, drawn %s", len(validation), size, self.number, self.of, how)
        return {**datasets, "train": train, "validation": validation}

    @hookimpl(wrapper=True)
    def build_sampler(self, run: Run, split: str) -> Generator[None, Any, Any]:
        sampler = yield
        if sampler is not None and split in POOLED:
            raise PluginError(
                f"the {split} split has a sampler, whose indices are those of the undivided data.",
                code="own-sampler",
                place=f"{run.recipe.where}: plugins.folds",
                remedy="Leave the sampler out, or give a dataset instead of a loader.",
            )
        return sampler


def as_split(datasets: Sequence[Any], split: str) -> list[Any]:
    """The datasets with their samples as ``split`` has them: see ``DatasetProtocol.as_split``."""
    return [dataset.as_split(split) if hasattr(dataset, "as_split") else dataset for dataset in datasets]


def changes_when_read(dataset: Any) -> bool:
    """Whether two reads of the first sample differ, of a dataset without ``as_split``."""
    import torch
    from torch.utils._pytree import tree_leaves

    from fastloop.runtime.random_states import preserve_random_states

    if hasattr(dataset, "as_split") or not len(dataset):
        return False
    with preserve_random_states():
        try:
            first = tree_leaves(dataset[0])
            second = tree_leaves(dataset[0])
        except Exception:  # an unreadable sample fails where it is trained on
            return False
    if len(first) != len(second):
        return True
    for before, after in zip(first, second, strict=True):
        are_tensors = isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)
        if are_tensors and not torch.equal(before, after):
            return True
    return False


def _has_one_per_sample(dataset: Any, name: str) -> bool:
    """Whether a dataset has an attribute with one value for each sample. The labels of tokens are not those."""
    values = getattr(dataset, name, None)
    return values is not None and len(values) == len(dataset)


class SampleSubset:
    """Some samples of several map-style datasets.

    Args:
        datasets: Datasets whose samples are numbered end to end.
        ids: Numbers of the samples, int64.

    Attributes:
        lengths: Tokens of each sample; exists if the datasets have this attribute. So does ``labels``, the label of
            each sample.
        tags: Returns the tags of all words of the samples; exists if the datasets have this method.
    """

    tags: Callable[[], NDArray[Any]]

    def __init__(self, datasets: Sequence[Any], ids: NDArray[Any]) -> None:
        import numpy as np
        from torch.utils.data import ConcatDataset

        self.datasets = datasets
        self.ids = ids
        self.joined: ConcatDataset[Any] = ConcatDataset(datasets)
        self.deterministic = all(getattr(dataset, "deterministic", False) for dataset in datasets)
        for name in ("lengths", "labels"):
            if all(_has_one_per_sample(dataset, name) for dataset in datasets):
                values = [np.asarray(getattr(dataset, name)) for dataset in datasets]
                setattr(self, name, np.concatenate(values)[ids])
        if all(hasattr(dataset, "tags") for dataset in datasets):
            self.tags = self._tags

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Any:
        return self.joined[int(self.ids[index])]

    def _tags(self) -> NDArray[Any]:
        import numpy as np

        tags = []
        start = 0
        for dataset in self.datasets:
            end = start + len(dataset)
            ids = self.ids[(self.ids >= start) & (self.ids < end)]
            tags.append(dataset.tags(ids - start))
            start = end
        return np.concatenate(tags)

    def fingerprint(self) -> str:
        """A hash of the datasets' fingerprints and the numbers of the samples."""
        from fastloop.data.datasets import fingerprint

        digest = hashlib.blake2b(self.ids.tobytes(), digest_size=8)
        for dataset in self.datasets:
            digest.update(fingerprint(dataset).encode())
        return digest.hexdigest()


def classes_of(datasets: Sequence[Any]) -> NDArray[Any] | None:
    """The class of every sample, (N,) integers; None: the datasets do not show one."""
    import numpy as np
    from torch.utils.data import TensorDataset

    classes = []
    for dataset in datasets:
        listed: Any
        if isinstance(dataset, TensorDataset):
            listed = dataset.tensors[-1]
        else:
            listed = getattr(dataset, "labels", getattr(dataset, "targets", None))
        values = np.asarray(listed if listed is not None else [])
        if values.shape != (len(dataset),) or values.dtype.kind not in "iu":
            return None
        classes.append(values)
    return np.concatenate(classes)


def divide(size: int, of: int, seed: int, classes: NDArray[Any] | None) -> NDArray[Any]:
    """The fold of each sample, (N,) int64. The sizes of folds differ by one at most, and so do the numbers of each
    class in them.

    The samples are shuffled, sorted by class, and dealt like cards: with two folds and the classes [a b a b b], the
    order may be the samples [2 0 4 1 3] (a a b b b), whose folds are [0 1 0 1 0].
    """
    import numpy as np

    order = np.random.default_rng(seed).permutation(size)
    if classes is not None:
        order = order[np.argsort(classes[order], kind="stable")]
    folds = np.empty(size, dtype=np.int64)
    folds[order] = np.arange(size) % of
    return folds
