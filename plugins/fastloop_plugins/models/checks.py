"""Check that a transformers model can do a text task: by architecture, and by a trial on a few tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from fastloop import RecipeError
from fastloop.probing import has_values, probing
from fastloop.problem import typed_clause
from fastloop_plugins.models.hub import quiet

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fastloop import Run

Found = TypeVar("Found")

CLASSIFIERS = "bert, distilbert, roberta, deberta-v2, modernbert, gpt2 or llama"
DECODERS = "gpt2, llama, qwen3 or gemma3_text"
"""Examples for messages."""

READS_AHEAD = "each position sees the tokens after it, so the model reads the tokens that it is to predict."

TOLERANCE = 1e-5
"""Largest change of an earlier logit, as a share of the largest logit. Measured on transformers 5.23's language models
with random weights: rounding gives up to 3e-7, reading ahead 9e-5 and more."""


ROUTER_REMEDY = "Set output_router_logits to false in the model's configuration."
"""Advice for a model whose router has another loss than expected."""

AFFORDABLE = 1e12
"""Largest product of tokens and parameters for which a block is tried in train mode: about ten seconds on two cores."""

PADDING_REMEDY = (
    "If it needs padding, set data.pad_to_multiple_of, or data.padding: max_length. Otherwise, use another model."
)
"""Advice for a model that computes in eval mode only."""

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

    # rejected elsewhere, or the model ships its own code
    if model_type not in CONFIG_MAPPING or config.get("auto_map"):
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
            f"{model_type!r} is an encoder-decoder, which classifies at a text's end token; a tokenizer that is "
            "trained here adds none. "
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


def check_causal(
    run: Run, model: nn.Module, ids: list[int], block: Mapping[str, Tensor], where: str
) -> tuple[float, float]:
    """Raise an error for a language model in which a later token changes an earlier logit.

    The model computes two rows that differ in their second half: on the CPU, in eval mode, without gradients. A process
    whose weights are on the meta device gets the result from the others. Every process must call it.

    Args:
        ids: A few token ids, at least two.
        block: The inputs of a batch of one sample, for a model that trains on some lengths only, such as Reformer.

    Returns:
        The weight of the auxiliary loss of the model's router, which its output has as ``aux_loss``; 0 without one. And
        how much tokens at the end of a row change its earlier logits, as a share of the largest logit, compared with a
        shorter row.

    Raises:
        RecipeError: The model reads ahead, cannot compute logits from token ids alone, or adds another loss of its
            router.
    """
    import torch

    def find() -> tuple[float, float]:
        config: Any = model.config
        vocabulary = config.get_text_config().vocab_size
        half = len(ids) // 2
        rows = torch.tensor([ids, ids[:half] + [(token + 1) % vocabulary for token in ids[half:]]])
        output = model(input_ids=rows, use_cache=False)
        logits = output.logits.float()
        change = (logits[0, :half] - logits[1, :half]).abs().max()
        if change > TOLERANCE * logits.abs().max():
            raise RecipeError(
                f"{type(model).__name__} is not causal: {READS_AHEAD} Use a decoder such as {DECODERS}.",
                code="not-causal",
                place=where,
            )
        alone = model(input_ids=rows[:1, :half], use_cache=False).logits.float()
        difference = (logits[:1, :half] - alone).abs().max() / alone.abs().max()
        return _router_weight(model, rows, output, where), float(difference)

    facts = on_all_processes(run, model, where, find) or (0.0, 0.0)
    if block["input_ids"].numel() * sum(parameter.numel() for parameter in model.parameters()) <= AFFORDABLE:
        check_trains(run, model, {**block, "use_cache": False}, where)
    return facts


def _router_weight(model: nn.Module, rows: Tensor, output: Any, where: str) -> float:
    """The weight of ``output.aux_loss`` in the model's own loss; 0 if there is none."""
    from torch import Tensor
    from torch.nn.functional import cross_entropy

    auxiliary = getattr(output, "aux_loss", None)
    if not isinstance(auxiliary, Tensor):
        return 0.0
    weight = 0.0
    for name in ("router_aux_loss_coef", "aux_loss_coef"):
        if hasattr(model, name):
            weight = getattr(model, name)
            break
    loss = model(input_ids=rows, labels=rows, use_cache=False).loss
    expected = cross_entropy(output.logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten()) + weight * auxiliary
    if (loss - expected).abs() > TOLERANCE * expected.abs():
        raise RecipeError(
            f"{type(model).__name__} computes a loss of {float(loss):.6g}, expected {float(expected):.6g}: cross "
            f"entropy and {weight:g} times the auxiliary loss of its router. {ROUTER_REMEDY}",
            code="wrong-loss",
            place=where,
        )
    return weight


def check_classifies(
    run: Run, model: nn.Module, inputs: Mapping[str, Tensor], classes: int, where: str, tokens: bool = False
) -> None:
    """Raise an error for a classifier that does not return ``classes`` logits for each text. Runs like
    ``check_causal``.

    Args:
        inputs: Token ids and mask of two texts, in the form of the task's batches.
        tokens: Expect logits for each token instead.

    Raises:
        RecipeError: The model cannot compute logits from token ids and mask alone, or they have another shape.
    """
    expected = (*inputs["input_ids"].shape[: 1 + tokens], classes)
    _check_shape(run, model, where, lambda: model(**inputs).logits, expected, "texts", TOKENIZER_REMEDY)


def check_classifies_images(run: Run, model: nn.Module, size: tuple[int, int], classes: int, where: str) -> None:
    """``check_classifies`` of images.

    Args:
        size: Height and width of the images in pixels.
    """
    import torch

    def compute() -> Any:
        output = model(torch.zeros(2, 3, *size))
        return getattr(output, "logits", output)

    remedy = f"Use another model, or another data.image_size (it is {size[0]} x {size[1]})."
    _check_shape(run, model, where, compute, (2, classes), "images", remedy)


def _check_shape(
    run: Run, model: nn.Module, where: str, compute: Callable[[], Any], expected: tuple[int, ...], of: str, remedy: str
) -> None:
    def find() -> None:
        shape = tuple(compute().shape)
        if shape != expected:
            raise RecipeError(
                f"{type(model).__name__} gives logits of shape {shape} for 2 {of}, expected {expected}.",
                code="wrong-shape",
                place=where,
                remedy="Use another model.",
            )

    on_all_processes(run, model, where, find, remedy)


def check_trains(run: Run, model: nn.Module, inputs: Mapping[str, Any], where: str) -> None:
    """Raise an error for a model that computes no logits in train mode, such as Reformer without padding. Runs like
    ``check_causal``.

    Args:
        inputs: As for ``check_classifies`` or ``check_causal``, which try eval mode.

    Raises:
        RecipeError: The model raised an error.
    """

    def find() -> None:
        model.train()  # afterwards, each module has its own mode again
        model(**inputs)

    on_all_processes(run, model, where, find, PADDING_REMEDY)


def check_alone(run: Run, model: nn.Module, forward: Callable[[], Any], other_remedy: str = "") -> None:
    """Raise an error for a model that cannot train on one sample alone, if micro-batches have one. Runs like
    ``check_causal``.

    CANINE needs four tokens, and batch norm without pixels needs two samples.

    Args:
        forward: Computes the logits of a sample.
        other_remedy: A sentence about another change that solves the problem.

    Raises:
        RecipeError: It raised an error in train mode.
    """
    if run.recipe.inference is not None or run.loaders.micro_batch_size > 1:
        return

    def find() -> None:
        model.train()
        forward()

    on_all_processes(
        run,
        model,
        f"{run.recipe.where}: train.micro_batch_size: found 1",
        find,
        f"Use micro-batches of two samples or more. {other_remedy}".rstrip(),
    )


def shortest(dataset: Any) -> Any:
    """The shortest sample of a dataset with ``lengths``, or of the samples that are tokenized, if these are some; the
    first one of another dataset; None for an iterable one."""
    if not hasattr(dataset, "__getitem__"):
        return None
    known = getattr(dataset, "encoded", dataset)
    return known[int(known.lengths.argmin()) if hasattr(known, "lengths") else 0]


def check_target_loss(run: Run, model: nn.Module, inputs: Mapping[str, Tensor], where: str) -> None:
    """Raise an error for an encoder-decoder whose loss is not the mean cross entropy of the target tokens. Runs like
    ``check_causal``.

    Args:
        inputs: A batch of ``seq2seq`` with ``labels``.

    Raises:
        RecipeError: The model cannot compute its loss from token ids, mask and labels alone, or computes another one.
    """
    from torch.nn.functional import cross_entropy

    def find() -> None:
        output = model(**inputs)
        expected = cross_entropy(output.logits.flatten(0, 1).float(), inputs["labels"].flatten())
        if bool((output.loss - expected).abs() > 1e-4 * expected.abs() + 1e-6):
            remedy = ROUTER_REMEDY if getattr(model.config, "output_router_logits", False) else "Use another model."
            raise RecipeError(
                f"{type(model).__name__} computes a loss of {float(output.loss):.6g}, expected {float(expected):.6g}, "
                "the mean cross entropy of the target tokens: its micro-batches could not be combined.",
                code="wrong-loss",
                place=where,
                remedy=remedy,
            )

    on_all_processes(run, model, where, find)


def on_all_processes(
    run: Run, model: nn.Module, where: str, find: Callable[[], Found], remedy: str = TOKENIZER_REMEDY
) -> Found | None:
    """Call ``find`` on each process that has weights, and return the first result on every process; None if no process
    has weights.

    ``find`` may compute with the model, which stays as it is.

    Raises:
        RecipeError: ``find`` raised an error on one of them.
    """
    result: tuple[Found | None, str] | None = None
    if has_values(model):
        try:
            with probing(model), quiet():
                result = find(), ""
        except RecipeError as error:
            result = None, str(error)
        except Exception as error:  # models raise errors of any type
            result = (
                None,
                f"{where}: {type(model).__name__} cannot compute logits from the task's batches: "
                f"{typed_clause(error)}. {remedy}",
            )
    results = [of_rank for of_rank in run.processes.all_gather_object(result) if of_rank is not None]
    problem = next((problem for _, problem in results if problem), "")
    if problem:
        raise RecipeError(problem, code="unsupported-model")
    return next((value for value, _ in results), None)
