"""Writes all logged values, metrics and rows for TensorBoard to ``tensorboard/`` in the run folder.

It also writes the recipe, and the status of the run at its end.

    plugins:
      - tensorboard
    train: {log_every: 10}

View them with ``tensorboard --logdir runs``. A run that resumes or rolls back continues the curves, with one
point a step.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from fastloop import Package, Plugin, hookimpl
from fastloop.recipe import secrets

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from fastloop import Run


@dataclass
class StepValues:
    """The newest step with values, and its values by name."""

    step: int = 0
    scalars: dict[str, float] = field(default_factory=dict)


class TensorBoard(Plugin):
    """Writes curves, rows, the recipe and the status of the run for TensorBoard."""

    name = "tensorboard"
    read_only = True
    requirements = (Package("tensorboard", ">=2.18", extra="tensorboard"),)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.writer: SummaryWriter | None = None
        self.newest = StepValues()
        self.is_loaded = False  # whether ``newest`` is that of a checkpoint

    @hookimpl
    def before_fit(self, run: Run) -> None:
        if not run.is_main:
            return
        import yaml
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(run.folder / "tensorboard")
        if run.state.step:
            self.hide_repeated(self.writer, run.state.step)
        self.writer.add_text(
            "recipe", f"```yaml\n{yaml.safe_dump(secrets.hidden(run.recipe.to_dict()), sort_keys=False)}```", 0
        )

    def hide_repeated(self, writer: Any, step: int) -> None:
        """Hide the points after the checkpoint of a step: the run repeats them.

        An evaluation of the step may follow its checkpoint, too. So all points of the step are hidden, and those before
        the checkpoint are written again.
        """
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        first_hidden = step if self.is_loaded else step + 1
        writer.file_writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)), first_hidden)
        if self.newest.step == first_hidden:
            for name, value in self.newest.scalars.items():
                writer.add_scalar(name, value, first_hidden)

    @hookimpl
    def log_scalars(self, scalars: Mapping[str, float], step: int) -> None:
        if self.writer is not None:
            if self.newest.step != step:
                self.newest = StepValues(step)
            self.newest.scalars.update(scalars)
            for name, value in scalars.items():
                self.writer.add_scalar(name, value, step)
            self.writer.flush()

    @hookimpl
    def log_rows(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        if self.writer is not None:
            self.writer.add_text(name, markdown_table(rows), step)
            self.writer.flush()

    @hookimpl
    def save_state(self) -> dict[str, Any]:
        return asdict(self.newest)

    @hookimpl
    def load_state(self, run: Run, state: dict[str, Any]) -> None:
        from fastloop.checkpoint.state_form import check_form

        check_form(state, {"step": 0, "scalars": {}})
        check_form([*state["scalars"].values()], [0.0], "scalars")
        self.newest = StepValues(state["step"], dict(state["scalars"]))
        self.is_loaded = True
        if self.writer is not None:  # `nan-guard` rolls back
            self.hide_repeated(self.writer, run.state.step)

    @hookimpl
    def write_summary(self, run: Run, summary: dict[str, Any]) -> None:
        if self.writer is not None:
            reason = f": {summary['reason']}" if summary["reason"] else ""
            self.writer.add_text("status", secrets.hide(f"{summary['status']}{reason}"), run.state.step)

    @hookimpl
    def teardown(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a table in Markdown: the values of other types than text as JSON."""
    names: dict[str, None] = {}  # in the order of their first row
    for row in rows:
        names.update(dict.fromkeys(row))
    lines = [_markdown_line(names), f"| {' | '.join(['---'] * len(names))} |"]
    for row in rows:
        cells = []
        for name in names:
            value = row.get(name)
            cells.append(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        lines.append(_markdown_line(cells))
    return "\n".join(lines)


def _markdown_line(cells: Iterable[str]) -> str:
    escaped = [cell.replace("|", "\\|").replace("\n", "<br>") for cell in cells]
    return f"| {' | '.join(escaped)} |"
