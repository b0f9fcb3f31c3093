// Attention forward for sm_100a and sm_103a: persistent, warp-specialised, TMA + tcgen05, one CTA an SM.
//
// A work item is 256 queries of one head: two Q tiles that share every K and V tile of 128 keys.
//
//   warps 0-3, 4-7   softmax of Q tile 0, 1     one thread a row; holds the row's 128 scores in registers
//   warps 8-11       correction of both         rescales O when the basis moves, stores O
//   warp 12          MMA issue                  one thread
//   warp 13          loads                      one thread
//   warp 14          clears V's tail            only in launches with key lengths
//   warp 15          none                       gives its registers and waits for the end
//
// Tensor memory (512 columns): S | P0 P1 | O0 | O1. There is one S, because it is needed only until the softmax warps
// hold it in registers, and a P for each Q tile beside it. So no MMA overwrites what another reads: the ISA orders two
// MMAs only on one accumulator (9.7.16.6), and with P laid over S the next QK would have to wait for PV's completion.
//
//   mma          QK0(0) QK1(0) | QK0(1) PV0(0) | QK1(1) PV1(0) | QK0(2) PV0(1) | QK1(2) PV1(1) | ...
//   S holds      S0(0)  S1(0)    S0(1)           S1(1)           S0(2)           S1(2)
//   softmax 0           | softmax0(0)    | softmax0(1)                   | softmax0(2) ...
//   softmax 1                  | softmax1(0)            | softmax1(1)
//   correction                           | O0 *= f(1)  | O1 *= f(1) ...
//
// The scores of a tile are there before its softmax has finished the tile before, so the exponentials never wait for
// QK; and an MMA issued late by one softmax finds the other's work queued.
//
// Barriers, with the arrivals of one phase:
//   q_full[q]             1   once an item                   load (expect_tx) -> MMA
//   q_empty[q]            1   once an item                   commit of the item's last QK -> load
//   kv_full[s]            1   once a token                   load (expect_tx) -> MMA, clear
//   kv_empty[s]           1   once a token                   commit of its last use -> load; 2 in launches with key
//                                                            lengths, where the clearing warp sees every token
//   v_clean[s]            1   once an item that needs it     clear -> MMA
//   scores_done[q]        1   once a tile                    commit of QKq -> softmax q
//   scores_read           4   once a QK                      a warp each of the softmax whose scores S held -> MMA
//   message_ready[q][2]   4   in turns: O's factor from an   a warp each of softmax q -> correction
//                             item's second tile on, then
//                             the row sum
//   p_ready[q]            8   once a tile                    4 warps of softmax q (P is stored) and 4 of the
//                                                            correction (O is in P's basis, or free) -> MMA
//   output_done[q]        1   once a tile                    commit of PVq -> softmax q (P is free), correction (O is
//                                                            complete)
//
// A wait names the parity of a phase, which the phase after next has too. So no barrier may complete a phase before
// every waiter has seen the one before it:
//   q_full[q]         the next is the load thread's, after its wait for q_empty[q]: a commit that the MMA thread makes
//                     after its wait for q_full[q]
//   q_empty[q]        the next is a commit that follows the next q_full[q], which the load thread gives after its wait
//   kv_full[s]        the next is the load thread's, after its wait for kv_empty[s], to which the MMA thread and the
//                     clearing warp come after their waits for kv_full[s]
//   kv_empty[s]       the next follows the next kv_full[s], which the load thread gives after its wait
//   v_clean[s]        the next follows the next kv_full[s], and so kv_empty[s]: a commit that the MMA thread makes
//                     after its wait for v_clean[s]. One barrier for all slots would not do: the clearing warp may be
//                     ahead by the length of the ring, which holds several items of one or two tiles
//   scores_done[q]    the next QKq needs scores_read of this one, to which each warp of softmax q comes after its wait
//   scores_read       the next answers a QK that the MMA thread issues after its wait
//   message_ready[q]  softmax q may be one message ahead of the correction, hence two places, and never more: a
//                     message follows the P of the tile before it, which is stored only after the output_done of the
//                     tile before that, and so after a PV that waited for the correction to have read the message of
//                     two before
//   p_ready[q]        the next needs softmax q to have seen output_done[q] of the PV that this one starts
//   output_done[q]    the next PVq needs p_ready[q], to which softmax q and the correction come after their waits
//
// Bitwise repeatable: every sum has a fixed order that depends on the item's own lengths and the number of key parts.

#include "../common/launch.h"
#include "feed.cuh"
#include "rows.cuh"

namespace videoattn::blackwell {
namespace {

constexpr int kCorrectionWarp = 8, kMmaWarp = 12, kLoadWarp = 13, kClearWarp = 14;

template <typename Element>
constexpr layouts::InputType kInputType = layouts::InputType::kBf16;
template <>
constexpr layouts::InputType kInputType<__half> = layouts::InputType::kF16;

template <typename C, typename Element>
__device__ __forceinline__ void attention(const CUtensorMap& q_map, const CUtensorMap& k_map, const CUtensorMap& v_map,
                                          const CUtensorMap& o_map, const Args& args) {
    extern __shared__ __align__(1024) uint8_t smem_bytes[];
    Shared<C>& shared = *reinterpret_cast<Shared<C>*>(smem_bytes + C::kStateOffset);
    const uint32_t smem = ptx::smem_address(smem_bytes);
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);

    if (threadIdx.x == 0) {
        // The descriptors' swizzle starts at a multiple of 1024; there is no shared memory left to round up in.
        if (smem % 1024 != 0) {
            __trap();
        }
        shared.initialise(args.kv_lengths != nullptr);
    }
    if (warp == kMmaWarp) {
        ptx::tcgen05_alloc<C::kTmemColumns>(ptx::smem_address(&shared.tmem_slot));
        ptx::tcgen05_relinquish_alloc_permit();
    }
    __syncwarp();
    ptx::tcgen05_fence_before_thread_sync();
    __syncthreads();
    ptx::tcgen05_fence_after_thread_sync();
    const TmemAddress tmem = shared.tmem_slot;

    if (warp < kCorrectionWarp) {
        ptx::setmaxnreg_inc<kSoftmaxRegisters>();
        softmax_warp<C, Element>(shared, warp / kWarps, tmem, args);
    } else if (warp < kMmaWarp) {
        ptx::setmaxnreg_dec<kCorrectionRegisters>();
        correction_warp<C, Element>(shared, smem, tmem, o_map, args);
    } else {
        ptx::setmaxnreg_dec<kOtherRegisters>();
        if (warp == kMmaWarp) {
            if (ptx::elect_one()) {
                mma_thread<C, kInputType<Element>>(shared, smem, tmem, args);
            }
        } else if (warp == kLoadWarp) {
            if (ptx::elect_one()) {
                load_thread<C>(shared, smem, q_map, k_map, v_map, args);
            }
        } else if (warp == kClearWarp && args.kv_lengths != nullptr) {
            clear_warp<C>(shared, smem, args);
        }
    }

    __syncwarp();
    ptx::tcgen05_fence_before_thread_sync();
    __syncthreads();
    ptx::tcgen05_fence_after_thread_sync();
    if (warp == kMmaWarp) {
        ptx::tcgen05_dealloc<C::kTmemColumns>(tmem);
    }
}

}  // namespace
}  // namespace videoattn::blackwell

#define VIDEOATTN_BLACKWELL_KERNEL(NAME, CONFIG, ELEMENT)                                                          \
    extern "C" __global__ void __launch_bounds__(videoattn::blackwell::kThreads, 1)                                \
        NAME(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,                 \
             const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap o_map,                 \
             const __grid_constant__ videoattn::blackwell::Args args) {                                            \
        videoattn::blackwell::attention<videoattn::blackwell::CONFIG, ELEMENT>(q_map, k_map, v_map, o_map, args);  \
    }

VIDEOATTN_BLACKWELL_KERNEL(videoattn_blackwell_d128_bf16, Config128, __nv_bfloat16)
VIDEOATTN_BLACKWELL_KERNEL(videoattn_blackwell_d128_fp16, Config128, __half)
VIDEOATTN_BLACKWELL_KERNEL(videoattn_blackwell_d64_bf16, Config64, __nv_bfloat16)
VIDEOATTN_BLACKWELL_KERNEL(videoattn_blackwell_d64_fp16, Config64, __half)


namespace videoattn {

KernelList blackwell_kernels() {
    static const Kernel kernels[] = {
        VIDEOATTN_ENTRY(videoattn_blackwell_d128_bf16),
        VIDEOATTN_ENTRY(videoattn_blackwell_d128_fp16),
        VIDEOATTN_ENTRY(videoattn_blackwell_d64_bf16),
        VIDEOATTN_ENTRY(videoattn_blackwell_d64_fp16),
    };
    return {kernels, sizeof(kernels) / sizeof(kernels[0])};
}

}  // namespace videoattn
