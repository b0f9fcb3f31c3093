// Attention forward for sm_90a: persistent, warp-specialised, TMA + wgmma.
//
// Warps: warpgroup 0 is the producer (warp 0 loads by TMA, warp 1 clears V rows past kv_lengths, warp 2 computes the gates
// of launches that have some, which costs the consumers no register and no latency; the rest leave);
// the launch's other warpgroups, its consumers, each own 64 query rows of the tile. Key tiles run from the last to the
// first, so that the partial one comes while there is nothing to overlap with.
//
// One consumer's time-line; the tensor core works on the upper line while the warpgroup runs the lower one, and the
// consumers take turns at issuing. Tiles follow one another without a gap: the next tile's first scores are issued
// together with the last P V of this one, and its epilogue runs where another block would rescale O.
//
//   wgmma   S0 | S1, O += P0 V0 | ... | S0', O += Pn-1 Vn-1 |            | S1', O' = P0' V0' | ...
//   thread     | softmax(S0)    | ... | softmax(Sn-1)       softmax(S0') | store O           | softmax(S1')
//
// Barriers (arrivals), the first two for each buffer of queries: q_full[g] 1 (the loader) + bytes; q_empty[g] 4 (a lane
// of each warp of consumer g);
// k_full[s], v_full[s] 1 + bytes; k_empty[s], v_empty[s] 4 a consumer, v_empty one more (the clearing warp) in launches
// with key lengths; v_clean[s] 1 (the clearing warp), used in tiles where a key length ends inside the tensor.
// gates_full[g] 32 (the gates' warp); gates_empty[g] 128: every thread that touched them arrives by itself, which
// compute-sanitizer's racecheck follows.
// In the kernels for short keys K and V of a head stay for all its tiles: k_empty and v_empty are arrived at when the
// head changes.
// Named barriers: 1 + g: consumer g's turn to issue (its own 128 threads wait, those of its predecessor arrive).
// The warps of a consumer meet only there: each takes its part of Q and stores its 16 rows of O by itself.

#include <cuda.h>

#include "../common/launch.h"
#include "consumer.cuh"
#include "producer.cuh"

namespace videoattn::hopper {
namespace {

template <typename C, typename Element>
__device__ __forceinline__ void attention(const CUtensorMap& q_map, const CUtensorMap& k_map, const CUtensorMap& v_map,
                                          const CUtensorMap& o_map, const Args& args) {
    extern __shared__ __align__(1024) uint8_t raw_smem[];
    uint32_t base = smem_address(raw_smem);
    // Or the compiler computes it anew, from a special register, at every step.
    asm volatile("" : "+r"(base));
    const Shared<C> smem{base};
    // The swizzle is a function of the address. Rounding up here would cost the hot loop its uniform registers.
    if (smem.base % 1024 != 0) __trap();
    // The first costs a register less, which head dim 128 needs. A descriptor of Q in shared memory must be uniform.
    const int warpgroup = C::kQInRegisters ? threadIdx.x / 128 : __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);

    if (threadIdx.x == 0) {
        prefetch_tensormap(q_map);
        prefetch_tensormap(k_map);
        prefetch_tensormap(v_map);
        prefetch_tensormap(o_map);
        for (int group = 0; group < consumers<C>(); ++group) {
            for (int buffer = 0; buffer < C::kQueryBuffers; ++buffer) {
                mbarrier_init(smem.q_full(group, buffer), 1);
                mbarrier_init(smem.q_empty(group, buffer), 4);
            }
            if (C::kGates) {
                mbarrier_init(smem.gates_full(group), 32);
                mbarrier_init(smem.gates_empty(group), 128);
            }
        }
        for (int stage = 0; stage < C::kStages; ++stage) {
            mbarrier_init(smem.k_full(stage), 1);
            mbarrier_init(smem.k_empty(stage), 4 * consumers<C>());
            mbarrier_init(smem.v_full(stage), 1);
            mbarrier_init(smem.v_empty(stage), 4 * consumers<C>() + (args.kv_lengths != nullptr ? 1 : 0));
            mbarrier_init(smem.v_clean(stage), 1);
        }
        fence_mbarrier_init();
        fence_proxy_async_smem();
    }
    __syncthreads();

    if (warpgroup == 0) {
        setmaxnreg_dec<C::kProducerRegisters>();
        const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
        if (warp == 0) {
            if (threadIdx.x == 0) load<C>(smem, q_map, k_map, v_map, args);
        } else if (warp == 1 && args.kv_lengths != nullptr) {
            clear_value_tails<C>(smem, args);
        } else if (C::kGates && warp == 2 && args.gate.data != nullptr) {
            fetch_gates<C, Element>(smem, args);
        }
    } else {
        setmaxnreg_inc<C::kConsumerRegisters>();
        Consumer<C, Element> consumer(smem, o_map, args, warpgroup - 1);
        if (consumer.group == consumers<C>() - 1) consumer.pass_turn();
        consumer.run();
        // The turn that nobody takes any more, so that no named barrier is left half arrived.
        if (consumer.group == 0) consumer.take_turn();
    }
}

}  // namespace
}  // namespace videoattn::hopper

#define VIDEOATTN_HOPPER_KERNEL(NAME, CONFIG, ELEMENT)                                                       \
    extern "C" __global__ void __launch_bounds__(videoattn::hopper::CONFIG::kThreads, 1)                     \
        NAME(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,           \
             const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap o_map,           \
             const videoattn::hopper::Args args) {                                         \
        videoattn::hopper::attention<videoattn::hopper::CONFIG, ELEMENT>(q_map, k_map, v_map, o_map, args);  \
    }

VIDEOATTN_HOPPER_KERNEL(videoattn_hopper_d128_n128_bf16, D128N128, __nv_bfloat16)
VIDEOATTN_HOPPER_KERNEL(videoattn_hopper_d128_n128_fp16, D128N128, __half)
VIDEOATTN_HOPPER_KERNEL(videoattn_hopper_d128_n128_short_bf16, D128N128Short, __nv_bfloat16)
VIDEOATTN_HOPPER_KERNEL(videoattn_hopper_d128_n128_short_fp16, D128N128Short, __half)
VIDEOATTN_HOPPER_KERNEL(videoattn_hopper_d64_n112_bf16, D64N112, __nv_bfloat16)
VIDEOATTN_HOPPER_KERNEL(videoattn_hopper_d64_n112_fp16, D64N112, __half)
VIDEOATTN_HOPPER_KERNEL(videoattn_hopper_d64_n96_bf16, D64N96, __nv_bfloat16)
VIDEOATTN_HOPPER_KERNEL(videoattn_hopper_d64_n96_fp16, D64N96, __half)
VIDEOATTN_HOPPER_KERNEL(videoattn_hopper_d64_n96_short_bf16, D64N96Short, __nv_bfloat16)
VIDEOATTN_HOPPER_KERNEL(videoattn_hopper_d64_n96_short_fp16, D64N96Short, __half)
VIDEOATTN_HOPPER_KERNEL(videoattn_hopper_d64_n64_short_bf16, D64N64Short, __nv_bfloat16)
VIDEOATTN_HOPPER_KERNEL(videoattn_hopper_d64_n64_short_fp16, D64N64Short, __half)

namespace videoattn {

KernelList hopper_kernels() {
    static const Kernel kernels[] = {
        VIDEOATTN_ENTRY(videoattn_hopper_d128_n128_bf16),       VIDEOATTN_ENTRY(videoattn_hopper_d128_n128_fp16),
        VIDEOATTN_ENTRY(videoattn_hopper_d128_n128_short_bf16), VIDEOATTN_ENTRY(videoattn_hopper_d128_n128_short_fp16),
        VIDEOATTN_ENTRY(videoattn_hopper_d64_n112_bf16),        VIDEOATTN_ENTRY(videoattn_hopper_d64_n112_fp16),
        VIDEOATTN_ENTRY(videoattn_hopper_d64_n96_bf16),         VIDEOATTN_ENTRY(videoattn_hopper_d64_n96_fp16),
        VIDEOATTN_ENTRY(videoattn_hopper_d64_n96_short_bf16),   VIDEOATTN_ENTRY(videoattn_hopper_d64_n96_short_fp16),
        VIDEOATTN_ENTRY(videoattn_hopper_d64_n64_short_bf16),   VIDEOATTN_ENTRY(videoattn_hopper_d64_n64_short_fp16),
    };
    return {kernels, sizeof(kernels) / sizeof(kernels[0])};
}

}  // namespace videoattn
