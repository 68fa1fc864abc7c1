// What becomes of layer 1's products: rows of y, rounded, and a share of their panel, which those that combine wait
// for.

#ifndef COMET_LAYER1_ROWS_CUH
#define COMET_LAYER1_ROWS_CUH

#include "../gemm/bias.cuh"
#include "../gemm/store_rows.cuh"
#include "../recorder.cuh"
#include "tiles.cuh"

// A tile's share of a panel, counted once all stores of its warpgroup are complete.
struct PanelShare {
    int* counters;
    int panel, plan_tiles;

    __device__ __forceinline__ void publish() {
        if (plan_tiles > 0) {
            __threadfence();
            asm volatile(
                "red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(counters + panel), "r"(plan_tiles) : "memory");
            plan_tiles = 0;
        }
    }
};

template <class Config>
__device__ __forceinline__ void compute_rows(
    Pipeline<Config>& pipeline, const PanelTile& tile, PanelShare& share, u16* y,
    const PanelProblem<Config>& problem, u32 staging, int group, int warp, int lane, int num_steps) {
    constexpr bool FENCES = false; // rows come by TMA
    Accumulator<Config> sums;
    ColumnBiases<Config> biases;
    if constexpr (Config::HAS_BIAS) {
        const int col = tile.col + group * (Config::BLOCK_N / 2) + warp * 16 + lane / 4;
        // Columns are a multiple of 16.
        if (col < problem.cols) biases.fetch(problem.biases, tile.expert, problem.cols, col, col + 8);
    }
    const bool leads = warp == 0 && lane == 0;
    // Publish the tile before, whose stores have had time to complete.
    multiply_tile<FENCES>(
        pipeline, sums, biases, tile.rows, group, lane, num_steps, [&] { if (leads) share.publish(); });
    store_tile<Config>(sums, tile, y, problem.cols, staging, group, warp, lane);
}

// The work of the math warps: `compute` is one tile.
template <class Config, class Storage, typename Compute>
__device__ __forceinline__ void compute_rows_of_tiles(
    const PanelProblem<Config>& problem, const Storage& storage, int* panel_counters,
    const Recorder<Config>& recorder, int warp, int lane, Compute compute) {
    PanelShare share{panel_counters, 0, 0};
    compute_tiles<Config>(storage, problem.num_tiles(), [&](Pipeline<Config>& pipeline, const PanelTile& tile) {
        const u64 begin = recorder.now();
        compute(pipeline, tile, share);
        share.panel = tile.panel;
        share.plan_tiles = tile.plan_tiles;
        if (warp == 0 && lane == 0) {
            recorder.record(
                Config::KIND_LAYER1_TILE, tile.first_row / Config::PLAN_TILE_ROWS, tile.col / Config::PANEL_UNIT,
                tile.panel, begin, begin);
        }
    });
    if (warp % 4 == 0 && lane == 0) share.publish();
}

template <class Config, class Storage>
__device__ __forceinline__ void multiply_rows(
    const PanelProblem<Config>& problem, const Storage& storage, u16* y, int* panel_counters,
    const Recorder<Config>& recorder, int warp, int lane) {
    const int group = warp / 4, num_steps = problem.num_steps();
    const u32 staging = storage.staging + group * ROWS_STAGING_BYTES<Config>;
    const auto compute = [&](Pipeline<Config>& pipeline, const PanelTile& tile, PanelShare& share) {
        compute_rows(pipeline, tile, share, y, problem, staging, group, warp % 4, lane, num_steps);
    };
    compute_rows_of_tiles(problem, storage, panel_counters, recorder, warp, lane, compute);
}

#endif
