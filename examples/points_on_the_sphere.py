r"""Neurons as charges on a sphere: where they come to rest, how weights hold them, and what the energy costs.

Ten vectors in three dimensions are moved by nothing but a regulariser of their directions.

    python examples/points_on_the_sphere.py -o points.png

* **Orthonormality** asks for more than there is room for: with ten vectors in three dimensions it is content with any
  tight frame, in which two of them may almost coincide. The **energy** :math:`\sum_{i \ne j} \|u_i - u_j\|^{-2}` always
  ends with 64.9 degrees between the closest two. In **half space** every vector repels the mirror images of the others
  as well (drawn pale), which leaves no two of them on nearly one line: 45.9 degrees.
* **Weighted** vectors have a length :math:`\beta` in the energy. The longer one is, the less it moves: others make
  room.
* **Forces** of chords fade out towards opposite directions, those of angles do not: there their energy has a kink.
* **Optimal energies** of N points grow as :math:`N^2` for s below the dimension 2 of the sphere, as
  :math:`N^2 \log N` for s = 2 and as :math:`N^{1 + s/2}` above.

The picture needs matplotlib.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hypersphere.energy import Minimum, Orthonormal, minimise
from hypersphere.energy.potentials import Riesz
from hypersphere.geometry import normalise

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NEURONS = 10
BETAS = (1.0, 2.0, 4.0, 10.0)
HEAVY = 2
"""How many of the neurons are weighted in the picture."""
RATE, STEPS = 4e-3, 300
"""Of the gradient flow of weighted neurons."""
SIZES = (4, 6, 8, 12, 16, 24, 32, 48, 64)
POWERS = (1.0, 2.0, 4.0)


def starts(seed: int) -> Tensor:
    """Random directions ``(10, 3)``."""
    return normalise(torch.randn(NEURONS, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


def at_rest(seed: int) -> dict[str, Minimum]:
    """Where the neurons end under each regulariser."""
    start = starts(seed)
    return {
        "random": minimise(start, 2, steps=0),
        "orthonormal": minimise(start, energy=Orthonormal(normalised=True), method="projected", steps=600),
        "energy": minimise(start, 2),
        "half space": minimise(start, 2, half_space=True, restarts=4, generator=torch.Generator().manual_seed(seed)),
    }


def flow(seed: int, beta: float, heavy: int = HEAVY) -> Tensor:
    """Path ``(steps + 1, 10, 3)`` of gradient descent, the first ``heavy`` neurons with weight ``beta``."""
    weights = torch.ones(NEURONS, dtype=torch.float64)
    weights[:heavy] = beta
    found = minimise(
        starts(seed), 2, beta=weights, method="riemannian", lr=RATE, steps=STEPS, max_move=0.05, trajectory=True
    )
    assert found.trajectory is not None
    return found.trajectory


def path_lengths(path: Tensor) -> Tensor:
    """Degrees that each neuron has gone along its path, ``(10,)``."""
    return torch.rad2deg((path[1:] - path[:-1]).norm(dim=2).sum(0))


@dataclass(frozen=True)
class Growth:
    """Optimal energies against the number of points, for one s.

    Args:
        s: Riesz exponent.
        energies: Number of points -> least energy found.
    """

    s: float
    energies: Mapping[int, float]

    def theorem(self, n: float) -> float:
        """The leading term on the sphere in three dimensions, up to a constant for s above 2."""
        if self.s < 2:
            return 2 ** (1 - self.s) / (2 - self.s) * n**2
        return n**2 * math.log(n) / 4 if self.s == 2 else n ** (1 + self.s / 2)

    @property
    def exponents(self) -> tuple[float, float]:
        """Slope over the upper half of the sizes on logarithmic axes: of the energies, and of the theorem."""
        low, high = sorted(self.energies)[len(self.energies) // 2], max(self.energies)
        span = math.log(high / low)
        return (
            math.log(self.energies[high] / self.energies[low]) / span,
            math.log(self.theorem(high) / self.theorem(low)) / span,
        )


def growth(sizes: Sequence[int] = SIZES) -> list[Growth]:
    """Optimal energies for every s of the picture."""
    generator = torch.Generator().manual_seed(0)
    return [Growth(s, {n: minimise((n, 3), s, restarts=4, generator=generator).energy for n in sizes}) for s in POWERS]


def force(theta: Tensor, s: float, *, angular: bool) -> Tensor:
    """Force between two directions at angles ``theta``: minus the derivative of the potential by the angle."""
    theta = theta.clone().requires_grad_()
    potential = Riesz(s)(theta.square()) if angular else Riesz(s)((2 * (theta / 2).sin()).square())
    return -torch.autograd.grad(potential.sum(), theta)[0]


# The picture.

VIEW = (math.radians(24), math.radians(-58))
"""Height and direction of the eye."""
SHADES = {"random": 9, "orthonormal": 1, "energy": 0, "half space": 4}
TITLES = {
    "random": "random start",
    "orthonormal": "orthonormal",
    "energy": "energy, s = 2",
    "half space": "half-space energy",
}


def seen(points: Tensor) -> Tensor:
    """Points ``(..., 3)`` as the eye sees them: to the right, up, and towards it."""
    height, turn = VIEW
    right = torch.tensor([-math.sin(turn), math.cos(turn), 0.0], dtype=points.dtype)
    flat = math.cos(height)
    towards = torch.tensor([flat * math.cos(turn), flat * math.sin(turn), math.sin(height)], dtype=points.dtype)
    up = torch.linalg.cross(towards, right)
    return points @ torch.stack([right, up, towards], 1)


def draw_sphere(axes: Axes) -> None:
    """A pale ball with meridians, those behind fainter."""
    import numpy as np  # noqa: PLC0415
    from matplotlib.collections import LineCollection  # noqa: PLC0415
    from matplotlib.patches import Circle  # noqa: PLC0415

    side = np.linspace(-1, 1, 200)
    x, y = np.meshgrid(side, side)
    z = np.sqrt(np.clip(1 - x**2 - y**2, 0, None))
    light = np.clip(-0.45 * x + 0.5 * y + 0.74 * z, 0, 1)
    light = np.round(light * 14) / 14  # few colours keep the file small
    dark, bright = np.array([0.80, 0.83, 0.88]), np.array([0.985, 0.99, 1.0])
    ball = axes.imshow(dark + (bright - dark) * light[..., None], extent=(-1, 1, -1, 1), origin="lower", zorder=0)
    edge = Circle((0, 0), 1, transform=axes.transData, fill=False, ec="#9aa1ad", lw=0.8, zorder=3)
    axes.add_patch(edge)
    ball.set_clip_path(edge)
    angles = torch.linspace(0, 2 * math.pi, 145, dtype=torch.float64)
    circles = [torch.stack([angles.cos(), angles.sin(), 0 * angles], 1)]
    for height in (-45, 45):
        at = math.radians(height)
        circles.append(
            torch.stack([math.cos(at) * angles.cos(), math.cos(at) * angles.sin(), 0 * angles + math.sin(at)], 1)
        )
    for turn in range(0, 180, 45):
        at = math.radians(turn)
        circles.append(torch.stack([math.cos(at) * angles.cos(), math.sin(at) * angles.cos(), angles.sin()], 1))
    for circle in circles:
        place = seen(circle)
        pieces = torch.stack([place[:-1, :2], place[1:, :2]], 1).numpy()
        front = (place[:-1, 2] > 0).numpy()
        for part, look in (
            (pieces[~front], {"alpha": 0.25, "zorder": 1}),
            (pieces[front], {"alpha": 0.7, "zorder": 2}),
        ):
            axes.add_collection(LineCollection(list(part), colors="#b4bbc6", linewidths=0.5, **look))
    axes.set_xlim(-1.06, 1.06)
    axes.set_ylim(-1.06, 1.06)
    axes.set_aspect("equal")
    axes.axis("off")


def turned(points: Tensor, aim: Tensor, above: float = 0.0) -> Tensor:
    """Points ``(..., 3)`` rotated so that the direction ``aim`` faces the eye, or comes to lie above that place."""
    basis = seen(torch.eye(3, dtype=points.dtype))  # its columns are the three directions of the eye
    axis = normalise(aim + normalise(basis[:, 2] + above * basis[:, 1]))
    # Half a turn about the middle of two directions takes one to the other.
    return 2 * (points @ axis).unsqueeze(-1) * axis - points


def draw_points(axes: Axes, points: Tensor, colour: Any, *, pale: bool = False, size: float = 46) -> None:
    """Neurons as points with a line to the centre; those on the far side are smaller and fainter."""
    for x, y, depth in seen(points).tolist():
        near = depth > 0
        strength = (0.3 if pale else 1.0) * (1.0 if near else 0.4)
        axes.plot(
            [0, x],
            [0, y],
            color=colour,
            lw=0.9,
            alpha=0.45 * strength,
            zorder=5 if near else 1.5,
            solid_capstyle="round",
        )
        axes.scatter(
            x,
            y,
            s=size * (0.75 + 0.35 * depth) * (0.6 if pale else 1.0),
            color=colour,
            alpha=strength,
            edgecolors="white",
            linewidths=0.7,
            zorder=7 + depth,
        )


def draw_path(axes: Axes, path: Tensor, colour: Any, **look: Any) -> None:
    """A curve on the sphere, fainter behind."""
    place = seen(path)
    front = place[:, 2] > 0
    for shown, alpha, order in ((~front, 0.35, 1.8), (front, 1.0, 6)):
        x, y = (torch.where(shown, place[:, axis], math.nan).numpy() for axis in (0, 1))
        axes.plot(x, y, color=colour, alpha=alpha, zorder=order, **look)


def draw_arc(axes: Axes, a: Tensor, b: Tensor, colour: Any, **look: Any) -> None:
    """The great arc between two directions."""
    t = torch.linspace(0, 1, 40, dtype=torch.float64).unsqueeze(1)
    theta = torch.atan2((a - b).norm() / 2, (a + b).norm() / 2) * 2
    draw_path(axes, (torch.sin((1 - t) * theta) * a + torch.sin(t * theta) * b) / torch.sin(theta), colour, **look)


def closest(points: Tensor) -> tuple[Tensor, Tensor]:
    """The two of ``points`` that are closest to each other."""
    cosines = (points @ points.T).fill_diagonal_(-2)
    i, j = divmod(int(cosines.argmax()), len(points))
    return points[i], points[j]


def draw_rest(axes: Axes, name: str, found: Minimum) -> None:
    """Neurons at rest, the closest two joined by an arc; with mirror images in half space."""
    from hypersphere.drawing import colour  # noqa: PLC0415
    from hypersphere.plot.style import INK  # noqa: PLC0415

    draw_sphere(axes)
    points, shade = found.points, colour(SHADES[name])
    both = torch.cat([points, -points]) if name == "half space" else points
    aim = normalise(sum(closest(both)))
    points, both = turned(points, aim, above=0.8), turned(both, aim, above=0.8)
    if name == "half space":
        draw_points(axes, -points, shade, pale=True)
    draw_points(axes, points, shade)
    draw_arc(axes, *closest(both), INK, lw=2.0, solid_capstyle="round")
    what = "lines" if name == "half space" else "neurons"
    axes.set_title(f"{TITLES[name]}\nclosest {what}: {math.degrees(found.smallest_angle):.1f}°", loc="center")


def draw_flow(axes: Axes, beta: float, path: Tensor) -> None:
    """Paths of the weighted neurons, and where all of them end."""
    from hypersphere.drawing import colour  # noqa: PLC0415
    from hypersphere.plot.style import MUTED  # noqa: PLC0415

    draw_sphere(axes)
    lengths = path_lengths(path)
    path = turned(path, normalise(path[0, :HEAVY].sum(0)))
    draw_points(axes, path[-1, HEAVY:], MUTED, size=26)
    for neuron in range(HEAVY):
        shade = colour(neuron + 1)
        draw_path(axes, path[:, neuron], shade, lw=1.8, ls=(0, (2.2, 1.1)))
        draw_points(axes, path[-1:, neuron], shade, size=60)
        x, y, depth = seen(path[0, neuron]).tolist()
        axes.scatter(x, y, s=34, facecolors="white", edgecolors=shade, linewidths=1.4, zorder=6.5 if depth > 0 else 1.9)
    gone = " and ".join(f"{length:.{0 if length >= 10 else 1}f}°" for length in lengths[:HEAVY].tolist())
    axes.set_title(f"β = {beta:g}\nmoved by {gone}", loc="center")


def draw_forces(axes: Axes) -> None:
    """Forces between two neurons against their angle."""
    from hypersphere.drawing import colour  # noqa: PLC0415
    from hypersphere.plot.style import angle_axis  # noqa: PLC0415

    theta = torch.linspace(math.radians(12), math.pi, 300, dtype=torch.float64)
    for angular in (False, True):
        for index, s in enumerate((0.0, 1.0, 2.0)):
            look: dict[str, Any] = {"ls": (0, (4, 1.6)), "lw": 1.5} if angular else {}
            axes.plot(
                torch.rad2deg(theta).numpy(),
                force(theta, s, angular=angular).numpy(),
                color=colour(index),
                **look,
                label=f"s = {s:g}, {'angle' if angular else 'chord'}",
            )
    angle_axis(axes, label="angle between two neurons (degrees)")
    axes.set_ylim(0, 2)
    axes.set_ylabel("force")
    axes.set_title("Forces of chords vanish at 180°, those of angles do not")
    axes.legend(loc="upper right", ncols=2)


def draw_growth(axes: Axes, found: Sequence[Growth]) -> None:
    """Optimal energies against the number of points, and the slopes of the theorem."""
    from hypersphere.drawing import colour  # noqa: PLC0415

    terms = {1.0: "$N^2$", 2.0: r"$N^2 \log(N) / 4$", 4.0: "$c N^3$"}
    for index, one in enumerate(found):
        sizes = sorted(one.energies)
        last = sizes[-1]
        axes.plot(
            sizes,
            [one.energies[n] / n**2 for n in sizes],
            marker="osD"[index],
            ls="",
            color=colour(index),
            ms=5,
            label=f"s = {one.s:g}, theorem: {terms[one.s]}",
        )
        # For s > 2 the theorem's constant is not known: the line goes through the last point.
        factor = one.energies[last] / one.theorem(last) if one.s > 2 else 1.0
        line = [factor * one.theorem(n) / n**2 for n in sizes]
        axes.plot(sizes, line, color=colour(index), lw=1.2, ls=(0, (1.5, 1.3)), zorder=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    shown = [n for n in (4, 8, 16, 32, 64) if n <= max(found[0].energies)]
    axes.set_xticks(shown, [str(n) for n in shown])
    axes.set_xlabel("number of points N")
    axes.set_ylabel(r"least energy found / $N^2$")
    axes.set_title("Optimal energies (marks) near their theorem (dotted)")
    axes.legend()


def draw(rest: Mapping[str, Minimum], paths: Mapping[float, Tensor], found: Sequence[Growth], path: Path) -> None:
    """Write a picture: neurons at rest, weighted ones on their way, forces, and the growth of energies."""
    from hypersphere.plot import save  # noqa: PLC0415  (only the picture needs matplotlib)
    from hypersphere.plot.style import new_figure, styled  # noqa: PLC0415

    @styled
    def picture() -> None:
        figure = new_figure(9.4, 8.8)
        figure.get_layout_engine().set(h_pad=0.1)
        top, middle, bottom = figure.subfigures(3, 1, height_ratios=[1.0, 1.0, 0.95])
        for axes, (name, one) in zip(top.subplots(1, 4), rest.items(), strict=True):
            draw_rest(axes, name, one)
        for axes, (beta, steps) in zip(middle.subplots(1, 4), paths.items(), strict=True):
            draw_flow(axes, beta, steps)
        left, right = bottom.subplots(1, 2)
        draw_forces(left)
        draw_growth(right, found)
        save(figure, path)

    picture()


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute and print as the command line says."""
    parser = argparse.ArgumentParser(description="Ten neurons on the sphere, moved by regularisers alone.")
    parser.add_argument("--seed", type=int, default=10, help="of the drawn start (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one seed and fewer points")
    parser.add_argument("-o", dest="picture", type=Path, metavar="PICTURE", help="write the picture there")
    options = parser.parse_args(arguments)
    seeds = [options.seed + k for k in range(1 if options.quick else 5)]

    every = [at_rest(seed) for seed in seeds]
    print(f"Smallest angle of {NEURONS} neurons in degrees, over {len(seeds)} starts (half space: of lines)")
    for name in every[0]:
        angles = [math.degrees(found[name].smallest_angle) for found in every]
        print(f"{name:12} mean {sum(angles) / len(angles):6.2f}   from {min(angles):6.2f} to {max(angles):6.2f}")

    print("\nDegrees that weighted neurons move, mean over the starts")
    paths: dict[float, Tensor] = {}
    for heavy in (1, HEAVY):
        flows = {beta: [flow(seed, beta, heavy) for seed in seeds] for beta in BETAS}
        means = {
            beta: torch.stack([path_lengths(one)[:heavy].mean() for one in some]).mean() for beta, some in flows.items()
        }
        print(f"{heavy} of {NEURONS}: " + "   ".join(f"beta {beta:g}: {mean:6.2f}" for beta, mean in means.items()))
        paths = {beta: some[0] for beta, some in flows.items()}

    found = growth(SIZES[:5] if options.quick else SIZES)
    print(f"\nLeast energies of up to {max(found[0].energies)} points, exponent of N found and of the theorem")
    for one in found:
        measured, theorem = one.exponents
        print(f"s = {one.s:g}: {measured:.3f}   {theorem:.3f}")
    if options.picture:
        draw(every[0], paths, found, options.picture)
        print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
