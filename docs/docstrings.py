"""Docstrings as the site shows them: examples as code, inner products that are no HTML tags, fields in one table."""

import re

import griffe


def inner_products(text: str) -> str:
    """The text with ⟨w, x⟩ for <w, x>, which a browser takes for an unknown tag and hides."""
    return re.sub(r"<(?=\S)([^<>]+,\s[^<>]+)(?<=\S)>", r"⟨\1⟩", text)


class Docstrings(griffe.Extension):
    """Shows a section "Example:" as code, keeps inner products, and lists the fields of a class in its docstring."""

    def on_class(self, *, cls: griffe.Class, **kwargs: object) -> None:
        fields = [
            (name, member)
            for name, member in cls.members.items()
            if member.is_attribute and member.docstring and "instance-attribute" in member.labels
        ]
        if not fields:
            return
        lines = [cls.docstring.value if cls.docstring else "", "", "Attributes:"]
        for name, member in fields:
            text = inner_products(" ".join(member.docstring.value.split()))
            lines.append(f"    {name} ({member.annotation}): {text}")
            cls.del_member(name)
        style = fields[0][1].docstring
        cls.docstring = griffe.Docstring(
            "\n".join(lines), parent=cls, parser=style.parser, parser_options=style.parser_options
        )

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = inner_products(text)
