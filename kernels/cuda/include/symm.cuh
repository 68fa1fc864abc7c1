// Flags in symmetric memory: waiting for other blocks and ranks, with a deadline, and publishing to them. The record of
// a fault is that of kernels/runtime/primitives.py.

#ifndef COMET_SYMM_CUH
#define COMET_SYMM_CUH

#include "recorder.cuh"

struct Fault {
    s64* record; // (8,): aborted, place, peer, index, expected, seen, taken
    u64 timeout_ns;
};

__device__ __forceinline__ int load_acquire(const int* flag) {
    int seen;
    asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
    return seen;
}

__device__ __forceinline__ bool has_failed(const Fault& fault) {
    return *reinterpret_cast<volatile s64*>(fault.record) != 0;
}

// Spin until the flag holds at least `expected`; whether it does: not if the deadline passed or another spin gave up.
__device__ __forceinline__ bool wait_flag(
    const int* flag, int expected, const Fault& fault, int place, int peer, int index) {
    if (load_acquire(flag) >= expected) return true;
    const u64 end = now_ns() + fault.timeout_ns;
    while (true) {
        const int seen = load_acquire(flag);
        if (seen >= expected) return true;
        if (has_failed(fault)) return false;
        if (now_ns() > end) {
            u64* const record = reinterpret_cast<u64*>(fault.record);
            if (atomicCAS(record + 6, 0ull, 1ull) == 0) {
                const s64 fields[] = {place, peer, index, expected, seen};
                for (int field = 0; field < 5; ++field) fault.record[1 + field] = fields[field];
            }
            __threadfence_system();
            *reinterpret_cast<volatile s64*>(fault.record) = 1;
            return false;
        }
        __nanosleep(50);
    }
}

// Orders all earlier stores of this thread, and those it has seen, before its later ones.
__device__ __forceinline__ void fence_release() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Publish a number after all earlier stores of this thread, to whatever GPU they went.
__device__ __forceinline__ void store_release(int* flag, int value) {
    fence_release();
    asm volatile("st.relaxed.sys.global.b32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// The same of all threads of the warp.
__device__ __forceinline__ void warp_store_release(int* flag, int value, int lane) {
    __syncwarp();
    if (lane == 0) store_release(flag, value);
}

#endif
