"""Suggestions for misspelt names. Pure, no torch."""

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches

_CUTOFF = 0.6
"""Smallest similarity of a suggestion (the default of ``difflib``)."""
_MOST_LETTERS = 2
"""Letters of two spellings of one name that the other lacks, added up: a wrong letter counts as two."""
_SYNONYMS = {
    "jobs:write": "jobs:run",
    "tunings:run": "tunings:write",
    "search": "q",
    "query": "q",
    "page_size": "limit",
    "order_by": "sort",
}
"""Names that others give to ours, by what is typed. They are asked for before similar ones."""
_LONGEST = 200
"""Characters compared: a longer text is not a misspelt name, and its comparison is slow."""


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The most similar of ``names``, ignoring case and hyphens versus underscores; none when all differ too much."""
    by_key = {_key(known): known for known in names}
    key = _key(name[:_LONGEST])
    if (synonym := _SYNONYMS.get(key)) in by_key:
        return by_key[synonym]
    found = get_close_matches(key, by_key, n=1, cutoff=_CUTOFF)
    return by_key[found[0]] if found else None


def suggestion(name: str, names: Iterable[str], quote: str = "`") -> str:
    """The text ``; did you mean `name`?``, or an empty text where no name is similar."""
    found = nearest(name, names)
    return f"; did you mean {quote}{found}{quote}?" if found else ""


def misspelt(name: str, names: Iterable[str]) -> str | None:
    """The one of ``names`` that ``name`` evidently means: one letter is wrong, or up to two are missing or too many.

    Stricter than ``nearest``: `classif_dropout` and `classifier_dropout` are two fields of transformers.
    """
    found = nearest(name, names)
    if found is None:
        return None
    matches = SequenceMatcher(None, _key(name), _key(found)).get_matching_blocks()
    different = len(name) + len(found) - 2 * sum(match.size for match in matches)
    return found if different <= _MOST_LETTERS else None


def _key(name: str) -> str:
    return name.casefold().replace("-", "_")
