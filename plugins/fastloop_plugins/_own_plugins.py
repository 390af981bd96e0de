"""The plugins of the fastloop project and of packages that a recipe names, from which `auto` and others choose."""

from __future__ import annotations

from collections.abc import Iterable

from packaging.utils import canonicalize_name

from fastloop.errors import RecipeError, did_you_mean
from fastloop.plugins.declarations import warn_once
from fastloop.plugins.installed import distribution_name, installed, is_own, name_and_version
from fastloop.plugins.packages import PACKAGES
from fastloop.problem import Problem


def own_plugins() -> list[str]:
    """Names of the plugins of fastloop and of the installed packages of the project. The name of their distribution
    decides. Other packages are not imported before a recipe names them.

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
                Problem(
                    f"{rivals} installs a plugin of this name, too. `auto` and the estimates of other commands leave "
                    "out fastloop's.",
                    code="name-taken",
                    place=f"plugin {name!r}",
                    remedy=f"Uninstall that package, or list {key!r} in the recipe.",
                )
            )
    return [name for name, point in table.items() if is_own(point) and name == point.name]


def plugins_of_packages(packages: Iterable[str], place: str) -> dict[str, str]:
    """Plugin -> its distribution, for the plugins of other packages that a recipe names.

    Leaves out, with a warning, a name that several packages use: a recipe lists such a plugin as ``package:name``.

    Args:
        packages: Names of distributions; case, ``-``, ``_`` and ``.`` do not matter.
        place: The key of the recipe, for messages.

    Raises:
        RecipeError: A package is not installed, or has no plugin.
    """
    by_distribution: dict[str, list[str]] = {}
    for key, point in installed().items():
        by_distribution.setdefault(canonicalize_name(distribution_name(point)), []).append(key)
    plugins: dict[str, str] = {}
    for package in packages:
        name = canonicalize_name(package)
        if name not in by_distribution:
            raise RecipeError(
                f"no package {package!r} with plugins of fastloop is installed.",
                code="unknown-package",
                place=place,
                remedy=f"{did_you_mean(package, by_distribution).strip()} Install it:",
                command=_install_command(package),
            )
        for key in by_distribution[name]:
            if ":" in key:
                warn_once(
                    Problem(
                        f"the plugin {key!r} is left out: several packages use its name.",
                        code="ambiguous-name",
                        place=place,
                        remedy=f"List it by {key!r}.",
                    )
                )
            else:
                plugins[key] = package
    return plugins


def _install_command(package: str) -> str:
    """The command that installs a package."""
    for own in PACKAGES:
        if own.distribution == canonicalize_name(package):
            return own.install
    return f"pip install {package}"
