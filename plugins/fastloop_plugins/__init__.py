"""fastloop's own plugins: one a file, registered by the same entry points that a third party uses.

A file ``_name.py`` is the helper of a plugin beside it, or of several. These folders hold no plugin::

    rows       # readers of file formats, and tables of rows
    text       # the toolkit of text tasks: data, labels, tokens, batches, generation
    models     # pretrained models: found, checked and loaded
    datasets   # datasets that need no download

``default_plugins`` lists the plugins that are on without being named.
"""
