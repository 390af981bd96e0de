"""The section ``data`` of the tasks ``dpo``, ``kto`` and ``reward-model``."""

from dataclasses import dataclass

from fastloop import option
from fastloop_plugins.text import DataOptions


@dataclass(kw_only=True)
class PreferenceData(DataOptions):
    """Options of ``data`` that all tasks have."""

    prompt: str | None = option("The column of prompts; null: the completions begin with them.", default="prompt")
    system: str | None = option("The column of system messages, if there is one.", default=None)
    chat_template: str | None = option(
        "Render texts, too, by a Jinja file, chatml, or tokenizer, for its own; null: render messages only.",
        default=None,
    )


@dataclass(kw_only=True)
class ComparisonData(PreferenceData):
    """The ``data`` section of ``dpo`` and ``reward-model``."""

    chosen: str = option("The column of the better completions.", default="chosen")
    rejected: str = option("The column of the worse completions.", default="rejected")


@dataclass(kw_only=True)
class LabelledData(PreferenceData):
    """The ``data`` section of ``kto``."""

    completion: str = option("The column of completions.", default="completion")
    label: str = option(
        "The column of labels: true or 1 for a good completion, false or 0 for another.", default="label"
    )
