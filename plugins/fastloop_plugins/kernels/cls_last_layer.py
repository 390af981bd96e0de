"""Computes a classifier's last layer only at the first token, the one position that the classifier reads.

    plugins:
      - cls-last-layer

With six layers, this saves a seventh of all computation. For tasks that declare ``output-per-text``, such as
``text-classification``, with architectures like BERT and DistilBERT (RoBERTa, XLM-R, ELECTRA, CamemBERT, ...).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from fastloop import Plugin, PluginError, Recommendation, SpeedupEstimate, hookimpl
from fastloop.probing import has_values, probing
from fastloop.problem import typed_clause
from fastloop_plugins._task_traits import recipe_traits, require_trait
from fastloop_plugins.models.wrapped import BERT_LIKE, model_type

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fastloop import Run
    from fastloop.plugins.manager import PluginSet
    from fastloop.recipe import Recipe
    from fastloop.runtime.hardware import Machine
    from fastloop.speedup_estimates import StepProfile

LINEARS = {("query", "key", "value"): None, ("q_lin", "k_lin", "v_lin"): "out_lin"}
"""Names of the query, key and value projections in an attention module -> name of its output projection, if it has
one."""


class ClsLastLayer(Plugin):
    """Computes the last layer only at the first token."""

    name = "cls-last-layer"
    numerics = "reassociated"
    runs_before = ("attention", "fast-dropout", "activation-checkpointing", "slot:strategy", "compile")
    for_inference = True

    @classmethod
    def recommend(cls, recipe: Recipe, machine: Machine) -> Recommendation | None:
        """For models like BERT that give one output for each text."""
        if model_type(recipe) not in BERT_LIKE or "output-per-text" not in recipe_traits(recipe):
            return None
        return Recommendation(why="the classifier reads one token of the last layer")

    @classmethod
    def estimate_speedup(cls, profile: StepProfile, recipe: Recipe) -> SpeedupEstimate | None:
        if cls.name in recipe.plugins or not profile.layers or "output-per-text" not in recipe_traits(recipe):
            return None
        return SpeedupEstimate(
            seconds=0.6 * profile.computing / profile.layers,  # keys and values of that layer stay
            why=f"The classifier reads one position of the last of {profile.layers} layers.",
        )

    @hookimpl(tryfirst=True)  # before the task reads its data
    def check_recipe(self, recipe: Recipe, plugins: PluginSet) -> None:
        require_trait("output-per-text", self, recipe, plugins)

    @hookimpl
    def before_prepare(self, run: Run, model: nn.Module) -> None:
        reason = next(filter(None, run.processes.all_gather_object(self.adapt(model))), None)
        if reason is not None:
            raise PluginError(
                f"{type(model).__name__} {reason}.",
                code="unsupported-model",
                place=f"{run.recipe.where}: plugins.cls-last-layer",
                remedy="Leave it out.",
            )

    def adapt(self, model: nn.Module) -> str | None:
        """Adapt the model and try it. Returns the reason if it cannot be adapted. The trial needs weights, which only
        the main process may have."""
        import torch
        from torch import nn

        attentions = [module for module in model.modules() if projections(module) is not None]
        lists = [modules for modules in model.modules() if isinstance(modules, nn.ModuleList) and len(modules)]
        block = None  # the last module of a list that has the last attention module in it
        for modules in lists:
            if attentions and attentions[-1] in list(modules[-1].modules()):
                block = modules[-1]
                break
        if block is None:
            return "is not built like BERT or DistilBERT"
        config: Any = model.config
        try:
            ids = torch.randint(min(100, config.vocab_size), (2, 8), generator=torch.Generator().manual_seed(0))
            probe = {"input_ids": ids}
            probe["attention_mask"] = (torch.arange(8) < torch.tensor([[8], [5]])).long()
            before = self.logits(model, probe) if has_values(model) else None
            attentions[-1].forward = partial(attend, attentions[-1])
            block.forward = partial(at_first, block.forward)
            if before is None or torch.allclose(before, self.logits(model, probe), rtol=1e-4, atol=1e-5):
                return None
        except Exception as error:  # modules with the names of BERT's may take other arguments
            return f"is not built like BERT or DistilBERT ({typed_clause(error)})"
        return "reads more than the first token"

    @staticmethod
    def logits(model: nn.Module, probe: dict[str, Any]) -> Tensor:
        """The model's logits for the probe, without dropout."""
        with probing(model):
            logits: Tensor = model(**probe).logits
        return logits


def projections(module: nn.Module) -> tuple[str, str, str] | None:
    """The names of an attention module's query, key and value projections; None for other modules."""
    return next((names for names in LINEARS if all(hasattr(module, name) for name in names)), None)


def at_first(
    forward: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any
) -> Any:
    """A block's forward at the first token, which attends to all of them. In a packed row: at the first token of each
    sequence."""
    import torch

    firsts = kwargs.get("first_tokens")
    if firsts is not None:
        ends = kwargs.get("cu_seq_lens_k")
        if ends is not None:  # FlashAttention's arguments: one query for each sequence
            each = torch.arange(len(ends), dtype=ends.dtype, device=ends.device)
            kwargs |= {"cu_seq_lens_q": each.clamp(max=len(firsts)), "max_length_q": 1}
        return forward(hidden_states.index_select(1, firsts), attention_mask, *args, everything=hidden_states, **kwargs)
    if attention_mask is not None and attention_mask.dim() == 4:
        attention_mask = attention_mask[:, :, :1]
    return forward(hidden_states[:, :1], attention_mask, *args, everything=hidden_states, **kwargs)


def attend(
    module: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, *, everything: Tensor, **kwargs: Any
) -> tuple[Tensor, Any]:
    """An attention module's forward: queries from ``hidden_states``, (B, 1, d), keys and values from ``everything``,
    (B, T, d)."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    names = projections(module)
    assert names is not None

    def heads(name: str, states: Tensor) -> Tensor:
        projected: Tensor = getattr(module, name)(states)
        return projected.view(*projected.shape[:2], -1, module.attention_head_size).transpose(1, 2)

    query, (key, value) = heads(names[0], hidden_states), (heads(name, everything) for name in names[1:])
    implementation = module.config._attn_implementation
    function = ALL_ATTENTION_FUNCTIONS["sdpa" if implementation == "eager" else implementation]
    kwargs = {name: kept for name, kept in kwargs.items() if kept is not None}
    dropout = module.dropout.p if module.training else 0.0
    output, weights = function(
        module, query, key, value, attention_mask, dropout=dropout, scaling=module.scaling, **kwargs
    )
    output = output.flatten(2)
    last = LINEARS[names]
    return (output if last is None else getattr(module, last)(output)), weights
