"""Models that fastloop exports, loaded by the libraries that users load them with, in a process without fastloop.

``round_trip_cases`` has the table: each task, full and with LoRA, from each kind of checkpoint, in each form.
"""

from __future__ import annotations

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from needed_packages import skip_file_without
from round_trip_cases import CASES, KINDS, QUICK, REFUSED, Case, Refusal
from round_trip_data import LONGEST
from round_trip_runs import RoundTrip, differences

pytest.importorskip("peft")
skip_file_without("onnxruntime")

TEXT_CASES = [case for case in CASES if case.kind not in ("image", "module")]


def parameter(case: Case | Refusal, *more: str) -> ParameterSet:
    """A case of a test, slow unless it is quick."""
    marks = [] if case.name in QUICK else [pytest.mark.slow]
    return pytest.param(case, *more, id="-".join((case.name, *more)), marks=marks)


FORMS = [(case, form) for case in CASES for form in ("model", *case.forms)]


@pytest.fixture(scope="module")
def trip(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RoundTrip:
    """The runs of all selected tests of this file, and their exports as a fresh process has loaded them."""
    selected: dict[str, Case] = {}
    for item in request.session.items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        refusal = parameters.get("refusal")
        case = parameters.get("case")
        if isinstance(case, Case):
            selected[case.name] = case
        elif isinstance(refusal, Refusal) and refusal.form != "model":
            selected.setdefault(refusal.case.name, refusal.case)
    made = RoundTrip(tmp_path_factory.mktemp("round_trip"))
    made.run(list(selected.values()))
    return made


def test_the_names_of_the_table_are_unique():
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))
    assert set(names) >= QUICK
    assert {case.kind for case in CASES} == KINDS.keys()


@pytest.mark.parametrize(("case", "form"), [parameter(*pair) for pair in FORMS])
def test_an_export_computes_what_the_last_evaluation_did(trip, case, form):
    trained = trip.trained[case.name]
    assert form not in trained.errors, trained.errors[form]
    assert differences(case, trained, trip.results[case.name, form]) == []


@pytest.mark.parametrize("case", [parameter(case) for case in CASES])
def test_predict_computes_what_the_last_evaluation_did(trip, case):
    trained, kind = trip.trained[case.name], KINDS[case.kind]
    assert "predict" not in trained.errors, trained.errors["predict"]
    rows = trained.predicted
    if kind.generates:
        assert len(rows) == len(trip.results[case.name, "model"].texts)  # each is compared with the export's
        return
    logits = torch.tensor(trained.outputs)
    if case.kind == "number":
        assert [row["prediction"] for row in rows] == pytest.approx(logits[:, 0].tolist(), abs=1e-5)
        return
    names = trained.classes or [str(index) for index in range(logits.shape[1])]
    if case.kind == "tags":
        likely = logits.softmax(1).max(1)
        assert [tag for row in rows for tag in row["tags"]] == [names[index] for index in likely.indices]
        found = [value for row in rows for value in row["probabilities"]]
        assert found == pytest.approx(likely.values.tolist(), abs=1e-5)
        return
    expected = logits.sigmoid() if case.kind == "topics" else logits.softmax(1)
    values = torch.tensor([[row[f"probability_{name}"] for name in names] for row in rows])
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "case",
    [parameter(case) for case in CASES if case.has_new_weights],
)
def test_weights_that_the_checkpoint_lacks_are_trained_or_reported(trip, case):
    trained = trip.trained[case.name]
    assert "weights" not in trained.errors, trained.errors["weights"]
    reported = " ".join(message for message in trained.messages if "frozen" in message)
    silent = [name for name, is_trained in trained.fresh.items() if not is_trained and name not in reported]
    assert silent == []


@pytest.mark.parametrize("case", [parameter(case) for case in TEXT_CASES])
def test_an_exported_tokenizer_cuts_and_pads_no_text_unasked(trip, case):
    """It keeps the ``model_max_length`` of the checkpoint, whatever ``data.max_length`` is."""
    result = trip.results[case.name, "model"]
    assert not result.is_cut
    if case.pretrained() is not None:
        assert result.longest_text == LONGEST


@pytest.mark.parametrize("refusal", [parameter(refusal) for refusal in REFUSED])
def test_combinations_without_a_round_trip_are_refused(trip, refusal):
    message = trip.refused(refusal)
    for name in refusal.names:
        assert name in message
