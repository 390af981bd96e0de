"""``fastloop prepare``: tokenizes the data of a recipe ahead.

command, data             # its options, and the datasets in the cache of token ids
"""
