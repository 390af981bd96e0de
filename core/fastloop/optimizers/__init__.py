"""The optimizer of ``train.optimizer``, and several optimizers and schedulers that a run uses as one."""
