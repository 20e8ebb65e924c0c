"""Names of the command line; __init__.py loads `app` when it is first used."""

from mechinterp.cli.commands import app as app

def main() -> None: ...
