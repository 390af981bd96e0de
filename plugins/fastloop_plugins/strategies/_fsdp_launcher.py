"""The FSDP settings of ``accelerate launch`` as options of ``fsdp``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fastloop_plugins.strategies._launcher import Launcher

if TYPE_CHECKING:
    from fastloop import Plugin
    from fastloop.recipe import Recipe

SHARDINGS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Accelerate's strategies of FSDP 1. A configuration names one, or its number from 1."""
REMEDIES = {
    "FSDP_FORWARD_PREFETCH": "Set fsdp_forward_prefetch: false there: torch gathers the next block ahead by itself.",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "Set fsdp_activation_checkpointing_offload: false there.",
}
"""A variable that must not be true -> what to do."""


def take_over(recipe: Recipe, plugin: Plugin) -> None:
    """Take FSDP's settings over from ``accelerate launch``, which always sets all of them: a default value asks for
    nothing.

    Settings that change neither the training nor the memory of its steps are left out: the form of Accelerate's own
    checkpoints, ``use_orig_params``, and how its models are loaded.

    Raises:
        PluginError: A setting contradicts the recipe, or there is no option for it.
    """
    launcher = Launcher(recipe, plugin)
    version = launcher.asked("FSDP_VERSION")
    if version is None:
        return
    if version == "1":
        _take_sharding(launcher)
    elif (launcher.asked("FSDP_RESHARD_AFTER_FORWARD") or "true").lower() == "false":
        launcher.take("FSDP_RESHARD_AFTER_FORWARD", "reshard_after_forward", False)
    if launcher.is_on("FSDP_OFFLOAD_PARAMS"):
        launcher.take("FSDP_OFFLOAD_PARAMS", "cpu_offload", True)
    policy = (launcher.asked("FSDP_AUTO_WRAP_POLICY") or "").upper()
    if policy == "SIZE_BASED_WRAP":
        launcher.refuse(
            "FSDP_AUTO_WRAP_POLICY",
            "Name the classes to shard in plugins.fsdp.blocks, and use TRANSFORMER_BASED_WRAP there.",
        )
    if policy == "NO_WRAP":
        launcher.take("FSDP_AUTO_WRAP_POLICY", "blocks", [])
    elif (classes := launcher.asked("FSDP_TRANSFORMER_CLS_TO_WRAP")) is not None:
        launcher.take("FSDP_TRANSFORMER_CLS_TO_WRAP", "blocks", [name.strip() for name in classes.split(",")])
    if launcher.is_on("FSDP_ACTIVATION_CHECKPOINTING") and not recipe.has_plugin("activation-checkpointing"):
        launcher.refuse("FSDP_ACTIVATION_CHECKPOINTING", "List the plugin 'activation-checkpointing' in the recipe.")
    for variable, remedy in REMEDIES.items():
        if launcher.is_on(variable):
            launcher.refuse(variable, remedy)
    if launcher.asked("FSDP_IGNORED_MODULES") is not None:
        launcher.refuse("FSDP_IGNORED_MODULES", "Take fsdp_ignored_modules out there.")


def _take_sharding(launcher: Launcher) -> None:
    """Take the strategy and the prefetch of FSDP 1 over."""
    sharding = (launcher.asked("FSDP_SHARDING_STRATEGY") or "FULL_SHARD").upper()
    if sharding.isdigit() and 0 < int(sharding) <= len(SHARDINGS):
        sharding = SHARDINGS[int(sharding) - 1]
    if sharding not in SHARDINGS or sharding == "NO_SHARD":
        launcher.refuse(
            "FSDP_SHARDING_STRATEGY", "List 'ddp' instead of 'fsdp', which shards nothing, and use MULTI_GPU there."
        )
    if sharding in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"):
        launcher.take("FSDP_SHARDING_STRATEGY", "reshard_after_forward", False)
    if sharding.startswith("HYBRID") and (within := int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) > 1:
        launcher.take("FSDP_SHARDING_STRATEGY", "shard_within", within)
    if (launcher.asked("FSDP_BACKWARD_PREFETCH") or "BACKWARD_PRE").upper() not in ("BACKWARD_PRE", "1"):
        launcher.refuse("FSDP_BACKWARD_PREFETCH", "Use BACKWARD_PRE there, which torch does by itself.")
