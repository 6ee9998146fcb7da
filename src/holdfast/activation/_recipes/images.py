"""Recipes of pooling and resampling. Knows how their nodes name sizes."""

from collections.abc import Callable
from typing import Any, Final

import torch

from holdfast.activation._recipes.reading import named, of_edge, of_saved, shape_of
from holdfast.activation._recipes.recipe import Arg, Recipe

aten = torch.ops.aten


def _max_pool(run: Callable[..., Any]) -> Recipe:
    return Recipe(
        (Arg("self", 0),),
        run,
        named("kernel_size", "stride", "padding", "dilation", "ceil_mode"),
        outputs=True,
        saves=(("result1", 1),),
    )


def _average_pool(run: Callable[..., Any]) -> Recipe:
    return of_saved(
        run,
        "kernel_size",
        "stride",
        "padding",
        "ceil_mode",
        "count_include_pad",
        "divisor_override",
    )


def _adaptive(run: Callable[..., Any], dims: int, *, is_max: bool = False) -> Recipe:
    return Recipe(
        (Arg("self", 0),),
        run,
        lambda node: (list(shape_of(node)[-dims:]),),
        outputs=is_max,
        saves=(("result1", 1),) if is_max else (),
    )


IMAGES: Final[dict[str, Recipe]] = {
    "MaxPool2DWithIndicesBackward0": _max_pool(aten.max_pool2d_with_indices.default),
    "MaxPool3DWithIndicesBackward0": _max_pool(aten.max_pool3d_with_indices.default),
    "AvgPool2DBackward0": _average_pool(aten.avg_pool2d.default),
    "AvgPool3DBackward0": _average_pool(aten.avg_pool3d.default),
    "AdaptiveAvgPool2DBackward0": _adaptive(aten._adaptive_avg_pool2d.default, 2),  # noqa: SLF001 -- what F calls
    "AdaptiveAvgPool3DBackward0": _adaptive(aten._adaptive_avg_pool3d.default, 3),  # noqa: SLF001 -- as above
    "AdaptiveMaxPool2DBackward0": _adaptive(aten.adaptive_max_pool2d.default, 2, is_max=True),
    "UpsampleNearest1DBackward0": of_edge(aten.upsample_nearest1d.default, "output_size", "scales"),
    "UpsampleNearest2DBackward0": of_edge(
        aten.upsample_nearest2d.default, "output_size", "scales_h", "scales_w"
    ),
    "UpsampleNearest3DBackward0": of_edge(
        aten.upsample_nearest3d.default, "output_size", "scales_d", "scales_h", "scales_w"
    ),
    "UpsampleNearestExact2DBackward0": of_edge(
        aten._upsample_nearest_exact2d.default,  # noqa: SLF001 -- as above
        "output_size",
        "scales_h",
        "scales_w",
    ),
    "UpsampleLinear1DBackward0": of_edge(
        aten.upsample_linear1d.default, "output_size", "align_corners", "scales"
    ),
    "UpsampleBilinear2DBackward0": of_edge(
        aten.upsample_bilinear2d.default, "output_size", "align_corners", "scales_h", "scales_w"
    ),
    "UpsampleBilinear2DAaBackward0": of_edge(
        aten._upsample_bilinear2d_aa.default,  # noqa: SLF001 -- as above
        "output_size",
        "align_corners",
        "scales_h",
        "scales_w",
    ),
    "UpsampleBicubic2DBackward0": of_edge(
        aten.upsample_bicubic2d.default, "output_size", "align_corners", "scales_h", "scales_w"
    ),
    "UpsampleTrilinear3DBackward0": of_edge(
        aten.upsample_trilinear3d.default,
        "output_size",
        "align_corners",
        "scales_d",
        "scales_h",
        "scales_w",
    ),
    "GridSampler2DBackward0": Recipe(
        (Arg("input", 0), Arg("grid", 1)),
        torch.grid_sampler_2d,
        named("interpolation_mode", "padding_mode", "align_corners"),
    ),
}
