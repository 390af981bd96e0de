"""Options of the tasks, and of their section ``data``."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fastloop import option
from fastloop_plugins.text import Data


@dataclass(kw_only=True)
class PromptData(Data):
    """Options of ``data`` that all tasks have."""

    prompt: Annotated[str | None, option("The column of prompts; null: the completions begin with them.")] = "prompt"
    system: Annotated[str | None, option("The column of system messages, if there is one.")] = None
    chat_template: Annotated[
        str | None,
        option("Render texts, too, by a Jinja file, chatml, or tokenizer, for its own; null: render messages only."),
    ] = None


@dataclass(kw_only=True)
class PairData(PromptData):
    """The ``data`` section of ``dpo`` and ``reward-model``."""

    chosen: Annotated[str, option("The column of the better completions.")] = "chosen"
    rejected: Annotated[str, option("The column of the worse completions.")] = "rejected"


@dataclass(kw_only=True)
class LabelledData(PromptData):
    """The ``data`` section of ``kto``."""

    completion: Annotated[str, option("The column of completions.")] = "completion"
    label: Annotated[str, option("The column of labels: true or 1 for a good completion, false or 0 for another.")] = (
        "label"
    )


Beta = Annotated[float, option("Multiplies rewards: a larger one keeps the model nearer to its reference.", gt=0)]


@dataclass(kw_only=True)
class DPOOptions:
    """Options of ``dpo``."""

    beta: Beta = 0.1
    loss: Annotated[
        Literal["sigmoid", "robust", "ipo", "orpo"], option("The loss; orpo trains without a reference.")
    ] = "sigmoid"
    label_smoothing: Annotated[
        float, option("robust: share of rows whose chosen completion is the worse one.", ge=0, lt=0.5)
    ] = 0.0


@dataclass(kw_only=True)
class KTOOptions:
    """Options of ``kto``."""

    beta: Beta = 0.1
    desirable_weight: Annotated[float, option("Weight of the loss of good completions.", gt=0)] = 1.0
    undesirable_weight: Annotated[float, option("Weight of the loss of other completions.", gt=0)] = 1.0


@dataclass(kw_only=True)
class RewardOptions:
    """Options of ``reward-model``."""

    center: Annotated[float, option("Weight of the squared sum of both rewards, which keeps them near 0.", ge=0)] = 0.0
