"""The order of work inside the fused kernels: work item -> tile and column block.

A *work item* is one tile times one column block. The functions are named by the axis that the shared tensor is cut
along. Both orders are grouped: a group of ``GROUP_TILES`` consecutive tiles goes through its column blocks with the
tile index fastest, so that a group's rows and a column's weights stay in L2.
With 3 tiles, 2 column blocks and groups of 2, items 0..5 are (tile, column)

    decode_tokens:               (0,0) (1,0) (0,1) (1,1) (2,0) (2,1)
    decode_columns, 2 panels:    (0,0) (1,0) (2,0) | (0,1) (1,1) (2,1)

All arguments are non-negative integers.
"""

import triton
import triton.language as tl

GROUP_TILES = tl.constexpr(8)  # consecutive tiles that share their weight columns through L2


@triton.jit
def part_of(index, num_elements, num_parts):
    """Part that ``index`` falls in when ``num_elements`` are cut into parts as even as possible, wider parts first."""
    narrow = num_elements // num_parts
    num_wide = num_elements % num_parts
    in_wide = num_wide * (narrow + 1)
    # The maximum only keeps the branch that is not taken from dividing by zero.
    behind = num_wide + (index - in_wide) // tl.maximum(narrow, 1)
    return tl.where(index < in_wide, index // (narrow + 1), behind)


@triton.jit
def part_span(part, num_elements, num_parts):
    """First element and width of ``part`` under the same cut as ``part_of``."""
    narrow = num_elements // num_parts
    num_wide = num_elements % num_parts
    first = part * narrow + tl.minimum(part, num_wide)
    width = narrow + (part < num_wide).to(tl.int32)
    return first, width


@triton.jit
def last_panel_width(num_cols, num_panels):
    """Return the column blocks of the last panel: half of an even share, as no GEMM hides its communication."""
    return tl.where(num_panels > 1, tl.maximum(num_cols // (2 * num_panels), 1), num_cols)


@triton.jit
def panel_of(column, num_cols, num_panels):
    """Panel of a column block; those before the last share its columns as evenly as possible."""
    others = num_cols - last_panel_width(num_cols, num_panels)
    panel = part_of(column, others, tl.maximum(num_panels - 1, 1))
    return tl.where(column < others, panel, num_panels - 1)


@triton.jit
def panel_span(panel, num_cols, num_panels):
    """First column block and width of ``panel`` under the same cut as ``panel_of``."""
    last = last_panel_width(num_cols, num_panels)
    first, width = part_span(panel, num_cols - last, tl.maximum(num_panels - 1, 1))
    is_last = panel == num_panels - 1
    return tl.where(is_last, num_cols - last, first), tl.where(is_last, last, width)


@triton.jit
def decode_tokens(item, num_tiles, num_cols, GROUP_TILES: tl.constexpr):
    """Tile and column block of a work item when tiles go group by group through all columns."""
    group_items = GROUP_TILES * num_cols
    group = item // group_items
    first = group * GROUP_TILES
    size = tl.minimum(num_tiles - first, GROUP_TILES)
    inside = item - group * group_items
    column = inside // size
    return first + inside - column * size, column


@triton.jit
def rows_of_piece(piece, tiles_ptr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr):
    """Routed rows of a piece, ROWS rows of a tile, and which of them are valid; the pieces of a tile are neighbours."""
    per_tile: tl.constexpr = BLOCK_M // ROWS
    tile = piece // per_tile
    in_tile = (piece - tile * per_tile) * ROWS + tl.arange(0, ROWS)
    valid = in_tile < tl.load(tiles_ptr + tile * 4 + 2)
    return tl.load(tiles_ptr + tile * 4 + 1) + in_tile, valid


@triton.jit
def decode_columns(item, num_tiles, num_cols, num_panels, GROUP_TILES: tl.constexpr):
    """Tile, column block and panel of a work item when all tiles finish a column panel before the next one."""
    panel = panel_of(item // num_tiles, num_cols, num_panels)
    first, width = panel_span(panel, num_cols, num_panels)
    tile, column = decode_tokens(item - first * num_tiles, num_tiles, width, GROUP_TILES)
    return tile, first + column, panel
