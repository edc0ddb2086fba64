"""Sharded training: parameters, gradients and optimiser states divided over the ranks by FSDP2.

    model = shard(densenet_bc(100, 12), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)      # after sharding: it holds this rank's shards
    loss(model(x)).backward()                                    # gradients are averaged over the ranks

`torch.distributed.fsdp.fully_shard` does the work; what is added is where to cut. A lean node reads the parameters of
everything that it joins, in the forward and once more in the backward, so all of them must be gathered together: a
dense block and its transition are one unit, a residual SGConv block is one, and the rest belongs to the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard

from lowtide.distributed.sequence import group_of
from lowtide.errors import ArgumentError, describe

Model = TypeVar("Model", bound=nn.Module)
Unit = nn.Module | Sequence[nn.Module]


def shard(
    model: Model,
    mesh: DeviceMesh | None = None,
    *,
    units: Sequence[Unit] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool = True,
) -> Model:
    """Divide a model's parameters over the ranks, in place; every memory level works and may change at any time.

    The loss is that of data parallel training: each rank computes its own batch's, and gradients are averaged. Buffers
    are not divided; as under DDP, those of a plain batch norm differ from rank to rank.

    Sharding a `DenseBlock` and its `Transition` by `fully_shard` yourself is right too, but then each is a node of its
    own, and at "block" the features between them are kept. A sharded `DenseLayer` makes its block run the plain way,
    with one warning.

    Args:
        model: `DenseNet`, `SequenceModel`, or anything that contains them or comes with `units`.
        mesh: one dimension: the ranks to divide by; two: replicated along the first, divided along the second.
            None: all ranks.
        units: modules to gather one after the other, or sequences of modules to gather together. Default: what the
            models inside ask for.
        mp_policy: the dtypes of parameters in use, of reduced gradients and of outputs.
        reshard_after_forward: free the gathered parameters between forward and backward, and gather them again.

    Raises:
        ArgumentError: nothing says where to cut.
        UnsupportedError: no process group.
    """
    where = "shard"
    group_of(None, where)
    if units is None:
        units = [unit for module in model.modules() for unit in _units_of(module)]
        if not units:
            got = type(model).__name__
            fix = "say where to cut: units=[...]"
            raise ArgumentError(
                describe(expected="a model with DenseNet or SequenceModel", got=got, where=where, fix=fix)
            )
    policy = mp_policy or MixedPrecisionPolicy()
    for unit in units:
        modules = [unit] if isinstance(unit, nn.Module) else list(unit)
        before = {id(m): _hooks(m) for m in modules}
        modules[-1].register_forward_hook(_without_view)
        fully_shard(
            modules if len(modules) > 1 else modules[0],  # pyright: ignore[reportCallIssue, reportArgumentType]
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=_Placement(mesh),
        )
        if hasattr(modules[0], "run_with"):
            register_fsdp_forward_method(modules[0], "run_with")
            for module in modules:
                # these hooks gather, as does run_with: the node that stands for these modules need not give way
                module.gathering_hooks = _hooks(module) - before[id(module)]  # pyright: ignore[reportArgumentType]
    fully_shard(model, mesh=mesh, mp_policy=policy, shard_placement_fn=_Placement(mesh))
    return model


def _units_of(module: nn.Module) -> Sequence[Unit]:
    find = getattr(module, "shard_units", None)
    return [] if find is None else find()


def _without_view(module: nn.Module, args: object, output: object) -> object:
    """FSDP hangs its backward on a unit's output and warns of views; the same memory will do if nobody calls it one."""
    del module, args
    if isinstance(output, Tensor) and output._base is not None:
        return torch.ops.aten._unsafe_view(output, output.shape)
    return output


def _hooks(module: nn.Module) -> frozenset[int]:
    return frozenset([*module._forward_pre_hooks, *module._forward_hooks])


class _Placement:
    """The axis along which a parameter is divided: the first one, unless that has fewer numbers than there are ranks
    and a later one divides evenly (the pieces of an SGConv kernel are (1 or 2, H, kernel_dim))."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self._ranks = distributed.get_world_size() if mesh is None else mesh.size(mesh.ndim - 1)

    def __call__(self, parameter: nn.Parameter) -> Shard | None:
        if parameter.dim() == 0 or parameter.shape[0] >= self._ranks:
            return None
        even = [dim for dim, size in enumerate(parameter.shape) if size and size % self._ranks == 0]
        return Shard(even[0]) if even else None
