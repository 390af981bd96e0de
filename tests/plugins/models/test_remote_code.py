"""A model whose Python code ships with it: its values, its export and the code of its README.

Modules:
    plugins/fastloop_plugins/models/remote_code.py
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cards import load_by_card
from inference_runs import CLASSES, TRAIN, train, write_recipe
from safetensors.torch import save_file

CODE = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput

class NetConfig(PretrainedConfig):
    model_type = "net-of-this-test"

    def __init__(self, vocab_size=10, pad_token_id=0, **options):
        self.vocab_size, self.hidden_size, self.pad_token_id = vocab_size, 16, pad_token_id
        super().__init__(**options)

class Net(PreTrainedModel):
    config_class, base_model_prefix = NetConfig, "net"

    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.register_buffer("scales", torch.linspace(1, 2, config.hidden_size), persistent=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.words

    def _init_weights(self, module):                       # neither the bias nor the buffer
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.3)

    def forward(self, input_ids, attention_mask=None):
        return BaseModelOutput(last_hidden_state=self.words(input_ids) * self.scales)

class NetForSequenceClassification(Net):
    def __init__(self, config):
        PreTrainedModel.__init__(self, config)
        self.net = Net(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def get_input_embeddings(self):
        return self.net.words

    def forward(self, input_ids, attention_mask=None, labels=None):
        states = self.net(input_ids).last_hidden_state
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        logits = self.score((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
        loss = nn.functional.cross_entropy(logits, labels) if labels is not None else None
        return SequenceClassifierOutput(loss=loss, logits=logits)
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pretrained model without a head, with its code and the tokenizer of a trained run."""
    modules = str(tmp_path / "modules")
    monkeypatch.setenv("HF_MODULES_CACHE", modules)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    first = tmp_path / "first"
    first.mkdir()
    train(write_recipe(first, train={**TRAIN, "epochs": 1}))
    folder = tmp_path / "base"
    folder.mkdir()
    for path in (first / "run" / "model").glob("token*"):
        shutil.copy(path, folder)
    size = json.loads((first / "run" / "model" / "config.json").read_text())["vocab_size"]
    (folder / "modeling_net.py").write_text(CODE)
    names = {"AutoConfig": "NetConfig", "AutoModel": "Net"}
    names["AutoModelForSequenceClassification"] = "NetForSequenceClassification"
    config: dict[str, Any] = {"model_type": "net-of-this-test", "vocab_size": size, "architectures": ["Net"]}
    config["auto_map"] = {auto: f"modeling_net.{name}" for auto, name in names.items()}
    (folder / "config.json").write_text(json.dumps(config))
    weights = torch.randn(size, 16, generator=torch.Generator().manual_seed(0))
    save_file({"words.weight": weights}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("is_adapter", [False, True])
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft calls it
def test_its_values_are_defined_and_its_card_loads_it_with_its_head(base, tmp_path, cli, is_adapter):
    plugins = []
    if is_adapter:
        pytest.importorskip("peft")
        plugins = [{"lora": {"r": 2, "target_modules": ["words"], "merge": False}}]
    model = {"name": str(base), "trust_remote_code": True}
    summary = train(write_recipe(tmp_path, plugins, model=model))
    assert summary["validation"]["loss"] < 10
    loaded = load_by_card(tmp_path / "run" / "model")
    adapted = loaded["model"]
    own = adapted.get_base_model() if is_adapter else adapted
    assert type(own).__name__ == "NetForSequenceClassification"
    code, out, err = cli("predict", str(tmp_path / "run"), "a lovely film", "--without", "auto")
    assert code == 0, err
    predicted = json.loads(out.splitlines()[-1])
    own.net.scales.copy_(torch.linspace(1, 2, 16))  # the code leaves it undefined in transformers, too
    inputs = loaded["tokenizer"]("a lovely film", return_tensors="pt")
    (probabilities,) = adapted(inputs.input_ids, attention_mask=inputs.attention_mask).logits.softmax(1).tolist()
    assert [predicted[f"probability_{name}"] for name in CLASSES] == pytest.approx(probabilities, abs=1e-5)
