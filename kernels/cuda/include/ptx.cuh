// Hopper's instructions by name: mbarriers, TMA, wgmma's fences and descriptors, registers of a warpgroup. Nothing here
// knows of a layer.

#ifndef COMET_PTX_CUH
#define COMET_PTX_CUH

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using s64 = long long;

constexpr int SWIZZLE_BYTES = 128; // bytes of a row in shared memory, which one swizzle spans
constexpr u32 ALL_LANES = 0xFFFFFFFF;

// A CUtensorMap.
struct alignas(64) TensorMap {
    char bytes[128];
};

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// ---- clusters

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

template <int CLUSTER>
__device__ __forceinline__ void cluster_sync() {
    if constexpr (CLUSTER > 1) {
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    } else {
        __syncthreads();
    }
}

// In the memory of block `rank` of the cluster; seen after the next cluster_sync.
template <int CLUSTER>
__device__ __forceinline__ void store_at(u32 target, int number, u32 rank) {
    if constexpr (CLUSTER == 1) {
        asm volatile("st.shared.s32 [%0], %1;" ::"r"(target), "r"(number) : "memory");
    } else {
        asm volatile(
            "{\n.reg .b32 there;\n"
            "mapa.shared::cluster.u32 there, %0, %2;\n"
            "st.shared::cluster.s32 [there], %1;\n}"
            ::"r"(target), "r"(number), "r"(rank) : "memory");
    }
}

// ---- mbarriers

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The same barrier of block `rank` of the cluster.
__device__ __forceinline__ void mbarrier_arrive_at(u32 barrier, u32 rank) {
    asm volatile(
        "{\n.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}"
        ::"r"(barrier), "r"(rank) : "memory");
}

__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra DONE;\n"
        "bra WAIT;\n"
        "DONE:\n}"
        ::"r"(barrier), "r"(parity) : "memory");
}

// Stores a number in the memory of block `rank` of the cluster, where threads that waited for the barrier see it; one
// arrival completes the barrier.
template <int CLUSTER>
__device__ __forceinline__ void store_and_arrive(u32 target, int number, u32 barrier, u32 rank) {
    if constexpr (CLUSTER == 1) {
        asm volatile("st.shared.s32 [%0], %1;" ::"r"(target), "r"(number) : "memory");
        mbarrier_arrive(barrier);
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

// ---- TMA: global to shared memory, which arrives at an mbarrier in bytes

__device__ __forceinline__ void tma_load_bytes(u32 target, const void* source, u32 barrier, u32 bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(target), "l"(source), "r"(bytes), "r"(barrier) : "memory");
}

// To all blocks of the cluster, where there are several.
template <int CLUSTER>
__device__ __forceinline__ void tma_load_2d(u32 target, const TensorMap& map, u32 barrier, int x, int y) {
    if constexpr (CLUSTER > 1) {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
            " [%0], [%1, {%3, %4}], [%2], %5;"
            ::"r"(target), "l"(&map), "r"(barrier), "r"(x), "r"(y), "h"(static_cast<u16>((1 << CLUSTER) - 1))
            : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
            ::"r"(target), "l"(&map), "r"(barrier), "r"(x), "r"(y) : "memory");
    }
}

__device__ __forceinline__ void tma_load_3d(u32 target, const TensorMap& map, u32 barrier, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
        ::"r"(target), "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z) : "memory");
}

__device__ __forceinline__ void tma_load_4d(
    u32 target, const TensorMap& map, u32 barrier, int x, int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6}], [%2];"
        ::"r"(target), "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// At 0 of the second and of the third axis.
__device__ __forceinline__ void tma_load_5d(u32 target, const TensorMap& map, u32 barrier, int x, int w, int v) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %4, %5, %6}], [%2];"
        ::"r"(target), "l"(&map), "r"(barrier), "r"(x), "r"(0), "r"(w), "r"(v) : "memory");
}

// ---- TMA: shared to global memory, by one thread, as a group of its own

__device__ __forceinline__ void tma_store_3d(const TensorMap& map, u32 source, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
                 ::"l"(&map), "r"(source), "r"(x), "r"(y), "r"(z) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until no more than PENDING of the thread's stores still read shared memory.
template <int PENDING>
__device__ __forceinline__ void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// ---- cp.async: 16 bytes of a lane

__device__ __forceinline__ void cp_async_16(u32 target, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

// Zeros where it does not exist.
__device__ __forceinline__ void cp_async_16(u32 target, const void* source, bool exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(target), "l"(source), "r"(exists ? 16 : 0) : "memory");
}

__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Once all earlier copies of the thread are there; the barrier counts on one arrival of each thread.
__device__ __forceinline__ void cp_async_mbarrier_arrive(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// ---- shared memory of a warp

// Four matrices of eight rows of 16 bytes: lanes 0 to 7 say where the first one's rows lie, and so on; of each a lane
// has two neighbours in the order of accumulators.
__device__ __forceinline__ void stmatrix_x4(u32 target, const u32 (&words)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(target), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
}

// ---- wgmma

// Descriptor of rows of SWIZZLE_BYTES, swizzled in groups of eight; the low word is the address in units of 16 bytes.
__device__ __forceinline__ u64 descriptor_of(u32 low_word) {
    return (u64(1) << 62) | (u64(8 * SWIZZLE_BYTES / 16) << 32) | low_word;
}

__device__ __forceinline__ u64 descriptor(u32 address) {
    return descriptor_of((1 << 16) | ((address & 0x3FFFF) >> 4));
}

__device__ __forceinline__ u32 low_word(u64 descriptor) { return static_cast<u32>(descriptor); }

// Tensor cores and TMA see what threads wrote to shared memory before.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// ---- registers of each thread from here on, of all four warps of a warpgroup

template <int COUNT>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- arithmetic

// A parameter as it is: what is loaded for addresses, too, the compiler widens at once and keeps in two registers,
// which warps that multiply do not have (88 bytes spilled in float16).
__device__ __forceinline__ int as_32_bits(int parameter) {
    asm volatile("" : "+r"(parameter));
    return parameter;
}

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Number of whatever lanes count before this lane, and in all.
__device__ __forceinline__ int before_lane(int mine, int lane, int& total) {
    int sum = mine;
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(ALL_LANES, sum, distance);
        if (lane >= distance) sum += other;
    }
    total = __shfl_sync(ALL_LANES, sum, 31);
    return sum - mine;
}

#endif
