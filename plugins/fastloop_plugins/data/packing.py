"""Packs the sequences of a batch end to end into one row: no padding is computed, and no sequence attends to another.

    plugins:
      - packing

Only the shape of batches changes, from (samples, longest) to (1, all tokens). For transformers models with selectable
attention (BERT, DistilBERT, RoBERTa, GPT-2, Llama and similar). A trial before training refuses a model whose results
differ, as with a short sliding window.

On CUDA in half precision one kernel computes a whole row, padded to a multiple of ``data.pad_to_multiple_of`` tokens,
so ``compile`` makes few graphs. Elsewhere attention is called once a sequence, and under ``compile`` a graph ends at
each call. On a CPU, long rows are padded, too, by at most 2%: products of few shapes are compiled less often, and take
less memory.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from fastloop import Plugin, PluginError, Recommendation, SpeedupEstimate, hookimpl
from fastloop_plugins._models import BERT_LIKE, model_type, transformers_model
from fastloop_plugins._task_traits import recipe_traits
from fastloop_plugins.data._shapes import MULTIPLE, cheap_multiple, multiple_for

if TYPE_CHECKING:
    from torch import nn

    from fastloop import Batch, Run
    from fastloop.estimates import StepProfile
    from fastloop.recipe import Recipe
    from fastloop.runtime.hardware import Machine
    from fastloop_plugins.data._packing import PackedCollator


FLASH = "flash_attention_2"
INSIDE = {
    "sdpa": "sdpa",
    "eager": "sdpa",
    FLASH: "sdpa",
    "fast_dropout": "fast_dropout",
    "fastloop_blocked": "fastloop_blocked",
}
"""The model's attention -> the attention called for each sequence. FlashAttention needs CUDA, so the trial on the CPU
uses sdpa."""
PACKABLE = (*BERT_LIKE, "gpt2", "llama", "mistral", "qwen2")
"""Types of models that the tests pack."""


class Packing(Plugin):
    """Packs sequences end to end, so that no padding is computed.

    Replaces collator, attention and pooling by versions for packed rows.
    """

    name = "packing"
    numerics = "reassociated"
    runs_after = ("cls-last-layer", "attention", "fast-dropout", "lora")
    runs_before = ("activation-checkpointing", "slot:strategy", "compile")
    for_inference = True
    collator: PackedCollator

    @classmethod
    def recommend(cls, recipe: Recipe, machine: Machine) -> Recommendation | None:
        """For texts that are padded, on a CPU, and on CUDA where one kernel computes the attention of a row."""
        has_kernel = "bf16" in machine.fast_dtypes and recipe.plugins.get("amp", False) is not False
        if machine.device != "cpu" and not (machine.device == "cuda" and has_kernel):
            return None
        traits = recipe_traits(recipe)
        kinds = BERT_LIKE if "output-per-text" in traits else PACKABLE  # a decoder's is that of the last token
        if "padded" not in traits or model_type(recipe) not in kinds:
            return None
        return Recommendation(why="no padding is computed")

    @classmethod
    def estimate_speedup(cls, profile: StepProfile, recipe: Recipe) -> SpeedupEstimate | None:
        if cls.name in recipe.plugins or not profile.padding:
            return None
        return SpeedupEstimate(
            seconds=profile.padding * profile.computing,
            why=f"{profile.padding:.0%} of the computed tokens are padding; packed rows have none.",
        )

    @hookimpl(wrapper=True)
    def build_collator(
        self, run: Run, split: str
    ) -> Generator[None, Callable[[list[Any]], Any], Callable[[list[Any]], Batch]]:
        from fastloop_plugins.data._packing import OtherPackedCollator, PackedCollator

        collate = yield
        if getattr(collate, "generates", False):
            return collate
        if split != run.loaders.first:
            return OtherPackedCollator(self.collator, collate)
        self.collator = PackedCollator(collate, run.settings.pad_to_multiple_of)
        return self.collator

    @hookimpl
    def before_prepare(self, run: Run, model: nn.Module) -> None:
        if not hasattr(self, "collator"):  # prompts to continue
            return
        found = transformers_model(model)
        if found is None:
            raise PluginError(
                f"{type(model).__name__} is not a transformers model.",
                code="unsupported-model",
                place=f"{run.recipe.where}: plugins.packing",
                remedy="Remove packing.",
            )
        elsewhere = any(parameter.is_meta for parameter in model.parameters())  # only the main process has weights
        answers = run.processes.all_gather_object(self.adapt(run, model, found, trial=not elsewhere))
        answer = next(answer for answer in answers if answer is not None)
        if isinstance(answer, str):
            raise PluginError(
                f"{type(found).__name__} cannot be packed: {answer}.",
                code="unsupported-model",
                place=f"{run.recipe.where}: plugins.packing",
                remedy="Remove packing.",
            )
        self.collator.first_position = answer

    def adapt(self, run: Run, model: nn.Module, found: Any, trial: bool) -> int | str | None:
        """Adapt the model to packed rows: returns its first position id, or a reason against it; None without a
        trial."""
        from torch import nn

        from fastloop_plugins.data import _varlen
        from fastloop_plugins.data._packing import first_tokens, register
        from fastloop_plugins.data._packing_trial import try_packing

        current, dataset = found.config._attn_implementation, run.datasets[run.loaders.first]
        longest = max(int(max(getattr(split, "lengths", [0]))) for split in run.datasets.values())
        inference = run.recipe.inference
        if inference is not None and inference.chunk and self.name in run.recipe.selected:
            longest = max(longest, run.recipe.data.get("max_length", 512))  # of later chunks
        stack = next(
            (
                module
                for module in found.modules()
                if any(isinstance(part, nn.ModuleList) for part in module.children())
            ),
            None,
        )
        if not getattr(found, "_supports_sdpa", False):
            return "it has no selectable attention"
        if current not in INSIDE:
            return f"its attention is {current!r}, and packing supports {', '.join(INSIDE)}"
        if stack is None:
            return "it has no list of blocks"
        if not hasattr(dataset, "__getitem__"):
            return f"it is trained on {type(dataset).__name__}, which is iterable"
        absent = _varlen.missing(run.device, _varlen.computing_dtype(run, model), _varlen.head_size(found.config))
        if run.device.type == "cuda" and absent is not None and self.name in run.recipe.selected:
            return f"attention would be computed one sequence at a time, since {absent}"
        if current != FLASH:  # which supports sliding windows
            self.collator.longest = longest

        def pack() -> None:
            found.set_attn_implementation(register(INSIDE[current]))
            stack.register_forward_hook(first_tokens, with_kwargs=True)

        answer = try_packing(run, model, found, self.collator, pack) if trial else None
        if isinstance(answer, str):
            return answer
        pack()
        self.collator.longest = longest
        if current == FLASH or absent is None:
            found.set_attn_implementation(FLASH if current == FLASH else _varlen.register())
            self.collator.varlen = True
        elif run.device.type == "cuda":
            self.log.warning("attention is computed one sequence at a time, since %s", absent)
        return answer

    @hookimpl
    def check_run(self, run: Run) -> None:
        lengths, sampler = getattr(run.datasets["train"], "lengths", None), run.train_loader.sampler
        if lengths is None or sampler is None:
            return
        steps = [micro_batches for _, micro_batches in sampler.steps()]
        batches = [[int(lengths[index]) for index in batch] for step in steps for batch in step]
        rows = [sum(batch) for batch in batches]
        share = 1 - sum(rows) / sum(max(batch) * len(batch) for batch in batches)
        if share < 0.02:
            self.log.warning("batches have only %.1f%% of padding: there is little to remove", 100 * share)
        else:
            self.log.info("removes padding, %.0f%% of the tokens of padded batches", 100 * share)
        if run.device.type == "cuda" and run.recipe.data.get("pad_to_multiple_of") is None:
            self.collator.multiple = multiple_for(rows, run.settings.pad_to_multiple_of or MULTIPLE)
        elif run.device.type == "cpu" and run.settings.pad_to_multiple_of is None:
            self.collator.multiple = cheap_multiple(rows)
        widths, multiple = [self.collator.width(row) for row in rows], self.collator.multiple
        if multiple > 1:
            more = 100 * (sum(widths) / sum(rows) - 1)
            shapes = len(set(widths))
            self.log.info(
                "rows are padded to a multiple of %d tokens: %d shapes, %.0f%% more tokens",
                multiple,
                shapes,
                more,
            )
