"""Optimizers of a user's own that keep their state in unusual places."""

import torch


class Odd(torch.optim.SGD):
    """SGD that keeps a list of what it has seen, which cannot be saved."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("history", []).append(float(parameter.norm()))


class Counting(torch.optim.SGD):
    """SGD whose step shrinks with a counter that it keeps in its parameter groups, as schedule-free optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] = group["lr"] / group["k"]
        super().step(closure)


class Late(torch.optim.SGD):
    """SGD that adds the gradient before, which it begins to keep in its second step."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                before = state.get("before")
                if state.get("seen"):
                    state["before"] = parameter.grad.clone()
                state["seen"] = True
                parameter.sub_(parameter.grad + (0 if before is None else before), alpha=group["lr"])
