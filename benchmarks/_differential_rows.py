"""The rows of ``differential.py``: what is trained, by which recipe, and by which trainer of another library.

To compare one more training, add it to ``ROWS``; a new kind of data is one more function in ``SAMPLES``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

STEPS = 5
BATCH = 4
MAX_LENGTH = 96
ADAPTER = {"r": 8, "alpha": 16}
"""Options of ``lora`` in the rows that have adapters; the peers get the same by PEFT's names."""

ANIMALS = ["owl", "cow", "cat", "fox", "bee", "dog", "hen", "pig", "hare", "frog"]
FOOD = ["mice", "grass", "fish", "rabbits", "pollen", "bones", "grain", "roots", "leaves", "flies"]
PLACES = ["forest", "field", "house", "den", "hive", "kennel", "barn", "meadow", "burrow", "pond"]

Sample = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A training that both sides do.

    Attributes:
        name: The kind of training, as the page names it.
        peer: The trainer of the other library; ``PEERS`` of ``_differential_sides.py`` has a function for each.
        samples: The key of ``SAMPLES``.
        data: The section ``data`` of the recipe, without the file.
        task: The task plugin of the recipe with its options; None: the recipe's default.
        model: The language model ``decoder``; ``bos``, a small one that begins each text with a token; or ``encoder``.
        given: Arguments of the peer.
        reason: Why the sides differ, if they do and we know it.
    """

    name: str
    peer: str
    samples: str
    data: dict[str, Any]
    task: dict[str, Any] | None = None
    model: Literal["decoder", "bos", "encoder"] = "decoder"
    given: dict[str, Any] = field(default_factory=dict)
    reason: str = ""


ROWS = [
    Row(
        name="chat",
        peer="SFTTrainer",
        samples="chats",
        data={"messages": "messages"},
        given={"assistant_only_loss": True},
    ),
    Row(
        name="completion",
        peer="SFTTrainer",
        samples="completions",
        data={"prompt": "prompt", "completion": "completion"},
    ),
    Row(
        name="text",
        peer="SFTTrainer",
        samples="texts",
        data={"text": "text"},
        given={"packing": True, "packing_strategy": "wrapped"},
    ),
    Row(
        name="completion, BOS",
        peer="SFTTrainer",
        samples="completions",
        data={"prompt": "prompt", "completion": "completion"},
        model="bos",
    ),
    Row(
        name="text, BOS",
        peer="SFTTrainer",
        samples="texts",
        data={"text": "text"},
        given={"packing": True, "packing_strategy": "wrapped"},
        model="bos",
    ),
    Row(name="dpo", peer="DPOTrainer", samples="pairs_of_answers", data={}, task={"dpo": {"beta": 0.1}}),
    Row(
        name="kto",
        peer="KTOTrainer",
        samples="judged_answers",
        data={},
        task={"kto": {"beta": 0.1}},
        reason="fastloop pairs a prompt with the completion of the row before it in the data, and TRL with one of the "
        "same batch. The estimate of the divergence differs by that.",
    ),
    Row(name="reward", peer="RewardTrainer", samples="pairs_of_answers", data={}, task={"reward-model": {}}),
    Row(
        name="embedding",
        peer="SentenceTransformerTrainer",
        samples="questions",
        data={"text": "question", "other": "answer"},
        task={"embedding": {"loss": "multiple_negatives"}},
        model="encoder",
    ),
    Row(
        name="reranker",
        peer="CrossEncoderTrainer",
        samples="scored_pairs",
        data={"text": "question", "other": "answer", "label": "score", "label_type": "number"},
        task={"reranker": {"loss": "binary"}},
        reason="the head is new. fastloop trains it, as PEFT does for a classifier, and `CrossEncoder.add_adapter` "
        "leaves it at random.",
        model="encoder",
    ),
]


def message(role: str, content: str) -> Sample:
    return {"role": role, "content": content}


def draw(index: int) -> tuple[str, str, str]:
    """An animal, its food and its place. No two of the first hundred are alike."""
    animal = index % len(ANIMALS)
    other = (index + index // len(ANIMALS)) % len(FOOD)
    return ANIMALS[animal], FOOD[other], PLACES[animal]


def chats(count: int) -> list[Sample]:
    """Conversations of one or two turns, some with a system message."""
    rows = []
    for index in range(count):
        animal, food, place = draw(index)
        messages = [message("user", f"What does the {animal} eat?"), message("assistant", f"It eats {food}.")]
        if index % 3 == 0:
            messages.insert(0, message("system", "Answer in one sentence."))
        if index % 2 == 0:
            messages += [message("user", "And where?"), message("assistant", f"It lives in the {place}.")]
        rows.append({"messages": messages})
    return rows


def completions(count: int) -> list[Sample]:
    rows = []
    for index in range(count):
        animal, food, place = draw(index)
        rows.append({"prompt": f"Q: What does the {animal} eat?\nA:", "completion": f" {food}, near the {place}."})
    return rows


def texts(count: int) -> list[Sample]:
    """Texts that fill more blocks than the steps read."""
    rows = []
    for index in range(count * 6):
        animal, food, place = draw(index)
        rows.append({"text": f"The {animal} number {index} eats {food} and lives in the {place}, as everyone knows."})
    return rows


def pairs_of_answers(count: int) -> list[Sample]:
    rows = []
    for index in range(count):
        animal, food, place = draw(index)
        prompt = [message("user", f"What does the {animal} eat?")]
        chosen = [message("assistant", f"It eats {food}.")]
        rejected = [message("assistant", f"No idea, but it lives in the {place} {index % 5} days a week.")]
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return rows


def judged_answers(count: int) -> list[Sample]:
    rows = []
    for index, row in enumerate(pairs_of_answers(count)):
        is_good = index % 2 == 0
        answer = row["chosen"] if is_good else row["rejected"]
        rows.append({"prompt": row["prompt"], "completion": answer, "label": is_good})
    return rows


def questions(count: int) -> list[Sample]:
    rows = []
    for index in range(count):
        animal, food, place = draw(index)
        question = f"What does the {animal} number {index} eat?"
        rows.append({"question": question, "answer": f"{food} that it finds in the {place}"})
    return rows


def scored_pairs(count: int) -> list[Sample]:
    return [row | {"score": float(index % 2)} for index, row in enumerate(questions(count))]


SAMPLES: dict[str, Callable[[int], list[Sample]]] = {
    "chats": chats,
    "completions": completions,
    "texts": texts,
    "pairs_of_answers": pairs_of_answers,
    "judged_answers": judged_answers,
    "questions": questions,
    "scored_pairs": scored_pairs,
}
"""Name -> function that makes the samples of a number of rows."""
