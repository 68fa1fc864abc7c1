// Layer 1 in one launch: the GEMM (panels.cu, and panel_gemm.cu or, in block FP8, fp8_panel_gemm.cu) beside reduce,
// send and final sums (combine.cu).
//
// A block has twelve warps: eight multiply, one loads for them, three combine from the start. Those that multiply
// combine when they are done, in the memory of the stages.

constexpr int LOADER = WARPS + COMBINERS;
constexpr int THREADS = 32 * (LOADER + 1);
static_assert(THREADS == 384);
constexpr int COMBINER_BYTES = LIST_BYTES + AHEAD_BESIDE * SLOT_BYTES;
constexpr int AFTER_BYTES = LIST_BYTES + AHEAD_AFTER * SLOT_BYTES;
static_assert(WARPS * AFTER_BYTES <= STAGES * STAGE_BYTES);

extern "C" __global__ void __launch_bounds__(THREADS, 1) gemm_combine(
    const __grid_constant__ TensorMap rows_map, const __grid_constant__ TensorMap weights_map,
    const int* __restrict__ counts, const int* __restrict__ starts, int experts, int depth,
    const __grid_constant__ Scales scales, const __grid_constant__ Returns returns) {
    extern __shared__ char dynamic[];
    const Memory<Item> memory(dynamic, 2 * STAGING_BYTES);
    char* const combiners = memory.behind();
    int* const first_piece = reinterpret_cast<int*>(combiners + COMBINERS * COMBINER_BYTES);

    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    Draws draws(returns.tickets + ITEM_TICKETS, memory.draws, warp == LOADER && lane == 0 && cluster_rank() == 0);
    if (warp == LOADER && lane == 0) memory.init(1, WARPS * CLUSTER);
    if (warp == 0) list_pieces(first_piece, counts, experts, lane);
    __syncthreads();
    cluster_sync();

    const Work work{
        counts, starts, first_piece, experts, depth, returns.cols, returns.panels, int(cluster_rank()),
        scales};
    if (warp < WARPS) {
        take_registers<MULTIPLYING_REGISTERS>();
        const Recorder recorder(returns.events, returns.event_capacity, __ldg(returns.epoch), 0);
        multiply_items(work, memory, returns.y, returns.panel_counters, recorder, warp, lane);
        both_groups_sync(); // they are done with the stages
        Combiner<AHEAD_AFTER>(returns, memory.begin + warp * AFTER_BYTES, 1 + COMBINERS + warp, lane).run();
    } else {
        give_registers<other_registers(MULTIPLYING_REGISTERS)>();
        if (warp == LOADER) {
            if (lane == 0) load_items(work, rows_map, weights_map, memory, draws);
        } else {
            const int combiner = warp - WARPS;
            Combiner<AHEAD_BESIDE>(returns, combiners + combiner * COMBINER_BYTES, 1 + combiner, lane).run();
        }
    }
    __syncwarp();
    cluster_sync();
}
