// Tiles of layer 0's GEMM, hidden[q] = activation(w[expert of q] @ row[q]) for all routed rows, whose tokens lie
// anywhere in x (own rows) or in the receive buffer; as fc2_dgrad (IS_DGRAD) of hidden[q] = row[q] @ w[expert of q],
// where rows are gradients of layer 1's output.

#ifndef COMET_LAYER0_TILES_CUH
#define COMET_LAYER0_TILES_CUH

#include "../gemm/scheduler.cuh"

// An expert's rows in two segments: some that are there from the start, so that nothing waits for the first rows of
// others, and the rest; both are cut into token tiles. All first segments come first.
struct Segments {
    int* first_tile; // (2 * experts + 1,) in shared memory: token tiles before each segment
    int* first_rows; // (experts,) in shared memory: rows of the first segment

    static constexpr int BYTES_PER_EXPERT = 3 * sizeof(int), BYTES_MORE = sizeof(int);
};

template <class Config>
struct GatherProblem {
    // Columns of the result of a tile; gate and up are interleaved in groups of 8, so they share a tile's columns.
    static constexpr int TILE_COLS = Config::IS_DGRAD ? Config::BLOCK_N : Config::BLOCK_N / 2;

    const int* counts; // (e,) routed rows of each expert
    const int* starts; // (e,) first routed row of each expert
    Segments segments;
    int experts, depth, ffn;
    const void* biases; // (e, 2F) of gate | up, if HAS_BIAS

    __device__ __forceinline__ int tiles_per_row_tile() const { return ceil_div(ffn, TILE_COLS); }
    __device__ __forceinline__ int num_tiles() const { return segments.first_tile[2 * experts] * tiles_per_row_tile(); }
    __device__ __forceinline__ int num_steps() const { return ceil_div(depth, Config::BLOCK_K); }
};

// The record of a tile that the first producer warp publishes in shared memory; `rows` is a multiple of ROW_STEP, of
// which `valid` are routed rows.
struct alignas(16) GatheredTile {
    int first_row, rows, valid, col, expert, phase, is_last, spare;
    u64 begin, ready; // nanoseconds
};

template <class Config>
__device__ __forceinline__ GatheredTile tile_at(const GatherProblem<Config>& problem, int index) {
    GatheredTile tile = {};
    const int row_tile = index / problem.tiles_per_row_tile();
    const int* const first_tile = problem.segments.first_tile;
    const int segment = segment_of(first_tile, 2 * problem.experts, row_tile);
    const bool is_first = segment < problem.experts;
    tile.phase = !is_first;
    tile.expert = is_first ? segment : segment - problem.experts;
    const int num = first_tile[segment + 1] - first_tile[segment];
    const TilePlace place(
        index - first_tile[segment] * problem.tiles_per_row_tile(), num, problem.tiles_per_row_tile());
    tile.col = place.col * problem.TILE_COLS;
    const int first = problem.segments.first_rows[tile.expert];
    const int count = is_first ? first : __ldg(problem.counts + tile.expert) - first;
    const int height = tile_rows<Config>(count, num);
    tile.first_row = __ldg(problem.starts + tile.expert) + (is_first ? 0 : first) + place.row_tile * height;
    tile.valid = min(height, count - place.row_tile * height);
    tile.rows = ceil_div(tile.valid, Config::ROW_STEP) * Config::ROW_STEP;
    return tile;
}

// Cuts the experts' rows. First segments are tiles of phase 0 of the plan, as many as keep every block busy once. The
// work of all threads of a block; `plan_tiles` go by phase.
template <class Config>
__device__ __forceinline__ void list_row_tiles(
    const GatherProblem<Config>& problem, const int4* plan_tiles, int num_plan_tiles, int thread) {
    const int experts = problem.experts;
    int* const first_rows = problem.segments.first_rows;
    for (int expert = thread; expert < experts; expert += Config::THREADS) first_rows[expert] = 0;
    __syncthreads();
    for (int tile = thread; tile < num_plan_tiles; tile += Config::THREADS) {
        const int4 entry = __ldg(plan_tiles + tile);
        if (entry.w == 0) atomicAdd(first_rows + entry.x, entry.z);
    }
    __syncthreads();
    if (thread >= 32) return;
    const int enough = ceil_div(gridDim.x, problem.tiles_per_row_tile());
    int before = 0;
    for (int second = 0; second < 2; ++second) {
        for (int begin = 0; begin < experts; begin += 32) {
            const int expert = begin + thread;
            const int first = expert < experts ? first_rows[expert] : 0;
            const int count = expert >= experts ? 0 : second ? __ldg(problem.counts + expert) - first : first;
            int row_tiles = num_row_tiles<Config>(count), total;
            int earlier = before_lane(row_tiles, thread, total);
            if (!second && expert < experts) {
                const int kept = min(row_tiles, max(enough - before - earlier, 0));
                if (kept < row_tiles) first_rows[expert] = kept * Config::MMA_ROWS;
                row_tiles = kept;
            }
            earlier = before_lane(row_tiles, thread, total);
            if (expert < experts) problem.segments.first_tile[second * experts + expert] = before + earlier;
            before += total;
        }
        __syncwarp();
    }
    if (thread == 0) problem.segments.first_tile[2 * experts] = before;
}

#endif
