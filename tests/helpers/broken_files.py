"""Broken and odd data files, as people have them. Other parsers read many of the broken ones wrong, without a message.

A case is one line here: ``good`` for a file that is read, ``broken`` for one that is refused, and ``mislabelled`` for
one that is refused to train. Each is read in memory, as a stream, and as a file to predict.
"""

from __future__ import annotations

import bz2
import csv
import datetime
import gzip
import io
import json
import lzma
from decimal import Decimal

import pyarrow
from data_files import (
    FILES,
    HEADER,
    ROWS,
    TOP,
    Rows,
    arrow_of,
    broken,
    cells,
    columns_of,
    first_batch_end,
    good,
    labels,
    mislabelled,
    objects,
    parquet_of,
    reviews,
    texts,
)

__all__ = ["FILES"]

# -- quotes ------------------------------------------------------------------------------------------------------------

STRAY = '"never closed\tneg'
STRAYS = {
    "a quote closed by another one": {"line_11": STRAY, "line_34": '"another one\tpos'},
    "a quote that swallows 22 rows": {"line_11": STRAY, "line_34": 'it is 5"\tpos'},
    "a quote that swallows a row with doubled quotes": {
        "line_11": STRAY,
        "line_12": 'she said ""wow""\tneg',
        "line_34": 'it is 5"\tpos',
    },
    "a quote that never closes": {"line_11": STRAY},
    "a quoted word opens a cell": {"line_11": '"Great" film\tneg'},
}
for name, lines in STRAYS.items():
    plain: Rows = [(line.split("\t")[0], line.split("\t")[1]) for line in reviews(**lines).splitlines()[1:]]
    for suffix, content in {"tsv": reviews(**lines), "csv": reviews(**lines).replace("\t", ",")}.items():
        broken(f"{name} of a {suffix}", f"a.{suffix}", content, ", line 11", remedy={"quoting": "none"}, mended=plain)
SWALLOWED = "id\ttext\n" + "".join(f"{number}\tfilm {number}\n" for number in range(7))
SWALLOWED += '7\t"never closed\n8\tfilm\n9\tit is 5"\n'
broken("a quote that swallows rows without labels", "a.tsv", SWALLOWED, ", line 9", data={"label": None})
LIKE = '"one,neg\ntwo",pos\n'
double = {"remedy": {"quoting": "double"}, "mended": [*ROWS, ("one,neg\ntwo", "pos")]}
broken("a cell that looks like rows", "a.csv", cells(ROWS) + LIKE, ", line 14", **double)
DOUBLED = '"a ""fine"" film",pos\n'
DOUBLED_ROWS: Rows = [*ROWS, ('a "fine" film', "pos"), ("one,neg\ntwo", "pos")]
good("a cell that looks like rows below doubled quotes", "a.csv", cells(ROWS) + DOUBLED + LIKE, DOUBLED_ROWS)
ESCAPED = 'id,text\n1,"a ""fine"" film\n""Really"", it is"\n2,"one ""more""\n""Really"", one"\n'
READ = ['a "fine" film\n"Really", it is', 'one "more"\n"Really", one']
texts("doubled quotes in cells that look like rows", "a.csv", ESCAPED, READ)
LONG: Rows = [(f"film {number}, fine\r\nand, long\n\n", ("neg", "pos")[number % 2]) for number in range(8)]
LONG.append(('so "so"\n,', "neg"))
QUOTED = io.StringIO(newline="")
csv.writer(QUOTED, lineterminator="\n").writerows([HEADER, *LONG])
good("cells over several lines", "a.csv", QUOTED.getvalue(), LONG)
AB: Rows = [("a", "x"), ("b", "y")]
good("quotes within quotes", "a.csv", TOP + '"a ""fine"" one",x\nb,y\n', [('a "fine" one', "x"), ("b", "y")])
good("a quote within a cell", "a.csv", TOP + 'a 5" one,x\nb,y\n', [('a 5" one', "x"), ("b", "y")])
good("quoted labels beside plain ones", "a.csv", TOP + 'a,"x"\nb,x\nc,y\n', [("a", "x"), ("b", "x"), ("c", "y")])
good("a backslash before n", "a.csv", TOP + '"a\\nb",x\nc,y\n', [("a\\nb", "x"), ("c", "y")])
broken("quotes after backslashes", "a.csv", TOP + '"a \\"fine\\" one",x\nb,y\n', ", line 2")
broken("single quotes around a comma", "a.csv", TOP + "'a, b',x\nc,y\n", ", line 2")
broken("a space before a quote", "a.csv", TOP + ' "a, b",x\nc,y\n', ", line 2")
broken("a space after a quote", "a.csv", TOP + '"a, b" ,x\nc,y\n', ", line 2")
broken("a last line that is cut within quotes", "a.csv", TOP + 'a,x\nb,y\n"c and', ", line 4")

# -- cells -------------------------------------------------------------------------------------------------------------

for size in (200_000, 6_000_000):
    BIG: Rows = [("x" * size, "neg"), ("y", "pos")]
    good(f"a cell of {size} characters", "a.csv", cells(BIG), BIG)
broken("too many cells", "a.csv", cells(ROWS) + "one, two,neg\n" + cells(ROWS, ()), ", line 14")
broken("too few cells", "a.csv", cells(ROWS) + "one\n" + cells(ROWS, ()), ", line 14")
broken("a cell too few in the last line", "a.csv", TOP + "a,x\nb,y\nc", ", line 4")
broken("a comma at the end of each row", "a.csv", TOP + "a,x,\nb,y,\n", ", line 2")
broken("a row of spaces", "a.csv", TOP + "a,x\n   \nb,y\n", ", line 3")
for name, end in {"CRLF": "\r\n", "CR": "\r"}.items():
    broken(f"{name} among LF", "a.csv", cells(ROWS) + f"one{end}two,neg\nthree,pos\n", ", line 14")
for name, end in {"CRLF": "\r\n", "CR": "\r", "CRCRLF": "\r\r\n"}.items():
    good(f"{name} alone", "a.csv", cells(ROWS, end=end), ROWS)
    good(f"{name} in a jsonl", "a.jsonl", objects(ROWS).replace("\n", end), ROWS)
broken("CR within a cell of a tsv", "a.tsv", "text\tlabel\na\rb\tx\nc\ty\n", ", line 2")
broken("CRLF at the end of the last line only", "a.csv", TOP + "a,x\nb,y\r\n", ", line 3")
TRAILING = "text,label,,\na,x,,\nb,y,,\n"
good("trailing commas", "a.csv", TRAILING, AB)
good("blank lines around the header", "a.csv", "\n\n" + TOP + "\na,x\n\nb,y\n\n", AB)
texts("a row of spaces in one column", "a.csv", "text\na\n   \nb\n", ["a", "   ", "b"])
texts("an empty line in one column", "a.csv", "text\na\n\nb\n", ["a", "b"])
texts("empty quotes in one column", "a.csv", 'text\na\n""\nb\n', ["a", "", "b"])

# -- headers -----------------------------------------------------------------------------------------------------------

broken("a header in the middle", "a.csv", cells(ROWS) + cells(ROWS), ", line 14")
swapped = cells([(str(label), text) for text, label in ROWS], ("label", "text"))
broken("a header in the middle, in another order", "a.csv", cells(ROWS) + swapped, ", line 14")
broken("a header in the middle, in capitals", "a.csv", cells(ROWS) + cells(ROWS, ("TEXT", "Label")), ", line 14")
broken("a header in the middle, after a space", "a.csv", TOP + "a,x\n text,label\nb,y\n", ", line 3")
broken("a header in the middle, after a mark", "a.csv", TOP + "a,x\n\ufefftext,label\nb,y\n", ", line 3")
broken("a header in the middle of numbers", "a.csv", TOP + "a,0\nb,1\n" + TOP + "c,1\n", ", line 4")
broken("a header in the middle of texts", "a.csv", "text\na\nb\ntext\n", ", line 4", data={"label": None})
good("the names of columns as texts", "a.csv", TOP + "Text,x\nlabel,y\n", [("Text", "x"), ("label", "y")])
good("some names of columns in a row", "a.csv", "text,label,good\nGood,text,1\nb,y,0\n", [("Good", "text"), ("b", "y")])
broken("a repeated column", "a.csv", "text,label,text\na,neg,b\nc,pos,d\n", ", line 1", "repeated-column")
good("columns that differ by case", "a.csv", "text,label,Text\na,x,1\nb,y,2\n", AB)
NAMED = {"remedy": {"columns": ["text", "label"]}, "mended": ROWS}
broken("no header", "a.csv", cells(ROWS, ()), code="unknown-column", **NAMED)
broken(
    "a header and data.read.columns", "a.csv", cells(ROWS), ", line 1", data={"read": {"columns": ["text", "label"]}}
)
BELOW = "a,x\nb,y\n"
for name, top in {
    "a header in capitals": "Text,Label",
    "a header with a no-break space": "text\u00a0,label",
    "a header with a zero-width space": "\u200btext,label",
    "a header with two byte-order marks": "\ufeff\ufefftext,label",
    "a title above the header": f"Export\n{TOP}",
    "a comment above the header": f"# Export\n{TOP}",
}.items():
    broken(name, "a.csv", f"{top.rstrip()}\n{BELOW}", code="unknown-column")
broken("a line for Excel above the header", "a.csv", "sep=;\ntext;label\na;x\nb;y\n", code="unknown-column")
mislabelled("a header with a space before label", "a.csv", "text, label\na, x\n", "", "unknown-column")
good("an unnamed index before the columns", "a.csv", ",text,label\n0,a,x\n1,b,y\n", AB)
good("a line end in the name of another column", "a.csv", 'text,label,"a\nb"\na,x,1\nb,y,2\n', AB)
for name, delimiter in {"semicolons": ";", "tabs": "\t", "bars": "|"}.items():
    good(name, "a.csv", cells(ROWS, delimiter=delimiter), ROWS)
good("commas in a tsv", "a.tsv", cells(ROWS), ROWS)
good("carets, as given", "a.csv", cells(ROWS, delimiter="^"), ROWS, delimiter="^")
good("semicolons below a header with a comma", "a.csv", "text;label;a,b\na;x;1\nb;y;2\n", AB)
good("semicolons of Excel with CRLF and a mark", "a.csv", "\ufeff" + cells(ROWS, delimiter=";", end="\r\n"), ROWS)
broken("spaces between the cells of a tsv", "a.tsv", "text    label\na    x\n", code="unknown-column")
tab = {"data": {"read": {"columns": ["text", "label"]}}, "remedy": {"columns": ["text", "label"], "delimiter": "tab"}}
broken("tabs without a header in a csv", "a.csv", "a\tx\nb\ty\n", ", line 1", mended=AB, **tab)

# -- values ------------------------------------------------------------------------------------------------------------

TYPED: Rows = [("007", "true"), ("1e5", "false"), ("NA", "true"), ("true", "false"), ("2020-01-01", "true"),
               (" x ", "false"), ("", "true"), ("null", "true")]  # fmt: skip
good("cells that look like numbers, dates and null", "a.csv", cells(TYPED), TYPED)
good("cells of a tsv that look like numbers", "a.tsv", cells(TYPED, delimiter="\t"), TYPED)
good("a zero byte in a cell", "a.csv", "text,label\na\0b,neg\nc,pos\n", [("a\0b", "neg"), ("c", "pos")])
broken("zero bytes at the end of a csv", "a.csv", TOP + "a,x\nb,y\n" + "\0" * 512, ", line 4")
broken("zero bytes at the end of a jsonl", "a.jsonl", objects(AB) + "\0" * 512, ", line 3")
broken("Ctrl-Z at the end of a csv", "a.csv", TOP + "a,x\nb,y\n\x1a", ", line 4")
broken("marks of a merge conflict", "a.csv", TOP + "a,x\n<<<<<<< HEAD\nb,y\n", ", line 3")
texts(
    "a txt with rare line ends",
    "a.txt",
    "one\u2028a\r\ntwo\x0cb\r\nthree\x85c\r\n",
    ["one\u2028a", "two\x0cb", "three\x85c"],
)
texts("a txt with a zero byte", "a.txt", "a\0b\nc\n", ["a\0b", "c"])

# -- nothing -----------------------------------------------------------------------------------------------------------

for suffix in ("csv", "tsv", "jsonl", "json", "txt", "csv.gz", "jsonl.bz2", "csv.zst"):
    nothing = {"label": None} if suffix == "txt" else {}
    mislabelled(f"an empty {suffix}", f"a.{suffix}", b"", "", "empty-split", **nothing)
mislabelled("a header alone", "a.csv", TOP, "", "empty-split")
mislabelled("a mark alone", "a.csv", b"\xef\xbb\xbf", "", "empty-split")
mislabelled("blank lines alone", "a.jsonl", "\n \n\n", "", "empty-split")
mislabelled("an empty list", "a.json", "[]", "", "empty-split")
mislabelled("texts of spaces alone", "a.csv", TOP + " ,x\n\t,y\n", "", "empty-column")
broken("an empty parquet", "a.parquet", b"", code="file-unreadable")
broken("an empty arrow", "a.arrow", b"", code="file-unreadable")

# -- encodings and compression -----------------------------------------------------------------------------------------

ACCENTS: Rows = [("café 🙂", "neg"), ("\u2028 naïve", "pos")]
MARKED = {"utf-8-sig": "utf-8-sig", "utf-16": "utf-16", "utf-16 of a Mac": "utf-16-be", "utf-32": "utf-32"}
for name, encoding in MARKED.items():
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    for how in ({}, {"encoding": "cp1252"}):  # the mark decides
        given = " and not in cp1252" if how else ""
        good(f"a csv in {name}{given}", "a.csv", (mark + cells(ACCENTS)).encode(encoding), ACCENTS, **how)
    escaped = json.dumps([{"text": text, "label": label} for text, label in ACCENTS], ensure_ascii=False)
    good(f"a json in {name}", "a.json", (mark + escaped).encode(encoding), ACCENTS)
    texts(f"a txt in {name}", "a.txt", (mark + "café 🙂\n\u2028 naïve\n").encode(encoding), ["café 🙂", "\u2028 naïve"])
good("a jsonl in utf-16", "a.jsonl", objects(ACCENTS).encode("utf-16"), ACCENTS)
CAFE: Rows = [("fine", "neg"), ("café", "pos")]
cp1252 = {"remedy": {"encoding": "cp1252"}, "mended": CAFE}
broken("a csv in cp1252", "a.csv", cells(CAFE).encode("cp1252"), ", line 3", **cp1252)
good("a csv in cp1252, as given", "a.csv", cells(CAFE).encode("cp1252"), CAFE, encoding="cp1252")
broken(
    "a csv in cp1252, called ascii",
    "a.csv",
    cells(CAFE).encode("cp1252"),
    ", line 3",
    data={"read": {"encoding": "ascii"}},
)
broken(
    "a csv in UTF-8, called cp1252",
    "a.csv",
    cells(CAFE * 8).encode(),
    ", line 3",
    "wrong-encoding",
    data={"read": {"encoding": "cp1252"}},
)
OTHER = '\n{"text": "fine", "label": "neg"}\n{"text": "café", "label": "pos"}\n'.encode("cp1252")
broken("a jsonl in cp1252", "a.jsonl", OTHER, ", line 3", **cp1252)
plain_texts = {"data": {"label": None}, "remedy": {"encoding": "cp1252"}, "mended": [("a", None), ("café", None)]}
broken("a txt in cp1252", "a.txt", "a\ncafé\n".encode("cp1252"), ", line 2", **plain_texts)
broken("an accent in cp1252 far behind", "a.csv", TOP.encode() + b"a,x\n" * 10_000 + b"caf\xe9,y\n", ", line 10002")
for encoding in ("utf-16-le", "utf-16-be"):
    unmarked = {"remedy": {"encoding": encoding}, "mended": ROWS}
    broken(
        f"{encoding} without a mark", "a.csv", cells(ROWS).encode(encoding), ", line 1", "wrong-encoding", **unmarked
    )
broken(
    "a txt in UTF-16 without a mark",
    "a.txt",
    "one\ntwo\n".encode("utf-16-le"),
    ", line 1",
    "wrong-encoding",
    data={"label": None},
)
broken("UTF-16 with half a character at its end", "a.csv", cells(ROWS).encode("utf-16")[:-1], ", line 13")
PACKERS = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "zst": lambda data: pyarrow.compress(data, codec="zstd", asbytes=True),
}
for suffix, pack in PACKERS.items():
    whole, other, end = pack(cells(ROWS).encode()), pack(cells(ROWS[:6]).encode()), pack(cells(ROWS[6:], ()).encode())
    path, codec = f"a.csv.{suffix}", {"gz": "gzip", "zst": "zstd"}.get(suffix, suffix)
    good(f"a csv.{suffix}", path, whole, ROWS)
    good(f"a jsonl.{suffix}", f"a.jsonl.{suffix}", pack(objects(ROWS).encode()), ROWS)
    good(f"a csv in {codec} by its option", "a.csv", whole, ROWS, compression=codec)
    good(f"two members in a csv.{suffix}", path, other + end, ROWS)
    broken(f"a csv.{suffix} that is cut off", path, whole[:-9], code="file-unreadable")
    broken(f"a csv.{suffix} that lacks a byte", path, whole[:-1], code="file-unreadable")
    broken(f"a csv.{suffix} whose second member is cut off", path, other + end[:-9], code="file-unreadable")
    broken(f"a csv.{suffix} with more behind it", path, whole + b"more", code="file-unreadable")
    broken(f"text that is called csv.{suffix}", path, cells(ROWS), code="file-unreadable")
    good(f"text that is called csv.{suffix}, as given", path, cells(ROWS), ROWS, compression="none")
    broken(f"a csv.{suffix} of a csv.gz", path, pack(gzip.compress(cells(ROWS).encode())), code="wrong-contents")
for suffix in ("gz", "zst"):
    good(f"a csv that is a {suffix}", "a.csv", PACKERS[suffix](cells(ROWS).encode()), ROWS)
for place in (-6, -2):
    wrong = bytearray(gzip.compress(cells(ROWS).encode()))
    wrong[place] ^= 1
    broken(f"a csv.gz with another checksum or size ({place})", "a.csv.gz", bytes(wrong), code="file-unreadable")
# Sixty equal parts of a gzip file: every worker imports this module, and compresses one of them.
SPACES = gzip.compress(objects([("x" * 1000, "0"), ("y", "1")]).encode()) + gzip.compress(b" " * 1_000_000) * 60
broken("60 MB of spaces in 60 kB", "a.jsonl.gz", SPACES + gzip.compress(b"\n"), code="too-large")

# -- other contents than the name says ---------------------------------------------------------------------------------

CONTENTS = {
    "a pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
    "a PDF": b"%PDF-1.7\n%text\n",
    "an RTF": b"{\\rtf1\\ansi text}\n",
    "an old workbook": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 512,
    "zero bytes": b"\0" * 4096,
    "a 7z archive": b"7z\xbc\xaf\x27\x1c\0\4",
    "a RAR archive": b"Rar!\x1a\x07\1\0",
    "an xz": lzma.compress(cells(ROWS).encode()),
    "a TAR archive": b"train.csv".ljust(257, b"\0") + b"ustar\0" + b"00" + b"\0" * 247,
}
for name, content in CONTENTS.items():
    broken(f"{name} called csv", "a.csv", content, code="wrong-contents")
    broken(f"{name} called txt", "a.txt", content, code="wrong-contents", data={"label": None})
    broken(f"{name} called parquet", "a.parquet", content, code="wrong-contents")
    broken(f"{name} called csv.gz", "a.csv.gz", gzip.compress(content), code="wrong-contents")
PAGE = "<!DOCTYPE html>\n<html><body>Sign in</body></html>\n"
broken("a web page called csv", "a.csv", PAGE, code="wrong-contents")
broken("a web page called jsonl", "a.jsonl", PAGE, code="wrong-contents")
texts("a web page called txt", "a.txt", PAGE, PAGE.splitlines())

# -- JSON --------------------------------------------------------------------------------------------------------------

FIRST = '{"text": "a", "label": "neg"}'
SECOND = '{"text": "b", "label": "neg", "label": "pos"}'
broken("a repeated key in a jsonl", "a.jsonl", f"{FIRST}\n{SECOND}", ", line 2")
broken("a repeated key in a list", "a.json", f"[{FIRST}, {SECOND}]", ", line 1")
broken(
    "a repeated key in another spelling",
    "a.jsonl",
    FIRST + '\n{"text": "b", "te\\u0078t": "c", "label": "x"}\n',
    ", line 2",
)
broken(
    "a repeated key within a value",
    "a.jsonl",
    FIRST + '\n{"text": "b", "label": "x", "m": {"k": 1, "k": 2}}\n',
    ", line 2",
)
BEGIN = '{"text": "a", "label": "0"}\n'
broken("half a UTF-16 pair", "a.jsonl", BEGIN + '{"text": "b \\ud83d", "label": "1"}\n', ", line 2")
good(
    "a whole UTF-16 pair",
    "a.jsonl",
    BEGIN + '{"text": "b \\ud83d\\ude42", "label": "1"}\n',
    [("a", "0"), ("b 🙂", "1")],
)
good("an escaped zero byte", "a.jsonl", BEGIN + '{"text": "b\\u0000", "label": "1"}\n', [("a", "0"), ("b\0", "1")])
good(
    "a rare line end in a jsonl",
    "a.jsonl",
    BEGIN + '{"text": "b\u2028", "label": "1"}\n',
    [("a", "0"), ("b\u2028", "1")],
)
MISSING = BEGIN + '{"txt": "b", "label": "1"}\n{"text": null, "label": "1"}\n{"Text": "b", "label": "1"}\n'
good("a text that is missing or null", "a.jsonl", MISSING, [("a", "0"), ("", "1"), ("", "1"), ("", "1")])
broken("5000 digits", "a.jsonl", BEGIN + '{"text": "b", "label": "1", "n": ' + "9" * 5000 + "}\n", ", line 2")
broken("100,000 lists", "a.jsonl", BEGIN + '{"text": "b", "label": "1", "n": ' + "[" * 100_000 + "\n", ", line 2")
HALF = objects(ROWS[:6])
LINES = {
    "single quotes in a line": "{'text': 'a', 'label': 'neg'}",
    "a line that is a list": "[1]",
    "two objects in a line": FIRST + FIRST,
    "a comma after a line": FIRST + ",",
    "a comment": "// more",
    "a byte-order mark in the middle": "\ufeff" + FIRST,
    "a line end within a text": '{"text": "a\nb", "label": "neg"}',
    "a tab within a text": '{"text": "a\tb", "label": "neg"}',
}
for name, line in LINES.items():
    broken(name, "a.jsonl", f"{HALF}{line}\n{HALF}", ", line 7")
for name, value in {
    "a number": "5",
    "true": "true",
    "NaN": "NaN",
    "a list": '["a"]',
    "an object": '{"en": "a"}',
}.items():
    broken(f"a text that is {name}", "a.jsonl", HALF + f'{{"text": {value}, "label": "neg"}}\n' + HALF, ", line 7")
broken("objects over several lines", "a.jsonl", json.dumps({"text": "a", "label": "x"}, indent=1), ", line 1")
good(
    "a list of objects called jsonl",
    "a.jsonl",
    json.dumps([{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]),
    AB,
)
good("an object a line called json", "a.json", objects(ROWS), ROWS)
ELEMENT = '{"text": "a", "label": "x"}'
broken("a list that is cut off", "a.json", f'[\n{FIRST},\n{{"text": "b", "label": "y"}}', ", line 3")
broken("a comma at the end of a list", "a.json", f"[\n{ELEMENT},\n]", ", line 3")
broken("a second list behind a list", "a.json", f"[{ELEMENT}]\n[{ELEMENT}]", ", line 2")
broken("a null in a list", "a.json", f"[{ELEMENT}, null]", ", row 2")
broken("lists in a list", "a.json", '[["text", "label"], ["a", "x"]]', ", row 1")
broken(
    "columns in an object", "a.json", '{"text": ["a", "b"], "label": ["x", "y"]}', ", line 1", streamed="wrong-label"
)
broken("rows under a key", "a.json", f'{{"version": 1, "data": [{ELEMENT}]}}', code="unknown-column")
mislabelled("a header among objects", "a.jsonl", objects([*ROWS, HEADER, *ROWS]), ", line 13", "header-in-rows")
mislabelled(
    "a header in capitals among objects", "a.jsonl", objects([*ROWS, ("Text", " LABEL")]), ", line 13", "header-in-rows"
)
DIFFER = '{"text": "a", "label": "x", "m": [{"a": 1}]}\n{"text": "b", "label": "y", "m": {"b": "c"}}\n'
good("values that differ by row", "a.jsonl", DIFFER, AB)
good(
    "NaN in a column that is not read",
    "a.jsonl",
    '{"text": "a", "label": "x", "s": NaN}\n{"text": "b", "label": "y"}\n',
    AB,
)
LATE: Rows = [(f"t{number}", "x" if number % 2 else "y") for number in range(60_100)]
LATER = [
    {"text": text, "label": label} | ({"extra": {"k": [number]}} if number > 60_000 else {})
    for number, (text, label) in enumerate(LATE)
]
good("a column that begins after 60,000 rows", "a.jsonl", "\n".join(map(json.dumps, LATER)), LATE)

# -- labels ------------------------------------------------------------------------------------------------------------

NAN, INFINITY = float("nan"), float("inf")
for name, (row, code, values) in {
    "labels of text and numbers": (1, "mixed-labels", ("x", 1, "x", 1)),
    "labels 1 and '1'": (3, "mixed-labels", (0, 1, "1")),
    "labels true and 1": (1, "mixed-labels", (True, False, 1)),
    "a label that is NaN": (2, "missing-label", (0, NAN, 1)),
    "a label that is null": (2, "missing-label", ("x", None, "y")),
    "a label that is infinite": (3, "wrong-label", (0, 1, INFINITY)),
    "a label that is an object": (3, "wrong-label", (0, 1, {"a": 1})),
    "a label that is a list": (1, "wrong-label", (["x"], ["y"])),
    "a label that is 0.5": (2, "wrong-label", (0, 0.5, 1)),
    "a label beyond the whole numbers of a float": (1, "wrong-label", (2.0**53, 2.0**53 + 2, 0)),
    "a label that is half a UTF-16 pair": (1, "wrong-label", ("\ud83d", "x")),
}.items():
    mislabelled(name, "a.jsonl", labels(*values), f", line {row}", code)
for name, (row, code, values) in {
    "a label that is empty": (2, "missing-label", ("neg", "", "pos")),
    "labels 01 and 1": (1, "mixed-labels", ("01", "1", "02")),
    "labels 0 and 01": (3, "mixed-labels", ("0", "1", "01")),
    "a number among names": (1, "mixed-labels", ("neg", "pos", "3")),
    "NA among numbers": (3, "mixed-labels", ("0", "1", "NA")),
    "a wide digit among numbers": (2, "mixed-labels", ("1", "\uff11", "0")),
    "thousands with a space": (1, "mixed-labels", ("1 000", "0", "1")),
    "0.5 among numbers": (2, "wrong-label", ("0", "0.5", "1")),
    "1e5 among numbers": (2, "wrong-label", ("0", "1e5", "1")),
    "-0 among numbers": (1, "wrong-label", ("-0", "0", "1")),
    "no label among numbers": (2, "missing-label", ("0", "", "1")),
    "a total in the last row": (1, "mixed-labels", ("x", "y", "2")),
}.items():
    content = TOP + "".join(f"text,{value}\n" for value in values)
    mislabelled(name, "a.csv", content, f", line {row + 1}", code)
mislabelled("whole numbers beyond 2^53", "a.jsonl", labels(2**53, 2**53 + 1), "", "gaps-in-labels")
good("1 and 1.0", "a.jsonl", labels(0, 1.0, 1), [("text 0", "0"), ("text 1", "1"), ("text 2", "1")])
good("digits of another script", "a.csv", TOP + "a,\u0660\nb,\u0661\n", [("a", "\u0660"), ("b", "\u0661")])
good("decimals with a comma", "a.csv", "text;label\na;0,0\nb;1,0\n", [("a", "0,0"), ("b", "1,0")])

# -- tables ------------------------------------------------------------------------------------------------------------

TABLE = pyarrow.Table.from_pylist([{"text": text, "label": label} for text, label in ROWS])
TWICE = pyarrow.table([["a", "b"], ["x", "y"], ["c", "d"]], names=["text", "label", "text"])
broken("a repeated column of a parquet", "a.parquet", parquet_of(TWICE), code="repeated-column")
broken("a parquet that is cut off", "a.parquet", parquet_of(TABLE)[:-30], code="file-unreadable")
broken("a parquet with more behind it", "a.parquet", parquet_of(TABLE) + b"xx", code="file-unreadable")
broken("a parquet behind another one", "a.parquet", parquet_of(TABLE) * 2, code="file-unreadable")
broken("a parquet with more before it", "a.parquet", b"\n" + parquet_of(TABLE), code="file-unreadable")
LATIN = pyarrow.array([b"fine", b"caf\xe9"], pyarrow.binary()).view(pyarrow.string())
UNDECODABLE = parquet_of(pyarrow.table({"text": LATIN, "label": ["x", "y"]}), write_statistics=False)
broken("text of a parquet that is not UTF-8", "a.parquet", UNDECODABLE, code="wrong-encoding")
ENCODED = TABLE.set_column(0, "text", TABLE["text"].dictionary_encode().combine_chunks())
LARGE = TABLE.set_column(0, "text", TABLE["text"].cast(pyarrow.large_string()))
good("a parquet with a dictionary", "a.parquet", parquet_of(ENCODED), ROWS)
good("a parquet of large strings", "a.parquet", parquet_of(LARGE), ROWS)
good("a parquet with groups of 5 rows", "a.parquet", parquet_of(TABLE, row_group_size=5), ROWS)
good("a parquet with pages of version 2", "a.parquet", parquet_of(TABLE, data_page_version="2.0"), ROWS)
good(
    "a parquet of differences",
    "a.parquet",
    parquet_of(TABLE, use_dictionary=False, column_encoding="DELTA_BYTE_ARRAY"),
    ROWS,
)
for codec in ("lz4", "brotli", "zstd"):
    good(f"a parquet in {codec}", "a.parquet", parquet_of(TABLE, compression=codec), ROWS)
NESTED = pyarrow.table(
    {"a": [{"text": "n"}, {"text": "m"}], "text": ["a", "b"], "text.label": ["q", "r"], "label": ["x", "y"]}
)
good("a parquet with the same name within a column", "a.parquet", parquet_of(NESTED), AB)
joined = pyarrow.Table.from_pylist([{"text": text, "label": label} for text, label in [*ROWS, HEADER]])
mislabelled("a header among the rows of a parquet", "a.parquet", parquet_of(joined), ", row 13", "header-in-rows")
mislabelled("a parquet without rows", "a.parquet", parquet_of(TABLE.slice(0, 0)), "", "empty-split")
DAY = datetime.datetime(2020, 1, 1)
for name, (row, code, values) in {
    "dates": (1, "wrong-label", [DAY, DAY + datetime.timedelta(1)]),
    "decimals": (1, "wrong-label", [Decimal("0.0"), Decimal("1.0")]),
    "bytes": (1, "wrong-label", [b"x", b"y"]),
    "structs": (1, "wrong-label", [{"x": 1}, {"x": 2}]),
    "lists": (1, "wrong-label", [["x"], ["y"]]),
    "fractions": (2, "wrong-label", [0.0, 1.5, 1.0]),
    "numbers and nulls": (2, "missing-label", [0, None, 1]),
    "nulls alone": (1, "missing-label", [None, None]),
    "numbers and NaN": (2, "missing-label", [0.0, NAN, 1.0]),
}.items():
    mislabelled(f"a parquet with labels of {name}", "a.parquet", columns_of(values), f", row {row}", code)
good("a parquet with labels of true and false", "a.parquet", columns_of([True, False]), [("a", "true"), ("b", "false")])
codes = pyarrow.array(["01", "02", "01"]).dictionary_encode()
good("a parquet with a dictionary of labels", "a.parquet", columns_of(codes), [("a", "01"), ("b", "02"), ("c", "01")])
good("a parquet with whole labels of a float", "a.parquet", columns_of([0.0, 1.0]), [("a", "0"), ("b", "1")])
for name, values in {
    "bytes": [b"a", b"b"],
    "numbers": [1, 2],
    "lists": [["a"], ["b"]],
    "structs": [{"en": "a"}, {"en": "b"}],
}.items():
    broken(f"a parquet with texts of {name}", "a.parquet", columns_of(["x", "y"], values), ", row 1")
DAMAGED = bytearray(arrow_of(TABLE))
OFFSETS = DAMAGED.index(ROWS[0][0].encode())
DAMAGED[OFFSETS - 56 : OFFSETS - 8] = b"\xff" * 48
STREAM, FILE = arrow_of(TABLE, 3), arrow_of(TABLE, 3, as_file=True)
good("an arrow stream", "a.arrow", arrow_of(TABLE), ROWS)
good("an arrow file", "a.arrow", FILE, ROWS)
good("an arrow stream with the end of Arrow 0.14", "a.arrow", STREAM[:-8] + b"\0\0\0\0", ROWS)
for name, content in {
    "an arrow with damaged offsets": bytes(DAMAGED),
    "an arrow that is cut off": STREAM[:-500],
    "an arrow stream that is cut off between batches": STREAM[: first_batch_end(STREAM)],
    "an arrow stream without its end": STREAM[:-8],
    "an arrow stream with more behind it": STREAM * 2,
    "an arrow file that is cut off between batches": FILE[: first_batch_end(STREAM) + 8],
    "an arrow file that lacks its last bytes": FILE[:-4],
    "a feather of version 1": b"FEA1" + b"\0" * 100,
}.items():
    broken(name, "a.arrow", content, code="file-unreadable")
broken("an arrow with a dictionary", "a.arrow", arrow_of(ENCODED), code="wrong-type")
