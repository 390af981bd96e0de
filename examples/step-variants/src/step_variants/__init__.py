"""Two plugins for fastloop that change a training step: ``sam`` takes two passes, and ``muon`` two optimizers."""
