"""Evaluation: metrics as pure functions, and named groups of them for recipes."""

from hypersphere.evaluate.clouds import chosen_clouds, point_contributions
from hypersphere.evaluate.faces import lfw
from hypersphere.evaluate.few_shot import EpisodeClassifiers, Episodes, classify, mean_and_interval, sample_episodes
from hypersphere.evaluate.folds import fold_accuracy, lfw10, video_similarity, ytf10
from hypersphere.evaluate.gallery import Gallery, Match, fingerprint
from hypersphere.evaluate.generation import class_balance, feature_distance, frechet_distance, generation_score
from hypersphere.evaluate.graphs import early_stop
from hypersphere.evaluate.identification import (
    Identification,
    Rate,
    identify,
    megaface,
    pool_templates,
    score_pairs,
    search,
)
from hypersphere.evaluate.metrics import (
    accuracy,
    class_centres,
    equal_error_rate,
    flip_features,
    pair_scores,
    pair_similarity,
)
from hypersphere.evaluate.named import TemplateResults, ijb, named_protocols
from hypersphere.evaluate.pair_stream import PairScores
from hypersphere.evaluate.protocols import METRICS, MISSING, Metric, Outputs, columns, evaluations, measure, table
from hypersphere.evaluate.robustness import CHECKS, explain
from hypersphere.evaluate.verification import (
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
    wilson_interval,
)

__all__ = [
    "CHECKS",
    "METRICS",
    "MISSING",
    "Calibration",
    "Det",
    "EpisodeClassifiers",
    "Episodes",
    "Gallery",
    "Identification",
    "Match",
    "Metric",
    "OperatingPoint",
    "Outputs",
    "PairScores",
    "Rate",
    "Roc",
    "TemplateResults",
    "Verification",
    "accuracy",
    "auc",
    "calibrate",
    "chosen_clouds",
    "class_balance",
    "class_centres",
    "classify",
    "columns",
    "det",
    "early_stop",
    "equal_error_rate",
    "evaluations",
    "explain",
    "feature_distance",
    "fingerprint",
    "flip_features",
    "fold_accuracy",
    "frechet_distance",
    "generation_score",
    "identify",
    "ijb",
    "lfw",
    "lfw10",
    "mean_and_interval",
    "measure",
    "megaface",
    "named_protocols",
    "pair_scores",
    "pair_similarity",
    "point_contributions",
    "pool_templates",
    "rates_at",
    "roc",
    "sample_episodes",
    "score_pairs",
    "search",
    "table",
    "tar_at_far",
    "verification_summary",
    "video_similarity",
    "wilson_interval",
    "ytf10",
]
