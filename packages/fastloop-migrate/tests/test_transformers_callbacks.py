"""The plugin ``transformers-callbacks``: callbacks of transformers, and the order of events of its Trainer."""

from __future__ import annotations

import json
import math
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from fastloop import PluginError, RecipeError, Trainer, UsageError
from fastloop.recipe import anchored, load_recipe
from fastloop.testing import expect_problem, tiny_data, tiny_model
from fastloop_tools.plan.code_files import code_files
from recording_plugins import ScriptedScore
from torch import nn
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainingArguments
from transformers.trainer_callback import ExportableState

from fastloop_migrate import TransformersCallbacks

EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]
SPEEDS = re.compile(r".*(_runtime|_per_second|total_flos|memory_bytes)|epoch")
"""Values that differ between two runs, or that only one of the two frameworks logs."""


class Record(TrainerCallback):
    """Appends ``(event, step, epoch, requests, names of values)`` for every event."""

    events: list[tuple[Any, ...]] = []
    values: list[dict[str, float]] = []
    kwargs: dict[str, Any] = {}


def _recorder(event: str) -> Any:
    def record(self: Record, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        flags = [name.removeprefix("should_") for name, value in vars(control).items() if value]
        values = kwargs.get("logs") or kwargs.get("metrics") or {}
        shown = {name: value for name, value in values.items() if not SPEEDS.fullmatch(name)}
        Record.events.append((event, state.global_step, round(state.epoch or 0, 6), sorted(flags), sorted(shown)))
        Record.values.append(shown)
        Record.kwargs = kwargs | {"args": args, "state": state}

    return record


for _event in EVENTS:
    setattr(Record, _event, _recorder(_event))


class Ask(TrainerCallback):
    """Sets flags of the control in one event."""

    def __init__(self, event: str, step: int, flags: list[str], value: bool = True) -> None:
        def set_flags(args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> TrainerControl:
            if state.global_step == step:
                vars(control).update(dict.fromkeys(flags, value))
            return control

        setattr(self, event, set_flags)


class Fails(TrainerCallback):
    """Raises an error in the second step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise ValueError("no second step, please")


class Counts(TrainerCallback, ExportableState):
    """Counts steps, and keeps the count in checkpoints."""

    made: list[Counts] = []

    def __init__(self, start: int = 0) -> None:
        self.start = start
        self.count = start
        Counts.made.append(self)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {"args": {"start": self.start}, "attributes": {"count": self.count}}


class MakesArguments(TrainerCallback):
    """Makes ``TrainingArguments`` of its own, which clears the state that Accelerate's classes share."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        TrainingArguments("unused", use_cpu=True, report_to="none")


class Model(nn.Module):
    """The tiny model as the HF Trainer calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = tiny_model(dropout=0.0)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.layers(inputs)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


HERE = __name__


def listed(*callbacks: Any, **arguments: Any) -> dict[str, Any]:
    """The plugin's entry. A callback of this file is given by its name."""
    places = [f"{HERE}:{entry}" if isinstance(entry, str) and ":" not in entry else entry for entry in callbacks]
    return {"transformers-callbacks": {"callbacks": places, "arguments": arguments}}


def record_trainer(folder: Path, every: str | int, **changes: Any) -> list[tuple[Any, ...]]:
    """The events of transformers' own Trainer."""
    from transformers import Trainer as HFTrainer

    Record.events = []
    Record.values = []
    train, validation = ([{"inputs": x, "labels": y} for x, y in data] for data in (tiny_data(), tiny_data(32, seed=1)))
    when: dict[str, Any] = {"eval_strategy": "epoch", "save_strategy": "epoch"}
    if isinstance(every, int):
        when = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": every, "save_steps": every}
    settings = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "num_train_epochs": 2,
        "logging_steps": 3,
        "metric_for_best_model": "loss",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        **when,
        **changes,
    }
    args = TrainingArguments(str(folder), **settings)
    trainer = HFTrainer(Model(), args, train_dataset=train, eval_dataset=validation, callbacks=[Record])
    trainer.train()
    return Record.events


def record_ours(tiny_run: Any, every: str | int, **changes: Any) -> list[tuple[Any, ...]]:
    """The events of a run."""
    Record.events = []
    Record.values = []
    settings = {
        "micro_batch_size": 4,
        "eval_batch_size": 8,
        "max_grad_norm": 1.0,
        "log_every": 3,
        "evaluate_every": every,
        "save_every": every,
        "device": "cpu",
        **changes,
    }
    tiny_run([listed("Record")], model=tiny_model(dropout=0.0), **settings)
    return Record.events


@pytest.mark.parametrize("batches", [{}, {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}])
@pytest.mark.parametrize("every", ["epoch", 3, 9])
def test_events_have_the_order_of_the_hf_trainer(every, batches, tiny_run, tmp_path):
    """event, step, epoch, requests in the control and names of values, for two epochs of nine steps"""
    theirs = record_trainer(tmp_path / "hf", every, **batches)
    ours = record_ours(tiny_run, every, **({"micro_batch_size": 8} if batches else {}))
    assert len(ours) > 80
    if every != "epoch":  # documented: one more save at the end, after on_epoch_end
        assert [event[0] for event in ours[-3:]] == ["on_save", "on_log", "on_train_end"]
        del ours[-3]
        assert ours[-3][0] == theirs[-3][0] == "on_epoch_end"
        ours[-3], theirs[-3] = ours[-3][:3], theirs[-3][:3]  # the control requests that save
    assert ours == theirs


def test_values_have_the_names_and_size_of_the_hf_trainer(tiny_run, tmp_path):
    record_trainer(tmp_path / "hf", "epoch")
    theirs = Record.values
    record_ours(tiny_run, "epoch")
    for ours, expected in zip(Record.values, theirs, strict=True):
        assert ours.keys() == expected.keys()
        assert all(0.2 < ours[name] / expected[name] < 5 for name in expected)
        assert ours.get("learning_rate") == expected.get("learning_rate")


def test_documented_differences_of_order(tiny_run, tmp_path):
    """a last step that is no multiple: the evaluation and the save follow on_epoch_end"""
    theirs = record_trainer(tmp_path / "hf", 5)
    ours = record_ours(tiny_run, 5)
    last = [event[0] for event in theirs if event[1] == 18], [event[0] for event in ours if event[1] == 18]
    assert sorted(last[0]) == sorted(last[1])
    assert last[0].index("on_save") < last[0].index("on_epoch_end")
    assert last[1].index("on_epoch_end") < last[1].index("on_evaluate")
    assert [event[:3] for event in ours if event[1] < 18] == [event[:3] for event in theirs if event[1] < 18]


def test_a_stop_within_an_epoch_ends_the_epoch_after_the_evaluation(tiny_run, tmp_path):
    theirs = record_trainer(tmp_path / "hf", "epoch", max_steps=4)
    ours = record_ours(tiny_run, "epoch", max_steps=4)
    names = [[event[0] for event in events if event[1] == 4] for events in (theirs, ours)]
    assert sorted(names[0]) == sorted(names[1])
    assert names[0].index("on_epoch_end") < names[0].index("on_evaluate")
    assert names[1].index("on_evaluate") < names[1].index("on_epoch_end")
    assert names[0][-1] == names[1][-1] == "on_train_end"


def test_callbacks_receive_the_objects_of_the_run(tiny_run):
    result = tiny_run([listed("Record"), {"lr-scheduler": False}], device="cpu", max_grad_norm=0.5)
    run = result.trainer.run
    found = Record.kwargs
    assert found["model"] is result.model
    assert found["optimizer"] is run.optimizer
    assert found["lr_scheduler"] is run.scheduler
    assert found["train_dataloader"] is run.train_loader.loader
    args = found["args"]
    state = found["state"]
    assert isinstance(args, TrainingArguments)
    assert (args.output_dir, args.learning_rate, args.num_train_epochs) == (str(run.folder), 1e-2, 2)
    assert (args.eval_strategy, args.max_grad_norm, args.logging_steps) == ("epoch", 0.5, 10)
    assert args.lr_scheduler_type == "constant"
    assert (state.global_step, state.max_steps, state.epoch, state.is_world_process_zero) == (18, 18, 2.0, True)
    assert [entry["step"] for entry in state.log_history] == [9, 10, 18, 18]
    json.loads(args.to_json_string())


def test_the_test_split_is_a_prediction(tiny_run):
    Record.events = []
    splits = [tiny_data(), tiny_data(32, seed=1), tiny_data(16, seed=2)]
    Trainer(
        tiny_model(), *splits, loss=nn.functional.cross_entropy, batch_size=8, epochs=1, plugins=[listed("Record")]
    ).fit()
    names = [event[0] for event in Record.events]
    assert names[-4:] == ["on_train_end", "on_prediction_step", "on_prediction_step", "on_predict"]
    assert Record.events[-1][4] == ["test_loss"]


def test_tensorboard_reads_the_curves_of_its_callback(tiny_run):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = tiny_run([listed("transformers.integrations:TensorBoardCallback")], log_every=6)
    (folder,) = (result.trainer.run.folder / "runs").iterdir()
    curves = EventAccumulator(str(folder)).Reload()
    assert {"train/loss", "train/learning_rate", "eval/loss", "train/train_loss"} <= set(curves.Tags()["scalars"])
    points = [(point.step, point.value) for point in curves.Scalars("train/loss")]
    assert [step for step, _ in points] == [6, 12, 18]
    assert [value for _, value in points] == pytest.approx(
        [sum(result.losses[step - 6 : step]) / 6 for step in (6, 12, 18)]
    )
    assert [point.step for point in curves.Scalars("eval/loss")] == [9, 18]
    (arguments,) = curves.Tensors("args/text_summary")
    assert '"learning_rate": 0.01' in arguments.tensor_proto.string_val[0].decode()


def early(patience: int) -> dict[str, Any]:
    """transformers' early stopping by a score."""
    entry = {"transformers:EarlyStoppingCallback": {"early_stopping_patience": patience}}
    return listed(entry, metric_for_best_model="score")


@pytest.mark.filterwarnings("ignore:.*load_best_model_at_end")
@pytest.mark.parametrize(("patience", "epochs"), [(1, 3), (2, 4), (3, 5)])
def test_early_stopping_callback_stops_as_the_plugin_does(tiny_run, patience, epochs):
    values = (0.5, 0.6, 0.55, 0.4, 0.3)
    result = tiny_run([early(patience), ScriptedScore(*values)], epochs=6)
    plugin = tiny_run(
        [{"early-stopping": {"monitor": "score", "patience": patience}}, ScriptedScore(*values)], epochs=6
    )
    assert result.summary["epochs"] == plugin.summary["epochs"] == epochs
    assert result.summary["reason"] == "transformers-callbacks: EarlyStoppingCallback in on_evaluate"


@pytest.mark.filterwarnings("ignore:.*load_best_model_at_end")
def test_objects_of_callbacks_run_in_trainer(tiny_run):
    counts = Counts()
    stop = EarlyStoppingCallback(2)
    plugin = TransformersCallbacks(counts, stop, arguments={"metric_for_best_model": "score"})
    result = tiny_run([plugin, ScriptedScore(0.5, 0.6, 0.55, 0.4, 0.3)], epochs=6)
    assert result.summary["epochs"] == 4
    assert counts.count == 4 * 9


def test_early_stopping_callback_resumes_its_patience(tiny_run):
    values = (0.5, 0.4, 0.3, 0.2, 0.1)
    first = tiny_run([early(3), ScriptedScore(*values[:2])], epochs=2, output="run")
    assert first.summary["status"] == "completed"
    again = tiny_run([early(3), ScriptedScore(*values[2:])], epochs=5, output="run", resume=True)
    assert again.summary["epochs"] == 4, "three evaluations without improvement, one of them before the resume"


def test_callbacks_with_state_and_the_history_are_restored(tiny_run):
    Counts.made = []
    callbacks = listed({f"{HERE}:Counts": {"start": 5}}, "Counts", "Record")
    tiny_run([callbacks], epochs=1, output="run")
    assert [callback.count for callback in Counts.made] == [14, 9]
    tiny_run([callbacks], epochs=2, output="run", resume=True)
    assert [callback.count for callback in Counts.made[4:]] == [23, 18]
    assert [entry["step"] for entry in Record.kwargs["state"].log_history] == [9, 10, 18, 18]


def test_progress_and_printer_show_the_values(tiny_run, capfd):
    tiny_run([listed("transformers:PrinterCallback", "transformers:ProgressCallback")], log_every=9)
    shown = capfd.readouterr()
    assert re.search(r"\{'loss': '[\d.]+', .*'learning_rate': '0.01', .*'epoch': '1'\}", shown.out)
    assert "'eval_loss'" in shown.out
    assert "18/18" in shown.err


def test_requests_evaluate_and_save_after_their_step(tiny_run):
    Record.events = []
    asks = {f"{HERE}:Ask": {"event": "on_step_end", "step": 4, "flags": ["should_save", "should_evaluate"]}}
    result = tiny_run([listed(asks, "Record")], evaluate_every=None, save_every=None)
    assert [event[1] for event in Record.events if event[0] == "on_save"] == [4]
    assert [event[1] for event in Record.events if event[0] == "on_evaluate"] == [4, 18]
    assert [path.name for path in (result.trainer.run.folder / "checkpoints").iterdir()] == ["step-00000004"]


@pytest.mark.parametrize("event", ["on_step_begin", "on_pre_optimizer_step", "on_step_end", "on_log", "on_substep_end"])
def test_a_stop_ends_the_run_after_its_step(event, tiny_run):
    step = 4 if event in ("on_step_end", "on_log") else 3
    asks = {f"{HERE}:Ask": {"event": event, "step": step, "flags": ["should_training_stop"]}}
    result = tiny_run([listed(asks)], log_every=1, micro_batch_size=4)
    assert result.summary["steps"] == 4
    assert result.summary["reason"] == f"transformers-callbacks: Ask in {event}"


def test_requests_without_a_counterpart_are_errors_or_warnings(tiny_run, caplog):
    asks = {"event": "on_step_end", "step": 3}
    with expect_problem("unsupported-callback control.should_epoch_stop on_step_end should_training_stop", PluginError):
        tiny_run([listed({f"{HERE}:Ask": {**asks, "flags": ["should_epoch_stop"]}})])
    tiny_run([listed({f"{HERE}:Ask": {**asks, "flags": ["should_log"]}})])
    assert caplog.text.count("set control.should_log, which is ignored: the run logs every train.log_every") == 1
    result = tiny_run([listed({f"{HERE}:Ask": {**asks, "step": 9, "event": "on_epoch_end", "value": False,
                                               "flags": ["should_evaluate"]}})])  # fmt: skip
    assert "set control.should_evaluate=False, which is ignored: the recipe's schedule applies" in caplog.text
    assert len(result.recorder.metrics) == 2


def test_an_evaluation_without_a_split_is_refused(tmp_path):
    entry = listed({f"{HERE}:Ask": {"event": "on_step_end", "step": 2, "flags": ["should_evaluate"]}})
    trainer = Trainer(
        tiny_model(),
        tiny_data(),
        loss=nn.functional.cross_entropy,
        batch_size=8,
        plugins=[entry],
        output=tmp_path / "r",
    )
    with expect_problem("unknown-split should_evaluate on_step_end", UsageError):
        trainer.fit()


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        ("transformers:EarlyStopingCallback", r"no 'EarlyStopingCallback'\. Did you mean 'EarlyStoppingCallback'\?"),
        ("transformerz:EarlyStoppingCallback", "no package 'transformerz' is installed"),
        ("EarlyStoppingCallback:", "expected file.py:name or package.module:name"),
        ("transformers:TrainerState", "is no class of transformers' TrainerCallback"),
        ({"transformers:EarlyStoppingCallback": {"patience": 2}}, "'patience'.*early_stopping_patience"),
        ({"a:B": {}, "c:D": {}}, "expected one {CALLBACK: arguments}"),
    ],
)
def test_wrong_callbacks_are_refused_before_the_run(callback, message, tiny_run):
    with pytest.raises(RecipeError, match=rf"plugins\.transformers-callbacks\.callbacks: .*{message}"):
        tiny_run([{"transformers-callbacks": {"callbacks": [callback]}}])


@pytest.mark.parametrize(
    ("name", "message"),
    [("metric_for_best", "Did you mean 'metric_for_best_model'"), ("deepspeed", "List a plugin for it instead")],
)
def test_wrong_arguments_are_refused(name, message, tiny_run):
    with pytest.raises(RecipeError, match=rf"plugins\.transformers-callbacks\.arguments\.{name}: .*{message}"):
        tiny_run([listed("Record", **{name: "x"})])


def test_an_error_names_the_plugin_the_callback_and_the_event(tiny_run):
    expected = r"plugin 'transformers-callbacks': Fails failed in on_step_end: ValueError: no second step, please"
    with pytest.raises(PluginError, match=expected):
        tiny_run([listed("Fails")])


def test_without_a_callback_it_warns(tiny_run, caplog):
    tiny_run([listed()])
    assert "plugins.transformers-callbacks.callbacks lists no callback, so the plugin does nothing" in caplog.text


def test_training_is_the_same_with_callbacks_that_only_read(tiny_run):
    plain = tiny_run()
    ours = tiny_run([listed("Record", "MakesArguments")])
    assert ours.losses == plain.losses
    assert all(torch.equal(ours.weights[name], plain.weights[name]) for name in plain.weights)
    assert math.isfinite(ours.summary["validation"]["loss"])


class Interrupts(TrainerCallback):
    """Presses Ctrl-C in the third step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            signal.raise_signal(signal.SIGINT)


def test_a_signal_ends_training_and_the_run_resumes(tiny_run):
    Record.events = []
    result = tiny_run([listed("Interrupts", "Record")], output="run")
    assert result.summary["steps"] == 3
    assert [event[0] for event in Record.events[-4:]] == ["on_save", "on_epoch_end", "on_log", "on_train_end"]
    Record.events = []
    tiny_run([listed("Record")], output="run", resume=True)
    assert [event[:3] for event in Record.events[:4]] == [
        ("on_init_end", 0, 0.0),
        ("on_train_begin", 3, 0.333333),
        ("on_epoch_begin", 3, 0.333333),
        ("on_step_begin", 3, 0.333333),
    ]
    assert Record.events[-1][:3] == ("on_train_end", 18, 2.0)


WRITES = """
from transformers import TrainerCallback


class Writes(TrainerCallback):
    def __init__(self, file):
        self.file = file

    def on_train_end(self, args, state, control, **kwargs):
        with open(self.file, "w") as file:
            file.write(f"{state.global_step} steps")
"""


def test_a_file_beside_the_recipe_holds_a_callback(tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("writes.py").write_text(WRITES)
    tiny_run([listed({"writes.py:Writes": {"file": "steps.txt"}})])
    assert Path("steps.txt").read_text() == "18 steps"


def test_the_file_of_a_callback_with_arguments_is_listed_and_saved(tmp_path, monkeypatch):
    """``plan`` lists the file, and the recipe in the run folder names it by its absolute path"""
    monkeypatch.chdir(tmp_path)
    Path("base").mkdir()
    file = Path("base", "writes.py")
    file.write_text(WRITES)
    entry = {"transformers-callbacks": {"callbacks": [{"writes.py:Writes": {"file": "steps.txt"}}]}}
    Path("base", "recipe.yaml").write_text(json.dumps({"plugins": [entry]}))
    recipe = load_recipe("base/recipe.yaml")
    assert code_files(recipe) == [file.resolve()]
    saved = anchored(recipe.plugins, Path("base"))
    assert saved["transformers-callbacks"]["callbacks"] == [{f"{file.resolve()}:Writes": {"file": "steps.txt"}}]
