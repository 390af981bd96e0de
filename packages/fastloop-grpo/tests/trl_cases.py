"""28 settings of the loss, and their numbers by fastloop and by TRL, which this file also records:

    python trl_cases.py

writes ``expected_trl.json``, with TRL 1.16.0: case -> numbers of one generation on the completions of ``grpo_cases``,
by SGD in float32. ``gradients`` describes those of each update: their norm, and their products with three vectors.
"""

import json
import warnings
from pathlib import Path

import torch
from fastloop import Plugin, hookimpl
from fastloop.testing import train
from grpo_cases import (
    COUNT,
    LONGEST,
    ROWS,
    by_first_token,
    by_length,
    fixed_completions,
    lines,
    recipe,
    tokenizer,
    write_model,
)

EXPECTED = Path(__file__).with_name("expected_trl.json")
RATE = 0.02
LOSSES = {
    "grpo": {"loss_type": "grpo"},
    "dapo": {"loss_type": "dapo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
}
"""Our loss -> options of TRL."""
SETTINGS = {
    "one": ({}, {}, 1),
    "parts": ({"loss_batch_size": 3}, {}, 1),
    "warm": ({"temperature": 0.7}, {"temperature": 0.7}, 1),
    "masked": ({"mask_truncated": True}, {"mask_truncated_completions": True}, 1),
    "three": ({"updates_per_generation": 3, "loss_batch_size": 7}, {"num_iterations": 3}, 3),
    "kl": ({"beta": 0.3, "updates_per_generation": 3}, {"beta": 0.3, "num_iterations": 3}, 3),
    "high": (
        {"epsilon": 0.1, "epsilon_high": 0.3, "updates_per_generation": 3},
        {"epsilon": 0.1, "epsilon_high": 0.3, "num_iterations": 3},
        3,
    ),
}
"""Name -> our options, those of TRL, and updates."""
CASES = [f"{loss} {setting}" for loss in LOSSES for setting in SETTINGS]


class Gradients(Plugin):
    """Records the gradients of each update, end to end."""

    name = "gradients"

    def __init__(self):
        super().__init__()
        self.updates = []

    @hookimpl
    def before_optimizer_step(self, run):
        self.updates.append(flatten(run.unwrap_model()))


def flatten(model):
    """The gradients of a model, end to end, float64."""
    return torch.cat([weight.grad.flatten() for weight in model.parameters()]).double()


def describe(gradients):
    """The norm of gradients, and their products with three vectors."""
    places = torch.arange(len(gradients), dtype=torch.float64)
    products = [float((gradients * (places * step).sin()).sum()) for step in (1.3, 2.1, 2.9)]
    return [float(gradients.norm()), *products]


def ours(case, folder):
    """The numbers of a case by fastloop, and the gradients of each update."""
    loss, setting = case.split()
    options, _, _ = SETTINGS[setting]
    gradients = Gradients()
    made = recipe(folder, write_model(folder / "model"), {"loss": loss, **options}, lr=RATE)
    trained = train(made, gradients)
    (point,) = lines(folder / "run" / "metrics.jsonl")
    rows = lines(folder / "run" / "rows" / "completions.jsonl")
    numbers = {"loss": trained.losses[0], "reward": point["reward"], "advantages": [row["advantage"] for row in rows]}
    if "kl" in point:
        numbers["kl"] = point["kl"]
    return numbers | {"gradients": [describe(each) for each in gradients.updates]}, gradients.updates


def theirs(case, folder):
    """The same by TRL."""
    import transformers
    import trl
    from datasets import Dataset

    class Fixed(trl.GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *arguments, **more):
            completions = [fixed_completions(ids)[place % COUNT] for place, ids in enumerate(prompt_ids)]
            return completions, None

    loss, setting = case.split()
    _, options, updates = SETTINGS[setting]
    model = write_model(folder / "model")
    config = trl.GRPOConfig(
        output_dir=str(folder),
        report_to="none",
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=len(ROWS) * COUNT,
        num_generations=COUNT,
        max_completion_length=LONGEST,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        weight_decay=0.0,
        max_grad_norm=0.0,
        max_steps=updates,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_steps=1,
        reward_weights=[1.0, 0.1],
        dataloader_pin_memory=False,
        steps_per_generation=1,
        disable_tqdm=True,
        **LOSSES[loss],
        **options,
    )
    gradients = []

    class Recording(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *arguments, model, **more):
            gradients.append(flatten(model))

    policy = transformers.AutoModelForCausalLM.from_pretrained(model)
    data = {"train_dataset": Dataset.from_list(ROWS), "processing_class": tokenizer()}
    trainer = Fixed(policy, [by_first_token, by_length], config, callbacks=[Recording()], **data)
    trainer.train()
    points = [point for point in trainer.state.log_history if "loss" in point]  # one for each update
    numbers = {"loss": points[-1]["loss"], "reward": points[0]["reward"]}
    order = {row["prompt"]: place for place, row in enumerate(ROWS)}
    asked = list(trainer._logs["prompt"])
    gains = list(trainer._logs["advantages"])
    groups = sorted(range(0, len(gains), COUNT), key=lambda start: order[asked[start]])
    numbers["advantages"] = [gain for start in groups for gain in gains[start : start + COUNT]]
    if "kl" in points[-1]:
        numbers["kl"] = sum(point["kl"] for point in points) / len(points)
    return numbers | {"gradients": [describe(each) for each in gradients]}, gradients


if __name__ == "__main__":
    import tempfile

    recorded = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in CASES:
            with tempfile.TemporaryDirectory() as folder:
                recorded[case], _ = theirs(case, Path(folder))
    text = [f"{json.dumps(case)}: {json.dumps(numbers)}" for case, numbers in recorded.items()]
    EXPECTED.write_text("{\n" + ",\n".join(text) + "\n}\n")
