"""Options of the tasks, and of their section ``data``."""

from dataclasses import dataclass
from typing import Literal

from fastloop import option
from fastloop_plugins.text import Data


@dataclass(kw_only=True)
class PromptData(Data):
    """Options of ``data`` that all tasks have."""

    prompt: str | None = option("The column of prompts; null: the completions begin with them.", default="prompt")
    system: str | None = option("The column of system messages, if there is one.", default=None)
    chat_template: str | None = option(
        "Render texts, too, by a Jinja file, chatml, or tokenizer, for its own; null: render messages only.",
        default=None,
    )


@dataclass(kw_only=True)
class PairData(PromptData):
    """The ``data`` section of ``dpo`` and ``reward-model``."""

    chosen: str = option("The column of the better completions.", default="chosen")
    rejected: str = option("The column of the worse completions.", default="rejected")


@dataclass(kw_only=True)
class LabelledData(PromptData):
    """The ``data`` section of ``kto``."""

    completion: str = option("The column of completions.", default="completion")
    label: str = option(
        "The column of labels: true or 1 for a good completion, false or 0 for another.", default="label"
    )


BETA = "Multiplies rewards: a larger one keeps the model nearer to its reference."


@dataclass(kw_only=True)
class DPOOptions:
    """Options of ``dpo``."""

    beta: float = option(BETA, default=0.1, gt=0)
    loss: Literal["sigmoid", "robust", "ipo", "orpo"] = option(
        "The loss; orpo trains without a reference.", default="sigmoid"
    )
    label_smoothing: float = option(
        "robust: share of rows whose chosen completion is the worse one.", default=0.0, ge=0, lt=0.5
    )


@dataclass(kw_only=True)
class KTOOptions:
    """Options of ``kto``."""

    beta: float = option(BETA, default=0.1, gt=0)
    desirable_weight: float = option("Weight of the loss of good completions.", default=1.0, gt=0)
    undesirable_weight: float = option("Weight of the loss of other completions.", default=1.0, gt=0)


@dataclass(kw_only=True)
class RewardOptions:
    """Options of ``reward-model``."""

    center: float = option("Weight of the squared sum of both rewards, which keeps them near 0.", default=0.0, ge=0)
