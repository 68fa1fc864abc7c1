// What becomes of layer 1's products in block FP8: rows of y, rounded.

#ifndef COMET_LAYER1_ROWS_FP8_CUH
#define COMET_LAYER1_ROWS_FP8_CUH

#include "../gemm/mma_fp8.cuh"
#include "rows.cuh"

// 16 rows of a half, by way of `staging`, 64 columns of each at a time: so that a line of y is written at once.
template <class Config>
__device__ __forceinline__ void store_half(
    const HalfSums& sums, u32 staging, u16* target, int cols, int lane) {
    const u32 written = staging + lane % 16 * SWIZZLE_BYTES, read = staging + lane / 8 * SWIZZLE_BYTES;
#pragma unroll
    for (int begin = 0; begin < HALF_COLS; begin += SWIZZLE_BYTES / 2) {
#pragma unroll
        for (int eight = 0; eight < 8; eight += 2) {
            const float* const four = sums + 4 * (begin / 8 + eight);
            u32 words[4];
#pragma unroll
            for (int word = 0; word < 4; ++word) words[word] = Config::Output::pack(four[2 * word], four[2 * word + 1]);
            stmatrix_x4(written + ((eight + lane / 16 ^ lane % 8) << 4), words);
        }
        __syncwarp();
#pragma unroll
        for (int row = 0; row < 16; row += 4) {
            uint4 values;
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(values.x), "=r"(values.y), "=r"(values.z), "=r"(values.w)
                         : "r"(read + row * SWIZZLE_BYTES + ((lane % 8 ^ (row + lane / 8) % 8) << 4)) : "memory");
            *reinterpret_cast<uint4*>(target + u64(row + lane / 8) * cols + begin + lane % 8 * 8) = values;
        }
        __syncwarp();
    }
}

template <class Config>
__device__ __forceinline__ void compute_rows_fp8(
    Pipeline<Config>& pipeline, const PanelTile& tile, PanelShare& share, u16* y, const PanelProblem<Config>& problem,
    int group, int warp, int lane) {
    static_assert(!Config::IS_DGRAD);
    Fp8Accumulator sums;
    const Region region(tile.rows, group, warp, lane);
    const bool leads = warp == 0 && lane == 0;
    const int num_steps = problem.num_steps(), num_blocks = problem.cols / HALF_COLS;
    // The last half may lie outside; then it has the scales of the one before.
    const auto scales_of = [&](int half) {
        const int block = min(tile.col / HALF_COLS + half, num_blocks - 1);
        return problem.scales.weights + u64((tile.expert * num_blocks + block) * num_steps);
    };
    const WeightScales<false> scales(scales_of(region.first_half), scales_of(1));
    // Publish the tile before, whose stores have had time to complete.
    multiply_region(pipeline, sums, scales, region, lane, num_steps, [&] { if (leads) share.publish(); });
    if constexpr (Config::HAS_BIAS) {
        const int col = tile.col + region.first_half * HALF_COLS;
        const auto* const pair = bias_pair<Config>(problem.biases, tile.expert, problem.cols, col + lane % 4 * 2);
        add_biases<Config>(sums, min(region.halves(), (problem.cols - col) / HALF_COLS), [&](int half, int eight) {
            return pair + half * (HALF_COLS / 2) + eight * 4;
        });
    }
    warpgroup_sync(group); // a matrix instruction reads for all four warps, and each has waited for its own only
    // What of the last stage no other warpgroup reads: own rows, or a half of the columns.
    u32 staging = pipeline.stages + pipeline.last() * Stage<Config>::BYTES +
                  (group * HALF_COLS + warp * 16) * SWIZZLE_BYTES;
    if (region.is_whole) staging += Stage<Config>::WEIGHT_BYTES - group * FP8_GROUP_ROWS * SWIZZLE_BYTES;
    u16* const target = y + u64(u32(tile.first_row + region.row - lane / 4)) * problem.cols;
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        const int col = tile.col + (region.first_half + half) * HALF_COLS;
        if (half < region.halves() && col < problem.cols) {
            store_half<Config>(sums[half], staging, target + col, problem.cols, lane);
        }
    }
    fence_proxy_async(); // orders the stores to the stage before the next load to it
    __syncwarp();
    if (lane == 0) pipeline.free_last();
    warpgroup_sync(group);
}

template <class Config, class Storage>
__device__ __forceinline__ void multiply_rows_fp8(
    const PanelProblem<Config>& problem, const Storage& storage, u16* y, int* panel_counters,
    const Recorder<Config>& recorder, int warp, int lane) {
    const int group = warp / 4;
    const auto compute = [&](Pipeline<Config>& pipeline, const PanelTile& tile, PanelShare& share) {
        compute_rows_fp8(pipeline, tile, share, y, problem, group, warp % 4, lane);
    };
    compute_rows_of_tiles(problem, storage, panel_counters, recorder, warp, lane, compute);
}

#endif
