r"""The contract of losses: heads whose loss is made of their own parts, with the gradients they promise.

A member's own ``contract`` may declare ``options`` and ``variants`` (to build it with), and what does not hold for
it: ``classes`` (``False`` for losses of something else than classes, of which little is asked then), ``logits``
(``False`` where the loss is more than the cross-entropy of ``margin_logits``), ``target`` (``False`` where the own
class has no target function), ``gradient`` (``False`` where parts of the value count as constants; ``"weights"``
where the gradient by weights alone is that of the value), ``derivative`` (``False`` where the slope of the target is
not that of its value), ``features`` (``False`` where the lengths of features count although the scale is constant),
``rotation``, ``permutation``, ``chunks``, ``single`` (``False`` where samples of a batch do not count by themselves).
"""

from __future__ import annotations

import copy
import pickle
import warnings
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypersphere.errors import ArgumentError
from hypersphere.losses import losses
from hypersphere.testing import common, numeric
from hypersphere.testing.contract import Check, Contract, variants

CONTRACT = Contract("loss", "losses", "hypersphere.losses:losses")
D, C = 6, 5
Y = torch.tensor([0, 4, 2, 2, 1, 3])
THETA = torch.linspace(0, torch.pi, 201, dtype=torch.float64)
INSIDE = torch.linspace(0.0123, 3.13, 41, dtype=torch.float64)


def takes(name: str, option: str) -> bool:
    """Whether a member has an option."""
    return any(o.name == option for o in CONTRACT.entry(name).options)


def build(name: str, classes: int = C, **more: Any) -> Any:
    """The member with the same weights every time, a small scale and exact gradients, where it takes these."""
    return next(iter(members(name, classes, **more)))


def members(name: str, classes: int = C, **more: Any) -> list[Any]:
    """The member with each of the options to be tried, and with ``more``, as far as it takes them."""
    found = []
    for options in variants(CONTRACT, name):
        usual = {"s": 4.0, "gradient": "exact"} | options | more
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of scales that are small on purpose
            found.append(losses.create(name, D, classes, **{k: v for k, v in usual.items() if takes(name, k)}))
    return found


def paths(name: str) -> tuple[dict[str, Any], ...]:
    """Options that choose how the classes are gone through."""
    return ({"path": "dense"}, {"path": "chunked"}) if takes(name, "path") else ({},)


def every(name: str, classes: int = C) -> list[Any]:
    """The members on every path and with every gradient that they take."""
    gradients: tuple[str, ...] = ("exact",)
    if takes(name, "gradient"):
        gradients = ("exact", "cgd", "caffe") if build(name).spec.unit_weights else ("exact", "cgd")
    return [
        head
        for path in paths(name)
        for gradient in gradients
        for head in members(name, classes, gradient=gradient, **path)
    ]


def features(batch: int = 6, seed: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    """Features that are the same every time."""
    return numeric.draw(batch, D, seed=seed, dtype=dtype)


def grads(head: nn.Module, loss: Tensor, x: Tensor) -> dict[str, Tensor]:
    """Gradients by the features and every parameter, zeros where there are none."""
    named = {"features": x, **{n: p for n, p in head.named_parameters() if p.requires_grad}}
    found = torch.autograd.grad(loss.sum(), list(named.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), found, strict=True)}


def rows(head: Any) -> Tensor:
    """One weight of each class."""
    found: Tensor = head.weight.detach().view(head.classes, -1, head.dim)[:, 0]
    return found


def of_classes(check: Check) -> Check:
    """A check for losses of classes alone."""

    def run(name: str) -> None:
        if CONTRACT.fact(name, "classes", True):
            check(name)

    run.__name__, run.__doc__ = check.__name__, check.__doc__
    return CONTRACT.check(run)


@of_classes
def is_finite_at_the_edges(name: str) -> None:
    """On the class, opposite to it, zero, tiny, long, equal, single, none: value and gradients are finite."""
    for head in every(name):
        x = features(dtype=torch.float32)
        cases = {
            "on the class": rows(head)[Y],
            "opposite to the class": -rows(head)[Y],
            "long, on the class": 1e4 * rows(head)[Y],
            "zero": torch.zeros(6, D),
            "tiny": torch.full((6, D), 1e-30),
            "equal": x[:1].repeat(6, 1),
            "single": x[:1],
            "no": x[:0],
        }
        for case, given in cases.items():
            for labels in (Y[: len(given)], torch.full((len(given),), 3)):
                leaf = given.clone().requires_grad_()
                loss = head(leaf, labels)
                assert loss.shape == () and loss.dtype == torch.float32, f"{case}: {loss}"
                numeric.finite([loss, *grads(head, loss, leaf).values()], f"{case} features")
                assert case != "no" or loss == 0, f"the loss of no samples is {loss}"
        with torch.no_grad():
            head.weight.view(C, -1, D)[0] = 0
        leaf = x.clone().requires_grad_()
        loss = head(leaf, Y)
        numeric.finite([loss, *grads(head, loss, leaf).values()], "with a zero weight")


@of_classes
def one_class_costs_nothing_to_get_right(name: str) -> None:
    """With one class there is nothing to mistake: finite, and 0 where the loss is a cross-entropy."""
    for head in every(name, classes=1):
        x = features(dtype=torch.float32).requires_grad_()
        loss = head(x, torch.zeros_like(Y))
        numeric.finite([loss, *grads(head, loss, x).values()], "with one class")
        if CONTRACT.fact(name, "logits", True):
            assert loss == 0, f"the only class costs {loss}"


@of_classes
def is_the_cross_entropy_of_its_logits(name: str) -> None:
    """The loss is made of ``margin_logits``, and these of scale, target and angles written out."""
    if not CONTRACT.fact(name, "logits", True):
        return
    for head in members(name):
        head = head.double().eval()
        x = features()
        logits = head.margin_logits(x, Y)
        numeric.close(head(x, Y), F.cross_entropy(logits, Y), 1e-7, "the loss")
        if head.weight.shape[0] != C or not CONTRACT.fact(name, "target", True):
            continue
        cosines = F.cosine_similarity(x[:, None], head.weight[None], dim=2)
        plain = head.logits(x)
        if getattr(head, "bias", None) is not None:
            plain, logits = plain - head.bias, logits - head.bias
        g = head.spec.g.of_cosine(cosines)
        scale = plain / torch.where(g.abs() > 1e-6, g, 1.0)
        for i, label in enumerate(Y.tolist()):
            length = float(x[i].norm())
            target = scale[i, label] * head.psi(cosines[i, label].acos(), label, length)
            numeric.close(logits[i, label], target, 1e-5, f"the target logit of sample {i}")


@of_classes
def logits_are_scaled_angular_functions(name: str) -> None:
    """``logits`` are scale times angular function of the angles, the same for all classes and without a margin."""
    for head in members(name):
        head = head.double().eval()
        x = features()
        if head.weight.shape[0] != C:
            continue
        logits = head.logits(x)
        assert logits.shape == (6, C)
        if not head.spec.unit_weights:
            bias = 0 if head.bias is None else head.bias
            numeric.close(logits, x @ head.weight.T + bias, 1e-6, "logits")
            continue
        g = head.spec.g.of_cosine(F.cosine_similarity(x[:, None], head.weight[None], dim=2))
        scale = logits[:, :1] / g[:, :1]
        offset = head.logits(torch.zeros(1, D, dtype=x.dtype))
        if not bool(offset.any()):
            numeric.close(logits, scale * g, 1e-5, "logits")
            assert bool((scale > 0).all()), f"the scale is {scale}"


@of_classes
def has_its_gradients(name: str) -> None:
    """The gradients by features and parameters are those of differences."""
    exact = CONTRACT.fact(name, "gradient", True)
    if exact is False:
        return
    for head in members(name):
        head = head.double().eval()
        x = features(5)
        names = [n for n, p in head.named_parameters() if p.requires_grad]
        values = [head.get_parameter(n).detach() for n in names]

        def loss(*given: Tensor, head: nn.Module = head, names: list[str] = names, x: Tensor = x) -> Tensor:
            start = given[0] if exact is True else x
            parts = given[1:] if exact is True else given
            found: Tensor = torch.func.functional_call(head, dict(zip(names, parts, strict=True)), (start, Y[:5]))
            return found

        numeric.gradient(loss, *([x] if exact is True else []), *values, what=f"gradient of {name}")


@of_classes
def target_falls_and_never_helps(name: str) -> None:
    """The target falls with the angle and is at most the angular function, whatever the feature norm."""
    if not CONTRACT.fact(name, "target", True):
        return
    for head in members(name):
        head = head.double()
        for norm in (None, 0.1, 15.0, 60.0, 200.0):
            psi = head.psi(THETA, norm=norm)
            assert bool((psi.diff() <= 1e-12).all()), f"the target rises at the norm {norm}"
            above = f"the target is above {head.spec.g} at the norm {norm}"
            assert bool((psi <= head.spec.g(THETA) + 1e-12).all()), above


@of_classes
def slope_is_the_derivative(name: str) -> None:
    """``slope`` is the derivative of ``psi``."""
    if CONTRACT.fact(name, "target", True) and CONTRACT.fact(name, "derivative", True):
        for head in members(name):
            head = head.double()
            numeric.derivative(head.psi, head.slope, INSIDE, f"slope of the target of {name}")


@of_classes
def is_differentiated_by_transforms(name: str) -> None:
    """Second derivatives, per-sample gradients and forward mode agree with each other on every path."""
    x, along = features(), features(seed=3)
    found: list[Tensor] = []
    for path in paths(name):
        head = build(name, **path).double().eval()
        named = {key: value.detach() for key, value in head.named_parameters()}
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(head(leaf, Y), leaf, create_graph=True)
        by = [leaf, *(p for p in head.parameters() if p.requires_grad)]
        second = torch.autograd.grad((first * along).sum(), by, allow_unused=True)

        def loss(given: dict[str, Tensor], x: Tensor, labels: Tensor, head: nn.Module = head) -> Tensor:
            value: Tensor = torch.func.functional_call(head, given, (x, labels))
            return value

        slope = torch.func.grad(loss, argnums=1)
        pushed = torch.func.jvp(lambda x, named=named, slope=slope: slope(named, x, Y), (x,), (along,))
        value, change = pushed[0], pushed[1]
        numeric.close(value, first, 1e-7, "the gradient by torch.func.grad")
        numeric.close(change, second[0], 1e-6, "a product with the Hessian")
        one = torch.func.vmap(torch.func.grad(lambda p, x, y, loss=loss: loss(p, x[None], y[None])), (None, 0, 0))
        for key, gradients in one(named, x, Y).items():
            for i in range(2):
                alone = head(x[i : i + 1], Y[i : i + 1])
                (wanted,) = torch.autograd.grad(alone, head.get_parameter(key), allow_unused=True)
                if wanted is not None:
                    numeric.close(gradients[i], wanted, 1e-7, f"the gradient of a sample by {key}")
        found.append(torch.cat([torch.zeros(0) if part is None else part.flatten() for part in second]))
        empty = x.clone()
        empty[2] = 0
        numeric.twice(lambda x, head=head: head(x, Y), empty, what="the loss of a zero feature")
    numeric.close(found[-1], found[0], 1e-6, "second derivatives in chunks")


@of_classes
def has_the_symmetries_of_its_family(name: str) -> None:
    """Rotating features and classes, and the order of samples and of classes, change nothing."""
    q = numeric.rotation(D)
    for head in members(name):
        head = head.double().eval()
        x, order = features(), torch.tensor([3, 0, 4, 1, 2])
        value = head(x, Y)
        numeric.close(head(x.flip(0), Y.flip(0)), value, 1e-8, "the loss in another order of samples")
        with torch.no_grad():
            turned = copy.deepcopy(head)
            for key in ("weight", "class_centres"):
                if hasattr(turned, key):
                    getattr(turned, key).copy_(getattr(turned, key) @ q)
            numeric.close(turned(x @ q, Y), value, 1e-8, "the rotated loss")
            mixed = copy.deepcopy(head)
            mixed.weight.copy_(head.weight.unflatten(0, (C, -1))[order].flatten(0, 1))
            for key in ("bias", "class_centres"):
                if getattr(mixed, key, None) is not None:
                    getattr(mixed, key).copy_(getattr(mixed, key)[order])
            numeric.close(mixed(x, torch.argsort(order)[Y]), value, 1e-8, "the loss in another order of classes")


@of_classes
def heeds_lengths_as_it_says(name: str) -> None:
    """With unit weights their lengths change nothing, with a constant scale those of features neither."""
    for head in members(name):
        head = head.double().eval()
        x, value = features(), head(features(), Y)
        lengths = torch.linspace(0.5, 2.5, len(head.weight), dtype=torch.float64).unsqueeze(1)
        with torch.no_grad():
            longer = copy.deepcopy(head)
            longer.weight.mul_(lengths)
            same = bool((longer(x, Y) - value).abs() < 1e-8)
        assert same == bool(head.spec.unit_weights), (
            f"unit_weights={head.spec.unit_weights}, but lengths of weights count otherwise"
        )
        constant = head.spec.unit_weights and (head.s is not None or getattr(head, "learned_scale", None) is not None)
        if constant and CONTRACT.fact(name, "features", True):
            by_length = head(x * torch.linspace(0.5, 2.5, 6, dtype=torch.float64).unsqueeze(1), Y)
            numeric.close(by_length, value, 1e-8, "the loss of longer features")


@of_classes
def chunks_are_the_whole(name: str) -> None:
    """The chunked path gives the numbers and gradients of the dense one."""
    if not takes(name, "path"):
        return
    for dense, chunked in zip(members(name, path="dense"), members(name, path="chunked"), strict=True):
        found = []
        for head in (dense.double(), chunked.double()):
            x = features().requires_grad_()
            loss = head(x, Y)
            found.append((loss, grads(head, loss, x)))
        (wanted, expected), (loss, own) = found
        numeric.close(loss, wanted, 1e-8, "the loss in chunks")
        for key, gradient in expected.items():
            numeric.close(own[key], gradient, 1e-7, f"the gradient by {key} in chunks")


@of_classes
def reductions_agree(name: str) -> None:
    """Sum and mean are those of the losses of the samples, of which ignored ones count for nothing."""
    x, without = features(), torch.tensor([-100, 4, 2, -100, 1, 3])
    for options in paths(name):
        single, mean, total = (
            build(name, reduction=kind, **options).double().eval() for kind in ("none", "mean", "sum")
        )
        each = single(x, Y)
        if each.shape == (6,) and CONTRACT.fact(name, "single", True):
            numeric.close(total(x, Y), each.sum(), 1e-9, "the sum")
            numeric.close(mean(x, Y), each.mean(), 1e-9, "the mean")
        wanted = mean(x[[1, 2, 4, 5]], Y[[1, 2, 4, 5]])
        numeric.close(mean(x, without), wanted, 1e-9, "the mean without ignored samples")


def _targets(name: str) -> list[dict[str, Any]]:
    """What there is to say about targets, alone and together, as far as a member takes it."""
    found: list[dict[str, Any]] = [{}, {"class_weights": torch.linspace(0.0, 2.0, C)}]
    if build(name).spec.negatives.softmax:
        found.append(found[1] | {"label_smoothing": 0.2})
        found.append(found[2] | {"probability_floor": 0.01})
    sizes = [key for key in build(name).margin_names if takes(name, key)]
    for key in sizes:
        low, high = build(name).margin_bounds(key)
        each = torch.linspace(float(low), float(high) + 0.3, C)
        try:
            members(name, C, **{key: each})
        except ArgumentError:  # of members whose sizes are no numbers of classes, or integers
            continue
        found[1:] = [more | {key: each} for more in found[1:]]
    return found


@of_classes
def soft_labels_are_the_expectation(name: str) -> None:
    """Shares of classes cost the mean of what each class costs as the target, whatever else is said of targets."""
    if not (takes(name, "class_weights") and build(name).takes_soft_labels):
        return
    other = (Y + 2) % C
    one, two = F.one_hot(Y, C).double(), F.one_hot(other, C).double()
    for path, more in product(paths(name), _targets(name)):
        if path["path"] == "chunked" and "probability_floor" in more:
            continue
        for head in members(name, reduction="none", **path, **more):
            head = head.double().eval()
            for buffer in head.buffers():
                if buffer.dim() == 0 and buffer.is_floating_point():
                    buffer.fill_(0.4)  # running statistics that are none of an untrained head
            found: list[tuple[Tensor, dict[str, Tensor]]] = []
            for shares in (None, one, 0.7 * one + 0.3 * two):
                x = features().requires_grad_()
                loss = head(x, Y) if shares is None else head(x, shares)
                if shares is not None and bool((shares < 1).all()):
                    wanted = 0.7 * found[0][0] + 0.3 * head(x, other)
                    numeric.close(loss, wanted, 1e-9, f"the loss of shares with {more}")
                    continue
                found.append((loss, grads(head, loss, x)))
            numeric.close(found[1][0], found[0][0], 1e-9, f"the loss of one share with {more}")
            for key, gradient in found[0][1].items():
                numeric.close(found[1][1][key], gradient, 1e-7, f"the gradient by {key} of one share with {more}")


@of_classes
def targets_are_those_of_cross_entropy(name: str) -> None:
    """Class weights, smoothing and the mean are those of torch's cross-entropy of the logits with the margin."""
    if not (CONTRACT.fact(name, "logits", True) and takes(name, "class_weights")):
        return
    labels = torch.tensor([0, 4, -100, 2, 1, 3])
    weights = torch.linspace(0.1, 2.0, C)
    for path, smoothing, reduction in product(paths(name), (0.0, 0.2), ("mean", "none")):
        options = {"label_smoothing": smoothing, "reduction": reduction}
        for head in members(name, class_weights=weights, **path, **options):
            head = head.double().eval()
            x = features()
            safe = torch.where(labels >= 0, labels, 0)
            logits = head.margin_logits(x, safe)
            wanted = head.loss_factor * F.cross_entropy(logits, labels, weight=head.class_weights, **options)
            numeric.close(head(x, labels), wanted, 1e-7, f"the {reduction} with smoothing {smoothing}")


@of_classes
def is_computed_in_full_precision(name: str) -> None:
    """Half precision is that of parameters and features alone, and autocast changes nothing."""
    for options in paths(name):
        for dtype, (low, wide) in product(
            numeric.LOW, zip(members(name, **options), members(name, **options), strict=True)
        ):
            low, wide = copy.deepcopy(low).to(dtype), copy.deepcopy(wide)
            wide.load_state_dict({key: value.float() for key, value in low.state_dict().items()})
            x = features(dtype=dtype).requires_grad_()
            loss = low(x, Y)
            assert loss.dtype == torch.float32, f"{dtype} gives {loss.dtype}"
            numeric.close(loss, wide(x.float(), Y), 2e-2, f"in {dtype}")
            found = grads(low, loss, x)
            numeric.finite(found.values(), f"gradients in {dtype}")
            assert found["features"].dtype == dtype
        plain, other = build(name, **options).eval(), build(name, **options).eval()
        x = features(dtype=torch.float32).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = other(x, Y)
        wanted = plain(x, Y)
        numeric.close(loss, wanted, 1e-5, "under autocast")
        for key, gradient in grads(plain, wanted, x).items():
            numeric.close(grads(other, other(x, Y), x)[key], gradient, 1e-3, f"gradient by {key} after autocast")


@of_classes
def any_layout_will_do(name: str) -> None:
    """Features that are not contiguous give the same."""
    x = features(dtype=torch.float32)
    strided = x.repeat_interleave(2, 0).mT.contiguous().mT[::2]
    assert not strided.is_contiguous()
    for options in paths(name):
        numeric.close(build(name, **options)(strided, Y), build(name, **options)(x, Y), 1e-6, "of strided features")


@of_classes
def copies_go_on_alike(name: str) -> None:
    """Copied, pickled and loaded heads go on with the same losses in training."""
    x = features(dtype=torch.float32)
    for options in paths(name):
        for head, loaded in zip(members(name, **options), members(name, **options), strict=True):
            head(x, Y)
            loaded.load_state_dict(head.state_dict())
            others = [copy.deepcopy(head), pickle.loads(pickle.dumps(head)), loaded]
            for _ in range(2):
                wanted = head(x, Y)
                for other in others:
                    assert torch.equal(other(x, Y), wanted), "a copy goes on with another loss"
            common.same_state(others[0], head)


@of_classes
def trains(name: str) -> None:
    """Features that it trains get the classes right, and the loss falls."""
    head = build(name)
    x = features(20, dtype=torch.float32).requires_grad_()
    labels = torch.arange(20) % C
    optimiser = torch.optim.Adam([x, *head.parameters()], lr=0.05)
    first = float(head(x, labels))
    for _ in range(100):
        optimiser.zero_grad()
        head(x, labels).backward()
        optimiser.step()
    assert float(head(x, labels)) < first, "the loss did not fall"
    accuracy = (head.logits(x).argmax(1) == labels).float().mean()
    assert float(accuracy) >= 0.9, f"of what it was trained on, {accuracy:.0%} is right"


@of_classes
def waits_for_nothing(name: str) -> None:
    """A step reads nothing off the device and makes no tensor of a number, but for the checks on a CPU."""
    for head in every(name):
        x = features(dtype=torch.float32).requires_grad_()
        head(x, Y)
        with numeric.Host(values=False):
            head(x, Y).backward()


@of_classes
def is_one_graph(name: str) -> None:
    """Compiled code has no breaks and gives the same numbers."""
    torch._dynamo.reset()
    head = build(name, path="dense").eval()
    numeric.compiled(head, features(dtype=torch.float32), Y, tolerance=1e-4)


@CONTRACT.check
def has_what_a_trainer_asks_for(name: str) -> None:
    """It has class vectors ``(C, D)`` (or none), logits of features, and schedules as numbers."""
    head = build(name)
    vectors, logits = head.class_vectors, head.logits(features(dtype=torch.float32))
    if CONTRACT.fact(name, "classes", True):
        assert vectors.shape == (C, D) and logits.shape == (6, C)
    assert not vectors.requires_grad
    assert all(isinstance(value, float) for value in head.schedules().values())


def _recipe(name: str) -> list[str]:
    return [f"loss.name={name}"] if CONTRACT.fact(name, "classes", True) else []


common.add(CONTRACT, build=lambda name: build(name), recipe=_recipe)
