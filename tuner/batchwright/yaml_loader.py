"""YAML loader that also reads ``1e-5`` as a number. No torch."""

import re

import yaml


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which also reads ``1e-5`` as a number, as YAML 1.2 and JSON do.

    YAML 1.1 requires a point and a sign (``1.0e-5``) and reads anything less as text, so a model's configuration would
    get a learning rate of type string.
    """


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+\Z"),
    list("-+.0123456789"),
)


def describe_yaml_error(error: yaml.YAMLError) -> str:
    """Format an error of the YAML parser: ``line 3, column 5: mapping values are not allowed here``."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    parts = [getattr(error, name, None) for name in ("context", "problem")]
    message = ", ".join(part for part in parts if part) or str(error).partition("\n")[0]
    return message if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: {message}"
