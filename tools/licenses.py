"""List the licences of what is installed: ``python tools/licenses.py`` writes docs/licenses.md from the metadata."""

import re
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LISTED = ROOT / "docs" / "licenses.md"
_NAME = re.compile(r"^([A-Za-z0-9][\w.-]*)==", re.MULTILINE)
_HEADER = """# Licences of what is installed

Made by `make licenses` from the packages' own metadata. Batchwright itself is under Apache-2.0. Packages that are only
installed on other platforms than the one where this was made are not listed. The pages carry
`preact/standalone.module.js` of the npm package [htm](https://www.npmjs.com/package/htm) 3.1.1 (Apache-2.0), which
contains [Preact](https://www.npmjs.com/package/preact) (MIT), as
`service/batchwright_service/dashboard/static/preact-htm.js`; the Latin subset of the font Geist from
[@fontsource-variable/geist](https://www.npmjs.com/package/@fontsource-variable/geist) 5.3.0 (OFL-1.1); and shapes of
[lucide-static](https://www.npmjs.com/package/lucide-static) 1.62.0 (ISC) as icons. Their licences are beside them.
"""
_LONGEST = 80
"""Characters of a licence's name; longer ones are its whole text, of which the first line is taken."""


def canonical(name: str) -> str:
    """A project's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def license_of(package: metadata.Distribution) -> str:
    """The licence that a package states: its SPDX expression, its classifiers, or its field."""
    fields = package.metadata
    if "License-Expression" in fields:
        return str(fields["License-Expression"])
    classifiers = [it.rpartition(" :: ")[2] for it in fields.get_all("Classifier") or [] if it.startswith("License ::")]
    text = str(fields["License"]) if "License" in fields else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = lines[0] if lines and len(lines[0]) <= _LONGEST else ""
    return ", ".join(it for it in classifiers if it != "OSI Approved") or named or "see its files"


def names_in(path: Path) -> set[str]:
    """The projects that a file of requirements pins."""
    return {canonical(name) for name in _NAME.findall(path.read_text())}


def row(name: str) -> str | None:
    """A line of the table; None for what is not installed here."""
    try:
        package = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    version = package.version.partition("+")[0]
    return f"| [{name}](https://pypi.org/project/{name}/) | {version} | {license_of(package).replace('|', '/')} |"


def table(title: str, names: set[str]) -> str:
    """A section of the document."""
    rows = [line for name in sorted(names) if (line := row(name)) is not None]
    return "\n".join([f"\n## {title}\n", "| package | version | licence |", "|---|---|---|", *rows, ""])


def document() -> str:
    """The whole document."""
    requirements = ROOT / "requirements"
    run = names_in(requirements / "runtime.txt") | names_in(requirements / "image.txt") | {"torch"}
    develop = (names_in(requirements / "dev.txt") | names_in(requirements / "docs.txt")) - run
    return _HEADER + table("To run it", run) + table("To develop and test it", develop)


if __name__ == "__main__":
    LISTED.write_text(document())
