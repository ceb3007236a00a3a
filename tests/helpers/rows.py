"""A measured number."""

from hypersphere.results import ResultRow

ROW = ResultRow(
    kind="result",
    group="Digits",
    what="ArcFace",
    metric="test accuracy",
    unit="%",
    mean=98.126,
    interval=0.204,
    seeds=(0, 1, 2),
    command="hypersphere train digits-arcface",
    version="0.1.0+abc",
    hardware="one CPU",
    date="2025-01-02",
    recipe="digits-arcface",
    recipe_hash="0123456789ab",
    published="98.5 (paper)",
    note="a note",
)
