"""Base class of tasks on texts: reading, tokenizing, caching, streaming, padding, predicting and exporting.

A task adds its columns and its loss. The order of samples is not here: plugins in ``fastloop_plugins.data`` set it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

from fastloop import Plugin, RecipeError, hookimpl
from fastloop_plugins.models.checks import shortest
from fastloop_plugins.models.label_order import name_classes
from fastloop_plugins.text.column_data import ColumnData
from fastloop_plugins.text.columns import each_text
from fastloop_plugins.text.data import TextData
from fastloop_plugins.text.model import TextModel
from fastloop_plugins.text.options import padded_traits
from fastloop_plugins.text.parts import read_parts
from fastloop_plugins.text.streaming.rows import name_row_errors

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

    from fastloop import Batch, Run, Trait
    from fastloop.recipe import Recipe
    from fastloop_plugins._cache import Flat
    from fastloop_plugins.models.label_order import LabelOrder
    from fastloop_plugins.text.batches import Ragged
    from fastloop_plugins.text.chat.rows import Chat
    from fastloop_plugins.text.columns import Text
    from fastloop_plugins.text.needed_rows import FirstRows
    from fastloop_plugins.text.samples import Sample
    from fastloop_plugins.text.sequences import Sequences
    from fastloop_plugins.text.tokens import Selection, Split


PROBLEM_TYPES = {
    "class": "single_label_classification",
    "number": "regression",
    "classes": "multi_label_classification",
}
"""``data.label_type`` -> transformers' name of a classifier's problem."""


class AutoClassModel(TextModel):
    """The ``model`` section of a ``TextTask``.

    Args:
        auto_class: The Auto class of transformers that builds the model.
        description: The kind of that model, for messages.
        examples: Architectures, for messages.
    """

    def __init__(
        self, recipe: Recipe, auto_class: str, classify: bool = True, description: str = "model", examples: str = ""
    ) -> None:
        self.auto_class = auto_class
        self.description = description
        self.examples = examples
        super().__init__(recipe, classify)

    def finish_tokenizer(self, texts: Iterable[Any], types: bool = False) -> None:
        super().finish_tokenizer(each_text(texts), types)

    def _check_architecture(self, config: dict[str, Any]) -> None:
        from transformers.models.auto import modeling_auto
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        known = getattr(modeling_auto, self.auto_class)._model_mapping._model_mapping  # model_type -> class
        kind = config.get("model_type")
        key = "name" if self.options.config is None else "config"
        if kind in CONFIG_MAPPING and kind not in known and not config.get("auto_map"):
            remedy = f"Use one that it has, such as {self.examples}" if self.examples else "Use another architecture"
            raise RecipeError(
                f"transformers has no {self.description} for {kind!r} ({self.auto_class}). {remedy}.",
                code="unsupported-model",
                place=f"{self.where}.{key}",
            )


def refuse_row(data: TextData, row: Any, problem: str) -> None:
    """Raise an error that names a row in memory, by its content. Reads the rows again, to find the first such one."""
    for part in chain.from_iterable(read_parts(data).values()):
        number = 0
        for block in data.parse_blocks(part, lambda index, problem: None):
            columns = list(block.values())
            rows: Any = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
            if row in rows:
                raise RecipeError(problem, code="invalid-row", place=part.row(number + rows.index(row) + 1))
            number += len(rows)
    raise RecipeError(problem, code="invalid-row", place=data.where)


def longest_and_shortest(dataset: Any) -> list[dict[str, Any]]:
    """The longest sample of a dataset, and its shortest one; of those that are tokenized, if only some are."""
    known = getattr(dataset, "encoded", dataset)
    return [known[int(known.lengths.argmax())], shortest(known)]


def build_ragged(task: TextTask, samples: list[dict[str, Any]]) -> Ragged:
    """A batch of a task before padding. Workers that are spawned get it by pickle."""
    return replace(task.build_batch(samples), reads_all=task.reads_all)


class TextTask(Plugin):
    """Base class of tasks on texts.

    It reads, tokenizes, caches, streams, pads, packs and predicts rows of texts, and builds and exports a model with
    its tokenizer. A task names its columns, and computes its loss from a batch:

        class Similarity(TextTask):
            name = "similarity"
            columns = ("text", "other")
            sections = {"model": ModelOptions, "data": PairData}    # adds the option ``other`` to ``DataOptions``

            @hookimpl
            def compute_loss(self, model, batch):
                states = compute(model, batch).last_hidden_state
                first, second = pool(states, batch, "mean").chunk(2)
                ...

    A batch has ``input_ids`` of all texts: those of the first column, then those of the second. See
    ``build_batch``.

    Attributes:
        columns: Options of ``data`` that name one column of texts each. Each text is a sequence of its own. If they
            depend on the recipe, set them, ``conversations`` and ``labels`` before the call of ``check_recipe`` of this
            class.
        inputs: Those of ``columns`` that a file to predict has; empty: the first one.
        conversations: Those of ``columns`` that hold conversations. ``encode`` gets the JSON of a ``Chat`` for each.
        chat_template: The text of the chat template to use; None: that of the tokenizer.
        values: Those of ``columns`` that hold values of any JSON type. Such an option names one, several, or
            null. ``encode`` gets the JSON of each value, and ``data.names_of(option)`` are the columns.
        labels: Whether rows have labels, which ``data.label`` names: none, optional or required. A batch then has
            ``labels``: class ids (rows,) int64, or numbers (rows,) float32.
        auto_class: The Auto class of transformers that builds the model.
        unused_modules: Modules of the model that the loss does not read. Their weights are frozen: a strategy would
            wait for their gradients.
        reads_all: Whether the loss reads the output of all tokens of a text, by ``compute``, ``pool`` or ``split``. A
            packed batch then has their lengths.
        sees_all_rows: Whether ``encode`` gets all rows of a split, such as to count some of them for a warning. Else
            several processes share the rows of a large split.
        samples_are_rows: Whether each row is one sample, in the order of the rows, which ``build_dataset`` builds from
            that row alone. A run of few steps then tokenizes only the rows of a large split that it reads.
        encoding_version: Increase it when ``encode`` gives other ids, so that cached ones are not used.
        order: The classes as the model's head numbers them; None: ``auto_class`` has no head for classes.
        data: The ``data`` section. ``data.options`` are its options, and ``data.classes`` the names of classes.
        text_model: The ``model`` section. ``text_model.tokenizer`` is there from ``build_datasets`` on.
    """

    slot = "task"
    fallback_hooks: tuple[str, ...] = ("compute_loss",)
    columns: tuple[str, ...] = ("text",)
    inputs: ClassVar[tuple[str, ...]] = ()
    conversations: tuple[str, ...] = ()
    chat_template: str | None = None
    values: ClassVar[tuple[str, ...]] = ()
    labels: str = "none"
    auto_class: ClassVar[str] = "AutoModel"
    unused_modules: ClassVar[tuple[str, ...]] = ("pooler",)
    reads_all: ClassVar[bool] = True
    _has_narrow_ids: ClassVar[bool] = True  # whether token ids in the cache may take 2 bytes
    _is_checked_on_first_rows: ClassVar[bool] = False  # whether a check of the recipe can do without the other rows
    _probe_inputs: ClassVar[tuple[str, ...]] = ("input_ids", "attention_mask", "token_type_ids")
    sees_all_rows: bool = False
    samples_are_rows: bool = False
    encoding_version: ClassVar[int] = 1
    order: LabelOrder | None = None
    _longest_and_shortest: list[dict[str, Any]] | None = None
    data: TextData
    text_model: TextModel

    @classmethod
    def declare_traits(cls, recipe: Recipe) -> set[Trait]:
        return padded_traits(recipe)

    def prediction_columns(self) -> tuple[str, ...]:
        """The options that name the columns of a file to predict."""
        return self.inputs or self.columns[:1]

    # -- what a task may replace ---------------------------------------------------------------------------------------

    def encoding_arguments(self) -> dict[str, Any]:
        """The arguments of ``encode``: JSON values. They are part of the name of cached token ids."""
        return {"max_length": self.data.options.max_length, "columns": list(self.columns)}

    @staticmethod
    def encode(
        tokenizer: PreTrainedTokenizerBase, rows: Sequence[Any], arguments: Mapping[str, Any]
    ) -> Iterator[list[int]]:
        """Yield the numbers of each row, which ``build_dataset`` reads. The result must depend only on the arguments.

        Args:
            rows: A tuple of the texts of ``columns`` for each row, or of ``inputs`` in prediction. The text alone if
                that is one column.

        Raises:
            RowError: The next row cannot be encoded. The run ends with an error that names its file and number.
        """
        from fastloop_plugins.text.encoding import encode_marked
        from fastloop_plugins.text.encoding_processes import portions
        from fastloop_plugins.text.sequences import join_ids

        options = {"truncation": True, "max_length": arguments["max_length"]}
        for portion in portions(rows):
            columns = zip(*((row,) if isinstance(row, str) else row for row in portion), strict=True)
            encoded = [encode_marked(tokenizer, texts, dict(options)) for texts in columns]
            yield from map(join_ids, zip(*encoded, strict=True))

    @staticmethod
    def build_dataset(split: Split, arguments: Mapping[str, Any]) -> Sequences:
        """The samples of a split, of which some rows may be those of one batch of a stream.

        Args:
            split: ``ids``, (numbers,) int32, has the numbers of all rows end to end; ``lengths``, (rows,) int64, their
                count in each row; ``labels`` the labels.
            arguments: See ``encoding_arguments``.
        """
        from fastloop_plugins.text.sequences import ColumnSequences

        return ColumnSequences(arguments["columns"], split.ids, split.lengths, split.labels)

    @staticmethod
    def read_conversation(value: Any, name: str, key: str) -> str:
        """The text that ``encode`` gets for a value of the column ``name``, which ``data.<key>`` names and
        ``conversations`` has: the JSON of a ``Chat``. A task may read other values, too.

        Raises:
            RowError: The value is no list of messages.
        """
        from fastloop_plugins.text.chat.rows import Chat, check_depth, read_messages

        check_depth(value, name)
        return Chat(read_messages(value, f"column {name!r} (data.{key})")).dumps()

    @staticmethod
    def chats_of(row: Text, arguments: Mapping[str, Any]) -> list[Chat]:
        """The conversations that ``encode`` renders for a row. A warning then has the number of rows with a content
        beside tool calls that the chat template leaves out, so give ``ChatRenderer`` ``counts_contents=True``.

        Args:
            row: See ``encode``.
            arguments: Those of ``encode``.
        """
        return []

    def build_batch(self, samples: list[dict[str, Any]]) -> Ragged:
        """A batch of samples, before padding or packing: the texts of the first column, then those of the next ones.
        The samples of ``Sequences`` have one text.

        ``loss_weight`` is the number of samples. In prediction, samples have the columns of ``inputs`` only.
        """
        import numpy as np
        import torch

        from fastloop_plugins.text.batches import Ragged

        names = ("input_ids",) if "input_ids" in samples[0] else self.columns
        rows: list[NDArray[np.int32]] = []
        for name in names:
            if name in samples[0]:
                rows.extend(sample[name] for sample in samples)
        fixed = {}
        if "label" in samples[0]:
            fixed["labels"] = torch.from_numpy(np.array([sample["label"] for sample in samples]))
        columns = {"input_ids": (rows, self.text_model.tokenizer.pad_token_id)}
        if "token_type_ids" in samples[0]:
            columns["token_type_ids"] = ([sample["token_type_ids"] for sample in samples], 0)
        tokens = sum(map(len, rows))
        return Ragged(columns=columns, fixed=fixed, loss_weight=len(samples), tokens=tokens)

    def _probe_samples(self, run: Run) -> list[dict[str, Any]]:
        """A long and a short sample, on which the model is tried."""
        return self._longest_and_shortest or longest_and_shortest(run.datasets[run.loaders.first_split])

    def check_model(self, run: Run, model: nn.Module, make: Callable[..., dict[str, Tensor]]) -> None:
        """Raise an error for a model that cannot do the task. Called on every process, before training.

        Args:
            make: Returns the model's inputs for the given samples; without any, for a long and a short one.
        """

    def output_columns(self) -> Sequence[str]:
        """The columns that ``predict`` returns for a file. `fastloop predict --keep` then refuses an input column of
        such a name before the model is built. Called after ``build_prediction_data``."""
        return ()

    # -- hooks ---------------------------------------------------------------------------------------------------------

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        classify = not self.auto_class.endswith("ForCausalLM")  # else a trained tokenizer has an end token
        self.data = ColumnData(recipe, self)
        self.text_model = AutoClassModel(recipe, self.auto_class, classify)

    @hookimpl
    def build_datasets(self, run: Run) -> Mapping[str, Any]:
        datasets = {name: self._build_samples(name, split) for name, split in self.read_splits(run).items()}
        run.state.unreadable += self.data.unreadable
        first = next(iter(datasets.values()), None)
        self._longest_and_shortest = longest_and_shortest(first) if first is not None and len(first) else None
        return self.data.streamed(run, datasets, self.text_model)

    def _build_samples(self, name: str, split: Split) -> Any:
        """The samples of a split, of which maybe only some are tokenized."""
        from fastloop_plugins._mapped import take
        from fastloop_plugins.text.needed_rows import NeededSamples

        build = partial(self.build_dataset, arguments=self.encoding_arguments())
        needed = split.needed
        if needed is None:
            samples = build(split)
            if self.samples_are_rows:
                samples.content = split.content
            self.check_dataset(name, samples)
            return samples
        labels = None if split.labels is None else take(split.labels, needed.ids)
        samples = build(split.with_ids((split.ids, split.lengths), labels))
        self.check_dataset(name, samples)
        return NeededSamples(split, needed, samples, build)

    def read_splits(self, run: Run, first: int | None = None) -> dict[str, Split]:
        """Read and encode the splits. ``show_samples`` needs only the ``first`` rows of train, with their texts."""
        self.data.skip_unreadable = run.settings.skip_unreadable
        splits = self._encode_splits(run, first)
        if self.chat_template is not None:  # cached tokens did not need it
            self.text_model.tokenizer.chat_template = self.chat_template
        self._order_classes(splits)
        return splits

    def _first_rows(self, run: Run) -> FirstRows | None:
        """Use only the first rows of large splits, in a run that only checks the recipe; None: use all rows."""
        from fastloop_plugins.text.needed_rows import FirstRows

        if not self._is_checked_on_first_rows or not run.settings.only_checks:
            return None
        return FirstRows(run.loaders.count_samples_to_read, self._count_samples)

    def _count_samples(self, flat: Flat) -> int:
        """The number of samples of some rows."""
        from fastloop_plugins.text.tokens import Split

        return len(self.build_dataset(Split(*flat), self.encoding_arguments()))

    def _encode_splits(self, run: Run, first: int | None) -> dict[str, Split]:
        """``read_splits`` with the labels as the data numbers them."""
        from fastloop_plugins.text import tokens

        def encode(tokenizer: PreTrainedTokenizerBase, rows: Any, arguments: dict[str, Any]) -> Iterator[list[int]]:
            encoded = self.encode(tokenizer, rows, arguments["encoding"])
            return name_row_errors(encoded, lambda index, problem: refuse_row(self.data, rows[index], problem))

        encoding = tokens.Encoding(
            arguments={
                "encoding": self.encoding_arguments(),
                "code": f"{type(self).__module__}.{type(self).__qualname__}:{self.encoding_version}",
            },
            encoder=encode,
            sees_all=self.sees_all_rows,
            is_narrow=self._has_narrow_ids,
        )
        return tokens.read(self.data, self.text_model, encoding, self._selection(run, first))

    def _selection(self, run: Run, first: int | None) -> Selection:
        """The rows to tokenize before training."""
        from fastloop_plugins.text.needed_rows import find_needs
        from fastloop_plugins.text.tokens import Selection

        first_rows = self._first_rows(run)
        samples = None
        if not self.samples_are_rows and first_rows is None and first is None:
            samples = run.loaders.count_samples_to_read("train")
        needs = find_needs(run) if self.samples_are_rows else None
        return Selection(first, needs, first_rows, samples)

    def _order_classes(self, splits: Mapping[str, Split] | None = None) -> None:
        """Set ``order`` and ``data.classes``, if ``auto_class`` has a head for classes. A checkpoint with the same
        classes keeps its ids.

        Args:
            splits: Their labels become ids of the model. None: the classes are the model's, as in prediction.
        """
        if not self.data.labels or not self.auto_class.endswith(self.text_model.head):
            return
        import numpy as np

        names = self.text_model.class_names()
        kind = self.data.label_type
        if splits is not None and (kind != "number" or len(names) > 1):  # the output of a regression has any name
            names = self.data.classes
        self.order = self.text_model.order_labels(names)
        if self.text_model.problem_type is not None:
            self.text_model.problem_type = PROBLEM_TYPES[kind]
        self.data.classes = self.order.names
        ids = np.array(self.order.ids)
        for split in (splits or {}).values():
            is_reordered = not np.array_equal(ids, np.arange(len(ids)))
            if split.labels is not None and kind != "number" and is_reordered:
                split.labels = ids[split.labels] if kind == "class" else split.labels[:, ids.argsort()]

    def check_dataset(self, split: str, dataset: Any) -> None:
        """Log how many texts of a split are longer than ``data.max_length``. A task may raise errors here."""
        if hasattr(dataset, "warn"):
            size = ("max_length", self.data.options.max_length)
            dataset.warn(split, [f"texts of data.{key}" for key in self.columns], [size] * len(self.columns))

    @hookimpl(optionalhook=True)
    def show_samples(self, run: Run, count: int) -> Iterator[Sample]:
        from fastloop_plugins.text.samples import column_samples

        split = self.read_splits(run, count)["train"]
        return column_samples(self.data, self.text_model, split, self.build_dataset(split, self.encoding_arguments()))

    @hookimpl
    def build_prediction_data(self, source: Any, start: int, size: int) -> Iterator[Sequences] | None:
        if source is None:  # a split
            return None
        self.text_model.load_tokenizer(self.data.options.max_length)
        self._order_classes()
        return self._encode_chunks(source, start, size)

    def _encode_chunks(self, source: Any, start: int, size: int) -> Iterator[Sequences]:
        """The samples of a file or of texts, see ``build_prediction_data``."""
        from fastloop_plugins._mapped import flat
        from fastloop_plugins.text.chat.left_out_contents import ContentsOfRows
        from fastloop_plugins.text.chunks import text_chunks
        from fastloop_plugins.text.tokens import Split

        arguments = self.encoding_arguments() | {"columns": list(self.prediction_columns())}

        left_out = ContentsOfRows(self, arguments)
        for texts, bad in text_chunks(self.data, source, start, size):
            for text in texts:
                left_out.add_row(text, f"row {start + left_out.total + 1}")
            ids = self.encode(self.text_model.tokenizer, texts, arguments)
            yield self.build_dataset(Split(*flat(name_row_errors(ids, bad))), arguments)
        problem = left_out.problem("predict")
        if problem is not None:
            self.log.warning(problem)

    @hookimpl
    def build_collator(self, run: Run) -> Callable[[list[Any]], Batch]:
        from fastloop_plugins.text.batches import PaddedCollator

        return PaddedCollator(partial(build_ragged, self), self.text_model.width(run, self.data.options))

    @hookimpl
    def build_model(self, run: Run) -> nn.Module:
        import transformers

        from fastloop_plugins.text.padding_check import check_padding

        if self.data.classes and self.order is None:  # predictions name classes by them
            name_classes(self.text_model.config, self.data.classes)
        model: nn.Module = self.text_model.build(getattr(transformers, self.auto_class), self.order)
        run.new_weights = frozenset(self.text_model.new)
        for name in self.unused_modules:
            module = getattr(model, name, None)
            if module is not None:
                module.requires_grad_(False)
        probe = self._probe_samples(run)
        collate = self.build_collator(run)

        def make(*samples: dict[str, Any]) -> dict[str, Tensor]:
            inputs = collate([*(samples or probe)]).inputs
            return {name: inputs[name] for name in self._probe_inputs if name in inputs}

        self.check_model(run, model, make)
        check_padding(run, model, self.text_model, self.text_model.width(run, self.data.options), make)
        return model

    @hookimpl
    def export_model(self, run: Run, folder: Path) -> Path:
        return self.text_model.export(run, folder)
