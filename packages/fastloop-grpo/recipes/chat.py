"""Prompts of additions as conversations, and reward functions of their answers."""

import random
import re

QUESTION = "What is {} + {}? Answer with a number alone."


def prompts(train=360, validation=40, seed=0):
    """Questions of two numbers from 1 to 20; the answer is their sum."""
    pairs = [(first, second) for first in range(1, 21) for second in range(1, 21)]
    random.Random(seed).shuffle(pairs)
    rows = []
    for first, second in pairs[: train + validation]:
        message = {"role": "user", "content": QUESTION.format(first, second)}
        rows.append({"prompt": [message], "answer": first + second})
    return {"train": rows[validation:], "validation": rows[:validation]}


def is_correct(completions, answer):
    """1 if the last number of the answer is the sum, otherwise 0."""
    rewards = []
    for (message,), right in zip(completions, answer, strict=True):
        numbers = re.findall(r"\d+", message["content"])
        rewards.append(float(bool(numbers) and int(numbers[-1]) == right))
    return rewards


def is_number(completions):
    """1 if the answer is a number and nothing else, otherwise 0."""
    return [float(message["content"].strip().isdigit()) for (message,) in completions]
