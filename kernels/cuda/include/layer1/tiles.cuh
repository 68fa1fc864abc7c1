// Tiles of layer 1's GEMM, y[q] = w[expert of q] @ a[q] for all routed rows, column panel by column panel; as fc1_dgrad
// (IS_DGRAD) of y[q] = a[q] @ w[expert of q].

#ifndef COMET_LAYER1_TILES_CUH
#define COMET_LAYER1_TILES_CUH

#include "../gemm/scheduler.cuh"

// See part_span, panel_of and panel_span of kernels/gemm/tiles.py.
__device__ __forceinline__ void part_span(int part, int elements, int parts, int& first, int& width) {
    const int narrow = elements / parts, wide = elements % parts;
    first = part * narrow + min(part, wide);
    width = narrow + (part < wide);
}

__device__ __forceinline__ void panel_span(int panel, int cols, int panels, int& first, int& width) {
    const int last = panels > 1 ? max(cols / (2 * panels), 1) : cols;
    if (panel == panels - 1) {
        first = cols - last;
        width = last;
    } else {
        part_span(panel, cols - last, panels - 1, first, width);
    }
}

// Scales of block FP8; see gemm_combine of kernels/layer/triton/gemm_combine.py.
struct ScaleArgs {
    const float* rows;    // (F / 128, Q)
    const float* weights; // (e, D / 128, F / 128)
    s64 num_rows;         // Q
};

template <class Config>
struct PanelProblem {
    const int* counts;     // (e,) routed rows of each expert
    const int* starts;     // (e,) first routed row of each expert
    const int* first_tile; // (e + 1,) in shared memory: token tiles before each expert
    int experts, depth, cols, panels, rank;
    ScaleArgs scales;
    const void* biases; // (e, D), if HAS_BIAS

    // Tiles of a token tile in the columns that count as one in panels, of a cluster.
    static constexpr int TILES_PER_UNIT = Config::PANEL_UNIT / Config::BLOCK_N / Config::CLUSTER;

    __device__ __forceinline__ int num_row_tiles() const { return first_tile[experts]; }
    __device__ __forceinline__ int num_units() const { return ceil_div(cols, Config::PANEL_UNIT); }
    __device__ __forceinline__ int num_tiles() const {
        return num_row_tiles() * num_units() * TILES_PER_UNIT;
    }
    __device__ __forceinline__ int num_steps() const { return ceil_div(depth, Config::BLOCK_K); }
};

// The record of a tile that the producer publishes in shared memory. `rows` is a multiple of ROW_STEP; `plan_tiles`
// says for how many of the plan's tiles it counts.
struct alignas(16) PanelTile {
    int first_row, rows, col, panel, plan_tiles, expert, is_last;
};

// Panels from left to right, in each all token tiles.
template <class Config>
__device__ __forceinline__ PanelTile tile_at(const PanelProblem<Config>& problem, int index) {
    constexpr int PER_UNIT = PanelProblem<Config>::TILES_PER_UNIT, ROW_STEP = Config::ROW_STEP;
    const int row_tiles = problem.num_row_tiles(), units = problem.num_units();
    PanelTile tile;
    int first = 0, width = 0;
    for (tile.panel = 0; tile.panel < problem.panels; ++tile.panel) {
        panel_span(tile.panel, units, problem.panels, first, width);
        if (index < (first + width) * PER_UNIT * row_tiles) break;
    }
    index -= first * PER_UNIT * row_tiles;
    const int row_tile = index / (width * PER_UNIT);
    const int expert = tile.expert = segment_of(problem.first_tile, problem.experts, row_tile);
    const int num = problem.first_tile[expert + 1] - problem.first_tile[expert];
    const TilePlace place(index - problem.first_tile[expert] * (width * PER_UNIT), num, width * PER_UNIT);
    tile.col = ((first * PER_UNIT + place.col) * Config::CLUSTER + problem.rank) * Config::BLOCK_N;
    const int count = __ldg(problem.counts + expert), plan_tiles = ceil_div(count, Config::PLAN_TILE_ROWS);
    const int height = tile_rows<Config>(count, num);
    tile.first_row = __ldg(problem.starts + expert) + place.row_tile * height;
    // Heights are rounded up, so the last tile may be lower than the others.
    tile.rows = min(height, ceil_div(count - place.row_tile * height, ROW_STEP) * ROW_STEP);
    tile.plan_tiles = (place.row_tile + 1) * plan_tiles / num - place.row_tile * plan_tiles / num;
    return tile;
}

// Token tiles before each expert's, and in all; the work of one warp. Where they leave half of the blocks without a
// tile, they are half as high: of about PLAN_TILE_ROWS rows, and never more than the plan's, by which panels are
// counted.
template <class Config>
__device__ __forceinline__ void list_row_tiles(const PanelProblem<Config>& problem, int* first_tile, int lane) {
    const int per_row_tile = problem.num_units() * problem.TILES_PER_UNIT * Config::CLUSTER, experts = problem.experts;
    const auto list = [&](auto tiles_of) {
        int before = 0;
        for (int first = 0; first < experts; first += 32) {
            const int expert = first + lane;
            const int tiles = expert < experts ? tiles_of(__ldg(problem.counts + expert)) : 0;
            int total;
            const int earlier = before_lane(tiles, lane, total);
            if (expert < experts) first_tile[expert] = before + earlier;
            before += total;
        }
        if (lane == 0) first_tile[experts] = before;
        return before;
    };
    const int row_tiles = list([](int count) { return num_row_tiles<Config>(count); });
    if (Config::MMA_ROWS == 2 * Config::PLAN_TILE_ROWS && 2 * row_tiles * per_row_tile <= int(gridDim.x)) {
        // Count the tiles of the height that `num` tiles have. The height is rounded up, so the last of `num` tiles may
        // be left without rows, and would lie after the expert's rows.
        list([](int count) {
            const int num = max((count + Config::PLAN_TILE_ROWS / 2) / Config::PLAN_TILE_ROWS, 1);
            return count > 0 ? ceil_div(count, tile_rows<Config>(count, num)) : 0;
        });
    }
}

#endif
