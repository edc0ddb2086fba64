"""State dicts in the layout of the public SGConv code, made to fit ours."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lowtide.errors import CheckpointError, describe

WHERE = "SGConv.load_public"
FLAG = "kernel_norm_initialized"


def read_public(public: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], bool]:
    """(a state dict that fits `ours` strictly, whether it brought the norm).

    Raises:
        CheckpointError: a name is missing or too many, or a tensor has another shape than ours.
    """
    renamed = {_our_name(name): tensor for name, tensor in public.items() if name != FLAG}
    norm = renamed.get("kernel_norm")
    made = norm is not None and norm.dim() == 3 and (FLAG not in public or bool(public[FLAG]))
    if not made:
        renamed["kernel_norm"] = ours["kernel_norm"]
    missing, unknown = sorted(ours.keys() - renamed.keys()), sorted(renamed.keys() - ours.keys())
    if missing or unknown:
        got = "; ".join(
            f"{what}: {', '.join(names)}" for what, names in (("missing", missing), ("unknown", unknown)) if names
        )
        fix = "construct the layer in the file's mode (scales, decay, postact, channels)"
        raise CheckpointError(describe(expected="the names of this layer", got=got, where=WHERE, fix=fix))
    fitting = {}
    for name, own in ours.items():
        tensor = renamed[name]
        if _without_ones(tensor) != _without_ones(own):
            expected = f"{name} {tuple(own.shape)}"
            raise CheckpointError(describe(expected=expected, got=str(tuple(tensor.shape)), where=WHERE))
        fitting[name] = tensor.reshape(own.shape)
    return fitting, made


def _our_name(name: str) -> str:
    """A layer with a gate stores its map as the first of two modules."""
    head, tail = "output_linear.0.", "output_linear."
    return tail + name[len(head) :] if name.startswith(head) else name


def _without_ones(tensor: Tensor) -> list[int]:
    """Sizes but for axes of one: a bias (out, 1) is a bias (out,)."""
    return [size for size in tensor.shape if size != 1]
