"""Classification heads: modules that own the class centres and turn features and labels into a loss."""

from hypersphere.losses import negatives
from hypersphere.losses.batch import Batch
from hypersphere.losses.head import MarginSoftmax
from hypersphere.losses.members.adaptive import AdaFace, CircleLoss, CurricularFace, MagFace
from hypersphere.losses.members.additive import ArcFace, CombinedMargin, CosFace, SubcenterArcFace
from hypersphere.losses.members.binary import Hinge, SphereFace2
from hypersphere.losses.members.gan import GANLoss
from hypersphere.losses.members.multiplicative import (
    ASoftmax,
    GASoftmax,
    LSoftmax,
    MSoftmax,
    SphereFacePlus,
    SphereFaceR,
)
from hypersphere.losses.members.pairs import CenterLoss, Contrastive, TripletLoss
from hypersphere.losses.members.plain import NormFace, Softmax, SSoftmax, WSoftmax
from hypersphere.losses.memory import MemoryEstimate, memory_estimate
from hypersphere.losses.pairs import circle_pairs, contrastive, triplet
from hypersphere.losses.registry import create, losses
from hypersphere.losses.rotation import ClassRotation
from hypersphere.losses.schedules import LambdaAnnealer, Ramp, Schedule
from hypersphere.losses.spec import HeadSpec
from hypersphere.losses.state import HeadState, MarginSize
from hypersphere.losses.theory import (
    adacos_scale,
    angular_margin,
    binary_margin,
    largest_cosine_margin,
    m_min,
    magface_minimum_weight,
    reachable_probability,
    softmax_bound,
    suggest_scale,
)

SphereFace = ASoftmax
AMSoftmax = CosFace

__all__ = [
    "AMSoftmax",
    "ASoftmax",
    "AdaFace",
    "ArcFace",
    "Batch",
    "CenterLoss",
    "CircleLoss",
    "ClassRotation",
    "CombinedMargin",
    "Contrastive",
    "CosFace",
    "CurricularFace",
    "GANLoss",
    "GASoftmax",
    "HeadSpec",
    "HeadState",
    "Hinge",
    "LSoftmax",
    "LambdaAnnealer",
    "MSoftmax",
    "MagFace",
    "MarginSize",
    "MarginSoftmax",
    "MemoryEstimate",
    "NormFace",
    "Ramp",
    "SSoftmax",
    "Schedule",
    "Softmax",
    "SphereFace",
    "SphereFace2",
    "SphereFacePlus",
    "SphereFaceR",
    "SubcenterArcFace",
    "TripletLoss",
    "WSoftmax",
    "adacos_scale",
    "angular_margin",
    "binary_margin",
    "circle_pairs",
    "contrastive",
    "create",
    "largest_cosine_margin",
    "losses",
    "m_min",
    "magface_minimum_weight",
    "memory_estimate",
    "negatives",
    "reachable_probability",
    "softmax_bound",
    "suggest_scale",
    "triplet",
]
