"""The table of the round-trip test. To add a case, add a ``Case`` to ``EXTRA``; for a refusal, one to ``REFUSED``."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal

from long_form import LONG
from round_trip_data import (
    ARCHITECTURES,
    CLASSES,
    IMAGE_CLASSES,
    MAX_LENGTH,
    OTHER_CLASSES,
    OTHER_TAGS,
    TAGS,
    TOPICS,
    Base,
    Bases,
)

Start = Literal["scratch", "bare", "headed", "other"]
"""From scratch; from a checkpoint without the task's head; with it; with a head for other classes."""
Method = Literal["full", "merged", "unmerged"]
"""All weights are trained; LoRA, merged into the export; LoRA, with ``merge: false``."""
Form = Literal["model", "safetensors", "adapter", "onnx"]
"""The folder ``model/`` of a run, or the value of ``fastloop export --to``."""

TEXT_FILES = {split: f"{split}.jsonl" for split in ("train", "validation", "test")}
LORA = {"r": 4, "alpha": 16}
TARGETS = {
    "distilbert": ["q_lin", "v_lin"],
    "modernbert": ["Wqkv"],
    "xlnet": ["layer_1", "layer_2"],
    "vit": ["q_proj", "v_proj", "query", "value"],
    "resnet": ["convolution"],
    "module": ["5"],
}
"""Architecture -> ``target_modules``, where peft has no default."""


@dataclass(frozen=True)
class Kind:
    """A task, with one form of its data.

    Attributes:
        task: The plugin.
        head: How the names of the task's classes in transformers end; empty: the task has no Auto class.
        architecture: The architecture of the cases of the product.
        data: The ``data`` section.
        classes: Names of the classes as a checkpoint has them: not in sorted order. Empty: no classes.
        other: Names of as many other classes.
        train: Keys of ``train``.
        generates: Whether texts are generated.
    """

    task: str
    head: str
    architecture: str
    data: Mapping[str, Any]
    classes: tuple[str, ...] = ()
    other: tuple[str, ...] = ()
    train: Mapping[str, Any] = field(default_factory=dict)
    generates: bool = False


LEARNS = {"epochs": 12, "lr": 2e-2}
"""Until a model of this size writes an answer and its end."""
TEXTS = {"files": TEXT_FILES, "max_length": MAX_LENGTH}
KINDS = {
    "class": Kind(
        "text-classification", "ForSequenceClassification", "distilbert", {**TEXTS, "label": "label"},
        CLASSES[::-1], OTHER_CLASSES,
    ),
    "pair": Kind(
        "text-classification", "ForSequenceClassification", "bert",
        {**TEXTS, "text": ["text", "other"], "label": "label"}, CLASSES[::-1], OTHER_CLASSES,
    ),
    "topics": Kind(
        "text-classification", "ForSequenceClassification", "distilbert",
        {**TEXTS, "label": "topics", "label_type": "classes"}, TOPICS[::-1], OTHER_CLASSES,
    ),
    "number": Kind(
        "text-classification", "ForSequenceClassification", "distilbert",
        {**TEXTS, "label": "score", "label_type": "number"}, ("score",), OTHER_CLASSES,
    ),
    "tags": Kind(
        "token-classification", "ForTokenClassification", "distilbert", {**TEXTS, "words": "words", "tags": "tags"},
        TAGS[::-1], OTHER_TAGS,
    ),
    "document": Kind("causal-lm", "ForCausalLM", "llama", {**TEXTS, "text": "document"}, train=LEARNS, generates=True),
    "completion": Kind(
        "causal-lm", "ForCausalLM", "llama", {**TEXTS, "prompt": "prompt", "completion": "completion"},
        train=LEARNS, generates=True,
    ),
    "chat": Kind(
        "causal-lm", "ForCausalLM", "llama", {**TEXTS, "messages": "messages", "chat_template": "chatml"},
        train=LEARNS, generates=True,
    ),
    "seq2seq": Kind(
        "seq2seq", "ForSeq2SeqLM", "t5",
        {**TEXTS, "text": "prompt", "target": "completion", "max_target_length": MAX_LENGTH},
        train=LEARNS, generates=True,
    ),
    "image": Kind(
        "image-classification", "ForImageClassification", "vit", {"images": "images", "image_size": 16},
        IMAGE_CLASSES[::-1], OTHER_CLASSES,
    ),
    "module": Kind("module", "", "module", {"module": "code.py:rows"}),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run, and the forms in which its model is loaded again.

    Attributes:
        kind: A key of ``KINDS``.
        architecture: A key of ``ARCHITECTURES``; empty: the kind's.
        forms: Beside ``model``.
        note: A part of the name, for cases that differ in the attributes below.
        plugins: Further plugins of the recipe.
        lora: Options of LoRA.
        base: Changes of the checkpoint.
        model: Keys of ``model``.
        data: Keys of ``data``. None removes a key.
        train: Keys of ``train``.
    """

    kind: str
    start: Start = "headed"
    method: Method = "full"
    architecture: str = ""
    forms: tuple[Form, ...] = ()
    note: str = ""
    plugins: tuple[Mapping[str, Any], ...] = ()
    lora: Mapping[str, Any] = field(default_factory=dict)
    base: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the case, unique in the table."""
        parts = (self.kind, self.architecture, self.start, self.method, self.note)
        return "-".join(part for part in parts if part)

    @property
    def family(self) -> str:
        """The key of ``ARCHITECTURES``, or ``module``."""
        return self.architecture or KINDS[self.kind].architecture

    @property
    def has_new_weights(self) -> bool:
        """Whether the run has weights that no tensor of its checkpoint gives."""
        return self.pretrained() is not None and (self.start != "headed" or "classes" in self.base)

    def pretrained(self) -> Base | None:
        """The checkpoint to start from; None: from scratch."""
        kind = KINDS[self.kind]
        if self.start == "scratch" or self.family == "module":
            return None
        head = "" if self.start == "bare" else kind.head
        classes = {"headed": kind.classes, "other": kind.other}.get(self.start, ())
        return Base(self.family, **{"head": head, "classes": classes, **self.base})

    def recipe(self, bases: Bases, output: str) -> dict[str, Any]:
        """The recipe, whose paths are relative to the folder of the data."""
        kind = KINDS[self.kind]
        base = self.pretrained()
        model: dict[str, Any] = {"name": str(bases.find(base))} if base is not None else self._scratch()
        data = {key: value for key, value in {**kind.data, **self.data}.items() if value is not None}
        train = {"epochs": 3, "batch_size": 8, "lr": 1e-2, "device": "cpu", "evaluate_every": None, "save_every": None}
        if self.method == "merged":
            train["save_every"] = 9  # such a run has the adapter alone in its checkpoints
        plugins: list[Any] = [{kind.task: {"loss": "cross_entropy"} if self.family == "module" else {}}]
        plugins += [{"log": False}, *self.plugins]
        if self.method != "full":
            targets = {"target_modules": TARGETS[self.family]} if self.family in TARGETS else {}
            plugins.append({"lora": {**LORA, **targets, "merge": self.method == "merged", **self.lora}})
        return {
            "model": {**model, **self.model},
            "data": data,
            "train": {**train, **kind.train, **self.train},
            "plugins": plugins,
            "output": output,
        }

    def _scratch(self) -> dict[str, Any]:
        if self.family == "module":
            return {"module": "code.py:Net"}
        if self.kind == "image":
            return {"config": ARCHITECTURES[self.family]}
        return {"config": ARCHITECTURES[self.family], "tokenizer": {"kind": "word"}}


QUICK = {"pair-headed-full", "chat-headed-full", "seq2seq-headed-merged"}
"""Names of the cases that are not marked slow."""
METHODS: tuple[Method, ...] = ("full", "merged", "unmerged")
WITH_CLASSES = ("class", "topics", "tags", "image")
"""Kinds whose checkpoints may have a head for other classes."""
Row = tuple[str, Start, Method]
"""Kind, start and method of a case."""


def _product() -> list[Row]:
    """Each kind from each start by each method. ``REFUSED`` has those that cannot be."""
    rows: list[Row] = []
    starts: tuple[Start, ...] = ("scratch", "bare", "headed", "other")
    for kind, start, method in itertools.product(KINDS, starts, METHODS):
        if start == "scratch" and method == "unmerged":
            continue  # refused
        if kind == "module" and start != "scratch":
            continue  # the user's module has no Auto class that adds a head to a checkpoint
        if start == "other" and kind not in WITH_CLASSES:
            continue
        rows.append((kind, start, method))
    return rows


def _pairwise(rows: Sequence[Row], first: Sequence[Row]) -> list[Row]:
    """Choose rows that hold each pair of values that any row holds: those of ``first``, then always the one that adds
    most pairs.

    From the eight rows of (a, b) x (c, d) x (e, f), it chooses ace, adf, bcf and bde.
    """

    def pairs(row: Row) -> set[tuple[int, str, int, str]]:
        columns = itertools.combinations(enumerate(row), 2)
        return {(*one, *other) for one, other in columns}

    left = set().union(*map(pairs, rows))
    chosen = list(first)
    for row in first:
        left -= pairs(row)
    while left:
        best = max(rows, key=lambda row: len(pairs(row) & left))
        chosen.append(best)
        left -= pairs(best)
    return chosen


def _pairs() -> list[Case]:
    """Each pair of a kind, a start and a method, in all forms."""
    rows = _product()
    first = [row for row in rows if row in ONNX or "-".join(row) in QUICK]
    cases = []
    for kind, start, method in _pairwise(rows, first):
        forms: tuple[Form, ...] = ()
        if method == "merged" and start not in ("scratch", "other"):
            forms = ("adapter",)
        elif method == "unmerged" and start != "other":
            forms = ("adapter", "safetensors")
        if (kind, start, method) in ONNX:
            forms = (*forms, "onnx")
        cases.append(Case(kind=kind, start=start, method=method, forms=forms))
    return cases


ONNX = {
    ("seq2seq", "headed", "full"),
    ("number", "bare", "unmerged"),
    ("completion", "headed", "full"),
    ("image", "bare", "full"),
}
"""Kind, start and method of the cases that are also exported to ONNX, which takes seconds."""
if LONG:
    ONNX |= {("pair", "headed", "merged"), ("tags", "bare", "full"), ("module", "scratch", "full")}


def _fresh_heads() -> list[Case]:
    """Architectures whose heads have more layers than one, or a pooler. The names of a head matter most to an adapter,
    so each family has one. In the long form it is also trained in full or merged, in turns."""
    families = {
        "class": ("bert", "electra", "deberta", "modernbert", "xlnet", "gpt2", "llama", "t5", "bart"),
        "tags": ("bert", "modernbert", "gpt2"),
        "image": ("resnet",),
        "document": ("gpt2", "tied-llama"),
        "seq2seq": ("bart", "t5-v1_1"),
    }
    others: Iterator[Method] = itertools.cycle(("full", "merged"))
    cases = []
    for kind, names in families.items():
        for family in names:
            methods: list[Method] = ["unmerged"]
            if family == "resnet":
                methods = ["full", "merged"]  # unmerged is refused
            elif LONG:
                methods.append(next(others))
            cases += [Case(kind=kind, start="bare", method=method, architecture=family) for method in methods]
    return cases


BEST = ({"checkpoint-best": {"monitor": "loss"}},)
EACH_EPOCH = {"evaluate_every": "epoch"}
DIVERGES = {"lr": 0.3, **EACH_EPOCH}
"""The best weights are not the last ones."""
AVERAGE = ({"ema": {"decay": 0.5}},)
ANSWERS = json.dumps({"do_sample": True, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.3})
NEW_TOKEN = {"tokens": ["<call>"]}
NEW_MARKS = {"special_tokens": ["<|im_start|>", "<|im_end|>"]}
FEW_ROWS = {"changes": '{"vocab_size": 45}'}
"""A checkpoint whose tokenizer has more tokens than its embedding has rows."""
OTHER_PADDING = {"changes": '{"pad_token_id": 7}'}
"""A checkpoint whose tokenizer pads with another token than its configuration says."""
NORMALIZED = json.dumps(
    {
        "image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}, "do_normalize": True,
        "image_mean": [0.2, 0.4, 0.6], "image_std": [0.3, 0.2, 0.4], "resample": 3,
    }
)  # fmt: skip
CROPPED = json.dumps(
    {
        "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 20},
        "crop_size": {"height": 16, "width": 16}, "do_center_crop": True, "resample": 2,
    }
)  # fmt: skip
EXTRA = [
    *_fresh_heads(),
    # other weights than the last ones
    Case(kind="class", note="best", plugins=BEST, train=DIVERGES),
    Case(kind="class", start="bare", method="unmerged", note="best", plugins=BEST, train=DIVERGES),
    Case(kind="class", note="ema", plugins=AVERAGE),
    Case(kind="class", start="bare", method="unmerged", note="ema", plugins=AVERAGE),
    Case(kind="class", start="bare", method="merged", note="ema-best", plugins=(*AVERAGE, *BEST), train=EACH_EPOCH),
    Case(kind="image", architecture="resnet", method="full", note="ema", plugins=AVERAGE),
    # other adapters
    Case(kind="class", start="bare", method="merged", note="all-linear", lora={"target_modules": "all-linear"}),
    Case(kind="tags", start="bare", method="merged", note="all-linear", lora={"target_modules": "all-linear"}),
    Case(kind="image", start="bare", method="unmerged", note="all-linear", lora={"target_modules": "all-linear"}),
    Case(
        kind="image", architecture="resnet", start="bare", method="unmerged", forms=("safetensors",),
        note="saved-norms", lora={"modules_to_save": ["classifier", "normalization"]},
    ),
    Case(kind="document", method="merged", note="all-linear", lora={"target_modules": "all-linear"}),
    Case(
        kind="document", architecture="tied-llama", method="merged", note="head",
        lora={"target_modules": ["lm_head"]},
    ),
    Case(
        kind="document", architecture="tied-llama", method="merged", note="embedding",
        lora={"target_modules": ["q_proj", "embed_tokens"]},
    ),
    Case(
        kind="document", architecture="llama", method="unmerged", note="saved-head",
        lora={"modules_to_save": ["lm_head"]},
    ),
    Case(
        kind="document", architecture="tied-llama", method="unmerged", note="saved-embedding",
        lora={"modules_to_save": ["embed_tokens"]},
    ),
    Case(kind="class", start="bare", method="merged", note="dora", lora={"use_dora": True}),
    Case(kind="tags", start="bare", method="unmerged", note="dora", lora={"use_dora": True}),
    Case(kind="completion", method="unmerged", note="rslora", lora={"use_rslora": True}),
    Case(kind="completion", method="merged", note="pissa", lora={"init_lora_weights": "pissa"}),
    Case(
        kind="document", architecture="tied-llama", method="unmerged", note="head",
        lora={"target_modules": ["lm_head"]},
    ),
    Case(
        kind="document", architecture="tied-llama", method="unmerged", note="embedding",
        lora={"target_modules": ["q_proj", "embed_tokens"]},
    ),
    Case(kind="document", architecture="gpt2", method="merged", note="embedding", lora={"target_modules": ["wte"]}),
    # other plugins that decide what is trained, or what a batch is
    Case(kind="class", start="bare", note="frozen", plugins=({"freeze": {"match": "classifier*"}},)),
    Case(
        kind="class", start="bare", method="merged", note="frozen",
        plugins=({"freeze": {"match": "*pre_classifier*"}},),
    ),
    Case(kind="pair", start="bare", method="unmerged", note="packed", plugins=({"packing": {}},)),
    Case(kind="completion", method="unmerged", note="packed", plugins=({"packing": {}},)),
    # tasks with the heads of other families
    Case(kind="tags", architecture="deberta", start="bare", method="unmerged"),
    Case(kind="tags", architecture="xlnet", start="bare", method="merged"),
    Case(kind="number", architecture="bart", start="bare", method="unmerged"),
    Case(kind="topics", architecture="t5", start="bare", method="unmerged"),
    Case(kind="pair", architecture="llama", start="bare", method="merged"),
    # vocabularies
    Case(kind="document", note="padded", model={"pad_vocab_to": 64}),
    Case(kind="document", architecture="tied-llama", note="padded", model={"pad_vocab_to": 64}),
    Case(kind="document", method="merged", note="padded", model={"pad_vocab_to": 64}),
    Case(kind="document", method="unmerged", note="padded", model={"pad_vocab_to": 64}),
    # other initial weights than the checkpoint's
    Case(kind="module", note="warm", model={"weights": "warm.safetensors"}),
    # heads of another size
    Case(kind="number", start="other", note="of-classes"),
    Case(kind="number", start="other", method="unmerged", note="of-classes"),
    Case(kind="class", note="wider", base={"classes": ("a", "b", "c", "d", "e")}),
    Case(kind="class", method="merged", note="wider", base={"classes": ("a", "b", "c", "d", "e")}),
    Case(kind="tags", method="unmerged", note="wider", base={"classes": ("a", "b", "c", "d", "e")}),
    Case(kind="image", method="unmerged", note="wider", base={"classes": ("a", "b", "c", "d", "e")}),
    Case(kind="seq2seq", architecture="bart", start="scratch"),
    Case(kind="completion", note="new-token", model=NEW_TOKEN),
    Case(kind="completion", method="merged", note="new-token", model=NEW_TOKEN),
    Case(kind="chat", note="new-marks", model=NEW_MARKS),
    Case(kind="chat", start="bare", method="merged", note="new-marks", model=NEW_MARKS),
    Case(
        kind="chat", architecture="tied-llama", method="merged", note="padded-marks",
        model={"pad_vocab_to": 64, **NEW_MARKS},
    ),
    Case(kind="document", architecture="tied-llama", note="new-token", model=NEW_TOKEN),
    Case(kind="document", architecture="tied-llama", method="merged", note="new-token", model=NEW_TOKEN),
    Case(kind="class", note="new-token", model=NEW_TOKEN),
    Case(kind="tags", start="bare", method="merged", note="new-token", model=NEW_TOKEN),
    Case(kind="completion", note="resized", base=FEW_ROWS, model={"resize_embeddings": True}),
    Case(kind="class", method="merged", note="resized", base=FEW_ROWS, model={"resize_embeddings": True}),
    Case(kind="class", note="other-padding", base=OTHER_PADDING),
    Case(kind="class", architecture="gpt2", note="other-padding", base=OTHER_PADDING),
    Case(kind="completion", note="other-padding", base=OTHER_PADDING),
    Case(kind="seq2seq", architecture="bart", note="other-padding", base=OTHER_PADDING),
    # what a checkpoint says about tokens and generation
    Case(kind="document", note="bos", base={"bos": True}),
    Case(kind="completion", note="bos", base={"bos": True}),
    Case(kind="chat", note="own-template", base={"chat": True}, data={"chat_template": None}),
    Case(kind="chat", note="template-with-tokens", base={"chat": True}),
    Case(kind="completion", note="generation", base={"generation": ANSWERS}),
    Case(kind="seq2seq", note="generation", base={"generation": ANSWERS}),
    Case(kind="seq2seq", architecture="bart", start="headed", note="beams", base={"generation": '{"num_beams": 3}'}),
    # saved in 16 bits
    Case(kind="class", note="bfloat16", base={"dtype": "bfloat16"}),
    Case(kind="class", start="bare", method="unmerged", note="bfloat16", base={"dtype": "bfloat16"}),
    Case(kind="completion", note="float16", base={"dtype": "float16"}),
    Case(kind="completion", method="merged", note="float16", base={"dtype": "float16"}),
    # how images are read
    Case(kind="image", note="processor", base={"processor": NORMALIZED}, data={"image_size": None}),
    Case(kind="image", note="crop", base={"processor": CROPPED}, data={"image_size": None}),
    # a configuration that asks for another kind of output
    Case(kind="class", note="was-regression", base={"changes": '{"problem_type": "regression"}'}),
    Case(kind="topics", note="was-single", base={"changes": '{"problem_type": "single_label_classification"}'}),
]  # fmt: skip
LONG_ONLY = {
    "tags-bert-bare-unmerged", "tags-modernbert-bare-unmerged", "tags-deberta-bare-unmerged", "image-resnet-bare-full",
    "document-tied-llama-bare-unmerged", "class-bare-unmerged-best", "class-headed-full-ema",
    "class-bare-merged-frozen", "completion-headed-unmerged-packed", "class-bare-merged-all-linear",
    "class-bare-merged-dora", "document-tied-llama-headed-unmerged-head", "document-tied-llama-headed-merged-embedding",
    "document-headed-full-padded", "completion-headed-full-new-token", "class-headed-full-new-token",
    "document-tied-llama-headed-merged-new-token", "chat-headed-full-new-marks", "number-other-full-of-classes",
    "class-headed-full-wider", "image-headed-unmerged-wider", "class-headed-full-other-padding",
    "completion-headed-full-bos", "class-headed-full-bfloat16", "completion-headed-merged-float16",
}  # fmt: skip
"""Names of the cases of the long form: another one has the same value of ``note``, and one the same architecture."""
CASES = [case for case in (*_pairs(), *EXTRA) if LONG or case.name not in LONG_ONLY]


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A combination that cannot be loaded again, and is refused.

    Attributes:
        form: ``model``: training refuses it. Others: ``fastloop export --to`` with this value does.
        reason: Why it cannot be.
        names: Words of the message: the key to change, and what was found.
    """

    case: Case
    form: Form
    reason: str
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the refusal, unique in the table."""
        return f"{self.case.name}-{self.form}"


def _refused() -> list[Refusal]:
    no_base = "an adapter is of use with its base model only, and random weights are in no folder"
    refused = []
    for kind in KINDS:
        unmerged = Case(kind=kind, start="scratch", method="unmerged")
        refused.append(Refusal(case=unmerged, form="model", reason=no_base, names=("plugins.lora.merge",)))
    for case in CASES:
        if case.start == "scratch" and not case.architecture and case.method == "merged":
            refused.append(Refusal(case=case, form="adapter", reason=no_base, names=("plugins.lora.merge",)))
        elif case.start == "scratch" and not case.architecture:
            no_adapter = "the run has no adapter"
            refused.append(Refusal(case=case, form="adapter", reason=no_adapter, names=("--to adapter", "lora")))
    statistics = "training changes the running statistics of batch norm, and an adapter does not have them"
    names = ("plugins.lora.merge", "resnet.embedder.embedder.normalization")
    unmerged = Case(kind="image", architecture="resnet", method="unmerged")
    merged = Case(kind="image", architecture="resnet", start="bare", method="merged")
    new_rows = "an adapter has no rows for tokens that its base model lacks"
    adds_token = Case(kind="completion", method="unmerged", note="new-token", model=NEW_TOKEN)
    refused.append(Refusal(case=adds_token, form="model", reason=new_rows, names=("plugins.lora.merge", "tokens")))
    larger = Case(kind="class", note="larger-tokenizer", base=FEW_ROWS)
    no_rows = "ids without a row in the embedding end in an IndexError"
    refused.append(Refusal(case=larger, form="model", reason=no_rows, names=("45", "resize_embeddings")))
    refused.append(Refusal(case=unmerged, form="model", reason=statistics, names=names))
    for library, model in (("timm", "resnet10t"), ("torchvision", "resnet18")):
        if find_spec(library) is None:
            name = f"{library}/{model}"
            missing = Case(kind="image", start="scratch", note=library, model={"config": None, "name": name})
            refused.append(
                Refusal(
                    case=missing, form="model", reason="not installed", names=("model.name", f"pip install {library}")
                )
            )
    refused.append(Refusal(case=merged, form="adapter", reason=statistics, names=names))
    return refused


REFUSED = _refused()
