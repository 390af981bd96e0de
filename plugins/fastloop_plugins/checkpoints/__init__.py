"""Plugins that select checkpoints to keep, and control how they are written.

_remote_folder, _uploader # of ``remote_output``
"""
