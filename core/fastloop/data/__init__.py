"""Batches from datasets, in an order that depends only on seed and epoch, not on the number of processes or workers.

The order of an epoch is ``torch.randperm(n, generator=manual_seed(seed + epoch))``, or with ``data.shuffle_block`` that
of ``draw_block_order``. An optimizer step takes the next ``batch_size`` samples; its micro-steps and processes take
consecutive shares, or the parts that a plugin splits it into. The number of samples drawn in the epoch defines the
position, so a run can resume with another number of processes. Loading does not use the global random state: dropout
draws the same numbers with and without workers. A worker seeds its random states for each micro-batch, with the seed
that ``StepSampler`` or ``Stream`` derives from that of the run, the epoch and the position of the micro-batch. For a
dataset that shards itself, it does so once an epoch.

loaders, loader           # the datasets, loaders and micro-batch sizes of a run, and the batches of one split
sampler                   # the sample ids of each micro-batch
custom_sampler            # the order of a sampler of a user or a plugin, which must be able to repeat its epochs
block_order               # an order that reads samples in blocks
datasets, iterables       # reads map-style and iterable datasets
equal_steps               # as many steps on each process, for a dataset that shards itself
digests                   # compares the data that processes read

A plugin orders the samples of an epoch by the setting ``arrange``, as ``examples/curriculum`` does, or gives a sampler
of torch by the hook ``build_sampler``. During a run, ``Loaders.set_micro_batch_size`` divides the steps otherwise.

The order of ``data.streaming`` is not here: text tasks draw it, in ``rows/order.py`` beside the plugins.

``fastloop_tools.trainer.user_loader`` reads the settings of a ``DataLoader`` that a user gives to ``Trainer``, and
refuses other ones. ``fastloop.checks.sample_orders`` compares the orders of processes.
"""

from fastloop.data.datasets import DatasetProtocol, fingerprint
from fastloop.data.loader import Loader
from fastloop.data.loaders import Loaders
from fastloop.data.sampler import StepSampler

__all__ = ["DatasetProtocol", "Loader", "Loaders", "StepSampler", "fingerprint"]
