// Layer 1 in one launch: the GEMM, and at the same time top-k sums, their transfer to the rank of each token and the
// final sums there. As fc1_dgrad the same kernel takes gradients back through layer 0's weights.
//
// A block has twelve warps: eight multiply, one loads for them, three combine from the start, if there is more than one
// panel. Those that multiply combine when they are done, in the memory of the stages.
//
// With IS_SPLIT the last blocks that run, `comm_blocks` of them, combine with all these warps from the start and
// compute nothing; in the others no warp combines before the tiles are done. Why that ends, in whatever order blocks
// find a place on the GPU: a block combines from the start only once all others run. So a warp that waits for a panel
// waits for tiles of blocks that run, which do not wait; if fewer blocks run, those combine that have computed.

#include "include/layer1/combine.cuh"
#include "include/layer1/producer.cuh"
#include "include/layer1/rows.cuh"
#include "include/layer1/rows_fp8.cuh"

struct PanelGemmArgs {
    TensorMap rows_map, weights_map;
    const int* counts; // (e,) routed rows of each expert
    const int* starts; // (e,) first routed row of each expert
    int experts, depth;
    ScaleArgs scales;
    const void* biases; // (e, D), if HAS_BIAS
};

// Bytes of staging memory for both math warpgroups; in block FP8 they use the stages.
template <class Config>
constexpr int gemm_combine_staging_bytes() {
    if constexpr (Config::IS_FP8) return 0;
    else return 2 * ROWS_STAGING_BYTES<Config>;
}

// Whether this cluster's blocks are among the last that run. By all threads of all of its blocks; `shared` is a number
// of each, at the same place.
template <class Config>
__device__ __forceinline__ bool is_comm_block(const CombineArgs& combine, int* shared) {
    constexpr int CLUSTER = Config::CLUSTER;
    cluster_sync<CLUSTER>(); // all blocks of the cluster run
    if (threadIdx.x == 0 && cluster_rank() == 0) {
        const int later = int(gridDim.x) / CLUSTER - 1 - next_ticket(combine.tickets + BLOCK_COUNTER);
        for (int block = 0; block < CLUSTER; ++block) {
            store_at<CLUSTER>(shared_address(shared), later * CLUSTER < combine.comm_blocks, block);
        }
    }
    __syncwarp();
    cluster_sync<CLUSTER>();
    const bool is_last = *shared;
    __syncthreads(); // its place is free again
    return is_last;
}

template <class Config>
__device__ __forceinline__ void gemm_combine(const PanelGemmArgs& gemm, const CombineArgs& combine) {
    constexpr int MATH_WARPS = Config::MATH_WARPS, COMBINE_WARPS = Config::COMBINE_WARPS;
    constexpr int PRODUCER = MATH_WARPS + COMBINE_WARPS;
    constexpr int COMBINE_BYTES = CombineShape<Config>::bytes(Config::AHEAD_COLOCATED);
    constexpr int AFTER_BYTES = CombineShape<Config>::bytes(Config::AHEAD_AFTER);
    using Storage = SharedStorage<Config, PanelTile, gemm_combine_staging_bytes<Config>()>;
    static_assert(Config::THREADS == 32 * (PRODUCER + 1));
    static_assert(MATH_WARPS * AFTER_BYTES <= Config::NUM_STAGES * Stage<Config>::BYTES);
    static_assert(Storage::BYTES + COMBINE_WARPS * COMBINE_BYTES + int(sizeof(int)) == Config::SHARED_BYTES);
    static_assert(sizeof(int) == Config::SHARED_BYTES_PER_EXPERT);
    extern __shared__ char dynamic[];
    const Storage storage(dynamic);
    char* const combiners = storage.behind();
    int* const first_tile = reinterpret_cast<int*>(combiners + COMBINE_WARPS * COMBINE_BYTES);

    const int warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    bool computes = true, combines = combine.panels > 1; // from the start
    if constexpr (Config::IS_SPLIT) {
        combines = is_comm_block<Config>(combine, first_tile);
        computes = !combines;
    }
    TileScheduler<Config> scheduler(
        combine.tickets + TILE_COUNTER, storage.slots,
        computes && warp == PRODUCER && lane == 0 && cluster_rank() == 0);
    if (warp == PRODUCER && lane == 0) storage.init(1, MATH_WARPS * Config::CLUSTER);
    const PanelProblem<Config> problem{
        gemm.counts, gemm.starts, first_tile, gemm.experts, gemm.depth, combine.cols, combine.panels,
        int(cluster_rank()), gemm.scales, gemm.biases};
    if (warp == 0) list_row_tiles(problem, first_tile, lane);
    __syncthreads();
    cluster_sync<Config::CLUSTER>();

    if (warp < MATH_WARPS) {
        take_math_registers<Config>();
        const Recorder<Config> recorder(combine.events, combine.event_capacity, __ldg(combine.epoch), 0);
        if (computes) {
            if constexpr (Config::IS_FP8) {
                multiply_rows_fp8(problem, storage, combine.y, combine.panel_counters, recorder, warp, lane);
            } else {
                multiply_rows(problem, storage, combine.y, combine.panel_counters, recorder, warp, lane);
            }
        }
        math_sync<Config>(); // they are done with the stages
        Combiner<Config, Config::AHEAD_AFTER>(
            combine, storage.begin + warp * AFTER_BYTES, 1 + COMBINE_WARPS + warp, lane).run();
    } else {
        give_math_registers<Config>();
        if (warp == PRODUCER) {
            if (computes && lane == 0) load_tiles(problem, gemm.rows_map, gemm.weights_map, storage, scheduler);
        } else if (combines) {
            const int combiner = warp - MATH_WARPS;
            Combiner<Config, Config::AHEAD_COLOCATED>(
                combine, combiners + combiner * COMBINE_BYTES, 1 + combiner, lane).run();
        }
    }
    __syncwarp();
    cluster_sync<Config::CLUSTER>();
}
