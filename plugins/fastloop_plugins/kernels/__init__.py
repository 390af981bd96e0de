"""Faster operations: attention, dropout, optimizers, compilation."""
