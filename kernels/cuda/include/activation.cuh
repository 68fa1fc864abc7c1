// Activations of layer 0: hidden = activation(gate, up), by the functor that Config::Activation names.
//
// A functor is a structure with `apply`, which gets a Config and takes its parameters from it.

#ifndef COMET_ACTIVATION_CUH
#define COMET_ACTIVATION_CUH

// hidden = silu(gate) * up
struct Swiglu {
    // As the Triton twin computes it, bit for bit, in 9 instructions instead of 16: a power too small for a normal
    // number vanishes in the sum, which is never below 1.
    template <class Config>
    static __device__ __forceinline__ float apply(float gate, float up) {
        float power, sigmoid;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(-gate, 1.4426950216293335f)));
        const float sum = __fadd_rn(power, 1.0f);
        const bool is_large = sum > 0x1p126f; // its inverse is no normal number
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(sigmoid) : "f"(is_large ? __fmul_rn(sum, 0.25f) : sum));
        if (is_large) sigmoid = __fmul_rn(sigmoid, 0.25f);
        return __fmul_rn(__fmul_rn(gate, sigmoid), up);
    }
};

template <class Config>
__device__ __forceinline__ float activate(float gate, float up) {
    return Config::Activation::template apply<Config>(gate, up);
}

#endif
