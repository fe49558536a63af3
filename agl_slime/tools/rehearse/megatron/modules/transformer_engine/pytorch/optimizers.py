"""AdamW in the form of Transformer Engine's: its step is the group's, from which Megatron resumes."""

from __future__ import annotations

from typing import Any

import torch

FusedSGD = torch.optim.SGD


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        **_: Any,
    ) -> None:
        if not adam_w_mode:
            raise NotImplementedError("Adam with L2 decay does not run on a CPU: give AdamW, Megatron's default")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = step = group.get("step", 0) + 1
            (beta1, beta2), lr = group["betas"], group["lr"]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["exp_avg"].lerp_(gradient, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                spread = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.addcdiv_(state["exp_avg"], spread, value=-lr / (1 - beta1**step))
