"""Recipes: everything that determines a run, as YAML checked before anything is built.

A recipe names its parts (data set, model, loss, regularisers) by their registry names; the options of each part are
checked against the signature of what the name stands for. Every mistake is reported with the line it stands on,
what is allowed there and the nearest known word.
"""

from hypersphere.recipe.explain import RecipeError
from hypersphere.recipe.part import Part, Schedule
from hypersphere.recipe.read import embedded, load, names
from hypersphere.recipe.resolve import check
from hypersphere.recipe.schema import Augment, Optimiser, Recipe, Rule, settings
from hypersphere.recipe.section import Section, Term, Training, Work, sections

__all__ = [
    "Augment",
    "Optimiser",
    "Part",
    "Recipe",
    "RecipeError",
    "Rule",
    "Schedule",
    "Section",
    "Term",
    "Training",
    "Work",
    "check",
    "embedded",
    "load",
    "names",
    "sections",
    "settings",
]
