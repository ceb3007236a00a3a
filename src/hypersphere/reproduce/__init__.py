"""Published tables as declarations, trained by one command, and what was measured beside what was published.

Example:
    >>> from hypersphere import reproduce
    >>> table = reproduce.find("thesis-2.2")
    >>> table.published_at("softmax/error")
    0.4
"""

from hypersphere.reproduce.table import Table, TableError, find, tables
from hypersphere.reproduce.training import Training, cell_recipe, trainings

__all__ = ["Table", "TableError", "Training", "cell_recipe", "find", "tables", "trainings"]
