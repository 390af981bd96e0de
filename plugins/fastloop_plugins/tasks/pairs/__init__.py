"""Inputs and targets of an encoder-decoder."""
