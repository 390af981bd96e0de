"""Every plugin, and how two processes train it in comparison with one: one row a plugin, in ``ROWS``.

``groups`` makes runs of several plugins that hold every pair of plugins that a recipe may hold.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations, permutations
from typing import Any

from long_form import LONG
from world_runs import Case

from fastloop.plugins import installed
from fastloop.testing import LANGUAGE, TEXTS
from fastloop_plugins.kernels.fused_optimizer import FUSED, FUSED_ON_SHARDS

load = cache(installed.load)
"""The class of a plugin. Each pair asks for it, and a look at the metadata of packages takes a millisecond."""

MODULE = {"loss": "cross_entropy", "metrics": {"accuracy": {"type": "MulticlassAccuracy", "num_classes": 3}}}
VECTORS: Mapping[str, Any] = {
    "model": {"module": "world_runs:Net"},
    "data": {"module": "world_runs:vectors"},
    "plugins": [{"module": MODULE}],
}
"""A model with all kinds of weights and buffers."""

IMAGES: Mapping[str, Any] = {
    "model": {"module": "fastloop.testing.tasks:Convolutions"},
    "data": {"module": "fastloop.testing.tasks:images"},
    "plugins": [{"module": MODULE}],
}
IMAGE_FILES: Mapping[str, Any] = {
    "model": {
        "config": {
            "model_type": "swin",
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [1, 2],
            "window_size": 2,
            "patch_size": 4,
            "drop_path_rate": 0.0,
        },
    },
    "data": {
        "module": "fastloop_plugins.datasets.digit_images:digit_images",
        "arguments": {"train": 35, "validation": 16, "test": 0, "size": 16, "folder": "images"},
        "image_size": 16,
        "augment": None,
    },
}
DATES: Mapping[str, Any] = {
    "model": {
        "config": {
            "model_type": "bart",
            "d_model": 16,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "max_position_embeddings": 48,
        },
        "tokenizer": {"kind": "bpe", "vocab_size": 300},
    },
    "data": {
        "module": "fastloop_plugins.datasets.dates:dates",
        "arguments": {"train": 35, "validation": 16, "test": 8},
        "target": "iso",
        "max_length": 32,
        "max_target_length": 16,
    },
}
TAGGED: Mapping[str, Any] = {
    "model": TEXTS["model"],
    "data": {
        "module": "fastloop_plugins.datasets.dispatches:dispatches",
        "arguments": {"train": 35, "validation": 16, "test": 8},
        "tags": "tags",
        "max_length": 32,
    },
}
WIDE: Mapping[str, Any] = {
    **TEXTS,
    "model": TEXTS["model"] | {"config": TEXTS["model"]["config"] | {"hidden_size": 64}},
    "plugins": [{"amp": {"dtype": "bf16"}}, "packing"],
}
"""``TEXTS`` with heads of 32 features, in bf16 and packed: the CPU kernels accept it."""
DECODER: Mapping[str, Any] = {
    **LANGUAGE,
    "model": LANGUAGE["model"] | {"config": LANGUAGE["model"]["config"] | {"hidden_size": 64}},
    "plugins": [{"amp": {"dtype": "bf16"}}, "packing"],
}
"""``LANGUAGE`` with heads of 32 features, in bf16 and packed: the CPU kernels accept it."""
TASKS = {
    "vectors": VECTORS,
    "images": IMAGES,
    "image files": IMAGE_FILES,
    "texts": TEXTS,
    "language": LANGUAGE,
    "dates": DATES,
    "tagged": TAGGED,
    "wide": WIDE,
    "decoder": DECODER,
}
STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "ddp": {"ddp": {}},
    "fsdp": {"fsdp": {}},
    "deepspeed": {"deepspeed": {"stage": 2}},
}


ADAMW = {"optimizer": "AdamW", "lr": 1e-2}
"""The other rows train with SGD. AdamW moves a weight by up to ``lr`` in a step, however small its gradient is, so two
runs that round differently part by up to 0.05 in five steps: first the biases of attention keys, whose gradient is
zero but for rounding. ``Group.reference`` is a run that rounds alike."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """How a plugin is trained.

    Attributes:
        task: A name in ``TASKS``. The plugins of ``vectors`` are also paired with those of other tasks.
        options: Options of the plugin.
        train: Keys of ``train``.
        strategies: Names in ``STRATEGIES`` that it is trained under. Pairs are trained under ``ddp`` and ``fsdp``.
        refuses: Plugin -> why no recipe has both, where neither declares it. Also of strategies.
        is_slow: Pair it on its own task only.
    """

    task: str = "vectors"
    options: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    strategies: Sequence[str] = ("ddp", "fsdp")
    refuses: Mapping[str, str] = field(default_factory=dict)
    is_slow: bool = False


ROWS: Mapping[str, Row] = {
    "activation-checkpointing": Row(),
    "allocator": Row(),
    "amp": Row(options={"dtype": "bf16"}),
    "async-save": Row(),
    "attention": Row(task="texts", options={"implementation": "eager"}),
    "auto": Row(task="texts"),
    "auto-micro-batch": Row(),
    "causal-lm": Row(task="language"),
    "channels-last": Row(task="images", strategies=("ddp",)),
    "checkpoint-best": Row(options={"monitor": "loss"}),
    "cls-last-layer": Row(task="texts"),
    "compile": Row(options={"backend": "aot_eager", "cache": False}, is_slow=True),
    "cpu-affinity": Row(options={"count": 1}),
    "cpu-attention": Row(task="wide"),
    "cpu-layers": Row(task="wide"),
    "dataloader-workers": Row(options={"num_workers": 1}),
    "ddp": Row(train=ADAMW, strategies=("ddp",)),
    "deepspeed": Row(train=ADAMW, strategies=("deepspeed",)),
    "device-prefetch": Row(),
    "early-stopping": Row(options={"monitor": "loss", "patience": 1, "min_delta": 0.5}),
    "ema": Row(options={"decay": 0.5}),
    "folds": Row(train={"drop_last": True}, refuses={"sample-audit": "each epoch leaves samples out"}),
    "freeze": Row(options={"match": "*orm*"}),
    "fsdp": Row(train=ADAMW, strategies=("fsdp",)),
    "fused-loss": Row(task="language", options={"chunk_tokens": 16}),
    "fused-optimizer": Row(train=ADAMW, refuses={"muon-optimizer": "torch has no fused kernel of it"}),
    "image-classification": Row(task="image files"),
    "int8-linears": Row(task="wide"),
    "length-bucketing": Row(task="texts", options={"window": 2}),
    "log": Row(),
    "lora": Row(task="texts", options={"r": 2}),
    "lr-scheduler": Row(),
    "metric-check": Row(),
    "module": Row(),
    "muon-optimizer": Row(train={"optimizer": "Muon", "lr": 1e-2}, strategies=("ddp",)),
    "nan-guard": Row(options={"action": "skip"}),
    "optimizer-check": Row(),
    "packing": Row(task="texts"),
    "parameter-groups": Row(train={"parameter_groups": [{"match": "*weight", "lr": 0.02}]}),
    "profile": Row(options={"wait": 1, "warmup": 1, "active": 1}),
    "progress": Row(),
    "remote-output": Row(options={"url": "uploads"}),
    "sample-audit": Row(),
    "seq2seq": Row(task="dates"),
    "skip-unreadable": Row(),
    "speed-check": Row(),
    "target-logits": Row(task="language"),
    "tensorboard": Row(),
    "text-classification": Row(task="texts"),
    "token-cache": Row(task="texts", options={"folder": "tokens"}),
    "token-classification": Row(task="tagged"),
    "trackers": Row(options={"trackers": []}),
    "transformers-callbacks": Row(options={"callbacks": ["transformers:PrinterCallback"]}),
    "watchdog": Row(),
}
"""Plugin -> its row. ``NOT_COMPARED`` has the others."""

NOT_COMPARED: Mapping[str, str] = {
    "context-parallel": "test_context_parallel.py: its processes train on the same samples, of a causal language model",
    "fast-dropout": "dropout draws other numbers on each process",
    "liger": "it needs CUDA",
    "neftune": "its noise is drawn on each process",
    "step-graph": "it needs CUDA, and one process",
    "tensor-parallel": "test_tensor_parallel.py: its processes train on the same samples, of a model with a plan",
    "torchao-fp8": "it needs CUDA",
}
"""Plugin -> why two processes need not train as one does, or where the comparison is."""


@dataclass(frozen=True)
class Group:
    """Plugins that are trained together.

    Attributes:
        strategies: Names in ``STRATEGIES``.
        implementation: That of ``fused-optimizer``; empty: as in its row.
        optimizer: ``train.optimizer``; empty: as in the rows.
    """

    task: str
    plugins: tuple[str, ...]
    strategies: Sequence[str]
    implementation: str = ""
    optimizer: str = ""

    @property
    def name(self) -> str:
        """The plugins of the group, and its optimizer."""
        return " ".join(filter(None, ("+".join(self.plugins), self.optimizer, self.implementation)))

    def options(self) -> dict[str, Any]:
        """The plugins, as a recipe lists them."""
        # the recipe of ``vectors`` lists ``module``, with its options, and cases add their strategy
        options = {name: dict(ROWS[name].options) for name in self.plugins if name not in ("module", *STRATEGIES)}
        if self.implementation:
            options["fused-optimizer"]["implementation"] = self.implementation
        return options

    def train(self) -> dict[str, Any]:
        """Keys of ``train``."""
        train: dict[str, Any] = {}
        for name in self.plugins:
            train |= ROWS[name].train
        if self.optimizer:
            train["optimizer"] = self.optimizer
        return train

    def alone(self) -> Case:
        """The run of one process."""
        return Case(
            name=f"{self.task} {self.name} alone",
            task=TASKS[self.task],
            plugins=self.options(),
            train=self.train(),
            turns=2,
        )

    def is_rounded(self) -> bool:
        """Whether a plugin of the group computes in a lower precision."""
        plugins = {*self.plugins, *listed(TASKS[self.task])}
        return any(load(name).numerics == "reduced-precision" for name in plugins)

    def in_group_of_one(self) -> Case:
        """The run under ``fsdp`` of one process, which holds all shards: see ``rounds_as_alone``."""
        return replace(self.together("fsdp"), name=f"{self.task} {self.name} fsdp alone", turns=2)

    def rounds_as_alone(self, strategy: str) -> bool:
        """Whether the run under a strategy computes in the dtypes of ``alone``.

        ``fsdp`` with `amp` gathers all weights in bf16, and autocast in one process keeps embeddings and norms in fp32.
        So it computes other gradients: by 8e-4, where they are 2e-3.
        """
        return strategy != "fsdp" or not self.is_rounded()

    def reference(self, strategy: str) -> Case:
        """The run of one process that two processes under a strategy are compared with."""
        return self.alone() if self.rounds_as_alone(strategy) else self.in_group_of_one()

    def together(self, strategy: str) -> Case:
        """The run of two processes."""
        return Case(
            name=f"{self.task} {self.name} {strategy}",
            task=TASKS[self.task],
            plugins={**self.options(), **STRATEGIES[strategy]},
            train=self.train(),
        )


def listed(task: Mapping[str, Any]) -> list[str]:
    """Names of the plugins that the recipe of a task lists."""
    names = []
    for entry in task.get("plugins", ()):
        names += [entry] if isinstance(entry, str) else [*entry]
    return names


def single_groups() -> list[Group]:
    """Each plugin of ``ROWS``. Pairs train each plugin under both strategies, so some are trained under fewer here:
    bitwise ones under one, in the short form under none; in the short form, others under one, unless they compute in a
    lower precision."""
    paired = {"ddp": set[str](), "fsdp": set[str]()}
    for group in pair_groups():
        paired[group.strategies[0]] |= {*group.plugins}
    groups = []
    for name, row in ROWS.items():
        numerics = load(name).numerics
        strategies = row.strategies
        if name in paired["ddp"] & paired["fsdp"] and row.task in PAIRED_TASKS:
            if numerics == "bitwise":
                strategies = strategies[:1] if LONG else ()
            elif numerics != "reduced-precision" and not LONG:
                strategies = strategies[:1]
        groups.append(Group(row.task, (name,), strategies))
    # the row of cpu-layers trains its kernels of BERT
    groups.append(Group("decoder", ("cpu-layers",), ("ddp", "fsdp")))
    return groups


OPTIMIZERS = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")
"""Torch optimizers that step shards. The rows of other plugins train with SGD, of `muon-optimizer` with Muon."""


def optimizer_groups() -> list[Group]:
    """Each optimizer in each implementation, with a learning rate that changes and differs between parameters.

    Under ``ddp``, an optimizer steps whole weights, as in one process. Only the long form trains each with it.
    """
    groups = []
    plugins = ("fused-optimizer", "lr-scheduler", "parameter-groups")
    for optimizer in OPTIMIZERS:
        strategies: tuple[str, ...] = ("ddp", "fsdp") if LONG or optimizer == "AdamW" else ("fsdp",)
        groups.append(Group("vectors", plugins, strategies, "foreach", optimizer))
        if optimizer in FUSED:
            strategies = ("ddp", "fsdp") if optimizer in FUSED_ON_SHARDS else ("ddp",)
            groups.append(Group("vectors", plugins, strategies, "fused", optimizer))
    return groups


GROUP_SIZE = 14 if LONG else 21
"""Plugins that are trained together at most: 13 groups of 21 plugins, or 27 groups of 14. Larger groups need fewer
runs, and show less clearly which of their plugins is wrong."""


PAIRED_TASKS = ("vectors", "texts", "language", "wide")
"""Tasks on which plugins are paired."""
UNPAIRED = ("ddp", "deepspeed", "fsdp", "module")
"""Plugins that are in other runs anyway."""


@cache
def pair_groups() -> list[Group]:
    """Groups that hold each pair of plugins that a recipe may hold. Every second group has ``fsdp``, if its plugins
    train with it."""
    groups: list[Group] = []
    for task in PAIRED_TASKS:
        names = paired_on(task)
        special = [name for name in names if ROWS[name].task == task]
        allowed = {frozenset(pair) for pair in combinations(names, 2) if may_share(pair)}
        wanted = [pair for pair in map(frozenset, combinations(names, 2)) if pair in allowed and pair & set(special)]
        for plugins in cover(names, allowed, wanted):
            strategy = "fsdp" if len(groups) % 2 else "ddp"
            if any(strategy not in ROWS[name].strategies for name in plugins):
                strategy = "ddp"
            groups.append(Group(task, plugins, (strategy,)))
    return groups


def paired_on(task: str) -> list[str]:
    """The plugins of a task, and those of ``vectors``, which suit all tasks."""
    names = []
    for name, row in ROWS.items():
        if name not in UNPAIRED and (row.task == task or (row.task == "vectors" and not row.is_slow)):
            names.append(name)
    return names


def may_share(pair: Collection[str]) -> bool:
    """Whether a recipe may hold both plugins."""
    for name, other in permutations(pair):
        if other in load(name).conflicts or other in ROWS[name].refuses:
            return False
    first, second = (load(name).slot for name in pair)
    return first is None or first != second


def cover(
    names: Sequence[str], allowed: Collection[frozenset[str]], wanted: Sequence[frozenset[str]]
) -> list[tuple[str, ...]]:
    """Groups of up to ``GROUP_SIZE`` names that hold all wanted pairs, and only allowed ones. Each begins with the
    first wanted pair that no group holds yet, and takes the name that brings the most of them, until none does.

    For the wanted and allowed pairs ab, ac, bc and ad, the groups are abc and ad.
    """
    left = dict.fromkeys(wanted)
    groups = []
    while left:
        group = sorted(next(iter(left)), key=names.index)
        while len(group) < GROUP_SIZE:
            gains = {}
            for name in names:
                pairs = [frozenset((name, member)) for member in group]
                if name not in group and all(pair in allowed for pair in pairs):
                    gains[name] = sum(pair in left for pair in pairs)
            best = max(gains, key=lambda name: gains[name], default=None)
            if best is None or gains[best] == 0:
                break
            group.append(best)
        for pair in combinations(group, 2):
            left.pop(frozenset(pair), None)
        groups.append(tuple(sorted(group, key=names.index)))
    return groups
