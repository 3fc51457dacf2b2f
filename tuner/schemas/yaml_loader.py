"""YAML as people write it. No torch."""

from __future__ import annotations

import re

import yaml


class Loader(yaml.SafeLoader):
    """Plain values only, as PyYAML reads them, but for numbers: ``1e-5`` is one, as in YAML 1.2 and in JSON.

    YAML 1.1 wants a point and a sign (``1.0e-5``), and takes anything less for text: a learning rate that a model's
    configuration would be given as a word.
    """


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+\Z"),
    list("-+.0123456789"),
)


def describe_yaml_error(error: yaml.YAMLError) -> str:
    """Where a text breaks YAML's rules, and how: ``line 3, column 5: mapping values are not allowed here``."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    words = [getattr(error, name, None) for name in ("context", "problem")]
    message = ", ".join(word for word in words if word) or str(error).partition("\n")[0]
    return message if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: {message}"
