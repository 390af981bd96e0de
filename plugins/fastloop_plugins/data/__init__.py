"""Plugins that load, order and pack samples.

dataloader_workers        # processes that read batches; _watched_loader sets them up and watches them
device_prefetch           # copies the next batches to the GPU; _read_ahead reads them
length_bucketing          # puts samples of similar length into a batch
packing                   # rows of several sequences; its parts: _packing, _packing_trial, _varlen
sample_audit              # the ids of trained samples; _audit_files reads and writes them
skip_unreadable           # skips samples that cannot be read; _skipping_reader is its reader
token_cache               # the cache of token ids, which ``fastloop_plugins._cache`` reads and writes
_padding_multiples        # multiples that plugins choose, so that a run has few shapes

``text.batches`` pads batches of texts: ``Width`` rounds lengths up to ``settings.pad_to_multiple_of``.
The core makes samples, batches and their order, and logs the samples that were skipped: ``fastloop.data``.
"""
