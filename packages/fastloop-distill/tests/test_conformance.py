"""The conformance suite: declarations, documents, resume with the same bits, two processes."""

from distill_runs import TASKS, student, teacher
from fastloop.testing import Conformance


class TestConformance(Conformance):
    plugin = "distill"
    options = {"teacher": teacher("texts")}
    task = {**TASKS["texts"], "model": student("texts")}


class TestConformanceOfStates(Conformance):
    plugin = "distill"
    options = {"teacher": teacher("language"), "states": "mse"}
    task = {**TASKS["language"], "model": student("language")}
