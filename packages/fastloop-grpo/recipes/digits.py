"""Prompts and reward functions of a task that a small model learns from scratch, offline."""


def prompts(validation=100):
    """Prompts of three digits, in a mixed order; the answer is the first digit."""
    rows = []
    for place in range(1000):
        number = place * 389 % 1000
        rows.append({"prompt": f"{number:03}=", "answer": f"{number:03}"[0]})
    return {"train": rows[validation:], "validation": rows[:validation]}


def repeats(completions, answer):
    """The share of the completion's characters that are the answer."""
    shares = []
    for text, digit in zip(completions, answer, strict=True):
        shares.append(text.count(digit) / max(len(text), 1))
    return shares


def is_short(completions):
    """1 for at most four characters, otherwise 0."""
    return [float(len(text) <= 4) for text in completions]
