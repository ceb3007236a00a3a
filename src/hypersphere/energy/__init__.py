r"""Regularisers of weights: hyperspherical energy (how evenly directions fill the sphere), orthogonality and others."""

from hypersphere.energy import theory
from hypersphere.energy.base import Regulariser, create, energies
from hypersphere.energy.compressive import (
    AdvCoMHE,
    APCoMHE,
    BPCoMHE,
    Compressive,
    GroupCoMHE,
    NaiveCoMHE,
    RPCoMHE,
    compressive_energy,
    preservation_loss,
)
from hypersphere.energy.gan import DiscriminatorMHE
from hypersphere.energy.layers import Neurons, Selection, neurons, select
from hypersphere.energy.low_rank import BPLowRank, LowRankBilateral
from hypersphere.energy.mhe import MHE, hyperspherical_energy
from hypersphere.energy.minibatch import InterClass, batch_pairs, batch_versus_all, caffe_inter_class, subset
from hypersphere.energy.minimise import Minimum, minimise, prototypes, refine
from hypersphere.energy.orthogonality import SRIP, CosineSum, Orthogonal, Orthonormal, OrthoReg
from hypersphere.energy.pairwise import PairEnergy
from hypersphere.energy.potentials import Potential, potentials
from hypersphere.energy.projections import ProjectionBank
from hypersphere.energy.report import Report, report
from hypersphere.energy.uniformity import (
    MGD,
    MHC,
    MHP,
    MHS,
    MMA,
    KoLeo,
    RelaxedMHP,
    Separation,
    Uniformity,
    alignment,
    hyperspherical_uniformity_gap,
    prototype_loss,
)

__all__ = [
    "MGD",
    "MHC",
    "MHE",
    "MHP",
    "MHS",
    "MMA",
    "SRIP",
    "APCoMHE",
    "AdvCoMHE",
    "BPCoMHE",
    "BPLowRank",
    "Compressive",
    "CosineSum",
    "DiscriminatorMHE",
    "GroupCoMHE",
    "InterClass",
    "KoLeo",
    "LowRankBilateral",
    "Minimum",
    "NaiveCoMHE",
    "Neurons",
    "OrthoReg",
    "Orthogonal",
    "Orthonormal",
    "PairEnergy",
    "Potential",
    "ProjectionBank",
    "RPCoMHE",
    "Regulariser",
    "RelaxedMHP",
    "Report",
    "Selection",
    "Separation",
    "Uniformity",
    "alignment",
    "batch_pairs",
    "batch_versus_all",
    "caffe_inter_class",
    "compressive_energy",
    "create",
    "energies",
    "hyperspherical_energy",
    "hyperspherical_uniformity_gap",
    "minimise",
    "neurons",
    "potentials",
    "preservation_loss",
    "prototype_loss",
    "prototypes",
    "refine",
    "report",
    "select",
    "subset",
    "theory",
]
