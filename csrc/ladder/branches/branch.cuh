// What the branches share. They leave the ladder after step 3 and try other answers to one question: where do P, O and
// the row maximum live? fp16, 128 queries and 64 keys a tile, one serial pipeline, 256 threads: two warpgroups, so that
// each row of S and O has two threads, one for each half of its columns.
//
//   leader thread   TMA K,V | QK           |                    | PV         |
//   all threads             .  scores_done | max, exp, P | sync |  output_done  | O to its place
#pragma once

#include "../../common/softmax.cuh"
#include "../ladder.cuh"

namespace branch {

using layouts::kMmaK;
using layouts::Major;
using layouts::Swizzle;
using ladder::warp_lanes;
using ptx::TmemAddress;

constexpr int kThreads = 256;
constexpr int kCtasPerSm = 2;  // which leaves a thread 128 registers
constexpr int kQueries = 128, kKeys = 64, kHeadDim = 128;
constexpr int kHalfKeys = kKeys / 2, kHalfDim = kHeadDim / 2;
constexpr int kBoxColumns = 64, kRowBytes = 2 * kBoxColumns, kAtomBytes = 8 * kRowBytes;
constexpr int kQBytes = kQueries * kHeadDim * 2, kKvBytes = kKeys * kHeadDim * 2, kPBytes = kQueries * kKeys * 2;
constexpr int kTmemPv = 64;  // S at column 0, the product with V at 64
constexpr float kScaleLog2 = ladder::kSoftmaxScale * softmax::kLog2E;
constexpr uint32_t kMmaQk = layouts::instruction_descriptor(kQueries, kKeys, layouts::InputType::kF16, Major::kK);
constexpr uint32_t kMmaPv = layouts::instruction_descriptor(kQueries, kHeadDim, layouts::InputType::kF16, Major::kMn);

struct Barriers {
    uint64_t loaded, scores_done, output_done;
};

struct Tiles {
    uint32_t q, k, v, p;  // shared-memory addresses

    __device__ explicit Tiles(const void* smem)
        : q(ptx::smem_address(smem)), k(q + kQBytes), v(k + kKvBytes), p(v + kKvBytes) {}
};

// The work of one CTA, and which row and which half of its columns is this thread's.
struct Place {
    int q_row, kv_row, tiles;
    int row = threadIdx.x % kQueries, half = threadIdx.x / kQueries;

    __device__ Place(int q_len, int kv_len)
        : q_row(blockIdx.x * kQueries), kv_row(q_row / q_len * kv_len), tiles(kv_len / kKeys) {}
};

__device__ __forceinline__ void initialise(Barriers& bar) {
    ptx::mbarrier_init(bar.loaded, 1);       // expect_tx of the leader
    ptx::mbarrier_init(bar.scores_done, 1);  // commit
    ptx::mbarrier_init(bar.output_done, 1);  // commit
    ladder::publish_barriers();
}

__device__ __forceinline__ void load_tile(uint32_t smem, const CUtensorMap& map, int row, int rows, uint64_t& barrier) {
#pragma unroll
    for (int column = 0; column < kHeadDim; column += kBoxColumns) {
        ptx::tma_load_2d(smem + column / kBoxColumns * rows * kRowBytes, map, column, row, barrier);
    }
}

// One thread: K and V of a tile, and Q before the first.
__device__ __forceinline__ void load(Barriers& bar, const Tiles& at, const CUtensorMap& q_map,
                                     const CUtensorMap& k_map, const CUtensorMap& v_map, const Place& place,
                                     int tile) {
    ptx::mbarrier_arrive_expect_tx(bar.loaded, 2 * kKvBytes + (tile == 0 ? kQBytes : 0));
    if (tile == 0) {
        load_tile(at.q, q_map, place.q_row, kQueries, bar.loaded);
    }
    load_tile(at.k, k_map, place.kv_row + tile * kKeys, kKeys, bar.loaded);
    load_tile(at.v, v_map, place.kv_row + tile * kKeys, kKeys, bar.loaded);
}

// S = Q K^T.
__device__ __forceinline__ void mma_qk(TmemAddress s, const Tiles& at) {
    const uint64_t q = layouts::smem_descriptor(at.q, 16, kAtomBytes, Swizzle::k128B);
    const uint64_t k = layouts::smem_descriptor(at.k, 16, kAtomBytes, Swizzle::k128B);
#pragma unroll
    for (int column = 0; column < kHeadDim; column += kMmaK) {
        const uint32_t box = column / kBoxColumns, inside = column % kBoxColumns * 2;
        ptx::tcgen05_mma_ss(s, layouts::advance(q, box * kQueries * kRowBytes + inside),
                            layouts::advance(k, box * kKeys * kRowBytes + inside), kMmaQk, column > 0);
    }
}

// P V (+ what is there), P from shared memory.
__device__ __forceinline__ void mma_pv(TmemAddress d, const Tiles& at, bool accumulate) {
    const uint64_t p = layouts::smem_descriptor(at.p, 16, kAtomBytes, Swizzle::k128B);
    const uint64_t v = layouts::smem_descriptor(at.v, kKeys * kRowBytes, kAtomBytes, Swizzle::k128B);
#pragma unroll
    for (int key = 0; key < kKeys; key += kMmaK) {
        ptx::tcgen05_mma_ss(d, layouts::advance(p, key * 2), layouts::advance(v, key / 8 * kAtomBytes), kMmaPv,
                            accumulate || key > 0);
    }
}

__device__ __forceinline__ float max_of(const float (&v)[32]) {
    float max = v[0];
#pragma unroll
    for (int i = 1; i < 32; ++i) {
        max = fmaxf(max, v[i]);
    }
    return max;
}

// This thread's half of the row of S, and the maximum of the whole row, scaled.
__device__ __forceinline__ float load_scores(float (&v)[kHalfKeys], TmemAddress s, int half) {
    ptx::tcgen05_ld_x32(v, s + (half ^ 1) * kHalfKeys);
    ptx::tcgen05_wait_ld(v);
    const float other = max_of(v);
    ptx::tcgen05_ld_x32(v, s + half * kHalfKeys);
    ptx::tcgen05_wait_ld(v);
    return fmaxf(other, max_of(v)) * kScaleLog2;
}

// P's row is one 128-byte line; its 16-byte pieces are permuted by the row, as the 128-byte swizzle wants it.
__device__ __forceinline__ uint32_t p_piece(const Tiles& at, int row, int piece) {
    return at.p + row * kRowBytes + ((piece ^ (row & 7)) << 4);
}

// P = 2^(S * scale - row_max) of this thread's half row into shared memory; its sum as result.
__device__ __forceinline__ float exponentiate(const Tiles& at, const Place& place, const float (&v)[kHalfKeys],
                                              float row_max) {
    float sum = 0.0f;
#pragma unroll
    for (int piece = 0; piece < kHalfKeys / 8; ++piece) {
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float p0 = ptx::ex2_approx_ftz(fmaf(v[piece * 8 + 2 * i], kScaleLog2, -row_max));
            const float p1 = ptx::ex2_approx_ftz(fmaf(v[piece * 8 + 2 * i + 1], kScaleLog2, -row_max));
            sum += p0 + p1;
            packed[i] = ptx::cvt_f16x2(p0, p1);
        }
        ptx::st_shared_v4(p_piece(at, place.row, place.half * (kHalfKeys / 8) + piece), packed[0], packed[1],
                          packed[2], packed[3]);
    }
    return sum;
}

// Whole CTA: P and everything read from tensor memory so far is handed to the leader's next MMA.
__device__ __forceinline__ void hand_over() {
    ptx::fence_proxy_async_smem();
    ptx::tcgen05_fence_before_thread_sync();
    __syncthreads();
    ptx::tcgen05_fence_after_thread_sync();
}

// Whole CTA: the sum of a row over both of its threads.
__device__ __forceinline__ float whole_row_sum(float (&sums)[2][kQueries], const Place& place, float sum) {
    sums[place.half][place.row] = sum;
    __syncthreads();
    return sums[0][place.row] + sums[1][place.row];
}

// Eight columns of one output row.
__device__ __forceinline__ void store_eight(__half* out, const float (&v)[8], float scale) {
    uint4 packed;
    packed.x = ptx::cvt_f16x2(v[0] * scale, v[1] * scale);
    packed.y = ptx::cvt_f16x2(v[2] * scale, v[3] * scale);
    packed.z = ptx::cvt_f16x2(v[4] * scale, v[5] * scale);
    packed.w = ptx::cvt_f16x2(v[6] * scale, v[7] * scale);
    *reinterpret_cast<uint4*>(out) = packed;
}

__device__ __forceinline__ __half* output_row(__half* out, const Place& place) {
    return out + (static_cast<size_t>(place.q_row) + place.row) * kHeadDim + place.half * kHalfDim;
}

}  // namespace branch
