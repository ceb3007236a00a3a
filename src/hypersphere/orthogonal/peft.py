r"""Adapters of Hugging Face's peft: OFT and BOFT checkpoints into a model, and out of it.

The format is read and written without peft. Orientations differ: with Q the skew matrix of the numbers in the file,
peft computes

* OFT with ``use_cayley_neumann``: the series of :math:`(I + Q)(I - Q)^{-1}`, as here, with :math:`k = T - 2` terms for
  ``num_cayley_neumann_terms`` = T from 4 on (3 is the same as 4);
* OFT without: :math:`(I - Q)(I + Q)^{-1}`, the transpose, so that numbers change their sign on the way;
* BOFT: the transpose, too, of the skew part :math:`(A - A^\top)/2` of full matrices, with a factor for every output.

What peft 0.21 computes with an adapter that is not merged differs from what it merges for OFT on convolutions with
kernels larger than 1, where the adapter at the identity changes outputs already; here both are what peft merges.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hypersphere import selection
from hypersphere.errors import ArgumentError
from hypersphere.nn.sharding import writes
from hypersphere.orthogonal.adapters import (
    adapted_layers,
    adapter_state_dict,
    chosen_name,
    load_adapter,
    pack,
    safetensors,
    unpack,
)
from hypersphere.orthogonal.algebra import skew

M = TypeVar("M", bound=nn.Module)

_PREFIX = "base_model.model."
_CONFIG, _STATE = "adapter_config.json", "adapter_model.safetensors"
_VERSION = "0.18.0"  # since which the series is the present one


# ------------------------------------------------------------------------------------------------------ import


def from_peft(
    model: M,
    source: str | PathLike[str] | Mapping[str, Tensor],
    config: Any = None,
    *,
    name: str = "default",
    **options: Any,
) -> M:
    """Add an OFT or BOFT adapter of Hugging Face's peft to a model, in place; it is active.

    Outputs are those of peft's merged model. Modules that were trained in full (``modules_to_save``) and biases come
    with the adapter.

    Args:
        model: The base model, plain.
        source: Folder with ``adapter_config.json`` and ``adapter_model.safetensors``, or the tensors
            (``peft.get_peft_model_state_dict``).
        config: The configuration where tensors are given: a peft object or a mapping.
        name: Name of the adapter.
        **options: What to change, as of :func:`hypersphere.orthogonal.adapt`: ``input_centric=True``, say.

    Returns:
        The model.

    Raises:
        ArgumentError: For another method, for settings that have no counterpart here (rotated embeddings, fewer than 3
            terms of the series, files of peft before 0.18 with the series, which was another), and for tensors that do
            not fit the model.

    Example:
        >>> tensors = {"base_model.model.0.oft_R.weight": torch.tensor([[0.5], [0.0]])}
        >>> config = {"peft_type": "OFT", "r": 0, "oft_block_size": 2, "use_cayley_neumann": False}
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> from_peft(model, tensors, config)[0].adapters.default.free.tolist()
        [[-0.5], [-0.0]]
    """
    selection.check_model(model)
    if isinstance(source, Mapping):
        state = source
        if config is None:
            raise ArgumentError("config", "must be given with tensors")
    else:
        state, found = _read(Path(source))
        config = found if config is None else config
    settings: dict[str, Any] = dict(config.to_dict() if hasattr(config, "to_dict") else config)
    kind = str(getattr(settings.get("peft_type"), "value", settings.get("peft_type")))
    layers, extras = _split(state, kind)
    if kind == "OFT":
        tensors, ours = _from_oft(layers, settings)
    else:
        tensors, ours = _from_boft(layers, settings)
    ours |= {"targets": list(layers), "train": list(extras), **options}
    load_adapter(model, {**tensors, **extras}, ours, name=name)
    for layer in adapted_layers(model).values():
        if name in layer.adapters:
            layer.adapters[name].constrain()  # peft does that in its forward pass
    return model


def _read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    for file in (folder / _CONFIG, folder / _STATE):
        if not file.is_file():
            raise ArgumentError(
                "source", f"must be a folder with {_CONFIG} and {_STATE}, got {folder} without {file.name}"
            )
    settings = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    settings.setdefault("peft_version", "0")  # written since 0.18
    return safetensors().load_file(str(folder / _STATE)), settings


def _split(state: Mapping[str, Tensor], kind: str) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """Tensors of each layer, and those of parameters of the model itself, by name."""
    if kind not in ("OFT", "BOFT"):
        raise ArgumentError("config", f"must be that of an OFT or a BOFT adapter, got peft_type {kind}")
    own = {"OFT": r"(.*)\.(oft_R)\.weight", "BOFT": r"(.*)\.(boft_R|boft_s)"}[kind]
    layers: dict[str, dict[str, Tensor]] = {}
    extras: dict[str, Tensor] = {}
    for key, value in state.items():
        match = re.fullmatch(own, key)
        if match:
            layers.setdefault(match[1].removeprefix(_PREFIX), {})[match[2]] = value.to(_wide(value))
        elif re.search(r"\.(b?oft_[A-Za-z_]+)(\.|$)", key):
            raise ArgumentError("source", f"must hold rotations of linear layers and convolutions, got {key}")
        else:
            extras[key.removeprefix(_PREFIX).replace(".base_layer.", ".")] = value
    if not layers:
        raise ArgumentError("source", f"must hold tensors of {kind}, got none")
    return layers, extras


def _wide(value: Tensor) -> torch.dtype:
    return torch.promote_types(value.dtype, torch.float32)


def _from_oft(
    layers: Mapping[str, Mapping[str, Tensor]], settings: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    series = bool(settings.get("use_cayley_neumann", True))
    terms = int(settings.get("num_cayley_neumann_terms", 5))
    if series:
        version = str(settings.get("peft_version") or _VERSION)
        if _before(version, _VERSION):
            raise ArgumentError(
                "config", f"must be of peft {_VERSION} or newer, whose series is another, got {version}"
            )
        if terms < 3:
            raise ArgumentError("config", f"must have num_cayley_neumann_terms of 3 or more, got {terms}")
    tensors = {f"{name}.free".lstrip("."): t["oft_R"] if series else -t["oft_R"] for name, t in layers.items()}
    blocks = int(settings.get("r") or 0)
    return tensors, {
        "method": "oft",
        "blocks": blocks or None,
        "block_size": None if blocks else int(settings.get("oft_block_size", 32)),
        "share_blocks": bool(settings.get("block_share", False)),
        "coft": bool(settings.get("coft", False)),
        "eps": float(settings.get("eps", 6e-5)),
        "cayley": "neumann" if series else "exact",
        "terms": max(terms, 4) - 2,
    }


def _before(version: str, other: str) -> bool:
    first, second = ([int(part) for part in re.findall(r"\d+", text)[:2]] for text in (version, other))
    return first < second


def _from_boft(
    layers: Mapping[str, Mapping[str, Tensor]], settings: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    factors = set()
    for name, found in layers.items():
        matrices, scale = found.get("boft_R"), found.get("boft_s")
        if matrices is None or scale is None:
            raise ArgumentError("source", f"must hold boft_R and boft_s of every layer, got one of them for {name}")
        if not bool((scale > 0).all()):
            raise ArgumentError("source", f"must hold positive factors boft_s, got others for {name}")
        # (A - A^T) / 2, and minus for the transpose
        tensors[f"{name}.free".lstrip(".")] = pack(matrices.mT - matrices).flatten(0, 1) / 2
        tensors[f"{name}.log_scale".lstrip(".")] = scale.flatten().log()
        # Of the tensors, not of the configuration: without its extension peft trains one factor, whatever that says.
        factors.add(matrices.shape[0])
    if len(factors) > 1:
        raise ArgumentError("source", f"must have the same number of factors for all layers, got {sorted(factors)}")
    blocks = int(settings.get("boft_block_num") or 0)
    return tensors, {
        "method": "boft",
        "blocks": blocks or None,
        "block_size": None if blocks else int(settings.get("boft_block_size", 4)),
        "butterfly": factors.pop(),
        "rescale": True,
        "dropout": float(settings.get("boft_dropout", 0.0)),
    }


# ------------------------------------------------------------------------------------------------------ export


def to_peft(model: nn.Module, folder: str | PathLike[str], name: str | None = None) -> None:
    """Write an adapter as a checkpoint of Hugging Face's peft (0.18 or newer), OFT or BOFT.

    An OFT adapter that rescales becomes one of BOFT with one factor, which has scales. Without its compiled extension
    (on a CPU) peft knows butterflies of one factor only, and cannot load others. Of a sharded model all processes call
    this, and the first of them writes.

    Args:
        model: The model.
        folder: Where the files go; it is made.
        name: The adapter; by default the active one.

    Raises:
        ArgumentError: For what peft has no counterpart of: layers other than ``nn.Linear`` and square ``nn.Conv2d``
            without groups (and, with OFT, without dilation), the series with fewer than 2 terms or with scales or
            butterflies, shared blocks or bounds with these, and parameters that are neither biases nor whole modules.

    Example:
        >>> import tempfile
        >>> from hypersphere.orthogonal.adapters import adapt
        >>> model = adapt(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)), block_size=4)
        >>> with tempfile.TemporaryDirectory() as path:
        ...     to_peft(model, path)
        ...     print(sorted(file.name for file in Path(path).iterdir()))
        ['adapter_config.json', 'adapter_model.safetensors']
    """
    name = chosen_name(model, name)
    state, config = adapter_state_dict(model, name)
    modules: dict[str, Any] = dict(model.named_modules())
    layers = {layer: modules[layer] for layer in config["targets"]}
    boft = config["method"] == "boft" or config["rescale"]
    if boft and (config["cayley"] != "exact" or config["share_blocks"] or config["coft"]):
        raise ArgumentError("name", "must be an adapter without series, shared blocks and bound, or without scales")
    if config["cayley"] == "neumann" and config["terms"] < 2:
        raise ArgumentError("name", f"must be an adapter with 2 terms or more, got {config['terms']}")
    written: dict[str, Tensor] = {}
    for layer_name, layer in layers.items():
        _check_layer(layer_name, layer, boft=boft)
        adapter = layer.adapters[name]
        free = state.pop(f"{layer_name}.free".lstrip("."))
        key = f"{_PREFIX}{layer_name}"
        if not boft:
            written[f"{key}.oft_R.weight"] = -free if config["cayley"] == "exact" else free
            continue
        log_scale = state.pop(f"{layer_name}.log_scale".lstrip("."), None)
        convolution = isinstance(layer, nn.Conv2d)
        scale = free.new_ones(layer.out_channels if convolution else layer.out_features)
        scale = scale if log_scale is None else log_scale.exp()
        written[f"{key}.boft_R"] = -skew(unpack(free, adapter.block)).unflatten(0, (adapter.stages, -1))
        written[f"{key}.boft_s"] = scale.view(1, -1) if convolution else scale.view(-1, 1)
    for key, value in state.items():
        owner, _, last = key.rpartition(".")
        written[f"{_PREFIX}{owner}.base_layer.{last}" if owner in layers else _PREFIX + key] = value
    settings = {
        **(_boft_settings(config, layers, name) if boft else _oft_settings(config)),
        "peft_version": _VERSION,
        "base_model_name_or_path": getattr(model, "name_or_path", None) or None,
        "inference_mode": True,
        "task_type": None,
        "target_modules": _target_modules(modules, layers),
        **_trained_in_full(modules, layers, state, "boft_only" if boft else "oft_only"),
        "init_weights": True,
    }
    place = Path(folder)
    tensors = {key: value.cpu().contiguous() for key, value in written.items()}
    library = safetensors()
    with writes(model) as here:
        if here:
            place.mkdir(parents=True, exist_ok=True)
            library.save_file(tensors, str(place / _STATE), metadata={"format": "pt"})
            (place / _CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _check_layer(name: str, layer: Any, *, boft: bool) -> None:
    kind = next((kind for kind in (nn.Linear, nn.Conv2d) if isinstance(layer, kind)), None)
    known = kind is not None or hasattr(layer, "in_features")  # a quantised linear layer
    if known and kind is nn.Conv2d:
        square = len(set(layer.kernel_size)) == 1
        known = square and layer.groups == 1 and (boft or set(layer.dilation) == {1})
    if not known:
        raise ArgumentError("name", f"must be an adapter of layers that peft can adapt, got {name}: {layer}")


def _oft_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    series = config["cayley"] == "neumann"
    return {
        "peft_type": "OFT",
        "r": config["blocks"] or 0,
        "oft_block_size": config["block_size"] or 0,
        "block_share": config["share_blocks"],
        "coft": config["coft"],
        "eps": config["eps"],
        "module_dropout": config["dropout"],
        "use_cayley_neumann": series,
        "num_cayley_neumann_terms": config["terms"] + 2 if series else 5,
    }


def _boft_settings(config: Mapping[str, Any], layers: Mapping[str, Any], name: str) -> dict[str, Any]:
    sizes = {layer.adapters[name].block for layer in layers.values()}
    if config["blocks"] is None and len(sizes) > 1:  # peft takes no nearest divisor here
        raise ArgumentError("name", f"must be an adapter whose blocks all have the same size, got {sorted(sizes)}")
    return {
        "peft_type": "BOFT",
        "boft_block_size": 0 if config["blocks"] else sizes.pop(),
        "boft_block_num": config["blocks"] or 0,
        "boft_n_butterfly_factor": config["butterfly"],
        "boft_dropout": config["dropout"],
    }


def _target_modules(modules: Iterable[str], layers: Iterable[str]) -> list[str] | str:
    """Last parts of names where these choose the same layers, otherwise a pattern of whole names."""
    chosen = set(layers)
    last = {name.rpartition(".")[2] for name in chosen}
    if {name for name in modules if name.rpartition(".")[2] in last} == chosen:
        return sorted(last)
    return "|".join(re.escape(name) for name in layers)


def _trained_in_full(
    modules: Mapping[str, Any], layers: Iterable[str], state: Iterable[str], only: str
) -> dict[str, Any]:
    """How the configuration says which of the model's own parameters come with the adapter."""
    biases = {name for name in state if name.rpartition(".")[2] == "bias"}
    rest = set(state) - {name for name in biases if name.rpartition(".")[0] in layers}
    owners = {name.rpartition(".")[0] for name in rest}
    for owner in owners:
        missing = {f"{owner}.{key}" for key, _ in modules[owner].named_parameters()} - rest
        if missing:
            raise ArgumentError("name", f"must be an adapter that trains whole modules, got one without {min(missing)}")
    return {"modules_to_save": sorted(owners) or None, "bias": only if set(state) - rest else "none"}
