// What becomes of layer 0's products: gate and up, rounded, and hidden = silu(gate) * up.

constexpr int GROUP_COLS = HIDDEN_COLS / 2;              // of a warpgroup
constexpr int STAGED_LINE = 2 * GROUP_COLS;              // bytes
constexpr int STAGING_BYTES = STAGED_ROWS * STAGED_LINE; // of each warpgroup
static_assert(MOST_ROWS % STAGED_ROWS == 0);

// An item's gate and up as they are rounded: a lane has two rows of one column for each eight rows.
struct Rounded {
    u32 gate[MOST_ROWS / 8], up[MOST_ROWS / 8];

    __device__ __forceinline__ explicit Rounded(const Sums& sums) {
#pragma unroll
        for (int eight = 0; eight < MOST_ROWS / 8; ++eight) {
            gate[eight] = pack(sums[4 * eight], sums[4 * eight + 1]);
            up[eight] = pack(sums[4 * eight + 2], sums[4 * eight + 3]);
        }
    }

    __device__ __forceinline__ u32 hidden(int eight) const {
        const float2 gates = unpack(gate[eight]), ups = unpack(up[eight]);
        return pack(swiglu(gates.x, ups.x), swiglu(gates.y, ups.y));
    }
};

// Through shared memory, which turns columns into rows of 32 columns.
template <typename Value>
__device__ __forceinline__ void store_values(
    Value value_at, u16* target, const Item& item, u32 col, u32 stride, bool in_range, u32 staging, int group, int warp,
    int lane) {
    const int in_32 = 8 * warp + lane / 4;
#pragma unroll
    for (int begin = 0; begin < MOST_ROWS; begin += STAGED_ROWS) {
        if (begin >= item.rows) break;
        group_sync(group);
#pragma unroll
        for (int row = begin; row < begin + STAGED_ROWS; row += STEP) {
            const int in_stage = row - begin + lane % 16;
            const u32 address = staging + in_stage * STAGED_LINE + ((warp ^ (in_stage >> 1 & 3)) << 4);
            asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
                         ::"r"(address), "r"(value_at(row / 8)), "r"(value_at(row / 8 + 1)) : "memory");
        }
        group_sync(group);
#pragma unroll
        for (int row = begin; row < begin + STAGED_ROWS; row += 32) {
            const int in_stage = row - begin + in_32;
            if (in_range && row + in_32 < item.rows) {
                u32 x, y, z, w;
                asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
                             : "r"(staging + in_stage * STAGED_LINE + ((lane % 4 ^ (in_stage >> 1 & 3)) << 4)));
                // The item is read again each time: few registers are left.
                u16* const line = target + u64(u32(item.first_row + row + in_32)) * stride + col;
                *reinterpret_cast<uint4*>(line) = make_uint4(x, y, z, w);
            }
        }
    }
}

struct Results {
    u16* hidden;
    u16* pre; // gate | up, if SAVES_PRE
};

__device__ __forceinline__ void compute_item(
    Ring& ring, const Item& item, const Results& results, int ffn, u32 staging, int group, int warp, int lane,
    int num_steps) {
    Sums sums;
    multiply_item(ring, sums, item.rows, group, lane, num_steps, [] {});
    const Rounded rounded(sums);
    const int col = item.col + group * GROUP_COLS + lane % 4 * 8;
    const bool in_range = col < ffn;
    if constexpr (SAVES_PRE) {
        const auto gate = [&](int eight) { return rounded.gate[eight]; };
        const auto up = [&](int eight) { return rounded.up[eight]; };
        store_values(gate, results.pre, item, col, 2 * ffn, in_range, staging, group, warp, lane);
        store_values(up, results.pre + ffn, item, col, 2 * ffn, in_range, staging, group, warp, lane);
    }
    const auto hidden = [&](int eight) { return rounded.hidden(eight); };
    store_values(hidden, results.hidden, item, col, ffn, in_range, staging, group, warp, lane);
}
