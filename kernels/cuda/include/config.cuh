// What a Config is made of: elements, and the shape of blocks that multiply them. The host completes it for each kernel
// (kernels/runtime/cuda_source.py), with what it needs itself to launch one.

#ifndef COMET_CONFIG_CUH
#define COMET_CONFIG_CUH

#include "ptx.cuh"

// offsetof, which NVRTC has no header for; that of CUDA 13.0 does not know __builtin_offsetof.
#define OFFSET_OF(structure, field) __INTADDR__(&(((structure*)0)->field))

// Numbers of 16 bits, two in a word, the first in the low bits.
struct Bf16 {
    static __device__ __forceinline__ u32 pack(float low, float high) {
        u32 packed;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
        return packed;
    }

    static __device__ __forceinline__ float2 unpack(u32 packed) {
        return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xFFFF0000));
    }

    using Pair = u32;
};

struct Fp16 {
    static __device__ __forceinline__ u32 pack(float low, float high) {
        u32 packed;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
        return packed;
    }

    static __device__ __forceinline__ float2 unpack(u32 packed) {
        float low, high;
        asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}"
            : "=f"(low), "=f"(high) : "r"(packed));
        return make_float2(low, high);
    }

    using Pair = u32;
};

struct Fp32 {
    static __device__ __forceinline__ float2 unpack(float2 pair) { return pair; }

    using Pair = float2;
};

struct E4m3 {};

// A block has two math warpgroups and four other warps. A launch gives all threads equally many
// registers, and math warpgroups have too few for tall tiles: the other warpgroup gives them some. In each of the
// four register files two warps multiply and one does not.
struct Block {
    static constexpr int MATH_WARPS = 8, THREADS = 32 * (MATH_WARPS + 4), LAUNCH_REGISTERS = 168;
};

template <class Config>
__device__ __forceinline__ void take_math_registers() {
    setmaxnreg_inc<Config::MATH_REGISTERS>();
}

template <class Config>
__device__ __forceinline__ void give_math_registers() {
    setmaxnreg_dec<3 * Config::LAUNCH_REGISTERS - 2 * Config::MATH_REGISTERS>();
}

// The four warps of one warpgroup that multiplies wait for each other.
__device__ __forceinline__ void warpgroup_sync(int group) {
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

// All warps that multiply do.
template <class Config>
__device__ __forceinline__ void math_sync() {
    asm volatile("bar.sync 3, %0;" ::"n"(32 * Config::MATH_WARPS) : "memory");
}

#endif
