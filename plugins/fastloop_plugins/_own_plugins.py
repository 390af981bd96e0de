"""The plugins of fastloop's own package, from which `auto` and other commands choose."""

from __future__ import annotations

from fastloop.plugins.declarations import warn_once
from fastloop.plugins.installed import installed, is_own, name_and_version


def own_plugins() -> list[str]:
    """Names of the plugins that fastloop itself installs. Other packages are not imported before a recipe names them.

    Leaves out, with a warning, each name that another package uses, too.
    """
    table = installed()
    for key, point in table.items():
        if is_own(point) and key != (name := point.name):
            rivals = ", ".join(
                " ".join(name_and_version(other.dist))
                for other in table.values()
                if other.name == name and not is_own(other)
            )
            warn_once(
                f"plugin {name!r}: {rivals} installs a plugin of this name, too. `auto` and the estimates of other "
                f"commands leave out fastloop's. Uninstall that package, or list {key!r} in the recipe."
            )
    return [name for name, point in table.items() if is_own(point) and name == point.name]
