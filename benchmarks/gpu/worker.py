"""One arm in a separate process, for ``_suite.Worker``: reads commands from stdin, writes replies as JSON to a pipe.

The specification is JSON: ``arm`` of ``_arms.ARMS``, ``reviews`` (a file of ``_reviews``), and the fields of
``_arms.Work``. With ``job``, a number of epochs, fastloop trains them over the split ``train`` with an evaluation after
each, and replies once. With ``tokens`` (a file of ``_blocks``) instead of ``reviews``, ``arm`` is of
``_language_arms.LANGUAGE_ARMS``, and the fields are of ``LanguageWork``. ``trace`` is the file that the command
``profile`` writes its trace to.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from _arms import ARMS, Work, prepare_fastloop, restart_for_fastloop
from _language_arms import LANGUAGE_ARMS, LanguageWork, restart_language
from _reviews import load
from _windows import Windows, training_flops

EPOCHS = 1000
"""More epochs than are ever requested: the command ends the worker."""


def next_command() -> str:
    """Wait for the next command. Ends this process if its parent has ended."""
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    return line.strip()


def run_job(work: Work, splits: dict[str, Any]) -> dict[str, Any]:
    """Train and evaluate; returns a part of the summary."""
    from fastloop.lifecycle import execute, open_run
    from fastloop.plugins.resolve import resolve

    recipe, task = prepare_fastloop(work, splits)
    with open_run(resolve(recipe, objects=[task])) as run:
        summary = execute(run)
    spans = (
        "startup_seconds",
        "compile_seconds",
        "train_seconds",
        "evaluate_seconds",
        "validation",
        "compile",
        "steps",
    )
    return {key: summary[key] for key in spans if key in summary} | {
        "flops": work.epochs * training_flops(run.unwrap_model(), splits["train"].lengths),
    }


def main() -> None:
    """Train as the specification describes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--reply", type=int, required=True, help="file descriptor of the pipe for replies")
    parser.add_argument("spec", type=json.loads, help="what to train")
    arguments = parser.parse_args()
    given = dict(arguments.spec)
    arm = given.pop("arm")
    job = given.pop("job", 0)
    trace = given.pop("trace", None)
    language = "tokens" in given
    folder = Path(given.pop("folder"))
    file = Path(given.pop("tokens" if language else "reviews"))
    work: Any = (
        LanguageWork(**given, folder=folder, tokens=file)
        if language
        else Work(**given, folder=folder, epochs=job or EPOCHS)
    )
    if arm == "fastloop":
        (restart_language if language else restart_for_fastloop)(work)
    import torch
    from transformers import set_seed

    torch.set_float32_matmul_precision("highest")  # no TF32, else the baseline would be faster than fp32
    torch.backends.cudnn.allow_tf32 = False
    set_seed(work.seed)

    def reply(result: dict[str, Any]) -> None:
        os.write(arguments.reply, (json.dumps(result | {"plugins": work.plugins, "pid": os.getpid()}) + "\n").encode())

    if language:
        LANGUAGE_ARMS[arm](work, Windows(work.device, next_command, reply, trace=trace))
        return
    splits = load(file)
    if job:
        next_command()
        started = time.perf_counter()
        reply({"command": "job", **run_job(work, splits), "seconds": time.perf_counter() - started})
        return
    train = splits["train"]
    tokens = int(train.lengths.sum())
    ARMS[arm](
        work,
        train,
        Windows(work.device, next_command, lambda result: reply(result | {"tokens": tokens}), train.lengths, trace),
    )


if __name__ == "__main__":
    main()
