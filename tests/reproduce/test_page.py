"""The page of the scoreboard: the JSON in it, and what a browser makes of that."""

import base64
import copy
import hashlib
import json
import math
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.browser import load, set_theme, show, wait
from helpers.pages import Page
from hypersphere.reproduce import cell_recipe, find
from hypersphere.reproduce.page import embedded, render, write_page
from hypersphere.reproduce.rows import Row
from hypersphere.reproduce.scoreboard import scoreboard

HOSTILE = "</script><img src=x onerror=\"document.title='taken'\"><!--<script>&amp; \u2028\u2029"
MINUS = "\N{MINUS SIGN}"
SMALL = {  # m = 4 ahead of softmax as published, m = 2 behind it
    "hinge": (0.52, None, 0.50),
    "softmax": (0.41, 0.40, 0.42),
    "l-softmax-2": (0.51, 0.50, 0.52),
    "l-softmax-3": (0.36, 0.37, 0.35),
    "l-softmax-4": (0.31, 0.30, 0.32),
}
PAPER = {"softmax": (0.40, 0.39), "l-softmax-4": (0.38, 0.41)}  # nothing is decided


def make_rows(scale, values, stale=()):
    table, rows = find("thesis-2.2"), []
    preset = next(iter(table.presets))
    for name, found in values.items():
        for seed, value in enumerate(found):
            cell = f"{name}/error"
            plan, _ = cell_recipe(table, cell, preset, scale, seed)
            shape = [90 * math.exp(-point / 2) + (value or 5) for point in range(4 if value is None else 10)]
            every = plan.train.steps // 10
            row = Row(
                *(
                    "paper",
                    scale,
                    cell,
                    seed,
                    value,
                    "diverged" if value is None else "finished",
                    plan.train.steps,
                    12.5,
                ),
                *("a1b2c3d", "0" * 12 if cell in stale else plan.hash, "9f8e7d6c5b4a", "NVIDIA H200", "2026-01-05"),
                " ".join(f"{every * (point + 1)}:{found:.4g}" for point, found in enumerate(shape)),
            )
            rows.append(row)
    return rows


@pytest.fixture(scope="module")
def board():
    rows = make_rows("small", SMALL, stale=["l-softmax-3/error"]) + make_rows("paper", PAPER)
    found = scoreboard({"thesis-2.2": rows}, ["thesis-2.2", "thesis-3.3"])
    steps = found["tables"][0]["boards"][1]["cells"]["softmax/error"]["runs"][0]["steps"]
    found["tables"][0]["reference"] = {"softmax/error": [(0, 80.0), (steps // 2, 20.0), (2 * steps, 5.0)]}
    return found


# ------------------------------------------------------------------------------------------------ without a browser

texts = st.text() | st.sampled_from([HOSTILE, "<!--", "]]>", "\u2028"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=10,
)


@given(values)
def test_embedded_json_reads_back_and_holds_no_markup(value):
    text = embedded(value)
    assert json.loads(text) == value
    assert not set(text) & {"<", ">", "&", "\u2028", "\u2029"}


def test_numbers_that_are_not_finite_are_null():
    assert embedded({"a": [math.nan, (math.inf, 1.5)]}) == '{"a":[null,[null,1.5]]}'


def test_page_carries_the_whole_board_and_asks_for_nothing(board, tmp_path):
    page = write_page(board, tmp_path / "made" / "page.html").read_text(encoding="utf-8")
    carried = re.search(r'<script type="application/json" id="board">(.*?)</script>', page, re.DOTALL)[1]
    assert json.loads(carried) == json.loads(json.dumps(board))
    around = page.replace(carried, "{}").replace('id="board"', 'id="plots"')  # where the reader of pages looks
    found = Page(around)
    assert found.addresses == ["data:,"]
    assert not found.tags & {"iframe", "img", "object", "embed"}
    assert "@import" not in page and "url(" not in page
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", around)


def test_only_its_own_script_may_run(board):
    page = render(board)
    script = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(script) == 1
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page
    assert "default-src 'none'" in page


def test_recipe_of_a_cell_is_there_once_unless_stale(board):
    cells = board["tables"][0]["boards"][1]["cells"]
    fresh = cell_recipe(find("thesis-2.2"), "softmax/error", next(iter(board["tables"][0]["presets"])), "small", 0)
    assert cells["softmax/error"]["recipe"] == fresh[0].to_yaml()
    assert cells["l-softmax-3/error"]["recipe"] is None
    assert [run["stale"] for run in cells["l-softmax-3/error"]["runs"]] == [True] * 3
    assert not any(run["stale"] for run in cells["softmax/error"]["runs"])


# ---------------------------------------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def address(board, tmp_path_factory):
    return write_page(board, tmp_path_factory.mktemp("scoreboard") / "page.html").as_uri()


@pytest.fixture
def page(browser, address):
    browser.get("about:blank")  # an address that differs in its hash alone is not loaded again
    return load(browser, address, width=1280)


def all_of(page, selector):
    return page.find_elements("css selector", selector)


def one(page, selector):
    return page.find_element("css selector", selector)


def text_of(page, selector):
    return page.execute_script("return document.querySelector(arguments[0])?.textContent ?? null", selector)


def shown(page):
    return [card.get_attribute("data-table") for card in all_of(page, ".card") if card.is_displayed()]


def choose(page, name, value):
    page.execute_script("arguments[0].click()", one(page, f"input[name={name}][value='{value}']"))


def cell_button(page, cell):
    return one(page, f"#table-thesis-2\\.2 [data-cell='{cell}'] button")


def press(page, *keys):
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(page).send_keys(*keys).perform()


@pytest.fixture
def keys():
    return pytest.importorskip("selenium.webdriver.common.keys").Keys


def settled(table, scale):
    """The verdict on each ordering that a table states, as the JSON has it; ``None`` where it has none."""
    found = {
        one["says"]: "changed"
        if any(board["cells"].get(cell, {}).get("stale") for pair in one["pairs"] for cell in pair[:2])
        else one["verdict"]
        for board in table["boards"]
        if board["scale"] == scale
        for one in board["orderings"]
    }
    return [found.get(says) for says in table["claims"]]


@pytest.mark.parametrize(("scale", "cells"), [("small", 5), ("paper", 2)])
def test_counts_keep_the_scales_apart(page, board, scale, cells):
    expected = Counter(one or "none" for table in board["tables"] for one in settled(table, scale))
    assert (expected["held"] > 0) == (expected["reversed"] > 0) == (scale == "small")
    tile = f".tile[data-scale={scale}]"
    for kind in ("held", "reversed", "open", "changed", "none"):
        assert int(text_of(page, f"{tile} .tally .{kind} b") or 0) == expected[kind]
    assert text_of(page, f"{tile} .measured") == str(cells)
    assert "1 of 2 tables" in text_of(page, ".tile.whole")


def test_grid_shows_the_numbers_of_the_json(page, board):
    table = board["tables"][0]
    for tab, found in enumerate(table["boards"]):
        all_of(page, "#table-thesis-2\\.2 [role=tab]")[tab].click()
        for cell, number in table["published"].items():
            place = f"#table-thesis-2\\.2 [data-cell='{cell}']"
            result = found["cells"].get(cell)
            if result is None:
                quoted = cell in table["untrained"]
                expected = f"{number:.2f} quoted" if quoted else f"published {number:.2f}"
                assert text_of(page, f"{place} .published") == expected
                assert not all_of(page, f"{place} button")
                continue
            assert text_of(page, f"{place} .ours") == result["text"]
            assert text_of(page, f"{place} .published") == f"published {number:.2f}"
            difference = f"{result['difference']:+.2f}".replace("-", MINUS)
            if difference[1:] == "0.00":
                assert text_of(page, f"{place} .difference") == "0.00 %"
            else:
                word = "worse" if result["difference"] > 0 else "better"
                assert text_of(page, f"{place} .difference") == f"{difference} % {word}"
                assert word in one(page, f"{place} .difference").get_attribute("class")
            same = result["rank"] == result["published_rank"]
            rank = f"rank {result['rank']}, " + ("as published" if same else f"published {result['published_rank']}")
            assert text_of(page, f"{place} .rank") == rank
            assert ("stale" in one(page, place).get_attribute("class").split()) == result["stale"]
            assert text_of(page, f"{place} .mark") == ("recipe has changed" if result["stale"] else None)
            runs = page.execute_script("return document.querySelectorAll(arguments[0]).length", f"{place} .spark .seed")
            assert runs == len(result["runs"])
            released = page.execute_script(
                "return document.querySelectorAll(arguments[0]).length", f"{place} .spark .released"
            )
            assert released == (cell == "softmax/error")


def test_a_diverged_seed_is_marked(page):
    choose(page, "scale", "small")
    assert "(N/C 1 of 3)" in text_of(page, "[data-cell='hinge/error'] .ours")
    assert len(all_of(page, "[data-cell='hinge/error'] .spark .lost")) == 1
    assert not all_of(page, "[data-cell='softmax/error'] .spark .lost")


def test_verdicts_name_their_scale(page, board):
    for tab, scale in enumerate(("paper", "small")):
        all_of(page, "#table-thesis-2\\.2 [role=tab]")[tab].click()
        chips = [chip.text for chip in all_of(page, "#table-thesis-2\\.2 .claim .chip")]
        for chip, verdict in zip(chips, settled(board["tables"][0], scale), strict=True):
            assert chip.endswith(f"· {scale} scale")
            assert verdict == "changed" or (verdict or "none yet") in chip


def test_filters_by_chapter_verdict_scale_and_title(page):
    assert shown(page) == ["thesis-2.2", "thesis-3.3"]
    choose(page, "chapter", "3")
    assert shown(page) == ["thesis-3.3"]
    assert text_of(page, "#shown") == "1 of 2 tables"
    assert page.current_url.endswith("#chapter=3")
    choose(page, "chapter", "")
    for verdict, scale, tables in (
        ("reversed", "", ["thesis-2.2"]),
        ("reversed", "paper", []),
        ("open", "paper", ["thesis-2.2"]),
        ("none yet", "", ["thesis-3.3"]),
        ("", "small", ["thesis-2.2"]),
    ):
        choose(page, "verdict", verdict)
        choose(page, "scale", scale)
        assert shown(page) == tables, (verdict, scale)
    choose(page, "scale", "")
    one(page, "input[type=search]").send_keys("relu 18")
    assert shown(page) == ["thesis-3.3"]
    one(page, "input[type=search]").send_keys(" no such")
    assert shown(page) == []
    assert one(page, "#nothing").is_displayed()
    one(page, "#nothing button").click()
    assert shown(page) == ["thesis-2.2", "thesis-3.3"]


def test_verdict_filter_opens_the_scale_that_it_was_reached_at(page):
    selected = "#table-thesis-2\\.2 [aria-selected=true] b"
    assert text_of(page, selected) == "paper scale"
    choose(page, "verdict", "reversed")
    assert text_of(page, selected) == "small scale"


def test_the_address_brings_filters_and_a_table_back(page, browser, address):
    browser.get("about:blank")
    load(browser, f"{address}#verdict=held&scale=small&q=mnist", width=1280)
    assert shown(browser) == ["thesis-2.2"]
    assert one(browser, "input[name=verdict][value=held]").is_selected()
    assert one(browser, "input[type=search]").get_attribute("value") == "mnist"
    browser.execute_script("location.hash = 'table=thesis-3.3'")
    wait(browser, lambda: one(browser, "#table-thesis-3\\.3").get_attribute("open"))
    assert shown(browser) == ["thesis-2.2", "thesis-3.3"]
    assert one(browser, "#table-thesis-3\\.3 .cells").is_displayed()
    browser.execute_script("location.hash = 'chapter=no+such'")
    wait(browser, lambda: one(browser, "input[name=chapter][value='']").is_selected())


def test_filters_and_tabs_by_keyboard(page, keys):
    page.execute_script("arguments[0].focus()", one(page, "input[name=chapter][value='']"))
    press(page, keys.ARROW_RIGHT, keys.ARROW_RIGHT)
    assert shown(page) == ["thesis-3.3"]
    press(page, keys.ARROW_LEFT, keys.ARROW_LEFT)
    page.execute_script("arguments[0].focus()", one(page, "[role=tab][aria-selected=true]"))
    press(page, keys.ARROW_RIGHT)
    assert text_of(page, "[aria-selected=true] b") == "small scale"
    press(page, keys.ARROW_RIGHT)
    assert text_of(page, "[aria-selected=true] b") == "paper scale"


def test_a_table_without_results_is_one_line_until_opened(page):
    card = one(page, "#table-thesis-3\\.3")
    assert card.size["height"] < 50
    assert not all_of(page, "#table-thesis-3\\.3 table")
    card.find_element("tag name", "summary").click()
    wait(page, lambda: all_of(page, "#table-thesis-3\\.3 table"))
    assert text_of(page, "#table-thesis-3\\.3 [data-cell='conv/accuracy']") == "80.73"


@pytest.mark.parametrize("by", ["click", "enter"])
def test_a_cell_opens_its_panel_and_gets_the_focus_back(page, board, keys, by):
    choose(page, "scale", "small")
    button = cell_button(page, "softmax/error")
    if by == "click":
        page.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
        button.click()
    else:
        page.execute_script("arguments[0].focus()", button)
        press(page, keys.ENTER)
    dialog = one(page, "dialog")
    assert dialog.is_displayed()
    result = board["tables"][0]["boards"][1]["cells"]["softmax/error"]
    assert text_of(page, "dialog h2") == "Softmax"
    assert "small scale" in dialog.text
    assert text_of(page, "dialog .ours") == result["text"]
    assert text_of(page, "dialog .copyable code") == result["command"]
    assert text_of(page, "dialog .recipe pre") == result["recipe"]
    assert [item.text for item in all_of(page, "dialog .deviations li")] == result["deviations"]
    rows = [
        [cell.text for cell in row.find_elements("css selector", "th, td")] for row in all_of(page, ".runs tbody tr")
    ]
    for row, run in zip(rows, result["runs"], strict=True):
        facts = [run["commit"], run["recipe_hash"], run["data"], run["device"], run["date"]]
        number = [str(run["seed"]), f"{run['value']:.2f}", run["status"], f"{run['steps']:,}", "13 s"]
        assert row == number + facts
    assert len(all_of(page, "dialog .chart .seed")) == 2 * len(result["runs"])  # with the key below
    assert len(all_of(page, "dialog .chart .released")) == 2
    press(page, keys.ESCAPE)
    wait(page, lambda: not dialog.is_displayed())
    assert page.switch_to.active_element == button


def test_released_curve_is_drawn_at_our_steps_alone(page, board):
    choose(page, "scale", "small")
    drawn = one(page, "[data-cell='softmax/error'] .spark .released").get_attribute("d")
    run = board["tables"][0]["boards"][1]["cells"]["softmax/error"]["runs"][0]
    assert len(re.findall("[ML]", drawn)) == len(run["curve"].split())


def test_command_is_copied(page, board, keys):
    choose(page, "scale", "small")
    page.execute_script("arguments[0].click()", cell_button(page, "softmax/error"))
    button = one(page, "dialog .copy")
    button.click()
    wait(page, lambda: button.text == "Copied")
    press(page, keys.ESCAPE)
    one(page, "input[type=search]").send_keys(keys.CONTROL, "v")
    expected = board["tables"][0]["boards"][1]["cells"]["softmax/error"]["command"]
    wait(page, lambda: one(page, "input[type=search]").get_attribute("value") == expected)


def test_phone_scrolls_sideways_inside_a_grid_alone(browser, address):
    browser.get("about:blank")
    page = load(browser, address, width=390)
    fits = "return document.scrollingElement.scrollWidth <= innerWidth && innerWidth === 390"
    assert page.execute_script(fits)
    page.execute_script("for (const card of document.querySelectorAll('.card')) card.open = true")
    wait(page, lambda: all_of(page, "#table-thesis-3\\.3 table"))
    assert page.execute_script(fits)
    page.execute_script("arguments[0].click()", cell_button(page, "softmax/error"))
    inside = "const panel = document.querySelector('dialog'); return panel.scrollWidth <= panel.clientWidth"
    assert page.execute_script(inside) and page.execute_script(fits)
    show(browser, width=1280)


def test_dark_theme_recolours_the_page(page):
    colours = """return ["body", ".card", ".difference.worse"].map((selector) => {
        const style = getComputedStyle(document.querySelector(selector));
        return `${style.backgroundColor} ${style.color}`;
    })"""
    choose(page, "scale", "small")
    light = page.execute_script(colours)
    set_theme(page, "dark")
    assert all(a != b for a, b in zip(light, page.execute_script(colours), strict=True))
    set_theme(page, "light")


def test_hostile_texts_are_inert(board, browser, tmp_path):
    hostile = copy.deepcopy(board)
    first, second = hostile["tables"]
    for table in (first, second):
        table |= {"title": HOSTILE, "note": HOSTILE, "surrogate": HOSTILE, "chapter": HOSTILE, "pictures": [HOSTILE]}
        table["source"]["place"] = table["needs"]["missing"] = HOSTILE
        table["claims"] = [HOSTILE]
    first["rows"][9]["title"] = first["columns"][0]["title"] = HOSTILE
    for found in first["boards"]:
        found["title"] = found["preset"] = HOSTILE
        for ordering in found["orderings"]:
            ordering["says"] = HOSTILE
        cell = found["cells"]["softmax/error"]
        cell |= {"text": HOSTILE, "command": HOSTILE, "recipe": HOSTILE, "deviations": [HOSTILE]}
        cell["runs"][0] |= {"device": HOSTILE, "commit": HOSTILE, "status": HOSTILE}
    browser.get("about:blank")
    page = load(browser, write_page(hostile, tmp_path / "page.html").as_uri(), width=1280)
    page.execute_script("for (const card of document.querySelectorAll('.card')) card.open = true")
    page.execute_script("arguments[0].click()", cell_button(page, "softmax/error"))
    assert text_of(page, ".card h3") == HOSTILE
    assert text_of(page, "dialog .recipe pre") == HOSTILE
    assert page.title == "Scoreboard"
    assert page.execute_script("return document.querySelectorAll('img, main script').length") == 0


def test_nothing_is_logged_as_an_error(browser, page):
    """Stands last, so that errors of the tests before count too."""
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
