"""Check the English of pages, docstrings and comments: words that fastloop does not use, and overlong sentences.

    python .ci/check_wording.py [FILE ...]

CONTRIBUTING.md states the rules. Code, quoted text, tables of Markdown and output blocks are not checked.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 30
"""Words of a sentence in a page. Longer ones are hard to follow."""
WORDS = {
    r"go(?:es|ing)? on|went on": "continue, resume, keep training",
    r"(?:is|are|was|were|be|been) said|say so|says so|said so": "log, print, report, raise an error",
    r"told|tells?|telling": "report, show, know",
    r"come by|comes by|came by": "every process must call it",
    r"(?:is|are|was|were) asked|what is asked": "call, request, name the actor",
    r"held against|holds? \w+ against": "compare with",
    r"rungs?": "variant",
    r"ladders?": "ablation",
    r"forecasts?|forecasted": "estimate",
    r"receipts?": "report",
    r"(?:the|our|in-|own) house": "project",
    r"kits?": "helpers",
    r"comes? out of|came out of": "is raised by, results from",
    r"so many|as many as there are": "give the number",
    r"by itself|of its own accord": "automatically, alone",
    r"by heart": "memorize",
    r"(?:is|are|was|were|be|been|leaves?) left alone|leaves? (?:it|them) alone": "unchanged, undisturbed",
    r"(?:give|gives|given|gave) (?:out|back)": "return",
    r"(?:is|are|was|were|be) to be had|cannot be had": "available, not available",
    r"of one's own": "separate, your own",
    r"which says?|what (?:it|they) says?": "which states, its content",
}
"""Pattern -> what to write instead."""
OPENINGS = re.compile(
    r"^(?:What|Those (?:that|who|which)|Of (?:a|an|the|its|these|those|all|each|which|what|several|two|many)"
    r"|That (?:a|an|the|all|each|every|no|it|its|nothing)|An? \w+ of (?:it|them))\b"
)
"""How no sentence begins: name the actor, then the verb. A question may begin with "What"."""
PATTERNS = [
    (re.compile(rf"(?<![\w-])(?:{pattern})(?![\w-])", re.IGNORECASE), pattern, instead)
    for pattern, instead in WORDS.items()
]
SENTENCE = re.compile(
    r"(?<=[.!?:;])(?<!e\.g\.)(?<!i\.e\.)(?<! al\.)\s+(?=[A-Z`\"'(])|(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<! "
    r"al\.)\s+|(?<=[.!?])\s*$"
)
MADE = re.compile(r"(?ms)^<!-- made: ([\w-]+) -->$.*?^<!-- end: \1 -->$|\A<!-- plugins/.*\Z")
"""A part of a page that is made from docstrings, whose sentences have no limit."""
CODE = re.compile(r"``[^`]*``|`[^`]*`|\"[^\"]*\"|https?://\S+")


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """The prose of a docstring or a Markdown page: ``(line offset, paragraph)``. Code, tables and headings are left
    out."""
    fenced, lines, first = False, [], 0
    for number, line in enumerate([*text.split("\n"), ""]):
        stripped = line.strip()
        if stripped.startswith("```"):
            fenced = not fenced
        begins = re.match(r"([-*+]|\d+\.)\s|(\w[\w ,.*]*|``[^`]*``):(?:\s|$)", stripped) is not None
        ends = (
            fenced
            or not stripped
            or stripped.startswith(("|", "#", "```", "<", ">>>", "$ "))
            or (line.startswith("    ") and not lines)
        )
        if (ends or begins) and lines:
            yield first, " ".join(lines)
            lines = []
        if not ends:
            if not lines:
                first = number
            lines.append(re.sub(r"^([-*+]|\d+\.)\s+", "", stripped))


def problems(text: str, limited: bool) -> Iterator[tuple[int, str]]:
    """``(line offset, message)`` for each problem in a text."""
    for offset, paragraph in paragraphs(text):
        prose = re.sub(r"(?<!\w)\*{1,2}|\*{1,2}(?!\w)", "", CODE.sub("X", paragraph))
        for pattern, _, instead in PATTERNS:
            for match in pattern.finditer(prose):
                yield offset, f"{match[0]!r}: write instead: {instead}"
        for sentence in SENTENCE.split(prose):
            if OPENINGS.match(sentence) and not sentence.rstrip().endswith("?"):
                yield (
                    offset,
                    f"a sentence begins with {' '.join(sentence.split()[:3])!r}: name the actor, then the verb",
                )
            if limited and len(sentence.split()) > LONGEST:
                yield (
                    offset,
                    f"a sentence of {len(sentence.split())} words, {LONGEST} at most: "
                    f"{' '.join(sentence.split()[:8])} ...",
                )


def texts(path: Path) -> Iterator[tuple[int, str, bool]]:
    """The docstrings and comments of a Python file, or the parts of a page:
    ``(first line, text, whether its sentences have a limit)``."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        written = MADE.sub(lambda part: "\n" * part[0].count("\n"), source)
        yield 1, written, True
        for part in MADE.finditer(source):
            yield source.count("\n", 0, part.start()) + 1, part[0], False
        return
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for field in ("body",):
            body = getattr(node, field, None)
            for statement in body if isinstance(body, list) else []:
                if (
                    isinstance(statement, ast.Expr)
                    and isinstance(statement.value, ast.Constant)
                    and isinstance(statement.value.value, str)
                ):
                    value = statement.value
                    text = str(value.value)
                    first, _, rest = text.partition("\n")
                    yield (
                        value.lineno,
                        first + "\n" + "\n".join(line[value.col_offset :] for line in rest.split("\n")),
                        False,
                    )
    previous, block = -1, []
    for token in [*tokenize.generate_tokens(io.StringIO(source).readline)]:
        if token.type != tokenize.COMMENT or token.string.startswith(("# type:", "# noqa", "# fmt:", "#!", "# --")):
            continue
        if token.start[0] != previous + 1 and block:
            yield block[0][0], "\n".join(line for _, line in block), False
            block = []
        previous = token.start[0]
        block.append((token.start[0], token.string.lstrip("# ").split("# type:")[0]))
    if block:
        yield block[0][0], "\n".join(line for _, line in block), False


def main(names: list[str]) -> int:
    """Print every problem; returns the exit code."""
    if not names:
        listed = subprocess.run(
            ["git", "ls-files", "*.md", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split()
        names = [name for name in listed if name != "CHANGELOG.md" and not name.startswith(".github/")]
    count = 0
    for name in names:
        for line, text, limited in texts(ROOT / name):
            for offset, message in problems(text, limited):
                count += 1
                print(f"{name}:{line + offset}: {message}")
    if count:
        print(f"{count} problems. CONTRIBUTING.md states the rules of wording.")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
