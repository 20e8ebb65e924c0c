"""The heading of examples in docstrings as the site's reader of docstrings knows it."""

import re

import griffe


class PluralExamples(griffe.Extension):
    """Reads a section "Example:" as one of examples, so that it is shown as code."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring:
            text = obj.docstring.value
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
