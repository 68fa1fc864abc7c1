// Tiles of the weight gradients, and what the warps of wgrad.cu do with them.
//
// Rows lie in shared memory as they do in global memory: a line is 64 columns of one row, and BLOCK_K lines, a panel,
// one below the other. The tensor cores transpose both operands. In the terms of pipeline.cuh a stage's first BLOCK_N
// lines are a's panels, the MAX_TILE_ROWS lines behind them b's.

#ifndef COMET_GEMM_WGRAD_CUH
#define COMET_GEMM_WGRAD_CUH

#include "scheduler.cuh"
#include "wgmma.cuh"

struct WgradProblem {
    const int* starts; // (e,) first routed row of each expert
    const int* counts; // (e,) routed rows of each expert
    int experts, a_cols, b_cols;

    template <class Shape>
    __device__ __forceinline__ int a_tiles() const { return ceil_div(a_cols, Shape::A_COLS); }
    template <class Shape>
    __device__ __forceinline__ int b_tiles() const { return ceil_div(b_cols, Shape::B_COLS); }
    template <class Shape>
    __device__ __forceinline__ int num_tiles() const { return experts * a_tiles<Shape>() * b_tiles<Shape>(); }
};

struct WgradArgs {
    TensorMap a_map, b_map; // segment maps of rows: kernels/runtime/nvrtc.py
    TensorMap out_map;      // boxes of 16 rows and 64 columns
    WgradProblem problem;
    int* counter; // counts tiles, 0 before the launch
};

template <class Config>
struct WgradShape {
    static constexpr int GROUPS = Config::MATH_WARPS / 4;
    static constexpr int LINE_COLS = SWIZZLE_BYTES / 2;
    static constexpr int PANEL_BYTES = Config::BLOCK_K * SWIZZLE_BYTES;
    static constexpr int A_PANELS = Config::BLOCK_N / Config::BLOCK_K;
    static constexpr int B_PANELS = Config::MAX_TILE_ROWS / Config::BLOCK_K;
    static constexpr int A_COLS = A_PANELS * LINE_COLS, B_COLS = B_PANELS * LINE_COLS; // columns of a tile
    static constexpr int BOX_ROWS = 16; // rows of the result that a warp stores at once
    static constexpr int BOX_BYTES = BOX_ROWS * SWIZZLE_BYTES;
    static constexpr int STAGING_BYTES = Config::STAGED_BOXES * BOX_BYTES; // bytes of each warp
    static constexpr int LEAD_BYTES = 8 * Config::NUM_STAGES; // behind the rest of the block's shared memory
    static_assert(A_PANELS == GROUPS && B_COLS == Config::MMA_ROWS && Config::BLOCK_K % Config::ROW_STEP == 0);
    static_assert(Config::LEAD < Config::NUM_STAGES); // a stage is free once the second warpgroup is a step further
    static_assert(Config::TILE_SLOTS > Config::NUM_STAGES + 2);
};

// ---- tiles

// The rows of an expert; the maps read what lies behind them as 0.
struct Segment {
    int start, count;
};

// The record of a tile that the producer publishes in shared memory.
struct alignas(16) WgradTile {
    Segment segment;
    int expert, a_col, b_col, is_last;

    // An expert without rows has a step, too, of zeros.
    template <class Config>
    __device__ __forceinline__ int num_steps() const { return max(ceil_div(segment.count, Config::BLOCK_K), 1); }
};

template <class Config>
using WgradStorage = SharedStorage<Config, WgradTile, Config::MATH_WARPS * WgradShape<Config>::STAGING_BYTES>;

template <class Config>
__device__ __forceinline__ WgradTile tile_at(const WgradProblem& problem, int index) {
    using Shape = WgradShape<Config>;
    const int a_tiles = problem.a_tiles<Shape>(), tiles = a_tiles * problem.b_tiles<Shape>();
    WgradTile tile;
    tile.expert = index / tiles;
    const TilePlace place(index - tile.expert * tiles, a_tiles, problem.b_tiles<Shape>());
    tile.a_col = place.row_tile * Shape::A_COLS;
    tile.b_col = place.col * Shape::B_COLS;
    tile.segment = {__ldg(problem.starts + tile.expert), __ldg(problem.counts + tile.expert)};
    return tile;
}

// ---- the thread that loads

// Loads rows of a segment through its tensor map.
__device__ __forceinline__ void load_segment(
    u32 target, const TensorMap& map, u32 barrier, int col, const Segment& segment, int row, int segment_rows) {
    tma_load_4d(
        target, map, barrier, col, segment_rows - segment.count + row, segment.start + segment.count, segment_rows);
}

template <class Config>
__device__ __forceinline__ void load_stage(
    const WgradArgs& args, const Pipeline<Config>& pipeline, const WgradTile& tile, int step) {
    using Shape = WgradShape<Config>;
    const u32 stage = pipeline.weights(), full = pipeline.full_barrier();
    const int row = step * Config::BLOCK_K;
    mbarrier_arrive_expect_tx(full, Stage<Config>::BYTES);
#pragma unroll
    for (int panel = 0; panel < Shape::A_PANELS; ++panel) {
        load_segment(stage + panel * Shape::PANEL_BYTES, args.a_map, full, tile.a_col + panel * Shape::LINE_COLS,
                     tile.segment, row, Config::SEGMENT_ROWS);
    }
#pragma unroll
    for (int panel = 0; panel < Shape::B_PANELS; ++panel) {
        load_segment(stage + (Shape::A_PANELS + panel) * Shape::PANEL_BYTES, args.b_map, full,
                     tile.b_col + panel * Shape::LINE_COLS, tile.segment, row, Config::SEGMENT_ROWS);
    }
}

template <class Config>
__device__ __forceinline__ void load_tiles(
    const WgradArgs& args, const WgradProblem& problem, const WgradStorage<Config>& storage,
    TileScheduler<Config>& scheduler) {
    const int tiles = problem.num_tiles<WgradShape<Config>>(), first = scheduler.first();
    if (first >= tiles) return;
    Pipeline<Config> pipeline = storage.pipeline();
    WgradTile next = tile_at<Config>(problem, first);
    for (bool is_last = false; !is_last;) {
        WgradTile tile = next;
        const int following = scheduler.next();
        tile.is_last = is_last = following >= tiles;
        scheduler.publish_ahead(is_last);
        if (!is_last) next = tile_at<Config>(problem, following); // its segment is found while this one is loaded
        for (int step = 0; step < tile.num_steps<Config>(); ++step) {
            pipeline.wait_empty();
            // Warps that have waited for the tile's first stage see this store.
            if (step == 0) storage.tiles[scheduler.slot()] = tile;
            load_stage(args, pipeline, tile, step);
            pipeline.advance();
        }
    }
}

// ---- warpgroups

// How far the first warpgroup is: an mbarrier for each stage, which it arrives at once it has begun to multiply that.
template <class Config>
struct Lead {
    u32 barriers;

    __device__ __forceinline__ void arrive(const Pipeline<Config>& pipeline, int lane) const {
        if (lane == 0) mbarrier_arrive(barriers + 8 * pipeline.stage);
    }

    // The second warpgroup waits before a step until the first one is LEAD steps ahead or in the tile's last step.
    __device__ __forceinline__ void wait(const Pipeline<Config>& pipeline, int step, int num_steps) const {
        if (step > 0 && step + Config::LEAD > num_steps) return;
        int stage = pipeline.stage + min(Config::LEAD, num_steps) - 1;
        u32 parity = pipeline.parity;
        if (stage >= Config::NUM_STAGES) {
            stage -= Config::NUM_STAGES;
            parity ^= 1;
        }
        mbarrier_wait(barriers + 8 * stage, parity);
    }
};

template <class Config>
using WgradSums = float[Config::MMA_ROWS / 2];

template <class Config>
__device__ __forceinline__ u64 panel_descriptor(u32 address) {
    return descriptor_of((WgradShape<Config>::PANEL_BYTES / 16 << 16) | ((address & 0x3FFFF) >> 4));
}

template <class Config>
__device__ __forceinline__ void free_stage(const Pipeline<Config>& pipeline, int lane) {
    if (lane == 0) pipeline.free_last();
}

// A step's products, of its first ROWS rows, and all around them.
template <int ROWS, class Config>
__device__ __forceinline__ void multiply_step(
    Pipeline<Config>& pipeline, WgradSums<Config>& sums, const Lead<Config>& lead, int step, int num_steps, int group,
    int lane) {
    using Shape = WgradShape<Config>;
    if (Config::LEAD > 0 && group == 1) lead.wait(pipeline, step, num_steps);
    pipeline.wait_full();
    const u32 stage = pipeline.weights();
    const u64 a = panel_descriptor<Config>(stage + group * Shape::PANEL_BYTES);
    const u64 b = panel_descriptor<Config>(stage + Shape::A_PANELS * Shape::PANEL_BYTES);
    wgmma_fence();
#pragma unroll
    for (int row = 0; row < ROWS; row += Config::ROW_STEP) {
        Wgmma<typename Config::Element, Config::MMA_ROWS>::template multiply<true, true, 0>(
            sums, a + row * SWIZZLE_BYTES / 16, b + row * SWIZZLE_BYTES / 16, step > 0 || row > 0);
    }
    wgmma_commit_group();
    if (Config::LEAD > 0 && group == 0) lead.arrive(pipeline, lane);
    wgmma_wait_group<1>();
    if (step > 0) free_stage(pipeline, lane); // the stage of the step before
    pipeline.advance();
}

// Multiplies only the 16-row steps that a last, partly filled step has.
template <int ROWS, class Config>
__device__ __forceinline__ void multiply_rest(
    Pipeline<Config>& pipeline, WgradSums<Config>& sums, const Lead<Config>& lead, int rows, int step, int group,
    int lane) {
    if constexpr (ROWS > 0) {
        if (rows > ROWS - Config::ROW_STEP) {
            multiply_step<ROWS>(pipeline, sums, lead, step, step + 1, group, lane);
        } else {
            multiply_rest<ROWS - Config::ROW_STEP>(pipeline, sums, lead, rows, step, group, lane);
        }
    }
}

template <class Config>
__device__ __forceinline__ void multiply_tile(
    Pipeline<Config>& pipeline, WgradSums<Config>& sums, const WgradTile& tile, const Lead<Config>& lead, int group,
    int lane) {
    constexpr int BLOCK_K = Config::BLOCK_K;
    const int rows = max(tile.segment.count, 1), num_steps = tile.num_steps<Config>(), full = rows / BLOCK_K;
#pragma unroll 1
    for (int step = 0; step < full; ++step) {
        multiply_step<BLOCK_K>(pipeline, sums, lead, step, num_steps, group, lane);
    }
    if (full < num_steps) multiply_rest<BLOCK_K>(pipeline, sums, lead, rows - full * BLOCK_K, full, group, lane);
    wgmma_wait_group<0>();
    free_stage(pipeline, lane);
}

// Rounds a warp's 16 rows and stores them 64 columns at a time, through boxes of shared memory that are used in turn.
// The map cuts off what lies outside of the result.
template <class Config>
__device__ __forceinline__ void store_tile(
    const WgradSums<Config>& sums, const WgradTile& tile, const TensorMap& out_map, u32 staging, int group, int warp,
    int lane) {
    using Shape = WgradShape<Config>;
    using Element = typename Config::Element;
    const int row = tile.a_col + group * Shape::LINE_COLS + warp * Shape::BOX_ROWS;
    const u32 line = staging + lane % 16 * SWIZZLE_BYTES;
#pragma unroll
    for (int panel = 0; panel < Shape::B_PANELS; ++panel) {
        const u32 box = panel % Config::STAGED_BOXES * Shape::BOX_BYTES;
        if (lane == 0) tma_store_wait<Config::STAGED_BOXES - 1>();
        __syncwarp();
#pragma unroll
        for (int chunk = 0; chunk < 8; chunk += 2) {
            const float* const values = sums + 4 * (8 * panel + chunk);
            const u32 words[] = {Element::pack(values[0], values[1]), Element::pack(values[2], values[3]),
                                 Element::pack(values[4], values[5]), Element::pack(values[6], values[7])};
            stmatrix_x4(line + box + ((chunk + lane / 16 ^ lane % 8) << 4), words);
        }
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) {
            tma_store_3d(out_map, line + box, tile.b_col + panel * Shape::LINE_COLS, row, tile.expert);
        }
    }
}

template <class Config>
__device__ __forceinline__ void multiply_tiles(
    const WgradProblem& problem, const TensorMap& out_map, const WgradStorage<Config>& storage, u32 leads, int warp,
    int lane) {
    using Shape = WgradShape<Config>;
    const int group = warp / 4;
    const u32 staging = storage.staging + warp * Shape::STAGING_BYTES;
    compute_tiles<Config>(storage, problem.num_tiles<Shape>(), [&](Pipeline<Config>& pipeline, WgradTile tile) {
        WgradSums<Config> sums;
        multiply_tile(pipeline, sums, tile, Lead<Config>{leads}, group, lane);
        store_tile<Config>(sums, tile, out_map, staging, group, warp % 4, lane);
    });
    if (lane == 0) tma_store_wait<0>(); // the block's memory is in use until then
}

#endif
