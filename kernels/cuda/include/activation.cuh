// Activations of layer 0: hidden = activation(gate, up), by the functor that Config::Activation names.
//
// A functor is a structure with `apply`, which gets a Config and takes its parameters from it.

#ifndef COMET_ACTIVATION_CUH
#define COMET_ACTIVATION_CUH

// Gives the bits of the Triton twin in 7 instructions instead of 14: a power too small for a normal number
// vanishes in the sum, which is never below 1.
__device__ __forceinline__ float sigmoid_of(float value) {
    float power, sigmoid;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(-value, 1.4426950216293335f)));
    const float sum = __fadd_rn(power, 1.0f);
    const bool is_large = sum > 0x1p126f; // its inverse is no normal number
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(sigmoid) : "f"(is_large ? __fmul_rn(sum, 0.25f) : sum));
    return is_large ? __fmul_rn(sigmoid, 0.25f) : sigmoid;
}

// hidden = silu(gate) * up
struct Swiglu {
    template <class Config>
    static __device__ __forceinline__ float apply(float gate, float up) {
        return __fmul_rn(__fmul_rn(gate, sigmoid_of(gate)), up);
    }
};

// hidden = gelu(gate) * up, of GELU's tanh form: 0.5 * (1 + tanh(z)) is sigmoid(2 * z)
struct Geglu {
    template <class Config>
    static __device__ __forceinline__ float apply(float gate, float up) {
        constexpr float SCALE = 1.5957691216057308f, CUBIC = 0.044715f; // 2 * sqrt(2 / pi)
        const float inner = __fmul_rn(__fmul_rn(SCALE, gate), __fmaf_rn(__fmul_rn(CUBIC, gate), gate, 1.0f));
        return __fmul_rn(__fmul_rn(gate, sigmoid_of(inner)), up);
    }
};

// hidden = relu(gate) * up; a NaN stays one
struct Reglu {
    template <class Config>
    static __device__ __forceinline__ float apply(float gate, float up) {
        return __fmul_rn(gate <= 0.0f ? 0.0f : gate, up);
    }
};

// gpt-oss: hidden = g * sigmoid(ALPHA * g) * (u + 1), with g = min(gate, LIMIT) and u = up clamped to +-LIMIT
struct ClampedSwiglu {
    template <class Config>
    static __device__ __forceinline__ float apply(float gate, float up) {
        gate = gate > Config::LIMIT ? Config::LIMIT : gate;
        up = up > Config::LIMIT ? Config::LIMIT : up;
        up = up < -Config::LIMIT ? -Config::LIMIT : up;
        return __fmul_rn(__fmul_rn(gate, sigmoid_of(__fmul_rn(Config::ALPHA, gate))), __fadd_rn(up, 1.0f));
    }
};

template <class Config>
__device__ __forceinline__ float activate(float gate, float up) {
    return Config::Activation::template apply<Config>(gate, up);
}

#endif
