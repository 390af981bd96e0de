"""Computes linear layers in 8 bits on a CPU, in `fastloop predict` and `fastloop evaluate`.

    plugins:
      - text-classification
      - amp: {dtype: bf16}
      - int8-linears: {largest_change: 0.01}

Each output of a layer has a scale for its weights. Each token has a scale and a zero point for its activations, which
the kernel finds while it packs them. The kernel computes layers of 64, 128, ... outputs and 16, 32, ... inputs. The
layer that scores the classes, norms, attention and embeddings stay as they are. Training computes without 8 bits.

The first 64 rows are also computed without 8 bits. The log shows how much their probabilities differ: the largest
difference, and the mean. A difference above ``largest_change`` ends the command with an error. `auto` does not select
the plugin: list it with the change that you accept.

The comparison takes time. `predict` of 500 reviews took 0.83 times as long as without the plugin, and 1.16 times as
long with ``rows: 256``. For a short file, lower ``rows``.

It needs a processor with AVX512-VNNI and AVX512-BF16, and a C compiler. Otherwise the plugin logs the reason and
changes nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fastloop import Output, Plugin, PluginError, Problem, hookimpl, option

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastloop import Run
    from torch import nn

    from fastloop_cpu._int8_changes import Changes, Values
    from fastloop_cpu._int8_linears import Switch

Columns = Mapping[str, Sequence[Any]] | None
"""The result of the hook ``predict``."""
WRITES_TEXTS = "it writes texts, whose probabilities cannot be compared."


class Int8Linears(Plugin):
    """Computes linear layers in 8 bits outside of training, with a scale for each token, and shows how much
    probabilities change."""

    name = "int8-linears"
    numerics = "reduced-precision"
    runs_after = ("lora", "cpu-layers")
    runs_before = ("slot:strategy",)
    conflicts = {
        "causal-lm": WRITES_TEXTS,
        "compile": "the kernel would break its graph.",
        "seq2seq": WRITES_TEXTS,
    }
    for_inference = True

    largest_change: float | None = option(
        "The largest change of a probability that is accepted; null: any.", default=None, gt=0
    )
    rows: int = option("Rows that are also computed without 8 bits.", default=64, ge=1)

    switch: Switch | None = None
    """Turns 8 bits on and off in the model's layers. None: no layer computes in 8 bits."""
    changes: Changes
    """The changes in the rows that were computed in both ways."""
    is_comparing = False
    is_shown = False

    @hookimpl
    def before_prepare(self, run: Run, model: nn.Module) -> None:
        if run.recipe.inference is None:
            self.log.info("training computes without 8 bits; `fastloop predict` and `fastloop evaluate` use them")
            return
        from fastloop_cpu._int8_changes import Changes
        from fastloop_cpu._int8_linears import unavailable, use

        reason = unavailable() if run.device.type == "cpu" else f"this run is on {run.device.type}"
        if reason is None:
            self.changes = Changes()
            self.switch = use(model)
            if self.switch is None:
                reason = f"{type(model).__name__} has no linear layer that the kernel computes"
        if reason is not None:
            self.log.warning(Problem(f"{reason}: the layers stay as they are.", code="no-effect"))

    @hookimpl(wrapper=True)
    def compute_loss(self, run: Run, model: nn.Module, batch: Any) -> Generator[None, Output, Output]:
        if not self._compares():
            return (yield)
        from fastloop_cpu._int8_changes import values_of_output

        with self._comparing():
            with self._without_8_bits():
                exact = run.hooks.compute_loss(run=run, model=model, batch=batch)
            output = yield
        self._compare(run, values_of_output(exact), values_of_output(output))
        return output

    @hookimpl(wrapper=True)
    def predict(self, run: Run, batch: Any) -> Generator[None, Columns, Columns]:
        if not self._compares():
            return (yield)
        from fastloop_cpu._int8_changes import values_of_columns

        with self._comparing():
            with self._without_8_bits():
                exact = run.hooks.predict(run=run, batch=batch)
            columns = yield
        if exact is not None and columns is not None:  # None: the task predicts nothing, which is an error elsewhere
            self._compare(run, values_of_columns(exact), values_of_columns(columns))
        return columns

    def _compares(self) -> bool:
        """Whether the next batch is also computed without 8 bits. Trial steps with gradients are not."""
        import torch

        if self.switch is None or self.is_comparing or torch.is_grad_enabled():
            return False
        return self.changes.rows < self.rows

    @contextmanager
    def _comparing(self) -> Iterator[None]:
        """Inside the block, hooks that call each other compare nothing."""
        self.is_comparing = True
        try:
            yield
        finally:
            self.is_comparing = False

    @contextmanager
    def _without_8_bits(self) -> Iterator[None]:
        """Inside the block, the layers compute as without the plugin."""
        assert self.switch is not None
        self.switch.is_on = False
        try:
            yield
        finally:
            self.switch.is_on = True

    def _compare(self, run: Run, exact: Values, quantized: Values) -> None:
        """Add the changes of a batch. Every process must call it.

        Raises:
            PluginError: A probability changes by more than ``largest_change``.
        """
        for part in run.processes.all_gather_object(exact.changes_to(quantized)):
            self.changes.add(part)
        if self.largest_change is not None and not self.changes.largest <= self.largest_change:  # also if it is NaN
            self.is_shown = True
            raise PluginError(
                f"{self.changes.kind} change too much in 8 bits.",
                code="inexact-quantization",
                place=f"{run.recipe.place(self.name)}.largest_change",
                found=f"a change of {self.changes.largest:.2g} in the first {self.changes.rows} rows",
                expected=f"at most {self.largest_change:g}",
                remedy="Add --without int8-linears, or accept a larger change.",
            )
        if self.changes.rows >= self.rows:
            self._show()

    def _show(self) -> None:
        """Log the changes, or that there are none because no layer was called."""
        assert self.switch is not None
        self.is_shown = True
        if not self.switch.calls:
            self.log.warning(
                Problem("the model calls none of its linear layers: nothing is computed in 8 bits.", code="no-effect")
            )
            return
        self.log.info("%s", self.changes)

    @hookimpl
    def teardown(self) -> None:
        if self.switch is not None and self.changes.rows and not self.is_shown:
            self._show()
