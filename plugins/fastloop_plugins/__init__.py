"""fastloop's own plugins: one a file, registered by the same entry points that a third party uses.

A file ``_name.py`` is the helper of a plugin beside it, or of several. The folders of plugins::

    tasks                     # a task is a plugin that defines model, data, loss and metrics
    training                  # change the training: schedules, adapters, averages, early stopping
    data                      # load, order and pack samples
    precision, kernels, memory   # compute in fewer bits, faster, or in less memory
    strategies                # train in several processes
    checkpoints               # keep the best weights, write in a thread, upload
    guards                    # detect invalid numbers and hanging processes
    observe                   # log, show progress, trace

These folders hold no plugin::

    rows                      # readers of file formats, and tables of rows
    text                      # the toolkit of text tasks: data, labels, tokens, batches, generation
    models                    # pretrained models: found, checked and loaded
    datasets                  # datasets that need no download

The files beside this one::

    default_plugins           # the plugins that are on without being named
    auto, _selection          # selects plugins by their ``recommend``; builds a run without those that fail
    _own_plugins              # the plugins that are selected from
    _task_traits, _listed_strategy   # what the task and the strategy of a recipe declare
    _cache, _partial_entry    # files that plugins keep between runs
    _mapped                   # arrays that are mapped from a file
    _foreign_load, _time      # the load of other programs, and times in options
    _names                    # the first of many names, in messages
    _targets                  # the target that losses and metrics ignore
    toolkit                   # helpers for plugins of other packages
"""
