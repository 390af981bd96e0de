"""The picture of the README: fastloop's plugins, one added after the other, and other loops, on one scale.

    python benchmarks/speed_picture.py     # writes docs/speed.svg from two files of benchmarks/results/

``peers.json`` has the other loops, and ``ablation-minilm.json`` the plugins. Both train MiniLM-L6 on batches of 12 film
reviews on the same machine, in runs of their own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from _measure import RESULTS, ROOT

from fastloop_tools.shared.svg import svg

PEERS = {
    "naive": "plain loop, fp32, padded to 512",
    "bare": "plain loop, bf16",
    "hf-trainer": "HF Trainer, bf16, by length",
    "hf-trainer+allocator": "the same, with our allocator",
}
"""Arm of ``peers.json`` -> its name in the picture."""
WIDTH = 900
"""Width of the picture, in units of SVG, as the other sizes."""
ROW = 30
"""Height of a row."""
LEFT = 230
"""Width of the names."""
LONGEST = 500
"""Length of the longest bar."""
PICTURE = ROOT / "docs" / "speed.svg"
GRAY = "#8a8f98"
GREEN = "#2a7f62"
STYLE = ".head { font-weight: 600; }"


@dataclass(frozen=True)
class Row:
    """A bar.

    Attributes:
        name: Its name.
        tokens: Real tokens a second.
        color: Its color.
    """

    name: str
    tokens: float
    color: str


def read_peers(record: dict[str, Any]) -> list[Row]:
    """The other loops, in the order of ``PEERS``."""
    speeds = {arm["arm"]: arm["tokens_per_second"] for arm in record["summary"]}
    return [Row(name, speeds[arm], GRAY) for arm, name in PEERS.items() if arm in speeds]


def read_plugins(record: dict[str, Any]) -> list[Row]:
    """The steps of an ablation."""
    rows = []
    for variant in record["variants"]:
        if variant["kind"] == "without" or not variant["results"]:
            continue
        rows.append(Row(variant["title"], variant["results"]["tokens_per_second"]["median"], GREEN))
    return rows


def draw(groups: dict[str, list[Row]], title: str) -> str:
    """Bars with a heading for each group."""
    longest = max(max(row.tokens for row in rows) for rows in groups.values())
    lines: list[str] = []
    y = 10
    for heading, rows in groups.items():
        lines.append(f'<text class="head" x="12" y="{y + 18}">{heading}</text>')
        y += ROW
        for row in rows:
            width = row.tokens / longest * LONGEST
            lines.append(f'<text x="{LEFT}" y="{y + 16}" text-anchor="end">{row.name}</text>')
            lines.append(f'<rect x="{LEFT + 10}" y="{y}" width="{width:.1f}" height="22" fill="{row.color}"/>')
            lines.append(f'<text x="{LEFT + 18 + width:.1f}" y="{y + 16}">{row.tokens:,.0f} tokens/s</text>')
            y += ROW
        y += ROW // 2
    return svg(title, WIDTH, y, lines, STYLE)


def picture() -> str:
    """The picture of the newest results."""
    peers = json.loads((RESULTS / "peers.json").read_text())
    ablation = json.loads((RESULTS / "ablation-minilm.json").read_text())
    groups = {"other loops": read_peers(peers), "fastloop, one plugin after the other": read_plugins(ablation)}
    return draw(groups, "Real tokens per second on two CPU cores, MiniLM-L6 on film reviews")


if __name__ == "__main__":
    PICTURE.write_text(picture())
    print(PICTURE)
