// Products of an item in block FP8: routed rows of an expert times columns of its weights.
//
// Routed rows are the 64 rows of a matrix instruction, 128 columns of the weights its N: so a thread's sums belong to
// two rows, and two scales of rows and one of the weights scale all of them. Tensor cores keep some 14 bits of a sum of
// e4m3 products; a step's 128 are added up there, and the steps here, while the other warpgroup multiplies. Each
// warpgroup has 64 of an item's rows and one half of its columns after the other; of an item of 64 rows, a half of its
// columns.

constexpr int MEANWHILE_STEP = 2;
constexpr int GROUP_ROWS = 64; // of a warpgroup
constexpr int HALF_COLS = COLS / 2;
constexpr int HALVES = 2;
constexpr int HALF_SUMS = GROUP_ROWS * HALF_COLS / 128; // of a thread
static_assert(COLS == 256 && MOST_ROWS == MOST_AT_ONCE && STEP == GROUP_ROWS && MOST_ROWS == 2 * STEP && CLUSTER == 1);

// What of an item is a warpgroup's, and in it a thread's first row; the second one is eight rows further.
struct Region {
    bool is_whole; // both halves of the columns, of own rows
    int first_half, first_row, row;

    __device__ __forceinline__ Region(int rows, int group, int warp, int lane)
        : is_whole(rows > GROUP_ROWS), first_half(is_whole ? 0 : group), first_row(is_whole ? group * GROUP_ROWS : 0),
          row(first_row + 16 * warp + lane / 4) {}

    __device__ __forceinline__ int halves() const { return is_whole ? HALVES : 1; }
};

// Scales of the weights that a warpgroup multiplies with, step by step, fetched a step ahead: of two halves of the
// columns, or of gate and up, whose eights of columns take turns.
template <bool TAKE_TURNS>
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
        return TAKE_TURNS ? place / 4 % 2 : half;
    }
};

// Adds products, scaled, to the sums of a half. Those with the same factor follow each other: it then comes from the
// registers once for two of them, while tensor cores use these as well.
template <bool TAKE_TURNS>
__device__ __forceinline__ void add_scaled(
    float (&sums)[HALF_SUMS], const Products& products, const float (&factors)[2][2], int half) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
#pragma unroll
        for (int begin = 2 * pair; begin < HALF_SUMS; begin += 8) {
            const float factor = factors[WeightScales<TAKE_TURNS>::index(half, begin)][pair % 2];
#pragma unroll
            for (int place = begin; place < begin + 2; ++place) {
                sums[place] = __fmaf_rn(products[place], factor, sums[place]);
            }
        }
    }
}

// The first stage is full. A stage is waited for while the last products of the one before are under way: a warpgroup
// has to add these and begin anew before the other one's are done.
template <int NUM_HALVES, bool TAKE_TURNS, typename Meanwhile>
__device__ __forceinline__ void multiply_halves(
    Ring& ring, Sums& sums, WeightScales<TAKE_TURNS>& scales, const Region& region, int lane, int num_steps,
    Meanwhile meanwhile) {
    Products products;
    // Of a stage's rows and weights, carried on from stage to stage: worked out anew, they would keep the products
    // waiting.
    const u32 stage = ring.stages + ring.stage * STAGE_BYTES;
    u32 rows_at = low_word(descriptor(stage + WEIGHT_BYTES + region.first_row * LINE));
    u32 weights_at = low_word(descriptor(stage + region.first_half * (HALF_COLS * LINE)));
#pragma unroll 1
    for (int step = 0; step < num_steps; ++step) {
        const float weights[2] = {scales.following[0], scales.following[1]};
        const u64 a = descriptor_of(rows_at), b = descriptor_of(weights_at);
        const u32 upper = ring.scales(step) + ROW_SCALE_BYTES * region.row, lower = upper + ROW_SCALE_BYTES * 8;
        const u32 empty = ring.empty + 8 * ring.stage;
        float factors[2][2];
#pragma unroll
        for (int half = 0; half < NUM_HALVES; ++half) {
            products_begin();
#pragma unroll
            for (int k = 0; k < LINE / 32; ++k) {
                multiply(products, a + 2 * k, b + half * (HALF_COLS * LINE / 16) + 2 * k, k > 0);
            }
            products_commit();
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
                ring.advance();
                ring.advance_scales(step, num_steps);
                const int onward = ring.stage == 0 ? (1 - STAGES) * STAGE_BYTES / 16 : STAGE_BYTES / 16;
                rows_at += onward;
                weights_at += onward;
                if (step + 1 < num_steps) barrier_wait(ring.full + 8 * ring.stage, ring.parity);
            }
            products_wait_for(products);
            if (half == NUM_HALVES - 1 && lane == 0 && step + 1 < num_steps) barrier_arrive_here(empty);
            add_scaled<TAKE_TURNS>(sums[half], products, factors, half);
        }
    }
    meanwhile();
}

// Adds up a warpgroup's region of an item. `meanwhile` is called while products run, and once more at the end. The last
// stage is still the caller's.
template <bool TAKE_TURNS, typename Meanwhile>
__device__ __forceinline__ void multiply_region(
    Ring& ring, Sums& sums, WeightScales<TAKE_TURNS> scales, const Region& region, int lane, int num_steps,
    Meanwhile meanwhile) {
#pragma unroll
    for (int place = 0; place < HALVES * HALF_SUMS; ++place) sums[place / HALF_SUMS][place % HALF_SUMS] = 0.0f;
    if (region.is_whole) {
        multiply_halves<HALVES>(ring, sums, scales, region, lane, num_steps, meanwhile);
    } else {
        multiply_halves<1>(ring, sums, scales, region, lane, num_steps, meanwhile);
    }
}
