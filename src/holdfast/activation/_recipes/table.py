"""The operations whose outputs can be made again, by the names of their autograd nodes. Each entry
is exact, bit for bit, or it is not here.

A node tells what it saved and the operation's settings; a tensor it did not save comes by an edge.
What a node lacks (a number that was added, the epsilon of a layer norm) is looked for where that
can be checked, and otherwise the output is kept.
"""

from typing import Final

from holdfast.activation._recipes.images import IMAGES
from holdfast.activation._recipes.moving import MOVING
from holdfast.activation._recipes.norms import NORMS
from holdfast.activation._recipes.pointwise import POINTWISE
from holdfast.activation._recipes.recipe import Recipe
from holdfast.activation._recipes.sums import SUMS
from holdfast.activation._recipes.views import VIEWS

RECIPES: Final[dict[str, Recipe]] = {**VIEWS, **MOVING, **POINTWISE, **NORMS, **SUMS, **IMAGES}
