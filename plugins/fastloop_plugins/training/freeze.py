"""Freezes parameters by name: they keep their initial or pretrained values.

    plugins:
      - freeze: {match: ["*.embeddings.*", "*.layer.0.*"]}

In patterns of parameter names, ``*`` stands for any characters, dots included. With ``lora``, a pattern of a layer
freezes its adapters. Every pattern must match a parameter. Dropout stays active in frozen modules, and batch norm
updates its statistics.

The parameters stay frozen for the whole run: the optimizer does not hold them. If another plugin unfreezes one later,
the optimizer does not change it, and a warning names it. Under ``ddp`` that is an error. To unfreeze layers in
training, freeze them in the ``before_fit`` hook of a plugin instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastloop import Plugin, Problem, hookimpl, option

if TYPE_CHECKING:
    from torch import nn


class Freeze(Plugin):
    """Freezes parameters by name."""

    name = "freeze"
    numerics = "changes-training"
    runs_after = ("lora", "activation-checkpointing")
    runs_before = ("fsdp",)

    match: str | list[str] = option("Pattern of parameter names, such as embeddings.*, or a list of them.")

    @hookimpl
    def before_prepare(self, model: nn.Module) -> None:
        from fastloop_plugins.training._patterns import matching, parameters_by_name

        parameters = parameters_by_name(model)
        patterns = [self.match] if isinstance(self.match, str) else self.match
        for pattern in patterns:
            for name in matching(pattern, parameters, f"{self.where}.match"):
                parameters[name].requires_grad_(False)
        sizes = [(parameter.numel(), parameter.requires_grad) for parameter in parameters.values()]
        trained = sum(size for size, is_trained in sizes if is_trained)
        total = sum(size for size, _ in sizes)
        if not trained:
            raise self.error(
                "match",
                f"{self.match!r} freezes every parameter that is trained.",
                code="nothing-trained",
                remedy="Leave one out.",
            )
        self.log.info("%s of %s parameters are trained (%.2f%%)", f"{trained:,}", f"{total:,}", 100 * trained / total)
        updated = frozen_batch_norms(model)
        if updated:
            self.log.warning(
                Problem(
                    f"{len(updated)} frozen layers of batch norm, such as {updated[0]}, still update their statistics "
                    "in training.",
                    code="frozen-batch-norm",
                    remedy="To keep them, let the train method of the model put these layers in eval mode.",
                )
            )


def frozen_batch_norms(model: nn.Module) -> list[str]:
    """The names of batch norms that train no parameter of their own, and update running statistics."""
    from torch.nn.modules.batchnorm import _BatchNorm

    names = []
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm) or not module.track_running_stats or not module.training:
            continue
        parameters = list(module.parameters(recurse=False))
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            names.append(name)
    return names
