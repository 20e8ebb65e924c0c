"""Docstrings as the site shows them: sections apart, examples as code, inner products, fields in one list, links."""

import re
from inspect import formatannotation, signature
from pydoc import locate
from textwrap import indent

import griffe

import mechinterp
from mechinterp.analysis.registry import ANALYSES
from mechinterp.analysis.result import known
from mechinterp.rooms import homes_of

FUNCTIONS = [
    *(getattr(mechinterp, name) for name in homes_of("mechinterp")),
    *(one.function for one in ANALYSES.values()),
]
PUBLIC = {one.__name__: f"{one.__module__}.{one.__name__}" for one in FUNCTIONS}
"""Full paths of the top-level names and of the analyses of the command line, by name."""


def inner_products(text: str) -> str:
    """The text with ⟨w, x⟩ for <w, x>, which a browser takes for an unknown tag and hides."""
    return re.sub(r"<(?=\S)([^<>]+,\s[^<>]+)(?<=\S)>", r"⟨\1⟩", text)


def with_links(text: str) -> str:
    """The docstring with links in its "See also:".

    Example:
        >>> with_links("Title.\\n\\nSee also:\\n    `load`.")
        'Title.\\n\\nSee also:\\n    [`load`][mechinterp.checkpoints.load.load].'
    """
    return re.sub(
        r"(?<=^See also:\n)(?: .*(?:\n|$))+",
        lambda names: re.sub(r"`(\w+)`", lambda n: f"[`{n[1]}`][{PUBLIC[n[1]]}]", names[0]),
        text,
        flags=re.M,
    )


def with_source(text: str, path: str) -> str:
    """The docstring with the file as its "Source:", where it names no paper."""
    if "Source:\n" in text:
        return text
    lines = text.split("\n")
    starts = [n for n, line in enumerate(lines) if re.match(r"(See also|Example):$", line)]
    at = starts[0] if starts else len(lines)
    lines[at:at] = ["Source:", indent(f"Defined here, in `{path}`.", "    ")]
    return "\n".join(lines)


def show_options(function: griffe.Function) -> None:
    """The options of `load`, as Python shows them: they are declared once, in a table that griffe does not read."""
    function.docstring.value = mechinterp.load.__doc__
    options = [
        griffe.Parameter(
            option.name,
            annotation=formatannotation(option.annotation),
            kind=griffe.ParameterKind.keyword_only,
            default="None",
        )
        for option in list(signature(mechinterp.load).parameters.values())[1:]
    ]
    function.parameters = griffe.Parameters(function.parameters["path"], *options)


def field_text(member: griffe.Attribute, meaning: str, unit: str) -> str:
    """Docstring of a field on one line; of a field that is a column of a table, its meaning and unit."""
    if member.docstring:
        return " ".join(member.docstring.value.split())
    return f"{meaning.removesuffix('.')}, unit {unit}." if unit else meaning


class Docstrings(griffe.Extension):
    """Separates sections, shows "Example:" as code, keeps inner products, lists the fields of a class, and links names."""

    def on_class(self, *, cls: griffe.Class, **kwargs: object) -> None:
        columns = known(locate(cls.path)) if "COLUMNS" in cls.members else {}
        fields = [
            (name, member, inner_products(text))
            for name, member in cls.members.items()
            if member.is_attribute and "instance-attribute" in member.labels
            if (text := field_text(member, *columns.get(name, ("", ""))))
        ]
        if not fields:
            return
        lines = [cls.docstring.value if cls.docstring else "", "", "Attributes:"]
        lines += [f"    {name} ({member.annotation}): {text}" for name, member, text in fields]
        for name, _, _ in fields:
            cls.del_member(name)
        style = next(d for d in (cls.docstring, *(m.docstring for _, m, _ in fields)) if d)
        cls.docstring = griffe.Docstring(
            "\n".join(lines), parent=cls, parser=style.parser, parser_options=style.parser_options
        )

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring:
            if obj.path == PUBLIC["load"]:
                show_options(obj)
            if PUBLIC.get(obj.name) == obj.path:
                file = f"{obj.module.path.replace('.', '/')}.py"
                obj.docstring.value = with_links(with_source(obj.docstring.value, file))
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            text = re.sub(r"(?<=[^\n]\n)(?=[A-Z][a-z ]+:\n +\S)", "\n", text)
            obj.docstring.value = inner_products(text)
