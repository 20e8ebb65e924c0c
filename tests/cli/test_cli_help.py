"""What one reads before one types: an example for each command, hints in errors, no colour where nobody sees it."""

import sys

import pytest

from mechinterp import cli

COMMANDS = {info.name: info for info in cli.app.registered_commands}


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["mechinterp", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
    return (int(stop.value.code or 0), *capsys.readouterr())


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_an_example_of_its_own(name: str, capsys):
    assert COMMANDS[name].epilog.startswith(f"Example: mechinterp {name} ")
    assert "Example" not in COMMANDS[name].help
    code, out, _ = said(capsys, name, "--help")
    assert code == 0
    assert f"Example: mechinterp {name} " in out


def test_the_list_of_commands_is_one_line_each_and_has_no_colour(capsys):
    _, out, _ = said(capsys, "--help")
    assert "Example" not in out
    assert all(name in out for name in COMMANDS)
    assert "\x1b" not in out
    assert "..." not in out.partition("Commands:")[2]


def test_what_the_parser_refuses_ends_with_where_to_look(capsys):
    code, out, err = said(capsys, "report", "checkpoints/softmax-h2-s0")
    assert (code, out) == (2, "")
    assert err.endswith("Missing option '--out'. See mechinterp report --help.\n")


def test_a_mistyped_command_gets_the_right_one(capsys):
    code, _, err = said(capsys, "clasify")
    assert code == 2
    assert "Did you mean 'classify'? See mechinterp --help." in err
