"""The documentation is true: its code runs, its recipes load, its generated parts are current, and its links resolve.

In a page, a block with ``title="FILE"`` is that file, and a diff with ``title="OLD NEW"`` is both. A python block
without a title is executed, all of a page in one namespace. The commands of a console block are run, and the shown part
of their output is compared: ``...`` stands for any text. Packages are installed into a
folder of the test's own. Blocks in other languages (``sh``: takes long, or needs a network) are only shown.
"""

from __future__ import annotations

import ast
import dataclasses
import html
import importlib
import importlib.util
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import forked
import pytest
from jsonschema import Draft202012Validator
from omegaconf import OmegaConf

from fastloop import hookspecs
from fastloop.checkpoint.pending_save import CheckpointSaver
from fastloop.cli.option_table import describe
from fastloop.cli.recipe_schema import recipe_schema
from fastloop.data import Loaders
from fastloop.distributed.processes import Processes
from fastloop.plugins.declared_options import options_of
from fastloop.plugins.installed import installed, is_own, load
from fastloop.plugins.plugin import Plugin
from fastloop.recipe import Train
from fastloop.run import Run
from fastloop.schedule import Schedule
from fastloop.settings import Settings
from fastloop.state import Batch, Output, State

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
WRITTEN = [ROOT / "README.md", *(page for page in PAGES if "decisions" not in page.parts)]
API = (
    *(Run, State, Batch, Output, Settings),
    *(Plugin, Processes, Schedule, CheckpointSaver, Loaders),
)
INTERNAL: dict[type, set[str]] = {
    Run: {"to_device"},
    State: {"count_step", "count_unreadable", "skip_samples", "restore"},
    Batch: {"pin_memory"},
    Processes: {"close", "explain_lost_connection"},
    CheckpointSaver: {"start"},
    Loaders: {"set_datasets", "build", "close", "copy_train"},
}
"""Methods that only the core calls."""
OURS = [name for name, point in installed().items() if is_own(point)]


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    title: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r'(?ms)^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', text)
    return [Block(match[1], match[2] or "", match[3], text.count("\n", 0, match.start()) + 1) for match in found]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def sources() -> Any:
    """docs/_sources.py, which writes the parts that are made from the code."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return importlib.import_module("_sources")
    finally:
        sys.path.remove(str(ROOT / "docs"))


# -- code --------------------------------------------------------------------------------------------------------------

RUN = [page for page in PAGES if any(block.language in ("python", "console") for block in blocks(page))]
BESIDE = {"lit": "lightning"}
"""File -> the package that it needs, and that may not be installed: commands that name the file are left out then."""
PIP = [
    "-m",
    "pip",
    "install",
    "--quiet",
    "--disable-pip-version-check",
    "--no-deps",
    "--no-index",
    "--no-build-isolation",
    "--target",
    "site",
    ".",
]
PROGRAMS = {"fastloop": ["-P", "-m", "fastloop"], "pytest": ["-P", *forked.PYTEST], "python": []}
"""As they are when installed: without the current folder on the import path."""


def test_there_are_pages_that_run():
    assert {"write-a-plugin.md", "migrate.md", "python-api.md", "recipe.md"} <= {page.name for page in RUN}


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=name)
def test_page_code_prints_the_shown_output(page, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    missing = [file for file, package in BESIDE.items() if importlib.util.find_spec(package) is None]
    here = tmp_path
    for block in blocks(page):
        if block.language == "diff":
            for file, mark in zip(block.title.split(), "-+", strict=True):
                lines = [line for line in block.text.splitlines() if line[:1] in ("", " ", mark)]
                Path(file).write_text("".join(f"{line[1:]}\n" for line in lines))
        elif block.title:
            Path(block.title).write_text(block.text)
        elif block.language == "python":
            exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)
        elif block.language == "console":
            for command, shown in commands(block.text):
                if command.startswith("cd "):
                    here /= command.removeprefix("cd ")
                elif not any(f" {file}." in command for file in missing):
                    check(f"{name(page)}:{block.line}: $ {command}", command, shown, here, tmp_path / "site")


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Each command of a console block with the output that is shown below it."""
    for part in re.split(r"(?m)^\$ ", text)[1:]:
        command, _, shown = part.partition("\n")
        yield command, shown.rstrip()


def check(where: str, command: str, shown: str, folder: Path, site: Path) -> None:
    program, *arguments = shlex.split(command)
    if command == "pip install -e .":
        arguments = [str(site) if word == "site" else word for word in PIP]
    elif program != "cp":
        arguments = [*PROGRAMS[program], *arguments]
    environment = os.environ | {
        "COLUMNS": "200",
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(folder / "hf-home"),
        "PYTHONPATH": os.pathsep.join([str(site), *(path for path in sys.path if path != str(site.parent))]),
    }
    code, output = execute(program, arguments, folder, environment)
    expected = 2 if re.search(r"(?m)^error: ", shown) else 0
    assert code == expected, f"{where}\n{output[-5000:]}"
    printed = "\n".join(line.rstrip() for line in output.rstrip().splitlines())
    pattern = re.escape(shown).replace(re.escape("..."), ".*")
    assert not shown or re.fullmatch(pattern, printed, re.DOTALL), f"{where}\nshows\n{shown}\nand printed\n{printed}"


def execute(program: str, arguments: list[str], folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Exit code and output. pip runs in a new Python, since it looks at what is imported already."""
    if program in PROGRAMS:
        output = folder / ".output"
        output.unlink(missing_ok=True)
        with forked.Command(*arguments, cwd=folder, env=environment, output=output) as command:
            return command.wait(380), output.read_text()
    command = [program if program == "cp" else sys.executable, *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, cwd=folder, env=environment, text=True, timeout=600, check=False, **streams)
    return done.returncode, done.stdout


# -- recipes and names -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    """Checks recipes."""
    return Draft202012Validator(recipe_schema()[0])


@pytest.mark.parametrize(
    "page", [page for page in WRITTEN if any(block.language == "yaml" for block in blocks(page))], ids=name
)
def test_its_recipes_are_recipes(page, validator):
    for block in blocks(page):
        if block.language == "yaml":
            errors = [
                error.message
                for error in validator.iter_errors(OmegaConf.to_container(OmegaConf.create(block.text), resolve=False))
            ]
            assert not errors, f"{name(page)}:{block.line}"


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_pages_name_existing_keys_commands_and_options(page, sources):
    text = page.read_text(encoding="utf-8")
    keys = {field.name for field in dataclasses.fields(Train)}
    assert set(re.findall(r"`train\.(\w+)[`=]", text)) <= keys
    for plugin, option in re.findall(r"`plugins\.([\w-]+)\.(\w+)[`=]", text):
        if plugin in OURS:
            assert option in [row.name for row in describe(options_of(load(plugin)))], f"{plugin}.{option}"
    known = dict(sources.leaves())
    for code in [*re.findall(r"`(fastloop [^`\n]+)`", text), *re.findall(r"(?m)^ *(?:\$ )?(fastloop [^#\n]+)", text)]:
        line = code.split(" #")[0].strip().replace("fastloop --json ", "fastloop ")
        if line in ("fastloop --install-completion", "fastloop --json", "fastloop COMMAND ...", "fastloop --help"):
            continue
        command = next((key for key in sorted(known, key=len, reverse=True) if f"{line} ".startswith(f"{key} ")), None)
        written_as_code = f"`{code}`" in text or f"$ {code}" in text
        assert command is not None or not written_as_code, f"there is no command {line!r}"
        if command is not None:
            options = {flag for parameter in known[command].params for flag in parameter.opts}
            assert set(re.findall(r"(?<![\w-])--[a-z-]+", line)) <= options | {"--help"}, line


def test_the_table_of_migration_names_existing_arguments():
    import transformers

    page = (ROOT / "docs/migrate.md").read_text()
    rows = [line.split("|") for line in page.partition("## Mapping of arguments")[2].splitlines()]
    words = {word for row in rows if len(row) == 6 for word in re.findall(r"`(\w+)(?:=[^`]*)?`", row[4])}
    fields = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    elsewhere = {"model", "from_pretrained", "load_dataset", "map", "peft", "resume_from_checkpoint"}
    of_trainer = {"compute_loss_func", "compute_metrics"}
    assert len(words & fields) > 25
    assert words - fields - elsewhere - of_trainer <= set(dir(transformers))

    lightning = pytest.importorskip("lightning")
    arguments = set(inspect.signature(lightning.Trainer).parameters)
    named = set(re.findall(r"`Trainer\((\w+)=", page))
    assert len(named) > 8
    assert named <= arguments
    for word in ("ModelCheckpoint", "EarlyStopping", "WeightAveraging", "EMAWeightAveraging"):
        assert f"`{word}" in page
        assert hasattr(__import__("lightning.pytorch.callbacks", fromlist=[word]), word)


# -- made from the code ------------------------------------------------------------------------------------------------


def unescaped(page: Path) -> str:
    """A page without the escapes of its tables."""
    return html.unescape(page.read_text(encoding="utf-8")).replace("\\|", "|")


STALE = "differs from the code that it is made from. Run `make docs-sources`, and commit the result."


@pytest.mark.slow  # `make lint` checks it, too
def test_parts_made_from_the_code_are_current(sources):
    stale = sorted(path.relative_to(ROOT).as_posix() for path in sources.outdated())
    assert not stale, f"{', '.join(stale)}: {STALE}"


@pytest.mark.slow
def test_stale_page_is_detected_and_rewritten(tmp_path):
    docs = shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    ema, cli = docs / "plugins" / "ema.md", docs / "cli.md"
    before = ema.read_text(), cli.read_text()
    ema.write_text(before[0].replace("- `decay: ", "- `dekay: "))
    cli.write_text(before[1].replace("## fastloop plan\n", "## fastloop plans\n"))
    (docs / "plugins" / "gone.md").write_text("# gone\n")
    checked = forked.run(str(docs / "_sources.py"), "--check")
    assert checked.returncode == 1
    assert checked.stdout.splitlines() == [
        f"docs/{page}: {STALE}" for page in ("cli.md", "plugins/ema.md", "plugins/gone.md")
    ]
    assert forked.run(str(docs / "_sources.py")).returncode == 0
    assert (ema.read_text(), cli.read_text()) == before
    assert not (docs / "plugins" / "gone.md").exists()


def test_every_hook_is_shown_with_its_docstring():
    text = (ROOT / "docs/loop.md").read_text()
    specs = {key: spec for key, spec in vars(hookspecs).items() if hasattr(spec, "fastloop_spec")}
    assert re.findall(r"(?m)^### `(\w+)`", text) == list(specs)
    for hook, spec in specs.items():
        part = text.partition(f"### `{hook}`")[2].partition("\n### ")[0]
        assert f"{hook}({', '.join(inspect.signature(spec).parameters)[:3]}" in part
        assert inspect.cleandoc(spec.__doc__).splitlines()[-1].rpartition(". ")[2] in part
    assert "Kind: *chain*." in text.partition("### `before_prepare`")[2].partition("\n### ")[0]
    assert "[`amp`](plugins/amp.md) (wraps it)" in text.partition("### `evaluate`")[2].partition("\n### ")[0]
    assert "for each micro-step:" in text


@pytest.mark.parametrize("plugin", OURS)
def test_every_plugin_has_a_page_with_its_every_option(plugin):
    text, cls = unescaped(ROOT / f"docs/plugins/{plugin}.md"), load(plugin)
    recipe = unescaped(ROOT / "docs/recipe.md")
    for section, keys in cls.sections.items():
        assert f"](../recipe.md#{section})" in text
        part = recipe.partition(f"\n## `{section}`\n")[2].partition("\n## ")[0]
        tables = [table for table in part.split("\nFor ") if f"[`{plugin}`]" in table.partition("\n")[0]]
        for row in describe(keys):
            assert any(f"- `{row.name}: " in table and row.help.partition("`")[0] in table for table in tables)
    for row in describe(options_of(cls)):
        assert f"- `{row.name}: {row.type.removesuffix(' | null')}" in text
        assert row.help.partition("`")[0] in text
    for other in (*cls.requires, *cls.conflicts):
        assert f"`{other.removeprefix('slot:')}`" in text
    assert cls.slot is None or f"- slot: `{cls.slot}`" in text
    package, group = cls.__module__.split(".")[:2]
    is_own = package in ("fastloop_plugins", "fastloop_tools")
    heading = group.capitalize() if is_own else f"Package {package.replace('_', '-')}"
    section = (ROOT / "docs/plugins/index.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert f"- [`{plugin}`]({plugin}.md)" in section


def test_every_command_is_shown_with_its_every_option(sources):
    text, found = unescaped(ROOT / "docs/cli.md"), dict(sources.leaves())
    assert re.findall(r"(?m)^## (.+)$", text) == list(found)
    assert {f"fastloop {command}" for command in ("train", "plan", "schema")} < set(found)
    for command, made in found.items():
        part = text.partition(f"## {command}\n")[2].partition("\n## ")[0]
        part += text.partition("\n## ")[0]
        for parameter in made.params:
            for flag in (
                parameter.opts
                if parameter.param_type_name == "option"
                else [parameter.metavar or parameter.name.upper()]
            ):
                assert flag in part, f"{command}: {flag}"
            assert (parameter.help or "").partition("`")[0] in part


def test_every_key_of_a_recipe_is_shown():
    text = unescaped(ROOT / "docs/recipe.md")
    for row in describe(Train):
        assert f"- `{row.name}: " in text
        assert row.help.partition("`")[0] in text
    assert re.findall(r"(?m)^## `(\w+)`", text) == list(recipe_schema()[0]["properties"])


@pytest.mark.parametrize("cls", API, ids=lambda cls: cls.__name__)
def test_every_public_member_is_in_the_api_reference(cls):
    part = (ROOT / "docs/api.md").read_text().partition(f"\n## {cls.__name__}\n")[2].partition("\n## ")[0]
    methods = [
        key for key, value in vars(cls).items() if inspect.isroutine(inspect.unwrap(getattr(value, "__func__", value)))
    ]
    fields = [*inspect.get_annotations(cls), *(key for key in vars(cls) if key not in methods)]
    for init in re.findall(r"(?ms)^    def __(?:post_)?init__\(.*?(?=^    (?:def|@|# --)|\Z)", inspect.getsource(cls)):
        fields += re.findall(r"\bself\.([a-z]\w*)(?:: [^=\n]+)?(?: =|, self|$)", init, re.MULTILINE)
    fields = [
        key
        for key in fields
        if not key.startswith("_") and key not in methods and not inspect.isclass(getattr(cls, key, None))
    ]
    shown, internal = set(re.findall(r"(?m)^- `(\w+)(?:: |\().+?` \S", part)), INTERNAL.get(cls, set())
    assert shown >= {*fields, *(key for key in methods if not key.startswith("_"))} - internal
    assert not shown & internal


def test_every_hook_is_on_the_page_of_the_loop():
    found = re.findall(r"(?m)^### `(\w+)`", (ROOT / "docs/loop.md").read_text())
    assert found == [key for key, spec in vars(hookspecs).items() if hasattr(spec, "fastloop_spec")]


# -- on a code host ----------------------------------------------------------------------------------------------------

READ = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *PAGES,
    *sorted(ROOT.glob("examples/*/README.md")),
]


def anchors(page: Path) -> set[str]:
    """The anchors that code hosts give the headings of a page."""
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"(?m)^#+ (.+)$", re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
        names.add(f"{slug}-{found[slug]}" if found[slug] else slug)
    return names


@pytest.mark.parametrize("page", READ, ids=name)
def test_page_links_exist(page):
    text = re.sub(r"(?ms)^```.*?^```|`[^`\n]*`(?!\])", "", page.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_it_names_paths_that_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    named = [word for word in re.findall(r"`([\w./-]+)`", text) if re.search(r"/|\.(py|md|toml|yml|yaml|sh)$", word)]
    assert len(named) > 15
    for word in named:
        if "my_plugin" not in word:
            found = [ROOT / word, *ROOT.glob(f"*/*/{word}"), *ROOT.glob(f"core/fastloop/*/{word}")]
            assert any(path.exists() for path in found), word


PACKAGES = [
    path
    for folder in ("core/fastloop", "plugins/fastloop_plugins", "plugins/fastloop_tools")
    for path in sorted((ROOT / folder).rglob("__init__.py"))
    if "template" not in path.parts
]


def files_of_docstring(init: Path) -> list[str]:
    """The names before the # in the lines of a package's docstring that describe its files."""
    text = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
    named = []
    for names in re.findall(r"^ *([a-z_]+(?:, [a-z_]+)*) +# ", text, re.MULTILINE):
        named += names.split(", ")
    return named


def test_docstrings_of_packages_name_files_that_exist():
    described = {init: files_of_docstring(init) for init in PACKAGES}
    for init, names in described.items():
        for name in names:
            assert (init.parent / f"{name}.py").is_file() or (init.parent / name / "__init__.py").is_file(), (
                init,
                name,
            )
    assert sum(map(bool, described.values())) >= 6


# -- the site ----------------------------------------------------------------------------------------------------------


class Loaded(HTMLParser):
    """Collects the ``urls`` that a browser loads with a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "a":  # which a reader follows
            self.urls += [value or "" for key, value in attrs if key in ("src", "href", "srcset", "data", "poster")]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built as `make docs` does."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_the_site_has_every_page_and_loads_nothing_from_a_network(site):
    pages = {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert {page.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for page in PAGES} <= set(pages)
    for path, text in pages.items():
        loaded = Loaded(text).urls
        assert any(url.endswith(".css") for url in loaded), path
        assert [url for url in loaded if re.match(r"(?i)\s*(https?:)?//", url)] == [], path
        assert not re.search(r"(?i)@import|url\(\s*['\"]?(https?:)?//", text), path
    for style in site.rglob("*.css"):
        assert not re.search(r"(?i)@import\s*['\"u]|url\(\s*['\"]?(https?:)?//", style.read_text(encoding="utf-8")), (
            style
        )


@pytest.mark.slow
def test_the_site_is_linked_and_navigable(site):
    for path in site.rglob("*.html"):
        if path.name == "404.html":
            continue
        for link in re.findall(r'<a [^>]*href="([^"#:]+)(?:#[^"]*)?"', path.read_text(encoding="utf-8")):
            target = (path.parent / link).resolve()
            assert target.exists(), f"{path.relative_to(site)}: {link}"
    start = (site / "index.html").read_text(encoding="utf-8")
    for plugin in OURS:
        assert f'href="plugins/{plugin}.html"' in start
