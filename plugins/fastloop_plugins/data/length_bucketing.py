"""Batches samples of similar length together.

    plugins:
      - length-bucketing: {window: 100, max_tokens: 8192}

In training, samples are shuffled, sorted by length inside windows of ``window`` batches, and the batches are shuffled
again. In evaluations and predictions, all samples are sorted by length; predictions are returned in the order of the
dataset. Datasets are map-style with ``lengths`` or ``input_ids``. ``max_tokens`` limits the tokens of a micro-batch,
padding included; steps still take ``train.batch_size`` samples.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

from fastloop import Plugin, PluginError, Problem, Recommendation, SpeedupEstimate, hookimpl, option
from fastloop.runtime import hardware
from fastloop_plugins._task_traits import recipe_traits
from fastloop_plugins.data._padding_multiples import MULTIPLE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Generator

    from fastloop import Run, Settings
    from fastloop.data import Loader
    from fastloop.recipe import Recipe
    from fastloop.speedup_estimates import StepProfile


class LengthBucketing(Plugin):
    """Makes batches of samples of like length."""

    name = "length-bucketing"
    numerics = "changes-training"
    runs_after = ("compile",)  # compile has a multiple of its own for pad_to_multiple_of
    for_inference = True
    kind = ""  # the type of the device: cpu, cuda

    window: int = option(
        "Batches whose samples are sorted together: more of them give less padding, and less random batches.",
        default=100,
        ge=2,
    )
    max_tokens: int | None = option(
        "Tokens of a device's batch at most, padding included; null: no limit.", default=None, ge=1
    )

    settings: Settings  # from configure on

    @classmethod
    def recommend(cls, recipe: Recipe, machine: hardware.Machine) -> Recommendation | None:
        if machine.device != "cuda" or recipe.has_plugin("packing"):
            return None
        if not cls._may_arrange(recipe):
            return None
        padded = recipe_traits(recipe) >= {"padded", "deterministic"}
        return Recommendation(why="little padding, and few shapes") if padded else None

    @classmethod
    def estimate_speedup(cls, profile: StepProfile, recipe: Recipe) -> SpeedupEstimate | None:
        if (
            {cls.name, "packing"} & recipe.plugins.keys()
            or not cls._may_arrange(recipe)
            or not profile.longest
            or recipe.data.get("padding") == "max_length"
        ):
            return None
        padding = 1 - profile.real / profile.longest  # a little remains
        return SpeedupEstimate(
            seconds=0.8 * padding * profile.in_operations,
            why=f"{padding:.0%} of a batch is padding to its longest sample.",
        )

    @staticmethod
    def _may_arrange(recipe: Recipe) -> bool:
        """Whether the recipe leaves the order of samples to plugins."""
        return recipe.inference is not None or recipe.data.get("shuffle_block") is None

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.known: dict[int, tuple[Any, NDArray[np.int64]]] = {}  # id of a dataset -> the dataset and its lengths

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        self.kind = hardware.this_machine(recipe.train.device).device
        if self.max_tokens is None:
            return
        where = f"{recipe.where}: plugins.length-bucketing.max_tokens"
        if recipe.train.micro_batch_size is not None:
            raise PluginError(
                "train.micro_batch_size is set too, and both limit what a device computes at once.",
                code="exclusive-options",
                place=where,
                remedy="Remove one of them: train.micro_batch_size=null, or plugins.length-bucketing.max_tokens=null.",
            )
        if recipe.data.get("padding") == "max_length":
            raise PluginError(
                "with data.padding: max_length all batches have the same width.",
                code="option-without-effect",
                place=where,
                remedy="Set data.padding: longest.",
            )

    @hookimpl
    def configure(self, settings: Settings) -> dict[str, Any]:
        self.settings = settings
        changes: dict[str, Any] = {"arrange": self.arrange}
        if self.kind == "cuda" and settings.pad_to_multiple_of is None:
            changes["pad_to_multiple_of"] = MULTIPLE
        if self.max_tokens is not None:
            changes["split_step"] = self.split_step
        return changes

    @hookimpl
    def check_run(self, run: Run) -> None:
        loaders = {"train": run.train_loader}
        if self.max_tokens is not None:
            loaders |= run.eval_loaders
        for split, loader in loaders.items():
            self._check_samples(split, loader, f"{run.recipe.where}: plugins.length-bucketing")
        lengths = self.lengths_of(run.datasets["train"])
        if lengths.min() == lengths.max():
            self.log.warning(
                Problem(f"all samples have length {lengths[0]}: there is nothing to sort.", code="no-effect")
            )
            return
        self._report_padding(run, lengths)

    def _check_samples(self, split: str, loader: Loader, where: str) -> None:
        """Check that the samples of a split can be sorted, and that each fits into a batch.

        Raises:
            PluginError: The dataset is iterable, or a sample is longer than ``max_tokens``.
        """
        dataset: Any = loader.dataset
        if loader.sampler is None:
            raise PluginError(
                f"{type(dataset).__name__} is iterable, with its own order.",
                code="iterable-dataset",
                place=f"{where}: {split}",
                remedy="Remove length-bucketing.",
            )
        limit = self.max_tokens
        if limit is None:
            return
        lengths = self.lengths_of(dataset)
        longest = int(lengths.argmax())
        length = int(lengths[longest])
        width = self.padded_width(length)
        if width > limit:
            padded = f", padded to {width}" if width > length else ""
            unit = self.padded_width(1)
            shorter = limit // unit * unit or limit
            raise PluginError(
                f"sample {longest} of the {split} split has {length} tokens{padded}, and {limit} are allowed.",
                code="sequence-too-long",
                place=f"{where}.max_tokens",
                remedy=f"Set it to {width} or more, or cut samples to {shorter} (texts: data.max_length).",
            )

    def _report_padding(self, run: Run, lengths: NDArray[np.int64]) -> None:
        """Log the share of padding with sorted samples and without, and the shapes of the micro-batches."""
        sampler: Any = run.train_loader.sampler
        size = sampler.size
        micro = run.loaders.micro_batch_size
        in_file_order = (list(range(first, min(first + micro, size))) for first in range(0, size, micro))
        before = self.padding_share(lengths, self.count_shapes(lengths, in_file_order))
        shapes = self.count_shapes(lengths, chain.from_iterable(step for _, step in sampler.steps()))
        share = self.padding_share(lengths, shapes)
        self.log.info("%.0f%% of the computed tokens are padding, instead of %.0f%%", 100 * share, 100 * before)
        micro_batches = shapes.total()
        widths = {width for _, width in shapes}
        self.log.info(
            "%d shapes in %d micro-batches (%.1f a step), %d widths",
            len(shapes),
            micro_batches,
            micro_batches / math.ceil(size / sampler.batch_size),
            len(widths),
        )

    def count_shapes(self, lengths: NDArray[np.int64], batches: Iterable[list[int]]) -> Counter[tuple[int, int]]:
        """(samples, width) -> number of batches with that shape."""
        shapes = Counter[tuple[int, int]]()
        for batch in batches:
            longest = int(lengths[batch].max())
            shapes[len(batch), self.padded_width(longest)] += 1
        return shapes

    def padding_share(self, lengths: NDArray[np.int64], shapes: Counter[tuple[int, int]]) -> float:
        """The share of padding in the tokens computed in an epoch."""
        computed = sum(samples * width * count for (samples, width), count in shapes.items())
        return 1 - int(lengths.sum()) / computed

    def padded_width(self, length: int) -> int:
        """The width of a batch whose longest sample has this length: 64 for 60 and a multiple of 64."""
        multiple = self.settings.pad_to_multiple_of or 1
        return -(-length // multiple) * multiple

    def split_step(self, dataset: Any, ids: list[int], processes: int) -> list[list[int]]:
        """Split a step into micro-batches within ``max_tokens``, enough to keep all processes busy; see
        ``Settings.split_step``."""
        lengths = self.lengths_of(dataset)
        limit = self.max_tokens
        assert limit is not None
        ids = by_length(lengths, ids)
        parts: list[list[int]] = []
        while ids:
            longest = max(int(lengths[ids[0]]), 1)  # ids are sorted by length, and a sample may have no token
            # samples that fit into a micro-batch as wide as the longest: 4 for a limit of 64 tokens and a width of 16
            count = max(limit // self.padded_width(longest), 1)
            parts.append(ids[:count])
            ids = ids[count:]

        def cost(part: list[int]) -> int:
            return len(part) * self.padded_width(int(lengths[part[0]]))

        while len(parts) % processes and max(map(len, parts)) > 1:
            largest = max((part for part in parts if len(part) > 1), key=cost)
            parts.remove(largest)
            half = (len(largest) + 1) // 2
            parts += [largest[:half], largest[half:]]
        return sorted(parts, key=cost, reverse=True)  # micro-batches that run in parallel have similar cost

    def arrange(self, dataset: Any, ids: list[int], batch_size: int, generator: Generator | None) -> list[int]:
        """Order samples so that each batch has similar lengths; see ``Settings.arrange``."""
        import torch

        lengths = self.lengths_of(dataset)
        if generator is None:
            return by_length(lengths, ids)
        full = len(ids) // batch_size * batch_size  # samples of full batches: 8 of 10 ids in batches of 4
        window_size = self.window * batch_size
        batches: list[list[int]] = []
        for start in range(0, full, window_size):
            window = by_length(lengths, ids[start : min(start + window_size, full)])
            batches += [window[first : first + batch_size] for first in range(0, len(window), batch_size)]
        ordered: list[int] = []
        for index in torch.randperm(len(batches), generator=generator).tolist():
            ordered += batches[index]
        ordered += by_length(lengths, ids[full:])  # a short batch can only be the last
        return ordered

    def lengths_of(self, dataset: Any) -> NDArray[np.int64]:
        """The length of each sample, computed once for each dataset.

        Raises:
            PluginError: The samples have no lengths.
        """
        if id(dataset) not in self.known:
            import numpy as np

            counts = getattr(dataset, "lengths", None)
            try:
                if counts is None:
                    counts = [len(dataset[index]["input_ids"]) for index in range(len(dataset))]
                lengths = np.asarray(counts, np.int64)
            except (TypeError, ValueError, KeyError, IndexError):
                raise PluginError(
                    f"{type(dataset).__name__} has no lengths.",
                    code="no-lengths",
                    place="plugin 'length-bucketing'",
                    remedy=(
                        "Give it an attribute `lengths`, a number for each sample, or samples that are mappings with "
                        "`input_ids`."
                    ),
                ) from None
            if len(self.known) >= 4:  # a file to predict has many chunks
                self.known = {}
            self.known[id(dataset)] = (dataset, lengths)
        return self.known[id(dataset)][1]


def by_length(lengths: NDArray[np.int64], ids: list[int]) -> list[int]:
    """Sample ids, the longest first. Those of equal length keep their order."""
    import numpy as np

    chosen = np.asarray(ids, np.int64)
    ordered: list[int] = chosen[np.argsort(-lengths[chosen], kind="stable")].tolist()
    return ordered
