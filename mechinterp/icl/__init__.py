"""Prompts of in-context linear regression, learners that predict on them, and fits of learners' scalars."""

from mechinterp.rooms import names_of

__getattr__ = names_of(__name__)
