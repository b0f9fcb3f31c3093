// Division in a kernel by a multiplication and a shift: a GPU takes a chain of some fifteen instructions for one.
#pragma once

#include <cstdint>

namespace videoattn {

// A number known at launch, by which a kernel divides what is below 2^31: floor(n / d) = (n + floor(m n / 2^32)) / 2^s
// (Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994, figure 4.1).
struct Divisor {
    int32_t value;
    uint32_t multiplier;
    int32_t shift;

    Divisor() = default;
    explicit Divisor(int64_t positive) : value(static_cast<int32_t>(positive)), shift(0) {
        while (int64_t{1} << shift < positive) ++shift;
        multiplier = static_cast<uint32_t>((((int64_t{1} << shift) - positive) << 32) / positive + 1);
    }

#ifdef __CUDACC__
    __device__ __forceinline__ int32_t divide(uint32_t n) const {
        return static_cast<int32_t>((static_cast<uint32_t>(uint64_t{n} * multiplier >> 32) + n) >> shift);
    }
#endif
};

}  // namespace videoattn
