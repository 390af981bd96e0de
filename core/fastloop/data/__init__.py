"""From datasets to the batches of a step: one order of samples for a seed, however many processes or workers read it.

The order of an epoch is ``torch.randperm(n, generator=manual_seed(seed + epoch))``. An optimizer step takes the next ``batch_size``
of it; its micro-steps and processes take consecutive shares, or the parts that a plugin splits it into. So the position in the data is
one number, the samples drawn in the epoch, and a resumed run starts there at once, whatever the number of processes was. Nothing here
draws from the global random state: dropout sees the same numbers with and without workers.
"""

from fastloop.data.datasets import DatasetProtocol, fingerprint
from fastloop.data.loader import Loader
from fastloop.data.loaders import Loaders
from fastloop.data.sampler import StepSampler

__all__ = ["DatasetProtocol", "Loader", "Loaders", "StepSampler", "fingerprint"]
