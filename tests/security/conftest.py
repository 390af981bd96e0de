"""Record what each test of this folder tries and what is promised."""

from fault_records import pytest_itemcollected

__all__ = ["pytest_itemcollected"]
