"""Names of algorithms, such as winograd4_rows8_mt2: a family, and numbers of a form, each behind a word."""

import dataclasses
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class Names:
    """How the forms of a family are named, and what their names say.

    Args:
        family: pattern of what a name begins with. Its groups are named after the fields that they tell:
            numbers, or flags if they are words.
        words: by field, in the order of a name, the word before its number.
    """

    def __init__(self, family: str, **words: str) -> None:
        numbers = (rf"(?:_{word}(?P<{field}>[1-9][0-9]*))?" for field, word in words.items())
        self._pattern = re.compile(f"(?:{family}){''.join(numbers)}")
        self._words = words

    def name(self, family: str, form: "DataclassInstance") -> str:
        """Return the name of a form: the family, and what numbers are not as by default.

        Args:
            family: which of the families that the pattern describes.
            form: its fields are those that the words were given for.
        """
        usual = {field.name: field.default for field in dataclasses.fields(form)}
        numbers = {field: getattr(form, field) for field in self._words}
        parts = (
            f"{word}{numbers[field]}" for field, word in self._words.items() if numbers[field] != usual[field]
        )
        return "_".join([family, *parts])

    def fields(self, name: str) -> dict[str, Any] | None:
        """Return what a name tells of a form, numbers and flags by field; None if it is of another family."""
        found = self._pattern.fullmatch(name)
        if found is None:
            return None
        told = {field: text for field, text in found.groupdict().items() if text}
        return {field: int(text) if text.isdigit() else True for field, text in told.items()}
