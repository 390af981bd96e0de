"""The plugin ``curriculum``."""

from __future__ import annotations

import pytest

from fastloop import FastloopError, Plugin, hookimpl
from fastloop.testing import tiny_data


class Rows:
    """Samples with a key, and an attribute ``difficulty``; each value occurs twice."""

    def __init__(self) -> None:
        self.data = tiny_data(40)
        self.difficulty = [(7 * place) % 20 for place in range(40)]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, place):
        return self.data[place]


class Order(Plugin):
    """Records the ids of each step."""

    name = "order"

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[int] = []

    @hookimpl
    def before_step(self, batches) -> None:
        self.ids += [place for batch in batches for place in batch.ids]


@pytest.mark.parametrize("descending", [False, True])
def test_each_epoch_is_in_order_and_a_resumed_run_continues_it(tiny_run, descending):
    rows, options = Rows(), {"by": "difficulty", "descending": descending}
    tiny_run([{"curriculum": options}, whole := Order()], data=rows)
    epochs = [whole.ids[:40], whole.ids[40:]]
    for ids in epochs:
        assert sorted(ids) == list(range(40))
        values = [rows.difficulty[place] for place in ids]
        assert values == sorted(values, reverse=descending)
    assert epochs[0] != epochs[1], "equal values are shuffled"
    tiny_run([{"curriculum": options}, first := Order()], data=rows, max_steps=3, output="run")
    tiny_run([{"curriculum": options}, rest := Order()], data=rows, output="run", resume=True)
    assert first.ids + rest.ids == whole.ids


def test_samples_without_the_value_are_refused(tiny_run):
    with pytest.raises(FastloopError, match="TensorDataset has no 'lengths': expected an attribute"):
        tiny_run(["curriculum"])
