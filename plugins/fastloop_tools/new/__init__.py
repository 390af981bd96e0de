"""``fastloop new``: creates a package from a template.

command, job              # `new plugin` and `new task`, and `new job`
_files                    # makes files from the folder ``template``
"""
