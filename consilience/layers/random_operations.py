"""Torch's operations that `KeyedDraws` replaces, and by what: random ones, and some that lanes could not run.

A replacement is called as replacement(draws, operation, *arguments): `draws.key(operation)` is the key of this call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from consilience.core.settings import Invalid
from consilience.layers import attention, recurrent, samplers

_SELU = 1.7580993408473766  # scale x alpha of SELU: what alpha dropout sets a dropped value to, negated


class Draws(Protocol):
    """What a replacement needs of the mode that calls it; inside `with draws:` operations are replaced, too."""

    mask: Tensor | None

    def key(self, func: Any) -> Tensor:
        """The key of the next call."""
        ...

    def permutation(self, func: Any, length: int) -> Tensor:
        """A random permutation of this length."""
        ...

    def spread(self, value: Tensor) -> Tensor:
        """A tensor with a copy for each client."""
        ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *_: Any) -> Any: ...


def name_of(func: Any) -> str:
    """The name of an operation."""
    return getattr(func, "__name__", str(func))


Replacement = Callable[..., Any]


def _size(size: Sequence[Any]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)


def _factory(sample: Callable[..., Tensor], like: bool) -> Replacement:
    """torch.rand, torch.randn; with `like`, torch.rand_like, torch.randn_like."""

    def draw(mode: Draws, func: Any, *args: Any, size: Any = None, input: Any = None, **options: Any) -> Tensor:
        template = (args[0] if input is None else input) if like else None
        shape = _size(args if size is None else (size,)) if template is None else template.shape
        dtype = options.get("dtype") or (torch.get_default_dtype() if template is None else template.dtype)
        return _finished(sample(mode.key(func), shape, dtype), template, options)

    return draw


def _finished(drawn: Tensor, template: Tensor | None, options: dict[str, Any]) -> Tensor:
    """The result on the requested device, with the other requested options."""
    device = options.get("device") or (torch.get_default_device() if template is None else template.device)
    drawn = drawn.to(device)
    if options.get("out") is not None:
        return options["out"].copy_(drawn)
    return drawn.requires_grad_() if options.get("requires_grad") else drawn


def _whole_numbers(like: bool) -> Replacement:
    """torch.randint([low,] high, size), torch.randint_like(input, [low,] high)."""

    def draw(mode: Draws, func: Any, *args: Any, **options: Any) -> Tensor:
        rest = list(args)
        template = (options.pop("input") if "input" in options else rest.pop(0)) if like else None
        shape = tuple(options["size"] if "size" in options else rest.pop()) if template is None else template.shape
        high = options["high"] if "high" in options else rest.pop()
        low = options.get("low", rest.pop() if rest else 0)
        dtype = options.get("dtype") or (torch.int64 if template is None else template.dtype)
        return _finished(samplers.whole(mode.key(func), shape, dtype, low, high), template, options)

    return draw


def _randperm(mode: Draws, func: Any, n: int, **options: Any) -> Tensor:
    return _finished(mode.permutation(func, n).to(options.get("dtype") or torch.int64), None, options)


def _normal(mode: Draws, func: Any, mean: Any = 0.0, std: Any = 1.0, size: Any = None, **options: Any) -> Tensor:
    given = [value for value in (mean, std) if isinstance(value, Tensor)]
    shape = torch.broadcast_shapes(*(value.shape for value in given)) if given else tuple(size)
    dtype = given[0].dtype if given else options.get("dtype") or torch.get_default_dtype()
    drawn = samplers.normal(mode.key(func), shape, dtype)
    return _finished(drawn, given[0] if given else None, options) * std + mean


def _bernoulli(mode: Draws, func: Any, input: Tensor, p: Any = None, **options: Any) -> Tensor:
    chance = input if p is None else p
    drawn = samplers.unit(mode.key(func), input.shape).to(input.device) < chance
    return _finished(drawn.to(input.dtype), input, options)


def _multinomial(mode: Draws, func: Any, input: Tensor, num_samples: int, replacement: bool = False,
                 **options: Any) -> Tensor:  # fmt: skip
    return _finished(samplers.categories(mode.key(func), input, num_samples, replacement), input, options)


def _fill(sample: Callable[..., Tensor], **defaults: Any) -> Replacement:
    """Tensor.normal_(mean, std) and others: overwrite a tensor with draws."""

    def draw(mode: Draws, func: Any, target: Tensor, *args: Any, **options: Any) -> Tensor:
        options.pop("generator", None)
        values = {**defaults, **dict(zip(defaults, args)), **options}
        return target.copy_(sample(mode.key(func), target.shape, target.dtype, *values.values()))

    return draw


def _bernoulli_into(key: Tensor, shape: Sequence[int], dtype: torch.dtype, p: Any) -> Tensor:
    return (samplers.unit(key, shape) < p).to(dtype)


def _geometric(key: Tensor, shape: Sequence[int], dtype: torch.dtype, p: float) -> Tensor:
    return (torch.log1p(-(samplers.unit(key, shape) + 2.0**-54)) / math.log1p(-p)).ceil().clamp(min=1).to(dtype)


def _cauchy(key: Tensor, shape: Sequence[int], dtype: torch.dtype, median: float, sigma: float) -> Tensor:
    return (median + sigma * torch.tan(math.pi * (samplers.unit(key, shape) - 0.5))).to(dtype)


def _log_normal(key: Tensor, shape: Sequence[int], dtype: torch.dtype, mean: float, std: float) -> Tensor:
    return samplers.normal(key, shape, dtype, mean, std).exp()


def _random(key: Tensor, shape: Sequence[int], dtype: torch.dtype, first: int, second: int | None) -> Tensor:
    if second is None:  # random_(to), or random_() over all that the type holds
        most = 2 ** {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}.get(dtype, 0)
        first, second = 0, first or (most if dtype.is_floating_point else torch.iinfo(dtype).max)
    return samplers.whole(key, shape, dtype, first, second)


def _dropout(*, channels: bool = False, alpha: bool = False, in_place: bool = False) -> Replacement:
    """torch.dropout(input, p, train) and its kin."""

    def draw(mode: Draws, func: Any, input: Tensor, p: float, train: bool) -> Tensor:
        if not train or p == 0:
            return input
        shape = (*input.shape[:2], *(1,) * (input.dim() - 2)) if channels else input.shape
        kept = samplers.keep(mode.key(func), shape, p).to(input.dtype)
        if alpha:
            scale = 1 / math.sqrt((_SELU**2 * p + 1) * (1 - p)) if p < 1 else 0.0
            out = input * (kept * scale) + ((kept - 1) * _SELU + _SELU * p) * scale
        else:
            out = input * kept / (1 - p) if p < 1 else input * 0
        return input.copy_(out) if in_place else out

    return draw


def _native_dropout(mode: Draws, func: Any, input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    kept = samplers.keep(mode.key(func), input.shape, p)
    return (input * kept.to(input.dtype) / (1 - p) if p < 1 else input * 0), kept


def _rrelu(mode: Draws, func: Any, input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3,
           training: bool = False) -> Tensor:  # fmt: skip
    if not training:
        return func(input, lower, upper, training)
    slope = samplers.uniform(mode.key(func), input.shape, input.dtype, lower, upper)
    out = torch.where(input < 0, input * slope, input)
    return input.copy_(out) if func is torch.rrelu_ else out


def _attention(mode: Draws, func: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
               dropout_p: float = 0.0, is_causal: bool = False, **options: Any) -> Tensor:  # fmt: skip
    if dropout_p == 0:
        return attention.folded(query, key, value, attn_mask, is_causal, **options)
    shape = (*query.shape[:-1], key.shape[-2])
    kept = samplers.keep(mode.key(func), shape, dropout_p)
    return attention.with_dropout(query, key, value, attn_mask, is_causal, kept, dropout_p, **options)


def _recurrent(mode: Draws, func: Any, *args: Any) -> Any:
    def drop(x: Tensor, p: float) -> Tensor:
        return REPLACED[torch.dropout](mode, func, x, p, True)

    return recurrent.layer_by_layer(func, args, drop)


def _fractional_pool(
    whole: Any,
    mode: Draws,
    func: Any,
    input: Tensor,
    kernel_size: Any,
    output_size: Any = None,
    output_ratio: Any = None,
    return_indices: bool = False,
    _random_samples: Tensor | None = None,
) -> Any:
    with mode:
        out = whole(input, kernel_size, output_size, output_ratio, True, _random_samples)
    return out if return_indices else out[0]


def _normalize(mode: Draws, func: Any, *args: Any, out: Tensor | None = None, **options: Any) -> Tensor:
    return func(*args, **options) if out is None else out.copy_(func(*args, **options))  # vmap has no rule for out=


def _embedding_renorm(
    mode: Draws, func: Any, weight: Tensor, input: Tensor, max_norm: float, norm_type: float
) -> Tensor:
    # torch's kernel for a GPU depends on how many tokens differ, which a captured step cannot; padding does not count
    live = torch.ones_like(input, dtype=torch.int64)
    if mode.mask is not None and input.dim() > 0 and input.shape[0] == mode.mask.shape[0]:
        live = live * mode.mask.to(torch.int64).reshape(-1, *(1,) * (input.dim() - 1))
    used = torch.zeros_like(weight[:, 0], dtype=torch.int64).scatter_add(0, input.flatten(), live.flatten())
    norm = torch.linalg.vector_norm(weight, norm_type, -1)
    scale = torch.where((used > 0) & (norm > max_norm), max_norm / (norm + 1e-7), torch.ones_like(norm))
    return weight.copy_(weight * scale.unsqueeze(-1))


def _group_norm(mode: Draws, func: Any, input: Tensor, *args: Any, **options: Any) -> Tensor:
    # torch crashes in the gradient by the weight alone if the input has its channels last
    if torch.is_grad_enabled() and not input.requires_grad and peek_interpreter_stack() is None:
        input = input.contiguous()
    return func(input, *args, **options)


def _layer_norm(mode: Draws, func: Any, input: Tensor, *args: Any, **options: Any) -> Tensor:
    # autocast leaves its result in single precision, and with it a transformer's residual stream: twice the bytes
    kind = input.device.type
    if not torch.is_autocast_enabled(kind):
        return func(input, *args, **options)
    return func(input.float(), *args, **options).to(torch.get_autocast_dtype(kind))


def _empty(mode: Draws, func: Any, *args: Any, **options: Any) -> Tensor:
    return mode.spread(func(*args, **options))


def _refused(mode: Draws, func: Any, *_: Any, **__: Any) -> Any:
    raise Invalid(f"{name_of(func)} cannot be drawn from the batch's key: its draws are by rejection, of a number that "
                  "depends on values. Use a distribution with a closed form (normal, uniform, exponential, "
                  "Bernoulli, categorical)")  # fmt: skip


NESTED = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    F.rrelu,
    F.gumbel_softmax,
    F.multi_head_attention_forward,
    F.fractional_max_pool2d_with_indices,
    F.fractional_max_pool3d_with_indices,
    F.embedding,
    F.embedding_bag,
}
REPLACED: dict[Any, Replacement] = {
    torch.rand: _factory(samplers.uniform, like=False),
    torch.randn: _factory(samplers.normal, like=False),
    torch.rand_like: _factory(samplers.uniform, like=True),
    torch.randn_like: _factory(samplers.normal, like=True),
    torch.randint: _whole_numbers(like=False),
    torch.randint_like: _whole_numbers(like=True),
    torch.randperm: _randperm,
    torch.normal: _normal,
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    torch.multinomial: _multinomial,
    Tensor.multinomial: _multinomial,
    Tensor.normal_: _fill(samplers.normal, mean=0.0, std=1.0),
    Tensor.uniform_: _fill(samplers.uniform, **{"from": 0.0, "to": 1.0}),
    Tensor.bernoulli_: _fill(_bernoulli_into, p=0.5),
    Tensor.exponential_: _fill(samplers.exponential, lambd=1.0),
    Tensor.geometric_: _fill(_geometric, p=0.5),
    Tensor.cauchy_: _fill(_cauchy, median=0.0, sigma=1.0),
    Tensor.log_normal_: _fill(_log_normal, mean=1.0, std=2.0),
    Tensor.random_: _fill(_random, **{"from": 0, "to": None}),
    torch.dropout: _dropout(),
    torch.dropout_: _dropout(in_place=True),
    torch.feature_dropout: _dropout(channels=True),
    torch.feature_dropout_: _dropout(channels=True, in_place=True),
    torch.alpha_dropout: _dropout(alpha=True),
    torch.alpha_dropout_: _dropout(alpha=True, in_place=True),
    torch.feature_alpha_dropout: _dropout(alpha=True, channels=True),
    torch.feature_alpha_dropout_: _dropout(alpha=True, channels=True, in_place=True),
    torch.native_dropout: _native_dropout,
    torch.rrelu: _rrelu,
    torch.rrelu_: _rrelu,
    F.scaled_dot_product_attention: _attention,
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent),
    F.fractional_max_pool2d: functools.partial(_fractional_pool, F.fractional_max_pool2d_with_indices),
    F.fractional_max_pool3d: functools.partial(_fractional_pool, F.fractional_max_pool3d_with_indices),
    torch.embedding_renorm_: _embedding_renorm,
    F.group_norm: _group_norm,
    F.layer_norm: _layer_norm,
    F.normalize: _normalize,
    torch.empty: _empty,
    **dict.fromkeys((torch.poisson, torch.binomial, torch._standard_gamma, torch._sample_dirichlet), _refused),
}
