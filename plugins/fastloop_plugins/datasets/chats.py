"""Synthetic conversations about animals, for a recipe that must run offline.

A user asks two to four questions about one animal. The first question names it; later ones write "it". Some
conversations begin with a system message that asks for one word. So an answer depends on the animal, the question and
the system message:

    system     Answer in one word.
    user       What does a cow eat?
    assistant  Grass.
    user       How many legs does it have?
    assistant  Four.

A model that sees only the last question cannot answer it.

Only the standard library is needed, and one seed gives the same rows in every process.
"""

from itertools import permutations, product
from random import Random

ANIMALS = {
    "cow": ("grass", "four", "a barn", "moo"),
    "hen": ("grain", "two", "a coop", "cluck"),
    "bee": ("nectar", "six", "a hive", "buzz"),
    "dog": ("meat", "four", "a kennel", "woof"),
    "duck": ("weeds", "two", "a pond", "quack"),
    "spider": ("flies", "eight", "a web", "nothing"),
    "horse": ("hay", "four", "a stable", "neigh"),
    "mouse": ("seeds", "four", "a hole", "squeak"),
    "owl": ("mice", "two", "a tree", "hoot"),
    "frog": ("worms", "four", "a marsh", "croak"),
}
"""Animal -> food, number of legs, home, sound."""
QUESTIONS = (
    ("What does {} eat?", "It eats {}."),
    ("How many legs does {} have?", "It has {} legs."),
    ("Where does {} live?", "It lives in {}."),
    ("What does {} say?", "It says {}."),
)
"""Question and answer for each fact."""
BRIEF = "Answer in one word."


def chats(
    train: int = 900, validation: int = 150, test: int = 150, seed: int = 0
) -> dict[str, list[dict[str, list[dict[str, str]]]]]:
    """Write three splits of the given sizes: split -> rows of ``messages``, each a list of {role, content}.

    No conversation occurs twice, within a split or across them. The test split does not change with the other two
    sizes.

    Raises:
        ValueError: There are not as many different conversations.
    """
    orders = [order for turns in (2, 3, 4) for order in permutations(range(len(QUESTIONS)), turns)]
    rows = [{"messages": _chat(*chosen)} for chosen in product(ANIMALS, orders, (False, True))]
    if train + validation + test > len(rows):
        raise ValueError(f"there are {len(rows)} conversations, and the splits need {train + validation + test}")
    Random(seed).shuffle(rows)
    first = test + validation
    return {"train": rows[first : first + train], "validation": rows[test:first], "test": rows[:test]}


def _chat(animal: str, order: tuple[int, ...], brief: bool) -> list[dict[str, str]]:
    article = "an" if animal == "owl" else "a"
    messages = [{"role": "system", "content": BRIEF}] if brief else []
    for number, asked in enumerate(order):
        (question, answer), fact = QUESTIONS[asked], ANIMALS[animal][asked]
        content = f"{fact.split()[-1].capitalize()}." if brief else answer.format(fact)
        messages.append({"role": "user", "content": question.format("it" if number else f"{article} {animal}")})
        messages.append({"role": "assistant", "content": content})
    return messages
