"""Static files of the pages: those in `static/`, and plotly.js from its package. Cached on the first request."""

from __future__ import annotations

import hashlib
import mimetypes
import re
from functools import cached_property
from importlib import metadata, util
from pathlib import Path

from fastapi import Response
from starlette.datastructures import Headers

from batchwright_service.api.etags import conditional, tagged
from batchwright_service.api.middleware.compression import accepts_gzip, compressed
from batchwright_service.dashboard.responses import SECURITY_HEADERS
from batchwright_service.errors import ConfigurationError

PLOTLY = "plotly.min.js"
_STATIC = Path(__file__).parent / "static"
_TEXT = ("text/", "application/json", "image/svg+xml")
_MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".woff2": "font/woff2"}
_IMMUTABLE = "public, max-age=31536000, immutable"
_REVALIDATE = "no-cache"
_ADDED_STYLE = re.compile(rb'getElementById\("([0-9a-f]{64})"\)')


class Asset:
    """One file: its media type, and its content, read on the first request."""

    def __init__(self, path: Path) -> None:
        self._path = path
        guessed = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        self.media_type = _MEDIA_TYPES.get(path.suffix, guessed)

    @cached_property
    def plain(self) -> bytes:
        """The content of the file."""
        return self._path.read_bytes()

    @cached_property
    def gzipped(self) -> bytes:
        """The content, compressed once."""
        return compressed(self.plain)

    def response(self, headers: Headers, *, immutable: bool) -> Response:
        """Return the file, or 304 if the browser has it. Reads and compresses the file the first time.

        Args:
            headers: the headers of the request.
            immutable: whether the address identifies this content.
        """
        sent = {**SECURITY_HEADERS, "Cache-Control": _IMMUTABLE if immutable else _REVALIDATE}
        zipped = accepts_gzip(headers) and self.media_type.startswith(_TEXT)
        if zipped:
            sent["Content-Encoding"] = "gzip"
        body = self.gzipped if zipped else self.plain
        return conditional(tagged(body, self.media_type), headers.get("if-none-match"), sent)


class Assets:
    """The static files by name, and their addresses.

    The files of `static/` share an address with a hash over all of them, so that modules can import one another by
    relative names and browsers can cache each file for ever. The address of plotly.js has its version instead.
    """

    def __init__(self, folder: Path = _STATIC) -> None:
        paths = sorted(path for path in folder.glob("[!.]*") if path.is_file())
        self._files = {path.name: Asset(path) for path in paths}
        digest = hashlib.blake2b(digest_size=8)
        for name, asset in self._files.items():
            digest.update(f"{name}\0{len(asset.plain)}\0".encode() + asset.plain)
        self._version = digest.hexdigest()
        self._plotly = Asset(_plotly_file())
        self._plotly_version = "plotly-" + metadata.version("plotly")

    def url(self, name: str) -> str:
        """Return the address of a file, for templates.

        Raises:
            KeyError: when there is no file of that name.
        """
        if name == PLOTLY:
            return f"/static/{self._plotly_version}/{PLOTLY}"
        if name not in self._files:
            raise KeyError(f"there is no static file {name!r}")
        return f"/static/{self._version}/{name}"

    @cached_property
    def chart_styles(self) -> tuple[str, ...]:
        """Ids of styles that plotly.js would add to a page, unless an element has the id.

        The styles are for maps, and the content security policy of the pages forbids them.
        """
        return tuple(sorted({match.decode() for match in _ADDED_STYLE.findall(self._plotly.plain)}))

    def find(self, version: str, name: str) -> tuple[Asset, bool] | None:
        """Return a file, and whether the version is the current one: a page from before an upgrade has another."""
        if name == PLOTLY:
            return self._plotly, version == self._plotly_version
        asset = self._files.get(name)
        return None if asset is None else (asset, version == self._version)


def _plotly_file() -> Path:
    """Find the file in its package, without importing the package.

    Raises:
        ConfigurationError: when the package is not installed.
    """
    found = util.find_spec("plotly")
    for folder in (found.submodule_search_locations or ()) if found else ():
        path = Path(folder) / "package_data" / PLOTLY
        if path.is_file():
            return path
    raise ConfigurationError("the pages' charts need plotly.js: install the package `plotly`, or batchwright[service]")
