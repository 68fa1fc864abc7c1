// Products of an item in block FP8: routed rows of an expert times columns of its weights.
//
// Routed rows are the 64 rows of a matrix instruction, 128 columns of the weights its N: so a thread's sums belong to two
// rows, and two scales of rows and one of the weights scale all of them. Tensor cores keep some 14 bits of a sum of e4m3
// products; a step's 128 are added up there, and the steps here, while the other warpgroup multiplies. Each warpgroup has
// half of the item's columns.

constexpr int MEANWHILE_STEP = 2;
constexpr int ROWS_AT_ONCE = 64;
constexpr int WAVE_SUMS = ROWS_AT_ONCE; // of a thread, for 128 columns
static_assert(COLS == 256 && MOST_ROWS == MOST_AT_ONCE && STEP == ROWS_AT_ONCE && CLUSTER == 1);

// Scales of the weights that a warpgroup multiplies with, step by step, fetched a step ahead. Eights of columns have the
// first and the last of them in turn.
struct WeightScales {
    const float* first;
    const float* last;
    float following[2];

    __device__ __forceinline__ WeightScales(const float* first, const float* last) : first(first), last(last) {
        fetch(0);
    }

    __device__ __forceinline__ void fetch(int step) {
        following[0] = __ldg(first + step);
        following[1] = __ldg(last + step);
    }
};

// sums += products of a step * scale of the row * scale of the weights
__device__ __forceinline__ void add_scaled(
    float (&sums)[WAVE_SUMS], const Products& products, const float (&rows)[2], const float (&weights)[2]) {
    const float scales[2][2] = {
        {rows[0] * weights[0], rows[1] * weights[0]}, {rows[0] * weights[1], rows[1] * weights[1]}};
#pragma unroll
    for (int place = 0; place < WAVE_SUMS; ++place) {
        sums[place] = __fmaf_rn(products[place], scales[place / 4 % 2][place / 2 % 2], sums[place]);
    }
}

template <int WAVES, typename Meanwhile>
__device__ __forceinline__ void multiply_rows(
    Ring& ring, Sums& sums, WeightScales& scales, int group, int warp, int lane, int num_steps, Meanwhile meanwhile) {
    Products products;
#pragma unroll 1
    for (int step = 0; step < num_steps; ++step) {
        const float weights[2] = {scales.following[0], scales.following[1]};
        scales.fetch(min(step + 1, num_steps - 1));
        barrier_wait(ring.full + 8 * ring.stage, ring.parity);
        // Tensor cores read what threads have written.
        if constexpr (ROWS_BY_THREADS) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        const u32 stage = ring.stages + ring.stage * STAGE_BYTES;
        const u64 a = descriptor(stage + WEIGHT_BYTES), b = descriptor(stage + group * (WEIGHT_BYTES / 2));
        const u32 row_scales = ring.scales() + 4 * (16 * warp + lane / 4);
#pragma unroll
        for (int wave = 0; wave < WAVES; ++wave) {
            products_begin();
#pragma unroll
            for (int k = 0; k < LINE / 32; ++k) {
                multiply(products, a + wave * (ROWS_AT_ONCE * LINE / 16) + 2 * k, b + 2 * k, k > 0);
            }
            products_commit();
            float rows[2];
            asm volatile("ld.shared.f32 %0, [%1];" : "=f"(rows[0]) : "r"(row_scales + 4 * ROWS_AT_ONCE * wave) : "memory");
            asm volatile("ld.shared.f32 %0, [%1];"
                         : "=f"(rows[1]) : "r"(row_scales + 4 * (ROWS_AT_ONCE * wave + 8)) : "memory");
            if (wave == 0 && step == MEANWHILE_STEP) meanwhile();
            products_wait_for(products);
            if (wave == WAVES - 1 && lane == 0) barrier_arrive(ring.empty + 8 * ring.stage, 0);
            add_scaled(sums[wave], products, rows, weights);
        }
        ring.advance();
    }
    meanwhile();
}

// As many waves as the item has rows for. `meanwhile` is called while products run, and once more at the end.
template <typename Meanwhile>
__device__ __forceinline__ void multiply_item(
    Ring& ring, Sums& sums, WeightScales& scales, int rows, int group, int warp, int lane, int num_steps,
    Meanwhile meanwhile) {
#pragma unroll
    for (int place = 0; place < MOST_ROWS / ROWS_AT_ONCE * WAVE_SUMS; ++place) {
        sums[place / WAVE_SUMS][place % WAVE_SUMS] = 0.0f;
    }
    if (rows > ROWS_AT_ONCE) {
        multiply_rows<2>(ring, sums, scales, group, warp, lane, num_steps, meanwhile);
    } else {
        multiply_rows<1>(ring, sums, scales, group, warp, lane, num_steps, meanwhile);
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
