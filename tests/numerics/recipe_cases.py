"""For every kind of node in the table of recipes, calls that make it: a function, and the shapes of
the tensors it takes. What it returns is then saved by whoever uses it."""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 -- as everyone calls it

aten = torch.ops.aten

ROWS = (64, 40)
CUBE = (4, 6, 40)
IMAGE = (2, 4, 12, 10)
VOLUME = (1, 2, 6, 8, 10)


def one(*functions, shape=ROWS):
    return [(function, (shape,)) for function in functions]


def two(*functions, shapes=(ROWS, ROWS)):
    return [(function, shapes) for function in functions]


def _mask(x):
    return (torch.arange(x.numel()) % 3 == 0).view(x.shape)


def _batch_norm(x, weight=None, bias=None, training=True):
    channels = x.shape[1]
    mean, variance = torch.full((channels,), 0.25).to(x.dtype), torch.full((channels,), 2.0)
    return F.batch_norm(
        x, mean, variance.to(x.dtype), weight, bias, training=training, momentum=0.3, eps=1e-3
    )


def _inside(x):
    """A grid of places to sample from, in the square."""
    return x.tanh()


CASES = {
    # views: of what a neg made
    "ViewBackward0": [
        *one(lambda x: x.contiguous().view(-1), lambda x: x.unflatten(-1, (8, -1))),
        *one(lambda x: x.view(x.shape), shape=IMAGE),
    ],
    "UnsafeViewBackward0": one(lambda x: aten._unsafe_view(x, (*x.shape, 1))),
    "ExpandBackward0": one(lambda x: x[None].expand(3, -1, -1), lambda x: x[:1].expand(5, 40)),
    "TBackward0": one(Tensor.t),
    "TransposeBackward0": [*one(lambda x: x.transpose(-1, 0)), *one(lambda x: x.mT, shape=CUBE)],
    "PermuteBackward0": one(lambda x: x.permute(-1, 0, 1), lambda x: x.movedim(0, 2), shape=CUBE),
    "SqueezeBackward0": one(lambda x: x[:1].squeeze()),
    "SqueezeBackward1": one(lambda x: x[:1].squeeze(0), lambda x: x[:, :1].squeeze(-1)),
    "SqueezeBackward2": one(lambda x: x[:1, :, :1].squeeze((0, -1)), shape=CUBE),
    "UnsqueezeBackward0": one(lambda x: x.unsqueeze(-1), lambda x: x.unsqueeze(0)),
    "SliceBackward0": one(
        lambda x: x[3:17:2], lambda x: x[..., -5:], lambda x: x.narrow(1, 2, 30), lambda x: x[5:5]
    ),
    "SelectBackward0": one(lambda x: x[3], lambda x: x.select(-1, -2)),
    "DiagonalBackward0": one(lambda x: x.diagonal(2), lambda x: x.diagonal(-1, 1, 0)),
    "UnfoldBackward0": one(lambda x: x.unfold(1, 7, 3), lambda x: x.unfold(-2, 5, 5)),
    "AliasBackward0": one(aten.alias),
    "ViewAsComplexBackward0": one(lambda x: torch.view_as_complex(x.contiguous().view(64, 20, 2))),
    "ViewAsRealBackward0": one(
        lambda x: torch.view_as_real(torch.view_as_complex(x.contiguous().view(64, 20, 2)))
    ),
    "UnbindBackward0": one(lambda x: x.unbind(0), lambda x: x.unbind(-1)[2::3], shape=CUBE),
    "SplitBackward0": one(lambda x: x.split(7, 1), lambda x: x.chunk(2, -1)[1]),
    "SplitWithSizesBackward0": one(lambda x: x.split([3, 30, 7], -1), lambda x: x.split([64, 0])),
    "UnsafeSplitBackward0": one(lambda x: torch.unsafe_split(x, 10, 1)),
    # what only moves
    "CloneBackward0": [
        *one(
            torch.clone,
            lambda x: x.t().contiguous(),
            lambda x: x.t().reshape(-1),
            lambda x: x.t().clone(),
            lambda x: x[:, None].expand(-1, 3, -1).reshape(64 * 3, 40),
            lambda x: x.repeat_interleave(2, 1),
            lambda x: x[:, ::2].clone(),
        ),
        *one(
            lambda x: x.contiguous(memory_format=torch.channels_last),
            lambda x: x.clone(memory_format=torch.channels_last).permute(0, 2, 3, 1),
            lambda x: x.permute(0, 2, 3, 1).clone().transpose(1, 2),
            lambda x: x.permute(0, 2, 3, 1).contiguous().flatten(1, 2),
            shape=IMAGE,
        ),
        *one(lambda x: x.contiguous(memory_format=torch.channels_last_3d), shape=VOLUME),
    ],
    "ToCopyBackward0": [
        *one(
            lambda x: x.to(torch.float64 if x.dtype != torch.float64 else torch.float32),
            lambda x: x.to(torch.bfloat16 if x.dtype != torch.bfloat16 else torch.float16),
            lambda x: x.t().to(torch.complex64),
            lambda x: x.float().double().bfloat16().float(),
        ),
        *one(
            lambda x: x.to(torch.complex64, memory_format=torch.channels_last),
            lambda x: x.to(torch.complex64, memory_format=torch.contiguous_format).flatten(1),
            shape=IMAGE,
        ),
    ],
    "CatBackward0": [
        *two(lambda x, y: torch.cat([x, y], -1), lambda x, y: torch.cat([x, x.t().t(), y])),
        *two(lambda x, y: torch.cat([x, y.double()], 1), lambda x, y: torch.cat([x[:0], y])),
        *two(lambda x, y: torch.cat([x, y], 1), shapes=(IMAGE, IMAGE)),
    ],
    "StackBackward0": two(
        lambda x, y: torch.stack([x, y], -1), lambda x, y: torch.stack([x, y.t().t(), x])
    ),
    "RepeatBackward0": one(lambda x: x.repeat(2, 1, 3), lambda x: x.tile(2)),
    "RollBackward0": one(
        lambda x: x.roll(3), lambda x: x.roll((-5, 2), (0, -1)), lambda x: x.roll(1, 0)
    ),
    "FlipBackward0": one(lambda x: x.flip(0, -1)),
    "PixelShuffleBackward0": one(lambda x: F.pixel_shuffle(x, 2), shape=IMAGE),
    "PixelUnshuffleBackward0": one(lambda x: F.pixel_unshuffle(x, 2), shape=IMAGE),
    "Im2ColBackward0": one(
        lambda x: F.unfold(x, (3, 2), dilation=(1, 2), padding=1, stride=(2, 1)), shape=IMAGE
    ),
    "EmbeddingBackward0": one(
        lambda x: F.embedding(torch.arange(90).view(9, 10) % 64, x),
        lambda x: F.embedding(torch.arange(90) % 64, x, padding_idx=-3, scale_grad_by_freq=True),
    ),
    "IndexSelectBackward0": one(
        lambda x: x.index_select(0, torch.arange(100) % 64),
        lambda x: x.index_select(-1, torch.arange(7)),
    ),
    "GatherBackward0": one(
        lambda x: x.gather(1, (torch.arange(64 * 9) % 40).view(64, 9)),
        lambda x: torch.take_along_dim(x, torch.arange(40)[None] % 64, 0),
    ),
    "ReflectionPad1DBackward0": one(lambda x: F.pad(x, (3, 1), mode="reflect"), shape=CUBE),
    "ReflectionPad2DBackward0": one(lambda x: F.pad(x, (3, 1, 0, 2), mode="reflect"), shape=IMAGE),
    "ReflectionPad3DBackward0": one(
        lambda x: F.pad(x, (3, 1, 0, 2, 1, 1), mode="reflect"), shape=VOLUME
    ),
    "ReplicationPad1DBackward0": one(lambda x: F.pad(x, (3, 1), mode="replicate"), shape=CUBE),
    "ReplicationPad2DBackward0": one(
        lambda x: F.pad(x, (3, 1, 0, 2), mode="replicate"), shape=IMAGE
    ),
    "ReplicationPad3DBackward0": one(
        lambda x: F.pad(x, (3, 1, 0, 2, 1, 1), mode="replicate"), shape=VOLUME
    ),
    # each element alone
    "NegBackward0": one(torch.neg, lambda x: (x * 2).neg_()),
    "SqrtBackward0": one(torch.sqrt),
    "RsqrtBackward0": one(torch.rsqrt),
    "ReciprocalBackward0": one(torch.reciprocal),
    "ExpBackward0": one(torch.exp, lambda x: (x * 2).exp_()),
    "Exp2Backward0": one(torch.exp2),
    "Expm1Backward0": one(torch.expm1),
    "TanBackward0": one(torch.tan),
    "TanhBackward0": [*one(torch.tanh, lambda x: (x * 2).tanh_()), *one(torch.tanh, shape=IMAGE)],
    "SigmoidBackward0": one(torch.sigmoid, lambda x: (x * 2).sigmoid_()),
    "ReluBackward0": [*one(torch.relu, lambda x: (x * 2).relu_()), *one(torch.relu, shape=IMAGE)],
    "EluBackward1": one(lambda x: F.elu_(x * 2, 1.3)),
    "CeluBackward1": one(lambda x: F.celu_(x * 2, 1.3)),
    "LeakyReluBackward1": one(lambda x: F.leaky_relu_(x * 2, 0.3)),
    "TrilBackward0": one(lambda x: x.tril(-2)),
    "TriuBackward0": one(lambda x: x.triu(3)),
    "AbsBackward0": one(torch.abs),
    "LogBackward0": one(torch.log),
    "Log2Backward0": one(torch.log2),
    "Log10Backward0": one(torch.log10),
    "Log1PBackward0": one(torch.log1p),
    "SinBackward0": one(torch.sin),
    "CosBackward0": one(torch.cos),
    "SinhBackward0": one(torch.sinh),
    "CoshBackward0": one(torch.cosh),
    "AtanBackward0": one(torch.atan),
    "ErfBackward0": one(torch.erf),
    "ErfcBackward0": one(torch.erfc),
    "PowBackward0": one(
        torch.square, lambda x: x**3, lambda x: x**0.5, lambda x: x**-1.7, lambda x: x**0
    ),
    "ClampBackward1": one(
        lambda x: x.clamp(-0.5, 0.7), lambda x: x.clamp(min=0), lambda x: x.clamp(max=0.1)
    ),
    "ClampMinBackward0": one(lambda x: torch.clamp_min(x, 0.2)),
    "ClampMaxBackward0": one(lambda x: torch.clamp_max(x, -0.2)),
    "LogitBackward0": one(torch.logit, lambda x: torch.logit(x, 1e-3)),
    "GeluBackward0": one(F.gelu, lambda x: F.gelu(x, approximate="tanh")),
    "SiluBackward0": [*one(F.silu), *one(F.silu, shape=IMAGE)],
    "MishBackward0": one(F.mish),
    "EluBackward0": one(lambda x: F.elu(x, 0.7), F.selu),
    "CeluBackward0": one(lambda x: F.celu(x, 1.3)),
    "LeakyReluBackward0": one(lambda x: F.leaky_relu(x, -0.2)),
    "SoftplusBackward0": one(F.softplus, lambda x: F.softplus(x, 2.5, 1.0)),
    "HardswishBackward0": one(F.hardswish),
    "HardsigmoidBackward0": one(F.hardsigmoid),
    "HardtanhBackward0": one(F.relu6, lambda x: F.hardtanh(x, -0.3, 0.4)),
    "HardshrinkBackward0": one(lambda x: F.hardshrink(x, 0.3)),
    "SoftshrinkBackward0": one(lambda x: F.softshrink(x, 0.3)),
    "AddBackward0": [
        *two(torch.add, lambda x, y: torch.add(x, y, alpha=0.3), lambda x, y: x + y.t().t()),
        *two(lambda x, y: (x * 2).add_(y), lambda x, y: (x * 2).add_(y.double())),
        *two(torch.add, lambda x, y: y + x, shapes=(ROWS, (40,))),
        *two(torch.add, shapes=(IMAGE, (4, 1, 1))),
        *two(lambda x, y: x + y.double(), lambda x, y: y.double() - (-x) + x),
    ],
    "SubBackward0": [
        *two(torch.sub, lambda x, y: torch.sub(x, y, alpha=2)),
        *two(lambda x, y: (x * 2).sub_(y.double()), shapes=(ROWS, (64, 1))),
    ],
    "MulBackward0": [
        *two(torch.mul, lambda x, y: x.detach() * y, lambda x, y: x * y.detach() * 0.3),
        *two(lambda x, y: x * 2.5 * y, lambda x, y: (x * 3).mul_(y.double())),
        *two(torch.mul, shapes=(ROWS, (64, 1))),
        *two(torch.mul, shapes=((2, 1, 30), (40, 1))),
        *two(lambda x, y: torch.complex(x.float(), y.float()) * torch.tensor(2 + 1j)),
    ],
    "DivBackward0": two(torch.div, lambda x, y: x / 3.0 / y.detach(), lambda x, y: x.detach() / y),
    "DivBackward2": two(
        lambda x, y: torch.div(x, y, rounding_mode="floor"),
        lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    ),
    "PowBackward1": two(lambda x, y: x.abs() ** y, lambda x, y: x.detach() ** y),
    "Atan2Backward0": two(torch.atan2),
    "LerpBackward0": two(lambda x, y: torch.lerp(x, y, 0.3)),
    "RsubBackward0": two(lambda x, y: torch.rsub(x, y, alpha=1.5)),
    "MulBackward1": one(lambda x: aten.mul.Scalar(x, 2.5)),
    "DivBackward1": one(lambda x: aten.div.Scalar(x, 2.5)),
    "PowBackward2": one(lambda x: 2.5**x),
    "MaximumBackward0": two(torch.maximum),
    "MinimumBackward0": two(torch.minimum),
    "FmaxBackward0": two(torch.fmax),
    "FminBackward0": two(torch.fmin),
    "ClampBackward0": two(
        lambda x, y: torch.clamp(x, y, y + y.abs()),
        lambda x, y: torch.clamp(x, min=y),
        lambda x, y: torch.clamp(x, max=y),
    ),
    "WhereBackward0": two(lambda x, y: torch.where(_mask(x), x, y)),
    "MaskedFillBackward1": [(lambda x, y: x.masked_fill(_mask(x), y), (ROWS, ()))],
    "LerpBackward1": [(torch.lerp, (ROWS, ROWS, ROWS))],
    "AddcmulBackward0": [
        (lambda x, y, z: torch.addcmul(x, y, z, value=0.3), (ROWS, ROWS, (40,))),
        (lambda x, y, z: torch.addcmul(x, y.detach(), z), (ROWS, ROWS, ROWS)),
    ],
    "AddcdivBackward0": [(lambda x, y, z: torch.addcdiv(x, y, z, value=0.3), (ROWS, ROWS, ROWS))],
    "LogSigmoidBackward0": one(F.logsigmoid),
    "GluBackward0": [*one(F.glu, lambda x: F.glu(x, 0)), *one(lambda x: F.glu(x, 1), shape=IMAGE)],
    "PreluKernelBackward0": [(F.prelu, (ROWS, (1,))), (F.prelu, (IMAGE, (4,)))],
    "ComplexBackward0": two(lambda x, y: torch.complex(x.float(), y.float())),
    "NativeDropoutBackward0": one(
        lambda x: torch.native_dropout(x, 0.3, True)[0],
        lambda x: torch.native_dropout(x, 1.0, True)[0],
    ),
    # norms
    "NativeLayerNormBackward0": [
        (lambda x, w, b: F.layer_norm(x, (40,), w, b), (CUBE, (40,), (40,))),
        (
            lambda x, w, b: F.layer_norm(x, (40,), w.detach(), b.detach(), 1e-6),
            (CUBE, (40,), (40,)),
        ),
        (lambda x, w: F.layer_norm(x, (6, 40), w, eps=1e-12), (CUBE, (6, 40))),
        (lambda x, b: F.layer_norm(x, (40,), None, b, eps=5e-3), (CUBE, (40,))),
        *one(lambda x: F.layer_norm(x, (40,), eps=0.0), lambda x: F.layer_norm(x + 1e4 * x, (40,))),
        (lambda x, w, b: F.layer_norm(x.t(), (64,), w, b), (ROWS, (64,), (64,))),
    ],
    "NativeBatchNormBackward0": [
        (_batch_norm, (IMAGE, (4,), (4,))),
        (_batch_norm, (ROWS, (40,), (40,))),
        (lambda x, w, b: _batch_norm(x, w, b, training=False), (IMAGE, (4,), (4,))),
        (lambda x, b: _batch_norm(x, None, b), (CUBE, (6,))),
        *one(_batch_norm, lambda x: _batch_norm(x, training=False), F.instance_norm, shape=IMAGE),
        (lambda x, w, b: F.instance_norm(x, weight=w, bias=b), (VOLUME, (2,), (2,))),
    ],
    "NativeGroupNormBackward0": [
        (lambda x, w, b: F.group_norm(x, 2, w, b, 1e-3), (IMAGE, (4,), (4,))),
        (lambda x, w, b: F.group_norm(x, 3, w, b), (CUBE, (6,), (6,))),
        *one(lambda x: F.group_norm(x, 4), shape=IMAGE),
    ],
    "SoftmaxBackward0": [
        *one(lambda x: x.softmax(-1), lambda x: x.softmax(0)),
        *one(lambda x: x.softmax(1, dtype=torch.float64), lambda x: x.softmax(1), shape=CUBE),
    ],
    "SafeSoftmaxBackward0": one(
        lambda x: torch._safe_softmax(x, -1),
        lambda x: torch._safe_softmax(x.masked_fill(_mask(x), x[0, 0]), 0, torch.float64),
    ),
    "LogSoftmaxBackward0": one(lambda x: x.log_softmax(-1), lambda x: x.log_softmax(0)),
    # sums of many
    "LogsumexpBackward0": one(lambda x: x.logsumexp(-1), lambda x: x.logsumexp((0, 1), True)),
    "SumBackward0": one(lambda x: x.sum() * x, lambda x: x.sum(dtype=torch.float64) * x),
    "SumBackward1": [
        *one(lambda x: x.sum(0), lambda x: x.sum((0, -1), keepdim=True) * x, lambda x: x.sum(())),
        *one(lambda x: x.sum(-1, dtype=torch.float64), shape=CUBE),
    ],
    "MeanBackward0": one(lambda x: x.mean() * x),
    "MeanBackward1": one(lambda x: x.mean(0), lambda x: x.mean((-2, -1), keepdim=True), shape=CUBE),
    "VarBackward0": one(lambda x: x.var(0), lambda x: x.var(correction=0), lambda x: x.var((0, 1))),
    "StdBackward0": one(lambda x: x.std(-1, keepdim=True), lambda x: x.std(0, correction=2.5)),
    "VarMeanBackward0": one(
        lambda x: torch.var_mean(x, -1), lambda x: torch.var_mean(x, 0, correction=0)[1]
    ),
    "AmaxBackward0": one(lambda x: x.amax(-1), lambda x: x.amax((0, 1), keepdim=True)),
    "AminBackward0": one(lambda x: x.amin(0)),
    "MaxBackward0": one(lambda x: x.max(-1)[0], lambda x: x.max(0, keepdim=True)[0]),
    "MinBackward0": one(lambda x: x.min(-1)[0]),
    "LinalgVectorNormBackward0": one(
        lambda x: x.norm(dim=-1),
        lambda x: x.norm() * x,
        lambda x: torch.linalg.vector_norm(x, 1, (0, 1), keepdim=True),
        lambda x: torch.linalg.vector_norm(x, float("inf"), 0),
        lambda x: F.normalize(x, dim=0),
    ),
    "CumsumBackward0": one(lambda x: x.cumsum(0), lambda x: x.cumsum(-1, dtype=torch.float64)),
    "CumprodBackward0": one(lambda x: x.cumprod(-1)),
    "LogcumsumexpBackward0": one(lambda x: x.logcumsumexp(0)),
    "MmBackward0": [
        (torch.mm, (ROWS, (40, 50))),
        (F.linear, (CUBE, (50, 40))),
        (lambda x, w: x @ w.detach().t(), (CUBE, (50, 40))),
        (lambda x, w: x.detach() @ w, (ROWS, (40, 50))),
    ],
    "BmmBackward0": [
        (torch.bmm, (CUBE, (4, 40, 9))),
        (torch.matmul, ((2, 3, 8, 10), (2, 3, 10, 8))),
        (torch.matmul, ((2, 1, 8, 10), (3, 10, 8))),
        (lambda x, y: torch.einsum("bij,bkj->bik", x, y), (CUBE, (4, 9, 40))),
        (lambda x, w: torch.einsum("btc,dc->btd", x, w), (CUBE, (9, 40))),
    ],
    "MvBackward0": [(torch.mv, (ROWS, (40,)))],
    "AddmmBackward0": [
        (F.linear, (ROWS, (50, 40), (50,))),
        (F.linear, (CUBE, (50, 40), (50,))),
        (lambda x, w, b: torch.addmm(b, x, w, beta=0.3, alpha=2), (ROWS, (40, 50), (64, 50))),
        (lambda x, w, b: F.linear(x, w.detach(), b), (ROWS, (50, 40), (50,))),
    ],
    "BaddbmmBackward0": [
        (lambda b, x, y: torch.baddbmm(b, x, y, beta=2, alpha=0.1), ((4, 6, 9), CUBE, (4, 40, 9)))
    ],
    "AddmvBackward0": [(lambda b, x, v: torch.addmv(b, x, v, beta=2), ((64,), ROWS, (40,)))],
    "ConvolutionBackward0": [
        (lambda x, w, b: F.conv2d(x, w, b, padding=1), (IMAGE, (6, 4, 3, 3), (6,))),
        (lambda x, w: F.conv2d(x, w, stride=2, dilation=2, groups=2), (IMAGE, (6, 2, 3, 3))),
        (lambda x, w: F.conv2d(x, w.detach(), padding="same"), (IMAGE, (6, 4, 3, 1))),
        (F.conv1d, (CUBE, (5, 6, 3), (5,))),
        (lambda x, w, b: F.conv3d(x, w, b, padding=1), (VOLUME, (5, 2, 3, 3, 3), (5,))),
        (
            lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, output_padding=1),
            (IMAGE, (4, 6, 3, 3), (6,)),
        ),
        (lambda x, w: F.conv_transpose1d(x, w, padding=1), (CUBE, (6, 5, 3))),
    ],
    "ScaledDotProductFlashAttentionForCpuBackward0": [
        (F.scaled_dot_product_attention, ((2, 3, 20, 8),) * 3),
        (
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3),
            ((2, 3, 20, 8),) * 3,
        ),
        (
            lambda q, k, v: F.scaled_dot_product_attention(
                q, k, v, attn_mask=torch.linspace(-1, 1, 20, dtype=q.dtype).expand(20, 20)
            ),
            ((2, 3, 20, 8),) * 3,
        ),
    ],
    # images
    "MaxPool2DWithIndicesBackward0": one(
        lambda x: F.max_pool2d(x, 2),
        lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
        lambda x: F.max_pool2d(x, 2, dilation=(2, 1)),
        lambda x: F.max_pool1d(x.flatten(2), 3),
        shape=IMAGE,
    ),
    "MaxPool3DWithIndicesBackward0": one(lambda x: F.max_pool3d(x, 2, padding=1), shape=VOLUME),
    "AvgPool2DBackward0": one(
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
        lambda x: F.avg_pool2d(x, 3, divisor_override=5),
        lambda x: F.avg_pool1d(x.flatten(2), 3),
        shape=IMAGE,
    ),
    "AvgPool3DBackward0": one(lambda x: F.avg_pool3d(x, 2, padding=1), shape=VOLUME),
    "AdaptiveAvgPool2DBackward0": one(
        lambda x: F.adaptive_avg_pool2d(x, (5, 3)),
        lambda x: F.adaptive_avg_pool2d(x, (None, 2)),
        lambda x: F.adaptive_avg_pool1d(x.flatten(2), 7),
        shape=IMAGE,
    ),
    "AdaptiveAvgPool3DBackward0": one(lambda x: F.adaptive_avg_pool3d(x, 3), shape=VOLUME),
    "AdaptiveMaxPool2DBackward0": one(lambda x: F.adaptive_max_pool2d(x, (5, 3)), shape=IMAGE),
    "UpsampleNearest1DBackward0": one(lambda x: F.interpolate(x, scale_factor=2.5), shape=CUBE),
    "UpsampleNearest2DBackward0": one(
        lambda x: F.interpolate(x, scale_factor=2),
        lambda x: F.interpolate(x, (15, 7)),
        shape=IMAGE,
    ),
    "UpsampleNearest3DBackward0": one(lambda x: F.interpolate(x, (7, 9, 11)), shape=VOLUME),
    "UpsampleNearestExact2DBackward0": one(
        lambda x: F.interpolate(x, (15, 7), mode="nearest-exact"), shape=IMAGE
    ),
    "UpsampleLinear1DBackward0": one(
        lambda x: F.interpolate(x, scale_factor=1.7, mode="linear"), shape=CUBE
    ),
    "UpsampleBilinear2DBackward0": one(
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        lambda x: F.interpolate(x, (15, 7), mode="bilinear", align_corners=True),
        lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear", recompute_scale_factor=True),
        shape=IMAGE,
    ),
    "UpsampleBilinear2DAaBackward0": one(
        lambda x: F.interpolate(x, scale_factor=0.6, mode="bilinear", antialias=True), shape=IMAGE
    ),
    "UpsampleBicubic2DBackward0": one(
        lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), shape=IMAGE
    ),
    "UpsampleTrilinear3DBackward0": one(
        lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), shape=VOLUME
    ),
    "GridSampler2DBackward0": [
        (
            lambda x, grid: F.grid_sample(x, _inside(grid), align_corners=False),
            (IMAGE, (2, 9, 9, 2)),
        ),
        (
            lambda x, grid: F.grid_sample(
                x, grid, mode="nearest", padding_mode="border", align_corners=True
            ),
            (IMAGE, (2, 9, 9, 2)),
        ),
    ],
}
