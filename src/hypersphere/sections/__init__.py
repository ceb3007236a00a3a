"""Sections of recipes, a file each: the keys of a section and what it does in a run.

See :mod:`hypersphere.recipe.section` for the hooks and the order in which they are called.
"""
