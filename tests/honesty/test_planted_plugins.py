"""The conformance suite finds each planted error of a plugin, and passes its correct twin.

Modules:
    core/fastloop/testing/conformance.py
    core/fastloop/testing/differences.py
    core/fastloop/testing/promises.py
"""

from __future__ import annotations

import os
import textwrap
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

import forked
import pytest
from long_form import LONG

pytestmark = pytest.mark.slow


class Planted(NamedTuple):
    """A plugin with an error.

    Attributes:
        check: The check that finds it.
        words: Words of the failure message.
        code: Members of the plugin's class.
        fixes: Texts of ``code`` -> their text in the correct twin.
        suite: Members of the test class.
        twin_suite: Those of the twin's.
    """

    check: str
    words: str
    code: str
    fixes: dict[str, str]
    suite: str = ""
    twin_suite: str = ""


COUNTS = """
numerics = "changes-training"

def __init__(self, **options):
    super().__init__(**options)
    self.count = 0

def halve(self, run):
    self.count += 1
    if self.count == {number}:
        for group in run.optimizer.param_groups:
            group["lr"] *= 0.5
# state

@hookimpl
def {hook}(self, run):
    self.halve(run)
"""
SAVES = """
@hookimpl
def save_state(self):
    return {"count": self.count}
"""
LOADS = """
@hookimpl
def load_state(self, state):
    self.count = state["count"]
"""
RESETS = """
@hookimpl
def save_state(self):
    state = {"count": self.count}
    self.count = 0  # saved
    return state
"""
STATE = {"# state": SAVES + LOADS}
RESUMED = "the same result from a run that was interrupted after step 9 and resumed"
EVERY_STEP = """
numerics = "bitwise"

@hookimpl
def before_step(self, run, batches):
    {body}
"""
GRADIENTS = """
numerics = "bitwise"

@hookimpl
def before_optimizer_step(self, run):
    for parameter in run.model.parameters():
        {body}
"""
EVALUATES = """
numerics = "bitwise"

@hookimpl(wrapper=True)
def evaluate(self, run):
    metrics = yield
    {body}
    return metrics
"""
BITS = "numerics 'bitwise': the losses that there are without it, to the bit"
TRAINING = "numerics 'bitwise': the training that there is without it, to the bit"
SAME = "the same weights, learning rates and metrics on all processes"

PLANTED = {
    "counts-steps": Planted("saved_and_loaded", RESUMED, COUNTS.format(number=7, hook="after_step"), STATE),
    "counts-many-steps": Planted("saved_and_loaded", RESUMED, COUNTS.format(number=17, hook="after_step"), STATE),
    "counts-evaluations": Planted("saved_and_loaded", RESUMED, COUNTS.format(number=3, hook="after_evaluate"), STATE),
    "counts-more-evaluations": Planted(
        "saved_and_loaded", RESUMED, COUNTS.format(number=6, hook="after_evaluate"), STATE
    ),
    "counts-epochs": Planted("saved_and_loaded", RESUMED, COUNTS.format(number=2, hook="after_epoch"), STATE),
    "counts-until-killed": Planted(
        "killed", "was killed in step 14", COUNTS.format(number=3, hook="after_evaluate"), STATE
    ),
    "saves-and-does-not-load": Planted(
        "saved_and_loaded",
        "right after load_state",
        COUNTS.format(number=40, hook="after_step").replace("# state", SAVES),
        {SAVES: SAVES + LOADS},
    ),
    "loads-another-name": Planted(
        "saved_and_loaded",
        RESUMED,
        COUNTS.format(number=7, hook="after_step").replace(
            "# state", SAVES + LOADS.replace('state["count"]', 'state.get("steps", 0)')
        ),
        {'state.get("steps", 0)': 'state["count"]'},
    ),
    "resets-when-it-saves": Planted(
        "killed",
        "was killed in step 14",
        COUNTS.format(number=6, hook="after_step").replace(
            "# state", SAVES.replace("    return", "    self.halved = self.count = 0\n    return") + LOADS
        ),
        {"    self.halved = self.count = 0\n": ""},
    ),
    "needs-the-first-epoch": Planted(
        "saved_and_loaded",
        "failed in after_epoch: AttributeError",
        """
        numerics = "bitwise"

        @hookimpl
        def before_epoch(self, run):
            if run.state.epoch_samples == 0:
                self.began = run.state.step

        @hookimpl
        def after_epoch(self, run):
            run.log("steps", run.state.step - self.began)
        """,
        {"if run.state.epoch_samples == 0:": "if True:"},
    ),
    "draws-from-torch": Planted(
        "numerics",
        BITS,
        EVERY_STEP.format(body="torch.rand(1)"),
        {"torch.rand(1)": "torch.rand(1, generator=torch.Generator())"},
    ),
    "draws-from-numpy": Planted(
        "numerics",
        "another state of the random numbers of numpy",
        EVERY_STEP.format(body="np.random.rand()"),
        {"np.random.rand()": "np.random.default_rng(0).random()"},
    ),
    "changes-the-loss": Planted(
        "numerics",
        BITS,
        """
        numerics = "bitwise"

        @hookimpl(wrapper=True)
        def compute_loss(self):
            output = yield
            output.loss = output.loss * (1 + 1e-6)
            return output
        """,
        {"output.loss * (1 + 1e-6)": "output.loss * 1"},
    ),
    "changes-weights-after-a-step": Planted(
        "numerics",
        BITS,
        """
        numerics = "bitwise"

        @hookimpl
        def after_step(self, run):
            with torch.no_grad():
                next(run.model.parameters()).mul_(1 - 1e-6)
        """,
        {".mul_(1 - 1e-6)": ".mul(1 - 1e-6)"},
    ),
    "changes-weights-at-the-end": Planted(
        "numerics",
        "other final weights",
        """
        numerics = "bitwise"

        @hookimpl
        def after_fit(self, run):
            with torch.no_grad():
                next(run.model.parameters()).mul_(1 - 1e-6)
        """,
        {".mul_(1 - 1e-6)": ".mul(1 - 1e-6)"},
    ),
    "changes-the-order": Planted(
        "numerics",
        BITS,
        """
        numerics = "bitwise"

        @hookimpl
        def configure(self):
            return {"arrange": lambda dataset, ids, size, generator: ids[1::-1] + ids[2:]}
        """,
        {"ids[1::-1] + ids[2:]": "ids"},
    ),
    "keeps-batches": Planted(
        "off",
        "to keep no batch after its step",
        """
        numerics = "bitwise"

        @hookimpl
        def before_fit(self):
            self.batches = []

        @hookimpl
        def before_step(self, batches):
            self.batches.append(batches[0].inputs)
        """,
        {".append(batches[0].inputs)": "[:] = [batches[0].inputs]"},
    ),
    "changes-inputs": Planted(
        "numerics",
        BITS,
        EVERY_STEP.format(body="batches[0].inputs[0].mul_(1 + 1e-6)"),
        {".mul_(1 + 1e-6)": ".mul(1 + 1e-6)"},
    ),
    "passes-in-train-mode": Planted(
        "batch_norm",
        "numerics 'bitwise': as many passes in train mode as there are without it. Found: norm.num_batches_tracked is",
        EVERY_STEP.format(
            body="with torch.no_grad(), preserve_random_states(), torch.random.fork_rng():\n        "
            "run.model(batches[0].inputs[0])"
        ),
        {"torch.random.fork_rng()": "evaluating(run.model)"},
    ),
    "passes-in-train-mode-reassociated": Planted(
        "batch_norm",
        "numerics 'reassociated': as many passes in train mode as there are without it. Found: "
        "norm.num_batches_tracked is",
        EVERY_STEP.replace("bitwise", "reassociated").format(
            body="with torch.no_grad(), preserve_random_states(), torch.random.fork_rng():\n        "
            "run.model(batches[0].inputs[0])"
        ),
        {"torch.random.fork_rng()": "evaluating(run.model)"},
    ),
    "acts-on-one-rank": Planted(
        "processes[ddp]",
        f"{SAME} on two processes with 'ddp'. Found: other weights",
        GRADIENTS.replace("bitwise", "changes-training").format(
            body="parameter.grad.mul_(0.5 if run.is_main else 1.0)"
        ),
        {"0.5 if run.is_main else 1.0": "0.5"},
    ),
    "acts-on-one-process": Planted(
        "processes[ddp]",
        "on two processes with 'ddp' that the plugin changes, as on one process. Found: the losses and weights",
        GRADIENTS.replace("bitwise", "changes-training").format(
            body="parameter.grad.mul_(0.5 if run.world_size == 1 else 1.0)"
        ),
        {"0.5 if run.world_size == 1 else 1.0": "0.5"},
    ),
    "evaluates-on-one-rank": Planted(
        "processes[ddp]",
        f"{SAME} on two processes with 'ddp'. Found: other metrics",
        EVALUATES.format(body='metrics["accuracy"] += run.is_main * 1e-6'),
        {"run.is_main * 1e-6": "0"},
    ),
    "removes-a-gradient": Planted(
        "numerics",
        BITS,
        GRADIENTS.format(body="parameter.grad = None if run.state.step == 12 else parameter.grad"),
        {"None if run.state.step == 12 else parameter.grad": "parameter.grad"},
    ),
    "overwrites-gradients": Planted(
        "numerics", BITS, GRADIENTS.format(body="parameter.grad.clamp_(-1e-3, 1e-3)"), {"clamp_": "clamp"}
    ),
    "leaves-eval-mode": Planted(
        "numerics",
        "after_evaluate left the model in eval mode",
        """
        numerics = "bitwise"

        @hookimpl
        def after_evaluate(self, run):
            run.model.eval()
        """,
        {"run.model.eval()": "run.model.train()"},
    ),
    "changes-a-metric": Planted(
        "numerics",
        f"{TRAINING}. Found: other metrics of evaluations",
        EVALUATES.format(body='metrics["accuracy"] = round(metrics["accuracy"], 1)'),
        {"round(": "max(", ", 1)": ", 0.0)"},
    ),
    "evaluates-again": Planted(
        "numerics",
        f"{TRAINING}. Found: 11 evaluations instead of 10",
        """
        numerics = "bitwise"

        @hookimpl
        def after_fit(self, run):
            loop.evaluate(run, "validation")
        """,
        {'loop.evaluate(run, "validation")': "pass"},
    ),
    "leaks-a-hook": Planted(
        "off",
        "to leave no hook of a run on the model. Found: forward hook of first",
        """
        numerics = "bitwise"

        @hookimpl
        def before_fit(self, run):
            self.handle = run.unwrap_model().first.register_forward_hook(lambda *arguments: None)

        @hookimpl
        def teardown(self):
            pass
        """,
        {"pass": "self.handle.remove()"},
    ),
    "leaks-a-setting": Planted(
        "off",
        "to leave nothing behind when it is off. Found: torch.are_deterministic_algorithms_enabled(): False before, "
        "True after",
        """
        numerics = "bitwise"

        @hookimpl
        def after_fit(self):
            torch.use_deterministic_algorithms(True)

        @hookimpl
        def teardown(self):
            pass
        """,
        {"pass": "torch.use_deterministic_algorithms(False)"},
    ),
    "adds-an-unused-layer": Planted(
        "processes[ddp]",
        "find_unused_parameters",
        """
        numerics = "changes-training"

        @hookimpl
        def before_prepare(self, model):
            model.more = torch.nn.Linear(2, 2)
        """,
        {},
        twin_suite='strategy_options = {"ddp": {"find_unused_parameters": True}}',
    ),
    "refuses-without-a-declaration": Planted(
        "processes[ddp]",
        "failed on process 0 of two with 'ddp': PluginError: only one process",
        """
        numerics = "bitwise"

        @hookimpl
        def check_run(self, run):
            if run.world_size > 1:
                raise PluginError("only one process")
        """,
        {},
        twin_suite='refuses = ("ddp",)',
    ),
    "leaves-steps-out": Planted(
        "saved_and_loaded",
        "more than 9 steps of training. Found: a run that ends after 4 steps",
        """
        numerics = "changes-training"
        steps = 1

        @hookimpl(tryfirst=True)
        def build_sampler(self, run, split):
            if split == "train":
                ids = torch.utils.data.SequentialSampler(range(min(8 * self.steps, 35)))
                return torch.utils.data.BatchSampler(ids, 8, False)
        """,
        {"steps = 1": "steps = 5"},
    ),
}
STOPS = """
numerics = "{numerics}"

@hookimpl
def after_step(self, run):
    if run.state.step == 4:
        run.state.request_stop("enough")
"""
CHANGES_THE_LOSS = """
@hookimpl(wrapper=True)
def compute_loss(self):
    output = yield
    output.loss = output.loss * (1 + 1e-6)
    return output
"""
EARLY = {
    "stops-early": STOPS.format(numerics="bitwise"),
    "stops-early-and-trains": STOPS.format(numerics="changes-training") + CHANGES_THE_LOSS,
    "stops-early-and-lies": STOPS.format(numerics="bitwise") + CHANGES_THE_LOSS,
}
"""Plugins that end the training by design, for all checks. The last one breaks its promise."""
HEAD = '''"""A plugin of a test.

    plugins:
      - {name}
"""

import numpy as np
import torch

from fastloop import Plugin, PluginError, hookimpl, loop
from fastloop.evaluation_results import evaluating
from fastloop.runtime.random_states import preserve_random_states


class Made(Plugin):
    """It is made for a test."""

    name = "{name}"
'''
CHECKS = ("declared", "numerics", "batch_norm", "saved_and_loaded", "killed", "processes[ddp]", "off")
FIRST = {planted.check: name for name, planted in reversed(PLANTED.items())}
"""Check -> the first plugin whose error it finds."""
WHOLE = {FIRST["saved_and_loaded"], FIRST["numerics"], "refuses-without-a-declaration"}
"""The plugins whose twins pass all checks: one that changes the training, one that is bitwise, and one that refuses a
strategy. ``tests/plugins/test_conformance.py`` has the correct plugins of the project. The other twins pass the check
that finds the error."""
TWINS = [name for name in PLANTED if LONG or name in WHOLE or name in FIRST.values()]
"""The plugins whose twins are tested: in the short form, one for each check, beside ``WHOLE``."""


def install(site: Path, name: str, code: str) -> None:
    module = name.replace("-", "_")
    (site / f"{module}.py").write_text(HEAD.format(name=name) + textwrap.indent(textwrap.dedent(code), "    "))
    info = site / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[fastloop.plugins]\n{name} = {module}:Made\n")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, tuple[str, str]]]:
    """Plugin -> check -> outcome and message, of one run of pytest. For a plugin with an error, only the check that
    finds it runs."""
    folder = tmp_path_factory.mktemp("authors")
    (folder / "site").mkdir()
    lines, selected = ["from fastloop.testing import Conformance"], []
    for name, planted in PLANTED.items():
        fixed = planted.code
        for before, after in planted.fixes.items():
            assert before in fixed, (name, before)
            fixed = fixed.replace(before, after)
        suites = [(name, planted.code, planted.suite, [planted.check])]
        if name in TWINS:
            checks = [*CHECKS] if name in WHOLE else [planted.check]
            suites.append((f"{name}-twin", fixed, planted.twin_suite, checks))
        for plugin, code, suite, checks in suites:
            install(folder / "site", plugin, code)
            cls = f"Test_{plugin.replace('-', '_')}"
            lines.append(f"class {cls}(Conformance):\n    plugin = {plugin!r}\n    {suite}")
            selected += [f"test_authors.py::{cls}::test_{check}" for check in checks]
    for name, code in EARLY.items():
        install(folder / "site", name, code)
        cls = f"Test_{name.replace('-', '_')}"
        lines.append(f"class {cls}(Conformance):\n    plugin = {name!r}")
        selected += [f"test_authors.py::{cls}::test_{check}" for check in CHECKS]
    (folder / "test_authors.py").write_text("\n\n".join(lines) + "\n")
    (folder / "conftest.py").write_text('pytest_plugins = ["fastloop.testing"]\n')
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = site\nfilterwarnings = error\n")
    environment = os.environ | {"FASTLOOP_TEST_STRATEGIES": "ddp"}
    done = forked.run(*forked.PYTEST, "--junitxml=report.xml", *selected, cwd=folder, env=environment, timeout=1800)
    assert done.returncode == 1, done.stdout + done.stderr
    found: dict[str, dict[str, tuple[str, str]]] = {"": {"output": ("", done.stdout)}}
    for case in ElementTree.parse(folder / "report.xml").iter("testcase"):
        name = case.get("classname", "").rpartition("Test_")[2].replace("_", "-")
        result = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        words = "" if result is None else " ".join(f"{result.get('message')} {result.text}".split())
        found.setdefault(name, {})[case.get("name", "").removeprefix("test_")] = (
            "passed" if result is None else result.tag,
            words,
        )
    return found


@pytest.mark.parametrize("name", PLANTED)
def test_the_suite_finds_a_planted_error(outcomes, name):
    planted = PLANTED[name]
    outcome, message = outcomes[name][planted.check]
    assert outcome == "failure", (outcome, message)
    assert planted.words in message
    assert f"plugin {name!r}" in message


@pytest.mark.parametrize("name", TWINS)
def test_the_suite_passes_the_correct_twin(outcomes, name):
    found = outcomes[f"{name}-twin"]
    checks = {*CHECKS} if name in WHOLE else {PLANTED[name].check}
    assert found.keys() == checks
    assert {check: result for check, result in found.items() if result[0] not in ("passed", "skipped")} == {}
    skipped = {check for check, (outcome, _) in found.items() if outcome == "skipped"}
    expected = {"batch_norm"} if "changes-training" in PLANTED[name].code else set()
    expected |= {"processes[ddp]"} if name.startswith("refuses") else set()
    assert skipped == expected & checks


@pytest.mark.parametrize("name", EARLY)
def test_the_suite_tells_a_plugin_that_ends_early_from_one_that_breaks_a_promise(outcomes, name):
    found = {check: outcome for check, (outcome, _) in outcomes[name].items()}
    skipped = {check for check, outcome in found.items() if outcome == "skipped"}
    failed = {check for check, outcome in found.items() if outcome == "failure"}
    lies = name.endswith("lies")
    assert failed == ({"numerics", "processes[ddp]"} if lies else set())
    needs_more_steps = {"batch_norm", "saved_and_loaded", "killed"}
    assert skipped == needs_more_steps | ({"numerics"} if name == "stops-early" else set())
    assert "it ends the training after 4 steps (enough)" in outcomes[name]["saved_and_loaded"][1]


def test_skipped_checks_are_listed_with_their_reasons(outcomes):
    _, output = outcomes[""]["output"]
    section = output.partition("conformance: skipped checks, which are no passes")[2]
    assert (
        "refuses-without-a-declaration-twin: processes[ddp]: refused with 'ddp': PluginError: only one process"
        in section
    )
    assert "counts-steps-twin: batch_norm: it is a task, or changes the training" in section
