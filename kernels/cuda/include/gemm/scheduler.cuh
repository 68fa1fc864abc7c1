// Which tile of a GEMM a block computes next, which rows and which columns that is, and how an expert's rows are cut
// into token tiles.
//
// A block that is ready takes the next number of a counter, so that neighbours in the order start together, and those
// of the same columns share their weights in L2. In turn, blocks drift apart, and weights come from memory several
// times, which costs time because the board's power is the limit (benchmarks/results/forward_kernels.md).

#ifndef COMET_GEMM_SCHEDULER_CUH
#define COMET_GEMM_SCHEDULER_CUH

#include "pipeline.cuh"

constexpr int TILE_COUNTER = 1; // among a launch's counters, behind the tickets of those that communicate
constexpr int BLOCK_COUNTER = 3; // of blocks that run, where some of them only communicate at first
constexpr int GROUP_TILES = 8;  // of an expert, of the same columns, that are neighbours in the order

// The place of a tile among an expert's tiles, `row_tiles` token tiles and `cols` blocks of columns, in the order of
// kernels/gemm/tiles.py.
struct TilePlace {
    int row_tile, col;

    __device__ __forceinline__ TilePlace(int index, int row_tiles, int cols) {
        const int first = index / (GROUP_TILES * cols) * GROUP_TILES, group = min(GROUP_TILES, row_tiles - first);
        const int rest = index - first * cols;
        row_tile = first + rest % group;
        col = rest / group;
    }
};

// The last of `num` segments that has at most `tile` token tiles before it.
__device__ __forceinline__ int segment_of(const int* first_tile, int num, int tile) {
    int low = 0, high = num - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (first_tile[middle] <= tile) low = middle; else high = middle - 1;
    }
    return low;
}

// Token tiles that `count` rows are cut into: of at most MMA_ROWS rows each, or one that is taller and has all of them.
template <class Config>
__device__ __forceinline__ int num_row_tiles(int count) {
    return count <= Config::MAX_TILE_ROWS ? count > 0 : ceil_div(count, Config::MMA_ROWS);
}

// Rows of each of `num` token tiles; the last may have fewer.
template <class Config>
__device__ __forceinline__ int tile_rows(int count, int num) {
    return ceil_div(ceil_div(count, num), Config::ROW_STEP) * Config::ROW_STEP;
}

// The next number of a counter. A thread that asks ahead of its use does not wait for it: an atomicAdd would, for the
// assembler makes one of it for the whole warp, and hands out its result at once.
__device__ __forceinline__ int next_ticket(int* counter) {
    int ticket;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7FFFFFFF;" : "=r"(ticket) : "l"(counter) : "memory");
    return ticket;
}

// A block's tile of this number, once it is published in its slot.
template <class Config>
__device__ __forceinline__ int fetch_tile(u32 slots, u32 number) {
    const u32 slot = slots + number % Config::TILE_SLOTS * SCHEDULER_SLOT_BYTES;
    mbarrier_wait(slot, number / Config::TILE_SLOTS & 1);
    int tile;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(tile) : "r"(slot + 8) : "memory");
    return tile;
}

// The work of a math warp: `compute` is one tile, whose first stage is full.
template <class Config, class Storage, typename Compute>
__device__ __forceinline__ void compute_tiles(const Storage& storage, int num_tiles, Compute compute) {
    Pipeline<Config> pipeline = storage.pipeline();
    int slot = 0;
    if (fetch_tile<Config>(storage.slots, 0) >= num_tiles) return;
    while (true) {
        pipeline.wait_full();
        const auto& tile = storage.tiles[slot];
        slot = (slot + 1) % Config::TILE_SLOTS;
        compute(pipeline, tile);
        if (tile.is_last) break;
    }
}

// The tile scheduler of a loading thread. One thread of a cluster leads: it takes numbers of the counter, and publishes
// them in slots in the shared memory of all its blocks. It publishes the tile after the next one, in a slot that all
// have read: a tile has a stage or more, and slots are at least three more than stages. All numbers are taken, so the
// blocks of a launch that are on the GPU finish it, whichever they are.
template <class Config>
struct TileScheduler {
    int* counter;
    u32 slots;
    bool leads;
    u32 number = 0; // number of the block's tile
    int ahead[2];   // the tiles that the leading thread publishes next

    // Ask for the first numbers: they arrive while the block sets itself up.
    __device__ __forceinline__ TileScheduler(int* counter, u32 slots, bool leads)
        : counter(counter), slots(slots), leads(leads) {
        if (leads) {
            ahead[0] = next_ticket(counter);
            ahead[1] = next_ticket(counter);
        }
    }

    // The block's first tile, once all blocks of the cluster have their slots.
    __device__ __forceinline__ int first() {
        if (leads) {
            publish(0, ahead[0]);
            publish(1, ahead[1]);
            ahead[0] = next_ticket(counter);
        }
        fetch_tile<Config>(slots, 1); // so that no store can arrive at a block that has ended
        return fetch_tile<Config>(slots, 0);
    }

    // The tile after this one.
    __device__ __forceinline__ int next() { return fetch_tile<Config>(slots, ++number); }

    // The tile after the next one. Its number was asked for a tile ago, as one is here: that takes a microsecond. Who
    // has no next tile waits for nothing more, so nothing is published.
    __device__ __forceinline__ void publish_ahead(bool is_last) {
        if (!leads || is_last) return;
        publish(number + 1, ahead[0]);
        ahead[0] = next_ticket(counter);
    }

    // The slot in which the math warps find the tile.
    __device__ __forceinline__ int slot() const { return (number - 1) % Config::TILE_SLOTS; }

private:
    __device__ __forceinline__ void publish(u32 number, int tile) const {
        const u32 slot = slots + number % Config::TILE_SLOTS * SCHEDULER_SLOT_BYTES;
#pragma unroll
        for (int block = 0; block < Config::CLUSTER; ++block) {
            store_and_arrive<Config::CLUSTER>(slot + 8, tile, slot, block);
        }
    }
};

#endif
