// Products of a tile in 16 bits: routed rows of an expert times columns of its weights, stage by stage.
//
// Transposed on the tensor cores: columns of the result are the 64 rows of a matrix instruction, routed rows its N. N
// goes in steps of 16, so an expert's rows are cut into token tiles of equal height and little is computed for nothing,
// where tiles of 128 routed rows waste a quarter of 256 +- 16. One token tile may be taller than what an instruction
// takes, for weights are then loaded once and not twice. Two warpgroups multiply, each BLOCK_N / 2 columns.

#ifndef COMET_GEMM_MMA_CUH
#define COMET_GEMM_MMA_CUH

#include "pipeline.cuh"
#include "wgmma.cuh"

constexpr int MEANWHILE_STEP = 2; // at which `meanwhile` is called

template <class Config>
using Accumulator = float[Config::MAX_TILE_ROWS / 2];

// Columns that are neighbours in memory (IS_DGRAD) lie along the lines of a stage, which the tensor cores transpose.
template <int ROWS, class Config>
__device__ __forceinline__ void multiply_block(Accumulator<Config>& sums, u64 weights, u64 rows) {
    using Element = typename Config::Element;
    constexpr int MMA_ROWS = Config::MMA_ROWS;
    if constexpr (ROWS <= MMA_ROWS) {
        Wgmma<Element, ROWS>::template multiply<Config::IS_DGRAD, false, 0>(sums, weights, rows, true);
    } else {
        Wgmma<Element, MMA_ROWS>::template multiply<Config::IS_DGRAD, false, 0>(sums, weights, rows, true);
        Wgmma<Element, ROWS - MMA_ROWS>::template multiply<Config::IS_DGRAD, false, MMA_ROWS / 2>(
            sums, weights, rows + MMA_ROWS * SWIZZLE_BYTES / 16, true);
    }
}

template <class Config>
__device__ __forceinline__ void free_last_stage(const Pipeline<Config>& pipeline, int lane) {
    if (lane < Config::CLUSTER) mbarrier_arrive_at(pipeline.empty + 8 * pipeline.last(), lane);
}

// Adds up a tile of ROWS rows. `meanwhile` is called while products run, and once more at the end, for tiles of few
// steps. FENCES: rows are what threads wrote. Biases are added here, where sums have their registers for certain.
template <int ROWS, bool FENCES, class Config, class Biases, typename Meanwhile>
__device__ __forceinline__ void multiply_steps(
    Pipeline<Config>& pipeline, Accumulator<Config>& sums, const Biases& biases, int group, int lane, int num_steps,
    Meanwhile meanwhile) {
    // From one instruction's weights to the next one's, in units of 16 bytes: along a line, or 16 lines on.
    constexpr int NEXT_WEIGHTS = Config::IS_DGRAD ? SWIZZLE_BYTES : 2;
#pragma unroll 1 // not slower, and the assembler takes a third of the time
    for (int step = 0; step < num_steps; ++step) {
        pipeline.wait_full();
        if constexpr (FENCES) fence_proxy_async();
        const u64 a = descriptor(pipeline.weights() + group * (Stage<Config>::WEIGHT_BYTES / 2));
        const u64 b = descriptor(pipeline.weights() + Stage<Config>::WEIGHT_BYTES);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < Config::BLOCK_K / 16; ++k) {
            multiply_block<ROWS, Config>(sums, a + NEXT_WEIGHTS * k, b + 2 * k);
        }
        wgmma_commit_group();
        if (step == MEANWHILE_STEP) meanwhile();
        // The step before is done: its stage may be loaded again, in all blocks that share its rows.
        wgmma_wait_group<1>();
        if (step > 0) free_last_stage(pipeline, lane);
        pipeline.advance();
    }
    wgmma_wait_group<0>();
    free_last_stage(pipeline, lane);
    meanwhile();
    if constexpr (Config::HAS_BIAS) biases.template add_to<ROWS>(sums, lane);
}

// The same of as many rows as a tile has. Only the products are compiled for each height, for the assembler's time.
template <bool FENCES, class Config, class Biases, typename Meanwhile>
__device__ __forceinline__ void multiply_tile(
    Pipeline<Config>& pipeline, Accumulator<Config>& sums, const Biases& biases, int rows, int group, int lane,
    int num_steps, Meanwhile meanwhile) {
    static_assert(Config::ROW_STEP == 16 && Config::MAX_TILE_ROWS <= 18 * 16);
#pragma unroll
    for (float& sum : sums) sum = 0.0f;
    switch (rows / 16) {
#define CASE(STEPS)                                                                                                    \
    case STEPS:                                                                                                        \
        if constexpr (16 * STEPS <= Config::MAX_TILE_ROWS) {                                                           \
            multiply_steps<16 * STEPS, FENCES>(pipeline, sums, biases, group, lane, num_steps, meanwhile);             \
        }                                                                                                              \
        break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9)
        CASE(10) CASE(11) CASE(12) CASE(13) CASE(14) CASE(15) CASE(16) CASE(17) CASE(18)
#undef CASE
    }
}

#endif
