// A ring of stages in shared memory, through which loading warps hand operands to those that multiply; how an expert's
// rows are cut into pieces; where warpgroups meet. A stage holds COLS lines of weights and MOST_ROWS lines of routed
// rows; block FP8 has scales of each row apart from them, of SCALE_STEPS steps together.

constexpr int WEIGHT_BYTES = COLS * LINE;
constexpr int STAGE_BYTES = WEIGHT_BYTES + MOST_ROWS * LINE;
constexpr int ROW_SCALE_BYTES = 4 * SCALE_STEPS;
constexpr int SCALE_BYTES = IS_FP8 ? MOST_ROWS * ROW_SCALE_BYTES : 0; // of as many steps

struct Ring {
    u32 stages, full, empty;
    int stage;
    u32 parity;
    int scale_slot; // there are as many as stages, for steps that may still be read are fewer

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }

    __device__ __forceinline__ int last() const { return stage == 0 ? STAGES - 1 : stage - 1; }

    // Of an item's step, of the first row.
    __device__ __forceinline__ u32 scales(int step) const {
        return stages + STAGES * STAGE_BYTES + scale_slot * SCALE_BYTES + 4 * (step % SCALE_STEPS);
    }

    __device__ __forceinline__ void advance_scales(int step, int num_steps) {
        if ((step + 1) % SCALE_STEPS && step + 1 < num_steps) return;
        if (++scale_slot == STAGES) scale_slot = 0;
    }
};

// How a block's shared memory begins: stages, their scales, what warpgroups stage for themselves or tell each other,
// barriers, items; all else comes behind.
template <typename Item>
struct Memory {
    char* begin;
    u32 stages, staging, full, empty;
    Item* items;
    u32 draws;

    __device__ __forceinline__ Memory(char* memory, int staging_bytes) {
        stages = (shared_address(memory) + 1023) & ~1023u;
        begin = memory + (stages - shared_address(memory));
        staging = stages + STAGES * (STAGE_BYTES + SCALE_BYTES);
        full = staging + staging_bytes;
        empty = full + 8 * STAGES;
        items = reinterpret_cast<Item*>(begin + (empty + 8 * STAGES - stages));
        draws = empty + 8 * STAGES + ITEM_SLOTS * sizeof(Item);
    }

    __device__ __forceinline__ Ring ring() const { return {stages, full, empty, 0, 0, 0}; }

    __device__ __forceinline__ char* behind() const { return begin + (draws + ITEM_SLOTS * DRAW_BYTES - stages); }

    // By one thread: how many arrivals fill a stage, and how many free it. Nothing has been told.
    __device__ __forceinline__ void init(u32 filling, u32 freeing) const {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(full + 8 * stage, filling);
            barrier_init(empty + 8 * stage, freeing);
        }
        for (int slot = 0; slot < ITEM_SLOTS; ++slot) barrier_init(draws + slot * DRAW_BYTES, 1);
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

// Pieces that `count` rows are cut into: of at most MOST_AT_ONCE rows each, or one that is taller and has all of them.
__device__ __forceinline__ int pieces_of(int count) {
    return count <= MOST_ROWS ? count > 0 : ceil_div(count, MOST_AT_ONCE);
}

// Rows of each of `num` pieces; the last may have fewer.
__device__ __forceinline__ int piece_height(int count, int num) {
    return ceil_div(ceil_div(count, num), STEP) * STEP;
}

// The four warps of one warpgroup that multiplies wait for each other.
__device__ __forceinline__ void group_sync(int group) {
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

// All warps that multiply do.
__device__ __forceinline__ void both_groups_sync() { asm volatile("bar.sync 3, %0;" ::"n"(32 * WARPS) : "memory"); }
