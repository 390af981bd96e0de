"""The optimizer of ``train.optimizer``, and several optimizers and schedulers that a run uses as one.

named                     # the optimizer of a recipe for all trained parameters; `parameter-groups` divides them
several, several_schedulers   # a dict of optimizers, and of their schedulers
combining                 # makes them from the dicts that plugins return

The plugin ``lr-scheduler`` makes the schedule of a run.
"""
