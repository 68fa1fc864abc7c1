// What becomes of layer 0's products in block FP8: hidden = silu(gate) * up, and 128 columns of a row of it share a
// scale.
//
// Of an item of 64 rows the warpgroups have half of these columns each, and tell each other the largest of each row.

constexpr int HALF_HIDDEN = HIDDEN_COLS / 2; // columns of hidden of a half: gate and up take turns
constexpr int STAGING_BYTES = 2 * GROUP_ROWS * sizeof(float); // of each warpgroup's Maxima
constexpr float E4M3_MAX = 448.0f, SMALLEST_SCALE = 1.1754943508222875e-38f; // 2^-126
constexpr u32 SCALE_BITS = ~15u; // element times scale is exact in float32
static_assert(HIDDEN_COLS == 128);

// By the rule of comet.quantization.formats.quantize_rows.
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

struct Results {
    char* hidden;
    float* scales;              // (F / 128, routed_rows)
    const float* weight_scales; // (experts, 2F / 128, D / 128)
    s64 routed_rows;
};

// Replaces gate by hidden in a half: of each eight columns a thread has two, of both of its rows. What is largest in
// either row may grow.
__device__ __forceinline__ void hidden_of(float (&sums)[HALF_SUMS], float (&largest)[2]) {
#pragma unroll
    for (int place = 0; place < HALF_SUMS; place += 8) {
#pragma unroll
        for (int index = 0; index < 4; ++index) {
            float& hidden = sums[place + index];
            hidden = swiglu(hidden, sums[place + 4 + index]);
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
            const u32 got = __shfl_xor_sync(0xFFFFFFFF, sent, distance);
            words[low] = is_upper ? got : words[low];
            words[high] = is_upper ? words[high] : got;
        }
    }
}

// One of a thread's two rows of a half, 64 columns of hidden: 16 bytes of each of four lanes.
__device__ __forceinline__ void store_row(
    const float (&sums)[HALF_SUMS], int row, float factor, char* target, bool exists, int lane) {
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

// The largest of each row of an item of 64, as either warpgroup has found it in its half. While one still reads them,
// the other may write those of the next such item: they lie in two places in turn.
struct Maxima {
    float* begin;
    int items = 0;

    __device__ __forceinline__ void exchange(float (&largest)[2], int group, int row, int lane) {
        float* const rows = begin + items % 2 * 2 * GROUP_ROWS;
        ++items;
#pragma unroll
        for (int place = 0; place < 2; ++place) {
            if (lane % 4 == 0) rows[group * GROUP_ROWS + row + 8 * place] = largest[place];
        }
        both_groups_sync();
#pragma unroll
        for (int place = 0; place < 2; ++place) {
            largest[place] = fmaxf(largest[place], rows[(group ^ 1) * GROUP_ROWS + row + 8 * place]);
        }
    }
};

__device__ __forceinline__ void compute_item(
    Ring& ring, const Item& item, const Results& results, const Work& work, Maxima& maxima, int group, int warp,
    int lane) {
    Sums sums;
    const Region region(item.rows, group, warp, lane);
    const int num_steps = work.num_steps(), num_blocks = work.items_per_piece(), block = item.col / HIDDEN_COLS;
    const float* const gate_scales = results.weight_scales + u64((item.expert * 2 * num_blocks + block) * num_steps);
    const WeightScales<true> scales(gate_scales, gate_scales + num_blocks * num_steps);
    multiply_region(ring, sums, scales, region, lane, num_steps, [] {});
    if (lane == 0) barrier_arrive_here(ring.empty + 8 * ring.last());
    float largest[2] = {0.0f, 0.0f};
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        if (half < region.halves()) hidden_of(sums[half], largest);
    }
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
#pragma unroll
        for (float& each : largest) each = fmaxf(each, __shfl_xor_sync(0xFFFFFFFF, each, distance));
    }
    if (!region.is_whole) maxima.exchange(largest, group, region.row, lane);
#pragma unroll
    for (int place = 0; place < 2; ++place) {
        const int row = region.row + 8 * place;
        const bool exists = row < item.valid;
        const float scale = scale_of(largest[place]), inverse = __frcp_rn(scale);
        const u64 index = u32(item.first_row + row);
        char* const target = results.hidden + index * work.ffn + item.col + region.first_half * HALF_HIDDEN;
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            if (half < region.halves()) {
                store_row(sums[half], place, inverse, target + half * HALF_HIDDEN, exists, lane);
            }
        }
        if (exists && region.first_half == 0 && lane % 4 == 0) {
            results.scales[block * results.routed_rows + index] = scale;
        }
    }
}

__device__ __forceinline__ void multiply_items(
    const Work& work, const Memory<Item>& memory, const Results& results, const Recorder& recorder, int warp,
    int lane) {
    Maxima maxima{reinterpret_cast<float*>(memory.begin + (memory.staging - memory.stages))};
    Ring ring = memory.ring();
    int slot = 0;
    if (told_of(memory.draws, 0) >= work.num_items()) return;
    while (true) {
        barrier_wait(ring.full + 8 * ring.stage, ring.parity);
        const Item& item = memory.items[slot];
        slot = (slot + 1) % ITEM_SLOTS;
        compute_item(ring, item, results, work, maxima, warp / 4, warp % 4, lane);
        if (warp == 0 && lane == 0) {
            recorder.record(
                KIND_LAYER0_TILE, item.first_row / TILE_ROWS, item.col / HIDDEN_COLS, item.phase, item.begin,
                item.ready);
        }
        if (item.is_last) break;
    }
}
