"""The documentation is so: its code runs, its recipes are recipes, its site builds, and it names what there is.

In a page, a block with ``title="FILE"`` is that file; a python block without a title is executed, all of a page in one namespace; a
console block's commands are run, and what is shown of their output is compared: ``...`` stands for any text. Packages are installed into a
folder of the test's own. Blocks in other languages (``sh``: takes long, or needs a network) are only shown.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import os
import re
import shlex
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
from fastloop.cli.recipe_schema import recipe_schema
from fastloop.options import describe
from fastloop.recipe import Train
from fastloop.registry import installed, load

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
WRITTEN = [ROOT / "README.md", *(page for page in PAGES if "decisions" not in page.parts)]
OURS = [name for name, point in installed().items() if point.dist is not None and point.dist.name == "fastloop"]


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
def hooks() -> Any:
    """docs/_hooks.py, which makes pages."""
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- code --------------------------------------------------------------------------------------------------------------------------

RUN = [page for page in PAGES if any(block.language in ("python", "console") for block in blocks(page))]
BESIDE = {"lightning.md": "lightning"}
"""Pages whose ``python FILE`` needs what may not be installed: only their ``fastloop`` is run then."""
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
PROGRAMS = {"fastloop": ["-P", "-m", "fastloop"], "pytest": ["-P", "-m", "pytest", "-p", "no:cacheprovider"], "python": []}
"""As they are when installed: without the current folder on the import path."""


def test_there_are_pages_that_run():
    assert {"write-a-plugin.md", "pytorch.md", "lightning.md", "hf-trainer.md", "recipe.md", "resolver.md"} <= {page.name for page in RUN}


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=name)
def test_its_code_runs_and_prints_what_it_shows(page, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    missing = page.name in BESIDE and importlib.util.find_spec(BESIDE[page.name]) is None
    here = tmp_path
    for block in blocks(page):
        if block.title:
            Path(block.title).write_text(block.text)
        elif block.language == "python":
            exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)
        elif block.language == "console":
            for command, shown in commands(block.text):
                if command.startswith("cd "):
                    here /= command.removeprefix("cd ")
                elif not (missing and command.startswith("python ")):
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
    """Exit code and output. pip and pytest run in a new Python, since they look at what is imported already."""
    if program in ("fastloop", "python"):
        output = folder / ".output"
        output.unlink(missing_ok=True)
        with forked.Command(*arguments, cwd=folder, env=environment, output=output) as command:
            return command.wait(380), output.read_text()
    command = [program if program == "cp" else sys.executable, *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, cwd=folder, env=environment, text=True, timeout=380, check=False, **streams)
    return done.returncode, done.stdout


# -- recipes and names ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in WRITTEN if any(block.language == "yaml" for block in blocks(page))], ids=name)
def test_its_recipes_are_recipes(page):
    validator = Draft202012Validator(recipe_schema()[0])
    for block in blocks(page):
        if block.language == "yaml":
            errors = [error.message for error in validator.iter_errors(OmegaConf.to_container(OmegaConf.create(block.text), resolve=False))]
            assert not errors, f"{name(page)}:{block.line}"


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_it_names_keys_commands_and_options_that_there_are(page, hooks):
    text = page.read_text(encoding="utf-8")
    keys = {field.name for field in dataclasses.fields(Train)}
    assert set(re.findall(r"`train\.(\w+)[`=]", text)) <= keys
    for plugin, option in re.findall(r"`plugins\.([\w-]+)\.(\w+)[`=]", text):
        assert plugin not in OURS or option in {row.name for row in describe(load(plugin).Config)}, f"{plugin}.{option}"
    known = dict(hooks.leaves())
    for code in [*re.findall(r"`(fastloop [^`\n]+)`", text), *re.findall(r"(?m)^ *(?:\$ )?(fastloop [^#\n]+)", text)]:
        line = code.split(" #")[0].strip()
        command = next((key for key in sorted(known, key=len, reverse=True) if f"{line} ".startswith(f"{key} ")), None)
        written_as_code = f"`{code}`" in text or f"$ {code}" in text
        assert command is not None or not written_as_code, f"there is no command {line!r}"
        if command is not None:
            options = {flag for parameter in known[command].params for flag in parameter.opts}
            assert set(re.findall(r"(?<![\w-])--[a-z-]+", line)) <= options | {"--help"}, line


def test_migration_pages_name_arguments_that_there_are():
    import transformers

    page = (ROOT / "docs/migrate/hf-trainer.md").read_text()
    cells = [line.split("|")[1] for line in page.partition("## What goes where")[2].splitlines() if line.startswith("| `")]
    words = {word for cell in cells for word in re.findall(r"`(\w+)(?:=[^`]*)?`", cell)}
    fields = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    elsewhere = {"model", "from_pretrained", "load_dataset", "map", "compute_metrics", "peft", "resume_from_checkpoint"}
    assert len(words & fields) > 30
    assert {word for word in words - fields - elsewhere if not hasattr(transformers, word)} == set()

    lightning = pytest.importorskip("lightning")
    page = (ROOT / "docs/migrate/lightning.md").read_text()
    arguments = set(inspect.signature(lightning.Trainer).parameters)
    named = set(re.findall(r"`Trainer\((\w+)=", page))
    assert len(named) > 8
    assert named <= arguments
    for word in ("ModelCheckpoint", "EarlyStopping", "WeightAveraging", "EMAWeightAveraging"):
        assert f"`{word}" in page
        assert hasattr(__import__("lightning.pytorch.callbacks", fromlist=[word]), word)


# -- what is made from the code --------------------------------------------------------------------------------------------------------


def test_every_hook_is_shown_with_its_words(hooks):
    specs = {key: spec for key, spec in vars(hookspecs).items() if hasattr(spec, "fastloop_spec")}
    text = hooks.all_hooks()
    assert re.findall(r"(?m)^### `(\w+)`", text) == list(specs)
    for hook, spec in specs.items():
        part = text.partition(f"### `{hook}`")[2].partition("\n### ")[0]
        assert f"{hook}({', '.join(inspect.signature(spec).parameters)[:3]}" in part
        assert inspect.cleandoc(spec.__doc__).splitlines()[-1].rpartition(". ")[2] in part
    assert "Kind: draft." in text.partition("### `configure_optimizer`")[2].partition("\n### ")[0]
    assert "[`ema`](plugins/ema.md) (wraps it)" in text.partition("### `evaluate`")[2].partition("\n### ")[0]
    assert "for each micro-step:" in hooks.annotated_loop()


@pytest.mark.parametrize("plugin", OURS)
def test_every_plugin_has_a_page_with_its_every_option(hooks, plugin):
    text, cls = hooks.made_pages()[f"plugins/{plugin}.md"], load(plugin)
    for row in [*describe(cls.Config), *(row for keys in cls.sections.values() for row in describe(keys))]:
        assert f"| `{row.name}` |" in text
        assert row.help.replace("|", "\\|") in text or row.help in text
    for hook in (key for key in vars(hookspecs) if hasattr(getattr(cls, key, None), "fastloop_impl")):
        assert f"(../loop.md#{hook})" in text
    for other in (*cls.requires, *cls.conflicts, *cls.runs_after, *cls.runs_before):
        assert f"`{other.removeprefix('slot:')}`" in text
    assert cls.slot is None or f"| slot | `{cls.slot}` |" in text
    assert f"[`{plugin}`]({plugin}.md)" in hooks.plugin_table()


def test_every_command_is_shown_with_its_every_option(hooks):
    text, found = hooks.commands(), dict(hooks.leaves())
    assert re.findall(r"(?m)^## (.+)$", text) == list(found)
    assert {f"fastloop {command}" for command in ("train", "plan", "schema")} < set(found)
    for command, made in found.items():
        part = text.partition(f"## {command}\n")[2].partition("\n## ")[0]
        for parameter in made.params:
            for flag in parameter.opts if parameter.param_type_name == "option" else [parameter.metavar or parameter.name.upper()]:
                assert flag in part, f"{command}: {flag}"
            assert (parameter.help or "") in part


def test_every_key_of_a_recipe_is_shown(hooks):
    text = hooks.recipe_keys()
    for row in describe(Train):
        assert f"| `{row.name}` |" in text
        assert row.help in text
    assert re.findall(r"(?m)^## `(\w+)`", text) == list(recipe_schema()[0]["properties"])


# -- the site --------------------------------------------------------------------------------------------------------------------------


class Loaded(HTMLParser):
    """What a page makes a browser load: ``urls``."""

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
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_the_site_has_every_page_and_loads_nothing_from_a_network(site):
    pages = {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    expected = {page.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for page in PAGES}
    assert expected | {f"plugins/{plugin}.html" for plugin in OURS} <= set(pages)
    for path, text in pages.items():
        loaded = Loaded(text).urls
        assert any(url.endswith(".css") for url in loaded), path
        assert [url for url in loaded if re.match(r"(?i)\s*(https?:)?//", url)] == [], path
        assert not re.search(r"(?i)@import|url\(\s*['\"]?(https?:)?//", text), path
        assert "made:" not in text, path
    for style in site.rglob("*.css"):
        assert not re.search(r"(?i)@import\s*['\"u]|url\(\s*['\"]?(https?:)?//", style.read_text(encoding="utf-8")), style


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
