"""Packs the sequences of a batch end to end into one row: no padding is computed, and no sequence attends to another.

A sequence is the token ids of one sample.

    plugins:
      - packing

Only the shape of batches changes, from (samples, longest) to (1, all tokens). No sequence is cut or left out: the task
does this before, by ``data.max_length`` (``SequencesWithTargets`` of ``text/chat/tokens.py``). For transformers models
with selectable attention (BERT, DistilBERT, RoBERTa, GPT-2, Llama and similar). A trial before training refuses a model
whose results differ, as with a short sliding window.

On CUDA in half precision one kernel computes a whole row, padded to a multiple of ``data.pad_to_multiple_of`` tokens,
so ``compile`` makes few graphs. Elsewhere attention is called once a sequence, and under ``compile`` a graph ends at
each call. On a CPU, long rows are padded, too, by at most 2%: products of few shapes are compiled less often, and take
less memory. A call takes about 0.4 ms in each layer, so packing may slow down a model of 64 units or fewer: measure it
with `fastloop bench`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from fastloop import Plugin, PluginError, Problem, Recommendation, SpeedupEstimate, hookimpl
from fastloop.probing import has_values
from fastloop_plugins._task_traits import recipe_traits
from fastloop_plugins.data._padding_multiples import MULTIPLE, cheap_multiple, multiple_for
from fastloop_plugins.models.wrapped import BERT_LIKE, model_type, transformers_model

if TYPE_CHECKING:
    from torch import nn

    from fastloop import Batch, Run
    from fastloop.recipe import Recipe
    from fastloop.runtime.hardware import Machine
    from fastloop.speedup_estimates import StepProfile
    from fastloop_plugins.data._packing import PackedCollator
    from fastloop_plugins.data._packing_trial import TrialResult


FLASH = "flash_attention_2"
INSIDE = {
    "sdpa": "sdpa",
    "eager": "sdpa",
    FLASH: "sdpa",
    "fast_dropout": "fast_dropout",
    "fastloop_blocked": "fastloop_blocked",
}
"""The model's attention -> the attention that a packed row calls for each sequence. A model with FlashAttention calls
sdpa in the trial, which runs on the CPU, and FlashAttention for whole rows in the run."""
PACKABLE = (*BERT_LIKE, "gpt2", "llama", "mistral", "qwen2")
"""Types of models that the tests pack."""
CALL_SECONDS = 4e-4
"""Seconds that a sequence of a packed row takes in a layer on a CPU, in forward and backward, beside the work on its
tokens: attention is called for each sequence. Measured 0.2 to 0.5 ms with BERT of 16 to 256 units."""
LITTLE_PADDING = 0.02
"""Share of padding in padded batches below which packing hardly saves anything."""


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
        has_kernel = "bf16" in machine.fast_dtypes and recipe.has_plugin("amp")
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
        seconds = profile.padding * profile.in_operations
        if profile.device == "cpu":
            seconds -= CALL_SECONDS * profile.attention_calls
        return SpeedupEstimate(
            seconds=seconds,
            why=f"{profile.padding:.0%} of the computed tokens are padding; packed rows have none.",
        )

    @hookimpl(wrapper=True)
    def build_collator(
        self, run: Run, split: str
    ) -> Generator[None, Callable[[list[Any]], Any], Callable[[list[Any]], Batch]]:
        from fastloop_plugins.data._packing import LaterPackedCollator, PackedCollator

        collate = yield
        if getattr(collate, "generates", False):  # prompts to continue, which cannot be packed
            return collate
        if split != run.loaders.first_split:
            return LaterPackedCollator(self.collator, collate)
        self.collator = PackedCollator(collate, run.settings.pad_to_multiple_of)
        return self.collator

    @hookimpl
    def before_prepare(self, run: Run, model: nn.Module) -> None:
        if not hasattr(self, "collator"):  # prompts to continue
            return
        network = transformers_model(model)
        if network is None:
            raise self.unsupported(run, f"{type(model).__name__} is not a transformers model.")
        own_result = self.adapt(run, model, network, trial=has_values(model))
        # a process without weights cannot try the model, and its result is None: all use the first result of a trial
        by_rank: list[TrialResult | None] = run.processes.all_gather_object(own_result)
        result = next(result for result in by_rank if result is not None)
        if result.refusal is not None:
            raise self.unsupported(run, f"{type(network).__name__} cannot be packed: {result.refusal}.")
        self.collator.first_position = result.first_position

    def unsupported(self, run: Run, text: str) -> PluginError:
        """The error for a model that cannot be packed."""
        return PluginError(
            text,
            code="unsupported-model",
            place=f"{run.recipe.where}: plugins.packing",
            remedy="Remove packing.",
        )

    def adapt(self, run: Run, model: nn.Module, network: Any, trial: bool) -> TrialResult | None:
        """Adapt the model to packed rows, and the collator to the model.

        Args:
            network: The transformers model in ``model``.
            trial: Whether to compute packed rows first. The model must have its weights.

        Returns:
            The model's first position, or a reason against packing; with a reason, the model is unchanged. None: the
            model was adapted without a trial.
        """
        from fastloop_plugins.data import _varlen
        from fastloop_plugins.data._packing import register, select_first_tokens
        from fastloop_plugins.data._packing_trial import TrialResult, try_packing

        refusal = self.find_obstacle(run, network)
        if refusal is not None:
            return TrialResult(refusal=refusal)
        stack = block_stack(network)
        if stack is None:
            return TrialResult(refusal="it has no list of blocks")
        implementation = network.config._attn_implementation
        no_kernel = why_no_kernel(run, model, network)
        if run.device.type == "cuda" and no_kernel is not None and self.name in run.recipe.selected:
            return TrialResult(refusal=f"attention would be computed one sequence at a time, since {no_kernel}")
        longest = self.longest_sequence(run)
        if implementation != FLASH:
            # The trial refuses rows longer than a sliding window. FlashAttention supports one, its stand-in does not.
            self.collator.longest = longest

        def pack() -> None:
            network.set_attn_implementation(register(INSIDE[implementation]))
            stack.register_forward_hook(select_first_tokens, with_kwargs=True)

        result = None
        if trial:
            result = try_packing(run, model, network, self.collator, pack)
            if result.refusal is not None:
                return result
        pack()
        self.collator.longest = longest
        if implementation == FLASH:
            network.set_attn_implementation(FLASH)
            self.collator.varlen = True
        elif no_kernel is None:
            network.set_attn_implementation(_varlen.register())
            self.collator.varlen = True
        elif run.device.type == "cuda":
            self.log.warning(
                Problem(f"attention is computed one sequence at a time, since {no_kernel}.", code="slow-attention")
            )
        return result

    def find_obstacle(self, run: Run, network: Any) -> str | None:
        """Why rows of this model and data cannot be packed, as far as it shows without computing; None: no reason."""
        implementation = network.config._attn_implementation
        if not getattr(network, "_supports_sdpa", False):
            return "it has no selectable attention"
        if implementation not in INSIDE:
            return f"its attention is {implementation!r}, and packing supports {', '.join(INSIDE)}"
        dataset = run.datasets[run.loaders.first_split]
        if not hasattr(dataset, "__getitem__"):
            return f"it is trained on {type(dataset).__name__}, which is iterable"
        return None

    def longest_sequence(self, run: Run) -> int:
        """The tokens of the longest sequence of all splits; 0 if unknown."""
        longest = 0
        for dataset in run.datasets.values():
            longest = max(longest, int(max(getattr(dataset, "lengths", [0]))))
        inference = run.recipe.inference
        if inference is not None and inference.chunk and self.name in run.recipe.selected:
            longest = max(longest, run.recipe.data.get("max_length", 512))  # of later chunks
        return longest

    @hookimpl
    def check_run(self, run: Run) -> None:
        batches = batch_lengths(run)
        if batches is None:
            return
        rows = [sum(batch) for batch in batches]
        self.report_padding(batches, rows)
        self.choose_multiple(run, rows)
        self.report_shapes(rows)

    def report_padding(self, batches: list[list[int]], rows: list[int]) -> None:
        """Log the share of padding that packing removes.

        Sequences of 3 and 5 tokens are a padded batch of 2 x 5 tokens, and a row of 8: packing removes 20%.
        """
        padded = sum(max(batch) * len(batch) for batch in batches)
        share = 1 - sum(rows) / padded
        if share < LITTLE_PADDING:
            self.log.warning(
                Problem(
                    f"batches have only {100 * share:.1f}% of padding: there is little to remove.", code="no-effect"
                )
            )
        else:
            self.log.info("removes padding, %.0f%% of the tokens of padded batches", 100 * share)

    def choose_multiple(self, run: Run, rows: list[int]) -> None:
        """Choose the multiple to which rows are padded, where the recipe leaves it open."""
        if run.device.type == "cuda" and run.recipe.data.get("pad_to_multiple_of") is None:
            self.collator.multiple = multiple_for(rows, run.settings.pad_to_multiple_of or MULTIPLE)
        elif run.device.type == "cpu" and run.settings.pad_to_multiple_of is None:
            self.collator.multiple = cheap_multiple(rows)

    def report_shapes(self, rows: list[int]) -> None:
        """Log how many different widths the rows have, and the tokens that are added to them."""
        if self.collator.multiple == 1:
            return
        widths = [self.collator.width(row) for row in rows]
        self.log.info(
            "rows are padded to a multiple of %d tokens: %d shapes, %.0f%% more tokens",
            self.collator.multiple,
            len(set(widths)),
            100 * (sum(widths) / sum(rows) - 1),
        )


def block_stack(network: nn.Module) -> nn.Module | None:
    """The first module with a list of blocks, such as the encoder of BERT: its output is that of the last block."""
    from torch import nn

    for module in network.modules():
        if any(isinstance(child, nn.ModuleList) for child in module.children()):
            return module
    return None


def why_no_kernel(run: Run, model: nn.Module, network: Any) -> str | None:
    """Why no kernel computes the attention of a whole row here; None: one does."""
    from fastloop_plugins.data import _varlen

    dtype = _varlen.computing_dtype(run, model)
    return _varlen.missing(run.device, dtype, _varlen.head_size(network.config))


def batch_lengths(run: Run) -> list[list[int]] | None:
    """The lengths of the sequences of each batch of the first epoch; None: they are not known before."""
    lengths = getattr(run.datasets["train"], "lengths", None)
    sampler = run.train_loader.sampler
    if lengths is None or sampler is None:
        return None
    batches = []
    for _, micro_batches in sampler.steps():
        for micro_batch in micro_batches:
            batches.append([int(lengths[index]) for index in micro_batch])
    return batches
