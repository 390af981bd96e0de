"""``Trainer``: evaluate, predict and save without training, before and after ``fit``.

Modules:
    plugins/fastloop_tools/trainer/task.py
    plugins/fastloop_tools/trainer/trainer.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, WeightedRandomSampler
from torchmetrics.classification import MulticlassAccuracy
from transformers import BertConfig, BertForSequenceClassification

from fastloop import Plugin, PluginError, Trainer, UsageError, hookimpl
from fastloop.testing import ProcessResult, expect_problem, tiny_data, tiny_model

QUIET: list[Any] = [{"log": False}, {"progress": False}]


def make(
    model: nn.Module | None = None, data: Any = None, evaluated: Any = None, plugins: Any = (), **settings: Any
) -> Trainer:
    defaults: dict[str, Any] = {
        "loss": nn.functional.cross_entropy,
        "epochs": 2,
        "lr": 1e-2,
        "output": "run",
        "device": "cpu",
    }
    if not isinstance(data, DataLoader):
        defaults["batch_size"] = 8
    metrics = {"accuracy": MulticlassAccuracy(3, average="micro")}
    arguments = defaults | {"metrics": metrics} | settings
    return Trainer(
        model or tiny_model(),
        data or tiny_data(),
        evaluated or tiny_data(32, seed=1),
        plugins=[*QUIET, *plugins],
        **arguments,
    )


def outputs(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """The result of a raw loop, in eval mode."""
    was_training = model.training
    with torch.no_grad():
        found: torch.Tensor = model.eval()(inputs)
    model.train(was_training)
    return found


# -- validate ----------------------------------------------------------------------------------------------------------


def test_validate_is_the_raw_loops_evaluation_before_training_and_fits_after():
    trainer = make()
    inputs, targets = tiny_data(32, seed=1).tensors
    scores = outputs(trainer.task.model, inputs)
    before = trainer.validate()
    assert before["accuracy"] == (scores.argmax(1) == targets).float().mean().item()
    assert before["loss"] == pytest.approx(nn.functional.cross_entropy(scores, targets).item(), rel=1e-6)
    assert not Path("run").exists(), "nothing is written"
    summary = trainer.fit()
    assert summary["validation"] != before
    assert trainer.validate() == summary["validation"]
    other = trainer.validate(tiny_data(16, seed=2))
    assert other == make(trainer.task.model, evaluated=tiny_data(16, seed=2), output="other").validate()
    assert other != summary["validation"]


def test_evaluation_before_or_between_changes_no_number_of_training():
    plain = make(output="plain")
    plain.fit()
    trainer = make()
    torch.manual_seed(7)
    drawn = torch.rand(3)
    torch.manual_seed(7)
    trainer.validate()
    trainer.predict(tiny_data(5))
    assert torch.equal(torch.rand(3), drawn), "the global random state is kept"
    trainer.fit()
    expected, weights = plain.run.full_state_dict(), trainer.run.full_state_dict()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_validate_without_data_is_refused():
    trainer = Trainer(
        tiny_model(), tiny_data(), plugins=QUIET, loss=nn.functional.cross_entropy, batch_size=8, device="cpu"
    )
    with expect_problem("no-dataset eval_loader=", UsageError):
        trainer.validate()
    assert trainer.validate(tiny_data(4))["loss"] > 0


def test_validate_uses_precision_plugins_and_leaves_training_plugins_out():
    fired: list[str] = []

    class Watch(Plugin):
        name = "watch"

        @hookimpl
        def before_evaluate(self) -> None:
            fired.append("evaluated")

    trainer = make(plugins=[{"amp": {"dtype": "bf16"}}, {"ema": {"decay": 0.5}}, Watch()])
    summary = trainer.fit()
    assert fired == ["evaluated"] * 2
    fired.clear()
    assert trainer.validate() == summary["validation"], "in bf16, with the averaged weights that fit left in the model"
    assert not fired


def test_an_error_of_user_code_is_raised_as_it_is():
    trainer = make(nn.Linear(7, 3))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trainer.validate()

    def broken(predictions: Any, targets: Any) -> Any:
        raise LookupError("loss")

    with pytest.raises(LookupError, match="loss") as failed:
        make(loss=broken).validate()
    assert "your code" in failed.value.__notes__[0]


@pytest.mark.parametrize(("first", "second"), [([], ["amp"]), (["amp"], []), (["amp"], ["amp"])], ids=str)
def test_a_model_can_be_trained_again_with_another_precision(first, second):
    trainer = make(plugins=first)
    trainer.fit()
    copy = tiny_model()
    copy.load_state_dict(trainer.task.model.state_dict())
    expected = make(copy, plugins=second, output="copy").fit()
    again = make(trainer.task.model, plugins=second, output="again")
    assert again.fit()["validation"] == expected["validation"]
    assert all(torch.equal(value, copy.state_dict()[name]) for name, value in trainer.task.model.state_dict().items())


# -- predict -----------------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(tiny_data(21))


PREDICTED: dict[str, Callable[[], Any]] = {
    "a dataset": lambda: tiny_data(21),
    "a loader": lambda: DataLoader(tiny_data(21), batch_size=4),
    "a loader with workers": lambda: DataLoader(tiny_data(21), batch_size=4, num_workers=2),
    "a shuffled loader": lambda: DataLoader(
        tiny_data(21), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "inputs alone": lambda: TensorDataset(tiny_data(21).tensors[0]),
    "bare tensors": lambda: list(tiny_data(21).tensors[0]),
    "a stream": Stream,
    "a stream with workers": lambda: DataLoader(Stream(), batch_size=4, num_workers=2),
}


@pytest.mark.parametrize("data", PREDICTED)
def test_predictions_are_the_models_outputs_in_the_order_of_the_dataset(data):
    trainer = make()
    found = trainer.predict(PREDICTED[data]())
    assert list(found) == ["output"]
    expected = outputs(trainer.task.model, tiny_data(21).tensors[0])
    assert found["output"].shape == expected.shape
    assert torch.allclose(found["output"], expected, rtol=0, atol=1e-6)
    assert not Path("run").exists()


def test_predictions_after_training_are_those_of_the_trained_model():
    trainer = make()
    before = trainer.predict(tiny_data(8))["output"]
    trainer.fit()
    found = trainer.predict(DataLoader(tiny_data(8), batch_size=8))["output"]
    assert not torch.equal(found, before)
    assert torch.equal(found, outputs(trainer.task.model, tiny_data(8).tensors[0]))


def test_a_loader_that_leaves_samples_out_is_refused():
    loader = DataLoader(tiny_data(8), batch_size=4, sampler=WeightedRandomSampler([1.0] * 8, 8))
    with expect_problem("samples-left-out WeightedRandomSampler", UsageError):
        make().predict(loader)
    assert len(make().predict(Subset(tiny_data(8), [5, 2]))["output"]) == 2


class Pairs(Dataset[dict[str, Any]]):
    """Token ids of different lengths, without labels."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.full((2 + index % 3,), 1 + index)}


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    batch = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    return batch | (
        {"labels": torch.tensor([sample["labels"] for sample in samples])} if "labels" in samples[0] else {}
    )


def test_a_model_of_transformers_predicts_logits_without_labels():
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=20, max_position_embeddings=8, num_labels=3, **small))
    trainer = make(model, DataLoader(Pairs(), batch_size=2, collate_fn=padded), Pairs(), loss=None, metrics=None)
    found = trainer.predict(Pairs())
    assert list(found) == ["logits"]
    with torch.no_grad():
        expected = torch.cat([model.eval()(**padded([Pairs()[index]])).logits for index in range(6)])
    assert torch.allclose(found["logits"], expected, atol=1e-6)
    again = type(model).from_pretrained(trainer.save_pretrained("saved"))
    assert torch.equal(again.classifier.weight, model.classifier.weight)


def test_outputs_of_different_shapes_are_a_list():
    class Echo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
            return {
                "ids": input_ids * self.scale,
                "loss": self.scale,
                "lengths": attention_mask.sum(1),
                "constant": torch.zeros(7),
            }

    found = make(
        Echo(), DataLoader(Pairs(), batch_size=1, collate_fn=padded), Pairs(), loss=None, metrics=None
    ).predict(Pairs())
    assert list(found) == ["ids", "lengths"]
    assert found["lengths"].tolist() == [2, 3, 4, 2, 3, 4]
    assert [len(row) for row in found["ids"]] == [2, 3, 4, 2, 3, 4]


class Scores(NamedTuple):
    """A result of a model with two tensors for each sample, and a number for the batch."""

    logits: torch.Tensor
    inputs: torch.Tensor
    count: int


@pytest.mark.parametrize(
    ("kind", "names"),
    [(tuple, ["output_0", "output_1"]), (list, ["output_0", "output_1"]), (Scores._make, ["logits", "inputs"])],
    ids=["tuple", "list", "namedtuple"],
)
def test_the_elements_of_a_sequence_have_names(kind, names):
    class Two(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> Any:
            return kind([super().forward(inputs), inputs, 3])

    model = Two(8, 3)
    found = make(model).predict(tiny_data(4))
    inputs = tiny_data(4).tensors[0]
    assert list(found) == names
    assert torch.equal(found[names[1]], inputs)


def test_a_model_without_outputs_is_refused():
    class Silent(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> Any:
            return {"loss": super().forward(inputs).mean()}

    with expect_problem("wrong-result 4", UsageError):
        make(Silent(8, 3)).predict(tiny_data(4))


def test_a_plugin_can_predict_instead():
    class Labels(Plugin):
        name = "labels"
        for_inference = True

        @hookimpl
        def predict(self, run: Any, batch: Any) -> dict[str, list[str]]:
            return {"label": ["abc"[index] for index in run.model(batch[0]).argmax(1).tolist()]}

    found = make(plugins=[Labels()]).predict(tiny_data(5))
    assert set(found) == {"label"}
    assert set("".join(found["label"])) <= set("abc")

    class Short(Labels):
        @hookimpl
        def predict(self, run: Any, batch: Any) -> dict[str, list[str]]:
            return {"label": ["a"]}

    with expect_problem("wrong-result 1 'label' 5", PluginError):
        make(plugins=[Short()]).predict(tiny_data(5))


# -- save_pretrained ---------------------------------------------------------------------------------------------------


def test_the_saved_model_is_the_one_of_the_run_folder():
    trainer = make()
    assert trainer.save_pretrained("before") == Path("before")
    initial = load_file("before/model.safetensors")
    assert all(torch.equal(initial[name], value) for name, value in trainer.task.model.state_dict().items())
    trainer.fit()
    saved, exported = (
        load_file(trainer.save_pretrained("after") / "model.safetensors"),
        load_file("run/model/model.safetensors"),
    )
    assert saved.keys() == exported.keys()
    assert all(torch.equal(saved[name], exported[name]) for name in saved)
    assert not any(torch.equal(saved[name], initial[name]) for name in saved)


def test_a_folder_with_files_of_a_user_keeps_them():
    Path("mine").mkdir()
    Path("mine/config.json").write_text("{}")
    Path("mine/adapter_config.json").write_text("{}")
    make().save_pretrained("mine")
    assert {path.name for path in Path("mine").iterdir()} >= {"config.json", "adapter_config.json", "model.safetensors"}


# -- several processes -------------------------------------------------------------------------------------------------


def of_processes(strategy: str) -> dict[str, Any]:
    """On this process of several: metrics and predictions before and after training."""
    trainer = make(plugins=[strategy], output="run")
    before = trainer.predict(tiny_data(21))["output"]
    summary = trainer.fit()
    found = trainer.validate(), trainer.predict(tiny_data(21))["output"].tolist(), summary["validation"]
    trainer.save_pretrained("saved")
    return {"before": before.tolist(), "validate": found[0], "output": found[1], "fit": found[2]}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_several_processes_predict_together(strategy: str, processes: Callable[..., list[ProcessResult]]):
    first, second = (process.result for process in processes(2, of_processes, strategy))
    assert first == second
    assert first["validate"] == pytest.approx(first["fit"])
    model = tiny_model()
    assert torch.allclose(torch.tensor(first["before"]), outputs(model, tiny_data(21).tensors[0]), atol=1e-6)
    model.load_state_dict(load_file("saved/model.safetensors"))
    assert torch.allclose(torch.tensor(first["output"]), outputs(model, tiny_data(21).tensors[0]), atol=1e-6)
