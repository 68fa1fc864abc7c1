// An item's products, rounded, as rows of the result.

constexpr int STAGING_BYTES = STAGED_ROWS * LINE; // of each warpgroup
static_assert(MOST_ROWS % STAGED_ROWS == 0);

// Through shared memory, which turns columns of the result into rows of 64 columns, to 128 bytes of a row at a time.
__device__ __forceinline__ void store_item(
    const Sums& sums, const Item& item, u16* __restrict__ out, int cols, u32 staging, int group, int warp,
    int lane) {
    const int chunk = 2 * warp + ((lane >> 3) & 1);
    const int in_pair = ((lane >> 4) << 3) + (lane & 7);
    const int col = item.col + group * (COLS / 2) + (lane % 8) * 8;
    u16* const target = out + u64(item.first_row) * cols + col;
#pragma unroll
    for (int begin = 0; begin < MOST_ROWS; begin += STAGED_ROWS) {
        if (begin >= item.rows) break;
        group_sync(group);
#pragma unroll
        for (int row = begin; row < begin + STAGED_ROWS; row += STEP) {
            const int place = row / 2;
            const u32 address = staging + (row - begin + in_pair) * LINE + ((chunk ^ (lane & 7)) << 4);
            asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                         ::"r"(address), "r"(pack(sums[place], sums[place + 1])),
                         "r"(pack(sums[place + 2], sums[place + 3])), "r"(pack(sums[place + 4], sums[place + 5])),
                         "r"(pack(sums[place + 6], sums[place + 7])) : "memory");
        }
        group_sync(group);
        if (col < cols) {
#pragma unroll
            for (int row = begin; row < begin + STAGED_ROWS; row += STEP) {
                if (row >= item.rows) break;
                const int in_stage = row - begin + 4 * warp + lane / 8;
                u32 x, y, z, w;
                asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
                             : "r"(staging + in_stage * LINE + ((lane % 8 ^ (in_stage & 7)) << 4)));
                asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                             ::"l"(target + u64(begin + in_stage) * cols), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
            }
        }
    }
    group_sync(group);
}
