"""Evaluation: metrics as pure functions, and named groups of them for recipes."""

from hypersphere.evaluate.clouds import chosen_clouds, point_contributions
from hypersphere.evaluate.faces import lfw
from hypersphere.evaluate.few_shot import EpisodeClassifiers, Episodes, classify, mean_and_interval, sample_episodes
from hypersphere.evaluate.gallery import Gallery, Match, fingerprint
from hypersphere.evaluate.generation import class_balance, feature_distance, frechet_distance, generation_score
from hypersphere.evaluate.graphs import early_stop
from hypersphere.evaluate.named import TemplateResults, ijb, named_protocols
from hypersphere.evaluate.protocols import METRICS, MISSING, Metric, Outputs, columns, evaluations, measure, table
from hypersphere.evaluate.robustness import CHECKS, explain

__all__ = [
    "CHECKS",
    "METRICS",
    "MISSING",
    "EpisodeClassifiers",
    "Episodes",
    "Gallery",
    "Match",
    "Metric",
    "Outputs",
    "TemplateResults",
    "chosen_clouds",
    "class_balance",
    "classify",
    "columns",
    "early_stop",
    "evaluations",
    "explain",
    "feature_distance",
    "fingerprint",
    "frechet_distance",
    "generation_score",
    "ijb",
    "lfw",
    "mean_and_interval",
    "measure",
    "named_protocols",
    "point_contributions",
    "sample_episodes",
    "table",
]
