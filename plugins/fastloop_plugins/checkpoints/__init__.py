"""Plugins that select checkpoints to keep, write them in the background, and upload the run folder.

checkpoint_best           # keeps the weights with the best metric; those to resume from: ``train.keep_checkpoints``
async_save                # writes checkpoints in a thread
remote_output             # uploads the run folder; its parts: _remote_folder, _uploader

``training._monitor`` reads the metric of ``checkpoint_best``, and compares its values.
"""
