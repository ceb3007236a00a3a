"""A small table of digits, whose trainings take seconds."""

from hypersphere.reproduce.table import Table, parse

TEXT = """
id: digits-table
title: Digits
chapter: own
source: {work: thesis, place: nowhere}
needs: {data: [digits], minutes: 2}
measure: {failed: 85}
recipe: digits-softmax
set: ["evaluate.metrics=[classification]", model.width=4, data.batch_size=32, train.steps=120, train.log_every=10]
presets:
  paper: {title: as printed}
  fast: {title: at twice the rate, set: [optimiser.lr=0.2], rows: {arcface: [loss.m=0.2]}, only: ["*/error"]}
columns:
  error: {title: Error}
  accuracy: {title: Accuracy, measure: {title: Accuracy, read: percent, better: higher, failed: 15}}
rows:
  softmax: {title: Softmax}
  again: {title: The same, set: [loss.name=softmax]}
  arcface: {title: ArcFace, recipe: digits-arcface}
  elsewhere: {title: Theirs, quoted: true}
cells:
  arcface/accuracy: {absent: not asked for}
published:
  softmax: {error: 2.0, accuracy: 98.0}
  again: {error: 2.0}
  arcface: {error: 1.0, accuracy: 99.0}
  elsewhere: {error: 1.5}
orderings:
  - {says: margins help, order: [arcface/*, softmax/*], only: [error]}
deviations:
  - {text: shorter, scales: [small]}
  - {text: faster, presets: [fast], cells: [arcface]}
searches:
  - {key: optimiser.lr, values: [0.05, 0.1], chosen: 0.1, cells: [softmax/error], set: [data.validation=200]}
"""


def table(**changes: str) -> Table:
    """The table, with texts in it replaced."""
    text = TEXT
    for before, after in changes.values():
        assert before in text
        text = text.replace(before, after)
    return parse(text, "digits-table.yaml")
