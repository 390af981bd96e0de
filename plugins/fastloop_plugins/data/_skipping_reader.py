"""Reads micro-batches of a map-style dataset without the samples that cannot be read."""

from __future__ import annotations

from contextlib import suppress

from fastloop.data.datasets import FillerCandidates, MapReader, MicroBatchSamples
from fastloop.errors import DataError
from fastloop.problem import typed_clause

FILLER_ATTEMPTS = 100
"""Samples to try as a filler if no sample of a micro-batch can be read."""


class SkippingReader(MapReader):
    """A ``MapReader`` for ``Settings.reader_class``."""

    def read_each(self, micro_batch: list[int]) -> MicroBatchSamples:
        """The readable samples of a micro-batch, or a filler if none is readable.

        Raises:
            DataError: There is no filler.
        """
        samples = MicroBatchSamples()
        for index in micro_batch:  # may contain an id twice
            try:
                (sample,) = self.read([index])
            except Exception as error:
                samples.unreadable += ((index, typed_clause(error)),)
            else:
                samples.append(sample)
                samples.ids += (index,)
        if not samples.ids:
            for index in range(micro_batch[0] + 1, micro_batch[0] + FILLER_ATTEMPTS):
                with suppress(Exception):
                    samples.append(FillerCandidates(self.read([index % len(self.dataset)])))
                    break
        if not samples:
            raise DataError(
                f"none of {FILLER_ATTEMPTS} samples from {micro_batch[0]} on can be read: {samples.unreadable[0][1]}",
                code="sample-unreadable",
            )
        return samples
