"""Streamed training splits of text tasks.

options                   # ``data.streaming``, and the settings that exclude it
streamed_data             # the part of ``TextData`` that opens a stream
shards                    # the files that a stream reads
dataset                   # the dataset: any range of positions of an epoch
rows                      # rows -> samples, in the data workers
blocks                    # blocks of a language model from texts put end to end
"""
