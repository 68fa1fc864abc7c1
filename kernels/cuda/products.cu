// Products of an item: routed rows of an expert times columns of its weights, from a ring of stages in shared memory.
//
// Transposed on the tensor cores: columns of the result are the 64 rows of a matrix instruction, routed rows its N. N
// goes in steps of 16, so an expert's rows are cut into pieces of equal height and little is computed for nothing, where
// tiles of 128 routed rows waste a quarter of 256 +- 16. One piece may be taller than what an instruction takes, for
// weights are then loaded once and not twice. Two warpgroups multiply, each COLS / 2 columns.

constexpr int MEANWHILE_STEP = 2;
constexpr int WEIGHT_BYTES = COLS * LINE;
constexpr int STAGE_BYTES = WEIGHT_BYTES + MOST_ROWS * LINE;

struct Ring {
    u32 stages, full, empty;
    int stage;
    u32 parity;

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// How a block's shared memory begins: stages, what is staged for stores, barriers, items; all else comes behind.
template <typename Item>
struct Memory {
    char* begin;
    u32 stages, staging, full, empty;
    Item* items;

    __device__ __forceinline__ Memory(char* memory, int staging_bytes) {
        stages = (shared_address(memory) + 1023) & ~1023u;
        begin = memory + (stages - shared_address(memory));
        staging = stages + STAGES * STAGE_BYTES;
        full = staging + staging_bytes;
        empty = full + 8 * STAGES;
        items = reinterpret_cast<Item*>(begin + (empty + 8 * STAGES - stages));
    }

    __device__ __forceinline__ Ring ring() const { return {stages, full, empty, 0, 0}; }

    __device__ __forceinline__ char* behind() const { return reinterpret_cast<char*>(items + ITEM_SLOTS); }

    // By one thread: how many arrivals fill a stage, and how many free it.
    __device__ __forceinline__ void init_barriers(u32 filling, u32 freeing) const {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(full + 8 * stage, filling);
            barrier_init(empty + 8 * stage, freeing);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
};

// The last of `num` parts that has at most `piece` pieces before it.
__device__ __forceinline__ int part_of(const int* first_piece, int num, int piece) {
    int low = 0, high = num - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (first_piece[middle] <= piece) low = middle; else high = middle - 1;
    }
    return low;
}

// Pieces that `count` rows are cut into: as many as one matrix instruction takes, or all of them in a taller one.
__device__ __forceinline__ int pieces_of(int count) {
    return count <= MOST_ROWS ? count > 0 : ceil_div(count, MOST_AT_ONCE);
}

// Rows of each of `num` pieces; the last may have fewer.
__device__ __forceinline__ int piece_height(int count, int num) {
    return ceil_div(ceil_div(count, num), STEP) * STEP;
}

__device__ __forceinline__ void group_sync(int group) {
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

// Adds up an item of ROWS rows. `meanwhile` is called while products run, and once more at the end, for items of few
// steps.
template <int ROWS, typename Meanwhile>
__device__ __forceinline__ void multiply_rows(
    Ring& ring, Sums& sums, int group, int lane, int num_steps, Meanwhile meanwhile) {
#pragma unroll 1 // as fast, and a third of the assembler's time
    for (int step = 0; step < num_steps; ++step) {
        barrier_wait(ring.full + 8 * ring.stage, ring.parity);
        // Tensor cores read what threads have written.
        if constexpr (ROWS_BY_THREADS) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        const u32 weights = ring.stages + ring.stage * STAGE_BYTES + group * (WEIGHT_BYTES / 2);
        const u64 a = descriptor(weights);
        const u64 b = descriptor(ring.stages + ring.stage * STAGE_BYTES + WEIGHT_BYTES);
        products_begin();
#pragma unroll
        for (int k = 0; k < DEPTH / 16; ++k) {
            multiply<ROWS>(sums, a + 2 * k, b + 2 * k);
        }
        products_commit();
        if (step == MEANWHILE_STEP) meanwhile();
        // The step before is done: its stage may be loaded again, in all blocks that share its rows.
        products_wait<1>();
        if (step > 0 && lane < CLUSTER) {
            barrier_arrive(ring.empty + 8 * (ring.stage == 0 ? STAGES - 1 : ring.stage - 1), lane);
        }
        ring.advance();
    }
    products_wait<0>();
    if (lane < CLUSTER) {
        barrier_arrive(ring.empty + 8 * (ring.stage == 0 ? STAGES - 1 : ring.stage - 1), lane);
    }
    meanwhile();
}

// The same of as many rows as an item has. Only the products are compiled for each height, for the assembler's time.
template <typename Meanwhile>
__device__ __forceinline__ void multiply_item(
    Ring& ring, Sums& sums, int rows, int group, int lane, int num_steps, Meanwhile meanwhile) {
#pragma unroll
    for (float& sum : sums) sum = 0.0f;
    switch (rows / STEP) {
#define CASE(N) case N / STEP: multiply_rows<N>(ring, sums, group, lane, num_steps, meanwhile); break;
        FOR_EACH_HEIGHT(CASE)
#undef CASE
    }
}
