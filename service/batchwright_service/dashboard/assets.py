"""Static files of the pages: those in `static/`, and plotly.js from its package. Cached on the first request."""

import hashlib
import mimetypes
import re
from functools import cached_property
from importlib import metadata, util
from pathlib import Path

from batchwright_service.api.etags import StaticContent
from batchwright_service.errors import ConfigurationError

PLOTLY = "plotly.min.js"
_STATIC = Path(__file__).parent / "static"
_MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".woff2": "font/woff2"}
_ADDED_STYLE = re.compile(rb'getElementById\("([0-9a-f]{64})"\)')


def _content(path: Path) -> StaticContent:
    guessed = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return StaticContent(path.read_bytes, _MEDIA_TYPES.get(path.suffix, guessed))


class Assets:
    """The static files by name, and their addresses.

    The files of `static/` share an address with a hash over all of them, so that modules can import one another by
    relative names and browsers can cache each file for ever. The address of plotly.js has its version instead.
    """

    def __init__(self, folder: Path = _STATIC) -> None:
        paths = sorted(path for path in folder.glob("[!.]*") if path.is_file())
        self._files = {path.name: _content(path) for path in paths}
        digest = hashlib.blake2b(digest_size=8)
        for name, asset in self._files.items():
            content = asset.plain.body
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        self._version = digest.hexdigest()
        self._plotly = _content(_plotly_file())
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
        return tuple(sorted({match.decode() for match in _ADDED_STYLE.findall(self._plotly.plain.body)}))

    def find(self, version: str, name: str) -> tuple[StaticContent, bool] | None:
        """Return a file, and whether the version is the current one: a page from before an upgrade has another."""
        if name == PLOTLY:
            return self._plotly, version == self._plotly_version
        asset = self._files.get(name)
        return None if asset is None else (asset, version == self._version)


def _plotly_file() -> Path:
    """Find the file in its package, without importing the package."""
    found = util.find_spec("plotly")
    for folder in (found.submodule_search_locations or ()) if found else ():
        path = Path(folder) / "package_data" / PLOTLY
        if path.is_file():
            return path
    raise ConfigurationError("the pages' charts need plotly.js: install the package `plotly`, or batchwright[service]")
