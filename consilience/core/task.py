"""What is learned: a module, a loss and its metrics, as pure functions of a tree of tensors."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from consilience.core import tree
from consilience.core.layers import ExactBatchNorm, extra_inputs, key_inputs, make_exact, use_matmul
from consilience.core.losses import LOSSES, Loss
from consilience.core.settings import Invalid, nearest
from consilience.core.tree import Tree


class Task:
    """A model and its loss; the model's values live in trees `{"params": ..., "buffers": ...}`, never in the module.

        task = cs.Task(nn.Linear(4, 3))
        output, buffers = task.apply(task.start(), x, train=False)

    module: any `nn.Module` that works under `torch.func`; it is copied, never changed. Parameters with
    `requires_grad=False` (a frozen encoder) are constants: they are never trained or sent.
    loss: "cross_entropy", "binary_cross_entropy" (one logit), "squared_error", or a function (output, target) -> [B]
    loss per example.
    """

    def __init__(self, module: nn.Module, loss: str | Loss = "cross_entropy") -> None:
        if isinstance(loss, str) and loss not in LOSSES:
            raise Invalid(f"loss = {loss!r} is not one of {', '.join(LOSSES)}{nearest(loss, LOSSES)}")
        for name, parameter in module.named_parameters():
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise Invalid(f"parameter {name!r} is not initialised: run the module once on a batch first")
        self.module = module
        self.loss_name = loss if isinstance(loss, str) else getattr(loss, "__name__", "custom")
        self.losses: Loss = LOSSES[loss] if isinstance(loss, str) else loss
        exact = make_exact(copy.deepcopy(module))
        frozen = _frozen_modules(module)
        self._exact = exact
        self._parameters = tuple(n for n, p in module.named_parameters() if p.requires_grad)
        self._buffers = tuple(n for n, _ in module.named_buffers() if not n.startswith(frozen))
        if not self._parameters:
            raise Invalid("the model has no trainable parameters: nothing can be learned")
        self._masks = extra_inputs(exact, ExactBatchNorm, "mask")
        self._keys = key_inputs(exact)
        self._replicas = threading.local()  # functional_call swaps values into the module: one per thread
        self._place: tuple[torch.device, torch.dtype | None] = (torch.device("cpu"), None)
        self.ready()

    def __repr__(self) -> str:
        count = sum(p.numel() for p in self.module.parameters() if p.requires_grad)
        return f"Task({type(self.module).__name__} with {count:,} parameters, loss={self.loss_name!r})"

    def start(self) -> Tree:
        """The module's present values: the model of round 0."""
        parameters, buffers = dict(self.module.named_parameters()), dict(self.module.named_buffers())
        values = {
            "params": {name: parameters[name] for name in self._parameters},
            "buffers": {name: buffers[name] for name in self._buffers},
        }
        return tree.clone(values)

    def to(self, device: torch.device, dtype: torch.dtype | None = None, *, matmul: bool = False) -> Task:
        """The same task with its constants on a device and in a dtype, and convolutions as matrix products if asked."""
        moved = copy.copy(self)
        if matmul:
            moved._exact = use_matmul(copy.deepcopy(self._exact))
        moved._replicas, moved._place = threading.local(), (device, dtype)
        return moved.ready()

    def ready(self) -> Task:
        """Make this thread's working copies of the module, which cannot be made inside a traced function."""
        device, dtype = self._place
        for name in ("train", "eval"):
            if not hasattr(self._replicas, name):
                module = copy.deepcopy(self._exact).requires_grad_(False).train(name == "train")
                for prefix in _frozen_modules(self.module):  # frozen parts keep their statistics
                    module.get_submodule(prefix[:-1]).eval()
                setattr(self._replicas, name, module.to(device=device, dtype=dtype))
        return self

    def apply(
        self,
        model: Tree,
        x: Any,
        *,
        train: bool,
        mask: Tensor | None = None,
        key: Tensor | None = None,
        through: Callable[[nn.Module, Any], Any] | None = None,
    ) -> tuple[Any, Tree]:
        """(output, buffers after the pass); `mask` and `key` serve batch norm and dropout in training.

        `through(module, x)` may use the module's other methods: what it returns is the output instead of forward's.
        """
        buffers = {name: value.clone() for name, value in model["buffers"].items()} if train else model["buffers"]
        values = {**model["params"], **buffers, **self._extra(train, mask, key)}
        module = self._replica(train)
        for name in self._keys:
            module.get_submodule(name.rpartition(".")[0]).calls = 0  # type: ignore[assignment]
        with _forwarding_to(through, module):
            return functional_call(module, values, (x,)), buffers

    def features(
        self, model: Tree, x: Any, *, train: bool = False, mask: Tensor | None = None, key: Tensor | None = None
    ) -> Tensor:
        """The representation in front of the last layer: the module's own `features(x)`."""
        if not hasattr(self.module, "features"):
            raise Invalid(f"{type(self.module).__name__} has no features(x) method: add one that returns [B, d]")
        return self.apply(model, x, train=train, mask=mask, key=key, through=_features)[0]

    def decide(self, output: Tensor) -> Tensor:
        """Class numbers from the model's output: the largest logit, or the sign of a single one."""
        if self.loss_name == "binary_cross_entropy":
            return (output > 0).to(torch.int64)
        return output.argmax(1)

    @property
    def decides(self) -> bool:
        """Whether the output stands for classes, so that accuracy means something."""
        return self.loss_name != "squared_error"

    def trained(self, model: Tree) -> nn.Module:
        """A copy of the user's module holding these values, ready to use or save."""
        module = copy.deepcopy(self.module)
        values = {**model["params"], **model["buffers"]}
        with torch.no_grad():
            for name, target in (*module.named_parameters(), *module.named_buffers()):
                if name in values:
                    target.copy_(values[name])
        return module.eval()

    def _extra(self, train: bool, mask: Tensor | None, key: Tensor | None) -> dict[str, Tensor]:
        extra: dict[str, Tensor] = {}
        if train and mask is not None:
            extra.update(dict.fromkeys(self._masks, mask))
        if train and key is not None:
            extra.update(dict.fromkeys(self._keys, key))
        return extra

    def _replica(self, train: bool) -> nn.Module:
        self.ready()
        return self._replicas.train if train else self._replicas.eval

    @property
    def convolves(self) -> bool:
        """Whether the model has 2-d convolutions."""
        return any(isinstance(part, nn.Conv2d) for part in self.module.modules())


def _frozen_modules(module: nn.Module) -> tuple[str, ...]:
    """Name prefixes of submodules that own parameters, none of them trainable."""
    return tuple(
        f"{name}."
        for name, part in module.named_modules()
        if name and any(True for _ in part.parameters()) and not any(p.requires_grad for p in part.parameters())
    )


def _features(module: Any, x: Any) -> Tensor:
    return module.features(x)


@contextlib.contextmanager
def _forwarding_to(through: Callable[[nn.Module, Any], Any] | None, module: nn.Module) -> Iterator[None]:
    if through is None:
        yield
        return
    module.forward = functools.partial(through, module)
    try:
        yield
    finally:
        del module.forward
