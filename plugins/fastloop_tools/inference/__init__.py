"""``fastloop evaluate`` and ``fastloop predict``: use a trained model without training."""
