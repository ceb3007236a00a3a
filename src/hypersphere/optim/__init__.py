"""What an optimiser must do differently: parameter groups, orthogonal matrices, heads with very many classes."""

from hypersphere.optim.groups import Rule, parameter_groups
from hypersphere.optim.orthogonal import OGD, cayley_step
from hypersphere.optim.rows import RowAdamW, RowSGD, gather_rows, row_parameters

__all__ = ["OGD", "RowAdamW", "RowSGD", "Rule", "cayley_step", "gather_rows", "parameter_groups", "row_parameters"]
