"""Run folders as the trainer writes them, and what tests look at in a page."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

TIGHTNESS = {"softmax": 0.45, "sphereface": 0.3, "arcface": 0.18}


RESULTS = {
    "softmax": {"accuracy": 0.9512, "mean_angle": 24.31, "min_centre_angle": 41.5, "eer": 0.2104, "energy": 0.5871},
    "sphereface": {"accuracy": 0.9731, "mean_angle": 15.02, "min_centre_angle": 50.2, "eer": 0.1563, "energy": 0.5512},
    "arcface": {"accuracy": 0.9731, "mean_angle": 9.47, "min_centre_angle": 48.9, "eer": 0.1188, "energy": 0.5329},
}


def make_features(loss, dim=3, classes=7, per_class=60, unseen=3, seed=0):
    """Features around evenly spread class directions, tighter for the stronger losses."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=(classes + unseen, dim))
    if dim == 2:
        angles = np.linspace(0, 2 * np.pi, classes + unseen, endpoint=False)
        weights = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    for _ in range(200 if dim > 2 else 0):  # push the directions apart
        weights /= np.linalg.norm(weights, axis=1, keepdims=True)
        apart = weights[:, None] - weights[None]
        weights += 0.05 * (apart / (np.sum(apart**2, axis=-1, keepdims=True) + 1e-3)).sum(axis=1)
    weights /= np.linalg.norm(weights, axis=1, keepdims=True)

    def around(labels):
        noise = TIGHTNESS[loss] * rng.normal(size=(len(labels), dim)) / np.sqrt(dim / 3)
        directions = weights[labels] + noise
        return (directions * rng.gamma(20, 0.5, size=(len(labels), 1))).astype(np.float32)

    labels = rng.permutation(np.repeat(np.arange(classes), per_class))
    tensors = {"features": around(labels), "labels": labels, "centres": weights[:classes].astype(np.float32)}
    if unseen:
        other = np.repeat(np.arange(unseen), 40)
        tensors |= {"unseen_features": around(other + classes), "unseen_labels": other}
    return tensors


def make_run(root, loss, *, name=None, evaluated=True, steps=600, class_names=None, folder=None, **shape):
    """A run folder as the trainer writes it; returns the folder."""
    path = Path(root) / (folder or loss)
    path.mkdir(parents=True)
    name = name or f"digits-{loss}"
    (path / "recipe.yaml").write_text(
        f"name: digits-{loss}\nseed: 1\ndata: {{name: digits, batch_size: 64, hold_out: [7, 8, 9]}}\n"
        f"model: {{name: small-cnn, dim: 3}}\nloss:\n  name: {loss}\n  s: 16.0\noptimiser: {{name: sgd, lr: 0.1}}\n"
        f"train:\n  steps: {steps}\n"
    )
    environment = {"python": "3.11.7", "torch": "2.13.0", "device": "cpu", "platform": "Linux"}
    facts = {"name": name, "recipe_hash": "3fb1c0de", "seed": 1, "version": "0.1.0", "commit": "0a1b2c3"}
    facts |= {"environment": environment, "started": "2026-01-05T10:00:00+00:00", "finished": None}
    (path / "run.json").write_text(json.dumps(facts | {"status": "finished", "step": steps}))
    rng = np.random.default_rng(len(loss))
    rows = []
    for step in range(20, steps + 1, 20):
        term = 2.2 * np.exp(-step / (150 + 20 * len(loss))) + 0.05 + 0.03 * rng.random()
        energy = 0.1 + 0.2 * np.exp(-step / 90)
        row = {"step": step, "split": "train", "total": term + energy, "loss": term, "mhe": energy}
        norms = {"grad_norm/model": 3 * term, "grad_norm/head": term / 2}
        rows.append(row | {"lr": 0.05 * (1 + np.cos(np.pi * step / steps))} | norms)
        if step % 100 == 0:
            accuracy = RESULTS[loss]["accuracy"] - 0.6 * np.exp(-step / 120)
            rows.append({"step": step, "split": "test", "accuracy": accuracy, "mean_angle": 60 * np.exp(-step / 400)})
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if evaluated:
        (path / "evaluation.json").write_text(json.dumps({"step": steps, "metrics": RESULTS[loss]}))
        tensors = make_features(loss, **shape)
        class_names = class_names or [f"digit {i}" for i in range(len(tensors["centres"]))]
        metadata = {"class_names": json.dumps(class_names), "unseen_names": json.dumps(["seven", "eight", "nine"])}
        save_file(tensors, path / "features.safetensors", metadata=metadata)
    return path


class Page(HTMLParser):
    """What the tests look at in a page: addresses, table rows, plots by kind and all visible text."""

    def __init__(self, source):
        super().__init__()
        self.source = source
        self.addresses, self.rows, self.best, self.plots, self.words, self.tags = [], [], [], {}, [], set()
        self.open = []
        self.feed(source)
        embedded = re.search(r'<script type="application/json" id="plots">(.*?)</script>', source, re.DOTALL)
        self.figures = json.loads(embedded[1])

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.add(tag)
        self.addresses += [attributes[name] for name in ("src", "href") if name in attributes]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if "plot" in attributes.get("class", "").split():
            self.plots[attributes["id"]] = attributes["class"].split()[1]
        if tag not in ("meta", "link", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> does not close what was opened"

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.words.append(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data
            if "b" in self.open:
                self.best.append((self.rows[-1][0], data))

    def of_kind(self, kind):
        return [self.figures[identity] for identity, found in self.plots.items() if found == kind]

    @property
    def text(self):
        return " ".join(self.words)
