// A consumer warpgroup: 64 query rows of every tile its CTA works on. The time-line is in attention.cu.
#pragma once

#include "output.cuh"
#include "profile.cuh"
#include "softmax.cuh"
#include "tile.cuh"
#include "wgmma.cuh"

namespace videoattn::hopper {

// Shared-memory matrix descriptor, 128-byte swizzle, 8-row groups 1024 bytes apart; `leading` bytes separate the
// 64-column blocks of an N-major operand and mean nothing to a K-major one (PTX ISA 9.7.15.5.1).
__device__ __forceinline__ uint64_t descriptor(uint32_t address, uint32_t leading) {
    return (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) | (uint64_t{leading >> 4} << 16) |
           ((address & 0x3FFFF) >> 4);
}

template <typename C, typename Element>
struct Consumer {
    static constexpr int kScores = C::kTileN / 2;
    static constexpr int kOutputs = C::kHeadDim / 2;
    static constexpr int kQSteps = C::kHeadDim / 16;
    static constexpr int kPSteps = C::kTileN / 16;
    static constexpr uint32_t kAccumulate = 1u << 30, kClear = 1u << 31;
    using Scores = Softmax<C::kTileN>;

    const Shared<C>& smem;
    const CUtensorMap& o_map;
    const Args& args;
    const int group;
    Recorder recorder;
    // Key blocks whose scores are done; the values of step - 1 come with the scores of step.
    uint32_t step = 0;
    // Where K and V stay, step goes back to the head's first block with every tile, and this is the step of the values.
    uint32_t kept_values = 0;
    // Phases, bit s of v_clean[s]; from bit kStages on the tiles whose queries were taken; about the P V to come
    // kAccumulate and kClear.
    uint32_t state = 0;
    uint32_t q[C::kQInRegisters ? kQSteps : 1][4];

    __device__ __forceinline__ Consumer(const Shared<C>& smem_, const CUtensorMap& o_map_, const Args& args_,
                                        int group_)
        : smem(smem_), o_map(o_map_), args(args_), group(group_),
          recorder(args_, consumers<C>() + 1, 1 + group_, threadIdx.x % 128 == 0) {}

    __device__ __forceinline__ void release(uint32_t barrier) {
        if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
    }

    __device__ __forceinline__ void take_turn() {
        recorder.enter(Phase::kTurn);
        if constexpr (C::kTurns) named_sync(1 + group, 256);
        recorder.enter(Phase::kIssue);
    }
    __device__ __forceinline__ void pass_turn() {
        if constexpr (C::kTurns) named_arrive(1 + (group + 1 == consumers<C>() ? 0 : group + 1), 256);
    }

    // Of the queries to come, or of the `back`th before them.
    __device__ __forceinline__ int query_buffer(int back) const {
        return C::kQueryBuffers > 1 ? (state >> C::kStages & 1) ^ back : 0;
    }

    __device__ __forceinline__ void take_queries() {
        const int buffer = query_buffer(0);
        mbarrier_wait(smem.q_full(group, buffer), state >> (C::kStages + C::kQueryBuffers - 1) & 1);
        // Of one buffer the lowest bit is all that counts.
        state = C::kQueryBuffers > 1 ? state + (1u << C::kStages) : state ^ 1u << C::kStages;
        if constexpr (C::kQInRegisters) {
            const uint32_t thread = fresh_thread();
            const int row = thread % 128 / 32 * kWarpRows;
#pragma unroll
            for (int i = 0; i < kQSteps; ++i)
                ldmatrix_x4(q[i], fragment_address<kGroupRows>(smem.q(group, buffer), row, thread % 32, i));
            // An arrival may overtake loads that have not returned, and the copy engine writes through another proxy:
            // without the fence it overwrites what is still being read (seen on an H200).
            fence_proxy_async_smem();
            __syncwarp();
            release(smem.q_empty(group, buffer));
        }
    }

    __device__ __forceinline__ void issue_scores(float (&s)[kScores]) {
        const uint64_t k = descriptor(smem.k(0), 16) + stage(step) * (C::kKvBytes >> 4);
        pin(s);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kQSteps; ++step) {
            const uint32_t k_step = (step / 4) * (C::kTileN * 128) + (step % 4) * 32;
            if constexpr (C::kQInRegisters) {
                Wgmma<Element, C::kTileN, 0>::rs(s, q[step], k + (k_step >> 4), step > 0);
            } else {
                const uint64_t a = descriptor(smem.q(group), 16) +
                                   query_buffer(1) * (C::kConsumers * C::kGroupBytes >> 4);
                const uint32_t q_step = (step / 4) * (kGroupRows * 128) + (step % 4) * 32;
                Wgmma<Element, C::kTileN, 0>::ss(s, a + (q_step >> 4), k + (k_step >> 4), step > 0);
            }
        }
        wgmma_commit();
    }

    // Issues the P V and passes the turn, if somebody is there to take it.
    template <bool kPass>
    __device__ __forceinline__ void issue_output(float (&o)[kOutputs], uint32_t (&p)[kPSteps][4]) {
        const uint64_t v = descriptor(smem.v(0), C::kTileN * 128) + stage(value_step()) * (C::kKvBytes >> 4);
        pin(o);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kPSteps; ++step) {
            Wgmma<Element, C::kHeadDim, 1>::rs(o, p[step], v + (step * 2048 >> 4), step > 0 ? 1 : state & kAccumulate);
        }
        wgmma_commit();
        if (kPass) pass_turn();
    }

    static __device__ __forceinline__ int stage(uint32_t step) { return step % C::kStages; }
    static __device__ __forceinline__ uint32_t phase(uint32_t step) { return step / C::kStages & 1; }

    __device__ __forceinline__ uint32_t value_step() const { return C::kResident ? kept_values : step - 1; }

    __device__ __forceinline__ void wait_keys() {
        recorder.enter(Phase::kKeys);
        mbarrier_wait(smem.k_full(stage(step)), phase(step));
    }

    __device__ __forceinline__ void wait_values() {
        const int at = stage(value_step());
        mbarrier_wait(smem.v_full(at), phase(value_step()));
        if (state & kClear) {
            mbarrier_wait(smem.v_clean(at), state >> at & 1);
            state ^= 1u << at;
        }
    }

    // Every tile of this CTA, one key block a step. Between steps p holds the last block's P.
    __device__ __forceinline__ void run() {
        float s[kScores], o[kOutputs], factor[2], block_sum[2];
        uint32_t p[kPSteps][4];
        // Tiles are located anew where they are needed: registers are dearer than the few multiplications.
        int index = next_tile(first_tile<C>(args));
        if (index >= end_tile<C>(args)) return;
        int left, tail;  // scores of this tile still to be issued, valid keys of its first block
        start(index, left, tail, false);

        wait_keys();
        take_queries();
        take_turn();
        issue_scores(s);
        pass_turn();
        recorder.enter(Phase::kScores);
        wgmma_wait<0>();
        pin(s);
        Scores softmax(args.scale_log2);
        open_rows(s, softmax, left, tail);

        // ptxas lifts the wait for a P V over all arithmetic of its basic block, exponentials included, and nothing
        // would be left to run beside the P V. So each wait stands behind a branch: here, and below behind the one on
        // whether references move. What is rare leaves the inner loop, which stays contiguous.
        bool fits = true, opened = false;  // opened: the last step was a tile's first, the tile before is to be stored
        for (int done = index;;) {
            finish_output(s, o, p);
            if (opened) {
                if (C::kResident && !same_keys<C>(args, done, index)) release_values(done);
                store(done, o, factor, 2);
            }
            opened = false;
            while (left > 0) {
                wait_keys();
                take_turn();
                issue_scores(s);
                wait_values();
                issue_output<true>(o, p);
                state = (state | kAccumulate) & ~kClear;
                recorder.enter(Phase::kScores);
                wgmma_wait<1>();
                pin(s);
                if constexpr (!C::kResident) release(smem.k_empty(stage(step)));
                release_queries(--left);
                recorder.enter(Phase::kSoftmax);
                fits = softmax.exponentiate_unchecked(s, block_sum);
                pin(s);
                if (!fits) break;
                softmax.add(block_sum);
                finish_output(s, o, p);
            }
            if (!fits) {
                fits = true;
                fit(s, o, softmax, block_sum, index, left);
                continue;
            }

            done = index;
            index = next_tile(index + tile_step<C>());
            if (index >= end_tile<C>(args)) {
                index = done;
                break;
            }
            const bool keep = same_keys<C>(args, done, index);
            if constexpr (C::kResident) leave(done, keep);
            wait_keys();
            take_queries();
            take_turn();
            issue_scores(s);
            wait_values();
            issue_output<true>(o, p);
            start(index, left, tail, keep);
            recorder.enter(Phase::kEpilogue);
            finish_rows(done, softmax, factor);
            recorder.enter(Phase::kScores);
            wgmma_wait<1>();
            pin(s);
            open_rows(s, softmax, left, tail);
            opened = true;
        }

        finish_rows(index, softmax, factor);
        wait_values();
        issue_output<false>(o, p);
        recorder.enter(Phase::kOutput);
        wgmma_wait<0>();
        pin(o);
        store(index, o, factor, 1);
        if (threadIdx.x % 32 == 0) bulk_wait_group();
        recorder.enter(Phase::kEnd);
    }

    // The exponentials of a tile's first block.
    __device__ __forceinline__ void open_rows(float (&s)[kScores], Scores& softmax, int& left, int tail) {
        if constexpr (!C::kResident) release(smem.k_empty(stage(step)));
        release_queries(--left);
        recorder.enter(Phase::kSoftmax);
        if (tail < C::kTileN) Scores::mask(s, tail);
        softmax.begin(s);
        softmax.exponentiate(s);
        pin(s);
    }

    // A block whose exponentials came out too large for its rows' references.
    __device__ __forceinline__ void fit(float (&s)[kScores], float (&o)[kOutputs], Scores& softmax,
                                        float (&block_sum)[2], int index, int block) {
        // Frees the registers of P. The warps of a consumer decide one by one, where the ISA has a warpgroup execute a
        // wait together: SASS waits warp by warp, and a vote of all four would stand in the loop.
        wgmma_wait<0>();
        pin(o);
        float factor[2];
        if (softmax.lower(s, block_sum, factor)) {
            softmax.add(block_sum);
        } else {
            scores_again(s, index, block);
            softmax.raise(s, factor);
            softmax.exponentiate(s);
        }
        pin(s);
        rescale(o, factor);
    }

    // Scores whose exponentials or their sums may have overflowed, once more, by this warp alone and from global
    // memory: their keys have left shared memory. It runs only where scores leap by more than a hundred powers of two
    // (Softmax::kSafePower), so it is written for few registers.
    __device__ __forceinline__ void scores_again(float (&s)[kScores], int index, int block) {
        const Tile tile = locate<C>(args, index);
        const int column = 2 * (threadIdx.x % 4);
        const int query = Rows<C, Element>{args, tile, group}.position(0);
        // A row past q_len repeats one before; nothing of it is stored.
        const Element* row = at<Element>(args.q, tile, min(query, args.q_len - 1)) + column;
        const bool both = query + 8 < args.q_len;
        const Element* key =
            at<Element>(args.k, tile, (tile.first_block + block) * C::kTileN + threadIdx.x % 32 / 4) + column;
#pragma unroll
        for (int i = 0; i < kScores; ++i) s[i] = 0.0f;
#pragma unroll 1
        for (int step = 0; step < kQSteps; ++step) {
            const Element* other = both ? row + 8 * args.q.stride_seq : row;
            const uint32_t a[4] = {load_pair(row), load_pair(other), load_pair(row + 8), load_pair(other + 8)};
#pragma unroll
            for (int i = 0; i < C::kTileN / 8; ++i) {
                mma<Element>(s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3], a, load_pair(key), load_pair(key + 8));
                key += 8 * args.k.stride_seq;
            }
            key += 16 - C::kTileN * args.k.stride_seq;
            row += 16;
        }
    }

    __device__ __forceinline__ void rescale(float (&o)[kOutputs], const float (&factor)[2]) {
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) o[i] *= factor[i / 2 % 2];
    }

    // Waits for the P V in flight, if there is one, and packs the exponentials for the next.
    __device__ __forceinline__ void finish_output(float (&s)[kScores], float (&o)[kOutputs],
                                                  uint32_t (&p)[kPSteps][4]) {
        recorder.enter(Phase::kOutput);
        wgmma_wait<0>();
        pin(s);
        pin(o);
        if (!C::kResident && step > 0) release(smem.v_empty(stage(step - 1)));
        recorder.enter(Phase::kPack);
        if constexpr (C::kResident) kept_values = step;
        ++step;
        Scores::template pack_fragments<Element>(s, p);
    }

    // The first tile from `index` on that has keys, or one past the last; those without get their zeros here.
    __device__ __forceinline__ int next_tile(int index) {
        for (; index < end_tile<C>(args); index += tile_step<C>()) {
            const Tile tile = locate<C>(args, index);
            if (tile.blocks > 0) break;
            Rows<C, Element>{args, tile, group}.write_empty();
        }
        return index;
    }

    // After a tile's last scores: back to its first block if the next tile has the same keys, or they may go.
    __device__ __forceinline__ void leave(int index, bool keep) {
        const uint32_t blocks = locate<C>(args, index).blocks;
        if (keep) {
            step -= blocks;
            return;
        }
        for (uint32_t block = step - blocks; block < step; ++block) release(smem.k_empty(stage(block)));
    }

    // After the last P V of a tile whose keys went, and the first scores of the next.
    __device__ __forceinline__ void release_values(int index) {
        const uint32_t blocks = locate<C>(args, index).blocks;
        for (uint32_t back = 2; back < 2 + blocks; ++back) release(smem.v_empty(stage(step - back)));
    }

    __device__ __forceinline__ void start(int index, int& left, int& tail, bool keep) {
        const Tile tile = locate<C>(args, index);
        left = tile.blocks;
        tail = tile.tail;
        state &= ~(kAccumulate | kClear);
        if (tile.clear && !keep) state |= kClear;
    }

    // After the last scores of a tile. One comparison: of nested ones ptxas makes a divergent region, and keeps the
    // loop around it in vector registers.
    __device__ __forceinline__ void release_queries(int left) {
        if (!C::kQInRegisters && (left | threadIdx.x % 32) == 0) mbarrier_arrive(smem.q_empty(group, query_buffer(1)));
    }

    // A finished tile's LSEs, and what its O is to be multiplied by.
    __device__ __forceinline__ void finish_rows(int index, const Scores& softmax, float (&inverse)[2]) {
        const Tile tile = locate<C>(args, index);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const float sum = quad_sum(softmax.row_sum[row]);
            inverse[row] = rcp_approx_ftz(sum);  // not denormal: some exponential was near 1 since it last shrank
            Rows<C, Element>{args, tile, group}.write_lse(row, softmax.log_sum(row, sum));
        }
    }

    // The tile's queries were the `back`th before those to come.
    __device__ __forceinline__ void store(int index, const float (&o)[kOutputs], const float (&inverse)[2], int back) {
        recorder.enter(Phase::kEpilogue);
        const Tile tile = locate<C>(args, index);
        const Rows<C, Element> rows{args, tile, group};
        if (args.splits.value > 1) {
            rows.write_partial(o, inverse);
        } else {
            // The copy engine may still read the tile before.
            if (threadIdx.x % 32 == 0) bulk_wait_group_read();
            __syncwarp();
            if (!C::kGates || args.gate.data == nullptr) {
                rows.template stage<false>(smem.o(group), o, inverse);
            } else {
                mbarrier_wait(smem.gates_full(group), (state >> C::kStages ^ back) & 1);
                rows.template stage<true>(smem.o(group), o, inverse, smem.gates(group));
                mbarrier_arrive(smem.gates_empty(group));
            }
            fence_proxy_async_smem();
            __syncwarp();
            if (threadIdx.x % 32 == 0) rows.send(smem.o(group), o_map);
        }
    }
};

}  // namespace videoattn::hopper
