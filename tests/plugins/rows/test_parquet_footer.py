"""The footer of a Parquet file is checked before pyarrow reads it: empty columns take 200 times their bytes.

Modules:
    plugins/fastloop_plugins/rows/parquet.py
"""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pytest
from bombs import empty_columns
from pyarrow import parquet

from fastloop.errors import RecipeError
from fastloop.testing import expect_problem
from fastloop_plugins.rows import parquet as reader
from fastloop_plugins.rows.formats import FileLayout
from fastloop_plugins.rows.options import Read

LAYOUT = FileLayout(Read(), {"text": "text"})


@pytest.mark.parametrize(("groups", "columns"), [(2, 50_000), (50, 2000)])
def test_a_footer_that_takes_gigabytes_is_refused_before_it_is_read(groups, columns, monkeypatch):
    path = empty_columns("a.parquet", groups, columns)
    monkeypatch.setattr(reader.parquet, "ParquetFile", lambda *_, **__: pytest.fail("read by pyarrow"))
    with expect_problem(f"too-large a.parquet {Path(path).stat().st_size} 50 data.read.max_expansion", RecipeError):
        LAYOUT.read(path)


def test_a_list_that_claims_more_items_than_the_footer_has_bytes_is_malformed():
    path = Path(empty_columns("a.parquet", 2, 20))
    content = path.read_bytes()
    group = b"\x19\xfc\x14"  # of 20 columns
    assert content.count(group) == 2
    path.write_bytes(content.replace(group, b"\x19\xfc\x7f", 1))
    with expect_problem("file-unreadable a.parquet footer", RecipeError):
        LAYOUT.read("a.parquet")


@pytest.mark.parametrize("rows", [1, 40])
def test_a_table_of_many_columns_is_read(rows):
    columns = {f"column {number}": list(range(rows)) for number in range(1500)}
    table = pyarrow.table({"text": ["a film"] * rows, **columns})
    parquet.write_table(table, "wide.parquet", row_group_size=max(rows // 4, 1))
    assert len(LAYOUT.read("wide.parquet")) == rows
