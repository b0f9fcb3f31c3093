// Attention forward for sm_90a: persistent, warp-specialised, TMA + wgmma.
//
// Warps: warpgroup 0 is the producer (warp 0 loads by TMA, warp 1 clears V rows past kv_lengths, the rest leave);
// warpgroups 1 .. kConsumers each own 64 query rows of the tile. Key tiles run from the last to the first, so that
// the partial one comes while there is nothing to overlap with.
//
// One consumer's time-line; the tensor core works on the upper line while the warpgroup runs the lower one, and the
// consumers take turns at issuing. Tiles follow one another without a gap: the next tile's first scores are issued
// together with the last P V of this one, and its epilogue runs where another block would rescale O.
//
//   wgmma   S0 | S1, O += P0 V0 | ... | S0', O += Pn-1 Vn-1 |            | S1', O' = P0' V0' | ...
//   thread     | softmax(S0)    | ... | softmax(Sn-1)       softmax(S0') | store O           | softmax(S1')
//
// Barriers (arrivals): q_full[g] 1 (the loader) + bytes; q_empty[g] 4 (a lane of each warp of consumer g);
// k_full[s], v_full[s] 1 + bytes; k_empty[s], v_empty[s] 4 kConsumers, v_empty one more (the clearing warp) in launches
// with key lengths; v_clean[s] 1 (the clearing warp), used in tiles where a key length ends inside the tensor.
// Named barriers: 1 + g: all 128 threads of consumer g; 4 + g: consumer g's turn to issue (its own 128 threads wait,
// those of its predecessor arrive).

#include <cuda.h>

#include "../common/launch.h"
#include "config.h"
#include "ptx.cuh"
#include "softmax.cuh"
#include "tile.cuh"
#include "wgmma.cuh"

namespace videoattn::hopper {
namespace {

// ---- producer ----

// Keys of a step come before the values of the step before it: the order in which the consumers need them.
template <typename C>
__device__ __forceinline__ void load(const Shared<C>& smem, const CUtensorMap& q_map, const CUtensorMap& k_map,
                                     const CUtensorMap& v_map, const Args& args) {
    Ring<C> keys, values;
    uint32_t q_phase = 0;
    int value_row = -1, value_head = 0, value_batch = 0;
    const auto load_values = [&] {
        barrier_wait(smem.v_empty(values.stage), values.phase ^ 1);
        barrier_expect_bytes(smem.v_full(values.stage), C::kKvBytes);
        tma_load(smem.v(values.stage), &v_map, smem.v_full(values.stage), value_row, value_head, value_batch);
        values.advance();
    };
    for (int index = blockIdx.x; index < args.tiles; index += gridDim.x) {
        const Tile tile = locate<C>(args, index);
        for (int block = tile.blocks - 1; block >= 0; --block) {
            barrier_wait(smem.k_empty(keys.stage), keys.phase ^ 1);
            barrier_expect_bytes(smem.k_full(keys.stage), C::kKvBytes);
            const int row = (tile.first_block + block) * C::kTileN;
            tma_load(smem.k(keys.stage), &k_map, smem.k_full(keys.stage), row, tile.head, tile.batch);
            keys.advance();
            if (block == tile.blocks - 1) {
                for (int group = 0; group < C::kConsumers; ++group) {
                    barrier_wait(smem.q_empty(group), q_phase ^ 1);
                    barrier_expect_bytes(smem.q_full(group), C::kGroupBytes);
                    tma_load(smem.q(group), &q_map, smem.q_full(group), tile.row + group * kGroupRows, tile.head,
                             tile.batch);
                }
                q_phase ^= 1;
            }
            if (value_row >= 0) load_values();
            value_row = row;
            value_head = tile.head;
            value_batch = tile.batch;
        }
    }
    if (value_row >= 0) load_values();
}

// Follows every value tile of a launch with key lengths, so that it can never mistake one phase for another.
template <typename C>
__device__ __forceinline__ void clear_value_tails(const Shared<C>& smem, const Args& args) {
    constexpr int kBoxRows = C::kTileN * (C::kHeadDim / 64);
    const int lane = threadIdx.x % 32;
    Ring<C> values;
    for (int index = blockIdx.x; index < args.tiles; index += gridDim.x) {
        const Tile tile = locate<C>(args, index);
        for (int block = 0; block < tile.blocks; ++block) {
            barrier_wait(smem.v_full(values.stage), values.phase);
            if (block == 0 && tile.clear) {
                // 128-byte rows of 64 columns, eight 16-byte pieces each; the swizzle stays inside a row.
                for (int piece = lane; piece < 8 * kBoxRows; piece += 32)
                    if (piece / 8 % C::kTileN >= tile.tail) store_zero16(smem.v(values.stage) + 16 * piece);
                async_proxy_fence();
                __syncwarp();
                if (lane == 0) barrier_arrive(smem.v_clean(values.stage));
            }
            if (lane == 0) barrier_arrive(smem.v_empty(values.stage));
            values.advance();
        }
    }
}

// ---- consumers ----

// Shared-memory matrix descriptor, 128-byte swizzle, 8-row groups 1024 bytes apart; `leading` bytes separate the
// 64-column blocks of an N-major operand and mean nothing to a K-major one (PTX ISA 9.7.15.5.1).
__device__ __forceinline__ uint64_t descriptor(uint32_t address, uint32_t leading) {
    return (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) | (uint64_t{leading >> 4} << 16) |
           ((address & 0x3FFFF) >> 4);
}

// Byte address of the 16-byte piece that lane `lane` hands to ldmatrix or stmatrix .x4 for the 16 x 16 block at
// (16 * warp, 16 * step) of a swizzled [head_dim / 64][64][64] tile.
__device__ __forceinline__ uint32_t fragment_address(uint32_t tile, int warp, int lane, int step) {
    const int row = 16 * warp + lane % 16;
    const int piece = 2 * (step % 4) + lane / 16;
    return tile + (step / 4) * (kGroupRows * 128) + row * 128 + ((piece ^ (row & 7)) << 4);
}

template <typename C, typename Element>
struct Consumer {
    static constexpr int kScores = C::kTileN / 2;
    static constexpr int kOutputs = C::kHeadDim / 2;
    static constexpr int kQSteps = C::kHeadDim / 16;
    static constexpr int kPSteps = C::kTileN / 16;
    static constexpr uint32_t kAccumulate = 1u << 30, kClear = 1u << 31;
    using Scores = Softmax<C::kTileN, C::kSoftExp2>;

    const Shared<C>& smem;
    const int group;
    uint32_t step = 0;  // key blocks whose scores are done; the values of step - 1 come with the scores of step
    // Phases, bit s of v_clean[s] and bit kStages of q_full; and about the P V to come kAccumulate and kClear.
    uint32_t state = 0;
    uint32_t q[C::kQInRegisters ? kQSteps : 1][4];

    __device__ __forceinline__ Consumer(const Shared<C>& smem_, int group_) : smem(smem_), group(group_) {}

    __device__ __forceinline__ void release(uint32_t barrier) {
        if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
    }

    __device__ __forceinline__ void take_turn() { named_sync(4 + group, 256); }
    __device__ __forceinline__ void pass_turn() {
        named_arrive(4 + (group + 1 == C::kConsumers ? 0 : group + 1), 256);
    }

    __device__ __forceinline__ void take_queries() {
        barrier_wait(smem.q_full(group), state >> C::kStages & 1);
        state ^= 1u << C::kStages;
        if constexpr (C::kQInRegisters) {
            const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll
            for (int step = 0; step < kQSteps; ++step)
                load_matrix(q[step], fragment_address(smem.q(group), warp, lane, step));
            __syncwarp();
            release(smem.q_empty(group));
        }
    }

    __device__ __forceinline__ void issue_scores(float (&s)[kScores]) {
        const uint64_t k = descriptor(smem.k(stage(step)), 16);
        pin(s);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kQSteps; ++step) {
            const uint32_t k_step = (step / 4) * (C::kTileN * 128) + (step % 4) * 32;
            if constexpr (C::kQInRegisters) {
                Wgmma<Element, C::kTileN, 0>::rs(s, q[step], k + (k_step >> 4), step > 0);
            } else {
                const uint64_t a = descriptor(smem.q(group), 16);
                const uint32_t q_step = (step / 4) * (kGroupRows * 128) + (step % 4) * 32;
                Wgmma<Element, C::kTileN, 0>::ss(s, a + (q_step >> 4), k + (k_step >> 4), step > 0);
            }
        }
        wgmma_commit();
    }

    __device__ __forceinline__ void issue_output(float (&o)[kOutputs], uint32_t (&p)[kPSteps][4]) {
        const uint64_t v = descriptor(smem.v(stage(step - 1)), C::kTileN * 128);
        pin(o);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kPSteps; ++step)
            Wgmma<Element, C::kHeadDim, 1>::rs(o, p[step], v + (step * 2048 >> 4), step > 0 ? 1 : state & kAccumulate);
        wgmma_commit();
    }

    static __device__ __forceinline__ int stage(uint32_t step) { return step % C::kStages; }
    static __device__ __forceinline__ uint32_t phase(uint32_t step) { return step / C::kStages & 1; }

    __device__ __forceinline__ void wait_keys() { barrier_wait(smem.k_full(stage(step)), phase(step)); }

    __device__ __forceinline__ void wait_values() {
        const int at = stage(step - 1);
        barrier_wait(smem.v_full(at), phase(step - 1));
        if (state & kClear) {
            barrier_wait(smem.v_clean(at), state >> at & 1);
            state ^= 1u << at;
        }
    }

    // Every tile of this CTA, one key block a step. Between steps p holds the last block's P.
    __device__ __forceinline__ void run(const CUtensorMap& o_map, const Args& args) {
        float s[kScores], o[kOutputs], factor[2];
        uint32_t p[kPSteps][4];
        // Tiles are located anew where they are needed: registers are dearer than the few divisions.
        int index = next_tile(o_map, args, blockIdx.x);
        if (index >= args.tiles) return;
        int left, tail;  // scores of this tile still to be issued, valid keys of its first block
        start(args, index, left, tail);

        wait_keys();
        take_turn();
        take_queries();
        issue_scores(s);
        pass_turn();
        wgmma_wait<0>();
        pin(s);
        Scores softmax(args.scale_log2);
        open_rows(s, softmax, left, tail);

        // ptxas lifts the wait for a P V over all arithmetic of its basic block, exponentials included, and nothing
        // would be left to run beside the P V. So each wait stands where paths meet: here and after the rescaling.
        for (int done = index;;) {
            finish_output(s, o, p);
            if (step > 1) store(o_map, args, done, o, factor);
            while (left > 0) {
                wait_keys();
                take_turn();
                issue_scores(s);
                wait_values();
                issue_output(o, p);
                pass_turn();
                state = (state | kAccumulate) & ~kClear;
                wgmma_wait<1>();
                pin(s);
                finish_scores(--left == 0);
                const bool moves = softmax.subtract(s, factor);
                softmax.exponentiate(s);
                pin(s);
                if (moves) {
                    wgmma_wait<0>();
                    pin(o);
#pragma unroll
                    for (int i = 0; i < kOutputs; ++i) o[i] *= factor[i / 2 % 2];
                }
                finish_output(s, o, p);
            }

            done = index;
            index = next_tile(o_map, args, index + gridDim.x);
            if (index >= args.tiles) {
                index = done;
                break;
            }
            wait_keys();
            take_turn();
            take_queries();
            issue_scores(s);
            wait_values();
            issue_output(o, p);
            pass_turn();
            start(args, index, left, tail);
            finish_rows(args, done, softmax, factor);
            wgmma_wait<1>();
            pin(s);
            open_rows(s, softmax, left, tail);
        }

        finish_rows(args, index, softmax, factor);
        wait_values();
        issue_output(o, p);
        wgmma_wait<0>();
        pin(o);
        release(smem.v_empty(stage(step - 1)));
        store(o_map, args, index, o, factor);
    }

    // The exponentials of a tile's first block.
    __device__ __forceinline__ void open_rows(float (&s)[kScores], Scores& softmax, int& left, int tail) {
        float unused[2];  // nothing has been accumulated against an earlier reference
        finish_scores(--left == 0);
        if (tail < C::kTileN) Scores::mask(s, tail);
        softmax.begin(s);
        softmax.subtract(s, unused);
        softmax.exponentiate(s);
        pin(s);
    }

    // Waits for the P V in flight, if there is one, and packs the exponentials for the next.
    __device__ __forceinline__ void finish_output(float (&s)[kScores], float (&o)[kOutputs],
                                                  uint32_t (&p)[kPSteps][4]) {
        wgmma_wait<0>();
        pin(s);
        pin(o);
        if (step > 0) release(smem.v_empty(stage(step - 1)));
        ++step;
        Scores::template pack_fragments<Element>(s, p);
    }

    // The first tile from `index` on that has keys, or one past the last; those without get their zeros here.
    __device__ __forceinline__ int next_tile(const CUtensorMap& o_map, const Args& args, int index) {
        for (; index < args.tiles; index += gridDim.x) {
            const Tile tile = locate<C>(args, index);
            if (tile.blocks > 0) break;
            store_empty(o_map, args, tile);
        }
        return index;
    }

    __device__ __forceinline__ void start(const Args& args, int index, int& left, int& tail) {
        const Tile tile = locate<C>(args, index);
        left = tile.blocks;
        tail = tile.tail;
        state &= ~(kAccumulate | kClear);
        if (tile.clear) state |= kClear;
    }

    __device__ __forceinline__ void finish_scores(bool last) {
        release(smem.k_empty(stage(step)));
        if (!C::kQInRegisters && last) release(smem.q_empty(group));
    }

    // A finished tile's LSEs, and what its O is to be multiplied by.
    __device__ __forceinline__ void finish_rows(const Args& args, int index, const Scores& softmax,
                                                float (&inverse)[2]) {
        const Tile tile = locate<C>(args, index);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const float sum = quad_sum(softmax.row_sum[row]);
            inverse[row] = 1.0f / sum;
            write_lse(args, tile, row, softmax.log_sum(row, sum));
        }
    }

    __device__ __forceinline__ void store(const CUtensorMap& o_map, const Args& args, int index,
                                          const float (&o)[kOutputs], const float (&inverse)[2]) {
        const Tile tile = locate<C>(args, index);
        if (args.splits > 1) {
            store_partial(args, tile, o, inverse);
            return;
        }
        const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
        open_output();
#pragma unroll
        for (int step = 0; step < kQSteps; ++step) {
            uint32_t r[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                r[i] = pack<Element>(o[8 * step + 2 * i] * inverse[i % 2], o[8 * step + 2 * i + 1] * inverse[i % 2]);
            store_matrix(fragment_address(smem.o(group), warp, lane, step), r[0], r[1], r[2], r[3]);
        }
        send_output(o_map, args, tile);
    }

    __device__ __forceinline__ void store_empty(const CUtensorMap& o_map, const Args& args, const Tile& tile) {
        for (int row = 0; row < 2; ++row) write_lse(args, tile, row, -INFINITY);
        if (args.splits > 1) {
            float o[kOutputs] = {}, inverse[2] = {};
            store_partial(args, tile, o, inverse);
            return;
        }
        open_output();
        for (int piece = threadIdx.x % 128; piece < C::kGroupBytes / 16; piece += 128)
            store_zero16(smem.o(group) + 16 * piece);
        send_output(o_map, args, tile);
    }

    // The thread's query row: `row` 0 or 1 of its two.
    __device__ __forceinline__ int position(const Tile& tile, int row) const {
        const int thread = threadIdx.x % 128;
        return tile.row + group * kGroupRows + thread / 32 * 16 + thread % 32 / 4 + 8 * row;
    }

    // Index of a query row among all rows, `split`s outermost.
    __device__ __forceinline__ int64_t flat_row(const Args& args, const Tile& tile, int position) const {
        const int64_t pair = static_cast<int64_t>(tile.split * args.batch + tile.batch) * args.heads + tile.head;
        return pair * args.q_len + position;
    }

    __device__ __forceinline__ void write_lse(const Args& args, const Tile& tile, int row, float value) {
        float* lse = args.splits > 1 ? args.partial_lse : args.lse;
        const int query = position(tile, row);
        if (lse == nullptr || threadIdx.x % 4 != 0 || query >= args.q_len) return;
        lse[flat_row(args, tile, query)] = value;
    }

    __device__ __forceinline__ void store_partial(const Args& args, const Tile& tile, const float (&o)[kOutputs],
                                                  const float (&inverse)[2]) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const int query = position(tile, row);
            if (query >= args.q_len) continue;
            float* target = args.partial_out + flat_row(args, tile, query) * C::kHeadDim + 2 * (threadIdx.x % 4);
#pragma unroll
            for (int block = 0; block < C::kHeadDim / 8; ++block)
                *reinterpret_cast<float2*>(target + 8 * block) =
                    make_float2(o[4 * block + 2 * row] * inverse[row], o[4 * block + 2 * row + 1] * inverse[row]);
        }
    }

    // The staging buffer is free once the copy engine has read the tile before.
    __device__ __forceinline__ void open_output() {
        if (threadIdx.x % 128 == 0) tma_store_wait_read();
        named_sync(1 + group, 128);
    }

    __device__ __forceinline__ void send_output(const CUtensorMap& o_map, const Args& args, const Tile& tile) {
        async_proxy_fence();
        named_sync(1 + group, 128);
        const int row = tile.row + group * kGroupRows;
        if (threadIdx.x % 128 == 0 && row < args.q_len) tma_store(&o_map, smem.o(group), row, tile.head, tile.batch);
    }
};

template <typename C, typename Element>
__device__ __forceinline__ void attention(const CUtensorMap& q_map, const CUtensorMap& k_map, const CUtensorMap& v_map,
                                          const CUtensorMap& o_map, const Args& args) {
    extern __shared__ uint8_t raw_smem[];
    const Shared<C> smem{(shared_address(raw_smem) + 1023) / 1024 * 1024};
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);

    if (threadIdx.x == 0) {
        prefetch_map(&q_map);
        prefetch_map(&k_map);
        prefetch_map(&v_map);
        prefetch_map(&o_map);
        for (int group = 0; group < C::kConsumers; ++group) {
            barrier_init(smem.q_full(group), 1);
            barrier_init(smem.q_empty(group), 4);
        }
        for (int stage = 0; stage < C::kStages; ++stage) {
            barrier_init(smem.k_full(stage), 1);
            barrier_init(smem.k_empty(stage), 4 * C::kConsumers);
            barrier_init(smem.v_full(stage), 1);
            barrier_init(smem.v_empty(stage), 4 * C::kConsumers + (args.kv_lengths != nullptr ? 1 : 0));
            barrier_init(smem.v_clean(stage), 1);
        }
        barrier_init_fence();
        async_proxy_fence();
    }
    __syncthreads();

    if (warpgroup == 0) {
        registers_shrink<C::kProducerRegisters>();
        const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
        if (warp == 0) {
            if (threadIdx.x == 0) load<C>(smem, q_map, k_map, v_map, args);
        } else if (warp == 1 && args.kv_lengths != nullptr) {
            clear_value_tails<C>(smem, args);
        }
    } else {
        registers_grow<C::kConsumerRegisters>();
        Consumer<C, Element> consumer(smem, warpgroup - 1);
        if (consumer.group == C::kConsumers - 1) consumer.pass_turn();
        consumer.run(o_map, args);
        if (threadIdx.x % 128 == 0) tma_store_wait();
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
VIDEOATTN_HOPPER_KERNEL(videoattn_hopper_d64_n128_bf16, D64N128, __nv_bfloat16)
VIDEOATTN_HOPPER_KERNEL(videoattn_hopper_d64_n128_fp16, D64N128, __half)
VIDEOATTN_HOPPER_KERNEL(videoattn_hopper_d64_n96_bf16, D64N96, __nv_bfloat16)
VIDEOATTN_HOPPER_KERNEL(videoattn_hopper_d64_n96_fp16, D64N96, __half)

namespace videoattn {

KernelList hopper_kernels() {
    static const Kernel kernels[] = {
        VIDEOATTN_ENTRY(videoattn_hopper_d128_n128_bf16), VIDEOATTN_ENTRY(videoattn_hopper_d128_n128_fp16),
        VIDEOATTN_ENTRY(videoattn_hopper_d64_n128_bf16),  VIDEOATTN_ENTRY(videoattn_hopper_d64_n128_fp16),
        VIDEOATTN_ENTRY(videoattn_hopper_d64_n96_bf16),  VIDEOATTN_ENTRY(videoattn_hopper_d64_n96_fp16),
    };
    return {kernels, sizeof(kernels) / sizeof(kernels[0])};
}

}  // namespace videoattn
