"""Check that a transformers model can do a text task: by its architecture, and by a trial on a few tokens before training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fastloop import RecipeError
from fastloop_plugins.tasks._hub import quiet

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fastloop import Run

CLASSIFIERS = "bert, distilbert, roberta, deberta-v2, modernbert, gpt2 or llama"
DECODERS = "gpt2, llama, qwen3 or gemma3_text"
"""Examples for messages."""

READS_AHEAD = "each position sees the tokens after it, so the model reads the tokens that it is to predict."

PROBE = ("one two three four five six seven eight", "one two three")
"""Texts for the trial of a classifier. The shorter one is padded."""

TOLERANCE = 1e-5
"""Largest change of an earlier logit, as a share of the largest logit. Measured on transformers 5.23's language models with random weights:
rounding gives up to 3e-7, reading ahead 9e-5 and more."""


TOKENIZER_REMEDY = "Use another model, or one with the tokenizer that it was trained with."
"""Advice for a model that fails on token ids."""


def unsupported(model_type: str, config: Mapping[str, Any], classify: bool, trains_tokenizer: bool) -> str | None:
    """Why an architecture certainly cannot do a task; None if it can, or if only a trial shows it.

    Args:
        config: Fields of the configuration, as far as they are known.
        classify: For text classification; otherwise for causal language modelling.
        trains_tokenizer: Whether the tokenizer is trained from the texts. Such a tokenizer adds no end token to a text.
    """
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING or config.get("auto_map"):  # rejected elsewhere, or the model ships its own code
        return None
    can_classify = model_type in auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    instead = f"For a language model, use a decoder such as {DECODERS}."
    if can_classify:
        instead = f"To classify texts, name the column of their labels: data.label=COLUMN. {instead}"
    defaults: Any = CONFIG_MAPPING[model_type]
    two_stacks = getattr(defaults, "is_encoder_decoder", False)
    if two_stacks:
        instead = f"To train an encoder-decoder, name the column of its targets: data.target=COLUMN. {instead}"
    if classify and can_classify:
        if not (two_stacks and trains_tokenizer):
            return None
        return (
            f"{model_type!r} is an encoder-decoder, which classifies at a text's end token; a tokenizer that is trained here adds none. "
            f"Use {CLASSIFIERS}, or a checkpoint with its tokenizer: model.name."
        )
    if classify:
        return (
            f"transformers has no text classifier for {model_type!r} (AutoModelForSequenceClassification). "
            f"Use one that it has, such as {CLASSIFIERS}."
        )
    if model_type not in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return f"transformers has no causal language model for {model_type!r} (AutoModelForCausalLM). {instead}"
    is_encoder = model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not two_stacks
    if is_encoder and config.get("is_decoder", getattr(defaults, "is_decoder", None)) is False:
        return f"{model_type!r} is an encoder (is_decoder: false): {READS_AHEAD} {instead}"
    return None


def check_causal(run: Run, model: nn.Module, ids: list[int], where: str) -> None:
    """Raise an error for a language model in which a later token changes an earlier logit.

    The model computes two rows that differ in their second half: on the CPU, in eval mode, without gradients. A process whose weights are
    on the meta device gets the result from the others. Every process must call it.

    Args:
        ids: A few token ids, at least two.

    Raises:
        RecipeError: The model reads ahead, or cannot compute logits from token ids alone.
    """
    import torch

    def find() -> str | None:
        config: Any = model.config
        vocabulary, half = config.get_text_config().vocab_size, len(ids) // 2
        rows = torch.tensor([ids, ids[:half] + [(token + 1) % vocabulary for token in ids[half:]]])
        logits = model(input_ids=rows, use_cache=False).logits.float()
        change = (logits[0, :half] - logits[1, :half]).abs().max()
        if change > TOLERANCE * logits.abs().max():
            return f"{where}: {type(model).__name__} is not causal: {READS_AHEAD} Use a decoder such as {DECODERS}."
        return None

    _agree(run, model, where, find)


def check_classifies(run: Run, model: nn.Module, inputs: Mapping[str, Tensor], classes: int, where: str, tokens: bool = False) -> None:
    """Raise an error for a classifier that does not return ``classes`` logits for each text. Runs like ``check_causal``.

    Args:
        inputs: Token ids and mask of two texts, in the form of the task's batches.
        tokens: Expect logits for each token instead.

    Raises:
        RecipeError: The model cannot compute logits from token ids and mask alone, or they have another shape.
    """

    def find() -> str | None:
        shape, expected = tuple(model(**inputs).logits.shape), (*inputs["input_ids"].shape[: 1 + tokens], classes)
        if shape == expected:
            return None
        return f"{where}: {type(model).__name__} gives logits of shape {shape} for 2 texts, expected {expected}. Use another model."

    _agree(run, model, where, find)


def check_target_loss(run: Run, model: nn.Module, inputs: Mapping[str, Tensor], where: str) -> None:
    """Raise an error for an encoder-decoder whose loss is not the mean cross entropy of the target tokens. Runs like ``check_causal``.

    Args:
        inputs: A batch of ``seq2seq`` with ``labels``.

    Raises:
        RecipeError: The model cannot compute its loss from token ids, mask and labels alone, or computes another one.
    """
    from torch.nn.functional import cross_entropy

    def find() -> str | None:
        output = model(**inputs)
        expected = cross_entropy(output.logits.flatten(0, 1).float(), inputs["labels"].flatten())
        if bool((output.loss - expected).abs() <= 1e-4 * expected.abs() + 1e-6):
            return None
        return (
            f"{where}: {type(model).__name__} computes a loss of {float(output.loss):.6g}, expected {float(expected):.6g}, the mean cross "
            "entropy of the target tokens: its micro-batches could not be combined. Use another model."
        )

    _agree(run, model, where, find)


def check_classifies_images(run: Run, model: nn.Module, size: int, classes: int, where: str) -> None:
    """Raise an error for an image classifier that does not return ``classes`` logits for each image. Runs like ``check_causal``.

    Args:
        size: Height and width of the images in pixels.

    Raises:
        RecipeError: The model cannot compute logits from such images, or they have another shape.
    """
    import torch

    def find() -> str | None:
        output = model(torch.zeros(2, 3, size, size))
        shape = tuple(getattr(output, "logits", output).shape)
        if shape == (2, classes):
            return None
        return f"{where}: {type(model).__name__} gives logits of shape {shape} for 2 images, expected {(2, classes)}. Use another model."

    _agree(run, model, where, find, f"Use another model, or another data.image_size (it is {size}).")


def _agree(run: Run, model: nn.Module, where: str, find: Callable[[], str | None], remedy: str = TOKENIZER_REMEDY) -> None:
    """Raise the first problem that any process found on every process."""
    problem = None
    if not any(parameter.is_meta for parameter in model.parameters()):
        try:
            with _inference(model):
                problem = find()
        except Exception as error:  # models raise errors of any type
            cause = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            problem = (
                f"{where}: {type(model).__name__} cannot compute logits from the task's batches: {type(error).__name__}: {cause}. {remedy}"
            )
    if problem := next(filter(None, run.processes.all_gather_object(problem)), None):
        raise RecipeError(problem)


@contextmanager
def _inference(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients. Restores modes and random states."""
    import torch

    from fastloop.evaluation_results import evaluating

    with evaluating(model), torch.no_grad(), torch.random.fork_rng(devices=[]), quiet():
        yield
