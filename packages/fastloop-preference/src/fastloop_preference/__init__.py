"""Preference tuning for fastloop: the tasks ``dpo``, ``kto`` and ``reward-model``.

dpo, kto, reward_model    # the tasks
task, policy              # their base class, and that of tasks with a reference
data_section, rows        # the section ``data``, and rows as tokens
reference_log_probs       # log-probabilities of the model before training
losses, metrics           # the losses, and means of rewards
"""
