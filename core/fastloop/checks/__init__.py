"""Checks during training: the optimizer, the updates of parameters, the task's metrics."""
