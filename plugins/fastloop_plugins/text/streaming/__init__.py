"""Streamed training splits of text tasks.

options                   # ``data.streaming``, and the settings that exclude it
opening                   # finds the files of a stream, and opens it
shards                    # the files that a stream reads
split                     # the split: its files, their index, and its first rows, which stand for it in checks
dataset                   # the dataset: any range of positions of an epoch
windows                   # the rows in memory among which places are drawn
rows                      # rows -> samples and labels, in the data workers
blocks                    # blocks of a language model from texts put end to end
"""
