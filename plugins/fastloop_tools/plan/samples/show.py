"""Shows samples in the terminal, or as an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

import rich
from rich.text import Text

from fastloop.recipe import secrets
from fastloop_tools.shared.visible_text import visible

if TYPE_CHECKING:
    from fastloop_tools.plan.samples.read import Sample

LONGEST = 2000
"""Characters of a text that are shown, about a screen."""
BETWEEN = "\u00b7"
"""Stands between two tokens: few texts have it."""
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h2 { margin: 2rem 0 .5rem; font-size: 1.1rem } dt { color: #666; margin-top: .5rem } dd { margin: 0 }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font: 13px/1.6 ui-monospace, monospace }
.token { border-right: 1px solid #bbb } .loss { background: #b9e6c0; color: #000 } small { color: #444 }
"""


def show(samples: Sequence[Sample]) -> None:
    """Print samples. Tokens with a loss are green; without colours, they are in brackets."""
    console = rich.get_console()
    coloured = console.is_terminal and console.color_system is not None and not console.no_color
    for number, sample in enumerate(samples, 1):
        text = Text(f"sample {number}\n")
        for name, content in sample:
            if isinstance(content, str):
                lines = [visible(secrets.hide(line)) for line in shorten(content).split("\n")]
                text.append(f"  {visible(name)}: ").append("\n    ".join(lines) + "\n")
            else:
                text.append(f"  {visible(name)} ({count(content)}):\n    ")
                text.append(show_tokens(content, coloured)).append("\n")
        console.print(text, soft_wrap=True, highlight=False)
    if has_loss(samples):
        console.print(f"Tokens with a loss are {'green' if coloured else 'in brackets'}.", highlight=False)


def show_tokens(tokens: Sequence[tuple[str, str | None]], coloured: bool) -> Text:
    """Tokens for a terminal, with a dot between two. A label follows its token after a slash.

    Without colours, ``What·is·[42·.]`` has a loss at the last two tokens.
    """
    shown = Text()
    was_trained = False
    for index, (token, target) in enumerate(tokens):
        is_trained = target is not None
        if not coloured and was_trained and not is_trained:
            shown.append("]")
        if index:
            line_ended = tokens[index - 1][0].endswith("\n")
            shown.append("\n    " if line_ended else BETWEEN, style="dim" if coloured else "")
        if not coloured and is_trained and not was_trained:
            shown.append("[")
        text = visible(token)
        if target:
            text += f"/{visible(target)}"
        shown.append(text, style="black on green" if coloured and is_trained else "")
        was_trained = is_trained
    if was_trained and not coloured:
        shown.append("]")
    return shown


def count(tokens: Sequence[tuple[str, str | None]]) -> str:
    """The number of tokens, and of those with a loss."""
    trained = sum(target is not None for _, target in tokens)
    return f"{len(tokens)}, {trained} with a loss" if trained else f"{len(tokens)}"


def has_loss(samples: Sequence[Sample]) -> bool:
    """Whether any token has a loss."""
    for sample in samples:
        for _, content in sample:
            if not isinstance(content, str) and any(target is not None for _, target in content):
                return True
    return False


def shorten(text: str) -> str:
    """The start of a long text, and the number of characters that follow."""
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}\n... and {len(text) - LONGEST} more characters"


def page(samples: Sequence[Sample], title: str) -> str:
    """Samples as a self-contained HTML page without scripts."""
    parts = []
    for number, sample in enumerate(samples, 1):
        parts.append(f"<h2>sample {number}</h2>\n<dl>")
        for name, content in sample:
            head = escape(name)
            if isinstance(content, str):
                shown = escape(shorten(content))
            else:
                head += f" ({count(content)})"
                shown = "".join(token_html(token) for token in content)
            parts.append(f"<dt>{head}</dt>\n<dd><pre>{shown}</pre></dd>")
        parts.append("</dl>")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>Samples of {escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f'<h1>Samples of {escape(title)}</h1>\n<p>Tokens with a loss are <span class="loss">green</span>.</p>\n'
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def token_html(token: tuple[str, str | None]) -> str:
    """A token. Line ends are shown, and break the line."""
    text, target = token
    shown = escape(visible(text))
    if target:
        shown += f"<small>/{escape(target)}</small>"
    classes = "token" if target is None else "token loss"
    line_end = "\n" if text.endswith("\n") else ""
    return f'<span class="{classes}">{shown}</span>{line_end}'
