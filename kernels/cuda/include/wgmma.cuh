// Written by kernels/runtime/wgmma.py.
//
// Wgmma<Element, N>::multiply: a product of the 64 rows and of the N columns that two descriptors name, over 32 bytes
// of each. It goes to N / 2 of a thread's numbers from FIRST on: added where `adds`, else in place of what they were.
// TRANSPOSE_A, TRANSPOSE_B: the contraction of an operand does not lie along its lines in shared memory.

#ifndef COMET_WGMMA_CUH
#define COMET_WGMMA_CUH

#include "config.cuh"

template <class Element, int N>
struct Wgmma;

template <>
struct Wgmma<Bf16, 16> {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %10, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7"
            "}, %8, %9, adds, 1, 1, %11, %12;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7])
            : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));
    }
};

template <>
struct Wgmma<Bf16, 32> {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %18, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
            "}, %16, %17, adds, 1, 1, %19, %20;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]), "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]),
              "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]),
              "+f"(d[FIRST + 15])
            : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));
    }
};

template <>
struct Wgmma<Bf16, 48> {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %26, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23"
            "}, %24, %25, adds, 1, 1, %27, %28;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]), "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]),
              "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]),
              "+f"(d[FIRST + 15]), "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
              "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23])
            : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));
    }
};

template <>
struct Wgmma<Bf16, 64> {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %34, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31"
            "}, %32, %33, adds, 1, 1, %35, %36;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]), "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]),
              "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]),
              "+f"(d[FIRST + 15]), "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
              "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]), "+f"(d[FIRST + 24]),
              "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]), "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]),
              "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31])
            : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));
    }
};

template <>
struct Wgmma<Bf16, 80> {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %42, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39"
            "}, %40, %41, adds, 1, 1, %43, %44;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]), "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]),
              "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]),
              "+f"(d[FIRST + 15]), "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
              "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]), "+f"(d[FIRST + 24]),
              "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]), "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]),
              "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31]), "+f"(d[FIRST + 32]), "+f"(d[FIRST + 33]), "+f"(d[FIRST + 34]),
              "+f"(d[FIRST + 35]), "+f"(d[FIRST + 36]), "+f"(d[FIRST + 37]), "+f"(d[FIRST + 38]), "+f"(d[FIRST + 39])
            : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));
    }
};

template <>
struct Wgmma<Bf16, 96> {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %50, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
            "%44, %45, %46, %47"
            "}, %48, %49, adds, 1, 1, %51, %52;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]), "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]),
              "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]),
              "+f"(d[FIRST + 15]), "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
              "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]), "+f"(d[FIRST + 24]),
              "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]), "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]),
              "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31]), "+f"(d[FIRST + 32]), "+f"(d[FIRST + 33]), "+f"(d[FIRST + 34]),
              "+f"(d[FIRST + 35]), "+f"(d[FIRST + 36]), "+f"(d[FIRST + 37]), "+f"(d[FIRST + 38]), "+f"(d[FIRST + 39]),
              "+f"(d[FIRST + 40]), "+f"(d[FIRST + 41]), "+f"(d[FIRST + 42]), "+f"(d[FIRST + 43]), "+f"(d[FIRST + 44]),
              "+f"(d[FIRST + 45]), "+f"(d[FIRST + 46]), "+f"(d[FIRST + 47])
            : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));
    }
};

template <>
struct Wgmma<Bf16, 112> {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %58, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n112k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
            "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55"
            "}, %56, %57, adds, 1, 1, %59, %60;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]), "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]),
              "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]),
              "+f"(d[FIRST + 15]), "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
              "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]), "+f"(d[FIRST + 24]),
              "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]), "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]),
              "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31]), "+f"(d[FIRST + 32]), "+f"(d[FIRST + 33]), "+f"(d[FIRST + 34]),
              "+f"(d[FIRST + 35]), "+f"(d[FIRST + 36]), "+f"(d[FIRST + 37]), "+f"(d[FIRST + 38]), "+f"(d[FIRST + 39]),
              "+f"(d[FIRST + 40]), "+f"(d[FIRST + 41]), "+f"(d[FIRST + 42]), "+f"(d[FIRST + 43]), "+f"(d[FIRST + 44]),
              "+f"(d[FIRST + 45]), "+f"(d[FIRST + 46]), "+f"(d[FIRST + 47]), "+f"(d[FIRST + 48]), "+f"(d[FIRST + 49]),
              "+f"(d[FIRST + 50]), "+f"(d[FIRST + 51]), "+f"(d[FIRST + 52]), "+f"(d[FIRST + 53]), "+f"(d[FIRST + 54]),
              "+f"(d[FIRST + 55])
            : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));
    }
};

template <>
struct Wgmma<Bf16, 128> {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %66, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
            "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
            "}, %64, %65, adds, 1, 1, %67, %68;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]), "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]),
              "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]),
              "+f"(d[FIRST + 15]), "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
              "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]), "+f"(d[FIRST + 24]),
              "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]), "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]),
              "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31]), "+f"(d[FIRST + 32]), "+f"(d[FIRST + 33]), "+f"(d[FIRST + 34]),
              "+f"(d[FIRST + 35]), "+f"(d[FIRST + 36]), "+f"(d[FIRST + 37]), "+f"(d[FIRST + 38]), "+f"(d[FIRST + 39]),
              "+f"(d[FIRST + 40]), "+f"(d[FIRST + 41]), "+f"(d[FIRST + 42]), "+f"(d[FIRST + 43]), "+f"(d[FIRST + 44]),
              "+f"(d[FIRST + 45]), "+f"(d[FIRST + 46]), "+f"(d[FIRST + 47]), "+f"(d[FIRST + 48]), "+f"(d[FIRST + 49]),
              "+f"(d[FIRST + 50]), "+f"(d[FIRST + 51]), "+f"(d[FIRST + 52]), "+f"(d[FIRST + 53]), "+f"(d[FIRST + 54]),
              "+f"(d[FIRST + 55]), "+f"(d[FIRST + 56]), "+f"(d[FIRST + 57]), "+f"(d[FIRST + 58]), "+f"(d[FIRST + 59]),
              "+f"(d[FIRST + 60]), "+f"(d[FIRST + 61]), "+f"(d[FIRST + 62]), "+f"(d[FIRST + 63])
            : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));
    }
};

template <>
struct Wgmma<Bf16, 144> {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %74, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n144k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
            "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, "
            "%65, %66, %67, %68, %69, %70, %71"
            "}, %72, %73, adds, 1, 1, %75, %76;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]), "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]),
              "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]),
              "+f"(d[FIRST + 15]), "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
              "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]), "+f"(d[FIRST + 24]),
              "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]), "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]),
              "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31]), "+f"(d[FIRST + 32]), "+f"(d[FIRST + 33]), "+f"(d[FIRST + 34]),
              "+f"(d[FIRST + 35]), "+f"(d[FIRST + 36]), "+f"(d[FIRST + 37]), "+f"(d[FIRST + 38]), "+f"(d[FIRST + 39]),
              "+f"(d[FIRST + 40]), "+f"(d[FIRST + 41]), "+f"(d[FIRST + 42]), "+f"(d[FIRST + 43]), "+f"(d[FIRST + 44]),
              "+f"(d[FIRST + 45]), "+f"(d[FIRST + 46]), "+f"(d[FIRST + 47]), "+f"(d[FIRST + 48]), "+f"(d[FIRST + 49]),
              "+f"(d[FIRST + 50]), "+f"(d[FIRST + 51]), "+f"(d[FIRST + 52]), "+f"(d[FIRST + 53]), "+f"(d[FIRST + 54]),
              "+f"(d[FIRST + 55]), "+f"(d[FIRST + 56]), "+f"(d[FIRST + 57]), "+f"(d[FIRST + 58]), "+f"(d[FIRST + 59]),
              "+f"(d[FIRST + 60]), "+f"(d[FIRST + 61]), "+f"(d[FIRST + 62]), "+f"(d[FIRST + 63]), "+f"(d[FIRST + 64]),
              "+f"(d[FIRST + 65]), "+f"(d[FIRST + 66]), "+f"(d[FIRST + 67]), "+f"(d[FIRST + 68]), "+f"(d[FIRST + 69]),
              "+f"(d[FIRST + 70]), "+f"(d[FIRST + 71])
            : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));
    }
};

template <>
struct Wgmma<Bf16, 160> {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %82, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n160k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
            "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, "
            "%65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
            "}, %80, %81, adds, 1, 1, %83, %84;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]), "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]),
              "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]),
              "+f"(d[FIRST + 15]), "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
              "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]), "+f"(d[FIRST + 24]),
              "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]), "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]),
              "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31]), "+f"(d[FIRST + 32]), "+f"(d[FIRST + 33]), "+f"(d[FIRST + 34]),
              "+f"(d[FIRST + 35]), "+f"(d[FIRST + 36]), "+f"(d[FIRST + 37]), "+f"(d[FIRST + 38]), "+f"(d[FIRST + 39]),
              "+f"(d[FIRST + 40]), "+f"(d[FIRST + 41]), "+f"(d[FIRST + 42]), "+f"(d[FIRST + 43]), "+f"(d[FIRST + 44]),
              "+f"(d[FIRST + 45]), "+f"(d[FIRST + 46]), "+f"(d[FIRST + 47]), "+f"(d[FIRST + 48]), "+f"(d[FIRST + 49]),
              "+f"(d[FIRST + 50]), "+f"(d[FIRST + 51]), "+f"(d[FIRST + 52]), "+f"(d[FIRST + 53]), "+f"(d[FIRST + 54]),
              "+f"(d[FIRST + 55]), "+f"(d[FIRST + 56]), "+f"(d[FIRST + 57]), "+f"(d[FIRST + 58]), "+f"(d[FIRST + 59]),
              "+f"(d[FIRST + 60]), "+f"(d[FIRST + 61]), "+f"(d[FIRST + 62]), "+f"(d[FIRST + 63]), "+f"(d[FIRST + 64]),
              "+f"(d[FIRST + 65]), "+f"(d[FIRST + 66]), "+f"(d[FIRST + 67]), "+f"(d[FIRST + 68]), "+f"(d[FIRST + 69]),
              "+f"(d[FIRST + 70]), "+f"(d[FIRST + 71]), "+f"(d[FIRST + 72]), "+f"(d[FIRST + 73]), "+f"(d[FIRST + 74]),
              "+f"(d[FIRST + 75]), "+f"(d[FIRST + 76]), "+f"(d[FIRST + 77]), "+f"(d[FIRST + 78]), "+f"(d[FIRST + 79])
            : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));
    }
};

template <>
struct Wgmma<Bf16, 176> {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %90, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n176k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
            "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, "
            "%65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, "
            "%86, %87"
            "}, %88, %89, adds, 1, 1, %91, %92;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]), "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]),
              "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]),
              "+f"(d[FIRST + 15]), "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
              "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]), "+f"(d[FIRST + 24]),
              "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]), "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]),
              "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31]), "+f"(d[FIRST + 32]), "+f"(d[FIRST + 33]), "+f"(d[FIRST + 34]),
              "+f"(d[FIRST + 35]), "+f"(d[FIRST + 36]), "+f"(d[FIRST + 37]), "+f"(d[FIRST + 38]), "+f"(d[FIRST + 39]),
              "+f"(d[FIRST + 40]), "+f"(d[FIRST + 41]), "+f"(d[FIRST + 42]), "+f"(d[FIRST + 43]), "+f"(d[FIRST + 44]),
              "+f"(d[FIRST + 45]), "+f"(d[FIRST + 46]), "+f"(d[FIRST + 47]), "+f"(d[FIRST + 48]), "+f"(d[FIRST + 49]),
              "+f"(d[FIRST + 50]), "+f"(d[FIRST + 51]), "+f"(d[FIRST + 52]), "+f"(d[FIRST + 53]), "+f"(d[FIRST + 54]),
              "+f"(d[FIRST + 55]), "+f"(d[FIRST + 56]), "+f"(d[FIRST + 57]), "+f"(d[FIRST + 58]), "+f"(d[FIRST + 59]),
              "+f"(d[FIRST + 60]), "+f"(d[FIRST + 61]), "+f"(d[FIRST + 62]), "+f"(d[FIRST + 63]), "+f"(d[FIRST + 64]),
              "+f"(d[FIRST + 65]), "+f"(d[FIRST + 66]), "+f"(d[FIRST + 67]), "+f"(d[FIRST + 68]), "+f"(d[FIRST + 69]),
              "+f"(d[FIRST + 70]), "+f"(d[FIRST + 71]), "+f"(d[FIRST + 72]), "+f"(d[FIRST + 73]), "+f"(d[FIRST + 74]),
              "+f"(d[FIRST + 75]), "+f"(d[FIRST + 76]), "+f"(d[FIRST + 77]), "+f"(d[FIRST + 78]), "+f"(d[FIRST + 79]),
              "+f"(d[FIRST + 80]), "+f"(d[FIRST + 81]), "+f"(d[FIRST + 82]), "+f"(d[FIRST + 83]), "+f"(d[FIRST + 84]),
              "+f"(d[FIRST + 85]), "+f"(d[FIRST + 86]), "+f"(d[FIRST + 87])
            : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));
    }
};

template <>
struct Wgmma<Bf16, 192> {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %98, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
            "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, "
            "%65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, "
            "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
            "}, %96, %97, adds, 1, 1, %99, %100;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]), "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]),
              "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]),
              "+f"(d[FIRST + 15]), "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
              "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]), "+f"(d[FIRST + 24]),
              "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]), "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]),
              "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31]), "+f"(d[FIRST + 32]), "+f"(d[FIRST + 33]), "+f"(d[FIRST + 34]),
              "+f"(d[FIRST + 35]), "+f"(d[FIRST + 36]), "+f"(d[FIRST + 37]), "+f"(d[FIRST + 38]), "+f"(d[FIRST + 39]),
              "+f"(d[FIRST + 40]), "+f"(d[FIRST + 41]), "+f"(d[FIRST + 42]), "+f"(d[FIRST + 43]), "+f"(d[FIRST + 44]),
              "+f"(d[FIRST + 45]), "+f"(d[FIRST + 46]), "+f"(d[FIRST + 47]), "+f"(d[FIRST + 48]), "+f"(d[FIRST + 49]),
              "+f"(d[FIRST + 50]), "+f"(d[FIRST + 51]), "+f"(d[FIRST + 52]), "+f"(d[FIRST + 53]), "+f"(d[FIRST + 54]),
              "+f"(d[FIRST + 55]), "+f"(d[FIRST + 56]), "+f"(d[FIRST + 57]), "+f"(d[FIRST + 58]), "+f"(d[FIRST + 59]),
              "+f"(d[FIRST + 60]), "+f"(d[FIRST + 61]), "+f"(d[FIRST + 62]), "+f"(d[FIRST + 63]), "+f"(d[FIRST + 64]),
              "+f"(d[FIRST + 65]), "+f"(d[FIRST + 66]), "+f"(d[FIRST + 67]), "+f"(d[FIRST + 68]), "+f"(d[FIRST + 69]),
              "+f"(d[FIRST + 70]), "+f"(d[FIRST + 71]), "+f"(d[FIRST + 72]), "+f"(d[FIRST + 73]), "+f"(d[FIRST + 74]),
              "+f"(d[FIRST + 75]), "+f"(d[FIRST + 76]), "+f"(d[FIRST + 77]), "+f"(d[FIRST + 78]), "+f"(d[FIRST + 79]),
              "+f"(d[FIRST + 80]), "+f"(d[FIRST + 81]), "+f"(d[FIRST + 82]), "+f"(d[FIRST + 83]), "+f"(d[FIRST + 84]),
              "+f"(d[FIRST + 85]), "+f"(d[FIRST + 86]), "+f"(d[FIRST + 87]), "+f"(d[FIRST + 88]), "+f"(d[FIRST + 89]),
              "+f"(d[FIRST + 90]), "+f"(d[FIRST + 91]), "+f"(d[FIRST + 92]), "+f"(d[FIRST + 93]), "+f"(d[FIRST + 94]),
              "+f"(d[FIRST + 95])
            : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));
    }
};

template <>
struct Wgmma<Bf16, 208> {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %106, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n208k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
            "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, "
            "%65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, "
            "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103"
            "}, %104, %105, adds, 1, 1, %107, %108;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]), "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]),
              "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]),
              "+f"(d[FIRST + 15]), "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
              "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]), "+f"(d[FIRST + 24]),
              "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]), "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]),
              "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31]), "+f"(d[FIRST + 32]), "+f"(d[FIRST + 33]), "+f"(d[FIRST + 34]),
              "+f"(d[FIRST + 35]), "+f"(d[FIRST + 36]), "+f"(d[FIRST + 37]), "+f"(d[FIRST + 38]), "+f"(d[FIRST + 39]),
              "+f"(d[FIRST + 40]), "+f"(d[FIRST + 41]), "+f"(d[FIRST + 42]), "+f"(d[FIRST + 43]), "+f"(d[FIRST + 44]),
              "+f"(d[FIRST + 45]), "+f"(d[FIRST + 46]), "+f"(d[FIRST + 47]), "+f"(d[FIRST + 48]), "+f"(d[FIRST + 49]),
              "+f"(d[FIRST + 50]), "+f"(d[FIRST + 51]), "+f"(d[FIRST + 52]), "+f"(d[FIRST + 53]), "+f"(d[FIRST + 54]),
              "+f"(d[FIRST + 55]), "+f"(d[FIRST + 56]), "+f"(d[FIRST + 57]), "+f"(d[FIRST + 58]), "+f"(d[FIRST + 59]),
              "+f"(d[FIRST + 60]), "+f"(d[FIRST + 61]), "+f"(d[FIRST + 62]), "+f"(d[FIRST + 63]), "+f"(d[FIRST + 64]),
              "+f"(d[FIRST + 65]), "+f"(d[FIRST + 66]), "+f"(d[FIRST + 67]), "+f"(d[FIRST + 68]), "+f"(d[FIRST + 69]),
              "+f"(d[FIRST + 70]), "+f"(d[FIRST + 71]), "+f"(d[FIRST + 72]), "+f"(d[FIRST + 73]), "+f"(d[FIRST + 74]),
              "+f"(d[FIRST + 75]), "+f"(d[FIRST + 76]), "+f"(d[FIRST + 77]), "+f"(d[FIRST + 78]), "+f"(d[FIRST + 79]),
              "+f"(d[FIRST + 80]), "+f"(d[FIRST + 81]), "+f"(d[FIRST + 82]), "+f"(d[FIRST + 83]), "+f"(d[FIRST + 84]),
              "+f"(d[FIRST + 85]), "+f"(d[FIRST + 86]), "+f"(d[FIRST + 87]), "+f"(d[FIRST + 88]), "+f"(d[FIRST + 89]),
              "+f"(d[FIRST + 90]), "+f"(d[FIRST + 91]), "+f"(d[FIRST + 92]), "+f"(d[FIRST + 93]), "+f"(d[FIRST + 94]),
              "+f"(d[FIRST + 95]), "+f"(d[FIRST + 96]), "+f"(d[FIRST + 97]), "+f"(d[FIRST + 98]), "+f"(d[FIRST + 99]),
              "+f"(d[FIRST + 100]), "+f"(d[FIRST + 101]), "+f"(d[FIRST + 102]), "+f"(d[FIRST + 103])
            : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));
    }
};

template <>
struct Wgmma<Bf16, 224> {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %114, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n224k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
            "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, "
            "%65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, "
            "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, "
            "%105, %106, %107, %108, %109, %110, %111"
            "}, %112, %113, adds, 1, 1, %115, %116;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]), "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]),
              "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]),
              "+f"(d[FIRST + 15]), "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
              "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]), "+f"(d[FIRST + 24]),
              "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]), "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]),
              "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31]), "+f"(d[FIRST + 32]), "+f"(d[FIRST + 33]), "+f"(d[FIRST + 34]),
              "+f"(d[FIRST + 35]), "+f"(d[FIRST + 36]), "+f"(d[FIRST + 37]), "+f"(d[FIRST + 38]), "+f"(d[FIRST + 39]),
              "+f"(d[FIRST + 40]), "+f"(d[FIRST + 41]), "+f"(d[FIRST + 42]), "+f"(d[FIRST + 43]), "+f"(d[FIRST + 44]),
              "+f"(d[FIRST + 45]), "+f"(d[FIRST + 46]), "+f"(d[FIRST + 47]), "+f"(d[FIRST + 48]), "+f"(d[FIRST + 49]),
              "+f"(d[FIRST + 50]), "+f"(d[FIRST + 51]), "+f"(d[FIRST + 52]), "+f"(d[FIRST + 53]), "+f"(d[FIRST + 54]),
              "+f"(d[FIRST + 55]), "+f"(d[FIRST + 56]), "+f"(d[FIRST + 57]), "+f"(d[FIRST + 58]), "+f"(d[FIRST + 59]),
              "+f"(d[FIRST + 60]), "+f"(d[FIRST + 61]), "+f"(d[FIRST + 62]), "+f"(d[FIRST + 63]), "+f"(d[FIRST + 64]),
              "+f"(d[FIRST + 65]), "+f"(d[FIRST + 66]), "+f"(d[FIRST + 67]), "+f"(d[FIRST + 68]), "+f"(d[FIRST + 69]),
              "+f"(d[FIRST + 70]), "+f"(d[FIRST + 71]), "+f"(d[FIRST + 72]), "+f"(d[FIRST + 73]), "+f"(d[FIRST + 74]),
              "+f"(d[FIRST + 75]), "+f"(d[FIRST + 76]), "+f"(d[FIRST + 77]), "+f"(d[FIRST + 78]), "+f"(d[FIRST + 79]),
              "+f"(d[FIRST + 80]), "+f"(d[FIRST + 81]), "+f"(d[FIRST + 82]), "+f"(d[FIRST + 83]), "+f"(d[FIRST + 84]),
              "+f"(d[FIRST + 85]), "+f"(d[FIRST + 86]), "+f"(d[FIRST + 87]), "+f"(d[FIRST + 88]), "+f"(d[FIRST + 89]),
              "+f"(d[FIRST + 90]), "+f"(d[FIRST + 91]), "+f"(d[FIRST + 92]), "+f"(d[FIRST + 93]), "+f"(d[FIRST + 94]),
              "+f"(d[FIRST + 95]), "+f"(d[FIRST + 96]), "+f"(d[FIRST + 97]), "+f"(d[FIRST + 98]), "+f"(d[FIRST + 99]),
              "+f"(d[FIRST + 100]), "+f"(d[FIRST + 101]), "+f"(d[FIRST + 102]), "+f"(d[FIRST + 103]), "+f"(d[FIRST +
              104]), "+f"(d[FIRST + 105]), "+f"(d[FIRST + 106]), "+f"(d[FIRST + 107]), "+f"(d[FIRST + 108]),
              "+f"(d[FIRST + 109]), "+f"(d[FIRST + 110]), "+f"(d[FIRST + 111])
            : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));
    }
};

template <>
struct Wgmma<Bf16, 240> {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %122, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n240k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
            "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, "
            "%65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, "
            "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, "
            "%105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119"
            "}, %120, %121, adds, 1, 1, %123, %124;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]), "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]),
              "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]),
              "+f"(d[FIRST + 15]), "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
              "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]), "+f"(d[FIRST + 24]),
              "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]), "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]),
              "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31]), "+f"(d[FIRST + 32]), "+f"(d[FIRST + 33]), "+f"(d[FIRST + 34]),
              "+f"(d[FIRST + 35]), "+f"(d[FIRST + 36]), "+f"(d[FIRST + 37]), "+f"(d[FIRST + 38]), "+f"(d[FIRST + 39]),
              "+f"(d[FIRST + 40]), "+f"(d[FIRST + 41]), "+f"(d[FIRST + 42]), "+f"(d[FIRST + 43]), "+f"(d[FIRST + 44]),
              "+f"(d[FIRST + 45]), "+f"(d[FIRST + 46]), "+f"(d[FIRST + 47]), "+f"(d[FIRST + 48]), "+f"(d[FIRST + 49]),
              "+f"(d[FIRST + 50]), "+f"(d[FIRST + 51]), "+f"(d[FIRST + 52]), "+f"(d[FIRST + 53]), "+f"(d[FIRST + 54]),
              "+f"(d[FIRST + 55]), "+f"(d[FIRST + 56]), "+f"(d[FIRST + 57]), "+f"(d[FIRST + 58]), "+f"(d[FIRST + 59]),
              "+f"(d[FIRST + 60]), "+f"(d[FIRST + 61]), "+f"(d[FIRST + 62]), "+f"(d[FIRST + 63]), "+f"(d[FIRST + 64]),
              "+f"(d[FIRST + 65]), "+f"(d[FIRST + 66]), "+f"(d[FIRST + 67]), "+f"(d[FIRST + 68]), "+f"(d[FIRST + 69]),
              "+f"(d[FIRST + 70]), "+f"(d[FIRST + 71]), "+f"(d[FIRST + 72]), "+f"(d[FIRST + 73]), "+f"(d[FIRST + 74]),
              "+f"(d[FIRST + 75]), "+f"(d[FIRST + 76]), "+f"(d[FIRST + 77]), "+f"(d[FIRST + 78]), "+f"(d[FIRST + 79]),
              "+f"(d[FIRST + 80]), "+f"(d[FIRST + 81]), "+f"(d[FIRST + 82]), "+f"(d[FIRST + 83]), "+f"(d[FIRST + 84]),
              "+f"(d[FIRST + 85]), "+f"(d[FIRST + 86]), "+f"(d[FIRST + 87]), "+f"(d[FIRST + 88]), "+f"(d[FIRST + 89]),
              "+f"(d[FIRST + 90]), "+f"(d[FIRST + 91]), "+f"(d[FIRST + 92]), "+f"(d[FIRST + 93]), "+f"(d[FIRST + 94]),
              "+f"(d[FIRST + 95]), "+f"(d[FIRST + 96]), "+f"(d[FIRST + 97]), "+f"(d[FIRST + 98]), "+f"(d[FIRST + 99]),
              "+f"(d[FIRST + 100]), "+f"(d[FIRST + 101]), "+f"(d[FIRST + 102]), "+f"(d[FIRST + 103]), "+f"(d[FIRST +
              104]), "+f"(d[FIRST + 105]), "+f"(d[FIRST + 106]), "+f"(d[FIRST + 107]), "+f"(d[FIRST + 108]),
              "+f"(d[FIRST + 109]), "+f"(d[FIRST + 110]), "+f"(d[FIRST + 111]), "+f"(d[FIRST + 112]), "+f"(d[FIRST +
              113]), "+f"(d[FIRST + 114]), "+f"(d[FIRST + 115]), "+f"(d[FIRST + 116]), "+f"(d[FIRST + 117]),
              "+f"(d[FIRST + 118]), "+f"(d[FIRST + 119])
            : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));
    }
};

template <>
struct Wgmma<Bf16, 256> {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %130, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
            "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, "
            "%65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, "
            "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, "
            "%105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, "
            "%122, %123, %124, %125, %126, %127"
            "}, %128, %129, adds, 1, 1, %131, %132;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]), "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]),
              "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]),
              "+f"(d[FIRST + 15]), "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
              "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]), "+f"(d[FIRST + 24]),
              "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]), "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]),
              "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31]), "+f"(d[FIRST + 32]), "+f"(d[FIRST + 33]), "+f"(d[FIRST + 34]),
              "+f"(d[FIRST + 35]), "+f"(d[FIRST + 36]), "+f"(d[FIRST + 37]), "+f"(d[FIRST + 38]), "+f"(d[FIRST + 39]),
              "+f"(d[FIRST + 40]), "+f"(d[FIRST + 41]), "+f"(d[FIRST + 42]), "+f"(d[FIRST + 43]), "+f"(d[FIRST + 44]),
              "+f"(d[FIRST + 45]), "+f"(d[FIRST + 46]), "+f"(d[FIRST + 47]), "+f"(d[FIRST + 48]), "+f"(d[FIRST + 49]),
              "+f"(d[FIRST + 50]), "+f"(d[FIRST + 51]), "+f"(d[FIRST + 52]), "+f"(d[FIRST + 53]), "+f"(d[FIRST + 54]),
              "+f"(d[FIRST + 55]), "+f"(d[FIRST + 56]), "+f"(d[FIRST + 57]), "+f"(d[FIRST + 58]), "+f"(d[FIRST + 59]),
              "+f"(d[FIRST + 60]), "+f"(d[FIRST + 61]), "+f"(d[FIRST + 62]), "+f"(d[FIRST + 63]), "+f"(d[FIRST + 64]),
              "+f"(d[FIRST + 65]), "+f"(d[FIRST + 66]), "+f"(d[FIRST + 67]), "+f"(d[FIRST + 68]), "+f"(d[FIRST + 69]),
              "+f"(d[FIRST + 70]), "+f"(d[FIRST + 71]), "+f"(d[FIRST + 72]), "+f"(d[FIRST + 73]), "+f"(d[FIRST + 74]),
              "+f"(d[FIRST + 75]), "+f"(d[FIRST + 76]), "+f"(d[FIRST + 77]), "+f"(d[FIRST + 78]), "+f"(d[FIRST + 79]),
              "+f"(d[FIRST + 80]), "+f"(d[FIRST + 81]), "+f"(d[FIRST + 82]), "+f"(d[FIRST + 83]), "+f"(d[FIRST + 84]),
              "+f"(d[FIRST + 85]), "+f"(d[FIRST + 86]), "+f"(d[FIRST + 87]), "+f"(d[FIRST + 88]), "+f"(d[FIRST + 89]),
              "+f"(d[FIRST + 90]), "+f"(d[FIRST + 91]), "+f"(d[FIRST + 92]), "+f"(d[FIRST + 93]), "+f"(d[FIRST + 94]),
              "+f"(d[FIRST + 95]), "+f"(d[FIRST + 96]), "+f"(d[FIRST + 97]), "+f"(d[FIRST + 98]), "+f"(d[FIRST + 99]),
              "+f"(d[FIRST + 100]), "+f"(d[FIRST + 101]), "+f"(d[FIRST + 102]), "+f"(d[FIRST + 103]), "+f"(d[FIRST +
              104]), "+f"(d[FIRST + 105]), "+f"(d[FIRST + 106]), "+f"(d[FIRST + 107]), "+f"(d[FIRST + 108]),
              "+f"(d[FIRST + 109]), "+f"(d[FIRST + 110]), "+f"(d[FIRST + 111]), "+f"(d[FIRST + 112]), "+f"(d[FIRST +
              113]), "+f"(d[FIRST + 114]), "+f"(d[FIRST + 115]), "+f"(d[FIRST + 116]), "+f"(d[FIRST + 117]),
              "+f"(d[FIRST + 118]), "+f"(d[FIRST + 119]), "+f"(d[FIRST + 120]), "+f"(d[FIRST + 121]), "+f"(d[FIRST +
              122]), "+f"(d[FIRST + 123]), "+f"(d[FIRST + 124]), "+f"(d[FIRST + 125]), "+f"(d[FIRST + 126]),
              "+f"(d[FIRST + 127])
            : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));
    }
};

template <>
struct Wgmma<Fp16, 16> {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %10, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7"
            "}, %8, %9, adds, 1, 1, %11, %12;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7])
            : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));
    }
};

template <>
struct Wgmma<Fp16, 32> {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %18, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
            "}, %16, %17, adds, 1, 1, %19, %20;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]), "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]),
              "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]),
              "+f"(d[FIRST + 15])
            : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));
    }
};

template <>
struct Wgmma<Fp16, 48> {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %26, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23"
            "}, %24, %25, adds, 1, 1, %27, %28;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]), "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]),
              "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]),
              "+f"(d[FIRST + 15]), "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
              "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23])
            : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));
    }
};

template <>
struct Wgmma<Fp16, 64> {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %34, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31"
            "}, %32, %33, adds, 1, 1, %35, %36;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]), "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]),
              "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]),
              "+f"(d[FIRST + 15]), "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
              "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]), "+f"(d[FIRST + 24]),
              "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]), "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]),
              "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31])
            : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));
    }
};

template <>
struct Wgmma<Fp16, 80> {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %42, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39"
            "}, %40, %41, adds, 1, 1, %43, %44;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]), "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]),
              "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]),
              "+f"(d[FIRST + 15]), "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
              "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]), "+f"(d[FIRST + 24]),
              "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]), "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]),
              "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31]), "+f"(d[FIRST + 32]), "+f"(d[FIRST + 33]), "+f"(d[FIRST + 34]),
              "+f"(d[FIRST + 35]), "+f"(d[FIRST + 36]), "+f"(d[FIRST + 37]), "+f"(d[FIRST + 38]), "+f"(d[FIRST + 39])
            : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));
    }
};

template <>
struct Wgmma<Fp16, 96> {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %50, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
            "%44, %45, %46, %47"
            "}, %48, %49, adds, 1, 1, %51, %52;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]), "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]),
              "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]),
              "+f"(d[FIRST + 15]), "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
              "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]), "+f"(d[FIRST + 24]),
              "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]), "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]),
              "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31]), "+f"(d[FIRST + 32]), "+f"(d[FIRST + 33]), "+f"(d[FIRST + 34]),
              "+f"(d[FIRST + 35]), "+f"(d[FIRST + 36]), "+f"(d[FIRST + 37]), "+f"(d[FIRST + 38]), "+f"(d[FIRST + 39]),
              "+f"(d[FIRST + 40]), "+f"(d[FIRST + 41]), "+f"(d[FIRST + 42]), "+f"(d[FIRST + 43]), "+f"(d[FIRST + 44]),
              "+f"(d[FIRST + 45]), "+f"(d[FIRST + 46]), "+f"(d[FIRST + 47])
            : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));
    }
};

template <>
struct Wgmma<Fp16, 112> {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %58, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n112k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
            "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55"
            "}, %56, %57, adds, 1, 1, %59, %60;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]), "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]),
              "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]),
              "+f"(d[FIRST + 15]), "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
              "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]), "+f"(d[FIRST + 24]),
              "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]), "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]),
              "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31]), "+f"(d[FIRST + 32]), "+f"(d[FIRST + 33]), "+f"(d[FIRST + 34]),
              "+f"(d[FIRST + 35]), "+f"(d[FIRST + 36]), "+f"(d[FIRST + 37]), "+f"(d[FIRST + 38]), "+f"(d[FIRST + 39]),
              "+f"(d[FIRST + 40]), "+f"(d[FIRST + 41]), "+f"(d[FIRST + 42]), "+f"(d[FIRST + 43]), "+f"(d[FIRST + 44]),
              "+f"(d[FIRST + 45]), "+f"(d[FIRST + 46]), "+f"(d[FIRST + 47]), "+f"(d[FIRST + 48]), "+f"(d[FIRST + 49]),
              "+f"(d[FIRST + 50]), "+f"(d[FIRST + 51]), "+f"(d[FIRST + 52]), "+f"(d[FIRST + 53]), "+f"(d[FIRST + 54]),
              "+f"(d[FIRST + 55])
            : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));
    }
};

template <>
struct Wgmma<Fp16, 128> {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %66, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
            "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
            "}, %64, %65, adds, 1, 1, %67, %68;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]), "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]),
              "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]),
              "+f"(d[FIRST + 15]), "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
              "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]), "+f"(d[FIRST + 24]),
              "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]), "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]),
              "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31]), "+f"(d[FIRST + 32]), "+f"(d[FIRST + 33]), "+f"(d[FIRST + 34]),
              "+f"(d[FIRST + 35]), "+f"(d[FIRST + 36]), "+f"(d[FIRST + 37]), "+f"(d[FIRST + 38]), "+f"(d[FIRST + 39]),
              "+f"(d[FIRST + 40]), "+f"(d[FIRST + 41]), "+f"(d[FIRST + 42]), "+f"(d[FIRST + 43]), "+f"(d[FIRST + 44]),
              "+f"(d[FIRST + 45]), "+f"(d[FIRST + 46]), "+f"(d[FIRST + 47]), "+f"(d[FIRST + 48]), "+f"(d[FIRST + 49]),
              "+f"(d[FIRST + 50]), "+f"(d[FIRST + 51]), "+f"(d[FIRST + 52]), "+f"(d[FIRST + 53]), "+f"(d[FIRST + 54]),
              "+f"(d[FIRST + 55]), "+f"(d[FIRST + 56]), "+f"(d[FIRST + 57]), "+f"(d[FIRST + 58]), "+f"(d[FIRST + 59]),
              "+f"(d[FIRST + 60]), "+f"(d[FIRST + 61]), "+f"(d[FIRST + 62]), "+f"(d[FIRST + 63])
            : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));
    }
};

template <>
struct Wgmma<Fp16, 144> {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %74, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n144k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
            "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, "
            "%65, %66, %67, %68, %69, %70, %71"
            "}, %72, %73, adds, 1, 1, %75, %76;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]), "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]),
              "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]),
              "+f"(d[FIRST + 15]), "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
              "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]), "+f"(d[FIRST + 24]),
              "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]), "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]),
              "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31]), "+f"(d[FIRST + 32]), "+f"(d[FIRST + 33]), "+f"(d[FIRST + 34]),
              "+f"(d[FIRST + 35]), "+f"(d[FIRST + 36]), "+f"(d[FIRST + 37]), "+f"(d[FIRST + 38]), "+f"(d[FIRST + 39]),
              "+f"(d[FIRST + 40]), "+f"(d[FIRST + 41]), "+f"(d[FIRST + 42]), "+f"(d[FIRST + 43]), "+f"(d[FIRST + 44]),
              "+f"(d[FIRST + 45]), "+f"(d[FIRST + 46]), "+f"(d[FIRST + 47]), "+f"(d[FIRST + 48]), "+f"(d[FIRST + 49]),
              "+f"(d[FIRST + 50]), "+f"(d[FIRST + 51]), "+f"(d[FIRST + 52]), "+f"(d[FIRST + 53]), "+f"(d[FIRST + 54]),
              "+f"(d[FIRST + 55]), "+f"(d[FIRST + 56]), "+f"(d[FIRST + 57]), "+f"(d[FIRST + 58]), "+f"(d[FIRST + 59]),
              "+f"(d[FIRST + 60]), "+f"(d[FIRST + 61]), "+f"(d[FIRST + 62]), "+f"(d[FIRST + 63]), "+f"(d[FIRST + 64]),
              "+f"(d[FIRST + 65]), "+f"(d[FIRST + 66]), "+f"(d[FIRST + 67]), "+f"(d[FIRST + 68]), "+f"(d[FIRST + 69]),
              "+f"(d[FIRST + 70]), "+f"(d[FIRST + 71])
            : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));
    }
};

template <>
struct Wgmma<Fp16, 160> {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %82, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n160k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
            "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, "
            "%65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
            "}, %80, %81, adds, 1, 1, %83, %84;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]), "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]),
              "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]),
              "+f"(d[FIRST + 15]), "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
              "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]), "+f"(d[FIRST + 24]),
              "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]), "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]),
              "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31]), "+f"(d[FIRST + 32]), "+f"(d[FIRST + 33]), "+f"(d[FIRST + 34]),
              "+f"(d[FIRST + 35]), "+f"(d[FIRST + 36]), "+f"(d[FIRST + 37]), "+f"(d[FIRST + 38]), "+f"(d[FIRST + 39]),
              "+f"(d[FIRST + 40]), "+f"(d[FIRST + 41]), "+f"(d[FIRST + 42]), "+f"(d[FIRST + 43]), "+f"(d[FIRST + 44]),
              "+f"(d[FIRST + 45]), "+f"(d[FIRST + 46]), "+f"(d[FIRST + 47]), "+f"(d[FIRST + 48]), "+f"(d[FIRST + 49]),
              "+f"(d[FIRST + 50]), "+f"(d[FIRST + 51]), "+f"(d[FIRST + 52]), "+f"(d[FIRST + 53]), "+f"(d[FIRST + 54]),
              "+f"(d[FIRST + 55]), "+f"(d[FIRST + 56]), "+f"(d[FIRST + 57]), "+f"(d[FIRST + 58]), "+f"(d[FIRST + 59]),
              "+f"(d[FIRST + 60]), "+f"(d[FIRST + 61]), "+f"(d[FIRST + 62]), "+f"(d[FIRST + 63]), "+f"(d[FIRST + 64]),
              "+f"(d[FIRST + 65]), "+f"(d[FIRST + 66]), "+f"(d[FIRST + 67]), "+f"(d[FIRST + 68]), "+f"(d[FIRST + 69]),
              "+f"(d[FIRST + 70]), "+f"(d[FIRST + 71]), "+f"(d[FIRST + 72]), "+f"(d[FIRST + 73]), "+f"(d[FIRST + 74]),
              "+f"(d[FIRST + 75]), "+f"(d[FIRST + 76]), "+f"(d[FIRST + 77]), "+f"(d[FIRST + 78]), "+f"(d[FIRST + 79])
            : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));
    }
};

template <>
struct Wgmma<Fp16, 176> {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %90, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n176k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
            "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, "
            "%65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, "
            "%86, %87"
            "}, %88, %89, adds, 1, 1, %91, %92;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]), "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]),
              "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]),
              "+f"(d[FIRST + 15]), "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
              "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]), "+f"(d[FIRST + 24]),
              "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]), "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]),
              "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31]), "+f"(d[FIRST + 32]), "+f"(d[FIRST + 33]), "+f"(d[FIRST + 34]),
              "+f"(d[FIRST + 35]), "+f"(d[FIRST + 36]), "+f"(d[FIRST + 37]), "+f"(d[FIRST + 38]), "+f"(d[FIRST + 39]),
              "+f"(d[FIRST + 40]), "+f"(d[FIRST + 41]), "+f"(d[FIRST + 42]), "+f"(d[FIRST + 43]), "+f"(d[FIRST + 44]),
              "+f"(d[FIRST + 45]), "+f"(d[FIRST + 46]), "+f"(d[FIRST + 47]), "+f"(d[FIRST + 48]), "+f"(d[FIRST + 49]),
              "+f"(d[FIRST + 50]), "+f"(d[FIRST + 51]), "+f"(d[FIRST + 52]), "+f"(d[FIRST + 53]), "+f"(d[FIRST + 54]),
              "+f"(d[FIRST + 55]), "+f"(d[FIRST + 56]), "+f"(d[FIRST + 57]), "+f"(d[FIRST + 58]), "+f"(d[FIRST + 59]),
              "+f"(d[FIRST + 60]), "+f"(d[FIRST + 61]), "+f"(d[FIRST + 62]), "+f"(d[FIRST + 63]), "+f"(d[FIRST + 64]),
              "+f"(d[FIRST + 65]), "+f"(d[FIRST + 66]), "+f"(d[FIRST + 67]), "+f"(d[FIRST + 68]), "+f"(d[FIRST + 69]),
              "+f"(d[FIRST + 70]), "+f"(d[FIRST + 71]), "+f"(d[FIRST + 72]), "+f"(d[FIRST + 73]), "+f"(d[FIRST + 74]),
              "+f"(d[FIRST + 75]), "+f"(d[FIRST + 76]), "+f"(d[FIRST + 77]), "+f"(d[FIRST + 78]), "+f"(d[FIRST + 79]),
              "+f"(d[FIRST + 80]), "+f"(d[FIRST + 81]), "+f"(d[FIRST + 82]), "+f"(d[FIRST + 83]), "+f"(d[FIRST + 84]),
              "+f"(d[FIRST + 85]), "+f"(d[FIRST + 86]), "+f"(d[FIRST + 87])
            : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));
    }
};

template <>
struct Wgmma<Fp16, 192> {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %98, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
            "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, "
            "%65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, "
            "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
            "}, %96, %97, adds, 1, 1, %99, %100;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]), "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]),
              "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]),
              "+f"(d[FIRST + 15]), "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
              "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]), "+f"(d[FIRST + 24]),
              "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]), "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]),
              "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31]), "+f"(d[FIRST + 32]), "+f"(d[FIRST + 33]), "+f"(d[FIRST + 34]),
              "+f"(d[FIRST + 35]), "+f"(d[FIRST + 36]), "+f"(d[FIRST + 37]), "+f"(d[FIRST + 38]), "+f"(d[FIRST + 39]),
              "+f"(d[FIRST + 40]), "+f"(d[FIRST + 41]), "+f"(d[FIRST + 42]), "+f"(d[FIRST + 43]), "+f"(d[FIRST + 44]),
              "+f"(d[FIRST + 45]), "+f"(d[FIRST + 46]), "+f"(d[FIRST + 47]), "+f"(d[FIRST + 48]), "+f"(d[FIRST + 49]),
              "+f"(d[FIRST + 50]), "+f"(d[FIRST + 51]), "+f"(d[FIRST + 52]), "+f"(d[FIRST + 53]), "+f"(d[FIRST + 54]),
              "+f"(d[FIRST + 55]), "+f"(d[FIRST + 56]), "+f"(d[FIRST + 57]), "+f"(d[FIRST + 58]), "+f"(d[FIRST + 59]),
              "+f"(d[FIRST + 60]), "+f"(d[FIRST + 61]), "+f"(d[FIRST + 62]), "+f"(d[FIRST + 63]), "+f"(d[FIRST + 64]),
              "+f"(d[FIRST + 65]), "+f"(d[FIRST + 66]), "+f"(d[FIRST + 67]), "+f"(d[FIRST + 68]), "+f"(d[FIRST + 69]),
              "+f"(d[FIRST + 70]), "+f"(d[FIRST + 71]), "+f"(d[FIRST + 72]), "+f"(d[FIRST + 73]), "+f"(d[FIRST + 74]),
              "+f"(d[FIRST + 75]), "+f"(d[FIRST + 76]), "+f"(d[FIRST + 77]), "+f"(d[FIRST + 78]), "+f"(d[FIRST + 79]),
              "+f"(d[FIRST + 80]), "+f"(d[FIRST + 81]), "+f"(d[FIRST + 82]), "+f"(d[FIRST + 83]), "+f"(d[FIRST + 84]),
              "+f"(d[FIRST + 85]), "+f"(d[FIRST + 86]), "+f"(d[FIRST + 87]), "+f"(d[FIRST + 88]), "+f"(d[FIRST + 89]),
              "+f"(d[FIRST + 90]), "+f"(d[FIRST + 91]), "+f"(d[FIRST + 92]), "+f"(d[FIRST + 93]), "+f"(d[FIRST + 94]),
              "+f"(d[FIRST + 95])
            : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));
    }
};

template <>
struct Wgmma<Fp16, 208> {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %106, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n208k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
            "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, "
            "%65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, "
            "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103"
            "}, %104, %105, adds, 1, 1, %107, %108;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]), "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]),
              "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]),
              "+f"(d[FIRST + 15]), "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
              "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]), "+f"(d[FIRST + 24]),
              "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]), "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]),
              "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31]), "+f"(d[FIRST + 32]), "+f"(d[FIRST + 33]), "+f"(d[FIRST + 34]),
              "+f"(d[FIRST + 35]), "+f"(d[FIRST + 36]), "+f"(d[FIRST + 37]), "+f"(d[FIRST + 38]), "+f"(d[FIRST + 39]),
              "+f"(d[FIRST + 40]), "+f"(d[FIRST + 41]), "+f"(d[FIRST + 42]), "+f"(d[FIRST + 43]), "+f"(d[FIRST + 44]),
              "+f"(d[FIRST + 45]), "+f"(d[FIRST + 46]), "+f"(d[FIRST + 47]), "+f"(d[FIRST + 48]), "+f"(d[FIRST + 49]),
              "+f"(d[FIRST + 50]), "+f"(d[FIRST + 51]), "+f"(d[FIRST + 52]), "+f"(d[FIRST + 53]), "+f"(d[FIRST + 54]),
              "+f"(d[FIRST + 55]), "+f"(d[FIRST + 56]), "+f"(d[FIRST + 57]), "+f"(d[FIRST + 58]), "+f"(d[FIRST + 59]),
              "+f"(d[FIRST + 60]), "+f"(d[FIRST + 61]), "+f"(d[FIRST + 62]), "+f"(d[FIRST + 63]), "+f"(d[FIRST + 64]),
              "+f"(d[FIRST + 65]), "+f"(d[FIRST + 66]), "+f"(d[FIRST + 67]), "+f"(d[FIRST + 68]), "+f"(d[FIRST + 69]),
              "+f"(d[FIRST + 70]), "+f"(d[FIRST + 71]), "+f"(d[FIRST + 72]), "+f"(d[FIRST + 73]), "+f"(d[FIRST + 74]),
              "+f"(d[FIRST + 75]), "+f"(d[FIRST + 76]), "+f"(d[FIRST + 77]), "+f"(d[FIRST + 78]), "+f"(d[FIRST + 79]),
              "+f"(d[FIRST + 80]), "+f"(d[FIRST + 81]), "+f"(d[FIRST + 82]), "+f"(d[FIRST + 83]), "+f"(d[FIRST + 84]),
              "+f"(d[FIRST + 85]), "+f"(d[FIRST + 86]), "+f"(d[FIRST + 87]), "+f"(d[FIRST + 88]), "+f"(d[FIRST + 89]),
              "+f"(d[FIRST + 90]), "+f"(d[FIRST + 91]), "+f"(d[FIRST + 92]), "+f"(d[FIRST + 93]), "+f"(d[FIRST + 94]),
              "+f"(d[FIRST + 95]), "+f"(d[FIRST + 96]), "+f"(d[FIRST + 97]), "+f"(d[FIRST + 98]), "+f"(d[FIRST + 99]),
              "+f"(d[FIRST + 100]), "+f"(d[FIRST + 101]), "+f"(d[FIRST + 102]), "+f"(d[FIRST + 103])
            : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));
    }
};

template <>
struct Wgmma<Fp16, 224> {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %114, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n224k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
            "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, "
            "%65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, "
            "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, "
            "%105, %106, %107, %108, %109, %110, %111"
            "}, %112, %113, adds, 1, 1, %115, %116;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]), "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]),
              "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]),
              "+f"(d[FIRST + 15]), "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
              "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]), "+f"(d[FIRST + 24]),
              "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]), "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]),
              "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31]), "+f"(d[FIRST + 32]), "+f"(d[FIRST + 33]), "+f"(d[FIRST + 34]),
              "+f"(d[FIRST + 35]), "+f"(d[FIRST + 36]), "+f"(d[FIRST + 37]), "+f"(d[FIRST + 38]), "+f"(d[FIRST + 39]),
              "+f"(d[FIRST + 40]), "+f"(d[FIRST + 41]), "+f"(d[FIRST + 42]), "+f"(d[FIRST + 43]), "+f"(d[FIRST + 44]),
              "+f"(d[FIRST + 45]), "+f"(d[FIRST + 46]), "+f"(d[FIRST + 47]), "+f"(d[FIRST + 48]), "+f"(d[FIRST + 49]),
              "+f"(d[FIRST + 50]), "+f"(d[FIRST + 51]), "+f"(d[FIRST + 52]), "+f"(d[FIRST + 53]), "+f"(d[FIRST + 54]),
              "+f"(d[FIRST + 55]), "+f"(d[FIRST + 56]), "+f"(d[FIRST + 57]), "+f"(d[FIRST + 58]), "+f"(d[FIRST + 59]),
              "+f"(d[FIRST + 60]), "+f"(d[FIRST + 61]), "+f"(d[FIRST + 62]), "+f"(d[FIRST + 63]), "+f"(d[FIRST + 64]),
              "+f"(d[FIRST + 65]), "+f"(d[FIRST + 66]), "+f"(d[FIRST + 67]), "+f"(d[FIRST + 68]), "+f"(d[FIRST + 69]),
              "+f"(d[FIRST + 70]), "+f"(d[FIRST + 71]), "+f"(d[FIRST + 72]), "+f"(d[FIRST + 73]), "+f"(d[FIRST + 74]),
              "+f"(d[FIRST + 75]), "+f"(d[FIRST + 76]), "+f"(d[FIRST + 77]), "+f"(d[FIRST + 78]), "+f"(d[FIRST + 79]),
              "+f"(d[FIRST + 80]), "+f"(d[FIRST + 81]), "+f"(d[FIRST + 82]), "+f"(d[FIRST + 83]), "+f"(d[FIRST + 84]),
              "+f"(d[FIRST + 85]), "+f"(d[FIRST + 86]), "+f"(d[FIRST + 87]), "+f"(d[FIRST + 88]), "+f"(d[FIRST + 89]),
              "+f"(d[FIRST + 90]), "+f"(d[FIRST + 91]), "+f"(d[FIRST + 92]), "+f"(d[FIRST + 93]), "+f"(d[FIRST + 94]),
              "+f"(d[FIRST + 95]), "+f"(d[FIRST + 96]), "+f"(d[FIRST + 97]), "+f"(d[FIRST + 98]), "+f"(d[FIRST + 99]),
              "+f"(d[FIRST + 100]), "+f"(d[FIRST + 101]), "+f"(d[FIRST + 102]), "+f"(d[FIRST + 103]), "+f"(d[FIRST +
              104]), "+f"(d[FIRST + 105]), "+f"(d[FIRST + 106]), "+f"(d[FIRST + 107]), "+f"(d[FIRST + 108]),
              "+f"(d[FIRST + 109]), "+f"(d[FIRST + 110]), "+f"(d[FIRST + 111])
            : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));
    }
};

template <>
struct Wgmma<Fp16, 240> {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %122, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n240k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
            "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, "
            "%65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, "
            "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, "
            "%105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119"
            "}, %120, %121, adds, 1, 1, %123, %124;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]), "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]),
              "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]),
              "+f"(d[FIRST + 15]), "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
              "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]), "+f"(d[FIRST + 24]),
              "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]), "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]),
              "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31]), "+f"(d[FIRST + 32]), "+f"(d[FIRST + 33]), "+f"(d[FIRST + 34]),
              "+f"(d[FIRST + 35]), "+f"(d[FIRST + 36]), "+f"(d[FIRST + 37]), "+f"(d[FIRST + 38]), "+f"(d[FIRST + 39]),
              "+f"(d[FIRST + 40]), "+f"(d[FIRST + 41]), "+f"(d[FIRST + 42]), "+f"(d[FIRST + 43]), "+f"(d[FIRST + 44]),
              "+f"(d[FIRST + 45]), "+f"(d[FIRST + 46]), "+f"(d[FIRST + 47]), "+f"(d[FIRST + 48]), "+f"(d[FIRST + 49]),
              "+f"(d[FIRST + 50]), "+f"(d[FIRST + 51]), "+f"(d[FIRST + 52]), "+f"(d[FIRST + 53]), "+f"(d[FIRST + 54]),
              "+f"(d[FIRST + 55]), "+f"(d[FIRST + 56]), "+f"(d[FIRST + 57]), "+f"(d[FIRST + 58]), "+f"(d[FIRST + 59]),
              "+f"(d[FIRST + 60]), "+f"(d[FIRST + 61]), "+f"(d[FIRST + 62]), "+f"(d[FIRST + 63]), "+f"(d[FIRST + 64]),
              "+f"(d[FIRST + 65]), "+f"(d[FIRST + 66]), "+f"(d[FIRST + 67]), "+f"(d[FIRST + 68]), "+f"(d[FIRST + 69]),
              "+f"(d[FIRST + 70]), "+f"(d[FIRST + 71]), "+f"(d[FIRST + 72]), "+f"(d[FIRST + 73]), "+f"(d[FIRST + 74]),
              "+f"(d[FIRST + 75]), "+f"(d[FIRST + 76]), "+f"(d[FIRST + 77]), "+f"(d[FIRST + 78]), "+f"(d[FIRST + 79]),
              "+f"(d[FIRST + 80]), "+f"(d[FIRST + 81]), "+f"(d[FIRST + 82]), "+f"(d[FIRST + 83]), "+f"(d[FIRST + 84]),
              "+f"(d[FIRST + 85]), "+f"(d[FIRST + 86]), "+f"(d[FIRST + 87]), "+f"(d[FIRST + 88]), "+f"(d[FIRST + 89]),
              "+f"(d[FIRST + 90]), "+f"(d[FIRST + 91]), "+f"(d[FIRST + 92]), "+f"(d[FIRST + 93]), "+f"(d[FIRST + 94]),
              "+f"(d[FIRST + 95]), "+f"(d[FIRST + 96]), "+f"(d[FIRST + 97]), "+f"(d[FIRST + 98]), "+f"(d[FIRST + 99]),
              "+f"(d[FIRST + 100]), "+f"(d[FIRST + 101]), "+f"(d[FIRST + 102]), "+f"(d[FIRST + 103]), "+f"(d[FIRST +
              104]), "+f"(d[FIRST + 105]), "+f"(d[FIRST + 106]), "+f"(d[FIRST + 107]), "+f"(d[FIRST + 108]),
              "+f"(d[FIRST + 109]), "+f"(d[FIRST + 110]), "+f"(d[FIRST + 111]), "+f"(d[FIRST + 112]), "+f"(d[FIRST +
              113]), "+f"(d[FIRST + 114]), "+f"(d[FIRST + 115]), "+f"(d[FIRST + 116]), "+f"(d[FIRST + 117]),
              "+f"(d[FIRST + 118]), "+f"(d[FIRST + 119])
            : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));
    }
};

template <>
struct Wgmma<Fp16, 256> {
    template <bool TRANSPOSE_A, bool TRANSPOSE_B, int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %130, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
            "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, "
            "%65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, "
            "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, "
            "%105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, "
            "%122, %123, %124, %125, %126, %127"
            "}, %128, %129, adds, 1, 1, %131, %132;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]), "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]),
              "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]),
              "+f"(d[FIRST + 15]), "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
              "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]), "+f"(d[FIRST + 24]),
              "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]), "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]),
              "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31]), "+f"(d[FIRST + 32]), "+f"(d[FIRST + 33]), "+f"(d[FIRST + 34]),
              "+f"(d[FIRST + 35]), "+f"(d[FIRST + 36]), "+f"(d[FIRST + 37]), "+f"(d[FIRST + 38]), "+f"(d[FIRST + 39]),
              "+f"(d[FIRST + 40]), "+f"(d[FIRST + 41]), "+f"(d[FIRST + 42]), "+f"(d[FIRST + 43]), "+f"(d[FIRST + 44]),
              "+f"(d[FIRST + 45]), "+f"(d[FIRST + 46]), "+f"(d[FIRST + 47]), "+f"(d[FIRST + 48]), "+f"(d[FIRST + 49]),
              "+f"(d[FIRST + 50]), "+f"(d[FIRST + 51]), "+f"(d[FIRST + 52]), "+f"(d[FIRST + 53]), "+f"(d[FIRST + 54]),
              "+f"(d[FIRST + 55]), "+f"(d[FIRST + 56]), "+f"(d[FIRST + 57]), "+f"(d[FIRST + 58]), "+f"(d[FIRST + 59]),
              "+f"(d[FIRST + 60]), "+f"(d[FIRST + 61]), "+f"(d[FIRST + 62]), "+f"(d[FIRST + 63]), "+f"(d[FIRST + 64]),
              "+f"(d[FIRST + 65]), "+f"(d[FIRST + 66]), "+f"(d[FIRST + 67]), "+f"(d[FIRST + 68]), "+f"(d[FIRST + 69]),
              "+f"(d[FIRST + 70]), "+f"(d[FIRST + 71]), "+f"(d[FIRST + 72]), "+f"(d[FIRST + 73]), "+f"(d[FIRST + 74]),
              "+f"(d[FIRST + 75]), "+f"(d[FIRST + 76]), "+f"(d[FIRST + 77]), "+f"(d[FIRST + 78]), "+f"(d[FIRST + 79]),
              "+f"(d[FIRST + 80]), "+f"(d[FIRST + 81]), "+f"(d[FIRST + 82]), "+f"(d[FIRST + 83]), "+f"(d[FIRST + 84]),
              "+f"(d[FIRST + 85]), "+f"(d[FIRST + 86]), "+f"(d[FIRST + 87]), "+f"(d[FIRST + 88]), "+f"(d[FIRST + 89]),
              "+f"(d[FIRST + 90]), "+f"(d[FIRST + 91]), "+f"(d[FIRST + 92]), "+f"(d[FIRST + 93]), "+f"(d[FIRST + 94]),
              "+f"(d[FIRST + 95]), "+f"(d[FIRST + 96]), "+f"(d[FIRST + 97]), "+f"(d[FIRST + 98]), "+f"(d[FIRST + 99]),
              "+f"(d[FIRST + 100]), "+f"(d[FIRST + 101]), "+f"(d[FIRST + 102]), "+f"(d[FIRST + 103]), "+f"(d[FIRST +
              104]), "+f"(d[FIRST + 105]), "+f"(d[FIRST + 106]), "+f"(d[FIRST + 107]), "+f"(d[FIRST + 108]),
              "+f"(d[FIRST + 109]), "+f"(d[FIRST + 110]), "+f"(d[FIRST + 111]), "+f"(d[FIRST + 112]), "+f"(d[FIRST +
              113]), "+f"(d[FIRST + 114]), "+f"(d[FIRST + 115]), "+f"(d[FIRST + 116]), "+f"(d[FIRST + 117]),
              "+f"(d[FIRST + 118]), "+f"(d[FIRST + 119]), "+f"(d[FIRST + 120]), "+f"(d[FIRST + 121]), "+f"(d[FIRST +
              122]), "+f"(d[FIRST + 123]), "+f"(d[FIRST + 124]), "+f"(d[FIRST + 125]), "+f"(d[FIRST + 126]),
              "+f"(d[FIRST + 127])
            : "l"(a), "l"(b), "r"(int(adds)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));
    }
};

template <>
struct Wgmma<E4m3, 128> {
    template <int FIRST, int COUNT>
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b, bool adds) {
        asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %66, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
            "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
            "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
            "}, %64, %65, adds, 1, 1;\n}"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]), "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]),
              "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]),
              "+f"(d[FIRST + 15]), "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
              "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]), "+f"(d[FIRST + 24]),
              "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]), "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]),
              "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31]), "+f"(d[FIRST + 32]), "+f"(d[FIRST + 33]), "+f"(d[FIRST + 34]),
              "+f"(d[FIRST + 35]), "+f"(d[FIRST + 36]), "+f"(d[FIRST + 37]), "+f"(d[FIRST + 38]), "+f"(d[FIRST + 39]),
              "+f"(d[FIRST + 40]), "+f"(d[FIRST + 41]), "+f"(d[FIRST + 42]), "+f"(d[FIRST + 43]), "+f"(d[FIRST + 44]),
              "+f"(d[FIRST + 45]), "+f"(d[FIRST + 46]), "+f"(d[FIRST + 47]), "+f"(d[FIRST + 48]), "+f"(d[FIRST + 49]),
              "+f"(d[FIRST + 50]), "+f"(d[FIRST + 51]), "+f"(d[FIRST + 52]), "+f"(d[FIRST + 53]), "+f"(d[FIRST + 54]),
              "+f"(d[FIRST + 55]), "+f"(d[FIRST + 56]), "+f"(d[FIRST + 57]), "+f"(d[FIRST + 58]), "+f"(d[FIRST + 59]),
              "+f"(d[FIRST + 60]), "+f"(d[FIRST + 61]), "+f"(d[FIRST + 62]), "+f"(d[FIRST + 63])
            : "l"(a), "l"(b), "r"(int(adds)));
    }

    // For all products; from here on the thread's numbers are what they have become.
    template <int FIRST, int COUNT>
    static __device__ __forceinline__ void wait(float (&d)[COUNT]) {
        asm volatile("wgmma.wait_group.sync.aligned 0;"
            : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]),
              "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]), "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]),
              "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]),
              "+f"(d[FIRST + 15]), "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
              "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]), "+f"(d[FIRST + 24]),
              "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]), "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]),
              "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31]), "+f"(d[FIRST + 32]), "+f"(d[FIRST + 33]), "+f"(d[FIRST + 34]),
              "+f"(d[FIRST + 35]), "+f"(d[FIRST + 36]), "+f"(d[FIRST + 37]), "+f"(d[FIRST + 38]), "+f"(d[FIRST + 39]),
              "+f"(d[FIRST + 40]), "+f"(d[FIRST + 41]), "+f"(d[FIRST + 42]), "+f"(d[FIRST + 43]), "+f"(d[FIRST + 44]),
              "+f"(d[FIRST + 45]), "+f"(d[FIRST + 46]), "+f"(d[FIRST + 47]), "+f"(d[FIRST + 48]), "+f"(d[FIRST + 49]),
              "+f"(d[FIRST + 50]), "+f"(d[FIRST + 51]), "+f"(d[FIRST + 52]), "+f"(d[FIRST + 53]), "+f"(d[FIRST + 54]),
              "+f"(d[FIRST + 55]), "+f"(d[FIRST + 56]), "+f"(d[FIRST + 57]), "+f"(d[FIRST + 58]), "+f"(d[FIRST + 59]),
              "+f"(d[FIRST + 60]), "+f"(d[FIRST + 61]), "+f"(d[FIRST + 62]), "+f"(d[FIRST + 63])
            :: "memory");
    }
};

#endif
