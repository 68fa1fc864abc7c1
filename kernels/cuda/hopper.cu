// Hopper's own instructions: barriers in shared memory, bulk copies, tensor cores. Of a layer this knows no more
// than that a box of weights is one expert's.
//
// The host puts constants in front of this text (kernels/runtime/cuda_text.py and its callers say what they mean), and
// multiply, which hands the tensor cores 32 bytes of each line, or, transposed, 16 lines:
//
// - in 16 bits, for each number of rows N, multiply<N>(sums, descriptor of weights, descriptor of rows), which adds a
//   product of 64 columns and N rows to the first N / 2 of a thread's Sums;
// - in 16 bits, with rows as the contraction, multiply(sums, descriptor of a, descriptor of b, adds), which adds one of
//   64 columns of a, MOST_AT_ONCE of b and 16 rows to a thread's Sums, or begins them anew;
// - in block FP8 multiply(products, descriptor of rows, descriptor of weights, adds), which adds one of 64 rows and 128
//   columns to a thread's Products, or begins them anew.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(64) TensorMap {
    char bytes[128];
};

// ---- shared memory, barriers, bulk copies

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_sync() {
    if constexpr (CLUSTER > 1) {
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    } else {
        __syncthreads();
    }
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive_here(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrive at the same barrier of block `rank` of the cluster.
__device__ __forceinline__ void barrier_arrive(u32 barrier, u32 rank) {
    asm volatile(
        "{\n.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}"
        ::"r"(barrier), "r"(rank) : "memory");
}

// Store a number in the memory of block `rank` of the cluster, for whoever there has waited for the barrier, which one
// arrival completes.
__device__ __forceinline__ void store_and_arrive(u32 target, int number, u32 barrier, u32 rank) {
    if constexpr (CLUSTER == 1) {
        asm volatile("st.shared.s32 [%0], %1;" ::"r"(target), "r"(number) : "memory");
        barrier_arrive_here(barrier);
    } else { // the store completes the barrier itself: an arrival that releases it costs a microsecond
        asm volatile(
            "{\n.reg .b32 there, remote;\n"
            "mapa.shared::cluster.u32 there, %0, %3;\n"
            "mapa.shared::cluster.u32 remote, %2, %3;\n"
            "mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _, [remote], 4;\n"
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.s32 [there], %1, [remote];\n}"
            ::"r"(target), "r"(number), "r"(barrier), "r"(rank) : "memory");
    }
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra DONE;\n"
        "bra WAIT;\n"
        "DONE:\n}"
        ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void load_bytes(u32 target, const void* source, u32 barrier, u32 bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(target), "l"(source), "r"(bytes), "r"(barrier) : "memory");
}

__device__ __forceinline__ void load_weights(
    u32 target, const TensorMap& map, u32 barrier, int k, int col, int expert) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
        ::"r"(target), "l"(&map), "r"(barrier), "r"(k), "r"(col), "r"(expert) : "memory");
}

// Weights whose columns are neighbours in memory: DEPTH lines of as many columns as a line has, twice.
__device__ __forceinline__ void load_columns(
    u32 target, const TensorMap& map, u32 barrier, int k, int col, int expert) {
    load_weights(target, map, barrier, col, k, expert);
    load_weights(target + DEPTH * LINE, map, barrier, col + LINE / 2, k, expert);
}

// Eights of gate rows and of up rows in turn.
__device__ __forceinline__ void load_gate_up(
    u32 target, const TensorMap& map, u32 barrier, int k, int eight, int expert) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %4, %5, %6}], [%2];"
        ::"r"(target), "l"(&map), "r"(barrier), "r"(k), "r"(0), "r"(eight), "r"(expert) : "memory");
}

__device__ __forceinline__ void load_rows(u32 target, const TensorMap& map, u32 barrier, int k, int row) {
    if constexpr (CLUSTER > 1) {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
            " [%0], [%1, {%3, %4}], [%2], %5;"
            ::"r"(target), "l"(&map), "r"(barrier), "r"(k), "r"(row), "h"(static_cast<u16>((1 << CLUSTER) - 1))
            : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
            ::"r"(target), "l"(&map), "r"(barrier), "r"(k), "r"(row) : "memory");
    }
}

// Four matrices of eight rows of 16 bytes: lanes 0 to 7 say where the first one's rows lie, and so on; of each a lane
// has two neighbours in the order of sums of products.
__device__ __forceinline__ void store_matrices(u32 target, const u32 (&words)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(target), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
}

// A box of shared memory to a matrix of an expert, by one thread; another may then wait until no more than PENDING of
// its boxes are still being read.
__device__ __forceinline__ void store_box(const TensorMap& map, u32 source, int col, int row, int expert) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
                 ::"l"(&map), "r"(source), "r"(col), "r"(row), "r"(expert) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void boxes_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// ---- tensor cores

// Rows of 128 bytes, swizzled in groups of eight rows; the low word says where, in units of 16 bytes.
__device__ __forceinline__ u64 descriptor_of(u32 low_word) {
    return (u64(1) << 62) | (u64(8 * LINE / 16) << 32) | low_word;
}

__device__ __forceinline__ u64 descriptor(u32 address) {
    return descriptor_of((1 << 16) | ((address & 0x3FFFF) >> 4));
}

__device__ __forceinline__ u32 low_word(u64 descriptor) { return static_cast<u32>(descriptor); }

// Tensor cores see what threads wrote to shared memory before.
__device__ __forceinline__ void fence_for_tensor_cores() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Registers of each thread from here on, of all four warps of a warpgroup. A launch gives all threads equally many,
// LAUNCH_REGISTERS, of which those that multiply tall items have too few. In each of the four register files two warps
// multiply and one does not.
constexpr int other_registers(int multiplying) { return 3 * LAUNCH_REGISTERS - 2 * multiplying; }

template <int COUNT>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 packed;
    if constexpr (ELEMENT_IS_BF16) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    }
    return packed;
}

__device__ __forceinline__ float2 unpack(u32 packed) {
    if constexpr (ELEMENT_IS_BF16) {
        return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xFFFF0000));
    } else {
        float low, high;
        asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}"
            : "=f"(low), "=f"(high) : "r"(packed));
        return make_float2(low, high);
    }
}

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Number of whatever lanes count before this lane, and in all.
__device__ __forceinline__ int before_lane(int mine, int lane, int& total) {
    int sum = mine;
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(0xFFFFFFFF, sum, distance);
        if (lane >= distance) sum += other;
    }
    total = __shfl_sync(0xFFFFFFFF, sum, 31);
    return sum - mine;
}
