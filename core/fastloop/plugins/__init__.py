"""Plugins: their base class, how a recipe is resolved to them, and the calls of their hooks.

In the order of a run::

    plugin                    # the base class: what a plugin declares
    declared_options          # the options on its class, as a dataclass; ``fastloop.options`` checks their values
    installed, packages       # the plugins that are installed, and those of the project's packages
    resolve                   # a recipe -> its plugins; ``auto`` selects here
    declarations, order       # plugins are checked together, and put into call order
    manager, hook_checks      # hooks are checked, and registered for a run
    call                      # ``run.hooks``: the function that calls a hook
    hook_replacement          # other functions in the place of hooks, to check, time or show them
"""
