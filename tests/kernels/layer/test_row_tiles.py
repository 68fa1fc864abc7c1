"""The token tiles of layer 1's CUDA kernel, from its own header, which a C++ compiler takes for the host here."""

import random
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from comet.kernels.runtime.cuda_source import FOLDER

PLAN_TILE_ROWS = 128
# One thread of the header's warp, and what it asks of the GPU. Reads `experts columns blocks`, then the experts' rows;
# writes a line for each tile.
PROGRAM = r"""
#include <algorithm>
#include <cstdio>
#include <vector>
#define __device__
#define __forceinline__ inline
#define COMET_GEMM_PIPELINE_CUH
using std::max; using std::min;
using u16 = unsigned short; using u32 = unsigned; using u64 = unsigned long long; using s64 = long long;
constexpr int SWIZZLE_BYTES = 128, SCHEDULER_SLOT_BYTES = 16;
struct { int x; } gridDim;
template <class Config> struct Pipeline { void wait_full() {} };
template <class T> T __ldg(const T* address) { return *address; }
int ceil_div(int a, int b) { return (a + b - 1) / b; }
int before_lane(int mine, int, int& total) { total = mine; return 0; }
void mbarrier_wait(u32, u32) {}
template <int CLUSTER> void store_and_arrive(u32, int, u32, u32) {}
#include "layer1/tiles.cuh"

struct Config {
    static constexpr int MMA_ROWS = 256, MAX_TILE_ROWS = 272, ROW_STEP = 16, PLAN_TILE_ROWS = 128, PANEL_UNIT = 256;
    static constexpr int BLOCK_N = 128, BLOCK_K = 64, CLUSTER = 2, TILE_SLOTS = 8;
};

int main() {
    int cols, count;
    while (scanf("%d %d %d", &cols, &gridDim.x, &count) == 3) {
        int start = 0, first_tile[2];
        PanelProblem<Config> problem{&count, &start, first_tile, 1, 512, cols, 1, 0, {}, nullptr};
        list_row_tiles(problem, first_tile, 0);
        for (int index = 0; index < problem.num_tiles(); ++index) {
            const PanelTile tile = tile_at(problem, index);
            printf("%d,%d,%d,%d ", tile.first_row, tile.rows, tile.col, tile.plan_tiles);
        }
        puts("");
    }
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_tiles_cut_an_experts_rows_and_stay_among_them(tmp_path: Path) -> None:
    """With few columns tiles are half as high; of 2177 rows in 17 tiles of 144 the last tile once had none."""
    (tmp_path / "tiles.cpp").write_text(PROGRAM)
    program = tmp_path / "tiles"
    subprocess.run(["g++", "-std=c++17", f"-I{FOLDER}/include", tmp_path / "tiles.cpp", "-o", program], check=True)
    print("seed 0")
    drawn = random.Random(0)
    counts = [0, 1, 127, 128, 191, 192, 2177, 4000, *range(1, 700, 7), *(drawn.randrange(9000) for _ in range(400))]
    asked = [(cols, blocks, count) for cols in (256, 512, 768, 2048) for blocks in (114, 132) for count in counts]
    given = "\n".join(" ".join(map(str, each)) for each in asked)
    answer = subprocess.run([program], input=given, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(answer) == len(asked)
    for (cols, blocks, count), line in zip(asked, answer, strict=True):
        of_columns = defaultdict(list)
        for tile in line.split():
            first, rows, column, plan_tiles = map(int, tile.split(","))
            of_columns[column].append((first, rows, plan_tiles))
        where = f"{count} rows, {cols} columns, {blocks} blocks"
        assert len(of_columns) == (cols // 256 if count else 0), where  # a cluster has two tiles side by side
        for tiles in of_columns.values():
            end = 0
            for first, rows, _ in sorted(tiles):
                assert first == end < count, where
                assert 0 < rows <= 272, where
                end = first + rows
            assert count <= end < count + 16, where
            assert sum(plan_tiles for *_, plan_tiles in tiles) == -(-count // PLAN_TILE_ROWS), where
