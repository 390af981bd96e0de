"""``Trainer`` with the user's optimizers and schedulers: the numbers of a raw loop, resume, and refusals.

Modules:
    plugins/fastloop_tools/trainer/optimizers.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from flat_optimizers import Listed
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

from fastloop import CheckpointError, Strategy, Trainer, UsageError
from fastloop.testing import ProcessResult, assert_problem, expect_problem, tiny_data, tiny_model
from fastloop.unstepped import stepped_parameters

QUIET: list[Any] = [{"log": False}, {"progress": False}]
LOADER = {"batch_size": 8, "shuffle": False}

MakeOptimizer = Callable[[nn.Module], Optimizer]
MakeScheduler = Callable[[Optimizer], LRScheduler]


def momentum(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)


def groups(model: nn.Module) -> Optimizer:
    first, *_, last = model.children()
    return AdamW([{"params": first.parameters(), "lr": 1e-3}, {"params": last.parameters()}], lr=1e-2, weight_decay=0.1)


def one_cycle(optimizer: Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=18)


def train(
    optimizer: Any, scheduler: Any = None, model: nn.Module | None = None, plugins: Any = (), **settings: Any
) -> Trainer:
    """Train with objects if the arguments are functions wrapped in ``built``, else as given."""
    defaults = {"loss": nn.functional.cross_entropy, "epochs": 2, "output": "run", "device": "cpu"}
    model = model or tiny_model()
    trainer = Trainer(
        model,
        DataLoader(tiny_data(), **LOADER),
        plugins=[*QUIET, *plugins],
        optimizer=optimizer,
        scheduler=scheduler,
        **defaults | settings,
    )
    trainer.fit()
    return trainer


def raw(
    make_optimizer: MakeOptimizer, make_scheduler: MakeScheduler | None = None, rounds: int = 1
) -> dict[str, torch.Tensor]:
    """A loop as users write it; ``rounds`` of it, one after another with the same objects."""
    model = tiny_model()
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer) if make_scheduler is not None else None
    inputs, targets = tiny_data().tensors
    for _ in range(rounds):
        torch.manual_seed(123)  # dropout draws from here
        for _ in range(2):
            for x, y in zip(inputs.split(8), targets.split(8), strict=True):
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if scheduler is not None:
                    scheduler.step()
    return model.state_dict()


def same(trainer: Trainer, expected: dict[str, torch.Tensor]) -> bool:
    found = trainer.task.model.state_dict()
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


CASES: dict[str, tuple[MakeOptimizer, MakeScheduler | None]] = {
    "momentum": (momentum, None),
    "groups, one cycle": (groups, one_cycle),
    "momentum, cosine": (momentum, lambda optimizer: CosineAnnealingLR(optimizer, 18)),
}


# -- the numbers of a raw loop -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("as_objects", [True, False], ids=["objects", "functions"])
def test_weights_are_those_of_a_raw_loop_to_the_bit(case, as_objects):
    make_optimizer, make_scheduler = CASES[case]
    optimizer: Any = make_optimizer
    scheduler: Any = make_scheduler
    model = tiny_model()
    if as_objects:
        optimizer = make_optimizer(model)
        scheduler = make_scheduler(optimizer) if make_scheduler else None
    trainer = train(optimizer, scheduler, model)
    assert same(trainer, raw(make_optimizer, make_scheduler))
    assert trainer.run.optimizer is optimizer or not as_objects
    assert trainer.run.scheduler is scheduler or not as_objects


@pytest.mark.parametrize(
    "optimizer", [partial(SGD, lr=0.1, momentum=0.9, nesterov=True), momentum], ids=["class", "function"]
)
def test_a_class_gets_the_trained_parameters(optimizer):
    assert same(train(optimizer), raw(momentum))


def test_objects_can_be_used_again_by_another_trainer():
    model = tiny_model()
    optimizer = groups(model)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    train(optimizer, scheduler, model)
    assert same(
        train(optimizer, scheduler, model),
        raw(groups, lambda found: LambdaLR(found, lambda step: 1 / (1 + step)), rounds=2),
    )


def test_names_and_mappings_are_those_of_a_recipe():
    by_name = train({"name": "SGD", "momentum": 0.9, "nesterov": True}, lr=0.1)
    assert same(by_name, raw(momentum))
    assert type(train("Adagrad", lr=0.1).run.optimizer).__name__ == "Adagrad"


# -- checkpoints and the run folder ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("as_objects", [True, False], ids=["objects", "functions"])
def test_a_run_resumes_in_a_new_process_state_with_the_same_numbers(case, as_objects):
    make_optimizer, make_scheduler = CASES[case]

    def arguments() -> tuple[Any, Any, nn.Module]:
        model = tiny_model()
        if not as_objects:
            return make_optimizer, make_scheduler, model
        optimizer = make_optimizer(model)
        return optimizer, make_scheduler(optimizer) if make_scheduler else None, model

    train(*arguments(), max_steps=5)
    assert same(train(*arguments(), resume=True), raw(make_optimizer, make_scheduler))


def test_the_run_folder_records_the_optimizer_and_a_resumed_run_must_have_the_same():
    train(momentum, max_steps=3)
    train_section = yaml.safe_load(Path("run/recipe.yaml").read_text())["train"]
    assert (train_section["lr"], train_section["optimizer"]["name"], train_section["optimizer"]["momentum"]) == (
        0.1,
        "SGD",
        0.9,
    )
    for other, expected in (
        (lambda model: SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True), "train.lr 0.1 0.2"),
        (lambda model: SGD(model.parameters(), lr=0.1), "train.optimizer 'momentum': 0.9 0,"),
        (groups, "train."),
    ):
        with expect_problem(f"resume-differs {expected}", CheckpointError):
            train(other, resume=True)
    train(momentum, resume=True, max_steps=5)


class Sign(Optimizer):
    """A user's own optimizer, whose arguments have other names."""

    def __init__(self, parameters: Any, rate: float) -> None:
        super().__init__(parameters, {"rate": rate, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["rate"] * parameter.grad.sign()


def test_an_optimizer_class_of_the_user_is_recorded_by_its_plain_arguments():
    model = tiny_model()
    train(Sign(model.parameters(), 0.01), model=model, max_steps=3)
    recorded = yaml.safe_load(Path("run/recipe.yaml").read_text())["train"]["optimizer"]
    assert recorded == {"name": f"{__name__}:Sign", "rate": 0.01, "betas": [0.9, 0.99]}
    assert train(lambda model: Sign(model.parameters(), 0.01), resume=True).run.state.step == 18
    assert json.loads(Path("run/summary.json").read_text())["steps"] == 18


# -- what cannot work --------------------------------------------------------------------------------------------------


def of_no_model() -> Optimizer:
    return AdamW(tiny_model().parameters())


def returns_a_list(model: nn.Module) -> Any:
    return [model]


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "a key beside it": (
        lambda: {"optimizer": momentum, "lr": 0.1},
        "option-without-effect lr=0.1",
    ),
    "no optimizer": (
        lambda: {"optimizer": 3},
        "wrong-type optimizer: int",
    ),
    "another model": (lambda: {"optimizer": of_no_model()}, "other-optimizer optimizer:"),
    "a function of something else": (lambda: {"optimizer": returns_a_list}, "wrong-result optimizer: list"),
    "a scheduler alone": (
        lambda: {"optimizer": None, "scheduler": StepLR(of_no_model(), 5)},
        "other-optimizer scheduler: optimizer=",
    ),
    "a scheduler beside a function": (
        lambda: {"optimizer": momentum, "scheduler": StepLR(of_no_model(), 5)},
        "other-optimizer scheduler:",
    ),
    "a scheduler class": (lambda: {"optimizer": momentum, "scheduler": StepLR}, "wrong-type scheduler: StepLR'>"),
    "a plateau": (
        lambda: {"optimizer": momentum, "scheduler": ReduceLROnPlateau},
        "wrong-type scheduler: ReduceLROnPlateau'>",
    ),
    "a plateau by function": (
        lambda: {"optimizer": momentum, "scheduler": lambda optimizer: ReduceLROnPlateau(optimizer)},
        "unsupported-schedule scheduler: ReduceLROnPlateau",
    ),
    "two schedulers": (
        lambda: {"optimizer": momentum, "scheduler": one_cycle, "plugins": ["lr-scheduler"]},
        "hook-implemented-twice 'lr-scheduler' 'trainer' build_scheduler",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_arguments_are_refused_before_writing(case, tmp_path):
    make, expected = REFUSED[case]
    with expect_problem(expected, UsageError):
        train(**make())
    assert not list(tmp_path.iterdir())


def test_an_object_is_refused_when_plugins_add_parameters_and_a_function_is_not():
    pytest.importorskip("peft")
    plugins = [{"lora": {"r": 2, "target_modules": ["0"]}}]
    model = tiny_model()
    with expect_problem("other-optimizer before_prepare", UsageError):
        train(momentum(model), model=model, plugins=plugins)
    assert train(momentum, plugins=plugins).run.state.step == 18


def test_an_argument_that_a_plugin_sets_is_mentioned(caplog):
    train(momentum, plugins=["fused-optimizer"], max_steps=1)
    assert_problem(caplog, "option-without-effect optimizer fused=True")


def with_strategy(strategy: Any, as_object: bool) -> Any:
    """On this process of two: the weights, or the message of the error."""
    model = tiny_model(dropout=0.0)
    optimizer = momentum(model) if as_object else momentum
    try:
        trainer = train(optimizer, one_cycle if not as_object else one_cycle(optimizer), model, plugins=[strategy])  # type: ignore[arg-type]
    except UsageError as error:
        return str(error)
    return {name: value.tolist() for name, value in trainer.run.full_state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "as_object"), [("ddp", True), ("fsdp", False), ({"deepspeed": {"stage": 2}}, True)]
)
def test_several_processes_train_the_same_with_what_their_strategy_takes(
    strategy, as_object, processes: Callable[..., list[ProcessResult]]
):
    if isinstance(strategy, dict):
        pytest.importorskip("deepspeed")
    first, _ = (process.result for process in processes(2, with_strategy, strategy, as_object))
    model = tiny_model(dropout=0.0)
    expected = train(momentum, one_cycle, model, output="alone").task.model.state_dict()
    assert not isinstance(first, str), first
    assert all(torch.allclose(torch.tensor(first[name]), expected[name], atol=1e-5) for name in expected)


@pytest.mark.slow
def test_fsdp_refuses_an_object_that_holds_whole_parameters(processes: Callable[..., list[ProcessResult]]):
    for process in processes(2, with_strategy, "fsdp", True):
        assert "they replaced 4 of the parameters that it holds (in before_prepare: fsdp" in process.result
        assert "Pass a function instead, which is called with the changed model" in process.result


class Holds(nn.Module):
    """A model that holds its loss."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.layers = tiny_model()
        self.loss = loss

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.layers(inputs)


class Centers(nn.Module):
    """A loss with a parameter for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.eye(3))

    def forward(self, predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (predictions - self.centers[targets]).square().mean()


class Flattens(Strategy):
    """Steps one flat tensor."""

    name = "flattens"

    def prepare(self, run: Any, model: Any, optimizer: Any) -> Any:
        return model, Listed(optimizer, stepped_parameters(optimizer))


@pytest.mark.parametrize("holder", ["nothing", "model", "optimizer", "flat optimizer", "frozen"])
def test_parameters_of_a_loss_are_a_warning_unless_they_train_or_are_frozen(caplog, holder):
    loss = Centers()
    model = Holds(loss) if holder == "model" else tiny_model()
    optimizer = None
    plugins = QUIET
    if holder == "flat optimizer":
        plugins = [*QUIET, Flattens()]
    if holder in ("optimizer", "flat optimizer"):
        optimizer = SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    elif holder == "frozen":
        loss.requires_grad_(False)
    trainer = Trainer(
        model,
        tiny_data(16),
        batch_size=8,
        loss=loss,
        optimizer=optimizer,
        plugins=plugins,
        max_steps=2,
        save_every=None,
    )
    trainer.fit()
    assert torch.equal(loss.centers, torch.eye(3)) is (holder in ("nothing", "frozen"))
    if holder == "nothing":
        assert_problem(caplog, "parameters-left-out loss Centers centers")
    else:
        assert "has parameters, such as" not in caplog.text
