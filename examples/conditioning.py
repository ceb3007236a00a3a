r"""Why an unbalanced linear layer is hard to train, and one of cosines is not.

A matrix of cosines :math:`F = U V^\top`, with weights :math:`U` (n, k) and inputs :math:`V` (m, k) whose rows are
unit vectors, is learned back from a start near :math:`(cU, V/c)`. There the product is as right as at
:math:`(U, V)`, but one factor is long and the other short. Two losses are compared,

.. math:: G = \tfrac12\|F - UV^\top\|_F^2, \qquad G_S = \tfrac12\|F - \hat U\hat V^\top\|_F^2,

the second with the rows normalised, which is a layer of cosines. The script computes their exact second derivatives,
the restricted condition number (largest over smallest non-zero eigenvalue), and how many steps of gradient descent
each of them takes.

    python examples/conditioning.py -o conditioning.png

Two published lemmas (Liu et al., Deep Hyperspherical Learning, 2017) say that the number of :math:`G` grows like
:math:`c^2` and that of :math:`G_S` does not change. What the exact computation shows:

* :math:`G` at an optimum has the eigenvalues :math:`c^2 s_i(U)^2 + s_j(V)^2/c^2` of the singular values and
  :math:`k^2` zeros. With more weights than dimensions (n > k) the number grows like :math:`c^4`, which is worse than
  claimed. With n <= k there is no small eigenvalue and it does not grow at all: there the first lemma is wrong.
* :math:`G_S` is immune only as a function on spheres, with every row brought back to unit length after each step. As a
  function of free rows its Hessian at :math:`(cU, V/c)` is the one at :math:`(U, V)` with every row and column
  multiplied by 1/c or c, and its number grows like :math:`c^4`, too. Cosines alone are no help without projection.
* In balance (c = 1) the cosines have the larger number, hence the slower descent. They gain from c = 2 or 4 on.

The picture needs matplotlib.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Matrix: TypeAlias = NDArray[np.float64]

SCALES = (1, 2, 4, 8, 16)
SIZE = (20, 30, 5)
"""n, m and k of the problem whose condition numbers are printed."""
FEW = (5, 30, 5)
"""The same with no more weights than dimensions."""
DESCENT = (6, 7, 3)
"""The problem that is solved by gradient descent."""
DESCENT_SCALES = (1, 2, 4, 8)
ZERO = 1e-9
"""Eigenvalues below this part of the largest one count as zero."""
DONE = 1e-10
"""Descent stops at this part of the first loss."""


def chirp(shape: tuple[int, int], step: float, phase: float) -> Matrix:
    """Numbers that look random and are the same everywhere: ``sin(step * i^2 + phase)``, row by row."""
    return np.sin(step * np.arange(np.prod(shape)) ** 2.0 + phase).reshape(shape)


def unit(rows: Matrix) -> Matrix:
    """``rows`` ``(n, k)``, each divided by its norm."""
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@dataclass(frozen=True)
class Problem:
    """Unit rows whose cosines are to be learned.

    Args:
        U: Weights, ``(n, k)``.
        V: Inputs, ``(m, k)``.
    """

    U: Matrix
    V: Matrix

    @classmethod
    def of_size(cls, n: int, m: int, k: int) -> Problem:
        """The problem of chirps with these numbers of weights, inputs and dimensions."""
        return cls(unit(chirp((n, k), 1.7, 0.3)), unit(chirp((m, k), 2.3, 0.9)))

    @property
    def cosines(self) -> Matrix:
        """What is to be learned, ``(n, m)``."""
        return self.U @ self.V.T

    def scaled(self, c: float) -> tuple[Matrix, Matrix]:
        """An optimum of both losses with one long and one short factor: ``(c U, V / c)``."""
        return c * self.U, self.V / c

    def near(self, c: float) -> tuple[Matrix, Matrix]:
        """A point close to :meth:`scaled`, where gradient descent starts."""
        return (
            c * (self.U + 0.05 * chirp(self.U.shape, 3.1, 0.2)),
            (self.V + 0.05 * chirp(self.V.shape, 2.9, 0.5)) / c,
        )


def loss(F: Matrix, U: Matrix, V: Matrix) -> float:
    """Half the squared error of ``U V^T``; :math:`G`. With unit rows it is :math:`G_S`."""
    return 0.5 * float(((U @ V.T - F) ** 2).sum())


def gradient(F: Matrix, U: Matrix, V: Matrix) -> tuple[Matrix, Matrix]:
    """Gradient of :math:`G` by U and by V."""
    error = U @ V.T - F
    return error @ V, error.T @ U


def sphere_gradient(F: Matrix, U: Matrix, V: Matrix) -> tuple[Matrix, Matrix]:
    """Gradient of :math:`G_S` by U and by V: what is left of that of :math:`G` at the unit rows beside the rows."""
    P, Q = unit(U), unit(V)
    found = []
    for rows, units, slope in zip((U, V), (P, Q), gradient(F, P, Q), strict=True):
        beside = slope - (slope * units).sum(1, keepdims=True) * units
        found.append(beside / np.linalg.norm(rows, axis=1, keepdims=True))
    return found[0], found[1]


def hessian(F: Matrix, U: Matrix, V: Matrix) -> Matrix:
    """Second derivatives of :math:`G`, ``((n+m) k, (n+m) k)``; the rows of U come first, then those of V."""
    (n, k), m = U.shape, len(V)
    error = U @ V.T - F
    cross = np.einsum("ij,ab->iajb", error, np.eye(k)) + np.einsum("ja,ib->iajb", V, U)
    cross = cross.reshape(n * k, m * k)
    return np.block([[np.kron(np.eye(n), V.T @ V), cross], [cross.T, np.kron(np.eye(m), U.T @ U)]])


def sphere_hessian(F: Matrix, U: Matrix, V: Matrix) -> Matrix:
    """Second derivatives of :math:`G_S` as a function of free rows, ``((n+m) k, (n+m) k)``."""
    P, Q = unit(U), unit(V)
    units, slopes = np.concatenate([P, Q]), np.concatenate(gradient(F, P, Q))
    k = P.shape[1]
    beside = np.eye(k) - units[:, :, None] * units[:, None, :]  # (n+m, k, k), onto the tangent space of each row
    tangent = np.einsum("rab,rb->ra", beside, slopes)
    inner = hessian(F, P, Q).reshape(len(units), k, len(units), k)
    full = np.einsum("rab,rbsc,scd->rasd", beside, inner, beside, optimize=True)
    # The normalisation itself is curved: three more terms for each row with itself.
    curved = (units * slopes).sum(1)[:, None, None] * beside
    curved += tangent[:, :, None] * units[:, None, :] + units[:, :, None] * tangent[:, None, :]
    row = np.arange(len(units))
    full[row, :, row, :] -= curved
    lengths = np.linalg.norm(np.concatenate([U, V]), axis=1).repeat(k)
    return full.reshape(len(lengths), len(lengths)) / np.outer(lengths, lengths)


def on_spheres(F: Matrix, U: Matrix, V: Matrix) -> Matrix:
    """Second derivatives of :math:`G_S` as a function on spheres, ``((n+m)(k-1), (n+m)(k-1))``.

    These are the second derivatives at the unit rows along the tangent directions of each row.
    """
    units = unit(np.concatenate([U, V]))
    _, _, frames = np.linalg.svd(units[:, None, :])  # first the row itself, then what is orthogonal to it
    rows, k = units.shape
    basis = np.zeros((rows, k, rows, k - 1))
    basis[np.arange(rows), :, np.arange(rows), :] = frames[:, 1:, :].transpose(0, 2, 1)
    flat = basis.reshape(rows * k, rows * (k - 1))
    return flat.T @ sphere_hessian(F, unit(U), unit(V)) @ flat


@dataclass(frozen=True)
class Condition:
    """What the eigenvalues of a Hessian say.

    Args:
        number: Largest over smallest non-zero eigenvalue.
        least: The smallest non-zero eigenvalue.
        largest: The largest one.
        zeros: How many are zero.
    """

    number: float
    least: float
    largest: float
    zeros: int


def condition(matrix: Matrix) -> Condition:
    """Restricted condition number of a symmetric matrix at an optimum.

    Example:
        >>> condition(np.diag([0.0, 2.0, 8.0]))
        Condition(number=4.0, least=2.0, largest=8.0, zeros=1)
    """
    values = np.linalg.eigvalsh(matrix)
    positive = values[values > ZERO * values[-1]]
    least, largest = float(positive[0]), float(positive[-1])
    return Condition(largest / least, least, largest, len(values) - len(positive))


def spectrum(U: Matrix, V: Matrix, c: float = 1.0) -> Matrix:
    """Non-zero eigenvalues of the Hessian of :math:`G` at ``(c U, V / c)`` in closed form, ascending."""
    weights, inputs = np.zeros(len(U)), np.zeros(len(V))
    for values, rows in ((weights, U), (inputs, V)):
        found = np.linalg.svd(rows, compute_uv=False)
        values[: len(found)] = found
    sums = (c * weights[:, None]) ** 2 + (inputs[None, :] / c) ** 2
    return np.sort(sums[sums > ZERO * sums.max()])


def descend(problem: Problem, c: float, *, sphere: bool, limit: int = 100_000) -> Matrix:
    """Gradient descent from near ``(c U, V / c)`` with the largest step that is safe at the optimum.

    The step is one over the largest eigenvalue at the optimum.

    Args:
        problem: What is to be learned.
        c: Imbalance of the start.
        sphere: Follow :math:`G_S` with all rows brought to unit length at the start and after each step, not
            :math:`G`.
        limit: Give up after so many steps.

    Returns:
        The loss at the start and after each step, until it is 1e-10 of the first.
    """
    F = problem.cosines
    U, V = problem.near(c)
    if sphere:
        U, V = unit(U), unit(V)
        step = 1 / condition(on_spheres(F, problem.U, problem.V)).largest
    else:
        step = 1 / condition(hessian(F, *problem.scaled(c))).largest
    losses = [loss(F, U, V)]
    while losses[-1] > DONE * losses[0] and len(losses) <= limit:
        by_U, by_V = (sphere_gradient if sphere else gradient)(F, U, V)
        U, V = U - step * by_U, V - step * by_V
        if sphere:
            U, V = unit(U), unit(V)
        losses.append(loss(F, U, V))
    return np.array(losses)


SHADES = ("#3f90da", "#e76300", "#832db6", "#ffa90e", "#bd1f01")
SPHERE: dict[str, Any] = {"color": "#222222", "ls": (0, (4, 1.5))}
CASES = ("G", "G, n = k", "G_S, free rows", "G_S on spheres")


def conditions(scales: Sequence[float] = SCALES) -> dict[str, list[Condition]]:
    """Condition of the four cases of the table at ``(c U, V / c)`` for each c."""
    wide, few = Problem.of_size(*SIZE), Problem.of_size(*FEW)
    kinds = dict(zip(CASES, ((hessian, wide), (hessian, few), (sphere_hessian, wide), (on_spheres, wide)), strict=True))
    return {
        name: [condition(of(problem.cosines, *problem.scaled(c))) for c in scales]
        for name, (of, problem) in kinds.items()
    }


def draw(found: dict[str, list[Condition]], runs: dict[str, Matrix], path: Path) -> None:
    """Write a picture: condition numbers and eigenvalues against c, and the losses of gradient descent."""
    from hypersphere.plot import save  # noqa: PLC0415  (only the picture needs matplotlib)
    from hypersphere.plot.style import new_figure, styled  # noqa: PLC0415

    @styled
    def picture() -> None:
        figure = new_figure(11.0, 3.9)
        left, middle, right = figure.subplots(1, 3)
        draw_numbers(left, found)
        draw_spectra(middle, Problem.of_size(*SIZE))
        draw_descent(right, runs)
        save(figure, path)

    picture()


def draw_numbers(axes: Axes, found: dict[str, list[Condition]]) -> None:
    """Condition numbers against c."""
    for index, (name, values) in enumerate(found.items()):
        looks = {"marker": "osD^"[index], **(SPHERE if name == CASES[-1] else {"color": SHADES[index]})}
        axes.plot(SCALES, [value.number for value in values], **looks, label=mathtext(name))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(1, 1e8)
    axes.set_xticks(SCALES, [str(c) for c in SCALES])
    axes.set_xlabel("imbalance c of the optimum (cU, V/c)")
    axes.set_ylabel("largest / smallest non-zero eigenvalue")
    axes.set_title("(a) Condition number")
    axes.legend(loc="upper left")


def draw_spectra(axes: Axes, problem: Problem) -> None:
    """Non-zero eigenvalues in falling order: two groups drift apart for G."""
    values = {f"$G$, c = {c}": spectrum(problem.U, problem.V, c) for c in (1, 4, 16)}
    sphere = np.linalg.eigvalsh(on_spheres(problem.cosines, problem.U, problem.V))
    values["$G_S$ on spheres, every c"] = sphere[sphere > ZERO * sphere[-1]]
    looks = [*({"color": SHADES[index]} for index in (0, 2, 4)), SPHERE]
    for look, (name, some) in zip(looks, values.items(), strict=True):
        axes.plot(np.arange(1, len(some) + 1), some[::-1], **look, label=name)
    axes.set_yscale("log")
    axes.set_xlabel("rank")
    axes.set_title("(b) Non-zero eigenvalues")
    axes.legend(loc="lower left")


def draw_descent(axes: Axes, runs: dict[str, Matrix]) -> None:
    """Losses of gradient descent."""
    for index, (name, losses) in enumerate(runs.items()):
        look = SPHERE if name.startswith("G_S") else {"color": SHADES[index]}
        text = f"{mathtext(name)}: {len(losses) - 1:,} steps"
        axes.plot(np.arange(1, len(losses) + 1), losses / losses[0], **look, label=text)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(1e-17, 3)
    axes.set_yticks([1.0, 1e-5, DONE])
    axes.yaxis.minorticks_off()
    axes.set_xlabel("1 + step")
    axes.set_ylabel("loss / first loss")
    axes.set_title("(c) Gradient descent")
    axes.legend(loc="lower left")


def mathtext(name: str) -> str:
    """A name with its formula set as one."""
    return name.replace("G_S", "$G_S$") if name.startswith("G_S") else name.replace("G", "$G$")


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute and print as the command line says."""
    parser = argparse.ArgumentParser(description="Condition numbers of products and of cosines.")
    parser.add_argument("--largest", type=int, choices=DESCENT_SCALES, default=8, help="largest c of gradient descent")
    parser.add_argument("-o", dest="picture", type=Path, metavar="PICTURE", help="write the curves there")
    options = parser.parse_args(arguments)

    found = conditions()
    print("Restricted condition number at (cU, V/c), n = 20, m = 30, k = 5 (second column: n = 5)")
    print("  c " + "".join(f"{name:>16}" for name in CASES))
    for row, c in enumerate(SCALES):
        print(f"{c:3} " + "".join(f"{found[name][row].number:16,.3f}" for name in CASES))
    print("zeros" + "".join(f"{found[name][0].zeros:{15 if i == 0 else 16}}" for i, name in enumerate(CASES)))

    problem = Problem.of_size(*DESCENT)
    chosen = [c for c in DESCENT_SCALES if c <= options.largest]
    runs = {f"G, c = {c}": descend(problem, c, sphere=False) for c in chosen}
    sphere = {c: descend(problem, c, sphere=True) for c in chosen}
    print("\nSteps of gradient descent to 1e-10 of the first loss, n = 6, m = 7, k = 3")
    for c in chosen:
        print(f"c = {c}: G {len(runs[f'G, c = {c}']) - 1:7,}   G_S on spheres {len(sphere[c]) - 1:5,}")
    if options.picture:
        draw(found, {**runs, "G_S on spheres, every c": sphere[chosen[-1]]}, options.picture)
        print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
