"""Reward functions: how they are called, and which are refused before a model is built."""

import json
import math

import pytest
from fastloop import FastloopError, Plugin, RecipeError, hookimpl
from fastloop.testing import train
from fastloop_plugins.text import Chat, RowError
from grpo_cases import lines, tokenizer, write_model
from grpo_runs import DATA, OPTIONS, sampled

from fastloop_grpo.prompts import MARK, encode
from fastloop_grpo.rewards import RewardFunction, RewardInputs, check_parameters, sum_rewards

CALLS = []
"""The arguments of each call of ``record``."""


def record(prompts, completions, completion_ids, answer, trainer_state, log_metric, log_extra, **kwargs):
    """A reward function in the form of TRL."""
    CALLS.append({"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **kwargs})
    CALLS[-1] |= {"answer": answer, "step": trainer_state.global_step, "steps": trainer_state.max_steps}
    log_metric("letters", 3.0)
    log_extra("place", list(range(len(prompts))))
    return [float(len(ids)) for ids in completion_ids]


def changes(prompts, completions, answer):
    """Adds each completion to its prompt, as a judge reads them, and takes values from the answer."""
    for prompt, completion, value in zip(prompts, completions, answer, strict=True):
        prompt.append(completion.pop())
        value["of"].pop()
    return [float(len(prompt)) for prompt in prompts]


async def answers_later(completions):
    return [1.0 for _ in completions]


def never_applies(completions):
    return [None for _ in completions]


def too_few(completions):
    return [0.0]


def not_a_number(completions):
    return [math.nan for _ in completions]


def a_text(completions):
    return ["good" for _ in completions]


def one_number(completions):
    return 1.0


def fails(completions):
    raise KeyError("solution")


def fails_in_training(completions, trainer_state):
    if trainer_state.global_step == 1:
        raise TimeoutError("no answer")
    return [0.0 for _ in completions]


def logs_a_reward(completions, log_metric):
    log_metric("reward", 3.0)
    return [0.0 for _ in completions]


def logs_a_completion(completions, log_extra):
    log_extra("completion", completions)
    return [0.0 for _ in completions]


def needs_a_column(completions, solution):
    return [0.0 for _ in completions]


class NoModel(Plugin):
    """Fails as soon as a model is built."""

    name = "no-model"

    @hookimpl(wrapper=True)
    def build_model(self):
        assert (yield) is None, "a model was built"


def chats():
    """Conversations, with columns of other types than text."""
    messages = [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hi?"}]
    rows = [{"prompt": messages, "answer": {"of": [index, None]}, "level": index} for index in range(4)]
    return {"train": rows}


@pytest.fixture(autouse=True)
def _no_calls():
    CALLS.clear()


def own(name):
    return f"{__name__}:{name}"  # a file would be imported once more, with other ``CALLS``


def test_a_function_of_trl_gets_its_arguments(tmp_path):
    options = {"rewards": [own("changes"), own("record"), own("never_applies")], "reward_weights": [0.0, 2.0, 1.0]}
    data = {"module": own("chats"), "columns": ["answer", "level"], "max_length": 40, "validation_fraction": 0}
    model = {"name": str(write_model(tmp_path / "model"))}
    train(sampled(tmp_path, options, model=model, data=data, max_steps=2, batch_size=2))
    trial, first, second = CALLS
    assert len(trial["prompts"]) == 2
    assert trial["completions"][0] == [{"role": "assistant", "content": ""}]
    assert [call["step"] for call in CALLS] == [0, 0, 1]
    assert [call["steps"] for call in CALLS] == [1, 2, 2]
    for call in (first, second):
        assert len(call["prompts"]) == 2 * OPTIONS["num_generations"]
        for prompt, answer, level in zip(call["prompts"], call["answer"], call["level"], strict=True):
            assert [message["role"] for message in prompt] == ["system", "user"]
            assert answer == {"of": [level, None]}
        for ids, (message,) in zip(call["completion_ids"], call["completions"], strict=True):
            assert message == {"role": "assistant", "content": tokenizer().decode(ids, skip_special_tokens=True)}
    point, last = lines(tmp_path / "run" / "metrics.jsonl")
    assert point["letters"] == point["rewards/changes"] == 3.0
    assert (
        point["reward"] == pytest.approx(2 * point["rewards/record"]) == pytest.approx(2 * point["completion_tokens"])
    )
    assert "rewards/never_applies" not in last
    rows = lines(tmp_path / "run" / "rows" / "completions.jsonl")
    assert [row["step"] for row in rows] == [1] * 8 + [2] * 8
    assert [row["place"] for row in rows[:8]] == list(range(8))
    assert rows[0]["rewards/never_applies"] is None
    assert [row["completion"] for row in rows[:8]] == first["completions"]


def test_tools_of_a_row_are_in_its_prompt():
    tools = [{"name": "search"}]
    row = MARK + Chat([{"role": "user", "content": "Hi?"}], tools).dumps()
    arguments = {"template": None, "render": False, "leaves_out": True, "max_length": 9}
    made = tokenizer()
    with pytest.raises(RowError, match="tools, which the chat template does not read"):
        [*encode(made, [row], arguments)]
    (numbers,) = encode(made, [row], arguments | {"template": "{{ tools }}" + made.chat_template})
    assert made.decode(numbers[1 : 1 + numbers[0]]) == f"{tools}u:Hi?<end>a:"


def test_a_prompt_without_any_reward_has_no_gradient(tmp_path):
    trained = train(sampled(tmp_path, {"rewards": [own("never_applies")]}, max_steps=1))
    assert all(float(gradient.abs().max()) == 0 for gradient in trained.gradients.values())
    assert "reward" not in lines(tmp_path / "run" / "metrics.jsonl")[0]


def test_a_function_that_fails_in_training_fails_the_run(tmp_path):
    with pytest.raises(FastloopError, match="TimeoutError: no answer .*test_rewards.py, line") as caught:
        train(sampled(tmp_path, {"rewards": [own("fails_in_training")]}))
    assert caught.value.exit_code == 1


def test_an_async_function_is_awaited(tmp_path):
    train(sampled(tmp_path, {"rewards": [own("answers_later")]}, max_steps=1))
    assert lines(tmp_path / "run" / "metrics.jsonl")[0]["reward"] == 1.0


REFUSED = {
    "misspelled": ({"rewards": [own("recrod")]}, {}, "record"),
    "no function": ({"rewards": [own("CALLS")]}, {}, "list"),
    "no reference": ({"rewards": ["accuracy"]}, {}, "file.py:name"),
    "none": ({"rewards": []}, {}, "empty"),
    "twice": ({"rewards": [own("a_text"), own("a_text")]}, {}, "twice"),
    "weights": ({"reward_weights": [1.0, 2.0]}, {}, "2 weights"),
    "column": ({"rewards": [own("needs_a_column")]}, {}, r"data.columns=\[solution\]"),
    "count": ({"rewards": [own("too_few")]}, {}, "1 value for 2 completions"),
    "nan": ({"rewards": [own("not_a_number")]}, {}, "nan for the completion"),
    "text": ({"rewards": [own("a_text")]}, {}, "'good' for the completion"),
    "number": ({"rewards": [own("one_number")]}, {}, "returned a float"),
    "error": ({"rewards": [own("fails")]}, {}, "KeyError: 'solution' .*test_rewards.py, line"),
    "value of grpo": ({"rewards": [own("logs_a_reward")]}, {}, "logs 'reward'.*test_rewards.py, line"),
    "column of grpo": ({"rewards": [own("logs_a_completion")]}, {}, "logs 'completion'"),
    "argument of grpo": ({}, {"columns": ["answer", "completions"]}, "argument 'completions' from grpo"),
    "positions": ({"max_new_tokens": 64}, {}, "64 positions"),
    "long prompts": ({}, {"max_length": 2}, "max_length"),
    "streaming": ({}, {"streaming": True}, "data.streaming"),
    "chat template": ({}, {"chat_template": "tokenizer"}, "no chat template"),
    "missing column": ({}, {"columns": ["solution"]}, "solution"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_a_model_is_built(case, tmp_path):
    options, data, message = REFUSED[case]
    with pytest.raises(FastloopError, match=message) as caught:
        train(sampled(tmp_path, options, data=data), NoModel())
    assert caught.value.exit_code == 2


def test_long_prompts_are_left_out(tmp_path):
    train(sampled(tmp_path, data={"module": own("uneven"), "max_length": 4}, max_steps=1))
    rows = lines(tmp_path / "run" / "rows" / "completions.jsonl")
    assert {row["prompt"] for row in rows} == {"12=", "345="}


def uneven():
    rows = [{"prompt": f"{number}=", "answer": number} for number in ("12", "345", "6789", "12345")]
    return {"train": rows, "validation": rows}


def test_sums_leave_out_functions_that_do_not_apply():
    functions = [RewardFunction(name, print, weight, None, name) for name, weight in (("a", 1.0), ("b", 0.5))]
    sums = sum_rewards(functions, {"a": [1.0, math.nan, math.nan], "b": [4.0, 2.0, math.nan]})
    assert sums[:2] == [3.0, 1.0]
    assert math.isnan(sums[2])


def test_a_function_gets_only_the_arguments_that_it_names():
    inputs = RewardInputs({"prompts": ["a"], "completions": ["b"], "completion_ids": [[3]], "answer": [7]}, 0, 1)
    for function, expected in ((lambda answer: answer, 7.0), (lambda completion_ids, other=2: completion_ids[0], 3.0)):
        parameters = check_parameters(function, "here", ["answer"])
        assert RewardFunction("name", function, 1.0, parameters, "here")(inputs) == [expected]
    with pytest.raises(RecipeError):
        check_parameters(lambda other: other, "here", ["answer"])


def test_the_rows_are_json(tmp_path):
    train(sampled(tmp_path, max_steps=1))
    text = (tmp_path / "run" / "rows" / "completions.jsonl").read_text()
    keys = {"step", "prompt", "completion", "tokens", "ended", "reward", "advantage", "rewards/repeats"}
    assert {*json.loads(text.splitlines()[0])} == keys
    assert DATA["columns"] == ["answer"]
