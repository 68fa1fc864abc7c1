// Weight gradients: out[expert] = sum over the expert's routed rows q of a[q]^T b[q].
//
// An item is 128 columns of a times 256 columns of b, of all rows of one expert. Rows are few, often only a thousand,
// so what counts is that an item's end costs nothing: one warp loads, and is ahead in the next items; of the two
// warpgroups, which have 64 columns of a each, the first is LEAD steps ahead of the second, so that one stores while
// the other multiplies. One alone keeps the tensor cores busy.
//
// Rows lie in shared memory as they do in global memory: a line is 64 columns of one row, and DEPTH lines, a block, one
// below the other. The tensor cores transpose both operands. In the terms of ring.cu a stage's first COLS lines are a's
// blocks, the MOST_ROWS lines behind them b's.

constexpr int GROUPS = WARPS / 4;
constexpr int BLOCK_COLS = LINE / 2;
constexpr int BLOCK_BYTES = DEPTH * LINE;
constexpr int A_BLOCKS = COLS / DEPTH;
constexpr int B_BLOCKS = MOST_ROWS / DEPTH;
constexpr int WARP_ROWS = 16; // of the result, of a warp
constexpr int BOX_BYTES = WARP_ROWS * LINE;
constexpr int STAGING_BYTES = STAGED_BOXES * BOX_BYTES; // of each warp
constexpr int THREADS = 32 * WARPS + 128;
static_assert(A_BLOCKS == GROUPS && B_BLOCKS * BLOCK_COLS == MOST_AT_ONCE && DEPTH % STEP == 0);
static_assert(LEAD < STAGES); // a stage is free once the second warpgroup has gone a step further
static_assert(ITEM_SLOTS > STAGES + 2);

// ---- segments

// Of the rows of an expert; the map reads what lies behind them as 0: see segment_map of kernels/runtime/nvrtc.py.
struct Segment {
    int start, count;
};

__device__ __forceinline__ void load_segment(
    u32 target, const TensorMap& map, u32 barrier, int col, const Segment& segment, int row) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6}], [%2];"
        ::"r"(target), "l"(&map), "r"(barrier), "r"(col), "r"(SEGMENT_ROWS - segment.count + row),
        "r"(segment.start + segment.count), "r"(SEGMENT_ROWS) : "memory");
}

// ---- items

struct Work {
    const int* starts; // first routed row of each expert
    const int* counts;
    int experts, a_cols, b_cols;

    __device__ __forceinline__ int a_tiles() const { return ceil_div(a_cols, A_BLOCKS * BLOCK_COLS); }
    __device__ __forceinline__ int b_tiles() const { return ceil_div(b_cols, B_BLOCKS * BLOCK_COLS); }
    __device__ __forceinline__ int num_items() const { return experts * a_tiles() * b_tiles(); }
};

// What the loading warp tells the warpgroups about an item, in shared memory.
struct alignas(16) Item {
    Segment segment;
    int expert, a_col, b_col, is_last;

    // An expert without rows has a step, too, of zeros.
    __device__ __forceinline__ int num_steps() const { return max(ceil_div(segment.count, DEPTH), 1); }
};

static_assert(sizeof(Item) == 32);

__device__ __forceinline__ Item item_at(const Work& work, int index) {
    const int tiles = work.a_tiles() * work.b_tiles();
    Item item;
    item.expert = index / tiles;
    const Place place(index - item.expert * tiles, work.a_tiles(), work.b_tiles());
    item.a_col = place.piece * (A_BLOCKS * BLOCK_COLS);
    item.b_col = place.col * (B_BLOCKS * BLOCK_COLS);
    item.segment = {__ldg(work.starts + item.expert), __ldg(work.counts + item.expert)};
    return item;
}

// ---- the thread that loads

__device__ __forceinline__ void load_stage(
    const Ring& ring, const TensorMap& a_map, const TensorMap& b_map, const Item& item, int step) {
    const u32 stage = ring.stages + ring.stage * STAGE_BYTES, ready = ring.full + 8 * ring.stage;
    barrier_expect(ready, STAGE_BYTES);
#pragma unroll
    for (int block = 0; block < A_BLOCKS; ++block) {
        const u32 target = stage + block * BLOCK_BYTES;
        load_segment(target, a_map, ready, item.a_col + block * BLOCK_COLS, item.segment, step * DEPTH);
    }
#pragma unroll
    for (int block = 0; block < B_BLOCKS; ++block) {
        const u32 target = stage + (A_BLOCKS + block) * BLOCK_BYTES;
        load_segment(target, b_map, ready, item.b_col + block * BLOCK_COLS, item.segment, step * DEPTH);
    }
}

__device__ __forceinline__ void load_items(
    const Work& work, const TensorMap& a_map, const TensorMap& b_map, const Memory<Item>& memory, Draws& draws) {
    const int num_items = work.num_items(), first = draws.first();
    if (first >= num_items) return;
    Ring ring = memory.ring();
    Item next = item_at(work, first);
    for (bool is_last = false; !is_last;) {
        Item item = next;
        const int following = draws.next();
        item.is_last = is_last = following >= num_items;
        draws.tell(is_last);
        if (!is_last) next = item_at(work, following); // its segment is found while this one is loaded
        for (int step = 0; step < item.num_steps(); ++step) {
            barrier_wait(ring.empty + 8 * ring.stage, ring.parity ^ 1);
            // Seen by whoever has waited for the item's first stage.
            if (step == 0) memory.items[draws.slot()] = item;
            load_stage(ring, a_map, b_map, item, step);
            ring.advance();
        }
    }
}

// ---- warpgroups

// How far the first warpgroup is: a barrier for each stage, which it arrives at once it has begun to multiply that.
struct Lead {
    u32 barriers;

    __device__ __forceinline__ void tell(const Ring& ring, int lane) const {
        if (lane == 0) barrier_arrive_here(barriers + 8 * ring.stage);
    }

    // By the second one, before a step: until the first one is LEAD steps further or has begun the item's last one.
    __device__ __forceinline__ void wait(const Ring& ring, int step, int num_steps) const {
        if (step > 0 && step + LEAD > num_steps) return;
        int stage = ring.stage + min(LEAD, num_steps) - 1;
        u32 parity = ring.parity;
        if (stage >= STAGES) {
            stage -= STAGES;
            parity ^= 1;
        }
        barrier_wait(barriers + 8 * stage, parity);
    }
};

__device__ __forceinline__ u64 block_descriptor(u32 address) {
    return descriptor_of((BLOCK_BYTES / 16 << 16) | ((address & 0x3FFFF) >> 4));
}

__device__ __forceinline__ void free_stage(const Ring& ring, int lane) {
    if (lane == 0) barrier_arrive_here(ring.empty + 8 * ring.last());
}

// A step's products, of its first ROWS rows, and all around them.
template <int ROWS>
__device__ __forceinline__ void multiply_step(
    Ring& ring, Sums& sums, const Lead& lead, int step, int num_steps, int group, int lane) {
    if (LEAD > 0 && group == 1) lead.wait(ring, step, num_steps);
    barrier_wait(ring.full + 8 * ring.stage, ring.parity);
    const u32 stage = ring.stages + ring.stage * STAGE_BYTES;
    const u64 a = block_descriptor(stage + group * BLOCK_BYTES);
    const u64 b = block_descriptor(stage + A_BLOCKS * BLOCK_BYTES);
    products_begin();
#pragma unroll
    for (int row = 0; row < ROWS; row += STEP) {
        multiply(sums, a + row * LINE / 16, b + row * LINE / 16, step > 0 || row > 0);
    }
    products_commit();
    if (LEAD > 0 && group == 0) lead.tell(ring, lane);
    products_wait<1>();
    if (step > 0) free_stage(ring, lane); // of the step before
    ring.advance();
}

// Of a last step that is not full, only as many steps of 16 rows are multiplied as there are.
template <int ROWS>
__device__ __forceinline__ void multiply_rest(
    Ring& ring, Sums& sums, const Lead& lead, int rows, int step, int group, int lane) {
    if constexpr (ROWS > 0) {
        if (rows > ROWS - STEP) {
            multiply_step<ROWS>(ring, sums, lead, step, step + 1, group, lane);
        } else {
            multiply_rest<ROWS - STEP>(ring, sums, lead, rows, step, group, lane);
        }
    }
}

__device__ __forceinline__ void multiply_item(
    Ring& ring, Sums& sums, const Item& item, const Lead& lead, int group, int lane) {
    const int rows = max(item.segment.count, 1), num_steps = item.num_steps(), full = rows / DEPTH;
#pragma unroll 1
    for (int step = 0; step < full; ++step) {
        multiply_step<DEPTH>(ring, sums, lead, step, num_steps, group, lane);
    }
    if (full < num_steps) multiply_rest<DEPTH>(ring, sums, lead, rows - full * DEPTH, full, group, lane);
    products_wait<0>();
    free_stage(ring, lane);
}

// Rounds a warp's 16 rows and stores them 64 columns at a time, through boxes of shared memory that are used in turn.
// The map cuts off what lies outside of the result.
__device__ __forceinline__ void store_item(
    const Sums& sums, const Item& item, const TensorMap& out_map, u32 staging, int group, int warp, int lane) {
    const int row = item.a_col + group * BLOCK_COLS + warp * WARP_ROWS;
    const u32 line = staging + lane % 16 * LINE;
#pragma unroll
    for (int block = 0; block < B_BLOCKS; ++block) {
        const u32 box = block % STAGED_BOXES * BOX_BYTES;
        if (lane == 0) boxes_wait<STAGED_BOXES - 1>();
        __syncwarp();
#pragma unroll
        for (int chunk = 0; chunk < 8; chunk += 2) {
            const float* const values = sums + 4 * (8 * block + chunk);
            const u32 words[] = {pack(values[0], values[1]), pack(values[2], values[3]), pack(values[4], values[5]),
                                 pack(values[6], values[7])};
            store_matrices(line + box + ((chunk + lane / 16 ^ lane % 8) << 4), words);
        }
        fence_for_tensor_cores(); // and for bulk copies
        __syncwarp();
        if (lane == 0) store_box(out_map, line + box, item.b_col + block * BLOCK_COLS, row, item.expert);
    }
}

__device__ __forceinline__ void multiply_items(
    const Work& work, const TensorMap& out_map, const Memory<Item>& memory, u32 leads, int warp, int lane) {
    if (told_of(memory.draws, 0) >= work.num_items()) return;
    const int group = warp / 4;
    const u32 staging = memory.staging + warp * STAGING_BYTES;
    Ring ring = memory.ring();
    int slot = 0;
    for (bool is_last = false; !is_last;) {
        barrier_wait(ring.full + 8 * ring.stage, ring.parity);
        const Item item = memory.items[slot];
        slot = (slot + 1) % ITEM_SLOTS;
        is_last = item.is_last;
        Sums sums;
        multiply_item(ring, sums, item, Lead{leads}, group, lane);
        store_item(sums, item, out_map, staging, group, warp % 4, lane);
    }
    if (lane == 0) boxes_wait<0>(); // the block's memory is in use until then
}

// ---- the launch

extern "C" __global__ void __launch_bounds__(THREADS, 1) weight_gradient(
    const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
    const __grid_constant__ TensorMap out_map, const int* __restrict__ starts, const int* __restrict__ counts,
    int experts, int a_cols, int b_cols, int* ticket) {
    extern __shared__ char dynamic[];
    const Memory<Item> memory(dynamic, WARPS * STAGING_BYTES);
    const u32 leads = shared_address(memory.behind());

    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    Draws draws(ticket, memory.draws, warp == WARPS && lane == 0);
    if (warp == WARPS && lane == 0) {
        for (int stage = 0; stage < STAGES; ++stage) barrier_init(leads + 8 * stage, WARPS / GROUPS);
        memory.init(1, WARPS);
    }
    __syncthreads();

    const Work work{starts, counts, experts, a_cols, b_cols};
    if (warp < WARPS) {
        take_registers<MULTIPLYING_REGISTERS>();
        multiply_items(work, out_map, memory, leads, warp, lane);
    } else {
        give_registers<other_registers(MULTIPLYING_REGISTERS)>();
        if (warp == WARPS && lane == 0) load_items(work, a_map, b_map, memory, draws);
    }
}
