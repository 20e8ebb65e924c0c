"""Docstrings as the site shows them: the heading of examples, and inner products that are no HTML tags."""

import re

import griffe


def inner_products(text: str) -> str:
    """The text with ⟨w, x⟩ for <w, x>, which a browser takes for an unknown tag and hides."""
    return re.sub(r"<(?=\S)([^<>]+,\s[^<>]+)(?<=\S)>", r"⟨\1⟩", text)


class Docstrings(griffe.Extension):
    """Reads a section "Example:" as one of examples, so that it is shown as code, and keeps inner products."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = inner_products(text)
