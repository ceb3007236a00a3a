"""Metrics as pure functions of features, scores and labels: verification, identification, accuracy by folds.

Example:
    >>> import torch
    >>> equal_error_rate(torch.tensor([0.9, 0.2, 0.8, 0.1]), torch.tensor([True, True, False, False]))
    0.5
"""

from hypersphere.metrics.basic import (
    accuracy,
    class_centres,
    confusion_matrix,
    equal_error_rate,
    flip_features,
    pair_scores,
    pair_similarity,
)
from hypersphere.metrics.episodes import EpisodeClassifiers, Episodes, classify, sample_episodes
from hypersphere.metrics.folds import fold_accuracy, lfw10, video_similarity, ytf10
from hypersphere.metrics.generation import class_balance, feature_distance, frechet_distance, generation_score
from hypersphere.metrics.identification import Identification, Rate, identify, megaface
from hypersphere.metrics.intervals import mean_and_interval, student_quantile, wilson_interval
from hypersphere.metrics.neighbours import score_pairs, search
from hypersphere.metrics.pair_stream import PairScores
from hypersphere.metrics.templates import TemplateResults, ijb, pool_templates
from hypersphere.metrics.verification import (
    Calibration,
    Det,
    OperatingPoint,
    Roc,
    Verification,
    auc,
    calibrate,
    det,
    rates_at,
    roc,
    tar_at_far,
    verification_summary,
)

__all__ = [
    "Calibration",
    "Det",
    "EpisodeClassifiers",
    "Episodes",
    "Identification",
    "OperatingPoint",
    "PairScores",
    "Rate",
    "Roc",
    "TemplateResults",
    "Verification",
    "accuracy",
    "auc",
    "calibrate",
    "class_balance",
    "class_centres",
    "classify",
    "confusion_matrix",
    "det",
    "equal_error_rate",
    "feature_distance",
    "flip_features",
    "fold_accuracy",
    "frechet_distance",
    "generation_score",
    "identify",
    "ijb",
    "lfw10",
    "mean_and_interval",
    "megaface",
    "pair_scores",
    "pair_similarity",
    "pool_templates",
    "rates_at",
    "roc",
    "sample_episodes",
    "score_pairs",
    "search",
    "student_quantile",
    "tar_at_far",
    "verification_summary",
    "video_similarity",
    "wilson_interval",
    "ytf10",
]
