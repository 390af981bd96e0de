"""A program that loads exported models with the libraries that users load them with, and never imports fastloop.

    python reload_exports.py jobs.json results.json

It reads a list of jobs, and writes a result for each: see ``Job`` and ``reload``.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

IGNORED = -100


@dataclass(kw_only=True)
class Job:
    """A folder to load.

    Attributes:
        kind: A key of ``KINDS`` of ``round_trip_cases``: what the rows hold.
        library: transformers, peft, onnxruntime or torch.
        folder: The export.
        auto: The Auto class of transformers.
        options: Arguments of ``from_pretrained`` for the base model of an adapter.
        data: The folder of the rows, images and code.
        max_length: Tokens of a row at most.
        classes: The names of the classes, for a folder that has none.
        max_new_tokens: Tokens of a generated text at most; 0: generate none.
    """

    kind: str
    library: str
    folder: str
    auto: str
    data: str
    max_length: int
    options: dict[str, Any] = field(default_factory=dict)
    classes: list[str] = field(default_factory=list)
    max_new_tokens: int = 0


@dataclass(kw_only=True)
class Result:
    """The numbers and texts that a job gave.

    Attributes:
        error: Why the folder cannot be loaded; empty: it was.
        loss: The mean loss of the test rows.
        outputs: The logits of each row, or word.
        texts: The text that is generated for each prompt.
        new_tokens: The number of tokens of each such text, with its end token.
        dtype: The type of the weights.
        longest_text: ``model_max_length`` of the tokenizer; 0 without one.
        is_cut: Whether the tokenizer truncates or pads texts by default.
    """

    error: str = ""
    loss: float = 0.0
    outputs: list[list[float]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)
    dtype: str = ""
    longest_text: int = 0
    is_cut: bool = False


@dataclass
class Weighted:
    """A mean of losses."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, loss: Tensor, weight: float = 1.0) -> None:
        """Add the mean loss of some targets."""
        self.total += float(loss) * weight
        self.weight += weight


class Loaded:
    """A model, and what reads its inputs.

    Attributes:
        model: A module; None for onnxruntime.
        tokenizer: None for images and modules.
        config: None for modules.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.model: Any = None
        self.session: Any = None
        self.config: Any = None
        self.tokenizer: Any = None
        if job.kind not in ("image", "module"):
            from transformers import AutoTokenizer

            self.tokenizer = AutoTokenizer.from_pretrained(job.folder)
        getattr(self, f"_load_{job.library}")()
        if self.model is not None:
            self.model.eval()

    def _load_transformers(self) -> None:
        import transformers

        self.model = getattr(transformers, self.job.auto).from_pretrained(self.job.folder)
        self.config = self.model.config

    def _load_peft(self) -> None:
        import transformers
        from peft import PeftConfig, PeftModel

        base = PeftConfig.from_pretrained(self.job.folder).base_model_name_or_path
        model = getattr(transformers, self.job.auto).from_pretrained(base, dtype=torch.float32, **self.job.options)
        self.config = model.config
        if (Path(self.job.folder) / "generation_config.json").is_file():  # peft does not read it
            model.generation_config = transformers.GenerationConfig.from_pretrained(self.job.folder)
        if self.tokenizer is not None and len(self.tokenizer) > model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(len(self.tokenizer))  # for the tokens that the adapter adds
        self.model = PeftModel.from_pretrained(model, self.job.folder)

    def _load_onnxruntime(self) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        file = str(Path(self.job.folder) / "model.onnx")
        self.session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        if self.job.kind != "module":
            from transformers import AutoConfig

            self.config = AutoConfig.from_pretrained(self.job.folder)

    def _load_torch(self) -> None:
        from safetensors.torch import load_file

        self.model = code(self.job).Net()
        self.model.load_state_dict(load_file(Path(self.job.folder) / "model.safetensors"))

    def class_names(self) -> list[str]:
        """The classes in the order of the logits."""
        if self.job.classes:
            return self.job.classes
        return [str(self.config.id2label[index]) for index in range(len(self.config.id2label))]

    def logits(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The logits of a batch."""
        if self.session is not None:
            names = [value.name for value in self.session.get_inputs()]
            if len(names) == 1 and names[0] not in inputs:
                inputs = {names[0]: next(iter(inputs.values()))}
            values = {name: tensor.numpy() for name, tensor in inputs.items() if name in names}
            return torch.from_numpy(self.session.run(None, values)[0])
        output = self.model(**inputs) if self.config is not None else self.model(*inputs.values())
        logits: Tensor = getattr(output, "logits", output)
        return logits.float()


def code(job: Job) -> Any:
    """The user's module."""
    spec = importlib.util.spec_from_file_location("round_trip_code", Path(job.data) / "code.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(job: Job) -> Iterator[dict[str, Any]]:
    """The test rows."""
    for line in (Path(job.data) / "test.jsonl").read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


# -- one function for each form of data --------------------------------------------------------------------------------


def read_texts(loaded: Loaded, result: Result, mean: Weighted) -> None:
    """One text, or a pair, with a class, a set of classes or a number. The loss is that of ``config.problem_type``."""
    job = loaded.job
    tokenizer = loaded.tokenizer
    names = loaded.class_names()
    problem = "single_label_classification"
    if job.library != "peft":
        problem = loaded.config.problem_type
    elif job.kind in ("number", "topics"):
        problem = {"number": "regression", "topics": "multi_label_classification"}[job.kind]
    for row in rows(job):
        texts = [row["text"], row["other"]] if job.kind == "pair" else [row["text"]]
        if len(texts) == 2 and tokenizer.sep_token is None:  # then a pair is one text
            texts = [f" {tokenizer.eos_token} ".join(texts)]
        inputs = tokenizer(*texts, truncation=True, max_length=job.max_length, return_tensors="pt")
        logits = loaded.logits(inputs)
        if problem == "regression":
            loss = mse_loss(logits.squeeze(1), torch.tensor([row["score"]]))
        elif problem == "multi_label_classification":
            wanted = torch.tensor([[float(name in row["topics"]) for name in names]])
            loss = binary_cross_entropy_with_logits(logits, wanted)
        else:
            loss = cross_entropy(logits, torch.tensor([names.index(row["label"])]))
        mean.add(loss)
        result.outputs += logits.tolist()


def read_tags(loaded: Loaded, result: Result, mean: Weighted) -> None:
    """Sentences of words with a tag each: the logits of the first token of every word."""
    names = loaded.class_names()
    for row in rows(loaded.job):
        inputs = loaded.tokenizer(row["words"], is_split_into_words=True, return_tensors="pt")
        places = inputs.word_ids()
        firsts = [places.index(word) for word in range(len(row["words"]))]
        logits = loaded.logits(inputs)[0, firsts]
        mean.add(cross_entropy(logits, torch.tensor([names.index(tag) for tag in row["tags"]])), len(firsts))
        result.outputs += logits.tolist()


def add_tokens(loaded: Loaded, mean: Weighted, ids: list[int], trained: list[bool]) -> None:
    """Add the loss of the next token in one row."""
    ids = ids[: loaded.job.max_length]
    trained = trained[: loaded.job.max_length]
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
    targets = torch.tensor([token if wanted else IGNORED for token, wanted in zip(ids[1:], trained[1:], strict=True)])
    mean.add(cross_entropy(loaded.logits(inputs)[0, :-1], targets), int((targets != IGNORED).sum()))


def read_documents(loaded: Loaded, result: Result, mean: Weighted) -> None:
    """Texts, each with its end token, as blocks of ``max_length`` tokens."""
    ids = list[int]()
    for row in rows(loaded.job):
        ids += [*loaded.tokenizer(row["document"])["input_ids"], loaded.tokenizer.eos_token_id]
    size = loaded.job.max_length
    for start in range(0, len(ids), size):
        block = ids[start : start + size]
        if len(block) > 1:
            add_tokens(loaded, mean, block, [True] * len(block))
    generate(loaded, result, [loaded.tokenizer(row["prompt"], return_tensors="pt") for row in prompts(loaded.job)])


def read_completions(loaded: Loaded, result: Result, mean: Weighted) -> None:
    """Prompts, and completions, which have the loss."""
    tokenizer = loaded.tokenizer
    for row in rows(loaded.job):
        prompt = tokenizer(row["prompt"])["input_ids"]
        answer = [*tokenizer(row["completion"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        add_tokens(loaded, mean, prompt + answer, [False] * len(prompt) + [True] * len(answer))
    generate(loaded, result, [tokenizer(row["prompt"], return_tensors="pt") for row in prompts(loaded.job)])


def read_chats(loaded: Loaded, result: Result, mean: Weighted) -> None:
    """A question and an answer, which has the loss, with the token that ends it."""
    tokenizer = loaded.tokenizer

    def render(messages: list[dict[str, str]], **options: Any) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    for row in rows(loaded.job):
        before = render(row["messages"][:1], add_generation_prompt=True)
        ids = render(row["messages"])
        assert ids[: len(before)] == before
        add_tokens(loaded, mean, ids, [False] * len(before) + [True] * (len(ids) - len(before)))
    questions = []
    for row in prompts(loaded.job):
        asked = tokenizer.apply_chat_template(
            row["messages"][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        questions.append(asked)
    generate(loaded, result, questions)


def read_targets(loaded: Loaded, result: Result, mean: Weighted) -> None:
    """Inputs and targets of an encoder-decoder."""
    asked = []
    for row in rows(loaded.job):
        inputs = loaded.tokenizer(row["prompt"], return_tensors="pt")
        targets = loaded.tokenizer(text_target=row["completion"], return_tensors="pt")["input_ids"]
        given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        start = torch.tensor([[loaded.config.decoder_start_token_id]])
        logits = loaded.logits({**given, "decoder_input_ids": torch.cat([start, targets[:, :-1]], dim=1)})
        mean.add(cross_entropy(logits[0], targets[0]), targets.shape[1])
        asked.append(given)
    generate(loaded, result, asked[: len(list(prompts(loaded.job)))], decoder=True)


def read_images(loaded: Loaded, result: Result, mean: Weighted) -> None:
    """A folder of images for each class."""
    from PIL import Image
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(loaded.job.folder)
    names = loaded.class_names()
    for path in sorted((Path(loaded.job.data) / "images" / "test").glob("*/*.png")):
        inputs = processor(Image.open(path), return_tensors="pt")
        logits = loaded.logits({"pixel_values": inputs["pixel_values"]})
        mean.add(cross_entropy(logits, torch.tensor([names.index(path.parent.name)])))
        result.outputs += logits.tolist()


def read_samples(loaded: Loaded, result: Result, mean: Weighted) -> None:
    """Samples of the user's module."""
    for values, target in code(loaded.job).rows()["test"]:
        logits = loaded.logits({"input": values[None]})
        mean.add(cross_entropy(logits, torch.tensor([target])))
        result.outputs += logits.tolist()


READERS = {
    "class": read_texts,
    "pair": read_texts,
    "topics": read_texts,
    "number": read_texts,
    "tags": read_tags,
    "document": read_documents,
    "completion": read_completions,
    "chat": read_chats,
    "seq2seq": read_targets,
    "image": read_images,
    "module": read_samples,
}


def prompts(job: Job) -> list[dict[str, Any]]:
    """The rows whose prompts are continued: the file that ``fastloop predict`` gets."""
    lines = (Path(job.data) / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def generate(loaded: Loaded, result: Result, asked: list[Mapping[str, Tensor]], decoder: bool = False) -> None:
    """Generate greedily, with the defaults of the export."""
    if not loaded.job.max_new_tokens or loaded.session is not None:
        return
    for inputs in asked:
        given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        (ids,) = loaded.model.generate(**given, max_new_tokens=loaded.job.max_new_tokens, do_sample=False, num_beams=1)
        new = ids[1 if decoder else given["input_ids"].shape[1] :]
        result.texts.append(loaded.tokenizer.decode(new, skip_special_tokens=True))
        result.new_tokens.append(len(new))


@torch.no_grad()
def reload(job: Job) -> Result:
    """Load a folder and compute the test rows."""
    result = Result()
    mean = Weighted()
    try:
        loaded = Loaded(job)
        READERS[job.kind](loaded, result, mean)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return Result(error=f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})")
    result.loss = mean.total / mean.weight
    if loaded.tokenizer is not None:
        fresh = type(loaded.tokenizer).from_pretrained(job.folder)  # as no call has changed it yet
        result.longest_text = fresh.model_max_length
        result.is_cut = fresh.backend_tokenizer.truncation is not None or fresh.backend_tokenizer.padding is not None
    if loaded.model is not None:
        result.dtype = str(next(loaded.model.parameters()).dtype)
    return result


def main() -> None:
    """Read the jobs, and write their results."""
    torch.set_num_threads(1)
    np.seterr(all="raise")
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    results = [asdict(reload(Job(**job))) for job in jobs]
    assert not any(name.partition(".")[0].startswith("fastloop") for name in sys.modules)
    Path(sys.argv[2]).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
