"""What an optimiser must do differently: parameter groups, orthogonal matrices, heads with very many classes."""

from hypersphere.optim.groups import Rule, parameter_groups
from hypersphere.optim.orthogonal import OGD, cayley_step
from hypersphere.optim.rows import RowSGD

__all__ = ["OGD", "RowSGD", "Rule", "cayley_step", "parameter_groups"]
