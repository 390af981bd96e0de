"""The plugin ``compile``.

Most tests use cheap backends of torch, because they test the plugin's own work around a backend.

Modules:
    core/fastloop/runtime/compiled_modules.py
    plugins/fastloop_plugins/kernels/_compiling.py
    plugins/fastloop_plugins/kernels/compile.py
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys

import pytest
import torch
from long_form import long_form_only
from safetensors.torch import load_file
from torch import nn

from fastloop import Plugin, PluginError, Trainer, hookimpl
from fastloop.testing import assert_problem, expect_problem, find_problems, tiny_data, tiny_model
from fastloop_plugins.kernels.compile import Compile

pytestmark = [  # torch's own, inside inductor
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    # on CUDA
    pytest.mark.filterwarnings(
        "ignore:TensorFloat32 tensor cores for float32 matrix multiplication available:UserWarning"
    ),
]


@pytest.fixture(autouse=True)
def _dynamo_as_it_was(monkeypatch, tmp_path):
    """Every test with its own cache folder and an empty compiler state."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    yield
    torch._dynamo.reset()


def eager(**options):
    return {"compile": {"backend": "aot_eager", **options}}


@torch._dynamo.register_backend(name="fastloop_test_broken")
def broken(graph, inputs):
    raise ValueError("this backend knows no such operation")


@pytest.mark.slow
def test_with_inductor_losses_stay_in_the_band_of_reassociated_numbers(tiny_run, tmp_path):
    data = tiny_data(64)  # one shape: two graphs, for training and for evaluation
    plain = tiny_run(model=tiny_model(dropout=0.0), data=data)
    result = tiny_run(["compile"], model=tiny_model(dropout=0.0), data=data)
    assert result.losses == pytest.approx(plain.losses, rel=1e-5)
    assert result.summary["compile_seconds"] > 0
    assert result.summary["compile"]["failure"] is None
    assert 2 <= result.summary["compile"]["graphs"] <= 6
    assert any((tmp_path / "cache" / "fastloop" / "compiled").rglob("*.so")), "compiled code is kept for later runs"


@pytest.mark.slow
def test_weights_keep_their_names_in_checkpoints_and_export(tiny_run):
    result = tiny_run([eager()], epochs=1)
    names = set(tiny_model().state_dict())
    folder = result.trainer.run.folder
    assert set(load_file(folder / "model" / "model.safetensors")) == names
    assert set(load_file(folder / "checkpoints" / "step-00000009" / "model.safetensors")) == names
    assert result.summary["compile"]["graphs"] > 0


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)


def test_regional_compiles_repeated_blocks_and_computes_the_same(tiny_run):
    torch.manual_seed(3)
    model = Repeated()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    regional = tiny_run([eager(regional=True)], model=model)
    again = Repeated()
    again.load_state_dict(state)
    assert regional.losses == pytest.approx(tiny_run(model=again).losses, rel=1e-5)
    assert regional.summary["compile"]["graphs"] > 0


@pytest.mark.slow
def test_regional_without_repeated_blocks_warns(tiny_run, caplog):
    with caplog.at_level(logging.WARNING, "fastloop"):
        tiny_run([eager(regional=True)], epochs=1)
    assert_problem(caplog, "no-blocks compile: regional: Sequential")


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, inputs):
        torch._dynamo.graph_break()
        return self.layer(inputs)


@pytest.mark.slow
def test_graph_breaks_are_counted_with_their_reasons(tiny_run):
    report = tiny_run([eager()], model=Breaks(), epochs=1).summary["compile"]
    assert report["graph_breaks"] > 0
    assert any("graph_break" in reason or "graph break" in reason for reason in report["graph_break_reasons"])


class Reads(nn.Module):
    """Prints, and reads a number off a tensor, within a loop: a cut there leaves all of it uncompiled."""

    def __init__(self, reads=True):
        super().__init__()
        self.layers, self.reads = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 3)]), reads

    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs)
            print(end="")
            if self.reads:
                inputs = inputs / max(1.0, inputs.detach().abs().max().item())
        return inputs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reads", "options", "breaks"), [(False, {}, False), (True, {}, True), (True, {"capture_scalars": True}, False)]
)
def test_printing_cuts_no_graph_and_reading_a_number_need_not(tiny_run, reads, options, breaks):
    torch.manual_seed(1)
    plain = tiny_run(model=Reads(reads), epochs=1)
    torch.manual_seed(1)
    result = tiny_run([eager(**options)], model=Reads(reads), epochs=1)
    assert result.losses == pytest.approx(plain.losses, rel=1e-5)
    assert bool(result.summary["compile"]["graph_breaks"]) is breaks
    assert result.summary["compile"]["failure"] is None


@pytest.mark.parametrize(
    ("options", "model", "reason"),
    [
        ({"backend": "fastloop_test_broken"}, tiny_model, "this backend knows no such operation"),
        ({"fullgraph": True}, Breaks, "graph_break"),
    ],
    ids=["broken backend", "fullgraph"],
)
def test_a_model_that_cannot_be_compiled_runs_eagerly_after_one_warning(tiny_run, caplog, options, model, reason):
    torch.manual_seed(1)
    plain = tiny_run(model=model())
    torch.manual_seed(1)
    with caplog.at_level(logging.WARNING, "fastloop"):
        result = tiny_run([eager(**options)], model=model())
    assert result.losses == plain.losses
    warnings = [str(problem) for problem in find_problems(caplog, "compilation-failed")]
    assert len(warnings) == 1
    assert reason in warnings[0]
    assert reason in result.summary["compile"]["failure"]


def test_on_failure_error_refuses_it(tiny_run):
    with expect_problem("compilation-failed 'compile'", PluginError):
        tiny_run([eager(backend="fastloop_test_broken", on_failure="error")])


def test_an_error_of_the_model_itself_is_not_taken_for_one_of_the_compiler(tiny_run):
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(7, 3)

        def forward(self, inputs):
            return self.layer(inputs)

    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|size mismatch|mat1 and mat2"):
        tiny_run([eager()], model=Wrong())


def test_an_unknown_backend_is_refused_with_those_there_are(tiny_run):
    with expect_problem("unknown-choice plugins.compile.backend 'inducter'", PluginError):
        tiny_run([eager(backend="inducter")])


class Pooled(nn.Module):
    """Takes samples of any number of features."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, inputs):
        return self.head(torch.tanh(self.embed(inputs[..., None])).mean(1))


class Varying(torch.utils.data.Dataset):
    """Samples of 1, 2, ... features."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index):
        return torch.full((index + 1,), 0.1), index % 3


@pytest.mark.slow
def test_lengths_that_vary_do_not_recompile_for_ever(tiny_run):
    """Batches of every width from 1 to 40 features long: a handful of graphs, not forty."""
    report = tiny_run([eager()], model=Pooled(), data=Varying(40), batch_size=1, epochs=1).summary["compile"]
    assert 1 < report["graphs"] <= 6
    assert report["recompilations"] <= 4
    assert report["failure"] is None


@pytest.mark.slow
@pytest.mark.parametrize(("shapes", "is_reported"), [(1, False), (2, True), (5, True)])
def test_a_function_that_has_all_of_its_graphs_is_one_warning(tiny_run, caplog, shapes, is_reported):
    plugin = {"compile": {"backend": "eager", "dynamic": False, "recompile_limit": 3}}
    tiny_run([plugin], model=Pooled(), data=Varying(shapes), batch_size=1, epochs=1)  # an evaluation has a graph, too
    reported = "many-recompilations compile: 2 3 plugins.compile.dynamic=true plugins.compile.recompile_limit"
    assert len(find_problems(caplog, reported)) == is_reported


@pytest.mark.slow
def test_trials_of_the_first_step_compile_nothing(tiny_run):
    """Micro-batches are cut in halves, which compares losses. Another size of batches would make training compile for
    any size."""
    data = tiny_data(64)
    whole = tiny_run([eager()], data=data, batch_size=16, eval_batch_size=16, epochs=1).summary["compile"]
    in_two = tiny_run([eager()], data=data, batch_size=32, micro_batch_size=16, eval_batch_size=16, epochs=1)
    assert in_two.summary["compile"]["graphs"] == whole["graphs"] > 0
    assert in_two.summary["compile"]["recompile_reasons"] == whole["recompile_reasons"]


@pytest.mark.slow
def test_it_asks_tasks_to_pad_to_a_multiple(tiny_run):
    assert tiny_run([eager()], epochs=1).trainer.run.settings.pad_to_multiple_of == 64
    assert tiny_run([eager()], epochs=1, pad_to_multiple_of=8).trainer.run.settings.pad_to_multiple_of == 8


class RecordsManyGraphs(Plugin):
    """Reports to torch what a recording of a CUDA graph reports, 70 times in the second epoch."""

    name = "records-many-graphs"

    @hookimpl
    def after_step(self, run):
        from torch._dynamo.utils import dynamo_timed, get_runtime_metrics_context

        for _ in range(70 if run.state.step == 7 else 0):
            with dynamo_timed("CUDAGraphNode.record", dynamo_compile_column_us="runtime_cudagraphify_time_us"):
                pass
            get_runtime_metrics_context().finish()


@pytest.mark.slow
def test_recompilations_are_counted_however_many_cuda_graphs_are_recorded_later(tiny_run):
    """67 samples in batches of 16 and of 3: the last step compiles again, and so does the evaluation."""
    few = tiny_run([eager(backend="eager")], epochs=2, batch_size=16).summary["compile"]
    many = tiny_run([eager(backend="eager"), RecordsManyGraphs()], epochs=2, batch_size=16).summary["compile"]
    assert few["graphs"] == few["recompilations"] + 1 > 2
    assert many["recompilations"] == few["recompilations"]
    assert many["recompile_reasons"] == few["recompile_reasons"]


# -- CUDA graphs -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_unavailable_cuda_graphs_are_logged(tiny_run, caplog):
    report = tiny_run([eager(mode="reduce-overhead")], epochs=1).summary["compile"]
    assert (
        "compile: mode reduce-overhead: CUDA graphs need the inductor backend and a CUDA device: none is recorded"
        in caplog.text
    )
    assert report["cuda_graphs_skipped"] is None


class AsIfRecorded(Compile):
    """Does on a CPU the same work as around CUDA graphs."""

    @hookimpl
    def check_run(self):
        self.records = True


@pytest.mark.slow
@pytest.mark.parametrize("micro", [8, 2], ids=["whole", "micro-steps"])
def test_cuda_graph_handling_changes_no_number(tiny_run, micro):
    arguments = {"micro_batch_size": micro, "data": tiny_data(64), "epochs": 1}
    plain, ours = (tiny_run([cls(backend="aot_eager")], **arguments) for cls in (Compile, AsIfRecorded))
    assert ours.losses == plain.losses
    assert ours.recorder.metrics == plain.recorder.metrics
    assert all(torch.equal(ours.weights[name], plain.weights[name]) for name in plain.weights)


class HasLoss(nn.Module):
    """Computes its loss itself, so that the loss too lies in a graph's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model(dropout=0.0)

    def forward(self, inputs, labels):
        logits = self.inner(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Named(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.data = tiny_data(64)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index):
        return dict(zip(("inputs", "labels"), self.data[index], strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("micro", [8, 4, 2], ids=["whole", "2 micro-steps", "4 micro-steps"])
def test_cuda_graphs_train_the_same_and_what_they_return_can_be_kept(tmp_path, micro):
    from fastloop.testing import Recorder

    losses = {}
    for mode in (None, "reduce-overhead"):
        recorder = Recorder()
        plugins = [recorder] if mode is None else [{"compile": {"mode": mode}}, recorder]
        common = {"epochs": 2, "lr": 1e-2, "batch_size": 8, "micro_batch_size": micro, "output": tmp_path / str(mode)}
        summary = Trainer(HasLoss(), Named(), Named(), plugins=plugins, **common).fit()
        losses[mode] = recorder.losses, [metrics["loss"] for _, metrics in recorder.metrics]
    assert losses["reduce-overhead"][0] == pytest.approx(losses[None][0], rel=1e-4)
    assert losses["reduce-overhead"][1] == pytest.approx(losses[None][1], rel=1e-4)
    assert summary["compile"]["failure"] is None
    assert summary["compile"]["cuda_graphs_skipped"] == 0


CACHED = """
import json, sys, torch
from torch import nn
from fastloop import Trainer

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))
data = [(torch.randn(8), torch.tensor(i % 3)) for i in range(16)]
quiet = [{"log": False}, {"progress": False}]
trainer = Trainer(net, data, loss=nn.functional.cross_entropy, plugins=["compile", *quiet], epochs=1, batch_size=8,
                  output="run", device="cpu")
print(json.dumps(trainer.fit()["compile"]))
"""


@pytest.mark.slow
@long_form_only
def test_a_copy_of_the_cache_lets_another_machine_start_warm(tmp_path, monkeypatch):
    """In fresh processes: torch reads the variable when it is imported."""
    monkeypatch.chdir(tmp_path)

    def train(cache):
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / cache), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", CACHED], env=environment, capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    cold = train("first")
    assert (cold["cache_hits"], cold["cache_misses"] > 0) == (0, True)
    shutil.copytree("first", "second")
    shutil.rmtree("first")
    shutil.rmtree("run")
    warm = train("second")
    assert (warm["cache_hits"], warm["cache_misses"]) == (cold["cache_misses"], 0)
