"""The section ``data`` of the task ``grpo``."""

from dataclasses import dataclass

from fastloop import option
from fastloop_plugins.text import DataOptions


@dataclass(kw_only=True)
class GRPOData(DataOptions):
    """The ``data`` section. ``max_length`` is of prompts: longer ones are left out."""

    prompt: str = option("The column of prompts: texts, or lists of messages.", default="prompt")
    columns: str | list[str] | None = option(
        "Further columns, which reward functions get by these names: any JSON values.", default=None
    )
    chat_template: str | None = option(
        "Render texts, too, by a Jinja file, chatml, or tokenizer, for its own; null: render messages only.",
        default=None,
    )


def grpo_options(options: DataOptions) -> GRPOData:
    """The options of the section ``data``, which a task of texts holds by their base class."""
    assert isinstance(options, GRPOData)
    return options
