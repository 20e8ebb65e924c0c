"""The count of code lines leaves out what is no code, and nothing else."""

from tests.count_lines import code_lines

SOURCE = '''"""Of a module,
on two lines."""

# a comment
import os  # counts


class A:
    """Of a class."""

    field: int = 1
    """Of a field."""

    def f(self):
        """Of a function.

        # no comment, but part of the docstring
        """
        text = """counts,
        # twice
        """
        return text
'''


def test_only_code_counts():
    # import, class, field, def, text (its second line looks like a comment), its end, return
    assert code_lines(SOURCE) == 7
