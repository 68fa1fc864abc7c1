// What a warp did and when, in the layout of kernels/runtime/recorder.py; nothing is left of it without
// Config::RECORDS.

#ifndef COMET_RECORDER_CUH
#define COMET_RECORDER_CUH

#include "ptx.cuh"

__device__ __forceinline__ u64 now_ns() {
    u64 time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

template <class Config>
struct Recorder {
    int* worker; // this warp's rows
    int capacity, epoch;

    __device__ __forceinline__ Recorder(int* events, int capacity, int epoch, int worker)
        : worker(events + u64(worker * gridDim.x + blockIdx.x) * (capacity + 1) * Config::EVENT_WORDS),
          capacity(capacity), epoch(epoch) {}

    __device__ __forceinline__ u64 now() const {
        if constexpr (Config::RECORDS) return now_ns();
        return 0;
    }

    // One thread records the work when it is done.
    __device__ __forceinline__ void record(int kind, int first, int second, int third, u64 begin, u64 ready) const {
        if constexpr (Config::RECORDS) {
            const int count = worker[0];
            worker[0] = count + 1;
            if (count >= capacity) return;
            int* const event = worker + (count + 1) * Config::EVENT_WORDS;
            u32 sm;
            asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
            event[0] = kind;
            event[1] = epoch;
            event[2] = sm;
            event[3] = first;
            event[4] = second;
            event[5] = third;
            u64* const times = reinterpret_cast<u64*>(event + 6);
            times[0] = begin;
            times[1] = ready;
            times[2] = now_ns();
        }
    }
};

#endif
