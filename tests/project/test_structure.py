"""Structure of the house: small packages that describe themselves, one name per module, tests that mirror packages."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.paths import ROOT

LIBRARY = "tuner/batchwright"
SERVICE = "service/batchwright_service"
MOST_MODULES = 14
"""Modules of a package, its ``__init__`` and subpackages aside: as many as a reader takes in at a glance."""
MODULES_ALLOWED = {
    "tests/support": 27,
    "tests/support/service": 21,
    "service/batchwright_service/store/database/migrations/versions": 99,
}
"""Folders of helpers, each of which has its line in ``tests/support/README.md``, and a history that only grows."""
FEWEST_LINES = 3
"""Lines of a package's docstring, by which it can hold more than a title."""
HOMONYMS = {
    "__main__": "what `python -m` runs: the command line, a command on virtual GPUs",
    "api_keys": "one concept through the layers: document, store, authentication, use case, route",
    "audit": "one concept through the layers: document, route",
    "base": "the interface that the other modules of its package implement",
    "build": "the module of a package that chooses by the spec (a workload, a data set), or that compiles",
    "client": "of a fork server, of the tracing process, of the HTTP API",
    "commands": "one concept through the layers: document, route",
    "devices": "the command that lists those of a host, and the store of those that are served",
    "errors": "the tree of errors of a distribution, of the command line, of the SDK",
    "estimates": "one concept through the layers: document, use case, route",
    "exports": "one concept through the layers: document, use case, route",
    "files": "of any kind (system), of training data",
    "hugging_face": "a workload built with transformers, an export to its trainer, a callback of the trainer",
    "jobs": "one concept through the layers: use case, route, call of the SDK",
    "lightning": "an export to its trainer, callbacks of the trainer",
    "problems": "problem documents, and their HTTP responses",
    "protocol": "messages between two processes of one package",
    "recommendation": "the document, the function that makes it, and the document with methods",
    "retention": "one concept through the layers: use case, store",
    "serve": "the command, and the process that it starts",
    "session": "of a tuning, of a trace, of virtual GPUs",
    "sessions": "one concept through the layers: store, authentication",
    "statistics": "one concept through the layers: use case, store",
    "torch_internals": "the private names of torch: those of training, and those that only traces of fake tensors use",
    "tunings": "one concept through the layers: use case, route, call of the SDK",
    "webhooks": "one concept through the layers: document, route, call of the SDK, command",
    "work": "one concept through the layers (document, use case, route, call of the SDK), and the process that does it",
    "worker": "the main module of a child process: of a probe, a trace, a run",
}
"""Names that modules of several packages share, with the reason. Any other name is that of one module."""
CLASS_HOMONYMS = {
    "BatchPlanCallback": "a callback of the same purpose for two trainers, each imported from its own module",
    "ConflictError": "one concept on both sides of HTTP",
    "Job": "the document, and the document with methods",
    "NotAuthenticatedError": "one concept on both sides of HTTP",
    "NotFoundError": "one concept on both sides of HTTP",
    "QuotaExceededError": "one concept on both sides of HTTP",
    "Recommendation": "the document, and the document with methods",
    "Tuning": "the document, and the document with methods",
    "TuningFailedError": "one concept on both sides of HTTP",
}
"""Names that two classes share, with the reason. Any other name is that of one class."""
WITHOUT_COUNTERPART = {
    "tests/project",
    "tests/gpu",
    "tests/fleet",
    "tests/image",
    "tests/support",
    "tests/support/exports",
    "tests/support/service",
}
"""Folders of tests that are of no single package."""
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/glossary.md", "tests/support/README.md")
_TOP = (
    "benchmarks",
    "docker",
    "docs",
    "examples",
    "openapi",
    "requirements",
    "service",
    "tests",
    "tools",
    "tuner",
)


def packages(root: Path, *tops: str) -> list[Path]:
    """Every package below the top-level folders, themselves included."""
    return sorted(init.parent for top in tops for init in (root / top).rglob("__init__.py"))


def modules(package: Path) -> list[Path]:
    """The modules directly in a package."""
    return sorted(path for path in package.glob("*.py") if path.name != "__init__.py")


def too_large(root: Path, found: Iterable[Path], allowed: Mapping[str, int]) -> dict[str, int]:
    """Packages with more modules than they may have, and how many."""
    counts = {package.relative_to(root).as_posix(): len(modules(package)) for package in found}
    return {name: count for name, count in counts.items() if count > allowed.get(name, MOST_MODULES)}


def docstring(path: Path) -> str:
    """The docstring of a module; empty without one."""
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def too_terse(found: Iterable[Path]) -> list[str]:
    """Packages whose docstring is shorter than ``FEWEST_LINES``."""
    lines = {package: docstring(package / "__init__.py").splitlines() for package in found}
    return [str(package) for package, text in lines.items() if len(text) < FEWEST_LINES]


def homonyms(found: Iterable[Path]) -> dict[str, set[str]]:
    """The names that modules of several packages share, with those packages."""
    places = defaultdict(list)
    for package in found:
        for module in modules(package):
            places[module.stem].append(package.name)
    return {name: set(where) for name, where in places.items() if len(where) > 1}


def class_homonyms(found: Iterable[Path]) -> dict[str, set[str]]:
    """The names that classes of several modules share, with the modules, by their paths in the package's folder."""
    places = defaultdict(set)
    for module in (module for package in found for module in modules(package)):
        for name in re.findall(r"^ *class (\w+)[(:]", module.read_text(), re.MULTILINE):
            places[name].add(f"{module.parent.name}.{module.stem}")
    return {name: where for name, where in places.items() if len(where) > 1}


def without_counterpart(root: Path) -> set[str]:
    """Folders of tests that no package of ``batchwright`` or ``batchwright_service`` stands behind."""
    folders = {path.parent for path in (root / "tests").rglob("*.py") if path.name.startswith(("test_", "__init__"))}
    strays = set()
    for folder in folders - {root / "tests"}:
        inside = folder.relative_to(root / "tests")
        of_service = inside.parts[0] == "service"
        if not (root / SERVICE / inside.relative_to("service") if of_service else root / LIBRARY / inside).is_dir():
            strays.add(folder.relative_to(root).as_posix())
    return strays


def named_paths(text: str) -> Iterator[str]:
    """The paths that a Markdown document names: between backticks, in links, and in its annotated tree."""
    tops = "|".join(_TOP)
    yield from re.findall(rf"`((?:{tops})/[\w./-]*)`", text)
    yield from re.findall(r"\]\((?!https?:|#)([\w./-]+)", text)
    for tree in re.findall(rf"^```\n((?:{tops})/.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        yield from _tree_paths(tree)


def _tree_paths(tree: str) -> Iterator[str]:
    """The paths of a tree of which each level is indented by two spaces."""
    above: list[str] = []
    for indent, name in re.findall(r"^( *)([\w./-]+)(?:\s|$)", tree, flags=re.MULTILINE):
        depth = len(indent) // 2
        if len(indent) % 2 or depth > len(above):
            continue  # the rest of a note
        above[depth:] = [name.rstrip("/")]
        yield "/".join(above)


def missing_paths(root: Path, document: Path) -> list[str]:
    """Paths that a document names and that are not there, from the root or from the document's own folder."""
    named = dict.fromkeys(named_paths(document.read_text()))
    return [name for name in named if not (root / name).exists() and not (document.parent / name).exists()]


def missing_modules(root: Path, package: Path) -> list[str]:
    """Modules between double backticks in a package's docstring that are not there.

    A name is looked for in the package, in its distribution, and by its full name; its last part may be a class.
    """
    named = re.findall(r"``([a-z_]+(?:\.\w+)*)``", docstring(package / "__init__.py"))
    tops = (root / LIBRARY, root / SERVICE)
    places = (package, *(top for top in tops if package.is_relative_to(top)), *(top.parent for top in tops))
    return [name for name in named if not any(_is_module(place, name) for place in places)]


def _is_module(place: Path, name: str) -> bool:
    path = place.joinpath(*name.split("."))
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    module = path.parent.with_suffix(".py")
    return (
        module.is_file() and re.search(rf"^(?:class|def) {path.name}\b", module.read_text(), re.MULTILINE) is not None
    )


# --- the house ---

OURS = packages(ROOT, LIBRARY, SERVICE)


def test_no_package_outgrows_a_glance() -> None:
    """Split the package by concept, or find the module that belongs elsewhere."""
    assert too_large(ROOT, [*OURS, *packages(ROOT, "tests")], MODULES_ALLOWED) == {}


def test_every_package_says_what_it_is_for() -> None:
    """In its docstring: what it is for, which module calls which, where a new thing goes, what it may import."""
    assert too_terse(OURS) == []


@pytest.mark.parametrize("package", OURS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_packages_name_modules_that_exist(package: Path) -> None:
    """After a move the docstrings of the packages around it follow."""
    assert missing_modules(ROOT, package) == []


def test_modules_that_share_a_name_have_a_reason() -> None:
    """Give a new module a name of its own, or list the name with its reason; unlist a name that is shared no more."""
    assert set(homonyms(OURS)) ^ set(HOMONYMS) == set()
    assert all(HOMONYMS.values())


def test_classes_that_share_a_name_have_a_reason() -> None:
    """Give a new class a name of its own, or list the name with its reason; unlist a name that is shared no more."""
    assert class_homonyms(OURS).keys() ^ CLASS_HOMONYMS.keys() == set()
    assert all(CLASS_HOMONYMS.values())


def test_tests_mirror_the_packages() -> None:
    """The tests of ``batchwright.x`` are in ``tests/x``, those of ``y`` in the service in ``tests/service/y``."""
    assert without_counterpart(ROOT) == WITHOUT_COUNTERPART


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_named_exists(document: str) -> None:
    """No document sends a reader to a file that is not there."""
    assert missing_paths(ROOT, ROOT / document) == []
    assert len(list(named_paths((ROOT / document).read_text()))) > 5


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: path.stem)
def test_every_path_of_a_page_exists(page: Path) -> None:
    """Files of the repository and other pages."""
    assert missing_paths(ROOT, page) == []


def test_the_glossary_is_in_order() -> None:
    """Each term has its definition, its module, and its place in the alphabet."""
    entries = re.split(r"^- ", (ROOT / "docs" / "glossary.md").read_text(), flags=re.MULTILINE)[1:]
    terms = [entry.partition("**: ")[0].removeprefix("**") for entry in entries]
    assert terms == sorted(terms)
    assert [entry for entry in entries if not re.search(r"\.\s+`[\w/]+\.py`\s*$", entry)] == []


def test_every_helper_has_its_line() -> None:
    """The README of the helpers lists each module of ``tests/support``, once."""
    support = ROOT / "tests" / "support"
    there = [path.relative_to(support).as_posix() for found in packages(support, ".") for path in modules(found)]
    listed = re.findall(r"^\| `([\w/]+\.py)` \|", (support / "README.md").read_text(), flags=re.MULTILINE)
    assert sorted(listed) == sorted(there)


# --- the checks themselves, on a made-up house ---


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A distribution with a package, a subpackage and their tests, in good order."""
    ours = (LIBRARY, f"{LIBRARY}/rooms", f"{LIBRARY}/rooms/attic", SERVICE)
    for folder in (*ours, "tests/rooms", "tests/rooms/attic"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "__init__.py").write_text('"""Keep rooms.\n\n``door`` opens ``attic.roof``.\n"""\n')
    (tmp_path / f"{LIBRARY}/rooms/door.py").write_text("class Hinge:\n    pass\n")
    (tmp_path / f"{LIBRARY}/rooms/attic/roof.py").touch()
    return tmp_path


def test_a_package_that_outgrows_its_limit_is_found(house: Path) -> None:
    """Its ``__init__`` and the modules of subpackages do not count; a limit of its own does."""
    for number in range(MOST_MODULES):
        (house / f"{LIBRARY}/rooms/more_{number}.py").touch()
    found = packages(house, LIBRARY)
    assert too_large(house, found, {}) == {f"{LIBRARY}/rooms": MOST_MODULES + 1}
    assert too_large(house, found, {f"{LIBRARY}/rooms": MOST_MODULES + 1}) == {}


def test_a_package_without_a_docstring_is_found(house: Path) -> None:
    """So is one with a single line."""
    (house / f"{LIBRARY}/rooms/__init__.py").write_text("")
    (house / f"{LIBRARY}/__init__.py").write_text('"""Keep rooms."""\n')
    assert too_terse(packages(house, LIBRARY)) == [str(house / LIBRARY), str(house / f"{LIBRARY}/rooms")]


def test_a_docstring_that_names_a_module_that_left_is_found(house: Path) -> None:
    """Modules are found in the package, in its distribution and by their full names; a class in its module."""
    package = house / f"{LIBRARY}/rooms"
    assert missing_modules(house, package) == []
    names = (
        "rooms.door",
        "batchwright.rooms.door",
        "door.Hinge",
        "attic",
        "cellar",
        "attic.door",
        "door.Knob",
        "batchwright.roof",
    )
    (package / "__init__.py").write_text(f'"""Keep rooms: {", ".join(f"``{name}``" for name in names)}."""\n')
    assert missing_modules(house, package) == ["cellar", "attic.door", "door.Knob", "batchwright.roof"]


def test_a_shared_name_is_found(house: Path) -> None:
    """Wherever the two packages stand."""
    assert homonyms(packages(house, LIBRARY, SERVICE)) == {}
    (house / f"{SERVICE}/door.py").touch()
    assert homonyms(packages(house, LIBRARY, SERVICE)) == {"door": {"rooms", Path(SERVICE).name}}


def test_a_class_with_the_name_of_another_is_found(house: Path) -> None:
    """Wherever the two modules stand, with a base class or without one."""
    (house / f"{LIBRARY}/rooms/attic/roof.py").write_text("class Gable:\n    class Hinge(Exception):\n        pass\n")
    assert class_homonyms(packages(house, LIBRARY, SERVICE)) == {"Hinge": {"rooms.door", "attic.roof"}}


def test_a_folder_of_tests_without_a_package_is_found(house: Path) -> None:
    """Folders of data files are none."""
    for name in ("rooms/cellar", "service/cellar", "rooms/golden"):
        (house / "tests" / name).mkdir(parents=True)
    (house / "tests/rooms/cellar/test_wine.py").touch()
    (house / "tests/service/cellar/__init__.py").touch()
    (house / "tests/rooms/golden/written.txt").touch()
    assert without_counterpart(house) == {"tests/rooms/cellar", "tests/service/cellar"}


def test_a_path_that_is_not_there_is_found(house: Path) -> None:
    """Between backticks, in a link, and in the tree, where notes and their second lines are no paths."""
    document = house / "GUIDE.md"
    document.write_text(
        f"See `{LIBRARY}/rooms/door.py`, `{LIBRARY}/rooms/window.py`, [the guide](GUIDE.md), not [a plan](PLAN.md#a)\n"
        f"or [the street](https://example.org).\n\n```\n{LIBRARY}/  rooms\n  rooms/        doors and\n"
        "                more\n    door.py     opens\n    lock.py     closes\ntests/\n```\n"
    )
    assert missing_paths(house, document) == [f"{LIBRARY}/rooms/window.py", "PLAN.md", f"{LIBRARY}/rooms/lock.py"]
