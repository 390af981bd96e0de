"""Adds noise to the embeddings of tokens in training, which can improve the answers of a fine-tuned language model.

    plugins:
      - neftune: {alpha: 5}

The noise of a text is uniform within ``alpha / sqrt(tokens * width of the embeddings)``, and padding is no token: Jain
et al., 2023, https://arxiv.org/abs/2310.05914. transformers and TRL also count padding, so their noise is smaller in a
padded batch. Here, ``packing`` draws from the same range. Evaluations and exported models have no noise.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

from fastloop import Output, Plugin, PluginError, hookimpl, option
from fastloop_plugins._task_traits import require_trait
from fastloop_plugins.models.wrapped import transformers_model

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fastloop import Run
    from fastloop.plugins.manager import PluginSet
    from fastloop.recipe import Recipe


class Neftune(Plugin):
    """Adds noise to the embeddings in training."""

    name = "neftune"
    numerics = "changes-training"
    recordable = True
    conflicts = {"context-parallel": "it divides texts, and the noise depends on their lengths."}
    lengths: Tensor | None = None
    handle: Any = None

    alpha: float = option("Scale of the noise; the paper has 5 to 15.", default=5.0, gt=0)

    padding: int | None  # id of the pad token; from after_prepare on

    @hookimpl(tryfirst=True)  # before the task reads its data
    def check_recipe(self, recipe: Recipe, plugins: PluginSet) -> None:
        require_trait("token-ids", self, recipe, plugins)

    @hookimpl
    def after_prepare(self, run: Run) -> None:
        model = transformers_model(run.unwrap_model())
        if model is None or model.config.is_encoder_decoder:
            raise PluginError(
                f"{type(run.unwrap_model()).__name__} is not a transformers model with one embedding of tokens: noise "
                "is for decoders such as Llama, and encoders such as BERT.",
                code="unsupported-model",
                place=f"{run.recipe.where}: plugins.neftune",
                remedy="Remove neftune.",
            )
        self.padding = getattr(model.config.get_text_config(), "pad_token_id", None)
        self.handle = model.get_input_embeddings().register_forward_hook(self.add_noise)

    @hookimpl(wrapper=True)
    def compute_loss(self, model: nn.Module, batch: Mapping[str, Any]) -> Generator[None, Output, Output]:
        import torch

        if model.training and torch.is_grad_enabled():
            self.lengths = text_lengths(batch, self.padding)
        try:
            return (yield)
        finally:
            self.lengths = None

    def add_noise(self, module: nn.Module, args: Any, embeddings: Tensor) -> Tensor | None:
        """Forward hook: embeddings (B, T, D) with noise."""
        import torch

        if self.lengths is None:
            return None
        scale = self.alpha / (self.lengths * embeddings.shape[-1]).sqrt()
        return embeddings + (2 * torch.rand_like(embeddings) - 1) * scale[..., None].to(embeddings.dtype)

    @hookimpl
    def teardown(self) -> None:
        if self.handle is not None:
            self.handle.remove()


def text_lengths(batch: Mapping[str, Any], padding: int | None) -> Tensor:
    """The tokens of the text that each token belongs to, (B, T) or (B, 1) float32, without waiting for the device.

    Args:
        batch: Padded, or packed: with ``position_ids``, (1, T), which restart with each text.
        padding: The token that pads a batch of a language model, which has no ``attention_mask``.
    """
    import torch

    from fastloop_plugins.text.forward_passes import find_documents

    ids = batch["input_ids"]
    positions = batch.get("position_ids")
    if positions is not None:
        text = find_documents(positions)[0]
        counts: Tensor = torch.zeros_like(text).scatter_add_(0, text, torch.ones_like(text))
        return counts[text][None].float()
    mask: Tensor | None = batch.get("attention_mask")
    if mask is not None:
        return mask.sum(1, keepdim=True).float()
    real = torch.ones_like(ids, dtype=torch.bool)
    if padding is not None and "targets" in batch:  # on the right, where no token has a target
        real = (ids != padding) | (batch["targets"] != -100)
    places = torch.arange(1, ids.shape[1] + 1, device=ids.device)
    return (real * places).amax(1, keepdim=True).clamp(min=1).float()
