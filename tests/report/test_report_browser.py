"""The run report in a real browser: headless Chromium draws it, clicks in it, turns it and switches its theme."""

import io

import numpy as np
import pytest
from PIL import Image

from helpers.browser import load, set_theme, show, wait
from helpers.pages import TIGHTNESS, make_run
from hypersphere import report
from hypersphere.drawing import PALETTE

ActionChains = pytest.importorskip("selenium.webdriver.common.action_chains").ActionChains
By = pytest.importorskip("selenium.webdriver.common.by").By


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return report.write([make_run(root, loss) for loss in TIGHTNESS], root / "report.html").as_uri()


@pytest.fixture(scope="module")
def page(browser, address):
    """The page at desktop width in the light theme; drawing takes seconds, so tests put back what they change."""
    return load(browser, address, width=1400)


def of_plot(browser, expression, index=0, kind="sphere"):
    """A JavaScript expression about the ``plot`` of a kind."""
    script = f"const plot = document.querySelectorAll('.plot.{kind}')[{index}]; return {expression};"
    return browser.execute_script(script)


def visibility(browser, name, index=0):
    found = f"plot._fullData.filter((trace) => trace.name === '{name}').map((trace) => trace.visible)"
    return of_plot(browser, found, index)


def scroll_to(browser, element):
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)


def pixels(browser, element):
    scroll_to(browser, element)  # what is outside the window is not in the picture
    return np.asarray(Image.open(io.BytesIO(element.screenshot_as_png)).convert("RGB")).astype(int)


def test_spheres_are_drawn_in_the_colours_of_the_classes(page):
    for plot in page.find_elements(By.CSS_SELECTOR, ".plot.sphere"):
        assert plot.find_elements(By.TAG_NAME, "canvas")
        legend_top = plot.find_element(By.CSS_SELECTOR, ".legend").location["y"] - plot.location["y"]
        image = pixels(page, plot)[: int(legend_top)]
        assert len(image) > 300
        drawn = np.abs(image - image[2, 2]).max(axis=-1) > 8
        assert drawn.mean() > 0.25  # the ball fills its box
        for color in PALETTE[:7]:
            rgb = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
            # Dots behind the ball are faded towards it, so a class counts by its hue: a mix of its colour and white.
            mixes = [255 + share * (np.array(rgb) - 255) for share in np.linspace(0.4, 1, 13)]
            near = np.min([np.abs(image - mix).max(axis=-1) for mix in mixes], axis=0) < 14
            assert near.sum() > 40, color


def test_legend_hides_and_shows_a_class_in_every_sphere(page):
    entry = page.find_elements(By.CSS_SELECTOR, ".plot.sphere .legendtoggle")[2]
    scroll_to(page, entry)
    for state in ("legendonly", True):
        ActionChains(page).move_to_element(entry).click().perform()
        # Dots and weight vector go together.
        wait(page, lambda state=state: all(visibility(page, "digit 2", i) == [state, state] for i in range(3)))
        assert visibility(page, "digit 3") == [True, True]
        entry = page.find_elements(By.CSS_SELECTOR, ".plot.sphere .legendtoggle")[2]


def test_turning_one_sphere_turns_the_others(page):
    sphere = page.find_element(By.CSS_SELECTOR, ".plot.sphere")
    before = of_plot(page, "plot.layout.scene.camera.eye")
    scroll_to(page, sphere)
    ActionChains(page).move_to_element(sphere).click_and_hold().move_by_offset(80, 20).pause(0.3).release().perform()
    wait(page, lambda: of_plot(page, "plot.layout.scene.camera.eye") != before)
    turned = of_plot(page, "plot.layout.scene.camera.eye")
    for index in (1, 2):
        wait(page, lambda index=index: of_plot(page, "plot.layout.scene.camera.eye", index) == turned)


def test_log_scale_and_hiding_a_run(page):
    page.find_element(By.ID, "log").click()
    wait(page, lambda: of_plot(page, "plot._fullLayout.yaxis.type", kind="curve.log") == "log")
    assert of_plot(page, "plot._fullLayout.yaxis.type", kind="curve:not(.log)") == "linear"
    button = page.find_element(By.CSS_SELECTOR, "button[data-run='1']")
    button.click()
    wait(page, lambda: of_plot(page, "plot._fullData.map((t) => t.visible)", kind="curve") == [True, False, True])
    assert button.get_attribute("aria-pressed") == "false"


def test_dark_theme_recolours_page_and_plots(page):
    colors = "[plot._fullLayout.paper_bgcolor, plot._fullLayout.font.color]"
    kinds = ("sphere", "histogram", "curve")
    light = {kind: of_plot(page, colors, kind=kind) for kind in kinds}
    light_page = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    set_theme(page, "dark")
    for kind in kinds:
        wait(page, lambda kind=kind: of_plot(page, colors, kind=kind) == ["#191f29", "#e4e8ef"])
        assert light[kind] == ["#ffffff", "#1c2330"]
    assert page.execute_script("return getComputedStyle(document.body).backgroundColor") != light_page
    set_theme(page, "light")


def test_desktop_puts_spheres_side_by_side(page):
    tops = {plot.location["y"] for plot in page.find_elements(By.CSS_SELECTOR, ".plot.sphere")}
    assert len(tops) == 1


def test_nothing_is_logged_as_an_error(page):
    """Stands after the tests that click, so that their errors count too."""
    assert [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_phone_is_one_column_without_sideways_scrolling(browser, address):
    page = load(browser, address, width=360)
    assert page.execute_script("return document.scrollingElement.scrollWidth <= innerWidth && innerWidth === 360")
    lefts = {figure.location["x"] for figure in page.find_elements(By.TAG_NAME, "figure")}
    assert len(lefts) == 1
    table = page.find_element(By.CSS_SELECTOR, ".scroll")
    assert page.execute_script("return arguments[0].scrollWidth > arguments[0].clientWidth", table)
    show(page, width=1400)
