"""Closed forms of the papers that only the analyses and the tests use; `mechinterp.theory` has what the package needs."""
