"""Rows with labels as the samples of classifiers: a class of a text, of a pair of texts, or of each word of a text."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchwright.schemas.dataset.data_spec import RecordsData
from batchwright.training.data.base import class_numbers, data_problem, import_optional
from batchwright.training.data.sources.rows import (
    Prepared,
    Read,
    TextRows,
    holds_lists,
    rows_with_all,
)
from batchwright.training.data.sources.tokens import TextTokenizer
from batchwright.workloads.base import IGNORED_LABEL

_TEXT, _LABEL = "data.text_field", "data.label_field"


@dataclass(frozen=True)
class ClassEncoder:
    """Encoder of rows with the class of a text, or of a pair of texts."""

    data: RecordsData
    """Names the fields."""
    tokenizer: TextTokenizer
    """Cuts the texts."""
    classes: dict[Any, int]
    """Numbers of the classes by their labels."""
    takes_types: bool = False
    """True if the model tells the texts of a pair apart by types of tokens (segments)."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the classes in the order of their numbers; empty where labels are numbers."""
        return tuple(name for name in self.classes if isinstance(name, str))

    def __call__(self, _: int, row: dict[str, Any]) -> dict[str, Tensor]:
        """Encode a row."""
        pair = None if self.data.text_pair_field is None else row[self.data.text_pair_field]
        encoded = self.tokenizer.encode(row[self.data.text_field], pair)
        types = {"token_type_ids": torch.tensor(encoded.types)} if self.takes_types else {}
        ids = torch.tensor(encoded.ids, dtype=torch.int64)
        return {"input_ids": ids, **types, "labels": torch.tensor(self.classes[row[self.data.label_field]])}


@dataclass(frozen=True)
class WordEncoder(ClassEncoder):
    """Encoder of rows with a class of each word, which its first token has."""

    def __call__(self, _: int, row: dict[str, Any]) -> dict[str, Tensor]:
        """Encode a row. Labels below 0 are ignored, as are added tokens and further tokens of a word."""
        ids, words = self.tokenizer.encode_words(row[self.data.text_field])
        numbers = [self.classes.get(label, IGNORED_LABEL) for label in row[self.data.label_field]]
        labels = [
            IGNORED_LABEL if word is None or (place and words[place - 1] == word) else numbers[word]
            for place, word in enumerate(words)
        ]
        return {"input_ids": torch.tensor(ids, dtype=torch.int64), "labels": torch.tensor(labels, dtype=torch.int64)}


def classification(read: Read, data: RecordsData, tokenizer: TextTokenizer, config: Any) -> Prepared:  # noqa: ANN401 - a transformers configuration
    """Prepare rows with the class of a text, or of a pair of texts.

    Raises:
        SpecError: when a field or its labels do not fit the model.
    """
    pair = data.text_pair_field
    texts = {_TEXT: data.text_field} | ({} if pair is None else {"data.text_pair_field": pair})
    rows = rows_with_all(read(), data, texts, label=data.label_field)
    classes = _classes(rows, data.label_field, config, of_words=False)
    takes_types = pair is not None and getattr(config, "type_vocab_size", 0) > 1
    return rows, ClassEncoder(data, tokenizer, classes, takes_types)


def token_classification(read: Read, data: RecordsData, tokenizer: TextTokenizer, config: Any) -> Prepared:  # noqa: ANN401 - as above
    """Prepare rows with a list of words, and a list of their classes.

    Raises:
        SpecError: when a field or its labels do not fit the model, or a row has not a label for each word.
    """
    found = read()
    for field, name in {_TEXT: data.text_field, _LABEL: data.label_field}.items():
        if name in found.rows.column_names and not holds_lists(found.rows, name):
            message = "must hold lists for token-classification: the words, and their labels"
            raise data_problem(field, message, f"{name}, {found.files.place(0)}")
    rows = rows_with_all(found, data, {_TEXT: data.text_field, _LABEL: data.label_field}, are_lists=True)
    compute = import_optional("pyarrow.compute", "data.kind", "records")
    columns = [rows.rows.with_format("arrow")[:].column(name) for name in (data.text_field, data.label_field)]
    texts = compute.list_flatten(columns[0])
    if "string" not in str(texts.type) or texts.null_count:
        raise data_problem(_TEXT, "must hold lists of words, each a text", f"{data.text_field}, {rows.place(0)}")
    words, labels = (compute.list_value_length(column).to_numpy() for column in columns)
    if wrong := np.flatnonzero(words != labels).tolist():
        message = f"a row has {labels[wrong[0]]} labels for {words[wrong[0]]} words"
        raise data_problem(_LABEL, message, rows.place(wrong[0]))
    classes = _classes(rows, data.label_field, config, of_words=True)
    return rows, WordEncoder(data, tokenizer, classes)


def _classes(found: TextRows, field: str, config: Any, *, of_words: bool) -> dict[Any, int]:  # noqa: ANN401 - as above
    """Map labels to classes: numbers are classes, and names have numbers. Negative ones of words are none."""
    compute = import_optional("pyarrow.compute", "data.kind", "records")
    column = found.rows.select_columns([field]).with_format("arrow")[:].column(field)
    parents = np.arange(len(column))
    if of_words:
        parents = compute.list_parent_indices(column).to_numpy()
        column = compute.list_flatten(column)
    kind = str(column.type)
    if kind not in {"string", "large_string"} and not kind.startswith(("int", "uint")):
        raise data_problem(_LABEL, f"holds {kind}: must be whole numbers or names", f"{field}, {found.place(0)}")
    if column.null_count:
        place = found.place(int(parents[np.flatnonzero(column.is_null().to_numpy())[0]]))
        raise data_problem(_LABEL, f"{field} is missing in a row with text", place)
    labels = column.unique().to_pylist()
    if "string" in kind:
        numbers: dict[Any, int] = dict(class_numbers(labels, config))
    else:
        numbers = {number: number for number in labels if number >= 0 or not of_words}
    classes = config.num_labels
    wrong = [number for number in numbers.values() if not 0 <= number < classes]
    if wrong:
        described = f"{len(numbers)} names" if "string" in kind else f"the label {wrong[0]}"
        message = (
            f"holds {described}, and the model has {classes} classes (0 to {classes - 1}): set model.config.num_labels"
        )
        at_fault = (place for place, label in enumerate(column.to_pylist()) if numbers.get(label) == wrong[0])
        raise data_problem(_LABEL, message, f"{field}, {found.place(int(parents[next(at_fault)]))}")
    return numbers
