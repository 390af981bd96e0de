"""``fastloop evaluate`` and ``fastloop predict``: use a trained model without training.

Both build a run by the hooks of training, so that truncation, labels and padding are the same, and load the exported
weights, which users load elsewhere. Only the task and plugins with ``for_inference`` take part.
"""
