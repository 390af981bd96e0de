"""Convert the data sets of a config to the section ``data`` of a recipe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop_migrate import keys, preference

if TYPE_CHECKING:
    from fastloop_migrate.convert import Conversion

MISSING = "???"
"""Stands for a value of the recipe that the user fills in, as in OmegaConf. fastloop refuses it by its key."""
NO_DATA = "the file names no data: set data.files, or data.name instead, and the columns"
FILES = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".txt")
"""Suffixes of files that a recipe reads."""
INSTRUCTIONS = {
    "alpaca": ["instruction", "input", "output"],
    "gpteacher": ["instruction", "input", "response"],
    "oasst": ["INSTRUCTION", "SOURCE", "RESPONSE"],
}
"""Axolotl's type of instructions -> the columns of the instruction, the input and the answer."""
TEMPLATE = "texts follow a chat template: that of the tokenizer, or data.chat_template; the type's own text is not used"


def convert_data(result: Conversion, settings: Mapping[str, Any], format: str, trainer: str) -> None:
    """The data sets, their columns, and the chat template.

    Args:
        trainer: One of ``preference.TRAINERS``.
    """
    if format == "axolotl":
        convert_axolotl(result, trainer)
    else:
        convert_trl(result, settings, format, trainer)
    convert_chat_template(result)
    if result.plugins.get("packing") is not None:
        counts = "with packing, TRL counts rows of max_length tokens"
        if format == "axolotl":
            counts = "with sample_packing, Axolotl counts rows of sequence_len tokens"
        result.note(
            "per_device_train_batch_size",
            f"{counts}, and train.batch_size counts samples: make it and micro_batch_size larger",
        )
    elif result.take("pad_to_sequence_len"):
        result.put("data.padding", "max_length")


def convert_chat_template(result: Conversion) -> None:
    """The chat template: a name, a file, or its text, which a recipe does not take."""
    template = result.take("chat_template")
    file = result.take("chat_template_path")
    if file is not None and str(file).endswith((".jinja", ".jinja2", ".j2")):
        result.put("data.chat_template", str(file))
    elif template == "chatml":
        result.put("data.chat_template", "chatml")
    elif template not in (None, "tokenizer_default") or file is not None:
        name = "its text" if file is not None and "{" in str(file) else file or template
        result.note("chat_template", f"{name}: save it as a Jinja file, and set data.chat_template to the file")


def convert_trl(result: Conversion, settings: Mapping[str, Any], format: str, trainer: str) -> None:
    """The keys of TRL. ``TrainingArguments`` name no data."""
    name = result.take("dataset_name")
    files = {} if name else script_files(result)
    if name:
        result.put("data.name", name)
        subset = result.take("dataset_config")
        if subset:
            result.put("data.subset", subset)
        train = result.take("dataset_train_split", "train")
        test = result.take("dataset_test_split", "test")
        splits = {}
        if train != "train":
            splits["train"] = train
        if settings.get("eval_strategy", "no") != "no":
            splits["validation"] = test
        if splits:
            result.put("data.splits", splits)
        if "validation" not in splits:
            result.put("data.validation_fraction", 0.0)
        if trainer == "sft":
            columns = "for conversations, set data.messages; for prompts: data.prompt, data.completion"
        elif trainer == "kto":
            columns = "rows have prompt, completion and label; for other columns, set data.prompt and so on"
        else:
            columns = "rows have prompt, chosen and rejected; with the prompt in both, set data.prompt: null"
        result.note("dataset_name", columns)
    elif files:
        result.put("data.files", files)
        if "label_column_name" not in settings and "text_column_name" not in settings:
            result.note("data", "set the columns: data.text and data.label, or those of another task")
    else:
        result.put("data.files", MISSING)
        if format == "transformers":
            columns = "data.text and data.label to classify texts, or those of another task"
        elif trainer == "sft":
            columns = "data.messages for conversations, or data.prompt and data.completion"
        else:
            columns = "those of the pairs, such as data.chosen and data.rejected"
        result.note("data", f"{NO_DATA}: {columns}")
    if "model_name_or_path" not in settings:
        result.put("model.name", MISSING)
        result.note("model", "the file names no model: set model.name")
    if result.take("assistant_only_loss"):
        result.put("data.messages", "messages")
        result.put("data.train_on", "assistant")


def script_files(result: Conversion) -> dict[str, Any]:
    """The files of each split in a config of an example script of transformers."""
    files = {}
    for key, split in keys.SCRIPT_FILES.items():
        path = result.take(key)
        if path is not None:
            files[split] = path
    return files


def convert_axolotl(result: Conversion, trainer: str) -> None:
    """Axolotl's ``datasets`` and ``pretraining_dataset``."""
    datasets = result.take("datasets") or result.take("pretraining_dataset") or []
    if isinstance(datasets, str):
        datasets = {"path": datasets, "type": "completion"}
    datasets = [datasets] if isinstance(datasets, Mapping) else list(datasets)
    files = all_local_files(datasets, result.folder)
    share = result.take_number("val_set_size")
    result.put("data.validation_fraction", float(share) if share < 1 else 0.1)
    if share >= 1:
        result.note("val_set_size", f"{share} rows; set data.validation_fraction to their share")
    tests = all_local_files(result.take("test_datasets", []), result.folder)
    if not datasets:
        result.put("data.files", MISSING)
        result.note("datasets", NO_DATA)
        return
    if files:
        splits: dict[str, Any] = {"train": files if len(files) > 1 else files[0]}
        if tests:
            splits["validation"] = tests[0]
        result.put("data.files", splits)
        left = [str(dataset.get("path")) for dataset in datasets if not local_files(dataset, result.folder)]
    else:
        first, *others = datasets
        left = [str(dataset.get("path")) for dataset in others]
        result.put("data.name", str(first.get("path")))
        if first.get("name"):
            result.put("data.subset", first["name"])
        if first.get("split", "train") != "train":
            result.put("data.splits", {"train": first["split"]})
        if first.get("data_files"):
            result.note("datasets: data_files", f"{first['data_files']}: download them, and list them in data.files")
    if left:
        paths = ", ".join(left)
        result.note(
            "datasets", f"{paths}: a recipe reads one data set; write all as files, and list them in data.files"
        )
    if trainer == "sft":
        convert_columns(result, datasets[0])
    else:
        preference.convert_axolotl_rows(result, datasets[0], trainer)
    if result.take("train_on_inputs"):
        result.put("data.train_on", "all")


def all_local_files(datasets: Iterable[Mapping[str, Any]], folder: Path) -> list[str]:
    """The files of the data sets that are local."""
    files = []
    for dataset in datasets:
        files += local_files(dataset, folder)
    return files


def local_files(dataset: Mapping[str, Any], folder: Path) -> list[str]:
    """The files of a data set, if it is local."""
    path = str(dataset.get("path"))
    listed = dataset.get("data_files") or []
    if path in ("json", "csv", "parquet", "text"):
        return [listed] if isinstance(listed, str) else list(listed)
    is_file = Path(path).suffix in FILES or dataset.get("ds_type") is not None
    return [path] if is_file and not (folder / path).is_dir() else []


def convert_columns(result: Conversion, dataset: Mapping[str, Any]) -> None:
    """The columns of a data set, by its type."""
    kind = dataset.get("type")
    name = str(kind).partition(":")[0].partition(".")[0].partition("_w_system")[0]
    if isinstance(kind, Mapping):
        columns = [kind.get(f"field_{part}") for part in ("instruction", "input", "output")]
        result.put("data.messages", [column for column in columns if column])
        result.note("datasets: type", TEMPLATE)
    elif name in INSTRUCTIONS:
        result.put("data.messages", INSTRUCTIONS[name])
        result.note("datasets: type", f"{kind}: {TEMPLATE}")
    elif name in ("chat_template", "sharegpt"):
        default = "messages" if name == "chat_template" else "conversations"
        result.put("data.messages", dataset.get("field_messages") or default)
        mapping = dataset.get("message_property_mappings") or {}
        role = mapping.get("role", "role")
        content = mapping.get("content", "content")
        if (role, content) not in (("role", "content"), ("from", "value")):
            result.note(
                "datasets: message_property_mappings",
                f"{role}, {content}: rename them to role and content (docs/tasks/chat.md)",
            )
        trained = dataset.get("roles_to_train")
        if trained not in (None, ["assistant"], ["gpt"], ["assistant", "gpt"], ["gpt", "assistant"]):
            result.note("datasets: roles_to_train", f"{trained}: data.train_on is assistant or all")
    elif name in ("completion", "pretrain", "None"):
        result.put("data.text", dataset.get("field") or dataset.get("text_column") or "text")
    else:
        result.note("datasets: type", f"{kind}: set data.text, data.messages or data.prompt (docs/tasks/chat.md)")
