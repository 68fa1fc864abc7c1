// Products of an item in 16 bits: routed rows of an expert times columns of its weights, from a ring of stages.
//
// Transposed on the tensor cores: columns of the result are the 64 rows of a matrix instruction, routed rows its N. N
// goes in steps of 16, so an expert's rows are cut into pieces of equal height and little is computed for nothing,
// where tiles of 128 routed rows waste a quarter of 256 +- 16. One piece may be taller than what an instruction takes,
// for weights are then loaded once and not twice. Two warpgroups multiply, each COLS / 2 columns.

constexpr int MEANWHILE_STEP = 2;
// From one instruction's weights to the next one's, in units of 16 bytes: along a line, or, where lines lie along the
// columns, 16 lines on.
constexpr int NEXT_WEIGHTS = IS_GRADIENT ? LINE : 2;

// Adds up an item of ROWS rows. `meanwhile` is called while products run, and once more at the end, for items of few
// steps.
template <int ROWS, typename Meanwhile>
__device__ __forceinline__ void multiply_rows(
    Ring& ring, Sums& sums, int group, int lane, int num_steps, Meanwhile meanwhile) {
#pragma unroll 1 // as fast, and a third of the assembler's time
    for (int step = 0; step < num_steps; ++step) {
        barrier_wait(ring.full + 8 * ring.stage, ring.parity);
        if constexpr (FENCED_BY_MULTIPLIERS) fence_for_tensor_cores();
        const u32 weights = ring.stages + ring.stage * STAGE_BYTES + group * (WEIGHT_BYTES / 2);
        const u64 a = descriptor(weights);
        const u64 b = descriptor(ring.stages + ring.stage * STAGE_BYTES + WEIGHT_BYTES);
        products_begin();
#pragma unroll
        for (int k = 0; k < DEPTH / 16; ++k) {
            multiply<ROWS>(sums, a + NEXT_WEIGHTS * k, b + 2 * k);
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
