// One thread loads layer 1's tiles. CLUSTER blocks have neighbouring columns of the same rows: each loads its own
// weights and a part of the rows, which TMA hands to all of them.

#ifndef COMET_LAYER1_PRODUCER_CUH
#define COMET_LAYER1_PRODUCER_CUH

#include "../gemm/weights.cuh"
#include "tiles.cuh"

template <class Config, class Storage>
__device__ __forceinline__ void load_tiles(
    const PanelProblem<Config>& problem, const TensorMap& rows_map, const TensorMap& weights_map,
    const Storage& storage, TileScheduler<Config>& scheduler) {
    constexpr int BOX_ROWS = Config::BOX_ROWS, BLOCK_K = Config::BLOCK_K;
    static_assert(Config::MAX_TILE_ROWS % BOX_ROWS == 0 && Config::ROW_STEP % 16 == 0);
    static_assert(Config::TILE_SLOTS > Config::NUM_STAGES + 2);
    Pipeline<Config> pipeline = storage.pipeline();
    const int num_tiles = problem.num_tiles();
    for (int index = scheduler.first(), following; index < num_tiles; index = following) {
        PanelTile tile = tile_at(problem, index);
        following = scheduler.next();
        tile.is_last = following >= num_tiles;
        storage.tiles[scheduler.slot()] = tile; // warps that waited for the first stage see it
        scheduler.publish_ahead(tile.is_last);
        const int boxes = ceil_div(tile.rows, BOX_ROWS);
        for (int step = 0; step < problem.num_steps(); ++step) {
            pipeline.wait_empty();
            const u32 weights = pipeline.weights(), rows = weights + Stage<Config>::WEIGHT_BYTES;
            const u32 full = pipeline.full_barrier();
            const int row_bytes = boxes * BOX_ROWS * SWIZZLE_BYTES + (Config::IS_FP8 ? 4 * tile.rows : 0);
            mbarrier_arrive_expect_tx(full, Stage<Config>::WEIGHT_BYTES + row_bytes);
            if constexpr (Config::IS_DGRAD) {
                load_columns<Config>(weights, weights_map, full, step * BLOCK_K, tile.col, tile.expert);
            } else {
                load_lines(weights, weights_map, full, step * BLOCK_K, tile.col, tile.expert);
            }
            for (int box = problem.rank; box < boxes; box += Config::CLUSTER) {
                tma_load_2d<Config::CLUSTER>(rows + box * BOX_ROWS * SWIZZLE_BYTES, rows_map, full, step * BLOCK_K,
                                             tile.first_row + box * BOX_ROWS);
            }
            if constexpr (Config::IS_FP8) {
                const float* const scales = problem.scales.rows + step * problem.scales.num_rows + tile.first_row;
                tma_load_bytes(pipeline.scales(step), scales, full, 4 * tile.rows);
                pipeline.advance_scales(step, problem.num_steps());
            }
            pipeline.advance();
        }
    }
}

#endif
