"""Checkpoints of Hugging Face's peft in and out: against peft itself, and against its formulas where it needs CUDA."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

from hypersphere.errors import ArgumentError
from hypersphere.orthogonal.adapters import adapt, constrain, list_adapters, merge_adapter, unload
from hypersphere.orthogonal.peft import from_peft, to_peft

pytest.importorskip("safetensors")
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # blocks that peft adjusts, its extension that is missing
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.point = nn.Conv2d(6, 8, 1)
        self.one = nn.Linear(8, 12)
        self.two = nn.Linear(12, 12, bias=False)
        self.head = nn.Linear(12, 3)
        for p in self.parameters():
            p.data *= 2

    def forward(self, x):
        x = self.point(self.conv(x).relu()).amax((2, 3))
        return self.head(self.two(self.one(x)))


@pytest.fixture
def peft():
    return pytest.importorskip("peft")


def images():
    return torch.randn(5, 4, 9, 9)


def stir(model):
    for name, p in model.named_parameters():
        if "oft_R" in name:
            nn.init.normal_(p, std=0.1)
        elif "boft_s" in name:
            nn.init.uniform_(p, 0.5, 2.0)
        elif "adapters" in name:
            nn.init.normal_(p, std=0.1)
        elif p.requires_grad:
            nn.init.normal_(p, std=0.3)
    return model


OFT = [
    {"oft_block_size": 4},
    {"oft_block_size": 4, "use_cayley_neumann": False},
    {"r": 2, "oft_block_size": 0, "use_cayley_neumann": False},
    {"oft_block_size": 5},  # adjusted to the nearest divisor
    {"oft_block_size": 6, "num_cayley_neumann_terms": 3},
    {"oft_block_size": 6, "num_cayley_neumann_terms": 4},
    {"oft_block_size": 6, "num_cayley_neumann_terms": 7},
    {"oft_block_size": 4, "block_share": True},
    {"oft_block_size": 4, "coft": True, "eps": 0.3},
    {"oft_block_size": 4, "coft": True, "eps": 0.3, "block_share": True, "use_cayley_neumann": False},
    {"oft_block_size": 4, "modules_to_save": ["head"]},
    {"oft_block_size": 4, "bias": "oft_only"},
]
BOFT = [
    {"boft_block_size": 2},
    {"boft_block_size": 0, "boft_block_num": 2},
    {"boft_block_size": 4, "bias": "boft_only", "modules_to_save": ["head"]},
    {"boft_block_size": 4, "boft_n_butterfly_factor": 2},  # one factor all the same, without CUDA
]
LAYERS = ["conv", "point", "one", "two"]


def wrapped(peft, model, settings):
    kind = peft.BOFTConfig if any(key.startswith("boft") for key in settings) else peft.OFTConfig
    return stir(peft.get_peft_model(copy.deepcopy(model), kind(target_modules=LAYERS, **settings)))


class TestImport:
    @pytest.mark.parametrize("settings", [*OFT, *BOFT], ids=str)
    def test_outputs_are_those_that_peft_merges(self, peft, settings, tmp_path):
        model, x = Net(), images()
        if settings.get("boft_block_size") == 4:  # peft adjusts no block of BOFT, and 6 is not divisible
            model.point = nn.Conv2d(6, 8, 2, padding=1)
        theirs = wrapped(peft, model, settings)
        theirs.save_pretrained(tmp_path)
        expected = theirs.merge_and_unload()(x)
        base = model(x)
        from_peft(model, tmp_path, name="theirs")
        found = model(x)
        assert (expected - base).abs().max() > 0.1
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
        assert list_adapters(model)["theirs"]["targets"] == LAYERS
        torch.testing.assert_close(unload(merge_adapter(model))(x), expected, rtol=1e-5, atol=2e-5)

    def test_the_two_ways_of_peft_are_transposes(self, peft, tmp_path):
        """The same numbers under the other setting would be the inverse rotation."""
        model = nn.Sequential(nn.Linear(8, 8, bias=False))
        nn.init.eye_(model[0].weight)
        found = []
        for series in (True, False):
            config = peft.OFTConfig(
                target_modules=["0"], oft_block_size=4, use_cayley_neumann=series, num_cayley_neumann_terms=20
            )
            theirs = peft.get_peft_model(copy.deepcopy(model), config)
            torch.manual_seed(1)
            stir(theirs)
            theirs.save_pretrained(tmp_path)
            found.append(from_peft(copy.deepcopy(model), tmp_path)[0].weight.detach())
            merged = theirs.merge_and_unload()[0].weight
            torch.testing.assert_close(found[-1], merged, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(found[0], found[1].mT, rtol=1e-5, atol=2e-5)
        assert (found[0] - found[1]).abs().max() > 0.1

    def test_tensors_and_objects(self, peft):
        model, x = Net(), images()
        theirs = wrapped(peft, model, OFT[0])
        state, config = peft.get_peft_model_state_dict(theirs), theirs.peft_config["default"]
        expected = theirs.merge_and_unload()(x)
        torch.testing.assert_close(from_peft(model, state, config)(x), expected, rtol=1e-5, atol=2e-5)

    def test_not_merged_theirs_differ_on_kernels(self, peft):
        """Why outputs are compared with merged ones: theirs changes outputs at the identity, ours does not."""
        model, x = Net(), images()
        base = model(x)
        theirs = peft.get_peft_model(copy.deepcopy(model), peft.OFTConfig(target_modules=["conv"], oft_block_size=4))
        assert (theirs(x) - base).abs().max() > 0.1
        torch.testing.assert_close(adapt(model, targets="conv", block_size=4)(x), base, rtol=1e-6, atol=1e-6)

    def test_transformers(self, peft, tmp_path):
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(
            vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=48,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).eval()
        ids = torch.randint(50, (2, 7))
        theirs = stir(
            peft.get_peft_model(
                copy.deepcopy(model), peft.OFTConfig(task_type="CAUSAL_LM", target_modules="all-linear")
            )
        ).eval()
        theirs.save_pretrained(tmp_path)
        for input_centric in (None, True):
            from_peft(model, tmp_path, input_centric=input_centric)
            torch.testing.assert_close(model(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-5)
            unload(model)


def butterfly_matrix(A):
    """The rotation of BOFT by its formulas: permutation matrices, block diagonals, and products of all of them."""
    factors, count, b, _ = A.shape
    d = count * b
    R = torch.eye(d, dtype=A.dtype)
    for level in range(factors):
        size, half = b * 2**level, b // 2  # groups, in which even half-blocks come first, then odd ones
        order = []
        for start in range(0, d, size):
            halves = list(range(size // half))
            for h in halves[::2] + halves[1::2]:
                order += range(start + h * half, start + (h + 1) * half)
        P = torch.eye(d, dtype=A.dtype)[order]
        blocks = []
        for matrix in A[level]:
            Q, eye = (matrix - matrix.mT) / 2, torch.eye(b, dtype=A.dtype)
            blocks.append((eye - Q) @ torch.linalg.inv(eye + Q))
        R = P @ torch.block_diag(*blocks) @ P.mT @ R
    return R


def boft_state(layers, factors, b):
    state = {}
    for name, layer in layers.items():
        d = layer.weight[0].numel()
        state[f"base_model.model.{name}.boft_R"] = 0.3 * torch.randn(factors, d // b, b, b)
        scale = torch.rand(1, layer.weight.shape[0]) + 0.5
        state[f"base_model.model.{name}.boft_s"] = scale if layer.weight.dim() == 4 else scale.mT
    return state


class TestButterflies:
    @pytest.mark.parametrize(("factors", "b"), [(1, 4), (2, 4), (3, 2), (4, 2)])
    def test_against_the_formulas(self, factors, b):
        model = nn.Sequential(nn.Conv2d(4, 6, 2), nn.Flatten(), nn.Linear(96, 16), nn.ReLU(), nn.Linear(16, 5))
        layers = {"0": model[0], "4": model[4]}
        state = boft_state(layers, factors, b)
        expected = {}
        for name, layer in layers.items():
            R = butterfly_matrix(state[f"base_model.model.{name}.boft_R"].double())
            scale = state[f"base_model.model.{name}.boft_s"].double().view(-1, 1)
            expected[name] = scale * (layer.weight.detach().double().flatten(1) @ R.mT)
        config = {"peft_type": "BOFT", "boft_block_size": b, "boft_n_butterfly_factor": factors}
        from_peft(model, state, config)
        for name, layer in layers.items():
            torch.testing.assert_close(layer.weight.double().flatten(1), expected[name], rtol=1e-5, atol=2e-5)

    def test_their_permutations_and_blocks(self, peft, monkeypatch):
        """Their own code for several factors, with the compiled part replaced by what it computes."""
        from peft.tuners.boft import layer as theirs

        class Blocks:
            @staticmethod
            def apply(x):
                return torch.stack([torch.block_diag(*factor) for factor in x])

        monkeypatch.setattr(theirs, "get_fbd_cuda", lambda: True)
        monkeypatch.setattr(theirs, "FastBlockDiag", Blocks)
        model = nn.Sequential(nn.Linear(16, 5), nn.ReLU(), nn.Conv2d(4, 3, 2))
        config = peft.BOFTConfig(target_modules=["0", "2"], boft_block_size=2, boft_n_butterfly_factor=4)
        wrapped = stir(peft.get_peft_model(copy.deepcopy(model), config))
        state = peft.get_peft_model_state_dict(wrapped)
        merged = wrapped.merge_and_unload()
        from_peft(model, state, config)
        for place in (0, 2):
            torch.testing.assert_close(model[place].weight, merged[place].weight, rtol=1e-5, atol=2e-5)

    @pytest.mark.parametrize("factors", [1, 3])
    def test_round_trip(self, factors, tmp_path):
        model, x = Net(), images()
        settings = {"targets": ["one", "point"], "block_size": 2, "butterfly": factors, "rescale": True}
        if factors == 3:
            settings["targets"] = ["one"]
        stir(adapt(model, "boft", **settings))
        out = model(x)
        to_peft(model, tmp_path)
        again = from_peft(unload(model), tmp_path)
        torch.testing.assert_close(again(x), out, rtol=1e-6, atol=1e-6)


OURS = [
    {"block_size": 4},
    {"block_size": 4, "cayley": "neumann", "terms": 2},
    {"block_size": 4, "cayley": "neumann", "terms": 3, "share_blocks": True},
    {"blocks": 2, "bias": "adapter", "train": "head"},
    {"block_size": 5},
    {"block_size": 4, "coft": True, "eps": 0.2, "input_centric": True},
    {"block_size": 2, "rescale": True},
    {"method": "boft", "block_size": 2, "butterfly": 1, "bias": "adapter", "train": "head"},
    {"method": "boft", "blocks": 2, "butterfly": 1, "rescale": True},
]


class TestExport:
    @pytest.mark.parametrize("settings", OURS, ids=str)
    def test_peft_merges_what_we_compute(self, peft, settings, tmp_path):
        model, x = Net(), images()
        plain = copy.deepcopy(model)
        stir(adapt(model, targets=LAYERS, **settings))
        constrain(model)
        out = model(x)
        to_peft(model, tmp_path)
        theirs = peft.PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path)
        torch.testing.assert_close(theirs.merge_and_unload()(x), out, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(from_peft(plain, tmp_path)(x), out, rtol=1e-5, atol=2e-5)

    def test_names_that_end_alike(self, peft, tmp_path):
        model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.ModuleDict({"a": nn.Linear(8, 8), "c": nn.Linear(8, 8)})})
        stir(adapt(model, targets=["a", "b.c"], block_size=4))
        assert list_adapters(model)["default"]["targets"] == ["a", "b.c"]
        to_peft(model, tmp_path)
        other = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.ModuleDict({"a": nn.Linear(8, 8), "c": nn.Linear(8, 8)})})
        theirs = peft.PeftModel.from_pretrained(other, tmp_path)
        adapted = {n for n, m in theirs.get_base_model().named_modules() if hasattr(m, "oft_R")}
        assert adapted == {"a", "b.c"}

    @pytest.mark.parametrize(
        ("layer", "settings", "message"),
        [
            (nn.Conv2d(4, 8, 3, groups=2), {}, "layers that peft can adapt"),
            (nn.Conv2d(4, 8, 3, dilation=2), {}, "layers that peft can adapt"),
            (nn.Conv2d(4, 8, (1, 3)), {}, "layers that peft can adapt"),
            (nn.Conv1d(4, 8, 3), {}, "layers that peft can adapt"),
            (nn.Linear(8, 8), {"cayley": "neumann", "terms": 1}, "2 terms or more"),
            (nn.Linear(8, 8), {"cayley": "neumann", "rescale": True}, "without series"),
            (nn.Linear(8, 8), {"share_blocks": True, "rescale": True}, "without series, shared blocks"),
        ],
        ids=str,
    )
    def test_what_peft_has_not(self, layer, settings, message, tmp_path):
        model = adapt(nn.Sequential(layer, nn.ReLU()), targets="0", block_size=4, **settings)
        with pytest.raises(ArgumentError, match=message):
            to_peft(model, tmp_path)
        assert not list(tmp_path.iterdir())

    def test_single_parameters(self, tmp_path):
        model = adapt(Net(), targets="one", train="head.weight")
        with pytest.raises(ArgumentError, match=r"without head\.bias"):
            to_peft(model, tmp_path)

    def test_blocks_of_several_sizes(self, tmp_path):
        model = adapt(Net(), targets=["one", "two"], block_size=8, rescale=True)
        with pytest.raises(ArgumentError, match=r"same size, got \[6, 8\]"):
            to_peft(model, tmp_path)


class TestUnsupported:
    def config(self, **settings):
        return {"peft_type": "OFT", "r": 0, "oft_block_size": 4, "peft_version": "0.21.2", **settings}

    def state(self):
        return {"base_model.model.one.oft_R.weight": torch.zeros(2, 6)}

    def test_another_method(self):
        with pytest.raises(ArgumentError, match="peft_type LORA"):
            from_peft(Net(), self.state(), self.config(peft_type="LORA"))

    def test_few_terms(self):
        with pytest.raises(ArgumentError, match="num_cayley_neumann_terms of 3 or more, got 2"):
            from_peft(Net(), self.state(), self.config(num_cayley_neumann_terms=2))

    def test_old_files(self, tmp_path):
        with pytest.raises(ArgumentError, match=r"0\.18\.0 or newer.*0\.17\.1"):
            from_peft(Net(), self.state(), self.config(peft_version="0.17.1"))
        from_peft(Net(), self.state(), self.config(peft_version="0.17.1", use_cayley_neumann=False))
        to_peft(adapt(Net(), targets="one", cayley="neumann"), tmp_path)
        config = json.loads((tmp_path / "adapter_config.json").read_text())
        del config["peft_version"]
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(ArgumentError, match="or newer"):
            from_peft(Net(), tmp_path)

    def test_embeddings(self):
        with pytest.raises(ArgumentError, match="oft_embedding_R"):
            from_peft(Net(), {"base_model.model.e.oft_embedding_R.weight": torch.zeros(2, 6)}, self.config())

    def test_tensors_that_do_not_fit(self):
        with pytest.raises(ArgumentError, match=r"got others: one\.free"):
            from_peft(Net(), {"base_model.model.one.oft_R.weight": torch.zeros(3, 6)}, self.config())
        with pytest.raises(ArgumentError, match="got 'elsewhere'"):
            from_peft(Net(), {"base_model.model.elsewhere.oft_R.weight": torch.zeros(2, 6)}, self.config())
        with pytest.raises(ArgumentError, match="must hold tensors of OFT"):
            from_peft(Net(), {"base_model.model.head.weight": torch.zeros(3, 12)}, self.config())

    def test_scales(self):
        state = boft_state({"one": Net().one}, 1, 4)
        state["base_model.model.one.boft_s"][0] = -1
        with pytest.raises(ArgumentError, match="must hold positive factors"):
            from_peft(Net(), state, {"peft_type": "BOFT", "boft_block_size": 4})
        del state["base_model.model.one.boft_s"]
        with pytest.raises(ArgumentError, match="boft_R and boft_s"):
            from_peft(Net(), state, {"peft_type": "BOFT", "boft_block_size": 4})

    def test_folder_and_configuration(self, tmp_path):
        with pytest.raises(ArgumentError, match=r"without adapter_config\.json"):
            from_peft(Net(), tmp_path)
        with pytest.raises(ArgumentError, match="config must be given"):
            from_peft(Net(), self.state())
