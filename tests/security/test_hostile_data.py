"""Data, images, models and templates from others: a small file takes no unbounded memory, or gives a one-line error.

Each attack runs in a process whose memory has a limit of 1.25 GiB above what it has at its start. Beyond it,
allocations fail.

Modules:
    plugins/fastloop_plugins/rows/limits.py
    plugins/fastloop_plugins/text/chat/time_limit.py
"""

from __future__ import annotations

import itertools
import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import yaml
from bombs import GIB, MIB, edit_parquet, empty_columns, hole, packed, png, safetensors, write_parquet
from image_helpers import write_images, write_vit
from text_helpers import TINY, TINY_GPT, rows

from fastloop_plugins.text.chat import time_limit as _time_limit

pytestmark = pytest.mark.slow

LIMITED = """
import resource, sys
data = int(open("/proc/self/status").read().split("VmData:")[1].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (data + 5 * 2**28, -1))
sys.argv[0] = "fastloop"
from fastloop.cli import main
try:
    main()
finally:
    open("peak", "w").write(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024))
"""
DEEP = "[" * 200_000 + "]" * 200_000
LONG_TEXT = "fine " * (MIB // 4)
"""More than 1 MiB, and quick to tokenize."""


def command(tree: dict[str, Any], name: str = "train", timeout: float = 600) -> Any:
    """Run a command on a recipe in a process with little memory."""
    Path("limited.py").write_text(LIMITED)
    train = {"epochs": 1, "max_steps": 1, "batch_size": 2, "device": "cpu"}
    Path("r.yaml").write_text(yaml.safe_dump({"train": train, "output": "run", **tree}))
    return forked.run("limited.py", name, "r.yaml", timeout=timeout)


def refused(tree: dict[str, Any]) -> str:
    """The error of one line with which a recipe ends."""
    done = command(tree)
    assert done.returncode in (1, 2), done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    assert len(errors) == 1, done.stderr
    assert len(errors[0]) < 2000
    return errors[0]


def accepted(tree: dict[str, Any]) -> None:
    done = command(tree)
    assert done.returncode == 0, done.stderr


def classify(path: str, streaming: bool, **data: Any) -> dict[str, Any]:
    """A recipe of text-classification that trains on one file."""
    more = {"streaming": True, "lanes": 1, "validation_fraction": 0} if streaming else {}
    section = {"files": {"train": path}, "text": "text", "label": "label", "max_length": 16, **more, **data}
    return {"model": {"config": TINY, "tokenizer": {"kind": "word"}}, "data": section}


def table(count: int = 40) -> list[dict[str, Any]]:
    return rows(count, ("bad", "good"))


@pytest.fixture(scope="module")
def written_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[], str]], str]:
    """Writes the file of an attack into the current folder, or links to the one that an earlier test wrote."""
    folder = tmp_path_factory.mktemp("attacks")
    kept: dict[str, tuple[str, Path]] = {}

    def link(attack: str, write: Callable[[], str]) -> str:
        if attack in kept:
            name, file = kept[attack]
            Path(name).hardlink_to(file)
        else:
            name, file = kept[attack] = write(), folder / str(len(kept))
            file.hardlink_to(name)
        return name

    return link


def lines(*more: str) -> str:
    return "".join(json.dumps(row) + "\n" for row in table()) + "".join(more)


def written(path: str, text: str | bytes) -> str:
    Path(path).write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# -- files of lines ----------------------------------------------------------------------------------------------------

CSV, ROW = b"text,label\na,good\n", b'{"text": "a", "label": "good"}\n'
LONG = r"line \d+: longer than 16 MiB, expected .* \(data\.read\.max_row_mib\)"
EXPANDS = r"has \d+ bytes and expands to more than \d+, expected .* \(data\.read\.max_expansion\)"
DEPTH = "line 41: .*recursion depth"

# name -> (writes a file, the error when it is read into memory, the error when it is streamed; None: it cannot be)
LINES: dict[str, tuple[Callable[[], str], str, str | None]] = {
    "one cell of 2 GiB in a csv.gz of 2 MB": (lambda: packed("a.csv.gz", CSV, b"a", 2 * GIB), LONG, LONG),
    "one cell of 2 GiB in a csv.zst": (lambda: packed("a.csv.zst", CSV, b"a", 2 * GIB), EXPANDS, EXPANDS),
    "one text of 2 GiB in a jsonl.gz": (lambda: packed("a.jsonl.gz", ROW + b'{"text": "', b"a", 2 * GIB), LONG, LONG),
    "one text of 2 GiB in a jsonl.bz2": (
        lambda: packed("a.jsonl.bz2", ROW + b'{"text": "', b"a", 2 * GIB),
        EXPANDS,
        EXPANDS,
    ),
    "one line of 2 GiB in a txt.zst": (lambda: packed("a.txt.zst", b"a\n", b"a", 2 * GIB), EXPANDS, None),
    "rows of 128 MiB in a jsonl.gz": (lambda: packed("a.jsonl.gz", b"", ROW, 128 * MIB), EXPANDS, EXPANDS),
    "rows of 2 GiB in a jsonl.zst": (lambda: packed("a.jsonl.zst", b"", ROW, 2 * GIB), EXPANDS, EXPANDS),
    "rows of 2 GiB in a csv.bz2": (lambda: packed("a.csv.bz2", CSV, b"b,bad\n", 2 * GIB), EXPANDS, EXPANDS),
    "a list of 128 MiB in a json.gz": (
        lambda: packed("a.json.gz", b"[" + ROW.strip(), b", " + ROW.strip(), 128 * MIB, b"]"),
        EXPANDS,
        None,
    ),
    "a quoted cell of a million lines": (lambda: packed("a.csv.gz", CSV + b'"', b"a line\n", 2 * GIB), LONG, LONG),
    "a jsonl with a line of 2 GiB": (lambda: hole("a.jsonl", ROW + b'{"text": "', 2 * GIB), LONG, LONG),
    "a csv with a line of 2 GiB": (lambda: hole("a.csv", CSV, 2 * GIB), LONG, LONG),
    "a txt with a line of 2 GiB": (lambda: hole("a.txt", b"a\n", 2 * GIB), LONG, None),
    "200,000 lists in a jsonl": (lambda: written("a.jsonl", lines(DEEP)), DEPTH, DEPTH),
    "900 lists as a text in a jsonl": (
        lambda: written("a.jsonl", lines('{"text": ' + "[" * 900 + "]" * 900 + ', "label": "good"}\n')),
        "line 41: column 'text' .*expected text",
        "line 41: column 'text' .*expected text",
    ),
    "200,000 objects in a row of a jsonl": (lambda: written("a.jsonl", lines('{"text":' * 200_000)), DEPTH, DEPTH),
    "200,000 lists in a json": (lambda: written("a.json", DEEP), "line 1: .*recursion depth", None),
    "bad UTF-8 in a csv": (
        lambda: written("a.csv", CSV + b"b,bad\n" * 2000 + b"caf\xe9,good\n"),
        "line 2003: not UTF-8",
        "line 2003: not UTF-8",
    ),
    "bad UTF-8 in a jsonl": (
        lambda: written("a.jsonl", lines().encode() + b'{"text": "\xe9"}\n'),
        "line 41: not",
        "line 41: not",
    ),
}


@pytest.mark.parametrize(
    ("attack", "streaming"),
    [
        (name, streaming)
        for name, (_, _, stream) in LINES.items()
        for streaming in (False, True)
        if stream is not None or not streaming
    ],
)
def test_file_of_lines_that_takes_gigabytes(attack, streaming, written_once):
    """a small text file that stands for gigabytes, or is nested 200,000 deep: refused with its line and the option
    that permits more"""
    write, memory, stream = LINES[attack]
    path = written_once(attack, write)
    found = refused(classify(path, streaming))
    assert found.startswith(f"error: {path}")
    assert re.search(stream if streaming and stream else memory, found), found


@pytest.mark.parametrize(
    ("name", "streaming"),
    [
        *itertools.product(["a.csv", "a.csv.gz", "a.csv.bz2", "a.jsonl", "a.jsonl.zst"], [False, True]),
        ("a.json.gz", False),
    ],
)
def test_file_of_lines_that_is_good(name, streaming):
    """control: plain and compressed files of lines with a text of more than 1 MiB, read into memory and streamed"""
    texts = table()
    texts[7]["text"] = LONG_TEXT
    if ".csv" in name:
        content = "text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in texts)
    else:
        content = "".join(json.dumps(row) + "\n" for row in texts)
    if name.endswith(("z2", "gz", "st")):
        packed(name, content.encode(), b"\n", 0)
    else:
        written(name, content)
    accepted(classify(name, streaming, max_length=16))


@pytest.mark.parametrize("streaming", [False, True], ids=["memory", "stream"])
def test_limits_can_be_raised(streaming):
    """control: data.read.max_row_mib and data.read.max_expansion, which the errors name, set the limits"""
    row = json.dumps({"text": LONG_TEXT, "label": "good"}).encode() + b"\n"
    path = packed("a.jsonl.gz", lines().encode(), b"\n", 0, row)
    assert "line 41: longer than 1 MiB" in refused(
        classify(path, streaming, read={"max_row_mib": 1, "max_expansion": 1000})
    )
    assert "expands to more than 1048576" in refused(
        classify(path, streaming, read={"max_row_mib": 1, "max_expansion": 2})
    )
    accepted(classify(path, streaming, read={"max_row_mib": 2, "max_expansion": 2}))
    accepted(classify(path, True, read={"max_row_mib": 2, "max_expansion": 2, "encoding": "cp1252"}))


# -- Parquet -----------------------------------------------------------------------------------------------------------


def labels(count: int) -> list[str]:
    return [("bad", "good")[number % 2] for number in range(count)]


def repeated(path: str, size: int, count: int, **options: Any) -> str:
    """A file in which each row has the same text."""
    return write_parquet(path, ["a" * size] * count, labels(count), **options)


def long_texts(path: str = "a.parquet") -> str:
    return write_parquet(path, ["a" * MIB] * 8, labels(8), use_dictionary=False)


CLAIMS = r"a page of column text claims \d+ bytes, and its column \d+"
PARQUET: dict[str, tuple[Callable[[], str], str]] = {
    "one text of 10 MiB that 1000 rows share": (lambda: shared("a.parquet", 10 * MIB, 1000), EXPANDS),
    "one text of 15 MiB that 900 rows share": (lambda: shared("a.parquet", 15 * MIB, 900), EXPANDS),
    "one prefix of 10 MiB that 160 rows share": (lambda: prefixed("a.parquet", 10 * MIB, 160), EXPANDS),
    "a million columns of 3 bytes in a footer": (lambda: empty_columns("a.parquet", 10, 100_000), EXPANDS),
    "a column that claims 1 TiB": (lambda: edit_parquet(long_texts(), chunk=2**40), EXPANDS),
    "a page that claims 2 GiB": (lambda: edit_parquet(long_texts(), page=2**31 - 1), CLAIMS),
    "a page that claims less than no byte": (lambda: edit_parquet(long_texts(), page=2**31), "claims"),
    "a column that claims one byte": (lambda: edit_parquet(long_texts(), chunk=1), CLAIMS),
    "10**12 rows": (
        lambda: edit_parquet(long_texts(), rows=10**12),
        r"a\.parquet: .*row group 0 has [9,]+2 rows less than it claims",
    ),
}


def shared(path: str, size: int, count: int) -> str:
    import pyarrow

    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * count, pyarrow.int32()), ["a" * size])
    return write_parquet(path, texts, labels(count), dictionary_pagesize_limit=GIB, store_schema=False)


def prefixed(path: str, size: int, count: int) -> str:
    """Each text is the prefix and a digit: the file has the prefix once."""
    return write_parquet(
        path,
        ["a" * size] * count,
        labels(count),
        use_dictionary=False,
        column_encoding={"text": "DELTA_BYTE_ARRAY", "label": "PLAIN"},
    )


@pytest.mark.parametrize("streaming", [False, True], ids=["memory", "stream"])
@pytest.mark.parametrize("attack", PARQUET)
def test_parquet_file_that_takes_gigabytes(attack, streaming, written_once):
    """a small Parquet file whose parts stand for gigabytes, or claim to: refused with what it claims"""
    write, message = PARQUET[attack]
    path = written_once(attack, write)
    found = refused(classify(path, streaming))
    assert re.search(message, found), found


@pytest.mark.parametrize("streaming", [False, True], ids=["memory", "stream"])
@pytest.mark.parametrize("form", ["plain", "shared", "categories", "prefixes", "many pages", "version 1"])
def test_parquet_file_that_is_good(form, streaming):
    """control: honest Parquet files in every form of page are read"""
    import pyarrow

    texts = [f"a fine film number {number} " * 20 for number in range(3000)]
    options: dict[str, Any] = {"plain": {"use_dictionary": False}, "many pages": {"data_page_size": 1000}}.get(form, {})
    options |= {
        "version 1": {"version": "1.0", "data_page_version": "1.0"},
        "many pages": {"data_page_version": "2.0"},
    }.get(form, {})
    if form == "prefixes":
        options |= {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY", "label": "PLAIN"}}
    column = pyarrow.array([texts[number % 5] for number in range(3000)] if form == "shared" else texts)
    write_parquet("a.parquet", column.dictionary_encode() if form == "categories" else column, labels(3000), **options)
    accepted(classify("a.parquet", streaming))


# -- images ------------------------------------------------------------------------------------------------------------

PIXELS = r"has \d+ x \d+ pixels.*, expected at most 89478485 in all \(data\.max_pixels\)"


def long_text() -> tuple[bytes, bytes]:
    """A chunk of a PNG with a text of 512 MiB. Compression takes a second, so no import does it."""
    return b"zTXt", b"note\0\0" + zlib.compress(b"a" * (512 * MIB))


IMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "1 x 60,000, which resizes to 4 gigapixels": (lambda path: png(path, 1, 60_000), PIXELS),
    "60,000 x 1": (lambda path: png(path, 60_000, 1), PIXELS),
    "12,000 x 12,000 in 20 kB": (lambda path: png(path, 12_000, 12_000), PIXELS),
    "30,000 x 30,000": (lambda path: png(path, 30_000, 30_000, written=10), r"exceeds limit of \d+ pixels.* "
                                                                            r"data\.max_pixels"),
    "2**31 - 1 squared": (lambda path: png(path, 2**31 - 1, 2**31 - 1, written=1), r"exceeds limit of \d+ pixels.* "
                                                                                   r"data\.max_pixels"),
    "a text of 512 MiB in it": (
        lambda path: png(path, 20, 20, more=[long_text()]),
        "cannot be read as an image: Decompressed data too large",
    ),
    "a PPM of 10**9 x 10**9": (lambda path: path.write_bytes(b"P6 1000000000 1000000000 255\n"), r"data\.max_pixels"),
    "a BMP of 50,000 x 50,000": (
        lambda path: path.write_bytes(
            b"BM" + bytes(8) + (54).to_bytes(4, "little") + (40).to_bytes(4, "little")
            + (50_000).to_bytes(4, "little") * 2 + b"\1\0\x18\0" + bytes(24)
        ),
        r"data\.max_pixels",
    ),
}  # fmt: skip


def images(**data: Any) -> dict[str, Any]:
    write_images(Path("images"), {"train": 4, "validation": 2})
    write_vit(Path("vit"))
    section = {"images": "images", **data}
    return {"model": {"name": "vit", "pretrained": False}, "data": section, "plugins": ["image-classification"]}


@pytest.mark.parametrize("attack", IMAGES)
def test_image_that_takes_gigabytes(attack):
    """a small image with billions of pixels, original or resized: refused before it is decoded"""
    write, message = IMAGES[attack]
    recipe = images(image_size=16, crop_fraction=0.25)
    path = Path("images/train/red/00.png")
    write(path)
    found = refused(recipe)
    assert found.startswith(f"error: {path}: ")
    assert re.search(message, found), found


def test_image_that_is_good():
    """control: a long image, a film of 500 pictures, and an image above data.max_pixels if that is raised"""
    from PIL import Image

    recipe = images(image_size=16)
    png(Path("images/train/red/00.png"), 20, 2000)
    Image.new("P", (50, 50)).save(
        "images/train/blue/03.gif",
        save_all=True,
        append_images=[Image.new("P", (50, 50), color) for color in range(250)] * 2,
    )
    png(Path("images/train/green/00.png"), 3000, 3000)
    accepted(recipe)
    assert "has 3000 x 3000 pixels, expected at most 1000000" in refused(
        {**recipe, "data": recipe["data"] | {"max_pixels": 10**6}}
    )
    png(Path("images/train/red/00.png"), 12_000, 12_000)
    accepted({**recipe, "data": recipe["data"] | {"max_pixels": 150_000_000}})


# -- models ------------------------------------------------------------------------------------------------------------


MODELS: dict[str, Callable[[Path], Any]] = {
    "weights whose header claims 2**63 bytes": lambda folder: safetensors(folder / "model.safetensors", {}, size=2**63),
    "weights whose header claims 90 MB": lambda folder: safetensors(folder / "model.safetensors", {}, size=90_000_000),
    "weights with a tensor of 4 TiB": lambda folder: safetensors(
        folder / "model.safetensors", {"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}, b"0000"
    ),
    "weights with a shape that overflows": lambda folder: safetensors(
        folder / "model.safetensors", {"a": {"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [0, 0]}}
    ),
    "weights with tensors that share bytes": lambda folder: safetensors(
        folder / "model.safetensors",
        {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in map(str, range(1000))},
        b"0000",
    ),
    "weights with a nested header": lambda folder: safetensors(
        folder / "model.safetensors", b'{"a":' + DEEP.encode() + b"}"
    ),
    "a nested configuration": lambda folder: (folder / "config.json").write_text(
        '{"model_type": "distilbert", "a": ' + DEEP + "}"
    ),
    "a configuration of 10**12 tokens": lambda folder: change(folder / "config.json", vocab_size=10**12),
    "a configuration of 10**6 layers": lambda folder: change(folder / "config.json", n_layers=10**6),
    "a configuration of 256 MiB": lambda folder: hole(
        str(folder / "config.json"), b'{"model_type": "distilbert", "a": "', GIB // 4
    ),
    "a nested tokenizer": lambda folder: (folder / "tokenizer.json").write_text(
        '{"version": "1.0", "model": ' + DEEP + "}"
    ),
    "a tokenizer of 2 GiB": lambda folder: hole(str(folder / "tokenizer.json"), b'{"version": "', 2 * GIB),
    "a nested configuration of the tokenizer": lambda folder: (folder / "tokenizer_config.json").write_text(
        '{"a": ' + DEEP + "}"
    ),
    "a nested index of weights": lambda folder: (folder / "model.safetensors.index.json").write_text(DEEP),
}


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def pretrained(folder: Path, config: dict[str, Any], causal: bool = False) -> dict[str, Any]:
    """Write a tiny model. Returns the recipe that trains it."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    from fastloop_plugins.text.model import TrainedTokenizer, train_tokenizer

    tokenizer = train_tokenizer(TrainedTokenizer(kind="word"), [row["text"] for row in table()], not causal)
    made = AutoConfig.for_model(**config, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    (AutoModelForCausalLM if causal else AutoModelForSequenceClassification).from_config(made).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return classify(written("a.jsonl", lines()), False) | {"model": {"name": str(folder)}}


@pytest.mark.parametrize("attack", MODELS)
def test_model_folder_that_takes_gigabytes(attack):
    """a small model folder whose files claim terabytes or are nested: refused with model.name"""
    recipe = pretrained(Path("model"), TINY)
    MODELS[attack](Path("model"))
    assert re.match(r"error: r\.yaml: model\.name: ", refused(recipe))


@pytest.mark.parametrize("attack", [name for name in MODELS if name.startswith("weights")])
def test_initial_weights_that_take_gigabytes(attack):
    """a safetensors file whose header claims terabytes: refused by name"""
    MODELS[attack](Path())
    recipe = classify(written("a.jsonl", lines()), False)
    recipe["model"]["weights"] = "model.safetensors"
    assert "model.safetensors" in refused(recipe)


def test_model_folder_that_is_good():
    """control: a tiny model folder is loaded with the same memory"""
    accepted(pretrained(Path("model"), TINY))


# -- chat templates ----------------------------------------------------------------------------------------------------

ESCAPES = {
    "the classes of Python": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "an attribute by name": "{{ (messages | attr('__class__')).__base__ }}",
    "an attribute by format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "an attribute by map": "{{ [messages] | map(attribute='__class__') | map(attribute='__base__') | list | first }}",
    "the globals of a function": "{{ raise_exception.__globals__['os'].system('touch pwned') }}",
    "the builtins of Jinja": "{{ cycler.__init__.__globals__.os.system('touch pwned') }}",
    "the builtins of a macro": "{{ self.__init__.__globals__ }}",
    "a changed conversation": "{{ messages.append(messages[0]) }}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}{{ os.system('touch pwned') }}",
    "a range of a billion": "{% for number in range(10 ** 9) %}a{% endfor %}",
    "a text of 10 GB": "{{ 'a' * 10 ** 10 }}",
    "a division by zero": "{{ 1 // 0 }}",
}


@pytest.mark.parametrize("attack", ESCAPES)
def test_chat_template_that_escapes(attack):
    """a chat template that reaches for Python's objects, files, or more than memory: refused, and nothing of it was
    run"""
    recipe = chats(ESCAPES[attack])
    found = refused(recipe)
    assert "chat template" in found
    assert not Path("pwned").exists()


def chats(template: str) -> dict[str, Any]:
    """A recipe of causal-lm with a chat template of a file."""
    Path("template.jinja").write_text(template)
    messages = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
    Path("chats.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 20)
    data = {
        "files": {"train": "chats.jsonl"},
        "messages": "messages",
        "chat_template": "template.jinja",
        "max_length": 16,
    }
    return {
        "model": {"config": TINY_GPT, "tokenizer": {"kind": "bpe", "vocab_size": 300}},
        "data": data,
        "plugins": ["causal-lm"],
    }


LOOPS = (
    "{% for a in range(30000) %}{% for b in range(30000) %}{% for c in range(30000) %}{% endfor %}{% endfor %}{% "
    "endfor %}"
)
LONG = {
    "always": LOOPS,
    "at an answer": "{% if messages[-1].role == 'assistant' %}" + LOOPS + "{% endif %}{{ messages[0].content }}",
}


@pytest.mark.parametrize("template", LONG.values(), ids=LONG.keys())
def test_chat_template_that_loops_for_hours(template, monkeypatch, cli):
    """a chat template that loops for years: refused after the limit, with the row"""
    monkeypatch.setattr(_time_limit, "SECONDS", 0.5)
    tree = {"train": {"max_steps": 1, "batch_size": 2, "device": "cpu"}, "output": "run", **chats(template)}
    Path("r.yaml").write_text(yaml.safe_dump(tree))
    code, _, err = cli("train", "r.yaml")
    (error,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2
    assert re.search(r"line 1.*: the chat template took more than 0\.5 seconds for this conversation", error), error


def test_chat_template_that_is_good():
    """control: a chat template that loops over messages is used"""
    accepted(chats("{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"))


@pytest.mark.parametrize("depth", [200_000, 900, 400, 20])
@pytest.mark.parametrize("where", ["tools", "arguments", "text of arguments", "content"])
def test_conversation_that_is_nested(where, depth):
    """a conversation that is nested up to 200,000 deep: refused with its row; 20 deep is read"""
    recipe = chats("{{ tools | tojson }}{% for message in messages %}{{ message | tojson }}\n{% endfor %}")
    # training a tokenizer on one long word takes minutes
    depth = min(depth, 2000) if where == "text of arguments" else depth
    nested = '{"a": ' + "[" * depth + "]" * depth + "}"
    arguments = {"arguments": nested, "text of arguments": json.dumps(nested)}.get(where, "{}")
    call = f'[{{"type": "function", "function": {{"name": "a", "arguments": {arguments}}}}}]'
    answer = f'{{"role": "assistant", "content": {nested if where == "content" else "null"}, "tool_calls": {call}}}'
    tools = (
        f'[{{"type": "function", "function": {{"name": "a", "parameters": {nested}}}}}]' if where == "tools" else "[]"
    )
    row = f'{{"messages": [{{"role": "user", "content": "a"}}, {answer}], "tools": {tools}}}\n'
    Path("chats.jsonl").write_text(Path("chats.jsonl").read_text() + row)
    done = command(recipe)
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    if where == "text of arguments" or (depth == 20 and where != "content"):
        assert done.returncode in (0, 2), done.stderr
    else:
        assert re.search(r"^error: chats\.jsonl, (line|row) 21: ", done.stderr, re.M), done.stderr
