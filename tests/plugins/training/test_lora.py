"""The plugin ``lora``, on a tiny BERT.

Modules:
    plugins/fastloop_plugins/training/_lora_model.py
    plugins/fastloop_plugins/training/lora.py
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset

from fastloop import CheckpointError, PluginError
from fastloop.testing import expect_problem

pytest.importorskip("peft")


class Sentences(Dataset):
    """Class 1 when the first token is even."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int):
        ids = torch.randint(1, 50, (6,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": (ids[0] % 2 == 0).long()}


def tiny_bert():
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    return BertForSequenceClassification(config)


@pytest.fixture
def bert_run(tiny_run, tmp_path):
    from fastloop import Trainer

    def train(output="run", epochs=2, resume=False, **options):
        model = tiny_bert()
        trainer = Trainer(
            model,
            Sentences(),
            Sentences(),
            plugins=[{"lora": options}],
            batch_size=8,
            epochs=epochs,
            lr=1e-2,
            output=tmp_path / output,
            resume=resume,
        )
        return model, trainer, trainer.fit()

    return train


def test_the_base_weights_stay_and_few_parameters_are_trained(bert_run):
    before = tiny_bert().state_dict()
    _, trainer, summary = bert_run(merge=False)
    after = trainer.run.unwrap_model().state_dict()
    frozen = {name: tensor for name, tensor in after.items() if "lora_" not in name and "modules_to_save" not in name}
    for name, tensor in frozen.items():
        original = name.removeprefix("base_model.model.").replace(".base_layer", "").replace("original_module.", "")
        assert torch.equal(tensor.cpu(), before[original]), name
    trained = sum(parameter.numel() for parameter in trainer.run.model.parameters() if parameter.requires_grad)
    assert trained < 0.3 * sum(tensor.numel() for tensor in before.values())
    assert summary["validation"]["loss"] < 0.69


def test_a_model_that_comes_in_eval_mode_is_trained_in_train_mode(tmp_path):
    from fastloop import Plugin, Trainer, hookimpl

    modes = []

    class Watch(Plugin):
        name = "watch"

        @hookimpl
        def after_backward(self, run):
            modes.append(all(module.training for module in run.model.modules()))

    Trainer(
        tiny_bert().eval(), Sentences(), plugins=["lora", Watch()], max_steps=2, batch_size=8, output=tmp_path / "run"
    ).fit()
    assert modes == [True, True]


def bytes_for_backward(compute: Callable[[], Tensor]) -> int:
    """Bytes that a forward pass keeps for its backward pass, each storage once."""
    sizes: dict[int, int] = {}
    kept = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)  # so that no other tensor gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compute()
    return sum(sizes.values())


class SharedInput(nn.Module):
    """Three layers that read the output of one, which autocast computes in bf16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 16)
        self.query = nn.Linear(16, 16)
        self.key = nn.Linear(16, 16)
        self.value = nn.Linear(16, 16)

    def forward(self, input_ids, labels):
        shared = self.first(input_ids.float())
        total = self.query(shared) + self.key(shared) + self.value(shared)
        return SimpleNamespace(loss=(total.mean(1) - labels).square().mean())


def test_under_autocast_adapters_of_one_input_keep_one_copy_of_it(tmp_path):
    from fastloop import Plugin, Trainer, hookimpl

    kept = {}
    losses = {}

    class Watch(Plugin):
        name = "watch"

        @hookimpl(wrapper=True)
        def compute_loss(self, run, model, batch):
            if run.state.step == 1:  # the first step has changed the factors that are zero at the start
                kept["one copy"] = bytes_for_backward(lambda: model(**batch).loss)
                losses["one copy"] = model(**batch).loss.item()
                for layer in run.model.modules():
                    layer.cast_input_dtype_enabled = True  # peft's default
                kept["peft's casts"] = bytes_for_backward(lambda: model(**batch).loss)
                losses["peft's casts"] = model(**batch).loss.item()
            return (yield)

    plugins = [{"lora": {"target_modules": ["query", "key", "value"]}}, {"amp": {"dtype": "bf16"}}, Watch()]
    Trainer(SharedInput(), Sentences(), plugins=plugins, max_steps=2, batch_size=8, output=tmp_path / "run").fit()
    assert kept["peft's casts"] - kept["one copy"] == 2 * 8 * 16 * 2  # two copies of 8 rows of 16 numbers of 2 bytes
    assert losses["peft's casts"] == losses["one copy"]


@pytest.mark.parametrize("options", [{"dropout": 0.1}, {"use_dora": True}], ids=["dropout", "DoRA"])
def test_layers_that_compute_on_the_input_in_float32_keep_the_cast(tmp_path, options):
    from fastloop import Plugin, Trainer, hookimpl

    casts = []

    class Watch(Plugin):
        name = "watch"

        @hookimpl
        def before_fit(self, run):
            for module in run.model.modules():
                if hasattr(module, "cast_input_dtype_enabled"):
                    casts.append(module.cast_input_dtype_enabled)

    plugins = [{"lora": options}, {"amp": {"dtype": "bf16"}}, Watch()]
    Trainer(tiny_bert(), Sentences(), plugins=plugins, max_steps=1, batch_size=8, output=tmp_path / "run").fit()
    assert casts
    assert all(casts)


def test_the_exported_model_has_the_adapters_merged_in(bert_run, tmp_path):
    model, trainer, _ = bert_run()
    exported = load_file(tmp_path / "run" / "model" / "model.safetensors")
    plain = tiny_bert()
    plain.load_state_dict(exported)
    ids = Sentences()[0]["input_ids"][None]
    with torch.no_grad():
        merged = plain.eval()(input_ids=ids).logits
        assert torch.allclose(merged, trainer.run.unwrap_model().cpu().eval()(input_ids=ids).logits, atol=1e-6)
        assert not torch.allclose(merged, tiny_bert().eval()(input_ids=ids).logits, atol=1e-3)
    assert not any("lora" in name for name in exported)
    assert model is not None


def test_a_run_does_not_resume_with_another_scale_of_the_adapters(bert_run):
    bert_run(epochs=1, merge=False, alpha=8)
    with pytest.raises(CheckpointError, match=r"plugins\.lora\.alpha = 8.*64"):
        bert_run(epochs=2, resume=True, merge=False, alpha=64)


def test_a_target_that_matches_nothing_is_an_error_that_names_the_layers(bert_run):
    with expect_problem("unknown-module 'lora' target_modules q_proj", PluginError):
        bert_run(target_modules=["q_proj"])
