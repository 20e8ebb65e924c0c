"""What one reads before one types: an example for each command, hints in errors, no colour where nobody sees it."""

import pytest

from mechinterp import cli
from tests.conftest import Run

COMMANDS = {info.name: info for info in cli.app.registered_commands}


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_an_example_of_its_own(name: str, run: Run):
    assert COMMANDS[name].epilog.startswith(f"Example: mechinterp {name} ")
    assert "Example" not in COMMANDS[name].help
    assert f"Example: mechinterp {name} " in run(name, "--help").done().out


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_the_list_of_commands_is_one_line_each_and_has_no_colour(arguments: tuple, run: Run):
    out = run(*arguments).done(silent=True).out
    assert "Example" not in out
    assert all(f" {name} " in out for name in COMMANDS)
    assert "\x1b" not in out
    assert "..." not in out.partition("Commands:")[2]


def test_what_the_parser_refuses_ends_with_where_to_look(run: Run):
    hint = "Missing option '--out'. See mechinterp report --help.\n"
    run("report", "checkpoints/softmax-h2-s0").assert_refused(hint)
    hint = "Did you mean 'classify'? See mechinterp --help."
    run("clasify").assert_refused(hint)
