// Three warps load layer 0's tiles: rows in 16 bytes per lane, for a TMA load of a single row of 128 bytes takes 66
// cycles; weights by TMA, gate rows and up rows interleaved in groups of 8, so that gate and up of a column of hidden
// meet in one thread.

#ifndef COMET_LAYER0_PRODUCER_CUH
#define COMET_LAYER0_PRODUCER_CUH

#include "../gemm/weights.cuh"
#include "../symm.cuh"
#include "tiles.cuh"

template <class Config>
struct Gather {
    static constexpr int LOADERS = Config::PRODUCER_WARPS;
    static constexpr int ELEMENT_BYTES = SWIZZLE_BYTES / Config::BLOCK_K;
    static constexpr int GROUP_ROWS = 16;                            // rows that a warp loads one after the other
    static constexpr int ROWS_PER_LOAD = 32 * 16 / SWIZZLE_BYTES;    // rows of a warp's load
    static constexpr int LOADS_PER_GROUP = GROUP_ROWS / ROWS_PER_LOAD;
    static constexpr int GROUPS = Config::MAX_TILE_ROWS / GROUP_ROWS;
    static constexpr int MOST_LOADS = (GROUPS + LOADERS - 1) / LOADERS * LOADS_PER_GROUP; // loads of a warp and stage
    static constexpr int UNROLLED = 4;                                // steps
    static constexpr int LOOK_STEP = 2; // from which it is seen whether the next tile's rows are there
    static constexpr int IDS_PER_LANE = (MOST_LOADS + 7) / 8;
    // Tensor cores see what threads wrote once these have fenced it: here in block FP8, else those that multiply do.
    static constexpr bool FENCES = Config::IS_FP8;
    static_assert(Config::CLUSTER == 1 && Config::ROW_STEP % GROUP_ROWS == 0 && UNROLLED % Config::SCALE_STEPS == 0);
    static_assert(Config::TILE_SLOTS > Config::NUM_STAGES + 2);
    static_assert(!Config::IS_FP8 || Stage<Config>::ROW_SCALE_BYTES == 16); // cp.async.cg copies 16 bytes
};

// The addresses of received rows, and whether the rows are there.
template <class Config>
struct ReceivedRows {
    const char* own;     // (T, row_bytes) tokens of this rank
    const char* buffer;  // (W * M, row_bytes) receive buffer
    const int* row_ids;  // (Q,) received row of each routed row
    const int* flags;    // (W, M / CHUNK)
    Fault fault;
    int epoch, rank, max_tokens, row_bytes;

    __device__ __forceinline__ bool is_own(int id) const { return u32(id - rank * max_tokens) < u32(max_tokens); }

    __device__ __forceinline__ const char* row(int id) const {
        return is_own(id) ? own + u64(id - rank * max_tokens) * row_bytes : buffer + u64(id) * row_bytes;
    }

    __device__ __forceinline__ bool has_arrived(int id) const {
        return is_own(id) || load_acquire(flags + id / Config::CHUNK) >= epoch;
    }

    // Into the record of faults, if it has not arrived.
    __device__ __forceinline__ void name_missing(int id) const {
        if (is_own(id)) return;
        const int source = id / max_tokens, chunk = id % max_tokens / Config::CHUNK;
        const Fault at_once{fault.record, 0};
        wait_flag(flags + id / Config::CHUNK, epoch, at_once, Config::PLACE_LAYER0, source, chunk);
    }
};

// The received rows of a tile that a warp loads. The rows go to the producer warps in turn; the eight lanes that load a
// row together keep the ids of their rows between them.
template <class Config>
struct TileRows {
    using G = Gather<Config>;
    int ids[G::IDS_PER_LANE];

    // The row of the tile, for the first eight lanes.
    static __device__ __forceinline__ int row_at(int load, int loader) {
        return (load / G::LOADS_PER_GROUP * G::LOADERS + loader) * G::GROUP_ROWS +
               load % G::LOADS_PER_GROUP * G::ROWS_PER_LOAD;
    }

    __device__ __forceinline__ void fetch(const GatheredTile& tile, const int* row_ids, int loader, int lane) {
#pragma unroll
        for (int eight = 0; eight < G::IDS_PER_LANE; ++eight) {
            // Rows past the last read the first one: no one reads the result.
            const int row = row_at(8 * eight + lane % 8, loader) + lane / 8;
            ids[eight] = __ldg(row_ids + tile.first_row + (row < tile.valid ? row : 0));
        }
    }

    __device__ __forceinline__ int id_of(int load, int lane) const {
        return __shfl_sync(ALL_LANES, ids[load / 8], lane / 8 * 8 + load % 8);
    }

    __device__ __forceinline__ void wait(const ReceivedRows<Config>& received) const {
        const u64 end = now_ns() + received.fault.timeout_ns;
        while (true) {
            bool arrived = true;
#pragma unroll
            for (int eight = 0; eight < G::IDS_PER_LANE; ++eight) arrived &= received.has_arrived(ids[eight]);
            if (__all_sync(ALL_LANES, arrived)) break;
            // Lanes look at different moments, and leave together.
            if (!__any_sync(ALL_LANES, has_failed(received.fault) || now_ns() > end)) continue;
            for (const int id : ids) received.name_missing(id);
            break;
        }
    }
};

// The addresses of a lane's scales for some rows of its warp, in block FP8: after a row's elements, one for each step.
// A row's bytes are a multiple of 64, so those of the last few steps may be followed by others that no one reads.
template <class Config>
struct RowScales {
    using G = Gather<Config>;
    const char* from[G::IDS_PER_LANE];

    __device__ __forceinline__ void find(
        const TileRows<Config>& rows, const ReceivedRows<Config>& received, int depth, int lane) {
#pragma unroll
        for (int eight = 0; eight < G::IDS_PER_LANE; ++eight) {
            // The id of row `lane` of the 32 that the warp loads in eight turns.
            const int id = __shfl_sync(ALL_LANES, rows.ids[eight], lane % 4 * 8 + lane / 4);
            from[eight] = received.row(id) + depth * G::ELEMENT_BYTES;
        }
    }

    __device__ __forceinline__ void load(u32 scales, int step, int loader, int lane) const {
#pragma unroll
        for (int eight = 0; eight < G::IDS_PER_LANE; ++eight) {
            const int row = TileRows<Config>::row_at(8 * eight + lane / 4, loader) + lane % 4;
            if (row >= Config::MAX_TILE_ROWS) continue;
            cp_async_16(scales + Stage<Config>::ROW_SCALE_BYTES * row, from[eight] + 4 * step);
        }
    }
};

// Stages into which a lane's loads are in flight: with FENCES the lanes say that a stage is full once their loads for
// LAG more stages are in flight.
template <class Config>
struct Underway {
    static constexpr int LAG = 1;
    static_assert(LAG + 1 < Config::NUM_STAGES); // those that multiply keep a stage while they wait for the next one
    int stages = 0;

    __device__ __forceinline__ void arrive(const Pipeline<Config>& pipeline, int before) const {
        constexpr int STAGES = Config::NUM_STAGES;
        mbarrier_arrive(pipeline.full + 8 * ((pipeline.stage + STAGES - before) % STAGES));
    }

    // After the loads for the pipeline's stage.
    __device__ __forceinline__ void add(const Pipeline<Config>& pipeline) {
        cp_async_commit_group();
        if (stages < LAG) {
            ++stages;
            return;
        }
        cp_async_wait_group<LAG>();
        fence_proxy_async();
        arrive(pipeline, LAG);
    }

    // The pipeline is at the stage after the last one.
    __device__ __forceinline__ void finish(const Pipeline<Config>& pipeline) {
        cp_async_wait_group<0>();
        fence_proxy_async();
        for (int before = stages; before > 0; --before) arrive(pipeline, before);
        stages = 0;
    }
};

// One step's part of the rows: 16 bytes per lane and load, zeros where a lane is not `inside`. Written for few
// instructions: a warp alone has time for about four per load.
template <class Config, bool FULL>
__device__ __forceinline__ void load_rows(
    u32 even, u32 odd, const char* const (&from)[Gather<Config>::MOST_LOADS], int offset, int num_groups,
    bool inside) {
    using G = Gather<Config>;
#pragma unroll
    for (int group = 0; group < G::MOST_LOADS / G::LOADS_PER_GROUP; ++group) {
        if (group >= num_groups) break;
#pragma unroll
        for (int place = 0; place < G::LOADS_PER_GROUP; ++place) {
            const int row = group * G::LOADERS * G::GROUP_ROWS + place * G::ROWS_PER_LOAD;
            const u32 target = (place % 2 ? odd : even) + row * SWIZZLE_BYTES;
            const char* const source = from[group * G::LOADS_PER_GROUP + place] + offset;
            if constexpr (FULL) {
                cp_async_16(target, source);
            } else {
                cp_async_16(target, source, inside);
            }
        }
    }
}

template <class Config>
__device__ __forceinline__ void load_tiles(
    const GatherProblem<Config>& problem, const ReceivedRows<Config>& received, const TensorMap& weights_map,
    GatheredTile* tiles, Pipeline<Config> pipeline, TileScheduler<Config>& scheduler, int loader, int lane) {
    using G = Gather<Config>;
    const int num_tiles = problem.num_tiles(), num_steps = problem.num_steps(), first = scheduler.first();
    if (first >= num_tiles) return;
    // Rows of 128 bytes are swizzled in groups of eight; a load has four rows.
    const u32 even = lane / 8 * SWIZZLE_BYTES + ((lane % 8 ^ lane / 8) << 4), odd = even ^ (4 << 4);
    GatheredTile next = tile_at(problem, first);
    TileRows<Config> rows;
    rows.fetch(next, received.row_ids, loader, lane);
    Underway<Config> underway;
    bool arrived = false;
    for (bool is_last = false; !is_last;) {
        GatheredTile tile = next;
        const int following = scheduler.next();
        tile.is_last = is_last = following >= num_tiles;
        if constexpr (Config::RECORDS) tile.begin = now_ns();
        if (!__all_sync(ALL_LANES, arrived)) {
            if constexpr (G::FENCES) underway.finish(pipeline);
            rows.wait(received);
        }
        __syncwarp(); // only one lane polled the flag; all lanes wait for it before they load the row
        if constexpr (Config::RECORDS) tile.ready = now_ns();
        if (scheduler.leads) tiles[scheduler.slot()] = tile; // warps that waited for the first stage see it
        const char* from[G::MOST_LOADS];
#pragma unroll
        for (int load = 0; load < G::MOST_LOADS; ++load) {
            from[load] = received.row(rows.id_of(load, lane)) + lane % 8 * 16;
        }
        RowScales<Config> scales;
        if constexpr (Config::IS_FP8) scales.find(rows, received, problem.depth, lane);
        const int num_groups = (tile.rows / G::GROUP_ROWS - loader + G::LOADERS - 1) / G::LOADERS;
        arrived = num_steps >= G::LOOK_STEP + G::IDS_PER_LANE;
        // The next tile's rows are found while this one's are loaded.
        if (!is_last) {
            next = tile_at(problem, following);
            rows.fetch(next, received.row_ids, loader, lane);
        }
        scheduler.publish_ahead(is_last);
        for (int begin = 0; begin < num_steps; begin += G::UNROLLED) {
#pragma unroll
            for (int unrolled = 0; unrolled < G::UNROLLED; ++unrolled) {
                const int step = begin + unrolled;
                if (step >= num_steps) break;
                // A look takes a microsecond, which is hidden while the pipeline is full: one per step.
                if (!is_last) {
#pragma unroll
                    for (int eight = 0; eight < G::IDS_PER_LANE; ++eight) {
                        if (step == G::LOOK_STEP + eight) arrived &= received.has_arrived(rows.ids[eight]);
                    }
                }
                pipeline.wait_empty();
                const u32 weights = pipeline.weights(), full = pipeline.full_barrier();
                if (scheduler.leads) {
                    mbarrier_arrive_expect_tx(full, Stage<Config>::WEIGHT_BYTES);
                    if constexpr (Config::IS_DGRAD) {
                        load_columns<Config>(weights, weights_map, full, step * Config::BLOCK_K, tile.col, tile.expert);
                    } else {
                        load_gate_up(weights, weights_map, full, step * Config::BLOCK_K, tile.col, tile.expert);
                    }
                }
                const u32 target = weights + Stage<Config>::WEIGHT_BYTES + loader * G::GROUP_ROWS * SWIZZLE_BYTES;
                if ((step + 1) * Config::BLOCK_K <= problem.depth) {
                    load_rows<Config, true>(
                        target + even, target + odd, from, unrolled * SWIZZLE_BYTES, num_groups, true);
                } else {
                    const bool inside = step * Config::BLOCK_K + lane % 8 * (16 / G::ELEMENT_BYTES) < problem.depth;
                    const int offset = inside ? unrolled * SWIZZLE_BYTES : 0;
                    load_rows<Config, false>(target + even, target + odd, from, offset, num_groups, inside);
                }
                if constexpr (Config::IS_FP8) {
                    if (unrolled % Config::SCALE_STEPS == 0) scales.load(pipeline.scales(step), step, loader, lane);
                    pipeline.advance_scales(step, num_steps);
                }
                if constexpr (G::FENCES) {
                    underway.add(pipeline);
                } else {
                    cp_async_mbarrier_arrive(full);
                }
                pipeline.advance();
            }
#pragma unroll
            for (int load = 0; load < G::MOST_LOADS; ++load) from[load] += G::UNROLLED * SWIZZLE_BYTES;
        }
    }
    if constexpr (G::FENCES) underway.finish(pipeline);
}

#endif
