"""Geometry, pure: boxes, grids, coverage, who writes and reads what. Knows no bytes, no files."""

from holdfast.reshard._box import Box, split_box
from holdfast.reshard._coalesce import Span, chunk_spans, coalesce
from holdfast.reshard._coverage import CoverageProblem, Hole, Outside, Overlap, check_coverage
from holdfast.reshard._grid import Cut, Grid
from holdfast.reshard._leaves import (
    Layout,
    Leaf,
    LeafList,
    RankGroup,
    group_ranks,
    leaf_list_digest,
)
from holdfast.reshard._load import Load, boxes_met, plan_load
from holdfast.reshard._mesh import (
    MeshGrid,
    Part,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    mesh_grid,
)
from holdfast.reshard._ranges import ByteRuns, CopyRuns, copy_runs, copy_to_part, row_runs
from holdfast.reshard._runs import IndexRuns
from holdfast.reshard._save import SavePlan, TensorPlan, Write, plan_save

__all__ = [
    "Box",
    "ByteRuns",
    "CopyRuns",
    "CoverageProblem",
    "Cut",
    "Grid",
    "Hole",
    "IndexRuns",
    "Layout",
    "Leaf",
    "LeafList",
    "Load",
    "MeshGrid",
    "Outside",
    "Overlap",
    "Part",
    "Placement",
    "RankGroup",
    "Replicate",
    "SavePlan",
    "Shard",
    "Span",
    "StridedShard",
    "TensorPlan",
    "Write",
    "boxes_met",
    "check_coverage",
    "chunk_spans",
    "coalesce",
    "copy_runs",
    "copy_to_part",
    "group_ranks",
    "leaf_list_digest",
    "mesh_grid",
    "plan_load",
    "plan_save",
    "row_runs",
    "split_box",
]
