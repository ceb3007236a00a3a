r"""Orthogonal training: maps to orthogonal matrices, rotations of any model's neurons, and fine-tuning by rotation."""

from hypersphere.orthogonal.adapters import (
    adapt,
    adapter_state_dict,
    constrain,
    disabled,
    drop,
    list_adapters,
    load_adapter,
    load_adapter_file,
    merge_adapter,
    save_adapter,
    unload,
    unmerge_adapter,
    use,
)
from hypersphere.orthogonal.apply import (
    Penalty,
    apply,
    cached,
    check,
    merge,
    penalty,
    rebase,
    retract,
)
from hypersphere.orthogonal.maps import Map, create, maps, orthogonality_error
from hypersphere.orthogonal.peft import from_peft, to_peft
from hypersphere.orthogonal.rotation import Rotation, rotations
from hypersphere.orthogonal.stochastic import Resampling, poet

__all__ = [
    "Map",
    "Penalty",
    "Resampling",
    "Rotation",
    "adapt",
    "adapter_state_dict",
    "apply",
    "cached",
    "check",
    "constrain",
    "create",
    "disabled",
    "drop",
    "from_peft",
    "list_adapters",
    "load_adapter",
    "load_adapter_file",
    "maps",
    "merge",
    "merge_adapter",
    "orthogonality_error",
    "penalty",
    "poet",
    "rebase",
    "retract",
    "rotations",
    "save_adapter",
    "to_peft",
    "unload",
    "unmerge_adapter",
    "use",
]
