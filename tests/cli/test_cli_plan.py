"""`hypersphere plan`: what it prints, that its numbers say what they are, and its errors."""

import json

import pytest

from helpers.command_line import words
from hypersphere.cli.plan import bytes_of, count_of
from hypersphere.cli.terminal import console
from hypersphere.losses import memory_estimate
from hypersphere.losses.plan import MEASURED

LARGE = ("plan", "--classes", "100M", "--gpus", "64")


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setattr(console, "width", 200)


@pytest.mark.parametrize(
    "text", ["100000000", "100e6", "1e8", "100_000_000", "100M", "100m", "0.1G", "0.1b", "100000k", " 100 M "]
)
def test_counts_as_people_write_them(text):
    assert count_of("classes", text) == 100_000_000


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80e9), ("80 gb", 80e9), ("1GiB", 2**30), ("0.5TB", 5e11), ("1.5e3MB", 1.5e9), ("2KiB", 2048)],
)
def test_sizes_as_people_write_them(text, size):
    assert bytes_of("memory", text) == size


def test_json(start):
    done = start(*LARGE, "--json")
    found = json.loads(done.out)
    assert done.code == 0 and done.err == "" and set(found) == {"given", "measured", "modelled"}
    assert (found["given"]["classes"], found["given"]["dim"], found["given"]["batch"]) == (100_000_000, 512, 128)
    assert found["measured"] == {"rate": MEASURED.rate / 1e12, "row": MEASURED.source}
    ways = {way["name"]: way for way in found["modelled"]}
    assert {name: way["fits"] for name, way in ways.items()} == {
        "replicated": False,
        "divided": True,
        "sampled": True,
        "fixed": True,
    }
    memory = memory_estimate(128, 100_000_000, 512, low_precision=True, processes=64)
    assert (
        ways["divided"]["memory"]["total"]
        == memory.total
        == sum(ways["divided"]["memory"][part] for part in ("weights", "gradient", "optimiser", "work"))
    )
    # 8,192 samples and 1,562,500 classes; 63 others, 128 samples of 512 numbers twice, labels, 4 numbers, sizes.
    assert ways["divided"]["head_ms"] == pytest.approx(6 * 8192 * 512 * 1_562_500 / MEASURED.rate * 1e3)
    assert ways["divided"]["exchanged"]["total"] == 63 * (128 * (1024 + 2048 + 8) + 8192 * 16 + 32)
    assert ways["divided"]["exchange_ms"] == pytest.approx(ways["divided"]["exchanged"]["total"] / 50e9 * 1e3)


def test_rate_bandwidth_and_precision(start):
    found = json.loads(start(*LARGE, "--rate", 100, "--bandwidth", 10, "--precision", "fp32", "--json").out)
    divided = found["modelled"][1]
    assert found["given"]["rate"] == 100 and found["measured"] == {}
    assert divided["head_ms"] == pytest.approx(6 * 8192 * 512 * 1_562_500 / 100e12 * 1e3)
    assert divided["exchanged"]["features and labels"] == 63 * 128 * (2048 + 8)
    assert divided["exchange_ms"] == pytest.approx(divided["exchanged"]["total"] / 10e9 * 1e3)
    unknown = json.loads(start(*LARGE, "--precision", "fp32", "--json").out)
    assert {way["head_ms"] for way in unknown["modelled"]} == {None} and "rate" not in unknown["given"]


def test_every_number_says_what_it_is(start):
    done = start(*LARGE)
    lines = done.out.splitlines()
    head = next(place for place, line in enumerate(lines) if line.split()[:1] == ["is"])
    table = lines[head + 1 : lines.index("", head)]
    assert lines[head].split() == ["is", "replicated", "divided", "sampled", "fixed"]
    assert len(table) == 9 and all(" modelled " in line for line in table)
    assert table[0].split() == ["weights,", "GB", "modelled", "204.80", "3.20", "3.20", "3.20"]
    assert table[5].split() == ["fits", "80", "GB", "modelled", "no", "yes", "yes", "yes"]
    text = words(done.out)
    assert text.startswith(
        "A head of 100,000,000 classes, 512 dimensions, on 64 GPUs with 128 samples each (8,192 in all)"
    )
    assert f"Rate: 327 TFLOP/s, measured: {MEASURED.source}." in text and "Bandwidth: 50 GB/s, given or assumed" in text
    assert "replicated (does not fit, 717 GB): each keeps all classes" in text
    assert "sampled (fits): each keeps 1/64 of the classes, with 10 % of the classes a step" in text


def test_one_gpu_has_nothing_to_divide(start):
    done = start("plan", "--classes", "1M", "--memory", "1GB", "--precision", "fp32")
    assert done.code == 0 and "divided" not in done.out and "on 1 GPU with" in done.out
    assert "give --rate" in done.out and " ? " in done.out
    found = json.loads(start("plan", "--classes", "1M", "--memory", "6GiB", "--json").out)["modelled"]
    assert [way["fits"] for way in found] == [False, True, True]  # 7.4 GB of 6.4 GB


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--classes", "many"], "classes must be a whole number such as 1000000, 1e6, 1_000_000 or 1M, got 'many'"),
        (["--classes", "10.5"], "classes must be a whole number such as 1000000, 1e6, 1_000_000 or 1M, got '10.5'"),
        (["--classes", "nan"], "classes must be a whole number such as 1000000, 1e6, 1_000_000 or 1M, got 'nan'"),
        (["--classes", "10GB"], "classes must be a whole number such as 1000000, 1e6, 1_000_000 or 1M, got '10GB'"),
        (
            ["--classes", "1e99999"],
            "classes must be a whole number such as 1000000, 1e6, 1_000_000 or 1M, got '1e99999'",
        ),
        (["--classes", "1e999"], "classes must be at least 1 and at most 1e+15, got 1E+999"),
        (["--classes", "-5"], "classes must be at least 1 and at most 1e+15, got -5"),
        (["--gpus", "0"], "gpus must be at least 1 and at most 1e+15, got 0"),
        (["--memory", "80"], "memory must be a size with its unit, such as 80GB or 80GiB, got '80'"),
        (["--memory", "-1GB"], "memory must be at least 1 and at most 1e+15, got -1000000000"),
        (["--optimiser", "lion"], "optimiser must be one of 'sgd', 'adam', got 'lion'"),
        (["--sample-rate", "0"], "sample_rate must be greater than 0 and at most 1, got 0.0"),
        (["--precision", "fp8"], "precision must be one of 'low', 'fp32', got 'fp8'"),
        (["--rate", "0"], "rate must be greater than 0, got 0.0"),
        (["--rate", "nan"], "rate must be greater than 0, got nan"),
        (["--bandwidth", "inf"], "bandwidth must be greater than 0 and finite, got inf"),
    ],
)
def test_nonsense_is_refused(start, arguments, message):
    done = start("plan", *(["--classes", "10"] if "--classes" not in arguments else []), *arguments)
    assert (done.code, done.out, done.err) == (2, "", f"error: {message}\n")


def test_classes_are_asked_for(start):
    assert start("plan").code == 2
