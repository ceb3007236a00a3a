"""Heads that learn a rotation of fixed class vectors in place of the class weights."""

import copy
import dataclasses
import pickle
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hypersphere as hs
from helpers.precision import float32_products
from hypersphere import recipe
from hypersphere.errors import ArgumentError
from hypersphere.losses import Batch, ClassRotation, losses, memory_estimate
from hypersphere.registry import UnknownNameError
from hypersphere.runs import RunFolder
from hypersphere.sections.regularisers import output_layer
from hypersphere.train import Trainer
from hypersphere.train.optimiser import make_optimiser, parameter_groups

NAMES = [name for name in losses if losses[name].factory.shared_options]  # all but the triplet loss
SETTINGS = {"margin-softmax": {"psi": "additive-angle", "s": 16.0, "m": 0.3}}
D, C = 6, 9
Y = torch.tensor([0, 4, 2, 2, 8, 3, 7])
each_head = pytest.mark.parametrize("name", NAMES)
each_map = pytest.mark.parametrize("name", ["cayley", "exponential", "gram_schmidt", "loewdin", "householder"])
NEWTON = {"method": "newton"}
CPU = torch.device("cpu")


def build(name, dim=D, classes=C, rotation="cayley", dtype=torch.float64, **options):
    """A head with small scales, so that no loss is saturated, and a rotation away from its start."""
    torch.manual_seed(1)
    small = {"s": 4.0} if any(o.name == "s" for o in losses[name].options) and name != "magface" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scales that are small on purpose
        head = losses.create(name, dim, classes, rotation=rotation, **SETTINGS.get(name, {}) | small | options)
    head.to(dtype)
    if isinstance(head.rotation, ClassRotation):
        disturb(head.rotation)
    return head


def disturb(rotation, size=0.3, seed=3):
    noise = torch.randn(rotation.free.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    with torch.no_grad():
        rotation.free += size * noise.to(rotation.free)
        if rotation.carried is not None:
            rotation.carried.copy_(rotation.map.warm_start(rotation.free))


def features(batch=7, dim=D, seed=2, dtype=torch.float64):
    return torch.randn(batch, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def angles(vectors):
    units = vectors.double() / vectors.double().norm(dim=1, keepdim=True)
    return (units @ units.T).clamp(-1, 1).acos()


def cayley(free):
    """R, computed as the series' closed form is written: a product with an inverse."""
    skew = free.triu(1) - free.triu(1).T
    eye = torch.eye(len(free), dtype=free.dtype)
    return (eye + skew) @ torch.linalg.inv(eye - skew)


def learned(head):
    """The plain head of the same kind whose weights are those that this one's act as."""
    plain = copy.deepcopy(head)
    plain.rotation = None
    plain.weight = nn.Parameter(head.weight @ cayley(head.rotation.free.detach()).T)
    return plain


# ------------------------------------------------------------------------------------------------ what it is


@each_head
def test_a_head_is_the_plain_one_with_turned_weights(name):
    head = build(name)
    plain, x = learned(head), features()
    assert not torch.allclose(head.weight, plain.weight, atol=0.1)
    torch.testing.assert_close(head(x, Y), plain(x, Y), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(head.logits(x), plain.logits(x), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(head.cosines(x), plain.cosines(x), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(head.margin_logits(x, Y), plain.margin_logits(x, Y), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(head.class_vectors, plain.class_vectors, rtol=1e-10, atol=1e-10)


@each_head
def test_gradients_by_the_features_are_those_of_the_plain_head(name):
    head = build(name)
    plain, x = learned(head), features().requires_grad_()
    found = torch.autograd.grad(head(x, Y), x)[0]
    torch.testing.assert_close(found, torch.autograd.grad(plain(x, Y), x)[0], rtol=1e-9, atol=1e-9)


@each_head
def test_the_gradient_by_the_rotation_is_that_of_the_turned_weights(name):
    head = build(name)
    head.eval()  # running statistics stay
    plain, x = learned(head), features()
    head(x, Y).backward()
    plain(x, Y).backward()
    # dL/dR = (dL/dW)^T V, through the closed form of R by numeric differences
    by_matrix = plain.weight.grad.T @ head.weight.detach()
    if name == "sphereface-plus":  # the energy of all classes does not change as they turn
        energy = torch.autograd.grad(plain.penalty(Batch.of(x, Y)).mean(), plain.weight)[0]
        by_matrix = (plain.weight.grad - energy).T @ head.weight.detach()
    if head.bias is not None:
        torch.testing.assert_close(head.bias.grad, plain.bias.grad)
    free, step = head.rotation.free.detach(), 1e-6
    for i, j in ((0, 1), (2, 5), (0, D - 1)):
        shift = torch.zeros_like(free)
        shift[i, j] = step
        slope = (cayley(free + shift) - cayley(free - shift)) / (2 * step)
        found, expected = head.rotation.free.grad[i, j].item(), (by_matrix * slope).sum().item()
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-9)
    assert (head.rotation.free.grad.tril() == 0).all()


@pytest.mark.parametrize("path", ["dense", "chunked"])
@pytest.mark.parametrize("name", ["softmax", "cosface", "arcface"])
def test_gradcheck(name, path):
    head, x = build(name, path=path).eval(), features()

    def loss(free, x):
        return torch.func.functional_call(head, {"rotation.free": free}, (x, Y))

    assert torch.autograd.gradcheck(loss, (head.rotation.free.detach().clone().requires_grad_(), x.requires_grad_()))


@pytest.mark.parametrize(("dim", "count"), [(128, 8_128), (512, 130_816), (1024, 523_776)])
def test_published_parameter_counts(dim, count):
    assert hs.orthogonal.create("cayley").free(dim) == count
    if dim == 128:  # ten times fewer than the 128,000 of a learned classifier of 1,000 classes
        head = hs.losses.Softmax(dim, 1000, bias=False, rotation="cayley")
        assert head.rotation.count == count and f"parameters={count}" in repr(head)
        assert sum(p.numel() for p in head.parameters() if p.requires_grad) == dim**2


def test_the_count_does_not_depend_on_the_classes():
    counts = {hs.losses.ArcFace(16, classes, s=64, rotation="cayley").rotation.count for classes in (10, 1000)}
    assert counts == {120}


@each_map
def test_it_begins_as_the_fixed_classifier(name):
    head = hs.losses.CosFace(D, C, s=30, rotation=name)
    torch.testing.assert_close(head.rotation.matrix, torch.eye(D))
    x = features(dtype=torch.float32)
    plain = hs.losses.CosFace(D, C, s=30, frozen=True)
    plain.weight.data.copy_(head.weight)
    torch.testing.assert_close(head(x, Y), plain(x, Y))


@each_map
def test_every_map_turns(name):
    head = build("arcface", rotation=name)
    matrix, x = head.rotation.matrix.detach(), features()
    torch.testing.assert_close(matrix.T @ matrix, torch.eye(D, dtype=torch.float64))
    torch.testing.assert_close(head.class_vectors, head.weight.detach() @ matrix.T)
    torch.testing.assert_close(head.rotation(x).norm(dim=1), x.norm(dim=1))
    head(x, Y).backward()
    assert (head.rotation.free.grad != 0).any()


def test_class_vectors_are_gaussian_and_of_a_length_that_classes_do_not_shrink():
    torch.manual_seed(0)
    for classes in (200, 5000):
        weight = hs.losses.Softmax(64, classes, rotation="cayley").weight
        assert weight.square().sum(1).mean().item() == pytest.approx(2, rel=0.05)
    # a uniform coordinate would have a fourth moment of 9/5, a Gaussian one of 3 in units of the variance squared
    assert (weight**4).mean().item() / weight.square().mean().item() ** 2 == pytest.approx(3, rel=0.03)
    assert not weight.requires_grad


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 8), st.integers(1, 6))
def test_norms_and_angles_stay(seed, dim, classes):
    head = build("softmax", dim, classes)
    disturb(head.rotation, 2.0, seed)
    torch.testing.assert_close(head.class_vectors @ head.class_vectors.T, head.weight @ head.weight.T)
    x = features(4, dim, seed)
    torch.testing.assert_close(head.rotation(x).norm(dim=1), x.norm(dim=1))


# ------------------------------------------------------------------------------------------------ training


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_angles_stay_through_training(kind):
    torch.manual_seed(0)
    head = hs.losses.CosFace(16, 40, s=30, rotation="cayley")
    model = nn.Linear(8, 16)
    before, fixed = angles(head.class_vectors), head.weight.detach().clone()
    start = head.class_vectors.clone()
    parameters = [p for p in (*model.parameters(), *head.parameters()) if p.requires_grad]
    optimiser = kind(parameters, lr=0.05)
    x, y = torch.randn(64, 8), torch.randint(40, (64,))
    for _ in range(50):
        optimiser.zero_grad()
        loss = head(model(x), y)
        loss.backward()
        optimiser.step()
    assert (head.class_vectors - start).norm(dim=1).mean() > 0.1 * start.norm(dim=1).mean()
    assert (angles(head.class_vectors) - before).abs().max() < 1e-5
    assert torch.equal(head.weight, fixed) and head.weight.grad is None and head.weight not in optimiser.state


def test_the_trainers_optimiser_holds_no_state_of_the_classes():
    head, model = hs.losses.Softmax(16, 1000, rotation="cayley"), nn.Linear(3, 16)
    groups = parameter_groups(model, head, recipe.load("digits-softmax").optimiser, CPU)
    optimiser = make_optimiser(groups, recipe.load("digits-softmax").optimiser)
    held = sum(value.numel() for state in optimiser.state.values() for value in state.values() if value.dim())
    assert held == 16 * 3 + 16 + 16 * 16 + 1000  # the model, the rotation and the biases
    assert head.weight not in optimiser.state


@pytest.mark.parametrize("path", ["dense", "chunked"])
@pytest.mark.parametrize("extra", [{}, {"sample_rate": 0.5}, {"label_smoothing": 0.1}])
def test_the_fixed_weights_get_no_gradient(path, extra):
    head = build("cosface", path=path, **extra)
    head(features(), Y).backward()
    assert head.weight.grad is None and head.rotation.free.grad.abs().sum() > 0


def test_the_energy_of_the_head_is_a_constant():
    head = build("softmax")
    energy = hs.energy.create("mhe")
    assert [neurons.constant for neurons in output_layer(head)] == [True]
    assert energy(output_layer(head)) == 0 and energy(output_layer(learned(head))) > 0.1
    found = [hs.energy.report(output_layer(each), energy).rows[0].energy for each in (head, learned(head))]
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_recipe_trains_it(tmp_path):
    overrides = ["loss.rotation=cayley", "train.steps=6", "train.tensorboard=false", "data.batch_size=64"]
    overrides += ["regularisers=[{name: mhe, weight: 0.1, target: all}]", "train.ema=0.9", "loss.bias=false"]
    chosen = recipe.load("digits-softmax", overrides)
    run = Trainer(chosen, RunFolder.create(tmp_path / "run", chosen, CPU), CPU)
    fixed, before = run.head.weight.clone(), angles(run.head.class_vectors)
    run.fit()
    assert torch.equal(run.head.weight, fixed)
    assert (run.head.rotation.free != 0).any()
    assert (angles(run.head.class_vectors) - before).abs().max() < 1e-5
    outputs = run.outputs()  # by running averages of the parameters, of which the rotation is one
    assert (angles(outputs.weight) - before).abs().max() < 1e-5
    torch.testing.assert_close(outputs.features @ outputs.weight.T, outputs.logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(outputs.weight, run.head.class_vectors, atol=1e-3)


def test_recipes_refuse_unknown_maps():
    with pytest.raises(recipe.RecipeError, match=r"loss unknown orthogonal map 'caley'. Did you mean 'cayley'"):
        recipe.load("digits-softmax", ["loss.rotation=caley"])
    with pytest.raises(recipe.RecipeError, match=r"loss.rotation should be"):
        recipe.load("digits-softmax", ["loss.rotation={}"])


def test_recipes_without_it_keep_their_hash():
    assert recipe.load("digits-softmax").hash == "53c7b0c2b0df"  # of results that were recorded without the option
    assert recipe.load("digits-softmax", ["loss.rotation=cayley"]).hash != recipe.load("digits-softmax").hash


# ------------------------------------------------------------------------------------------------ state and edges


def test_state_dict_round_trip():
    head = build("arcface")
    other = losses.create("arcface", D, C, rotation="cayley", s=4.0).double()
    other.load_state_dict(head.state_dict())
    x = features()
    assert torch.equal(head(x, Y), other(x, Y)) and torch.equal(head.class_vectors, other.class_vectors)
    again = pickle.loads(pickle.dumps(head))
    assert torch.equal(head(x, Y), again(x, Y)) and torch.equal(copy.deepcopy(head)(x, Y), head(x, Y))


@pytest.mark.parametrize("map", [{"name": "cayley"}, {"name": "gram_schmidt"}], ids=lambda map: map["name"])
def test_a_map_that_starts_warm_from_its_last_step(map):
    """Refined from step to step by products alone, it trains as the one that is computed anew."""
    heads = [build("cosface", rotation=ClassRotation(D, hs.orthogonal.create(**map, **o))) for o in ({}, NEWTON)]
    assert heads[1].rotation.carried is not None and "rotation.carried" in heads[1].state_dict()
    optimisers = [torch.optim.SGD([head.rotation.free], lr=0.003) for head in heads]
    start = heads[0].class_vectors
    for step in range(30):
        x = features(seed=step)
        for head, optimiser in zip(heads, optimisers, strict=True):
            optimiser.zero_grad()
            (head(x, Y) + head(x.flip(0), Y)).backward()  # two calls before one backward pass
            optimiser.step()
    assert (heads[0].class_vectors - start).abs().max() > 0.02
    torch.testing.assert_close(heads[1].rotation.free, heads[0].rotation.free, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(heads[1].class_vectors, heads[0].class_vectors, rtol=1e-6, atol=1e-6)
    carried = heads[1].rotation.carried.clone()
    heads[1].eval()(x, Y)
    assert torch.equal(heads[1].rotation.carried, carried)


def test_a_module_of_ones_own_is_the_same():
    torch.manual_seed(1)
    turn = ClassRotation(D, hs.orthogonal.create("cayley"))
    head = hs.losses.CosFace(D, C, s=30, rotation=turn)
    assert head.rotation is turn and not head.weight.requires_grad
    assert "frozen" not in repr(head)


def test_centres_and_added_classes():
    head = build("cosface")
    x, y = features(C, seed=8), torch.arange(C)
    head.init_centres(x, y)
    torch.testing.assert_close(head.cosines(x).diagonal(), torch.ones(C, dtype=torch.float64))
    units = x / x.norm(dim=1, keepdim=True)
    vectors = head.class_vectors
    torch.testing.assert_close(vectors / vectors.norm(dim=1, keepdim=True), units)
    before = head.logits(x).detach()
    head.add_classes(300)
    assert not head.weight.requires_grad and head.weight.shape == (C + 300, D)
    torch.testing.assert_close(head.logits(x)[:, :C], before)
    added = head.weight[C:].detach()
    assert (added**4).mean() / added.square().mean() ** 2 > 2.5  # Gaussian, 9/5 if uniform


def test_several_centres():
    head = build("subcenter-arcface", k=2)
    plain, x = learned(head), features()
    torch.testing.assert_close(head.dominant_weight(x, Y), plain.dominant_weight(x, Y))
    assert torch.equal(head.clean(x, Y), plain.clean(x, Y))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit(dtype):
    head = build("cosface", dtype=torch.float32)
    wide, x = copy.deepcopy(head), features(dtype=dtype)
    x[0] = 0
    head.to(dtype)
    assert head.rotation.matrix.dtype == torch.float32 and head.class_vectors.dtype == dtype
    matrix = head.rotation.matrix.detach().double()
    torch.testing.assert_close(matrix.T @ matrix, torch.eye(D, dtype=torch.float64), rtol=0, atol=1e-5)
    loss = head(x.requires_grad_(), Y)
    assert loss.dtype == torch.float32
    loss.backward()
    assert x.grad.isfinite().all() and head.rotation.free.grad.isfinite().all()
    torch.testing.assert_close(loss, wide(x.float(), Y), rtol=2e-2, atol=2e-2)


def test_autocast_changes_nothing():
    head, x = build("cosface", dtype=torch.float32), features(dtype=torch.float32)
    matrix, loss, logits, vectors = head.rotation.matrix, head(x, Y), head.logits(x), head.class_vectors
    turned = x @ matrix
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(head.rotation.matrix, matrix) and torch.equal(head.rotation(x), turned)
        assert torch.equal(head.logits(x), logits) and torch.equal(head.class_vectors, vectors)
        torch.testing.assert_close(head(x, Y), loss)


def test_edges():
    head = build("softmax", 1, 1)
    assert head(features(3, 1), torch.zeros(3, dtype=torch.int64)).item() == 0 and head.rotation.count == 0
    head = build("cosface", 2, 3)
    strided = features(4, 4)[:, ::2]
    torch.testing.assert_close(head.logits(strided), head.logits(strided.contiguous()))
    assert head(features(0, 2), torch.zeros(0, dtype=torch.int64)) == 0
    assert (head.logits(torch.zeros(2, 2, dtype=torch.float64)) == 0).all()
    # opposite class vectors stay opposite, equal ones equal
    head.weight.data[1], head.weight.data[2] = -head.weight.data[0], head.weight.data[0]
    vectors = head.class_vectors
    torch.testing.assert_close(vectors[1], -vectors[0])
    assert torch.equal(vectors[2], vectors[0])


def test_what_is_refused():
    with pytest.raises(UnknownNameError, match=r"^unknown orthogonal map 'caley'. Did you mean 'cayley'"):
        hs.losses.CosFace(D, C, s=30, rotation="caley")
    with pytest.raises(ArgumentError, match=r"^rotation must be the name of an orthogonal map or a module, got 3"):
        hs.losses.CosFace(D, C, s=30, rotation=3)
    with pytest.raises(ArgumentError, match=r"^rotation must be an orthogonal map, got Unconstrained"):
        hs.losses.CosFace(D, C, s=30, rotation="unconstrained")
    with pytest.raises(ArgumentError, match=r"^rotation must have dimension 6, got 5"):
        hs.losses.CosFace(D, C, s=30, rotation=ClassRotation(5))
    with pytest.raises(ArgumentError, match=r"^dim must be"):
        ClassRotation(0)
    with pytest.raises(ArgumentError, match=r"^rotation is not an option of 'triplet'"):
        hs.losses.TripletLoss(D, C, rotation="cayley")


def test_memory():
    plain, turned = (memory_estimate(1024, 1_000_000, 512, rotation=rotation) for rotation in (False, True))
    assert turned.gradient == turned.optimiser == 4 * 512**2
    assert turned.weights - plain.weights == 4 * 512**2 and turned.work == plain.work
    assert turned.total < 0.4 * plain.total
    sampled = memory_estimate(1024, 1_000_000, 512, rotation=True, sample_rate=0.1)
    assert sampled.gradient == 4 * 512**2 and sampled.work < memory_estimate(1024, 1_000_000, 512, sample_rate=0.1).work


# ------------------------------------------------------------------------------------------------ many classes


def accuracy(dim, rotation, seed):
    """Test accuracy of a small network on 500 Gaussian clusters, with learned class weights or a learned rotation."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(500, 64, generator=generator)
    labels = torch.arange(500).repeat(20)
    train, test = (centres[labels] + 0.7 * torch.randn(len(labels), 64, generator=generator) for _ in range(2))
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, dim))
    head = hs.losses.Softmax(dim, 500, bias=False, rotation=rotation)
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad) if rotation is None else head.rotation.count
    assert trained == {None: 500 * dim, "cayley": dim * (dim - 1) // 2}[rotation]
    optimiser = torch.optim.Adam([p for p in (*model.parameters(), *head.parameters()) if p.requires_grad], lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 400)
    for _ in range(400):
        rows = torch.randint(len(labels), (256,), generator=generator)
        optimiser.zero_grad()
        head(model(train[rows]), labels[rows]).backward()
        optimiser.step()
        schedule.step()
    head.eval()
    with torch.no_grad():
        return (head.logits(model(test)).argmax(1) == labels).double().mean().item()


@pytest.mark.slow
def test_with_many_dimensions_a_rotation_is_as_good_as_learned_weights():
    gaps = {
        dim: sum(accuracy(dim, None, seed) - accuracy(dim, "cayley", seed) for seed in (0, 1)) / 2 for dim in (16, 128)
    }
    assert gaps[16] > 0.1, gaps
    assert -0.02 < gaps[128] < 0.02, gaps


# ------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGPU:
    def case(self, path, **options):
        """A head, a batch, and loss, features' and rotation's gradient of the plain head in float64."""
        head = build("cosface", 64, 3000, s=30.0, path=path, dtype=torch.float32, **options).cuda()
        x, y = 4 * features(48, 64, dtype=torch.float32).cuda(), torch.arange(0, 3000, 62, device="cuda")[:48]
        wide = copy.deepcopy(head).cpu().double()
        wide.spec = dataclasses.replace(wide.spec, path="dense")
        leaf = x.cpu().double().requires_grad_()
        loss = wide(leaf, y.cpu())
        loss.backward()
        return head, x, y, (loss.detach(), leaf.grad, wide.rotation.free.grad)

    def step(self, head, x, y, low):
        leaf = x.clone().requires_grad_()
        head.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=low, cache_enabled=False):
            loss = head(leaf, y)
        loss.backward()
        return loss.detach(), leaf.grad, head.rotation.free.grad

    @staticmethod
    def assert_near(found, wanted, tolerance):
        for got, want in zip(found, wanted, strict=True):
            assert (got.cpu().double() - want).norm() <= tolerance * want.norm()

    @pytest.mark.parametrize("low", [False, True])
    @pytest.mark.parametrize("path", ["dense", "compiled", "chunked"])
    def test_every_path_agrees_with_float64(self, path, low):
        head, x, y, wanted = self.case(path)
        self.step(head, x, y, low)  # the first call may set things up
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = self.step(head, x, y, low)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        self.assert_near(found, wanted, 2e-2 if low else 1e-4)
        assert head.weight.grad is None

    @pytest.mark.parametrize("path", ["dense", "chunked"])
    def test_a_step_is_captured(self, path, monkeypatch):
        monkeypatch.setattr(hs.losses.head, "CAN_COMPILE", False)
        head, x, y, wanted = self.case(path)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step(head, x, y, False)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = self.step(head, x, y, False)
        graph.replay()
        self.assert_near(found, wanted, 1e-4)

    def test_products_are_never_rounded_to_tf32(self):
        head, x, _, _ = self.case("dense")
        matrix = head.rotation.matrix.detach().double()
        with float32_products("high"):
            found = head.rotation(x)
        assert (found.double() - x.double() @ matrix).abs().max() < 2e-5
        assert hs.orthogonal.orthogonality_error(head.rotation.matrix) < 1e-6

    def test_no_gradient_of_the_size_of_the_classes_is_ever_held(self):
        head = hs.losses.CosFace(64, 1_000_000, s=64, rotation="cayley", path="chunked").cuda()
        x, y = torch.randn(64, 64, device="cuda", requires_grad=True), torch.arange(64, device="cuda")
        head(x, y).backward()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        head(x, y).backward()
        assert torch.cuda.max_memory_allocated() - before < 0.8 * head.weight.numel() * 4
