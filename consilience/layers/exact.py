"""Layers with the same result in every lane: batch norm that ignores padding, dropout drawn from a key, convolutions
as matrix products.

`Task` swaps them in for PyTorch's own, under the same parameter names. Their extra inputs (`mask`, `key`) are buffers
that `functional_call` fills per step, which keeps the forward pass a pure function under vmap, compile and CUDA graphs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilience.core import rng
from consilience.core.settings import Invalid


class ExactBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm whose statistics count live rows only; with one value per channel it uses the running ones."""

    mask: Tensor | None

    @staticmethod
    def like(layer: nn.modules.batchnorm._BatchNorm) -> ExactBatchNorm:
        """The same layer, sharing parameters and buffers."""
        new = ExactBatchNorm(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        new._parameters, new._buffers = dict(layer._parameters), dict(layer._buffers)
        new.register_buffer("mask", None, persistent=False)
        return new.train(layer.training)

    def _check_input_dim(self, input: Tensor) -> None:
        pass

    def forward(self, input: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        if self.mask is not None:
            return self._masked(input, self.mask)
        if input.numel() == input.shape[1]:
            return self._masked(input, torch.ones_like(input[:, 0]))
        if self.momentum is None and self.running_mean is not None:
            return self._cumulative(input)
        return super().forward(input)

    def _cumulative(self, x: Tensor) -> Tensor:
        """The mean over all batches so far: torch's own reads the counter's value, which a traced step cannot."""
        mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)  # type: ignore[arg-type]
        out = F.batch_norm(x, mean, var, self.weight, self.bias, True, 1.0, self.eps)
        self._track(mean.detach(), var.detach(), torch.ones((), dtype=torch.bool, device=x.device))
        return out

    def _masked(self, x: Tensor, mask: Tensor) -> Tensor:
        shape = (1, -1) + (1,) * (x.dim() - 2)
        live = mask.reshape((-1,) + (1,) * (x.dim() - 1)).to(x.dtype)
        axes = [axis for axis in range(x.dim()) if axis != 1]
        count = mask.sum() * (x.numel() // (x.shape[0] * x.shape[1]))
        mean = (x * live).sum(axes) / count
        var = ((x - mean.view(shape)).square() * live).sum(axes) / count  # biased, as in normalisation
        if self.running_mean is not None and self.running_var is not None:
            several = count > 1
            self._track(mean.detach(), (var * count / (count - 1)).detach(), several)
            mean = torch.where(several, mean, self.running_mean)
            var = torch.where(several, var, self.running_var)
        out = (x - mean.view(shape)) * torch.rsqrt(var + self.eps).view(shape)
        if self.weight is not None:
            out = out * self.weight.view(shape)
        return out if self.bias is None else out + self.bias.view(shape)

    def _track(self, mean: Tensor, unbiased_var: Tensor, several: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(several.to(torch.int64))
        seen = self.num_batches_tracked
        factor: Any = 1.0 / seen.clamp(min=1).to(mean.dtype) if self.momentum is None else self.momentum
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased_var)):
            running.copy_(torch.where(several, (1 - factor) * running + factor * new, running))


class KeyedDropout(nn.Module):
    """Dropout whose pattern is a function of (key, layer, position): equal in every lane and on every device."""

    key: Tensor | None
    keyed = True  # see `key_inputs`

    def __init__(self, p: float, layer: int, whole_channels: bool) -> None:
        super().__init__()
        self.p, self.layer, self.whole_channels = p, layer, whole_channels
        self.calls = 0  # in this pass: a layer that is used twice draws two patterns; Task starts it afresh
        self.register_buffer("key", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if self.key is None:
            raise Invalid("a model with dropout was trained without a key: pass Task.apply(..., key=batch.key)")
        refuse_recomputing("dropout")
        shape = x.shape[:2] + (1,) * (x.dim() - 2) if self.whole_channels else x.shape
        count = shape.numel() if isinstance(shape, torch.Size) else torch.Size(shape).numel()
        keep = rng.keep_mask(rng.fold(self.key, self.layer + 2**16 * self.calls), count, self.p).view(shape)
        self.calls += 1
        return x * keep.to(x.dtype) / (1 - self.p) if self.p < 1 else x * 0


def refuse_recomputing(what: str) -> None:
    """Refuse draws inside `torch.utils.checkpoint`, whose recomputation would number the calls differently."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and "checkpoint" in getattr(hooks[0], "__qualname__", ""):
        raise Invalid(
            f"{what} inside torch.utils.checkpoint would be drawn anew when the activations are computed again: switch "
            "gradient checkpointing off (gradient_checkpointing_disable() in Hugging Face models), or the dropout"
        )


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)  # a client is one process
_DROPOUTS = {nn.Dropout: False, nn.Dropout1d: True, nn.Dropout2d: True, nn.Dropout3d: True}


def make_exact(module: nn.Module) -> nn.Module:
    """Swap batch norm and dropout layers, in place, for their exact counterparts; refuse what has none.

    A part may have a method `compute_less()`, by which it leaves out what its output does not depend on.
    """
    for part in list(module.modules()):
        if hasattr(part, "compute_less"):
            part.compute_less()  # type: ignore[operator]
    # torch's transformer layers may have the batch in the second dimension: their dropout is drawn by position
    parents = (part for part in module.modules() if type(part).__module__ == nn.TransformerEncoderLayer.__module__)
    inside = {id(child) for part in parents for child in part.children()}
    swapped: dict[int, nn.Module] = {}
    for name, layer in list(module.named_modules()):
        if type(layer) in _BATCH_NORMS:
            swapped[id(layer)] = ExactBatchNorm.like(layer)
        elif type(layer) in _DROPOUTS and id(layer) not in inside:
            rate, whole = layer.p, _DROPOUTS[type(layer)]
            swapped[id(layer)] = KeyedDropout(rate, len(swapped), whole)
        elif isinstance(layer, nn.RNNBase):
            layer.flatten_parameters = _leave_apart  # type: ignore[method-assign]
        elif isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and not layer.scale_grad_by_freq:
            layer.sparse = False  # the same gradient, as a plain tensor
        else:
            _refuse_inexact(name, layer)
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):  # a layer may have several names
            if id(child) in swapped:
                setattr(parent, name, swapped[id(child)])
    return swapped.get(id(module), module)


def _leave_apart() -> None:
    """Do not flatten weights for cuDNN, since every call has different weights."""


def _refuse_inexact(name: str, layer: nn.Module) -> None:
    kind = f"{type(layer).__name__} {name!r}"
    if getattr(layer, "scale_grad_by_freq", False):
        raise Invalid(f"{kind} counts how often a token is in the batch, padding too: use scale_grad_by_freq=False")
    tracking = isinstance(layer, nn.modules.instancenorm._InstanceNorm) and layer.track_running_stats
    if tracking or isinstance(layer, nn.modules.batchnorm._BatchNorm):
        raise Invalid(
            f"{kind} keeps statistics over a batch in a way that cannot tell padding from rows: use nn.BatchNorm1d, "
            "2d or 3d itself, nn.GroupNorm, or instance norm without running statistics"
        )


def extra_inputs(module: nn.Module, kind: type[nn.Module], field: str) -> tuple[str, ...]:
    """The full names of the buffers to fill, such as 'layer1.0.bn1.mask'."""
    return tuple(f"{name}.{field}" if name else field for name, m in module.named_modules() if type(m) is kind)


def key_inputs(module: nn.Module) -> tuple[str, ...]:
    """The buffers `key` of dropout, and of any layer that says `keyed = True` because it draws from a key in training.

    Such a layer registers a buffer `key` of None, and reads there the int64 scalar that seeds its draws.
    """
    return tuple(f"{n}.key" if n else "key" for n, part in module.named_modules() if getattr(part, "keyed", False))


class MatmulConv2d(nn.Module):
    """A convolution as shifts and a matrix product: over a group of clients it becomes one batched product.

    vmap turns a convolution with one kernel per client into a grouped convolution, which GPU libraries run slowly.
    On a GPU, in tf32, it is one kernel of ours (`client_convolutions`), which forms no columns.
    """

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.kernel, self.stride, self.dilation = layer.kernel_size, layer.stride, layer.dilation
        assert not isinstance(layer.padding, str)
        self.padding = (layer.padding[0], layer.padding[1])

    def forward(self, x: Tensor) -> Tensor:
        if _on_gpu(x) and self.kernel != (1, 1) and not self._cuts(x):
            from consilience.layers import client_convolutions

            if client_convolutions.usable(x, self.weight):
                geometry = (self.stride, self.padding, self.dilation)
                return client_convolutions.convolve(x, self.weight, self.bias, *geometry)
        (top, left), (down, right) = self.padding, self.stride
        x = F.pad(x, (left, left, top, top))
        reach = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel)]
        height, width = ((x.shape[2 + i] - reach[i]) // self.stride[i] + 1 for i in (0, 1))
        if self._cuts(x):
            patches = x.unflatten(3, (width, right)).unflatten(2, (height, down)).permute(0, 2, 4, 1, 3, 5)
            out = F.linear(patches.flatten(3).flatten(1, 2), self.weight.flatten(1), self.bias)
            return out.transpose(1, 2).unflatten(-1, (height, width))
        # shifted views, not F.unfold: the gradient is then a sum of padded slices, which needs no atomic additions
        shifted = [
            x[:, :, i : i + (height - 1) * down + 1 : down, j : j + (width - 1) * right + 1 : right]
            for i in range(0, self.kernel[0] * self.dilation[0], self.dilation[0])
            for j in range(0, self.kernel[1] * self.dilation[1], self.dilation[1])
        ]
        columns = torch.stack(shifted, 2).flatten(1, 2).flatten(2)  # [B, C kh kw, L]
        out = F.linear(columns.transpose(1, 2), self.weight.flatten(1), self.bias)  # [B, L, O]
        return out.transpose(1, 2).unflatten(-1, (height, width))

    def _cuts(self, x: Tensor) -> bool:
        """Whether pictures are cut into patches that neither overlap nor leave a rest, as vision transformers do."""
        fits = x.shape[2] % self.stride[0] == 0 and x.shape[3] % self.stride[1] == 0
        return fits and self.kernel == self.stride and self.dilation == (1, 1) and self.kernel != (1, 1)


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def use_matmul(module: nn.Module) -> nn.Module:
    """Swap every plain 2-d convolution, in place."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            plain = type(child) is nn.Conv2d and child.groups == 1 and child.padding_mode == "zeros"
            if plain and not isinstance(child.padding, str):
                setattr(parent, name, MatmulConv2d(child))  # type: ignore[arg-type]
    return module
