"""Classification heads: modules that own the class centres and turn features and labels into a loss."""

from hypersphere.losses.annealing import LambdaAnnealer
from hypersphere.losses.heads import ArcFace, ASoftmax, MarginSoftmax, Softmax, create, losses

SphereFace = ASoftmax

__all__ = ["ASoftmax", "ArcFace", "LambdaAnnealer", "MarginSoftmax", "Softmax", "SphereFace", "create", "losses"]
