"""The static files of the pages: ours, and plotly.js, which comes in a package. All held in memory once asked for."""

from __future__ import annotations

import hashlib
import mimetypes
import re
from functools import cached_property
from importlib import metadata, util
from pathlib import Path

from fastapi import Response
from starlette.datastructures import Headers

from service.api.etags import conditional, tagged
from service.api.middleware.compression import accepts_gzip, compressed
from service.dashboard.responses import PROTECTING
from service.errors import ConfigurationError

PLOTLY = "plotly.min.js"
_STATIC = Path(__file__).parent / "static"
_TEXT = ("text/", "application/json", "image/svg+xml")
_MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".png": "image/png"}
_FOR_GOOD = "public, max-age=31536000, immutable"
_ASK_AGAIN = "no-cache"
_ADDED_STYLE = re.compile(rb'getElementById\("([0-9a-f]{64})"\)')


class Asset:
    """One file: its media type, and what it holds, read when it is first asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        guessed = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        self.media_type = _MEDIA_TYPES.get(path.suffix, guessed)

    @cached_property
    def plain(self) -> bytes:
        """What it holds."""
        return self._path.read_bytes()

    @cached_property
    def gzipped(self) -> bytes:
        """The same, compressed once."""
        return compressed(self.plain)

    def response(self, asked: Headers, *, for_good: bool) -> Response:
        """The file, or that it is still the one the browser has. Reads and compresses the first time.

        Args:
            asked: the headers of the request.
            for_good: whether the address names this very content.
        """
        told = {**PROTECTING, "Cache-Control": _FOR_GOOD if for_good else _ASK_AGAIN}
        zipped = accepts_gzip(asked) and self.media_type.startswith(_TEXT)
        if zipped:
            told["Content-Encoding"] = "gzip"
        body = self.gzipped if zipped else self.plain
        return conditional(tagged(body, self.media_type), asked.get("if-none-match"), told)


class Assets:
    """The files by their names, and their addresses.

    All of our files are at one address that has a hash of all of them in it, so that modules can import one another by
    relative names and each may be kept for good; plotly.js has its version instead.
    """

    def __init__(self, folder: Path = _STATIC) -> None:
        paths = sorted(path for path in folder.glob("[!.]*") if path.is_file())
        self._ours = {path.name: Asset(path) for path in paths}
        digest = hashlib.blake2b(digest_size=8)
        for name, asset in self._ours.items():
            digest.update(f"{name}\0{len(asset.plain)}\0".encode() + asset.plain)
        self._version = digest.hexdigest()
        self._plotly = Asset(_plotly_file())
        self._plotly_version = "plotly-" + metadata.version("plotly")

    def url(self, name: str) -> str:
        """The address of a file, for templates.

        Raises:
            KeyError: when there is none of that name.
        """
        if name == PLOTLY:
            return f"/static/{self._plotly_version}/{PLOTLY}"
        if name not in self._ours:
            raise KeyError(f"there is no static file {name!r}")
        return f"/static/{self._version}/{name}"

    @cached_property
    def chart_styles(self) -> tuple[str, ...]:
        """Ids by which plotly.js knows styles that it would add to a page: where an element has one, it adds none.

        The pages' policy forbids what it would add, which is for maps.
        """
        return tuple(sorted({match.decode() for match in _ADDED_STYLE.findall(self._plotly.plain)}))

    def find(self, version: str, name: str) -> tuple[Asset, bool] | None:
        """A file, and whether that version of it is the one there is: a page from before an upgrade has another."""
        if name == PLOTLY:
            return self._plotly, version == self._plotly_version
        asset = self._ours.get(name)
        return None if asset is None else (asset, version == self._version)


def _plotly_file() -> Path:
    """Where the package keeps the file, found without importing the package.

    Raises:
        ConfigurationError: when it is not installed.
    """
    found = util.find_spec("plotly")
    for place in (found.submodule_search_locations or ()) if found else ():
        path = Path(place) / "package_data" / PLOTLY
        if path.is_file():
            return path
    raise ConfigurationError("the pages' charts need plotly.js: install the package `plotly`, or batchwright[service]")
