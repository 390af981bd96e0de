"""``fastloop new``. ``new plugin`` and ``new task`` create a package with a plugin, tests, a recipe and all files to
publish it."""

from __future__ import annotations

import datetime
import importlib.util
import keyword
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastloop import __version__
from fastloop.errors import UsageError, did_you_mean
from fastloop_tools.new import _files
from fastloop_tools.new.job import job

if TYPE_CHECKING:
    from packaging.version import Version

new = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Create files from a template.")
new.command("job")(job)

FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "recipe.yaml": "recipe.yaml",
    ".gitignore": "gitignore",
    ".github/workflows/ci.yaml": "ci.yaml",
    "src/{module}/__init__.py": "plugin.py",
    "tests/conftest.py": "conftest.py",
    "tests/test_{module}.py": "test_plugin.py",
}
"""File of the package -> its template."""
TASK_FILES = {"src/{module}/__init__.py": "task.py", "tests/test_{module}.py": "test_task.py", "pairs.csv": "pairs.csv"}
"""The files of a package with a task that differ."""
LICENSES = {"MIT": "MIT", "Apache-2.0": "Apache-2.0", "BSD-3-Clause": "BSD-3-Clause", "none": ""}
"""License -> template of its text."""
TAKEN = {
    "Annotated", "Any", "Conformance", "DataOptions", "Mapping", "ModelOptions", "Output", "PairData", "Plugin", "Run",
    "Tensor",
}  # fmt: skip
"""Names that the templates import."""


Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the plugin in recipes: lower case words, joined by hyphens.")
]
Folder = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the package [default: NAME].")]
License = Annotated[str, typer.Option(metavar="|".join(LICENSES), help="License of the package.")]
Author = Annotated[str, typer.Option(metavar="TEXT", help="Copyright holder [default: the package's authors].")]


@new.command("plugin")
def plugin(name: Name, folder: Folder = None, license: License = "MIT", author: Author = "") -> None:
    """Create a package with a working plugin.

    It has tests, a README, a recipe and a CI file. Existing files are not overwritten.
    """
    create(name, folder, license, author)


@new.command("task")
def task(name: Name, folder: Folder = None, license: License = "MIT", author: Author = "") -> None:
    """Create a package with a working task on texts.

    The task learns vectors of texts from pairs. The package has tests, a README, a recipe with rows, and a CI file.
    Existing files are not overwritten.
    """
    create(name, folder, license, author, task=True)


def create(name: str, folder: Path | None, license: str, author: str, task: bool = False) -> None:
    """Write the files of a package, and print the next steps.

    Raises:
        UsageError: An argument is invalid, or a file exists already.
    """
    check_name(name)
    if license not in LICENSES:
        raise UsageError(
            f"found {license!r}.", code="unknown-choice", place="--license", remedy=did_you_mean(license, LICENSES)
        )
    if not author.isprintable():
        raise UsageError(code="wrong-format", place="--author", expected="one line of text")
    folder = folder or Path(name)
    _files.write(folder, render(name, license, author, task))
    typer.echo(f"\nNext steps:\n  cd {folder}\n  pip install -e '.[test]'\n  pytest\n  fastloop train recipe.yaml")


def check_name(name: str) -> None:
    """Raise an error for an invalid name, or one that is already in use.

    Raises:
        UsageError: The name is invalid or in use; the message suggests another.
    """
    from fastloop.plugins.installed import installed

    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        proposal = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-0123456789")
        hint = f" Did you mean {proposal!r}?" if proposal else ""
        raise UsageError(
            f"{name!r} cannot be a plugin's name. Expected lower case words joined by hyphens, such as 'my-plugin'.",
            code="wrong-format",
            remedy=hint,
        )
    for key, point in installed().items():
        if key.rpartition(":")[2] == name:
            owner = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
            raise UsageError(
                f"{name!r} is the name of a plugin of {owner}: a recipe could not distinguish the two.",
                code="name-taken",
                remedy="Choose another name.",
            )
    module = name.replace("-", "_")
    exists = keyword.iskeyword(module)
    if not exists:
        spec = importlib.util.find_spec(module)
        exists = spec is not None and spec.origin is not None  # no origin: just a folder of this name
    if exists:
        raise UsageError(
            f"{name!r} would be the Python module {module!r}, which already exists.",
            code="name-taken",
            remedy=f"Choose another name, such as 'my-{name}'.",
        )


def first_unsupported(version: Version) -> str:
    """The first release that may lack names of this one, by docs/stability.md."""
    if version.major:
        return f"{version.major + 1}"
    # from 0.2 on, a deprecated name works for one more minor version
    return f"0.{version.minor + (1 if version.minor < 2 else 2)}"


def described(source: str, title: str) -> dict[str, Any]:
    """``description``, ``numerics`` and ``options`` of the class ``title`` in the text of a plugin's file, for the
    other files."""
    from fastloop.cli.option_table import describe
    from fastloop.plugins.declared_options import options_of

    module = ModuleType("fastloop_tools.new.example")
    sys.modules[module.__name__] = module  # dataclasses look up annotations there
    try:
        exec(source, vars(module))
        cls = vars(module)[title]
        description = cls.description[0].lower() + cls.description[1:]
        return {"description": description, "numerics": cls.numerics, "options": describe(options_of(cls))}
    finally:
        del sys.modules[module.__name__]


def render(name: str, license: str = "MIT", author: str = "", task: bool = False) -> dict[str, str]:
    """Path -> text of every file of the package."""
    from packaging.version import Version

    module = name.replace("-", "_")
    version = Version(__version__)
    title = "".join(word.capitalize() for word in name.split("-"))
    words: dict[str, Any] = {
        "name": name,
        "task": task,
        "module": module,
        "title": f"{title}Plugin" if title in TAKEN else title,
        "license": license if LICENSES[license] else "",
        "author": author,
        "holder": author or f"The authors of {name}",
        "year": datetime.date.today().year,
        "above": f"{version.public}",
        "below": first_unsupported(version),
    }
    files = dict(FILES)
    if task:
        files |= TASK_FILES
    if LICENSES[license]:
        files["LICENSE"] = f"licenses/{LICENSES[license]}"
    source = _files.render(files["src/{module}/__init__.py"], words)
    words |= described(source, words["title"])
    return {path.format(module=module): _files.render(template, words) for path, template in files.items()}
