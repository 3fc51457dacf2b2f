"""Malformed data of every kind that a spec takes: a generator of files, with the place that an error must name."""

import io
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from PIL import Image

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
ROWS: dict[str, dict[str, Any]] = {
    "causal": {"text": "some text"},
    "completion": {"prompt": "2 + 2 = ", "completion": "4"},
    "messages": {"messages": MESSAGES},
    "preference": {"prompt": "say ", "chosen": "yes", "rejected": "no"},
    "classes": {"text": "some text", "label": 1},
    "words": {"text": ["some", "text"], "label": [0, 1]},
}
"""A good row of each kind of records."""
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@dataclass(frozen=True)
class Malformed:
    """Files that are wrong, and the data of a spec that names them by paths in their folder."""

    name: str
    kind: str
    files: dict[str, bytes]
    data: dict[str, Any]
    place: str
    """Text that an error must contain."""
    must_fail: bool = True
    """False where the data may also be read, with what is wrong left out."""
    paths: tuple[str, ...] = field(default=("paths", "path", "tokenizer", "chat_template"))

    def spec_data(self, folder: Path) -> dict[str, Any]:
        """Write the files, and return the `data` of a spec."""
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        data = dict(self.data)
        for key in self.paths:
            value = data.get(key)
            if isinstance(value, list):
                data[key] = [str(folder / each) for each in value]
            elif value is not None and value != "bytes":
                data[key] = str(folder / value)
        return data


def every_malformed() -> list[Malformed]:
    """All inputs, of which no two have one name."""
    found = [*_lines(), *_tables(), *_values(), *_templates(), *_configs(), *_tokenizers(), *_images(), *_arrays()]
    assert len({one.name for one in found}) == len(found)
    return found


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _records(kind: str, files: dict[str, bytes], name: str, place: str, **fields: Any) -> Malformed:
    settings: dict[str, Any] = {"kind": "records", "paths": sorted(file for file in files if file.startswith("rows"))}
    if kind == "completion":
        settings["completion_field"] = "completion"
    if kind == "messages":
        settings["messages_field"] = "messages"
        files = {"chat.jinja": TEMPLATE.encode(), **files}
        settings["chat_template"] = "chat.jinja"
    must_fail = fields.pop("must_fail", True)
    return Malformed(f"{kind}-{name}", kind, files, settings | fields, place, must_fail)


def _lines() -> Iterator[Malformed]:
    """JSON lines at fault, in the third row of the second file."""
    for kind, row in ROWS.items():
        good = _json(row) + b"\n"
        wrong = {
            "number": b"17",
            "text": b'"text"',
            "array": b"[1, 2]",
            "truncated": _json(row)[:-3],
            "quotes": good.strip().replace(b'"', b"'"),
            "utf8": good.strip().replace(b"s", b"\xff").replace(b"2", b"\xff"),
            "utf16": good.decode().encode("utf-16"),
            "surrogate": b'{"text": "\\ud800"}',
            "control": b'{"text": "a\x00b"}',
            "twice": b'{"text": "a", "text": "b"}',
            "word": b"nonsense",
            "comma": good.strip()[:-1] + b",}",
            "deep": b'{"x": ' + b"[" * 20000 + b"]" * 20000 + b"}",
        }
        for name, line in wrong.items():
            files = {"rows1.jsonl": good * 3, "rows2.jsonl": good * 2 + line + b"\n" + good}
            place = "rows2.jsonl" if name in {"utf16", "twice", "surrogate"} else "row 3 of"
            yield _records(kind, files, f"line-{name}", place)
        yield _records(kind, {"rows1.jsonl": good, "rows2.jsonl": b"null\n" * 3}, "line-nulls", "rows2.jsonl")
        yield _records(kind, {"rows.jsonl": b""}, "empty", "rows.jsonl")
        yield _records(kind, {"rows.jsonl": good + b"null\n" + good}, "null-between", "row 2 of")
        yield _records(kind, {"rows.jsonl": good * 2 + b"nullnull\n"}, "null-twice", "row 3 of")
        yield _records(kind, {"rows1.jsonl": good, "rows2.jsonl": b'{"other": 1}\n'}, "columns", "rows2.jsonl, unlike")


def _tables() -> Iterator[Malformed]:
    """CSV, Parquet and text files."""
    csv = {
        "columns": b"text,label\na,1\nb,1,2,3\n",
        "utf8": b"text,label\na,1\n\xff\xfe,1\n",
        "no-field": b"words\na\n",
        "only-header": b"text,label\n",
        "empty": b"",
        "nul": b"text,label\n\x00,1\n",
        "quote": b'text,label\n"a,1\n',
    }
    for name, content in csv.items():
        may = name in {"nul", "quote"}
        yield _records("causal", {"rows.csv": content}, f"csv-{name}", "rows.csv", must_fail=not may)
    for name, content in {
        "magic": b"PAR1PAR1",
        "random": bytes(range(256)),
        "empty": b"",
        "huge": b"PAR1\xff\xff\xff\x7fPAR1",
    }.items():
        yield _records("causal", {"rows.parquet": content}, f"parquet-{name}", "rows.parquet")
    yield _records("causal", {"rows.txt": b"a\n\xff\n"}, "text-utf8", "row 2 of", must_fail=False)
    yield _records("causal", {"rows.json": b'[{"text": "a"}, 3]'}, "json-number", "rows.json")
    yield _records("causal", {"rows.json": b'{"text": "a"'}, "json-open", "rows.json")
    yield _records("causal", {"rows.json": b'[{"text": "a"}, null]'}, "json-null", "row 2 of")


def _values() -> Iterator[Malformed]:
    """Rows of good JSON whose values are of a wrong type."""
    wrong: list[object] = [None, 1, 1.5, True, [], ["a"], {"a": 1}, [[1]], [None]]
    for kind, row in ROWS.items():
        for number, name in enumerate(row):
            for place, value in enumerate(wrong):
                rows = b"".join(_json({**row, name: value}) + b"\n" for _ in range(2))
                yield _records(
                    kind, {"rows.jsonl": rows}, f"value-{name}-{number}-{place}", "rows.jsonl", must_fail=False
                )
    chats: dict[str, list[Any]] = {
        "text": ["hi"],
        "no-role": [{"content": "hi"}],
        "sender": [{"from": "nobody", "value": "hi"}],
        "parts": [{"role": "user", "content": [{"type": "image"}]}],
    }
    for name, chat in chats.items():
        yield _records("messages", {"rows.jsonl": _json({"messages": chat}) + b"\n"}, f"chat-{name}", "row 1 of")


def _templates() -> Iterator[Malformed]:
    """Chat templates that fail, do not end, or take what they must not."""
    sources = {
        "zero": "{{ 1/0 }}",
        "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "power": "{{ 9 ** (9 ** 9) }}",
        "syntax": "{% for m in %}",
        "open": "{{ messages",
        "filter": "{{ messages | nonsense }}",
        "undefined": "{{ nothing.of.it }}",
        "call": "{{ messages() }}",
        "index": "{{ messages[9].content + 1 }}",
        "type": "{{ messages + 1 }}",
        "raise": "{{ raise_exception('no') }}",
        "attribute": "{{ ''.__class__.__mro__ }}",
        "range": "{% for i in range(10 ** 9) %}{% endfor %}",
        "include": "{% include 'other' %}",
        "import": "{% import 'other' as o %}",
        "extends": "{% extends 'other' %}",
        "unicode": "{{ '\\ud800'.encode() }}",
        "format": "{{ '%d' % 'a' }}",
        "overflow": "{{ 10.0 ** 400 }}",
    }
    rows = (_json({"messages": MESSAGES}) + b"\n") * 2
    for name, source in sources.items():
        files = {"rows.jsonl": rows, "chat.jinja": source.encode()}
        yield _records("messages", files, f"template-{name}", "row 1 of")
    files = {"rows.jsonl": rows, "chat.jinja": b"\xff\xfe"}
    yield _records("messages", files, "template-utf8", "chat.jinja")


def _configs() -> Iterator[Malformed]:
    """A `tokenizer_config.json` at fault, beside a tokenizer."""
    contents = {
        "no-json": b"{not json",
        "utf8": b"\xff",
        "list": b"[1]",
        "number": b"3",
        "text": b'"chat_template"',
        "deep": b"[" * 20000,
        "template-number": b'{"chat_template": 3}',
        "template-list": b'{"chat_template": [3]}',
        "template-names": b'{"chat_template": [{"name": ["default"], "template": "a"}]}',
        "template-none": b'{"chat_template": [{"name": "default"}]}',
    }
    rows = (_json({"messages": MESSAGES}) + b"\n") * 2
    for name, content in contents.items():
        files = {"rows.jsonl": rows, "tokenizer.json": _tokenizer(), "tokenizer_config.json": content}
        place = "tokenizer" if not name.startswith("template") else "data.chat_template"
        yield _records("messages", files, f"config-{name}", place, tokenizer="tokenizer.json", chat_template=None)


def _tokenizer(model: dict[str, Any] | None = None, **fields: Any) -> bytes:
    vocabulary = {"[UNK]": 0, "some": 1, "text": 2}
    made = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]", **(model or {})}
    empty: dict[str, Any] = {
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
    }
    return _json({"version": "1.0", **empty, "model": made, **fields})


def _tokenizers() -> Iterator[Malformed]:
    """A `tokenizer.json` at fault, used for records and for text."""
    special = {"id": "[CLS]", "ids": [99999], "tokens": ["[CLS]"]}
    post: dict[str, Any] = {"type": "TemplateProcessing", "pair": [], "special_tokens": {"[CLS]": special}}
    post["single"] = [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    piece = {"unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    contents = {
        "no-json": b"{",
        "empty": b"",
        "list": b"[]",
        "number": b"1",
        "utf8": b"\xff",
        "unknown": _tokenizer({"vocab": {"a": 0}}),
        "unknown-bpe": _tokenizer({"type": "BPE", "vocab": {"a": 0}, "merges": []}),
        "unknown-piece": _tokenizer({"type": "WordPiece", "vocab": {"a": 0}, **piece}),
        "unknown-unigram": _tokenizer({"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": None}),
        "unigram-id": _tokenizer({"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 7}),
        "large": _tokenizer({"vocab": {"[UNK]": 4294967295}}),
        "negative": _tokenizer({"vocab": {"[UNK]": -1}}),
        "merges": _tokenizer({"type": "BPE", "vocab": {"a": 0}, "merges": [["x", "y"]]}),
        "special": _tokenizer(post_processor=post),
        "type": _tokenizer({"type": "Nonsense"}),
        "steps": _tokenizer(pre_tokenizer={"type": "Nonsense"}),
        "regex": _tokenizer(pre_tokenizer={**pattern, "pattern": {"Regex": "("}}),
        "backtracks": _tokenizer(pre_tokenizer=pattern),
    }
    content = "a" * 40 + "! zzz"
    for name, made in contents.items():
        place = "rows.jsonl" if name.startswith("unknown") or name == "backtracks" else "tokenizer.json"
        files = {"rows.jsonl": _json({"text": content}) + b"\n", "tokenizer.json": made}
        yield _records("causal", files, f"tokenizer-{name}", place, tokenizer="tokenizer.json")
        texts = {"corpus.txt": content.encode(), "tokenizer.json": made}
        place = "corpus.txt" if place == "rows.jsonl" else place
        data = {"kind": "text", "paths": ["corpus.txt"], "tokenizer": "tokenizer.json"}
        yield Malformed(f"text-tokenizer-{name}", "causal", texts, data, place)
    texts = {"corpus.txt": b"some\n\xff text", "tokenizer.json": _tokenizer()}
    data = {"kind": "text", "paths": ["corpus.txt"], "tokenizer": "tokenizer.json"}
    yield Malformed("text-utf8", "causal", texts, data, "line 2 of")


def _encoded(format_: str) -> bytes:
    stream = io.BytesIO()
    pixels = np.arange(40 * 40 * 3, dtype=np.uint8).reshape(40, 40, 3)
    Image.fromarray(pixels).save(stream, format_)
    return stream.getvalue()


def _images() -> Iterator[Malformed]:
    """Images that are cut, damaged, or larger than Pillow opens."""
    data = {"kind": "images", "path": "images"}
    damage: dict[str, Callable[[bytes], bytes]] = {
        "head": lambda content: content[:10],
        "half": lambda content: content[: len(content) // 2],
        "zeros": lambda content: content[:4] + bytes(40) + content[44:],
        "ones": lambda content: content[:12] + b"\xff" * 24 + content[36:],
        "empty": lambda _: b"",
    }
    for format_ in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"):
        for name, damaged in damage.items():
            files = {f"images/dog/1.{format_.lower()}": damaged(_encoded(format_))}
            yield Malformed(f"image-{format_}-{name}", "images", files, data, "images/dog/1.", must_fail=False)
    png = _encoded("PNG")
    bomb = png[:16] + struct.pack(">II", 60000, 60000) + png[24:]
    yield Malformed("image-bomb", "images", {"images/dog/1.png": bomb}, data, "images/dog/1.png")
    yield Malformed(
        "image-second", "images", {"images/cat/1.png": png, "images/dog/1.png": png[:60]}, data, "dog/1.png"
    )


def _arrays() -> Iterator[Malformed]:
    """Files of arrays that are cut, of other types, or out of range."""

    def npz(**arrays: Any) -> bytes:
        stream = io.BytesIO()
        np.savez(stream, **arrays)
        return stream.getvalue()

    ids = np.zeros((3, 64), dtype=np.int64)
    good, safe = npz(input_ids=ids), safetensors.numpy.save({"input_ids": ids})
    contents = {
        f"{name}-cut-{cut}": content[:cut]
        for name, content in (("npz", good), ("safetensors", safe))
        for cut in (0, 7, 60, 200)
    }
    contents |= {
        "npz-object": npz(input_ids=np.array([{}, None], dtype=object)),
        "npz-text": npz(input_ids=np.array([["a"]])),
        "npz-scalar": npz(input_ids=np.int64(3)),
        "npz-none": npz(input_ids=ids[:0]),
        "npz-range": npz(input_ids=ids + 10**6),
        "npz-float": npz(input_ids=ids.astype(float)),
        "npz-complex": npz(input_ids=ids.astype(complex)),
        "npz-large": npz(input_ids=ids.astype(np.uint64) + np.uint64(2**64 - 1)),
        "npz-date": npz(input_ids=ids.astype("datetime64[s]")),
        "safetensors-length": b"\xff" * 8 + safe[8:],
        "safetensors-header": safe[:8] + b"x" * (len(safe) - 8),
    }
    for name, content in contents.items():
        file = f"arrays.{name.partition('-')[0]}"
        yield Malformed(f"arrays-{name}", "causal", {file: content}, {"kind": "arrays", "path": file}, "data.path")
