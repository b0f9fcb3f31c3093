// wgmma.mma_async m64nNk16 with fp32 accumulators (PTX ISA 9.7.15), one specialisation for each N of the
// products and of the variants.
// B always comes from shared memory; A from shared memory (ss) or registers (rs).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace videoattn::hopper {

// kTransB: 0 for K-major B (K as stored), 1 for N-major B (V as stored).
template <typename Element, int kN, int kTransB>
struct Wgmma;

// Inline PTX numbers its operands, so the accumulators' names and the operands behind them are lists by eights.
#define TEXT8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TEXT16 TEXT8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TEXT24 TEXT16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define TEXT32 TEXT24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define TEXT40 TEXT32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define TEXT48 TEXT40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define TEXT56 TEXT48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define TEXT64 TEXT56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define TEXT72 TEXT64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define EIGHT(i)                                                                                        \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define REGISTERS8 EIGHT(0)
#define REGISTERS16 REGISTERS8, EIGHT(8)
#define REGISTERS24 REGISTERS16, EIGHT(16)
#define REGISTERS32 REGISTERS24, EIGHT(24)
#define REGISTERS40 REGISTERS32, EIGHT(32)
#define REGISTERS48 REGISTERS40, EIGHT(40)
#define REGISTERS56 REGISTERS48, EIGHT(48)
#define REGISTERS64 REGISTERS56, EIGHT(56)
#define REGISTERS72 REGISTERS64, EIGHT(64)

// X0 .. X6: the numbers of the operands that follow the accumulators.
#define WGMMA_OF(N, COUNT, ELEMENT, TYPE, X0, X1, X2, X3, X4, X5, X6)                                              \
    template <int kTransB>                                                                                         \
    struct Wgmma<ELEMENT, N, kTransB> {                                                                            \
        static __device__ __forceinline__ void ss(float (&d)[COUNT], uint64_t a, uint64_t b, int accumulate) {     \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " X2 ", 0;\n"                                           \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" TEXT##COUNT "}, " X0 \
                         ", " X1 ", p, 1, 1, 0, " X3 ";\n}\n"                                                      \
                         : REGISTERS##COUNT                                                                        \
                         : "l"(a), "l"(b), "r"(accumulate), "n"(kTransB));                                         \
        }                                                                                                          \
        static __device__ __forceinline__ void rs(float (&d)[COUNT], const uint32_t (&a)[4], uint64_t b,           \
                                                  int accumulate) {                                                \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " X5 ", 0;\n"                                           \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" TEXT##COUNT "}, {"   \
                         X0 ", " X1 ", " X2 ", " X3 "}, " X4 ", p, 1, 1, " X6 ";\n}\n"                             \
                         : REGISTERS##COUNT                                                                        \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransB));     \
        }                                                                                                          \
    };
#define WGMMA(N, COUNT, ...)                                  \
    WGMMA_OF(N, COUNT, __nv_bfloat16, "bf16", __VA_ARGS__)    \
    WGMMA_OF(N, COUNT, __half, "f16", __VA_ARGS__)

WGMMA(64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
WGMMA(80, 40, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
WGMMA(96, 48, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
WGMMA(112, 56, "%56", "%57", "%58", "%59", "%60", "%61", "%62")
WGMMA(128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
WGMMA(144, 72, "%72", "%73", "%74", "%75", "%76", "%77", "%78")

#undef WGMMA
#undef WGMMA_OF
#undef EIGHT
#undef TEXT8
#undef TEXT16
#undef TEXT24
#undef TEXT32
#undef TEXT40
#undef TEXT48
#undef TEXT56
#undef TEXT64
#undef TEXT72
#undef REGISTERS8
#undef REGISTERS16
#undef REGISTERS24
#undef REGISTERS32
#undef REGISTERS40
#undef REGISTERS48
#undef REGISTERS56
#undef REGISTERS64
#undef REGISTERS72

}  // namespace videoattn::hopper
