// What becomes of layer 0's products in block FP8: hidden = silu(gate) * up, and 128 columns of a row of it share a scale.
//
// The two warpgroups have half of these columns each and tell each other the largest of a row.

constexpr int GROUPS = 2;
constexpr int WAVES = MOST_ROWS / ROWS_AT_ONCE;
constexpr int STAGING_BYTES = GROUPS * MOST_ROWS * sizeof(float); // of the largest of an item's rows; two items in turn
constexpr int GROUPS_BARRIER = 3;
constexpr float E4M3_MAX = 448.0f, SMALLEST_SCALE = 1.1754943508222875e-38f; // 2^-126
constexpr u32 SCALE_BITS = ~15u; // element times scale is exact in float32
static_assert(HIDDEN_COLS == 128);

// By the rule of comet.quantize.quantize_rows.
__device__ __forceinline__ float scale_of(float largest) {
    const float scale = fmaxf(__fdiv_rn(largest, E4M3_MAX), SMALLEST_SCALE);
    return __uint_as_float(__float_as_uint(scale) & SCALE_BITS);
}

__device__ __forceinline__ float inverse(float value) {
    float result;
    asm("div.full.f32 %0, %1, %2;" : "=f"(result) : "f"(1.0f), "f"(value));
    return result;
}

// Two numbers of e4m3, the first in the low bits.
__device__ __forceinline__ u32 to_e4m3(float first, float second) {
    u16 packed;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(second), "f"(first));
    return packed;
}

struct Results {
    char* hidden;
    float* scales;              // (F / 128, rows)
    const float* weight_scales; // (experts, 2F / 128, D / 128)
    s64 rows;
};

// Replaces a wave's gate and up by hidden: of each eight columns two, of either row, in the place of gate. Returns the
// largest of either row among the four lanes that have it.
__device__ __forceinline__ void hidden_of(float (&sums)[WAVE_SUMS], float (&largest)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        largest[row] = 0.0f;
#pragma unroll
        for (int place = 2 * row; place < WAVE_SUMS; place += 8) {
#pragma unroll
            for (int col = 0; col < 2; ++col) {
                sums[place + col] = swiglu(sums[place + col], sums[place + 4 + col]);
                largest[row] = fmaxf(largest[row], fabsf(sums[place + col]));
            }
        }
#pragma unroll
        for (int distance = 1; distance < 4; distance *= 2) {
            largest[row] = fmaxf(largest[row], __shfl_xor_sync(0xFFFFFFFF, largest[row], distance));
        }
    }
}

// One row of a wave, 64 columns of hidden: 16 bytes of each of four lanes.
__device__ __forceinline__ void store_row(
    const float (&sums)[WAVE_SUMS], int row, float factor, char* target, bool stores, int lane) {
    u32 words[4];
#pragma unroll
    for (int word = 0; word < 4; ++word) {
        const int place = 16 * word + 2 * row;
        words[word] = to_e4m3(sums[place] * factor, sums[place + 1] * factor) |
                      to_e4m3(sums[place + 8] * factor, sums[place + 9] * factor) << 16;
    }
    transpose_words(words, lane);
    if (!stores) return;
    *reinterpret_cast<uint4*>(target + 16 * (lane % 4)) = make_uint4(
        __byte_perm(words[0], words[1], 0x5410), __byte_perm(words[2], words[3], 0x5410),
        __byte_perm(words[0], words[1], 0x7632), __byte_perm(words[2], words[3], 0x7632));
}

__device__ __forceinline__ void compute_item(
    Ring& ring, const Item& item, const Results& results, const Work& work, float* maxima, int group, int warp,
    int lane) {
    Sums sums;
    const int num_steps = work.num_steps(), num_blocks = work.items_per_piece(), block = item.col / HIDDEN_COLS;
    const float* const gate_scales = results.weight_scales + u64((item.expert * 2 * num_blocks + block) * num_steps);
    WeightScales scales(gate_scales, gate_scales + num_blocks * num_steps);
    multiply_item(ring, sums, scales, item.rows, group, warp, lane, num_steps, [] {});
    const int first = 16 * warp + lane / 4;
    float largest[WAVES][2];
#pragma unroll
    for (int wave = 0; wave < WAVES; ++wave) {
        hidden_of(sums[wave], largest[wave]);
        if (lane % 4 == 0) {
            maxima[group * MOST_ROWS + wave * ROWS_AT_ONCE + first] = largest[wave][0];
            maxima[group * MOST_ROWS + wave * ROWS_AT_ONCE + first + 8] = largest[wave][1];
        }
    }
    asm volatile("bar.sync %0, %1;" ::"n"(GROUPS_BARRIER), "n"(32 * WARPS) : "memory");
#pragma unroll
    for (int wave = 0; wave < WAVES; ++wave) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = wave * ROWS_AT_ONCE + first + 8 * half;
            const bool exists = row < item.valid;
            const float scale = scale_of(fmaxf(largest[wave][half], maxima[(group ^ 1) * MOST_ROWS + row]));
            const u64 place = u32(item.first_row + row);
            char* const target = results.hidden + place * work.ffn + item.col + group * GROUP_COLS;
            store_row(sums[wave], half, inverse(scale), target, exists, lane);
            if (exists && group == 0 && lane % 4 == 0) results.scales[block * results.rows + place] = scale;
        }
    }
}

__device__ __forceinline__ void multiply_items(
    const Work& work, const Memory<Item>& memory, const Results& results, const Recorder& recorder, int warp, int lane) {
    const int group = warp / 4;
    float* const maxima = reinterpret_cast<float*>(memory.begin + (memory.staging - memory.stages));
    Ring ring = memory.ring();
    int slot = 0;
    for (int index = blockIdx.x; index < work.num_items(); index += gridDim.x) {
        barrier_wait(ring.full + 8 * ring.stage, ring.parity);
        const Item& item = memory.items[slot];
        const u64 begin = item.begin, ready = item.ready;
        // A warpgroup may be an item ahead of the other.
        float* const own_maxima = maxima + slot % 2 * GROUPS * MOST_ROWS;
        slot = (slot + 1) % ITEM_SLOTS;
        compute_item(ring, item, results, work, own_maxima, group, warp % 4, lane);
        if (warp == 0 && lane == 0) {
            recorder.record(
                KIND_LAYER0_TILE, item.first_row / TILE_ROWS, item.col / HIDDEN_COLS, item.phase, begin, ready);
        }
    }
}
