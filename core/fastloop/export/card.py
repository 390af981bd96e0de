"""The README of an exported model: base model, task, and the code that loads it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastloop import __version__
from fastloop.export.text_inputs import TextInputs
from fastloop.runtime.files import read_json_object

BASE_CONFIG = "base_config.json"
"""In an adapter that fastloop exported: the configuration of the base model, with the classes of the task."""
BASE_LINE = "- Base model: "
"""How the line of a card about its base model begins."""
FROM_SCRATCH = "none: trained from scratch"
"""The rest of this line without a base model."""
MARK = "tags: [fastloop]"
"""A line of every card. A README without it is a user's own, and stays."""
CHECKSUM = "<!-- Written by fastloop, which keeps this page once it was edited. SHA-256 of the text above: "
"""How the last line of a card begins. The checksum of the other lines follows, so that fastloop replaces a card only if
nobody has edited it."""
HUB_NAME = r"\w[\w.-]*(/\w[\w.-]*)?"
"""A regular expression for the name of a model on the hub: ``name`` or ``owner/name``."""
OTHER_BASE = "FOLDER-OF-THE-BASE-MODEL"
"""In the code of an uploaded card: the place of a base model that the hub does not have."""
IMPORT_HUB = "import huggingface_hub"
"""The first line of the code of a card that downloads a repository."""
EQUAL = "The probabilities equal those of `fastloop predict --without amp`, up to rounding in float32."
"""How the probabilities of a classifier compare with those of fastloop."""
AUTO_CLASSES = {
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
}
"""Auto class of transformers -> its classes of models, in ``modeling_auto``. Others load with ``AutoModel``."""
CHAT = """
messages = [{"role": "user", "content": "Hello"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=100, do_sample=False)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""
CONTINUE = """
inputs = tokenizer("the first text", return_tensors="pt")
given = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
output = model.generate(**given, max_new_tokens=100, do_sample=False)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""
WRITE = """given = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
output = model.generate(**given, do_sample=False)
print(tokenizer.batch_decode(output, skip_special_tokens=True))"""
PRINT_CLASS = """for probabilities in outputs.logits.softmax(1):
    print(model.config.id2label[int(probabilities.argmax())], probabilities.max().item())"""
PRINT_CLASSES = """for probabilities in outputs.logits.sigmoid():
    print([label for index, label in model.config.id2label.items() if probabilities[index] > 0.5])"""

PRINT_NUMBERS = "print(outputs.logits.squeeze(1).tolist())"
PRINT_TAGS = """
words = ["the", "first", "text"]
inputs = tokenizer([words], is_split_into_words=True, truncation=True, return_tensors="pt")
outputs = model(**inputs)
tokens = inputs.word_ids()  # the number of the word that each token is of
for number, word in enumerate(words):
    logits = outputs.logits[0, tokens.index(number)]
    print(word, model.config.id2label[int(logits.argmax())])"""

PRINT_IMAGE = """
image = Image.open("image.png").convert("RGB")
outputs = model(**processor(image, return_tensors="pt"))
probabilities = outputs.logits.softmax(1)[0]
print(model.config.id2label[int(probabilities.argmax())], probabilities.max().item())"""


@dataclass(kw_only=True)
class ModelCard:
    """The content of a card.

    Attributes:
        title: The name of the run or model.
        name: The folder to load, as users name it.
        base: The model that training began from, as the recipe names it; None: unknown, or trained from scratch.
        base_is_folder: Whether ``base`` is a folder of this machine, and no name of the hub.
        task: The name of the task; None: unknown.
        architecture: The class of the model, such as ``BertForTokenClassification``; None: that of ``config.json``.
        labels: Class id -> name; empty: the model does not classify.
        texts: The texts that the model reads.
    """

    title: str
    name: str
    base: str | None = None
    base_is_folder: bool = False
    task: str | None = None
    architecture: str | None = None
    labels: dict[int, str] = field(default_factory=dict)
    texts: TextInputs = field(default_factory=TextInputs)

    def render(self, folder: Path) -> str:
        """The page in Markdown, for the files in a folder."""
        library, code = self._code(folder)
        form = "adapter" if library == "peft" else "safetensors"
        lines = self.head(library, form)
        lines += ["```python", *code, "```", ""]
        lines += self.lines_below_code(self.texts.tokenizer_call("pt") in code)
        return add_checksum("\n".join(lines))

    def _code(self, folder: Path) -> tuple[str, list[str]]:
        """``(library, lines)``: the library that loads the model, and the code."""
        place = f"folder = {json.dumps(self.name)}"
        if (folder / "adapter_config.json").is_file():
            return "peft", self._adapter_code(folder, place)
        if (folder / "modules.json").is_file():
            return "sentence-transformers", [
                "from sentence_transformers import SentenceTransformer",
                "",
                place,
                "model = SentenceTransformer(folder)",
            ]
        config = read_json_object(folder / "config.json")
        if not config.get("model_type"):
            return "pytorch", [
                "from safetensors.torch import load_file",
                "",
                place,
                'weights = load_file(f"{folder}/model.safetensors")',
                "# model: an object of the class that was trained",
                "model.load_state_dict(weights)",
            ]
        architecture = self.architecture or next(iter(config.get("architectures") or ["AutoModel"]))
        auto = find_auto_class(architecture, own_classes(config))
        lines = [place, f"model = {auto}.from_pretrained(folder{code_option(config)})"]
        lines += self._input_code(folder, auto, config)
        return "transformers", [*imports_of(lines), "", *lines]

    def head(self, library: str, form: str) -> list[str]:
        """The lines above the code.

        Args:
            library: The library that loads the model.
            form: The form of the export, such as ``safetensors``.
        """
        lines = ["---", f"library_name: {library}"]
        if self.base is not None and not self.base_is_folder:
            lines.append(f"base_model: {json.dumps(self.base)}")
        lines += [MARK, "---", f"# {self.title}", "", f"Exported by fastloop {__version__} as {form}.", ""]
        if self.task is not None:
            lines += [f"{BASE_LINE}{self.base or FROM_SCRATCH}", f"- Task: {self.task}", ""]
        return lines

    def lines_below_code(self, tokenizes_texts: bool) -> list[str]:
        """The lines after the code: how texts begin, where they are cut, and the classes.

        Args:
            tokenizes_texts: Whether the code has the line ``TextInputs.tokenizer_call``.
        """
        lines = []
        if self.texts.prefix:
            lines += [self.texts.describe_prefix(), ""]
        if tokenizes_texts and self.texts.max_length is not None:
            text = self.texts.describe_limit()
            if len(self.labels) > 1:
                text += f" {EQUAL}"
            lines += [text, ""]
        if self.labels:
            lines += [*label_table(self.labels), ""]
        return lines

    def _adapter_code(self, folder: Path, place: str) -> list[str]:
        base = read_json_object(folder / "adapter_config.json").get("base_model_name_or_path") or self.base
        if self.architecture is None or base is None:
            return [
                "from peft import PeftModel",
                "",
                place,
                "# base: the model that the adapter was trained on",
                "model = PeftModel.from_pretrained(base, folder)",
            ]
        config = read_json_object(folder / BASE_CONFIG)
        auto = find_auto_class(self.architecture, own_classes(config))
        lines = [place]
        options = ""
        of_base = json.dumps(str(base))
        code = code_option(config)
        if (folder / BASE_CONFIG).is_file():  # the base with the classes of this model
            loader = "AutoConfig"
            if code:  # its class is in the code that ships with the base
                lines.append(f"config = AutoConfig.from_pretrained({of_base}{code})")
                loader = "type(config)"
            lines.append(f'config = {loader}.from_pretrained(f"{{folder}}/{BASE_CONFIG}")')
            options = ", config=config"
        elif self.labels:
            options = f", num_labels={len(self.labels)}"
        lines.append(f"base = {auto}.from_pretrained({of_base}{options}{code})")
        if (folder / "generation_config.json").is_file():  # peft does not read it
            lines.append("base.generation_config = GenerationConfig.from_pretrained(folder)")
        lines.append("model = PeftModel.from_pretrained(base, folder)")
        lines += self._input_code(folder, auto, config)
        return [*imports_of(lines), "", *lines]

    def _input_code(self, folder: Path, auto: str, config: dict[str, Any]) -> list[str]:
        """The code that loads an exported tokenizer or image processor, and gives texts or an image to the model. Empty
        if the folder has neither.

        It prints the answer of a chat model, the text that another model writes, or the classes of each text or word.

        Args:
            auto: The Auto class of the model.
            config: The configuration of transformers, with the classes.
        """
        if not (folder / "tokenizer_config.json").is_file():
            if not (folder / "preprocessor_config.json").is_file():
                return []
            lines = ["processor = AutoImageProcessor.from_pretrained(folder)"]
            if auto == "AutoModelForImageClassification":
                lines += PRINT_IMAGE.splitlines()
            return lines
        lines = [f"tokenizer = AutoTokenizer.from_pretrained(folder{code_option(config)})"]
        if auto == "AutoModelForCausalLM" and has_chat_template(folder):
            lines += CHAT.splitlines()
        elif auto == "AutoModelForCausalLM":
            lines += CONTINUE.splitlines()
        elif auto == "AutoModelForSeq2SeqLM":
            lines += ["", self.texts.tokenizer_call("pt"), *WRITE.splitlines()]
        elif auto == "AutoModelForTokenClassification":
            lines += PRINT_TAGS.splitlines()
        elif auto == "AutoModelForSequenceClassification":
            lines += ["", self.texts.tokenizer_call("pt")]
            lines.append("outputs = model(**inputs)")
            several = config.get("problem_type") == "multi_label_classification"
            if len(self.labels) == 1:
                lines.append(PRINT_NUMBERS)
            elif several:
                lines += PRINT_CLASSES.splitlines()
            else:
                lines += PRINT_CLASS.splitlines()
        return lines


def imports_of(lines: Iterable[str]) -> list[str]:
    """The imports that the code of a card needs."""
    code = "\n".join(lines)
    imports = []
    if "PeftModel" in code:
        imports.append("from peft import PeftModel")
    if "Image.open" in code:
        imports.append("from PIL import Image")
    names = sorted(set(re.findall(r"\b(Auto\w+|GenerationConfig)\.from_pretrained", code)))
    imports.append(f"from transformers import {', '.join(names)}")
    return imports


def label_table(labels: Mapping[int, str]) -> list[str]:
    """The lines of a Markdown table of the classes, in the order of their ids. A label keeps its row and its column."""
    lines = ["| id | label |", "|---:|---|"]
    for index in sorted(labels):
        label = " ".join(labels[index].split()).replace("|", "\\|")
        lines.append(f"| {index} | {label} |")
    return lines


def find_auto_class(architecture: str, own: Mapping[str, str]) -> str:
    """The Auto class that loads a class of transformers, or of a model's own code, with its head.

    Args:
        own: A result of ``own_classes``.
    """
    from transformers.models.auto import modeling_auto

    for auto, name in own.items():
        if name == architecture:
            return auto
    for auto, mapping in AUTO_CLASSES.items():
        for value in getattr(modeling_auto, mapping).values():
            if architecture in ((value,) if isinstance(value, str) else value):
                return auto
    return "AutoModel"


def own_classes(config: Mapping[str, Any]) -> dict[str, str]:
    """The classes in the code that ships with a model: Auto class -> the name of a model's class. Empty without code.

    Args:
        config: The configuration, in which ``auto_map`` has entries such as ``"AutoModel": "modeling_net.NetModel"``.
    """
    classes = {}
    for auto, place in (config.get("auto_map") or {}).items():
        if auto.startswith("AutoModel") and isinstance(place, str):
            classes[auto] = place.rpartition(".")[2]
    return classes


def code_option(config: Mapping[str, Any]) -> str:
    """The argument of ``from_pretrained`` that runs the code which ships with a model; empty without code."""
    return ", trust_remote_code=True" if config.get("auto_map") else ""


def has_chat_template(folder: Path) -> bool:
    """Whether an exported tokenizer renders conversations."""
    if (folder / "chat_template.jinja").is_file():
        return True
    return bool(read_json_object(folder / "tokenizer_config.json").get("chat_template"))


def is_hub_name(name: str) -> bool:
    """Whether a name could exist on the hub."""
    return re.fullmatch(HUB_NAME, name) is not None


def is_local(name: str, folder: Path) -> bool:
    """Whether the name of a base model is a folder of this machine, and none of the hub.

    Args:
        folder: The place of a folder of this name.
    """
    return folder.exists() or not is_hub_name(name)


def add_checksum(page: str) -> str:
    """A card with its checksum as the last line."""
    text = page.rstrip()
    return f"{text}\n\n{CHECKSUM}{hashlib.sha256(text.encode()).hexdigest()} -->\n"


def remove_checksum(page: str) -> str:
    """A card without its last line."""
    return page.rpartition(CHECKSUM)[0].rstrip()


def is_unedited(readme: Path) -> bool:
    """Whether a README is a card as fastloop has written it. Line ends, and empty lines at the end, do not count."""
    if not readme.is_file():
        return False
    text = readme.read_text(encoding="utf-8", errors="replace").rstrip()
    return CHECKSUM in text and add_checksum(remove_checksum(text)).rstrip() == text


def is_own(readme: Path) -> bool:
    """Whether a README is a card, maybe an edited one, and no user's own page."""
    return readme.is_file() and MARK in readme.read_text(encoding="utf-8", errors="replace").splitlines()[:6]


def rename(page: str, name: str) -> str:
    """A card whose code loads another folder."""
    page = remove_checksum(page).replace(f"{IMPORT_HUB}\n", "", 1)
    page = re.sub(r"^folder = .*$", lambda _: f"folder = {json.dumps(name)}", page, count=1, flags=re.M)
    return add_checksum(page)


def load_from_hub(page: str, repository: str, local_base: str | None) -> str:
    """A card whose code loads a repository of the Hugging Face hub. It downloads the files that it opens by their
    path, and names no folder of this machine.

    Args:
        local_base: The folder of the base model that the code of an adapter loads; None: there is none.
    """
    page = remove_checksum(rename(page, repository))
    if "\nbase_model: " not in page:
        page = re.sub(rf"^{BASE_LINE}(?!{FROM_SCRATCH}).*\n", "", page, count=1, flags=re.M)
    if local_base is not None:
        page = page.replace(f"from_pretrained({json.dumps(local_base)}", f'from_pretrained("{OTHER_BASE}"')
    if "{folder}/" in page:  # libraries take the name of a repository like that of a folder
        page = page.replace("```python\n", f"```python\n{IMPORT_HUB}\n", 1)
        place = json.dumps(repository)
        page = page.replace(f"folder = {place}", f"folder = huggingface_hub.snapshot_download({place})", 1)
    return add_checksum(page)
