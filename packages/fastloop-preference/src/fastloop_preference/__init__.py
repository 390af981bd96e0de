"""Preference tuning for fastloop: the tasks ``dpo``, ``kto`` and ``reward-model``."""
