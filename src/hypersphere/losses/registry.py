"""Losses by name, and how a head is called: names of the ecosystem, unknown options, scales too small to be of use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypersphere.errors import warn
from hypersphere.losses.theory import reachable_probability, suggest_scale
from hypersphere.registry import Member, Registry

if TYPE_CHECKING:
    from hypersphere.losses.head import MarginSoftmax

ALIASES = {
    **{"margin": "m", "scale": "s"},
    **{"embedding_size": "dim", "num_classes": "classes"},
    **{"in_features": "dim", "out_features": "classes"},
}
"""What other libraries call the arguments of a head."""

LEAST_PROBABILITY = 0.9

losses: Registry[MarginSoftmax] = Registry(
    "loss", positional=("dim", "classes"), option_aliases=ALIASES, members=("hypersphere.losses.members",)
)


def create(name: str, *sizes: int, mesh: Any = None, **options: Any) -> MarginSoftmax:
    """Build a head by name; ``hypersphere list losses`` prints the names and their options.

    Args:
        name: Name or alias; hyphens and underscores are the same.
        *sizes: Feature dimension D and number of classes C; also as ``dim=`` and ``classes=``.
        mesh: Processes to divide the classes among; see :meth:`MarginSoftmax.shard`.
        **options: The member's own options.

    Example:
        >>> create("sphereface", 64, 10, m=3).classes
        10
    """
    head = losses.create(name, *sizes, **options)
    return head if mesh is None else head.shard(mesh)


class HeadType(Member, type):
    """The class of head classes: lets every head be built with the names that other libraries have for its arguments.

    ``margin`` and ``scale`` stand for ``m`` and ``s``, ``embedding_size`` or ``in_features`` for ``dim``,
    ``num_classes`` or ``out_features`` for ``classes``. An unknown option is answered with all that there are.
    """

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """Build a head."""
        entry = losses.find(cls)
        options = losses.canonical(options, entry)
        if entry is not None:  # a member passes on what is an option of all, and might take what is none of its own
            entry.check(options, called=True)
        head = super().__call__(*args, **options)
        if message := _scale_warning(head):
            warn(message)
        return head


def _scale_warning(head: MarginSoftmax) -> str | None:
    """What to tell a user whose scale is too small to be of use."""
    bounded = head.softmax_scale and head.spec.negatives.softmax and head.spec.unit_weights
    if head.s is None or not bounded:  # free norms are factors on the scale
        return None
    best = reachable_probability(head.classes, head.s)
    if best >= LEAST_PROBABILITY:
        return None
    enough = suggest_scale(head.classes, LEAST_PROBABILITY)
    return (
        f"s = {head.s:g} cannot give a class of {head.classes:,} more than a probability of {best:.2g}, so the "
        f"loss stays large; {enough:.1f} or more reaches {LEAST_PROBABILITY} (hypersphere.losses.suggest_scale)"
    )
