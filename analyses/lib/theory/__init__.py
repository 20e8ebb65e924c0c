"""Closed forms that only the analyses and the tests use; `mechinterp.theory` has those of the
package."""
