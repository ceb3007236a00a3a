"""What an evaluation says of its metrics is what tables, pages, curves and recorded rows show."""

from __future__ import annotations

import json

import pytest
import torch
from plotly.offline import get_plotlyjs

from helpers.paths import NET
from hypersphere import recipe, report, results
from hypersphere.cli.runs import show_metrics
from hypersphere.errors import ArgumentError
from hypersphere.evaluate import MISSING, Metric, Outputs, columns, details, evaluations, measure, table
from hypersphere.report import figures
from hypersphere.report.page import render
from hypersphere.runs import RunFolder


@pytest.fixture
def own():
    """An evaluation of a user's own that declares one of its metrics, a family, and not the third."""
    declared = (
        Metric("sureness", "Sure answers", unit="%", better="higher", curve="Answers above 0.9 (%)", help="How many."),
        Metric("sureness/*", "Sure answers of {}", unit="%", detail=True),
    )

    @evaluations.register("own-check", metrics=declared)
    def own_check(outputs: Outputs) -> dict[str, float]:
        return {"sureness": 0.125, "sureness/left": 0.5, "my_score": 12.3456}

    yield own_check
    evaluations.remove("own-check")


@pytest.fixture
def run(own, tmp_path):
    """A finished run that was evaluated by it three times."""
    eye = torch.eye(3)
    found = measure(Outputs(eye, eye, torch.arange(3), eye), ["classification", "own-check"])
    plan = recipe.load("digits-softmax", [])
    folder = RunFolder.create(tmp_path / "run", plan, torch.device("cpu"))
    folder.write_facts(status="finished", finished="2025-03-04T05:06:07+00:00", version="9.9")
    (folder.path / "evaluation.json").write_text(json.dumps({"step": 3, "metrics": found}))
    rows = [{"step": step, "split": "train", "total": 1.0 / step, "lr": 0.1} for step in (1, 2, 3)]
    rows += [{"step": step, "split": "test", **found} for step in (1, 2, 3)]
    folder.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_table_shows_what_is_declared_and_what_is_not(own):
    rows = [{"accuracy": 0.5, "sureness": 0.25, "my_score": 3.0}, {"sureness": 0.5, "my_score": 12.3456}]
    assert [metric.title for metric in columns(rows).values()] == ["Test accuracy", "Sure answers", "My score"]
    assert [[cell.text for cell in row] for row in table(rows)] == [
        ["50.00%", "25.00%", "3"],
        [MISSING, "50.00%", "12.35"],
    ]
    assert [[cell.best for cell in row] for row in table(rows)] == [[False, False, False], [False, True, False]]


def test_details_have_a_table_of_their_own(own):
    rows = [{"accuracy": 0.5, "sureness/left": 0.25, "cross_entropy": 1.0}, {"sureness/right": 0.5}]
    assert [metric.title for metric in columns(rows).values()] == ["Test accuracy"]
    titles = [metric.title for metric in columns(rows, detail=True).values()]
    assert titles == ["Sure answers of left", "Test cross-entropy", "Sure answers of right"]
    assert [cell.text for cell in table(rows, detail=True)[0]] == ["25.00%", "1.0000", MISSING]


def test_large_families_are_one_line_of_details():
    few = {f"accuracy/{index}": index / 10 for index in range(8)}
    assert len(details([few])) == 8 and details([few])[3] == ("Test accuracy of class 3", ["30.00%"])
    many = few | {"accuracy/8": 0.8}
    assert details([many, {"accuracy/2": 0.25}, {"accuracy": 1.0}]) == [
        ("Test accuracy of class *", ["0.00% to 80.00% (9)", "25.00% to 25.00% (1)", MISSING])
    ]
    assert details([]) == []


def test_the_page_the_curves_the_rows_and_the_terminal_say_it(run, capsys):
    page = report.build([run.path]).replace(get_plotlyjs(), "")
    for text in (
        ">Sure answers<",
        ">12.50%<",
        ">My score<",
        ">12.35<",
        ">Sure answers of left<",
        ">Test cross-entropy<",
    ):
        assert text in page
    for title in ("Answers above 0.9 (%)", "Sure answers of left (%)", "My score", "Test accuracy (%)"):
        assert f"<h3>{title}</h3>" in page
    rows = results.rows_from_runs([run], "Own")
    assert {(row.metric, row.unit, row.mean) for row in rows} == {
        ("Test accuracy", "%", 100.0),
        ("Sure answers", "%", 12.5),
        ("My score", "", 12.3456),
    }
    more = results.rows_from_runs([run], "Own", details=["cross_entropy"])
    assert [row.metric for row in more] == [*(row.metric for row in rows), "Test cross-entropy"]
    with pytest.raises(ArgumentError, match=r"^details must be one of "):
        results.rows_from_runs([run], "Own", details=["crossentropy"])
    show_metrics([run])
    shown = capsys.readouterr().out
    for text in ("Sure answers", "12.50%", "My score", "12.35", "Sure answers of left: 50.00%", "Test cross-entropy: "):
        assert text in shown


def test_curves_of_shares_are_in_percent(run):
    drawn = {curve.title: curve.figure["data"][0]["y"] for curve in figures.curves([report.load_run(run.path)], ["a"])}
    assert drawn["Answers above 0.9 (%)"] == [12.5] * 3 and drawn["Sure answers of left (%)"] == [50.0] * 3
    assert drawn["My score"] == [12.346] * 3 and drawn["Test accuracy (%)"] == [100.0] * 3
    assert {"Total loss", "Learning rate"} < set(drawn)


def test_runs_without_details_have_no_table_of_them(run):
    (run.path / "evaluation.json").write_text(json.dumps({"step": 3, "metrics": {"accuracy": 0.5}}))
    assert "Further metrics" not in render([report.load_run(run.path)])


def test_a_removed_evaluation_takes_its_declarations_along():
    @evaluations.register("Passing_By", metrics=(Metric("passing", "In passing", unit="%"),))
    def passing(outputs: Outputs) -> dict[str, float]:
        return {"passing": 1.0}

    assert evaluations.metric("passing").title == "In passing"
    evaluations.remove("passing-by")
    assert evaluations.metric("passing").title == "Passing" and evaluations.metric("passing").unit == ""
    evaluations.register("passing-by")(passing)
    assert evaluations.metric("passing").unit == ""
    evaluations.remove("passing-by")


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("accuracy", "Test accuracy"),
        ("accuracy/3", "Test accuracy of class 3"),
        ("accuracy_fgsm", "Under FGSM"),
        ("accuracy_transfer_fgsm", "Under FGSM, transfer"),
        ("accuracy_recalibrated", "Test accuracy, statistics anew"),
        ("rare_accuracy", "Rare-class accuracy"),
        ("few_shot_20", "20-shot accuracy"),
        ("few_shot_20_interval", "20-shot accuracy, interval"),
        ("deepfool_l2", "Median smallest change, l2"),
        ("of_nobody/3", "Of nobody/3"),
    ],
)
def test_the_declaration_that_says_most_of_a_name_is_taken(name, title):
    assert evaluations.metric(name).title == title
    assert evaluations.metric(name).name == name


def test_what_recipes_measure_is_declared_and_shown():
    """The names in the golden trajectories are all that the evaluations of the embedded recipes give."""
    emitted: set[str] = set()
    for file in (NET / "golden").glob("run-*.json"):
        golden = json.loads(file.read_text())
        emitted |= golden["evaluation"].keys()
        emitted |= {key for row in golden["rows"] if row["split"] == "test" for key in row} - {"step", "split"}
    assert len(emitted) > 40
    declared = evaluations.metrics()
    assert {name for name in emitted if not any(metric.of(name) for metric in declared)} == set()
    row = dict.fromkeys(emitted, 0.5)
    assert columns([row]).keys() | columns([row], detail=True).keys() == emitted
    shown = {"rare_accuracy", "accuracy_recalibrated", "accuracy", "mean_angle", "few_shot_1", "accuracy_strongest"}
    assert shown <= columns([row]).keys()


def test_every_share_is_declared_in_percent():
    """Accuracies and error rates are shares wherever they are declared."""
    for metric in evaluations.metrics():
        if metric.name.startswith(("accuracy", "few_shot")) or "accuracy" in metric.name or metric.name.endswith("eer"):
            assert metric.unit == "%" and metric.scale == 100 and metric.form.endswith("%")
            assert metric.curve.endswith("(%)")


def test_no_two_declarations_have_one_title():
    titles = [metric.title for metric in evaluations.metrics()]
    assert len(titles) == len(set(titles))


@pytest.mark.parametrize("options", [{"unit": "%", "form": ".2f"}, {"form": ".2%"}, {"unit": "°", "form": ".1%"}])
def test_a_format_that_does_not_fit_the_unit_is_refused(options):
    with pytest.raises(ArgumentError, match=r"^form must end in % for shares and for nothing else"):
        Metric("one", "One", **options)
