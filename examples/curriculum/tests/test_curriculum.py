"""Tests of curriculum: the order of samples, resuming, errors, and fastloop's conformance tests."""

import pytest
from fastloop import FastloopError, Plugin, hookimpl
from fastloop.testing import TEXTS, Conformance, tiny_data

from curriculum import Curriculum


class Samples:
    """Samples with an attribute ``difficulty``; each value occurs twice."""

    def __init__(self):
        self.data = tiny_data(40)
        self.difficulty = [(7 * place) % 20 for place in range(40)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, place):
        return self.data[place]


class Order(Plugin):
    """Records the ids of each step."""

    name = "order"

    def __init__(self):
        super().__init__()
        self.ids = []

    @hookimpl
    def before_step(self, batches):
        self.ids += [place for batch in batches for place in batch.ids]


@pytest.mark.parametrize("descending", [False, True])
def test_each_epoch_is_in_order_and_a_resumed_run_continues_it(tiny_run, descending):
    samples = Samples()

    def ids(**arguments):
        order = Order()
        tiny_run([Curriculum(by="difficulty", descending=descending), order], data=samples, **arguments)
        return order.ids

    whole = ids()
    epochs = [whole[:40], whole[40:]]
    for epoch in epochs:
        assert sorted(epoch) == list(range(40))
        values = [samples.difficulty[place] for place in epoch]
        assert values == sorted(values, reverse=descending)
    assert epochs[0] != epochs[1], "equal values are shuffled"
    assert ids(max_steps=3, output="run") + ids(output="run", resume=True) == whole


def test_samples_without_the_value_are_refused(tiny_run):
    with pytest.raises(FastloopError, match="TensorDataset has no 'lengths': expected an attribute"):
        tiny_run([Curriculum()])


def test_equal_values_are_reported(tiny_run, caplog):
    samples = Samples()
    samples.difficulty = [3.0] * 40
    tiny_run([Curriculum(by="difficulty")], data=samples)
    assert "all samples have difficulty 3: there is nothing to sort" in caplog.text


class TestConformance(Conformance):
    plugin = "curriculum"
    task = TEXTS
    slow = ("processes[fsdp]", "processes[deepspeed]")
