"""``fastloop plan --untrusted``: the code, files and URLs of a stranger's recipe, without importing that code.

``find_spec("a.b")`` imports ``a``, so modules are searched part by part in the folders of the import path. A file is
installed if the ``RECORD`` of a package lists it, or a ``.pth`` file of an editable package adds its folder. The list
shows which code runs, and not whether it is harmless.
"""
