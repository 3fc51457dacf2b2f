"""Vendored files of the pages: unchanged, with their licences, and without code made from text."""

import hashlib
import re
from importlib import resources

import pytest

STATIC = resources.files("batchwright_service.dashboard").joinpath("static")
PREACT_SHA256 = "72284e8e9079c87817145df1110f74e8a2aa040b2fc384922e18dfcb46fc1fd7"
"""Of `preact/standalone.module.js` in htm-3.1.1.tgz as `npm pack htm@3.1.1` fetches it."""
FONT_SHA256 = "19f9c92546aa300c312235e3125af1b81394d8db9a4bc4a425cd5b641d2d54e1"
"""Of `files/geist-latin-wght-normal.woff2` in fontsource-variable-geist-5.3.0.tgz, likewise fetched."""
FORBIDDEN = re.compile(r"\beval\(|new Function|\.innerHTML\s*=|insertAdjacentHTML|document\.write")


@pytest.mark.parametrize(
    ("name", "sha256"), [("preact-htm.js", PREACT_SHA256), ("geist-latin-wght.woff2", FONT_SHA256)]
)
def test_carried_files_are_those_of_the_pinned_versions(name: str, sha256: str) -> None:
    """Every byte is npm's."""
    assert hashlib.sha256(STATIC.joinpath(name).read_bytes()).hexdigest() == sha256


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("preact-htm", ("Apache License", "Copyright (c) 2015-present Jason Miller")),
        ("geist", ("SIL OPEN FONT LICENSE Version 1.1", "Copyright 2024 The Geist Project Authors")),
        ("lucide", ("ISC License", "Lucide Icons and Contributors")),
    ],
)
def test_the_licences_are_carried_too(name: str, words: tuple[str, str]) -> None:
    """Of htm and Preact, of the font, and of the icons."""
    text = STATIC.joinpath(f"{name}.LICENSE.txt").read_text(encoding="utf-8")
    assert all(each in text for each in words)


def test_no_module_of_ours_makes_code_or_markup_from_text() -> None:
    """Pages are made of nodes: no text is run, and none is parsed as HTML."""
    ours = [path for path in STATIC.iterdir() if path.name.endswith(".js") and path.name != "preact-htm.js"]
    found = {path.name: FORBIDDEN.findall(path.read_text(encoding="utf-8")) for path in ours}
    assert {name: faults for name, faults in found.items() if faults} == {}
    assert not [path.name for path in ours if "dangerouslySetInnerHTML" in path.read_text(encoding="utf-8")]
