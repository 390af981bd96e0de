"""Rephrase the messages of core and plugins with synonyms, and report which tests break.

    python benchmarks/synonyms.py                  # 300 quick tests, drawn with seed 0
    python benchmarks/synonyms.py --seed 1 --tests 500
    python benchmarks/synonyms.py --show           # print the rephrased messages, and run nothing

A test should compare the code, the place, the names and the numbers of a message. Then its words can be improved
without a change of tests. In a copy of the tree, each word of ``SYNONYMS`` is replaced in errors, warnings, log lines
and in the sentences that functions return for them. Names, keys, options, numbers and placeholders stay. The drawn
tests run before and after. A test breaks if it passes before and fails after. Tests whose subject is the wording are
listed apart.

On 2026-11-28, 2 of 280 tests broke: 300 were drawn with seed 1, and 20 are about wording or fail anyway.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

from _tree_copy import TreeCopy

SYNONYMS = {
    "accepts": "permits",
    "again": "anew",
    "because": "since",
    "before": "ahead of",
    "begins": "starts",
    "cannot": "is unable to",
    "changed": "altered",
    "changes": "alters",
    "choose": "pick",
    "contains": "includes",
    "continue": "proceed",
    "damaged": "corrupt",
    "differ": "deviate",
    "differs": "deviates",
    "different": "distinct",
    "empty": "blank",
    "ended": "finished",
    "expected": "wanted",
    "folder": "directory",
    "found": "saw",
    "give": "pass",
    "ignored": "disregarded",
    "initialized": "set up",
    "installed": "present",
    "lacks": "misses",
    "leave": "keep",
    "leaves": "keeps",
    "listed": "enumerated",
    "missing": "absent",
    "must": "has to",
    "needs": "demands",
    "only": "just",
    "other": "further",
    "reinitialized": "reset",
    "remove": "drop",
    "repeated": "duplicate",
    "requires": "demands",
    "resumed": "continued",
    "returned": "produced",
    "same": "identical",
    "saved": "stored",
    "several": "multiple",
    "starts": "begins",
    "takes": "permits",
    "texts": "documents",
    "use": "employ",
    "used": "employed",
    "wrong": "incorrect",
    "written": "stored",
}
"""Word of a message -> another word for it. None of them names a key, an option or a file format."""
MESSAGE_CALLS = re.compile(r"(Error|Problem|[Ww]arning|append|info|error|note_once|refuse)$")
"""The last part of the name of a function that takes a message."""
KEPT_FIELDS = ("code", "place", "command")
"""Fields of a problem that are no sentences."""
SENTENCE_WORDS = 4
"""Words that make text, which a function assigns or returns, a sentence."""
NAMES = r"\{(?:[^{}]|\{[^{}]*\})*\}|`[^`]*`|(?<!\w)'[^']*'(?!\w)"
"""Parts of a message that stay: placeholders, code and quoted names."""
WORD = r"(?<![\w./=:{}\\-])[A-Za-z]+(?![\w/=({-]|[.:']\w)"
"""A word that is no part of a path, a key, an option or an assignment."""
PART = re.compile(rf"{NAMES}|{WORD}")
WORDING_TESTS = ("tests/docs/", "tests/test_readme.py", "tests/core/test_problem.py", "tests/core/test_clause.py")
"""Tests whose subject is the wording: pages that show messages, and the text that fields make."""


def messages(tree: ast.AST) -> Iterator[ast.expr]:
    """The literals of messages in a module: arguments of calls, and sentences that functions assign or return."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and MESSAGE_CALLS.search(ast.unparse(node.func)):
            for argument in node.args:
                yield from literals(argument)
            for keyword in node.keywords:
                if keyword.arg not in KEPT_FIELDS:
                    yield from literals(keyword.value)
        elif isinstance(node, ast.FunctionDef):
            for statement in ast.walk(node):
                if isinstance(statement, ast.Return | ast.Yield | ast.Assign) and statement.value is not None:
                    yield from (part for part in literals(statement.value) if is_sentence(part))


def literals(node: ast.expr) -> Iterator[ast.expr]:
    """The strings that an expression joins or chooses from."""
    if (isinstance(node, ast.Constant) and isinstance(node.value, str)) or isinstance(node, ast.JoinedStr):
        yield node
    elif isinstance(node, ast.BinOp):
        yield from literals(node.left)
        yield from literals(node.right)
    elif isinstance(node, ast.IfExp):
        yield from literals(node.body)
        yield from literals(node.orelse)


def is_sentence(literal: ast.expr) -> bool:
    """Whether a string has some words, and is no markup or code."""
    text = ast.unparse(literal)
    return len(text.split()) >= SENTENCE_WORDS and "<" not in text and "\\n" not in text


def rephrase(code: str) -> str:
    """A module with synonyms in its messages."""
    content = code.encode()
    starts = [0]
    for line in content.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    spans = set()
    for node in messages(ast.parse(code)):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = starts[node.lineno - 1] + node.col_offset
        spans.add((start, starts[node.end_lineno - 1] + node.end_col_offset))
    for start, end in sorted(spans, reverse=True):
        literal = PART.sub(replace, content[start:end].decode())
        content = content[:start] + literal.encode() + content[end:]
    changed = content.decode()
    ast.parse(changed)
    return changed


def replace(match: re.Match[str]) -> str:
    """The synonym of a word, with a capital letter if the word has one. Other parts stay."""
    word = match[0]
    synonym = SYNONYMS.get(word.lower(), word)
    return synonym[:1].upper() + synonym[1:] if word[:1].isupper() else synonym


def rephrase_tree(folder: Path) -> int:
    """Rephrase the messages of core and plugins in a copy of the tree. Returns the number of changed lines."""
    count = 0
    for part in ("core", "plugins"):
        for path in sorted((folder / part).rglob("*.py")):
            code = path.read_text(encoding="utf-8")
            changed = rephrase(code)
            path.write_text(changed, encoding="utf-8")
            count += sum(a != b for a, b in zip(code.splitlines(), changed.splitlines(), strict=True))
    return count


def is_about_wording(test: str) -> bool:
    return test.startswith(WORDING_TESTS)


def report(ran: Collection[str], broken: Collection[str]) -> str:
    """Which tests break, by folder, and the share."""
    counted = [test for test in ran if not is_about_wording(test)]
    breaks = sorted(test for test in broken if not is_about_wording(test))
    folders = Counter(test.partition("::")[0].rpartition("/")[0] for test in breaks)
    lines = [f"  {test}" for test in breaks]
    lines += [f"{count:4} {folder}" for folder, count in folders.most_common()]
    lines += [f"about wording: {test}" for test in sorted(broken) if is_about_wording(test)]
    lines.append(f"{len(breaks)} of {len(counted)} tests break: {len(breaks) / max(len(counted), 1):.1%}")
    return "\n".join(lines)


def show_messages() -> None:
    """Print each changed line of the product."""
    from _measure import ROOT

    for part in ("core", "plugins"):
        for path in sorted((ROOT / part).rglob("*.py")):
            code = path.read_text(encoding="utf-8")
            for before, after in zip(code.splitlines(), rephrase(code).splitlines(), strict=True):
                if before != after:
                    print(f"{path.relative_to(ROOT)}: {after.strip()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--tests", type=int, default=300, metavar="N", help="size of the sample")
    parser.add_argument("--show", action="store_true", help="print the rephrased messages, and run nothing")
    arguments = parser.parse_args()
    if arguments.show:
        show_messages()
        return
    marks = "not slow"
    with tempfile.TemporaryDirectory() as name:
        copy = TreeCopy(Path(name) / "tree")
        collected = copy.collect(marks)
        drawn = random.Random(arguments.seed).sample(collected, min(arguments.tests, len(collected)))
        before = copy.run(drawn, marks) or {}
        passed = [test for test, has_passed in before.items() if has_passed]
        print(f"{len(passed)} of {len(drawn)} drawn tests pass; seed {arguments.seed}", flush=True)
        print(f"{rephrase_tree(copy.folder)} lines are rephrased", flush=True)
        after = copy.run(drawn, marks) or {}
        broken = [test for test in passed if not after.get(test, True)]
    print(report(passed, broken))
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
