"""LAMB for very large batches: Adam whose step, per weight tensor, is scaled to the norm of the tensor.

Source: You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", arXiv:1904.00962,
algorithm 2.
"""

import torch

from utils.optim.adam_by_weight import AdamByWeight, Group, adam_directions


class Lamb(AdamByWeight):
    """x ← x − lr · |x| / |r + λx| · (r + λx) for each weight tensor x, with Adam's direction r = m̂ / (√v̂ + ε).

    This variant has both bias corrections of Adam. λ (`weight_decay`) is decoupled and inside the norm as in the paper;
    the ratio of norms (trust ratio) is not clamped (the paper's φ is the identity), and is 1 if either norm is 0.
    Other parameters use r itself, without decay and trust ratio: their norm is no measure of a step.
    """

    def _update(self, group: Group, parameters: list[torch.Tensor], found_inf: torch.Tensor | None) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        directions = adam_directions(gradients, self._states(parameters), group, found_inf)
        if group["weight_decay"]:
            torch._foreach_add_(directions, parameters, alpha=group["weight_decay"])
        if group["is_weights"]:
            norms, step_norms = (torch.stack(torch._foreach_norm(tensors)) for tensors in (parameters, directions))
            lrs = group["lr"] * (norms / step_norms).masked_fill((norms == 0) | (step_norms == 0), 1.0)
        else:
            lrs = group["lr"] * directions[0].new_ones(())
        if found_inf is not None:
            lrs = lrs.masked_fill(found_inf > 0, 0.0)
        torch._foreach_mul_(directions, list(lrs.unbind()) if group["is_weights"] else lrs)
        torch._foreach_sub_(parameters, directions)
