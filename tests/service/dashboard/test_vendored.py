"""The module of other authors that the pages carry: unchanged, with its licences, and without code made from text."""

from __future__ import annotations

import hashlib
import re
from importlib import resources

STATIC = resources.files("service.dashboard").joinpath("static")
SHA256 = "72284e8e9079c87817145df1110f74e8a2aa040b2fc384922e18dfcb46fc1fd7"
"""Of `preact/standalone.module.js` in htm-3.1.1.tgz as `npm pack htm@3.1.1` fetches it."""
FORBIDDEN = re.compile(r"\beval\(|new Function|\.innerHTML\s*=|insertAdjacentHTML|document\.write")


def test_preact_and_htm_are_those_of_the_pinned_version() -> None:
    """Every byte is npm's."""
    assert hashlib.sha256(STATIC.joinpath("preact-htm.js").read_bytes()).hexdigest() == SHA256


def test_the_licences_are_carried_too() -> None:
    """The Apache License of htm, and the MIT License of Preact."""
    text = STATIC.joinpath("preact-htm.LICENSE.txt").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Copyright (c) 2015-present Jason Miller" in text


def test_no_module_of_ours_makes_code_or_markup_from_text() -> None:
    """Pages are made of nodes: no text is run, and none is parsed as HTML."""
    ours = [path for path in STATIC.iterdir() if path.name.endswith(".js") and path.name != "preact-htm.js"]
    found = {path.name: FORBIDDEN.findall(path.read_text(encoding="utf-8")) for path in ours}
    assert {name: faults for name, faults in found.items() if faults} == {}
    assert not [path.name for path in ours if "dangerouslySetInnerHTML" in path.read_text(encoding="utf-8")]
