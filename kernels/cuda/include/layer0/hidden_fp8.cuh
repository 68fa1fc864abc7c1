// What becomes of layer 0's products in block FP8: hidden = activation(gate, up), and 128 columns of a row of it share
// a scale.
//
// Of a tile of 64 rows the warpgroups have half of these columns each, and tell each other the largest of each row.

#ifndef COMET_LAYER0_HIDDEN_FP8_CUH
#define COMET_LAYER0_HIDDEN_FP8_CUH

#include "../gemm/mma_fp8.cuh"
#include "hidden.cuh"

constexpr int HALF_HIDDEN = HALF_COLS / 2; // columns of hidden of a half: gate and up are interleaved
constexpr float E4M3_MAX = 448.0f, SMALLEST_SCALE = 1.1754943508222875e-38f; // 2^-126
constexpr u32 SCALE_BITS = ~15u; // element times scale is exact in float32

// The scale by the rule of comet.quantization.formats.quantize_rows.
__device__ __forceinline__ float scale_of(float largest) {
    const float scale = fmaxf(__fdiv_rn(largest, E4M3_MAX), SMALLEST_SCALE);
    return __uint_as_float(__float_as_uint(scale) & SCALE_BITS);
}

// Two numbers of e4m3, the first in the low bits.
__device__ __forceinline__ u32 to_e4m3(float first, float second) {
    u16 packed;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(second), "f"(first));
    return packed;
}

// Replaces gate by hidden in a half: of each eight columns a thread has two, of both of its rows. What is largest in
// either row may grow.
template <class Config>
__device__ __forceinline__ void activate_half(HalfSums& sums, float (&largest)[2]) {
#pragma unroll
    for (int place = 0; place < HALF_SUMS; place += 8) {
#pragma unroll
        for (int index = 0; index < 4; ++index) {
            float& hidden = sums[place + index];
            hidden = activate<Config>(hidden, sums[place + 4 + index]);
            largest[index / 2] = fmaxf(largest[index / 2], fabsf(hidden));
        }
    }
}

// Four lanes with four words each: lane q gets word q of each of them.
__device__ __forceinline__ void transpose_words(u32 (&words)[4], int lane) {
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
        const bool is_upper = lane & distance;
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            const int low = distance == 1 ? 2 * pair : pair, high = low + distance;
            const u32 sent = is_upper ? words[low] : words[high];
            const u32 got = __shfl_xor_sync(ALL_LANES, sent, distance);
            words[low] = is_upper ? got : words[low];
            words[high] = is_upper ? words[high] : got;
        }
    }
}

// One of a thread's two rows of a half, 64 columns of hidden: 16 bytes of each of four lanes.
__device__ __forceinline__ void store_row(
    const HalfSums& sums, int row, float factor, char* target, bool exists, int lane) {
    u32 words[4];
#pragma unroll
    for (int word = 0; word < 4; ++word) {
        const int place = 16 * word + 2 * row;
        words[word] = to_e4m3(sums[place] * factor, sums[place + 1] * factor) |
                      to_e4m3(sums[place + 8] * factor, sums[place + 9] * factor) << 16;
    }
    transpose_words(words, lane);
    if (!exists) return;
    *reinterpret_cast<uint4*>(target + 16 * (lane % 4)) = make_uint4(
        __byte_perm(words[0], words[1], 0x5410), __byte_perm(words[2], words[3], 0x5410),
        __byte_perm(words[0], words[1], 0x7632), __byte_perm(words[2], words[3], 0x7632));
}

// The largest of each row of a tile of 64, as either warpgroup has found it in its half. While one still reads them,
// the other may write those of the next such tile: they lie in two places in turn.
template <class Config>
struct Maxima {
    static constexpr int BYTES = 2 * 2 * FP8_GROUP_ROWS * sizeof(float);

    float* begin;
    int tiles = 0;

    __device__ __forceinline__ void exchange(float (&largest)[2], int group, int row, int lane) {
        float* const rows = begin + tiles % 2 * 2 * FP8_GROUP_ROWS;
        ++tiles;
#pragma unroll
        for (int place = 0; place < 2; ++place) {
            if (lane % 4 == 0) rows[group * FP8_GROUP_ROWS + row + 8 * place] = largest[place];
        }
        math_sync<Config>();
#pragma unroll
        for (int place = 0; place < 2; ++place) {
            largest[place] = fmaxf(largest[place], rows[(group ^ 1) * FP8_GROUP_ROWS + row + 8 * place]);
        }
    }
};

template <class Config>
__device__ __forceinline__ void compute_hidden_fp8(
    Pipeline<Config>& pipeline, const GatheredTile& tile, const HiddenArgs& args, const GatherProblem<Config>& problem,
    Maxima<Config>& maxima, int group, int warp, int lane) {
    constexpr int TILE_COLS = GatherProblem<Config>::TILE_COLS;
    static_assert(TILE_COLS == 128 && !Config::IS_DGRAD);
    Fp8Accumulator sums;
    const Region region(tile.rows, group, warp, lane);
    const int num_steps = problem.num_steps(), num_blocks = problem.tiles_per_row_tile(), block = tile.col / TILE_COLS;
    const float* const gate_scales = args.weight_scales + u64((tile.expert * 2 * num_blocks + block) * num_steps);
    const WeightScales<true> scales(gate_scales, gate_scales + num_blocks * num_steps);
    multiply_region(pipeline, sums, scales, region, lane, num_steps, [] {});
    if (lane == 0) pipeline.free_last();
    if constexpr (Config::HAS_BIAS) {
        const int col = tile.col + region.first_half * HALF_HIDDEN + lane % 4 * 2;
        const auto* const gate = bias_pair<Config>(problem.biases, tile.expert, 2 * problem.ffn, col);
        const auto* const up = gate + problem.ffn / 2;
        add_biases<Config>(sums, region.halves(), [&](int half, int eight) {
            return (eight % 2 ? up : gate) + half * (HALF_HIDDEN / 2) + eight / 2 * 4;
        });
    }
    float largest[2] = {0.0f, 0.0f};
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        if (half < region.halves()) activate_half<Config>(sums[half], largest);
    }
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
#pragma unroll
        for (float& each : largest) each = fmaxf(each, __shfl_xor_sync(ALL_LANES, each, distance));
    }
    if (!region.is_whole) maxima.exchange(largest, group, region.row, lane);
#pragma unroll
    for (int place = 0; place < 2; ++place) {
        const int row = region.row + 8 * place;
        const bool exists = row < tile.valid;
        const float scale = scale_of(largest[place]), inverse = __frcp_rn(scale);
        const u64 index = u32(tile.first_row + row);
        char* const target =
            static_cast<char*>(args.hidden) + index * problem.ffn + tile.col + region.first_half * HALF_HIDDEN;
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            if (half < region.halves()) {
                store_row(sums[half], place, inverse, target + half * HALF_HIDDEN, exists, lane);
            }
        }
        if (exists && region.first_half == 0 && lane % 4 == 0) args.scales[block * args.num_rows + index] = scale;
    }
}

// The work of the math warps, tile by tile.
template <class Config, class Storage>
__device__ __forceinline__ void multiply_hidden_fp8(
    const GatherProblem<Config>& problem, const Storage& storage, const HiddenArgs& args,
    const Recorder<Config>& recorder, int warp, int lane) {
    Maxima<Config> maxima{reinterpret_cast<float*>(storage.begin + (storage.staging - storage.stages))};
    compute_tiles<Config>(storage, problem.num_tiles(), [&](Pipeline<Config>& pipeline, const GatheredTile& tile) {
        compute_hidden_fp8(pipeline, tile, args, problem, maxima, warp / 4, warp % 4, lane);
        record_tile(recorder, tile, warp, lane);
    });
}

#endif
