"""Checkpoints, the run folder, saving and resuming.

``fastloop.schedule`` decides when a run saves a checkpoint to resume from. The plugin ``checkpoint-best`` decides after
an evaluation whether to write the weights to ``best-*`` beside these, and puts the best ones back at the end.

store                     # the files of a checkpoint and their format: written, verified, found to resume from, removed
state_form                # whether a state that was read has the keys and types of the present one
run_folder, lock          # the run folder, and its lock
run_summary               # ``summary.json``
saving                    # starts to write the state of a run
pending_save              # the save that is under way, and earlier outcomes; ``Run._sync_requests`` acts on them
learning_rates            # those of a run that resumes with another length
resume                    # restores the state of a run from the checkpoint that ``store.find_newest`` returns
frozen                    # what is frozen or in eval mode, restored after the hooks that fire again
settings_record           # the settings of a run in its checkpoint; ``fastloop.checks.resumed_run`` compares them
"""

from fastloop.checkpoint.store import (
    ResumePoint,
    copy,
    find_newest,
    pack,
    read,
    rotate,
    steps_to_keep,
    unpack,
    verify,
    write,
)
from fastloop.runtime.step_folders import MANIFEST, checkpoints, step_folder, step_of

__all__ = [
    "MANIFEST",
    "ResumePoint",
    "checkpoints",
    "copy",
    "find_newest",
    "pack",
    "read",
    "rotate",
    "step_folder",
    "step_of",
    "steps_to_keep",
    "unpack",
    "verify",
    "write",
]
