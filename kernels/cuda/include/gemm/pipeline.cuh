// Stages in shared memory, through which producer warps hand operands to those that multiply, and how a block's shared
// memory begins. A stage holds BLOCK_N lines of weights and MAX_TILE_ROWS lines of routed rows, a line being
// SWIZZLE_BYTES; block FP8 has scales of each row apart from them, of SCALE_STEPS steps together.

#ifndef COMET_GEMM_PIPELINE_CUH
#define COMET_GEMM_PIPELINE_CUH

#include "../config.cuh"

template <class Config>
struct Stage {
    static constexpr int WEIGHT_BYTES = Config::BLOCK_N * SWIZZLE_BYTES;
    static constexpr int BYTES = WEIGHT_BYTES + Config::MAX_TILE_ROWS * SWIZZLE_BYTES;
    static constexpr int ROW_SCALE_BYTES = 4 * Config::SCALE_STEPS;
    // Scales of SCALE_STEPS steps.
    static constexpr int SCALE_BYTES = Config::IS_FP8 ? Config::MAX_TILE_ROWS * ROW_SCALE_BYTES : 0;
};

template <class Config>
struct Pipeline {
    u32 stages, full, empty; // addresses in shared memory; of a stage's mbarriers, 8 bytes each
    int stage;
    u32 parity;
    int scale_slot; // there are as many as stages, for steps that may still be read are fewer

    __device__ __forceinline__ void advance() {
        if (++stage == Config::NUM_STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }

    __device__ __forceinline__ int last() const { return stage == 0 ? Config::NUM_STAGES - 1 : stage - 1; }

    // Address of the stage's weights.
    __device__ __forceinline__ u32 weights() const { return stages + stage * Stage<Config>::BYTES; }
    __device__ __forceinline__ u32 full_barrier() const { return full + 8 * stage; }
    __device__ __forceinline__ u32 empty_barrier() const { return empty + 8 * stage; }

    __device__ __forceinline__ void wait_full() const { mbarrier_wait(full_barrier(), parity); }
    __device__ __forceinline__ void wait_empty() const { mbarrier_wait(empty_barrier(), parity ^ 1); }

    // Each math warp says that the stage before this one may be loaded again.
    __device__ __forceinline__ void free_last() const { mbarrier_arrive(empty + 8 * last()); }

    // The scales of a step of a tile, of its first row.
    __device__ __forceinline__ u32 scales(int step) const {
        return stages + Config::NUM_STAGES * Stage<Config>::BYTES + scale_slot * Stage<Config>::SCALE_BYTES +
               4 * (step % Config::SCALE_STEPS);
    }

    __device__ __forceinline__ void advance_scales(int step, int num_steps) {
        if ((step + 1) % Config::SCALE_STEPS && step + 1 < num_steps) return;
        if (++scale_slot == Config::NUM_STAGES) scale_slot = 0;
    }
};

constexpr int SCHEDULER_SLOT_BYTES = 16; // an mbarrier and the number of a tile, see scheduler.cuh

// How a block's shared memory begins: stages, their scales, what warpgroups stage for themselves or tell each other,
// mbarriers, tiles and the scheduler's slots; all else comes behind.
template <class Config, class Tile, int STAGING_BYTES>
struct SharedStorage {
    static constexpr int BYTES =
        1024 + Config::NUM_STAGES * (Stage<Config>::BYTES + Stage<Config>::SCALE_BYTES + 16) + STAGING_BYTES +
        Config::TILE_SLOTS * (int(sizeof(Tile)) + SCHEDULER_SLOT_BYTES);

    char* begin;
    u32 stages, staging, full, empty;
    Tile* tiles;
    u32 slots;

    __device__ __forceinline__ explicit SharedStorage(char* memory) {
        stages = (shared_address(memory) + 1023) & ~1023u;
        begin = memory + (stages - shared_address(memory));
        staging = stages + Config::NUM_STAGES * (Stage<Config>::BYTES + Stage<Config>::SCALE_BYTES);
        full = staging + STAGING_BYTES;
        empty = full + 8 * Config::NUM_STAGES;
        tiles = reinterpret_cast<Tile*>(begin + (empty + 8 * Config::NUM_STAGES - stages));
        slots = empty + 8 * Config::NUM_STAGES + Config::TILE_SLOTS * sizeof(Tile);
    }

    __device__ __forceinline__ Pipeline<Config> pipeline() const { return {stages, full, empty, 0, 0, 0}; }

    __device__ __forceinline__ char* behind() const {
        return begin + (slots + Config::TILE_SLOTS * SCHEDULER_SLOT_BYTES - stages);
    }

    // One thread sets how many arrivals fill a stage, and how many free it. No tile has been published.
    __device__ __forceinline__ void init(u32 filling, u32 freeing) const {
        for (int stage = 0; stage < Config::NUM_STAGES; ++stage) {
            mbarrier_init(full + 8 * stage, filling);
            mbarrier_init(empty + 8 * stage, freeing);
        }
        for (int slot = 0; slot < Config::TILE_SLOTS; ++slot) mbarrier_init(slots + slot * SCHEDULER_SLOT_BYTES, 1);
        fence_mbarrier_init();
    }
};

#endif
