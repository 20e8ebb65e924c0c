"""`python -m mechinterp` is the command `mechinterp`."""

from mechinterp.cli import main

main()
