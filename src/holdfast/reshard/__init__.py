"""Geometry, pure: boxes, grids, coverage, who writes and reads what. Knows no bytes, no files."""

from holdfast.reshard._box import Box, split_box
from holdfast.reshard._coalesce import chunk_spans, coalesce
from holdfast.reshard._coverage import Hole, Outside, Overlap, check_coverage
from holdfast.reshard._grid import Grid
from holdfast.reshard._leaves import Layout, Leaf, LeafList, RankGroup, group_ranks
from holdfast.reshard._load import Load, boxes_met, plan_load
from holdfast.reshard._mesh import Part, Placement, Replicate, Shard, StridedShard, mesh_grid
from holdfast.reshard._ranges import CopyRuns, copy_to_part, row_runs
from holdfast.reshard._runs import IndexRuns
from holdfast.reshard._save import SavePlan, Write, plan_save

__all__ = [
    "Box",
    "CopyRuns",
    "Grid",
    "Hole",
    "IndexRuns",
    "Layout",
    "Leaf",
    "LeafList",
    "Load",
    "Outside",
    "Overlap",
    "Part",
    "Placement",
    "RankGroup",
    "Replicate",
    "SavePlan",
    "Shard",
    "StridedShard",
    "Write",
    "boxes_met",
    "check_coverage",
    "chunk_spans",
    "coalesce",
    "copy_to_part",
    "group_ranks",
    "mesh_grid",
    "plan_load",
    "plan_save",
    "row_runs",
    "split_box",
]
