"""Parameters grouped for the optimiser: convolution kernels at their own rate, without weight decay."""

from __future__ import annotations

from typing import Any

from torch import nn

from lowtide.nn.sgconv import SGConv

KERNEL_LR = 0.001


def parameter_groups(
    model: nn.Module, lr: float, weight_decay: float = 0.0, *, kernel_lr: float = KERNEL_LR
) -> list[dict[str, Any]]:
    """Groups for `torch.optim`: all other parameters with lr and weight_decay; kernels with kernel_lr and none.

    The kernels are the pieces and the learned decay of every SGConv in the model. Decaying them would shrink the kernel
    towards nothing against a norm that stays as it is. Frozen parameters are left out, shared ones come once, empty
    groups do not appear. Li et al. 2022 train kernels with 0.001 whatever the rate of the rest.

    Example:
        torch.optim.AdamW(parameter_groups(model, lr=0.01, weight_decay=0.05))
    """
    of_kernels = {id(p) for module in model.modules() if isinstance(module, SGConv) for p in module.kernel_parameters()}
    kernels = [p for p in model.parameters() if p.requires_grad and id(p) in of_kernels]
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in of_kernels]
    groups = [
        {"params": others, "lr": lr, "weight_decay": weight_decay},
        {"params": kernels, "lr": kernel_lr, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
