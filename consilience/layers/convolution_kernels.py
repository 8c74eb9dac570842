"""Triton kernels that convolve the pictures of many clients at once, each client with weights of its own.

A convolution is one matrix product per client, whose left factor has a row for every output pixel and a column for
every weight of a kernel. The kernels form that factor in registers, tile by tile, and never write it to memory: the
columns of the usual 3 x 3 kernel take nine times the memory of the pictures. No sum depends on the order in which
programs run, so that results repeat bit for bit.

This module imports Triton, which PyTorch's builds for CUDA bring along; `client_convolutions` imports it where it is
there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

ENOUGH_PROGRAMS = 512  # fewer leave a large GPU idle; a constant, so that sums are split alike on every device
LEAST_PIXELS = 256  # of one part of a sum over pixels
SPLIT = True  # factors of gradients, see `_correlate`


@dataclass(frozen=True)
class Geometry:
    """Stride, padding and dilation, vertical and horizontal."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def output_size(self, size: tuple[int, int], kernel: tuple[int, int]) -> tuple[int, int]:
        """Height and width of the convolved picture."""
        height, width = (
            (size[at] + 2 * self.padding[at] - self.dilation[at] * (kernel[at] - 1) - 1) // self.stride[at] + 1
            for at in (0, 1)
        )
        return height, width

    @property
    def constants(self) -> dict[str, int]:
        """As the kernels take them."""
        names = ("STRIDE", "PADDING", "DILATION")
        pairs = (self.stride, self.padding, self.dilation)
        return {f"{name}_{side}": pair[at] for name, pair in zip(names, pairs) for at, side in enumerate("HW")}


@triton.jit
def _convolve(
    source, weights, bias, target, tiles, pixels, area, columns, height, width,
    s_client, s_picture, s_channel, s_line, s_column,
    CHANNELS: tl.constexpr, OUTPUTS: tl.constexpr, TAPS: tl.constexpr, KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PADDING_H: tl.constexpr, PADDING_W: tl.constexpr,
    DILATION_H: tl.constexpr, DILATION_W: tl.constexpr, TRANSPOSED: tl.constexpr, BIASED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """target [client, pixel, output] from source [client, picture, channel, line, column], by [client, output, weight].

    A target pixel has `columns` pixels to a line and `area` to a picture. TRANSPOSED: the source is the gradient of a
    convolution's result, the target that of its input.
    """
    client = (tl.program_id(0) // tiles).to(tl.int64)
    pixel = (tl.program_id(0) % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    source += client * s_client
    weights += client * (OUTPUTS * TAPS * CHANNELS)
    picture, rest = pixel // area, pixel % area
    line, column = rest // columns, rest % columns
    if TRANSPOSED:
        line, column = line + PADDING_H, column + PADDING_W
    else:
        line, column = line * STRIDE_H - PADDING_H, column * STRIDE_W - PADDING_W
    here = (pixel < pixels)[:, None]
    one_tap: tl.constexpr = CHANNELS % BLOCK_K == 0
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, TAPS * CHANNELS, BLOCK_K):
        weight = first + tl.arange(0, BLOCK_K)
        channel = weight % CHANNELS
        if one_tap:
            tap = first // CHANNELS
            down, right = (tap // KERNEL_W) * DILATION_H, (tap % KERNEL_W) * DILATION_W
        else:
            tap = weight // CHANNELS
            down, right = ((tap // KERNEL_W) * DILATION_H)[None, :], ((tap % KERNEL_W) * DILATION_W)[None, :]
        if TRANSPOSED:
            at_line, at_column = line[:, None] - down, column[:, None] - right
            inside = (at_line >= 0) & (at_column >= 0)
            if STRIDE_H > 1 or STRIDE_W > 1:
                inside = inside & (at_line % STRIDE_H == 0) & (at_column % STRIDE_W == 0)
                at_line, at_column = at_line // STRIDE_H, at_column // STRIDE_W
        else:
            at_line, at_column = line[:, None] + down, column[:, None] + right
            inside = (at_line >= 0) & (at_column >= 0)
        if TRANSPOSED or PADDING_H > 0 or PADDING_W > 0:
            inside = inside & (at_line < height) & (at_column < width) & here & (weight < TAPS * CHANNELS)[None, :]
        else:
            inside = here & (weight < TAPS * CHANNELS)[None, :]
        places = picture[:, None] * s_picture + at_line * s_line + at_column * s_column + channel[None, :] * s_channel
        left = tl.load(source + places, mask=inside, other=0.0)
        known = (output < OUTPUTS)[None, :] & (weight < TAPS * CHANNELS)[:, None]
        right_factor = tl.load(weights + output[None, :] * (TAPS * CHANNELS) + weight[:, None], mask=known, other=0.0)
        total = tl.dot(left, right_factor, total, input_precision="tf32")
    if BIASED:
        total += tl.load(bias + client * OUTPUTS + output, mask=output < OUTPUTS, other=0.0)[None, :]
    to = target + client * pixels * OUTPUTS + pixel[:, None] * OUTPUTS + output[None, :]
    tl.store(to, total, mask=here & (output < OUTPUTS)[None, :])


@triton.jit
def _correlate(
    source, above, target, tiles, clients, pixels, part, area, columns, height, width,
    s_client, s_picture, s_channel, s_line, s_column, a_client, a_picture, a_output, a_line, a_column,
    CHANNELS: tl.constexpr, OUTPUTS: tl.constexpr, TAPS: tl.constexpr, KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PADDING_H: tl.constexpr, PADDING_W: tl.constexpr,
    DILATION_H: tl.constexpr, DILATION_W: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """target [part, client, weight, output]: a sum over `part` pixels of the source times the gradient above it.

    The last weight is the bias. SPLIT: factors are multiplied as sums of two bfloat16 values each,
    which rounds less than tf32 does: matrix units take no transposed factors in tf32.
    """
    client = (tl.program_id(0) // tiles).to(tl.int64)
    weight = (tl.program_id(0) % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    output = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    source += client * s_client
    above += client * a_client
    tap, channel = weight // CHANNELS, weight % CHANNELS
    down, right = (tap // KERNEL_W) * DILATION_H - PADDING_H, (tap % KERNEL_W) * DILATION_W - PADDING_W
    shift = down * s_line + right * s_column + channel * s_channel
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    by_bias = tl.zeros((BLOCK_K, BLOCK_M), dtype=tl.float32)
    begin = tl.program_id(2) * part
    end = tl.minimum(begin + part, pixels)  # the last part may be shorter
    for first in range(0, part, BLOCK_K):
        pixel = begin + first + tl.arange(0, BLOCK_K)
        picture, rest = pixel // area, pixel % area
        line, column = rest // columns, rest % columns
        at_line, at_column = line * STRIDE_H, column * STRIDE_W
        inside = (pixel < end)[:, None] & (weight < TAPS * CHANNELS)[None, :]
        if PADDING_H > 0:
            reached = at_line[:, None] + down[None, :]
            inside = inside & (reached >= 0) & (reached < height)
        if PADDING_W > 0:
            reached = at_column[:, None] + right[None, :]
            inside = inside & (reached >= 0) & (reached < width)
        places = picture * s_picture + at_line * s_line + at_column * s_column
        value = tl.load(source + places[:, None] + shift[None, :], mask=inside, other=0.0)
        places = picture * a_picture + line * a_line + column * a_column
        known = (pixel < end)[:, None] & (output < OUTPUTS)[None, :]
        grad = tl.load(above + places[:, None] + output[None, :] * a_output, mask=known, other=0.0)
        by_bias += grad
        if SPLIT:
            value_high, grad_high = value.to(tl.bfloat16), grad.to(tl.bfloat16)
            value_low = (value - value_high.to(tl.float32)).to(tl.bfloat16)
            grad_low = (grad - grad_high.to(tl.float32)).to(tl.bfloat16)
            total = tl.dot(tl.trans(grad_high), value_low, total)
            total = tl.dot(tl.trans(grad_low), value_high, total)
            total = tl.dot(tl.trans(grad_high), value_high, total)
        else:
            total = tl.dot(tl.trans(grad), value, total, input_precision="tf32")
    row = (tl.program_id(2).to(tl.int64) * clients + client) * (TAPS * CHANNELS + 1)
    to = target + (row + weight[:, None]) * OUTPUTS + output[None, :]
    tl.store(to, tl.trans(total), mask=(weight < TAPS * CHANNELS)[:, None] & (output < OUTPUTS)[None, :])
    if tl.program_id(0) % tiles == 0:
        tl.store(target + (row + TAPS * CHANNELS) * OUTPUTS + output, tl.sum(by_bias, 0), mask=output < OUTPUTS)


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    size: tuple[int, int] | None = None,
) -> Tensor:
    """x [G, B, C, H, W], weight [G, O, h, w, C] -> [G, B, O, H', W'], channels last.

    With a `size`, x is the gradient of a convolution's result, and the result that of its input of this size.
    """
    clients, pictures, channels, height, width = x.shape
    outputs, kernel = weight.shape[1], (weight.shape[2], weight.shape[3])
    transposed = size is not None
    size = size or geometry.output_size((height, width), kernel)
    target = torch.empty(clients, pictures, *size, outputs, dtype=x.dtype, device=x.device)
    pixels, weights = pictures * size[0] * size[1], kernel[0] * kernel[1] * channels
    block_n = min(128, max(16, triton.next_power_of_2(outputs)))
    tiles = triton.cdiv(pixels, 128)
    _convolve[(tiles * clients, triton.cdiv(outputs, block_n))](
        x, weight.contiguous(), target if bias is None else bias.contiguous(), target,
        tiles, pixels, size[0] * size[1], size[1], height, width, *x.stride(),
        CHANNELS=channels, OUTPUTS=outputs, TAPS=kernel[0] * kernel[1], KERNEL_W=kernel[1], **geometry.constants,
        TRANSPOSED=transposed, BIASED=bias is not None,
        BLOCK_M=128, BLOCK_N=block_n, BLOCK_K=min(32, max(16, triton.next_power_of_2(weights))),
        num_warps=8 if block_n == 128 else 4, num_stages=3,
    )  # fmt: skip
    return target.permute(0, 1, 4, 2, 3)


def weight_gradient(grad: Tensor, x: Tensor, kernel: tuple[int, int], geometry: Geometry) -> Tensor:
    """The gradients by the weights, and after them by the bias: [G, h w C + 1, O]."""
    clients, pictures, channels, height, width = x.shape
    outputs, rows, columns = grad.shape[2:]
    pixels, weights = pictures * rows * columns, kernel[0] * kernel[1] * channels
    block_m = min(64, max(16, triton.next_power_of_2(outputs)))
    block_n = min(64, max(16, triton.next_power_of_2(weights)))
    split = SPLIT and block_m == block_n == 64  # in smaller blocks tf32 is faster
    blocks, tiles = triton.cdiv(outputs, block_m), triton.cdiv(weights, block_n)
    parts = min(triton.cdiv(ENOUGH_PROGRAMS, clients * tiles * blocks), triton.cdiv(pixels, LEAST_PIXELS))
    sums = torch.empty(parts, clients, weights + 1, outputs, dtype=x.dtype, device=x.device)
    _correlate[(tiles * clients, blocks, parts)](
        x, grad, sums, tiles, clients, pixels, triton.cdiv(pixels, parts),
        rows * columns, columns, height, width, *x.stride(), *grad.stride(),
        CHANNELS=channels, OUTPUTS=outputs, TAPS=kernel[0] * kernel[1], KERNEL_W=kernel[1], **geometry.constants,
        SPLIT=split, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=32, num_warps=4, num_stages=3,
    )  # fmt: skip
    return sums[0] if parts == 1 else sums.sum(0)
