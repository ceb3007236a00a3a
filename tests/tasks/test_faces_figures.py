"""The page of a verification: its curves against scikit-learn, its hardest pairs and thumbnails, and a real browser."""

from __future__ import annotations

import base64
import io
import json
import re
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import norm
from sklearn.metrics import roc_curve

from helpers.browser import load
from hypersphere.metrics import calibrate, lfw10, verification_summary
from hypersphere.tasks.faces.data import Pairs
from hypersphere.tasks.faces.figures import VerificationPage, det_figure, hardest, roc_figure, write_verification

pytestmark = pytest.mark.filterwarnings("ignore:a FAR of")
COUNT, PAIRS = 60, 400


def picture(index: int) -> torch.Tensor:
    """A smooth image that differs from the others, so that JPEG keeps it."""
    rows, columns = torch.meshgrid(torch.linspace(0, 1, 28), torch.linspace(0, 1, 24), indexing="ij")
    shades = [rows, columns, (rows + columns) / 2]
    return torch.stack([255 * (0.2 + 0.6 * index / COUNT * shade) for shade in shades]).to(torch.uint8)


def make_page(**changes) -> VerificationPage:
    """Pairs of 20 people with scores that overlap; one image has a name that is no good for HTML."""
    generator = torch.Generator().manual_seed(0)
    people = torch.arange(COUNT) % 20
    left, right = torch.randint(COUNT, (2, 4 * PAIRS), generator=generator)
    left, right = left[left != right], right[left != right]
    same = people[left] == people[right]
    order = torch.cat([same.nonzero().flatten()[:40], (~same).nonzero().flatten()[: PAIRS - 40]])
    left, right, same = left[order], right[order], same[order]
    features = torch.randn(20, 16, generator=generator)[people] + 0.9 * torch.randn(COUNT, 16, generator=generator)
    scores = torch.cosine_similarity(features[left], features[right])
    names = [f"p{int(person)}/p{int(person)}_{i:04d}" for i, person in enumerate(people)]
    worst = int(left[scores.argsort()[same[scores.argsort()]][0]])
    names[worst] = f'{names[worst]}"><script>alert(1)</script>'
    pairs = Pairs(tuple(names), left, right, same, torch.arange(len(left)) % 4)
    ids = (people[left], people[right])
    results = {"accuracy": lfw10(features[left], features[right], same, pairs.fold)}
    results |= verification_summary(scores, same, identities=ids, samples=50, fars=[0.1])
    line = calibrate(scores, same, 0.05, identities=ids, samples=50)
    facts = {"name": "tiny & small", "pairs": pairs, "scores": scores, "results": results, "calibration": line}
    facts |= {"how": "cosine scores", "read": picture, "skipped": ("a<b>.jpg: broken",)}
    return VerificationPage(**(facts | changes))


@pytest.fixture(scope="module")
def found() -> VerificationPage:
    return make_page()


@pytest.fixture(scope="module")
def written(found, tmp_path_factory) -> Path:
    return write_verification(found, tmp_path_factory.mktemp("page") / "deep" / "page.html")


@pytest.fixture(scope="module")
def html(written) -> str:
    """The page without the program that draws its plots."""
    return re.sub(r"<script>.*?</script>", "", written.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_page_is_one_file_and_leaves_no_other(written, html):
    assert [path.name for path in written.parent.iterdir()] == ["page.html"]
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", html)
    assert "alert(1)</script>" not in html and "&lt;script&gt;alert(1)" in html and "a&lt;b&gt;.jpg" in html
    assert "tiny &amp; small" in html


def test_every_number_stands_there_with_its_interval_and_words(found, html):
    text = unescape(re.sub(r"<[^>]+>", " ", html))
    for value in found.results.values():
        assert f"{value.value:.2%}" in text and value.words in text
        assert f"{value.interval[0]:.2%} to {value.interval[1]:.2%}" in text
    line = found.calibration
    assert f"{line.threshold:.4f}" in text and line.words in text and str(found.pairs) in text
    assert f"{line.interval[0]:.4f} to {line.interval[1]:.4f}" in text and f"{line.tar:.2%} of the genuine" in text


def test_the_roc_is_that_of_scikit_learn(found):
    figure, _ = roc_figure(found.scores, found.pairs.same, found.calibration)
    curve, diamond = figure["data"]
    far, tar, _ = roc_curve(found.pairs.same, found.scores, drop_intermediate=False)
    impostors = int((~found.pairs.same).sum())
    for x, y in zip(curve["x"], curve["y"], strict=True):  # every point drawn is one of the curve
        assert np.min(np.abs(np.maximum(far, 0.5 / impostors) - x) + np.abs(100 * tar - y)) < 1e-3
    area = np.trapezoid(tar, far)
    drawn = np.trapezoid(np.array(curve["y"]) / 100, np.array(curve["x"]))
    assert drawn == pytest.approx(area, abs=0.005)
    scores, same = found.scores.numpy(), found.pairs.same.numpy()
    line = found.calibration.threshold
    assert diamond["x"] == [pytest.approx((scores[~same] > line).mean())]
    assert diamond["y"] == [pytest.approx(100 * (scores[same] > line).mean())]


def test_the_det_has_axes_of_normal_quantiles(found):
    figure, _ = det_figure(found.scores, found.pairs.same, found.calibration)
    _, curve, diamond = figure["data"]
    far, tar, _ = roc_curve(found.pairs.same, found.scores, drop_intermediate=False)
    least = [0.5 / int(kind.sum()) for kind in (~found.pairs.same, found.pairs.same)]
    x, y = (norm.ppf(rate.clip(low, 1 - low)) for rate, low in zip((far, 1 - tar), least, strict=True))
    for place in zip(curve["x"], curve["y"], strict=True):
        assert np.min(np.abs(x - place[0]) + np.abs(y - place[1])) < 1e-3
    assert diamond["x"] == [pytest.approx(norm.ppf(found.calibration.far))]
    assert diamond["y"] == [pytest.approx(norm.ppf(1 - found.calibration.tar))]
    ticks = figure["layout"]["xaxis"]
    percents = [float(text.removesuffix(" %")) / 100 for text in ticks["ticktext"]]
    np.testing.assert_allclose(ticks["tickvals"], norm.ppf(percents), rtol=1e-3)


def plots_of(written: Path):
    text = re.search(r'<script type="application/json" id="plots">(.*?)</script>', written.read_text(), re.DOTALL)
    return list(json.loads(text[1]).values())


def test_histogram_and_errors_have_the_threshold_in_them(found, written):
    _, _, histogram, errors = plots_of(written)
    scores, same, line = found.scores.numpy(), found.pairs.same.numpy(), found.calibration
    for figure in (histogram, errors):
        band, rule = figure["layout"]["shapes"]
        assert rule["x0"] == rule["x1"] == pytest.approx(line.threshold)
        assert (band["x0"], band["x1"]) == pytest.approx(line.interval)
    for trace, kind in zip(histogram["data"], (same, ~same), strict=True):
        counts, edges = np.histogram(scores[kind], bins=80, range=(scores.min(), scores.max()))
        np.testing.assert_allclose(trace["y"], 100 * counts / kind.sum(), rtol=1e-3)
        assert trace["x0"] == pytest.approx((edges[0] + edges[1]) / 2) and sum(trace["y"]) == pytest.approx(
            100, abs=0.1
        )
    rates = {"FAR": lambda t: (scores[~same] >= t).mean(), "FRR": lambda t: (scores[same] < t).mean()}
    for trace in errors["data"]:
        for x, y in list(zip(trace["x"], trace["y"], strict=True))[::17]:
            nearest = scores[np.abs(scores - x).argmin()]  # the page has five digits
            assert (y or 0) == pytest.approx(100 * rates[trace["name"]](nearest), rel=1e-3)


def test_the_hardest_pairs_are_shown_as_the_network_sees_them(found, html):
    scores, same = found.scores.tolist(), found.pairs.same.tolist()
    worst = sorted((score, i) for i, score in enumerate(scores) if same[i])[:12]
    best = sorted(((-score, i) for i, score in enumerate(scores) if not same[i]))[:12]
    assert hardest(found.scores, found.pairs.same) == ([i for _, i in worst], [i for _, i in best])
    items = re.findall(r"<li>.*?</li>", html, re.DOTALL)
    assert len(items) == 24
    for item, (_, index) in zip(items, [*worst, *best], strict=True):
        assert f"<b>{scores[index]:.4f}</b>" in item
        wrong = (scores[index] > found.calibration.threshold) != same[index]
        assert ("wrongly" in item) == wrong
        sides = (int(found.pairs.left[index]), int(found.pairs.right[index]))
        for side, source in zip(sides, re.findall(r'src="data:image/jpeg;base64,([^"]+)"', item), strict=True):
            shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(source)))).astype(int)
            assert np.abs(shown - picture(side).permute(1, 2, 0).numpy()).mean() < 3


def test_perfect_and_constant_scores_can_be_drawn(tmp_path):
    for scores in (make_page().pairs.same.float(), torch.zeros(PAIRS)):
        page = make_page()
        line = calibrate(scores, page.pairs.same, 0.1, samples=10)
        drawn = make_page(scores=scores, calibration=line)
        assert len(plots_of(write_verification(drawn, tmp_path / "page.html"))) == 4


def test_the_page_in_a_browser(browser, written, found):
    browser.get_log("browser")  # of pages before
    for width in (1400, 360):
        page = load(browser, written.as_uri(), width)
        plots = page.find_elements("css selector", ".plot .main-svg")
        assert len(plots) >= 4
        assert page.execute_script("return document.scrollingElement.scrollWidth <= innerWidth")
        assert page.execute_script("return [...document.images].map((image) => image.naturalWidth)") == [24] * 48
    assert [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"] == []
