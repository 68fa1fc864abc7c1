// Products of a tile in block FP8: routed rows of an expert times columns of its weights.
//
// Routed rows are the 64 rows of a matrix instruction, 128 columns of the weights its N: so a thread's sums belong to
// two rows, and two scales of rows and one of the weights scale all of them. Tensor cores keep some 14 bits of a sum of
// e4m3 products; a step's 128 are added up there, and the steps here, while the other warpgroup multiplies. Each
// warpgroup has 64 of a tile's rows and one half of its columns after the other; of a tile of 64 rows, a half of its
// columns.

#ifndef COMET_GEMM_MMA_FP8_CUH
#define COMET_GEMM_MMA_FP8_CUH

#include "mma.cuh"

constexpr int FP8_GROUP_ROWS = 64; // rows of a warpgroup
constexpr int HALF_COLS = 128;     // half of a tile's columns
constexpr int HALVES = 2;
constexpr int HALF_SUMS = FP8_GROUP_ROWS * HALF_COLS / 128; // sums of a thread

using Products = float[HALF_SUMS]; // sums of one step
using HalfSums = float[HALF_SUMS];
using Fp8Accumulator = HalfSums[HALVES];

// The part of a tile that is a warpgroup's, and a thread's first row in it; its second row is eight rows further.
struct Region {
    bool is_whole; // both halves of the columns, of own rows
    int first_half, first_row, row;

    __device__ __forceinline__ Region(int rows, int group, int warp, int lane)
        : is_whole(rows > FP8_GROUP_ROWS), first_half(is_whole ? 0 : group),
          first_row(is_whole ? group * FP8_GROUP_ROWS : 0), row(first_row + 16 * warp + lane / 4) {}

    __device__ __forceinline__ int halves() const { return is_whole ? HALVES : 1; }
};

// Scales of the weights that a warpgroup multiplies with, step by step, fetched a step ahead: of two halves of the
// columns, or of gate and up, whose columns are INTERLEAVED in groups of 8.
template <bool INTERLEAVED>
struct WeightScales {
    const float* first;
    const float* second;
    float following[2];

    __device__ __forceinline__ WeightScales(const float* first, const float* second) : first(first), second(second) {
        fetch(0);
    }

    __device__ __forceinline__ void fetch(int step) {
        following[0] = __ldg(first + step);
        following[1] = __ldg(second + step);
    }

    static __device__ __forceinline__ constexpr int index(int half, int place) {
        return INTERLEAVED ? place / 4 % 2 : half;
    }
};

// Adds products, scaled, to the sums of a half. Those with the same factor follow each other: it then comes from the
// registers once for two of them, while tensor cores use these as well.
template <bool INTERLEAVED>
__device__ __forceinline__ void add_scaled(
    HalfSums& sums, const Products& products, const float (&factors)[2][2], int half) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
#pragma unroll
        for (int begin = 2 * pair; begin < HALF_SUMS; begin += 8) {
            const float factor = factors[WeightScales<INTERLEAVED>::index(half, begin)][pair % 2];
#pragma unroll
            for (int place = begin; place < begin + 2; ++place) {
                sums[place] = __fmaf_rn(products[place], factor, sums[place]);
            }
        }
    }
}

// The first stage is full. A warpgroup waits for a stage while the last products of the one before are under way: it
// has to add these and start again before the products of the other warpgroup are done.
template <int NUM_HALVES, bool INTERLEAVED, class Config, typename Meanwhile>
__device__ __forceinline__ void multiply_halves(
    Pipeline<Config>& pipeline, Fp8Accumulator& sums, WeightScales<INTERLEAVED>& scales, const Region& region, int lane,
    int num_steps, Meanwhile meanwhile) {
    using Mma = Wgmma<typename Config::Element, HALF_COLS>;
    constexpr int STAGE_BYTES = Stage<Config>::BYTES, ROW_SCALE_BYTES = Stage<Config>::ROW_SCALE_BYTES;
    Products products;
    // Descriptors of a stage's rows and weights. They advance from stage to stage: to compute them again would keep the
    // products waiting.
    const u32 stage = pipeline.weights();
    u32 rows_at = low_word(descriptor(stage + Stage<Config>::WEIGHT_BYTES + region.first_row * SWIZZLE_BYTES));
    u32 weights_at = low_word(descriptor(stage + region.first_half * (HALF_COLS * SWIZZLE_BYTES)));
#pragma unroll 1
    for (int step = 0; step < num_steps; ++step) {
        const float weights[2] = {scales.following[0], scales.following[1]};
        const u64 a = descriptor_of(rows_at), b = descriptor_of(weights_at);
        const u32 upper = pipeline.scales(step) + ROW_SCALE_BYTES * region.row, lower = upper + ROW_SCALE_BYTES * 8;
        const u32 empty = pipeline.empty_barrier();
        float factors[2][2];
#pragma unroll
        for (int half = 0; half < NUM_HALVES; ++half) {
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < SWIZZLE_BYTES / 32; ++k) {
                const u64 columns = b + half * (HALF_COLS * SWIZZLE_BYTES / 16) + 2 * k;
                Mma::template multiply<0>(products, a + 2 * k, columns, k > 0);
            }
            wgmma_commit_group();
            if (half == 0) {
                scales.fetch(min(step + 1, num_steps - 1));
                float rows[2];
                asm volatile("ld.shared.f32 %0, [%1];" : "=f"(rows[0]) : "r"(upper) : "memory");
                asm volatile("ld.shared.f32 %0, [%1];" : "=f"(rows[1]) : "r"(lower) : "memory");
#pragma unroll
                for (int place = 0; place < 4; ++place) {
                    factors[place / 2][place % 2] = weights[place / 2] * rows[place % 2];
                }
                if (step == MEANWHILE_STEP) meanwhile();
            }
            if (half == NUM_HALVES - 1) {
                pipeline.advance();
                pipeline.advance_scales(step, num_steps);
                const int onward = pipeline.stage == 0 ? (1 - Config::NUM_STAGES) * STAGE_BYTES / 16 : STAGE_BYTES / 16;
                rows_at += onward;
                weights_at += onward;
                if (step + 1 < num_steps) pipeline.wait_full();
            }
            Mma::template wait<0>(products);
            if (half == NUM_HALVES - 1 && lane == 0 && step + 1 < num_steps) mbarrier_arrive(empty);
            add_scaled<INTERLEAVED>(sums[half], products, factors, half);
        }
    }
    meanwhile();
}

// Adds up a warpgroup's region of a tile. `meanwhile` is called while products run, and once more at the end. The last
// stage is still the caller's.
template <bool INTERLEAVED, class Config, typename Meanwhile>
__device__ __forceinline__ void multiply_region(
    Pipeline<Config>& pipeline, Fp8Accumulator& sums, WeightScales<INTERLEAVED> scales, const Region& region, int lane,
    int num_steps, Meanwhile meanwhile) {
    static_assert(Config::BLOCK_N == HALVES * HALF_COLS && Config::ROW_STEP == FP8_GROUP_ROWS);
    static_assert(Config::MAX_TILE_ROWS == 2 * FP8_GROUP_ROWS && Config::MMA_ROWS == Config::MAX_TILE_ROWS);
    static_assert(Config::CLUSTER == 1);
#pragma unroll
    for (int place = 0; place < HALVES * HALF_SUMS; ++place) sums[place / HALF_SUMS][place % HALF_SUMS] = 0.0f;
    if (region.is_whole) {
        multiply_halves<HALVES>(pipeline, sums, scales, region, lane, num_steps, meanwhile);
    } else {
        multiply_halves<1>(pipeline, sums, scales, region, lane, num_steps, meanwhile);
    }
}

#endif
