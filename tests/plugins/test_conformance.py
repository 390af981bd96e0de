"""All of fastloop's plugins pass the conformance suite that other packages use.

The quick tests train with a plugin of each kind, and two processes with plugins whose work involves other processes,
under ddp only. The checks of one plugin take two to nine seconds, and those of a strategy over ten.

Some checks run in the long form and in ``make conformance`` alone:

- ``processes``, unless the work of the plugin involves the other processes. For nearly every plugin,
  ``strategies/test_plugins_on_two_processes.py`` compares two processes with one.
- ``killed`` of a plugin without a state. A run that resumes after a kill reads what it reads after an interruption,
  which ``saved_and_loaded`` checks. The suites of ``QUICK`` and ``KILLED`` and of plugins with a state kill a process.
"""

from __future__ import annotations

from typing import Any

from long_form import LONG, long_form_only
from world_rows import NOT_COMPARED

from fastloop.plugins.installed import installed, is_own, load
from fastloop.testing import IMAGES, LANGUAGE, TEXTS, Conformance
from fastloop.testing.studies import StudyResults, strategies_for

OURS = [name for name, point in installed().items() if is_own(point)]

PAIRS = {
    "model": {
        "config": {
            "model_type": "bart",
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
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
"""Dates with their ISO form, and a BART of two layers."""

IMAGE_FILES: dict[str, Any] = {
    "model": {
        "config": {
            "model_type": "swin",
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [1, 2],
            "window_size": 2,
            "patch_size": 4,
            "hidden_dropout_prob": 0.1,
        },
    },
    "data": {
        "module": "fastloop_plugins.datasets.digit_images:digit_images",
        "arguments": {"train": 35, "validation": 16, "test": 0, "size": 16, "folder": "images"},
        "image_size": 16,
    },
}
"""Images of 16 x 16 in files, and a Swin transformer of two layers."""

TAGGED: dict[str, Any] = {
    "model": TEXTS["model"],
    "data": {
        "module": "fastloop_plugins.datasets.dispatches:dispatches",
        "arguments": {"train": 35, "validation": 16, "test": 8},
        "tags": "tags",
        "max_length": 32,
    },
}
"""Sentences with tagged names, and the BERT of ``TEXTS``."""

WIDE: dict[str, Any] = TEXTS | {
    "model": TEXTS["model"] | {"config": TEXTS["model"]["config"] | {"hidden_size": 64}},
    "plugins": [*TEXTS.get("plugins", []), {"amp": {"dtype": "bf16"}}, "packing"],
}
"""``TEXTS`` with heads of 32 features, in bf16 and packed."""

TRIED_ON: dict[str, dict[str, Any]] = {
    "activation-checkpointing": {"task": TEXTS},
    "attention": {"task": TEXTS, "options": {"implementation": "eager"}},
    "causal-lm": {"task": LANGUAGE},
    "channels-last": {"task": IMAGES},
    "cpu-attention": {"task": WIDE},
    "cpu-layers": {"task": WIDE},
    "compile": {"options": {"backend": "eager", "cache": False}},
    "dataloader-workers": {"options": {"num_workers": 1}},
    "ema": {"options": {"decay": 0.9}},
    "fast-dropout": {"task": TEXTS},
    "image-classification": {"task": IMAGE_FILES},
    "deepspeed": {"refuses": ("one process",)},  # it needs a launcher
    "cls-last-layer": {"task": TEXTS},
    "fused-loss": {"task": LANGUAGE, "options": {"chunk_tokens": 16}},
    "step-graph": {"device": "auto", "requires": ["fused-optimizer"], "refuses": ("ddp",)},
    "target-logits": {"task": LANGUAGE},
    "int8-linears": {"task": WIDE},
    "freeze": {"options": {"match": "*.bias"}},
    "length-bucketing": {"task": TEXTS, "options": {"window": 2}},
    "liger": {"task": LANGUAGE, "device": "auto"},
    "lora": {"task": TEXTS},
    "neftune": {"task": LANGUAGE},
    "packing": {"task": TEXTS},
    "trackers": {"options": {"trackers": []}},  # test_trackers.py trains with real ones
    "remote-output": {"options": {"url": "uploads"}},
    "context-parallel": {"task": LANGUAGE},
    "seq2seq": {"task": PAIRS},
    "token-cache": {"task": TEXTS, "options": {"folder": "tokens"}},
    "profile": {"options": {"wait": 1, "warmup": 1, "active": 1}},
    "tensor-parallel": {"task": LANGUAGE},
    "text-classification": {"task": TEXTS},
    "token-classification": {"task": TAGGED},
    "transformers-callbacks": {
        "options": {"callbacks": ["transformers:PrinterCallback", {"transformers:EarlyStoppingCallback": {}}]}
    },
    "torchao-fp8": {"device": "auto", "options": {"min_features": 16}},
}
"""Plugin -> options to test it with, if the defaults have no effect on a tiny task."""

ON_PROCESSES = (
    "amp", "auto-micro-batch", "checkpoint-best", "ema", "length-bucketing", "metric-check", "nan-guard",
    "optimizer-check", "packing", "sample-audit", "text-classification", "token-classification",
)  # fmt: skip
"""Plugins whose work involves the other processes."""


KILLED = ("async-save", "dataloader-workers", "remote-output")
"""Plugins without a state whose threads or processes end with a killed process."""
QUICK = ("amp", "ddp", "ema", "fsdp", "module", "nan-guard")
"""A plugin of each kind whose checks need no text. Those of the other plugins train in `make test-slow`."""
TRAINING = ("declared", "numerics", "batch_norm", "saved_and_loaded", "killed", "off", "cost")
"""The checks that train, on one process."""


class OnProcessesInLongForm(Conformance):
    """The suite of a plugin that ``test_plugins_on_two_processes.py`` compares."""

    @long_form_only
    def test_processes(self, study_results: StudyResults, strategy: str) -> None:
        super().test_processes(study_results, strategy)


def is_checked_on_processes(name: str) -> bool:
    """Whether the check ``processes`` of a plugin runs in the short form, too."""
    return name in ON_PROCESSES or name in NOT_COMPARED or load(name).slot == "strategy"


def is_killed(name: str) -> bool:
    """Whether the check ``killed`` of a plugin runs in the short form, too."""
    return name in QUICK or name in KILLED or hasattr(load(name), "save_state")


def suite(name: str) -> type[Conformance]:
    """The suite of one plugin."""
    quick = set()
    if name in QUICK and name in ON_PROCESSES:
        quick = {"ddp"}
    elif name in ("ddp", "fsdp"):
        quick = {name}
    slow = [f"processes[{strategy}]" for strategy in strategies_for(name) if strategy not in quick]
    if name not in QUICK:
        slow += TRAINING
    attributes: dict[str, Any] = {"plugin": name, "__module__": __name__, "slow": slow, **TRIED_ON.get(name, {})}
    if not LONG and not is_killed(name):
        attributes["test_killed"] = None  # not collected, so that nothing is trained for it
    base = Conformance if is_checked_on_processes(name) else OnProcessesInLongForm
    return type(f"Test_{name.replace('-', '_')}", (base,), attributes)


globals().update({cls.__name__: cls for cls in map(suite, OURS)})


def test_special_setups_name_existing_plugins():
    assert TRIED_ON.keys() <= set(OURS)
